"""Launches of a plan as the columns of the planner: what they do, are given, read and write.

Holds at all values of the plan's variables, and wherever its memory lies: two launches have the
same parameters where they are given the same numbers and expressions, which are then equal in every
run. A row has one block: how many a launch has is a matter of values. `access_columns` also tells
what launches touch in one run. Knows launches, nothing of workers.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from brickline.executor.megakernel.planning import (
    ACCESS_DTYPE,
    ATOMIC,
    PURE,
    READ,
    WRITE,
    Tasks,
)
from brickline.plan_buffers import PlanBuffer
from brickline.plan_launches import Argument, Launch, integers_of


def columns_of(launches: Sequence[Launch]) -> Tasks:
    """Return a row for each launch, its accesses in the order of its buffers."""
    kernels: dict[str, int] = {}
    given: dict[Hashable, int] = {}
    access_begin, accesses, _ = access_columns(launches)
    count = len(launches)
    return Tasks(
        np.array(
            [kernels.setdefault(each.kernel.digest, len(kernels)) for each in launches], np.uint32
        ),
        np.ones(count, np.uint32),
        np.array([_flags(launch) for launch in launches], np.uint32),
        np.arange(count + 1, dtype=np.uint32),
        np.array([given.setdefault(_given(each), len(given)) for each in launches], np.uint64),
        access_begin,
        accesses,
    )


def access_columns(
    launches: Sequence[Launch], values: Mapping[str, int | float] | None = None
) -> tuple[NDArray[np.uint32], NDArray[np.void], dict[Hashable, int]]:
    """Return where the accesses of each launch begin and one more, all accesses, and their spaces.

    Args:
        launches: All of a plan.
        values: Of the plan's variables. Default None: their largest, so that it is all that a
            launch may touch in any run.
    """
    spaces: dict[Hashable, int] = {}
    accesses: list[tuple[int, int, int, int, int]] = []
    access_begin = [0]
    integers = None if values is None else integers_of(values)
    for launch in launches:
        for param, buffer in launch.buffers():
            space, begin, end = buffer.range if integers is None else buffer.range_at(integers)
            mode = READ * param.access.reads + WRITE * param.access.writes
            accesses.append((begin, end, 0, spaces.setdefault(space, len(spaces)), mode))
        access_begin.append(len(accesses))
    return np.array(access_begin, np.uint32), np.array(accesses, ACCESS_DTYPE), spaces


def _flags(launch: Launch) -> int:
    kernel = launch.kernel
    return PURE * kernel.pure | ATOMIC * any(each.accumulate is not None for each in kernel.params)


def _given(launch: Launch) -> Hashable:
    """Return what tells a launch from others of its kernel, but for where its buffers lie."""
    return tuple(map(_same, launch.arguments)), launch.sizes


def _same(given: Argument) -> Hashable:
    """Return what is equal where arguments are the same in every run; of a float its bits."""
    if isinstance(given, PlanBuffer):
        return None
    return struct.pack("<d", given) if isinstance(given, float) else given
