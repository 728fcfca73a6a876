"""A Profile as one CSV table for spreadsheets: bricks, bricks by layer and by phase, and steps.

The column ``table`` tells them apart; units are in the names of the columns.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from io import StringIO
from typing import Any

from brickline.profile import Profile
from brickline.profile_rows import StepStats
from brickline.report.as_json import brick_fields

COLUMNS = (
    "table",
    "name",
    "category",
    "layer",
    "phase",
    "count",
    "timed",
    "total_ns",
    "exclusive_ns",
    "share",
    "avg_us",
    "min_us",
    "max_us",
    "std_us",
    "p50_us",
    "p90_us",
    "p99_us",
    "p999_us",
    "total_elements",
    "throughput_elements_per_s",
    "total_bytes",
    "throughput_gbps",
    "gflops",
    "bottleneck",
)


def profile_csv(profile: Profile) -> str:
    """Return the table as text, with a header line."""
    stream = StringIO()
    writer = csv.DictWriter(stream, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(profile))
    return stream.getvalue()


def _rows(profile: Profile) -> Iterator[dict[str, Any]]:
    tables = (
        ("brick", profile.bricks),
        ("brick_layer", profile.brick_layers),
        ("brick_phase", profile.brick_phases),
    )
    for table, rows in tables:
        for row in rows:
            yield {"table": table} | brick_fields(profile, row)
    for step in profile.steps.values():
        yield _step(profile, step)


def _step(profile: Profile, step: StepStats) -> dict[str, Any]:
    fields = brick_fields(profile, step.stats)
    return fields | {"table": "step", "category": "", "share": "", "bottleneck": ""}
