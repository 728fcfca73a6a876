"""Bounds of elementwise functions, by perturbing each input in float64.

The condition ``|x f'(x)|`` of every input is measured, so that one rule serves all functions of any
number of inputs. Functions whose usual formulas cancel inside carry an own magnitude besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from brickline.oracle.bounds import Budget, finite_part, rule
from brickline.oracle.calls import Call, widen

STEP = 2.0**-26
"""Relative perturbation: the square root of float64's unit roundoff."""
JUMP = 2.0**-22
"""…for functions that jump: what is closer to a jump than four float32 roundings is not held."""

_SMOOTH = """
    acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh cos cosh deg2rad digamma div
    elu elu_backward erf erfc erfinv exp exp2 expm1 gelu gelu_backward glu glu_backward hardsigmoid
    hardsigmoid_backward hardswish hardswish_backward hypot i0 leaky_relu leaky_relu_backward lerp
    lgamma log log10 log1p log2 log_sigmoid_backward log_sigmoid_forward logaddexp logaddexp2 logit
    logit_backward mish mish_backward mul multiply polar pow prelu rad2deg reciprocal rsqrt rsub
    sigmoid sigmoid_backward silu silu_backward sin sinc sinh softplus softplus_backward softshrink
    softshrink_backward sqrt square sub subtract tan tanh tanh_backward true_divide xlogy celu
    celu_backward selu _prelu_kernel _prelu_kernel_backward special_expit
    rrelu_with_noise_backward native_dropout_backward masked_scale
    """
_JUMPING = "floor_divide fmod remainder frac"
_ROUGH_SCALARS = frozenset({"addcdiv", "addcmul", "lerp", "add", "sub", "rsub", "pow"})
"""Their scalar factors are rounded to the tensors' dtype on some devices."""
_ROUGH_INSIDE = frozenset({"sigmoid_backward", "tanh_backward"})
"""They round what is inside to the tensors' dtype."""
_COMPOSED = frozenset({"pow", "rsqrt", "logit", "xlogy", "sinc"})
"""Made of two functions, each rounded to the tensors' dtype, on some devices."""


@rule(_SMOOTH)
def smooth(call: Call, exact: Sequence[torch.Tensor | None]) -> Sequence[Budget | None]:
    """Sum the conditions of all inputs."""
    name = call.name.removeprefix("aten::").rstrip("_")
    if call.get("rounding_mode") is not None:
        return jumping(call, exact)
    if not any(each is not None and wide(each) for each in exact):
        return [None for _ in exact]
    magnitudes, scalars = _conditions(call, exact, (STEP,))
    extra = _CANCELLING.get(name)
    made: list[Budget | None] = []
    for number, value in enumerate(exact):
        if value is None or not wide(value):
            made.append(None)
            continue
        magnitude = magnitudes[number]
        if extra is not None and number == 0:
            magnitude = magnitude + extra(call)
        stored = scalars[number] if name in _ROUGH_SCALARS else None
        roundings = 2.0 if name in _COMPOSED else 1.0
        if name in _ROUGH_INSIDE and extra is not None:
            stored = extra(call)
        made.append(Budget(magnitude, stored=stored, stored_sd=stored, roundings=roundings))
    return made


@rule(_JUMPING)
def jumping(call: Call, exact: Sequence[torch.Tensor | None]) -> Sequence[Budget | None]:
    """Sum the conditions on both sides; a place next to a jump gets a bound that is useless."""
    if not any(each is not None and wide(each) for each in exact):
        return [None for _ in exact]
    magnitudes, _ = _conditions(call, exact, (JUMP, -JUMP))
    return [
        Budget(magnitudes[number]) if value is not None and wide(value) else None
        for number, value in enumerate(exact)
    ]


@rule("arange linspace logspace range")
def sequence(call: Call, exact: Sequence[torch.Tensor | None]) -> Sequence[Budget | None]:
    """Steps from a start: errors are of the size of the longest way."""
    return [
        Budget(each.abs() + each.abs().amax())
        if each is not None and each.numel() and wide(each)
        else None
        for each in exact
    ]


def wide(value: torch.Tensor) -> bool:
    """Whether a float64 result is floating point: integers are exact."""
    return bool(value.dtype.is_floating_point or value.is_complex())


def _conditions(
    call: Call, exact: Sequence[torch.Tensor | None], steps: tuple[float, ...]
) -> tuple[list[Any], list[Any]]:
    """Return for each output its own size and conditions, and the part of its scalars."""
    leaves, shape = tree_flatten((call.args, dict(call.kwargs)))
    total = [None if each is None else _size(each) for each in exact]
    scalars: list[Any] = [None] * len(total)
    for number, leaf in enumerate(leaves):
        tensor = isinstance(leaf, torch.Tensor) and wide(leaf)
        factor = isinstance(leaf, float) and leaf not in (0.0, 1.0, -1.0)
        if not tensor and not factor:
            continue
        for step in steps:
            changed = list(leaves)
            changed[number] = widen(leaf) * (1 + step)
            args, kwargs = tree_unflatten(changed, shape)
            made = Call(call.func, args, kwargs).exact()
            for index, (value, other) in enumerate(zip(exact, made, strict=True)):
                if value is None or other is None or not wide(value):
                    continue
                moved = _size(other - value) / abs(step)
                moved = torch.where(moved.isfinite(), moved, torch.zeros_like(moved))
                total[index] = total[index] + moved
                if factor:
                    before = scalars[index]
                    scalars[index] = moved if before is None else before + moved
    finite = [None if each is None else finite_part(each) for each in total]
    return finite, scalars


def _size(value: torch.Tensor) -> torch.Tensor:
    """Return absolute values; for complex numbers of both parts, the modulus twice."""
    if value.is_complex():
        size = value.abs()
        return torch.stack([size, size], dim=-1)
    return value.abs()


def _gelu_backward(call: Call) -> torch.Tensor:
    size = call.wide("self").abs()
    inner = torch.where(size > 16, torch.zeros_like(size), 1 + size * (1 + size.square() * 0.1))
    return call.wide("grad_output").abs() * torch.maximum(inner, torch.ones_like(size))


def _silu_backward(call: Call) -> torch.Tensor:
    value = call.wide("self")
    return call.wide("grad_output").abs() * value.sigmoid() * (1 + value.abs())


def _sigmoid_backward(call: Call) -> torch.Tensor:
    value = call.wide("output").abs()
    return call.wide("grad_output").abs() * value * (1 + value)


def _tanh_backward(call: Call) -> torch.Tensor:
    return call.wide("grad_output").abs() * (1 + call.wide("output").square())


def _hardswish(call: Call) -> torch.Tensor:
    size = call.wide("self").abs()
    return size * (size + 3) / 6


def _mish_backward(call: Call) -> torch.Tensor:
    return call.wide("grad_output").abs() * (1 + call.wide("self").abs())


_CANCELLING: dict[str, Callable[[Call], torch.Tensor]] = {
    "gelu": lambda call: call.wide("self").abs(),
    "gelu_backward": _gelu_backward,
    "silu_backward": _silu_backward,
    "sigmoid_backward": _sigmoid_backward,
    "tanh_backward": _tanh_backward,
    "hardswish": _hardswish,
    "hardsigmoid": lambda call: call.wide("self").abs() / 6 + 0.5,
    "hardswish_backward": _mish_backward,
    "mish": lambda call: call.wide("self").abs(),
    "mish_backward": _mish_backward,
    "erf": lambda call: torch.ones_like(call.wide("self")),
    "elu": lambda call: call.wide("self").abs().clamp(max=1.0),
    "log_sigmoid_forward": lambda call: (-call.wide("self").abs()).exp(),
    "logit": lambda call: torch.ones_like(call.wide("self")),
    "softplus_backward": lambda call: call.wide("grad_output").abs(),
    "glu_backward": lambda call: (
        torch.cat([call.wide("grad_output").abs()] * 2, int(call.get("dim", -1)))
        * (1 + call.wide("self").abs())
    ),
}
"""Magnitudes inside the usual formulas where they cancel: ``1 + erf(x)``, ``1 - y * y``."""
