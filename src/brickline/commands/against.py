"""The part of ``brickline report`` that holds runs against a base: see `regressions`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import typer
from rich.console import Console

from brickline.commands.streams import print_document
from brickline.comparison.conditions import differing_circumstances
from brickline.errors import UsageError
from brickline.profile import profile_from_run
from brickline.regressions import changes_between
from brickline.report.against import changes_json, print_changes
from brickline.run.failures import problem_text
from brickline.run_paths import find_runs
from brickline.runs import Run


def show_changes(
    given: Sequence[Path],
    against: Sequence[Path],
    *,
    fail_over: str | None,
    json: bool,
    limit: int | None,
) -> None:
    """Print what became slower or faster; exit with 1 past the limit, 3 where it may be chance."""
    allowed = None if fail_over is None else relative_limit(fail_over)
    runs, base = ([Run.open(path) for path in find_runs(side)] for side in (given, against))
    _refuse_copies([*runs, *base])
    changes = changes_between(*([profile_from_run(run) for run in side] for side in (runs, base)))
    differing = (*_unfinished([*runs, *base]), *differing_circumstances(runs[0], base[0]))
    if json:
        print_document(f"{changes_json(changes, limit=allowed, circumstances=differing)}\n")
    else:
        print_changes(changes, Console(), limit=allowed, most=limit, circumstances=differing)
    if allowed is None:
        return
    if not changes.rows:
        raise UsageError(
            "expected bricks or steps that were timed on both sides, got none, so --fail-over has"
            " nothing to judge; record the same work on both"
        )
    if changes.over(allowed):
        raise typer.Exit(1)
    if changes.unsure(allowed):
        raise typer.Exit(3)


def relative_limit(text: str) -> float:
    """Return what ``5%`` stands for, 0.05.

    Raises:
        UsageError: if it is no percentage.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if found is None:
        raise UsageError(f"--fail-over: expected a percentage such as 5%, got {text!r}")
    return float(found[1]) / 100.0


def _refuse_copies(runs: Sequence[Run]) -> None:
    """A copy of a run is no repeat of it."""
    seen: dict[str, Path] = {}
    for run in runs:
        other = seen.setdefault(str(run.manifest["id"]), run.path)
        if other != run.path:
            raise UsageError(
                f"expected runs that were recorded one by one, got the same one twice: {other} and"
                f" {run.path}; leave one out"
            )
    if len({run.path for run in runs}) < len(runs):
        raise UsageError("expected different runs on both sides, got one of them twice")


def _unfinished(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.is_live:
            yield f"{run.path} is still being recorded"
        yield from (f"{run.path}: {problem_text(problem, 'not read')}" for problem in run.problems)
