"""Reader: expressions from text and from JSON; `Expr` writes both.

It knows the grammar and how large a text may be. Who makes it says what its integers, variables and
functions become, so nothing here simplifies or keeps an expression.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Generic, Protocol, Self, TypeVar

from brickline.errors import SymbolicError
from brickline.symbolic_ops import CALLS, SYMBOLS

MAX_TEXT = 4096
"""Characters that a text may have."""


class Readable(Protocol):
    """What is read: the operators of Python build it."""

    def __neg__(self) -> Self:
        """Return it with the other sign."""


R = TypeVar("R", bound=Readable)

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class Reader(Generic[R]):
    """Reads text and JSON.

    Args:
        constant: Makes an expression of an integer and refuses everything else.
        variable: Makes a variable of its name, low and high.
        functions: What may be called in a text.
    """

    def __init__(
        self,
        constant: Callable[[Any], R],
        variable: Callable[[Any, Any, Any], R],
        functions: Mapping[str, Callable[..., R]],
    ) -> None:
        self._constant = constant
        self._variable = variable
        self._functions = functions
        self._builders: dict[str, Callable[..., R]] = {
            "+": lambda *args: reduce(operator.add, args),
            "*": lambda *args: reduce(operator.mul, args),
            "//": operator.floordiv,
            "%": operator.mod,
            **{name: functions[name] for op in CALLS for name in [SYMBOLS[op]]},
        }

    def parse(self, text: str, variables: Mapping[str, R]) -> R:
        """Return the expression of a text over these variables, by their names.

        Raises:
            SymbolicError: The text holds anything else.
        """
        if len(text) > MAX_TEXT:
            raise SymbolicError(
                f"expected an expression of at most {MAX_TEXT} characters, got {len(text)}; build "
                "it from Variables instead"
            )
        try:
            return self._from_syntax(ast.parse(text.strip(), mode="eval").body, variables)
        except SymbolicError as error:
            raise SymbolicError(f"{error} - at {text!r:.200}") from None
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SymbolicError(
                f"expected an integer expression such as 'ceil_div(n, 256)', got {text!r:.200} "
                f"({type(error).__name__})"
            ) from None

    def from_json(self, data: Any) -> R:
        """Return the expression that integers and lists describe.

        Raises:
            SymbolicError: They describe none.
        """
        try:
            return self._from_json(data)
        except RecursionError:
            raise SymbolicError(
                "expected an expression as JSON, got lists nested too deep"
            ) from None

    def build(self, symbol: str, args: Sequence[R]) -> R:
        """Return the operation of a symbol on operands."""
        return _built(symbol, self._builders[symbol], args)

    def _from_syntax(self, node: ast.expr, variables: Mapping[str, R]) -> R:
        match node:
            case ast.Constant(value=value):
                return self._constant(value)
            case ast.Name(id=name) if name in variables:
                return variables[name]
            case ast.Name(id=name):
                known = ", ".join(variables) or "none declared"
                raise SymbolicError(
                    f"expected a variable ({known}), got {name!r}; declare it first"
                )
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._from_syntax(operand, variables)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                build: Callable[[R, R], R] = _OPERATORS[type(op)]
                return build(
                    self._from_syntax(left, variables), self._from_syntax(right, variables)
                )
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if (
                name in self._functions
            ):
                given = [self._from_syntax(arg, variables) for arg in args]
                return _built(name, self._functions[name], given)
        raise SymbolicError(
            f"expected integers, variables, + - * // % and {', '.join(self._functions)}, got "
            f"{ast.unparse(node)!r:.80}"
        )

    def _from_json(self, data: Any) -> R:
        match data:
            case ["variable", name, low, high]:
                return self._variable(name, low, high)
            case [str(symbol), *args] if symbol in self._builders:
                given = [self._from_json(arg) for arg in args]
                return self.build(symbol, given)
            case list():
                symbols = ", ".join(self._builders)
                raise SymbolicError(f"expected a list that starts with {symbols}, got {data!r:.80}")
        return self._constant(data)


def _built(symbol: str, build: Callable[..., R], args: Sequence[R]) -> R:
    try:
        return build(*args)
    except TypeError:
        raise SymbolicError(f"expected operands of {symbol}, got {len(args)} of them") from None
