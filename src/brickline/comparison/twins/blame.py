"""Which module turned good inputs into bad outputs, from a test of single operands.

Knows the nesting of launches, and not what makes an operand bad.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from brickline.comparison.pairing import Alignment
from brickline.comparison.sides import PARAMETER_INDEX, Side


@dataclass(frozen=True)
class Blame:
    """A module, and what shows that it is the one."""

    row: int
    """Launch of the candidate."""
    operand: int
    """The operand that differs."""
    before: int | None = None
    """Launch that is handed a tensor which differs; None: it is the module's output."""
    alternatives: tuple[int, ...] = ()


Test = Callable[[int], bool | None]
"""Whether an operand is bad; None: not known."""


def operands_of(side: Side, row: int, role: int) -> list[int]:
    """Return inputs or outputs of a launch, parameters left out."""
    own = range(int(side.first[row]), int(side.first[row + 1]))
    return [
        operand
        for operand in own
        if (side.role[operand] > 0) == (role > 0) and side.index[operand] < PARAMETER_INDEX
    ]


def innermost(side: Side, alignment: Alignment, row: int, is_bad: Test) -> Blame | None:
    """Return the innermost module that turned good inputs into bad outputs; None: none did.

    Args:
        side: The candidate.
        alignment: Which launches have a partner.
        row: A call with bad outputs.
        is_bad: Asked of operands.
    """
    outputs = [operand for operand in operands_of(side, row, 1) if is_bad(operand)]
    if not outputs:
        return None
    inside = [
        child
        for child in np.flatnonzero(side.parent == row).tolist()
        if side.direction[child] == 0 and alignment.partner[child] >= 0
    ]
    benign: list[int] = []
    for child in inside:
        given = [is_bad(operand) for operand in operands_of(side, child, 0)]
        worse = [operand for operand in operands_of(side, child, 0) if is_bad(operand)]
        made = [is_bad(operand) for operand in operands_of(side, child, 1)]
        if any(given):
            return Blame(row, worse[0], child, tuple(benign))
        if any(made):
            deeper = innermost(side, alignment, child, is_bad)
            if deeper is None:
                continue
            return deeper
        if not any(verdict is not None for verdict in made):
            benign.append(child)  # it may be this one: nothing of what it made was compared
    return Blame(row, outputs[0], None, tuple(benign))
