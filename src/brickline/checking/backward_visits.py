"""What is kept of one call of a module and of the backward passes through it.

`Visit` is a call, `Pass` a backward pass, `Gradients` what one of these brought to the other. Knows
nothing of how they are captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from brickline.checking.sides import Call
from brickline.checking.snapshot import RandomState


@dataclass(eq=False)
class Gradients:
    """What one backward pass brought to one call."""

    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """By the number of the tensor among the floating-point outputs."""
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """By the number of the tensor among the floating-point inputs."""
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the name of the module's own parameter."""


@dataclass(eq=False)
class Autocast:
    """Which devices' operations were cast to a lower precision, and to which."""

    dtypes: dict[str, torch.dtype]

    @classmethod
    def taken(cls) -> Autocast:
        """Return what holds now."""
        kinds = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        return cls(
            {
                kind: torch.get_autocast_dtype(kind)
                for kind in kinds
                if torch.is_autocast_enabled(kind)
            }
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """Cast in the same way as long as this lasts."""
        with ExitStack() as stack:
            for kind, dtype in self.dtypes.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            yield


@dataclass(eq=False)
class Visit:
    """One call of one module of the candidate."""

    path: str
    call: int
    position: int
    module: Any
    given: Call
    """Its arguments, as they were before it ran."""
    random: RandomState
    autocast: Autocast
    setting: Any = None
    """What was said to hold during the root's call."""
    random_after: RandomState | None = None
    returned: Any = None
    """What it returned, copied."""
    children: list[Visit] = field(default_factory=list)
    aliases: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """While it runs: the inputs that need a gradient, and how often they had been written."""
    inputs: set[int] = field(default_factory=set)
    """Numbers of the inputs that need a gradient."""
    outputs: set[int] = field(default_factory=set)
    """Numbers of the outputs that a gradient can arrive at."""
    gradients: dict[int, Gradients] = field(default_factory=dict)
    """By backward pass."""
    weights: int = 0
    """How often its weights had been written when it was called."""
    contained: tuple[int, ...] = ()
    """Tensors in lists and dictionaries of its arguments, which are not followed."""
    partial: bool = False
    """Whether there are such tensors and they need a gradient."""
    hidden: bool = False
    """Whether gradients pass by what it is called with and returns."""
    recorded: int | None = None
    """The backward pass that was itself recorded: later ones are no plain ones."""
    written: set[int] = field(default_factory=set)
    """Inputs that the call wrote over: their gradients are not seen."""

    @property
    def told(self) -> bool:
        """Whether all gradients that come out of it are among those that were noted."""
        return not (self.hidden or self.partial or self.written)


@dataclass(eq=False)
class Pass:
    """One backward pass: which calls it went through, and what parameters got in all."""

    visits: dict[int, Visit] = field(default_factory=dict)
    totals: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients of parameters, by the parameter's id."""
    whole: bool = True
    """Whether it goes to every leaf; otherwise a gradient that is missing says nothing."""
    complete: bool = False
    """Whether it came to its end."""

    def completed(self) -> None:
        """It came to its end."""
        self.complete = True
