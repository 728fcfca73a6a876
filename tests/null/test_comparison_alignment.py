"""Aligning the launches of two runs: never crossing, whatever was inserted, deleted or renamed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from hand_made_launches import Launches
from hypothesis import given, settings
from hypothesis import strategies as st

from brickline.align.sequences import longest_increasing
from brickline.comparison.pairing import Alignment, align
from brickline.comparison.sides import Side, Vocabulary

OPS = ("aten.mm.default", "aten.add.Tensor", "aten.view.default", "aten.mul.Tensor")


def launches_of(sequence: list[tuple[str, int]]) -> Launches:
    """Ops one after the other, each with the value that its number stands for."""
    out = Launches()
    for name, value in sequence:
        made = np.random.default_rng(value).standard_normal((4, 16))
        out.add(name, [], [made], level="op", kind=name)
    return out


def aligned(one: Launches, two: Launches) -> tuple[Side, Side, Alignment]:
    words = Vocabulary()
    a, b = one.side(words), two.side(words)
    return a, b, align(a, b)


def in_order(alignment: Alignment) -> bool:
    rows = np.flatnonzero((alignment.partner >= 0) & ~alignment.reordered)
    return bool((np.diff(alignment.partner[rows]) > 0).all())


def one_to_one(alignment: Alignment) -> bool:
    partners = alignment.partner[alignment.rows]
    return len(np.unique(partners)) == len(partners)


SEQUENCES = st.lists(st.sampled_from(OPS), min_size=1, max_size=40)


@settings(max_examples=80, deadline=None)
@given(SEQUENCES, st.data())
def test_insertions_and_deletions_survive(names: list[str], data: Any) -> None:
    sequence = [(name, number) for number, name in enumerate(names)]
    changed, origin = [], []
    for number, entry in enumerate(sequence):
        what = data.draw(st.sampled_from(["keep"] * 6 + ["delete", "insert"]))
        if what == "insert":
            changed.append((data.draw(st.sampled_from(OPS)), 1000 + number))
            origin.append(-1)
        if what != "delete":
            changed.append(entry)
            origin.append(number)
    _, _, alignment = aligned(launches_of(changed), launches_of(sequence))
    assert in_order(alignment)
    assert one_to_one(alignment)
    for row, number in enumerate(origin):
        if number >= 0:
            assert alignment.partner[row] == number


def test_one_launch_more_and_one_less_shift_nothing() -> None:
    sequence = [("aten.mm.default", number) for number in range(4)]
    changed = [("aten.mm.default", 1000), *sequence[:3]]
    _, _, alignment = aligned(launches_of(changed), launches_of(sequence))
    assert alignment.partner.tolist()[1:] == [0, 1, 2]


@settings(max_examples=60, deadline=None)
@given(SEQUENCES, SEQUENCES)
def test_unrelated_sequences_never_cross(one: list[str], two: list[str]) -> None:
    first = launches_of([(name, number) for number, name in enumerate(one)])
    second = launches_of([(name, 500 + number) for number, name in enumerate(two)])
    _, _, alignment = aligned(first, second)
    assert in_order(alignment)
    assert one_to_one(alignment)


@settings(max_examples=40, deadline=None)
@given(SEQUENCES)
def test_renamed_launches_are_paired_by_value(names: list[str]) -> None:
    sequence = [(name, number) for number, name in enumerate(names)]
    renamed = [(f"my_{name}", number) for name, number in sequence]
    _, _, alignment = aligned(launches_of(renamed), launches_of(sequence))
    assert alignment.partner.tolist() == list(range(len(names)))
    assert alignment.by_value.all()


@settings(max_examples=40, deadline=None)
@given(st.permutations(range(6)))
def test_what_is_out_of_order_is_paired_by_its_name(order: list[int]) -> None:
    def record(numbers: Any) -> Launches:
        out = Launches()
        for number in numbers:
            made = np.random.default_rng(number).standard_normal((4, 16))
            out.add(f"layers.0.{'abcdef'[number]}", [], [made])
        return out

    _, _, alignment = aligned(record(order), record(range(6)))
    assert alignment.partner.tolist() == list(order)
    assert in_order(alignment)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=30))
def test_the_longest_increasing_part_is_increasing_and_longest(values: list[int]) -> None:
    found = longest_increasing(np.array(values, np.int64))
    chosen = [values[place] for place in found]
    assert all(one < two for one, two in itertools.pairwise(chosen))
    lengths = [1] * len(values)
    for right, value in enumerate(values):
        best = [lengths[left] for left in range(right) if values[left] < value]
        lengths[right] = 1 + max(best, default=0)
    assert len(found) == max(lengths, default=0)


def test_other_nesting_is_paired_by_value() -> None:
    one, two = Launches(), Launches()
    values = [np.random.default_rng(number).standard_normal((4, 8)) for number in range(4)]
    root = one.add("Model", [values[0]], [values[3]], kind="Model")
    inner = one.add("body", [values[0]], [values[3]], kind="Body", parent=root)
    one.add("body.a", [values[0]], [values[1]], parent=inner)
    one.add("body.b", [values[1]], [values[3]], parent=inner)
    root = two.add("Net", [values[0]], [values[3]], kind="Net")
    two.add("first", [values[0]], [values[1]], parent=root)
    two.add("second", [values[1]], [values[3]], parent=root)
    a, b, alignment = aligned(one, two)
    pairs = {a.path(row): b.path(int(alignment.partner[row])) for row in alignment.rows}
    assert pairs["body.a"] == "first"
    assert pairs["body.b"] == "second"
    assert in_order(alignment)
    assert one_to_one(alignment)
