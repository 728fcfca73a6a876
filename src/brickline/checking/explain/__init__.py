"""Why a region of the candidate computes something else: causes, repairs and repros."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from brickline.checking.execution.tape import REFUSALS
from brickline.checking.explain.cause import SECONDS, Cause, cause_of
from brickline.checking.explain.region import region_of
from brickline.checking.explain.repro import ShownRegion, shown_region, write_region_repro
from brickline.checking.logic.search import Cut, Search

FAILURES = (*REFUSALS, KeyError, AssertionError, ArithmeticError)
"""What a hypothesis raises that fits nothing that a region does."""


@dataclass(frozen=True)
class Explanation:
    """What is known of a cut beside its place."""

    words: str | None = None
    """Its cause, where a hypothesis computed the reference's value."""
    repair: Mapping[str, Any] | None = None
    shown: ShownRegion | None = None


def explained(search: Search, cut: Cut, seconds: float = SECONDS) -> Explanation:
    """Return the cause of a cut, and the region behind it for a repro.

    Args:
        search: That found the cut.
        cut: A value that is wrong and what belongs there.
        seconds: How long hypotheses are tried. Default 10.
    """
    try:
        with torch.no_grad():
            return _explained(search, cut, time.monotonic() + seconds)
    except FAILURES:
        return Explanation()  # the place is known all the same


def _explained(search: Search, cut: Cut, end: float) -> Explanation:
    region = region_of(search, cut, end)
    if region is None:
        return Explanation()
    cause = cause_of(region, cut)
    region.end = float("inf")
    shown = shown_region(region, cause)
    if cause is None:
        return Explanation(shown=shown)
    return Explanation(cause.words, cause.repair, shown)


__all__ = ["Cause", "Explanation", "ShownRegion", "explained", "write_region_repro"]
