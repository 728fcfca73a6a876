"""The interface of a device, and how one is found by name.

A device compiles kernels, keeps memory, and launches. Its clock says when a brick began and ended:
the profiler hands its native core to the clock, which connects the two; no clock is on the hot path
itself. This module knows no device: `open_device` and `open_clock` import the one asked for.
"""

from __future__ import annotations

import importlib
import os
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from brickline.errors import DeviceError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from brickline import _core
    from brickline.buffers import Buffer
    from brickline.kernel import Kernel


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


FAULTS = {
    2: "shared memory is used up; declare more shared_bytes",
    3: "a vector form was given a length that is no multiple of its width",
    4: "groups() was called in a block of fewer than 32 lanes; declare a local_size of 32 or more",
    5: "a block has more than 1024 lanes",
    6: "a code of its own that does not fit 32 bits; pass block.fault a number up to 2**32 - 2",
}
"""What Block itself reports; codes of kernels begin at 16. As in kernel.h."""


def fault_text(code: int) -> str:
    """Return what a fault code of a single-source kernel means."""
    return f"fault {code}: {fault_words(code)}"


def fault_words(code: int) -> str:
    """Return the same without the code."""
    return FAULTS.get(code, "a code of its own, from block.fault")


@dataclass(frozen=True)
class Limits:
    """The largest launch that a device takes."""

    grid: tuple[int, int, int]
    """Blocks along each axis."""
    block: tuple[int, int, int]
    """Lanes of a block along each axis."""
    lanes: int
    """Lanes of a block in all."""
    shared_bytes: int
    """Shared memory of a block."""


@dataclass(frozen=True)
class Compiled:
    """What a compiler made of one kernel: plain data, fit for a disk."""

    binary: bytes
    entry_point: str
    source: str
    """The whole translation unit, as the compiler saw it."""
    log: str = ""
    """What the compiler said, warnings included."""
    resources: Mapping[str, int] = field(default_factory=dict)
    """What a block needs, where the device says so: registers, shared and local bytes."""
    includes: Mapping[str, str] = field(default_factory=dict)
    """Files beside the compiler's and brickline's own that it read, with their SHA-256."""


@dataclass(frozen=True)
class Program:
    """Code that is loaded on a device. It stays loaded while `library` lives."""

    function: int
    """Where the entry lies: an address on the host, a handle of CUDA's driver."""
    library: object
    context: int = 0
    """CUDA: the context that the function belongs to."""
    fault: int = 0
    """CUDA: address of the word that single-source kernels write their faults to."""


class Event(ABC):
    """A moment in a stream of a device."""

    @abstractmethod
    def record(self, stream: Any = None) -> None:
        """Take the moment at which the stream gets here.

        Args:
            stream: A stream of torch, CuPy or cuda-core, or a handle. Default: torch's current
                one, else the default stream.
        """

    @abstractmethod
    def wait(self) -> None:
        """Wait until the stream has got there."""

    @abstractmethod
    def ns_since(self, earlier: Event) -> float:
        """Return the time from another event of this device to this one; waits for both."""


class Device(ABC):
    """One device of this machine.

    The contract: methods may be called from any thread. `compile` starts a compiler and touches no
    device memory; what it makes depends on the kernel and on `compiler_identity` alone, so equal
    pairs may share one binary. Memory lives as long as its `Buffer`. Copies and launches are
    ordered within one stream; `synchronize` waits for all and raises what they failed with.
    """

    name: str
    """Such as ``CPU`` or ``CUDA:0``."""
    kind: int
    """As `brickline._core.BufferCore.kind` says it."""
    number: int = 0
    limits: Limits

    @abstractmethod
    def compiler_identity(self, kernel: Kernel) -> Mapping[str, Any]:
        """Return everything that the code depends on beside the kernel; starts no compiler."""

    @abstractmethod
    def compile(self, kernel: Kernel) -> Compiled:
        """Compile a kernel.

        Raises:
            CompileError: if the compiler refuses, with its own words.
            DeviceError: if there is no compiler.
        """

    @abstractmethod
    def load(self, compiled: Compiled) -> Program:
        """Make compiled code callable."""

    @abstractmethod
    def allocate(self, shape: Sequence[int], dtype: str) -> Buffer:
        """Return fresh memory, aligned to 256 bytes; its contents are undefined."""

    @abstractmethod
    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy bytes between two buffers of one size, of which at least one lies here."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything launched so far."""

    @abstractmethod
    def event(self) -> Event:
        """Return an event that was not recorded yet."""

    def stream_handle(self, stream: Any = None) -> int:
        """Return the handle of the stream to launch into; 0 on devices that have none.

        Raises:
            DeviceError: if a stream is given that this device cannot have.
        """
        if stream is not None:
            raise DeviceError(f"{self.name} has no streams; leave stream= out")
        return 0

    def make_streams(self, count: int) -> Sequence[Any]:
        """Return streams that run beside each other; their handles are `stream_handle`'s."""
        raise DeviceError(f"{self.name} has no streams")

    @contextmanager
    def capture_stream(self) -> Iterator[int]:
        """Give the handle of a stream to capture, which is the current one meanwhile."""
        raise DeviceError(f"{self.name} has no graphs")
        yield 0

    def clock(self, stream: Any = None) -> Clock:
        """Return what times bricks on this device; see `open_clock`."""
        return open_clock(self.name, stream)

    def to_numpy(self, buffer: Buffer) -> NDArray[Any]:
        """Return a copy of a buffer of this device as a NumPy array, when all launches are done."""
        from brickline.buffers import aligned_memory  # loads NumPy, which a clock does not need

        host = aligned_memory(buffer.shape, buffer.dtype)
        self.copy(host, buffer)
        return host.numpy()

    def from_numpy(self, array: NDArray[Any]) -> Buffer:
        """Return memory of this device with a copy of an array."""
        from brickline.buffers import as_buffer

        source = as_buffer(array)
        target = self.allocate(source.shape, source.dtype)
        self.copy(target, source)
        return target


_NAME = re.compile(r"(NULL|CPU|CUDA)(?::(\d+))?", re.IGNORECASE)
_devices: dict[str, Device] = {}
_devices_lock = threading.Lock()


def _after_fork() -> None:
    """Free the lock, which a thread that does not exist in the child may have held."""
    global _devices_lock
    _devices_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def open_device(name: str | Device) -> Device:
    """Return a device by its name; the same object each time.

    Args:
        name: ``"CPU"``, ``"CUDA:n"`` (``"CUDA"`` is ``"CUDA:0"``), or ``"NULL"``, which checks
            everything and executes nothing.

    Raises:
        DeviceError: if there is no such device here.
    """
    if isinstance(name, Device):
        return name
    kind, number = _parse(name)
    canonical = f"{kind}:{number}" if kind == "CUDA" else kind
    with _devices_lock:
        device = _devices.get(canonical)
        if device is None:
            module = importlib.import_module(f"brickline.device.{kind.lower()}")
            device = _devices[canonical] = module.open_device(number)
    return device


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
    kind, number = _parse(device)
    if kind != "CUDA" and stream is not None:
        raise DeviceError(f"{kind} has no streams; leave stream= out, or use device='CUDA:n'")
    clock: Clock = importlib.import_module("brickline.device.clocks").clock_of(kind, number, stream)
    return clock


def _parse(device: str) -> tuple[str, int]:
    match = _NAME.fullmatch(device) if isinstance(device, str) else None
    if match is None:
        raise DeviceError(f"unknown device {device!r}; expected CPU, CUDA:n or NULL")
    kind, number = match.group(1).upper(), match.group(2)
    if kind != "CUDA" and number not in (None, "0"):
        raise DeviceError(f"there is one {kind} device; expected {kind}, got {device!r}")
    return kind, int(number or 0)
