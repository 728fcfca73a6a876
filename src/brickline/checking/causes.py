"""Why an op is wrong, told from its error alone: `explain`.

Every signature in `SIGNATURES` makes a guess and checks it: what the op would have made if the
guess were right must be what it made, down to rounding. So a cause that is named is one that the
data bears out; where none is, the cause is None. Nothing is compared with a tolerance of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from brickline.checking import (
    cause_attention,
    cause_fits,
    cause_norms,
    cause_order,
    cause_pointwise,
    cause_products,
    cause_trials,
    cause_values,
)
from brickline.checking.evidence import Evidence
from brickline.checking.guesses import Case, Guess
from brickline.checking.places import area_of, index_of, place_of
from brickline.checking.residual import MOST_ELEMENTS, Residual, dense, residual_of

SIGNATURES: tuple[Callable[[Case], list[Guess]], ...] = (
    cause_values.nonfinite,
    cause_order.never_written,
    cause_values.saturation,
    cause_values.flush_to_zero,
    cause_fits.dropout,
    cause_order.passed_through,
    cause_pointwise.activation,
    cause_norms.norms,
    cause_attention.attention,
    cause_products.products,
    cause_fits.scale_of_all,
    cause_fits.offset,
    cause_fits.input_in_sum,
    cause_order.other_order,
    cause_order.permuted,
    cause_fits.scale_by_slice,
    cause_pointwise.rotary_table,
    cause_pointwise.rotation,
    cause_values.coarse_grid,
    cause_fits.scale_by_group,
    cause_trials.trials,
)
"""In order of preference: of two that explain the output as well, the first is named."""

_NEED_THE_WHOLE = {
    cause_order.never_written,
    cause_order.passed_through,
    cause_order.other_order,
    cause_order.permuted,
    cause_fits.scale_by_slice,
    cause_fits.offset,
    cause_attention.attention,
    cause_pointwise.rotary_table,
    cause_trials.trials,
}
"""Signatures that number slices, or run the op, and so cannot work on a part of the output."""

_EXPLAINED = 3.0
"""Mean square of the rest, in units of rounding, up to which guesses are equally good."""


@dataclass(frozen=True)
class Explanation:
    """Why and where an op is wrong."""

    cause: str | None
    """In words; None where no signature explains what the op made."""
    where: str | None
    """Which rows, columns or elements, and the worst of them."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was measured: `signature`, `explained` (share of the error), and its own figures."""


def explain(evidence: Evidence) -> Explanation:
    """Say why and where an op is wrong, from what it made and what it should have made.

    Never raises: a signature that fails is left out, and `facts["skipped"]` tells.
    """
    try:
        return _explain(evidence)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        return Explanation(None, None, {"skipped": [f"{type(error).__name__}: {error}"]})


def _explain(evidence: Evidence) -> Explanation:
    actual, exact = evidence.actual, evidence.exact
    if actual.is_meta or exact.is_meta:
        return Explanation(None, None, {"skipped": ["the output has no values (meta device)"]})
    if tuple(actual.shape) != tuple(exact.shape):
        return _other_shape(evidence)
    if not exact.numel():
        return Explanation(None, None)
    if not (exact.is_floating_point() or exact.is_complex()):
        return _whole_numbers(evidence)
    residual = residual_of(evidence)
    where = place_of(residual, image="conv" in Case(evidence, residual).kind)
    if where is None:
        return Explanation(None, None)
    case = _part(evidence, residual)
    guesses, skipped = _guesses(case, whole=case.residual is residual)
    facts: dict[str, Any] = {"skipped": skipped} if skipped else {}
    if not guesses:
        return Explanation(None, where, facts)
    chosen = _choose(guesses)
    facts |= {"signature": chosen.signature, "left": chosen.left, **chosen.facts}
    return Explanation(chosen.cause, where, facts)


def _guesses(case: Case, *, whole: bool) -> tuple[list[Guess], list[str]]:
    found: list[Guess] = []
    skipped: list[str] = []
    for signature in SIGNATURES:
        if not whole and signature in _NEED_THE_WHOLE:
            continue
        if signature is cause_trials.trials and any(each.left <= _EXPLAINED for each in found):
            break
        try:
            found += signature(case)
        except Exception as error:  # a candidate's code runs in trials, and may raise anything
            reason = str(error).partition("\n")[0][:120]
            skipped.append(f"{signature.__name__}: {type(error).__name__}: {reason}")
    return found, skipped


def _choose(guesses: list[Guess]) -> Guess:
    """Return the first that leaves rounding only, else the one that leaves least."""
    full = [each for each in guesses if each.left <= _EXPLAINED]
    return full[0] if full else min(guesses, key=lambda each: each.left)


def _part(evidence: Evidence, residual: Residual) -> Case:
    """Return the case, of the worst slices only where the output is very large."""
    size = residual.exact.numel()
    if size <= MOST_ELEMENTS or residual.exact.dim() < 2:
        return Case(evidence, residual)
    rows = residual.exact.shape[0]
    count = max(rows * MOST_ELEMENTS // size, 1)
    error = residual.error.square().reshape(rows, -1).sum(-1)
    kept = error.topk(min(count, rows)).indices.sort().values
    spread = residual.spread
    cut = replace(
        residual,
        actual=residual.actual[kept],
        exact=residual.exact[kept],
        finite=residual.finite[kept],
        spread=spread[kept] if spread.dim() and spread.shape[0] == rows else spread,
    )
    inputs = [
        each[kept.to(each.device)] if each.dim() and each.shape[0] == rows else each
        for each in evidence.inputs
    ]
    # Its module cannot be run on a part, so it is not tried.
    return Case(replace(evidence, inputs=inputs, args=(), kwargs={}), cut)


def _other_shape(evidence: Evidence) -> Explanation:
    actual, exact = dense(evidence.actual).double(), dense(evidence.exact).double()
    got, expected = tuple(actual.shape), tuple(exact.shape)
    facts = {"signature": "shape", "shape": list(got), "reference shape": list(expected)}
    words = f"shape: {got} instead of {expected}"
    if sorted(got) == sorted(expected) and actual.dim() == exact.dim() >= 2:
        for first in range(exact.dim()):
            for second in range(first + 1, exact.dim()):
                turned = exact.transpose(first, second)
                if turned.shape == actual.shape and torch.allclose(actual, turned, 1e-2, 1e-3):
                    facts["signature"] = "transposed"
                    words = f"transposed: dims {first} and {second} exchanged ({got})"
    return Explanation(words, "every element", facts)


def _whole_numbers(evidence: Evidence) -> Explanation:
    actual, exact = evidence.actual.to(evidence.exact.device), evidence.exact
    wrong = actual != exact
    count = int(wrong.sum())
    if not count:
        return Explanation(None, None)
    at = index_of(int(wrong.flatten().int().argmax()), exact.shape)
    got, expected = actual[at].item(), exact[at].item()
    where = f"{area_of(wrong)}; first at {list(at)} {got} instead of {expected}"
    return Explanation(None, where, {"elements": count})
