"""Widgets that draw lines of pieces: a panel of lines, and a table that scrolls and sorts.

They draw with textual's line interface, keep what they drew, and ask for a redraw of the lines that
have changed and no others. They know views, not frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding
from textual.filter import ANSIToTruecolor
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from brickline.bricks import BrickCategory
from brickline.top.live import Order
from brickline.top.views import Line, View, ViewColumn

_GAP = "  "
_LEAST_NAME = 12
_MOST_NAME = 24

STYLES = frozenset(
    {"title", "big", "value", "label", "dim", "name", "trend", "good", "warn", "bad"}
    | {"track", "header", "sorted", "cursor", "tab", "tab-on"}
    | {each.label for each in BrickCategory}
)
"""The names that pieces may use; each is a component class `lines--NAME`."""


class Lines(Widget):
    """Draws lines of pieces, cut and padded to its width."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"lines--{name}" for name in STYLES}

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._lines: list[Line] = []
        self._strips: list[Strip] = []
        self._palette: dict[str, Style] = {}
        self._drawn_width = 0
        self._blank = Strip([])

    class Resized(Message):
        """The panel has another size."""

    def on_resize(self, event: events.Resize) -> None:
        """Ask to be drawn for the new size."""
        self.post_message(self.Resized())

    def show(self, lines: Sequence[Line]) -> None:
        """Draw these lines from now on."""
        width = self.size.width
        if width != self._drawn_width:
            self._lines, self._strips, self._drawn_width = [], [], width
        changed = [at for at, line in enumerate(lines) if self._is_new(at, line)]
        fewer = range(len(lines), len(self._lines))
        self._strips = [
            self._strip(line, width) if self._is_new(at, line) else self._strips[at]
            for at, line in enumerate(lines)
        ]
        self._lines = list(lines)
        if changed or fewer:
            self.refresh(*_regions([*changed, *fewer], width))

    def _is_new(self, at: int, line: Line) -> bool:
        return at >= len(self._lines) or self._lines[at] != line

    def render_line(self, y: int) -> Strip:
        """Return a line for textual."""
        return self.render_lines(Region(0, y, self.size.width, 1))[0]

    def render_lines(self, crop: Region) -> list[Strip]:
        """Return the lines as they are: there is no border, tint or opacity to add to them."""
        width, known = self.size.width, len(self._strips)
        if self._blank.cell_length != width:
            self._blank = self._strip((), width)
        lines = [self._strips[y] if y < known else self._blank for y in crop.line_range]
        if crop.x == 0 and crop.width == width:
            return lines
        return [line.crop(crop.x, crop.right) for line in lines]

    def notify_style_update(self) -> None:
        """Draw everything anew: the theme has changed."""
        super().notify_style_update()
        # The styles of pieces follow those of the widget, so they are asked for later.
        self.call_after_refresh(self._draw_anew)

    def _draw_anew(self) -> None:
        self._palette, self._drawn_width, self._blank = {}, 0, Strip([])
        lines, self._lines = self._lines, []
        self.show(lines)

    def _strip(self, line: Line, width: int) -> Strip:
        segments = [Segment(text, self.style_named(style)) for text, style in line if text]
        used = _width_of(line)
        if used < width:
            segments.append(Segment(" " * (width - used), self.style_named("")))
        strip = Strip(segments, max(used, width))
        if used > width:
            strip = strip.crop(0, width)
        for each in self.app.get_line_filters():
            # NO_COLOR takes colours away; ours are never those of the terminal's own palette.
            if not isinstance(each, ANSIToTruecolor):
                strip = strip.apply_filter(each, self.background_colors[1])
        return strip

    def style_named(self, name: str) -> Style:
        """Return the style of a piece; two names make the second one's background."""
        known = self._palette.get(name)
        if known is None:
            known = self._palette[name] = self._made_style(name)
        return known

    def _made_style(self, name: str) -> Style:
        first, _, ground = name.partition(" ")
        style = self.get_component_rich_style(f"lines--{first}") if first else self.rich_style
        if ground:
            style += Style(bgcolor=self.get_component_rich_style(f"lines--{ground}").bgcolor)
        return style


def _regions(lines: Sequence[int], width: int) -> list[Region]:
    """Return the fewest regions that cover the lines."""
    regions: list[Region] = []
    start = last = lines[0]
    for at in (*lines[1:], -1):
        if at != last + 1:
            regions.append(Region(0, start, width, last - start + 1))
            start = at
        last = at
    return regions


class Table(Lines, can_focus=True):
    """A view with a title line, a cursor, and as many columns as fit."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "move(-20)", "Page up", show=False),
        Binding("pagedown", "move(20)", "Page down", show=False),
        Binding("home,g", "move(-1000000)", "First", show=False),
        Binding("end,G", "move(1000000)", "Last", show=False),
    ]

    class Moved(Message):
        """The cursor is on another row."""

    class Sorted(Message):
        """A title was clicked."""

        def __init__(self, order: Order) -> None:
            super().__init__()
            self.order = order

    def __init__(self, *, id: str | None = None) -> None:  # noqa: A002
        super().__init__(id=id)
        self._view = View((), lambda keys: [], "")
        self._order: Order | None = None
        self._reverse = False
        self._cursor: Any = None
        self._first = 0
        self._titles: list[tuple[int, int, Order | None]] = []

    @property
    def cursor(self) -> Any:
        """The key of the row under the cursor; None in an empty table."""
        return self._cursor

    def show_view(self, view: View, order: Order | None = None, *, reverse: bool = False) -> None:
        """Draw a view; the cursor stays on its row while rows move."""
        self._view, self._order, self._reverse = view, order, reverse
        self._draw()

    def action_move(self, rows: int) -> None:
        """Move the cursor."""
        if self._view.keys:
            place = min(max(self._place() + rows, 0), len(self._view.keys) - 1)
            self._cursor = self._view.keys[place]
            self._draw(follow=True)
            self.post_message(self.Moved())

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll without moving the cursor."""
        self._scroll(3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll without moving the cursor."""
        self._scroll(-3)

    def on_click(self, event: events.Click) -> None:
        """Sort by a title, or put the cursor on a row."""
        if event.y == 0:
            for start, end, order in self._titles:
                if start <= event.x < end and order is not None:
                    self.post_message(self.Sorted(order))
        elif self._first + event.y - 1 < len(self._view.keys):
            self._cursor = self._view.keys[self._first + event.y - 1]
            self._draw()
            self.post_message(self.Moved())

    def _scroll(self, rows: int) -> None:
        self._first += rows
        self._draw()

    def _place(self) -> int:
        keys = self._view.keys
        return list(keys).index(self._cursor) if self._cursor in keys else 0

    def _draw(self, *, follow: bool = False) -> None:
        keys, room = self._view.keys, self.size.height - 1
        if room < 1 or not self.size.width:
            return  # not laid out yet
        if not keys:
            self._cursor = None
            self.show([((self._view.empty, "dim"),)])
            return
        place = self._place()
        self._cursor = keys[place]
        if follow:
            self._first = min(max(self._first, place - room + 1), place)
        self._first = min(max(self._first, 0), max(0, len(keys) - room))
        shown = keys[self._first : self._first + room]
        columns = self._fitting(self._view.columns(shown), len(shown))
        lines = [self._title_line(columns)]
        lines += [
            _row_line(columns, at, "cursor" if self._first + at == place else "")
            for at in range(len(shown))
        ]
        self.show(lines)

    def _fitting(self, columns: list[ViewColumn], rows: int) -> list[tuple[ViewColumn, int]]:
        """Return the columns that fit with their widths; one without takes what is left."""
        least = _LEAST_NAME
        for column in columns:
            if not column.width and column.draw is None:
                longest = max(_width_of(column.cell(at)) for at in range(rows))
                least = max(least, min(longest, _MOST_NAME, self.size.width // 3))
        left = self.size.width - least - len(_GAP)
        chosen: set[int] = set()
        for at in sorted(range(len(columns)), key=lambda at: (columns[at].rank, at)):
            wide = columns[at].width + len(_GAP) if columns[at].width else 0
            if wide <= left:
                chosen.add(at)
                left -= wide
        return [(columns[at], columns[at].width or left + least) for at in sorted(chosen)]

    def _title_line(self, columns: list[tuple[ViewColumn, int]]) -> Line:
        pieces, start = [], 0
        self._titles = []
        for column, width in columns:
            is_order = column.order is not None and column.order is self._order
            arrow = ("▲" if self._reverse else "▼") if is_order else ""
            text = _fill(f"{column.title}{arrow}", width, column.left)
            pieces.append((text + _GAP, "sorted" if is_order else "header"))
            self._titles.append((start, start + width + len(_GAP), column.order))
            start += width + len(_GAP)
        return tuple(pieces)


def _width_of(cell: Line | str) -> int:
    if isinstance(cell, str):
        return len(cell) if cell.isascii() else cell_len(cell)
    return sum(len(text) if text.isascii() else cell_len(text) for text, _ in cell)


def _row_line(columns: list[tuple[ViewColumn, int]], at: int, ground: str) -> Line:
    pieces: list[tuple[str, str]] = []
    for column, width in columns:
        cell = column.draw(at, width) if column.draw else column.cell(at)
        found: Line = ((cell, ""),) if isinstance(cell, str) else cell
        used = _width_of(found)
        if used > width:
            found, used = _cut_cell(found, width), width
        blank = " " * (width - used)
        if column.left:
            pieces += [*found, (blank + _GAP, "")]
        else:
            pieces += [(blank, ""), *found, (_GAP, "")]
    if ground:
        pieces = [(text, style if " " in style else f"{style} {ground}") for text, style in pieces]
    return _merged(pieces)


def _merged(pieces: list[tuple[str, str]]) -> Line:
    """Join neighbours of one style: a terminal is told of each change of style."""
    merged = [pieces[0]]
    for text, style in pieces[1:]:
        if style == merged[-1][1]:
            merged[-1] = (merged[-1][0] + text, style)
        elif text:
            merged.append((text, style))
    return tuple(merged)


def _cut_cell(cell: Line, width: int) -> Line:
    kept, left = [], width - 1
    for text, style in cell:
        kept.append((set_cell_size(text, min(left, cell_len(text))), style))
        left -= min(left, cell_len(text))
    return (*kept, ("…", "dim"))


def _fill(text: str, width: int, left: bool) -> str:
    cut = text if len(text) <= width else text[:width]
    return cut.ljust(width) if left else cut.rjust(width)
