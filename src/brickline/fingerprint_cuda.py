"""Fingerprints of CUDA tensors: compiled once per dtype, enqueued without waiting.

`DeviceFingerprints` keeps records in a ring in device memory until `drain` fetches them. The kernel
is ``include/brickline/fingerprint_cuda.h``; the core shares the work out. Needs brickline[cuda].
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from typing import Any

import numpy as np

from brickline import _core
from brickline.buffers import Buffer, as_buffer
from brickline.cache import CachedKernel, KernelCache
from brickline.device.base import Device, open_device
from brickline.dtypes import DTYPES
from brickline.errors import UsageError
from brickline.fingerprints import RECORD_BYTES, TensorView, view_of
from brickline.kernel import Kernel
from brickline.kernel_arguments import Param
from brickline.kernel_source import INCLUDE_DIRECTORY

SLOT_BYTES = 1024
"""Bytes of the ring for each record."""
SHARED_LAUNCH = 8
"""Tensors that one launch takes, at most."""
SMALL_BYTES = 1 << 20
"""Up to here tensors share a launch: larger ones fill the device alone."""
_COUNTER_BYTES, _PARTIAL_BYTES = 256, 1152
_SPARE_SCRATCH = 8
_HEADERS = ("abi", "elements", "fingerprint", "fingerprint_cuda", "platform")
_TYPES = {
    dtype.code: "fingerprint::Truth" if dtype.name == "bool" else dtype.block_type
    for dtype in DTYPES.values()
}
_NAMES = {dtype.code: dtype.name for dtype in DTYPES.values()}
_SIZES = {dtype.code: dtype.size_bytes for dtype in DTYPES.values()}
_CUDA = 2


@cache
def _headers_digest() -> str:
    texts = [(INCLUDE_DIRECTORY / "brickline" / f"{name}.h").read_bytes() for name in _HEADERS]
    return sha256(b"".join(texts)).hexdigest()


@cache
def fingerprint_kernel(dtype: int, jobs: int) -> Kernel:
    """Return the kernel for a dtype's code, and for as many tensors in one launch."""
    name = f"fingerprint_{_NAMES[dtype]}_{jobs}"
    source = (
        f'#include "brickline/fingerprint_cuda.h"  // {_headers_digest()}\n'
        "namespace brickline {\n"
        'extern "C" __global__ void __launch_bounds__(256, 2)\n'
        f"{name}(const __grid_constant__ fingerprint::Batch<{jobs}> batch, char* scratch) {{\n"
        f"    fingerprint::take_batch<{_TYPES[dtype]}>(batch, scratch);\n"
        "}\n}\n"
    )
    # The core launches it by itself, so of its signature this is all that a Kernel must know.
    signature = [Param("scratch", "u8", 1, "read-write")]
    return Kernel(name, source, signature, local_size=256, language="cuda")


class _Machine:
    """What one device needs for fingerprints: programs, and a scratch area per stream."""

    def __init__(self, number: int) -> None:
        from cuda.core import Device as CudaCore

        self.number = number
        self.device: Device = open_device(f"CUDA:{number}")
        self.processors = int(CudaCore(number).properties.multiprocessor_count)
        self._cache = KernelCache()
        self._programs: dict[tuple[int, int], tuple[int, int, CachedKernel]] = {}
        self._scratch: dict[int, Buffer] = {}
        # Made ahead: while a stream is captured, memory cannot be allocated.
        self._spare = [self._new_scratch() for _ in range(_SPARE_SCRATCH)]
        self._lock = threading.Lock()

    def program(self, dtype: int, jobs: int) -> tuple[int, int, CachedKernel]:
        """Return the function, its context, and what keeps it loaded."""
        found = self._programs.get((dtype, jobs))
        if found is None:
            cached = self._cache.get_or_compile(
                fingerprint_kernel(dtype, jobs), f"CUDA:{self.number}"
            )
            found = cached.program.function, cached.program.context, cached
            self._programs[dtype, jobs] = found
        return found

    def scratch(self, stream: int) -> int:
        """Return memory for partial results that no other stream writes to."""
        found = self._scratch.get(stream)
        if found is None:
            with self._lock:
                found = self._spare.pop() if self._spare else self._new_scratch()
                self._scratch[stream] = found
        return found.address

    def _new_scratch(self) -> Buffer:
        nbytes = _COUNTER_BYTES + (2 * self.processors + SHARED_LAUNCH) * _PARTIAL_BYTES
        scratch = self.device.allocate((nbytes,), "u8")
        self.device.copy(scratch, as_buffer(np.zeros(nbytes, np.uint8)))  # no team has finished
        return scratch

    def launch(self, stream: int, jobs: tuple[Any, ...]) -> None:
        """Enqueue the fingerprints of tensors of one dtype."""
        capacity = 1 if len(jobs) == 1 else SHARED_LAUNCH
        function, context, _ = self.program(jobs[0][2], capacity)
        scratch = self.scratch(stream)
        _core.launch_fingerprints(function, context, stream, scratch, self.processors, jobs)


@cache
def _machine(number: int) -> _Machine:
    return _Machine(number)


def _stream_finder() -> Callable[[int], int]:
    """Return what finds torch's current stream, or the default stream without torch."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return lambda _: 0
    found: Callable[[int], int] = torch._C._cuda_getCurrentRawStream
    return found


class DeviceFingerprints:
    """A ring of fingerprints in the memory of one CUDA device.

    `take` enqueues and returns at once; `drain` waits and returns what has been taken since.

    Example:
        >>> ring = DeviceFingerprints(0)        # doctest: +SKIP
        >>> ticket = ring.take(tensor)          # doctest: +SKIP
        >>> dict(ring.drain())[ticket]          # doctest: +SKIP
    """

    def __init__(self, device: int | str = 0, capacity: int = 4096) -> None:
        """Make a ring.

        Args:
            device: Number of the device, or its name, ``"CUDA:1"``. Default 0.
            capacity: Records that it holds; a fuller ring is drained by `take`, which then waits.
                Default 4096, which are 4 MiB.

        Raises:
            DeviceError: The device or cuda-core is absent.
            UsageError: The capacity is not positive.
        """
        if capacity < SHARED_LAUNCH:
            raise UsageError(f"expected a capacity of at least {SHARED_LAUNCH}, got {capacity}")
        number = int(str(device).upper().removeprefix("CUDA").removeprefix(":") or 0)
        self._machine = _machine(number)
        self.number, self.capacity = number, capacity
        self._ring = self._machine.device.allocate((capacity, SLOT_BYTES), "u8")
        self._address = self._ring.address
        self._stream = _stream_finder()
        self.ring = _core.FingerprintRing(
            self._address,
            capacity,
            SLOT_BYTES,
            self._machine.processors,
            self._machine.program,
            self._machine.scratch,
            self._fetch,
        )
        """Its tickets; the core takes tensors of its own accord."""
        self._ready: list[tuple[int, int, bytes]] = []
        self._lock = threading.RLock()

    @property
    def pending(self) -> int:
        """How many fingerprints have been taken and not yet drained."""
        return self.ring.taken - self.ring.fetched + len(self._ready)

    def take(self, tensor: Any, label: int = 0) -> int:
        """Enqueue the fingerprint of a tensor on its device's current stream.

        Args:
            tensor: A CUDA tensor, or its `TensorView`. It must not be written to by another stream
                before this one has got here.
            label: A number under which `drain_labelled` returns the record. Default 0: none.

        Returns:
            The ticket under which `drain` returns the record.

        Raises:
            UsageError: It is no dense tensor of this device.
        """
        view = self._view(tensor)
        with self._lock:
            ticket = self.ring.reserve(1)
            self._machine.launch(self._stream(self.number), (self._job(ticket, view),))
            self.ring.set_label(ticket, label)
            return ticket

    def take_many(self, tensors: Iterable[Any]) -> list[int]:
        """Enqueue the fingerprints of several tensors; small ones of one dtype share a launch.

        Args:
            tensors: As `take`.

        Returns:
            Their tickets, in order.
        """
        views = [self._view(tensor) for tensor in tensors]
        with self._lock:
            if len(views) > self.capacity:  # more than the ring holds at once
                return [self.take(view) for view in views]
            first = self.ring.reserve(len(views))
            tickets = list(range(first, first + len(views)))
            stream = self._stream(self.number)
            shared: dict[int, list[Any]] = {}
            for ticket, view in zip(tickets, views, strict=True):
                job = self._job(ticket, view)
                if _bytes_of(view) > SMALL_BYTES:
                    self._machine.launch(stream, (job,))
                else:
                    shared.setdefault(view.dtype, []).append(job)
            for jobs in shared.values():
                for start in range(0, len(jobs), SHARED_LAUNCH):
                    self._machine.launch(stream, tuple(jobs[start : start + SHARED_LAUNCH]))
            return tickets

    def drain(self) -> list[tuple[int, bytes]]:
        """Wait for what has been taken, and return tickets and records in order of the tickets."""
        return [(ticket, record) for ticket, _, record in self._drained()]

    def drain_labelled(self) -> list[tuple[int, bytes]]:
        """The same with labels instead of tickets, of what has one."""
        return [(label, record) for _, label, record in self._drained() if label]

    def _drained(self) -> list[tuple[int, int, bytes]]:
        with self._lock:
            self._fetch()
            ready, self._ready = self._ready, []
            return ready

    def _view(self, tensor: Any) -> TensorView:
        view = tensor if isinstance(tensor, TensorView) else view_of(tensor)
        if view.kind != _CUDA or view.number != self.number:
            place = f"CUDA:{view.number}" if view.kind == _CUDA else "CPU"
            raise UsageError(f"expected a tensor on CUDA:{self.number}, got one on {place}")
        return view

    def _job(self, ticket: int, view: TensorView) -> tuple[Any, ...]:
        row = self._address + ticket % self.capacity * SLOT_BYTES
        return row, view.address, view.dtype, view.shape, view.strides

    def _fetch(self) -> None:
        with self._lock:
            ring, label = self.ring, self.ring.label
            end = ring.taken  # more may be taken meanwhile, and not be done
            while ring.fetched < end:  # at most twice: up to the end of the ring, and on
                first = ring.fetched
                start = first % self.capacity
                count = min(end - first, self.capacity - start)
                part = Buffer.at_address(
                    self._address + start * SLOT_BYTES,
                    (count, SLOT_BYTES),
                    "u8",
                    kind=_CUDA,
                    number=self.number,
                    owner=self._ring,
                )
                rows = self._machine.device.to_numpy(part)
                for ticket, row in enumerate(rows, first):
                    self._ready.append((ticket, label(ticket), row[:RECORD_BYTES].tobytes()))
                ring.fetched_to(first + count)


def _bytes_of(view: TensorView) -> int:
    elements = 1
    for size in view.shape:
        elements *= size
    return elements * _SIZES[view.dtype]


@cache
def _single(number: int) -> DeviceFingerprints:
    return DeviceFingerprints(number, capacity=SHARED_LAUNCH)


def fingerprint_on_cuda(view: TensorView) -> bytes:
    """Return the record of a CUDA tensor, and wait for it."""
    ring = _single(view.number)
    with ring._lock:
        ticket = ring.take(view)
        return dict(ring.drain())[ticket]
