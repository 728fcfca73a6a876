"""Pairs in order: which of them cross, and the most that do not.

Works on rows and scores alone.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from brickline.comparison.sides import Bools, Ints


def keep_ordered(partner: Ints) -> None:
    """Take back the fewest pairs so that no two cross."""
    rows = np.flatnonzero(partner >= 0)
    targets = partner[rows]
    if not len(rows) or (np.diff(targets) > 0).all():
        return
    kept = longest_increasing(targets)
    dropped = np.ones(len(rows), bool)
    dropped[kept] = False
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
