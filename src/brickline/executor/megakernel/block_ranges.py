"""What a block of a launch touches of its memory, from `Param.touches`, and what is proved of it.

Proofs are of expressions, for all values of their variables at once. Knows launches and kernels,
nothing of regions or workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import islice, product
from operator import add, mul

from brickline.errors import SymbolicError
from brickline.kernel import BLOCK_INDEX, Param
from brickline.plan_buffers import PlanBuffer
from brickline.plan_launches import Launch
from brickline.symbolic import Expr
from brickline.symbolic_ops import Op

KEPT = 4096
"""Ranges that are remembered: layers of a plan have the same ones again and again."""


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Bytes that a block touches, over block_x and the plan's variables."""

    begin: Expr
    end: Expr
    base: int
    """From where both are counted."""


def block_range(launch: Launch, param: Param, buffer: PlanBuffer) -> BlockRange | None:
    """Return what a block of a launch touches of a buffer.

    None where that is not declared, or depends on more than block_x and the plan's variables.
    """
    if param.touches is None:
        return None
    pairs = zip(launch.kernel.signature, launch.arguments, strict=True)
    values = tuple(
        (declared.name, given)
        for declared, given in pairs
        if not isinstance(declared, Param) and isinstance(given, int | Expr)
    )
    found = _touched(param.touches, values)
    return None if found is None else BlockRange(*found, buffer.range[1])


@lru_cache(maxsize=KEPT)
def _touched(
    touches: tuple[Expr, Expr], values: tuple[tuple[str, int | Expr], ...]
) -> tuple[Expr, Expr] | None:
    """Return a range of bytes where scalars have values; None where it has more than block_x."""
    named = {each.name for _, value in values for each in Expr.of(value).variables}
    if named & {index.name for index in BLOCK_INDEX}:  # of the plan, and not the block's place
        return None
    try:
        begin, end = (each.substitute(dict(values)) for each in touches)
    except SymbolicError:
        return None
    others = {index.name for index in BLOCK_INDEX[1:]}
    if others & {each.name for each in begin.variables | end.variables}:
        return None
    return begin, end


def are_apart(first: BlockRange, second: BlockRange) -> bool:
    """Whether no block touches of the second what a later block touches of the first."""
    return _begins_after(first.begin, second.end, first.base - second.base)


@lru_cache(maxsize=KEPT)
def _begins_after(begin: Expr, end: Expr, shift: int) -> bool:
    """Whether what one block begins with comes after what all before it end with.

    It begins no earlier with each block, and with the next block not before the other has ended:
    so it does with all blocks that follow.
    """
    try:
        following = begin.substitute({"block_x": BLOCK_INDEX[0] + 1})
        return _is_never_below(following, begin) and _is_never_below(following + shift, end)
    except SymbolicError:  # an expression grew too large
        return False


def _is_never_below(left: Expr, right: Expr) -> bool:
    """Whether one value is at least the other, whatever the variables are."""
    return any((left - each).low >= 0 for each in _bounds(right))


def _bounds(value: Expr) -> list[Expr]:
    """Return values that are never below one: itself, and those with operands for a minimum."""
    if value.op is Op.MIN:
        return [value, *(bound for each in value.args for bound in _bounds(each))]
    if value.op is Op.MUL and all(each.low >= 0 for each in value.args):
        return [reduce(mul, each) for each in _choices(value.args)]
    if value.op is Op.ADD:
        return [reduce(add, each) for each in _choices(value.args)]
    return [value]


def _choices(operands: Sequence[Expr]) -> list[tuple[Expr, ...]]:
    """Return operands with bounds in their places, a few of many."""
    return list(islice(product(*map(_bounds, operands)), 64))


@lru_cache(maxsize=KEPT)
def block_bytes(param: Param) -> Expr | None:
    """Return n where block k touches bytes k * n to (k + 1) * n at most, over a kernel's scalars.

    None where that cannot be shown, or depends on more than block_x.
    """
    found = None if param.touches is None else _touched(param.touches, ())
    if found is None:
        return None
    begin, end = found
    try:
        size = begin.substitute({"block_x": BLOCK_INDEX[0] + 1}) - begin
        is_first_at_0 = begin.substitute({"block_x": Expr.of(0)}).value == 0
        is_within = _is_never_below(begin + size, end)
    except SymbolicError:  # an expression grew too large
        return None
    is_fixed = BLOCK_INDEX[0].name not in {each.name for each in size.variables}
    return size if is_fixed and is_first_at_0 and is_within else None
