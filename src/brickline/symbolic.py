"""Integer expressions over named, bounded variables: how large a launch is, before it is known.

An `Expr` is immutable and simplified while it is built: a polynomial over variables, divisions,
remainders, minima and maxima, its terms collected and sorted. Equal expressions are one object, so
``is`` and ``==`` agree, and launch shapes that are written differently are usually the same. A
simplification never changes a value; a part that cancels takes the errors it could raise with it.

Arithmetic is that of Python's integers (``//`` and ``%`` round down), and an evaluation in which
any step leaves int64 is an error. Owns the objects, one for each expression, and their evaluation;
the rules are in `symbolic_simplifier`, text and JSON are read in `symbolic_reader`, and values are
checked in `symbolic_values`. Knows nothing of kernels or devices.
"""

from __future__ import annotations

import keyword
import os
import re
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn, SupportsIndex
from weakref import WeakValueDictionary

from brickline.errors import SymbolicError
from brickline.symbolic_limits import WithoutValue
from brickline.symbolic_ops import (
    APPLY,
    DIVISIONS,
    INT64_MAX,
    INT64_MIN,
    LEAVES,
    MAX_OPERATIONS,
    SYMBOLS,
    Code,
    Op,
    code_of_node,
    range_of_node,
    refuse_size,
    terms_of,
    text_of_node,
)
from brickline.symbolic_reader import Reader
from brickline.symbolic_simplifier import Simplifier
from brickline.symbolic_terms import Terms, added, multiplied
from brickline.symbolic_values import integer_of, shown, value_of

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_RECORD = struct.Struct("<IIq")


class Expr(WithoutValue):
    """An integer expression.

    Made from a `Variable` and integers by ``+ - * // %``, `ceil_div`, `minimum` and `maximum`, or
    from text by `parse`. Compared by identity: equal expressions are the same object.

    Example:
        >>> n = Variable("n", 1, 4096)
        >>> (n + 255) // 256 is ceil_div(n, 256)
        True
        >>> ceil_div(n, 256).high
        16
        >>> ceil_div(n, 256).evaluate({"n": 257})
        2
    """

    __slots__ = ("__weakref__", "_text", "_variables", "args", "code", "high", "low", "op")
    __array_ufunc__ = None  # so that a NumPy integer on the left leaves the operation to Expr

    op: Op
    args: tuple[Any, ...]
    """Operands; of a constant its value, of a variable name, low and high."""
    low: int
    """No value is smaller; may lie outside int64."""
    high: int
    """No value is larger; may lie outside int64."""
    code: Code
    """How it is evaluated."""
    _text: str
    _variables: frozenset[Variable]

    def __new__(cls) -> Expr:
        """Refuse: an expression is made by its operators."""
        raise TypeError("expected Expr.constant(value), Expr.parse(text, variables) or a Variable")

    @staticmethod
    def constant(value: SupportsIndex) -> Expr:
        """Return an integer as an expression."""
        return _as_expr(value)

    @staticmethod
    def of(value: Expr | SupportsIndex | str, variables: Iterable[Variable] = ()) -> Expr:
        """Return an expression as it is, an integer as a constant, and a text parsed."""
        return Expr.parse(value, variables) if isinstance(value, str) else _as_expr(value)

    @staticmethod
    def parse(text: str, variables: Iterable[Variable] = ()) -> Expr:
        """Read an expression such as ``"ceil_div(n, 256) * 2"``; ``str`` writes one.

        Args:
            text: Integers, names of variables, ``+ - * // %``, parentheses, ``ceil_div(a, b)``,
                ``minimum(...)`` and ``maximum(...)`` (or ``min`` and ``max``).
            variables: Those that the text may name.

        Raises:
            SymbolicError: The text holds anything else.
        """
        return _READER.parse(text, {variable.name: variable for variable in variables})

    @staticmethod
    def from_json(data: Any) -> Expr:
        """Read what `to_json` returns.

        Raises:
            SymbolicError: It is something else.
        """
        return _READER.from_json(data)

    def to_json(self) -> Any:
        """Return integers and lists: ``["+", ["variable", "n", 1, 64], 3]``."""
        if self.op is Op.CONST:
            return self.args[0]
        if self.op is Op.VALUE:
            return ["variable", *self.args]
        return [SYMBOLS[self.op], *map(Expr.to_json, self.args)]

    @property
    def variables(self) -> frozenset[Variable]:
        """The variables whose values decide the result."""
        return self._variables

    @property
    def value(self) -> int | None:
        """The value of a constant, else None."""
        return self.args[0] if self.op is Op.CONST else None

    def evaluate(self, values: Mapping[str, SupportsIndex], where: str = "an expression") -> int:
        """Return the value for given values of the variables; names it lacks are ignored.

        Args:
            values: Integers by the name of the variable.
            where: What is evaluated, for the error: ``"kernel rms_norm, global_size[0]"``.

        Raises:
            SymbolicError: A value is missing, not an integer or out of its variable's bounds, a
                divisor is zero, or a step leaves int64.
        """
        ordered = sorted(self.variables, key=str)
        given = {variable.name: value_of(variable, values, where) for variable in ordered}
        stack: list[int] = []
        for op, operand in self.code:
            if op is Op.CONST:
                stack.append(operand)
            elif op is Op.VALUE:
                stack.append(given[operand])
            else:
                right = -1 if op is Op.NEG else stack.pop()
                stack.append(self._step(op, stack.pop(), right, given, where))
        return stack.pop()

    def substitute(self, values: Mapping[str, Expr | SupportsIndex]) -> Expr:
        """Return the expression with variables replaced by expressions; names it lacks stay.

        Args:
            values: Expressions or integers by the name of the variable that they replace.

        Raises:
            SymbolicError: What comes of it has two variables of one name, or divides by zero.
        """
        if not any(variable.name in values for variable in self.variables):
            return self
        if isinstance(self, Variable):
            return _as_expr(values[self.name])
        return _READER.build(SYMBOLS[self.op], [each.substitute(values) for each in self.args])

    def _step(self, op: Op, left: int, right: int, given: dict[str, int], where: str) -> int:
        op = Op.MUL if op is Op.NEG else op
        if right == 0 and op in DIVISIONS:
            self._refuse("a divisor other than 0", f"{left} {SYMBOLS[op]} 0", given, where)
        result = APPLY[op](left, right)
        if not INT64_MIN <= result <= INT64_MAX:
            step = f"{left} {SYMBOLS[op]} {right} = {result}"
            self._refuse("every step within int64", step, given, where)
        return result

    def _refuse(self, expected: str, got: str, given: dict[str, int], where: str) -> NoReturn:
        values = ", ".join(f"{name}={value}" for name, value in given.items()) or "no variables"
        raise SymbolicError(
            f"expected {expected}, got {got} with {values} - at {where} = {self}; pass other "
            "values, or declare narrower bounds so that it is found earlier"
        )

    def program(self, names: Sequence[str]) -> bytes:
        """Return postfix code for the native evaluator.

        A record is 16 bytes, little-endian: u32 opcode (`Op`), u32 zero, i64 operand. The operand
        is the value of CONST and the index into ``names`` of VALUE; binary operations pop two.
        ``ceil_div(n, 256)`` over ("m", "n")::

            01000000 00000000 0100000000000000   VALUE 1
            00000000 00000000 0001000000000000   CONST 256
            06000000 00000000 0000000000000000   CEILDIV

        Raises:
            SymbolicError: A variable is not in ``names``.
        """
        places = {name: place for place, name in enumerate(names)}
        missing = sorted({variable.name for variable in self.variables} - set(places))
        if missing:
            raise SymbolicError(
                f"expected the variables of {self} among {', '.join(names) or 'no names'}, got "
                f"{', '.join(missing)} too; pass every variable's name"
            )
        records = (
            _RECORD.pack(op, 0, places[operand] if op is Op.VALUE else operand)
            for op, operand in self.code
        )
        return b"".join(records)

    def __add__(self, other: Expr | SupportsIndex) -> Expr:
        return _SIMPLIFIER.sum_of(added(*_both(self, other)))

    def __mul__(self, other: Expr | SupportsIndex) -> Expr:
        mine, others = _both(self, other)
        if len(mine) * len(others) > MAX_OPERATIONS:
            refuse_size()
        return _SIMPLIFIER.sum_of(multiplied(mine, others))

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Expr:
        return _SIMPLIFIER.sum_of(added({}, terms_of(self), -1))

    def __sub__(self, other: Expr | SupportsIndex) -> Expr:
        return _SIMPLIFIER.sum_of(added(*_both(self, other), -1))

    def __rsub__(self, other: Expr | SupportsIndex) -> Expr:
        return _as_expr(other) - self

    def __floordiv__(self, other: Expr | SupportsIndex) -> Expr:
        return _division(Op.FLOORDIV, self, _as_expr(other))

    def __rfloordiv__(self, other: Expr | SupportsIndex) -> Expr:
        return _division(Op.FLOORDIV, _as_expr(other), self)

    def __mod__(self, other: Expr | SupportsIndex) -> Expr:
        return _division(Op.MOD, self, _as_expr(other))

    def __rmod__(self, other: Expr | SupportsIndex) -> Expr:
        return _division(Op.MOD, _as_expr(other), self)

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<Expr {self}>"

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"an expression is immutable: cannot set {name!r} of {self}")

    def __reduce__(self) -> tuple[Any, ...]:
        return Expr.from_json, (self.to_json(),)


class Variable(Expr):
    """A named integer whose value is given later, from ``low`` to ``high``, both included.

    Args:
        name: An identifier of ASCII letters, digits and underscores.
        low: The smallest value, within int64.
        high: The largest value, within int64.

    Raises:
        SymbolicError: The name cannot stand in an expression, or the bounds hold no value.
    """

    __slots__ = ()

    def __new__(cls, name: str, low: SupportsIndex, high: SupportsIndex) -> Variable:
        """Return the one variable of this name and these bounds."""
        is_name = isinstance(name, str) and _NAME.fullmatch(name)
        if not is_name or keyword.iskeyword(name) or name in _FUNCTIONS:
            raise SymbolicError(
                f"expected a variable's name as an identifier such as n_rows, got {name!r:.80}; "
                f"keywords of Python and {', '.join(_FUNCTIONS)} are taken"
            )
        bounds = integer_of(low), integer_of(high)
        if bounds[0] is None or bounds[1] is None:
            raise SymbolicError(
                f"expected integer bounds of {name}, got {low!r:.80} to {high!r:.80}; both are "
                "required"
            )
        if not INT64_MIN <= bounds[0] <= bounds[1] <= INT64_MAX:
            raise SymbolicError(
                f"expected bounds of {name} within int64, the low one first, got "
                f"{shown(bounds[0])} to {shown(bounds[1])}"
            )
        made = _node(Op.VALUE, (name, *bounds))
        assert isinstance(made, Variable)
        return made

    @property
    def variables(self) -> frozenset[Variable]:
        """Itself."""
        return frozenset((self,))

    @property
    def name(self) -> str:
        """Its name, by which `evaluate` finds its value."""
        return str(self.args[0])

    def __repr__(self) -> str:
        return f"Variable({self.name!r}, {self.low}, {self.high})"


def ceil_div(a: Expr | SupportsIndex, b: Expr | SupportsIndex) -> Expr:
    """Return ``a / b`` rounded up."""
    return _division(Op.CEILDIV, _as_expr(a), _as_expr(b))


def minimum(*values: Expr | SupportsIndex) -> Expr:
    """Return the smallest of one or more values."""
    return _extremum(Op.MIN, values)


def maximum(*values: Expr | SupportsIndex) -> Expr:
    """Return the largest of one or more values."""
    return _extremum(Op.MAX, values)


_FUNCTIONS: dict[str, Callable[..., Expr]] = {
    "ceil_div": ceil_div,
    "minimum": minimum,
    "maximum": maximum,
    "min": minimum,
    "max": maximum,
}
"""What may be called in a text."""


def _as_expr(value: object) -> Expr:
    if isinstance(value, Expr):
        return value
    number = integer_of(value)
    if number is None:
        raise SymbolicError(
            f"expected an expression or an integer, got {value!r:.80} ({type(value).__name__}); "
            "convert it with int()"
        )
    return _constant(number)


# One object per expression.

_TABLE: WeakValueDictionary[tuple[Any, ...], Expr] = WeakValueDictionary()
_LOCK = threading.RLock()  # reentrant: a collection inside may run code that builds expressions
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


def _node(op: Op, args: tuple[Any, ...]) -> Expr:
    """Return the one object for operands that are simplified already."""
    with _LOCK:
        found = _TABLE.get((op, args))
        if found is None:
            found = _TABLE[op, args] = _made(op, args)
        return found


def _made(op: Op, args: tuple[Any, ...]) -> Expr:
    made = object.__new__(Variable if op is Op.VALUE else Expr)
    low, high = range_of_node(op, args)
    facts = {
        "op": op,
        "args": args,
        "low": low,
        "high": high,
        "_text": text_of_node(op, args),
        "code": code_of_node(op, args),
        "_variables": frozenset() if op in LEAVES else _joined_variables(args),
    }
    for name, value in facts.items():
        object.__setattr__(made, name, value)
    return made


@lru_cache(maxsize=1024)  # they come and go with every simplification
def _constant(value: int) -> Expr:
    if not INT64_MIN <= value <= INT64_MAX:
        raise SymbolicError(
            f"expected constants and coefficients within int64, got {shown(value)}; use smaller "
            "ones"
        )
    return _node(Op.CONST, (value,))


def _joined_variables(exprs: Iterable[Expr]) -> frozenset[Variable]:
    joined: frozenset[Variable] = frozenset().union(*(expr.variables for expr in exprs))
    names = Counter(variable.name for variable in joined)
    if len(names) < len(joined):
        ((name, _),) = names.most_common(1)
        clash = sorted(repr(variable) for variable in joined if variable.name == name)
        raise SymbolicError(
            f"expected one variable of a name in an expression, got {' and '.join(clash)}; "
            "declare it once, or rename one"
        )
    return joined


# Operations: operands are checked here, and `Simplifier` makes the result.

_SIMPLIFIER: Simplifier[Expr] = Simplifier(_node, _constant)


def _both(a: Expr, b: Expr | SupportsIndex) -> tuple[Terms[Expr], Terms[Expr]]:
    other = _as_expr(b)
    _joined_variables((a, other))
    return terms_of(a), terms_of(other)


def _division(op: Op, a: Expr, b: Expr) -> Expr:
    _joined_variables((a, b))
    return _SIMPLIFIER.division(op, a, b)


def _extremum(op: Op, values: Iterable[Expr | SupportsIndex]) -> Expr:
    given = [_as_expr(value) for value in values]
    if not given:
        raise SymbolicError(f"expected one or more values, got {SYMBOLS[op]}()")
    _joined_variables(given)
    return _SIMPLIFIER.extremum(op, given)


_READER: Reader[Expr] = Reader(_as_expr, Variable, _FUNCTIONS)
