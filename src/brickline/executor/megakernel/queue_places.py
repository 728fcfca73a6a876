"""Where the workers of a queue are: threads of the host, or blocks of a GPU.

A place says how many there are, compiles the ops for them, and knows what the core must be told.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from brickline import _core
from brickline.buffers import Buffer
from brickline.cache import KernelCache
from brickline.device.base import Device
from brickline.executor.megakernel.cuda import REGISTERS, WARP, CudaEngine
from brickline.executor.megakernel.queue_arguments import Memory, QueueOp
from brickline.executor.megakernel.queue_memory import Bytes
from brickline.executor.megakernel.queue_options import count_of
from brickline.executor.megakernel.queue_refusals import refusal
from brickline.executor.megakernel.source import ENTRY, queue_source
from brickline.executor.refusals import limit_numbers
from brickline.kernel import Kernel

MAX_THREADS = 255
"""Workers of a queue on a CPU."""
_CPU, _CUDA = 1, 2
_LEAST_LANES = 256
"""Of a block on CUDA: its intake deals with as many submissions at once."""
_MOST_LANES = 1024
_MOST_WORKERS = 4095
"""MegaQueueOptions::MAX_WORKERS."""
_RING_BITS = 3
"""Of each priority there are 8 rings, so that blocks do not all want the head of one."""
_REST_NS = 1_000_000
"""How long nothing is open before a launch ends: who waits for the device waits for it."""


def place_of(where: str, device: Device, workers: int | None) -> Place:
    """Return where the workers of a queue are.

    Args:
        where: The queue, for messages.
        device: A CPU or a GPU.
        workers: How many. Default None: as many as the device executes at once.

    Raises:
        QueueError: The device is none for a queue.
    """
    if device.kind == _CPU:
        return CpuPlace(where, device, workers)
    if device.kind == _CUDA:
        return CudaPlace(where, device, workers)
    raise refusal(
        "MK511",
        f"{where}, device",
        f"expected CPU, or a GPU such as CUDA:0, got {device.name}; queues run there",
    )


class Place(ABC):
    """Where workers are.

    Args:
        where: The queue, for messages.
        device: The device.
    """

    execution_mode: str
    after_a_hang: str
    """What survives an item that never returns, and what to do."""
    workers: int
    starts = 0
    """Times that workers are started before the first submission."""

    def __init__(self, where: str, device: Device) -> None:
        self.where, self.device = where, device
        self.name = device.name
        self.limits = limit_numbers(device.limits)
        """The largest sizes of a submission."""

    @abstractmethod
    def tables_bytes(self, slots: int, kernels: Mapping[str, Kernel], *, recorded: bool) -> int:
        """Return the bytes that a queue takes before the first submission."""

    @abstractmethod
    def compile(self, kernels: Mapping[str, Kernel], cache: KernelCache) -> dict[str, QueueOp]:
        """Return the ops.

        Raises:
            QueueError: A worker cannot execute one.
            CompileError: A compiler refuses a source.
        """

    def core_options(self) -> dict[str, int] | None:
        """Return what the core must know of the device; None for threads."""
        return None

    @abstractmethod
    def bytes_at(self, begin: int, end: int) -> Bytes:
        """Return what memory of the workers holds now, also while they run; maybe not a copy."""

    def stream_of(self, where: str, stream: Any) -> int | None:
        """Return the stream that submissions come after; None where there is none."""
        if stream is not None:
            raise refusal("MK511", f"{where}, stream", "a CPU has no streams; leave it out")
        return None


class CpuPlace(Place):
    """Threads of the host."""

    execution_mode = "threads"
    starts = 1
    after_a_hang = (
        "a thread cannot be ended from outside: the engine is dead, and the memory of its "
        "submissions is kept. Look for the loop in the op, and make another Megakernel"
    )

    def __init__(self, where: str, device: Device, workers: int | None) -> None:
        super().__init__(where, device)
        cores = len(os.sched_getaffinity(0))
        self.workers = count_of(
            where, "workers", cores if workers is None else workers, MAX_THREADS
        )

    def tables_bytes(self, slots: int, kernels: Mapping[str, Kernel], *, recorded: bool) -> int:
        """Return the bytes of the tables."""
        return _core.mega_queue_bytes(slots, self.workers, _most_arguments(kernels))

    def compile(self, kernels: Mapping[str, Kernel], cache: KernelCache) -> dict[str, QueueOp]:
        """Return the ops, each compiled on its own."""
        return {
            name: QueueOp(number, name, cache.get_or_compile(kernel, self.device))
            for number, (name, kernel) in enumerate(kernels.items())
        }

    def bytes_at(self, begin: int, end: int) -> Bytes:
        """Return the bytes where they are."""
        found: Bytes = Buffer.at_address(begin, (end - begin,), "u8").numpy()
        return found


class CudaPlace(Place):
    """Blocks of one cooperative launch on a GPU, and one more that takes submissions in."""

    execution_mode = "cooperative launch"
    after_a_hang = CudaEngine.after_a_hang

    def __init__(self, where: str, device: Any, workers: int | None) -> None:
        super().__init__(where, device)
        is_able = device.is_cooperative and device.can_map_host_memory
        if not is_able or device.compute_capability < (8, 0):
            raise refusal(
                "MK511",
                f"{where}, device",
                "expected a GPU with cooperative launch, mapped memory and compute capability 8.0, "
                f"got {device.name}; use CPU",
            )
        most = min(_MOST_WORKERS, 32 * device.multiprocessors)  # no device has more at once
        chosen = device.multiprocessors - 1 if workers is None else workers
        self.workers = count_of(where, "workers", chosen, most)
        self.number: int = device.number
        self._unit: Any = None
        self._lanes = self._item_bytes = 0

    def tables_bytes(self, slots: int, kernels: Mapping[str, Kernel], *, recorded: bool) -> int:
        """Return the bytes of tables on the device and of memory that the host shares with it."""
        return _core.mega_queue_device_bytes(
            slots, self.workers, _most_arguments(kernels), len(kernels), recorded, _RING_BITS
        )

    def compile(self, kernels: Mapping[str, Kernel], cache: KernelCache) -> dict[str, QueueOp]:
        """Return the ops; they are compiled together with the engine."""
        lanes = max(_lanes(name, kernel) for name, kernel in kernels.items())
        self._lanes = max(_LEAST_LANES, -(-lanes // WARP) * WARP)
        self._item_bytes = self._shared_bytes(kernels)
        memory = Memory(_CUDA, self.number)
        # Each on its own first: a compiler's message is then about one of them.
        ops = {
            name: QueueOp(number, name, cache.get_or_compile(kernel, self.device), memory)
            for number, (name, kernel) in enumerate(kernels.items())
        }
        self._check_registers(ops)
        unit = Kernel(
            "megakernel_queue",
            queue_source(list(kernels.values()), self._lanes),
            [],
            entry=ENTRY,
            language="megakernel",
            local_size=self._lanes,
        )
        self._unit = cache.get_or_compile(unit, self.device).program
        self._check_workers(len(kernels), _most_arguments(kernels))
        self.limits = [*self.limits[:6], self._item_bytes, self._lanes]
        return ops

    def _shared_bytes(self, kernels: Mapping[str, Kernel]) -> int:
        """Return the shared memory of an item: of the largest, or all where one is not known."""
        own = _core.mega_queue_shared_bytes(len(kernels), _most_arguments(kernels), 0)
        room = (self.device.limits.shared_bytes - own) // 128 * 128
        needed = 0
        for name, kernel in kernels.items():
            value = kernel.shared_bytes.value
            if value is not None and value > room:
                raise refusal(
                    "MK501",
                    f"op {name}",
                    f"expected at most {room} bytes of shared memory, got {value}; declare less",
                )
            needed = max(needed, room if value is None else value)
        return -(-needed // 128) * 128

    def _check_registers(self, ops: Mapping[str, QueueOp]) -> None:
        # A quarter of a multiprocessor has a quarter of its registers, and of its warps.
        warps = -(-self._lanes // (4 * WARP)) * 4
        room = min(255, REGISTERS // (warps * WARP) // 8 * 8)
        for name, op in ops.items():
            needed = op.cached.resources.get("registers", 0)
            if needed > room:
                raise refusal(
                    "MK501",
                    f"op {name}",
                    f"it needs {needed} registers a lane, and a worker of {self._lanes} lanes has "
                    f"{room}; declare a smaller local_size for the largest op",
                )

    def _check_workers(self, ops: int, arguments: int) -> None:
        shared = _core.mega_queue_shared_bytes(ops, arguments, self._item_bytes)
        most = self.device.blocks_at_once(self._unit.function, self._lanes, shared) - 1  # type: ignore[attr-defined]
        if self.workers > most:
            raise refusal(
                "MK511",
                f"{self.where}, workers",
                f"expected 1 to {most}, as many blocks of {self._lanes} lanes and {shared} bytes "
                f"of shared memory as {self.name} has at once beside one that takes submissions, "
                f"got {self.workers}; leave workers out",
            )

    def core_options(self) -> dict[str, int] | None:
        """Return how blocks are made."""
        return {
            "context": self._unit.context,
            "function": self._unit.function,
            "threads": self._lanes,
            "item_bytes": self._item_bytes,
            "ring_bits": _RING_BITS,
            "rest_ns": _REST_NS,
        }

    def bytes_at(self, begin: int, end: int) -> Bytes:
        """Return a copy."""
        found: Bytes = self.device.bytes_at(begin, end)  # type: ignore[attr-defined]
        return found

    def stream_of(self, where: str, stream: Any) -> int | None:
        """Return the handle of a stream, of torch's current one where none is given."""
        return int(self.device.stream_handle(stream))


def _most_arguments(kernels: Mapping[str, Kernel]) -> int:
    return max(len(kernel.signature) for kernel in kernels.values())


def _lanes(name: str, kernel: Kernel) -> int:
    """Return the lanes of a block, which the engine is compiled for."""
    lanes = 1
    for size in kernel.local_size or ():
        if size.value is None:
            raise refusal(
                "MK501",
                f"op {name}",
                f"expected a local_size that depends on no argument, got {size}; declare a number",
            )
        lanes *= size.value
    if lanes > _MOST_LANES or (lanes > WARP and lanes % WARP):
        raise refusal(
            "MK501",
            f"op {name}",
            f"expected at most {WARP} lanes, or a multiple of {WARP} up to {_MOST_LANES}, got "
            f"{lanes}; declare another local_size",
        )
    return lanes
