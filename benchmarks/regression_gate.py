"""How often `brickline report --against` errs, and which changes it finds; all of it simulated.

A comparison is 24 bricks in so many runs a side. Noise is drawn for each brick and run, and what a
kind of noise says besides. The comparisons go through the product's own arithmetic, `noise_of` and
`interval_of`. As a script it prints the table "How many repeats" of docs/regressions.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import Claim, main

from brickline.regressions import Interval, interval_of
from brickline.regressions.run_noise import noise_of

BRICKS = 24
TAIL = 0.025
SEED = 20240229
OWN = 0.01
"""Noise of each brick from run to run where a kind does not say otherwise."""
SIDES = ((3, 3, 1.0), (5, 5, 1.0), (3, 3, 4.0), (3, 8, 0.25), (3, 8, 4.0))
"""Runs of the one side, of the base, and how much louder the base is."""


def independent(rng: Any, runs: int) -> Any:
    return OWN * rng.standard_normal((BRICKS, runs))


def heavy_tails(rng: Any, runs: int) -> Any:
    return OWN * rng.standard_t(3, (BRICKS, runs))


def drifting(rng: Any, runs: int) -> Any:
    """Each run has three times as much noise that all bricks share."""
    return independent(rng, runs) + 3 * OWN * rng.standard_normal(runs)


def drifting_heavily(rng: Any, runs: int) -> Any:
    return independent(rng, runs) + 3 * OWN * rng.standard_t(3, runs)


def groups(rng: Any, runs: int) -> Any:
    """Every third brick shares noise: memory, arithmetic, launches."""
    shared = rng.standard_normal((3, runs))[np.arange(BRICKS) % 3]
    return independent(rng, runs) + 3 * OWN * shared


def unlike(rng: Any, runs: int) -> Any:
    """The loudest brick has twenty times the noise of the quietest."""
    return np.exp(np.linspace(-1.5, 1.5, BRICKS))[:, None] * independent(rng, runs)


def halves(rng: Any, runs: int) -> Any:
    """Every second brick has ten times the noise."""
    return np.where(np.arange(BRICKS) % 2, 10.0, 1.0)[:, None] * independent(rng, runs)


def few_loud(rng: Any, runs: int) -> Any:
    """Three bricks have three times the noise."""
    return np.where(np.arange(BRICKS) < 3, 3.0, 1.0)[:, None] * independent(rng, runs)


KINDS = (
    *(independent, heavy_tails, drifting, drifting_heavily),
    *(groups, unlike, halves, few_loud),
)


def intervals(ours: Any, theirs: Any) -> list[Interval]:
    """As `changes_between` computes them, but for the spread within the runs."""
    noises = zip(noise_of(ours.tolist()), noise_of(theirs.tolist()), strict=True)
    rows = zip(ours.tolist(), theirs.tolist(), noises, strict=True)
    return [interval_of(a, b, noise, TAIL, rows=len(ours)) for a, b, noise in rows]


def false_alarms(
    kind: Callable[[Any, int], Any], side: tuple[int, int, float], count: int
) -> float:
    """Return the percentage of comparisons that name a brick although nothing changed."""
    rng = np.random.default_rng(SEED)
    runs, base, louder = side
    named = sum(
        any(
            abs(row.middle) > row.half
            for row in intervals(kind(rng, runs), louder * kind(rng, base))
        )
        for _ in range(count)
    )
    return 100.0 * named / count


def found(runs: int, noise: float, change: float, count: int) -> float:
    """Return the percentage of comparisons that show a change of one brick."""
    rng, shown = np.random.default_rng(SEED), 0
    for _ in range(count):
        ours, theirs = (noise / OWN * independent(rng, runs) for _ in range(2))
        ours[0] += np.log1p(change)
        first = intervals(ours, theirs)[0]
        shown += first.middle > first.half
    return 100.0 * shown / count


def run(quick: bool = False) -> list[dict[str, Any]]:
    count = 20 if quick else 2000
    wrong = {
        f"{kind.__name__} {runs}+{base} x{louder:g}": false_alarms(
            kind, (runs, base, louder), count
        )
        for kind in KINDS
        for runs, base, louder in SIDES[: 1 if quick else None]
    }
    worst = max(wrong, key=wrong.__getitem__)
    print("\n".join(f"{rate:5.1f} %  {name}" for name, rate in wrong.items()), file=sys.stderr)
    claims = [
        Claim(
            "comparisons of the same code that name a brick, worst noise",
            wrong[worst],
            "%",
            None if quick else 6.0,  # 5 %, and what 2,000 comparisons scatter by
            note=f"{worst}; mean of {len(wrong)} {np.mean(list(wrong.values())):.1f} %",
        ),
        Claim(
            "+30 % of one brick missed, three runs a side, 3 % noise",
            100.0 - found(3, 0.03, 0.3, count),
            "%",
            None if quick else 10.0,
        ),
    ]
    return [claim.as_dict() for claim in claims]


def table(count: int = 2000) -> str:
    """The table of docs/regressions.md."""
    noises = (0.005, 0.01, 0.02, 0.03, 0.05)
    lines = ["| Runs a side | Change | " + " | ".join(f"{100 * n:g} %" for n in noises) + " |"]
    lines += ["|---" * (2 + len(noises)) + "|"]
    for runs in (3, 5, 10):
        for change in (0.05, 0.1, 0.2, 0.3):
            shown = " | ".join(f"{found(runs, n, change, count):.0f} %" for n in noises)
            lines.append(f"| {runs} | {100 * change:g} % | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if "--table" in sys.argv:
        print(table())
        sys.exit()
    sys.exit(main(run, description=__doc__))
