"""MegakernelTelemetry: counters of one run of a megakernel, each measured or None.

Also what follows from measured times: how busy workers were, how much was ready for them, and the
words for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from brickline.errors import UsageError
from brickline.megakernel_tables import MAX_COUNT, Column, Spans, WorkerTimes

WHOLE_BPS = 10_000
"""Basis points of 1."""
SPARSE_BPS, DENSE_BPS, CONSTRAINED_BPS = 500, 4_000, 8_500
TOPOLOGIES = ("empty", "memory-constrained", "sparse", "hybrid", "dense")
PRESSURES = ("empty", "light", "balanced", "saturated")


@dataclass(frozen=True)
class MegakernelTelemetry:
    """Counters for performance gates; None where nobody measured."""

    bytes_uploaded: int | None = None
    """From the host to the device for this run: tables, arguments, submissions."""
    bytes_read_back: int | None = None
    """From the device to the host."""
    bytes_moved: int | None = None
    """Both together; found by itself where both are known."""
    resident_allocations: int | None = None
    """Pieces of device memory that were allocated for this run; 0 where earlier ones served."""
    kernel_launches: int | None = None
    """Launches; on a CPU, how often workers were started."""
    sync_points: int | None = None
    """How often the host waited for the device."""
    occupancy_bps: int | None = None
    """Time inside items to workers times `backend_dispatch_ns`, in basis points."""
    frontier_density_bps: int | None = None
    """Items ready or running, averaged over the run, to workers; may pass 10,000."""
    readback_buffers: int | None = None
    """Pieces of memory whose contents the host got from the device."""
    compiled_cache_hit: bool | None = None
    """Whether all code was compiled before."""
    resident_cache_hit: bool | None = None
    """Whether tables were there from an earlier run."""
    topology: str | None = None
    """One of `TOPOLOGIES`."""
    pressure: str | None = None
    """One of `PRESSURES`."""
    execution_mode: str | None = None
    """Such as ``threads`` or ``cooperative``."""
    capacity: int | None = None
    """Items that may be queued at once: slots of a queue, items of a program."""
    peak_memory_bytes: int | None = None
    memory_budget_bytes: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each.name, getattr(self, each.name), str(each.type))
        if self.bytes_uploaded is not None and self.bytes_read_back is not None:
            both = self.bytes_uploaded + self.bytes_read_back
            if self.bytes_moved is None:
                object.__setattr__(self, "bytes_moved", both)
            elif self.bytes_moved != both:
                raise UsageError(
                    f"telemetry, bytes_moved: expected {both}, both ways together, got "
                    f"{self.bytes_moved}"
                )

    def known(self) -> dict[str, Any]:
        """Return what was measured, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in found.items() if value is not None}


def _check(name: str, value: Any, kind: str) -> None:
    if value is None:
        return
    expected = kind.removesuffix(" | None")
    if kind.startswith("bool"):
        fits = isinstance(value, bool)
    elif kind.startswith("str"):
        choices = {"topology": TOPOLOGIES, "pressure": PRESSURES}.get(name, ())
        fits = isinstance(value, str) and (not choices or value in choices)
        expected = ", ".join(choices) or expected
    else:
        fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_COUNT
        expected = f"a number from 0 to {MAX_COUNT - 1}"
    if not fits:
        raise UsageError(f"telemetry, {name}: expected {expected}, got {value!r:.80}")


def occupancy_bps(workers: Sequence[WorkerTimes], time_ns: int) -> int | None:
    """Return how much of a time workers spent inside items; None where it was not measured.

    Args:
        workers: What each did.
        time_ns: From the start of the workers until all have left.
    """
    work = [worker.work_ns for worker in workers]
    if not workers or None in work or not time_ns:
        return None
    share = sum(each or 0 for each in work) / (len(workers) * time_ns)
    return min(round(WHOLE_BPS * share), WHOLE_BPS)


def frontier_density_bps(
    spans: Spans | None, waits_begin: Column, waits: Column, region: Column, workers: int
) -> int | None:
    """Return how many items were ready or running on average, to workers.

    A part of a task is ready when the last part of the last task that it waits for has ended, and
    the worker's own part of the task before it in its region. From then on it counts with all of
    its items until it begins, and with fewer and fewer until it ends. None without spans.
    """
    if spans is None or not len(spans) or not workers:
        return None
    first, last = int(spans.begin_ns.min()), int(spans.end_ns.max())
    if last <= first:
        return None
    count = len(waits_begin) - 1
    ended = np.full(count + 1, first, np.int64)
    np.maximum.at(ended, spans.task, spans.end_ns)
    whose = np.repeat(np.arange(count), np.diff(waits_begin))
    ready = np.full(count, first, np.int64)
    np.maximum.at(ready, whose, ended[waits])
    since = np.maximum(ready[spans.task], _own_end(spans, region))
    stood = np.maximum(spans.ready_ns - since, 0)
    integral = (spans.items * (stood + spans.work_ns / 2) + spans.work_ns / 2).sum()
    return round(WHOLE_BPS * float(integral) / (last - first) / workers)


def _own_end(spans: Spans, region: Column) -> Column:
    """Return when a worker's part before each, of the same region, ended; 0 where there is none."""
    order = np.lexsort((spans.begin_ns, spans.worker))
    worker, mine = spans.worker[order], region[spans.task[order]]
    same = (worker[1:] == worker[:-1]) & (mine[1:] == mine[:-1])
    found = np.zeros(len(spans), np.int64)
    found[order[1:]] = np.where(same, spans.end_ns[order[:-1]], 0)
    return found


def topology_of(
    items: int, density_bps: int | None, peak_bytes: int | None, budget_bytes: int | None
) -> str | None:
    """Return what kind of work it was; None where its density was not measured."""
    if not items:
        return "empty"
    if budget_bytes and WHOLE_BPS * (peak_bytes or 0) >= CONSTRAINED_BPS * budget_bytes:
        return "memory-constrained"
    if density_bps is None:
        return None
    if density_bps <= SPARSE_BPS:
        return "sparse"
    return "dense" if density_bps >= DENSE_BPS else "hybrid"


def pressure_of(items: int, workers: int, requeued: int = 0) -> str:
    """Return how much there was to do for the workers."""
    if not items:
        return "empty"
    if requeued or items >= 4 * workers:
        return "saturated"
    return "balanced" if items >= workers else "light"
