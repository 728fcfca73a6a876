"""The values of variables: integers, one for each variable, within its bounds.

Checks what callers pass and says what was expected. Of a variable it knows its name and its bounds,
nothing of expressions.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Protocol, SupportsIndex

from brickline.errors import SymbolicError


class Bounded(Protocol):
    """What a value is held against."""

    @property
    def name(self) -> str:
        """By which its value is found."""

    @property
    def low(self) -> int:
        """No value is smaller."""

    @property
    def high(self) -> int:
        """No value is larger."""


def check_values(
    variables: Iterable[Bounded], values: Mapping[str, SupportsIndex], where: str
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
    checked = {variable.name: value_of(variable, values, where) for variable in wanted}
    surplus = sorted(str(name) for name in values if name not in checked)
    if surplus:
        names = ", ".join(checked) or "no variables"
        raise SymbolicError(
            f"expected values for {names}, got one for {', '.join(surplus)} too - at {where}; "
            "leave it out"
        )
    return checked


def value_of(variable: Bounded, values: Mapping[str, SupportsIndex], where: str) -> int:
    """Return the value of one variable; arguments and errors are those of `check_values`."""
    name, bounds = variable.name, f"from {variable.low} to {variable.high}"
    if name not in values:
        raise SymbolicError(
            f"expected a value of {name} {bounds}, got none - at {where}; pass {name}=..."
        )
    number = integer_of(values[name])
    if number is None:
        raise SymbolicError(
            f"expected {name} as an integer {bounds}, got {values[name]!r:.80} - at {where}"
        )
    if not variable.low <= number <= variable.high:
        raise SymbolicError(
            f"expected {name} {bounds}, got {shown(number)} - at {where}; pass a value within "
            f"its bounds, or widen them where {name} is declared"
        )
    return number


def integer_of(value: object) -> int | None:
    """Return a Python or NumPy integer as an int; None for a bool and everything else."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        return None
    try:
        return int(operator.index(value))
    except TypeError:
        return None


def shown(number: int) -> str:
    """Return an integer as text; Python refuses to write very long ones."""
    return str(number) if number.bit_length() <= 256 else f"one of {number.bit_length()} bits"
