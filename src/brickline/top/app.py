"""TopApp: the terminal interface of `brickline top`.

It looks at the process on a timer, at the machine in a thread, and gives frames to the views and
views to the panels. What a figure is, and how it looks, is said elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.theme import Theme
from textual.timer import Timer
from textual.widgets import Footer, Input

from brickline.errors import BricklineError
from brickline.top.live import Frame, Live, Order
from brickline.top.machine import Machine, MachineLoad
from brickline.top.panels import Lines, Table
from brickline.top.screens import HelpScreen, SaveScreen
from brickline.top.snapshot import proposed_path, recorded_name, save_snapshot
from brickline.top.views import (
    Line,
    Status,
    View,
    bricks_view,
    categories_view,
    detail_lines,
    head_lines,
    layers_view,
    side_lines,
    tiles_view,
)
from brickline.top.watched import WatchedProcess

VIEWS = ("Bricks", "Categories", "Layers", "Tiles")
INTERVALS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
LOAD_S = 1.0
SLOW_S = 0.5
WIDE = 110
"""From this width on there is a panel beside the table."""
HIGH = 32
"""From this height on there is a picture of one brick below it."""


DARK = Theme(
    name="brickline-dark",
    primary="#4fb3a5",
    accent="#4fb3a5",
    success="#6fbf73",
    warning="#e0a458",
    error="#e5696f",
    background="#101418",
    surface="#182026",
    panel="#182026",
    foreground="#d5dde3",
    dark=True,
)
LIGHT = Theme(
    name="brickline-light",
    primary="#0f766e",
    accent="#0f766e",
    success="#2f7d32",
    warning="#a85b00",
    error="#b3261e",
    background="#fbfbf9",
    surface="#f0f1ee",
    panel="#f0f1ee",
    foreground="#1d252b",
    dark=False,
)


class TopApp(App[None]):
    """Shows a live process until it is left."""

    TITLE = "brickline top"
    CSS_PATH = Path(__file__).with_name("top.tcss")
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[Any]] = [
        Binding("1", "view(0)", "Bricks", show=False),
        Binding("2", "view(1)", "Categories", show=False),
        Binding("3", "view(2)", "Layers", show=False),
        Binding("4", "view(3)", "Tiles", show=False),
        Binding("question_mark,f1", "help", "Help", key_display="?"),
        Binding("q,ctrl+c", "quit", "Quit", key_display="q"),
        Binding("s", "sort", "Sort"),
        Binding("slash", "filter", "Filter", key_display="/"),
        Binding("space", "pause", "Pause", key_display="space"),
        Binding("w", "window", "Window"),
        Binding("S,ctrl+s", "save", "Save", key_display="S"),
        Binding("r", "reverse", "Reverse", show=False),
        Binding("d", "shade", "Dark or light", show=False),
        Binding("plus,equals_sign", "interval(-1)", "Faster", show=False),
        Binding("minus", "interval(1)", "Slower", show=False),
        Binding("escape", "clear", "Clear filter", show=False),
    ]

    def __init__(
        self,
        process: WatchedProcess,
        interval: float = 1.0,
        *,
        machine: Machine | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self.register_theme(DARK)
        self.register_theme(LIGHT)
        self.theme = DARK.name
        self.saved: list[Path] = []
        self._process = process
        self._live = Live(process, clock)
        self._machine = machine or Machine(process.pid)
        self._load: MachineLoad | None = None
        self._frame: Frame | None = None
        self._interval = interval
        self._timer: Timer | None = None
        self._status = Status(recorded_name(process), process.pid)
        self._view = 0
        self._order, self._reverse, self._whole = Order.SHARE, False, False
        self._wanted = ""
        self._slow_drawn_s = float("-inf")
        self._head, self._tabs = Lines(id="head"), Lines(id="tabs")
        self._table, self._side = Table(id="table"), Lines(id="side")
        self._detail = Lines(id="detail")
        self._box = Input(placeholder="part of a name", id="filter", select_on_focus=False)

    def compose(self) -> ComposeResult:
        """Lay out the panels."""
        yield self._head
        yield self._tabs
        with Horizontal(id="body"):
            with Vertical():
                yield self._table
                yield self._detail
            yield self._side
        yield self._box
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begin to look."""
        self._table.focus()
        self._arrange()
        self.look_at_machine()
        self.set_interval(LOAD_S, self.look_at_machine)
        self.look()
        self._timer = self.set_interval(self._interval, self.look)

    def on_unmount(self) -> None:
        """Let go of the driver."""
        self._machine.close()

    def on_resize(self) -> None:
        """Fit the panels to the terminal."""
        self._arrange()

    def on_lines_resized(self) -> None:
        """Draw for the new size of a panel."""
        self.draw()

    def _arrange(self) -> None:
        self._side.display = self.size.width >= WIDE
        self._detail.display = self.size.height >= HIGH and self._view == 0

    # ------------------------------------------------------------------------------------- looking

    def look(self) -> None:
        """Take a frame and draw it, unless the screen is paused or the process has ended."""
        if self._status.paused or (self._frame is not None and self._frame.ended):
            return
        self._frame = self._live.look(self._load, whole=self._whole)
        slow = self._frame.now.time_s - self._slow_drawn_s >= SLOW_S or self._frame.ended
        self.draw(slow=slow)

    @work(thread=True, exclusive=True, group="load", exit_on_error=False)
    def look_at_machine(self) -> None:
        """Ask for the load; a driver may take its time, so the screen does not wait for it."""
        if not (self._process.ended or self._status.paused):
            self._load = self._machine.look()

    def draw(self, *, slow: bool = True) -> None:
        """Draw the last frame; nothing is drawn beneath another screen.

        Args:
            slow: Draw all, and not the table alone. What stands around it changes too little to be
                drawn ten times a second. Default True, because a key is answered at once.
        """
        frame = self._frame
        if frame is None or len(self.screen_stack) > 1 or not self._table.size.width:
            return
        view, order = self._shown(frame)
        self._table.show_view(view, order, reverse=self._reverse)
        if slow:
            self._slow_drawn_s = frame.now.time_s
            self._draw_head(frame)
            self._tabs.show([self._tab_line()])
            self._draw_detail()
            if self._side.display:
                self._side.show(side_lines(frame, self._side.size.width, self._side.size.height))

    def _draw_head(self, frame: Frame) -> None:
        room = self.size.width - 2, max(1, self.size.height - 8)
        lines = head_lines(frame, self._status, *room)
        if self._head.size.height != len(lines):
            self._head.styles.height = len(lines)
        self._head.show(lines)

    def _draw_detail(self) -> None:
        row = self._table.cursor
        if self._frame is not None and self._detail.display:
            room = self._detail.content_size
            none: list[Line] = []
            self._detail.show(
                none if row is None else detail_lines(self._frame, row, room.width, room.height)
            )

    def on_table_moved(self) -> None:
        """Show another brick's picture."""
        self._draw_detail()

    def _shown(self, frame: Frame) -> tuple[View, Order | None]:
        if self._view == 0:
            view = bricks_view(frame, self._order, reverse=self._reverse, wanted=self._wanted)
            return view, self._order
        return (categories_view, layers_view, tiles_view)[self._view - 1](frame), None

    def _tab_line(self) -> Line:
        pieces = []
        for at, name in enumerate(VIEWS):
            pieces += [(f" {at + 1} {name} ", "tab-on" if at == self._view else "tab"), (" ", "")]
        if self._wanted:
            pieces.append((f" filter: {self._wanted}", "warn"))
        return tuple(pieces)

    # ---------------------------------------------------------------------------------------- keys

    def action_view(self, at: int) -> None:
        """Show another table."""
        self._view = at
        self._arrange()
        self.call_after_refresh(self.draw)

    def action_sort(self) -> None:
        """Sort by the next column."""
        orders = list(Order)
        self._order = orders[(orders.index(self._order) + 1) % len(orders)]
        self.draw()

    def on_table_sorted(self, event: Table.Sorted) -> None:
        """Sort by a title, and the other way round the second time."""
        self._reverse = not self._reverse if event.order is self._order else False
        self._order = event.order
        self.draw()

    def action_reverse(self) -> None:
        """Sort the other way round."""
        self._reverse = not self._reverse
        self.draw()

    def action_window(self) -> None:
        """Change between figures of lately and of the whole recording."""
        self._whole = not self._whole
        if self._frame is not None:
            self._frame = replace(self._frame, whole=self._whole)
        self.draw()

    def action_pause(self) -> None:
        """Hold the screen, or go on."""
        self._status = replace(self._status, paused=not self._status.paused)
        self.draw()

    def action_interval(self, step: int) -> None:
        """Refresh more or less often."""
        nearest = min(INTERVALS_S, key=lambda each: abs(each - self._interval))
        at = INTERVALS_S.index(nearest) + step
        self._interval = INTERVALS_S[min(max(at, 0), len(INTERVALS_S) - 1)]
        if self._timer is not None:
            self._timer.stop()
        self._timer = self.set_interval(self._interval, self.look)
        self.notify(f"every {self._interval:g} s", timeout=1.5, markup=False)

    def action_shade(self) -> None:
        """Change between dark and light."""
        self.theme = LIGHT.name if self.theme == DARK.name else DARK.name

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(HelpScreen(), lambda _: self.draw())

    # -------------------------------------------------------------------------------------- filter

    def action_filter(self) -> None:
        """Ask for a part of a name."""
        self._box.display = True
        self._box.value = self._wanted
        self._box.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        if event.input is self._box and self._box.display:
            self._wanted = event.value
            self.action_view(0)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter and go back to the table."""
        if event.input is self._box:
            self._close_filter()

    def action_clear(self) -> None:
        """Show all bricks again."""
        self._wanted = ""
        self._close_filter()
        self.draw()

    def _close_filter(self) -> None:
        self._box.display = False
        self._table.focus()

    # ------------------------------------------------------------------------------------ snapshot

    def action_save(self) -> None:
        """Ask where, then save."""
        self.push_screen(SaveScreen(proposed_path(self._process)), self._save_to)

    def _save_to(self, path: str | None) -> None:
        if path:
            self.save(path)
        self.draw()

    @work(thread=True, group="save", exit_on_error=False)
    def save(self, path: str) -> None:
        """Save a snapshot; a large spool takes a while, so the screen does not wait for it."""
        try:
            saved = save_snapshot(self._process, path)
        except BricklineError as error:
            self.call_from_thread(self.notify, str(error), severity="error", markup=False)
            return
        self.saved.append(saved)
        self.call_from_thread(
            self.notify, f"brickline report {saved}", title="Saved", timeout=8, markup=False
        )
