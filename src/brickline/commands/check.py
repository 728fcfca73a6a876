"""``brickline check``: does this model compute what it should, and if not, which op is wrong?"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from brickline.commands.named import drive_of, inputs_of, load_named, model_of
from brickline.commands.streams import print_document, say
from brickline.errors import UsageError
from brickline.report.divergence import print_divergence
from brickline.report.html.divergence_page import write_divergence_page
from brickline.report.html.page import refuse_taken_page
from brickline.verdict import DivergenceReport, apply_accepted, load_accepted
from brickline.verdict import write_accept as write_proposal
from brickline.whole_files import refuse_taken_file

SEED = 0
"""Seeds torch before each factory of the command line, so that two sides draw the same weights."""


def check(
    candidate: Annotated[
        str | None,
        typer.Argument(metavar="CANDIDATE", help="file.py:name or package.module:name."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="REFERENCE", help="What it should compute; without, each op's own float64."
        ),
    ] = None,
    drive: Annotated[
        str | None, typer.Option(metavar="NAME", help="A function that runs the model it is given.")
    ] = None,
    inputs: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A tuple, or a function; default CANDIDATE's `inputs`."),
    ] = None,
    accept: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Intended differences, in TOML.")
    ] = None,
    write_accept: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Propose such a file from what is found.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Keep the report.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one page that opens offline in a browser."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    runs: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="CANDIDATE REFERENCE", help="Re-execute two runs that hold tensors."),
    ] = None,
    repro_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Where repros go.")] = None,
) -> None:
    """Find the op that computes something else than it should; exit 0, 1, 3 as in the docs.

    Example: brickline check port.py:model --reference original.py:model
    """
    _check_usage(candidate, runs, reference, drive, inputs)
    for path in (out, write_accept):
        if path is not None:
            refuse_taken_file(path, force=force)
    if html is not None:
        refuse_taken_page(html, force=force)
    load_accepted(accept)  # a mistake in it is said before the work
    _need_torch()
    if runs is not None:
        found = apply_accepted(_check_runs(*runs), accept)
    else:
        assert candidate is not None
        found = _check_models(candidate, reference, drive, inputs, accept, repro_dir)
    _show(found, json=json)
    if out is not None:
        say(f"wrote {found.save(out, overwrite=force)}")
    if html is not None:
        page = write_divergence_page(found, html, force=force)
        say(f"wrote {page}")
    if write_accept is not None:
        _propose(found, write_accept, overwrite=force)
    raise typer.Exit(found.exit_status)


def _check_usage(
    candidate: str | None, runs: tuple[Path, Path] | None, *options: str | None
) -> None:
    if (candidate is None) == (runs is None):
        raise UsageError(
            "expected either CANDIDATE or --runs CANDIDATE REFERENCE; for example: "
            "brickline check port.py:model --reference original.py:model"
        )
    if runs is not None and any(options):
        raise UsageError("--runs re-executes what was recorded: it takes no other model or inputs")
    _, drive, inputs = options
    if drive is not None and inputs is not None:
        raise UsageError("expected one of --drive and --inputs, got both; a drive makes its own")


def _need_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UsageError(
            "check needs PyTorch, which is not installed: pip install 'brickline[torch]'"
        )


def _seed() -> None:
    import torch

    torch.manual_seed(SEED)


def _check_models(
    candidate: str,
    reference: str | None,
    drive: str | None,
    inputs: str | None,
    accept: Path | None,
    repro_dir: Path | None,
) -> DivergenceReport:
    named = load_named(candidate, "CANDIDATE")
    model = model_of(named, "CANDIDATE", _seed)
    arguments: tuple[Any, ...] = ()
    call: dict[str, Any] = {"accept": accept}
    if reference is not None:
        held_to = load_named(reference, "--reference")
        call["reference"] = model_of(held_to, "--reference", _seed)
    if drive is not None:
        call["drive"] = drive_of(load_named(drive, "--drive"))
    else:
        arguments, call["kwargs"] = inputs_of(inputs, named, _seed)
    if repro_dir is not None:
        call["repro"] = repro_dir
    from brickline.checker import check as check_models

    with _progress() as progress:
        found = check_models(model, *arguments, progress=progress, **call)
    return replace(found, candidate=candidate, reference=reference or found.reference)


def _check_runs(candidate: Path, reference: Path) -> DivergenceReport:
    from brickline.checking.replay import check_runs

    return check_runs(candidate, reference)


@contextmanager
def _progress() -> Iterator[Callable[[int, int | None, str], None]]:
    """Show what is being done, on standard error; nothing stays of it."""
    columns = (
        TextColumn("checking"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )
    console = Console(stderr=True)
    quiet = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as shown:
        task = shown.add_task("", total=None)

        def report(done: int, total: int | None, text: str) -> None:
            shown.update(task, completed=done, total=total, description=text)

        yield report


def _show(found: DivergenceReport, *, json: bool) -> None:
    if json:
        print_document(f"{found.to_json()}\n")
    else:
        print_divergence(found, Console())


def _propose(found: DivergenceReport, path: Path, *, overwrite: bool) -> None:
    proposed = write_proposal(found, path, overwrite=overwrite)
    say(f"wrote {proposed}; give each entry a reason before using it")
