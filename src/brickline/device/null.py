"""A device that checks everything and executes nothing: for tests, and planning without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from brickline.buffers import ALIGNMENT, Buffer, check_copy
from brickline.device.base import Compiled, Device, Event, Limits, Program
from brickline.kernel import Kernel
from brickline.kernel_source import entry_point


class NullEvent(Event):
    """A moment like any other: no time passes here."""

    def record(self, stream: Any = None) -> None:
        """Take no moment."""

    def wait(self) -> None:
        """Wait for nothing."""

    def ns_since(self, earlier: Event) -> float:
        """Return 0."""
        return 0.0


class NullDevice(Device):
    """No compiler, no memory: buffers have an address and no contents."""

    name = "NULL"
    kind = 0
    limits = Limits((2**31 - 1, 65535, 65535), (1024, 1024, 64), 1024, 1 << 20)

    def __init__(self) -> None:
        self._next_address = 1 << 20
        self._lock = threading.Lock()

    def compiler_identity(self, kernel: Kernel) -> Mapping[str, Any]:
        """Return nothing: there is no compiler."""
        return {}

    def compile(self, kernel: Kernel) -> Compiled:
        """Return the source as it is."""
        return Compiled(b"", entry_point(kernel), kernel.source)

    def load(self, compiled: Compiled) -> Program:
        """Load nothing."""
        return Program(0, None)

    def allocate(self, shape: Sequence[int], dtype: str) -> Buffer:
        """Return an address that nothing else has."""
        with self._lock:
            buffer = Buffer.at_address(self._next_address, shape, dtype, kind=self.kind)
            self._next_address += (buffer.nbytes // ALIGNMENT + 1) * ALIGNMENT
        return buffer

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Check the sizes; what is copied from here is zeros."""
        check_copy(target, source)
        if target.kind != self.kind and target.nbytes:
            memoryview(target)[:] = bytes(target.nbytes)

    def synchronize(self) -> None:
        """Wait for nothing."""

    def event(self) -> NullEvent:
        """Return an event at which no time passes."""
        return NullEvent()


def open_device(number: int) -> NullDevice:
    """Return the device that does nothing."""
    return NullDevice()
