"""What a process and its machine are busy with: cores and memory by psutil, GPUs by NVML.

Both packages are optional, and so is each figure: what is not known is None, never zero. It knows
nothing of bricks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuLoad:
    """One GPU. Its load is that of all processes on it."""

    index: int
    name: str
    busy: float | None = None
    """Part of the last second or so in which some kernel ran, from 0 to 1."""
    used_bytes: int | None = None
    total_bytes: int | None = None
    process_bytes: int | None = None
    """Memory of the watched process; None where the driver does not tell."""
    power_w: float | None = None
    temperature_c: float | None = None


@dataclass(frozen=True)
class MachineLoad:
    """The load of one moment."""

    cpu: float | None = None
    """Cores that the process keeps busy; 1 is one core."""
    cores: int | None = None
    threads: int | None = None
    resident_bytes: int | None = None
    memory_bytes: int | None = None
    """Memory of the machine."""
    machine_cpu: float | None = None
    """Part of all cores that is busy with anything, from 0 to 1."""
    gpus: tuple[GpuLoad, ...] = ()
    """The GPUs that the process uses; all where that is not known."""


class Machine:
    """Asks for the load of one process; a second of distance between two calls is enough."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._psutil: Any = None
        self._process: Any = None
        self._nvml: Any = None
        self._opened = False

    def look(self) -> MachineLoad:
        """Return the load since the call before; the first call knows no CPU load."""
        first = not self._opened
        if first:
            self._open()
        known: dict[str, Any] = {"gpus": self._gpus()}
        if self._psutil is not None:
            psutil = self._psutil
            known["cores"] = psutil.cpu_count()
            known["memory_bytes"] = psutil.virtual_memory().total
            machine_cpu = psutil.cpu_percent(None)
            # A percentage is since the call before, so the first one means nothing.
            known["machine_cpu"] = None if first else machine_cpu / 100
            with suppress(psutil.Error, OSError):
                with self._process.oneshot():
                    cpu = self._process.cpu_percent(None)
                    known["resident_bytes"] = self._process.memory_info().rss
                    known["threads"] = self._process.num_threads()
                known["cpu"] = None if first else cpu / 100
        return MachineLoad(**known)

    def close(self) -> None:
        """Let go of the driver."""
        if self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
            self._nvml = None

    def _open(self) -> None:
        self._opened = True
        with suppress(ImportError):
            import psutil

            with suppress(psutil.Error, OSError):
                self._process = psutil.Process(self._pid)
                self._psutil = psutil
        with suppress(ImportError):
            import pynvml

            with suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._nvml = pynvml

    def _gpus(self) -> tuple[GpuLoad, ...]:
        nvml = self._nvml
        if nvml is None:
            return ()
        found: list[GpuLoad] = []
        with suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                with suppress(nvml.NVMLError):
                    found.append(_gpu_load(nvml, index, self._pid))
        ours = tuple(gpu for gpu in found if gpu.process_bytes is not None)
        return ours or tuple(found)


def _gpu_load(nvml: Any, index: int, pid: int) -> GpuLoad:
    device = nvml.nvmlDeviceGetHandleByIndex(index)

    def asked(ask: Callable[[], Any]) -> Any:
        """Return the answer, or None from a device that does not have it."""
        try:
            return ask()
        except nvml.NVMLError:
            return None

    name = asked(lambda: nvml.nvmlDeviceGetName(device)) or f"GPU {index}"
    busy = asked(lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu)
    memory = asked(lambda: nvml.nvmlDeviceGetMemoryInfo(device))
    power = asked(lambda: nvml.nvmlDeviceGetPowerUsage(device))
    processes = asked(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(device)) or ()
    return GpuLoad(
        index=index,
        name=name.decode(errors="replace") if isinstance(name, bytes) else str(name),
        busy=None if busy is None else busy / 100,
        used_bytes=None if memory is None else int(memory.used),
        total_bytes=None if memory is None else int(memory.total),
        process_bytes=next((each.usedGpuMemory for each in processes if each.pid == pid), None),
        power_w=None if power is None else power / 1e3,
        temperature_c=asked(
            lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU)
        ),
    )
