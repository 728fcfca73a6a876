"""The timeline of a page: the last entries and launches of each thread and stream, packed.

Owns how much of it a page holds, newest first until the page's share is full, and what the lanes
are called; where the rows come from is the matter of `timeline_spans`.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.abi import SlotKind
from brickline.profile import Profile
from brickline.report.html.page import named, packed
from brickline.report.html.timeline_spans import LAUNCH, Book, Lane, Spans, category_list, spans_of

MAX_SPANS = 60_000
"""Entries and launches on a page; the newest stay. About 1.4 MiB of it."""
MAX_LANES = 64
"""Threads and streams on a page, those with the most on them."""
SPAN_BYTES = 32
"""What one weighs on a page at most, in base64."""
MAX_NAMES = 2000
"""Distinct names on a page; the rest are called by one."""
MAX_LABEL = 80
"""Characters of a name."""


def timeline_view(profile: Profile, room_bytes: int) -> dict[str, Any] | None:
    """Return the columns of the timeline, or None where the run keeps none.

    Args:
        profile: whose parts keep entries and launches.
        room_bytes: what it may weigh on the page.
    """
    book = Book()
    sources = [spans for part in profile.parts for spans in spans_of(part)]
    if not sources:
        return None
    total = sum(len(spans.rows) for spans in sources)
    most = max(0, min(MAX_SPANS, (room_bytes - 4 * MAX_LABEL * MAX_NAMES) // SPAN_BYTES))
    columns = [spans.columns(book) for spans in _newest(sources, most)]
    joined = {key: np.concatenate([each[key] for each in columns]) for key in columns[0]}
    places = _places(book, joined["lane"])
    kept = np.isin(joined["lane"], list(places))
    joined = {key: column[kept] for key, column in joined.items()}
    joined["start"] = joined["start"] - (int(joined["start"].min()) if kept.any() else 0)
    joined["lane"] = np.array([places[lane] for lane in joined["lane"].tolist()], np.uint8)
    joined["name"] = np.minimum(joined["name"], MAX_NAMES)
    order = np.lexsort((joined["start"], joined["lane"]))
    names = [named(name, MAX_LABEL) for name in book.names.values[:MAX_NAMES]]
    return {
        "total": total,
        "shown": int(kept.sum()),
        "kinds": {"step": int(SlotKind.STEP), "tile": int(SlotKind.TILE), "launch": LAUNCH},
        "lanes": _lanes(profile, [book.lanes.values[lane] for lane in places]),
        "lanes_left_out": len(book.lanes.values) - len(places),
        "names": names + (["(another name)"] if len(book.names.values) > MAX_NAMES else []),
        "categories": category_list(book, MAX_NAMES + 1),
        "phases": [named(str(phase), 60) for phase in book.phases.values],
        "columns": {key: packed(_narrow(column[order])) for key, column in joined.items()},
    }


def _newest(sources: list[Spans], most: int) -> list[Spans]:
    """Return the rows that ended last, ``most`` of all sources together."""
    ends = np.concatenate([spans.end_ns for spans in sources])
    chosen = np.ones(len(ends), bool)
    older = len(ends) - most
    if older > 0:
        chosen[np.argpartition(ends, min(older, len(ends) - 1))[:older]] = False
    borders = np.cumsum([len(spans.rows) for spans in sources])[:-1]
    parts = np.split(chosen, borders)
    return [spans.selected(mine) for spans, mine in zip(sources, parts, strict=True)]


def _places(book: Book, lanes: NDArray[np.int64]) -> dict[int, int]:
    """Return the lanes to show, in their order on the page, each with its place."""
    found, counts = np.unique(lanes, return_counts=True)
    busiest = sorted(zip(counts.tolist(), found.tolist(), strict=True), reverse=True)[:MAX_LANES]
    ordered = sorted((lane for _, lane in busiest), key=lambda lane: book.lanes.values[lane])
    return {lane: at for at, lane in enumerate(ordered)}


def _lanes(profile: Profile, lanes: list[Lane]) -> list[dict[str, Any]]:
    """Return what each lane is called; what only a process or thread tells apart says so."""
    known = {(lane.process, lane.lane): lane for lane in profile.lanes}
    several = len({lane.process for lane in lanes}) > 1
    twice = Counter(
        known[lane.process, lane.number].label
        for lane in lanes
        if not lane.launches and (lane.process, lane.number) in known
    )

    def label(lane: Lane) -> str:
        if lane.launches:
            where = f"CUDA:{lane.device} stream {lane.number:#x}" if lane.on_device else ""
            return f"{where or f'thread {lane.number}'} · launches"
        entry = known.get((lane.process, lane.number))
        if entry is None:
            return f"lane {lane.number}"
        return f"{entry.label} {entry.thread}" if twice[entry.label] > 1 else entry.label

    def full(lane: Lane) -> str:
        return f"{label(lane)} · process {lane.process}" if several else label(lane)

    return [{"name": named(full(lane), 80), "device": lane.on_device} for lane in lanes]


def _narrow(column: NDArray[Any]) -> NDArray[Any]:
    """Return a column in the smallest kind that a page can unpack and that loses nothing."""
    if not len(column):
        return column.astype(np.uint8)
    low, high = int(column.min()), int(column.max())
    for kind in (np.uint8, np.uint16, np.int16, np.uint32, np.int32):
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return column.astype(kind)
    return column.astype(np.float64)
