"""One look at what a process records: sums per brick, step and tile, as arrays.

A look is taken many times a second, so nothing becomes an object per row here. `Roster` knows which
row each slot belongs to and gives a row its number for good; `Sample` holds the sums of one moment,
and two of them subtract. It knows nothing of time windows nor of how rows look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.abi import BIN, NODE, SlotKind
from brickline.bricks import BrickCategory
from brickline.histogram import FIRST_INDEX
from brickline.node_table import UNKNOWN_NAME
from brickline.nodes import share_ns_of_nodes
from brickline.profile_rows import TILE_LEVELS

if TYPE_CHECKING:
    from brickline.runs import Part

Numbers: TypeAlias = NDArray[np.float64]
Places: TypeAlias = NDArray[np.int64]

SUMS = ("count", "timed", "total_ns", "exclusive_ns", "elements", "zero_count", "flops", "bytes_in")
"""Columns of a node that are summed per row."""


@dataclass(frozen=True)
class Row:
    """What a row stands for."""

    kind: SlotKind
    name: str
    """The brick; of steps the phase; of tiles the brick that they are part of."""
    category: BrickCategory = BrickCategory.OTHER
    level: int = 0

    @property
    def level_name(self) -> str:
        """The level of tiles in words."""
        return TILE_LEVELS[self.level] if self.level < len(TILE_LEVELS) else f"level {self.level}"


@dataclass(frozen=True)
class SlotRows:
    """For every slot of one part its row and layer; the last entry is for slots not described."""

    rows: Places
    layers: Places


class Roster:
    """Gives rows their numbers; a row keeps its own for as long as the process is watched."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self._numbers: dict[Row, int] = {}
        self._parts: dict[tuple[Any, ...], SlotRows] = {}

    def places(self, kind: SlotKind) -> list[int]:
        """Return the rows of one kind."""
        return [at for at, row in enumerate(self.rows) if row.kind is kind]

    @property
    def categories(self) -> Places:
        """The category of every row."""
        return np.array([int(row.category) for row in self.rows], np.int64)

    @property
    def is_brick(self) -> NDArray[np.bool_]:
        """For every row whether it is a brick."""
        return np.array([row.kind is SlotKind.BRICK for row in self.rows], bool)

    def of_part(self, part: Part) -> SlotRows:
        """Return where the slots of a part belong; made anew only when it has more of them."""
        key = (part.path, part.header.get("created_unix_ns"), len(part.slots))
        known = self._parts.get(key)
        if known is None:
            known = self._parts[key] = self._of_slots(part)
        return known

    def _of_slots(self, part: Part) -> SlotRows:
        slots = part.slots
        size = int(slots["slot"].max()) + 2 if len(slots) else 1
        rows = np.full(size, self._number(Row(SlotKind.BRICK, UNKNOWN_NAME)), np.int64)
        layers = np.full(size, -1, np.int64)
        names = {int(slot["slot"]): part.string(int(slot["name"])) for slot in slots}
        for slot in slots:
            at = int(slot["slot"])
            rows[at] = self._number(_row_of(slot, names))
            layers[at] = int(slot["layer"])
        return SlotRows(rows, layers)

    def _number(self, row: Row) -> int:
        known = self._numbers.setdefault(row, len(self.rows))
        if known == len(self.rows):
            self.rows.append(row)
        return known


def _row_of(slot: Any, names: dict[int, str]) -> Row:
    kind, number = int(slot["kind"]), int(slot["category"])
    if kind == SlotKind.TILE:
        return Row(SlotKind.TILE, names.get(int(slot["owner"]), ""), level=int(slot["level"]))
    name = names[int(slot["slot"])]
    if kind == SlotKind.STEP:
        return Row(SlotKind.STEP, name)
    known = number < len(BrickCategory)
    return Row(SlotKind.BRICK, name, BrickCategory(number) if known else BrickCategory.OTHER)


@dataclass(frozen=True, eq=False)
class Sample:
    """The sums of one moment, by row number; rows that came later are missing at the end."""

    time_s: float
    roster: Roster
    nodes: NDArray[Any] = field(repr=False)
    bins: NDArray[Any] = field(repr=False)
    rows: Places = field(repr=False)
    """The row of every node."""
    layers: Places = field(repr=False)
    sums: dict[str, Numbers]
    lost: int = 0
    problems: tuple[str, ...] = ()

    @cached_property
    def share_ns(self) -> Numbers:
        """What shares are made of, per row; 0 for rows that are no bricks."""
        shares = share_ns_of_nodes(self.nodes[self._bricks], self.rows[self._bricks])
        return sums_by(self.rows[self._bricks], shares, len(self.roster.rows))

    @cached_property
    def layer_shares(self) -> dict[int, Numbers]:
        """The same per layer and category; sampling is undone by layer, as in `Profile.layers`."""
        chosen = self._bricks & (self.layers >= 0)
        rows, layers = self.rows[chosen], self.layers[chosen]
        if not len(rows):
            return {}
        width, depth = len(BrickCategory), int(layers.max()) + 1
        shares = share_ns_of_nodes(self.nodes[chosen], rows * depth + layers)
        places = layers * width + self.roster.categories[rows]
        cells = sums_by(places, shares, depth * width).reshape(depth, width)
        return {layer: cells[layer] for layer in np.unique(layers).tolist()}

    @cached_property
    def _bricks(self) -> NDArray[np.bool_]:
        return self.roster.is_brick[self.rows]

    def buckets(self, rows: Sequence[int]) -> Numbers:
        """Return the histogram counts of some rows, as `histogram.quantiles_of_rows` takes them.

        The last answer is kept: a sample that others are compared with is asked many times.
        """
        if self._asked.get("rows") != rows:
            self._asked.update(rows=list(rows), counts=self._counted(rows))
        counts: Numbers = self._asked["counts"]
        return counts

    @cached_property
    def _asked(self) -> dict[str, Any]:
        return {}

    def _counted(self, rows: Sequence[int]) -> Numbers:
        place = np.full(len(self.roster.rows), -1, np.int64)
        place[list(rows)] = np.arange(len(rows))
        of_bin = place[self.rows][self.bins["node"]]
        chosen = of_bin >= 0
        index = self.bins["index"][chosen].astype(np.int64) - FIRST_INDEX
        width = int(index.max(initial=-1)) + 1
        places = of_bin[chosen] * width + index
        flat = sums_by(places, self.bins["count"][chosen], len(rows) * width)
        return flat.reshape(len(rows), width)


def sums_by(places: Places, values: NDArray[Any], size: int) -> Numbers:
    """Return for each of so many places the sum of its values."""
    return np.bincount(places, values, minlength=size).astype(np.float64, copy=False)


def sample_parts(parts: Sequence[Part], roster: Roster, time_s: float) -> Sample:
    """Sum what the parts hold, row by row."""
    nodes: list[NDArray[Any]] = []
    bins: list[NDArray[Any]] = []
    rows: list[Places] = []
    layers: list[Places] = []
    offset = 0
    for part in parts:
        known = roster.of_part(part)
        at = np.minimum(part.nodes["slot"], len(known.rows) - 1)
        rows.append(known.rows[at])
        layers.append(known.layers[at])
        nodes.append(part.nodes)
        shifted = part.bins
        if offset:
            shifted = shifted.copy()
            shifted["node"] += offset
        bins.append(shifted)
        offset += len(part.nodes)
    all_nodes, all_rows = _joined(nodes, NODE), _joined(rows, np.int64)
    size = len(roster.rows)
    return Sample(
        time_s=time_s,
        roster=roster,
        nodes=all_nodes,
        bins=_joined(bins, BIN),
        rows=all_rows,
        layers=_joined(layers, np.int64),
        sums={name: sums_by(all_rows, all_nodes[name], size) for name in SUMS},
        lost=sum(int(part.header.get("lost_records", 0)) for part in parts),
        problems=tuple(each for part in parts for each in part.problems),
    )


def _joined(pieces: list[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    # Joining rows of many fields compares the fields each time; mostly there is one part.
    return pieces[0] if len(pieces) == 1 else np.concatenate([np.empty(0, dtype), *pieces])
