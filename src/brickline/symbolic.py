"""Integer expressions over named, bounded variables: how large a launch is, before it is known.

An `Expr` is immutable and simplified while it is built: a polynomial over variables, divisions,
remainders, minima and maxima, its terms collected and sorted. Equal expressions are one object, so
``is`` and ``==`` agree, and launch shapes that are written differently are usually the same. A
simplification never changes a value; a part that cancels takes the errors it could raise with it.

Arithmetic is that of Python's integers (``//`` and ``%`` round down), and an evaluation in which
any step leaves int64 is an error. Knows nothing of kernels or devices.
"""

from __future__ import annotations

import ast
import keyword
import operator
import os
import re
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, NoReturn, SupportsIndex
from weakref import WeakValueDictionary

from brickline.errors import SymbolicError
from brickline.symbolic_ops import (
    APPLY,
    CALLS,
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
from brickline.symbolic_terms import (
    Terms,
    added,
    common_divisor,
    divided,
    multiplied,
    range_of,
    shifted,
    split_by_constant,
    split_by_divisor,
)

MAX_TEXT = 4096
"""Characters that `Expr.parse` reads."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_RECORD = struct.Struct("<IIq")


class Expr:
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
        return _parse(text, {variable.name: variable for variable in variables})

    @staticmethod
    def from_json(data: Any) -> Expr:
        """Read what `to_json` returns.

        Raises:
            SymbolicError: It is something else.
        """
        try:
            return _from_json(data)
        except RecursionError:
            raise SymbolicError(
                "expected an expression as JSON, got lists nested too deep"
            ) from None

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
        given = {variable.name: _value(variable, values, where) for variable in ordered}
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
        return _sum(added(*_both(self, other)))

    def __mul__(self, other: Expr | SupportsIndex) -> Expr:
        mine, others = _both(self, other)
        if len(mine) * len(others) > MAX_OPERATIONS:
            refuse_size()
        return _sum(multiplied(mine, others))

    __radd__ = __add__
    __rmul__ = __mul__

    def __neg__(self) -> Expr:
        return _sum(added({}, terms_of(self), -1))

    def __sub__(self, other: Expr | SupportsIndex) -> Expr:
        return _sum(added(*_both(self, other), -1))

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
        bounds = _integer(low), _integer(high)
        if bounds[0] is None or bounds[1] is None:
            raise SymbolicError(
                f"expected integer bounds of {name}, got {low!r:.80} to {high!r:.80}; both are "
                "required"
            )
        if not INT64_MIN <= bounds[0] <= bounds[1] <= INT64_MAX:
            raise SymbolicError(
                f"expected bounds of {name} within int64, the low one first, got "
                f"{_shown(bounds[0])} to {_shown(bounds[1])}"
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


def check_values(
    variables: Iterable[Variable], values: Mapping[str, SupportsIndex], where: str
) -> dict[str, int]:
    """Return the value of every variable as an int, in their order.

    Args:
        variables: Those that need a value.
        values: Integers by name.
        where: What they are for, for the error: ``"kernel rms_norm"``.

    Raises:
        SymbolicError: A value is missing, surplus, not an integer or out of bounds.
    """
    wanted = list(variables)
    checked = {variable.name: _value(variable, values, where) for variable in wanted}
    surplus = sorted(str(name) for name in values if name not in checked)
    if surplus:
        names = ", ".join(checked) or "no variables"
        raise SymbolicError(
            f"expected values for {names}, got one for {', '.join(surplus)} too - at {where}; "
            "leave it out"
        )
    return checked


def _value(variable: Variable, values: Mapping[str, SupportsIndex], where: str) -> int:
    name, bounds = variable.name, f"from {variable.low} to {variable.high}"
    if name not in values:
        raise SymbolicError(
            f"expected a value of {name} {bounds}, got none - at {where}; pass {name}=..."
        )
    number = _integer(values[name])
    if number is None:
        raise SymbolicError(
            f"expected {name} as an integer {bounds}, got {values[name]!r:.80} - at {where}"
        )
    if not variable.low <= number <= variable.high:
        raise SymbolicError(
            f"expected {name} {bounds}, got {_shown(number)} - at {where}; pass a value within "
            f"its bounds, or widen them where {name} is declared"
        )
    return number


def _integer(value: object) -> int | None:
    """Return a Python or NumPy integer as an int; None for a bool and everything else."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return int(operator.index(value))
    except TypeError:
        return None


def _shown(number: int) -> str:
    """Return an integer as text; Python refuses to write very long ones."""
    return str(number) if number.bit_length() <= 256 else f"one of {number.bit_length()} bits"


def _as_expr(value: object) -> Expr:
    if isinstance(value, Expr):
        return value
    number = _integer(value)
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
            f"expected constants and coefficients within int64, got {_shown(value)}; use smaller "
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


# Simplification. Below, `Terms` are polynomials whose factors are variables and what cannot be
# expanded: divisions, remainders, minima and maxima.


def _both(a: Expr, b: Expr | SupportsIndex) -> tuple[Terms[Expr], Terms[Expr]]:
    other = _as_expr(b)
    _joined_variables((a, other))
    return terms_of(a), terms_of(other)


def _sum(terms: Terms[Expr]) -> Expr:
    """Return the expression of a polynomial: positive terms first, constants behind others."""
    ordered = sorted(
        terms.items(), key=lambda term: (term[1] < 0, not term[0], [str(each) for each in term[0]])
    )
    args = tuple(_term(factors, coefficient) for factors, coefficient in ordered)
    if not args:
        return _constant(0)
    return args[0] if len(args) == 1 else _node(Op.ADD, args)


def _term(factors: tuple[Expr, ...], coefficient: int) -> Expr:
    if not factors:
        return _constant(coefficient)
    args = factors if coefficient == 1 else (_constant(coefficient), *factors)
    return args[0] if len(args) == 1 else _node(Op.MUL, args)


def _division(op: Op, a: Expr, b: Expr) -> Expr:
    _joined_variables((a, b))
    if b.low == b.high == 0:
        raise SymbolicError(f"expected a divisor other than 0, got {a} {SYMBOLS[op]} {b}")
    if a.value is not None and b.value is not None:
        return _constant(APPLY[op](a.value, b.value))
    if b.low <= 0 <= b.high:
        return _node(op, (a, b))  # may divide by zero, which only the values can tell
    terms = terms_of(a)
    if b.high < 0:
        # Both operands change sign: the quotient stays, the remainder changes its sign too.
        terms, b = added({}, terms, -1), -b
        if op is Op.MOD:
            return _sum(added({}, _remainder(terms, b), -1))
    if op is Op.MOD:
        return _sum(_remainder(terms, b))
    return _sum(_quotient(terms, b) if op is Op.FLOORDIV else _quotient_above(terms, b))


def _quotient_above(a: Terms[Expr], b: Expr) -> Terms[Expr]:
    """Return ``ceil_div(a, b)`` for a positive ``b``."""
    return shifted(_quotient(shifted(a, -1), b), 1)


def _quotient(a: Terms[Expr], b: Expr) -> Terms[Expr]:
    """Return ``a // b`` for a positive ``b``: what divides evenly, and the rest divided."""
    whole, rest = split_by_divisor(a, terms_of(b))
    varying, _ = split_by_constant(rest)
    # (g*x + k) // (g*y) == (x + k // g) // y
    common = common_divisor(varying, terms_of(b))
    if common > 1:
        rest, b = divided(rest, common), _sum(divided(terms_of(b), common))
    return added(whole, _quotient_of_rest(rest, b))


def _quotient_of_rest(rest: Terms[Expr], b: Expr) -> Terms[Expr]:
    known = _known_quotient(rest, b)
    if known is not None:
        return shifted({}, known)
    varying, constant = split_by_constant(rest)
    if all(coefficient < 0 for coefficient in (varying or rest).values()):
        return added({}, _quotient_above(added({}, rest, -1), b), -1)
    nested = _quotient_of_quotient(varying, constant, b)
    if nested is not None:
        return nested
    # One less than a multiple of b: written as ceil_div, where all ways to round up meet.
    if b.value is not None and constant == b.value - 1:
        return {(_node(Op.CEILDIV, (_sum(varying), b)),): 1}
    if b.value is None and constant == -1:
        return {(_node(Op.CEILDIV, (_sum(varying), b)),): 1, (): -1}
    return {(_node(Op.FLOORDIV, (_sum(rest), b)),): 1}


def _quotient_of_quotient(varying: Terms[Expr], constant: int, b: Expr) -> Terms[Expr] | None:
    """Return ``(x // a + constant) // b`` as one division by ``a*b``, where both are constants."""
    if len(varying) != 1 or b.value is None:
        return None
    (((inner, *others), coefficient),) = varying.items()
    if others or coefficient != 1 or inner.op not in (Op.FLOORDIV, Op.CEILDIV):
        return None
    x, a = inner.args[0], inner.args[1].value
    if a is None or a * b.value > INT64_MAX:
        return None
    up = a - 1 if inner.op is Op.CEILDIV else 0
    return _quotient(shifted(terms_of(x), constant * a + up), _constant(a * b.value))


def _remainder(a: Terms[Expr], b: Expr) -> Terms[Expr]:
    """Return ``a % b`` for a positive ``b``."""
    _, rest = split_by_divisor(a, terms_of(b))
    known = _known_quotient(rest, b)
    if known is not None:
        return added(rest, terms_of(b), -known)
    if b.value is not None:
        rest = {factors: coefficient % b.value for factors, coefficient in rest.items()}
    varying, constant = split_by_constant(rest)
    # (g*x + k) % (g*y) == g * ((x + k // g) % y) + k % g
    common = common_divisor(varying, terms_of(b))
    if common > 1:
        inner = _remainder(divided(rest, common), _sum(divided(terms_of(b), common)))
        return shifted(added({}, inner, common), constant % common)
    known = _known_quotient(rest, b)
    if known is not None:
        return added(rest, terms_of(b), -known)
    return {(_node(Op.MOD, (_sum(rest), b)),): 1}


def _known_quotient(rest: Terms[Expr], b: Expr) -> int | None:
    """Return ``rest // b`` where it is the same for all values of the variables."""
    ends = range_of(rest)
    corners = {end // divisor for end in ends for divisor in (b.low, b.high)}
    if len(corners) == 1:
        return corners.pop()
    if b.value is not None:
        return None
    for guess in (0, -1):  # rest may lie below b though their bounds overlap, as d - 1 and d do
        remainder = added(rest, terms_of(b), -guess)
        above = range_of(added(remainder, terms_of(b), -1))[1]
        if range_of(remainder)[0] >= 0 > above:
            return guess
    return None


def _extremum(op: Op, values: Iterable[Expr | SupportsIndex]) -> Expr:
    given = [_as_expr(value) for value in values]
    if not given:
        raise SymbolicError(f"expected one or more values, got {SYMBOLS[op]}()")
    _joined_variables(given)
    flat = {arg for expr in given for arg in (expr.args if expr.op is op else (expr,))}
    kept: list[Expr] = []
    for expr in sorted(flat, key=str):
        if not any(_decides(op, other, expr) for other in kept):
            kept = [other for other in kept if not _decides(op, expr, other)] + [expr]
    return kept[0] if len(kept) == 1 else _node(op, tuple(kept))


def _decides(op: Op, a: Expr, b: Expr) -> bool:
    """Return whether the bounds say that ``op`` of both is always ``a``."""
    low, high = range_of(added(terms_of(a), terms_of(b), -1))
    return high <= 0 if op is Op.MIN else low >= 0


# Text and JSON.

_OPERATORS: dict[type[ast.operator], Callable[[Expr, Expr], Expr]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_BUILDERS: dict[str, Callable[..., Expr]] = {
    "+": lambda *args: reduce(operator.add, args),
    "*": lambda *args: reduce(operator.mul, args),
    "//": operator.floordiv,
    "%": operator.mod,
    **{name: _FUNCTIONS[name] for op in CALLS for name in [SYMBOLS[op]]},
}


def _parse(text: str, variables: Mapping[str, Variable]) -> Expr:
    if len(text) > MAX_TEXT:
        raise SymbolicError(
            f"expected an expression of at most {MAX_TEXT} characters, got {len(text)}; build it "
            "from Variables instead"
        )
    try:
        return _from_syntax(ast.parse(text.strip(), mode="eval").body, variables)
    except SymbolicError as error:
        raise SymbolicError(f"{error} - at {text!r:.200}") from None
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SymbolicError(
            f"expected an integer expression such as 'ceil_div(n, 256)', got {text!r:.200} "
            f"({type(error).__name__})"
        ) from None


def _from_syntax(node: ast.expr, variables: Mapping[str, Variable]) -> Expr:
    match node:
        case ast.Constant(value=value):
            return _as_expr(value)
        case ast.Name(id=name) if name in variables:
            return variables[name]
        case ast.Name(id=name):
            known = ", ".join(variables) or "none declared"
            raise SymbolicError(f"expected a variable ({known}), got {name!r}; declare it first")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_from_syntax(operand, variables)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            build = _OPERATORS[type(op)]
            return build(_from_syntax(left, variables), _from_syntax(right, variables))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _built(name, _FUNCTIONS[name], [_from_syntax(arg, variables) for arg in args])
    raise SymbolicError(
        f"expected integers, variables, + - * // % and {', '.join(_FUNCTIONS)}, got "
        f"{ast.unparse(node)!r:.80}"
    )


def _from_json(data: Any) -> Expr:
    match data:
        case ["variable", name, low, high]:
            return Variable(name, low, high)
        case [str(symbol), *args] if symbol in _BUILDERS:
            return _built(symbol, _BUILDERS[symbol], [_from_json(arg) for arg in args])
        case list():
            symbols = ", ".join(_BUILDERS)
            raise SymbolicError(f"expected a list that starts with {symbols}, got {data!r:.80}")
    return _as_expr(data)


def _built(symbol: str, build: Callable[..., Expr], args: Sequence[Expr]) -> Expr:
    try:
        return build(*args)
    except TypeError:
        raise SymbolicError(f"expected operands of {symbol}, got {len(args)} of them") from None
