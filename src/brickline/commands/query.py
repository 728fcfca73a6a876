"""``brickline query``: runs and kept reports, asked in SQL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from brickline.commands.streams import print_document, say
from brickline.errors import UsageError
from brickline.run_paths import find_runs


def query(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN... [SQL]",
            help="Runs, kept reports, patterns or directories of runs, and last the question."
            " Without one the views are listed.",
        ),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print one CSV table.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Rows that a terminal gets; default 1000.")
    ] = None,
) -> None:
    """Ask runs in SQL: bricks, traces, tensors, tiles, graph and verdicts, across many runs.

    Example: brickline query decode.brick "FROM brick_times ORDER BY total_ns DESC LIMIT 10"
    """
    if json and csv:
        raise UsageError("expected one of --json and --csv, got both; ask for one")
    # Late, because they load pyarrow, which no other command has to wait for.
    from brickline.query import LIST_OF_VIEWS, open_database
    from brickline.report.answer import MOST_ROWS, WIDEST, answer_csv, answer_json, print_answer

    sql = given[-1] if _is_sql(given[-1]) else None
    paths = find_runs(given[:-1] if sql is not None else given)
    with open_database(paths, sql) as database:
        for note in database.notes:
            say(note)
        answer = database.ask(sql or LIST_OF_VIEWS)
        if json or csv:
            print_document(answer_json(answer) if json else answer_csv(answer))
        else:
            widest = WIDEST if sql else 1000
            print_answer(answer, Console(), limit=limit or MOST_ROWS, widest=widest)


def _is_sql(text: str) -> bool:
    """Tell a question from a path: SQL has blanks, and no file has its name."""
    return any(each.isspace() for each in text.strip()) and not Path(text).exists()
