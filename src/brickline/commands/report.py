"""``brickline report``: a run as a table, JSON or CSV, held to budgets and checks.

A report that `check` or `compare` kept is shown as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from brickline.budgets import BudgetResult, check_budgets, load_budgets
from brickline.errors import UsageError
from brickline.profile import profile_from_run
from brickline.profile_checks import ProfileFinding
from brickline.report.as_csv import profile_csv
from brickline.report.as_json import profile_json
from brickline.report.divergence import print_divergence
from brickline.report.figures import Look
from brickline.report.text import print_profile, render_budgets, render_findings
from brickline.runs import Run
from brickline.verdicts import DivergenceReport


def report(
    run: Annotated[
        Path, typer.Argument(help="The run, or kept report, to show.", metavar="RUN|FILE")
    ],
    budget: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Budgets in TOML; exit 1 when one is exceeded."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print one CSV table.")] = False,
    validate: Annotated[
        bool,
        typer.Option("--validate", help="Check that the figures hold together; exit 1 on errors."),
    ] = False,
    repeat: Annotated[
        list[Path] | None,
        typer.Option(metavar="RUN", help="Another run of the same work, for --validate."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Rows of the brick table; default all.")
    ] = None,
) -> None:
    """Show where the time of a run went.

    Example: brickline report decode.brick --budget budgets.toml
    """
    if json and csv:
        raise UsageError("expected one of --json and --csv, got both; ask for one at a time")
    if run.is_file():
        if budget is not None or csv or validate or repeat:
            raise UsageError(f"{run} is no run: it is shown as text, or with --json")
        _show_divergence(run, json=json)
        return
    opened = Run.open(run)
    opened.publish()
    profile = profile_from_run(opened)
    results = check_budgets(profile, load_budgets(budget)) if budget is not None else None
    repeats = [profile_from_run(Run.open(path)) for path in repeat or ()]
    findings = profile.validate(repeats) if validate else None
    if json:
        typer.echo(profile_json(profile, findings=findings, budgets=results))
    elif csv:
        typer.echo(profile_csv(profile), nl=False)
    else:
        print_profile(profile, Console(), limit=limit)
    _print_gates(findings, results, to_stderr=json or csv)
    failed = any(not result for result in results or ())
    if failed or any(each.severity == "error" for each in findings or ()):
        raise typer.Exit(1)


def _show_divergence(path: Path, *, json: bool) -> None:
    found = DivergenceReport.load(path)
    if json:
        typer.echo(found.to_json())
    else:
        print_divergence(found, Console())


def _print_gates(
    findings: list[ProfileFinding] | None, results: list[BudgetResult] | None, *, to_stderr: bool
) -> None:
    """Print checks and budgets, beside a document on standard output where there is one."""
    console = Console(stderr=to_stderr)
    look = Look.of(console)
    if findings is not None:
        console.print()
        console.print(render_findings(findings, look))
    if results is not None:
        console.print()
        console.print(render_budgets(results, look))
