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
VERSION = 2
_STYLES = {Direction.SLOWER: "bold red", Direction.FASTER: "green", Direction.UNCHANGED: ""}
_CALLS = 0.01
"""Relative difference of entries per step from which it is mentioned."""
_MOST_NAMED = 5
"""Rows that a gate's answer names; the table has the rest."""
_FACTOR = 10.0
"""From here on a ratio is said as a factor: nobody reads a percentage of five digits."""
_UNSEEN_NS = 1.0
"""Below this a base's figure is what a clock made of nothing, and so is a ratio to it."""


def visible_size(changes: Changes) -> str:
    """Return how large a change had to be to be shown, and what that rests on."""
    sides = f"{_runs(changes.runs)} against {changes.base_runs}"
    sizes = changes.visible
    if sizes is None:
        return f"{sides}: nothing was timed on both sides, so no change can be seen"
    least, middle, most = map(relative, sizes)
    told = f"{sides}: changes below {middle} cannot be seen"
    if least != most:
        told += f" in the median row ({least} in the steadiest, {most} in the noisiest)"
    if changes.enough:
        return told
    if max(changes.runs, changes.base_runs) == 1:
        told += (
            ", going by the spread within the runs alone; how much one run differs from the next is"
            " unknown from one run a side, and may hide far larger ones"
        )
    return (
        f"{told}. No change is shown with fewer than {LEAST_RUNS} runs a side: record the same work"
        " again, each time in a process of its own, best in turn with the base"
    )


def _runs(count: int) -> str:
    return f"{count} run" if count == 1 else f"{count} runs"


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
    console.print(look.text(headline(changes), "bold"))
    console.print(look.text(visible_size(changes), "" if changes.enough else "yellow"))
    if changes.rows:
        console.print()
        console.print(_table(changes, look, console.width, most))
    for line in _notes(changes, look, circumstances):
        console.print(look.text(f"· {line}"))
    if limit is not None and changes.rows:
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
    return f"{_runs(changes.runs)} against {changes.base_runs}: of {len(bricks)} {what} {said}"


def _table(changes: Changes, look: Look, width: int, most: int | None) -> Table:
    phases = len({row.phase for row in changes.rows}) > 1
    columns: list[Column[Change]] = [
        Column("Brick", 0, lambda row: row.name, left=True),
        Column("Phase", 4, lambda row: row.phase if phases else "", left=True),
        Column("Base", 5, lambda row: look.time(row.base_ns)),
        Column("Now", 3, lambda row: look.time(row.ns)),
        Column("Change", 0, _estimate),
        Column("Interval", 2, _interval),
        Column("Hidden below", 6, lambda row: relative(row.visible)),
        Column("Of time", 6, lambda row: percent(row.share) if row.kind is Kind.BRICK else ""),
        Column("Noise", 7, lambda row: "" if row.noise is None else percent(row.noise)),
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
    """Return a relative change as a percentage with its sign, or as a factor."""
    ratio = 1.0 + change
    if ratio >= _FACTOR:
        return f"× {_three_digits(ratio)}"
    if 0.0 < ratio <= 1.0 / _FACTOR:
        return f"÷ {_three_digits(1.0 / ratio)}"
    return f"{100 * change:+.1f} %"


def relative(size: float) -> str:
    """Return the size of a change, of two digits below 10 %, without a sign."""
    if 1.0 + size >= _FACTOR:
        return signed(size)
    return f"{100 * size:.1f} %" if size < 0.0995 else f"{100 * size:.0f} %"


def _three_digits(value: float) -> str:
    if value >= 1e12:
        return f"{value:.2e}"
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.1f}"


def _estimate(row: Change) -> str:
    return "new" if row.base_ns < _UNSEEN_NS <= row.ns else signed(row.change)


def _interval(row: Change) -> str:
    if row.low is None or row.high is None or row.base_ns < _UNSEEN_NS:
        return ""
    return f"{signed(row.low)} to {signed(row.high)}"


def _notes(changes: Changes, look: Look, circumstances: Sequence[str]) -> Iterator[str]:
    if changes.enough and changes.rows:
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
        ("In too few runs of a side", changes.too_few),
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
    """Return the gate's answer: what is over the limit, and what only the estimate says is."""
    over, unsure = changes.over(limit), changes.unsure(limit)
    allowed = percent(limit)
    lines = []
    if over:
        worst = _listed([_worded(row, look) for row in over])
        lines.append(look.text(f"FAILED   slower by more than {allowed}: {worst}", "bold red"))
    if unsure:
        doubted = _listed([_doubted(row, look, enough=changes.enough) for row in unsure])
        said = f"unsure   estimated above {allowed}, but chance is not excluded: {doubted}; "
        said += (
            "more repeats or a quieter machine would tell"
            if changes.enough
            else f"record at least {LEAST_RUNS} runs a side"
        )
        lines.append(look.text(said, "yellow"))
    if not lines:
        lines.append(look.text(f"ok       no estimate is above {allowed}", "green"))
    return Group(*lines)


def _listed(rows: Sequence[str]) -> str:
    rest = len(rows) - _MOST_NAMED
    return ", ".join(rows[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _doubted(row: Change, look: Look, *, enough: bool) -> str:
    hidden = f", hidden below {relative(row.visible)}" if enough else ""
    return f"{_worded(row, look)}{hidden}"


def _worded(row: Change, look: Look) -> str:
    """Return a row and its change; beside a base too small for a ratio, both durations."""
    if row.base_ns < _UNSEEN_NS <= row.ns:
        base = look.time(row.base_ns)
        return f"{_named(row)} new: {look.time(row.ns)} where the base had {base}"
    factor = f" ({look.time(row.base_ns)} to {look.time(row.ns)})" if row.change >= 9.0 else ""
    return f"{_named(row)} {signed(row.change)}{factor}"


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
        "enough_runs": changes.enough,
        "visible": _sizes(changes),
        "fail_over": limit,
        "rows": [
            {**asdict(row), "direction": str(row.direction), "over": _over(row, limit)}
            for row in changes.rows
        ],
        "unsure": None if limit is None else len(changes.unsure(limit)),
        "common_change": changes.common,
        "only_here": [key._asdict() for key in changes.only_here],
        "only_base": [key._asdict() for key in changes.only_base],
        "too_few": [key._asdict() for key in changes.too_few],
        "circumstances": list(circumstances),
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)


def _over(row: Change, limit: float | None) -> bool | None:
    return None if limit is None else row.exceeds(limit)


def _sizes(changes: Changes) -> dict[str, float] | None:
    sizes = changes.visible
    return None if sizes is None else dict(zip(("least", "median", "most"), sizes, strict=True))


def _status(changes: Changes, limit: float | None) -> str:
    if not changes.rows:
        return "nothing compared"
    if limit is None:
        return "compared"
    if changes.over(limit):
        return "slower"
    return "unsure" if changes.unsure(limit) else "ok"
