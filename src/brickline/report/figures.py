"""How figures and names look in a terminal: units, bars, columns that fit.

Knows nothing of profiles. `Look` holds what a terminal can show, so that a stream without Unicode
gets plain characters instead of an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TextIO, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = TypeVar("Row")

_BLOCKS = " ▏▎▍▌▋▊▉█"
GAP = 3
"""Characters between two columns."""
HEAT_STYLES = ("green", "green", "yellow", "dark_orange", "red")


@dataclass(frozen=True)
class Look:
    """What a console can show."""

    unicode: bool = True

    @classmethod
    def of(cls, console: Console) -> Look:
        """Ask the console's encoding."""
        return cls(unicode=console.encoding.lower().startswith("utf"))

    def plain(self, text: str) -> str:
        """Return text that the console can print and that moves no cursor."""
        shown = text
        if not text.isprintable():
            shown = "".join(
                each if each.isprintable() else each.encode("unicode_escape").decode()
                for each in text
            )
        if self.unicode:
            return shown
        shown = (
            shown.replace("µ", "u")
            .replace("·", "-")
            .replace("…", "...")
            .replace("×", "x")
            .replace("÷", "/")
        )
        return shown.encode("ascii", "backslashreplace").decode()

    def text(self, text: str, style: str = "") -> Text:
        """Return text in which markup and control characters mean nothing."""
        return Text(self.plain(text), style=style)

    def time(self, ns: float) -> str:
        """Return a duration in the unit that keeps it short."""
        for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "µs")):
            if ns >= 0.9995 * size:  # from there on three digits make it one of them
                return self.plain(f"{_digits(ns / size)} {unit}")
        return f"{ns:.0f} ns"

    def bar(self, share: float, width: int) -> Text:
        """Return a bar of a share from 0 to 1, warmer the longer it is."""
        share = min(max(share, 0.0), 1.0)
        style = HEAT_STYLES[min(int(share * len(HEAT_STYLES)), len(HEAT_STYLES) - 1)]
        if not self.unicode:
            return Text(("#" * round(share * width)).ljust(width), style=style)
        eighths = round(share * width * 8)
        whole, rest = divmod(eighths, 8)
        drawn = "█" * whole + (_BLOCKS[rest] if rest else "")
        return Text(drawn.ljust(width), style=style)

    def table(self, title: str) -> Table:
        """Return an empty table in the house style."""
        lines = box.SIMPLE_HEAD if self.unicode else box.ASCII2
        return Table(
            title=self.text(title, "bold"),
            title_justify="left",
            box=lines,
            pad_edge=False,
            show_edge=False,
            header_style="bold",
        )


def plain_console(stream: TextIO, width: int) -> Console:
    """Return a console that writes plain text, in a notebook too, where rich would show it."""
    return Console(
        file=stream, width=width, color_system=None, legacy_windows=False, force_jupyter=False
    )


def _digits(value: float) -> str:
    """Return three significant digits, four from 1000 on."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def rate(value: float) -> str:
    """Return a figure with three significant digits; empty where there is none."""
    return _digits(value) if value else ""


def percent(share: float) -> str:
    """Return a share from 0 to 1 as a percentage."""
    return f"{100 * share:.1f} %"


@dataclass(frozen=True)
class Column(Generic[Row]):
    """One column of a table; the higher the rank, the sooner it gives way."""

    title: str
    rank: int
    show: Callable[[Row], str | Text]
    left: bool = False


def fitting_table(
    look: Look, title: str, columns: Sequence[Column[Row]], rows: Sequence[Row], width: int
) -> Table:
    """Return the table with as many columns as the width holds.

    The first column always stays, and its texts are cut where they would take half the width.
    """
    widest = max(12, width // 2 - 2)
    cells = [[_as_text(look, column.show(row)) for row in rows] for column in columns]
    widths = [
        max([len(look.plain(column.title)), *(text.cell_len for text in texts)])
        for column, texts in zip(columns, cells, strict=True)
    ]
    widths[0] = min(widths[0], widest)
    # A column in which nothing stands says nothing.
    chosen = {at for at, texts in enumerate(cells) if at == 0 or any(text.plain for text in texts)}
    while len(chosen) > 1 and sum(widths[at] + GAP for at in chosen) - GAP > width:
        chosen.remove(max(chosen, key=lambda at: (columns[at].rank, at)))
    table = look.table(title)
    for at in sorted(chosen):
        column = columns[at]
        table.add_column(
            look.text(column.title),
            justify="left" if column.left else "right",
            max_width=widest if at == 0 else None,
            no_wrap=True,
            overflow="ellipsis" if look.unicode else "crop",
        )
    for place in range(len(rows)):
        table.add_row(*(cells[at][place] for at in sorted(chosen)))
    return table


def _as_text(look: Look, shown: str | Text) -> Text:
    return shown if isinstance(shown, Text) else look.text(shown)
