"""What a run holds that has a place in time: the timeline's steps, bricks and tiles, and launches.

A run that keeps no timeline knows of each brick when its first entry began, when its last one
ended, and how much time all of them took. Such a brick is one entry, a summary.

Every part becomes columns of the same form, on one clock for the whole run. Exporters of timelines
draw or send them; how, is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline import abi
from brickline.bricks import BrickCategory
from brickline.node_table import Ids, slot_rows
from brickline.runs import Part

Integers: TypeAlias = NDArray[np.int64]

SAME_CLOCK_NS = 100_000_000
"""Parts whose clocks differ by less in their distance to Unix time share a machine's clock."""
LAST_NS = 2**62
"""No clock gets here; what does is damaged."""


class Kind(IntEnum):
    """What an entry is, and at once what is dropped last where not all can be kept."""

    STEP = 0
    BRICK = 1
    LAUNCH = 2
    TILE = 3


KIND_OF_SLOT = np.full(256, Kind.BRICK, np.int64)
KIND_OF_SLOT[[abi.SlotKind.BRICK, abi.SlotKind.STEP, abi.SlotKind.TILE]] = (
    Kind.BRICK,
    Kind.STEP,
    Kind.TILE,
)
CATEGORIES = (*(category.label for category in BrickCategory), "step", "kernel", "tile", "layer")
STEP, KERNEL, TILE, LAYER = range(len(BrickCategory), len(CATEGORIES))


class Place(NamedTuple):
    """Where an entry happened: a thread of the host, a stream, or a worker of a megakernel."""

    device: int
    """-1 on the host."""
    number: int
    """Of the thread, or handle of the stream."""
    worker: int = -1

    @property
    def label(self) -> str:
        """The place in words."""
        where = f"thread {self.number}" if self.device < 0 else f"stream {self.number:#x}"
        return where if self.worker < 0 else f"{where}, worker {self.worker}"


@dataclass(frozen=True)
class Spans:
    """The entries of one part, one row each, and how many could not be placed."""

    part: Part
    names: Sequence[str]
    phases: Sequence[str]
    places: Sequence[Place]
    kind: Integers
    name: Integers
    """Row of `names`."""
    category: Integers
    """Row of `CATEGORIES`."""
    phase: Integers
    place: Integers
    """Row of `places`."""
    start: Integers
    end: Integers
    depth: Integers
    step: Integers
    layer: Integers
    """-1 outside layers."""
    elements: Integers
    instant: NDArray[np.bool_]
    """Launches of which only the moment of enqueueing is known: `start` and `end` are that."""
    trace: NDArray[np.uint64]
    """Id of the launch; 0 for entries of the timeline."""
    parent: NDArray[np.uint64]
    """Id of the launch that this one is a part of; 0: none."""
    enqueue: Integers
    """When the host enqueued a launch that ran elsewhere; -1 otherwise."""
    thread: Integers
    """Row of `places` of the thread that enqueued it."""
    entries: Integers
    """How many entries of a brick this one stands for, from the first to the last; 0: itself."""
    total: Integers
    """Nanoseconds that those took in all; 0 where it stands for itself."""
    untimed: int = 0
    """Entries and launches of which no time is known, so that they have no place here."""

    def __len__(self) -> int:
        return len(self.start)

    def take(self, rows: Integers) -> Spans:
        """Return some of the rows."""
        columns = [each.name for each in fields(self)[4:-1]]
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})


def clock_shifts(parts: Sequence[Part]) -> tuple[dict[str, int], int]:
    """Return what to add to each part's times so that all are on one clock, and that clock's place.

    The clock is the one of the machine that was started first, so nothing becomes negative; parts
    of one machine share its clock, whatever Unix time each of them saw when it began.

    Returns:
        Nanoseconds per part's name, and Unix time minus the common clock.
    """
    offsets = {
        part.name: int(part.header["anchor_unix_ns"]) - int(part.header["anchor_ns"])
        for part in parts
    }
    first = min(offsets.values(), default=0)
    shifts: dict[str, int] = {}
    machine = last = first
    for name, offset in sorted(offsets.items(), key=lambda each: each[1]):
        machine = offset if offset - last > SAME_CLOCK_NS else machine
        last = offset
        shifts[name] = machine - first
    return shifts, first


def spans_of_part(part: Part, shift_ns: int = 0) -> Spans:
    """Return what a part has of timeline and launches, with times moved by `shift_ns`."""
    names, phases, places = Ids(), Ids(), Ids()
    groups = [_timeline(part, names, phases, places), _launches(part, names, phases, places)]
    if not len(part.recent):
        groups.append(_summaries(part, names, phases, places))
    untimed = sum(int(group.pop("untimed")) for group in groups)
    columns = {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}
    for name in ("start", "end"):
        columns[name] = columns[name] + shift_ns
    columns["enqueue"] = np.where(columns["enqueue"] < 0, -1, columns["enqueue"] + shift_ns)
    return Spans(part, names.values, phases.values, places.values, **columns, untimed=untimed)


def _timeline(part: Part, names: Ids, phases: Ids, places: Ids) -> dict[str, Any]:
    start, end = part.recent["start"].astype(np.int64), part.recent["end"].astype(np.int64)
    timed = (part.recent["flags"] & int(abi.RecordFlag.UNTIMED)) == 0
    timed &= (start >= 0) & (start <= end) & (end < LAST_NS)
    rows, lanes = part.recent[timed], part.recent_lanes[timed]
    slots = slot_rows(part, rows["slot"], names)
    kind = KIND_OF_SLOT[np.minimum(slots["kind"], 255)]
    category = np.minimum(slots["category"], len(BrickCategory) - 1).astype(np.int64)
    columns = _columns(rows, start[timed], end[timed])
    return columns | {
        "kind": kind,
        # A step is called by its phase, where it has one.
        "name": np.where(slots["name"] == names[""], names["step"], slots["name"]).astype(np.int64),
        "category": np.select([kind == Kind.STEP, kind == Kind.TILE], [STEP, TILE], category),
        "phase": _phases(part, rows["phase"], phases),
        "place": _lane_places(part, lanes, places),
        "depth": rows["depth"].astype(np.int64),
        "layer": slots["layer"].astype(np.int64),
        "elements": rows["elements_high"].astype(np.int64) << 32 | rows["elements_low"],
        "untimed": np.count_nonzero(~timed),
    }


def _launches(part: Part, names: Ids, phases: Ids, places: Ids) -> dict[str, Any]:
    rows = part.traces
    start, end, enqueue = rows["start_ns"], rows["end_ns"], rows["enqueue_ns"]
    timed = (start >= 0) & (start <= end) & (end < LAST_NS)
    seen = (enqueue >= 0) & (enqueue < LAST_NS)
    rows, timed, seen = rows[timed | seen], timed[timed | seen], seen[timed | seen]
    start, end = (np.where(timed, rows[at], rows["enqueue_ns"]) for at in ("start_ns", "end_ns"))
    thread = _threads(rows["thread"], places)
    elsewhere = timed & ((rows["device"] >= 0) | (rows["worker"] >= 0))
    place = thread.copy()
    place[elsewhere] = _launch_places(rows[elsewhere], places)
    return _columns(rows, start, end) | {
        "kind": np.full(len(rows), Kind.LAUNCH, np.int64),
        "name": _texts(part, rows["name"], names),
        "category": np.full(len(rows), KERNEL, np.int64),
        "phase": _phases(part, rows["phase"], phases),
        "place": place,
        # A launch lies inside the brick that made it, also where both took the same time.
        "depth": np.full(len(rows), 256, np.int64),
        "layer": rows["layer"].astype(np.int64),
        "instant": ~timed,
        "trace": rows["trace"],
        "parent": rows["parent"],
        "enqueue": np.where(elsewhere & seen, rows["enqueue_ns"], -1),
        "thread": thread,
        "untimed": len(part.traces) - len(rows),
    }


def _summaries(part: Part, names: Ids, phases: Ids, places: Ids) -> dict[str, Any]:
    """Return one entry for each brick on each lane, but not for those that launches show."""
    traces, nodes = part.traces, part.nodes
    shown = np.unique(traces["slot"][(traces["start_ns"] >= 0) & (traces["end_ns"] >= 0)])
    slots = slot_rows(part, nodes["slot"], names)
    kind = KIND_OF_SLOT[np.minimum(slots["kind"], 255)]
    wanted = (kind == Kind.BRICK) & ~np.isin(nodes["slot"], shown)
    wanted |= (kind == Kind.STEP) & (len(shown) == 0)
    wanted &= (nodes["timed"] > 0) & (nodes["first_ns"] <= nodes["last_ns"])
    wanted &= nodes["last_ns"] < LAST_NS
    rows, slots, kind = nodes[wanted], slots[wanted], kind[wanted]
    start, end = rows["first_ns"].astype(np.int64), rows["last_ns"].astype(np.int64)
    category = np.minimum(slots["category"], len(BrickCategory) - 1).astype(np.int64)
    return _columns(rows, start, end) | {
        "kind": kind,
        "name": np.where(slots["name"] == names[""], names["step"], slots["name"]).astype(np.int64),
        "category": np.where(kind == Kind.STEP, STEP, category),
        "phase": _phases(part, rows["phase"], phases),
        "place": _lane_places(part, part.node_lanes[wanted], places),
        # A step goes on while its bricks do.
        "depth": np.where(kind == Kind.STEP, 0, 1),
        "layer": slots["layer"].astype(np.int64),
        "elements": np.minimum(rows["elements"], LAST_NS).astype(np.int64),
        "entries": rows["timed"].astype(np.int64),
        "total": np.minimum(rows["total_ns"], LAST_NS).astype(np.int64),
        "untimed": 0,
    }


def _columns(rows: NDArray[Any], start: Integers, end: Integers) -> dict[str, Any]:
    """Return what is in every entry, and what only some have as if it were not there."""
    names, none = rows.dtype.names or (), np.zeros(len(rows), np.int64)
    return {
        "start": start,
        "end": end,
        "step": rows["step"].astype(np.int64) if "step" in names else none,
        "entries": none,
        "total": none,
        "elements": none,
        "instant": np.zeros(len(rows), bool),
        "trace": np.zeros(len(rows), np.uint64),
        "parent": np.zeros(len(rows), np.uint64),
        "enqueue": np.full(len(rows), -1, np.int64),
        "thread": none,
    }


def _by_distinct(values: NDArray[Any], number_of: Any) -> Integers:
    """Return `number_of` each value, asked once for each distinct one."""
    distinct, place = np.unique(values, return_inverse=True)
    return np.array([number_of(each) for each in distinct.tolist()], np.int64)[place]


def _texts(part: Part, ids: NDArray[Any], names: Ids) -> Integers:
    return _by_distinct(ids, lambda number: names[part.string(number)])


def _phases(part: Part, numbers: NDArray[Any], phases: Ids) -> Integers:
    return _by_distinct(numbers, lambda number: phases[part.phases.get(number, "")])


def _threads(threads: NDArray[Any], places: Ids) -> Integers:
    return _by_distinct(threads, lambda thread: places[Place(-1, thread)])


def _lane_places(part: Part, lanes: NDArray[Any], places: Ids) -> Integers:
    known = {int(lane["lane"]): lane for lane in part.lanes}

    def of_lane(number: int) -> int:
        lane = known.get(number)
        if lane is None:
            return places[Place(-1, 0)]
        device = int(lane["device"])
        return places[Place(device, int(lane["thread"] if device < 0 else lane["stream"]))]

    return _by_distinct(lanes, of_lane)


def _launch_places(rows: NDArray[Any], places: Ids) -> Integers:
    number = np.where(rows["device"] < 0, rows["thread"], rows["stream"])
    columns = [np.unique(each, return_inverse=True) for each in (number, rows["worker"])]
    (numbers, at_number), (workers, at_worker) = columns
    devices, at_device = np.unique(rows["device"], return_inverse=True)
    keys = (at_device * len(numbers) + at_number) * len(workers) + at_worker

    def of_key(key: int) -> int:
        rest, worker = divmod(key, len(workers))
        device, at = divmod(rest, len(numbers))
        return places[Place(int(devices[device]), int(numbers[at]), int(workers[worker]))]

    return _by_distinct(keys, of_key)
