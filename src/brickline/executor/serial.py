"""One launch after the other, in the order of the plan."""

from __future__ import annotations

from brickline import _core


class SerialExecutor:
    """Runs launches in order, on the calling thread or in one stream."""

    def __init__(self, core: _core.PlanCore) -> None:
        self.run = core.run_serial
        """The core's own function: nothing stands between a call and the first launch."""
