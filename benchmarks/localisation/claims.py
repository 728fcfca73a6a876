"""The scores as claims, as ``brickline bench`` takes them: figures that must not exceed a target.

Knows the targets; how a score comes about is the matter of `score`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from localisation.cases import cases
from localisation.rules import RULES
from localisation.score import SCRIPT, Row, score

NOT_NAMED = (
    # Claim, groups, most percent that may go unnamed.
    ("same code", ("same code", "re-ordered"), 2.0),
    ("different code", ("different code",), 10.0),
    ("from some decode step on", ("decode",), 10.0),
    ("two faults, the one that matters first", ("two faults",), 10.0),
    ("bf16 and outlier channels", ("bf16 and outliers",), 10.0),
    ("backward", ("backward",), 10.0),
    ("callables and other structures", ("callables and structures",), 10.0),
    ("models of transformers", ("transformers",), 10.0),
    ("held out at first, mended since", ("held out",), 10.0),
    ("unseen decode loops and callables, mended since", ("unseen drives",), 10.0),
    (
        "unseen ports, mended since",
        ("unseen ports", "unseen again", "unseen third", "unseen fourth", "unseen fifth"),
        10.0,
    ),
)


def claims(quick: bool) -> list[dict[str, Any]]:
    """Score every tool and return what is claimed of brickline, with the peers' figures."""
    torch.set_num_threads(1)
    tools = ["check", *(() if quick else ("compare",)), SCRIPT, *RULES]
    rows = list(score(list(cases())[:: 60 if quick else 1], tools))
    out = [_not_named(name, groups, target, rows, tools) for name, groups, target in NOT_NAMED]
    out.append(_counted("check: faults of which a wrong module was named", _wrong, rows, tools))
    out.append(_counted("check: harmless variants with a culprit", _false, rows, tools))
    if not quick:
        out += _of_compare(rows)
    return out


def _not_named(
    name: str, groups: tuple[str, ...], target: float, rows: list[Row], tools: list[str]
) -> dict[str, Any]:
    chosen = [row for row in rows if row.group in groups]
    figures = {tool: _percent(chosen, tool) for tool in tools}
    count = sum(row.observable for row in chosen if row.tool == "check")
    return _claim(
        f"check: observable faults not named, {name}", figures, "%", target, f"{count} faults"
    )


def _percent(rows: Iterable[Row], tool: str) -> float | None:
    seen = [row.outcome for row in rows if row.tool == tool and row.observable]
    return 100 * sum(each != "named" for each in seen) / len(seen) if seen else None


def _wrong(row: Row) -> bool:
    return row.expected is not None and (row.outcome == "wrong" or bool(row.extra))


def _false(row: Row) -> bool:
    return row.expected is None and row.outcome == "wrong"


def _counted(name: str, bad: Any, rows: list[Row], tools: list[str]) -> dict[str, Any]:
    figures = {tool: float(sum(bad(row) for row in rows if row.tool == tool)) for tool in tools}
    return _claim(name, figures, "cases", 0.0, "")


def _of_compare(rows: list[Row]) -> list[dict[str, Any]]:
    ours = [row for row in rows if row.tool == "compare"]
    missed = {"check": _percent(ours, "compare")}
    wrong = {"check": 100 * sum(row.outcome == "wrong" for row in ours) / max(len(ours), 1)}
    return [
        _claim("compare: observable faults not named, from runs alone", missed, "%", 15.0, ""),
        _claim("compare: cases with a wrong suspect", wrong, "%", 2.0, f"{len(ours)} cases"),
    ]


def _claim(
    name: str, figures: dict[str, float | None], unit: str, target: float, note: str
) -> dict[str, Any]:
    figure = figures.pop("check")
    return {
        "name": name,
        "figure": figure,
        "unit": unit,
        "target": target,
        "met": None if figure is None else figure <= target,
        "peers": {tool: value for tool, value in figures.items() if tool != "compare"},
        "note": note,
    }
