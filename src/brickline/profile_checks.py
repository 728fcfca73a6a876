"""Does a profile hold together? The decode-profiling contract, checked on measured figures.

Every check gives one finding with its figure and its limit, whether it passes or not. The codes
that a check stands for are those of the published contract (GDP-001 to GDP-015):

================== =================== ==========================================================
code               contract            what is checked
================== =================== ==========================================================
coverage           GDP-001, GDP-002    wall time of the steps that is inside bricks
lm-head-count      GDP-004, GDP-013    LmHead entries against decode steps
attention-count    GDP-004             attention entries against steps times layers
count-multiples    GDP-004             every brick's entries are a multiple of the steps
sum-against-wall   GDP-007             exclusive time fits into each thread's and stream's span
host-bound         GDP-003             device times that show the host's pace instead
magnitudes         GDP-005             LmHead > GateProjection > RmsNorm per call
tokens             GDP-006, GDP-013    tokens come from steps; elements are not tokens
variation          GDP-008             per-token time over repeated runs
completeness       GDP-011             nothing that was measured is missing
================== =================== ==========================================================

The rest (GDP-009, 010, 012, 014, 015) guards against scores and totals that were not computed; a
Profile holds nothing that was not measured, so there is nothing to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Literal, TypeAlias

from brickline.bricks import BrickId
from brickline.stats import BrickStats

if TYPE_CHECKING:
    from brickline.profile import Profile

Severity: TypeAlias = Literal["ok", "skipped", "warning", "error"]

MIN_COVERAGE = 0.85
REPLAY_COVERAGE = 0.5
"""Below it, bricks are not merely missing: something replays work that they never see."""
MAX_VARIATION = 0.15
MIN_REPEATS = 3
WALL_SLACK = 0.01
"""Clocks are read one after the other, and ticks are rounded to nanoseconds."""
MAX_HOST_BOUND = 0.5


@dataclass(frozen=True)
class ProfileFinding:
    """What one check says."""

    code: str
    severity: Severity
    """"skipped" where the run lacks what the check needs."""
    message: str
    figure: float | None = None
    limit: float | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return self.severity in ("ok", "skipped")


def check_profile(profile: Profile, repeats: Sequence[Profile] = ()) -> list[ProfileFinding]:
    """Return one finding per check, in the order of the module's table.

    Args:
        profile: the profile to check.
        repeats: further profiles of the same work; with ``profile`` at least three are needed.
    """
    return [
        _check_coverage(profile),
        _check_lm_head(profile),
        _check_attention(profile),
        _check_multiples(profile),
        _check_wall(profile),
        _check_host_bound(profile),
        _check_magnitudes(profile),
        _check_tokens(profile),
        _check_variation(profile, repeats),
        _check_completeness(profile),
    ]


def _check_coverage(profile: Profile) -> ProfileFinding:
    code, covered = "coverage", profile.coverage
    if covered is None:
        message = "no step was timed; mark model passes with `with profiler.step(tokens=...)`"
        return ProfileFinding(code, "skipped", message, None, MIN_COVERAGE)
    message = f"bricks cover {covered:.1%} of the steps' wall time"
    if covered >= MIN_COVERAGE:
        return ProfileFinding(code, "ok", message, covered, MIN_COVERAGE)
    message += f"; at least {MIN_COVERAGE:.0%} is expected"
    if covered < REPLAY_COVERAGE:
        message += "; a graph replay (CUDA graphs) may hide bricks: record it with event nodes"
    else:
        message += "; add bricks around what is not yet measured"
    return ProfileFinding(code, "error", message, covered, MIN_COVERAGE)


def _in_decode(profile: Profile, brick: BrickId) -> BrickStats | None:
    """Return a brick's row of the decode phase, or of the whole run without such a phase."""
    if "decode" not in profile.steps:
        return profile.brick(brick)
    rows = (row for row in profile.brick_phases if row.phase == "decode")
    return next((row for row in rows if row.brick == brick), None)


def _check_lm_head(profile: Profile) -> ProfileFinding:
    code, head = "lm-head-count", _in_decode(profile, BrickId.LM_HEAD)
    if head is None or profile.decode is None:
        return ProfileFinding(code, "skipped", "no LmHead brick, or no steps to hold it against")
    steps = profile.decode.count
    message = f"LmHead was entered {head.count} times in {steps} decode steps"
    # The last sampled token is never fed back, so one pass fewer is healthy.
    fits = head.count in (steps, steps - 1)
    return ProfileFinding(code, "ok" if fits else "warning", message, head.count, steps)


def _check_attention(profile: Profile) -> ProfileFinding:
    code = "attention-count"
    names = (BrickId.ATTENTION_SCORE, BrickId.QKV_PROJECTION, BrickId.ATTENTION_OUTPUT)
    row = next((found for each in names if (found := _in_decode(profile, each))), None)
    layers = len(profile.layers)
    if row is None or profile.decode is None or not layers:
        return ProfileFinding(code, "skipped", "no attention brick, no layers, or no steps")
    expected = profile.decode.count * layers
    message = (
        f"{row.name} was entered {row.count} times; {profile.decode.count} steps"
        f" of {layers} layers make {expected}"
    )
    fits = row.count in (expected, expected - layers)
    return ProfileFinding(code, "ok" if fits else "warning", message, row.count, expected)


def _check_multiples(profile: Profile) -> ProfileFinding:
    code, decode = "count-multiples", profile.decode
    if decode is None or not decode.count:
        return ProfileFinding(code, "skipped", "no steps to hold counts against")
    rows: Sequence[BrickStats] = profile.bricks
    if "decode" in profile.steps:
        rows = [row for row in profile.brick_phases if row.phase == "decode"]
    odd = [f"{row.name} {row.count}" for row in rows if row.count % decode.count]
    if not odd:
        message = f"all {len(rows)} bricks are entered a whole number of times per step"
        return ProfileFinding(code, "ok", message, 0, 0)
    message = f"not a multiple of {decode.count} steps: {', '.join(odd)}"
    return ProfileFinding(code, "warning", message, len(odd), 0)


def _check_wall(profile: Profile) -> ProfileFinding:
    code, limit = "sum-against-wall", 1.0 + WALL_SLACK
    ratios = [
        (lane.stats.exclusive_ns / lane.span_ns, lane.label)
        for lane in profile.lanes
        if lane.span_ns
    ]
    if not ratios:
        return ProfileFinding(code, "skipped", "no lane has timed entries", None, limit)
    worst, label = max(ratios)
    message = f"exclusive brick time fills {worst:.1%} of the span of {label}, the fullest lane"
    return ProfileFinding(code, "ok" if worst <= limit else "error", message, worst, limit)


def _check_host_bound(profile: Profile) -> ProfileFinding:
    code = "host-bound"
    on_device = sum(lane.stats.timed for lane in profile.lanes if lane.device >= 0)
    if not on_device:
        message = "no brick was timed on a device"
        return ProfileFinding(code, "skipped", message, None, MAX_HOST_BOUND)
    share = profile.recording.host_bound / on_device
    message = f"{share:.1%} of the device entries waited for the host to enqueue their end"
    if share > MAX_HOST_BOUND:
        message += "; their times show the host's pace: use a CUDA graph, or SyncMode.IMMEDIATE"
    severity: Severity = "ok" if share <= MAX_HOST_BOUND else "warning"
    return ProfileFinding(code, severity, message, share, MAX_HOST_BOUND)


def _check_magnitudes(profile: Profile) -> ProfileFinding:
    code = "magnitudes"
    names = (BrickId.LM_HEAD, BrickId.GATE_PROJECTION, BrickId.RMS_NORM)
    rows = [row for each in names if (row := _in_decode(profile, each)) and row.timed]
    if len(rows) < 2:
        return ProfileFinding(code, "skipped", "fewer than two of LmHead, GateProjection, RmsNorm")
    message = " against ".join(f"{row.name} {row.avg_us:.1f} µs" for row in rows)
    ratio = min(big.avg_ns / max(small.avg_ns, 1.0) for big, small in pairwise(rows))
    if ratio > 1.0:
        return ProfileFinding(code, "ok", message, ratio, 1.0)
    message += "; each is expected to take longer than the next: is the device synchronised?"
    return ProfileFinding(code, "warning", message, ratio, 1.0)


def _check_tokens(profile: Profile) -> ProfileFinding:
    code, tokens, elements = "tokens", profile.total_tokens, profile.total_elements
    if not profile.steps:
        message = f"no steps, so no tokens; {elements} elements are not tokens"
        return ProfileFinding(code, "skipped", message, elements)
    if not tokens:
        message = "the steps count no tokens; pass them: profiler.step(tokens=...)"
        return ProfileFinding(code, "warning", message, 0, 1)
    message = f"{tokens} tokens in steps; the bricks' {elements} elements are not tokens"
    return ProfileFinding(code, "ok", message, tokens, 1)


def _check_variation(profile: Profile, repeats: Sequence[Profile]) -> ProfileFinding:
    code = "variation"
    times = [each.us_per_token for each in (profile, *repeats) if each.us_per_token is not None]
    if len(times) < MIN_REPEATS:
        message = f"{len(times)} runs with per-token times, {MIN_REPEATS} are needed"
        return ProfileFinding(code, "skipped", message, None, MAX_VARIATION)
    variation = stdev(times) / fmean(times)
    message = f"time per token varies by {variation:.1%} over {len(times)} runs"
    if variation < MAX_VARIATION:
        return ProfileFinding(code, "ok", message, variation, MAX_VARIATION)
    message += "; lock clocks, pin threads, or warm up"
    return ProfileFinding(code, "error", message, variation, MAX_VARIATION)


def _check_completeness(profile: Profile) -> ProfileFinding:
    code, recording = "completeness", profile.recording
    if recording.lost:
        message = f"{recording.lost} entries found no space and are missing"
        return ProfileFinding(code, "error", message, recording.lost, 0)
    loose = recording.orphan_exits + recording.abandoned_timers
    if loose:
        message = (
            f"{recording.abandoned_timers} timers were started and never stopped,"
            f" {recording.orphan_exits} exits had no entry"
        )
        return ProfileFinding(code, "warning", message, loose, 0)
    message = f"{recording.counted} entries, none lost; {recording.timed} of them timed"
    return ProfileFinding(code, "ok", message, 0, 0)
