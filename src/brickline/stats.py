"""BrickStats: what is known of one brick, or of any group of its measurements.

Numbers and their arithmetic; it knows nothing of nodes, runs, lanes or devices. Every statistic
merges: adding the parts of any split gives the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from typing import Any

from brickline.bricks import BrickCategory, BrickId
from brickline.histogram import Histogram, merge_histograms
from brickline.roofline import BrickBottleneck, Peaks, bottleneck_of

__all__ = [
    "BrickBottleneck",
    "BrickLabel",
    "BrickStats",
    "CategoryStats",
    "Histogram",
    "Peaks",
    "merge",
]


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


@dataclass(frozen=True)
class BrickLabel:
    """What a group of measurements stands for; None where the group spans several."""

    name: str
    brick: BrickId | None = None
    """None for a dynamic brick."""
    category: BrickCategory = BrickCategory.OTHER
    layer: int | None = None
    phase: str | None = None


@dataclass(frozen=True)
class BrickStats(BrickLabel):
    """Statistics of one brick; sums are exact integers.

    Times, bytes, FLOPs and cycles are of the `timed` entries; under sampling `count` is larger.
    """

    count: int = 0
    """Entries counted."""
    timed: int = 0
    """Entries timed; fewer than `count` under sampling."""
    total_ns: int = 0
    """Inclusive time. On a device lane it is the time in the stream, gaps included."""
    min_ns: int = 0
    max_ns: int = 0
    shift_ns: int = 0
    """`sum_squares` is about this duration."""
    sum_squares: float = 0.0
    exclusive_ns: int = 0
    """Time in no inner brick, of the `exclusive_count` entries that were left in order."""
    exclusive_count: int = 0
    total_elements: int = 0
    """Of all counted entries. Elements are not tokens."""
    timed_elements: int = 0
    total_bytes: int = 0
    total_compressed_bytes: int = 0
    """Bytes that went out."""
    total_flops: float = 0.0
    total_cycles: int = 0
    min_cycles: int = 0
    max_cycles: int = 0
    cycles_count: int = 0
    stream_ns: int = 0
    """Of `total_ns`, what device events measured: time in the stream, gaps included."""
    host_ns: int = 0
    """Device lanes: host time between the two enqueues. Steps: `StepStats.elapsed_ns`."""
    host_bound: int = 0
    out_of_order: int = 0
    approximate: int = 0
    histogram: Histogram = field(default_factory=Histogram)

    @classmethod
    def from_durations(
        cls, name: str, durations_ns: Sequence[int], elements: int = 1, **fields: Any
    ) -> BrickStats:
        """Count raw durations of ``elements`` each; ``fields`` overrides any other field."""
        shift = durations_ns[0] if durations_ns else 0
        known: dict[str, Any] = {
            "count": len(durations_ns),
            "timed": len(durations_ns),
            "total_ns": sum(durations_ns),
            "min_ns": min(durations_ns, default=0),
            "max_ns": max(durations_ns, default=0),
            "shift_ns": shift,
            "sum_squares": float(sum((each - shift) ** 2 for each in durations_ns)),
            "exclusive_ns": sum(durations_ns),
            "exclusive_count": len(durations_ns),
            "total_elements": elements * len(durations_ns),
            "timed_elements": elements * len(durations_ns),
            "histogram": Histogram.from_durations(durations_ns),
        }
        return cls(name, **(known | fields))

    @property
    def avg_ns(self) -> float:
        """Mean duration of the timed entries."""
        return _ratio(self.total_ns, self.timed)

    @property
    def avg_us(self) -> float:
        """Mean duration."""
        return self.avg_ns / 1e3

    @property
    def min_us(self) -> float:
        """Shortest duration; 0 when nothing is timed."""
        return self.min_ns / 1e3

    @property
    def max_us(self) -> float:
        """Longest duration."""
        return self.max_ns / 1e3

    @property
    def std_ns(self) -> float:
        """Sample standard deviation (over n - 1); 0 for fewer than two entries."""
        if self.timed < 2:
            return 0.0
        return sqrt(_centred_squares(self) / (self.timed - 1))

    def quantile_ns(self, q: float) -> float:
        """Return a quantile from 0 to 1, at most one bucket (4.4 %) off."""
        return self.histogram.quantile(q, self.min_ns, self.max_ns)

    @property
    def p50_ns(self) -> float:
        """Median."""
        return self.quantile_ns(0.5)

    @property
    def p90_ns(self) -> float:
        """90 % of the entries are not longer."""
        return self.quantile_ns(0.9)

    @property
    def p99_ns(self) -> float:
        """99 % of the entries are not longer."""
        return self.quantile_ns(0.99)

    @property
    def p999_ns(self) -> float:
        """99.9 % of the entries are not longer."""
        return self.quantile_ns(0.999)

    @property
    def throughput(self) -> float:
        """Elements per second."""
        return _ratio(self.timed_elements * 1e9, self.total_ns)

    @property
    def tokens_per_sec(self) -> float:
        """Another name of `throughput`, true where one element is one token."""
        return self.throughput

    @property
    def throughput_gbps(self) -> float:
        """Bytes that came in over time, 10^9 per second."""
        return _ratio(self.total_bytes, self.total_ns)

    @property
    def moved_bytes(self) -> int:
        """Bytes that came in and went out."""
        return self.total_bytes + self.total_compressed_bytes

    @property
    def compression_ratio(self) -> float:
        """Bytes in over bytes out; 1 without data."""
        if not (self.total_bytes and self.total_compressed_bytes):
            return 1.0
        return self.total_bytes / self.total_compressed_bytes

    @property
    def gflops(self) -> float:
        """Declared FLOPs over measured time, 10^9 per second."""
        return _ratio(self.total_flops, self.total_ns)

    @property
    def arithmetic_intensity(self) -> float:
        """Declared FLOPs per declared byte; 0 where no bytes are declared."""
        return _ratio(self.total_flops, self.moved_bytes)

    @property
    def cycles_per_element(self) -> float:
        """Cycles over elements."""
        return _ratio(self.total_cycles, self.timed_elements)

    @property
    def avg_cycles(self) -> float:
        """Mean cycles of the entries that gave them."""
        return _ratio(self.total_cycles, self.cycles_count)

    @property
    def estimated_ipc(self) -> float:
        """Elements per cycle: instructions per cycle if an element took one instruction."""
        return _ratio(self.timed_elements, self.total_cycles)

    def diagnose_from_cycles(self) -> str:
        """Say in words what cycles and time suggest; a guess, unlike `bottleneck`."""
        if not self.total_cycles or not self.total_ns:
            return "insufficient data"
        if self.estimated_ipc < 0.5:
            return "memory-bound"
        if self.estimated_ipc > 2.0:
            return "compute-bound"
        if self.total_ns / self.total_cycles > 1.0:
            return "throttled or context-switched"
        return "balanced"

    def bottleneck(self, peaks: Peaks | None) -> BrickBottleneck:
        """Derive the roof from declared bytes and FLOPs, measured time and measured peaks.

        See `roofline.bottleneck_of` for when it is unknown.
        """
        return bottleneck_of(self.moved_bytes, self.total_flops, self.total_ns, peaks)

    @property
    def exclusive_share(self) -> float:
        """Part of the brick's own time that is in no inner brick."""
        return _ratio(self.exclusive_ns, self.total_ns)

    @property
    def estimated_total_ns(self) -> float:
        """`total_ns` scaled from the timed entries to all counted ones."""
        return _ratio(self.total_ns * self.count, self.timed)

    @property
    def share_ns(self) -> float:
        """The time that shares are made of, scaled from the timed entries to all counted ones.

        Exclusive time, so that nested bricks are not counted twice, and the spans that a caller
        supplied, which have no exclusive time. Entries left out of order have no part in it.
        """
        supplied = max(0, self.timed - self.exclusive_count - self.out_of_order)
        return _ratio((self.exclusive_ns + self.avg_ns * supplied) * self.count, self.timed)

    def us_per_token(self, tokens: int) -> float:
        """Inclusive time of all counted entries over tokens."""
        return _ratio(self.estimated_total_ns / 1e3, tokens)


def _centred_squares(stats: BrickStats) -> float:
    """Return the sum of squares about the mean."""
    away = (stats.total_ns - stats.timed * stats.shift_ns) / stats.timed
    return max(0.0, stats.sum_squares - stats.timed * away * away)


SUMMED = (
    "count",
    "timed",
    "total_ns",
    "exclusive_ns",
    "exclusive_count",
    "total_elements",
    "timed_elements",
    "total_bytes",
    "total_compressed_bytes",
    "total_flops",
    "total_cycles",
    "cycles_count",
    "stream_ns",
    "host_ns",
    "host_bound",
    "out_of_order",
    "approximate",
)
"""Fields of BrickStats that merge by addition."""


def merge(parts: Sequence[BrickStats], label: BrickLabel | None = None) -> BrickStats:
    """Add statistics exactly; layer and phase stay where all parts agree.

    Args:
        parts: at least one.
        label: what the sum stands for; the label of the first part when None.

    Raises:
        ValueError: without parts.
    """
    if not parts:
        raise ValueError("expected at least one BrickStats to merge, got none")
    first = parts[0]
    sums = {name: sum(getattr(part, name) for part in parts) for name in SUMMED}
    timed = [part for part in parts if part.timed]
    cycled = [part for part in parts if part.cycles_count]
    shift = round(sums["total_ns"] / sums["timed"]) if sums["timed"] else 0
    return BrickStats(
        name=label.name if label else first.name,
        brick=label.brick if label else first.brick,
        category=label.category if label else first.category,
        layer=label.layer if label else _common([part.layer for part in parts]),
        phase=label.phase if label else _common([part.phase for part in parts]),
        min_ns=min((part.min_ns for part in timed), default=0),
        max_ns=max((part.max_ns for part in timed), default=0),
        shift_ns=shift,
        # About the common mean every term is positive, so nothing cancels.
        sum_squares=sum(
            _centred_squares(part) + part.timed * (part.total_ns / part.timed - shift) ** 2
            for part in timed
        ),
        min_cycles=min((part.min_cycles for part in cycled), default=0),
        max_cycles=max((part.max_cycles for part in cycled), default=0),
        histogram=merge_histograms(part.histogram for part in parts),
        **sums,
    )


def _common(values: list[Any]) -> Any:
    return values[0] if all(value == values[0] for value in values) else None


@dataclass(frozen=True)
class CategoryStats:
    """Sums over a category, a layer, a phase or a lane."""

    name: str = ""
    count: int = 0
    timed: int = 0
    total_ns: int = 0
    exclusive_ns: int = 0
    total_elements: int = 0
    timed_elements: int = 0
    share_ns: float = 0.0
    """The time that shares are made of, as in `BrickStats.share_ns`, summed node by node."""

    @property
    def avg_us(self) -> float:
        """Mean duration of one entry of any of its bricks."""
        return _ratio(self.total_ns / 1e3, self.timed)

    @property
    def throughput(self) -> float:
        """Elements per second."""
        return _ratio(self.timed_elements * 1e9, self.total_ns)

    def percentage(self, total_ns: float) -> float:
        """Inclusive time as a percentage of a total; 0 where the total is 0."""
        return 100.0 * _ratio(self.total_ns, total_ns)
