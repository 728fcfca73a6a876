"""From a NodeTable to the tables of a Profile: one function per table.

Each function groups nodes its own way and sums them; none looks at another's table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.abi import ClockDomain, SlotKind
from brickline.node_table import Ids, Integers, NodeTable, label_of, slot_rows
from brickline.nodes import category_stats_from_nodes, stats_from_nodes
from brickline.profile_rows import LaneStats, Recording, StepStats, TileCell, TileStats
from brickline.stats import BrickLabel, BrickStats, CategoryStats, merge

if TYPE_CHECKING:
    from brickline.runs import Part

Mask: TypeAlias = NDArray[np.bool_]
TileKey: TypeAlias = tuple[int, str | None]
"""Level, and the brick that the tiles belong to."""

PAST_BOUND = 0xFFFFFFFF
"""Row and column of the cell that tiles past the bound share."""


def _factorise(keys: NDArray[Any]) -> tuple[Integers, Integers]:
    """Return for each group the place of its first member, and for each member its group."""
    _, first, groups = np.unique(keys, return_index=True, return_inverse=True)
    return first, groups


def _selected_stats(
    table: NodeTable, places: Integers, groups: Integers, labels: Sequence[BrickLabel]
) -> list[BrickStats]:
    """Fold the nodes at ``places``."""
    row_of = np.full(len(table.nodes), -1, np.int64)
    row_of[places] = np.arange(len(places))
    bins = table.bins[row_of[table.bins["node"]] >= 0]
    bins["node"] = row_of[bins["node"]]
    return stats_from_nodes(table.nodes[places], bins, groups, labels, table.on_device[places])


def brick_rows(table: NodeTable, *, layer: bool = False, phase: bool = False) -> list[BrickStats]:
    """Return one row per brick, or per brick and layer or phase."""
    places = np.flatnonzero(table.slots["kind"] == SlotKind.BRICK)
    slots = table.slots[places]
    keys = slots["name"].astype(np.int64) << 32
    if layer:
        keys |= slots["layer"].astype(np.int64) + 1
    if phase:
        keys |= table.phase_ids[places]
    first, groups = _factorise(keys)
    labels = [label_of(table, int(places[at]), layer=layer, phase=phase) for at in first]
    return _selected_stats(table, places, groups, labels)


def category_rows(table: NodeTable, keys: NDArray[Any]) -> dict[int, CategoryStats]:
    """Sum bricks by a key per node; negative keys are left out."""
    chosen = (table.slots["kind"] == SlotKind.BRICK) & (keys >= 0)
    first, groups = _factorise(keys[chosen])
    names = [int(key) for key in keys[chosen][first]]
    bricks = table.slots["name"][chosen].astype(np.int64)
    labels = [str(name) for name in names]
    rows = category_stats_from_nodes(table.nodes[chosen], groups, labels, bricks)
    return dict(zip(names, rows, strict=True))


def domains(table: NodeTable) -> Integers:
    """Return the clock domain of every node."""
    known = [int(lane.get("clock_domain", 0)) for lane in table.lanes] + [int(ClockDomain.HOST)]
    return np.asarray(known, np.int64)[table.lane_ids]


def step_rows(table: NodeTable) -> dict[str, StepStats]:
    """Return the steps by phase; their times are the host's."""
    places = np.flatnonzero(table.slots["kind"] == SlotKind.STEP)
    first, groups = _factorise(table.slots["name"][places])
    names = [table.names[int(table.slots["name"][places[at]])] for at in first]
    labels = [BrickLabel(name=name or "step", phase=name) for name in names]
    rows = _selected_stats(table, places, groups, labels)
    return {name: StepStats(name, row) for name, row in zip(names, rows, strict=True)}


def coverage_of(
    table: NodeTable, steps: Mapping[str, StepStats], bricks: Sequence[BrickStats]
) -> float | None:
    """Return the part of the steps' time that is inside bricks; None without timed steps.

    Bricks on a device lane are inside a step of the host in meaning, not in the lane's nesting:
    there the busiest device lane is what the step was covered by. Where layers are sampled, timed
    steps hold bricks that are only counted, so both sides are scaled to all counted entries.

    Args:
        table: all nodes.
        steps: the steps by phase.
        bricks: one row per brick and phase.
    """
    wall = sum(step.wall_ns for step in steps.values())
    if not wall:
        return None
    inside = [row for row in bricks if row.phase in steps]
    counted, timed = sum(row.count for row in inside), sum(row.timed for row in inside)
    passes = sum(step.count for step in steps.values())
    timed_passes = sum(step.stats.timed for step in steps.values())
    if timed * passes < 0.99 * counted * timed_passes:
        scaled = sum(row.exclusive_ns * row.count / row.timed for row in inside if row.timed)
        return min(1.0, scaled / sum(step.stats.estimated_total_ns for step in steps.values()))
    on_device = (domains(table) == ClockDomain.CUDA) & (table.slots["kind"] == SlotKind.BRICK)
    busy = np.zeros(len(table.lanes) + 1)
    np.add.at(busy, table.lane_ids[on_device], table.nodes["exclusive_ns"][on_device])
    covered = wall - sum(step.stats.exclusive_ns for step in steps.values()) + int(busy.max())
    return min(covered, wall) / wall


def lane_rows(table: NodeTable) -> tuple[LaneStats, ...]:
    """Return one row per thread and stream."""
    sums = category_rows(table, table.lane_ids)
    rows = []
    for at, lane in enumerate(table.lanes):
        mine = table.nodes[(table.lane_ids == at) & (table.nodes["timed"] > 0)]
        span = int(mine["last_ns"].max()) - int(mine["first_ns"].min()) if len(mine) else 0
        rows.append(
            LaneStats(
                process=int(lane["process"]),
                lane=int(lane["lane"]),
                thread=int(lane.get("thread", 0)),
                clock_domain=ClockDomain(lane.get("clock_domain", 0)),
                device=int(lane.get("device", -1)),
                stream=int(lane.get("stream", 0)),
                name=str(lane.get("name", "")),
                stats=sums.get(at, CategoryStats(str(at))),
                span_ns=span,
                fold_ns=int(lane.get("fold_ns", 0)),
                lost=int(lane.get("lost", 0)),
            )
        )
    return tuple(rows)


def tile_rows(table: NodeTable, cells: dict[TileKey, list[TileCell]]) -> tuple[TileStats, ...]:
    """Return one row per level and brick."""
    places = np.flatnonzero(table.slots["kind"] == SlotKind.TILE)
    slots = table.slots[places]
    first, groups = _factorise(slots["level"].astype(np.int64) << 32 | slots["owner"])
    keys = [_tile_key(table.names, slots[at]) for at in first]
    labels = [BrickLabel(owner or "tiles") for _, owner in keys]
    rows = _selected_stats(table, places, groups, labels)
    return tuple(
        TileStats.from_stats(row, level, owner, cells.get((level, owner), ()))
        for (level, owner), row in zip(keys, rows, strict=True)
    )


def _tile_key(names: list[str], slot: Any) -> TileKey:
    owner = int(slot["owner"])
    return int(slot["level"]), names[owner] if owner < len(names) else None


def tile_level_rows(tiles: Sequence[TileStats]) -> tuple[TileStats, ...]:
    """Sum the tiles of each level."""
    rows = []
    for level in sorted({tile.level for tile in tiles}):
        group = [tile for tile in tiles if tile.level == level]
        total = merge(group, BrickLabel(group[0].level_name))
        cells = [cell for tile in group for cell in tile.cells]
        rows.append(TileStats.from_stats(total, level, None, cells))
    return tuple(rows)


def tile_cells(parts: Sequence[Part]) -> dict[TileKey, list[TileCell]]:
    """Return the cells of each level and brick, lanes and processes summed."""
    sums: dict[tuple[TileKey, int | None, int | None], TileCell] = {}
    for part in parts:
        if not len(part.cells):
            continue
        names = Ids()
        slots = slot_rows(part, part.cells["slot"], names)
        for cell, slot in zip(part.cells, slots, strict=True):
            apart = cell["row"] != PAST_BOUND
            row, column = (int(cell["row"]), int(cell["column"])) if apart else (None, None)
            key = (_tile_key(names.values, slot), row, column)
            known = sums.get(key)
            low, high = int(cell["min_ns"]), int(cell["max_ns"])
            sums[key] = TileCell(
                row,
                column,
                count=int(cell["count"]) + (known.count if known else 0),
                total_ns=int(cell["total_ns"]) + (known.total_ns if known else 0),
                min_ns=min(low, known.min_ns) if known else low,
                max_ns=max(high, known.max_ns) if known else high,
                total_flops=float(cell["flops"]) + (known.total_flops if known else 0.0),
            )
    cells: dict[TileKey, list[TileCell]] = {}
    for (tile, _, _), summed in sums.items():
        cells.setdefault(tile, []).append(summed)
    return cells


def recording_of(parts: Sequence[Part], table: NodeTable) -> Recording:
    """Return how the figures came to be."""

    def header(name: str) -> int:
        return sum(int(part.header.get(name, 0)) for part in parts)

    def nodes(name: str) -> int:
        return int(table.nodes[name].sum())

    measuring = 0.0
    for part in parts:
        count, timed = (int(part.nodes[name].sum()) for name in ("count", "timed"))
        measuring += float(part.header.get("overhead_ns", 0.0)) * timed
        measuring += float(part.header.get("counting_ns", 0.0)) * (count - timed)
    return Recording(
        processes=len({part.header.get("process", 0) for part in parts}),
        counted=nodes("count"),
        timed=nodes("timed"),
        approximate=nodes("approximate"),
        out_of_order=nodes("out_of_order"),
        host_bound=nodes("host_bound"),
        lost=header("lost_records"),
        orphan_exits=header("orphan_exits"),
        abandoned_timers=header("abandoned_timers"),
        pending_device_spans=header("pending_device_spans"),
        observing_ns=header("observing_ns"),
        waiting_ns=header("waiting_ns"),
        measuring_ns=measuring,
        fold_ns=sum(int(lane.get("fold_ns", 0)) for lane in table.lanes),
        unclosed=sum(not part.header.get("closed", 0) for part in parts),
    )
