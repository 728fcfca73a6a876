"""Launches as the core takes them: functions, argument slots, sizes and dependencies as numbers."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from brickline.buffers import Buffer
from brickline.cache import CachedKernel
from brickline.kernel import Param, Scalar
from brickline.plan_buffers import Extent, PlanBuffer
from brickline.plan_launches import Argument, FloatVariable, Launch
from brickline.symbolic import Expr, Variable

MAY_OVERLAP, MAY_SPLIT, WAITS = 1, 2, 4


def launch_rows(
    launches: Sequence[Launch],
    kernels: Sequence[CachedKernel],
    names: Sequence[str],
    faults: Buffer | None,
) -> list[tuple[Any, ...]]:
    """Return a row for each launch.

    Args:
        launches: Those of the plan.
        kernels: The compiled kernel of each.
        names: The plan's variables, in the order in which their values are given.
        faults: A word for each launch, on devices where the core has none.
    """
    places = {name: place for place, name in enumerate(names)}

    def size(extent: Extent) -> int | bytes:
        return extent.program(names) if isinstance(extent, Expr) else extent

    rows = []
    for launch, cached in zip(launches, kernels, strict=True):
        pairs = zip(launch.kernel.signature, launch.arguments, strict=True)
        rows.append(
            (
                cached.program.function,
                0 if faults is None else _fault(launch, faults),
                _flags(launch),
                [_slot(declared, given, names, places) for declared, given in pairs],
                [size(extent) for extent in launch.sizes],
                list(launch.waits_for),
            )
        )
    return rows


def variable_rows(variables: Iterable[Variable | FloatVariable]) -> list[tuple[int, int, bool]]:
    """Return the bounds of each variable, and whether it is a floating-point number."""
    return [
        (0, 0, True) if isinstance(each, FloatVariable) else (each.low, each.high, False)
        for each in variables
    ]


def _fault(launch: Launch, faults: Buffer) -> int:
    if launch.kernel.language != "block":
        return 0
    return faults.address + 4 * launch.number


def _flags(launch: Launch) -> int:
    kernel = launch.kernel
    waits = WAITS if kernel.language == "block" else 0  # as its generated entry does
    if not kernel.host_parallel_safe:
        return waits
    # Blocks that add to one element do so in any order, so they stay with one thread.
    adds = any(param.accumulate is not None for param in kernel.params)
    return waits | (MAY_OVERLAP if adds or not waits else MAY_OVERLAP | MAY_SPLIT)


def _slot(
    declared: Param | Scalar, given: Argument, names: Sequence[str], places: dict[str, int]
) -> tuple[Any, ...]:
    if isinstance(given, PlanBuffer):
        return "buffer", given.storage.number, given.offset
    assert isinstance(declared, Scalar)
    if isinstance(given, FloatVariable):
        return "float", places[given.name], declared.dtype == "f32"
    if isinstance(given, Expr):
        return "expression", given.program(names), declared.dtype == "i32"
    if declared.variable is None:
        code = "<f" if declared.dtype == "f32" else "<d"
        return "value", int.from_bytes(struct.pack(code, given), "little")
    return "value", int(given) % 2**64
