"""Which bricks became slower or faster between two sets of runs, and how sure that is."""

from brickline.regressions.changes import (
    CONFIDENCE,
    LEAST_RUNS,
    Change,
    Changes,
    Direction,
    Interval,
    Key,
    Kind,
    changes_between,
    interval_of,
    trimmed_mean,
)

__all__ = [
    "CONFIDENCE",
    "LEAST_RUNS",
    "Change",
    "Changes",
    "Direction",
    "Interval",
    "Key",
    "Kind",
    "changes_between",
    "interval_of",
    "trimmed_mean",
]
