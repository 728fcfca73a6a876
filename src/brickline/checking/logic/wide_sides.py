"""Both sides of a check, ready to make one call in float64 again and again.

Each time from the state in which the call began, with its buffers in float64 as well: what a call
keeps is then not rounded on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from brickline.checking.arbitration import Rerun
from brickline.checking.execution.tape import Tape
from brickline.checking.execution.wide_memory import WideMemory
from brickline.checking.inquiry import Inquiry
from brickline.checking.logic.outputs import is_output
from brickline.checking.performance import Performance
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import (
    Convert,
    RandomState,
    State,
    holds_numbers,
    snapshot,
    tensors_in,
)
from brickline.checking.state.answer import StateAnswer
from brickline.checking.state.carrying import carried_values, holding
from brickline.checking.state.tensors import held_tensors
from brickline.oracle.wide_calls.state import held_wide, wide_constants
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
    left: WideMemory
    """What earlier calls of this side left behind."""
    passed: WideMemory
    """What earlier calls of the candidate left, and may be among the arguments."""
    carried: dict[str, torch.Tensor] = field(default_factory=dict)
    """What it computes with in place of its own tensors."""

    @property
    def root(self) -> Any:
        """The model, or another callable."""
        return self.side.root

    def run(
        self,
        change: Convert | None = None,
        prepared: AbstractContextManager[Any] | None = None,
        native: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """Make the call.

        Args:
            change: Applied to each floating-point tensor of the call. Default None.
            prepared: Entered after the state is restored. Default None.
            native: What the call left natively, by place; what it leaves now is remembered with
                it. Default None: nothing is.
        """
        call = self._call(change)
        performance = Performance(
            self.side.stage, wide=True, keep=False, parameters=self.side.parameters, in_steps=True
        )
        performance.starves = False  # a result that is partly narrow would prove nothing
        with self.ready(), prepared or nullcontext(), performance.performing():
            result = snapshot(self.function(call))  # it may alias what is put back now
            if native:
                self.left.note(native, left_by(self.root, call.args, call.kwargs, result))
        return result

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
            buffers = [
                f"{path}.{name}" if path else name
                for path, module in self.side.stage.modules.items()
                for name in module._buffers
            ]
            tape = Tape(self.side.stage, self.weights(), replaced, buffers)
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
        weights: dict[int, tuple[str, torch.Tensor]] = {}
        for path, module in self.side.stage.modules.items():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    weights.setdefault(id(tensor), (f"{path}.{name}" if path else name, tensor))
        return dict(weights.values())

    def _call(self, change: Convert | None) -> Call:
        """Return the call with its tensors in float64."""
        call = self.call.copied(device=self.side.device)
        for tensor in call.places().values():
            if not holds_numbers(tensor):
                continue
            if is_narrow(tensor):
                tensor.data = self.passed.widened(tensor)
            if change is not None and tensor.dtype.is_floating_point:
                tensor.copy_(change(tensor))
        return call

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Put the side into the state in which the call began, wide."""
        self.before.restore()
        self.dice.restore()
        wide = held_wide(_kept(self.root), self.left.widened)
        with torch.no_grad(), wide, holding(self.root, self.carried), wide_constants():
            yield


def left_by(root: Any, args: Any, kwargs: Any, output: Any) -> dict[str, torch.Tensor]:
    """Return the tensors that a call leaves behind, by place."""
    left = {f"argument{place}": tensor for place, tensor in tensors_in((args, dict(kwargs)))}
    left |= {f"output{place}": tensor for place, tensor in tensors_in(output)}
    for (path, place), tensor in State(root).tensors().items():
        left[f"{path}:{place}"] = tensor
    return left


def _kept(root: Any) -> list[torch.Tensor]:
    """Return the tensors that modules keep beside their parameters."""
    if not isinstance(root, torch.nn.Module):
        return []
    tensors: dict[int, torch.Tensor] = {}
    weights = {id(weight) for weight in root.parameters()}
    for module in root.modules():
        attributes = {
            name: value
            for name, value in vars(module).items()
            if name not in _OWN and not isinstance(value, torch.nn.Module)
        }
        for _, tensor in tensors_in((dict(module._buffers), attributes)):
            if id(tensor) not in weights and holds_numbers(tensor):
                tensors[id(tensor)] = tensor
    return list(tensors.values())


_OWN = frozenset(vars(torch.nn.Module()))


def candidate_side(rerun: Rerun, left: WideMemory) -> WideSide:
    """Return the candidate."""

    def function(call: Call) -> Any:
        return rerun.function(*call.args, **call.kwargs)

    return WideSide(rerun.side, rerun.call, rerun.before, rerun.dice, function, left, left)


def reference_side(inquiry: Inquiry, left: WideMemory, passed: WideMemory) -> WideSide:
    """Return the reference."""
    dice = inquiry.call.dice or RandomState()
    run = inquiry.reference.run
    return WideSide(inquiry.reference, inquiry.call, inquiry.state, dice, run, left, passed)


def carry(candidate: WideSide, reference: WideSide, answer: StateAnswer) -> None:
    """Let both sides compute with one set of weights from now on.

    What earlier calls left behind stays as they left it.
    """
    if not (answer.candidate or answer.reference or answer.effective):
        return
    left = [_left_names(side) for side in (candidate, reference)]
    with reference.ready():
        theirs = held_tensors(reference.root)
        candidate.before.restore()
        ours = held_tensors(candidate.root)
        mine = {name: each for name, each in answer.candidate.items() if name not in left[0]}
        candidate.carried.update(carried_values(ours, theirs, mine))
        ours |= candidate.carried
        others = {name: each for name, each in answer.reference.items() if name not in left[1]}
        reference.carried.update(carried_values(theirs, ours, others))
        reference.carried.update(answer.effective)


def _left_names(side: WideSide) -> set[str]:
    """Return the tensors of a side that earlier calls left."""
    side.before.restore()
    return {name for name, tensor in held_tensors(side.root).items() if side.left.knows(tensor)}
