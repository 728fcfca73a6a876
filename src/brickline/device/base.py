"""The interface of a device, and how one is found by name.

A clock says when a brick began and ended. The profiler hands its native core to the clock, which
connects the two; no clock is on the hot path itself. This module knows no device: `open_clock`
imports the one that is asked for.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from brickline.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from brickline import _core


class SyncMode(IntEnum):
    """When the host waits for the device, and so what a brick's time means.

    On a CPU all four are the host's clock.
    """

    IMMEDIATE = 0
    """Wait before and after each brick: exact, and the slowest."""
    PER_LAYER = 1
    """Device events, and a wait whenever the layer changes."""
    DEFERRED = 2
    """Device events, resolved later without any wait; the default."""
    NONE = 3
    """No device time at all: the host's clock around the enqueueing."""

    @classmethod
    def parse(cls, value: SyncMode | str | int) -> SyncMode:
        """Return the mode that a member, its number or its name (in any case) stands for."""
        if isinstance(value, str):
            name = value.replace("_", "").replace("-", "").lower()
            for mode in cls:
                if mode.name.replace("_", "").lower() == name:
                    return mode
        elif isinstance(value, int) and int(value) in cls._value2member_map_:
            return cls(int(value))
        names = ", ".join(mode.name for mode in cls)
        raise UsageError(f"unknown sync mode {value!r}; expected one of {names}")


@dataclass(frozen=True)
class Sampling:
    """Which entries are timed; all of them are counted.

    Device events cost microseconds, so launch-bound work times some steps and counts the rest.
    """

    steps: int = 1
    """Time every nth step; outside steps, every nth entry. Default 1: all of them."""
    layers: int = 1
    """Within a timed step, time the layers whose number n divides. Default 1: all of them."""

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("layers", self.layers)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
                raise UsageError(
                    f"sampling {name}: expected a whole number from 1 on, got {value!r}"
                )


class Clock(ABC):
    """When bricks begin and end on one device.

    The contract: `prepare` is called before the profiler's spool is opened and `attach` after it,
    in the process and thread that enable the profiler, and again in a forked child. Neither
    synchronises the device. Times of one lane never run backwards.
    """

    name: str
    """The device's name in upper case, such as ``CPU`` or ``CUDA:0``."""
    default_sampling: Sampling = Sampling()
    """What the profiler uses where its maker does not choose."""

    @abstractmethod
    def prepare(self, core: _core.ProfilerCore) -> None:
        """Choose the host's tick source."""

    @abstractmethod
    def attach(self, core: _core.ProfilerCore) -> None:
        """Connect the device's own clock, where it has one."""


_NAME = re.compile(r"(NULL|CPU|CUDA)(?::(\d+))?", re.IGNORECASE)


def open_clock(device: str, stream: Any = None) -> Clock:
    """Return the clock of a device by its name.

    Args:
        device: ``"CPU"``, ``"CUDA:n"`` (``"CUDA"`` is ``"CUDA:0"``), or ``"NULL"``, whose time
            only moves when it is told to.
        stream: The stream that bricks run on, for devices that have streams: a handle, or a stream
            of torch or cuda-core. Default None: torch's current stream at each brick.

    Raises:
        DeviceError: if there is no such device here.
    """
    match = _NAME.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise DeviceError(f"unknown device {device!r}; expected CPU, CUDA:n or NULL")
    kind, number = match.group(1).upper(), match.group(2)
    if kind != "CUDA" and number not in (None, "0"):
        raise DeviceError(f"there is one {kind} device; expected {kind}, got {device!r}")
    if kind != "CUDA" and stream is not None:
        raise DeviceError(f"{kind} has no streams; leave stream= out, or use device='CUDA:n'")
    module = importlib.import_module(f"brickline.device.{kind.lower()}")
    clock: Clock = module.open_clock(int(number or 0), stream)
    return clock
