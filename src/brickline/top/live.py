"""Live: a process followed over time, and Frame: what there is to show of it at one moment.

Rates are over the last second, figures over the last ten or over the whole recording, and trends
keep a point each half second. Only what is asked of a frame is computed. It knows nothing of
terminals.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from brickline.abi import SlotKind
from brickline.bricks import BrickCategory
from brickline.histogram import quantiles_of_rows
from brickline.top.machine import MachineLoad
from brickline.top.samples import Numbers, Roster, Row, Sample, sample_parts, sums_by

if TYPE_CHECKING:
    from brickline.runs import Part

RATE_S = 1.0
"""Rates are over this time at least."""
WINDOW_S = 10.0
"""Figures of lately are over this time."""
WINDOW_STEP_S = 2.0
TREND_STEP_S = 0.5
TREND_POINTS = 120


class Watched(Protocol):
    """What `watched.WatchedProcess` gives."""

    pid: int

    def statistics(self) -> list[Part]:
        """Return what is recorded by now."""

    def wait(self, seconds: float) -> bool:
        """Wait for the time or for the end of the process; return whether it has ended."""


class Order(Enum):
    """What bricks are sorted by; the value is its name on the screen."""

    SHARE = "share"
    RATE = "calls/s"
    BUSY = "busy"
    COUNT = "count"
    AVG = "avg"
    P50 = "p50"
    P99 = "p99"
    NAME = "name"


@dataclass(frozen=True)
class Figures:
    """Columns of some rows, in the same order; None is a column not known yet."""

    rows: Sequence[int]
    rate: list[float] | None
    """Entries per second, lately."""
    busy: list[float] | None
    """Part of the time that was spent in the row, lately; above 1 with several threads."""
    count: list[float]
    """Entries since the recording began."""
    avg_ns: list[float]
    share: list[float]
    p50_ns: list[float]
    p99_ns: list[float]
    gflops: list[float]
    gbps: list[float]


@dataclass(frozen=True, eq=False)
class Frame:
    """One moment: the sums now, and those to compare them with."""

    now: Sample
    ended: bool = False
    second: Sample | None = None
    """About a second ago."""
    window: Sample | None = None
    """About ten seconds ago, or when watching began."""
    trends: tuple[tuple[Numbers, float], ...] = ()
    """Per half second: part of the time spent in each row, and tokens per second."""
    load: MachineLoad | None = None
    whole: bool = False
    """Whether figures are of the whole recording, and not of the last seconds."""

    @property
    def rows(self) -> list[Row]:
        """What each row stands for."""
        return self.now.roster.rows

    @property
    def window_s(self) -> float | None:
        """The time that figures are over; None for the whole recording."""
        return self.now.time_s - self._base.time_s if self._base is not None else None

    def places(self, kind: SlotKind) -> list[int]:
        """Return the rows of one kind that have entries."""
        counts = self.now.sums["count"]
        return [at for at in self.now.roster.places(kind) if at < len(counts) and counts[at]]

    def bricks(self, order: Order, *, reverse: bool = False, wanted: str = "") -> list[int]:
        """Return brick rows whose name holds `wanted`, in any case, largest first by `order`."""
        text = wanted.casefold()
        chosen = [at for at in self.places(SlotKind.BRICK) if text in self.rows[at].name.casefold()]
        if order is Order.NAME:
            return sorted(chosen, key=lambda at: self.rows[at].name.casefold(), reverse=reverse)
        values = dict(zip(chosen, self._ranking(order, chosen), strict=True))
        chosen.sort(key=lambda at: self.rows[at].name)
        return sorted(chosen, key=lambda at: values[at], reverse=not reverse)

    def _ranking(self, order: Order, rows: list[int]) -> list[float]:
        columns: dict[Order, Callable[[], Numbers]] = {
            Order.RATE: lambda: self._per_second("count"),
            Order.BUSY: lambda: self._per_second("total_ns"),
            Order.COUNT: lambda: self.now.sums["count"],
            Order.AVG: lambda: _ratio(self._spent("total_ns"), self._spent("timed")),
        }
        if order in (Order.P50, Order.P99):
            return self.quantiles(rows, 0.5 if order is Order.P50 else 0.99)
        values = columns.get(order, lambda: self._shares)()
        return [float(each) for each in values[rows]]

    def figures(self, rows: Sequence[int]) -> Figures:
        """Return the columns of some rows."""
        at = list(rows)
        total, timed = self._spent("total_ns")[at], self._spent("timed")[at]
        known = self.second is not None
        return Figures(
            rows=rows,
            rate=self._per_second("count")[at].tolist() if known else None,
            busy=(self._per_second("total_ns")[at] / 1e9).tolist() if known else None,
            count=self.now.sums["count"][at].tolist(),
            avg_ns=_ratio(total, timed).tolist(),
            share=_shared(self._shares[at], self._shares).tolist(),
            p50_ns=self.quantiles(at, 0.5),
            p99_ns=self.quantiles(at, 0.99),
            gflops=_ratio(self._spent("flops")[at], total).tolist(),
            gbps=_ratio(self._spent("bytes_in")[at], total).tolist(),
        )

    def quantiles(self, rows: Sequence[int], quantile: float) -> list[float]:
        """Return a quantile of the durations of some rows, in ns."""
        zeros = self._spent("zero_count")[list(rows)]
        found = quantiles_of_rows(self.buckets(rows), zeros, quantile)
        return [float(each) for each in found]

    def buckets(self, rows: Sequence[int]) -> Numbers:
        """Return the histogram counts of some rows; column k is bucket ``k + FIRST_INDEX``."""
        known = self._buckets.get(tuple(rows))
        if known is None:
            known = self._buckets[tuple(rows)] = self._counted(rows)
        return known

    @cached_property
    def _buckets(self) -> dict[tuple[int, ...], Numbers]:
        return {}

    def _counted(self, rows: Sequence[int]) -> Numbers:
        counts = self.now.buckets(list(rows)).copy()
        if self._base is not None:
            # In one order, so that the base is asked for the same rows again.
            known = sorted(at for at in rows if at < len(self._base.sums["count"]))
            before = self._base.buckets(known)
            of_row = {row: place for place, row in enumerate(rows)}
            places = [of_row[at] for at in known]
            counts[places, : before.shape[1]] -= before[:, : counts.shape[1]]
        return np.maximum(counts, 0.0)

    @cached_property
    def categories(self) -> list[tuple[BrickCategory, float]]:
        """Categories with their share of brick time, largest first."""
        sums = sums_by(self.now.roster.categories, self._shares, len(BrickCategory))
        shares = _shared(sums, sums).tolist()
        found = [(each, shares[each]) for each in BrickCategory if shares[each]]
        return sorted(found, key=lambda each: -each[1])

    @cached_property
    def layers(self) -> list[tuple[int, Numbers]]:
        """Layers with the ns that each category took in them."""
        before = self._base.layer_shares if self._base is not None else {}
        return [
            (layer, np.maximum(cells - before.get(layer, 0.0), 0.0))
            for layer, cells in sorted(self.now.layer_shares.items())
        ]

    @cached_property
    def tokens(self) -> int:
        """Tokens of all steps since the recording began."""
        return int(sum(self.now.sums["elements"][self.places(SlotKind.STEP)]))

    @cached_property
    def tokens_per_s(self) -> float | None:
        """Tokens per second, lately; None where it is not known yet."""
        if self.second is None:
            return None
        return float(self._per_second("elements")[self.places(SlotKind.STEP)].sum())

    @cached_property
    def decode(self) -> int | None:
        """The row of the steps that per-token figures are made of; None without steps."""
        steps = self.places(SlotKind.STEP)
        named = [at for at in steps if self.rows[at].name == "decode"]
        counts = self.now.sums["count"]
        return next(iter(named), max(steps, key=lambda at: counts[at], default=None))

    def trend(self, row: int, points: int) -> list[float]:
        """Return the last parts of the time that were spent in a row, oldest first."""
        return [float(busy[row]) if row < len(busy) else 0.0 for busy, _ in self.trends[-points:]]

    @property
    def _base(self) -> Sample | None:
        return None if self.whole else self.window

    def _spent(self, name: str) -> Numbers:
        return _since(self.now.sums[name], self._base.sums[name] if self._base else None)

    @cached_property
    def _shares(self) -> Numbers:
        return _since(self.now.share_ns, self._base.share_ns if self._base else None)

    def _per_second(self, name: str) -> Numbers:
        if self.second is None:
            return np.zeros(len(self.now.sums[name]))
        return per_second(self.now, self.second, name)


def per_second(now: Sample, before: Sample, name: str) -> Numbers:
    """Return how much a sum has grown per second."""
    return _since(now.sums[name], before.sums[name]) / max(now.time_s - before.time_s, 1e-9)


def _since(now: Numbers, before: Numbers | None) -> Numbers:
    if before is None:
        return now
    grown = now.copy()
    grown[: len(before)] -= before
    # Scaling by what was timed may shrink a share a little; that is no negative time.
    return np.maximum(grown, 0.0)


def _ratio(above: Numbers, below: Numbers) -> Numbers:
    return np.divide(above, below, out=np.zeros(np.shape(above)), where=below > 0)


def _shared(values: Numbers, whole: Numbers) -> Numbers:
    return values / (float(whole.sum()) or 1.0)


@dataclass(eq=False)
class Live:
    """Takes one look after the other, and keeps the past that rates and figures need."""

    process: Watched
    clock: Callable[[], float] = time.monotonic
    roster: Roster = field(default_factory=Roster)
    _seconds: deque[Sample] = field(default_factory=deque)
    _windows: deque[Sample] = field(default_factory=deque)
    _trends: deque[tuple[Numbers, float]] = field(
        default_factory=lambda: deque(maxlen=TREND_POINTS)
    )
    _trend_from: Sample | None = None
    _last: Sample | None = None

    def look(self, load: MachineLoad | None = None, *, whole: bool = False) -> Frame:
        """Return the process as it is now; of one that has ended, its final state."""
        ended = self.process.wait(0.0)
        parts = self.process.statistics()
        now = sample_parts(parts, self.roster, self.clock())
        if self._last is not None and not len(now.nodes) and len(self._last.nodes):
            now = self._last  # the spool cannot be read at this moment
        elif self._last is not None and _count(now) < _count(self._last):
            self._forget()
        self._last = now
        second, window = self._before(now)
        self._add_trend(now)
        return Frame(now, ended, second, window, tuple(self._trends), load, whole)

    def _before(self, now: Sample) -> tuple[Sample | None, Sample | None]:
        """Return what to compare with, and keep this moment for later ones."""
        second = _drop_older(self._seconds, now.time_s - RATE_S)
        window = _drop_older(self._windows, now.time_s - WINDOW_S)
        self._seconds.append(now)
        if not self._windows or now.time_s - self._windows[-1].time_s >= WINDOW_STEP_S:
            self._windows.append(now)
        return second, window

    def _add_trend(self, now: Sample) -> None:
        start = self._trend_from
        if start is not None and now.time_s - start.time_s < TREND_STEP_S:
            return
        self._trend_from = now
        if start is not None:
            steps = self.roster.places(SlotKind.STEP)
            tokens = float(per_second(now, start, "elements")[steps].sum())
            self._trends.append((per_second(now, start, "total_ns") / 1e9, tokens))

    def _forget(self) -> None:
        """Begin anew: the profiler was reset, so sums have fallen."""
        self._seconds.clear()
        self._windows.clear()
        self._trends.clear()
        self._trend_from = None


def _count(sample: Sample) -> float:
    return float(sample.sums["count"].sum())


def _drop_older(samples: deque[Sample], time_s: float) -> Sample | None:
    """Return the youngest sample that is as old as the time, else the oldest; drop the rest."""
    while len(samples) > 1 and samples[1].time_s <= time_s:
        samples.popleft()
    return samples[0] if samples else None
