"""Histogram: durations in base-2 exponential buckets, scale 4.

Bucket ``i`` holds ``(2^(i/16), 2^((i+1)/16)]`` nanoseconds, zero has a count of its own. These are
the edges of OpenTelemetry's exponential histograms and of Prometheus native histograms (whose
index is one higher, because it names the upper edge), so counts convert exactly. It knows nothing
of bricks, nodes or runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import ceil, isqrt
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from brickline.abi import HIST_BINS, HIST_SCALE

Indices: TypeAlias = NDArray[np.int32]
Counts: TypeAlias = NDArray[np.uint64]

FIRST_INDEX = -1
"""The bucket of 1 ns."""
LAST_INDEX = HIST_BINS - 2
"""Longer durations are counted here, 3.2 days and more."""
BUCKET_RATIO = 2.0 ** (1 / 16)
"""Upper edge over lower edge: the largest relative error of a quantile."""


def _whole_edges() -> NDArray[np.uint64]:
    """Return floor(2^(k/16)) for every upper edge, by exact integer roots."""
    edges = (isqrt(isqrt(isqrt(isqrt(1 << k)))) for k in range(LAST_INDEX - FIRST_INDEX + 1))
    return np.fromiter(edges, dtype=np.uint64)


_EDGES = _whole_edges()


def bucket_indices(durations_ns: ArrayLike) -> Indices:
    """Return the bucket of every duration; each must be at least 1 ns."""
    durations = np.asarray(durations_ns, dtype=np.uint64)
    # A whole number lies at or below an edge exactly when it lies at or below the edge's floor.
    found = np.searchsorted(_EDGES, durations, side="left") + FIRST_INDEX
    return np.minimum(found, LAST_INDEX).astype(np.int32)


def _no_indices() -> Indices:
    return np.empty(0, np.int32)


def _no_counts() -> Counts:
    return np.empty(0, np.uint64)


@dataclass(frozen=True, eq=False)
class Histogram:
    """Filled buckets in ascending order."""

    indices: Indices = field(default_factory=_no_indices)
    counts: Counts = field(default_factory=_no_counts)
    zero_count: int = 0
    """Durations of 0 ns, which no exponential bucket holds."""

    @classmethod
    def from_durations(cls, durations_ns: Sequence[int] | NDArray[Any]) -> Histogram:
        """Count raw durations."""
        durations = np.asarray(durations_ns, dtype=np.uint64)
        positive = durations[durations > 0]
        indices, counts = np.unique(bucket_indices(positive), return_counts=True)
        return cls(
            indices.astype(np.int32), counts.astype(np.uint64), len(durations) - len(positive)
        )

    @classmethod
    def from_otlp(cls, point: dict[str, Any]) -> Histogram:
        """Read what `to_otlp` writes."""
        counts = np.asarray(point["positive"]["bucket_counts"], dtype=np.uint64)
        filled = np.flatnonzero(counts)
        indices = (filled + point["positive"]["offset"]).astype(np.int32)
        return cls(indices, counts[filled], point["zero_count"])

    @staticmethod
    def index_of(duration_ns: int) -> int:
        """Return the bucket of one duration of at least 1 ns."""
        return int(bucket_indices(duration_ns))

    @staticmethod
    def bounds(index: int) -> tuple[float, float]:
        """Return the edges of a bucket: lower excluded, upper included."""
        return 2.0 ** (index / 16), 2.0 ** ((index + 1) / 16)

    @property
    def count(self) -> int:
        """All durations, zeros included."""
        return int(self.counts.sum()) + self.zero_count

    def quantile(self, q: float, low: float = 0.0, high: float = float("inf")) -> float:
        """Return the duration in ns below which a share ``q`` of the entries lies.

        It is the entry of rank ``ceil(q * count)``, placed inside its bucket by geometric
        interpolation, so it is off by less than `BUCKET_RATIO`.

        Args:
            q: from 0 to 1.
            low: smallest measured duration, where it is known; the answer is clamped to it.
            high: largest measured duration, likewise.
        """
        if not 0.0 <= q <= 1.0:
            raise ValueError(f"expected a quantile from 0 to 1, got {q!r}")
        count = self.count
        if count == 0:
            return 0.0
        # The small term keeps products such as 0.07 * 100 = 7.000000000000001 at their rank.
        rank = max(1, ceil(q * count - 1e-9))
        if rank <= self.zero_count:
            return 0.0
        reached = np.cumsum(self.counts) + np.uint64(self.zero_count)
        # Counts of a damaged run may wrap around; the last bucket then stands for what is missing.
        at = min(int(np.searchsorted(reached, rank, side="left")), len(self.counts) - 1)
        if at < 0:
            return low
        inside = int(self.counts[at])
        part = (rank - (int(reached[at]) - inside) - 0.5) / inside
        place: float = 2.0 ** ((int(self.indices[at]) + part) / 16)
        return min(max(place, low), high)

    def to_otlp(self) -> dict[str, Any]:
        """Return the fields of an OpenTelemetry exponential histogram data point, in ns."""
        point: dict[str, Any] = {"scale": HIST_SCALE, "zero_count": self.zero_count}
        point["count"] = self.count
        if len(self.indices) == 0:
            point["positive"] = {"offset": 0, "bucket_counts": []}
            return point
        offset = int(self.indices[0])
        dense = np.zeros(int(self.indices[-1]) - offset + 1, np.uint64)
        dense[self.indices - offset] = self.counts
        point["positive"] = {"offset": offset, "bucket_counts": dense.tolist()}
        return point

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return (
            self.zero_count == other.zero_count
            and np.array_equal(self.indices, other.indices)
            and np.array_equal(self.counts, other.counts)
        )

    def __hash__(self) -> int:
        return hash((self.indices.tobytes(), self.counts.tobytes(), self.zero_count))


def quantiles_of_rows(
    counts: NDArray[Any], zero_counts: NDArray[Any], quantile: float
) -> NDArray[np.float64]:
    """Return `Histogram.quantile` of many histograms at once, without bounds; 0 for empty ones.

    Args:
        counts: one row per histogram; column k holds bucket ``k + FIRST_INDEX``.
        zero_counts: durations of 0 ns, one per row.
        quantile: from 0 to 1.
    """
    if not counts.size:
        return np.zeros(len(counts))
    reached = np.cumsum(counts, axis=1)
    total = reached[:, -1] + zero_counts
    rank = np.maximum(1.0, np.ceil(quantile * total - 1e-9)) - zero_counts
    at = np.minimum((reached < rank[:, None]).sum(axis=1), counts.shape[1] - 1)
    rows = np.arange(len(counts))
    inside = np.maximum(counts[rows, at], 1)
    part = (rank - (reached[rows, at] - inside) - 0.5) / inside
    places = 2.0 ** ((at + FIRST_INDEX + part) / 16)
    return np.where((rank > 0) & (reached[:, -1] > 0), places, 0.0)


def merge_histograms(histograms: Iterable[Histogram]) -> Histogram:
    """Add histograms; nothing is lost."""
    parts = list(histograms)
    if not parts:
        return Histogram()
    indices = np.concatenate([part.indices for part in parts])
    unique, place = np.unique(indices, return_inverse=True)
    counts = np.zeros(len(unique), np.uint64)
    np.add.at(counts, place, np.concatenate([part.counts for part in parts]))
    return Histogram(unique, counts, sum(part.zero_count for part in parts))
