"""Both sides of a check, ready to make one call in float64 again and again.

Each time from the state in which the call began, with its buffers in float64 as well: what a call
keeps is then not rounded on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from brickline.checking.arbitration import Rerun
from brickline.checking.inquiry import Inquiry
from brickline.checking.performance import Performance
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import Convert, RandomState, State, snapshot
from brickline.oracle.wide_calls.state import held_wide, wide_constants


@dataclass(frozen=True)
class WideSide:
    """One side before one call."""

    side: Side
    call: Call
    before: State
    dice: RandomState
    function: Callable[[Call], Any]
    """Makes the call."""

    @property
    def root(self) -> Any:
        """The model, or another callable."""
        return self.side.root

    def run(
        self,
        change: Convert | None = None,
        prepared: AbstractContextManager[Any] | None = None,
    ) -> Any:
        """Make the call.

        Args:
            change: Applied to each floating-point tensor of the call. Default None.
            prepared: Entered after the state is restored. Default None.
        """
        call = self.call.copied(device=self.side.device, wide=True)
        if change is not None:
            for tensor in call.places().values():
                if tensor.dtype.is_floating_point:
                    tensor.copy_(change(tensor))
        performance = Performance(
            self.side.stage, wide=True, keep=False, parameters=self.side.parameters, in_steps=True
        )
        performance.starves = False  # a result that is partly narrow would prove nothing
        with self.ready(), prepared or nullcontext(), performance.performing():
            return snapshot(self.function(call))  # it may alias what is put back now

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Put the side into the state in which the call began, wide."""
        self.before.restore()
        self.dice.restore()
        buffers = self.root.buffers() if isinstance(self.root, torch.nn.Module) else ()
        with torch.no_grad(), held_wide(buffers), wide_constants():
            yield


def candidate_side(rerun: Rerun) -> WideSide:
    """Return the candidate."""

    def function(call: Call) -> Any:
        return rerun.function(*call.args, **call.kwargs)

    return WideSide(rerun.side, rerun.call, rerun.before, rerun.dice, function)


def reference_side(inquiry: Inquiry) -> WideSide:
    """Return the reference."""
    dice = inquiry.call.dice or RandomState()
    return WideSide(inquiry.reference, inquiry.call, inquiry.state, dice, inquiry.reference.run)
