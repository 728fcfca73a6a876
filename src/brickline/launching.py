"""From a kernel and its program to something that can be called.

`make_launcher` hands the declaration to the native launcher, which checks every argument of every
launch. `launch_guarded` launches once with guard zones around the buffers and says where a kernel
wrote out of bounds. Knows devices by their interface alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from brickline import _core
from brickline.buffers import Buffer, as_buffer
from brickline.device.base import Device, Program, open_device
from brickline.dtypes import DTYPES
from brickline.errors import LaunchError
from brickline.kernel import Kernel, Param, Scalar
from brickline.symbolic import Expr

if TYPE_CHECKING:
    from brickline.cache import CachedKernel

GUARD_BYTES = 4096
GUARD_BYTE = 0xA5
_SCALAR_TYPES = {"f64": 1, "f32": 2}
"""As the native launcher numbers them; 0 is every integer."""
_NAMES = {dtype.code: dtype.name for dtype in DTYPES.values()}
_DTYPE_NAMES = tuple(_NAMES.get(code, "?") for code in range(max(_NAMES) + 1))


def make_launcher(kernel: Kernel, device: Device, program: Program) -> Callable[..., None]:
    """Return what launches a kernel on a device, with its arguments checked."""
    if any(param.strides is not None for param in kernel.params):
        return _refuse_strided(kernel)
    names = [each.name for each in kernel.signature]

    def code(expression: Expr) -> bytes:
        return expression.program(names)

    def row(each: Param | Scalar) -> tuple[Any, ...]:
        if isinstance(each, Param):
            access = each.access.reads + 2 * each.access.writes
            shape = tuple(code(size) for size in each.shape)
            return each.name, True, DTYPES[each.dtype].code, access, each.align, shape
        low, high = each.low or 0, each.high or 0
        return each.name, False, _SCALAR_TYPES.get(each.dtype, 0), low, high

    limits = device.limits
    local_size = kernel.local_size or (Expr.of(1),) * 3
    sizes = (*kernel.global_size, *local_size, kernel.shared_bytes)
    return _core.Launcher(
        name=kernel.name,
        arguments=tuple(row(each) for each in kernel.signature),
        sizes=tuple(map(code, sizes)),
        size_texts=tuple(map(str, sizes)),
        limits=(*limits.grid, *limits.block, limits.shared_bytes, limits.lanes),
        kind=device.kind,
        number=device.number,
        function=program.function,
        context=program.context,
        fault=program.fault if kernel.language == "block" else 0,
        owner=program.library,
        convert=_convert,
        dtypes=_DTYPE_NAMES,
    )


def _refuse_strided(kernel: Kernel) -> Callable[..., None]:
    def launch(*args: Any, **arguments: Any) -> None:
        raise LaunchError(
            f"kernel {kernel.name} takes strided views, which a Plan knows; launch it there"
        )

    return launch


def _convert(value: Any, launcher: _core.Launcher, name: str) -> Buffer:
    return _as_argument(value, launcher.name, name)


def _as_argument(value: Any, kernel: str, name: str) -> Buffer:
    try:
        return as_buffer(value)
    except LaunchError as error:
        raise LaunchError(f"kernel {kernel}: {name}: {error}") from error


def launch_guarded(cached: CachedKernel, arguments: Mapping[str, Any]) -> None:
    """Launch once with guard zones around every buffer, and wait for it.

    Buffers are copied between zones of `GUARD_BYTES` bytes on either side, and what the kernel
    writes is copied back where nothing was written outside. A write that lands beyond the zones is
    not seen.

    Args:
        cached: The kernel.
        arguments: Its arguments by name.

    Raises:
        LaunchError: if the kernel wrote outside a buffer: which one, and how far.
    """
    kernel = cached.kernel
    if kernel is None:
        raise LaunchError(f"kernel {cached.entry_point} is another library's; launch it there")
    if not cached.program.function:  # NULL executes nothing, and its memory has no contents
        cached.launch(**arguments)
        return
    device = open_device(cached.device)
    given = {
        param: _as_argument(arguments[param.name], kernel.name, param.name)
        for param in kernel.params
        if param.name in arguments
    }
    _check_overlap(kernel, given)
    zones = {param: _guarded(device, param, buffer) for param, buffer in given.items()}
    guarded = {
        param.name: inside.at(inside.address, owner=zone, read_only=given[param].is_read_only)
        for param, (inside, zone) in zones.items()
    }
    cached.launch(**(dict(arguments) | guarded))
    device.synchronize()
    for param, (inside, zone) in zones.items():
        _check_zone(kernel, param, inside, zone.address, device.to_numpy(zone))
    for param, (inside, _) in zones.items():
        if param.access.writes:
            device.copy(given[param], inside)
    device.synchronize()


def _guarded(device: Device, param: Param, buffer: Buffer) -> tuple[Buffer, Buffer]:
    """Return a copy of a buffer, and the larger one that it lies inside."""
    zone = device.allocate((param.align + buffer.nbytes + 2 * GUARD_BYTES,), "u8")
    device.copy(zone, as_buffer(np.full(zone.nbytes, GUARD_BYTE, np.uint8)))
    address = zone.address + GUARD_BYTES
    inside = buffer.at(address + -address % param.align, owner=zone)
    device.copy(inside, buffer)
    return inside, zone


def _check_overlap(kernel: Kernel, given: Mapping[Param, Buffer]) -> None:
    """Refuse what a launch refuses, before copies hide it."""
    for param, buffer in given.items():
        for other, theirs in given.items():
            if other is param or not param.access.writes:
                continue
            begin = max(buffer.address, theirs.address)
            shared = min(buffer.address + buffer.nbytes, theirs.address + theirs.nbytes) - begin
            if shared > 0:
                raise LaunchError(
                    f"kernel {kernel.name} writes to {param.name}, which shares {shared} bytes "
                    f"with {other.name}; pass memory of its own, or declare one read-write argument"
                )


def _check_zone(kernel: Kernel, param: Param, inside: Buffer, address: int, zone: Any) -> None:
    nbytes = inside.nbytes
    changed = np.flatnonzero(zone != GUARD_BYTE) + address - inside.address
    outside = changed[(changed < 0) | (changed >= nbytes)]
    if not len(outside):
        return
    first = int(outside[0])
    where = f"{-first} bytes before it" if first < 0 else f"{first - nbytes} bytes after its end"
    raise LaunchError(
        f"kernel {kernel.name} writes outside {param.name}, which has {nbytes} bytes: first "
        f"{where}, {len(outside)} bytes in all; look at the kernel's bounds"
    )
