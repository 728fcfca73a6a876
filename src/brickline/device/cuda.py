"""CUDA: NVRTC, modules and memory through cuda-core, in the primary context.

The core launches by the handles that are found here. Single-source kernels write their faults to
one word of the device, which `synchronize` reads.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.buffers import Buffer, check_copy
from brickline.device.base import Compiled, Device, Event, Limits, Program, fault_text
from brickline.device.compiling import compile_error, headers_digest
from brickline.device.cuda_context import current_stream, is_cuda_error, stream_handle
from brickline.errors import DeviceError, LaunchError
from brickline.kernel import Kernel
from brickline.kernel_source import INCLUDE_DIRECTORY, cuda_source, entry_point, headers

_STATIC_SHARED_BYTES = 48 << 10
"""More shared memory than this must be asked for, kernel by kernel."""


class CudaDevice(Device):
    """One GPU. Launches are asynchronous; copies wait for all of them first."""

    kind = 2

    def __init__(self, number: int) -> None:
        try:
            import cuda.bindings.driver as driver
            import cuda.core as core
        except ImportError as error:
            raise DeviceError(
                f"CUDA:{number} needs cuda-core: pip install 'brickline[cuda]' ({error})"
            ) from error
        self._core, self._driver = core, driver
        self.name, self.number = f"CUDA:{number}", number
        try:
            self._device = core.Device(number)
            with self._current():
                pass
        except Exception as error:
            if not is_cuda_error(error):
                raise
            raise DeviceError(f"{self.name} cannot be used: {error}") from error
        facts = self._device.properties
        self.limits = Limits(
            (facts.max_grid_dim_x, facts.max_grid_dim_y, facts.max_grid_dim_z),
            (facts.max_block_dim_x, facts.max_block_dim_y, facts.max_block_dim_z),
            facts.max_threads_per_block,
            facts.max_shared_memory_per_block_optin,
        )
        self.multiprocessors = int(facts.multiprocessor_count)
        self.is_cooperative = bool(facts.cooperative_launch)
        self.can_map_host_memory = bool(getattr(facts, "can_map_host_memory", True))
        self._fault = self.allocate((1,), "u32")
        self._fault_lock = threading.Lock()
        self._write(self._fault, np.zeros(1, np.uint32))

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make this device current, and afterwards again what the thread had."""
        _, before = self._driver.cuCtxGetCurrent()
        self._device.set_current()
        try:
            yield
        finally:
            if int(before):
                self._driver.cuCtxSetCurrent(before)

    @cached_property
    def compute_capability(self) -> tuple[int, int]:
        """Major and minor number."""
        return divmod(int(self._device.arch.rstrip("af")), 10)

    @cached_property
    def _architecture(self) -> str:
        return f"sm_{self._device.arch}"

    @cached_property
    def _nvrtc_version(self) -> list[int]:
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
        return [major, minor]

    def _options(self, kernel: Kernel) -> dict[str, Any]:
        # Contraction is off where one source serves several engines; plain CUDA is left as it is.
        is_ours = kernel.language in ("block", "megakernel")
        toolkit = [] if is_ours else _toolkit_headers()
        options: dict[str, Any] = {"arch": self._architecture, "std": "c++17"}
        if is_ours:
            options["fma"] = False
        return options | {"include_path": [str(path) for path in (INCLUDE_DIRECTORY, *toolkit)]}

    def compiler_identity(self, kernel: Kernel) -> Mapping[str, Any]:
        """Return NVRTC's version, its options and the headers."""
        options = self._options(kernel)
        del options["include_path"]  # an installation's place does not change its code
        return {
            "kind": "nvrtc",
            "version": self._nvrtc_version,
            "options": options,
            "headers": headers_digest(headers(kernel, cuda=True)),
        }

    def compile(self, kernel: Kernel) -> Compiled:
        """Compile a kernel to a cubin."""
        if kernel.language == "c":
            raise DeviceError(
                f"kernel {kernel.name} is plain C, which CUDA does not run; compile it for CPU, "
                f"or write it against brickline/kernel.h"
            )
        source, options = cuda_source(kernel), self._options(kernel)
        with self._current():
            return self._compiled(kernel, source, options)

    def _compiled(self, kernel: Kernel, source: str, options: dict[str, Any]) -> Compiled:
        try:
            made = self._core.Program(
                source, "c++", self._core.ProgramOptions(name=kernel.name, **options)
            ).compile("cubin")
        except Exception as error:
            if "NVRTC" not in type(error).__name__.upper():  # see is_cuda_error
                raise
            log = str(error).rstrip("\0")
            raise compile_error(kernel, log, f"nvrtc {options}") from error
        entry = entry_point(kernel)
        try:
            attributes = made.get_kernel(entry).attributes
        except Exception as error:
            if not is_cuda_error(error):
                raise
            raise compile_error(
                kernel,
                f'the code has no function {entry}: declare it extern "C" __global__ ({error})',
                f"nvrtc {options}",
            ) from error
        resources = {
            "registers": attributes.num_regs,
            "shared_bytes": attributes.shared_size_bytes,
            "local_bytes": attributes.local_size_bytes,
            "max_lanes": attributes.max_threads_per_block,
        }
        return Compiled(bytes(made.code), entry, source, resources=resources)

    def load(self, compiled: Compiled) -> Program:
        """Load a cubin into the primary context."""
        with self._current():
            return self._loaded(compiled)

    def _loaded(self, compiled: Compiled) -> Program:
        library = self._core.ObjectCode.from_cubin(compiled.binary, name=compiled.entry_point)
        kernel = library.get_kernel(compiled.entry_point)
        # Launching by the function of this context saves the driver a search at each launch.
        status, function = self._driver.cuKernelGetFunction(kernel.handle)
        self._check((status,))
        room = self.limits.shared_bytes - compiled.resources.get("shared_bytes", 0)
        if room > _STATIC_SHARED_BYTES:
            attribute = self._driver.CUfunction_attribute
            self._driver.cuKernelSetAttribute(
                attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                room,
                kernel.handle,
                self.number,
            )
        context = int(self._device.context.handle)
        return Program(int(function), (library, kernel), context, self._fault.address)

    def allocate(self, shape: Sequence[int], dtype: str) -> Buffer:
        """Return fresh device memory."""
        empty = Buffer.at_address(0, shape, dtype, kind=self.kind, number=self.number)
        try:
            with self._current():
                memory = _Memory(self, max(empty.nbytes, 1))
        except Exception as error:
            if not is_cuda_error(error):
                raise
            raise DeviceError(
                f"{self.name} cannot allocate {empty.nbytes} bytes: {error}"
            ) from error
        return empty.at(memory.address, owner=memory)

    def zeros(self, shape: Sequence[int], dtype: str) -> Buffer:
        """Return fresh device memory that is zero."""
        buffer = self.allocate(shape, dtype)
        with self._current():
            self._check(self._driver.cuMemsetD8(buffer.address, 0, buffer.nbytes))
        return buffer

    def is_idle(self, stream: int) -> bool:
        """Whether everything that a stream was given is done.

        Raises:
            DeviceError: Something of it failed.
        """
        with self._current():
            (status,) = self._driver.cuStreamQuery(stream)
        if status == self._driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        self._check((status,))
        return True

    def blocks_at_once(self, function: int, threads: int, shared_bytes: int) -> int:
        """Return how many blocks of a kernel are on the device at once."""
        with self._current():
            status, count = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._driver.CUfunction(function), threads, shared_bytes
            )
        self._check((status,))
        return int(count) * self.multiprocessors

    def allocate_mapped(self, nbytes: int) -> MappedMemory:
        """Return memory of the host, zero, that kernels read and write while they run."""
        with self._current():
            return MappedMemory(self, nbytes)

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy between this device and the host, or within it, when all launches are done."""
        check_copy(target, source)
        self.synchronize()
        with self._current():
            self._check(self._driver.cuMemcpy(target.address, source.address, target.nbytes))

    def bytes_at(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Return a copy of memory of this device as it is now, whatever is running.

        In a stream of its own; who wrote there must have ended, or have told the host so.
        """
        found = np.empty(end - begin, np.uint8)
        address = found.__array_interface__["data"][0]
        with self._current():
            stream = stream_handle(self._reading)
            self._check(self._driver.cuMemcpyDtoHAsync(address, begin, end - begin, stream))
            self._check(self._driver.cuStreamSynchronize(stream))
        return found

    @cached_property
    def _reading(self) -> Any:
        (stream,) = self.make_streams(1)
        return stream

    def _write(self, target: Buffer, array: np.ndarray[Any, Any]) -> None:
        address = array.__array_interface__["data"][0]
        with self._current():
            self._check(self._driver.cuMemcpyHtoD(target.address, address, target.nbytes))

    def synchronize(self) -> None:
        """Wait for all launches, and raise what one of them failed with."""
        word = np.zeros(1, np.uint32)
        address = word.__array_interface__["data"][0]
        with self._current(), self._fault_lock:
            self._device.sync()
            self._check(self._driver.cuMemcpyDtoH(address, self._fault.address, 4))
            if not word[0]:
                return
            self._write(self._fault, np.zeros(1, np.uint32))
        raise LaunchError(
            f"a kernel on {self.name} reported {fault_text(int(word[0]))}; it ran since the last "
            "synchronize: call that after each launch to see which one"
        )

    def stream_handle(self, stream: Any = None) -> int:
        """Return the handle of a stream, of torch's current one where none is given."""
        return current_stream(self.number) if stream is None else stream_handle(stream)

    def make_streams(self, count: int) -> Sequence[Any]:
        """Return streams of cuda-core."""
        with self._current():
            return [self._device.create_stream() for _ in range(count)]

    @contextmanager
    def capture_stream(self) -> Iterator[int]:
        """Give a stream of cuda-core, which torch takes for its current one meanwhile."""
        (stream,) = self.make_streams(1)
        handle, torch = stream_handle(stream), sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available():
            yield handle
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(handle, device=self.number)):
            yield handle

    def event(self) -> CudaEvent:
        """Return an event of CUDA's driver."""
        return CudaEvent(self)

    def _check(self, result: Any) -> None:
        status = result[0]
        if int(status) != 0:
            raise DeviceError(f"{self.name}: CUDA's driver says {status.name}")


class CudaEvent(Event):
    """An event of CUDA's driver."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        with device._current():
            status, self._event = device._driver.cuEventCreate(0)
        device._check((status,))

    def record(self, stream: Any = None) -> None:
        """Enqueue the event."""
        handle = self._device.stream_handle(stream)
        with self._device._current():
            self._device._check(self._device._driver.cuEventRecord(self._event, handle))

    def wait(self) -> None:
        """Wait until the stream has got there."""
        self._device._check(self._device._driver.cuEventSynchronize(self._event))

    def ns_since(self, earlier: Event) -> float:
        """Return the device's time between two events."""
        if not isinstance(earlier, CudaEvent) or earlier._device is not self._device:
            raise DeviceError(f"expected an event of {self._device.name}, got {earlier!r}")
        self.wait()
        earlier.wait()
        status, milliseconds = self._device._driver.cuEventElapsedTime(earlier._event, self._event)
        self._device._check((status,))
        return float(milliseconds) * 1e6

    def __del__(self) -> None:
        event = getattr(self, "_event", None)
        if event is not None:
            self._device._driver.cuEventDestroy(event)


class MappedMemory:
    """Memory of the host that kernels see, too."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device, driver = device, device._driver
        flags = driver.CU_MEMHOSTALLOC_DEVICEMAP | driver.CU_MEMHOSTALLOC_PORTABLE
        status, self._pointer = driver.cuMemHostAlloc(nbytes, flags)
        device._check((status,))
        status, address = driver.cuMemHostGetDevicePointer(self._pointer, 0)
        device._check((status,))
        self.address = int(address)
        """As kernels see it."""
        memory = (ctypes.c_ubyte * nbytes).from_address(int(self._pointer))
        self.bytes: np.ndarray[Any, Any] = np.ctypeslib.as_array(memory)
        """As the host sees it."""
        self.bytes[:] = 0

    def __del__(self) -> None:
        pointer = getattr(self, "_pointer", None)
        if pointer is None or sys is None or sys.is_finalizing():
            return
        with self._device._current():
            self._device._driver.cuMemFreeHost(pointer)


class _Memory:
    """Device memory that is given back once no launch can still use it."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._device, owner = device, device._device
        self._buffer = owner.allocate(nbytes, stream=owner.default_stream)
        owner.sync()
        self.address = int(self._buffer.handle)

    def __del__(self) -> None:
        buffer = getattr(self, "_buffer", None)
        # When the interpreter ends its modules are taken apart, and the driver frees everything.
        if buffer is None or sys is None or sys.is_finalizing():
            return
        with self._device._current():
            self._device._device.sync()
            buffer.close()


def _toolkit_headers() -> list[Path]:
    """Return where CUDA's own headers lie, for plain CUDA sources that include them."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return [path for home in homes if home and (path := Path(home) / "include").is_dir()][:1]


def open_device(number: int) -> CudaDevice:
    """Return a GPU.

    Raises:
        DeviceError: if cuda-core, the driver or the device is absent.
    """
    return CudaDevice(number)
