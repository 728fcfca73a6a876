"""The CPU's clock: the core's own host ticks, in every sync mode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brickline.device.base import Clock

if TYPE_CHECKING:
    from brickline import _core


class CpuClock(Clock):
    """Host time; there is nothing to connect."""

    name = "CPU"

    def prepare(self, core: _core.ProfilerCore) -> None:
        """Leave the host's ticks as they are."""

    def attach(self, core: _core.ProfilerCore) -> None:
        """Leave the core on its host clock."""


def open_clock(number: int, stream: Any) -> CpuClock:
    """Return the clock of the CPU."""
    return CpuClock()
