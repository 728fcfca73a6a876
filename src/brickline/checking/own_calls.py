"""The calls that a drive makes of the reference, where it does not take the candidate's.

A cache of one side's own class is an argument that the other side cannot read. Then the drive runs
the reference, too, and the calls are compared one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from brickline.checking.logic.wide_sides import left_by
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import RandomState, State, snapshot


@dataclass(frozen=True)
class OwnCall:
    """One call of the reference, as a drive makes it."""

    call: Call
    before: State
    left: Mapping[str, torch.Tensor]
    """What it left behind, by place."""


def own_calls(reference: Side, drive: Callable[[Any], Any]) -> list[OwnCall]:
    """Drive the reference from the state that it is in, and return its calls; it is put back."""
    root = reference.root
    before, dice = State(root), RandomState()
    calls: list[OwnCall] = []

    def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call, state = Call.taken(args, kwargs), State(root)
        output = function(*args, **kwargs)
        calls.append(OwnCall(call, state, snapshot(left_by(root, args, kwargs, output))))
        return output

    try:
        with torch.no_grad():
            if not isinstance(root, torch.nn.Module):
                drive(functools.partial(called, root))
                return calls
            had = root.__dict__.get("forward")
            root.__dict__["forward"] = functools.partial(called, root.forward)
            try:
                drive(root)
            finally:
                if had is None:
                    root.__dict__.pop("forward", None)
                else:
                    root.__dict__["forward"] = had
        return calls
    finally:
        before.restore()
        dice.restore()


def has_other_inputs(ours: Call, theirs: Call) -> bool:
    """Return whether two calls are given other whole numbers in the same places, such as tokens."""
    mine, other = ours.places(), theirs.places()
    return any(
        not tensor.dtype.is_floating_point
        and place in other
        and (
            other[place].shape != tensor.shape
            or not torch.equal(other[place].to(tensor.device), tensor)
        )
        for place, tensor in mine.items()
    )
