"""Where the values of a plan come from: who reads what of whom, and who writes last.

Follows from the hazards that a plan has found, by byte range. Knows launches, nothing of runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

from brickline.hazards import HazardKind
from brickline.megakernel_flow import Flow
from brickline.plan_launches import Launch

Interval = tuple[int, int]


def flow_of(launches: Sequence[Launch], computed_by: Sequence[int]) -> Flow:
    """Return where the values that launches read came from.

    A launch's sources are those that wrote last to some byte that it reads; what it reads beyond
    them is memory that was there before. One that is not run has one source, the launch that
    computed its values.

    Args:
        launches: All of a plan.
        computed_by: Of each, the launch that computes its values: itself, where it is run.
    """
    begin, sources = [0], list[int]()
    given_begin, given, places = [0], list[int](), dict[str, int]()
    for launch in launches:
        if computed_by[launch.number] != launch.number:
            sources.append(computed_by[launch.number])
            begin.append(len(sources))
            given_begin.append(len(given))
            continue
        written: dict[Hashable, list[Interval]] = {}
        found = set()
        for hazard in launch.hazards:
            if hazard.kind is HazardKind.READ_AFTER_WRITE:
                found.add(computed_by[hazard.earlier])
                written.setdefault(hazard.space, []).append((hazard.begin, hazard.end))
        sources += sorted(found)
        begin.append(len(sources))
        names = set()
        for param, buffer in launch.buffers():
            space, first, end = buffer.range
            if param.access.reads and not _is_covered(first, end, written.get(space, ())):
                names.add(buffer.name)
        given += [places.setdefault(name, len(places)) for name in sorted(names)]
        given_begin.append(len(given))
    return Flow(begin, sources, given_begin, given, tuple(places))


def last_writers(launches: Sequence[Launch]) -> dict[str, tuple[int, ...]]:
    """Return, by the name of a storage, the launches that wrote last to some byte of it."""
    covered: dict[Hashable, list[Interval]] = {}
    found: dict[str, set[int]] = {}
    for launch in reversed(launches):
        writes = [buffer for param, buffer in launch.buffers() if param.access.writes]
        for buffer in writes:
            space, first, end = buffer.range
            if not _is_covered(first, end, covered.get(space, ())):
                found.setdefault(buffer.name, set()).add(launch.number)
        for buffer in writes:
            space, first, end = buffer.range
            covered[space] = _joined([*covered.get(space, ()), (first, end)])
    return {name: tuple(sorted(numbers)) for name, numbers in sorted(found.items())}


def _is_covered(begin: int, end: int, intervals: Iterable[Interval]) -> bool:
    for first, last in sorted(intervals):
        if begin >= end or first > begin:
            break
        begin = max(begin, last)
    return begin >= end


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same bytes as intervals that do not meet."""
    joined: list[Interval] = []
    for first, last in sorted(intervals):
        if joined and first <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(last, joined[-1][1]))
        else:
            joined.append((first, last))
    return joined
