"""Hazards against brute force: every byte has a history of its own, and closures decide."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brickline.hazards import Hazard, HazardKind, Tracker

BYTES = 12
"""Small, so that ranges meet in every way."""


@dataclass
class Touch:
    """What a launch reads and writes: space, first byte, end."""

    reads: list[tuple[str, int, int]] = field(default_factory=list)
    writes: list[tuple[str, int, int]] = field(default_factory=list)


ranges = st.tuples(st.sampled_from("xyz"), st.integers(0, BYTES), st.integers(0, BYTES)).map(
    lambda made: (made[0], min(made[1:]), max(made[1:]))
)
launches = st.lists(
    st.builds(Touch, st.lists(ranges, max_size=3), st.lists(ranges, max_size=2)), max_size=12
)


def tracked(program: list[Touch]) -> list[list[Hazard]]:
    """What the tracker says each launch waits for."""
    tracker, found = Tracker(), []
    for number, launch in enumerate(program):
        hazards = [each for touch in launch.reads for each in tracker.read(number, *touch)]
        hazards += [each for touch in launch.writes for each in tracker.write(number, *touch)]
        found.append(hazards)
    return found


def bytes_of(touches: list[tuple[str, int, int]]) -> set[tuple[str, int]]:
    return {(space, place) for space, begin, end in touches for place in range(begin, end)}


def conflicting(program: list[Touch]) -> set[tuple[int, int]]:
    """Every pair of which one writes a byte that the other touches."""
    reads = [bytes_of(launch.reads) for launch in program]
    writes = [bytes_of(launch.writes) for launch in program]
    return {
        (early, late)
        for late in range(len(program))
        for early in range(late)
        if writes[early] & (reads[late] | writes[late]) or reads[early] & writes[late]
    }


def closure(edges: set[tuple[int, int]], count: int) -> set[tuple[int, int]]:
    before: dict[int, set[int]] = defaultdict(set)
    for late in range(count):
        for early in (a for a, b in edges if b == late):
            before[late] |= {early, *before[early]}
    return {(early, late) for late, all_of_them in before.items() for early in all_of_them}


def edges_of(found: list[list[Hazard]]) -> set[tuple[int, int]]:
    return {(hazard.earlier, late) for late, hazards in enumerate(found) for hazard in hazards}


@given(launches)
def test_edges_order_exactly_what_conflicts(program: list[Touch]) -> None:
    edges, conflicts = edges_of(tracked(program)), conflicting(program)
    assert edges <= conflicts
    assert closure(edges, len(program)) == closure(conflicts, len(program))


@given(launches)
def test_every_hazard_names_bytes_that_both_touch_in_that_way(program: list[Touch]) -> None:
    for late, hazards in enumerate(tracked(program)):
        for hazard in hazards:
            theirs, mine = program[hazard.earlier], program[late]
            span = bytes_of([(str(hazard.space), hazard.begin, hazard.end)])
            assert span, "a hazard is about some byte"
            wrote = hazard.kind is not HazardKind.WRITE_AFTER_READ
            writes = hazard.kind is not HazardKind.READ_AFTER_WRITE
            assert span <= bytes_of(theirs.writes if wrote else theirs.reads)
            assert span <= bytes_of(mine.writes if writes else mine.reads)


@given(launches)
def test_the_last_writer_of_a_range_is_known(program: list[Touch]) -> None:
    tracker = Tracker()
    writers: dict[tuple[str, int], int] = {}
    for number, launch in enumerate(program):
        for touch in launch.reads:
            tracker.read(number, *touch)
        for touch in launch.writes:
            tracker.write(number, *touch)
            writers |= dict.fromkeys(bytes_of([touch]), number)
    for space in "xyz":
        for begin in range(BYTES):
            for end in range(begin, BYTES + 1):
                wrote = [writers.get((space, place)) for place in range(begin, end)]
                found = tracker.writer(space, begin, end)
                assert found in wrote if any(each is not None for each in wrote) else found is None


@pytest.mark.parametrize("place", [0, 3, 8])
def test_ranges_without_bytes_never_conflict(place: int) -> None:
    tracker = Tracker()
    assert tracker.write(0, "x", 0, 8) == []
    assert tracker.read(1, "x", place, place) == []
    assert tracker.write(2, "x", place, place) == []
    assert tracker.writer("x", place, place) is None
    assert {hazard.earlier for hazard in tracker.write(3, "x", 0, 8)} == {0}
    assert tracker.writer("x", place, place) is None


def test_a_range_ends_before_its_end() -> None:
    tracker = Tracker()
    tracker.write(0, "x", 4, 8)
    assert tracker.read(1, "x", 0, 4) == []
    assert tracker.read(2, "x", 8, 12) == []
    assert tracker.writer("x", 0, 4) is None
    (hazard,) = tracker.read(3, "x", 0, 5)
    assert hazard == Hazard(0, HazardKind.READ_AFTER_WRITE, "x", 4, 5)


def test_spaces_know_nothing_of_each_other() -> None:
    tracker = Tracker()
    tracker.write(0, "x", 0, 8)
    assert tracker.write(1, "y", 0, 8) == []
    assert tracker.read(2, 7, 0, 8) == []


def test_a_launch_does_not_wait_for_itself() -> None:
    tracker = Tracker()
    assert tracker.read(0, "x", 0, 8) == []
    assert tracker.write(0, "x", 4, 12) == []
    assert tracker.read(0, "x", 0, 12) == []


def test_what_was_overwritten_is_forgotten() -> None:
    tracker = Tracker()
    for number in range(10):
        tracker.write(number, "x", 0, 8)
    assert [hazard.earlier for hazard in tracker.read(10, "x", 0, 8)] == [9]


@pytest.mark.parametrize("length", [100, 1000, 10_000])
def test_a_launch_of_a_chain_has_no_more_hazards_however_long_the_chain(length: int) -> None:
    def cell(number: int) -> tuple[str, int, int]:
        return "x", number % 3, number % 3 + 1

    program = [Touch([cell(number)], [cell(number + 1)]) for number in range(length)]
    assert max(map(len, tracked(program))) <= 3


def test_segments_of_many_small_writes_are_gone_when_all_is_overwritten() -> None:
    tracker = Tracker()
    for number in range(100):
        tracker.write(number, "x", number, number + 1)
    assert len(tracker.write(100, "x", 0, 100)) == 100
    assert len(tracker.write(101, "x", 0, 100)) == 1
