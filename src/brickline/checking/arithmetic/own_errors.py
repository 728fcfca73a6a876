"""Does a candidate of different code round more than the reference does?

Each side is compared with itself in float64. At values that are equal there, the error of the
candidate may not be much larger than that of the reference, which works in the same dtype: how far
rounding goes is measured, on what is known to be the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from brickline.checking.arithmetic.native_values import native_values
from brickline.checking.facts import CULPRIT_LIMIT, Fact, verdict_of
from brickline.checking.logic.explaining import explain
from brickline.checking.logic.known_values import KnownValues
from brickline.checking.pairing import is_end, roots_of
from brickline.checking.recording import Recording, Value
from brickline.checking.stage import Key
from brickline.oracle.ratios import FLOOR_ULP, Ratios
from brickline.oracle.widen import unit_roundoff
from brickline.verdict import Verdict

FACTOR = 4.0
"""How often the reference's error the candidate's must be to be more than another way to round."""
SHOWS = 1.0
"""What is returned has lost more from this ratio on, of which 2 is the limit."""
LOST = 0.3
"""Relative L2 from which on an error says nothing: rounding has turned a choice before."""


@dataclass(frozen=True)
class Native:
    """One side of a call, as it ran and in float64."""

    recording: Recording
    wide: KnownValues


def own_errors(candidate: Native, reference: Native, work: torch.dtype) -> list[Fact]:
    """Return what each value of the candidate has lost that the reference has, too; in order.

    Args:
        candidate: The one side.
        reference: The other one, which computes the same function in float64.
        work: The dtype that the candidate works in; one rounding to it is always allowed.
    """
    floor = 2 * FLOOR_ULP * unit_roundoff(work)
    explained = explain(candidate.wide, reference.wide, reference.wide.bank())
    ours = native_values(candidate.recording, candidate.wide.tape)
    theirs = native_values(reference.recording, reference.wide.tape)
    facts: list[Fact] = []
    right: dict[int, bool] = {}
    for index, value in ours.items():
        partner = explained.get(index)
        other = None if partner is None else theirs.get(partner)
        if partner is None or other is None or not candidate.wide.informative(index):
            continue
        one = _distance(value.tensor, candidate.wide.values[index].tensor)
        two = _distance(other.tensor, reference.wide.values[partner].tensor)
        if one is None or two is None or max(one.relative, two.relative) > LOST:
            continue
        fact = _fact(value.key, other.key, one, two, floor)
        if fact.suspicious:
            fact.modules = _modules(candidate.wide, index, right)
        right[index] = not fact.suspicious
        facts.append(fact)
    facts += _ends(candidate, reference, floor)
    return facts


def first_culprit(facts: list[Fact]) -> Fact | None:
    """Return the first value that has lost more, if what is returned has, too.

    All that follows it has its error from there. What does not show in what is returned is another
    way to round.
    """
    shows = any(is_end(fact.key) and fact.ratios.z > SHOWS for fact in facts)
    culprit: Fact | None = None
    for fact in facts:
        if not fact.suspicious:
            continue
        if culprit is None and fact.modules and shows:
            culprit = fact
        elif fact.verdict is Verdict.CULPRIT:
            fact.verdict = Verdict.PROPAGATED if culprit is not None else Verdict.ROUNDING
    return culprit


@dataclass(frozen=True)
class _Error:
    relative: float
    largest: float
    nonfinite: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _distance(native: torch.Tensor, wide: torch.Tensor) -> _Error | None:
    if not native.dtype.is_floating_point or not wide.dtype.is_floating_point:
        return None
    ours, exact = native.double(), wide.to(native.device)
    limit = float(torch.finfo(native.dtype).max)
    filler = ~(exact.abs() < limit / 2)  # a mask's, or more than the dtype holds
    plain = ours.isfinite() & ~filler
    size = float(exact[plain].norm())
    gap = ours[plain] - exact[plain]
    nonfinite = int((~ours.isfinite() & ~filler).sum())
    relative = float(gap.norm()) / size if size else 0.0
    largest = float(gap.abs().max()) if gap.numel() else 0.0
    return _Error(relative, largest, nonfinite, native.dtype, tuple(native.shape))


def _fact(key: Key, other: Key, one: _Error, two: _Error, floor: float) -> Fact:
    ratio = one.relative / max(two.relative, floor)
    scaled = ratio * CULPRIT_LIMIT / FACTOR
    overflow = one.nonfinite if not two.nonfinite else 0
    ratios = Ratios(
        0.0, scaled, 0.0, one.relative, one.largest, 0, one.relative, two.relative, overflow
    )
    return Fact(key, other, ratios, verdict_of(ratios.z), one.dtype, one.shape)


def _modules(ours: KnownValues, index: int, right: dict[int, bool]) -> tuple[str, ...]:
    """Return the modules that computed a value from others that have lost no more."""
    stops = {value: True for value, is_right in right.items() if is_right}
    region = sorted(ours.behind([index], {**stops, index: None}), reverse=True)
    steps = [ours.values[inner].step for inner in region]
    paths = [step.frame.path for step in steps if step.func is not None and not step.moves]
    return tuple(dict.fromkeys(paths))


def _ends(candidate: Native, reference: Native, floor: float) -> Iterator[Fact]:
    """Yield what is returned: numbers by their error, whole numbers by being the same."""
    left = list(_returned(reference))
    for value, wide in _returned(candidate):
        fit = (pair for pair in left if pair[0].tensor.shape == value.tensor.shape)
        pair = next(fit, None)
        if pair is None:
            continue
        left = [other for other in left if other is not pair]
        theirs, exact = pair
        if wide is None or exact is None:
            same = torch.equal(value.tensor, theirs.tensor.to(value.tensor.device))
            verdict = Verdict.IDENTICAL if same else Verdict.UNKNOWN
            plain = Ratios(0.0, 0.0, 0.0, 0.0, 0.0, 0)
            kind = value.tensor.dtype
            fact = Fact(value.key, theirs.key, plain, verdict, kind, tuple(value.tensor.shape))
            if not same:
                fact.notes["reason"] = "other whole numbers: a choice that rounding may have turned"
            yield fact
            continue
        one, two = _distance(value.tensor, wide), _distance(theirs.tensor, exact)
        if one is not None and two is not None:
            yield _fact(value.key, theirs.key, one, two, floor)


def _returned(side: Native) -> Iterator[tuple[Value, torch.Tensor | None]]:
    """Yield what is returned, and the same in float64; None for whole numbers."""
    wide = [side.wide.values[index].tensor for index in side.wide.tape.outputs]
    for value in roots_of(side.recording):
        if not value.tensor.dtype.is_floating_point or not value.tensor.numel():
            yield value, None
            continue
        fit = next((tensor for tensor in wide if tensor.shape == value.tensor.shape), None)
        if fit is not None:
            wide = [tensor for tensor in wide if tensor is not fit]
            yield value, fit
