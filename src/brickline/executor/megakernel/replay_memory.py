"""Which bytes of a plan's memory are whose at the end of a run, and how to read them.

Knows ranges of bytes and prepared plans; what is compared with what is the matter of `replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.buffers import Buffer
from brickline.executor.megakernel.replay_log import writes_of
from brickline.executor.megakernel.replay_runs import Written
from brickline.plan_launches import Launch, evaluated

if TYPE_CHECKING:
    from brickline.executor.prepared import PreparedPlan

Range: TypeAlias = tuple[int, int, int]
"""Buffer, first byte and end."""
MAX_BLOCKS = 1 << 16
"""Blocks that are asked who touches a byte; of a larger grid nobody is."""


def read_bytes(prepared: PreparedPlan, storage: int, begin: int, end: int) -> bytes:
    """Return a copy of bytes of a prepared plan, from whatever device."""
    whole = prepared._memory.buffers[storage]
    part = Buffer.at_address(
        whole.address + begin,
        (end - begin,),
        "u8",
        kind=whole.kind,
        number=whole.number,
        owner=whole,
    )
    found: NDArray[Any] = prepared._device.to_numpy(part)
    return found.tobytes()


def digests_of(prepared: PreparedPlan, ranges: Sequence[Range]) -> tuple[Written, ...]:
    """Return digests of ranges as they are now."""
    return tuple(
        Written.of(storage, begin, read_bytes(prepared, storage, begin, end))
        for storage, begin, end in ranges
    )


def surviving(launches: Sequence[Launch]) -> list[list[Range]]:
    """Return of each launch what it may have written and no later launch may overwrite."""
    covered: dict[int, list[tuple[int, int]]] = {}
    found: list[list[Range]] = []
    for launch in reversed(launches):
        mine = writes_of(launch)
        found.append(
            [
                (storage, *left)
                for storage, begin, end in mine
                for left in _without(begin, end, covered.get(storage, []))
            ]
        )
        for storage, begin, end in mine:
            covered[storage] = _merged([*covered.get(storage, []), (begin, end)])
    return found[::-1]


def _without(begin: int, end: int, taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what of a range lies in none of others, which are in order and apart."""
    left = []
    for first, last in taken:
        if last <= begin or first >= end:
            continue
        if first > begin:
            left.append((begin, first))
        begin = max(begin, last)
    return left + ([(begin, end)] if begin < end else [])


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def first_difference(first: bytes, second: bytes) -> int | None:
    """Return the first byte in which two of the same length differ."""
    if first == second:
        return None
    unequal = np.frombuffer(first, np.uint8) != np.frombuffer(second, np.uint8)
    return int(unequal.argmax())


def block_that_touches(
    launch: Launch, values: dict[str, Any], storage: int, byte: int
) -> tuple[int, int, int] | None:
    """Return the first block of a launch that may write a byte; None where nobody knows."""
    scalars = {
        name: value for name, value in launch.scalars(values).items() if isinstance(value, int)
    }
    grid = [int(evaluated(size, values)) for size in launch.sizes[:3]]
    if grid[0] * grid[1] * grid[2] > MAX_BLOCKS:
        return None
    for param, buffer in launch.buffers():
        here = byte - buffer.offset
        outside = buffer.storage.number != storage or not 0 <= here < buffer.span
        if not param.access.writes or param.touches is None or outside:
            continue
        begin, end = (each.substitute(scalars) for each in param.touches)
        for z, y, x in np.ndindex(grid[2], grid[1], grid[0]):
            at = {"block_x": int(x), "block_y": int(y), "block_z": int(z)}
            if begin.evaluate(at) <= here < end.evaluate(at):
                return at["block_x"], at["block_y"], at["block_z"]
    return None
