"""What a timeline is drawn from: the entries that a part keeps, and the launches that it traced.

Each source gives its rows as arrays, without an object per row, and names the lanes they lie on.
How many of them a page holds is the matter of `timeline`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.abi import ClockDomain, RecordFlag
from brickline.bricks import BrickCategory
from brickline.node_table import Ids, slot_rows
from brickline.runs import Part

Columns: TypeAlias = dict[str, NDArray[Any]]

LAUNCH = 255
"""The kind of a launch, beside the kinds of slots."""


class Lane(NamedTuple):
    """One thread or stream of one process; they sort host first, entries before launches."""

    on_device: bool
    process: int
    launches: bool
    """True for the launches of a thread or stream, False for its entries."""
    number: int
    """Of the lane for entries; of the thread, or the handle of the stream, for launches."""
    device: int = -1


@dataclass
class Book:
    """The numbers that columns hold instead of names, lanes and phases."""

    names: Ids = field(default_factory=Ids)
    phases: Ids = field(default_factory=Ids)
    lanes: Ids = field(default_factory=Ids)
    categories: dict[int, int] = field(default_factory=dict)
    """By the number of a name."""


@dataclass(frozen=True)
class Spans:
    """Rows of one source of one part, with their times on the clock that all parts share."""

    part: Part
    rows: NDArray[Any]
    numbers: NDArray[np.uint32]
    """The lane of each entry; the thread of each launch."""
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    launches: bool

    def selected(self, chosen: NDArray[np.bool_]) -> Spans:
        """Return only these rows."""
        return replace(
            self,
            rows=self.rows[chosen],
            numbers=self.numbers[chosen],
            start_ns=self.start_ns[chosen],
            end_ns=self.end_ns[chosen],
        )

    def columns(self, book: Book) -> Columns:
        """Return what a page shows of each row."""
        own = _launch_columns(self, book) if self.launches else _entry_columns(self, book)
        phases = self.rows["phase"]
        numbers = {each: book.phases[self.part.phases.get(each, "")] for each in _unique(phases)}
        return own | {
            "start": self.start_ns,
            "duration": self.end_ns - self.start_ns,
            "step": self.rows["step"].astype(np.int64),
            "phase": np.array([numbers[each] for each in phases.tolist()], np.uint8),
        }


def spans_of(part: Part) -> Iterator[Spans]:
    """Give the sources of a part that hold anything with a time."""
    # Processes on other machines have other monotonic clocks; Unix time is common to all.
    shift = int(part.header.get("anchor_unix_ns", 0)) - int(part.header.get("anchor_ns", 0))
    recent, traces = part.recent, part.traces
    timed = (recent["flags"] & int(RecordFlag.UNTIMED)) == 0
    if timed.any():
        start, end = (recent[name][timed].astype(np.int64) + shift for name in ("start", "end"))
        numbers = part.recent_lanes[timed]
        yield Spans(part, recent[timed], numbers, start, np.maximum(start, end), False)
    timed = (traces["start_ns"] >= 0) & (traces["end_ns"] >= 0)
    if timed.any():
        rows = traces[timed]
        start, end = rows["start_ns"] + shift, rows["end_ns"] + shift
        yield Spans(part, rows, rows["thread"], start, np.maximum(start, end), True)


def _entry_lanes(spans: Spans, book: Book) -> NDArray[np.int64]:
    process = int(spans.part.header.get("process", 0))
    on_device = {
        lane["lane"]: lane.get("clock_domain", 0) == ClockDomain.CUDA for lane in spans.part.lanes
    }
    lane_of = {
        number: book.lanes[Lane(on_device.get(number, False), process, False, number)]
        for number in _unique(spans.numbers)
    }
    return np.array([lane_of[number] for number in spans.numbers.tolist()], np.int64)


def _launch_lanes(spans: Spans, book: Book) -> NDArray[np.int64]:
    process, rows = int(spans.part.header.get("process", 0)), spans.rows
    on_device = rows["clock_domain"] == int(ClockDomain.CUDA)
    keys = zip(
        on_device.tolist(),
        np.where(on_device, rows["stream"], spans.numbers).tolist(),
        np.where(on_device, rows["device"], -1).tolist(),
        strict=True,
    )
    lanes = (book.lanes[Lane(dev, process, True, number, device)] for dev, number, device in keys)
    return np.fromiter(lanes, np.int64, len(rows))


def _entry_columns(spans: Spans, book: Book) -> Columns:
    slots = slot_rows(spans.part, spans.rows["slot"], book.names)
    for name, category in zip(slots["name"].tolist(), slots["category"].tolist(), strict=True):
        book.categories.setdefault(name, category)
    return {
        "name": slots["name"].astype(np.int64),
        "layer": slots["layer"].astype(np.int64),
        "kind": slots["kind"].astype(np.uint8),
        "depth": spans.rows["depth"].astype(np.uint8),
        "flags": spans.rows["flags"].astype(np.uint8),
        "lane": _entry_lanes(spans, book),
    }


def _launch_columns(spans: Spans, book: Book) -> Columns:
    rows = spans.rows
    categories = slot_rows(spans.part, rows["slot"], Ids())["category"]
    of_name = {each: book.names[spans.part.string(each)] for each in _unique(rows["name"])}
    names = np.array([of_name[each] for each in rows["name"].tolist()], np.int64)
    for name, category in zip(names.tolist(), categories.tolist(), strict=True):
        book.categories.setdefault(name, category)
    lanes = _launch_lanes(spans, book)
    return {
        "name": names,
        "layer": rows["layer"].astype(np.int64),
        "kind": np.full(len(rows), LAUNCH, np.uint8),
        "depth": _depths(spans, lanes),
        "flags": np.zeros(len(rows), np.uint8),
        "lane": lanes,
    }


def _depths(spans: Spans, lanes: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return how many launches of the same lane each one lies in, or overlaps; 31 at most."""
    depths = np.zeros(len(spans.rows), np.uint8)
    open_until: dict[int, list[int]] = {}
    order = np.lexsort((-spans.end_ns, spans.start_ns))
    starts, ends, lane_of = spans.start_ns.tolist(), spans.end_ns.tolist(), lanes.tolist()
    for at in order.tolist():
        rows = open_until.setdefault(lane_of[at], [])
        free = next((row for row, end in enumerate(rows) if end <= starts[at]), len(rows))
        free = min(free, 31)
        rows[free : free + 1] = [ends[at]]
        depths[at] = free
    return depths


def _unique(values: NDArray[Any]) -> list[int]:
    found: list[int] = np.unique(values).tolist()
    return found


def category_list(book: Book, most: int) -> list[int]:
    """Return the category of every name, up to ``most`` of them."""
    other = int(BrickCategory.OTHER)
    return [book.categories.get(name, other) for name in range(min(len(book.names.values), most))]
