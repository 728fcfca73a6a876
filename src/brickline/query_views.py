"""The views that `brickline query` offers: the tables of a run, and what people ask of them first.

Texts only: which columns the tables have is the matter of `table_columns`, where they come from
that of `query`. `docs/querying.md` explains every view.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

TABLES: Mapping[str, str] = {
    "bricks": "Statistics per lane, brick, layer and phase",
    "steps": "Model passes per lane and phase",
    "tiles": "Tiles per level and brick",
    "tile_cells": "Tiles by row and column",
    "histograms": "Durations in buckets",
    "timeline": "Every entry of the last steps",
    "traces": "Kernel launches",
    "operands": "Tensors of the launches",
    "fingerprints": "What is kept of each tensor",
    "twins": "The same tensors in float64; no launches",
    "graph_nodes": "Execution graph",
    "graph_edges": "Execution graph",
    "parts": "Spools, with their clocks",
    "lanes": "Threads and streams",
    "facts": "Numbers noted during the run",
}
"""Views that are a table of the run's, with the column `run` in front."""

GIVEN: Mapping[str, str] = {
    "runs": "The runs and what was known of the machine",
    "verdicts": "Every verdict of the kept reports",
    "findings": "The findings of the kept reports",
}
"""Views over what is in memory: manifests, and reports that `check` and `compare` kept."""

_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}


@dataclass(frozen=True)
class View:
    """A view that is made from others."""

    about: str
    sql: str


def _timed(kind: str, keys: Sequence[str], what: str, share: str) -> str:
    """Return the statistics of a table of measurements, by some of its columns.

    A quantile is the entry of rank ``ceil(q * count)``, placed within its bucket by geometric
    interpolation and kept within the shortest and the longest, as `Histogram.quantile` does.
    """
    by = ", ".join(keys)
    same = " AND ".join(f"sums.{key} IS NOT DISTINCT FROM places.{key}" for key in keys)
    shown = ",\n  ".join(
        f"max(least(greatest(ns, min_ns), max_ns)) FILTER (WHERE q = {q}) / 1e3 AS {name}_us"
        for name, q in _QUANTILES.items()
    )
    asked = ", ".join(f"({q})" for q in _QUANTILES.values())
    return f"""
WITH sums AS (
  SELECT {by}, {what},
    sum(timed)::BIGINT AS timed, sum(total_ns)::BIGINT AS total_ns,
    sum(exclusive_ns)::BIGINT AS exclusive_ns, min(min_ns) AS min_ns, max(max_ns) AS max_ns,
    sum(exclusive_count)::BIGINT AS exclusive_count, sum(out_of_order)::BIGINT AS out_of_order,
    sum(zero_count)::BIGINT AS zeros
  FROM {kind}s GROUP BY {by}
), buckets AS (
  SELECT {by}, bucket, sum(count)::BIGINT AS inside FROM histograms
  WHERE kind = '{kind}' GROUP BY {by}, bucket
), reached AS (
  SELECT *, sum(inside) OVER (PARTITION BY {by} ORDER BY bucket)::BIGINT AS upto FROM buckets
), ranks AS (
  SELECT {by}, q, min_ns, max_ns, zeros,
    greatest(1, ceil(q * timed - 1e-9)) - zeros AS rank
  FROM sums, (VALUES {asked}) AS asked(q) WHERE timed > 0
), places AS (
  SELECT {", ".join(f"ranks.{key} AS {key}" for key in keys)}, q, min_ns, max_ns,
    CASE WHEN rank <= 0 THEN 0 ELSE
      2 ^ ((bucket + (rank - (upto - inside) - 0.5) / inside) / 16) END AS ns
  FROM ranks LEFT JOIN reached
    ON {" AND ".join(f"ranks.{key} IS NOT DISTINCT FROM reached.{key}" for key in keys)}
    AND rank > upto - inside AND rank <= upto
), quantiles AS (
  SELECT {by},
  {shown}
  FROM places GROUP BY {by}
)
SELECT sums.* EXCLUDE (min_ns, max_ns, exclusive_count, out_of_order, zeros),
  {share}
  total_ns / nullif(timed, 0) / 1e3 AS avg_us, min_ns / 1e3 AS min_us, max_ns / 1e3 AS max_us,
  places.* EXCLUDE ({by})
FROM sums LEFT JOIN quantiles AS places ON {same}
"""


_COUNTED = "any_value(category) AS category, sum(count)::BIGINT AS count"
_SHARE = """
  (exclusive_ns + total_ns / timed * greatest(0, timed - exclusive_count - out_of_order))
    * count / timed / sum((exclusive_ns + total_ns / timed
      * greatest(0, timed - exclusive_count - out_of_order)) * count / timed)
    OVER (PARTITION BY sums.run) AS share,"""
_STEPS = (
    "sum(count)::BIGINT AS steps, sum(tokens)::BIGINT AS tokens, "
    "sum(coalesce(elapsed_ns, total_ns))::BIGINT AS elapsed_ns"
)
_PER_TOKEN = """
  total_ns * steps / nullif(timed, 0) / nullif(tokens, 0) / 1e3 AS us_per_token,
  1e9 * tokens * timed / nullif(elapsed_ns * steps, 0) AS tokens_per_s,"""

VIEWS: Mapping[str, View] = {
    "brick_times": View(
        "Bricks, with shares and percentiles", _timed("brick", ["run", "name"], _COUNTED, _SHARE)
    ),
    "layer_times": View(
        "The same by layer", _timed("brick", ["run", "layer", "name"], _COUNTED, _SHARE)
    ),
    "phase_times": View(
        "The same by phase", _timed("brick", ["run", "phase", "name"], _COUNTED, _SHARE)
    ),
    "step_times": View(
        "Steps, with time per token", _timed("step", ["run", "phase"], _STEPS, _PER_TOKEN)
    ),
    "launches": View(
        "Traces, with their brick and duration",
        """
SELECT traces.* EXCLUDE (slot), slots.name AS brick,
  (end_ns - start_ns) / 1e3 AS duration_us
FROM traces LEFT JOIN (
  SELECT run, part, slot, any_value(name) AS name FROM bricks GROUP BY run, part, slot
) AS slots USING (run, part, slot)
""",
    ),
    "kernel_times": View(
        "Kernels, with exact percentiles",
        """
SELECT run, name, any_value(backend) AS backend, sum(entries)::BIGINT AS launches,
  count(end_ns - start_ns) AS timed, sum(end_ns - start_ns)::BIGINT AS total_ns,
  avg(end_ns - start_ns) / 1e3 AS avg_us, min(end_ns - start_ns) / 1e3 AS min_us,
  max(end_ns - start_ns) / 1e3 AS max_us,
  quantile_disc(end_ns - start_ns, 0.5) / 1e3 AS p50_us,
  quantile_disc(end_ns - start_ns, 0.99) / 1e3 AS p99_us
FROM traces GROUP BY run, name
""",
    ),
    "tensors": View(
        "Operands, with their launch and fingerprint",
        """
SELECT operands.run, operands.part, trace, traces.name, layer, position, ordinal, direction,
  role, "index", tensor, operands.version, operands.dtype, operands.shape, hash, l2, absmax,
  minimum, maximum, nan_count, inf_count, zeros
FROM operands JOIN traces USING (run, part, trace)
LEFT JOIN fingerprints USING (run, part, fingerprint)
""",
    ),
}
"""Views that are made from others, after those."""


def about_views() -> dict[str, str]:
    """Return every view with what it holds, the ones that people ask for first in front."""
    return {name: view.about for name, view in VIEWS.items()} | {**TABLES, **GIVEN}


def views_for(sql: str | None) -> list[str]:
    """Return the views that a query may read, each after those that it is made from.

    They are the ones it names and what those are made from; all of them where it names none, as
    `SHOW TABLES` does, or where no query is known yet.
    """
    found = {*about_views()} if sql is None else _words(sql) & {*about_views()}
    found = found or {*about_views()}
    for name in list(found & VIEWS.keys()):
        found |= _words(VIEWS[name].sql) & TABLES.keys()
    return [name for name in (*TABLES, *GIVEN, *VIEWS) if name in found]


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def quoted(text: str) -> str:
    """Return a text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def listed(names: Iterable[str]) -> str:
    """Return texts as an SQL list."""
    return f"[{', '.join(map(quoted, names))}]"
