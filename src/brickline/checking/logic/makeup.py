"""Which of the reference's weights a weight is made of, row by row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from brickline.checking.execution.tape import WEIGHT, Value
from brickline.checking.stage import family_of

LOOKED_AT = 16
"""Rows of a weight that are looked up, evenly spaced."""
_Row = tuple[str, int, int]
"""Family of a weight, the axis along which its rows lie, and the number of the row."""


class Makeup:
    """The rows and columns of all the reference's weights."""

    def __init__(self, values: Iterable[Value]) -> None:
        self._rows: dict[bytes, _Row] = {}
        self._known: dict[int, tuple[_Row | None, ...] | None] = {}
        for value in values:
            if value.step.name == WEIGHT and value.tensor.ndim >= 2:
                matrix = value.tensor.flatten(1).cpu().numpy()
                family = family_of(value.name)
                for axis, lines in enumerate((matrix, matrix.T)):
                    for number, line in enumerate(np.ascontiguousarray(lines)):
                        self._rows.setdefault(line.tobytes(), (family, axis, number))

    def of(self, value: Value) -> tuple[_Row | None, ...] | None:
        """Return what rows of a weight are; None where none of them is known."""
        if value.index not in self._known:
            self._known[value.index] = self._look_up(value)
        return self._known[value.index]

    def _look_up(self, value: Value) -> tuple[_Row | None, ...] | None:
        if value.tensor.ndim < 2:
            return None
        matrix = np.ascontiguousarray(value.tensor.flatten(1).cpu().numpy())
        places = np.unique(np.linspace(0, len(matrix) - 1, LOOKED_AT).astype(int))
        rows = tuple(self._rows.get(matrix[place].tobytes()) for place in places)
        return rows if any(row is not None for row in rows) else None
