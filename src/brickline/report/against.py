"""What became slower or faster, as text for a terminal and as JSON.

The judgement is that of `regressions`; here it is only worded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.table import Table

from brickline.regressions import LEAST_RUNS, Change, Changes, Direction, Key, Kind
from brickline.report.figures import Column, Look, fitting_table, percent

SCHEMA = "brickline-changes"
VERSION = 1
_STYLES = {Direction.SLOWER: "bold red", Direction.FASTER: "green", Direction.UNCHANGED: ""}
_CALLS = 0.01
"""Relative difference of entries per step from which it is mentioned."""


def not_enough(changes: Changes) -> str:
    """Return the answer where a side has too few runs."""
    return (
        f"not enough repeats: expected at least {LEAST_RUNS} runs a side, got {changes.runs}"
        f" against {changes.base_runs}; record the same work again, each time in a process of its"
        " own, best in turn with the base"
    )


def print_changes(
    changes: Changes,
    console: Console,
    *,
    limit: float | None = None,
    most: int | None = None,
    circumstances: Sequence[str] = (),
) -> None:
    """Print the answer first, then every row, then what is to be known about them.

    Args:
        changes: what to show.
        console: where to.
        limit: the relative slowdown that fails, where one is asked for.
        most: rows at most; all of them when None.
        circumstances: how the two sides differ.
    """
    look = Look.of(console)
    if not changes.enough:
        console.print(look.text(not_enough(changes), "yellow"))
        return
    console.print(look.text(headline(changes), "bold"))
    if changes.rows:
        console.print()
        console.print(_table(changes, look, console.width, most))
    for line in _notes(changes, look, circumstances):
        console.print(look.text(f"· {line}"))
    if limit is not None:
        console.print()
        console.print(_verdict(changes, look, limit))


def headline(changes: Changes) -> str:
    """Return how many bricks became slower and faster, and in how many runs."""
    bricks = [row for row in changes.rows if row.kind is Kind.BRICK]
    slower = sum(row.direction is Direction.SLOWER for row in bricks)
    faster = sum(row.direction is Direction.FASTER for row in bricks)
    said = (
        f"{slower} slower, {faster} faster, {len(bricks) - slower - faster} without a change shown"
    )
    what = "bricks, each phase apart," if len({row.phase for row in bricks}) > 1 else "bricks"
    return f"{changes.runs} runs against {changes.base_runs}: of {len(bricks)} {what} {said}"


def _table(changes: Changes, look: Look, width: int, most: int | None) -> Table:
    phases = len({row.phase for row in changes.rows}) > 1
    columns: list[Column[Change]] = [
        Column("Brick", 0, lambda row: row.name, left=True),
        Column("Phase", 4, lambda row: row.phase if phases else "", left=True),
        Column("Base", 5, lambda row: look.time(row.base_ns)),
        Column("Now", 3, lambda row: look.time(row.ns)),
        Column("Change", 0, lambda row: signed(row.change)),
        Column("Interval", 2, lambda row: f"{signed(row.low)} to {signed(row.high)}"),
        Column("Of time", 6, lambda row: percent(row.share) if row.kind is Kind.BRICK else ""),
        Column("Noise", 7, lambda row: percent(row.noise)),
        Column(
            "", 1, lambda row: look.text(_word(row.direction), _STYLES[row.direction]), left=True
        ),
    ]
    shown = changes.rows[:most]
    hidden = len(changes.rows) - len(shown)
    title = f"Typical time of one entry (the first {len(shown)} of {len(changes.rows)})"
    return fitting_table(
        look, title if hidden else "Typical time of one entry", columns, shown, width
    )


def _word(direction: Direction) -> str:
    return "" if direction is Direction.UNCHANGED else str(direction)


def signed(change: float) -> str:
    """Return a relative change as a percentage with its sign."""
    return f"{100 * change:+.1f} %"


def _notes(changes: Changes, look: Look, circumstances: Sequence[str]) -> Iterator[str]:
    yield (
        f"All {len(changes.rows)} intervals hold at once with {100 * changes.confidence:g} %"
        " confidence; noise is what runs of one side differ by."
    )
    common = changes.common
    if common is not None:
        yield (
            f"Nearly every brick moved by about {signed(common)}: the machine may have changed"
            " rather than the code. Record both sides in turn."
        )
    for row in changes.rows:
        if row.per_step and row.base_per_step and _calls_differ(row):
            yield (
                f"{_named(row)} is entered {row.per_step:.4g} times a step, in the base"
                f" {row.base_per_step:.4g} times."
            )
    for title, keys in (
        ("Only in these runs", changes.only_here),
        ("Only in the base", changes.only_base),
        (f"In fewer than {LEAST_RUNS} runs of a side", changes.too_few),
    ):
        if keys:
            yield f"{title}: {', '.join(_named(key) for key in keys)}."
    for line in circumstances:
        yield f"The sides differ: {line}"


def _calls_differ(row: Change) -> bool:
    ours, theirs = row.per_step or 0.0, row.base_per_step or 0.0
    return abs(ours - theirs) > _CALLS * theirs


def _named(row: Change | Key) -> str:
    return f"{row.name} ({row.phase})" if row.phase else row.name


def _verdict(changes: Changes, look: Look, limit: float) -> RenderableType:
    """Return the gate's answer, and how many rows it could not answer for."""
    over, unsure = changes.over(limit), changes.open_past(limit)
    allowed = percent(limit)
    answer = look.text(f"ok       nothing is shown to be slower by more than {allowed}", "green")
    if over:
        worst = ", ".join(f"{_named(row)} {signed(row.change)}" for row in over)
        answer = look.text(f"FAILED   slower by more than {allowed}: {worst}", "bold red")
    if not unsure:
        return answer
    said = (
        f"unsure   {len(unsure)} of {len(changes.rows)} rows may be slower by more than {allowed},"
        " as far as the noise shows; more repeats or a quieter machine would tell"
    )
    return Group(answer, look.text(said, "yellow"))


def changes_json(
    changes: Changes, *, limit: float | None = None, circumstances: Sequence[str] = ()
) -> str:
    """Return one JSON document; changes are relative, 0.05 being 5 % more time."""
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "status": _status(changes, limit),
        "runs": changes.runs,
        "base_runs": changes.base_runs,
        "confidence": changes.confidence,
        "fail_over": limit,
        "rows": [
            {**asdict(row), "direction": str(row.direction), "over": _over(row, limit)}
            for row in changes.rows
        ],
        "unsure": None if limit is None else len(changes.open_past(limit)),
        "common_change": changes.common,
        "only_here": [key._asdict() for key in changes.only_here],
        "only_base": [key._asdict() for key in changes.only_base],
        "too_few": [key._asdict() for key in changes.too_few],
        "circumstances": list(circumstances),
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)


def _over(row: Change, limit: float | None) -> bool | None:
    return None if limit is None else row.exceeds(limit)


def _status(changes: Changes, limit: float | None) -> str:
    if not changes.enough:
        return "not enough repeats"
    if limit is not None and changes.over(limit):
        return "slower"
    return "ok" if limit is not None else "compared"
