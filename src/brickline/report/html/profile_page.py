"""A Profile as one HTML page: what the page's scripts are given, table by table.

Owns which tables there are, how much of each a page holds, and the words above them; timeline,
graph, tiles and layers have modules of their own, drawing is the scripts' matter. Whatever the run
holds, the page stays small: what is left out is counted, and the page says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np

from brickline.budgets import BudgetResult
from brickline.profile import Profile
from brickline.profile_checks import ProfileFinding
from brickline.profile_rows import StepStats
from brickline.report.as_json import brick_fields, budget_fields, step_fields
from brickline.report.figures import Look, percent, rate
from brickline.report.html.graph_tree import graph_views
from brickline.report.html.layer_heat import layer_heat
from brickline.report.html.page import MAX_BYTES, MAX_NAME, data_block, named, page
from brickline.report.html.tile_grids import tile_grids
from brickline.report.html.timeline import timeline_view
from brickline.report.text import DISABLED, EMPTY, notes
from brickline.run.failures import is_failure
from brickline.run.twin_rows import texts_of_run
from brickline.runs import Run
from brickline.stats import BrickStats, Histogram

SCRIPTS = (
    "histogram.js",
    "bricks.js",
    "heat.js",
    "timeline.js",
    "roofline.js",
    "tiles.js",
    "graph.js",
    "recording.js",
    "profile.js",
)
STYLES = ("profile.css",)
ASSET_BYTES = 256 * 2**10
"""Kept free for styles and scripts."""
MAX_BRICKS = 1500
"""Rows of the brick table; those with the longest total."""
FULL_BRICKS = 200
"""Of those, the rows with long names and fine histograms."""
MAX_BUCKETS = (200, 48)
"""Buckets of a fine histogram and of the others; neighbours are added where there are more."""
SHORT_NAME = 100
"""Characters of the names of the other rows."""
MAX_LINES = 200
"""Lines of any list: problems, facts, circumstances, processes."""
MAX_TEXT = 600
"""Characters of one line."""


def profile_page(
    profile: Profile,
    *,
    run: Run | None = None,
    findings: Sequence[ProfileFinding] | None = None,
    budgets: Sequence[BudgetResult] | None = None,
) -> str:
    """Return the page of a profile.

    Args:
        profile: what to show.
        run: the run it was made from, for what a profile does not know: its path, how many
            launches were traced, which processes were not followed.
        findings: the checks to show; those of `Profile.validate` when None.
        budgets: the budgets to show, where a file was given.
    """
    document = page_document(profile, run=run, findings=findings, budgets=budgets)
    return page(f"{profile.name} · brickline", document, scripts=SCRIPTS, styles=STYLES)


def page_document(
    profile: Profile,
    *,
    run: Run | None = None,
    findings: Sequence[ProfileFinding] | None = None,
    budgets: Sequence[BudgetResult] | None = None,
) -> dict[str, Any]:
    """Return what the page's scripts show, as JSON values."""
    checks = profile.validate() if findings is None and profile.bricks else findings or ()
    document = {
        "name": named(profile.name),
        "headline": list(_headline(profile)),
        "notices": list(_notices(profile)),
        "figures": _figures(profile),
        "bricks": [
            _brick(profile, row, full=at < FULL_BRICKS)
            for at, row in enumerate(profile.bricks[:MAX_BRICKS])
        ],
        "bricks_left_out": _left_out(profile),
        "categories": [
            {"name": row.name, "share": profile.share(row), "count": row.count}
            for row in sorted(profile.categories.values(), key=lambda row: -row.share_ns)
        ],
        "steps": [_step(profile, step) for step in list(profile.steps.values())[:MAX_LINES]],
        "heat": layer_heat(profile),
        "roofline": _roofline(profile),
        "tiles": tile_grids(profile),
        "graphs": graph_views(profile),
        "lanes": _lanes(profile),
        "notes": [named(note, MAX_TEXT) for note in notes(profile, Look())][:MAX_LINES],
        "problems": _bounded(profile.problems),
        "checks": [asdict(each) | {"message": named(each.message, MAX_TEXT)} for each in checks],
        "budgets": None if budgets is None else [budget_fields(each) for each in budgets],
        "recording": _recording(profile, run),
        "facts": _pairs(profile.facts),
        "circumstances": _pairs(_flat(_circumstances(profile, run))),
    }
    # Last, because it can be cut to any size.
    room = MAX_BYTES - ASSET_BYTES - len(data_block(document).encode())
    return document | {"timeline": timeline_view(profile, room)}


def _headline(profile: Profile) -> Iterator[tuple[str, bool]]:
    """Give the sentence that comes first, in pieces; True for those that matter most."""
    if not profile.bricks:
        yield (DISABLED if not profile.enabled else EMPTY), False
        return
    look = Look()
    decode = profile.decode
    if decode is not None and decode.us_per_token:
        yield f"{look.time(decode.us_per_token * 1e3)} per token", True
        yield f" ({rate(decode.tokens_per_s)} tokens/s). ", False
    longest = max(profile.bricks, key=lambda row: row.share_ns)
    yield f"{named(longest.name, 80)} takes {percent(profile.share(longest))}", True
    yield " of all brick time", False
    by_category = sorted(profile.categories.values(), key=lambda row: -row.share_ns)
    if len(by_category) > 1:
        yield f", {by_category[0].name} bricks {percent(profile.share(by_category[0]))}", False
    if profile.coverage is not None:
        yield f"; bricks cover {percent(profile.coverage)} of the steps", False
    yield ".", False


def _notices(profile: Profile) -> Iterator[tuple[str, str]]:
    """Give what a reader must know before any figure: kind and words."""
    if profile.is_live:
        yield (
            "warn",
            "This run was still being recorded when the page was made; "
            "it shows what had finished by then. Make it again for more.",
        )
    failures = sum(is_failure(problem) for problem in profile.problems)
    if failures:
        yield (
            "bad",
            f"brickline failed {'once' if failures == 1 else f'in {failures} ways'} while it "
            "recorded, so parts of the run are missing; the errors are named under Recording.",
        )
    damaged = len(profile.problems) - failures
    if damaged:
        yield (
            "bad",
            f"{damaged} parts of the run are damaged or cut off; what could be read "
            "is here, and the rest is listed below under Recording."
            if damaged > 1
            else "A part of the run is damaged or cut off; what could be read is here, and the "
            "rest is named below under Recording.",
        )
    recording = profile.recording
    if recording.timed < recording.counted:
        yield (
            "info",
            f"Sampled: {recording.timed:,} of {recording.counted:,} entries were timed. Times and "
            "percentiles are of those; shares are scaled to all of them.",
        )


def _figures(profile: Profile) -> dict[str, Any]:
    decode = profile.decode
    return {
        "us_per_token": profile.us_per_token,
        "tokens_per_s": decode.tokens_per_s if decode else None,
        "phase": named(decode.phase, 40) if decode else None,
        "p50_ns": decode.stats.p50_ns if decode else None,
        "p99_ns": decode.stats.p99_ns if decode else None,
        "steps": sum(step.count for step in profile.steps.values()),
        "tokens": profile.total_tokens,
        "coverage": profile.coverage,
        "wall_ns": profile.wall_ns,
        "total_ns": profile.total_ns,
        "exclusive_ns": profile.exclusive_ns,
        "elements": profile.total_elements,
        "bricks": len(profile.bricks),
        "overhead_ns": profile.recording.overhead_ns,
        "overhead_share": profile.overhead_share,
    }


def _brick(profile: Profile, row: BrickStats, *, full: bool) -> dict[str, Any]:
    fields = brick_fields(profile, row)
    for unused in ("brick_id", "layer", "phase", "total_compressed_bytes", "compression_ratio"):
        del fields[unused]
    short = {name: float(f"{value:.9g}") for name, value in fields.items() if _is_float(value)}
    return (
        fields
        | short
        | {
            "name": named(row.name, MAX_NAME if full else SHORT_NAME),
            "histogram": histogram_fields(row.histogram, MAX_BUCKETS[0 if full else 1]),
        }
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, float)


def histogram_fields(histogram: Histogram, most: int) -> dict[str, Any]:
    """Return the filled buckets: the first index, steps to the next ones, and counts.

    With more than ``most`` of them, two neighbours become one, which is exact and doubles the width
    of a bucket; ``doubled`` says how often.
    """
    indices, counts = histogram.indices.astype(np.int64), histogram.counts
    doubled = 0
    # Durations up to 1 ns have a negative index, which halving never joins with the others.
    while len(indices) > max(most, 2):
        indices, place = np.unique(indices >> 1, return_inverse=True)
        sums = np.zeros(len(indices), np.uint64)
        np.add.at(sums, place, counts)
        counts, doubled = sums, doubled + 1
    return {
        "first": int(indices[0]) if len(indices) else 0,
        "steps": [after - before for before, after in pairwise(indices.tolist())],
        "counts": counts.tolist(),
        "zero": histogram.zero_count,
        "doubled": doubled,
    }


def _left_out(profile: Profile) -> dict[str, Any] | None:
    rest = profile.bricks[MAX_BRICKS:]
    if not rest:
        return None
    return {"count": len(rest), "share": sum(profile.share(row) for row in rest)}


def _step(profile: Profile, step: StepStats) -> dict[str, Any]:
    fields = step_fields(profile, step)
    return fields | {
        "phase": named(step.phase),
        "p90_us": step.stats.p90_ns / 1e3,
        "p999_us": step.stats.p999_ns / 1e3,
        "min_us": step.stats.min_us,
        "avg_us": step.stats.avg_us,
        "histogram": histogram_fields(step.stats.histogram, MAX_BUCKETS[0]),
    }


def _roofline(profile: Profile) -> dict[str, Any]:
    """Return a point for each brick that declares its work, and why the others have none."""
    rows = [(at, row) for at, row in enumerate(profile.bricks[:MAX_BRICKS]) if row.total_ns]
    declared = [(at, row) for at, row in rows if row.total_flops and row.moved_bytes]
    reasons = {
        "declare neither FLOPs nor bytes": sum(
            not row.total_flops and not row.moved_bytes for _, row in rows
        ),
        "declare bytes and no FLOPs": sum(
            not row.total_flops and bool(row.moved_bytes) for _, row in rows
        ),
        "declare FLOPs and no bytes": sum(
            bool(row.total_flops) and not row.moved_bytes for _, row in rows
        ),
    }
    peaks = profile.peaks
    return {
        "peaks": asdict(peaks) if peaks else None,
        "declared": len(declared),
        "left_out": [(reason, count) for reason, count in reasons.items() if count],
        "points": [
            {
                "brick": at,
                "intensity": row.arithmetic_intensity,
                "gflops": row.gflops,
                "attainable_gflops": min(peaks.gflops, row.arithmetic_intensity * peaks.gbps),
                "bound": "memory"
                if row.arithmetic_intensity * peaks.gbps < peaks.gflops
                else "compute",
            }
            for at, row in declared
        ]
        if peaks
        else [],
    }


def _lanes(profile: Profile) -> list[dict[str, Any]]:
    return [
        {
            "name": named(lane.label, 120),
            "process": lane.process,
            "device": lane.device,
            "count": lane.stats.count,
            "total_ns": lane.stats.total_ns,
            "share": profile.share(lane.stats),
            "span_ns": lane.span_ns,
            "lost": lane.lost,
        }
        for lane in profile.lanes[:MAX_LINES]
    ]


def _recording(profile: Profile, run: Run | None) -> list[tuple[str, str | int]]:
    """Return how the run came to be, as names and values."""
    manifest = profile.manifest
    recording = profile.recording
    known: list[tuple[str, Any]] = [
        ("run", str(run.path) if run else None),
        ("id", manifest.get("id")),
        ("format version", manifest.get("version")),
        ("recorded", manifest.get("created")),
        ("ended", manifest.get("ended") or ("still recording" if profile.is_live else None)),
        ("processes", recording.processes),
        ("threads and streams", len(profile.lanes)),
        ("entries counted", recording.counted),
        ("entries timed", recording.timed),
        ("entries lost", recording.lost),
        ("launches traced", sum(len(part.traces) for part in run.parts) if run else None),
        ("fingerprints", sum(len(part.fingerprint_rows) for part in run.parts) if run else None),
        ("float64 twins", "; ".join(texts_of_run((run.manifest, *run.joined))) or None)
        if run
        else ("float64 twins", None),
        ("processes not followed", len(run.unfollowed) or None if run else None),
    ]
    return [
        (name, value if isinstance(value, int) else named(str(value), MAX_TEXT))
        for name, value in known
        if value is not None
    ]


def _circumstances(profile: Profile, run: Run | None) -> Mapping[str, Any]:
    found = run.circumstances if run is not None else profile.manifest.get("circumstances")
    return found if isinstance(found, Mapping) else {}


def _flat(values: Mapping[str, Any], before: str = "", depth: int = 4) -> dict[str, Any]:
    """Return nested values by dotted name; what is not known is left out."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and depth:
            flat |= _flat(value, f"{before}{name}.", depth - 1)
        elif value not in (None, [], {}):
            flat[f"{before}{name}"] = value
    return flat


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    pairs = [(named(str(name)), _words(value)) for name, value in values.items()]
    hidden = len(pairs) - MAX_LINES
    return pairs[:MAX_LINES] + ([("…", f"{hidden:,} more")] if hidden > 0 else [])


def _words(value: Any) -> str:
    if isinstance(value, list | tuple):
        return named(" ".join(str(each) for each in value[:MAX_LINES]), MAX_TEXT)
    if isinstance(value, float):
        return f"{value:g}"
    return named(str(value), MAX_TEXT)


def _bounded(lines: Sequence[str]) -> list[str]:
    shown = [named(line, MAX_TEXT) for line in lines[:MAX_LINES]]
    hidden = len(lines) - len(shown)
    return shown + ([f"… {hidden:,} more"] if hidden else [])
