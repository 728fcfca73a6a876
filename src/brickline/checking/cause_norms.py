"""Causes within a normalisation: eps, a mean or a weight left out, another variance.

A normalisation is recognised by its values: an input, normalised in float64 with one of the
weights at hand and some eps, is the exact answer. Names and classes are not asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from brickline.checking.guesses import Case, Guess, best
from brickline.checking.residual import floats_of

_SAME = 1e-7
"""Relative distance within which two float64 answers are the same."""


@dataclass(frozen=True)
class Norm:
    """How a normalisation is computed."""

    values: torch.Tensor
    """Its input, with what is normalised together as the last dimension."""
    weight: torch.Tensor | float
    bias: torch.Tensor | float
    centred: bool
    eps: float
    weight_name: str = ""
    bias_name: str = ""
    unbiased: bool = False
    eps_outside: bool = False

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values less their mean, where it is taken off, and their mean square."""
        values = self.values
        if self.centred:
            values = values - values.mean(-1, keepdim=True)
        count = values.shape[-1]
        square = values.square().sum(-1, keepdim=True) / (count - 1 if self.unbiased else count)
        return values, square

    def output(self) -> torch.Tensor:
        """Return what it makes."""
        values, square = self.moments()
        root = square.sqrt() + self.eps if self.eps_outside else (square + self.eps).sqrt()
        return values / root * self.weight + self.bias


def norms(case: Case) -> list[Guess]:
    """Another eps, weight, bias, mean or variance."""
    found = next(_recognised(case), None)
    if found is None:
        return []
    guesses = [
        case.guess("norm", f"normalisation: {words}", other.output())
        for words, other in _variants(found)
    ]
    return best([_other_eps(case, found), *guesses])


def _recognised(case: Case) -> Iterator[Norm]:
    exact = case.residual.exact
    if exact.dim() < 1 or exact.shape[-1] < 4 or not exact.isfinite().all():
        return
    size = exact.shape[-1]
    flat = floats_of(case.evidence, (size,))
    weights: list[tuple[str, torch.Tensor | float]] = [("", 1.0), *flat]
    weights += [(f"1 + {name}", 1.0 + each) for name, each in flat]
    for _, values in floats_of(case.evidence, exact.shape):
        for weight_name, weight in weights:
            for bias_name, bias in [("", 0.0), *flat]:
                for centred in (False, True):
                    norm = Norm(values, weight, bias, centred, 0.0, weight_name, bias_name)
                    eps = _eps_of(norm, exact)
                    if eps is None:
                        continue
                    norm = replace(norm, eps=eps)
                    distance = float((norm.output() - exact).norm())
                    if distance <= _SAME * float(exact.norm()):
                        yield norm


def _eps_of(norm: Norm, output: torch.Tensor) -> float | None:
    """Return the eps with which a normalisation makes an output, from the row that shows it best.

    The inverse root of each row is a fit of the output by the row's own values; eps is what its
    square is beyond the mean square.
    """
    values, square = norm.moments()
    shape = values * norm.weight
    scale = ((output - norm.bias) * shape).sum(-1, keepdim=True)
    norm_square = shape.square().sum(-1, keepdim=True)
    usable = (norm_square > 0) & (scale > 0)
    if not usable.any():
        return None
    inverse = scale / norm_square.clamp_min(1e-300)
    eps = torch.where(usable, inverse.clamp_min(1e-300).pow(-2) - square, torch.inf)
    # The smaller the mean square, the less its rounding hides eps.
    weight = torch.where(usable, square.clamp_min(1e-30).pow(-2), 0.0)
    value = float((torch.where(usable, eps, 0.0) * weight).sum() / weight.sum())
    return value if abs(value) < 1e6 else None


def _other_eps(case: Case, norm: Norm) -> Guess | None:
    residual = case.residual
    actual = torch.where(residual.finite, residual.actual, residual.exact)
    eps = _eps_of(norm, actual)
    if eps is None or eps < -1e-3 * float(norm.moments()[1].mean()):
        return None
    # Rounding shows which eps the data can tell apart; a plain number among them is named.
    plain = _plain_number(max(eps, 0.0))
    for each in dict.fromkeys((plain, max(eps, 0.0))):
        words = f"eps: {each:.3g} explains the output, where the reference has {norm.eps:.3g}"
        facts: dict[str, Any] = {"eps": each, "reference eps": max(norm.eps, 0.0)}
        found = case.guess("eps", words, replace(norm, eps=each).output(), **facts)
        if found is not None and abs(each - norm.eps) > 1e-3 * abs(norm.eps) + 1e-13:
            return found
    return None


def _plain_number(value: float) -> float:
    """Return the nearest 1, 2 or 5 times a power of ten."""
    if value <= 0.0:
        return 0.0
    steps = [factor * 10.0**power for power in range(-16, 3) for factor in (1.0, 2.0, 5.0)]
    return min(steps, key=lambda step: abs(step / value - 1))


def _variants(norm: Norm) -> Iterator[tuple[str, Norm]]:
    if norm.centred:
        yield "the mean is not taken off", replace(norm, centred=False)
    else:
        yield "the mean is taken off", replace(norm, centred=True)
    yield "the variance is over n-1, not n", replace(norm, unbiased=True)
    yield "eps is added outside the root", replace(norm, eps_outside=True)
    if norm.weight_name:
        yield f"{norm.weight_name} is not applied", replace(norm, weight=1.0)
        if norm.weight_name.startswith("1 + "):
            plain = norm.weight_name.removeprefix("1 + ")
            yield f"multiplied by {plain}, not 1 + {plain}", replace(norm, weight=norm.weight - 1.0)
        else:
            words = f"multiplied by 1 + {norm.weight_name}, not {norm.weight_name}"
            yield words, replace(norm, weight=norm.weight + 1.0)
    if norm.bias_name:
        yield f"{norm.bias_name} is not added", replace(norm, bias=0.0)
