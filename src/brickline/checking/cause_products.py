"""Causes within a sum of products: TF32 and other short inputs, dropped or wrong blocks of terms.

A matrix product is recognised by its values: two of the tensors at hand, multiplied in float64,
are the exact answer. Then what other products they make can be tried on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from brickline.checking.guesses import Case, Guess, best
from brickline.checking.places import indices_in_words
from brickline.checking.residual import MOST_ELEMENTS, floats_of, tensors_of, unit_roundoff

_SAME = 1e-9
_MOST_WORK = 1 << 34
"""Multiplications that one recomputation may cost; larger products are looked at in part."""


@dataclass(frozen=True)
class Product:
    """A matrix product that makes an output."""

    left: torch.Tensor
    """Of shape (..., rows, terms)."""
    right: torch.Tensor
    """Of shape (..., terms, columns)."""
    bias: torch.Tensor | float
    bias_name: str
    names: tuple[str, str]

    @property
    def terms(self) -> int:
        """How many products each element sums."""
        return int(self.left.shape[-1])

    def output(
        self, function: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    ) -> torch.Tensor:
        """Return the product of what a function makes of its two sides."""
        return function(self.left) @ function(self.right) + self.bias


def to_tf32(values: torch.Tensor) -> torch.Tensor:
    """Round to 10 bits, to nearest with ties away from zero, as tensor cores' inputs are."""
    bits = values.float().contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32).double()


def _cut_to_tf32(values: torch.Tensor) -> torch.Tensor:
    return (values.float().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32).double()


def _flushed(values: torch.Tensor) -> torch.Tensor:
    return torch.where(values.abs() < torch.finfo(torch.float32).tiny, 0.0, values)


def _through(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: values.to(dtype).double()


ROUNDINGS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "TF32": ("TF32", to_tf32),
    "TF32, cut off": ("TF32", _cut_to_tf32),
    "bfloat16": ("low-precision inputs", _through(torch.bfloat16)),
    "float16": ("low-precision inputs", _through(torch.float16)),
    "flushed": ("flush to zero", _flushed),
}


def products(case: Case) -> list[Guess]:
    """What short inputs, missing terms or other weights explain."""
    if len(case.shape) < 1 or not case.residual.finite.all():
        return []
    case = _narrowed(case)
    product = next(_recognised(case, case.residual.exact, _SAME), None)
    if product is None:
        return _own_weights(case)
    guesses = best([_turned(case, product)])
    guesses += best([*_prefer_tf32(_rounded(case, product)), *_wrong_blocks(case, product)])
    guesses += best([_without_bias(case, product)])
    return guesses or _accumulated(case, product) or _other_weights(case, product)


def _narrowed(case: Case) -> Case:
    """Return the case of the worst columns alone, where a weight is too large to be widened."""
    size, named = case.shape[-1], tensors_of(case.evidence)
    large = [each for _, each in named if each.dim() == 2 and each.numel() > MOST_ELEMENTS]
    if not any(size in each.shape for each in large):
        return case
    residual = case.residual
    strength = residual.error.reshape(-1, size).square().sum(0)
    columns = strength.topk(min(1024, size)).indices.sort().values

    def cut(each: torch.Tensor) -> torch.Tensor:
        if each.dim() in (1, 2) and size in each.shape:
            return each.index_select(list(each.shape).index(size), columns.to(each.device))
        return each

    spread = residual.spread
    narrow = replace(
        residual,
        actual=residual.actual[..., columns],
        exact=residual.exact[..., columns],
        finite=residual.finite[..., columns],
        spread=spread[..., columns] if spread.dim() and spread.shape[-1] == size else spread,
    )
    inputs = [cut(each) for _, each in named]
    return Case(replace(case.evidence, inputs=inputs, module=None), narrow)


def _recognised(case: Case, output: torch.Tensor, tolerance: float) -> Iterator[Product]:
    named = floats_of(case.evidence)
    shape = output.shape
    biases: list[tuple[str, torch.Tensor | float]] = [("", 0.0)]
    biases += [(name, each) for name, each in named if tuple(each.shape) == (shape[-1],)]
    for left_name, left in named:
        for right_name, right in named:
            if left is right or right.dim() < 2 or left.dim() < 1:
                continue
            for each in (right, right.mT):
                if not _fit(left, each, shape):
                    continue
                for bias_name, bias in biases:
                    names = (left_name, right_name)
                    product = Product(left, each, bias, bias_name, names)
                    if _makes(product, output, tolerance):
                        yield product


def _fit(left: torch.Tensor, right: torch.Tensor, shape: torch.Size) -> bool:
    if left.shape[-1] != right.shape[-2] or right.shape[-1] != shape[-1]:
        return False
    if left.shape[:-1] != shape[:-1]:
        return False
    batched = right.dim() == left.dim() and right.shape[:-2] == left.shape[:-2]
    return bool(right.dim() == 2 or batched)


def _makes(product: Product, output: torch.Tensor, tolerance: float) -> bool:
    """Return whether a product is the output; first on a few rows, which are cheap."""
    if product.right.dim() == 2:
        rows = product.left.reshape(-1, product.terms)[:2]
        first = rows @ product.right + product.bias
        wanted = output.reshape(-1, output.shape[-1])[:2]
        if not _near(first, wanted, tolerance):
            return False
    if output.numel() * product.terms > _MOST_WORK:
        return bool(product.right.dim() == 2)
    return _near(product.output(), output, tolerance)


def _near(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    size = float(other.norm())
    return size > 0 and float((one - other).norm()) <= tolerance * size


def _rounded(case: Case, product: Product) -> Iterator[Guess | None]:
    for name, (kind, function) in ROUNDINGS.items():
        output = product.output(function)
        if kind == "TF32":
            words = "TF32: with both inputs rounded to its 10 bits, float64 makes this output"
        elif kind == "flush to zero":
            words = "flush to zero: inputs below 1.2e-38 count as 0"
        else:
            words = f"low-precision inputs: with both rounded to {name}, float64 makes this output"
        facts: dict[str, Any] = {"rounding": name, "terms": product.terms}
        yield case.guess(kind, words, output, **facts)
        if kind == "low-precision inputs":
            for index, side in enumerate(("left", "right")):
                left = function(product.left) if side == "left" else product.left
                right = function(product.right) if side == "right" else product.right
                one = f"low-precision inputs: {product.names[index]} was rounded to {name}"
                yield case.guess(kind, one, left @ right + product.bias, **facts)


def _prefer_tf32(guesses: Iterator[Guess | None]) -> list[Guess | None]:
    """Leave out float16, which has as many bits, unless it fits clearly better."""
    found = [each for each in guesses if each is not None]
    tf32 = min((each.left for each in found if each.signature == "TF32"), default=None)
    return [
        each
        for each in found
        if tf32 is None or each.facts["rounding"] != "float16" or 1.5 * each.left < tf32
    ]


def _turned(case: Case, product: Product) -> Guess | None:
    """A square matrix the other way round."""
    right = product.right
    if right.dim() != 2 or right.shape[0] != right.shape[1]:
        return None
    words = f"transposed: multiplied with {product.names[1]} the other way round"
    return case.guess("transposed", words, product.left @ right.mT + product.bias)


def _without_bias(case: Case, product: Product) -> Guess | None:
    if not product.bias_name:
        return None
    output = product.left @ product.right
    return case.guess("missing bias", f"missing bias: {product.bias_name} is not added", output)


def _wrong_blocks(case: Case, product: Product) -> Iterator[Guess | None]:
    """One block of terms counts another number of times than once: 0 where it was dropped."""
    error, wrong = case.residual.error, case.residual.wrong
    size = product.terms
    # It may have happened to some output columns or rows only.
    area = wrong.any(-1, keepdim=True) & wrong.reshape(-1, case.shape[-1]).any(0)
    for start, stop in _blocks(case, product):
        part = product.left[..., start:stop] @ product.right[..., start:stop, :] * area
        norm = float(part.square().sum())
        if norm <= 0:
            continue
        factor = float((error * part).sum()) / norm
        if abs(factor) * norm**0.5 < 0.5 * float(error.norm()):
            continue
        whole = round(factor) if abs(factor - round(factor)) < 0.02 else factor
        output = case.residual.exact + whole * part
        yield case.guess(
            *_block_words(whole, start, stop, size), output, numbers=2, terms=[start, stop]
        )


def _block_words(factor: float, start: int, stop: int, size: int) -> tuple[str, str]:
    where = indices_in_words("term", range(start, stop), size)
    if factor == -1:
        if stop == size:
            return "dropped tail", f"dropped tail: {where} of each sum are left out"
        return "dropped terms", f"dropped terms: {where} of each sum are left out"
    if factor == 1:
        return "doubled terms", f"doubled terms: {where} of each sum count twice"
    if stop - start == 1:
        words = f"weight: {where} of each sum counts {1 + factor:.4g} times"
        return "weight", words
    return "quantisation scale", f"scale: {where} of each sum count {1 + factor:.4g} times"


def _blocks(case: Case, product: Product) -> Iterator[tuple[int, int]]:
    """Yield blocks of terms whose sum resembles the error, the likeliest first."""
    size = product.terms
    left = product.left.reshape(-1, size) if product.right.dim() == 2 else None
    if left is None:
        errors = case.residual.error.reshape(-1, *case.shape[-2:])
        batch = int(errors.square().sum((-1, -2)).argmax())
        right = product.right.reshape(-1, *product.right.shape[-2:])[batch]
        left = product.left.reshape(-1, *product.left.shape[-2:])[batch]
        error = errors[batch]
    else:
        right, error = product.right, case.residual.error.reshape(-1, case.shape[-1])
    rows = error.square().sum(-1).topk(min(8, len(error))).indices
    strength = error[rows].square().sum(0)
    columns = strength.topk(min(64, error.shape[-1])).indices
    columns = columns[strength[columns] > 1e-4 * strength.max()]
    error = error[rows][:, columns]
    terms = left[rows][:, None, :] * right.T[columns][None]
    sums = torch.nn.functional.pad(terms.cumsum(-1), (1, 0))
    total = sums[..., -1:]
    tails = total - sums[..., :-1]
    found: list[tuple[float, int, int]] = []
    # From the second term on: all of them are not a tail but a scale.
    for start, left_over in enumerate(_misfit(tails[..., 1:], error), start=1):
        found.append((left_over, start, size))
    for width in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        if width >= size:
            break
        starts = torch.arange(0, size - width + 1, width, device=sums.device)
        parts = sums[..., starts + width] - sums[..., starts]
        for start, left_over in zip(starts.tolist(), _misfit(parts, error), strict=True):
            found.append((left_over, start, start + width))
    found.sort()
    yield from [(start, stop) for left_over, start, stop in found[:6] if left_over < 0.5]


def _misfit(parts: torch.Tensor, error: torch.Tensor) -> list[float]:
    """Return what share of the error's energy the best multiple of each part leaves."""
    error = error[..., None]
    norm = parts.square().sum((0, 1)).clamp_min(1e-300)
    along = (parts * error).sum((0, 1))
    energy = error.square().sum().clamp_min(1e-300)
    left: list[float] = (1 - along.square() / norm / energy).tolist()
    return left


def _accumulated(case: Case, product: Product) -> list[Guess]:
    """Sums that are rounded to a short dtype as they grow, tried in steps of several lengths."""
    if product.right.dim() != 2 or product.terms < 8:
        return []
    residual = case.residual
    left = product.left.reshape(-1, product.terms)
    rows = torch.linspace(0, len(left) - 1, min(len(left), 64)).long().unique()
    columns = torch.linspace(0, product.right.shape[-1] - 1, min(product.right.shape[-1], 64))
    columns = columns.long().unique()
    right = product.right[:, columns]
    left = left[rows]
    shape = (-1, case.shape[-1])
    exact = residual.exact.reshape(shape)[rows][:, columns]
    actual = residual.actual.reshape(shape)[rows][:, columns]
    error = float((actual - exact).square().mean().sqrt())
    bias = product.bias[columns] if isinstance(product.bias, torch.Tensor) else 0.0
    for dtype in (torch.bfloat16, torch.float16):
        if unit_roundoff(dtype) < unit_roundoff(residual.dtype):
            continue
        name = str(dtype).removeprefix("torch.")
        for step in (1, 4, 8, 16, 32, 64, 128, 256):
            if product.terms // step < 2 or product.terms // step > 4096:
                continue
            made = _summed(left, right, bias, step, dtype)
            left_over = float((made - actual).square().mean().sqrt())
            if left_over < 0.1 * error:
                words = f"low-precision accumulation: sums kept in {name}, {step} terms at a time"
                facts = {"dtype": name, "step": step, "terms": product.terms}
                return [Guess("low-precision accumulation", words, 0.0, facts)]
    return []


def _summed(
    left: torch.Tensor,
    right: torch.Tensor,
    bias: torch.Tensor | float,
    step: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    total = torch.zeros(len(left), right.shape[-1], dtype=dtype, device=left.device)
    for start in range(0, left.shape[-1], step):
        part = left[:, start : start + step] @ right[start : start + step]
        total = (total.double() + part.to(dtype).double()).to(dtype)
    return (total.double() + bias).to(dtype).double()


def _own_weights(case: Case) -> list[Guess]:
    """The actual output is right for the op's own weights, so these are other weights."""
    residual = case.residual
    noise = float(residual.noise().norm()) / max(float(residual.actual.norm()), 1e-300)
    for product in _recognised(case, residual.actual, max(3 * noise, 1e-12)):
        found = case.guess("weights", "", product.output())
        if found is None:
            continue
        wrong = residual.wrong.reshape(-1, case.shape[-1])
        columns = wrong.any(0).nonzero().flatten().tolist()
        size = case.shape[-1]
        which = "" if len(columns) == size else f" in {indices_in_words('row', columns, size)}"
        words = f"weights: right for its own {product.names[1]}, which differs from the reference's"
        return [Guess("weights", words + which, found.left, found.facts)]
    return []


def _other_weights(case: Case, product: Product) -> list[Guess]:
    """Few output columns are wrong, or each by one term: rows or single numbers of the weight."""
    residual = case.residual
    if product.right.dim() != 2:
        return []
    wrong = residual.wrong.reshape(-1, case.shape[-1])
    columns = wrong.any(0).nonzero().flatten()
    left = product.left.reshape(-1, product.terms)
    if not len(columns) or len(columns) > 0.25 * case.shape[-1] or len(left) < 4:
        return []
    error = residual.error.reshape(-1, case.shape[-1])[:, columns]
    norm = left.square().sum(0).clamp_min(1e-300)
    along = left.T @ error
    share = (along.square() / norm[:, None]) / error.square().sum(0).clamp_min(1e-300)
    term = share.argmax(0)
    change = along.gather(0, term[None])[0] / norm[term]
    output = residual.exact.reshape(-1, case.shape[-1]).clone()
    output[:, columns] += left[:, term] * change
    where = indices_in_words("column", columns.tolist(), case.shape[-1])
    single = case.guess(
        "weight",
        f"weight: one number of {product.names[1]} differs for {where} (term {int(term[0])}, "
        f"by {float(change[0]):.4g})",
        output.reshape(case.shape),
    )
    if single is not None and len(left) > 4 and bool(wrong[:, columns].double().mean() > 0.2):
        return [single]
    return []
