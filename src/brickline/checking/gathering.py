"""The evidence against a culprit: its module's own call, and what the reference makes of it.

Taken while the state of both sides is that of the call; looked at after the drive, when nothing is
hooked any more.
"""

from __future__ import annotations

from typing import Any

import torch

from brickline.checking.arbitration import Rerun
from brickline.checking.evidence import Evidence
from brickline.checking.facts import Fact
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import snapshot, tensors_in
from brickline.oracle.widen import Widened

MOST_BYTES = 1 << 30
"""Calls larger than this are not kept."""


def gather(
    fact: Fact, path: str, call: Call, candidate: Side, reference: Side, rerun: Rerun
) -> Evidence:
    """Return what is known about a culprit: its own call where both sides have it, else the op."""
    found = None
    try:
        found = _of_module(fact, path, call, candidate, reference, rerun)
    except Exception:
        found = None
    if found is not None:
        return found
    assert fact.actual is not None
    assert fact.exact is not None
    return Evidence(
        candidate.stage.display(path), fact.actual, fact.exact, fact.clean, op=fact.key.op
    )


def _of_module(
    fact: Fact, path: str, call: Call, candidate: Side, reference: Side, rerun: Rerun
) -> Evidence | None:
    if path:
        module = candidate.stage.modules[path]
        made = _call_of(module, fact.key.call if fact.key.path == path else 0, rerun)
        partner: Any = reference.stage.modules.get(path)
    else:
        module, made = candidate.root, (call.copied(), None)
        partner = reference.root
    if made is None or partner is None or _bytes(made[0]) > MOST_BYTES:
        return None
    given, output = made
    if output is None:
        output = rerun.perform().output
    ready = given.copied(device=reference.device)
    with torch.no_grad():
        clean = partner(*ready.args, **ready.kwargs)
        wide = given.copied(device=reference.device, wide=True)
        with Widened():
            exact = partner(*wide.args, **wide.kwargs)
    return _evidence(candidate.stage.display(path), module, given, output, exact, clean)


def _evidence(
    name: str, module: Any, given: Call, output: Any, exact: Any, clean: Any
) -> Evidence | None:
    """Choose the output tensor that is most wrong."""
    ours = [tensor for _, tensor in tensors_in(output)]
    right = [tensor for _, tensor in tensors_in(exact)]
    rough = [tensor for _, tensor in tensors_in(clean)]
    best: tuple[float, int] | None = None
    for number, (a, b) in enumerate(zip(ours, right, strict=False)):
        if a.shape != b.shape or a.numel() == 0:
            continue
        size = float(b.double().norm()) or 1.0
        error = float((a.to(b.device).double() - b.double()).nan_to_num(1e30).norm()) / size
        if best is None or error > best[0]:
            best = (error, number)
    if best is None or best[0] == 0:
        return None
    at = best[1]
    kept = rough[at] if at < len(rough) and rough[at].shape == ours[at].shape else None
    inputs = [tensor for _, tensor in tensors_in((given.args, dict(given.kwargs)))]
    return Evidence(
        name,
        ours[at],
        right[at],
        kept,
        op=None,
        inputs=inputs,
        module=module,
        args=given.args,
        kwargs=given.kwargs,
        output_index=at,
    )


def _call_of(module: torch.nn.Module, number: int, rerun: Rerun) -> tuple[Call, Any] | None:
    """Make the root's call again and return one call of a module in it, with what it returned."""
    count = 0
    kept: list[Any] = []

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        nonlocal count
        if count == number and not kept:
            kept.append(Call.taken(args, kwargs))
        count += 1

    def leave(_: Any, args: Any, kwargs: Any, output: Any) -> None:
        if len(kept) == 1 and count == number + 1:
            kept.append(snapshot(output))

    hooks = [
        torch.nn.Module.register_forward_pre_hook(module, enter, with_kwargs=True),
        torch.nn.Module.register_forward_hook(module, leave, with_kwargs=True),
    ]
    try:
        rerun.perform()
    finally:
        for hook in hooks:
            hook.remove()
    return (kept[0], kept[1]) if len(kept) == 2 else None


def _bytes(call: Call) -> int:
    return sum(each.numel() * each.element_size() for each in call.places().values())
