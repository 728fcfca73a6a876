"""Does one call of the candidate compute what the reference computes?

Both sides make the call in float64, where two right implementations agree to the last digits and
two different functions do not. How far right ones may differ is measured, by moving what the sides
do not share, and every input, by its own rounding. Where the modules have the same names, each of
them is then fed what its counterpart was given: one that puts out something else, though all that
it calls does not, computes another function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from brickline.checking.arbitration import Rerun
from brickline.checking.endings import trouble_of
from brickline.checking.inquiry import Inquiry
from brickline.checking.logic.carrying import (
    carried_weights,
    is_equal,
    is_rounded,
    nudged,
    plain_name,
    unshared_tensors,
)
from brickline.checking.logic.feeding import (
    FedModule,
    fed_modules,
    has_parts,
    has_same_modules,
)
from brickline.checking.logic.outputs import largest_distance, outputs_of, paired
from brickline.checking.logic.wide_sides import WideSide, candidate_side, reference_side
from brickline.checking.masks import idle_queries, is_of_transformers
from brickline.checking.sides import Side
from brickline.checking.snapshot import RandomState, State
from brickline.oracle.wide_calls.state import nudge

FLOOR = 1e-12
"""Relative L2 up to which outputs are the same without further measuring."""
MARGIN = 10.0
"""How often the measured noise a difference must be to be one."""
Place = tuple[str, str]
"""Path of a module, and a place in what it keeps."""
TINY = 2.0**-52
"""By how much inputs are moved: float64's own rounding."""


@dataclass(frozen=True)
class Logic:
    """What float64 says of one call."""

    error: float | None = None
    """Relative L2 of the outputs; infinite where other elements are not finite."""
    noise: float = 0.0
    """The same of right code, measured; 0 where it was not asked for."""
    modules: tuple[FedModule, ...] = ()
    """Modules of the candidate that put out something else when fed what the reference's were."""
    problem: str | None = None
    """Why nothing can be said."""

    @property
    def differs(self) -> bool:
        """Whether both sides compute different functions."""
        return self.error is not None and self.error > max(FLOOR, MARGIN * self.noise)


def same_function(rerun: Rerun, inquiry: Inquiry) -> Logic:
    """Compare one call of both sides in float64, and leave both as they are.

    Args:
        rerun: The candidate's call.
        inquiry: The reference before the same call.
    """
    if not _began_alike(rerun.side, rerun.before, inquiry.reference, inquiry.state):
        return Logic(problem="what both sides kept of earlier calls differs by rounding")
    ours, theirs = State(rerun.side.root), State(inquiry.reference.root)
    dice = RandomState()
    try:
        with _eagerly(), carried_weights(rerun.side.root, inquiry.reference.root):
            return _compared(rerun, inquiry)
    except Exception as error:
        return Logic(problem=f"float64 could not be asked: {trouble_of(error)}")
    finally:
        ours.restore()
        theirs.restore()
        dice.restore()


def _began_alike(ours: Side, before: State, theirs: Side, state: State) -> bool:
    """Return whether what both sides keep of earlier calls is the same, up to one rounding."""
    if ours.first is None or theirs.first is None:
        ours.first, theirs.first = before, state
        return True
    kept = _changed(ours.first, before) | _changed(theirs.first, state)
    one, two = _tensors(before), _tensors(state)
    return all(
        place in one
        and place in two
        and (is_equal(one[place], two[place]) or is_rounded(one[place], two[place]))
        for place in kept
    )


def _changed(first: State, now: State) -> set[Place]:
    before, after = _tensors(first), _tensors(now)
    return {
        place
        for place in before.keys() | after.keys()
        if place not in before or place not in after or not is_equal(before[place], after[place])
    }


def _tensors(state: State) -> dict[Place, torch.Tensor]:
    return {(plain_name(path), name): each for (path, name), each in state.tensors().items()}


def _compared(rerun: Rerun, inquiry: Inquiry) -> Logic:
    sides = candidate_side(rerun), reference_side(inquiry)
    if any(side.side.stage.elsewhere for side in sides):
        return Logic(problem="some modules run on other threads, where nothing can be widened")
    ours, theirs = (outputs_of(side.run()) for side in sides)
    if not paired(ours, theirs):
        return Logic(problem="the outputs of both sides have no tensors in common")
    if not any(bool(each.isfinite().any()) for each in theirs):
        return Logic(problem="no output of the reference is finite")
    idle = _idle(rerun, inquiry)
    error = largest_distance(ours, theirs, idle)
    if error <= FLOOR:
        return Logic(error)
    known = inquiry.candidate.weights
    unshared = (
        unshared_tensors(side.root, other.root, known, which)
        for which, (side, other) in enumerate(zip(sides, sides[::-1], strict=True))
    )
    noise = max(
        _moved(side, places, before)
        for side, places, before in zip(sides, unshared, (ours, theirs), strict=True)
    )
    found = Logic(error, noise)
    if not found.differs:
        return found
    if has_same_modules(*sides):
        return Logic(error, noise, fed_modules(*sides, max(FLOOR, MARGIN * noise), idle))
    return found if has_parts(sides[0]) else Logic(error, noise, (FedModule("", error),))


def _idle(rerun: Rerun, inquiry: Inquiry) -> torch.Tensor | None:
    """Return which queries may look at nothing and have no answer, where a mask says so."""
    roots = rerun.side.root, inquiry.reference.root
    if not any(is_of_transformers(root) for root in roots):
        return None
    return idle_queries(rerun.call.args, rerun.call.kwargs)


@contextmanager
def _eagerly() -> Iterator[None]:
    """Run compiled code as it was written."""
    with torch.compiler.set_stance("force_eager"):
        yield


def _moved(side: WideSide, places: dict[str, float], before: list[torch.Tensor]) -> float:
    """Return how far the outputs of one side move with what rounding may have moved."""
    generator = torch.Generator().manual_seed(0)
    after = side.run(
        lambda tensor: nudge(tensor, TINY, generator),
        prepared=nudged(side.root, places, generator),
    )
    return largest_distance(outputs_of(after), before)
