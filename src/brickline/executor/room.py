"""Whether the buffers of a plan fit into memory, and in which words they do not.

Host memory is asked of Linux. An array larger than all of it can often be had and not be filled:
the system then ends the process, so what cannot fit is refused before any of it is allocated.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from brickline.device.base import Device
from brickline.errors import PlanError
from brickline.plan_buffers import Storage
from brickline.symbolic import Expr

HOST = 1
"""Kind of a device whose memory is the host's."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_MEMINFO = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")


def check_room(plan: str, storages: Sequence[Storage], device: Device) -> None:
    """Refuse buffers that host memory cannot hold together.

    Args:
        plan: The plan's name.
        storages: Those that memory is to be found for.
        device: Where.

    Raises:
        PlanError: They need more than the machine has; the message names the largest.
    """
    if device.kind != HOST:
        return
    memory, swap = _host_bytes("MemTotal"), _host_bytes("SwapTotal")
    needed = sum(storage.nbytes for storage in storages)
    if memory is not None and needed > memory + (swap or 0):
        culprit = max(storages, key=lambda storage: storage.nbytes)
        raise PlanError(no_room(plan, culprit, storages, device))


def no_room(plan: str, storage: Storage, storages: Sequence[Storage], device: Device) -> str:
    """Say what a buffer needs, what the device has left, and what can be done.

    Args:
        plan: The plan's name.
        storage: What found no memory.
        storages: All that memory is to be found for.
        device: Where.
    """
    needed = sum(each.nbytes for each in storages)
    shape = ", ".join(map(str, storage.shape))
    words = f"plan {plan}: buffer {storage.name}, {storage.dtype}[{shape}], needs "
    words += size_text(storage.nbytes)
    if needed > storage.nbytes:
        words += f", all buffers together {size_text(needed)}"
    free = _host_bytes("MemAvailable") if device.kind == HOST else _device_bytes(device)
    has = "cannot allocate that" if free is None else f"has {size_text(free)} available"
    varying = sorted(
        {
            variable
            for size in storage.shape
            if isinstance(size, Expr)
            for variable in size.variables
        },
        key=str,
    )
    bounds = ", ".join(f"{each.name} up to {each.high}" for each in varying)
    remedy = f"lower the bounds of what it keeps room for ({bounds})" if bounds else "declare less"
    return f"{words}; {device.name} {has}: {remedy}, or bind memory of your own, bind={{...}}"


def size_text(count: int) -> str:
    """Return bytes in the unit that keeps them short.

    Example:
        >>> size_text(7), size_text(2**47)
        ('7 bytes', '128.0 TiB')
    """
    unit = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count} bytes" if unit == 0 else f"{count / 1024**unit:.1f} {_UNITS[unit]}"


def _host_bytes(name: str) -> int | None:
    """Return a fact of the host's memory, at most what a container may use."""
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = next((int(each.split()[1]) * 1024 for each in lines if each.startswith(name)), None)
    try:
        limit = int(_LIMIT.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such limit, or "max"
        return found
    return limit if found is None else min(found, limit)


def _device_bytes(device: Device) -> int | None:
    """Return the bytes of a GPU that are free, where torch is loaded and can tell."""
    torch = sys.modules.get("torch")
    try:
        free: int | None = None if torch is None else torch.cuda.mem_get_info(device.number)[0]
    except (AssertionError, RuntimeError):  # torch without CUDA, or a device that is broken
        return None
    return free
