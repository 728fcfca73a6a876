"""What is known of one case of a sealed set. Knows no tool that is scored on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Pair:
    """The two sides of a case, and what both are called with."""

    candidate: nn.Module
    reference: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    drive: Callable[[nn.Module], Any] | None = None
    """Runs either side, where one call is not enough; takes the place of the arguments."""


@dataclass(frozen=True)
class Case:
    """One pair of models, with at most one fault in the candidate."""

    name: str
    """``architecture.fault/dtype``, unique in its set."""
    architecture: str
    make: Callable[[], Pair]
    """Builds both sides anew; deterministic."""
    dtype: torch.dtype = torch.float32
    """Of the candidate's weights; the reference may be wider."""
    expected: tuple[str, ...] = ()
    """Dotted path of the candidate's module that runs the wrong operation or holds the wrong
    weight. More than one only where an expert would accept each; empty: nothing is wrong."""
    cause: str = ""
    """What is wrong, in a few words; empty: nothing is."""
    precision: bool = False
    """Whether only precision is lost: in float64 both sides compute the same."""
    trained: bool = False
    """Whether the weights are trained ones."""

    @property
    def harmless(self) -> bool:
        """Whether nothing is wrong."""
        return not self.expected
