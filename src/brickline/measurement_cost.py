"""What a measurement costs in this process, so that a run can say what it added to itself."""

from __future__ import annotations

import functools
import os
import time

from brickline import _core


@functools.cache
def measurement_cost_ns() -> float:
    """Return what one `with brick:` costs in this process, in nanoseconds; measured once."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="brickline-") as scratch:
        core = _core.ProfilerCore()
        core._open(os.path.join(scratch, "scratch.spool"))
        core._set_enabled(True)
        brick = core.brick("calibration")
        costs = []
        for _ in range(20):
            before = time.perf_counter_ns()
            for _ in range(50):
                pass
            between = time.perf_counter_ns()
            for _ in range(50):
                with brick:
                    pass
            costs.append((time.perf_counter_ns() - between - (between - before)) / 50)
        core._close()
    return max(0.0, min(costs))
