"""Which entries of one thread or stream lie inside which, and which need a track of their own.

Works on starts and ends alone. Viewers draw a track as a stack: an entry that begins inside another
and ends after it would be hidden without a word, so it goes to a further level.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Integers: TypeAlias = NDArray[np.int64]

SEARCHED = 8
"""Levels that are searched for an entry around a new one; on further ones nothing nests."""


@dataclass(frozen=True)
class Nested:
    """How entries lie, in the order in which they were given."""

    levels: list[Integers]
    """Per level its beginnings and ends in order of time: row n begins as n and ends as ~n."""
    parents: Integers
    """Row of the innermost entry around each, -1 where there is none."""


def nest(starts: NDArray[Any], ends: NDArray[Any], depths: NDArray[Any] | None = None) -> Nested:
    """Lay entries into levels within which they nest.

    Args:
        starts: when each begins.
        ends: when each ends, not before its start.
        depths: how far inside each was recorded, larger further; decides between entries of the
            same start and end.
    """
    starts, ends = starts.astype(np.int64), ends.astype(np.int64)
    keys = [-ends, starts] if depths is None else [depths, -ends, starts]
    order = np.lexsort(keys)
    starts, ends = starts[order], ends[order]
    if np.all(starts[1:] >= ends[:-1]):
        events = np.repeat(order, 2)
        events[1::2] = ~events[1::2]
        return Nested([events] if len(events) else [], np.full(len(order), -1, np.int64))
    sweep = _Sweep(order.tolist())
    for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        sweep.add(row, start, end)
    return sweep.nested()


class _Level:
    """One stack of open entries: row, start and end of each."""

    def __init__(self) -> None:
        self.open: list[tuple[int, int, int]] = []
        self.events: list[int] = []

    def close_until(self, time: float) -> None:
        while self.open and self.open[-1][2] <= time:
            self.events.append(~self.open.pop()[0])


class _Sweep:
    """Goes through entries by start, the longer first."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order = order
        self._parents = np.full(len(order), -1, np.int64)
        self._levels: list[_Level] = []
        self._flat: list[tuple[int, int]] = []  # end and level, of those past the searched ones

    def add(self, row: int, start: int, end: int) -> None:
        around, free = None, None
        for level in self._levels[:SEARCHED]:
            level.close_until(start)
            if not level.open:
                free = free or level
            elif level.open[-1][2] >= end and (
                around is None or level.open[-1][1] > around.open[-1][1]
            ):
                around = level
        own = self._order[row]
        chosen = around or free or self._further(start, end)
        if around is not None:
            self._parents[own] = around.open[-1][0]
        chosen.open.append((own, start, end))
        chosen.events.append(own)

    def _further(self, start: int, end: int) -> _Level:
        """Return a level on which nothing is open: the one that has been free the longest."""
        if len(self._levels) < SEARCHED or not self._flat or self._flat[0][0] > start:
            self._levels.append(_Level())
            at = len(self._levels) - 1
        else:
            at = heapq.heappop(self._flat)[1]
            self._levels[at].close_until(start)
        if at >= SEARCHED:
            heapq.heappush(self._flat, (end, at))
        return self._levels[at]

    def nested(self) -> Nested:
        for level in self._levels:
            level.close_until(float("inf"))
        return Nested([np.array(level.events, np.int64) for level in self._levels], self._parents)
