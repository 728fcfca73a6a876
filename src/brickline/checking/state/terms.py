"""What a tensor may have been made from: the other side's tensors, and what is computed from them.

A `Term` computes its value from the tensors of a side whenever it is asked, in float64: it is found
with the reference's own weights and evaluated with those that the reference runs with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from brickline.checking.state.tensors import Tensors

Valued = tuple[torch.Tensor, torch.Tensor]
"""A value, and by how much a relative error of one in every source would move it at most."""


@dataclass(frozen=True, eq=False)
class Term:
    """A tensor of a side, or one that is computed from several."""

    words: str
    names: tuple[str, ...]
    evaluate: Callable[[Tensors], Valued]
    vector: bool = False
    """Whether it has one dimension at most, aside from those of size one."""

    def value(self, tensors: Tensors) -> torch.Tensor:
        """Return the value alone."""
        return self.evaluate(tensors)[0]


@dataclass(frozen=True)
class Form:
    """A function of one tensor, element by element."""

    words: str
    function: Callable[[torch.Tensor], torch.Tensor]
    slope: Callable[[torch.Tensor], torch.Tensor]


FORMS = (
    Form("{}", lambda x: x, torch.ones_like),
    Form("1 + {}", lambda x: 1 + x, torch.ones_like),
    Form("1 - {}", lambda x: 1 - x, torch.ones_like),
    Form("exp({})", torch.exp, torch.exp),
    Form("-exp({})", lambda x: -torch.exp(x), torch.exp),
    Form("exp(-exp({}))", lambda x: torch.exp(-torch.exp(x)), lambda x: torch.exp(x - x.exp())),
    Form("tanh({})", torch.tanh, lambda x: 1 - x.tanh().square()),
    Form("sigmoid({})", torch.sigmoid, lambda x: x.sigmoid() * (1 - x.sigmoid())),
    Form("softplus({})", torch.nn.functional.softplus, torch.sigmoid),
    Form("1 / {}", torch.reciprocal, lambda x: x.square().reciprocal()),
)


def raw_term(name: str, tensor: torch.Tensor) -> Term:
    """Return the term of a tensor itself."""

    def evaluate(tensors: Tensors) -> Valued:
        wide = tensors[name].detach().double()
        return wide, wide.abs()

    return Term(name, (name,), evaluate, sum(size > 1 for size in tensor.shape) <= 1)


def formed(term: Term, form: Form) -> Term:
    """Return a function of a term."""
    if form is FORMS[0]:
        return term

    def evaluate(tensors: Tensors) -> Valued:
        value, size = term.evaluate(tensors)
        return form.function(value), form.slope(value).abs() * size

    return Term(form.words.format(term.words), term.names, evaluate, term.vector)


def scaled(term: Term, factor: Term, words: str | None = None) -> Term:
    """Return the product of a term with a number or a tensor of its shape."""

    def evaluate(tensors: Tensors) -> Valued:
        (value, size), (by, by_size) = term.evaluate(tensors), factor.evaluate(tensors)
        by, by_size = by.to(value.device), by_size.to(value.device)
        return value * by, size * by.abs() + value.abs() * by_size

    said = f"{factor.words} * {term.words}" if words is None else words
    return Term(said, term.names + factor.names, evaluate, term.vector)


def summed(*terms: Term) -> Term:
    """Return the sum of terms."""

    def evaluate(tensors: Tensors) -> Valued:
        values, sizes = zip(*(term.evaluate(tensors) for term in terms), strict=True)
        return sum(values[1:], values[0]), sum(sizes[1:], sizes[0])

    names = tuple(name for term in terms for name in term.names)
    return Term(" + ".join(term.words for term in terms), names, evaluate, terms[0].vector)


def raised(term: Term, by: Term) -> Term:
    """Return the sum of a number and a term."""

    def evaluate(tensors: Tensors) -> Valued:
        value, size = term.evaluate(tensors)
        return value + by.value(tensors).to(value.device), size

    return Term(f"{by.words} + {term.words}", term.names, evaluate, term.vector)


def number(value: float, words: str) -> Term:
    """Return a number that is no tensor."""

    def evaluate(_: Tensors) -> Valued:
        return torch.tensor(value, dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)

    return Term(words, (), evaluate, True)


def row(term: Term, index: int) -> Term:
    """Return one row of a term."""

    def evaluate(tensors: Tensors) -> Valued:
        value, size = term.evaluate(tensors)
        return value.flatten(0, -2)[index], size.flatten(0, -2)[index]

    return Term(f"{term.words}[{index}]", term.names, evaluate, True)


# --- what is computed from several tensors of one module


def derived_terms(tensors: Tensors, root: Any) -> Iterator[Term]:
    """Yield the scales and shifts that norms over a batch, and norms of weights, amount to."""
    modules = dict(root.named_modules()) if isinstance(root, torch.nn.Module) else {}
    for name in tensors:
        path, _, own = name.rpartition(".")
        start = f"{path}." if path else ""
        if own == "running_var":
            yield from _norm_terms(start, tensors, modules.get(path))
        if own == "weight_g" and f"{start}weight_v" in tensors:
            yield _lengths(name, f"{start}weight_v")
        if own == "original0" and f"{start}original1" in tensors:
            yield _lengths(name, f"{start}original1")


def _norm_terms(start: str, tensors: Tensors, module: Any) -> Iterator[Term]:
    eps = float(getattr(module, "eps", 1e-5))
    mean, var = f"{start}running_mean", f"{start}running_var"
    weight, bias = f"{start}weight", f"{start}bias"
    names = tuple(name for name in (weight, bias, mean, var) if name in tensors)

    def factor(tensors: Tensors) -> Valued:
        spread = tensors[var].double()
        scale = (spread + eps).rsqrt()
        if weight in tensors:
            scale = scale * tensors[weight].double()
        return scale, scale.abs() * (1 + 0.5 * spread / (spread + eps))

    def shift(tensors: Tensors) -> Valued:
        (scale, size), middle = factor(tensors), tensors[mean].double()
        value, of = -middle * scale, middle.abs() * (size + scale.abs())
        if bias in tensors:
            value, of = value + tensors[bias].double(), of + tensors[bias].double().abs()
        return value, of

    said = start.rstrip(".") or "the root"
    yield Term(f"the scale of {said}", names, factor, True)
    if mean in tensors:
        yield Term(f"the shift of {said}", names, shift, True)


def _lengths(length: str, direction: str) -> Term:
    """Return by what the rows of a direction are multiplied to have given lengths."""

    def evaluate(tensors: Tensors) -> Valued:
        lengths, ways = tensors[length].double(), tensors[direction].double()
        if lengths.ndim != ways.ndim:
            lengths = lengths.reshape(-1, *[1] * (ways.ndim - 1))
        over = [k for k in range(ways.ndim) if lengths.shape[k] == 1] or [0]
        value = (lengths / torch.linalg.vector_norm(ways, dim=over, keepdim=True)).reshape(-1)
        return value, 2 * value.abs()

    return Term(f"{length} / |{direction}|", (length, direction), evaluate, True)


# --- numbers


class Numbers:
    """Numbers that a side may have multiplied a weight with, by their size."""

    def __init__(self, *roots: Any) -> None:
        known: dict[float, str] = {}
        for value, words in _numbers(roots):
            for other, said in _powers(value, words):
                known.setdefault(other, said)
        self._values = torch.tensor(sorted(known), dtype=torch.float64)
        self._words = known

    def nearest(self, value: float, tolerance: float) -> Term | None:
        """Return the number that one within a tolerance stands for, None where there is none."""
        if not math.isfinite(value) or value == 0:
            return None
        size = abs(value)
        if abs(size - 1) <= tolerance:
            size = 1.0
        gaps = (self._values / size - 1).abs()
        best = int(gaps.argmin())
        if float(gaps[best]) > tolerance:
            return None
        known = float(self._values[best])
        sign = math.copysign(1.0, value)
        return number(sign * known, ("-" if sign < 0 else "") + self._words[known])


def _numbers(roots: tuple[Any, ...]) -> Iterator[tuple[float, str]]:
    for tenth in range(1, 10):
        yield tenth / 10, str(tenth / 10)
    for integer in range(1, 17):
        yield float(integer), str(integer)
    for root in roots:
        if not isinstance(root, torch.nn.Module):
            continue
        for module in root.modules():
            own = {**vars(module), **vars(getattr(module, "config", None) or _Nothing())}
            for name, value in own.items():
                plain = isinstance(value, int | float) and not isinstance(value, bool)
                if plain and math.isfinite(value) and value > 0:
                    yield float(value), name
        sizes = {size for tensor in root.parameters() for size in tensor.shape}
        yield from ((float(size), str(size)) for size in sorted(sizes))


class _Nothing:
    """Has no attributes."""


def _powers(value: float, words: str) -> Iterator[tuple[float, str]]:
    yield value, words
    if value > 0:
        yield 1 / value, f"1 / {words}"
        yield math.sqrt(value), f"sqrt({words})"
        yield 1 / math.sqrt(value), f"1 / sqrt({words})"
