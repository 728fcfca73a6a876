"""A device that does nothing, with a clock that moves only when told: time for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brickline.device.base import Clock

if TYPE_CHECKING:
    from brickline import _core


class NullClock(Clock):
    """Time that stands still until `BrickProfiler.advance` moves it."""

    name = "NULL"

    def prepare(self, core: _core.ProfilerCore) -> None:
        """Take the core off the host's clock."""
        core._use_manual_clock()

    def attach(self, core: _core.ProfilerCore) -> None:
        """Leave the core on the manual clock."""


def open_clock(number: int, stream: Any) -> NullClock:
    """Return a clock that stands still."""
    return NullClock()
