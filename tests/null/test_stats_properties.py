"""Statistics against brute force: any durations, split any way, merged any way."""

from __future__ import annotations

from math import ceil

import numpy as np
import pytest
from hand_made import bin_rows, node_row
from hypothesis import given
from hypothesis import strategies as st

from brickline.abi import BIN, NODE
from brickline.histogram import BUCKET_RATIO, Histogram, bucket_indices, merge_histograms
from brickline.nodes import category_stats_from_nodes, stats_from_nodes
from brickline.stats import BrickLabel, BrickStats, merge

durations = st.lists(
    st.one_of(st.integers(0, 50), st.integers(0, 10**12), st.integers(10**6, 10**6 + 100)),
    min_size=1,
    max_size=60,
)
splits = st.lists(durations, min_size=1, max_size=6)


def folded(parts: list[list[int]], groups: list[int]) -> list[BrickStats]:
    nodes = np.array([node_row(part) for part in parts], NODE)
    bins = np.array([row for at, part in enumerate(parts) for row in bin_rows(at, part)], BIN)
    labels = [BrickLabel(str(group)) for group in sorted(set(groups))]
    return stats_from_nodes(nodes, bins, np.array(groups), labels)


def assert_same(found: BrickStats, raw: list[int]) -> None:
    assert found.count == found.timed == len(raw)
    assert found.total_ns == sum(raw)
    assert (found.min_ns, found.max_ns) == (min(raw), max(raw))
    assert found.histogram == Histogram.from_durations(raw)
    deviation = float(np.std(np.array(raw, np.float64), ddof=1)) if len(raw) > 1 else 0.0
    # A first duration far from the rest costs digits of a sum of squares about it.
    assert found.std_ns == pytest.approx(deviation, rel=1e-6, abs=1e-6 * max(max(raw), 1))


@given(splits)
def test_merging_any_split_gives_the_whole(parts: list[list[int]]):
    whole = [each for part in parts for each in part]
    assert_same(merge([BrickStats.from_durations("x", part) for part in parts]), whole)
    assert_same(folded(parts, [0] * len(parts))[0], whole)


@given(splits, st.data())
def test_groups_do_not_mix(parts: list[list[int]], data: st.DataObject):
    drawn = data.draw(st.lists(st.integers(0, 2), min_size=len(parts), max_size=len(parts)))
    groups = np.unique(drawn, return_inverse=True)[1].tolist()
    for group, stats in enumerate(folded(parts, groups)):
        raw = [ns for part, mine in zip(parts, groups, strict=True) if mine == group for ns in part]
        assert_same(stats, raw)


@given(splits, st.integers(1, 5))
def test_merging_in_any_order_of_brackets(parts: list[list[int]], cut: int):
    stats = [BrickStats.from_durations("x", part) for part in parts]
    left, right = stats[:cut], stats[cut:]
    if not right:
        return
    nested = merge([merge(left), merge(right)])
    flat = merge(stats)
    assert nested.histogram == flat.histogram
    assert nested.total_ns == flat.total_ns
    assert nested.std_ns == pytest.approx(flat.std_ns, rel=1e-6, abs=1e-6 * max(flat.max_ns, 1))


@given(durations, st.floats(0, 1))
def test_a_quantile_is_within_one_bucket_of_the_true_one(raw: list[int], q: float):
    stats = BrickStats.from_durations("x", raw)
    true = sorted(raw)[max(1, ceil(q * len(raw) - 1e-9)) - 1]
    found = stats.quantile_ns(q)
    if true == 0:
        assert found == 0
    else:
        slack = 1 + 1e-12
        assert true / BUCKET_RATIO / slack <= found <= true * BUCKET_RATIO * slack


@given(durations)
def test_quantiles_rise(raw: list[int]):
    stats = BrickStats.from_durations("x", raw)
    found = [stats.quantile_ns(q) for q in (0, 0.1, 0.5, 0.9, 0.99, 0.999, 1)]
    assert found == sorted(found)
    assert stats.min_ns <= found[0]
    assert found[-1] <= stats.max_ns


@given(st.integers(1, 2**47))
def test_bucket_of_a_duration_by_exact_arithmetic(duration: int):
    index = int(bucket_indices([duration])[0])
    # 2^(i/16) < d <= 2^((i+1)/16), raised to the sixteenth power.
    assert index < 0 or 2**index < duration**16
    assert duration**16 <= 2 ** (index + 1)


@given(splits)
def test_histograms_survive_otlp_and_addition(parts: list[list[int]]):
    whole = merge_histograms(Histogram.from_durations(part) for part in parts)
    assert whole == Histogram.from_durations([each for part in parts for each in part])
    assert Histogram.from_otlp(whole.to_otlp()) == whole


@given(splits, st.integers(0, 20))
def test_shares_of_nodes_are_shares_of_bricks(parts: list[list[int]], untimed: int):
    nodes = np.array([*(node_row(part) for part in parts), node_row([], count=untimed)], NODE)
    whole = [each for part in parts for each in part]
    stats = BrickStats.from_durations("x", whole, count=len(whole) + untimed)
    group = np.zeros(len(nodes), np.int64)
    (row,) = category_stats_from_nodes(nodes, group, ["all"], group)
    assert row.total_ns == sum(whole)
    assert row.share_ns == pytest.approx(stats.share_ns)
