"""The clocks of the devices: what times bricks on each of them.

Apart from the devices themselves, because a profiler needs a clock and neither compiler nor memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from brickline.device.base import Clock, Sampling
from brickline.device.cuda_context import current_device, stream_handle

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


class CpuClock(Clock):
    """Host time; there is nothing to connect."""

    name = "CPU"

    def prepare(self, core: _core.ProfilerCore) -> None:
        """Leave the host's ticks as they are."""

    def attach(self, core: _core.ProfilerCore) -> None:
        """Leave the core on its host clock."""


class CudaClock(Clock):
    """Pairs of driver events in the streams of one device, recorded and resolved by the core."""

    # A timed launch-bound step takes two thirds longer. One in 128 makes that half a per cent.
    default_sampling = Sampling(steps=128)

    def __init__(self, number: int, stream: Any) -> None:
        self.name = f"CUDA:{number}"
        self._number = number
        self._stream = None if stream is None else stream_handle(stream)

    def prepare(self, core: _core.ProfilerCore) -> None:
        """Leave the host's ticks as they are: they time steps and enqueueing."""

    def attach(self, core: _core.ProfilerCore) -> None:
        """Hand the device's events to the core."""
        with current_device(self._number) as getter:
            if self._stream is not None:
                core._use_cuda(self._number, self._stream, None)
            else:
                core._use_cuda(self._number, 0, getter)


def clock_of(kind: str, number: int, stream: Any) -> Clock:
    """Return the clock of a device."""
    if kind == "CUDA":
        return CudaClock(number, stream)
    return CpuClock() if kind == "CPU" else NullClock()
