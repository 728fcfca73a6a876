"""Polynomials with integer coefficients, and the ranges they lie in.

The arithmetic below `symbolic`: a polynomial is a dict from the sorted factors of a term to its
coefficient, () being the constant term. Of a factor it knows its bounds and its text alone, so
nothing here builds an expression.
"""

from __future__ import annotations

from collections import Counter
from math import gcd
from typing import Protocol, TypeAlias, TypeVar


class Factor(Protocol):
    """What a polynomial is made of; equal factors are the same object."""

    @property
    def low(self) -> int:
        """No value is smaller."""

    @property
    def high(self) -> int:
        """No value is larger."""


F = TypeVar("F", bound=Factor)
Terms: TypeAlias = dict[tuple[F, ...], int]
Range: TypeAlias = tuple[int, int]


def added(a: Terms[F], b: Terms[F], times: int = 1) -> Terms[F]:
    """Return ``a + times * b``; terms that cancel are gone."""
    total = dict(a)
    for factors, coefficient in b.items():
        total[factors] = total.get(factors, 0) + times * coefficient
    return {factors: coefficient for factors, coefficient in total.items() if coefficient}


def shifted(a: Terms[F], constant: int) -> Terms[F]:
    """Return ``a + constant``."""
    return added(a, {(): constant})


def multiplied(a: Terms[F], b: Terms[F]) -> Terms[F]:
    """Return ``a * b``, expanded."""
    total: Terms[F] = {}
    for factors, coefficient in a.items():
        for others, times in b.items():
            both = tuple(sorted(factors + others, key=str))
            total[both] = total.get(both, 0) + coefficient * times
    return {factors: coefficient for factors, coefficient in total.items() if coefficient}


def split_by_constant(terms: Terms[F]) -> tuple[Terms[F], int]:
    """Return the terms with factors, and the constant term."""
    return {factors: c for factors, c in terms.items() if factors}, terms.get((), 0)


def split_by_divisor(a: Terms[F], b: Terms[F]) -> tuple[Terms[F], Terms[F]]:
    """Return quotient and rest with ``a == quotient * b + rest``, term by term.

    Only a divisor of one term divides anything but itself. The constant term of the rest is
    reduced to ``[0, b)`` by a positive constant divisor.
    """
    if a == b:
        return {(): 1}, {}
    if len(b) != 1:
        return {}, a
    ((divisor, by),) = b.items()
    quotient: Terms[F] = {}
    rest: Terms[F] = {}
    for factors, coefficient in a.items():
        left = _without(factors, divisor)
        if left is not None and (coefficient % by == 0 or not factors):
            quotient[left], coefficient = divmod(coefficient, by)
        if coefficient:
            rest[factors] = coefficient
    return quotient, rest


def _without(factors: tuple[F, ...], divisor: tuple[F, ...]) -> tuple[F, ...] | None:
    left = list(factors)
    for factor in divisor:
        if factor not in left:
            return None
        left.remove(factor)
    return tuple(left)


def common_divisor(*polynomials: Terms[F]) -> int:
    """Return the largest integer that divides every coefficient; 0 where there are none."""
    return gcd(*(coefficient for terms in polynomials for coefficient in terms.values()))


def divided(terms: Terms[F], by: int) -> Terms[F]:
    """Return coefficients divided by ``by``, rounded down; zeros are gone."""
    return {factors: c // by for factors, c in terms.items() if c // by}


def range_of(terms: Terms[F]) -> Range:
    """Return bounds that hold for every value of the factors.

    They are exact where no factor occurs in two terms. Where one does, as ``m`` in ``n*m - m``,
    bounds of ``m * (n - 1)`` are taken too, and the tighter ones count.
    """
    low, high = _plain_range(terms)
    occurs = Counter(factor for factors in terms for factor in set(factors))
    for factor in (factor for factor, count in occurs.items() if count > 1):
        inside: Terms[F] = {}
        outside: Terms[F] = {}
        for factors, coefficient in terms.items():
            left = _without(factors, (factor,))
            if left is None:
                outside[factors] = coefficient
            else:
                inside[left] = coefficient
        ours = _range_product((factor.low, factor.high), _plain_range(inside))
        rest = _plain_range(outside)
        low, high = max(low, ours[0] + rest[0]), min(high, ours[1] + rest[1])
    return low, high


def _plain_range(terms: Terms[F]) -> Range:
    ranges = [_term_range(factors, c) for factors, c in terms.items()]
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)


def _term_range(factors: tuple[F, ...], coefficient: int) -> Range:
    total = (coefficient, coefficient)
    powers = Counter(factors) if len(factors) > 1 else dict.fromkeys(factors, 1)
    for factor, power in powers.items():
        ends = factor.low**power, factor.high**power
        crosses_zero = power % 2 == 0 and factor.low < 0 < factor.high
        total = _range_product(total, (0 if crosses_zero else min(ends), max(ends)))
    return total


def _range_product(a: Range, b: Range) -> Range:
    corners = [x * y for x in a for y in b]
    return min(corners), max(corners)
