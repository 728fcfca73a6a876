"""Parts of a run made by hand, so that the looking half is tested without recording anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.abi import BIN, CELL, NO_SLOT, NODE, RECORD, SLOT, ClockDomain, SlotKind
from brickline.bricks import BrickCategory, BrickId
from brickline.histogram import bucket_indices
from brickline.profile import Profile, profile_from_parts

NOT_YET = np.iinfo(np.uint64).max
"""What the core leaves in a minimum that nothing was compared with."""


def node_row(durations_ns: Sequence[int], **fields: Any) -> NDArray[Any]:
    """One node with the fields that the core would have folded from these durations."""
    row = np.zeros((), NODE)
    shift = durations_ns[0] if durations_ns else 0
    row["count"] = row["timed"] = row["exclusive_count"] = len(durations_ns)
    row["total_ns"] = row["exclusive_ns"] = sum(durations_ns)
    row["min_ns"] = min(durations_ns, default=NOT_YET)
    row["max_ns"] = max(durations_ns, default=0)
    row["shift_ns"] = shift
    row["sum_squares"] = float(sum((each - shift) ** 2 for each in durations_ns))
    row["min_cycles"] = row["first_ns"] = NOT_YET
    row["zero_count"] = sum(each == 0 for each in durations_ns)
    for name, value in fields.items():
        row[name] = value
    return row


def bin_rows(node: int, durations_ns: Sequence[int]) -> list[tuple[int, int, int]]:
    """The filled buckets of one node."""
    positive = [each for each in durations_ns if each]
    found = Counter(bucket_indices(positive).tolist())
    return [(node, index, count) for index, count in sorted(found.items())]


@dataclass
class HandMadePart:
    """Grows call by call; has the attributes of `brickline.runs.Part`."""

    process: int = 100
    overhead_ns: float = 50.0
    header: dict[str, Any] = field(default_factory=dict)
    lanes: list[dict[str, Any]] = field(default_factory=list)
    strings: list[str] = field(default_factory=lambda: [""])
    phases: dict[int, str] = field(default_factory=lambda: {0: ""})
    facts: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    recent: NDArray[Any] = field(default_factory=lambda: np.empty(0, RECORD))
    recent_lanes: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.uint32))
    node_list: list[NDArray[Any]] = field(default_factory=list)
    lane_list: list[int] = field(default_factory=list)
    bin_list: list[tuple[int, int, int]] = field(default_factory=list)
    slot_list: list[tuple[int, ...]] = field(default_factory=list)
    cell_list: list[tuple[Any, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.header = {
            "process": self.process,
            "closed": 1,
            "overhead_ns": self.overhead_ns,
            "lost_records": 0,
            "orphan_exits": 0,
            "abandoned_timers": 0,
            "pending_device_spans": 0,
        } | self.header
        self.add_lane()

    def add_lane(self, domain: ClockDomain = ClockDomain.HOST, **fields: Any) -> int:
        lane = len(self.lanes)
        known = {"lane": lane, "thread": 7 + lane, "threads": 1, "clock_domain": int(domain)}
        known |= {"device": -1, "stream": 0, "name": "", "closed": 1, "fold_ns": 0}
        known |= {"folded": 0, "lost": 0}
        self.lanes.append(known | fields)
        return lane

    def string(self, number: int) -> str:
        return self.strings[number]

    def string_id(self, text: str) -> int:
        if text not in self.strings:
            self.strings.append(text)
        return self.strings.index(text)

    def phase_id(self, phase: str) -> int:
        for number, known in self.phases.items():
            if known == phase:
                return number
        self.phases[len(self.phases)] = phase
        return len(self.phases) - 1

    def slot(
        self,
        kind: SlotKind,
        name: str,
        *,
        layer: int = -1,
        level: int = 0,
        owner: int = NO_SLOT,
        category: BrickCategory | None = None,
    ) -> int:
        brick = BrickId.from_name(name) if kind is SlotKind.BRICK else None
        if category is None:
            category = brick.category if brick is not None else BrickCategory.OTHER
        number = -1 if brick is None else int(brick)
        row = (int(kind), self.string_id(name), number, layer, int(category), level, owner)
        for known in self.slot_list:
            if known[1:] == row:
                return known[0]
        # Numbers with gaps, because nothing promises that there are none.
        self.slot_list.append((3 + 2 * len(self.slot_list), *row))
        return self.slot_list[-1][0]

    def node(self, slot: int, durations_ns: Sequence[int], lane: int = 0, **fields: Any) -> None:
        self.bin_list += bin_rows(len(self.node_list), durations_ns)
        self.node_list.append(node_row(durations_ns, slot=slot, **fields))
        self.lane_list.append(lane)

    def brick(
        self,
        name: str,
        durations_ns: Sequence[int],
        *,
        layer: int = -1,
        phase: str = "",
        lane: int = 0,
        elements: int = 1,
        **fields: Any,
    ) -> HandMadePart:
        slot = self.slot(SlotKind.BRICK, name, layer=layer)
        total = elements * len(durations_ns)
        known = {"elements": total, "timed_elements": total, "phase": self.phase_id(phase)}
        self.node(slot, durations_ns, lane, **(known | fields))
        return self

    def step(
        self,
        phase: str,
        durations_ns: Sequence[int],
        *,
        tokens: int = 1,
        exclusive_ns: int = 0,
        lane: int = 0,
        **fields: Any,
    ) -> HandMadePart:
        number = self.phase_id(phase)
        slot = self.slot(SlotKind.STEP, phase, level=number)
        total = tokens * len(durations_ns)
        known = {"elements": total, "timed_elements": total, "exclusive_ns": exclusive_ns}
        known |= {"phase": number, "first_ns": 0, "last_ns": sum(durations_ns)}
        self.node(slot, durations_ns, lane, **(known | fields))
        return self

    def tile(
        self, owner: str | None, level: int, durations_ns: Sequence[int], **fields: Any
    ) -> HandMadePart:
        of = NO_SLOT if owner is None else self.slot(SlotKind.BRICK, owner)
        slot = self.slot(SlotKind.TILE, ("macro", "midi", "micro")[level], level=level, owner=of)
        self.node(slot, durations_ns, exclusive_ns=0, exclusive_count=0, **fields)
        for column, duration in enumerate(durations_ns):
            self.cell_list.append((slot, 0, column, 0, 1, duration, duration, duration, 10.0, 0))
        return self

    @property
    def nodes(self) -> NDArray[Any]:
        return np.array(self.node_list, NODE) if self.node_list else np.empty(0, NODE)

    @property
    def node_lanes(self) -> NDArray[Any]:
        return np.array(self.lane_list, np.uint32)

    @property
    def bins(self) -> NDArray[Any]:
        return np.array(self.bin_list, BIN)

    @property
    def slots(self) -> NDArray[Any]:
        return np.array(self.slot_list, SLOT)

    @property
    def cells(self) -> NDArray[Any]:
        return np.array(self.cell_list, CELL)

    @property
    def cell_lanes(self) -> NDArray[Any]:
        return np.zeros(len(self.cell_list), np.uint32)


def decode_part(steps: int = 8, layers: int = 4) -> HandMadePart:
    """A healthy decode: bricks cover 95 % of every step of 1 ms."""
    part = HandMadePart()
    part.step("decode", [1_000_000] * steps, exclusive_ns=50_000 * steps)
    for layer in range(layers):
        at = {"layer": layer, "phase": "decode"}
        part.brick("RmsNorm", [10_000] * (2 * steps), elements=64, **at)
        part.brick("AttentionScore", [50_000] * steps, elements=64, **at)
        part.brick(
            "GateProjection", [80_000] * steps, **at, bytes_in=8_000 * steps, flops=16_000.0 * steps
        )
    part.brick("LmHead", [350_000] * steps, phase="decode")
    return part


def profile_of(*parts: HandMadePart, **options: Any) -> Profile:
    """The profile of hand-made parts."""
    return profile_from_parts(parts, **options)  # type: ignore[arg-type]
