"""Checks of what callers hand to an execution graph, and the translation of the core's errors.

Each function returns the value in the form that the core takes, or raises with what was expected
and what came. Holds no state.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from brickline.errors import BricklineError, CountError, GraphError
from brickline.graph_rows import TransferDirection

MAX_COUNT = 2**63 - 1
MAX_U32 = 2**32 - 1


def count(name: str, value: Any, limit: int = MAX_COUNT) -> int:
    """Return an integer from 0 to ``limit``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise CountError(f"expected {name} as an integer, got {value!r}") from None
    if not 0 <= number <= limit:
        raise CountError(f"expected {name} from 0 to {limit}, got {number}")
    return number


def optional_count(name: str, value: Any) -> int | None:
    """Return a count, or None for what was not measured."""
    return None if value is None else count(name, value)


def rate(name: str, value: float | None) -> float:
    """Return a finite rate from 0, or NaN for what was not measured."""
    if value is None:
        return math.nan
    found = number(name, value)
    if not (math.isfinite(found) and found >= 0):
        raise CountError(f"expected {name} finite and at least 0, got {value}; leave it out when "
                         "it was not measured")  # fmt: skip
    return found


def number(name: str, value: Any) -> float:
    """Return a real number as a float."""
    try:
        if not isinstance(value, str | bytes):
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise CountError(f"expected {name} as a number, got {value!r:.80}")


def text(name: str, value: Any) -> str:
    """Return a non-empty string that is valid Unicode."""
    if not isinstance(value, str) or not value:
        raise GraphError(f"expected {name} as a non-empty string, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise GraphError(f"expected {name} as valid Unicode, got {value!r}") from None
    return value


def dim3(name: str, value: Any) -> list[int]:
    """Return three sizes; missing ones are 1."""
    sizes = list(value) if isinstance(value, Iterable) else [value]
    if not 1 <= len(sizes) <= 3:
        raise CountError(f"expected {name} with one to three sizes, got {value!r}")
    return [count(name, size, MAX_U32) for size in sizes] + [1] * (3 - len(sizes))


def node_id(value: Any) -> int:
    """Return something that may be a node id; the core says whether it is one."""
    try:
        number = operator.index(value)
    except TypeError:
        raise GraphError(f"expected a node id, got {value!r}; add_* returns one") from None
    if not 0 <= number <= MAX_U32:
        raise GraphError(f"expected a node id from 0, got {number}; add_* returns one")
    return number


class _GraphErrors:
    """A block whose ValueError comes from the core; a class, as a generator costs far more."""

    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(exc, ValueError) and not isinstance(exc, BricklineError):
            raise GraphError(str(exc)) from None


_GRAPH_ERRORS = _GraphErrors()


def graph_errors() -> _GraphErrors:
    """Return a block that turns the core's ValueError into GraphError."""
    return _GRAPH_ERRORS


def direction_code(value: Any) -> int:
    """Return the number of a transfer direction."""
    try:
        return int(TransferDirection(value))
    except ValueError:
        raise GraphError(f"expected a TransferDirection, got {value!r}") from None
