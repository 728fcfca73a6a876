"""The table of verdicts as a page holds it: rows by column, few of a million, the rest counted.

Owns which rows a page keeps and how a row is packed. `Texts` gives each name once; a row refers to
it by number. Knows nothing of how rows are drawn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.report.divergence import shorten
from brickline.report.figures import Look
from brickline.report.html.page import MAX_NAME, packed
from brickline.verdict import Verdict, VerdictTable

MAX_ROWS = 20_000
"""Rows of the table of verdicts."""
MAX_GROUPS = 400
"""Lines of the count of what is left out."""
MAX_TEXT_CHARACTERS = 1_000_000
"""Characters of all names together; longer ones are cut in their middle until they fit."""
SHORTEST = 40
"""Characters that a name always keeps."""
QUIET = (Verdict.IDENTICAL, Verdict.ROUNDING)
"""Verdicts that are counted and never listed."""
ORDER = (
    Verdict.CULPRIT,
    Verdict.NONFINITE_ORIGIN,
    Verdict.SUSPECT,
    Verdict.STRUCTURAL,
    Verdict.NONDETERMINISTIC,
    Verdict.UNKNOWN,
    Verdict.UNOBSERVABLE,
    Verdict.WATCH,
    Verdict.AMPLIFIED,
    Verdict.TIE,
    Verdict.ACCEPTED,
    Verdict.PROPAGATED,
    *QUIET,
)
"""What a reader looks at first; also what is kept first where there is too much."""
NO_NUMBER = -(2**31)
"""Stands for None among whole numbers."""

_PLACE = {verdict: place for place, verdict in enumerate(ORDER)}
_NUMBERED = re.compile(r"(?<![^.\[])\d+(?![^.\]])")


class Texts:
    """Every name of a page once; number 0 is None."""

    def __init__(self) -> None:
        self._numbers: dict[str | None, int] = {None: 0}

    def numbers(self, values: Sequence[Any]) -> NDArray[Any]:
        """Return the numbers of a column, in the smallest type that holds them."""
        known = self._numbers
        found = [
            known.setdefault(value, len(known)) if value is None or type(value) is str else -1
            for value in values
        ]
        for at, number in enumerate(found):
            if number < 0:  # a report that somebody wrote by hand
                found[at] = known.setdefault(str(values[at]), len(known))
        largest = max(found, default=0)
        return np.array(found, np.uint16 if largest < 2**16 else np.uint32)

    def listed(self) -> tuple[list[str], int]:
        """Return all names but None, cut where they are too long, and how many were cut."""
        names = [name for name in self._numbers if name is not None]
        most = MAX_NAME
        while most > SHORTEST and sum(min(len(name), most) for name in names) > MAX_TEXT_CHARACTERS:
            most = max(SHORTEST, most * 3 // 4)
        return [shorten(name, most, Look()) for name in names], sum(len(x) > most for x in names)


def verdicts_view(table: VerdictTable, texts: Texts) -> dict[str, Any]:
    """Return how many of each verdict there are, the rows to list, and what is left out."""
    verdicts = table.columns["verdict"]
    counts = Counter(verdicts)
    places = np.fromiter((_PLACE[each] for each in verdicts), np.int8, len(verdicts))
    told = np.flatnonzero(places < len(ORDER) - len(QUIET))
    # Stable: within a verdict the order of execution is kept.
    ranked = told[np.argsort(places[told], kind="stable")]
    kept, rest = np.sort(ranked[:MAX_ROWS]), ranked[MAX_ROWS:]
    return {
        "order": [str(verdict) for verdict in ORDER],
        "counts": [counts.get(verdict, 0) for verdict in ORDER],
        "told": len(told),
        "most": MAX_ROWS,
        "rows": rows_packed(table, kept, texts),
        "left_out": left_out(table, rest),
    }


def rows_packed(table: VerdictTable, rows: NDArray[np.int64], texts: Texts) -> dict[str, Any]:
    """Return some rows of the table by column; see `rowsOf` in ``verdicts.js``."""
    at = rows.tolist()

    def column(name: str) -> list[Any]:
        values = table.columns[name]
        return [values[place] for place in at]

    out: dict[str, Any] = {"count": len(at), "row": packed(rows.astype(np.uint32))}
    for name in ("name", "reference_name", "brick", "op", "direction"):
        out[name] = packed(texts.numbers(column(name)))
    for name in ("layer_idx", "position", "ordinal"):
        out[name] = packed(_whole_numbers(column(name)))
    for name in ("z", "local_error", "propagated_error"):
        out[name] = packed(_figures(column(name)))
    places = [_PLACE[each] for each in column("verdict")]
    out["verdict"] = packed(np.array(places, np.uint8))
    return out


def _whole_numbers(values: Sequence[Any]) -> NDArray[Any]:
    """Return counts with `NO_NUMBER` for None, and for what is none."""
    return np.array(
        [
            value if isinstance(value, int) and abs(value) < -NO_NUMBER else NO_NUMBER
            for value in values
        ],
        np.int32,
    )


def _figures(values: Sequence[float | None]) -> NDArray[Any]:
    """Return figures as they are, None as NaN, and NaN as -inf, which no figure here can be."""
    found = np.array([-np.inf if value is None else value for value in values], np.float64)
    none, odd = np.isneginf(found), np.isnan(found)
    found[none], found[odd] = np.nan, -np.inf
    return found


def left_out(table: VerdictTable, rows: NDArray[np.int64]) -> dict[str, Any] | None:
    """Return how many rows are not listed, by brick and verdict, the most frequent first.

    A row without a brick is counted by its name, in which every number of a layer is a star.
    """
    if not len(rows):
        return None
    bricks, names, verdicts = (table.columns[each] for each in ("brick", "name", "verdict"))
    found = Counter((bricks[at], names[at], verdicts[at]) for at in rows.tolist())
    groups: Counter[tuple[str, str]] = Counter()
    for (brick, name, verdict), count in found.items():
        group = str(brick) if brick is not None else _NUMBERED.sub("*", str(name))
        groups[shorten(group, MAX_NAME, Look()), str(verdict)] += count
    shown = groups.most_common(MAX_GROUPS)
    return {
        "count": len(rows),
        "groups": [[brick, verdict, count] for (brick, verdict), count in shown],
        "more_groups": len(groups) - len(shown),
        "more": len(rows) - sum(count for _, count in shown),
    }
