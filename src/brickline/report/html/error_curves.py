"""Error over depth as a page draws it: one curve for each call of the model that matters.

Owns which calls are drawn and which brick stands for its neighbours where there are too many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from brickline.report.error_curve import groups_of, parts_of, size_of
from brickline.report.html.verdict_rows import Texts, rows_packed
from brickline.verdict import GUILTY, DivergenceReport, VerdictTable

MAX_CALLS = 32
"""Curves of a page: the calls of its findings, then the first, the last and those between."""
MAX_ALL_POINTS = 6400
"""Points of all curves together; what comes first is kept."""
MAX_POINTS = 800
"""Points of a curve; the worst of its neighbours stands for them."""

Call = tuple[int | None, str]
"""Number of the root's call and the pass, forward or backward."""


def curves_view(report: DivergenceReport, texts: Texts) -> dict[str, Any]:
    """Return the curves, which of them is shown first, and how many calls have none."""
    table = report.verdicts
    calls = _calls(table)
    chosen = _chosen(report, calls)
    rows = _rows(table, set(chosen))
    points = {call: _points(table, rows[call]) for call in chosen}
    kept = _kept([(call, len(points[call])) for call in chosen])
    shown = sorted(kept, key=_in_order)
    return {
        "curves": [
            {
                "position": position,
                "direction": direction,
                "of": len(rows[position, direction]),
                "rows": rows_packed(table, np.array(points[position, direction], np.int64), texts),
            }
            for position, direction in shown
        ],
        "first": shown.index(kept[0]) if kept else 0,
        "calls": len(calls),
    }


def _in_order(call: Call) -> tuple[int, str]:
    return (-1 if call[0] is None else call[0]), str(call[1] != "forward")


def _calls(table: VerdictTable) -> set[Call]:
    """Return every call; rows that belong to none are drawn with each, or alone."""
    found = set(zip(table.columns["position"], table.columns["direction"], strict=True))
    numbered = {call for call in found if call[0] is not None}
    ways = {way for _, way in numbered}
    return numbered | {call for call in found if call[1] not in ways}


def _chosen(report: DivergenceReport, calls: set[Call]) -> list[Call]:
    """Return the calls to draw, the one to begin with first."""
    order = sorted(calls, key=_in_order)
    ranked = sorted(report.findings, key=lambda each: each.verdict not in GUILTY)
    wanted = [(each.position, each.direction) for each in ranked]
    wanted += [*order[:1], *order[-1:], *order]
    return list(dict.fromkeys(call for call in wanted if call in calls))[:MAX_CALLS]


def _kept(sizes: Sequence[tuple[Call, int]]) -> list[Call]:
    """Return the calls that have a curve and fit together on a page."""
    kept, room = [], MAX_ALL_POINTS
    for call, size in sizes:
        if 1 < size <= room:
            kept.append(call)
            room -= size
    return kept


def _rows(table: VerdictTable, chosen: set[Call]) -> dict[Call, list[int]]:
    """Return the rows of each call that are parts of the model, in the order of execution."""
    rows: dict[Call, list[int]] = defaultdict(list)
    calls = zip(table.columns["position"], table.columns["direction"], strict=True)
    for row, call in enumerate(calls):
        if call in chosen:
            rows[call].append(row)
        elif call[0] is None:
            for each in chosen:
                if each[1] == call[1]:
                    rows[each].append(row)
    return defaultdict(list, {call: list(_parts(table, own)) for call, own in rows.items()})


def _parts(table: VerdictTable, rows: Sequence[int]) -> Iterator[int]:
    """Leave out modules that stand for their parts, unless they are guilty, and empty rows."""
    names, ops, verdicts = (table.columns[each] for each in ("name", "op", "verdict"))
    local, propagated = table.columns["local_error"], table.columns["propagated_error"]
    parts = set(parts_of([str(names[row]) for row in rows], [ops[row] for row in rows]))
    for place, row in enumerate(rows):
        guilty = verdicts[row] in GUILTY
        known = local[row] is not None or propagated[row] is not None
        if guilty or (place in parts and known):
            yield row


def _points(table: VerdictTable, rows: Sequence[int]) -> list[int]:
    verdicts = table.columns["verdict"]
    local, propagated = table.columns["local_error"], table.columns["propagated_error"]

    def weight(row: int) -> tuple[bool, float, float]:
        return verdicts[row] in GUILTY, size_of(local[row]), size_of(propagated[row])

    return [max(rows[a:b], key=weight) for a, b in groups_of(len(rows), MAX_POINTS)]
