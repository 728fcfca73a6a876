"""What the runs of one side differ by, brick by brick, and how well that is known.

Pure arithmetic on logarithms of figures, one per run. It knows neither profiles nor bricks.

Three runs say little about the noise of one brick, but thirty bricks of three runs say a lot about
the noise that is usual on a side. So a brick's variance is drawn to the usual one, as empirical
Bayes methods do (limma's moderated t): the usual variance counts like so many further degrees of
freedom, the more, the more alike the bricks are. Every step errs on the careful side:

- How far the bricks' own variances differ is taken one standard error larger than it looks, so few
  bricks lend little; and they never lend more than twice what a brick's own runs give.
- The more the bricks differ, the larger the usual variance is taken.
- No brick is taken to be quieter than its own runs; one that is louder than usual borrows less.

A brick that is far quieter than the others of its side loses by that. So its noise by its own runs
alone is kept beside, of few degrees of freedom, and `interval_of` uses whichever shows more.

What this cannot see is noise that bricks share: bricks that move together say no more than one.
`interval_of` in `regressions` therefore never uses a smaller quantile than a single brick's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log, pi, sqrt
from statistics import median, variance
from typing import NamedTuple

FLOOR = 1e-3
"""Relative noise that is always reckoned with: runs that agree better do so by chance, or on a
clock that somebody else moves."""
QUIETEST = 0.1
"""Part of the median variance of a side's bricks below which no brick is taken to be: three runs
may agree far better by chance than they would again."""
MOST_BORROWED = 2.0
"""Degrees of freedom that other bricks lend, at most, for each of a brick's own."""


class Noise(NamedTuple):
    """How the runs of one side differ in one brick."""

    alone: float
    """Variance of the logarithm of a run's figure, by the brick's own runs."""
    own: float
    """Degrees of freedom of those."""
    drawn: float
    """The variance, drawn to what is usual on the side."""
    borrowed: float = 0.0
    """Degrees of freedom that the other bricks of the side lend."""

    def at_least(self, floor: float) -> Noise:
        """Return the same, with no variance below `floor`."""
        return self._replace(alone=max(self.alone, floor), drawn=max(self.drawn, floor))


WITHIN_RUNS = Noise(FLOOR * FLOOR, inf, FLOOR * FLOOR)
"""Where no side has two runs: all that is left is the spread within them."""


def noise_of(rows: Sequence[Sequence[float]]) -> list[Noise]:
    """Return the noise of each row of one side.

    Args:
        rows: For each brick the logarithms of its figures, one per run, at least two.
    """
    own = [len(row) - 1 for row in rows]
    seen = [max(variance(row), FLOOR * FLOOR) for row in rows]
    if len(rows) < 2:
        return [Noise(spread, freedom, spread) for spread, freedom in zip(seen, own, strict=True)]
    logs = [log(spread / _median_share(k)) for spread, k in zip(seen, own, strict=True)]
    differing = _differing(logs, own)
    usual = exp(median(logs) + differing / 3.0)
    lent = (1.0 + sqrt(1.0 + 2.0 * differing)) / differing if differing else inf
    floor = QUIETEST * median(seen)
    return [
        _noise(max(spread, floor), freedom, usual, min(lent, MOST_BORROWED * freedom))
        for spread, freedom in zip(seen, own, strict=True)
    ]


def _noise(seen: float, own: float, usual: float, lent: float) -> Noise:
    drawn = (lent * usual + own * seen) / (lent + own)
    return Noise(seen, own, max(drawn, seen), lent * min(1.0, usual / seen))


def _differing(logs: Sequence[float], own: Sequence[int]) -> float:
    """Return the variance of the true log variances, one standard error above its estimate.

    A sample variance scatters by itself; its logarithm does so by `_scatter`, and the square of
    that scatter has five times its own variance at most where there are two degrees of freedom.
    """
    scatter = sum(map(_scatter, own)) / len(own)
    return max(0.0, variance(logs) + scatter * sqrt(5.0 / len(logs)) - scatter)


def _scatter(freedom: int) -> float:
    """Return the variance of the logarithm of a sample variance: trigamma of half its freedom."""
    at, value = (0.5, pi * pi / 2.0) if freedom % 2 else (1.0, pi * pi / 6.0)
    while at < freedom / 2.0:
        value -= 1.0 / (at * at)
        at += 1.0
    return value


def _median_share(freedom: int) -> float:
    """Return the median of a sample variance as a share of the true one (Wilson and Hilferty)."""
    return (1.0 - 2.0 / (9.0 * freedom)) ** 3
