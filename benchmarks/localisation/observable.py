"""Decides whether a fault can be seen at all, without asking any tool.

The guilty brick is run on the inputs that it had in the candidate, as it is and without its fault,
and the latter again in float64. A fault is observable if the two differ, in the RMS, by more than
`FACTOR` times what the clean one's rounding makes. What a call keeps (a cache, an argument that it
writes to) is part of what it returns; a fault in backward is looked for in the gradients.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from localisation.cases import Case

FACTOR = 4.0
LOW = (torch.float32, torch.bfloat16, torch.float16)


def observable(case: Case) -> bool:
    """Return whether the fault can be seen; a harmless case has none."""
    return not case.harmless and ratio(case) > FACTOR


def ratio(case: Case) -> float:
    """Return the largest ratio of the fault's effect to the clean brick's rounding, over calls."""
    return max(ratios(case), default=0.0)


def ratios(case: Case) -> list[float]:
    """Return that ratio for each call of the guilty brick, in order."""
    path = case.expected or ""
    if not isinstance(case.candidate, nn.Module):
        return [_ratio_of_callable(case)]
    calls = _calls(copy.deepcopy(case.candidate), path, case)
    return [_ratio_of_call(case, path, each) for each in calls]


class _Call:
    """One call of the brick: what it was handed, what it kept before, and its gradients."""

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.args, self.kwargs = copy.deepcopy(_detached((args, kwargs)))
        self.kept = _kept(module)
        self.grads: list[Tensor | None] = []
        self.random = torch.get_rng_state()


def _calls(candidate: nn.Module, path: str, case: Case) -> list[_Call]:
    module = candidate.get_submodule(path)
    calls: list[_Call] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(_Call(module, args, kwargs))

    def after(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        call = calls[-1]
        outs = [each for each in _tensors(out) if each.requires_grad]
        call.grads = [None] * len(outs)
        for number, each in enumerate(outs):
            each.register_hook(lambda grad, n=number: call.grads.__setitem__(n, grad.clone()))

    handles = [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]
    case.given(candidate)
    for each in handles:
        each.remove()
    return calls


def _ratio_of_call(case: Case, path: str, call: _Call) -> float:
    faulty = _outcome(case.candidate, path, call, case.direction)
    clean = _outcome(case.trio.clean, path, call, case.direction)
    with widened():
        exact = _outcome(case.trio.clean, path, call, case.direction, wide=True)
    return max((_ratio(*each) for each in zip(faulty, clean, exact, strict=True)), default=0.0)


def _ratio_of_callable(case: Case) -> float:
    """Return the ratio of a function; what it writes into its arguments is what it gives, too."""
    faulty, clean = (
        _given_by(each, copy.deepcopy(case.args)) for each in (case.candidate, case.trio.clean)
    )
    with widened():
        exact = _given_by(case.trio.clean, tree_map(_double, copy.deepcopy(case.args)))
    return max(_ratio(*each) for each in zip(faulty, clean, exact, strict=True))


def _given_by(function: Any, args: Any) -> list[Tensor]:
    return [*_tensors(function(*args)), *_tensors(args)]


def _ratio(faulty: Tensor, clean: Tensor, exact: Tensor) -> float:
    if not clean.is_floating_point() or faulty.shape != clean.shape:
        return 0.0 if torch.equal(faulty, clean) else float("inf")
    wide = clean.double()
    finite = wide.isfinite() & exact.isfinite()
    if (faulty.isfinite() != clean.isfinite()).any():
        return float("inf")
    effect = (faulty.double() - wide)[finite].norm()
    rounding = (wide - exact)[finite].norm()
    return 0.0 if effect == 0 else float(effect / rounding)


def _outcome(
    root: nn.Module, path: str, call: _Call, direction: str, wide: bool = False
) -> list[Tensor]:
    """Run a brick on one call; return all it made: outputs, what it kept, or its gradients."""
    module = copy.deepcopy(root).get_submodule(path)
    args, kwargs, kept, grads = copy.deepcopy((call.args, call.kwargs, call.kept, call.grads))
    if wide:
        module.double()
        args, kwargs, kept, grads = tree_map(_double, (args, kwargs, kept, grads))
        for each in _objects((args, kwargs)):
            _widen_object(each)
    _restore(module, kept)
    torch.set_rng_state(call.random)
    backward = direction == "backward"
    leaves = [each.requires_grad_() for each in _tensors((args, kwargs)) if _is_real(each)]
    with torch.set_grad_enabled(backward):
        made = _tensors(module(*args, **kwargs))
    if not backward:
        held = [each for each in _kept(module).values() if isinstance(each, Tensor)]
        held += _tensors(_objects((args, kwargs)))
        return [each.detach() for each in (*made, *held)]
    outs = [each for each in made if each.requires_grad]
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None]
    wanted = leaves + list(module.parameters())
    got = torch.autograd.grad(
        [out for out, _ in pairs], wanted, [grad for _, grad in pairs], allow_unused=True
    )
    return [
        torch.zeros_like(of) if each is None else each for of, each in zip(wanted, got, strict=True)
    ]


# --- What a module keeps --------------------------------------------------------------------------


def _kept(module: nn.Module) -> dict[str, Any]:
    """Return the state of a module and those below, by path and name."""
    out: dict[str, Any] = {}
    for path, each in module.named_modules():
        for name in getattr(each, "state", ()):
            value = getattr(each, name)
            out[f"{path}.{name}"] = value.clone() if isinstance(value, Tensor) else value
    return out


def _restore(module: nn.Module, kept: dict[str, Any]) -> None:
    for key, value in kept.items():
        path, _, name = key.rpartition(".")
        setattr(module.get_submodule(path), name, value)


# --- Tensors in structures ------------------------------------------------------------------------


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    if hasattr(value, "update") or is_dataclass(value):
        return _tensors(list(vars(value).values()))
    return []


def _objects(value: Any) -> list[Any]:
    """Return the caches among the arguments."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [found for each in value for found in _objects(each)]
    return [value] if hasattr(value, "update") else []


def _widen_object(value: Any) -> None:
    for name, each in vars(value).items():
        setattr(value, name, tree_map(_double, each))


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point()


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and _is_real(value) else value


def _detached(value: Any) -> Any:
    return tree_map(lambda each: each.detach() if isinstance(each, Tensor) else each, value)


class _Widened(TorchDispatchMode):
    """Lets no op make a narrower number than float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in LOW:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextmanager
def widened() -> Iterator[None]:
    """Compute in float64 what asks for less."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Widened():
            yield
    finally:
        torch.set_default_dtype(before)
