"""How much speaks for two launches being one: contents, types, names and sizes.

Knows nothing of order nor of places; `align` pairs with it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from brickline.align.keys import Ints
from brickline.align.sequences import Bools
from brickline.comparison.fingerprint_columns import cosines, relative_distances
from brickline.comparison.sides import PARAMETER_INDEX, Side

NEAR = 0.1
"""Relative L2 up to which two tensors are the same by value."""
ENOUGH = 1.5
"""Similarity below which two launches are not one."""
SAME_BITS, SAME_VALUE, LIKE_VALUE, SOME_VALUE, OTHER_VALUE = 6.0, 4.0, 2.5, 1.0, -0.75
"""Similarity of the outputs: equal hashes; cosine above 0.99, 0.9, 0.5; and less than that."""
SAME_TYPE, SAME_TAIL, SAME_NAME, OTHER_SIZE, OTHER_DEPTH = 1.0, 1.0, 1.0, -3.0, -1.0


def first_outputs(side: Side) -> Ints:
    """Return the first output operand of every launch, -1: none."""
    out = np.full(len(side), -1, np.int64)
    at = np.flatnonzero(side.role > 0)[::-1]
    out[side.owner[at]] = at
    return out


class Similarity:
    """How much speaks for two launches being one."""

    def __init__(self, a: Side, b: Side, position: Ints) -> None:
        self._a, self._b, self._position = a, b, position
        self._outer = [self._marks(side) for side in (a, b)]
        self._shared = np.zeros(len(a.words.texts), bool)
        self._shared[np.intersect1d(a.name, b.name)] = True
        tails = [text.rpartition(".")[2] for text in a.words.texts]
        numbers: dict[str, int] = {}
        self._tail = np.array([numbers.setdefault(tail, len(numbers)) for tail in tails], np.int64)

    @staticmethod
    def _marks(side: Side) -> tuple[Ints, Ints, Ints, Ints]:
        """Return per launch: first output, its size, first input, largest parameter."""
        operands = np.arange(len(side.role))
        owner = side.owner
        inputs = (side.role == 0) & (side.index < PARAMETER_INDEX)
        parameters = (side.role == 0) & (side.index >= PARAMETER_INDEX)
        outputs = side.role > 0
        found = []
        for chosen in (outputs, inputs, parameters):
            first = np.full(len(side), -1, np.int64)
            first[owner[chosen][::-1]] = operands[chosen][::-1]
            found.append(first)
        output, entry, parameter = found
        size = np.where(output >= 0, side.elements[output], -1) if len(operands) else output
        return output, size, entry, parameter

    def scores(self, rows: Ints, columns: Ints) -> NDArray[np.float64]:
        """Return the evidence for every pair of rows and columns; negative: not one."""
        a, b = self._a, self._b
        size_a, size_b = self._outer[0][1][rows], self._outer[1][1][columns]
        values = self._values(0, rows, columns)
        score = values.copy()
        score += 0.5 * self._values(2, rows, columns)
        score += 0.75 * self._values(3, rows, columns)
        types_a, types_b = a.type[rows][:, None], b.type[columns][None, :]
        score += SAME_TYPE * ((types_a == types_b) & (types_a >= 0))
        score += SAME_NAME * (a.name[rows][:, None] == b.name[columns][None, :])
        tails_a, tails_b = self._tail[a.name[rows]], self._tail[b.name[columns]]
        score += SAME_TAIL * (tails_a[:, None] == tails_b[None, :])
        sized = (size_a[:, None] >= 0) & (size_b[None, :] >= 0)
        score += OTHER_SIZE * (sized & (size_a[:, None] != size_b[None, :]))
        uneven = self._leaf(a, rows)[:, None] != self._leaf(b, columns)[None, :]
        score += OTHER_DEPTH * uneven
        apart = a.direction[rows][:, None] != b.direction[columns][None, :]
        apart |= a.rank[rows][:, None] != b.rank[columns][None, :]
        apart |= a.level[rows][:, None] != b.level[columns][None, :]
        apart |= self._position[rows][:, None] != b.position[columns][None, :]
        # A name that both sides use means the same on both, unless values say otherwise.
        shared_a, shared_b = self._shared[a.name[rows]], self._shared[b.name[columns]]
        other = a.name[rows][:, None] != b.name[columns][None, :]
        apart |= other & (shared_a[:, None] | shared_b[None, :]) & (values < SAME_VALUE)
        # A module is its first child where it puts out the same, not where it owns the same weight.
        apart |= uneven & (values < SAME_VALUE)
        score[apart] = -1.0
        return np.where(score >= ENOUGH, score, -1.0)

    def same_role(self, rows: Ints, columns: Ints) -> Bools:
        """Return where outputs, or weights and inputs, are the same by value."""
        same: Bools = self._values(0, rows, columns) >= SAME_VALUE
        fed = self._values(2, rows, columns) >= LIKE_VALUE
        return same | (fed & (self._values(3, rows, columns) >= SAME_VALUE))

    @staticmethod
    def _leaf(side: Side, rows: Ints) -> Bools:
        # A child is entered right after its parent.
        after = np.minimum(rows + 1, len(side) - 1)
        inside: Bools = side.parent[after] == rows
        return ~inside

    def _values(self, which: int, rows: Ints, columns: Ints) -> NDArray[np.float64]:
        out = np.zeros((len(rows), len(columns)))
        own_a, own_b = self._outer[0][which][rows], self._outer[1][which][columns]
        print_a = np.where(own_a >= 0, self._a.print[own_a], -1) if len(self._a.print) else own_a
        print_b = np.where(own_b >= 0, self._b.print[own_b], -1) if len(self._b.print) else own_b
        at_a, at_b = np.flatnonzero(print_a >= 0), np.flatnonzero(print_b >= 0)
        if not len(at_a) or not len(at_b):
            return out
        prints_a, prints_b = print_a[at_a], print_b[at_b]
        cosine = cosines(self._a.prints, prints_a, self._b.prints, prints_b)
        value = np.select(
            [np.isnan(cosine), cosine > 0.99, cosine > 0.9, cosine > 0.5],
            [0.0, SAME_VALUE, LIKE_VALUE, SOME_VALUE],
            OTHER_VALUE,
        )
        hash_a, hash_b = self._a.prints.hash[prints_a], self._b.prints.hash[prints_b]
        equal = (hash_a[:, None, :] == hash_b[None, :, :]).all(axis=2)
        out[np.ix_(at_a, at_b)] = np.where(equal, SAME_BITS, value)
        return out


def is_near(a: Side, b: Side, rows: Ints, others: Ints, marks: Callable[[Side], Ints]) -> Bools:
    """Return where one operand of two launches is the same by value."""
    out = np.zeros(len(rows), bool)
    ours, theirs = marks(a)[rows], marks(b)[others]
    at = np.flatnonzero((ours >= 0) & (theirs >= 0))
    prints_a, prints_b = a.print[ours[at]], b.print[theirs[at]]
    seen = (prints_a >= 0) & (prints_b >= 0)
    at, prints_a, prints_b = at[seen], prints_a[seen], prints_b[seen]
    same = a.prints.elements[prints_a] == b.prints.elements[prints_b]
    out[at] = same & (relative_distances(a.prints, prints_a, b.prints, prints_b) < NEAR)
    return out


def first_parameters(side: Side) -> Ints:
    """Return the first parameter operand of every launch, -1: none."""
    out = np.full(len(side), -1, np.int64)
    at = np.flatnonzero((side.role == 0) & (side.index >= PARAMETER_INDEX))[::-1]
    out[side.owner[at]] = at
    return out


def multiplies(side: Side, rows: Ints) -> Bools:
    """Return which launches multiply by weights and do nothing else."""
    numbers, at = np.unique(side.type[rows], return_inverse=True)
    names = [side.words[number] if number >= 0 else "" for number in numbers.tolist()]
    found = np.array([any(part in name for part in ("Linear", "Conv")) for name in names], bool)
    products: Bools = found[at.reshape(-1)]
    return products
