"""Profile: its tables add up, shares count once, and the contract's checks fire."""

from __future__ import annotations

import numpy as np
import pytest
from hand_made import HandMadePart, decode_part, profile_of

from brickline.abi import RECORD, ClockDomain
from brickline.bricks import BrickCategory, BrickId
from brickline.profile import Profile, peaks_from_document
from brickline.profile_checks import ProfileFinding
from brickline.stats import Peaks


def finding(code: str, profile: Profile, *repeats: Profile) -> ProfileFinding:
    return next(each for each in profile.validate(repeats) if each.code == code)


def test_tables_of_a_decode():
    profile = profile_of(decode_part(steps=8, layers=4), name="decode")
    assert [row.name for row in profile.bricks] == [
        "LmHead",
        "GateProjection",
        "AttentionScore",
        "RmsNorm",
    ]
    norm = profile.brick(BrickId.RMS_NORM)
    assert norm is not None
    assert (norm.count, norm.category, norm.layer) == (64, BrickCategory.NORM, None)
    assert len(profile.brick_layers) == 3 * 4 + 1
    assert {row.layer for row in profile.brick_layers if row.name == "RmsNorm"} == {0, 1, 2, 3}
    assert sorted(profile.layers) == [0, 1, 2, 3]
    assert set(profile.phases) == {"decode"}
    assert set(profile.categories) == {
        BrickCategory.NORM,
        BrickCategory.ATTENTION,
        BrickCategory.FFN,
        BrickCategory.OTHER,
    }
    assert profile.categories[BrickCategory.FFN].name == "FFN"
    step = profile.steps["decode"]
    assert (step.count, step.tokens, step.wall_ns) == (8, 8, 8_000_000)
    assert step.us_per_token == 1000.0
    assert step.tokens_per_s == 1000.0
    assert profile.us_per_token == 1000.0
    assert profile.coverage == pytest.approx(0.95)
    assert profile.total_tokens == 8
    assert profile.total_elements == 8 * 4 * (2 * 64 + 64 + 1) + 8
    assert profile.recording.overhead_ns == 50.0 * profile.recording.timed


def test_sums_agree_over_every_grouping():
    profile = profile_of(decode_part())
    total = sum(row.total_ns for row in profile.bricks)
    assert total == profile.total_ns
    for rows in (profile.brick_layers, profile.brick_phases, profile.categories.values()):
        assert sum(row.total_ns for row in rows) == total
    assert sum(lane.stats.total_ns for lane in profile.lanes) == total
    assert sum(map(profile.share, profile.bricks)) == pytest.approx(1.0)
    assert sum(map(profile.share, profile.categories.values())) == pytest.approx(1.0)


def test_a_nested_brick_counts_once_in_shares():
    part = HandMadePart()
    part.brick("Block", [100], exclusive_ns=40).brick("RmsNorm", [60])
    profile = profile_of(part)
    outer, inner = profile.brick("Block"), profile.brick("RmsNorm")
    assert outer is not None
    assert inner is not None
    assert profile.total_ns == 160
    assert profile.share(outer) == pytest.approx(0.4)
    assert profile.share(inner) == pytest.approx(0.6)


def test_processes_and_lanes_are_merged_and_told_apart():
    one, two = decode_part(), decode_part()
    two.header["process"] = 101
    two.strings.insert(1, "shift every string id")
    two.slot_list = [(slot[0], slot[1], slot[2] + 1, *slot[3:]) for slot in two.slot_list]
    both = profile_of(one, two)
    single = profile_of(one)
    assert [row.name for row in both.bricks] == [row.name for row in single.bricks]
    assert both.total_ns == 2 * single.total_ns
    assert both.recording.processes == 2
    assert [lane.process for lane in both.lanes] == [100, 101]
    assert both.us_per_token == single.us_per_token
    head, twice = single.bricks[0], both.bricks[0]
    assert twice.histogram.count == 2 * head.histogram.count


def test_phases_are_kept_apart():
    part = decode_part()
    part.step("prefill", [9_000_000], tokens=16).brick("LmHead", [500_000], phase="prefill")
    profile = profile_of(part)
    assert profile.total_tokens == 24
    assert profile.us_per_token == 1000.0, "of the decode phase alone"
    heads = {row.phase: row.count for row in profile.brick_phases if row.name == "LmHead"}
    assert heads == {"decode": 8, "prefill": 1}
    assert finding("lm-head-count", profile).severity == "ok"


def test_tiles_have_rows_and_columns():
    part = HandMadePart()
    part.brick("LmHead", [1000])
    part.tile("LmHead", 0, [100, 300], flops=800.0, bytes_in=200)
    part.tile(None, 2, [50])
    profile = profile_of(part)
    tile = next(row for row in profile.tiles if row.owner == "LmHead")
    assert (tile.level_name, tile.count, tile.gflops, tile.arithmetic_intensity) == (
        "macro",
        2,
        2.0,
        4.0,
    )
    assert tile.peak_share(8.0) == 0.25
    assert tile.cache_efficiency(1.0) == 1.0
    assert [(cell.column, cell.total_ns) for cell in tile.by_column()] == [(0, 100), (1, 300)]
    assert [(cell.row, cell.count) for cell in tile.by_row()] == [(0, 2)]
    assert [row.level_name for row in profile.tile_levels] == ["macro", "micro"]
    assert len(profile.bricks) == 1, "tiles are no bricks"
    assert profile.total_ns == 1000


def test_timeline():
    part = decode_part()
    slot = part.slot_list[-1][0]
    part.recent = np.array([(10, 30, slot, 5, 1, 1, 0, 1, 7)], RECORD)
    part.recent_lanes = np.zeros(1, np.uint32)
    (span,) = profile_of(part).timeline
    assert (span.name, span.phase, span.step) == ("LmHead", "decode", 7)
    assert (span.start_ns, span.end_ns, span.elements) == (10, 30, (1 << 32) + 5)


def test_device_bricks_cover_a_host_step():
    part = HandMadePart()
    lane = part.add_lane(ClockDomain.CUDA, device=0, stream=16)
    part.step("decode", [1000], exclusive_ns=1000)
    part.brick("LmHead", [900], phase="decode", lane=lane, host_bound=1, last_ns=950, first_ns=0)
    profile = profile_of(part)
    assert profile.coverage == pytest.approx(0.9)
    assert profile.lanes[1].label == "CUDA:0 stream 0x10"
    assert finding("host-bound", profile).severity == "warning"


def test_sampled_layers_do_not_lower_coverage():
    part = HandMadePart().step("decode", [1000] * 4, exclusive_ns=2200)
    part.brick("RmsNorm", [450] * 4, layer=0, phase="decode")
    part.brick("RmsNorm", [], layer=1, phase="decode", count=4)
    profile = profile_of(part)
    assert profile.coverage == pytest.approx(0.9)
    assert profile.share(profile.layers[0]) == pytest.approx(0.5)


def test_sampled_steps_on_a_device_scale_shares_across_lanes():
    part = HandMadePart()
    lane = part.add_lane(ClockDomain.CUDA, device=0)
    part.step("decode", [1000], count=10, exclusive_ns=1000)
    part.brick("LmHead", [], phase="decode", count=9).brick(
        "LmHead", [400], lane=lane, phase="decode"
    )
    part.brick("RmsNorm", [], phase="decode", count=9).brick(
        "RmsNorm", [600], lane=lane, phase="decode"
    )
    profile = profile_of(part)
    assert profile.coverage == 1.0
    assert profile.share_total_ns == 10_000
    assert profile.share(profile.categories[BrickCategory.NORM]) == pytest.approx(0.6)
    assert profile.recording.counted == 30
    assert profile.recording.timed == 3


def test_nothing_recorded():
    profile = profile_of(HandMadePart())
    assert profile.bricks == ()
    assert profile.coverage is None
    assert profile.us_per_token is None
    assert profile.total_throughput == 0.0
    assert all(each.passed for each in profile.validate())
    assert profile_of().lanes == ()


def test_a_slot_that_the_run_does_not_describe_is_kept():
    part = decode_part()
    part.node(999, [5])
    unknown = profile_of(part).brick("(unknown)")
    assert unknown is not None
    assert unknown.total_ns == 5


def test_peaks():
    assert peaks_from_document({"gflops": 10, "gbps": 2}) == Peaks(10.0, 2.0)
    assert peaks_from_document({"gflops": 10}) is None
    assert peaks_from_document({"gflops": 10, "gbps": None}) is None
    assert peaks_from_document(None) is None


def test_a_healthy_decode_passes_every_check():
    profile = profile_of(decode_part())
    findings = profile.validate([profile, profile])
    assert [each for each in findings if not each.passed] == []
    assert {each.code for each in findings if each.severity == "skipped"} == {"host-bound"}
    figures = {each.code: each.figure for each in findings}
    assert figures["coverage"] == pytest.approx(0.95)
    assert figures["variation"] == 0


@pytest.mark.parametrize(("exclusive", "words"), [(400, "add bricks"), (700, "graph replay")])
def test_low_coverage_is_an_error(exclusive: int, words: str):
    part = HandMadePart().step("decode", [1000], exclusive_ns=exclusive)
    found = finding("coverage", profile_of(part))
    assert found.severity == "error"
    assert found.figure == pytest.approx(1 - exclusive / 1000)
    assert words in found.message


@pytest.mark.parametrize(("count", "severity"), [(8, "ok"), (7, "ok"), (6, "warning")])
def test_lm_head_against_steps(count: int, severity: str):
    part = HandMadePart().step("decode", [10] * 8).brick("LmHead", [1] * count, phase="decode")
    assert finding("lm-head-count", profile_of(part)).severity == severity


def test_counts_against_steps_and_layers():
    part = decode_part(steps=8, layers=4)
    part.brick("AttentionScore", [1], layer=0, phase="decode")
    profile = profile_of(part)
    attention = finding("attention-count", profile)
    assert (attention.severity, attention.figure, attention.limit) == ("warning", 33, 32)
    assert "AttentionScore 33" in finding("count-multiples", profile).message


def test_more_time_than_the_clock_showed_is_an_error():
    part = HandMadePart().brick("RmsNorm", [600, 600], first_ns=0, last_ns=1000)
    found = finding("sum-against-wall", profile_of(part))
    assert found.severity == "error"
    assert found.figure == pytest.approx(1.2)


def test_order_of_magnitudes():
    part = HandMadePart().brick("LmHead", [10]).brick("RmsNorm", [20])
    assert finding("magnitudes", profile_of(part)).severity == "warning"


def test_variation_over_repeats():
    profiles = [
        profile_of(HandMadePart().step("decode", [duration])) for duration in (1000, 1500, 2000)
    ]
    found = finding("variation", *profiles)
    assert found.severity == "error"
    assert found.figure == pytest.approx(1 / 3)
    assert finding("variation", *profiles[:2]).severity == "skipped"


def test_steps_without_tokens():
    part = HandMadePart().step("decode", [1000], tokens=0)
    assert finding("tokens", profile_of(part)).severity == "warning"


@pytest.mark.parametrize(
    ("name", "severity"), [("lost_records", "error"), ("abandoned_timers", "warning")]
)
def test_what_is_missing_is_said(name: str, severity: str):
    part = decode_part()
    part.header[name] = 3
    found = finding("completeness", profile_of(part))
    assert (found.severity, found.figure) == (severity, 3)
