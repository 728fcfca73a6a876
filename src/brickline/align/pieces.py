"""How much of a tensor another side holds too, in whatever tensors and orders.

Tensors are cut into short pieces along each of their dimensions. Fused, split, stacked, transposed
and permuted weights have most of their pieces in common with what they were made from; in bfloat16
single elements prove nothing, and pieces do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

LENGTHS = (8, 4)
"""Elements of a piece; the first of which a dimension is a multiple."""
_KEY = np.cos(np.arange(4096) * 1.6180339887 + 0.5)


class Pieces:
    """The pieces of many tensors."""

    def __init__(self, tensors: Iterable[np.ndarray]) -> None:
        marks: dict[int, list[np.ndarray]] = {}
        wholes: list[float] = []
        for tensor in tensors:
            wholes.append(_mark_of_whole(tensor))
            for axis in range(tensor.ndim):
                size = tensor.shape[axis]
                for length in {*(each for each in LENGTHS if size % each == 0), size}:
                    if 1 < length <= _KEY.size:
                        marks.setdefault(length, []).append(_marks(tensor, axis, length))
        self._marks = {
            length: np.unique(np.concatenate(several)) for length, several in marks.items()
        }
        self._wholes = np.unique(np.array(wholes))

    def share(self, tensor: np.ndarray) -> float:
        """Return which part of a tensor is here, from 0 to 1."""
        if tensor.size == 0 or _contains(self._wholes, np.array([_mark_of_whole(tensor)])).all():
            return 1.0
        return max(self._shares(tensor), default=0.0)

    def _shares(self, tensor: np.ndarray) -> Iterator[float]:
        for axis in range(tensor.ndim):
            size = tensor.shape[axis]
            length = next((each for each in LENGTHS if size % each == 0), size)
            known = self._marks.get(length)
            if known is None or length > _KEY.size or length < 2:
                continue
            yield float(_contains(known, _marks(tensor, axis, length)).mean())


def _marks(tensor: np.ndarray, axis: int, length: int) -> np.ndarray:
    """Return one number for each piece along an axis, which other pieces hardly share."""
    pieces = np.ascontiguousarray(np.moveaxis(tensor, axis, -1)).reshape(-1, length)
    # Summed in one order, so that equal pieces give equal numbers to the bit.
    marks = np.zeros(len(pieces))
    for place in range(length):
        marks += pieces[:, place] * _KEY[place]
    return marks


def _mark_of_whole(tensor: np.ndarray) -> float:
    """Return one number for all elements of a tensor in whatever order."""
    ordered = np.sort(tensor, axis=None)
    places = np.cos(np.arange(ordered.size) * 0.7548776662 + 0.25)
    return float((ordered * places).sum()) + ordered.size


def _contains(known: np.ndarray, marks: np.ndarray) -> np.ndarray:
    at = np.clip(np.searchsorted(known, marks), 0, max(known.size - 1, 0))
    same: np.ndarray = known[at] == marks if known.size else np.zeros(marks.size, dtype=bool)
    return same
