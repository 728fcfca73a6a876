"""Why the core refuses the values of a run: which size or argument of a launch, and what it takes.

Words alone: the core finds what does not fit, and says so in numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from brickline.device.base import Limits
from brickline.plan_launches import SIZES, Argument, FloatVariable, Launch
from brickline.symbolic import Expr

_FAULTS = {"overflow": "leaves int64", "division": "divides by zero"}


class Refused(NamedTuple):
    """What the core found, as it reports it."""

    launch: int
    kind: str
    """"size" or "argument"."""
    place: int
    """In `SIZES`, or in the kernel's signature."""
    why: str
    """"range", "overflow", "division", or "lanes": more than a block has in all."""
    value: float


def limit_numbers(limits: Limits) -> list[int]:
    """Return limits as the core takes them: one for each of `SIZES`, and the lanes in all."""
    return [*limits.grid, *limits.block, limits.shared_bytes, limits.lanes]


def refusal_text(
    launch: Launch, refused: Refused, values: Mapping[str, float], limits: Limits
) -> str:
    """Say what of a launch does not fit, what is expected, and what to do.

    Args:
        launch: The launch.
        refused: What the core found.
        values: Those of the variables.
        limits: The largest launch that the device takes.
    """
    parts: tuple[Argument, ...]
    if refused.kind != "size":
        declared = launch.kernel.signature[refused.place]
        name, parts = declared.name, (launch.arguments[refused.place],)
        expected, remedy = f"a number that fits {declared.dtype}", "pass another number"
    else:
        name, parts = SIZES[refused.place], (launch.sizes[refused.place],)
        least = 0 if name == "shared_bytes" else 1
        expected = f"{least} to {limit_numbers(limits)[refused.place]}"
        remedy = f"declare another {name.partition('[')[0]}= of kernel {launch.kernel.name}"
    if refused.why == "lanes":
        name, parts = "the product of local_size", launch.sizes[3:6]
        expected = f"at most {limits.lanes} lanes"
    given = ""
    if any(isinstance(part, Expr | FloatVariable) for part in parts):
        given = " with " + ", ".join(f"{name}={value}" for name, value in values.items())
        remedy = "pass other values"
    if len(parts) == 1 and isinstance(parts[0], Expr):
        name = f"{name} = {parts[0]}"
    found = _FAULTS.get(refused.why, f"is {refused.value}")
    return f"{name} {found}{given}; expected {expected}: {remedy}"
