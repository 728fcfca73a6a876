"""The screens that lie over the table: the keys, and where a snapshot is to go."""

from __future__ import annotations

from typing import Any, ClassVar

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

KEYS = (
    ("1 2 3 4", "bricks, categories, layers, tiles"),
    ("↑ ↓ PgUp PgDn", "move; g and G go to the first and last row"),
    ("s", "sort by the next column; a click on a title sorts by it"),
    ("r", "reverse the order"),
    ("/", "filter bricks by name; Escape clears the filter"),
    ("w", "figures of the last 10 seconds, or since the recording began"),
    ("space", "pause the screen; the process runs on"),
    ("+ -", "refresh more or less often"),
    ("S", "save what is recorded by now as a run"),
    ("d", "dark or light"),
    ("q", "leave; the process runs on"),
)
COLUMNS = (
    ("Share", "part of all brick time; time in inner bricks counts for them alone"),
    ("Busy", "part of the last second spent inside, inner bricks included"),
    ("Calls/s", "entries in the last second"),
    ("Avg p50 p99", "duration of an entry; p99 is marked where it exceeds ten times p50"),
    ("Count", "entries since the recording began"),
    ("Busy, lately", "Busy each half second, scaled to its own largest value"),
    ("CPU, memory", "of the process; GPU figures are of the whole GPU"),
)


class HelpScreen(ModalScreen[None]):
    """Says what the keys do and what the columns mean."""

    BINDINGS: ClassVar[list[Any]] = [("escape,q,question_mark,enter", "dismiss", "Close")]

    def compose(self) -> ComposeResult:
        """Lay out the text."""
        with VerticalScroll(id="help"):
            yield Static(Text("Keys", style="bold"))
            yield Static(_list(KEYS))
            yield Static(Text("Columns", style="bold"))
            yield Static(_list(COLUMNS))
            yield Static(Text("Escape closes this.", style="dim"))


def _list(entries: tuple[tuple[str, str], ...]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 1))
    table.add_column(max_width=14)
    table.add_column(ratio=1)
    for name, meaning in entries:
        table.add_row(Text(name, style="bold"), Text(meaning))
    table.add_row("", "")
    return table


class SaveScreen(ModalScreen[str | None]):
    """Asks where a snapshot is to go; gives the path, or None."""

    BINDINGS: ClassVar[list[Any]] = [("escape", "dismiss(None)", "Cancel")]

    def __init__(self, proposed: str) -> None:
        super().__init__()
        self._proposed = proposed

    def compose(self) -> ComposeResult:
        """Lay out the question."""
        with Vertical(id="save"):
            yield Static(Text("Save what is recorded by now as the run", style="bold"))
            yield Input(value=self._proposed, select_on_focus=False, id="path")
            yield Static(Text("Enter saves, Escape does not.", style="dim"))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Give the path back."""
        self.dismiss(event.value.strip() or None)
