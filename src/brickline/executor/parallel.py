"""Independent launches at the same time: on CPU threads, or on CUDA streams.

Whether that pays is measured, not guessed: both ways run a few times at the start, and the faster
one goes on until it is told to look again, because sizes change with variables. Results are
the same bits either way, so nothing but time depends on the choice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeAlias

from brickline import _core
from brickline.device.base import Device
from brickline.errors import PlanError

Run: TypeAlias = Callable[[int], tuple[int, int, int]]

TRIALS = 4
"""Timed runs of each way before one is chosen; the first of each warms up and does not count."""
STREAMS = 4


class Choice:
    """Two ways to run the same launches, of which the faster one is taken.

    Args:
        serial: The plain way.
        together: The way that may be faster.
        wait: Waits until a run is done, where a run is only enqueued; it is timed with the run.
    """

    def __init__(self, serial: Run, together: Run, wait: Callable[[], None] | None = None) -> None:
        self._ways = (serial, together)
        self._wait = wait
        self.look_again()

    def look_again(self) -> None:
        """Try both ways again, and choose anew."""
        self._best: list[int | None] = [None, None]
        self._trials = 0
        self.chosen: int | None = None
        """0 for serial, 1 for together, None while both are tried."""
        self.run: Run = self._tried

    def choose(self, way: int) -> None:
        """Take one of the ways from now on; nothing stands between a call and its launches."""
        self.chosen = way
        self.run = self._ways[way]

    def _tried(self, stream: int) -> tuple[int, int, int]:
        way = self._trials // TRIALS
        began = time.perf_counter_ns()
        outcome = self._ways[way](stream)
        if self._wait is not None:
            self._wait()
        took = time.perf_counter_ns() - began
        if self._trials % TRIALS:
            best = self._best[way]
            self._best[way] = took if best is None else min(best, took)
        self._trials += 1
        if self._trials == 2 * TRIALS:
            serial, together = self._best
            assert serial is not None
            assert together is not None
            self.choose(int(together < serial))
        return outcome


class ParallelExecutor(Choice):
    """Runs launches on CPU threads, as their dependencies allow.

    Raises:
        PlanError: `threads` is no number from 1 on.
    """

    def __init__(self, core: _core.PlanCore, threads: int | None) -> None:
        count = len(os.sched_getaffinity(0)) if threads is None else _checked(threads)

        def together(stream: int) -> tuple[int, int, int]:
            return core.run_parallel(count)

        super().__init__(core.run_serial, together)
        if count == 1 or not core.can_overlap:
            self.choose(0)


class StreamsExecutor(Choice):
    """Enqueues launches into several CUDA streams, as their dependencies allow."""

    def __init__(self, core: _core.PlanCore, device: Device, streams: int | None) -> None:
        count = STREAMS if streams is None else _checked(streams)
        self._streams = device.make_streams(count)
        core.set_streams([device.stream_handle(each) for each in self._streams])
        super().__init__(core.run_serial, core.run_streams, device.synchronize)


def _checked(count: int) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= 1024:
        raise PlanError(f"threads: expected a number from 1 to 1024, got {count!r:.80}")
    return count
