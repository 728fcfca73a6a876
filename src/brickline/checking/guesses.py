"""A guess at a cause, and the case it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from brickline.checking.evidence import Evidence
from brickline.checking.residual import Residual


@dataclass(frozen=True)
class Guess:
    """One cause that explains what an op made."""

    signature: str
    """Short name of the cause, the same for all its wordings."""
    cause: str
    """What happened, in words."""
    left: float = 0.0
    """Mean square of what it leaves unexplained, in units of rounding."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What was measured."""


@dataclass(frozen=True)
class Case:
    """What a signature looks at."""

    evidence: Evidence
    residual: Residual

    @property
    def shape(self) -> torch.Size:
        """Of the output."""
        return self.residual.exact.shape

    @property
    def kind(self) -> str:
        """Name of the op and of the module's class, in lower case, to look words up in."""
        module = self.evidence.module
        return f"{self.evidence.op or ''} {type(module).__name__} {self.evidence.name}".lower()

    @cached_property
    def wrong_count(self) -> int:
        """How many elements are wrong; all of them where the error is small and everywhere."""
        residual = self.residual
        count = int(residual.wrong.sum())
        return residual.exact.numel() if residual.energy > 2 and not count else count

    def guess(
        self, signature: str, cause: str, output: torch.Tensor, *, numbers: int = 0, **facts: Any
    ) -> Guess | None:
        """Return the guess if its output explains the actual one.

        Args:
            signature: Short name of the cause.
            cause: The cause in words.
            output: What the op would have made.
            numbers: How many numbers were fitted; so much more has to be wrong.
            facts: What was measured.
        """
        if self.wrong_count < 4 + 4 * numbers:
            return None
        left = self.residual.left(output)
        return None if left is None else Guess(signature, cause, left, facts)


def best(guesses: list[Guess | None]) -> list[Guess]:
    """Return the guess of a family that leaves least, as a list of one or none."""
    found = [each for each in guesses if each is not None]
    return [min(found, key=lambda each: each.left)] if found else []
