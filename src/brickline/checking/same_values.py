"""Which values of the two sides are the same but for rounding, told by their contents alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch

from brickline.checking.pairing import Layout, Part, is_fine
from brickline.checking.recording import Value
from brickline.checking.stage import ARGUMENT, INPUT, Key
from brickline.oracle.widen import unit_roundoff

NEAR = 8.0
"""Values are the same if they differ by at most this many unit roundoffs…"""
NEAR_FLOOR = 1e-4
"""…or by this much, as relative L2."""


def is_telling(value: Value) -> bool:
    """Whether a value can be told from others by its contents."""
    tensor = value.tensor
    if not tensor.dtype.is_floating_point or tensor.numel() < 4:
        return False
    return value.key.op != INPUT and not value.key.op.startswith(ARGUMENT)


def nearness(dtype: torch.dtype) -> float:
    """Return how far two values may be from each other to be the same but for rounding."""
    return max(NEAR * unit_roundoff(dtype), NEAR_FLOOR)


class Choices:
    """Values of the candidate among which those are looked for that equal the reference's."""

    def __init__(self, values: Iterable[Value]) -> None:
        self._by_size: defaultdict[int, list[tuple[Value, float]]] = defaultdict(list)
        for each in values:
            self._by_size[each.tensor.numel()].append((each, _norm(each)))

    def same_as(self, right: Value, used: Collection[Key]) -> Part | None:
        """Return the nearest of those that are the same as a value of the reference."""
        choices = self._by_size.get(right.tensor.numel())
        if not choices:
            return None
        norm = _norm(right)
        best: tuple[float, Part] | None = None
        for mine, own in choices:
            near = nearness(mine.tensor.dtype)
            if not abs(own - norm) <= near * norm or mine.key in used or not is_fine(mine, right):
                continue
            found = _layout(mine.tensor, right.tensor, near)
            if found is not None and (best is None or found[1] < best[0]):
                best = (found[1], Part(mine.key, fit=found[0], near=2 * near))
        return None if best is None else best[1]


def _norm(value: Value) -> float:
    """Return the norm of a value; one that is not finite, or constant, has none."""
    wide = value.tensor.double()
    size = float(wide.norm())
    varies = size > 0 and float(wide.std()) > 1e-6 * float(wide.abs().max())
    return size if varies else float("nan")


def _layout(
    mine: torch.Tensor, right: torch.Tensor, near: float
) -> tuple[Layout | None, float] | None:
    """Return the plainest way to lay one tensor like another that makes them the same."""
    left, wide = mine.to(right.device).double(), right.double()
    size = float(wide.norm())
    for fit, made in Layout.laid(left, wide.shape):
        distance = float((made - wide).norm()) / size
        if distance <= near:
            return fit, distance
    return None
