"""NodeTable: the nodes of all parts of a run side by side with what each one stands for.

With it any grouping is one pass over arrays. It knows slots, phases and lanes; what is worth
grouping is the matter of `profile_tables`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.abi import BIN, NO_SLOT, NODE, SLOT, ClockDomain, RecordFlag
from brickline.bricks import BrickCategory, BrickId
from brickline.profile_rows import Span
from brickline.stats import BrickLabel

if TYPE_CHECKING:
    from brickline.runs import Part

Integers: TypeAlias = NDArray[np.int64]

UNKNOWN_NAME = "(unknown)"
"""The name of a slot that a damaged run does not describe."""


@dataclass(frozen=True)
class NodeTable:
    """Nodes of all parts, and what each stands for; ids lead into `names`, `phases` and `lanes`."""

    nodes: NDArray[Any]
    bins: NDArray[Any]
    slots: NDArray[Any]
    """The `abi.SLOT` row of every node; its `name` and `owner` are ids of `names`."""
    phase_ids: Integers
    lane_ids: Integers
    names: list[str]
    phases: list[str]
    lanes: list[dict[str, Any]]
    """As the core gives them, with the process added."""

    @cached_property
    def on_device(self) -> NDArray[np.bool_]:
        """For every node whether its times are those of a device's stream."""
        of_lane = [lane["clock_domain"] == ClockDomain.CUDA for lane in self.lanes]
        return np.array([*of_lane, False], bool)[self.lane_ids]


class Ids:
    """Gives every distinct value the next number."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._ids: dict[Any, int] = {}

    def __getitem__(self, value: Any) -> int:
        """Return the number of a value, new or known."""
        known = self._ids.setdefault(value, len(self.values))
        if known == len(self.values):
            self.values.append(value)
        return known


def slot_rows(part: Part, slots: NDArray[Any], names: Ids) -> NDArray[Any]:
    """Return the slot row for each slot number, with `name` and `owner` as ids of ``names``."""
    known = np.append(part.slots, np.zeros(1, SLOT))
    known[-1] = (0, 0, NO_SLOT, -1, -1, BrickCategory.OTHER, 0, NO_SLOT)
    rows_of = {int(slot): row for row, slot in enumerate(part.slots["slot"])}
    own = [names[part.string(index)] for index in part.slots["name"].tolist()]
    own.append(names[UNKNOWN_NAME])
    owners = [int(own[rows_of[slot]]) if slot in rows_of else NO_SLOT for slot in known["owner"]]
    known["name"], known["owner"] = own, owners
    return known[[rows_of.get(slot, -1) for slot in slots.tolist()]]


def node_table(parts: Sequence[Part]) -> NodeTable:
    """Put the nodes of all parts side by side."""
    names, phases = Ids(), Ids()
    lanes: list[dict[str, Any]] = []
    nodes, bins, slots = [np.empty(0, NODE)], [np.empty(0, BIN)], [np.empty(0, SLOT)]
    phase_ids, lane_ids = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    offset = 0
    for part in parts:
        lane_of = {lane["lane"]: len(lanes) + at for at, lane in enumerate(part.lanes)}
        lanes += [{**lane, "process": part.header.get("process", 0)} for lane in part.lanes]
        shifted = part.bins.copy()
        shifted["node"] += offset
        offset += len(part.nodes)
        rows = slot_rows(part, part.nodes["slot"], names)
        of_phase = (part.phases.get(each, "") for each in part.nodes["phase"].tolist())
        nodes.append(part.nodes)
        bins.append(shifted)
        slots.append(rows)
        phase_ids.append(np.fromiter((phases[each] for each in of_phase), np.int64))
        of_lane = (lane_of.get(lane, -1) for lane in part.node_lanes.tolist())
        lane_ids.append(np.fromiter(of_lane, np.int64))
    return NodeTable(
        nodes=np.concatenate(nodes),
        bins=np.concatenate(bins),
        slots=np.concatenate(slots),
        phase_ids=np.concatenate(phase_ids),
        lane_ids=np.concatenate(lane_ids),
        names=names.values,
        phases=phases.values,
        lanes=lanes,
    )


def label_of(
    table: NodeTable, node: int, *, layer: bool = False, phase: bool = False
) -> BrickLabel:
    """Return what a node stands for, its layer and phase only where the group is made by them."""
    _, _, name, brick, at_layer, category, _, _ = table.slots[node].item()
    return BrickLabel(
        name=table.names[name],
        brick=BrickId(brick) if 0 <= brick < BrickId.COUNT else None,
        category=BrickCategory(category) if category < len(BrickCategory) else BrickCategory.OTHER,
        layer=at_layer if layer and at_layer >= 0 else None,
        phase=table.phases[int(table.phase_ids[node])] if phase else None,
    )


def timeline_of(parts: Sequence[Part]) -> list[Span]:
    """Return the entries that the parts keep, oldest first on each lane."""
    spans: list[Span] = []
    for part in parts:
        names = Ids()
        rows = slot_rows(part, part.recent["slot"], names)
        process = int(part.header.get("process", 0))
        for record, slot, lane in zip(part.recent, rows, part.recent_lanes.tolist(), strict=True):
            spans.append(
                Span(
                    name=names.values[int(slot["name"])],
                    layer=int(slot["layer"]) if slot["layer"] >= 0 else None,
                    phase=part.phases.get(int(record["phase"]), ""),
                    step=int(record["step"]),
                    process=process,
                    lane=lane,
                    start_ns=int(record["start"]),
                    end_ns=int(record["end"]),
                    depth=int(record["depth"]),
                    elements=int(record["elements_high"]) << 32 | int(record["elements_low"]),
                    flags=RecordFlag(int(record["flags"])),
                )
            )
    return spans
