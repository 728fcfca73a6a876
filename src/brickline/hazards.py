"""Which launch must wait for which: reads and writes of byte ranges become hazards.

Of every byte it is known who wrote it last and who has read it since, as disjoint segments. A read
waits for the last writer; a write waits for the last writer and for the readers since. What an
older launch did is forgotten where a newer one overwrites it: to wait for the newer one is to wait
for both. Knows launches by their numbers and memory by a space and byte ranges, nothing of kernels
or devices.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class HazardKind(StrEnum):
    """Why one launch waits for another."""

    READ_AFTER_WRITE = "reads what it wrote"
    WRITE_AFTER_READ = "overwrites what it reads"
    WRITE_AFTER_WRITE = "overwrites what it wrote"


@dataclass(frozen=True, slots=True)
class Hazard:
    """A byte range for which a later launch waits for an earlier one."""

    earlier: int
    kind: HazardKind
    space: Hashable
    begin: int
    end: int


@dataclass(slots=True)
class _Segment:
    """Bytes with one history: the last writer, and those who have read since."""

    begin: int
    end: int
    writer: int | None = None
    readers: list[int] = field(default_factory=list)

    def cut(self, at: int) -> _Segment:
        """Shorten this segment to end at `at`, and return the rest."""
        rest = _Segment(at, self.end, self.writer, self.readers.copy())
        self.end = at
        return rest


class _Space:
    """The segments of one memory, in order; what no launch has touched has none."""

    def __init__(self) -> None:
        self.segments: list[_Segment] = []
        self.begins: list[int] = []

    def _cut(self, at: int) -> int:
        """Make a border at `at`; return the place of the first segment that begins there or on."""
        place = bisect_right(self.begins, at) - 1
        if place < 0:
            return 0
        segment = self.segments[place]
        if segment.begin == at:
            return place
        if segment.end > at:
            self.segments.insert(place + 1, segment.cut(at))
            self.begins.insert(place + 1, at)
        return place + 1

    def within(self, begin: int, end: int) -> tuple[int, int]:
        """Return the places of the segments of a range, cut at its ends."""
        first = self._cut(begin)
        return first, self._cut(end)

    def replace(self, first: int, last: int, segments: Sequence[_Segment]) -> None:
        self.segments[first:last] = segments
        self.begins[first:last] = [segment.begin for segment in segments]


class Tracker:
    """Reads and writes of launches, in the order of the program."""

    def __init__(self) -> None:
        self._spaces: dict[Hashable, _Space] = {}

    def read(self, launch: int, space: Hashable, begin: int, end: int) -> list[Hazard]:
        """Note that a launch reads a range; return what it waits for."""
        if begin >= end:
            return []
        memory = self._spaces.setdefault(space, _Space())
        first, last = memory.within(begin, end)
        found, covered = [], []
        at = begin
        for segment in memory.segments[first:last]:
            if segment.begin > at:  # nobody has touched what lies between
                covered.append(_Segment(at, segment.begin, None, [launch]))
            if segment.writer is not None and segment.writer != launch:
                found.append(
                    Hazard(
                        segment.writer,
                        HazardKind.READ_AFTER_WRITE,
                        space,
                        segment.begin,
                        segment.end,
                    )
                )
            if not segment.readers or segment.readers[-1] != launch:
                segment.readers.append(launch)
            covered.append(segment)
            at = segment.end
        if at < end:
            covered.append(_Segment(at, end, None, [launch]))
        if len(covered) != last - first:
            memory.replace(first, last, covered)
        return found

    def write(self, launch: int, space: Hashable, begin: int, end: int) -> list[Hazard]:
        """Note that a launch writes a range; return what it waits for."""
        if begin >= end:
            return []
        memory = self._spaces.setdefault(space, _Space())
        first, last = memory.within(begin, end)
        found = []
        for segment in memory.segments[first:last]:
            for reader in segment.readers:
                if reader != launch:
                    found.append(
                        Hazard(
                            reader, HazardKind.WRITE_AFTER_READ, space, segment.begin, segment.end
                        )
                    )
            if segment.writer is not None and segment.writer != launch:
                found.append(
                    Hazard(
                        segment.writer,
                        HazardKind.WRITE_AFTER_WRITE,
                        space,
                        segment.begin,
                        segment.end,
                    )
                )
        memory.replace(first, last, [_Segment(begin, end, launch)])
        return found

    def writer(self, space: Hashable, begin: int, end: int) -> int | None:
        """Return who wrote last to some byte of a range; None where nobody did."""
        memory = self._spaces.get(space)
        if memory is None or begin >= end:
            return None
        place = max(0, bisect_right(memory.begins, begin) - 1)
        for segment in memory.segments[place:]:
            if segment.begin >= end:
                break
            if segment.writer is not None and segment.end > begin:
                return segment.writer
        return None
