"""The rows that a Profile is made of: steps, tiles, lanes, spans, and how they were recorded.

Plain data and its arithmetic; it knows nothing of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from brickline.abi import ClockDomain, RecordFlag
from brickline.stats import BrickStats, CategoryStats

TILE_LEVELS = ("macro", "midi", "micro")


@dataclass(frozen=True)
class StepStats:
    """The model passes of one phase."""

    phase: str
    """Empty for passes outside any named phase."""
    stats: BrickStats
    """Durations of the passes; its elements are tokens, its exclusive time is in no brick."""

    @property
    def count(self) -> int:
        """Passes."""
        return self.stats.count

    @property
    def tokens(self) -> int:
        """Tokens of all passes."""
        return self.stats.total_elements

    @property
    def wall_ns(self) -> int:
        """Time of the timed passes, one after the other."""
        return self.stats.total_ns

    @property
    def elapsed_ns(self) -> int:
        """Time in which any pass ran; what passes of several threads or tasks share counts once.

        Summed over processes. Runs of versions that did not count it have `wall_ns` here.
        """
        return self.stats.host_ns or self.wall_ns

    @property
    def us_per_token(self) -> float:
        """Time of a pass over its tokens, of the timed passes; 0 without tokens."""
        tokens = self.stats.timed_elements
        return self.wall_ns / 1e3 / tokens if tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all threads and tasks per second in which any pass ran; 0 without tokens."""
        elapsed = self.elapsed_ns
        return 1e9 * self.stats.timed_elements / elapsed if elapsed else 0.0


@dataclass(frozen=True)
class TileCell:
    """One row, one column, or one place of a brick's tiles."""

    row: int | None
    column: int | None
    """None where the cell sums over the column, or lies past the bound of cells kept apart."""
    count: int
    total_ns: int
    min_ns: int
    max_ns: int
    total_flops: float

    @property
    def avg_us(self) -> float:
        """Mean duration."""
        return self.total_ns / 1e3 / self.count if self.count else 0.0

    @property
    def gflops(self) -> float:
        """Declared FLOPs over measured time."""
        return self.total_flops / self.total_ns if self.total_ns else 0.0


@dataclass(frozen=True)
class TileStats(BrickStats):
    """Tiles of one level; of one brick, or of all where `owner` is None."""

    level: int = 0
    """0 macro, 1 midi, 2 micro."""
    owner: str | None = None
    cells: tuple[TileCell, ...] = ()

    @classmethod
    def from_stats(
        cls, stats: BrickStats, level: int, owner: str | None, cells: Sequence[TileCell] = ()
    ) -> TileStats:
        """Add what is known of tiles only."""
        known = {each.name: getattr(stats, each.name) for each in fields(BrickStats)}
        return cls(**known, level=level, owner=owner, cells=tuple(cells))

    @property
    def level_name(self) -> str:
        """The level in words."""
        return TILE_LEVELS[self.level] if self.level < len(TILE_LEVELS) else f"level {self.level}"

    def peak_share(self, peak_gflops: float) -> float:
        """Part of a measured peak; 0 without one."""
        return self.gflops / peak_gflops if peak_gflops > 0 else 0.0

    def cache_efficiency(self, peak_gflops: float) -> float:
        """Return `peak_share` cut at 1, under the name it is published by."""
        return min(1.0, self.peak_share(peak_gflops))

    def by_row(self) -> list[TileCell]:
        """Sum the cells of each tile row."""
        return _sum_cells(self.cells, "row")

    def by_column(self) -> list[TileCell]:
        """Sum the cells of each tile column."""
        return _sum_cells(self.cells, "column")


def _sum_cells(cells: Sequence[TileCell], axis: str) -> list[TileCell]:
    groups: dict[int | None, list[TileCell]] = {}
    for cell in cells:
        groups.setdefault(getattr(cell, axis), []).append(cell)
    return [
        TileCell(
            row=place if axis == "row" else None,
            column=place if axis == "column" else None,
            count=sum(cell.count for cell in group),
            total_ns=sum(cell.total_ns for cell in group),
            min_ns=min(cell.min_ns for cell in group),
            max_ns=max(cell.max_ns for cell in group),
            total_flops=sum(cell.total_flops for cell in group),
        )
        for place, group in sorted(groups.items(), key=lambda each: (each[0] is None, each[0] or 0))
    ]


@dataclass(frozen=True)
class LaneStats:
    """One recording thread, or one stream of a device."""

    process: int
    lane: int
    thread: int
    clock_domain: ClockDomain
    device: int
    """-1 on the host."""
    stream: int
    name: str
    stats: CategoryStats
    """Its bricks."""
    span_ns: int = 0
    """From the start of the first entry to the end of the last, steps included."""
    fold_ns: int = 0
    lost: int = 0

    @property
    def label(self) -> str:
        """Where it is, in words."""
        if self.clock_domain is ClockDomain.CUDA:
            return f"CUDA:{self.device} stream {self.stream:#x}"
        return self.name or f"thread {self.thread}"


@dataclass(frozen=True)
class Span:
    """One entry of the timeline, on its lane's clock."""

    name: str
    layer: int | None
    phase: str
    step: int
    process: int
    lane: int
    start_ns: int
    end_ns: int
    depth: int
    elements: int
    flags: RecordFlag


@dataclass(frozen=True)
class Recording:
    """How the figures came to be: what was counted, timed, lost, and what it cost."""

    processes: int = 0
    counted: int = 0
    """Entries of bricks, steps and tiles."""
    timed: int = 0
    """Entries with a duration; fewer than `counted` under sampling."""
    approximate: int = 0
    """Spans that the caller supplied."""
    out_of_order: int = 0
    host_bound: int = 0
    lost: int = 0
    orphan_exits: int = 0
    abandoned_timers: int = 0
    pending_device_spans: int = 0
    measuring_ns: float = 0.0
    """Calibrated costs of an entry, times the entries that were timed or only counted."""
    fold_ns: int = 0
    observing_ns: int = 0
    """The host's time for what is recorded beside bricks: tensors, traces, ops, device events."""
    waiting_ns: int = 0
    """The host's time in the waits for a device that a sync mode asks for."""
    unclosed: int = 0
    """Processes that have not closed their part: they run, or were killed."""

    @property
    def overhead_ns(self) -> float:
        """What recording itself took on the host, without waits for a device."""
        return self.measuring_ns + self.fold_ns + self.observing_ns
