"""What was measured at one pair of values, and what is said of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from brickline.checking.pairing import Part
from brickline.checking.stage import Key
from brickline.oracle.ratios import Ratios
from brickline.verdict import Verdict

CULPRIT_LIMIT = 2.0
"""A ratio above it, again and again, is no rounding."""


@dataclass
class Fact:
    """One value of the candidate against its reference, each made from the candidate's inputs."""

    key: Key
    """The candidate's."""
    reference_key: Key
    ratios: Ratios
    verdict: Verdict
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    actual: torch.Tensor | None = None
    exact: torch.Tensor | None = None
    clean: torch.Tensor | None = None
    modules: tuple[str, ...] = ()
    """Paths of the candidate's modules whose work is not explained by earlier pairs."""
    part: Part | None = None
    """How the candidate's value lies in the reference's."""
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def suspicious(self) -> bool:
        """Whether rounding does not explain it, as far as was measured."""
        return self.ratios.z > CULPRIT_LIMIT

    def release(self) -> None:
        """Let the tensors go; the figures stay."""
        self.actual = self.exact = self.clean = None


def verdict_of(z: float) -> Verdict:
    """Return what a ratio says by itself."""
    if z <= 1:
        return Verdict.ROUNDING
    return Verdict.WATCH if z <= CULPRIT_LIMIT else Verdict.CULPRIT
