"""The tensors that a side holds, and whether two of them are the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from brickline.checking.snapshot import State, tensors_in

SLACK = 1.001
"""A rounding to nearest, and the rounding of the quotient that measures it."""
CHUNK = 1 << 24
"""Elements that are widened at a time."""

ARITHMETIC = 8 * 2.0**-24
"""What float32 may lose while a value is computed from its sources."""
TYPICAL = 0.7
"""Root mean square of roundings, as part of the largest; one that is spread evenly has 0.58."""
DEVIATION = 0.58
"""Standard deviation of a rounding, as part of the largest; by what a mean is judged."""
MANY = 64
"""Elements from which on that is known."""
ENOUGH = 0.5
"""Part of a tensor that must be a value's for it to be meant as that value."""

Tensors = Mapping[str, torch.Tensor]


def named_tensors(root: Any) -> dict[str, torch.Tensor]:
    """Return the floating-point parameters and buffers of a module, by its own names."""
    if not isinstance(root, torch.nn.Module):
        return {}
    return {
        plain_name(name): tensor
        for name, tensor in (*root.named_parameters(), *root.named_buffers())
        if tensor.dtype.is_floating_point
    }


def held_tensors(root: Any) -> dict[str, torch.Tensor]:
    """Return all floating-point and complex tensors that a module holds, plain ones included."""
    if not isinstance(root, torch.nn.Module):
        return {}
    tensors = dict(root.named_parameters())
    for path, module in root.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if name in _OWN:
                continue
            for place, tensor in () if isinstance(value, torch.nn.Module) else tensors_in(value):
                tensors.setdefault(f"{path}.{name}{place}" if path else f"{name}{place}", tensor)
    return {
        plain_name(name): tensor
        for name, tensor in tensors.items()
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex
    }


_OWN = frozenset(name for name in vars(torch.nn.Module()) if name.startswith("_"))


def changed_tensors(root: Any, before: State) -> set[str]:
    """Return the buffers and other tensors of a side that hold something else than before."""
    now, earlier = State(root).tensors(), before.tensors()
    names = set()
    for path, place in now.keys() | earlier.keys():
        tensor, other = earlier.get((path, place)), now.get((path, place))
        if tensor is None or other is None or not is_equal(tensor, other):
            names.add(plain_name(f"{path}.{place}" if path else place))
    return names


def plain_name(path: str) -> str:
    """Return the path of a module or tensor without what torch.compile puts in between."""
    return ".".join(part for part in path.split(".") if part != "_orig_mod")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has real floating-point elements that can be read one by one."""
    strided = tensor.layout is torch.strided and not tensor.is_meta
    return strided and tensor.dtype.is_floating_point and not tensor.is_quantized


def roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to a dtype."""
    return float(torch.finfo(dtype).eps) / 2


def is_equal(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors are the same to the bit."""
    same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
    return bool(same and torch.equal(ours, theirs.to(ours.device)))


def is_rounded(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Return whether two tensors differ, and by no more than one rounding of each element."""
    if ours.shape != theirs.shape or not ours.numel():
        return False
    if not (is_plain(ours) and is_plain(theirs)) or is_equal(ours, theirs):
        return False
    coarse = SLACK * max(roundoff(ours.dtype), roundoff(theirs.dtype))
    least = SLACK * max(_least(ours.dtype), _least(theirs.dtype))
    pairs = zip(ours.reshape(-1).split(CHUNK), theirs.reshape(-1).split(CHUNK), strict=True)
    return all(_are_near(one, other, coarse, least) for one, other in pairs)


def _least(dtype: torch.dtype) -> float:
    """Return the largest error of one rounding where numbers are too small for a full fraction."""
    return float(torch.finfo(dtype).smallest_normal) * roundoff(dtype)


def _are_near(ours: torch.Tensor, theirs: torch.Tensor, coarse: float, least: float) -> bool:
    one, two = ours.double(), theirs.to(ours.device).double()
    sizes = torch.maximum(one.abs(), two.abs())
    return bool(((one - two).abs() <= (coarse * sizes).clamp(min=least)).all())


# --- is a tensor a value that was rounded?


@dataclass(frozen=True)
class Agreement:
    """How a tensor compares with a value."""

    within: torch.Tensor
    """Which elements are the value's, rounded."""
    typical: float
    """Root mean square of the gaps of those, as part of the largest rounding."""

    bias: float = 0.0
    """Mean of the gaps towards larger values, as part of what it may be."""

    @property
    def share(self) -> float:
        """Part of the elements that agree."""
        return float(self.within.double().mean()) if self.within.numel() else 1.0

    @property
    def holds(self) -> bool:
        """Whether the tensor is meant to be the value."""
        few = self.within.numel() < MANY
        return self.share >= (1.0 if few else ENOUGH) and (
            few or (self.typical <= TYPICAL and self.bias <= 1)
        )


def agreement(
    tensor: torch.Tensor, value: torch.Tensor, size: torch.Tensor, source_roundoff: float
) -> Agreement:
    """Compare a tensor with the value that it may be, in the tensor's precision.

    Args:
        tensor: In its own dtype.
        value: In float64, of the same shape.
        size: By how much a relative error of one in its sources would move the value.
        source_roundoff: Relative error of the sources.
    """
    gap = tensor.detach().double() - value
    own = roundoff(tensor.dtype)
    smallest = torch.finfo(tensor.dtype).smallest_normal * own
    # Half the distance to the next number of the dtype, which is the same up to a power of two.
    half = own * torch.exp2(torch.frexp(value).exponent.double() - 1)
    half = torch.where(value.isfinite() & (value != 0), half, 0.0)
    most = SLACK * half + SLACK * source_roundoff * size + smallest
    most = most + ARITHMETIC * (size + value.abs())
    within = gap.abs() <= most  # False where a value is not known
    parts = (gap / most * value.sign())[within]
    if not parts.numel():
        return Agreement(within, 0.0)
    # A number that is nearly the right one moves all elements alike; so may a rounded vector.
    shared = source_roundoff / (own + source_roundoff)
    likely = 5 * DEVIATION / math.sqrt(parts.numel()) + 0.5 * shared
    typical = math.sqrt(float(parts.square().mean()))
    return Agreement(within, typical, abs(float(parts.mean())) / likely)
