"""A `Case` is one pair of models and what is known about it; `cases` yields all of them.

Knows the models, the faults and the harmless variants; not the tools that are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from localisation.drives import Run

GROUPS = (
    "same code",
    "re-ordered",
    "bf16 and outliers",
    "different code",
    "decode",
    "two faults",
    "backward",
    "callables and structures",
    "transformers",
    "harmless",
    "held out",
    "unseen drives",
    "unseen ports",
    "unseen again",
    "unseen third",
    "unseen fourth",
    "unseen fifth",
)


@dataclass(frozen=True)
class Trio:
    """The two sides, and the candidate as it would be without its faults."""

    candidate: nn.Module
    reference: nn.Module
    clean: nn.Module


@dataclass(eq=False)
class Case:
    """One pair of models; the models are made when they are first asked for."""

    name: str
    group: str
    kind: str
    """What sort of fault or variant it is."""
    regime: str
    make: Callable[[], Trio]
    run: Callable[[torch.dtype], Run]
    dtype: torch.dtype = torch.float32
    expected: str | None = None
    """Dotted path of the innermost candidate module that runs the wrong ops; None if harmless."""
    also: tuple[str, ...] = ()
    """Where further faults are, that matter less."""
    position: int | None = None
    """Number of the root's call in which the fault first acts; None if harmless."""
    direction: str = "forward"

    @property
    def harmless(self) -> bool:
        """Whether nothing is wrong."""
        return self.expected is None

    @cached_property
    def trio(self) -> Trio:
        """The models."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.make()

    @property
    def candidate(self) -> nn.Module:
        """The side that is checked."""
        return self.trio.candidate

    @property
    def reference(self) -> nn.Module:
        """The side that is right."""
        return self.trio.reference

    @cached_property
    def given(self) -> Run:
        """How the candidate is run, in its own dtype."""
        return self.run(self.dtype)

    @property
    def args(self) -> tuple[Any, ...]:
        """What the candidate is called with, where there is no drive."""
        return self.given.args

    @property
    def drive(self) -> Callable[[nn.Module], Any] | None:
        """How the candidate is driven, where one call is not enough."""
        return self.given.drive

    def forget(self) -> None:
        """Let the models go; they are made anew when asked for again."""
        self.__dict__.pop("trio", None)

    def named(self, path: str) -> str:
        """Return how a finding may be called: the root has its class's name."""
        if path or isinstance(self.candidate, nn.Module):
            return path or type(self.candidate).__name__
        return self.candidate.__name__


def cases() -> Iterator[Case]:
    """Yield every case, in the order of `GROUPS`."""
    from localisation import (
        callables,
        faults,
        harmless,
        held_out,
        hugging_face,
        structures,
        unseen_alone,
        unseen_drives,
        unseen_kernels,
        unseen_ports,
        unseen_training,
    )

    sources = (
        faults,
        callables,
        structures,
        hugging_face,
        harmless,
        held_out,
        unseen_drives,
        unseen_kernels,
        unseen_training,
        unseen_alone,
        unseen_ports,
    )
    made = [case for each in sources for case in each.cases()]
    names = [each.name for each in made]
    assert len(names) == len(set(names)), "two cases have one name"
    for group in GROUPS:
        yield from (each for each in made if each.group == group)
