"""Which values of two different codes belong together: those that are equal in float64.

They are partners for the question of arithmetic, where each side rounds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from brickline.checking.execution.tape import Value
from brickline.checking.logic.explaining import explain
from brickline.checking.logic.known_values import KnownValues
from brickline.checking.op_kinds import PASSING
from brickline.checking.pairing import Layout, Part, Partner
from brickline.checking.stage import Key

MOST_ORDERS = 6
"""Orders of dimensions that are looked at for each value."""


def equal_pairs(ours: KnownValues, theirs: KnownValues) -> dict[Key, Partner]:
    """Return partners of the reference's values, by key.

    Args:
        ours: What the candidate computes in float64.
        theirs: What the reference does.
    """
    explained = explain(ours, theirs, theirs.bank())
    keys = dict(_keys(theirs))
    partners: dict[Key, Partner] = {}
    for index, key in _keys(ours):
        partner = explained.get(index)
        other = None if partner is None else keys.get(partner)
        if partner is None or other is None or other in partners:
            continue
        fit = _fit(ours, theirs, index, partner)
        if fit is not False:
            partners[other] = Partner((Part(key, fit),))
    return partners


def _keys(side: KnownValues) -> Iterator[tuple[int, Key]]:
    """Yield the values that operations make, by the keys that they have in every execution."""
    counts: Counter[tuple[str, int, str]] = Counter()
    for step in side.tape.steps:
        if step.func is None or step.name in PASSING or _is_view(side.values, step.outputs):
            continue
        place = (step.frame.path, step.frame.call, step.name)
        number = counts[place]
        counts[place] += 1
        if not step.moves:
            for out, index in enumerate(step.outputs):
                yield index, Key(*place, number, out)


def _is_view(values: list[Value], outputs: list[int]) -> bool:
    return not outputs or values[outputs[0]].step.moves


def _fit(
    ours: KnownValues, theirs: KnownValues, index: int, partner: int
) -> Layout | Literal[False] | None:
    """Return how dimensions lie; False where no order of them makes two values equal."""
    value, other = ours.values[index], theirs.values[partner]
    if value.shape.numel() != other.shape.numel() or value.tensor.is_complex():
        return False
    margin = ours.tolerances[index] + theirs.tolerances[partner]
    right = other.tensor.to(value.tensor.device)
    for fit, laid in itertools.islice(Layout.laid(value.tensor, other.shape), MOST_ORDERS):
        gap = (laid - right).nan_to_num(posinf=0.0, neginf=0.0).abs()
        if not gap.numel() or bool(gap.max() <= margin):
            return fit
    return False
