"""Causes that are shown by trying: the op is run again with one thing changed, and is right.

Runs a copy of the candidate's own module, never the module itself; an op that cannot be copied or
run again has no trials.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from brickline.checking.cause_pointwise import ACTIVATIONS
from brickline.checking.evidence import Evidence
from brickline.checking.guesses import Case, Guess
from brickline.checking.repro_vjp import gradient
from brickline.checking.residual import dense, unit_roundoff

_MOST_BYTES = 1 << 30
"""Largest module that is copied for a trial."""


def trials(case: Case) -> list[Guess]:
    """The first change that mends the op."""
    evidence = case.evidence
    if evidence.module is None or _bytes_of(evidence.module) > _MOST_BYTES:
        return []
    with torch.no_grad(), _kept_random_state(evidence):
        for trial in _TRIALS:
            # The candidate's code may raise anything under a change it was not written for.
            with contextlib.suppress(Exception):
                found = trial(case)
                if found is not None:
                    return [found]
    return []


def run_again(
    evidence: Evidence, change: Callable[[Any], Any] | None = None, **call: Any
) -> torch.Tensor | None:
    """Return what a copy of the op makes of its own inputs, as the output in question.

    Args:
        evidence: The op and its call.
        change: Changes the copy before it runs.
        call: `convert`, a function applied to each tensor of the call.
    """
    module = (
        copy.deepcopy(evidence.module)
        if isinstance(evidence.module, torch.nn.Module)
        else evidence.module
    )
    if change is not None:
        module = change(module)
    convert = call.get("convert", lambda tensor: tensor)

    def fresh(value: Any) -> Any:
        return convert(value.detach().clone()) if isinstance(value, torch.Tensor) else value

    args, kwargs = pytree.tree_map(fresh, (evidence.args, dict(evidence.kwargs)))
    assert module is not None
    backward = evidence.backward
    if backward is not None:
        arrived = pytree.tree_map(fresh, dict(backward.arrived))
        made: torch.Tensor = gradient(module, args, kwargs, arrived, backward.wanted)
        return made
    outputs = [
        each
        for each in pytree.tree_leaves(module(*args, **kwargs))
        if isinstance(each, torch.Tensor)
    ]
    if evidence.output_index >= len(outputs):
        return None
    return dense(outputs[evidence.output_index])


def _in_evaluation(case: Case) -> Guess | None:
    module = case.evidence.module
    if not isinstance(module, torch.nn.Module) or not any(
        each.training for each in module.modules()
    ):
        return None
    mended = _mends(case, run_again(case.evidence, lambda each: each.eval()))
    if mended is None:
        return None
    layers = {type(each).__name__ for each in module.modules() if "Drop" in type(each).__name__}
    which = f" ({', '.join(sorted(layers))})" if layers else ""
    words = f"dropout left on: in evaluation mode it is right{which}"
    if not layers:
        words = "training mode: in evaluation mode it is right"
    return Guess("dropout" if layers else "training mode", words, mended)


def _without_tf32(case: Case) -> Guess | None:
    if case.residual.dtype is not torch.float32:
        return None
    before = torch.get_float32_matmul_precision()
    convolutions = torch.backends.cudnn.allow_tf32
    if before == "highest" and not (case.evidence.actual.is_cuda and convolutions):
        return None
    try:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        mended = _mends(case, run_again(case.evidence))
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.allow_tf32 = convolutions
    if mended is None:
        return None
    return Guess("TF32", "TF32: with full float32 products it is right", mended)


def _in_float64(case: Case) -> Guess | None:
    """Only where the op's own dtype repeats the error is float64 to be believed."""
    if not isinstance(case.evidence.module, torch.nn.Module):
        return None
    again = run_again(case.evidence)
    if again is None or again.shape != case.shape:
        return None
    double = _double(case)
    mended = _mends(case, double)
    if mended is None or _mends(case, again) is not None:
        return None
    name = str(case.residual.dtype).removeprefix("torch.")
    words = f"low precision within: right in float64, wrong in {name}"
    return Guess("low precision", words, mended)


def _double(case: Case) -> torch.Tensor | None:
    def widen(value: torch.Tensor) -> torch.Tensor:
        return value.double() if value.dtype.is_floating_point else value

    return run_again(case.evidence, lambda each: each.double(), convert=widen)


class _NoDropout(TorchFunctionMode):
    """Leaves out every dropout that is called as a function."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.nn.functional.dropout:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


def _without_dropout(case: Case) -> Guess | None:
    mended = _under(case, _NoDropout())
    words = "dropout left on: without it, it is right"
    # That it mends also a plain run says nothing about dropout.
    if mended is None or _mends(case, run_again(case.evidence)) is not None:
        return None
    return Guess("dropout", words, mended)


class _Skip(TorchDispatchMode):
    """Leaves out clamps, or casts to a shorter dtype, and notes which."""

    def __init__(self, what: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.what, self.dtype = what, dtype
        self.skipped: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func.__name__.partition(".")[0]
        if self.what == "clamp" and name in ("clamp", "clamp_max", "clamp_min", "hardtanh"):
            limits = [f"{each:.4g}" for each in args[1:] if isinstance(each, int | float)]
            self.skipped.add(f"{name} at {' and '.join(limits)}" if limits else name)
            return args[0].clone()
        wanted = kwargs.get("dtype")
        if self.what == "cast" and name == "_to_copy" and _is_shorter(wanted, self.dtype):
            self.skipped.add(str(wanted).removeprefix("torch."))
            kwargs["dtype"] = args[0].dtype
        return func(*args, **kwargs)


def _is_shorter(wanted: Any, given: torch.dtype) -> bool:
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        return False
    return given.is_floating_point and unit_roundoff(wanted) > unit_roundoff(given)


def _without_casts(case: Case) -> Guess | None:
    mode = _Skip("cast", case.residual.dtype)
    mended = _under(case, mode)
    if mended is None or not mode.skipped:
        return None
    names = " and ".join(sorted(mode.skipped))
    return Guess(
        "low precision", f"low precision within: without casts to {names} it is right", mended
    )


def _without_clamps(case: Case) -> Guess | None:
    mode = _Skip("clamp", case.residual.dtype)
    mended = _under(case, mode)
    if mended is None or not mode.skipped:
        return None
    words = f"saturation: without {', '.join(sorted(mode.skipped))} it is right"
    return Guess("saturation", words, mended)


class _Swap(TorchDispatchMode):
    """Calls one activation in place of another, and notes which are called."""

    def __init__(self, wanted: str | None = None, other: str | None = None) -> None:
        super().__init__()
        self.wanted, self.other = wanted, other
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _activation_name(func, kwargs or {})
        if name is not None and name not in self.seen:
            self.seen.append(name)
        if name is None or name != self.wanted or self.other is None:
            return func(*args, **(kwargs or {}))
        made = ACTIVATIONS[self.other](args[0])
        return args[0].copy_(made) if func.__name__.partition(".")[0].endswith("_") else made


_ATEN = (
    "relu",
    "silu",
    "gelu",
    "sigmoid",
    "tanh",
    "leaky_relu",
    "elu",
    "softplus",
    "hardswish",
    "mish",
)


def _activation_name(func: Any, kwargs: Any) -> str | None:
    name = func.__name__.partition(".")[0].rstrip("_")
    if name not in _ATEN:
        return None
    if name == "gelu" and kwargs.get("approximate") == "tanh":
        return "gelu (tanh)"
    return str(name).replace("_", " ")


def _with_other_activation(case: Case) -> Guess | None:
    with _Swap() as plain:
        run_again(case.evidence)
    found: list[tuple[float, str]] = []
    for wanted in plain.seen[:3]:
        for other in ACTIVATIONS:
            if other == wanted:
                continue
            mended = _under(case, _Swap(wanted, other))
            if mended is not None:
                found.append((mended, f"activation: {wanted} instead of {other}"))
    if not found:
        return None
    mended, words = min(found)
    return Guess("activation", f"{words}; exchanged, it is right", mended)


class _Causal(TorchDispatchMode):
    """Puts a causal mask in place of the one that scores are given before a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.shown = self.hidden = self.masks = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0].rstrip("_")
        kwargs = kwargs or {}
        if name == "masked_fill" and _is_scores(args[0]) and _is_large(args[2]):
            self._note(args[1])
            return args[0].masked_fill(_later(args[0]), args[2])
        if name == "where" and len(args) == 3 and all(_is_tensor(each) for each in args):
            return self._where(func, args, kwargs)
        if name == "add" and _is_tensor(args[1]) and _is_scores(args[0]) and _hides(args[1]):
            self._note(args[1] < -1e4)
            return args[0].masked_fill(_later(args[0]), -torch.inf)
        if name == "_softmax" and _is_scores(args[0]):
            # Whatever else was hidden stays hidden; later positions are.
            scores = args[0]
            self._note(scores < -1e4)
            return func(scores.masked_fill(_later(scores), -torch.inf), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _where(self, func: Any, args: Any, kwargs: Any) -> Any:
        condition, first, second = args
        if _is_scores(first) and second.numel() == 1 and _is_large(second.item()):
            self._note(~condition)
            return torch.where(~_later(first), first, second)
        if _is_scores(second) and first.numel() == 1 and _is_large(first.item()):
            self._note(condition)
            return torch.where(~_later(second), second, first)
        return func(*args, **kwargs)

    def _note(self, hidden: torch.Tensor) -> None:
        if hidden.dim() < 2 or self.masks or hidden.shape[-1] < 2:
            return
        later = _later(hidden)
        layers = max(hidden.numel() // later.numel(), 1)
        self.masks += 1
        self.shown += int((~hidden & later).sum()) // layers
        self.hidden += int((hidden & ~later).sum()) // layers


class _CausalCall(TorchFunctionMode):
    """Makes the fused attention causal, or lets it see everything, or scales it as usual."""

    def __init__(self, **change: Any) -> None:
        super().__init__()
        self.change, self.called = change, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        self.called = True
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return func(**{**dict(zip(names, args, strict=False)), **kwargs, **self.change})


def _causal(case: Case) -> Guess | None:
    if len(case.shape) < 2 or case.shape[-2] < 2:
        return None
    changes: dict[str, dict[str, Any]] = {
        "mask: with a causal mask it is right": {"attn_mask": None, "is_causal": True},
        "mask: without any mask it is right": {"attn_mask": None, "is_causal": False},
        "attention scale: with 1/√(head size) it is right": {"scale": None},
        "dropout left on: without dropout it is right": {"dropout_p": 0.0},
    }
    for words, change in changes.items():
        call = _CausalCall(**change)
        with contextlib.suppress(RuntimeError, TypeError):
            mended = _under(case, call)
            if mended is not None:
                return Guess(words.partition(":")[0], words, mended)
        if not call.called:
            break
    mode = _Causal()
    mended = _under(case, mode)
    if mended is None or not mode.masks:
        return None
    facts = {"positions shown too many": mode.shown, "positions hidden too many": mode.hidden}
    detail = _mask_words(mode)
    return Guess("mask", f"mask: with a causal mask it is right{detail}", mended, facts)


def _mask_words(mode: _Causal) -> str:
    parts = []
    if mode.shown:
        parts.append(f"{mode.shown} later positions are seen")
    if mode.hidden:
        parts.append(f"{mode.hidden} earlier positions are hidden")
    return f" ({' and '.join(parts)})" if parts else ""


def _later(scores: torch.Tensor) -> torch.Tensor:
    length, width = scores.shape[-2:]
    ones = torch.ones(length, width, dtype=torch.bool, device=scores.device)
    return ones.triu(width - length + 1)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_scores(value: Any) -> bool:
    return _is_tensor(value) and value.dim() >= 2 and 2 <= value.shape[-2] <= value.shape[-1]


def _is_large(value: Any) -> bool:
    if _is_tensor(value):
        return value.numel() == 1 and _is_large(value.item())
    return isinstance(value, int | float) and value < -1e3


def _hides(value: torch.Tensor) -> bool:
    if not value.dtype.is_floating_point or value.dim() < 2 or value.shape[-1] < 2:
        return False
    return bool(((value == 0) | (value < -1e3)).all()) and bool((value < -1e3).any())


_TRIALS: tuple[Callable[[Case], Guess | None], ...] = (
    _in_evaluation,
    _without_tf32,
    _without_dropout,
    _without_casts,
    _without_clamps,
    _with_other_activation,
    _causal,
    _in_float64,
)


def _under(case: Case, mode: Any) -> float | None:
    """Return whether a run under a mode is right; the judging is not under it."""
    with mode:
        output = run_again(case.evidence)
    return _mends(case, output)


def _mends(case: Case, output: torch.Tensor | None) -> float | None:
    return None if output is None else case.residual.mends(output)


def _bytes_of(module: Any) -> int:
    if not isinstance(module, torch.nn.Module):
        return 0
    tensors = [*module.parameters(), *module.buffers()]
    return sum(each.numel() * each.element_size() for each in tensors)


@contextlib.contextmanager
def _kept_random_state(evidence: Evidence) -> Iterator[None]:
    devices = [evidence.actual.device] if evidence.actual.is_cuda else []
    with torch.random.fork_rng(devices=devices):
        yield
