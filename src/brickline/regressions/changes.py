"""Which bricks became slower or faster between two sets of runs, and how sure that is.

Pure arithmetic on profiles. A run gives one figure for each brick and phase; what the figures of
the runs of one side differ by is the noise, and a change is called one only where it stands out of
it. So the unit of variation is the run: a million entries of one run say nothing about the next.

The method, in full:

- The figure of a run is the mean duration without the longest 5 % of the entries, in which the
  operating system takes its turns: the exact sum, less what the histogram says of that tail.
- The change is the difference of the mean logarithms of both sides, so a factor.
- Its interval is Welch's: each side has a variance of its own, in which a brick borrows from the
  others of its side (see `run_noise`). A variance is never taken for less than what the spread
  within the runs makes of their means.
- The intervals of all rows hold together: each is as wide as Bonferroni demands for the number of
  rows. So where nothing changed, at most ``1 - confidence`` of the comparisons name any row at all.
- Half of an interval is what a change must exceed to be shown: the row's visible size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import exp, expm1, log, sqrt
from statistics import fmean, median
from typing import NamedTuple

import numpy as np

from brickline.errors import UsageError
from brickline.profile import Profile
from brickline.regressions.run_noise import WITHIN_RUNS, Noise, noise_of
from brickline.stats import BrickStats
from brickline.student import student_quantile

LEAST_RUNS = 3
"""Runs a side; fewer show no change, because a variance from two is a guess."""
CONFIDENCE = 0.95
TRIMMED = 0.05
"""Part of the entries, the longest, that is left out of a run's figure."""
LEAST_TRIMMED = 10
"""Of fewer entries, none is left out."""

ALONE = 0.2
"""Part of the probability of error that goes to intervals by a brick's own runs alone."""
MOST_FREEDOM = 1e6
"""Degrees of freedom from which Student's distribution is the normal one."""
MOST_LOG = 700.0
"""Logarithm of a factor that a float still holds."""


class Kind(StrEnum):
    """What a row is about."""

    STEP = "step"
    BRICK = "brick"


class Key(NamedTuple):
    """What is compared between the sides."""

    kind: Kind
    name: str
    phase: str


class Direction(StrEnum):
    """What is said of a row."""

    SLOWER = "slower"
    FASTER = "faster"
    UNCHANGED = "no change shown"


class Figure(NamedTuple):
    """One brick in one run."""

    ns: float
    """Typical duration of an entry."""
    sampling: float
    """Relative variance of `ns` that the spread of the entries within the run makes."""
    per_step: float | None
    """Entries for each step of the phase; None without steps."""
    share_ns: float
    """What shares of time are made of."""


@dataclass(frozen=True)
class Change:
    """How one brick, or the step, of one phase differs between the sides."""

    kind: Kind
    name: str
    phase: str
    base_ns: float
    """Typical duration of an entry: geometric mean over the runs of the base."""
    ns: float
    low: float | None
    """Relative change, lower end: -0.02 is 2 % less time. None with fewer than `LEAST_RUNS` runs
    on a side, as is `high`."""
    change: float
    high: float | None
    visible: float
    """The smallest slowdown that could have been shown. With one run a side it is what the spread
    within the runs hides, and the noise between runs, which is unknown, may hide more."""
    share: float
    """Part of the base's brick time in this phase's rows; 1 for steps."""
    noise: float | None
    """Relative standard deviation from run to run, the larger of both sides; None with one run a
    side."""
    per_step: float | None = None
    """Entries for each step; None without steps."""
    base_per_step: float | None = None

    @property
    def direction(self) -> Direction:
        """Slower or faster only where the interval does not hold 0."""
        if self.low is not None and self.low > 0.0:
            return Direction.SLOWER
        faster = self.high is not None and self.high < 0.0
        return Direction.FASTER if faster else Direction.UNCHANGED

    def exceeds(self, limit: float) -> bool:
        """Whether it is shown to be slower, and by more than `limit` at the best estimate."""
        return self.direction is Direction.SLOWER and self.change > limit


@dataclass(frozen=True)
class Changes:
    """What became of every brick. Made by `changes_between`."""

    runs: int
    base_runs: int
    rows: tuple[Change, ...] = ()
    """Steps first; then what is shown to have changed, by its part of the time; then the rest."""
    only_here: tuple[Key, ...] = ()
    only_base: tuple[Key, ...] = ()
    too_few: tuple[Key, ...] = ()
    """Recorded on both sides, and on one of them in too few of its runs."""
    confidence: float = CONFIDENCE

    @property
    def enough(self) -> bool:
        """Whether both sides have enough runs to show a change."""
        return min(self.runs, self.base_runs) >= LEAST_RUNS

    @property
    def slower(self) -> tuple[Change, ...]:
        """What is shown to be slower."""
        return tuple(row for row in self.rows if row.direction is Direction.SLOWER)

    @property
    def faster(self) -> tuple[Change, ...]:
        """What is shown to be faster."""
        return tuple(row for row in self.rows if row.direction is Direction.FASTER)

    def over(self, limit: float) -> tuple[Change, ...]:
        """Return what is slower by more than `limit`, a relative change."""
        return tuple(row for row in self.rows if row.exceeds(limit))

    def unsure(self, limit: float) -> tuple[Change, ...]:
        """Return what is slower by more than `limit` at the best estimate, and may be by chance."""
        return tuple(row for row in self.rows if row.change > limit and not row.exceeds(limit))

    @property
    def visible(self) -> tuple[float, float, float] | None:
        """The smallest, median and largest visible size of the rows; None without rows."""
        sizes = [row.visible for row in self.rows]
        return (min(sizes), median(sizes), max(sizes)) if sizes else None

    @property
    def common(self) -> float | None:
        """The change that nearly all bricks share; None where they do not move together.

        A machine that runs hotter, or another one, moves every brick; a change of code seldom does.
        """
        moved = [row.change for row in self.rows if row.kind is Kind.BRICK]
        shown = [row for row in (*self.slower, *self.faster) if row.kind is Kind.BRICK]
        if len(moved) < 4 or len(shown) * 2 < len(moved):
            return None
        middle = median(moved)
        near = [each for each in moved if abs(each - middle) <= max(0.5 * abs(middle), 0.01)]
        return middle if len(near) * 10 >= len(moved) * 9 else None


def changes_between(
    runs: Sequence[Profile], base: Sequence[Profile], *, confidence: float = CONFIDENCE
) -> Changes:
    """Hold the runs of one side against those of the other.

    Args:
        runs: Profiles of the runs in question, each recorded anew.
        base: Profiles of the runs that they are held against.
        confidence: Probability with which all intervals hold. Default 0.95.

    Raises:
        UsageError: if the confidence is not between 0.5 and 1.
    """
    if not 0.5 <= confidence < 1.0:
        raise UsageError(f"confidence: expected a number from 0.5 to 1, got {confidence!r}")
    ours, theirs = _by_key(runs), _by_key(base)
    found = Changes(
        runs=len(runs),
        base_runs=len(base),
        only_here=tuple(key for key in ours if key not in theirs),
        only_base=tuple(key for key in theirs if key not in ours),
        confidence=confidence,
    )
    both = [key for key in theirs if key in ours]
    few = [min(LEAST_RUNS, len(side)) for side in (runs, base)]
    keys = [key for key in both if len(ours[key]) >= few[0] and len(theirs[key]) >= few[1]]
    totals = _total_share(theirs)
    tail = (1.0 - confidence) / 2.0
    intervals = _intervals([ours[key] for key in keys], [theirs[key] for key in keys], tail)
    rows = [
        _change(key, ours[key], theirs[key], interval, totals, shown=found.enough)
        for key, interval in zip(keys, intervals, strict=True)
    ]
    too_few = tuple(key for key in both if key not in set(keys))
    return Changes(**{**vars(found), "rows": tuple(sorted(rows, key=_order)), "too_few": too_few})


def _intervals(
    ours: Sequence[Sequence[Figure]], theirs: Sequence[Sequence[Figure]], tail: float
) -> list[Interval]:
    """Return the interval of every row, so wide that all of them hold together."""
    sides = [[[log(each.ns) for each in row] for row in side] for side in (ours, theirs)]
    known = [noise_of(side) if all(len(row) > 1 for row in side) else None for side in sides]
    unknown = [WITHIN_RUNS] * len(ours)
    noises = (known[0] or known[1] or unknown, known[1] or known[0] or unknown)
    least = [[fmean(each.sampling for each in row) for row in side] for side in (ours, theirs)]
    return [
        interval_of(
            sides[0][at],
            sides[1][at],
            [noise[at].at_least(floor[at]) for noise, floor in zip(noises, least, strict=True)],
            tail,
            rows=len(ours),
        )
        for at in range(len(ours))
    ]


def _order(row: Change) -> tuple[bool, bool, float, str, str]:
    shown = row.direction is not Direction.UNCHANGED
    return (row.kind is not Kind.STEP, not shown, -abs(row.change) * row.share, row.name, row.phase)


def _by_key(profiles: Iterable[Profile]) -> dict[Key, list[Figure]]:
    found: dict[Key, list[Figure]] = {}
    for profile in profiles:
        for key, figure in figures_of(profile).items():
            found.setdefault(key, []).append(figure)
    return found


def figures_of(profile: Profile) -> dict[Key, Figure]:
    """Return the figure of every timed step and brick of one run, by phase."""
    found: dict[Key, Figure] = {}
    for phase, step in profile.steps.items():
        if step.stats.timed:
            found[Key(Kind.STEP, "step", phase)] = _figure(step.stats, None)
    for row in profile.brick_phases:
        if row.timed and row.total_ns:
            step_row = profile.steps.get(row.phase or "")
            per_step = row.count / step_row.count if step_row and step_row.count else None
            found[Key(Kind.BRICK, row.name, row.phase or "")] = _figure(row, per_step)
    return found


def _figure(row: BrickStats, per_step: float | None) -> Figure:
    typical, spread = trimmed_mean(row)
    return Figure(typical, (spread / typical) ** 2 / row.timed, per_step, row.share_ns)


def trimmed_mean(row: BrickStats, part: float = TRIMMED) -> tuple[float, float]:
    """Return mean and standard deviation of a brick's entries without the longest ones, in ns.

    The sum of all entries is exact and that of the longest comes from the histogram, so the mean
    is off by at most a bucket's error of what is left out; where the tail outweighs the rest, the
    rest itself is taken from the histogram.
    """
    counts = row.histogram.counts.astype(np.float64)
    middles = np.exp2((row.histogram.indices + 0.5) / 16.0).clip(row.min_ns, row.max_ns)
    total = float(counts.sum()) + row.histogram.zero_count
    cut = np.ceil(part * total) if total >= LEAST_TRIMMED else 0.0
    left_out = np.minimum(counts, np.maximum(0.0, cut - (counts[::-1].cumsum()[::-1] - counts)))
    kept, kept_count = counts - left_out, total - float(left_out.sum())
    tail_ns, rest_ns = float(left_out @ middles), float(kept @ middles)
    exact = row.total_ns - tail_ns if tail_ns <= rest_ns else rest_ns
    mean = max(exact / kept_count, 1e-3) if kept_count else 1e-3
    about = rest_ns / kept_count if kept_count else 0.0
    squares = float(kept @ (middles - about) ** 2) + row.histogram.zero_count * about**2
    return mean, sqrt(squares / kept_count) if kept_count else 0.0


def _total_share(figures: Mapping[Key, Sequence[Figure]]) -> float:
    return sum(
        fmean(each.share_ns for each in found)
        for key, found in figures.items()
        if key.kind is Kind.BRICK
    )


def _change(
    key: Key,
    ours: Sequence[Figure],
    theirs: Sequence[Figure],
    interval: Interval,
    total_ns: float,
    *,
    shown: bool,
) -> Change:
    share = fmean(each.share_ns for each in theirs) / total_ns if total_ns else 0.0
    repeated = max(len(ours), len(theirs)) > 1
    return Change(
        kind=key.kind,
        name=key.name,
        phase=key.phase,
        base_ns=exp(fmean(log(each.ns) for each in theirs)),
        ns=exp(fmean(log(each.ns) for each in ours)),
        low=_relative(interval.middle - interval.half) if shown else None,
        change=_relative(interval.middle),
        high=_relative(interval.middle + interval.half) if shown else None,
        visible=_relative(interval.half),
        share=1.0 if key.kind is Kind.STEP else share,
        noise=interval.noise if repeated else None,
        per_step=_mean_per_step(ours),
        base_per_step=_mean_per_step(theirs),
    )


def _relative(difference: float) -> float:
    """Return what a difference of logarithms is as a relative change."""
    return expm1(min(difference, MOST_LOG))


def _mean_per_step(figures: Sequence[Figure]) -> float | None:
    known = [each.per_step for each in figures if each.per_step is not None]
    return fmean(known) if len(known) == len(figures) else None


class Interval(NamedTuple):
    """A difference of logarithms, and how far the true one may lie from it."""

    middle: float
    half: float
    noise: float
    """Standard deviation from run to run, the larger of both sides."""


def interval_of(
    ours: Sequence[float],
    theirs: Sequence[float],
    noises: Sequence[Noise],
    tail: float,
    *,
    rows: int = 1,
) -> Interval:
    """Return the interval of the difference of two means that holds for all rows at once.

    It is the narrower of two, which share the probability of error. One takes a brick's noise from
    its own runs alone, and sees what happens to a brick that is far quieter than the others. The
    other borrows from those, and sees more wherever bricks are alike.

    Degrees of freedom that are borrowed count only as far as bricks are independent of each other.
    Where all of them share one noise they are as wrong as one is, so the quantile is at least that
    of a single row with the runs of its own. Those degrees of freedom are an estimate too, and too
    many where a few noisy runs agree by chance; they are taken halfway between Welch's and the
    smaller side's.

    Args:
        ours: One number per run.
        theirs: Likewise.
        noises: How the runs of the two sides differ.
        tail: Probability that any of the rows lies above its interval, and that any lies below.
        rows: How many there are.
    """
    counts = len(ours), len(theirs)
    own = [noise.own for noise in noises]
    alone = [noise.alone / count for noise, count in zip(noises, counts, strict=True)]
    drawn = [noise.drawn / count for noise, count in zip(noises, counts, strict=True)]
    lent = _welch(drawn, [noise.own + noise.borrowed for noise in noises])
    shared = (1.0 - ALONE) * tail
    half = min(
        _quantile(ALONE * tail / rows, _careful(alone, own)) * sqrt(sum(alone)),
        max(_quantile(shared / rows, lent), _quantile(shared, _careful(drawn, own)))
        * sqrt(sum(drawn)),
    )
    spread = sqrt(max(noise.alone for noise in noises))
    return Interval(fmean(ours) - fmean(theirs), half, spread)


def _careful(parts: Sequence[float], freedoms: Sequence[float]) -> float:
    fewest = min(freedoms)
    return (fewest + min(_welch(parts, freedoms), 2.0 * fewest)) / 2.0


def _welch(parts: Sequence[float], freedoms: Sequence[float]) -> float:
    rest = sum(part * part / freedom for part, freedom in zip(parts, freedoms, strict=True))
    return sum(parts) ** 2 / rest if rest else MOST_FREEDOM


def _quantile(tail: float, freedom: float) -> float:
    return student_quantile(tail, min(freedom, MOST_FREEDOM))
