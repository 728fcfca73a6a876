"""Causes within attention whose queries, keys and values are at hand: mask, scale, heads.

Recognised by values: softmax(scale · q kᵀ + mask) v in float64 is the exact answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations

import torch

from brickline.checking.guesses import Case, Guess, best
from brickline.checking.residual import tensors_of

_SAME = 1e-9
_MOST_SCORES = 1 << 25


@dataclass(frozen=True)
class Attention:
    """How attention is computed."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    causal: int | None = None
    """How many positions after its own a query sees; None sees all."""
    mask: torch.Tensor | None = None
    interleaved: bool = False
    """Whether heads that share a key are apart by the number of keys, not neighbours."""

    def output(self) -> torch.Tensor:
        """Return what it makes, in float64."""
        key, value = self._shared(self.key), self._shared(self.value)
        scores = self.query @ key.mT * self.scale
        if self.causal is not None:
            length, width = scores.shape[-2:]
            seen = torch.ones(length, width, dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(~seen.tril(width - length + self.causal), -torch.inf)
        if self.mask is not None:
            hidden = self.mask.dtype is torch.bool
            scores = (
                scores.masked_fill(~self.mask, -torch.inf)
                if hidden
                else scores + self.mask.double()
            )
        return scores.softmax(-1).nan_to_num(0.0) @ value

    def _shared(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 4 or tensor.shape[-3] == self.query.shape[-3]:
            return tensor
        copies = self.query.shape[-3] // tensor.shape[-3]
        if self.interleaved:
            return torch.cat([tensor] * copies, -3)
        return tensor.repeat_interleave(copies, -3)


def attention(case: Case) -> list[Guess]:
    """Another mask, scale or sharing of heads."""
    if len(case.shape) not in (3, 4) or not case.residual.finite.any():
        return []
    found = next(_recognised(case), None)
    if found is None:
        return []
    return best(
        [case.guess(kind, words, other.output()) for kind, words, other in _variants(found)]
    )


def _recognised(case: Case) -> Iterator[Attention]:
    device = case.residual.exact.device
    at_hand = [each.to(device) for _, each in tensors_of(case.evidence)]
    long = [each.double() for each in at_hand if each.dtype.is_floating_point]
    long = [each for each in long if each.dim() == len(case.shape)]
    for query, key, value in permutations(long[:5], 3):
        if not _fit(query, key, value, case.shape):
            continue
        scores = query.shape[:-1] + key.shape[-2:-1]
        if scores.numel() > _MOST_SCORES:
            return
        masks = [each for each in at_hand if _is_mask(each, scores)]
        for scale in dict.fromkeys((query.shape[-1] ** -0.5, 1.0, *_given_scale(case))):
            for mask in [None, *masks]:
                for causal in (None, 0):
                    for interleaved in (False, True):
                        tried = Attention(query, key, value, scale, causal, mask, interleaved)
                        if _is_exact(tried, case):
                            yield tried


def _fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, shape: torch.Size) -> bool:
    if q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2]:
        return False
    if q.shape[:-1] != shape[:-1] or v.shape[-1] != shape[-1]:
        return False
    if q.dim() < 4:
        return bool(q.shape[:-2] == k.shape[:-2] == v.shape[:-2])
    same = q.shape[:-3] == k.shape[:-3] and k.shape[:-2] == v.shape[:-2]
    return bool(same and k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0)


def _is_mask(each: torch.Tensor, scores: torch.Size) -> bool:
    if each.dim() < 2 or each.shape[-2:] != scores[-2:] or each.dim() > len(scores):
        return False
    sizes = zip(reversed(each.shape), reversed(scores), strict=False)
    return all(size in (1, full) for size, full in sizes)


def _given_scale(case: Case) -> list[float]:
    given = case.evidence.kwargs.get("scale")
    return [float(given)] if isinstance(given, int | float) else []


def _is_exact(tried: Attention, case: Case) -> bool:
    try:
        output = tried.output()
    except RuntimeError:
        return False
    exact = torch.where(case.residual.finite, case.residual.exact, 0.0)
    output = torch.where(case.residual.finite, output, 0.0)
    return float((output - exact).norm()) <= _SAME * float(exact.norm())


def _variants(found: Attention) -> Iterator[tuple[str, str, Attention]]:
    size = found.query.shape[-1]
    if found.causal is not None:
        for off, words in ((1, "one position too many"), (-1, "one position too few")):
            yield "mask", f"mask: each query sees {words} (off by one)", replace(found, causal=off)
        yield (
            "mask",
            "mask: not causal, every query sees every position",
            replace(found, causal=None),
        )
    else:
        yield (
            "mask",
            "mask: causal, where the reference sees every position",
            replace(found, causal=0),
        )
    if found.mask is not None:
        yield "mask", "mask: the mask that is given is not applied", replace(found, mask=None)
        if found.mask.dtype is torch.bool:
            inverse = replace(found, mask=~found.mask)
            yield "mask", "mask: what the mask shows is hidden, and the other way round", inverse
    scales = {1.0: "scores are not scaled", 1 / size: f"scores are divided by {size}, not √{size}"}
    scales[size**-0.5] = f"scores are divided by √{size}"
    for scale, words in scales.items():
        if abs(scale - found.scale) > 1e-9:
            yield "scale", f"attention scale: {words}", replace(found, scale=scale)
    if found.query.dim() == 4 and found.key.shape[-3] != found.query.shape[-3]:
        other = replace(found, interleaved=not found.interleaved)
        yield "heads", "heads: queries are paired with other keys (grouped heads)", other
    for heads in (-3,) if found.query.dim() == 4 else ():
        if found.value.shape[heads] > 1:
            turned = replace(found, value=found.value.roll(1, heads))
            yield "heads", "heads: values are those of the head before", turned
    flipped = replace(found, key=found.key.flip(-2), value=found.value)
    yield "permuted", "permuted: keys are in another order than values", flipped
