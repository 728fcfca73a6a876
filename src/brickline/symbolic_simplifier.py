"""Simplifier: the rules by which expressions are simplified while they are built.

Below, `Terms` are polynomials whose factors are variables and what cannot be expanded: divisions,
remainders, minima and maxima. No rule changes a value. Of an expression this knows what
`symbolic_ops` knows; who hands it in says how the objects are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic

from brickline.errors import SymbolicError
from brickline.symbolic_ops import APPLY, INT64_MAX, SYMBOLS, E, Op, terms_of
from brickline.symbolic_terms import (
    Terms,
    added,
    common_divisor,
    divided,
    range_of,
    shifted,
    split_by_constant,
    split_by_divisor,
)


class Simplifier(Generic[E]):
    """Sums, divisions and extrema in the one form in which equal ones meet.

    Args:
        node: Returns the one object for an operation over operands that are simplified already.
        constant: Returns the one object for an integer.
    """

    def __init__(
        self, node: Callable[[Op, tuple[Any, ...]], E], constant: Callable[[int], E]
    ) -> None:
        self._node = node
        self._constant = constant

    def sum_of(self, terms: Terms[E]) -> E:
        """Return the expression of a polynomial: positive terms first, constants behind others."""
        ordered = sorted(
            terms.items(),
            key=lambda term: (term[1] < 0, not term[0], [str(each) for each in term[0]]),
        )
        args = tuple(self._term(factors, coefficient) for factors, coefficient in ordered)
        if not args:
            return self._constant(0)
        return args[0] if len(args) == 1 else self._node(Op.ADD, args)

    def _term(self, factors: tuple[E, ...], coefficient: int) -> E:
        if not factors:
            return self._constant(coefficient)
        args = factors if coefficient == 1 else (self._constant(coefficient), *factors)
        return args[0] if len(args) == 1 else self._node(Op.MUL, args)

    def division(self, op: Op, a: E, b: E) -> E:
        """Return a quotient, rounded down or up, or a remainder.

        Raises:
            SymbolicError: The divisor is always 0.
        """
        if b.low == b.high == 0:
            raise SymbolicError(f"expected a divisor other than 0, got {a} {SYMBOLS[op]} {b}")
        if a.value is not None and b.value is not None:
            return self._constant(APPLY[op](a.value, b.value))
        if b.low <= 0 <= b.high:
            return self._node(op, (a, b))  # may divide by zero, which only the values can tell
        terms = terms_of(a)
        if b.high < 0:
            # Both operands change sign: the quotient stays, the remainder changes its sign too.
            terms, b = added({}, terms, -1), self.sum_of(added({}, terms_of(b), -1))
            if op is Op.MOD:
                return self.sum_of(added({}, self._remainder(terms, b), -1))
        if op is Op.MOD:
            return self.sum_of(self._remainder(terms, b))
        return self.sum_of(
            self._quotient(terms, b) if op is Op.FLOORDIV else self._quotient_above(terms, b)
        )

    def _quotient_above(self, a: Terms[E], b: E) -> Terms[E]:
        """Return ``ceil_div(a, b)`` for a positive ``b``."""
        return shifted(self._quotient(shifted(a, -1), b), 1)

    def _quotient(self, a: Terms[E], b: E) -> Terms[E]:
        """Return ``a // b`` for a positive ``b``: what divides evenly, and the rest divided."""
        whole, rest = split_by_divisor(a, terms_of(b))
        varying, _ = split_by_constant(rest)
        # (g*x + k) // (g*y) == (x + k // g) // y
        common = common_divisor(varying, terms_of(b))
        if common > 1:
            rest, b = divided(rest, common), self.sum_of(divided(terms_of(b), common))
        return added(whole, self._quotient_of_rest(rest, b))

    def _quotient_of_rest(self, rest: Terms[E], b: E) -> Terms[E]:
        known = _known_quotient(rest, b)
        if known is not None:
            return shifted({}, known)
        varying, constant = split_by_constant(rest)
        if all(coefficient < 0 for coefficient in (varying or rest).values()):
            return added({}, self._quotient_above(added({}, rest, -1), b), -1)
        nested = self._quotient_of_quotient(varying, constant, b)
        if nested is not None:
            return nested
        # One less than a multiple of b: written as ceil_div, where all ways to round up meet.
        if b.value is not None and constant == b.value - 1:
            return {(self._node(Op.CEILDIV, (self.sum_of(varying), b)),): 1}
        if b.value is None and constant == -1:
            return {(self._node(Op.CEILDIV, (self.sum_of(varying), b)),): 1, (): -1}
        return {(self._node(Op.FLOORDIV, (self.sum_of(rest), b)),): 1}

    def _quotient_of_quotient(self, varying: Terms[E], constant: int, b: E) -> Terms[E] | None:
        """Return ``(x // a + constant) // b`` as one by ``a*b``, where both are constants."""
        if len(varying) != 1 or b.value is None:
            return None
        (((inner, *others), coefficient),) = varying.items()
        if others or coefficient != 1 or inner.op not in (Op.FLOORDIV, Op.CEILDIV):
            return None
        x, a = inner.args[0], inner.args[1].value
        if a is None or a * b.value > INT64_MAX:
            return None
        up = a - 1 if inner.op is Op.CEILDIV else 0
        return self._quotient(shifted(terms_of(x), constant * a + up), self._constant(a * b.value))

    def _remainder(self, a: Terms[E], b: E) -> Terms[E]:
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
            inner = self._remainder(
                divided(rest, common), self.sum_of(divided(terms_of(b), common))
            )
            return shifted(added({}, inner, common), constant % common)
        known = _known_quotient(rest, b)
        if known is not None:
            return added(rest, terms_of(b), -known)
        return {(self._node(Op.MOD, (self.sum_of(rest), b)),): 1}

    def extremum(self, op: Op, given: Iterable[E]) -> E:
        """Return the smallest or largest of one or more values, without those that never decide."""
        flat = {arg for expr in given for arg in (expr.args if expr.op is op else (expr,))}
        kept: list[E] = []
        for expr in sorted(flat, key=str):
            if not any(_decides(op, other, expr) for other in kept):
                kept = [other for other in kept if not _decides(op, expr, other)] + [expr]
        return kept[0] if len(kept) == 1 else self._node(op, tuple(kept))


def _known_quotient(rest: Terms[E], b: E) -> int | None:
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


def _decides(op: Op, a: E, b: E) -> bool:
    """Return whether the bounds say that ``op`` of both is always ``a``."""
    low, high = range_of(added(terms_of(a), terms_of(b), -1))
    return high <= 0 if op is Op.MIN else low >= 0
