"""Which entries of a run become OpenTelemetry spans, with which ids, and who is whose parent.

Owns the choice and the ids, not the messages: `otlp` writes those. A step is a trace of its own, so
that no trace grows without bound; bricks and launches lie below it as they lay in time. Ids follow
from the run's id and from what an entry is, so sending a run twice gives the same spans.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from brickline.export.nesting import nest
from brickline.export.spans import CATEGORIES, Kind, Place, Spans, spans_of_part
from brickline.runs import Part, Run

MAX_DEPTH = 512
"""How far out a kept entry is looked for; a damaged run may hold launches inside each other."""


@dataclass(frozen=True)
class SpanRow:
    """One span; times are Unix time in ns."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    """Empty at the top of a trace."""
    name: str
    start_ns: int
    end_ns: int
    kind: Kind
    category: str
    place: Place
    phase: str
    step: int
    """0 outside steps."""
    layer: int
    """-1 outside layers."""
    elements: int
    launch: int
    """Id of the launch in its part; 0 for what is none."""
    entries: int = 0
    """How many entries of a brick this span stands for, from the first to the last; 0: itself."""
    total_ns: int = 0
    """What those took in all."""


@dataclass(frozen=True)
class PartSpans:
    """The spans of one part, and how many entries are not among them."""

    part: Part
    rows: Sequence[SpanRow]
    left_out: int
    """More than were asked for."""
    untimed: int
    """Without a start and an end."""


def spans_of_run(run: Run, limit: int) -> Iterator[PartSpans]:
    """Return the spans of each part: steps first, then bricks, launches and tiles, newest first.

    Args:
        run: what to send.
        limit: spans in all.
    """
    for part in run.parts:
        found = _part_spans(run.manifest["id"], part, limit)
        limit -= len(found.rows)
        yield found


def _part_spans(run_id: str, part: Part, limit: int) -> PartSpans:
    to_unix = int(part.header["anchor_unix_ns"]) - int(part.header["anchor_ns"])
    spans = spans_of_part(part, to_unix)
    timed = np.flatnonzero(~spans.instant)
    untimed = spans.untimed + len(spans) - len(timed)
    spans = spans.take(timed)
    parents = _parents(spans)
    kept = _kept(spans, limit)
    chosen = np.zeros(len(spans) + 1, bool)
    chosen[kept] = True
    roots = _kept_ancestors(parents, chosen)
    rows = _rows(run_id, spans, kept, roots)
    return PartSpans(part, rows, len(spans) - len(rows), untimed)


def _kept(spans: Spans, limit: int) -> NDArray[np.int64]:
    order = np.lexsort((-spans.start, spans.kind))[: max(0, limit)]
    return order[np.argsort(spans.start[order], kind="stable")]


def _parents(spans: Spans) -> NDArray[np.int64]:
    """Return the row of the entry around each: as the launch says, as they lie, or its step."""
    parents = np.full(len(spans), -1, np.int64)
    for place in np.unique(spans.place).tolist():
        here = np.flatnonzero(spans.place == place)
        found = nest(spans.start[here], spans.end[here], spans.depth[here]).parents
        parents[here] = np.where(found >= 0, here[found], -1)
    steps = np.flatnonzero(spans.kind == Kind.STEP)
    of_step = dict(zip(spans.step[steps].tolist(), steps.tolist(), strict=True))
    alone = np.flatnonzero((parents < 0) & (spans.step > 0) & (spans.kind != Kind.STEP))
    parents[alone] = [of_step.get(step, -1) for step in spans.step[alone].tolist()]
    inside = np.flatnonzero(spans.parent > 0)
    if len(inside):
        order = np.argsort(spans.trace, kind="stable")
        at = np.searchsorted(spans.trace[order], spans.parent[inside])
        found = order[np.minimum(at, len(order) - 1)]
        same = spans.trace[found] == spans.parent[inside]
        parents[inside[same]] = found[same]
    return parents


def _kept_ancestors(parents: NDArray[np.int64], chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the nearest entry around each that is kept; -1 where there is none."""
    found = parents.copy()
    for _ in range(MAX_DEPTH):
        skipped = (found >= 0) & ~chosen[found]
        if not skipped.any():
            return found
        found[skipped] = parents[found[skipped]]
    return np.where(chosen[found], found, -1)


def _rows(
    run_id: str, spans: Spans, kept: NDArray[np.int64], parents: NDArray[np.int64]
) -> list[SpanRow]:
    seen: Counter[tuple[object, ...]] = Counter()
    span_ids: dict[int, bytes] = {}
    for row in kept.tolist():
        place, launch = spans.places[int(spans.place[row])], int(spans.trace[row])
        start, end = int(spans.start[row]), int(spans.end[row])
        name = spans.names[int(spans.name[row])]
        what: tuple[object, ...] = ("launch", launch) if launch else (place, start, end, name)
        seen[what] += 1
        span_ids[row] = _id(8, run_id, spans.part.name, what, seen[what])
    known: dict[int, bytes] = {}
    return [
        _row(
            spans,
            row,
            int(parents[row]),
            span_ids,
            _trace_id(run_id, row, parents, span_ids, known),
        )
        for row in kept.tolist()
    ]


def _trace_id(
    run_id: str,
    row: int,
    parents: NDArray[np.int64],
    span_ids: dict[int, bytes],
    known: dict[int, bytes],
) -> bytes:
    """Return the id of the trace whose top is the topmost entry around this one."""
    way = [row]
    # A damaged run may say that two launches lie inside each other.
    while parents[way[-1]] >= 0 and way[-1] not in known and len(way) <= len(span_ids):
        way.append(int(parents[way[-1]]))
    top = way[-1]
    trace_id = known.get(top) or _id(16, run_id, "trace", span_ids[top])
    known.update(dict.fromkeys(way, trace_id))
    return trace_id


def _row(
    spans: Spans, row: int, parent: int, span_ids: dict[int, bytes], trace_id: bytes
) -> SpanRow:
    return SpanRow(
        trace_id=trace_id,
        span_id=span_ids[row],
        parent_id=span_ids.get(parent, b""),
        name=spans.names[int(spans.name[row])],
        start_ns=int(spans.start[row]),
        end_ns=int(spans.end[row]),
        kind=Kind(int(spans.kind[row])),
        category=CATEGORIES[int(spans.category[row])],
        place=spans.places[int(spans.place[row])],
        phase=spans.phases[int(spans.phase[row])],
        step=int(spans.step[row]),
        layer=int(spans.layer[row]),
        elements=int(spans.elements[row]),
        launch=int(spans.trace[row]),
        entries=int(spans.entries[row]),
        total_ns=int(spans.total[row]),
    )


def _id(size: int, *what: object) -> bytes:
    """Return bytes that follow from what they name; never all zero, which means none."""
    digest = hashlib.blake2b(repr(what).encode("utf-8", "replace"), digest_size=size).digest()
    return digest if any(digest) else b"\x01" * size
