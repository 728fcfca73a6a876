"""The answer to a query as a table for a terminal, as JSON or as CSV.

Rows are taken as they come, so that a million of them pass through as CSV or JSON without being
held; a terminal gets the first ones and is told how many there are.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from io import StringIO
from itertools import islice
from math import isfinite
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from brickline.query import Answer
from brickline.report.figures import Look

SCHEMA = "brickline-query"
VERSION = 1
MOST_ROWS = 1000
"""Rows that a terminal gets unless more are asked for."""
WIDEST = 60
"""Characters of a text that a terminal gets."""
_ANY_WIDTH = 1 << 20


def print_answer(
    answer: Answer, console: Console, *, limit: int = MOST_ROWS, widest: int = WIDEST
) -> None:
    """Print the first rows as a table, and how many there are.

    Args:
        answer: what to show.
        console: where to. Rows that are too wide for a terminal stand upright, one value a line; a
            file or pipe gets every row on one line, however long.
        limit: rows to show.
        widest: characters of a text to show.
    """
    look = Look.of(console)
    rows = [[_cell(value, widest) for value in row] for row in islice(answer.rows, limit)]
    table = look.table("")
    table.title = None
    for at, name in enumerate(answer.columns):
        right = all(_is_figure(row[at]) for row in rows)
        table.add_column(look.text(name), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(look.text(cell) for cell in row))
    needed = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table).maximum
    if needed <= console.width:
        console.print(table)
    elif console.is_terminal:
        for number, row in enumerate(rows, 1):
            console.print(_upright(look, number, answer.columns, row))
    else:
        console.width = needed
        console.print(table)
    console.print(look.text(_counted(len(rows), sum(1 for _ in answer.rows)), "dim"))


def _upright(look: Look, number: int, columns: Sequence[str], row: Sequence[str]) -> Table:
    """Return a row that is too wide for the terminal with one value a line."""
    table = look.table(f"Row {number}")
    table.show_header = False
    table.add_column()
    table.add_column(overflow="fold")
    for name, cell in zip(columns, row, strict=True):
        table.add_row(look.text(name, "bold"), look.text(cell))
    return table


def _counted(shown: int, more: int) -> str:
    if more:
        return f"the first {shown:,} of {shown + more:,} rows; --limit shows more, --csv all"
    return "no rows" if shown == 0 else "1 row" if shown == 1 else f"{shown:,} rows"


def _is_figure(text: str) -> bool:
    return re.fullmatch(r"(-?[\d,]+(\.\d+)?(e[+-]\d+)?)?", text) is not None


def _cell(value: Any, widest: int) -> str:
    """Return a value for a reader, with four significant digits and texts cut off."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    text = value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False)
    text = text if isinstance(value, str | list | dict) else text.strip('"')
    return text if len(text) <= widest else f"{text[: widest - 1]}…"


def answer_json(answer: Answer) -> Iterator[str]:
    """Return one JSON document in pieces: the columns with their types, and the rows."""
    columns = [
        {"name": name, "type": kind}
        for name, kind in zip(answer.columns, answer.types, strict=True)
    ]
    head = {"schema": SCHEMA, "version": VERSION, "columns": columns}
    yield json.dumps(head, ensure_ascii=False)[:-1] + ', "rows": ['
    for number, row in enumerate(answer.rows):
        text = json.dumps([_plain(value) for value in row], ensure_ascii=False, allow_nan=False)
        yield f"{',' if number else ''}\n{text}"
    yield "\n]}\n"


def answer_csv(answer: Answer) -> Iterator[str]:
    """Return a CSV table in pieces, with a header line; nothing stands for NULL."""
    yield _csv_line(answer.columns)
    for row in answer.rows:
        yield _csv_line([_csv_cell(value) for value in row])


def _csv_line(cells: Any) -> str:
    stream = StringIO()
    csv.writer(stream, lineterminator="\n").writerow(cells)
    return stream.getvalue()


def _csv_cell(value: Any) -> Any:
    plain = _plain(value)
    return json.dumps(plain, ensure_ascii=False) if isinstance(plain, list | dict) else plain


def _plain(value: Any) -> Any:
    """Return what JSON can hold; numbers that are not finite become their names."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, date | datetime | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes | bytearray):
        return value.hex()
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)
