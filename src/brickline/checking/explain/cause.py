"""Why a region computes something else: hypotheses that were run, in order, until one is right."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from brickline.checking.execution.tape import WEIGHT
from brickline.checking.explain.hypotheses.constants import (
    changed_constants,
    dimension_orders,
    missing_constants,
    solved_constants,
)
from brickline.checking.explain.hypotheses.expressions import other_expressions
from brickline.checking.explain.hypotheses.functions import (
    dropped,
    dual_operations,
    missing_functions,
    other_functions,
)
from brickline.checking.explain.hypotheses.masks import other_masks
from brickline.checking.explain.hypotheses.operands import exchanged_inputs, missing_operands
from brickline.checking.explain.hypotheses.orders import (
    plain_orders,
    reordered_inputs,
    wrong_slices,
)
from brickline.checking.explain.hypotheses.rotations import other_rotations
from brickline.checking.explain.hypotheses.weights import other_weights
from brickline.checking.explain.program import Program
from brickline.checking.explain.region import OutOfTimeError, Region, Trial, handed_region
from brickline.checking.explain.words import value_words
from brickline.checking.logic.search import Cut

SECONDS = 10.0
"""How long hypotheses about one cut are tried."""
Family = tuple[Callable[[Region], Iterator[Trial]], int]
FIRST: tuple[Family, ...] = ((other_weights, 40), (other_masks, 20))
"""What is tried before it is asked what the region is handed."""
FAMILIES: tuple[Family, ...] = (
    (dropped, 200),
    (changed_constants, 400),
    (dimension_orders, 200),
    (dual_operations, 100),
    (other_functions, 400),
    (missing_functions, 400),
    (exchanged_inputs, 200),
    (other_rotations, 40),
    (reordered_inputs, 100),
    (missing_operands, 600),
    (wrong_slices, 10),
    (solved_constants, 100),
    (missing_constants, 100),
    (plain_orders, 600),
    (other_expressions, 1),
)
"""Hypotheses from plain to complex, each with the number of trials that it may take."""


@dataclass(frozen=True)
class Cause:
    """What makes a region compute the reference's value."""

    words: str
    repair: Mapping[str, Any]
    """The same as data: kind, place, value, and what belongs there."""
    program: Program
    """The region with the repair."""
    family: str
    """Which kind of hypothesis it was."""


def cause_of(region: Region, cut: Cut) -> Cause | None:
    """Return the first hypothesis under which a region computes the reference's value.

    Args:
        region: Behind the cut.
        cut: The value that is wrong and what belongs there.
    """
    try:
        return (
            first_right(region, FIRST) or _of_handed(region, cut) or first_right(region, FAMILIES)
        )
    except OutOfTimeError:
        return None


def _of_handed(region: Region, cut: Cut) -> Cause | None:
    """Return why a region is handed the wrong value, where that is known."""
    own = handed_region(region, cut)
    if own is None or cut.handed is None:
        return None
    index, partner = cut.handed.value, own.partner
    mine = region.there.get(partner)
    if mine is not None and region.ours.values[index].step.name != WEIGHT:
        first, second = value_words(region.ours, index), value_words(region.ours, mine)
        if first != second:
            words = f"it reads {first} in the place of {second}"
            repair = {"kind": "input", "input": first, "right": second}
            program = region.program.with_input(index, own.right_tensor)
            return Cause(words, repair, program, "handed")
    cause = first_right(own, (*FIRST, *FAMILIES))
    if cause is None:
        return None
    program = region.program.after(cause.program, index)
    return replace(cause, program=program, family=f"handed: {cause.family}")


def first_right(region: Region, families: Sequence[Family]) -> Cause | None:
    """Return the first trial that computes the reference's value."""
    for family, most in families:
        for trial in itertools.islice(family(region), most):
            if region.agrees(trial.program):
                return Cause(trial.words, trial.repair, trial.program, family.__name__)
    return None
