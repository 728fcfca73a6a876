"""Which rows of memory the blocks of a launch stream, so that they can be copied ahead.

A kernel streams a parameter where it reads it with ``block.rows`` or ``block.products`` and says
what a block touches: so many whole rows for each block, one block after the other. Nothing of a
plan may write to it: a copy ahead of its turn would take what was there before.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from math import prod

from brickline.dtypes import DTYPES
from brickline.errors import SymbolicError
from brickline.kernel import Param
from brickline.plan_buffers import PlanBuffer
from brickline.plan_launches import Launch
from brickline.symbolic import Expr

SLOT_BYTES = 16 << 10
"""What is copied at once, at most: a slot of the ring. Smaller ones leave bandwidth unused."""
ALIGN = 16
"""Bytes that addresses and sizes of copies are multiples of."""


@dataclass(frozen=True)
class RowStream:
    """What the blocks of one launch stream."""

    argument: int
    """Its place in the signature."""
    row_bytes: int
    block_rows: int
    rows: int


def row_stream(launch: Launch, written: Container[int]) -> RowStream | None:
    """Return what a launch streams; None where it streams nothing that can be copied ahead.

    Args:
        launch: One launch of a plan.
        written: Numbers of the storages that the plan writes to.
    """
    pairs = zip(launch.kernel.signature, launch.arguments, strict=True)
    for place, (declared, given) in enumerate(pairs):
        if not isinstance(declared, Param) or not isinstance(given, PlanBuffer):
            continue
        if declared.access.writes or declared.touches is None or declared.align % ALIGN:
            continue
        if not re.search(rf"\bblock\.(rows|products)\(\s*{declared.name}\b", launch.kernel.source):
            continue
        if given.strides is not None or given.storage.number in written:
            continue
        found = _rows_of(launch, declared, given)
        if found is not None:
            return RowStream(place, *found)
    return None


def _rows_of(launch: Launch, declared: Param, given: PlanBuffer) -> tuple[int, int, int] | None:
    """Return (bytes of a row, rows of a block, rows) where all are known and fit a ring."""
    shape = [size for size in given.shape if isinstance(size, int)]
    if len(shape) < len(given.shape) or len(shape) < 2 or not all(shape):
        return None
    row_bytes = prod(shape[1:]) * DTYPES[given.dtype].size_bytes
    blocks, *others = launch.sizes[:3]
    if row_bytes % ALIGN or row_bytes > SLOT_BYTES or others != [1, 1] or isinstance(blocks, Expr):
        return None
    values = {
        scalar.name: value
        for scalar, value in zip(launch.kernel.signature, launch.arguments, strict=True)
        if isinstance(value, int)
    }
    ranges = [_touched(declared, values, block) for block in (0, blocks - 1)]
    if None in ranges:
        return None
    (begin, end), (last_begin, last_end) = (each for each in ranges if each is not None)
    rows = shape[0]
    block_rows = (end - begin) // row_bytes
    is_regular = (
        begin == 0
        and block_rows > 0
        and end == block_rows * row_bytes
        and last_begin == (blocks - 1) * block_rows * row_bytes
        and last_end == rows * row_bytes
    )
    return (row_bytes, block_rows, rows) if is_regular else None


def _touched(declared: Param, values: dict[str, int], block: int) -> tuple[int, int] | None:
    assert declared.touches is not None
    places = {"block_x": block, "block_y": 0, "block_z": 0}
    try:
        begin, end = (each.evaluate(values | places) for each in declared.touches)
    except SymbolicError:  # it depends on variables of the plan
        return None
    return int(begin), int(end)
