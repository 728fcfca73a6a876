"""The operations of integer expressions: opcodes, text, bounds, and postfix code of a node.

A node is an operation and its operands, simplified already. Of an operand this knows ``op``,
``args``, ``low``, ``high``, ``value`` and ``code``; `symbolic` makes the objects.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from enum import IntEnum
from functools import reduce
from itertools import accumulate
from typing import Any, NoReturn, Protocol, TypeAlias, TypeVar

from brickline.errors import SymbolicError
from brickline.symbolic_terms import Range, Terms, range_of

INT64_MIN = -(2**63)
INT64_MAX = 2**63 - 1
MAX_OPERATIONS = 512
"""Records in the program of an expression; a launch shape that needs more is an accident."""
MAX_STACK = 32
"""Values that the native evaluator keeps at a time."""


class Op(IntEnum):
    """What a node is; the numbers are the opcodes of the native evaluator."""

    CONST = 0
    VALUE = 1
    ADD = 2
    MUL = 3
    FLOORDIV = 4
    MOD = 5
    CEILDIV = 6
    MIN = 7
    MAX = 8
    NEG = 9


SYMBOLS = {
    Op.ADD: "+",
    Op.MUL: "*",
    Op.FLOORDIV: "//",
    Op.MOD: "%",
    Op.CEILDIV: "ceil_div",
    Op.MIN: "minimum",
    Op.MAX: "maximum",
}
"""How an operation is written, as text and as JSON."""

APPLY: dict[Op, Callable[[int, int], int]] = {
    Op.ADD: operator.add,
    Op.MUL: operator.mul,
    Op.FLOORDIV: operator.floordiv,
    Op.MOD: operator.mod,
    Op.CEILDIV: lambda a, b: -(-a // b),
    Op.MIN: min,
    Op.MAX: max,
}
"""What the binary operations do, in integers of any size."""

LEAVES = frozenset({Op.CONST, Op.VALUE})
DIVISIONS = frozenset({Op.FLOORDIV, Op.MOD, Op.CEILDIV})
_POLYNOMIALS = frozenset({Op.CONST, Op.ADD, Op.MUL})
CALLS = frozenset({Op.CEILDIV, Op.MIN, Op.MAX})

Code: TypeAlias = tuple[tuple[Op, Any], ...]
"""Postfix steps: opcode and operand, which is a value for CONST and a name for VALUE."""


class Operand(Protocol):
    """What this module knows of an expression."""

    @property
    def op(self) -> Op:
        """What it is."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Operands; of a constant its value, of a variable name, low and high."""

    @property
    def low(self) -> int:
        """No value is smaller."""

    @property
    def high(self) -> int:
        """No value is larger."""

    @property
    def value(self) -> int | None:
        """The value of a constant, else None."""

    @property
    def code(self) -> Code:
        """How it is evaluated."""


E = TypeVar("E", bound=Operand)


def terms_of(expr: E) -> Terms[E]:
    """Return an expression as a polynomial."""
    return terms_of_node(expr.op, expr.args) if expr.op in _POLYNOMIALS else {(expr,): 1}


def terms_of_node(op: Op, args: tuple[Any, ...]) -> Terms[Any]:
    """Return a constant, a sum or a product as a polynomial."""
    if op is Op.ADD:
        return {factors: c for arg in args for factors, c in terms_of(arg).items()}
    if op is Op.MUL:
        coefficient = args[0].value
        return {args: 1} if coefficient is None else {args[1:]: coefficient}
    return {(): args[0]} if args[0] else {}


def range_of_node(op: Op, args: tuple[Any, ...]) -> Range:
    """Return bounds that hold for all values of the variables."""
    if op is Op.CONST:
        return args[0], args[0]
    if op is Op.VALUE:
        return args[1], args[2]
    if op is Op.ADD or op is Op.MUL:
        return range_of(terms_of_node(op, args))
    if op is Op.MIN or op is Op.MAX:
        choose = APPLY[op]
        return reduce(choose, [arg.low for arg in args]), reduce(choose, [arg.high for arg in args])
    return _remainder_range(*args) if op is Op.MOD else _quotient_range(op, *args)


def _quotient_range(op: Op, a: Operand, b: Operand) -> Range:
    # A quotient is monotonic in either operand as long as the divisor keeps its sign.
    ends = {b.low, min(b.high, -1), max(b.low, 1), b.high} - {0}
    divisors = [end for end in ends if b.low <= end <= b.high]
    corners = [APPLY[op](end, divisor) for end in (a.low, a.high) for divisor in divisors]
    return min(corners), max(corners)


def _remainder_range(a: Operand, b: Operand) -> Range:
    low, high = min(b.low + 1, 0), max(b.high - 1, 0)
    if a.low >= 0:
        high = min(high, a.high)
    if a.high <= 0:
        low = max(low, a.low)
    return low, high


def code_of_node(op: Op, args: tuple[Any, ...]) -> Code:
    """Return postfix code, the operands from left to right.

    Raises:
        SymbolicError: It is longer or needs a larger stack than an evaluation allows.
    """
    if op in LEAVES:
        return ((op, args[0]),)
    negated = op is Op.MUL and args[0].value == -1
    first, *others = args[1:] if negated else args
    code = list(first.code)
    for arg in others:
        code += (*arg.code, (op, 0))
    if negated:
        code.append((Op.NEG, 0))
    if len(code) > MAX_OPERATIONS or _stack_of_code(code) > MAX_STACK:
        refuse_size()
    return tuple(code)


def _stack_of_code(code: Iterable[tuple[Op, Any]]) -> int:
    steps = (1 if op in LEAVES else 0 if op is Op.NEG else -1 for op, _ in code)
    return max(accumulate(steps))


def refuse_size() -> NoReturn:
    """Raise the error of an expression that is too large."""
    raise SymbolicError(
        f"expected an expression of at most {MAX_OPERATIONS} operations with at most {MAX_STACK} "
        "values waiting, got a larger one; pass a part of it as a variable of its own"
    )


def text_of_node(op: Op, args: tuple[Any, ...]) -> str:
    """Return the text from which a parser makes the same node."""
    if op in LEAVES:
        return str(args[0])
    if op is Op.ADD:
        texts = (
            f" - {text[1:]}" if text[0] == "-" else f" + {text}" for text in map(str, args[1:])
        )
        return str(args[0]) + "".join(texts)
    if op is Op.MUL:
        coefficient = args[0].value
        product = "*".join(map(_operand_text, args if coefficient is None else args[1:]))
        sign = "" if coefficient is None else "-" if coefficient == -1 else f"{coefficient}*"
        return sign + product
    if op in CALLS:
        return f"{SYMBOLS[op]}({', '.join(map(str, args))})"
    return f"{_operand_text(args[0])} {SYMBOLS[op]} {_operand_text(args[1])}"


def _operand_text(expr: Operand) -> str:
    bare = expr.op is Op.VALUE or expr.op in CALLS or (expr.op is Op.CONST and expr.low >= 0)
    return str(expr) if bare else f"({expr})"
