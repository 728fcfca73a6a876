"""Three ratios of an error to what rounding makes, each scaled so that 1 is its clean limit.

- **element**: the largest error of one element, to its rounding bound where the operation's is
  known, else to the spread of clean errors at such places;
- **rmse**: the root mean square error, to that of a clean execution in the same dtype, floored by
  the rounding of the output itself;
- **bias**: the mean error along the exact values, to its sampling limit.

Works on tensors of any device and reads one small vector back. Knows no operations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from brickline.oracle.widen import unit_roundoff

RMSE_FACTOR = 2.0
"""A clean RMSE is at most this often another clean RMSE of the same computation and dtype."""
BIAS_SIGMAS = 7.0
"""The mean of N clean errors is at most this many standard errors."""
BIAS_SHARE = 1.0
"""…beyond this part of the clean RMSE, because clean errors may share a sign."""
SPREAD_FACTOR = 4.0
"""The largest clean error is at most this often the largest of another clean execution."""
SPREAD_FLOOR = 6.0
"""Largest clean error in standard deviations that is never surprising."""
PRIOR_WEIGHT = 4
"""How many rows or columns the expectation from the output's own rounding counts for."""
FLOOR_ULP = 0.29
"""Standard deviation of rounding to nearest, in units in the last place."""


@dataclass(frozen=True)
class Ratios:
    """How far an output is from exact, against what rounding explains."""

    element: float
    rmse: float
    bias: float
    relative_l2: float
    """‖actual − exact‖ / ‖exact‖, over elements that are finite on both sides."""
    largest: float
    """Largest absolute error."""
    worst: int
    """Flat index of the element with the largest element ratio."""
    rmse_actual: float = 0.0
    rmse_clean: float = 0.0
    nonfinite: int = 0
    """Elements that are finite on one side only, or infinite with another sign."""

    @property
    def z(self) -> float:
        """Return the largest of the three; 1 is the clean limit."""
        return math.inf if self.nonfinite else max(self.element, self.rmse, self.bias)

    @property
    def evidence(self) -> dict[str, float]:
        """Return what a finding shows of them."""
        return {
            "element": self.element,
            "rmse": self.rmse,
            "bias": self.bias,
            "largest_error": self.largest,
            "rmse_actual": self.rmse_actual,
            "rmse_clean": self.rmse_clean,
            "nonfinite": self.nonfinite,
        }


def measure(
    actual: torch.Tensor,
    exact: torch.Tensor,
    *,
    clean: torch.Tensor | None = None,
    bound: torch.Tensor | None = None,
    noise: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Ratios:
    """Measure an output against the exact one.

    Args:
        actual: What was made.
        exact: What float64 makes of the same inputs, with the same shape.
        clean: What a clean execution in the same dtype makes.
        bound: Largest rounding error of each element.
        noise: Errors that rounding inside is expected to make, of any sign.
        dtype: The dtype whose rounding counts. Default: that of `actual`.
    """
    if actual.numel() == 0:
        return Ratios(0.0, 0.0, 0.0, 0.0, 0.0, 0)
    kind = dtype or actual.dtype
    right = exact.detach().double().reshape(-1)
    left = actual.detach().to(right.device).double().reshape(-1)
    if not kind.is_floating_point:
        return _exact_ratios(left, right)
    other = None if clean is None else clean.detach().to(right.device).double().reshape(-1)
    extra = None if noise is None else noise.detach().to(right.device).double().reshape(-1)
    limit = None if bound is None else bound.detach().to(right.device).double().reshape(-1)
    vector, worst = _figures(left, right, other, extra, limit, kind, exact.shape)
    figures = vector.tolist()
    return _ratios(figures, int(worst))


def _exact_ratios(left: torch.Tensor, right: torch.Tensor) -> Ratios:
    """Integers and booleans are right or wrong."""
    wrong = left != right
    count = int(wrong.sum())
    if not count:
        return Ratios(0.0, 0.0, 0.0, 0.0, 0.0, 0)
    error = (left - right).abs()
    size = float(right.norm())
    relative = float(error.norm()) / size if size else math.inf
    return Ratios(
        math.inf, math.inf, math.inf, relative, float(error.max()), int(wrong.int().argmax())
    )


def _figures(
    left: torch.Tensor,
    right: torch.Tensor,
    clean: torch.Tensor | None,
    noise: torch.Tensor | None,
    limit: torch.Tensor | None,
    kind: torch.dtype,
    shape: torch.Size,
) -> tuple[torch.Tensor, torch.Tensor]:
    u = unit_roundoff(kind)
    tiny = float(torch.finfo(kind).smallest_normal) * u
    largest = float(torch.finfo(kind).max)
    fits = right.isfinite() & (right.abs() <= largest)
    finite = left.isfinite() & fits
    agree = finite | (left == right) | (left.isnan() & right.isnan())
    agree = agree | (left.isinf() & ~fits & (left.sign() == right.sign()))
    if clean is not None:
        # Where a clean execution is not finite either, nothing is shown.
        agree = agree | ~clean.isfinite()
    zero = torch.zeros_like(right)
    exact = torch.where(finite, right, zero)
    error = torch.where(finite, left - right, zero)
    size = exact.abs()
    # Standard deviation of rounding the output to its dtype.
    rounding = size * (2 * u * FLOOR_ULP) + tiny
    count = finite.sum().clamp(min=1).double()
    rmse = (error.square().sum() / count).sqrt()
    floor = (rounding.square().sum() / count).sqrt()
    spread = rounding
    own = None
    if clean is not None:
        seen = finite & clean.isfinite()
        own = torch.where(seen, clean - right, zero)
        floor = torch.maximum(floor, (own.square().sum() / count).sqrt())
        spread = _spread(own, rounding, shape)
    if noise is not None:
        probable = torch.where(noise.isfinite(), noise, zero)
        floor = torch.maximum(floor, (probable.square().sum() / count).sqrt())
        spread = torch.maximum(spread, _spread(probable, rounding, shape))
    if limit is None:
        scaled = error.abs() / spread
        clean_peak = torch.zeros((), dtype=torch.float64, device=right.device)
        if own is not None:
            clean_peak = (own.abs() / spread).max()
        element = scaled.max() / (SPREAD_FACTOR * clean_peak.clamp(min=SPREAD_FLOOR))
        worst = scaled.argmax()
    else:
        scaled = torch.where(finite, error.abs() / (limit + tiny), zero)
        element, worst = scaled.max(), scaled.argmax()
    norm = exact.norm()
    along = (error * exact).sum().abs() / norm.clamp(min=tiny)
    # The component of the error along the exact values, as an RMSE.
    bias = along / count.sqrt()
    bias_limit = floor * (BIAS_SIGMAS / count.sqrt() + BIAS_SHARE)
    wrong = (~agree).sum().double()
    worst = torch.where(wrong > 0, (~agree).int().argmax(), worst)
    relative = error.norm() / norm.clamp(min=tiny)
    figures = torch.stack(
        [
            element,
            rmse / (RMSE_FACTOR * floor),
            bias / bias_limit,
            relative,
            error.abs().max(),
            rmse,
            floor,
            wrong,
        ]
    )
    return figures, worst


def _spread(error: torch.Tensor, rounding: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the expected size of clean errors at each place.

    One clean execution gives one error a place; its neighbours in the same row and the same
    column tell how large such errors are there. Where rows or columns are few, errors are taken
    to be in proportion to the rounding of the output.
    """
    columns = int(shape[-1]) if len(shape) else 1
    seen = error.reshape(-1, columns).square()
    prior = rounding.reshape(-1, columns).square()
    ratio = (seen.mean() / prior.mean()).clamp(min=1.0)
    weight = min(seen.shape)
    both = (weight * _from_margins(seen) + PRIOR_WEIGHT * ratio * _from_margins(prior)) / (
        weight + PRIOR_WEIGHT
    )
    return torch.maximum(both.sqrt().reshape(-1), rounding)


def _from_margins(table: torch.Tensor) -> torch.Tensor:
    """Return the table that is a product of its row means and column means."""
    total = table.mean().clamp(min=1e-300)
    return table.mean(1, keepdim=True) * table.mean(0, keepdim=True) / total


def _ratios(figures: list[float], worst: int) -> Ratios:
    element, rmse, bias, relative, largest, own, clean, wrong = figures
    return Ratios(
        element=element,
        rmse=rmse,
        bias=bias,
        relative_l2=relative,
        largest=largest,
        worst=worst,
        rmse_actual=own,
        rmse_clean=clean,
        nonfinite=int(wrong),
    )
