"""What an op added to its answer: actual minus exact, and how much of that rounding may be.

A guess at the cause is a tensor: what the op would have made if the guess were right. `Residual`
says whether such a tensor explains what the op made, down to rounding. Nothing here knows a cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from brickline.checking.evidence import Evidence

MOST_ELEMENTS = 1 << 22
"""Larger outputs are looked at in part: whole slices of the first dimension."""
_LEFT = 3.0
"""Mean square of what is left, in units of rounding, up to which everything is explained."""
_SHARE = 1e-3
"""Part of the error's energy that a guess may leave, where the rest is more than rounding."""

_SAMPLE = 1 << 14
"""Elements that a guess is tried on first."""


@dataclass
class Residual:
    """An op's error in float64, with the rounding that may hide in it."""

    actual: torch.Tensor
    exact: torch.Tensor
    dtype: torch.dtype
    """Of the actual output."""
    spread: torch.Tensor
    """Standard deviation of rounding within the op, without that of its output; by row."""
    finite: torch.Tensor
    """Where both are finite."""

    @cached_property
    def error(self) -> torch.Tensor:
        """Actual minus exact; zero where either is not finite."""
        return torch.where(self.finite, self.actual - self.exact, 0.0)

    def noise(self, values: torch.Tensor | None = None) -> torch.Tensor:
        """Return the standard deviation of rounding around some values; by default the exact."""
        if values is None:
            return self._noise
        return self._noise_around(values)

    @cached_property
    def _noise(self) -> torch.Tensor:
        return self._noise_around(self.exact)

    def _noise_around(self, values: torch.Tensor) -> torch.Tensor:
        unit, around = unit_roundoff(self.dtype), values
        around = torch.where(self.finite, around, 0.0).nan_to_num(0.0, 0.0, 0.0)
        return torch.hypot(0.5 * unit * around.abs(), self.spread).clamp_min(1e-300)

    @cached_property
    def energy(self) -> float:
        """Mean square of the error, in units of rounding."""
        return float((self.error / self.noise()).square().mean())

    @cached_property
    def wrong(self) -> torch.Tensor:
        """Elements whose error is far beyond rounding, or that are not finite on one side only."""
        same = (self.actual == self.exact) | (self.actual.isnan() & self.exact.isnan())
        return torch.where(self.finite, self.error.abs() > 6 * self.noise(), ~same)

    def left(self, guess: torch.Tensor) -> float | None:
        """Return the mean square of what a guess leaves, in units of rounding.

        None where it does not explain the output: more than rounding and more than a thousandth
        of its energy is left, or more than a quarter of the error.
        """
        if guess.shape != self.actual.shape or not self.finite.any():
            return None
        # What it made is to be explained too: next to nothing is no explanation of a small output.
        before = min(self.energy, float((self.actual / self.noise()).square()[self.finite].mean()))
        limit = min(max(_LEFT, _SHARE * before), 0.25 * self.energy)
        if guess.numel() > _SAMPLE and self._sampled(guess) > 10 * limit:
            return None
        rest = torch.where(self.finite, self.actual - guess, 0.0)
        if not rest.isfinite().all():
            return None
        after = float((rest / self.noise(guess)).square().mean())
        if after > limit:
            return None
        if float(rest.square().sum()) > 0.25 * float(self.error.square().sum()):
            return None
        return after

    def mends(self, other: torch.Tensor) -> float | None:
        """Return how far another output is from the exact one, if rounding explains the rest."""
        if other.shape != self.exact.shape:
            return None
        rest = torch.where(self.finite, other.double().to(self.exact.device) - self.exact, 0.0)
        if not rest.isfinite().all():
            return None
        after = float((rest / self.noise()).square().mean())
        if self.energy < 4:
            return None  # nothing to mend: the error is hardly more than rounding
        limit = min(max(2 * _LEFT, 1e-4 * self.energy), 0.1 * self.energy)
        return after if after <= limit else None

    def _sampled(self, guess: torch.Tensor) -> float:
        """Return what a guess leaves of some elements, which most guesses do not outlive."""
        step = guess.numel() // _SAMPLE
        finite = self.finite.flatten()[::step]
        rest = self.actual.flatten()[::step] - guess.flatten()[::step]
        unit = self.noise().flatten()[::step]
        left = torch.where(finite, rest / unit, 0.0).nan_to_num(0.0, 0.0, 0.0)
        return float(left.square().mean())


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return half the distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps) / 2 if dtype.is_floating_point else 0.0


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return plain values: not sparse, quantised, conjugated or part of a graph."""
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def residual_of(evidence: Evidence) -> Residual:
    """Return the error of one op; both outputs have the same shape and some elements."""
    actual, exact = dense(evidence.actual), dense(evidence.exact)
    actual = actual.to(exact.device)
    dtype = actual.dtype if actual.dtype.is_floating_point else torch.float64
    clean = None if evidence.clean is None else dense(evidence.clean).to(exact.device)
    if clean is not None and clean.shape != exact.shape:
        clean = None
    actual, exact = actual.double(), exact.double()
    finite = actual.isfinite() & exact.isfinite()
    spread = _spread(exact, clean, evidence.bound, dtype)
    return Residual(actual, exact, dtype, spread, finite)


def _spread(
    exact: torch.Tensor, clean: torch.Tensor | None, bound: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return what rounding inside the op does: the reference's own, else a share of its bound."""
    values = exact.nan_to_num(0.0, 0.0, 0.0)
    unit = unit_roundoff(dtype)
    floor = _rms(values) * min(2.0**-24, max(unit, 2.0**-53))
    if clean is not None:
        error = (clean.double() - exact).nan_to_num(0.0, 0.0, 0.0)
        own = (error.square() - (0.5 * unit * values).square()).clamp_min(0.0).sqrt()
        return torch.maximum(1.5 * _rms(own), floor)
    if bound is not None and bound.shape == exact.shape:
        return bound.double().to(exact.device).nan_to_num(0.0, 0.0, 0.0) / 8 + floor
    return torch.maximum(4 * floor, _rms(values) * unit)


def _rms(values: torch.Tensor) -> torch.Tensor:
    """Return the root mean square by row where rows are long, otherwise of the whole."""
    squares = values.square()
    if values.dim() and values.shape[-1] >= 32:
        # A row of its own has few samples; a tenth of the whole keeps it from being exactly 0.
        row = squares.mean(-1, keepdim=True)
        return torch.maximum(row, 1e-6 * squares.mean()).sqrt()
    return squares.mean().sqrt()


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return the last dimension as columns and the rest as rows."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.dim() else tensor.reshape(1, 1)


def tensors_of(evidence: Evidence) -> list[tuple[str, torch.Tensor]]:
    """Return the op's inputs and its own parameters and buffers by name, as plain values."""
    named = [(f"input {index}", each) for index, each in enumerate(evidence.inputs)]
    module = evidence.module
    if isinstance(module, torch.nn.Module):
        named += list(module.named_parameters(recurse=False))
        named += list(module.named_buffers(recurse=False))
    return [
        (name, dense(each))
        for name, each in named[:16]
        if isinstance(each, torch.Tensor) and each.numel() and not each.is_meta
    ]


def floats_of(
    evidence: Evidence, shape: Sequence[int] | None = None
) -> list[tuple[str, torch.Tensor]]:
    """Return the floating tensors among `tensors_of` in float64, of one shape where asked."""
    device = evidence.exact.device
    return [
        (name, each.to(device).double())
        for name, each in tensors_of(evidence)
        if each.dtype.is_floating_point and each.numel() <= 2 * MOST_ELEMENTS
        if shape is None or tuple(each.shape) == tuple(shape)
    ]
