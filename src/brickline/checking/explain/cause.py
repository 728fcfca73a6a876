"""Why a region computes something else: hypotheses that were run, in order, until one is right."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from brickline.checking.explain.constants import (
    changed_constants,
    dimension_orders,
    missing_constants,
    solved_constants,
)
from brickline.checking.explain.expressions import other_expressions
from brickline.checking.explain.functions import (
    dropped,
    dual_operations,
    missing_functions,
    other_functions,
)
from brickline.checking.explain.masks import other_masks
from brickline.checking.explain.operands import exchanged_inputs, missing_operands
from brickline.checking.explain.orders import plain_orders, reordered_inputs, wrong_slices
from brickline.checking.explain.program import Program
from brickline.checking.explain.region import OutOfTime, Region, Trial, region_of
from brickline.checking.explain.weights import other_weights
from brickline.checking.logic.search import Cut, Search

SECONDS = 10.0
"""How long hypotheses about one cut are tried."""
FAMILIES: tuple[tuple[Callable[[Region], Iterator[Trial]], int], ...] = (
    (other_weights, 40),
    (other_masks, 20),
    (changed_constants, 400),
    (dimension_orders, 200),
    (dropped, 200),
    (exchanged_inputs, 200),
    (dual_operations, 100),
    (other_functions, 400),
    (missing_functions, 400),
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
    repair: Mapping[str, Any] = field(default_factory=dict)
    """The same as data: kind, place, value, and what belongs there."""
    program: Program | None = None
    """The region with the repair."""
    family: str = ""


def cause_of(search: Search, cut: Cut, seconds: float = SECONDS) -> Cause | None:
    """Return the first hypothesis under which a region computes the reference's value.

    Args:
        search: That found the cut.
        cut: The value that is wrong and what belongs there.
        seconds: How long to try. Default 10.
    """
    end = time.monotonic() + seconds
    with torch.no_grad():
        region = region_of(search, cut, end)
        return None if region is None else first_right(region)


def first_right(region: Region) -> Cause | None:
    """Return the first trial that computes the reference's value."""
    try:
        for family, most in FAMILIES:
            for trial in itertools.islice(family(region), most):
                if region.agrees(trial.program):
                    return Cause(trial.words, trial.repair, trial.program, family.__name__)
    except OutOfTime:
        pass
    return None
