"""Where the rows of one side's weights are among those of the other, number for number.

Rows may be parts of longer ones or several side by side, and matrices may lie on their side. Says
only where something is; what that means is the matter of `weight_evidence`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

RUN = 8
"""So many numbers in a row are no coincidence."""
SOME = 0.25
"""A weight of which so many rows are held, but not all, was changed, not made of others."""
MOST_PLACES = 32
"""Where a stretch may begin is tried so often, and so many rows stand for all."""


class Place(NamedTuple):
    """Where a row of the candidate's is among the reference's weights."""

    way: int
    """How these are read."""
    tensor: int
    row: int
    """Rows of the tensor before it."""
    column: int
    """Numbers of its row before it."""


class Known:
    """The rows of one side's weights, read in every way in which they may be multiplied."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        wide = [each.detach().double().cpu() for each in tensors]
        matrices = [each for each in wide if each.ndim > 1]
        kernels = [each.flatten(2) for each in wide if each.ndim > 2]
        self._lines = [
            Line(each)
            for each in (
                [
                    *(each.flatten(1) for each in matrices),
                    *(each for each in wide if each.ndim < 2),
                ],
                [each.mT for each in matrices],
                [each.permute(2, 0, 1) for each in kernels],
                [each.permute(2, 1, 0) for each in kernels],
            )
            if each
        ]

    def holds_some(self, tensor: torch.Tensor) -> bool:
        """Whether some rows of a weight are here, though not all of them."""
        wide = tensor.detach().double().cpu().flatten(1)
        rows = wide[:: max(len(wide) // MOST_PLACES, 1)]
        return any(line.part_of(rows) >= SOME for line in self._lines[:2])

    def places(self, tensor: torch.Tensor) -> list[Place]:
        """Return where the rows of a weight are, or else its columns, all of them read one way."""
        wide = tensor.detach().double().cpu()
        readings = [wide.flatten(1) if wide.ndim > 1 else wide]
        if wide.ndim > 2:
            readings += [wide, wide.mT]
        for reading in readings:
            for way, line in enumerate(self._lines):
                found = line.covering(reading)
                if found:
                    return [Place(way, *line.place(start)) for start in found]
        if wide.ndim == 2:
            # Columns belong to what is multiplied: their order counts.
            for way, line in enumerate(self._lines[:2]):
                found = line.covering(wide.mT)
                if found and all(b - a == len(wide) + 1 for a, b in itertools.pairwise(found)):
                    return [Place(way, *line.place(start)) for start in found]
        return []


class Line:
    """Rows one after the other; zeros are left out."""

    def __init__(self, parts: list[torch.Tensor]) -> None:
        gap = np.array([np.nan])
        rows = [each.reshape(-1, each.shape[-1]) for each in parts]
        kept = [row[row != 0].numpy() for each in rows for row in each]
        pieces = [piece for row in kept for piece in (row, gap)]
        self._first_rows = np.cumsum([0, *map(len, rows)])
        self._starts = np.cumsum([0, *(len(row) + 1 for row in kept)])
        self._numbers = np.concatenate(pieces)
        self._order = np.argsort(self._numbers, kind="stable")
        self._ranked = self._numbers[self._order]

    def place(self, start: int) -> tuple[int, int, int]:
        """Return the tensor, the row and the column of a place; zeros are no columns."""
        row = int(np.searchsorted(self._starts, start, "right")) - 1
        tensor = int(np.searchsorted(self._first_rows, row, "right")) - 1
        return tensor, row - int(self._first_rows[tensor]), start - int(self._starts[row])

    def covering(self, reading: torch.Tensor) -> list[int]:
        """Return where the rows begin of which a reading is made; none if one is not found.

        A row may be a part of one here, or several whole ones of the same number side by side;
        numbers of one dimension may be several parts.
        """
        found: list[int] = []
        splits: set[tuple[int, ...]] = set()
        for row in reading.reshape(-1, reading.shape[-1]):
            numbers = row[row != 0].numpy()
            at, lengths = 0, []
            while at < len(numbers):
                start, length = self._longest(numbers[at:])
                whole = length == len(numbers) - at
                if not whole and length < RUN:
                    return []
                if reading.ndim > 1 and (at or not whole) and not self._is_row(start, length):
                    return []
                found.append(start)
                lengths.append(length)
                at += length
            splits.add(tuple(lengths))
            if len({self.place(each)[1] for each in found[len(found) - len(lengths) :]}) > 1:
                return []
            if len(splits) > 1 and any(len(each) > 1 for each in splits) and reading.ndim > 1:
                return []
        return found

    def part_of(self, rows: torch.Tensor) -> float:
        """Return which part of some rows is here."""
        return sum(bool(self.covering(row[None])) for row in rows) / max(len(rows), 1)

    def _is_row(self, start: int, length: int) -> bool:
        """Whether a stretch is all of a row."""
        end = start + length
        begins = start == 0 or bool(np.isnan(self._numbers[start - 1]))
        return begins and bool(np.isnan(self._numbers[end]))

    def _longest(self, numbers: np.ndarray) -> tuple[int, int]:
        """Return where the longest stretch is that begins with these numbers, and its length."""
        low, high = (np.searchsorted(self._ranked, numbers[0], side) for side in ("left", "right"))
        starts = self._order[low:high]
        for ahead in range(1, min(RUN, len(numbers))):
            starts = starts[starts + ahead < len(self._numbers)]
            starts = starts[self._numbers[starts + ahead] == numbers[ahead]]
        best = (0, 0)
        for start in starts[:MOST_PLACES]:
            line = self._numbers[start : start + len(numbers)]
            differ = np.flatnonzero(line != numbers[: len(line)])
            length = int(differ[0]) if len(differ) else len(line)
            if length > best[1]:
                best = (int(start), length)
        return best
