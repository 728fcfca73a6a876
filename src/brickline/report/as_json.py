"""A Profile as one JSON document: versioned, with units in the names of its fields.

Consumers check ``schema`` and ``version``; fields are only added within a version.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from brickline.budgets import BudgetResult
from brickline.profile import Profile
from brickline.profile_checks import ProfileFinding
from brickline.profile_rows import LaneStats, StepStats, TileCell, TileStats
from brickline.stats import BrickStats, CategoryStats

SCHEMA = "brickline-profile"
VERSION = 1


def profile_json(
    profile: Profile,
    *,
    findings: Sequence[ProfileFinding] | None = None,
    budgets: Sequence[BudgetResult] | None = None,
    indent: int | None = 2,
) -> str:
    """Return the document as text; see `profile_document`."""
    document = profile_document(profile, findings=findings, budgets=budgets)
    return json.dumps(document, indent=indent, ensure_ascii=False, allow_nan=False)


def profile_document(
    profile: Profile,
    *,
    findings: Sequence[ProfileFinding] | None = None,
    budgets: Sequence[BudgetResult] | None = None,
) -> dict[str, Any]:
    """Return every table as JSON values.

    Args:
        profile: what to write.
        findings: the checks to add, where they were asked for.
        budgets: the budgets to add, where a file was given.
    """
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "version": VERSION,
        "name": profile.name,
        "enabled": profile.enabled,
        "is_live": profile.is_live,
        "total_ns": profile.total_ns,
        "exclusive_ns": profile.exclusive_ns,
        "total_elements": profile.total_elements,
        "total_throughput_elements_per_s": profile.total_throughput,
        "total_tokens": profile.total_tokens,
        "wall_ns": profile.wall_ns,
        "us_per_token": profile.us_per_token,
        "coverage": profile.coverage,
        "overhead_ns": profile.recording.overhead_ns,
        "overhead_share": profile.overhead_share,
        "peaks": asdict(profile.peaks) if profile.peaks else None,
        "bricks": [brick_fields(profile, row, histogram=True) for row in profile.bricks],
        "brick_layers": [brick_fields(profile, row) for row in profile.brick_layers],
        "brick_phases": [brick_fields(profile, row) for row in profile.brick_phases],
        "categories": [_sums(profile, row) for row in profile.categories.values()],
        "layers": [{"layer": at} | _sums(profile, row) for at, row in profile.layers.items()],
        "phases": [_sums(profile, row) for row in profile.phases.values()],
        "lanes": [_lane(profile, lane) for lane in profile.lanes],
        "steps": [step_fields(profile, step) for step in profile.steps.values()],
        "tiles": [_tile(profile, tile) for tile in profile.tiles],
        "recording": asdict(profile.recording),
        "facts": {name: _finite(value) for name, value in profile.facts.items()},
        "circumstances": profile.manifest.get("circumstances"),
        "problems": list(profile.problems),
    }
    if findings is not None:
        document["checks"] = [asdict(each) for each in findings]
    if budgets is not None:
        document["budgets"] = [budget_fields(each) for each in budgets]
    return document


def brick_fields(profile: Profile, row: BrickStats, *, histogram: bool = False) -> dict[str, Any]:
    """Return one row of BrickStats."""
    fields = {
        "name": row.name,
        "brick_id": None if row.brick is None else int(row.brick),
        "category": row.category.label,
        "layer": row.layer,
        "phase": row.phase,
        "count": row.count,
        "timed": row.timed,
        "total_ns": row.total_ns,
        "exclusive_ns": row.exclusive_ns,
        "share": profile.share(row),
        "avg_us": row.avg_us,
        "min_us": row.min_us,
        "max_us": row.max_us,
        "std_us": row.std_ns / 1e3,
        "p50_us": row.p50_ns / 1e3,
        "p90_us": row.p90_ns / 1e3,
        "p99_us": row.p99_ns / 1e3,
        "p999_us": row.p999_ns / 1e3,
        "total_elements": row.total_elements,
        "throughput_elements_per_s": row.throughput,
        "total_bytes": row.total_bytes,
        "total_compressed_bytes": row.total_compressed_bytes,
        "compression_ratio": row.compression_ratio,
        "throughput_gbps": row.throughput_gbps,
        "total_flops": row.total_flops,
        "gflops": row.gflops,
        "arithmetic_intensity_flop_per_byte": row.arithmetic_intensity,
        "bottleneck": str(row.bottleneck(profile.peaks)),
        "total_cycles": row.total_cycles,
        "host_ns": row.host_ns,
        "host_bound": row.host_bound,
        "out_of_order": row.out_of_order,
        "approximate": row.approximate,
    }
    return fields | ({"histogram_ns": row.histogram.to_otlp()} if histogram else {})


def step_fields(profile: Profile, step: StepStats) -> dict[str, Any]:
    """Return the steps of one phase.

    Bricks on a device lane lie in no step of the host, so what is outside of them is unknown.
    """
    on_device = any(brick.host_ns for brick in profile.bricks)
    return {
        "phase": step.phase,
        "count": step.count,
        "timed": step.stats.timed,
        "tokens": step.tokens,
        "wall_ns": step.wall_ns,
        "elapsed_ns": step.elapsed_ns,
        "outside_bricks_ns": None if on_device else step.stats.exclusive_ns,
        "us_per_token": step.us_per_token,
        "tokens_per_s": step.tokens_per_s,
        "p50_us": step.stats.p50_ns / 1e3,
        "p99_us": step.stats.p99_ns / 1e3,
        "max_us": step.stats.max_us,
    }


def budget_fields(result: BudgetResult) -> dict[str, Any]:
    """Return one budget and what was measured."""
    return asdict(result.budget) | {
        "measured_us": result.measured_us,
        "ratio": result.ratio,
        "passed": result.passed,
    }


def _sums(profile: Profile, row: CategoryStats) -> dict[str, Any]:
    return {
        "name": row.name,
        "count": row.count,
        "timed": row.timed,
        "total_ns": row.total_ns,
        "exclusive_ns": row.exclusive_ns,
        "share": profile.share(row),
        "avg_us": row.avg_us,
        "total_elements": row.total_elements,
        "throughput_elements_per_s": row.throughput,
    }


def _lane(profile: Profile, lane: LaneStats) -> dict[str, Any]:
    return _sums(profile, lane.stats) | {
        "name": lane.label,
        "process": lane.process,
        "lane": lane.lane,
        "thread": lane.thread,
        "clock_domain": lane.clock_domain.name.lower(),
        "device": lane.device,
        "stream": lane.stream,
        "span_ns": lane.span_ns,
        "fold_ns": lane.fold_ns,
        "lost": lane.lost,
    }


def _tile(profile: Profile, tile: TileStats) -> dict[str, Any]:
    peak = profile.peaks.gflops if profile.peaks else None
    fields = brick_fields(profile, tile)
    for name in ("brick_id", "category", "layer", "phase", "share", "exclusive_ns"):
        del fields[name]
    return fields | {
        "level": tile.level_name,
        "owner": tile.owner,
        "peak_share": tile.peak_share(peak) if peak else None,
        "rows": [_cell(cell) for cell in tile.by_row()],
        "columns": [_cell(cell) for cell in tile.by_column()],
    }


def _cell(cell: TileCell) -> dict[str, Any]:
    return {
        "index": cell.row if cell.row is not None else cell.column,
        "count": cell.count,
        "total_ns": cell.total_ns,
        "avg_us": cell.avg_us,
        "min_us": cell.min_ns / 1e3,
        "max_us": cell.max_ns / 1e3,
        "gflops": cell.gflops,
    }


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
