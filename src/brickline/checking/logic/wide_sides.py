"""Both sides of a check, ready to make one call in float64 again and again.

Each time from the state in which the call began, with its buffers in float64 as well: what a call
keeps is then not rounded on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from brickline.checking.arbitration import Rerun
from brickline.checking.execution.tape import Tape
from brickline.checking.inquiry import Inquiry
from brickline.checking.logic.outputs import is_output
from brickline.checking.performance import Performance
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import Convert, RandomState, State, snapshot, tensors_in
from brickline.oracle.widen import is_narrow


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
        call = self._call(change)
        performance = Performance(
            self.side.stage, wide=True, keep=False, parameters=self.side.parameters, in_steps=True
        )
        performance.starves = False  # a result that is partly narrow would prove nothing
        with self.ready(), prepared or nullcontext(), performance.performing():
            return snapshot(self.function(call))  # it may alias what is put back now

    def tape(
        self,
        change: Convert | None = None,
        prepared: AbstractContextManager[Any] | None = None,
        replaced: Mapping[int, np.ndarray] | None = None,
    ) -> Tape:
        """Make the call and return all that it computes.

        Args:
            change: Applied to each floating-point tensor of the call. Default None.
            prepared: Entered after the state is restored. Default None.
            replaced: Elements that take the place of a value's, by its index. Default None.
        """
        call = self._call(change)
        math = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        with self.ready(), prepared or nullcontext(), math:
            tape = Tape(self.side.stage, self.weights(), replaced)
            for name, tensor in call.places().items():
                tape.argument(name, tensor)
            with tape.noting():
                output = self.function(call)
            tensors = [tensor for _, tensor in tensors_in(output)]
            tape.returned([each for each in tensors if is_output(each)])
            tape.forget_tensors()
        return tape

    def weights(self) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name."""
        weights: dict[str, torch.Tensor] = {}
        for path, module in self.side.stage.modules.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    weights[f"{path}.{name}" if path else name] = tensor
        return weights

    def _call(self, change: Convert | None) -> Call:
        """Return the call with its tensors in float64."""
        call = self.call.copied(device=self.side.device, wide=True)
        if change is not None:
            for tensor in call.places().values():
                if tensor.dtype.is_floating_point:
                    tensor.copy_(change(tensor))
        return call

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Put the side into the state in which the call began, wide."""
        self.before.restore()
        self.dice.restore()
        buffers = self.root.buffers() if isinstance(self.root, torch.nn.Module) else ()
        with torch.no_grad(), held_wide(buffers), _wide_constants():
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


@contextmanager
def held_wide(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Hold the floating-point ones among some tensors in float64 as long as this lasts."""
    kept = [(tensor, tensor.data) for tensor in tensors if is_narrow(tensor)]
    try:
        for tensor, data in kept:
            tensor.data = data.double()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


@contextmanager
def _wide_constants() -> Iterator[None]:
    """Make constants, and quotients of integers, in float64 as long as this lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
