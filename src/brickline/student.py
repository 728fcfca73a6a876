"""Student's t distribution, for intervals from a handful of repeats.

Plain arithmetic in floats: no table, and nothing that has to be installed.
"""

from __future__ import annotations

from math import exp, lgamma, log, log1p, pi

_SMALLEST = 1e-300
_MOST_TERMS = 300
_MOST_STEPS = 60


def student_quantile(tail: float, freedom: float) -> float:
    """Return the t above which a share ``tail`` of the distribution lies.

    Args:
        tail: Above 0, below one half.
        freedom: Degrees of freedom, above 0; need not be whole.

    Raises:
        ValueError: if one of them is out of range.
    """
    if not 0.0 < tail < 0.5 or not freedom > 0.0:
        raise ValueError(
            f"expected a tail from 0 to 0.5 and freedom above 0, got {tail!r} and {freedom!r}"
        )
    t = 1.0
    while student_tail(t, freedom) > tail:
        t *= 2.0
    # The logarithm of the tail is concave in log t, so Newton's steps from above never pass it.
    for _ in range(_MOST_STEPS):
        above = student_tail(t, freedom)
        step = log(tail / above) * above / (t * _density(t, freedom))
        t *= exp(-step)
        if step < 1e-12:
            break
    return t


def student_tail(t: float, freedom: float) -> float:
    """Return the share of the distribution that lies above ``t``, which is 0 or more."""
    return 0.5 * _beta_share(freedom / (freedom + t * t), freedom / 2.0, 0.5)


def _density(t: float, freedom: float) -> float:
    front = lgamma((freedom + 1.0) / 2.0) - lgamma(freedom / 2.0) - 0.5 * log(freedom * pi)
    return exp(front - (freedom + 1.0) / 2.0 * log1p(t * t / freedom))


def _beta_share(x: float, a: float, b: float) -> float:
    """Return the regularised incomplete beta function, by its continued fraction."""
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(1.0 - x))
    if x < (a + 1.0) / (a + b + 2.0):  # where the fraction converges fast
        return front * _fraction(x, a, b) / a
    return 1.0 - front * _fraction(1.0 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """Return the continued fraction by Lentz's method."""
    above, below = 1.0, _away(1.0 - (a + b) * x / (a + 1.0))
    below = 1.0 / below
    value = below
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            below = 1.0 / _away(1.0 + term * below)
            above = _away(1.0 + term / above)
            value *= above * below
        if abs(above * below - 1.0) < 1e-15:
            break
    return value


def _away(value: float) -> float:
    """Return the value, or a tiny one where it would divide by zero."""
    return value if abs(value) > _SMALLEST else _SMALLEST
