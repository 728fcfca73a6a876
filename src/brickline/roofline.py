"""Peaks of a machine, and which of them holds a brick back. Knows numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import isfinite

BOUND_SHARE = 0.2
"""A roof explains a brick's time when the brick reaches at least this share of it."""


class BrickBottleneck(Enum):
    """Which roof a brick runs under."""

    UNKNOWN = "unknown"
    MEMORY = "memory"
    COMPUTE = "compute"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Peaks:
    """What the machine reaches at best, as measured on it.

    Raises:
        ValueError: if a peak is not positive and finite.
    """

    gflops: float
    gbps: float
    """Memory bandwidth, 10^9 bytes per second."""

    def __post_init__(self) -> None:
        for name in ("gflops", "gbps"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                raise ValueError(f"expected a positive peak {name}, got {value!r}")


def bottleneck_of(
    moved_bytes: int, flops: float, time_ns: int, peaks: Peaks | None
) -> BrickBottleneck:
    """Return the roof that work comes closest to.

    Unknown without peaks, without declared work, and where less than `BOUND_SHARE` of either roof
    is reached: then latency or overhead takes the time.
    """
    if peaks is None or not time_ns:
        return BrickBottleneck.UNKNOWN
    memory = moved_bytes / time_ns / peaks.gbps
    compute = flops / time_ns / peaks.gflops
    if max(memory, compute) < BOUND_SHARE:
        return BrickBottleneck.UNKNOWN
    return BrickBottleneck.MEMORY if memory >= compute else BrickBottleneck.COMPUTE
