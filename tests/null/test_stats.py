"""BrickStats and Histogram: published arithmetic, edges, empty input."""

from __future__ import annotations

import numpy as np
import pytest
from hand_made import node_row

from brickline.abi import NODE
from brickline.bricks import BrickCategory, BrickId
from brickline.histogram import FIRST_INDEX, LAST_INDEX, Histogram, merge_histograms
from brickline.nodes import category_stats_from_nodes
from brickline.stats import (
    BrickBottleneck,
    BrickLabel,
    BrickStats,
    CategoryStats,
    Peaks,
    merge,
)


def test_a_power_of_two_closes_the_bucket_below_it():
    assert Histogram.index_of(1) == FIRST_INDEX == -1
    assert Histogram.index_of(2) == 15
    assert Histogram.index_of(3) == 25
    assert Histogram.index_of(1 << 40) == 16 * 40 - 1
    assert Histogram.index_of((1 << 40) + 1) == 16 * 40
    assert Histogram.index_of(1 << 60) == LAST_INDEX


def test_bounds_hold_every_duration_of_the_bucket():
    for duration in [1, 2, 3, 5, 999, 1000, 10**6, 10**9 + 7]:
        low, high = Histogram.bounds(Histogram.index_of(duration))
        assert low < duration <= high


def test_histogram_converts_to_otlp_and_back():
    histogram = Histogram.from_durations([0, 0, 1, 2, 1000, 1001, 5])
    point = histogram.to_otlp()
    assert point["scale"] == 4
    assert point["zero_count"] == 2
    assert point["count"] == 7
    assert point["positive"]["offset"] == -1
    assert sum(point["positive"]["bucket_counts"]) == 5
    assert Histogram.from_otlp(point) == histogram


def test_empty_histogram():
    assert Histogram().quantile(0.5) == 0.0
    assert Histogram().to_otlp()["positive"] == {"offset": 0, "bucket_counts": []}
    assert Histogram.from_otlp(Histogram().to_otlp()) == Histogram()
    assert merge_histograms([]) == Histogram()


def test_quantile_outside_0_to_1_is_refused():
    with pytest.raises(ValueError, match=r"got 1\.5"):
        Histogram().quantile(1.5)


def test_quantiles_are_clamped_to_what_was_measured():
    stats = BrickStats.from_durations("x", [1000] * 10)
    assert stats.p50_ns == stats.p999_ns == 1000
    assert BrickStats.from_durations("x", [0, 0, 7]).p50_ns == 0


def test_published_arithmetic():
    stats = BrickStats.from_durations(
        "Compress", [1000, 3000], elements=10, total_bytes=4000, total_compressed_bytes=1000
    )
    assert (stats.count, stats.total_ns) == (2, 4000)
    assert (stats.avg_us, stats.min_us, stats.max_us) == (2.0, 1.0, 3.0)
    assert stats.throughput == stats.tokens_per_sec == pytest.approx(20 / 4e-6)
    assert stats.throughput_gbps == 1.0
    assert stats.compression_ratio == 4.0
    assert stats.std_ns == pytest.approx(np.std([1000, 3000], ddof=1))


def test_nothing_measured_gives_zeros_not_errors():
    stats = BrickStats("x")
    assert stats.avg_us == stats.min_us == stats.max_us == stats.throughput == stats.std_ns == 0.0
    assert stats.compression_ratio == 1.0
    assert stats.cycles_per_element == stats.avg_cycles == stats.estimated_ipc == 0.0
    assert stats.share_ns == stats.us_per_token(0) == stats.p99_ns == 0.0
    assert stats.bottleneck(Peaks(1, 1)) is BrickBottleneck.UNKNOWN


@pytest.mark.parametrize(
    ("elements", "cycles", "total_ns", "words"),
    [
        (1, 0, 10, "insufficient data"),
        (1, 10, 10, "memory-bound"),
        (30, 10, 10, "compute-bound"),
        (10, 10, 20, "throttled or context-switched"),
        (10, 10, 5, "balanced"),
    ],
)
def test_diagnosis_from_cycles(elements: int, cycles: int, total_ns: int, words: str):
    stats = BrickStats(
        "x", total_ns=total_ns, timed_elements=elements, total_cycles=cycles, cycles_count=1
    )
    assert stats.diagnose_from_cycles() == words


def test_cycles():
    stats = BrickStats("x", timed_elements=8, total_cycles=40, cycles_count=2)
    assert (stats.cycles_per_element, stats.avg_cycles, stats.estimated_ipc) == (5, 20, 0.2)


def test_bottleneck_is_derived_from_work_time_and_peaks():
    peaks = Peaks(gflops=100, gbps=10)
    memory = BrickStats("x", total_ns=100, total_bytes=800, total_flops=100)
    compute = BrickStats("x", total_ns=100, total_bytes=8, total_flops=9000)
    slow = BrickStats("x", total_ns=10_000, total_bytes=800, total_flops=100)
    assert memory.bottleneck(peaks) is BrickBottleneck.MEMORY
    assert compute.bottleneck(peaks) is BrickBottleneck.COMPUTE
    assert slow.bottleneck(peaks) is BrickBottleneck.UNKNOWN, "neither roof explains the time"
    assert memory.bottleneck(None) is BrickBottleneck.UNKNOWN
    assert str(BrickBottleneck.MEMORY) == "memory"
    assert memory.arithmetic_intensity == 0.125
    assert compute.gflops == 90


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_peaks_must_be_positive(bad: float):
    with pytest.raises(ValueError, match="positive peak gbps"):
        Peaks(gflops=1.0, gbps=bad)


def test_sampling_scales_shares_and_keeps_rates():
    stats = BrickStats.from_durations("x", [100, 100], elements=3, count=20, total_elements=60)
    assert stats.avg_ns == 100
    assert stats.throughput == pytest.approx(6e9 / 200), "of the timed entries"
    assert stats.estimated_total_ns == stats.share_ns == 2000
    assert stats.us_per_token(10) == pytest.approx(0.2)


def test_supplied_spans_have_a_share_though_no_exclusive_time():
    stats = BrickStats.from_durations("x", [100, 300], exclusive_ns=0, exclusive_count=0)
    assert stats.share_ns == 400
    late = BrickStats.from_durations(
        "x", [100, 300], exclusive_ns=100, exclusive_count=1, out_of_order=1
    )
    assert late.share_ns == 100


def test_merge_keeps_what_the_parts_agree_on():
    one = BrickStats.from_durations("x", [1], layer=0, phase="decode")
    two = BrickStats.from_durations("x", [2], layer=1, phase="decode")
    both = merge([one, two, BrickStats("x", phase="decode")])
    assert (both.layer, both.phase, both.count, both.min_ns, both.max_ns) == (
        None,
        "decode",
        2,
        1,
        2,
    )
    assert merge([one], BrickLabel("y", BrickId.RMS_NORM)).brick == BrickId.RMS_NORM
    with pytest.raises(ValueError, match="at least one"):
        merge([])


def test_category_stats():
    rows = np.array([node_row([100, 300], elements=4, timed_elements=4), node_row([600])], NODE)
    (both,) = category_stats_from_nodes(rows, np.zeros(2, np.int64), ["Norm"], np.arange(2))
    assert (both.count, both.total_ns, both.total_elements) == (3, 1000, 4)
    assert both.avg_us == pytest.approx(1 / 3)
    assert both.throughput == 4e6
    assert both.percentage(2000) == 50.0
    assert both.percentage(0) == 0.0
    assert CategoryStats("x").avg_us == 0.0
    assert BrickCategory.NORM.label == "Norm"
