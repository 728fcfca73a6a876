"""A run as a Perfetto trace: TrackEvent protobuf, which ui.perfetto.dev and trace_processor open.

Owns which tracks there are and what is on them; `perfetto_packets` owns the packets, `spans` what
there is to show, and `nesting` which entries fit onto one track.

::

    process                        one per part of the run
    ├── thread N                   steps, bricks, tiles and launches of the host; where it enqueued
    │   └── thread N (further 1)   entries that overlap others without lying inside them
    ├── CUDA:0
    │   └── stream 0x…             bricks and kernels on the device's clock
    └── layers of CUDA:0
        └── layer 3                from the first to the last entry of each pass through it

Flows lead from where the host enqueued a launch to the kernel. Times are those of the run's host
clock, CLOCK_MONOTONIC, and a clock snapshot says where that lies in Unix time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.export.nesting import nest
from brickline.export.perfetto_packets import (
    BEGIN,
    END,
    EXPLICIT,
    INSTANT,
    NAME,
    ORDERING,
    PROCESS,
    RANK,
    THREAD,
    Events,
    Flows,
    PacketWriter,
    cut,
)
from brickline.export.spans import CATEGORIES, LAYER, Kind, Spans, clock_shifts, spans_of_part
from brickline.export.wire import bytes_field, number_field, text_field
from brickline.runs import Part, Run

Integers: TypeAlias = NDArray[np.int64]

ANNOTATIONS = ("step", "layer", "elements", "trace", "entries", "total_ns")
"""What is said of an entry when it is selected."""


@dataclass
class Drawn:
    """What an export has put into the trace."""

    slices: int = 0
    instants: int = 0
    flows: int = 0
    tracks: int = 0
    summaries: int = 0
    """Slices that stand for all entries of a brick."""
    overlapping: int = 0
    """Slices on further tracks."""
    untimed: int = 0
    """Entries and launches of which no time is known; they are not in the trace."""


def write_perfetto(run: Run, file: BinaryIO) -> Drawn:
    """Write the trace of a run, live or finished.

    Args:
        run: what to show.
        file: where to; it is only appended to.
    """
    shifts, unix_minus_clock = clock_shifts(run.parts)
    packets, drawn = PacketWriter(file, _number_of(str(run.manifest["id"]))), Drawn()
    anchor = int(run.parts[0].header["anchor_ns"]) + shifts[run.parts[0].name] if run.parts else 0
    packets.begin(anchor, anchor + unix_minus_clock)
    for part in run.parts:
        _PartTracks(packets, drawn, run, part).write(spans_of_part(part, shifts[part.name]))
    drawn.tracks = packets.tracks
    return drawn


def _number_of(run_id: str) -> int:
    """Return the 128 bits of a run's id; another form of id is hashed to as many."""
    if re.fullmatch("[0-9a-f]{32}", run_id):
        return int(run_id, 16)
    return int.from_bytes(hashlib.blake2b(run_id.encode(), digest_size=16).digest(), "big")


class _Home(NamedTuple):
    """A track, and what further ones beside it are called."""

    uuid: int
    label: str


class _PartTracks:
    """The tracks of one process."""

    def __init__(self, packets: PacketWriter, drawn: Drawn, run: Run, part: Part) -> None:
        self._packets, self._drawn = packets, drawn
        self._pid = part.process % 2**31
        label = run.name if len(run.parts) < 2 else f"{run.name}, rank {part.rank}"
        process = number_field(1, self._pid) + text_field(6, cut(label))
        self._process = packets.describe(bytes_field(PROCESS, process))
        self._devices: dict[int, int] = {}
        self._names = {
            int(lane["thread"]): str(lane["name"]) for lane in part.lanes if lane["device"] < 0
        }

    def write(self, spans: Spans) -> None:
        """Write every thread and stream, then the layers."""
        self._drawn.untimed += spans.untimed
        self._drawn.summaries += int(np.count_nonzero(spans.entries))
        launched = np.flatnonzero(spans.enqueue >= 0)
        flows = np.zeros(len(spans), np.uint64)
        flows[launched] = self._packets.flows(len(launched))
        self._drawn.flows += len(launched)
        slices = dict(_groups(spans.place, np.flatnonzero(~spans.instant)))
        points = dict(_groups(spans.place, np.flatnonzero(spans.instant)))
        launches = dict(_groups(spans.thread, launched))
        nothing = np.empty(0, np.int64)
        used = slices.keys() | points.keys() | launches.keys()
        for row in sorted(used, key=lambda row: spans.places[row]):
            home = self._home(spans, row)
            self._slices(spans, slices.get(row, nothing), home, flows)
            moments = (points.get(row, nothing), launches.get(row, nothing))
            self._points(spans, np.concatenate(moments), home, flows)
        for device in sorted({spans.places[row].device for row in slices}):
            self._layers(spans, device)

    def _home(self, spans: Spans, row: int) -> _Home:
        place = spans.places[row]
        if place.device < 0 and place.worker < 0:
            name = cut(self._names.get(place.number) or place.label)
            thread = number_field(1, self._pid) + number_field(2, place.number)
            descriptor = bytes_field(THREAD, thread + text_field(5, name))
            return _Home(self._packets.describe(descriptor, self._process), name)
        above = self._process if place.device < 0 else self._device(place.device)
        descriptor = text_field(NAME, place.label)
        return _Home(self._packets.describe(descriptor, above), place.label)

    def _device(self, number: int) -> int:
        if number not in self._devices:
            text = text_field(NAME, f"CUDA:{number}")
            self._devices[number] = self._packets.describe(text, self._process)
        return self._devices[number]

    def _slices(self, spans: Spans, here: Integers, home: _Home, flows: Flows | None) -> None:
        """Write entries of one place, on as many tracks as they need."""
        nested = nest(spans.start[here], spans.end[here], spans.depth[here])
        for level, order in enumerate(nested.levels):
            uuid = home.uuid
            if level:
                text = text_field(NAME, f"{home.label} (further {level})")
                uuid = self._packets.describe(text, home.uuid)
                self._drawn.overlapping += len(order) // 2
            self._drawn.slices += len(order) // 2
            ends = order < 0
            rows = here[np.where(ends, ~order, order)]
            time = np.where(ends, spans.end[rows], spans.start[rows])
            kind = np.where(ends, END, BEGIN)
            self._events(spans, uuid, rows, time, kind, flows, flow_ends=True)

    def _points(self, spans: Spans, rows: Integers, home: _Home, flows: Flows) -> None:
        """Write moments: launches without a duration, and where the host enqueued others."""
        if not len(rows):
            return
        self._drawn.instants += len(rows)
        time = np.where(spans.instant[rows], spans.start[rows], spans.enqueue[rows])
        kind = np.full(len(rows), INSTANT, np.int64)
        self._events(spans, home.uuid, rows, time, kind, flows, flow_ends=False)

    def _events(
        self,
        spans: Spans,
        uuid: int,
        rows: Integers,
        time: Integers,
        kind: Integers,
        flows: Flows | None,
        *,
        flow_ends: bool,
    ) -> None:
        absent = np.int64(-1)
        annotations = (
            np.where(spans.step[rows] > 0, spans.step[rows], absent),
            spans.layer[rows],
            np.where(spans.elements[rows] > 1, spans.elements[rows], absent),
            np.where(spans.trace[rows] > 0, spans.trace[rows].astype(np.int64), absent),
            np.where(spans.entries[rows] > 0, spans.entries[rows], absent),
            np.where(spans.entries[rows] > 0, spans.total[rows], absent),
        )
        flow = None if flows is None else flows[rows]
        events = Events(
            time, kind, spans.name[rows], spans.category[rows], annotations, flow, flow_ends
        )
        self._packets.write(uuid, events, spans.names, CATEGORIES, ANNOTATIONS)

    def _layers(self, spans: Spans, device: int) -> None:
        passes = layer_passes(spans, device)
        if not len(passes):
            return
        where = "the host" if device < 0 else f"CUDA:{device}"
        text = text_field(NAME, f"layers of {where}") + number_field(ORDERING, EXPLICIT)
        above = self._packets.describe(text, self._process)
        for layer, rows in _groups(passes.layer, np.arange(len(passes))):
            text = text_field(NAME, f"layer {layer}") + number_field(RANK, layer)
            home = _Home(self._packets.describe(text, above), f"layer {layer}")
            self._slices(passes, rows, home, None)


def layer_passes(spans: Spans, device: int) -> Spans:
    """Return one entry per pass through a layer: what follows in one place, step and layer."""
    on_device = np.array([place.device == device for place in spans.places], bool)
    of_work = (spans.kind == Kind.BRICK) & (spans.entries == 0) | (spans.kind == Kind.LAUNCH)
    rows = np.flatnonzero(on_device[spans.place] & of_work & (spans.layer >= 0) & ~spans.instant)
    rows = rows[np.lexsort((spans.start[rows], spans.place[rows]))]
    changes = np.zeros(len(rows), bool)
    changes[:1] = True
    for column in (spans.place[rows], spans.layer[rows], spans.step[rows]):
        changes[1:] |= column[1:] != column[:-1]
    firsts = np.flatnonzero(changes)
    ends = np.maximum.reduceat(spans.end[rows], firsts) if len(rows) else spans.end[rows]
    chosen = spans.take(rows[firsts])
    layers, name = np.unique(chosen.layer, return_inverse=True)
    return replace(
        chosen,
        names=[f"layer {layer}" for layer in layers.tolist()],
        name=name,
        category=np.full(len(firsts), LAYER, np.int64),
        end=ends,
        elements=np.zeros(len(firsts), np.int64),
        trace=np.zeros(len(firsts), np.uint64),
    )


def _groups(column: Integers, rows: Integers) -> Iterator[tuple[int, Integers]]:
    """Return the distinct values of a column in ascending order, each with its rows."""
    rows = rows[np.argsort(column[rows], kind="stable")]
    values, firsts = np.unique(column[rows], return_index=True)
    pieces = np.split(rows, firsts[1:]) if len(firsts) else []
    yield from zip(values.tolist(), pieces, strict=True)
