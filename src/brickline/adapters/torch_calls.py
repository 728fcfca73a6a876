"""Calls of modules that are under way: where in the run they are, and what is known of them so far.

Plain records, which the recorder fills. Knows nothing of how calls are watched or written.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from brickline.adapters.torch_sites import Site


class Place:
    """One call of a root: its position, and how often each name occurred in it."""

    __slots__ = ("ordinals", "phase", "position", "step", "thread")

    def __init__(self, position: int) -> None:
        self.position = position
        self.ordinals: dict[str, int] = {}
        self.step = self.phase = 0
        """As the profiler counts them."""
        self.thread = 0


class Root:
    """A recorded model."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model = model
        self.name = name
        self.calls = count()
        self.latest = Place(0)
        self.keys: list[Any] = []


class Call:
    """A module's call that is under way."""

    __slots__ = (
        "enters",
        "gradients",
        "inputs",
        "is_outermost",
        "is_whole",
        "is_written",
        "known",
        "operands",
        "ordinal",
        "parent",
        "place",
        "site",
        "start_ns",
        "step",
        "trace",
    )

    def __init__(self, site: Site, place: Place, parent: int) -> None:
        self.site = site
        self.place = place
        self.parent = parent
        self.trace = parent  # its own number, where it is recorded
        self.ordinal = 0
        self.operands: list[bytes] = []
        """Pieces of its operands' rows."""
        self.inputs: list[Tensor] = []
        self.known: list[bytes] = []
        """Rows of its inputs and then of its own tensors, without the trace."""
        self.gradients: Any = None
        self.start_ns = 0
        self.step: Any = None
        self.enters = False
        self.is_outermost = False
        """Whether a step of the run begins with it."""
        self.is_whole = True
        """Whether all its tensors could be looked at."""
        self.is_written = False


class ThreadState(threading.local):
    """The calls that one thread has open."""

    def __init__(self) -> None:
        self.stack: list[Call] = []
        self.places: dict[int, Place] = {}
        self.observing = False
        self.replaying = False
        """Whether a call is made again: its modules are heard of elsewhere."""


def tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> tuple[int, str]:
    """Return how many tokens a call of a model processes, and its phase.

    The first tensor of integers with a dimension is taken for token ids: one to a row is decoding.
    A model without one has neither.
    """
    for value in (*args, *(kwargs or {}).values()):
        if isinstance(value, Tensor) and value.dim() and value.dtype in (torch.int64, torch.int32):
            return value.numel(), "decode" if value.shape[-1] == 1 else "prefill"
    return 0, "forward"
