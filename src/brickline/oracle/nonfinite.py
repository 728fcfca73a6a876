"""Where NaN and infinity come from: finite inputs, and an output that is not, with the likely kind.

Knows the values of one call only: whether an infinity is meant (a mask) is for others to say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from brickline.oracle.calls import Call


class Origin(NamedTuple):
    """A call that made the first value that is not finite."""

    output: int
    kind: str
    carried: bool = False
    """Whether an input was infinite: the NaN is its consequence, unless it was meant as a mask."""


def origin(
    call: Call,
    outputs: Sequence[torch.Tensor | None],
    exact: Sequence[torch.Tensor | None] | None,
) -> Origin | None:
    """Return what a call made that is not finite while its inputs were, or None.

    A NaN counts where no input holds one, an infinity where all inputs are finite.
    """
    for number, each in enumerate(outputs):
        if each is None or not each.dtype.is_floating_point or not each.numel():
            continue
        nan, inf = _holds(each)
        if not nan and not inf:
            continue
        before = [_holds(value) for value in call.inputs if value.dtype.is_floating_point]
        had_nan, had_inf = any(each[0] for each in before), any(each[1] for each in before)
        value = exact[number] if exact is not None and number < len(exact) else None
        if nan and not had_nan and not any(_is_not_finite(each, nan=True) for each in call.args):
            return Origin(number, _kind_of_nan(call, had_inf), had_inf)
        if inf and not had_inf and not had_nan and not any(map(_is_not_finite, call.args)):
            return Origin(number, _kind_of_infinity(call, each, value))
    return None


def holds_nonfinite(value: torch.Tensor) -> bool:
    """Whether a tensor has a NaN or an infinity."""
    return value.dtype.is_floating_point and any(_holds(value))


def _holds(value: torch.Tensor) -> tuple[bool, bool]:
    if not value.dtype.is_floating_point or not value.numel() or value.is_meta:
        return False, False
    if value.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        value = value.float()
    if bool(value.sum().isfinite()):
        return False, False
    return bool(value.isnan().any()), bool(value.isinf().any())


def _is_not_finite(value: object, nan: bool = False) -> bool:
    if not isinstance(value, float):
        return False
    return math.isnan(value) if nan else not math.isfinite(value)


def _kind_of_nan(call: Call, had_inf: bool) -> str:
    name = call.name.removeprefix("aten::")
    if "softmax" in name or "attention" in name:
        return "a softmax row without a finite value (all masked)" if had_inf else "softmax"
    if name.startswith(("log", "sqrt", "rsqrt", "pow")):
        return "a logarithm, root or power of a negative number"
    if name.startswith(("div", "true_divide", "reciprocal", "remainder", "fmod")):
        return "0 / 0" if not had_inf else "inf / inf"
    if not had_inf:
        return "NaN from finite inputs"
    if name.startswith(("sub", "add", "sum", "mean", "rsub")):
        return "inf - inf"
    return "0 * inf"


def _kind_of_infinity(call: Call, made: torch.Tensor, exact: torch.Tensor | None) -> str:
    name = call.name.removeprefix("aten::").rstrip("_")
    largest = float(torch.finfo(made.dtype).max)
    if exact is not None and exact.shape == made.shape:
        there = made.isinf()
        if bool((exact[there].isfinite() & (exact[there].abs() > largest)).any()):
            word = "overflow of a cast" if name in ("_to_copy", "copy", "to") else "overflow"
            return f"{word} to {str(made.dtype).removeprefix('torch.')}"
        if bool(exact[there].isfinite().any()):
            return "an infinity where float64 is finite and fits"
    if name.startswith("log"):
        return "a logarithm of zero"
    if name.startswith(("div", "true_divide", "reciprocal", "rsqrt", "pow")):
        return "a division by zero"
    return "an infinity from finite inputs"
