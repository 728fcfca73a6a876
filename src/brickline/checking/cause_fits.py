"""Causes with few numbers: a scale, a sign, an offset, an input added or left out, dropout."""

from __future__ import annotations

import math

import torch

from brickline.checking.guesses import Case, Guess, best
from brickline.checking.places import dimension_names, indices_in_words
from brickline.checking.residual import Residual, floats_of

_SURE = 6.0
"""Standard deviations by which a number differs before it is said to differ."""


def scale_of_all(case: Case) -> list[Guess]:
    """One factor for every element."""
    residual = case.residual
    if _enough(residual, 1):
        factor, sigma = _factor(residual, residual.exact, range(residual.exact.dim()))
        value, error = float(factor), float(sigma)
        if abs(value - 1) > _SURE * error and abs(value) > _SURE * error:
            value = _short(value, error)
            words, kind = _scale_words(value, case.shape), "sign" if _is(value, -1) else "scale"
            found = case.guess(kind, words, value * residual.exact, factor=value)
            return best([found])
    return []


def scale_by_slice(case: Case) -> list[Guess]:
    """One factor for each row, column or other slice; those that are not 1 are named."""
    residual = case.residual
    dims = residual.exact.dim()
    names = dimension_names(dims)
    guesses: list[Guess | None] = []
    for dim in range(dims):
        size = residual.exact.shape[dim]
        if size < 2 or not _enough(residual, size):
            continue
        others = [each for each in range(dims) if each != dim]
        factor, sigma = _factor(residual, residual.exact, others)
        off = ((factor - 1).abs() > _SURE * sigma) & residual.wrong.any(dim=others)
        if not off.any() or (bool(off.all()) and not _varies(factor, sigma, off)):
            continue
        output = torch.where(_along(off, dim, dims), _along(factor, dim, dims), 1.0)
        output = output * residual.exact
        where = indices_in_words(names[dim], off.nonzero().flatten().tolist(), size)
        low, high = float(factor[off].min()), float(factor[off].max())
        if abs(low) < 1e-12 and abs(high) < 1e-12:
            continue
        if _varies(factor, sigma, off):
            words = f"scale: {where} multiplied by {low:.4g} to {high:.4g}"
            hint = "a weight of each column differs" if dim == dims - 1 else ""
            words += f" ({hint})" if hint and bool(off.all()) else ""
            kind = "scale"
        else:
            value = _short(float(factor[off].mean()), float(sigma[off].mean()))
            kind = "sign" if _is(value, -1) else "scale"
            words = f"{_scale_words(value, case.shape)} in {where}"
        count = int(off.sum()) if _varies(factor, sigma, off) else 1
        found = case.guess(kind, words, output, numbers=count, lowest=low, highest=high)
        guesses.append(found)
    return best(guesses)


def scale_by_group(case: Case) -> list[Guess]:
    """One factor for each block of columns of each row, as quantisation has."""
    residual = case.residual
    columns = residual.exact.shape[-1] if residual.exact.dim() else 0
    guesses: list[Guess | None] = []
    for group in (256, 128, 64, 32, 16):
        if columns % group or columns == group:
            continue
        shape = (-1, columns // group, group)
        exact = residual.exact.reshape(shape)
        actual, noise = residual.actual.reshape(shape), residual.noise().reshape(shape)
        weight = torch.where(residual.finite.reshape(shape), noise.pow(-2), 0.0)
        norm = (weight * exact.square()).sum(-1, keepdim=True).clamp_min(1e-300)
        factor = (weight * actual * exact).sum(-1, keepdim=True) / norm
        off = (factor - 1).abs() > _SURE * norm.rsqrt()
        output = (torch.where(off, factor, 1.0) * exact).reshape(residual.exact.shape)
        low, high = float(factor.min()), float(factor.max())
        words = (
            f"quantisation: {int(off.sum())} of {off.numel()} groups of {group} columns have "
            f"another scale, by {low:.4g} to {high:.4g}"
        )
        guesses.append(
            case.guess("quantisation scale", words, output, numbers=int(off.sum()), group=group)
        )
    return best(guesses)


def offset(case: Case) -> list[Guess]:
    """One number added to every element, to each column or to each row."""
    residual = case.residual
    dims = residual.exact.dim()
    guesses: list[Guess | None] = []
    if _enough(residual, 1):
        value, sigma = _mean(residual, range(dims))
        if abs(float(value)) > _SURE * float(sigma):
            words = f"offset: {float(value):.6g} added to every element"
            guesses.append(case.guess("offset", words, residual.exact + value, value=float(value)))
    for dim in range(dims if not best(guesses) else 0):
        size = residual.exact.shape[dim]
        if size < 2 or not _enough(residual, size):
            continue
        others = [each for each in range(dims) if each != dim]
        value, sigma = _mean(residual, others)
        off = value.abs() > _SURE * sigma
        if not off.any():
            continue
        added = torch.where(off, value, 0.0)
        where = indices_in_words(dimension_names(dims)[dim], off.nonzero().flatten().tolist(), size)
        words = _offset_words(case, added, where, dim)
        output = residual.exact + _along(added, dim, dims)
        guesses.append(case.guess("offset", words, output, numbers=int(off.sum())))
    return best(guesses)


def _offset_words(case: Case, added: torch.Tensor, where: str, dim: int) -> str:
    exact = case.residual.exact
    means = exact.mean(dim=[each for each in range(exact.dim()) if each != dim])
    if float((added + means).norm()) < 1e-3 * float(means.norm()):
        return f"offset: the mean of each of {where} is taken off"
    for name, each in floats_of(case.evidence, added.shape):
        size = float(each.norm()) + 1e-300
        if float((added + each).norm()) < 0.02 * size:
            return f"missing bias: {name} is not added"
        if float((added - each).norm()) < 0.02 * size:
            return f"offset: {name} is added once too often"
    hint = " (a bias that is missing or wrong)" if dim == exact.dim() - 1 else ""
    return f"offset: a constant is added to each of {where}{hint}"


def input_in_sum(case: Case) -> list[Guess]:
    """A multiple of an input added or left out, as a residual connection is."""
    residual = case.residual
    guesses: list[Guess | None] = []
    for name, each in floats_of(case.evidence, case.shape):
        if not _enough(residual, 1) or not each.isfinite().all() or not each.any():
            continue
        weight = torch.where(residual.finite, residual.noise().pow(-2), 0.0)
        norm = (weight * each.square()).sum()
        factor = float((weight * residual.error * each).sum() / norm)
        if _is(factor, -1, 1e-2):
            words, factor = f"residual: {name} is not added", -1.0
        elif _is(factor, 1, 1e-2):
            words, factor = f"residual: {name} is added once too often", 1.0
        else:
            words = f"residual: {factor:.4g} times {name} too much"
        output = residual.exact + factor * each
        guesses.append(case.guess("residual", words, output, factor=factor))
    return best(guesses)


def dropout(case: Case) -> list[Guess]:
    """Some elements are 0, the others scaled by what makes up for them."""
    residual = case.residual
    there = residual.finite & (residual.exact.abs() > 6 * residual.noise())
    count = int(there.sum())
    zero = there & (residual.actual == 0)
    dropped = int(zero.sum())
    if count < 32 or dropped < 4 or dropped > 0.95 * count:
        return []
    kept = there & ~zero
    ratio = (residual.actual[kept] / residual.exact[kept]).median()
    share, factor = dropped / count, float(ratio)
    rate = 1 - 1 / factor if factor > 0 else -1.0
    sigma = math.sqrt(max(share * (1 - share), 1e-3) / count)
    # Without the factor that makes up for them, zeros are something else.
    if not 0.5 * share < rate < 1.0 or abs(rate - share) > 5 * sigma:
        return []
    output = torch.where(residual.actual == 0, 0.0, factor * residual.exact)
    words = (
        f"dropout left on: {share:.1%} of the answers are 0, the rest {factor:.4g} times as large"
    )
    return best([case.guess("dropout", words, output, rate=rate, zeros=share)])


def _enough(residual: Residual, numbers: int) -> bool:
    """Return whether there is far more data than a fit takes numbers from it."""
    return bool(residual.exact.numel() >= max(8, 6 * numbers))


def _factor(
    residual: Residual, values: torch.Tensor, dims: range | list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a weighted fit, and their standard deviations."""
    weight = torch.where(residual.finite, residual.noise().pow(-2), 0.0)
    values = torch.where(residual.finite, values, 0.0)
    actual = torch.where(residual.finite, residual.actual, 0.0)
    norm = (weight * values.square()).sum(dim=list(dims)).clamp_min(1e-300)
    return (weight * values * actual).sum(dim=list(dims)) / norm, norm.rsqrt()


def _mean(residual: Residual, dims: range | list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.where(residual.finite, residual.noise().pow(-2), 0.0)
    total = weight.sum(dim=list(dims)).clamp_min(1e-300)
    return (weight * residual.error).sum(dim=list(dims)) / total, total.rsqrt()


def _varies(factor: torch.Tensor, sigma: torch.Tensor, off: torch.Tensor) -> bool:
    chosen, spread = factor[off], sigma[off]
    middle = (chosen / spread.square()).sum() / spread.pow(-2).sum()
    return bool(((chosen - middle).abs() > _SURE * spread + 1e-6 * middle.abs()).any())


def _along(values: torch.Tensor, dim: int, dims: int) -> torch.Tensor:
    return values.reshape([-1 if each == dim else 1 for each in range(dims)])


def _short(value: float, sigma: float) -> float:
    """Return the shortest number that the data cannot tell from a value."""
    shorter = [float(f"{value:.{digits}g}") for digits in range(1, 7)]
    near = [each for each in shorter if abs(each - value) <= 3 * sigma]
    return near[0] if near else value


def _is(value: float, wanted: float, tolerance: float = 1e-3) -> bool:
    return abs(value - wanted) <= tolerance * abs(wanted)


def _scale_words(value: float, shape: torch.Size) -> str:
    if _is(value, -1):
        return "sign: every answer is negated"
    named = {
        2.0: "2",
        0.5: "1/2",
        math.sqrt(2): "√2",
        math.sqrt(0.5): "1/√2",
        4.0: "4",
        0.25: "1/4",
    }
    size = shape[-1] if len(shape) else 1
    if size > 4:
        named |= {
            math.sqrt(size): f"√{size}",
            1 / math.sqrt(size): f"1/√{size}",
            float(size): str(size),
            1 / size: f"1/{size}",
            math.sqrt((size - 1) / size): f"√({size - 1}/{size}): variance over n-1",
            math.sqrt(size / (size - 1)): f"√({size}/{size - 1}): variance over n",
        }
    near = [words for number, words in named.items() if _is(value, number, 2e-5)]
    return f"scale: multiplied by {value:.6g}{f' ({near[0]})' if near else ''}"
