"""What is known about one op that is held to be wrong: the tensors themselves.

Lives only while a check runs; a `Finding` keeps the figures and the words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Backward:
    """Of a gradient that is wrong: which one, and what it is made from."""

    arrived: Mapping[int, torch.Tensor]
    """The gradients at the call's outputs, by number among the floating-point ones."""
    wanted: tuple[str, Any]
    """("inputs", number) or ("parameters", name)."""
    weights: Mapping[str, torch.Tensor]
    """The module's parameters and buffers in the call."""


@dataclass
class Evidence:
    """One op or brick on its own inputs: what it made, and what it should have made."""

    name: str
    """The finding's name."""
    actual: torch.Tensor
    """What the candidate made."""
    exact: torch.Tensor
    """What float64 makes of the same inputs."""
    clean: torch.Tensor | None = None
    """What the reference makes of them in the candidate's dtype."""
    bound: torch.Tensor | None = None
    """Largest rounding error of each element, where the op's is known."""
    op: str | None = None
    inputs: Sequence[torch.Tensor] = ()
    """The tensors that went in, as they were before the call."""
    module: Callable[..., Any] | None = None
    """What the candidate called: a module or another callable."""
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Its call, as it was before it ran."""
    output_index: int = 0
    """Which of the call's output tensors `actual` is."""
    backward: Backward | None = None
    """Where `actual` is no output but a gradient."""
