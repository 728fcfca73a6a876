"""What a measurement costs in this process, so that a run can say what it added to itself."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from brickline import _core

_TRIES = 20


def difference_ns(plain: Callable[[], None], measured: Callable[[], None]) -> float:
    """Return how much longer one call takes than another, in nanoseconds; never below 0.

    It is the median of pairs, so that an interruption of either call does not show.
    """
    differences = []
    for _ in range(_TRIES):
        began = time.perf_counter_ns()
        plain()
        between = time.perf_counter_ns()
        measured()
        differences.append(time.perf_counter_ns() - between - (between - began))
    return max(0.0, statistics.median(differences))


class EntryCosts(NamedTuple):
    """Nanoseconds that one `with brick:` costs in this process."""

    timed_ns: float
    counted_ns: float
    """In a step that sampling leaves out."""


@functools.cache
def entry_costs() -> EntryCosts:
    """Return what an entry costs; measured once in a process."""
    import tempfile

    count = range(50)

    def plain() -> None:
        for _ in count:
            pass

    def measured() -> None:
        for _ in count:
            with brick:
                pass

    with tempfile.TemporaryDirectory(prefix="brickline-") as scratch:
        core = _core.ProfilerCore()
        core._open(os.path.join(scratch, "scratch.spool"))
        core._set_enabled(True)
        brick = core.brick("calibration")
        timed_ns = difference_ns(plain, measured) / len(count)
        core._configure(sample_steps=2)
        with core.step():  # the first of a phase is timed
            pass
        with core.step():
            counted_ns = difference_ns(plain, measured) / len(count)
        core._close()
    return EntryCosts(timed_ns, counted_ns)
