"""``brickline compare``: two recorded runs, and the first launch that rounding does not explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from brickline.commands.streams import print_document, say
from brickline.comparison.comparing import compare as compare_runs
from brickline.report.divergence import print_divergence
from brickline.report.html.divergence_page import write_divergence_page
from brickline.report.html.page import refuse_taken_page
from brickline.verdict import apply_accepted, load_accepted
from brickline.whole_files import refuse_taken_file


def compare(
    candidate: Annotated[Path, typer.Argument(help="The run in question.", metavar="CANDIDATE")],
    reference: Annotated[
        Path, typer.Argument(help="The run it is held against.", metavar="REFERENCE")
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", metavar="FILE", help="Keep the report.")
    ] = None,
    accept: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Intended differences, in TOML.")
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one page that opens offline in a browser."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Say where two runs part; exit 0 matched, 1 diverged, 3 inconclusive.

    Example: brickline compare cuda.brick cpu.brick
    """
    if out is not None:
        refuse_taken_file(out, force=force)
    if html is not None:
        refuse_taken_page(html, force=force)
    load_accepted(accept)  # a mistake in it is said before the work
    found = apply_accepted(compare_runs(candidate, reference), accept)
    if json:
        print_document(f"{found.to_json()}\n")
    else:
        print_divergence(found, Console())
    if out is not None:
        say(f"wrote {found.save(out, overwrite=force)}")
    if html is not None:
        page = write_divergence_page(found, html, force=force)
        say(f"wrote {page}")
    raise typer.Exit(found.exit_status)
