"""Ranges of addresses and copies of bytes, against sets and dictionaries that hold each byte."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import brickline as bl
from brickline.executor.megakernel.queue_memory import KnownBytes, Ranges
from brickline.executor.megakernel.queue_places import place_of

SPANS = st.tuples(st.integers(0, 40), st.integers(0, 12)).map(lambda it: (it[0], it[0] + it[1]))


@given(st.lists(st.tuples(st.booleans(), SPANS), max_size=20), SPANS)
def test_ranges_are_sets_of_addresses(
    steps: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]
) -> None:
    ranges, expected = Ranges(), set[int]()
    for adds, span in steps:
        if adds:
            ranges.add(*span)
            expected |= set(range(*span))
        else:
            ranges.remove(*span)
            expected -= set(range(*span))
    found = list(ranges)
    assert {each for span in found for each in range(*span)} == expected
    assert all(first[1] < second[0] for first, second in pairwise(found))
    assert all(begin < end for begin, end in found)
    left = [each for span in ranges.without(*asked) for each in range(*span)]
    assert left == sorted(set(range(*asked)) - expected)
    assert ranges.touches(*asked) == bool(set(range(*asked)) & expected)


@given(st.lists(SPANS, max_size=20), SPANS)
def test_copies_are_those_that_were_put_last(
    spans: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    known, expected = KnownBytes(), dict[int, int]()
    for value, (begin, end) in enumerate(spans):
        known.put(begin, np.full(end - begin, value, np.uint8))
        expected.update(dict.fromkeys(range(begin, end), value))
    covered = [each for span in known.spans() for each in range(*span)]
    assert covered == sorted(expected)
    begin, end = asked
    seen: dict[int, int | None] = {}
    for at, stop, data in known.parts(begin, end):
        values = [None] * (stop - at) if data is None else data.tolist()
        seen.update(zip(range(at, stop), values, strict=True))
    assert seen == {each: expected.get(each) for each in range(begin, end)}


def test_bytes_are_seen_where_they_are() -> None:
    bytes_at = place_of("queue", bl.open_device("CPU"), 1).bytes_at
    array = np.arange(8, dtype=np.uint8)
    seen = bytes_at(array.ctypes.data + 2, array.ctypes.data + 5)
    assert seen.tolist() == [2, 3, 4]
    array[3] = 9
    assert seen.tolist() == [2, 9, 4]
    assert bytes_at(array.ctypes.data, array.ctypes.data).size == 0
