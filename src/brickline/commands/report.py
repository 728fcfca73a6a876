"""``brickline report``: a run as a table, JSON, CSV or an HTML page, held to budgets and checks.

A report that `check` or `compare` kept, or that of a megakernel, is shown as it was, and several
runs are held `--against` others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from brickline.budgets import BudgetResult, check_budgets, load_budgets
from brickline.commands.against import show_changes
from brickline.commands.streams import print_document, say
from brickline.documents import stated_format
from brickline.errors import UsageError
from brickline.megakernel_files import DOCUMENT
from brickline.megakernel_report import MegakernelReport
from brickline.profile import profile_from_run
from brickline.profile_checks import ProfileFinding
from brickline.report.as_csv import profile_csv
from brickline.report.as_json import profile_json
from brickline.report.divergence import print_divergence
from brickline.report.figures import Look
from brickline.report.html.divergence_page import write_divergence_page
from brickline.report.html.megakernel_page import write_megakernel_page
from brickline.report.html.page import refuse_taken_page, write_page
from brickline.report.html.profile_page import profile_page
from brickline.report.megakernel import print_megakernel
from brickline.report.text import print_profile, render_budgets, render_findings
from brickline.run.failures import problem_text
from brickline.run.twin_rows import texts_of_run
from brickline.runs import Run
from brickline.verdict import DivergenceReport

_OTHER_FILES = {
    "": "an empty file",
    "brickline-replay": "a replay log: brickline plan replay runs it again",
    "brickline plan": "a plan: brickline plan explain shows it",
    "brickline-graph": "a graph",
}
"""What else may be given by mistake, by what a file says that it is."""


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="The run, or kept report, to show; with --against several repeats.",
            metavar="RUN|FILE...",
        ),
    ],
    against: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="BASE",
            help="A run, or directory of runs, of the same work to hold these against; repeatable.",
        ),
    ] = None,
    fail_over: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="With --against: exit 1 past this slowdown, 3 where it may be chance.",
        ),
    ] = None,
    budget: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Budgets in TOML; exit 1 when one is exceeded."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print one CSV table.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one page that opens offline in a browser."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file at --html.")] = False,
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
    """Show where the time of a run went, or with --against what became slower or faster.

    Example: brickline report decode.brick --budget budgets.toml
    """
    if against:
        if budget is not None or csv or html is not None or validate or repeat:
            raise UsageError("--against goes with --fail-over, --json and --limit; ask for one")
        show_changes(runs, against, fail_over=fail_over, json=json, limit=limit)
        return
    if fail_over is not None:
        raise UsageError("--fail-over goes with --against BASE: slower than what?")
    if len(runs) > 1:
        raise UsageError(f"expected one run, got {len(runs)}; several go with --against BASE")
    run = runs[0]
    if json + csv + (html is not None) > 1:
        raise UsageError("expected one of --json, --csv and --html, got several; ask for one")
    if html is not None:
        refuse_taken_page(html, force=force)
    if run.is_file():
        if budget is not None or csv or validate or repeat:
            raise UsageError(f"{run} is no run: it is shown as text, or with --json or --html")
        found = stated_format(run)
        if found in _OTHER_FILES:
            raise UsageError(
                f"{run} is {_OTHER_FILES[found]}; expected a run, which is a directory, or a "
                "report that check, compare or MegakernelReport.save kept"
            )
        show = _show_megakernel if found == DOCUMENT.format else _show_divergence
        show(run, json=json, html=html, force=force)
        return
    opened = Run.open(run)
    if opened.is_live:
        say("the run is still being recorded; this is what it held now")
    if html is None:
        opened.publish()
    profile = profile_from_run(opened)
    results = check_budgets(profile, load_budgets(budget)) if budget is not None else None
    repeats = [profile_from_run(Run.open(path)) for path in repeat or ()]
    findings = profile.validate(repeats) if validate else None
    if json:
        print_document(f"{profile_json(profile, findings=findings, budgets=results)}\n")
    elif csv:
        for problem in profile.problems:
            say(problem_text(problem, "left out"))
        print_document(profile_csv(profile))
    elif html is not None:
        text = profile_page(profile, run=opened, findings=findings, budgets=results)
        print_document(f"The page is in {write_page(text, html, force=force)}\n")
    else:
        print_profile(profile, Console(), limit=limit)
        for text in texts_of_run((opened.manifest, *opened.joined)):
            print_document(f"{text[0].upper()}{text[1:]}.\n")
    _print_gates(findings, results, to_stderr=json or csv)
    failed = any(not result for result in results or ())
    if failed or any(each.severity == "error" for each in findings or ()):
        raise typer.Exit(1)


def _show_divergence(path: Path, *, json: bool, html: Path | None, force: bool) -> None:
    found = DivergenceReport.load(path)
    if json:
        print_document(f"{found.to_json()}\n")
    elif html is not None:
        print_document(f"The page is in {write_divergence_page(found, html, force=force)}\n")
    else:
        print_divergence(found, Console())


def _show_megakernel(path: Path, *, json: bool, html: Path | None, force: bool) -> None:
    found = MegakernelReport.load(path)
    if json:
        print_document(found.to_json())
    elif html is not None:
        print_document(f"The page is in {write_megakernel_page(found, html, force=force)}\n")
    else:
        print_megakernel(found, Console())


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
