"""Bytes of a device by address: ranges of them, and what they held when somebody last looked.

For who logs a queue. Knows addresses and bytes, nothing of submissions.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Span: TypeAlias = tuple[int, int]
"""First address and end."""
Bytes: TypeAlias = NDArray[np.uint8]


class Ranges:
    """A set of addresses, as ranges that are in order and apart."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[Span]:
        return zip(self._begins, self._ends, strict=True)

    def add(self, begin: int, end: int) -> None:
        """Add a range; those that it touches become one with it."""
        if begin >= end:
            return
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]

    def remove(self, begin: int, end: int) -> None:
        """Take a range away."""
        first, last = bisect_right(self._ends, begin), bisect_left(self._begins, end)
        if begin >= end or first >= last:
            return
        pieces = [(self._begins[first], begin), (end, self._ends[last - 1])]
        left = [each for each in pieces if each[0] < each[1]]
        self._begins[first:last] = [each[0] for each in left]
        self._ends[first:last] = [each[1] for each in left]

    def without(self, begin: int, end: int) -> list[Span]:
        """Return what of a range is not in the set."""
        left = []
        for at in range(bisect_right(self._ends, begin), bisect_left(self._begins, end)):
            if self._begins[at] > begin:
                left.append((begin, self._begins[at]))
            begin = max(begin, self._ends[at])
        return left + ([(begin, end)] if begin < end else [])

    def touches(self, begin: int, end: int) -> bool:
        """Whether any address of a range is in the set."""
        return begin < end and bisect_right(self._ends, begin) < bisect_left(self._begins, end)


class KnownBytes:
    """Copies of bytes, by address."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._data: list[Bytes] = []

    def spans(self) -> Iterator[Span]:
        """Yield the ranges of which there are copies, in order; neighbours may be two."""
        for begin, data in zip(self._begins, self._data, strict=True):
            yield begin, begin + len(data)

    def parts(self, begin: int, end: int) -> list[tuple[int, int, Bytes | None]]:
        """Return a range piece by piece: first address, end, and the copy, or None if unknown."""
        found: list[tuple[int, int, Bytes | None]] = []
        at = max(bisect_right(self._begins, begin) - 1, 0)
        while begin < end:
            while at < len(self._begins) and self._begins[at] + len(self._data[at]) <= begin:
                at += 1
            first = self._begins[at] if at < len(self._begins) else end
            data = self._data[at][begin - first : end - first] if first <= begin else None
            stop = min(first, end) if data is None else begin + len(data)
            found.append((begin, stop, data))
            begin = stop
        return found

    def put(self, begin: int, data: Bytes) -> None:
        """Keep a copy of bytes."""
        for first, stop, known in self.parts(begin, begin + len(data)):
            given = data[first - begin : stop - begin]
            if known is not None:
                known[:] = given
                continue
            at = bisect_left(self._begins, first)
            self._begins.insert(at, first)
            self._data.insert(at, given.copy())
