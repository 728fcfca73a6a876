"""Two ordered lists belong together in order: the most pairs that do not cross.

Owns the longest increasing pairing, and the search between pairs that are known for the pairing
with the largest evidence. Works on rows and scores alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.align.keys import Ints

Bools: TypeAlias = NDArray[np.bool_]
Scores: TypeAlias = Callable[[Ints, Ints], NDArray[np.float64]]
"""Gives the evidence for every pair of some rows of both sides; negative: not one."""

BAND = 256
"""Half the width of the search around the diagonal; OpGuard saw windows of 484 launches at most."""
CELL_BUDGET = 60_000_000
"""Cells of all windows together, so that two unrelated long lists take seconds, not hours."""


def keep_ordered(partner: Ints) -> None:
    """Take back the fewest pairs so that no two cross."""
    rows = np.flatnonzero(partner >= 0)
    targets = partner[rows]
    if not len(rows) or (np.diff(targets) > 0).all():
        return
    dropped = np.ones(len(rows), bool)
    dropped[longest_increasing(targets)] = False
    partner[rows[dropped]] = -1


def longest_increasing(values: Ints) -> Ints:
    """Return where a longest increasing subsequence lies."""
    ends: list[int] = []
    places: list[int] = []
    before = np.full(len(values), -1, np.int64)
    for at, value in enumerate(values.tolist()):
        length = bisect_left(ends, value)
        before[at] = places[length - 1] if length else -1
        if length == len(ends):
            ends.append(value)
            places.append(at)
        else:
            ends[length] = value
            places[length] = at
    out = []
    at = places[-1] if places else -1
    while at >= 0:
        out.append(at)
        at = int(before[at])
    return np.array(out[::-1], np.int64)


def out_of_order(partner: Ints, before: Bools) -> Bools:
    """Return which of the pairs that came last cross others."""
    base = np.where(before, partner, -1)
    reached = np.concatenate([[-1], np.maximum.accumulate(base)[:-1]])
    ahead = np.where(before, partner, np.iinfo(np.int64).max)
    to_come = np.append(np.minimum.accumulate(ahead[::-1])[::-1][1:], np.iinfo(np.int64).max)
    added = (partner >= 0) & ~before
    out: Bools = added & ~((partner > reached) & (partner < to_come))
    fitting = np.flatnonzero(added & ~out)
    crossing = np.ones(len(fitting), bool)
    crossing[longest_increasing(partner[fitting])] = False
    out[fitting[crossing]] = True
    return out


def best_in_order(score: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Return the pairs in order, none crossing, with the largest sum of positive scores."""
    rows, columns = score.shape
    best = np.zeros((rows + 1, columns + 1))
    for row in range(rows):
        paired = best[row, :-1] + np.where(score[row] > 0, score[row], -np.inf)
        best[row + 1, 1:] = np.maximum.accumulate(np.maximum(best[row, 1:], paired))
    out = []
    row, column = rows, columns
    while row and column:
        here = best[row, column]
        if here == best[row - 1, column]:
            row -= 1
        elif here == best[row, column - 1]:
            column -= 1
        else:
            out.append((row - 1, column - 1))
            row, column = row - 1, column - 1
    return out[::-1]


def pair_between(scores: Scores, partner: Ints, count: int) -> Ints:
    """Pair what lies between the pairs that are known, by evidence; return the rows added.

    Args:
        scores: The evidence.
        partner: Row of the other side for each row, -1: none. Pairs are in order.
        count: Rows of the other side.
    """
    added: list[int] = []
    budget = CELL_BUDGET
    for rows, columns in _windows(partner, count):
        if budget <= 0:
            break
        budget -= min(len(rows) * len(columns), len(rows) * 2 * BAND)
        for row, column in _pairs_of_window(scores, rows, columns):
            partner[row] = column
            added.append(row)
    return np.array(added, np.int64)


def _windows(partner: Ints, count: int) -> Iterator[tuple[Ints, Ints]]:
    """Yield the unpaired rows of both sides between each two neighbouring pairs."""
    rows = np.flatnonzero(partner >= 0)
    begins, begins_b = np.append(0, rows + 1), np.append(0, partner[rows] + 1)
    ends, ends_b = np.append(rows, len(partner)), np.append(partner[rows], count)
    for at in np.flatnonzero((ends > begins) & (ends_b > begins_b)):
        yield np.arange(begins[at], ends[at]), np.arange(begins_b[at], ends_b[at])


def _pairs_of_window(scores: Scores, rows: Ints, columns: Ints) -> list[tuple[int, int]]:
    if len(rows) * len(columns) <= (4 * BAND) ** 2:
        pairs = best_in_order(scores(rows, columns))
        return [(int(rows[one]), int(columns[two])) for one, two in pairs]
    return _pairs_of_band(scores, rows, columns)


def _pairs_of_band(scores: Scores, rows: Ints, columns: Ints) -> list[tuple[int, int]]:
    """Search a long window piece by piece along its diagonal, each from where the last ended."""
    out: list[tuple[int, int]] = []
    row = column = 0
    slope = len(columns) / len(rows)
    while row < len(rows) and column < len(columns):
        near = rows[row : row + BAND]
        far = columns[column : column + 2 * BAND]
        pairs = best_in_order(scores(near, far))
        # The last quarter may find better partners in the next piece.
        kept = [pair for pair in pairs if pair[0] < 0.75 * BAND] or pairs
        out += [(int(near[one]), int(far[two])) for one, two in kept]
        if kept:
            row, column = row + kept[-1][0] + 1, column + kept[-1][1] + 1
        else:
            row, column = row + BAND, max(column, round((row + BAND) * slope) - BAND)
    return out
