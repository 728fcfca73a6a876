"""Which entries share a track: nothing is lost, and everything nests."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from brickline.export.nesting import Nested, nest

SPANS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 20)).map(lambda each: (each[0], sum(each))),
    max_size=60,
)


def laid(spans: list[tuple[int, int]]) -> Nested:
    starts = np.array([start for start, _ in spans], np.int64)
    return nest(starts, np.array([end for _, end in spans], np.int64))


def follow(nested: Nested, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Every entry as a stack reads it; the times along a level never go back."""
    found = []
    for events in nested.levels:
        stack: list[int] = []
        times = [spans[~event][1] if event < 0 else spans[event][0] for event in events.tolist()]
        assert times == sorted(times)
        for event in events.tolist():
            if event >= 0:
                stack.append(event)
            else:
                row = stack.pop()
                assert row == ~event
                found.append(spans[row])
        assert not stack
    return found


@given(SPANS)
def test_nothing_is_lost_and_everything_nests(spans: list[tuple[int, int]]) -> None:
    assert sorted(follow(laid(spans), spans)) == sorted(spans)


@given(SPANS)
def test_a_parent_is_the_innermost_of_its_level(spans: list[tuple[int, int]]) -> None:
    nested = laid(spans)
    for row, parent in enumerate(nested.parents.tolist()):
        if parent >= 0:
            assert parent != row
            assert spans[parent][0] <= spans[row][0] <= spans[row][1] <= spans[parent][1]


def test_what_nests_needs_one_level_and_what_overlaps_another() -> None:
    assert len(laid([(0, 10), (1, 5), (2, 3), (5, 9), (10, 12)]).levels) == 1
    nested = laid([(0, 10), (5, 15)])
    assert [level.tolist() for level in nested.levels] == [[0, ~0], [1, ~1]]
    assert laid([]).levels == []


def test_an_entry_lies_inside_the_latest_one_around_it() -> None:
    nested = laid([(0, 10), (5, 15), (6, 8)])
    assert nested.parents.tolist() == [-1, -1, 1]


def test_equal_entries_nest_by_depth() -> None:
    starts, ends = np.array([5, 5, 5]), np.array([9, 9, 9])
    nested = nest(starts, ends, np.array([2, 0, 1]))
    assert [level.tolist() for level in nested.levels] == [[1, 2, 0, ~0, ~2, ~1]]
    assert nested.parents.tolist() == [2, -1, 1]


def test_many_at_once_take_as_many_levels_and_no_more() -> None:
    spans = [(at, 1000 + at) for at in range(300)] + [(5000, 5001)] * 3
    nested = laid(spans)
    assert len(nested.levels) == 300
    assert sorted(follow(nested, spans)) == sorted(spans)
