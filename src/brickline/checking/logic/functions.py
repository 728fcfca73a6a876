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
from dataclasses import dataclass, field, replace

import torch

from brickline.checking.arbitration import Rerun
from brickline.checking.endings import trouble_of
from brickline.checking.inquiry import Inquiry
from brickline.checking.logic.carrying import (
    carried_weights,
    nudged,
    unshared_tensors,
)
from brickline.checking.logic.feeding import (
    FedModule,
    fed_modules,
    has_parts,
    has_same_modules,
)
from brickline.checking.logic.known_values import KnownValues
from brickline.checking.logic.outputs import largest_distance, outputs_of, paired
from brickline.checking.logic.searching import TINY, known_values, searched_modules
from brickline.checking.logic.wide_sides import (
    WideSide,
    candidate_side,
    carry,
    left_by,
    reference_side,
)
from brickline.checking.masks import idle_queries, is_of_transformers
from brickline.checking.snapshot import RandomState, State
from brickline.checking.state.answer import StateAnswer
from brickline.checking.state.effective import holds_codes, quantised
from brickline.checking.state.question import ask_state
from brickline.checking.state.tensors import changed_tensors
from brickline.oracle.wide_calls.state import nudge

FLOOR = 1e-12
"""Relative L2 up to which outputs are the same without further measuring."""
MARGIN = 10.0
"""How often the measured noise a difference must be to be one."""
OPEN = 8.0
"""Roundoffs by which outputs of right code differ at the most for weights that are rounded."""


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
    unexplained: str | None = None
    """What is left of the difference with all repaired that was found; None for nothing."""
    values: tuple[KnownValues, KnownValues] | None = field(default=None, repr=False, compare=False)
    """All that both sides compute, where the functions are the same and somebody asked."""

    roundoff: float = 0.0
    """The larger one of what both sides round weights to."""

    @property
    def is_open(self) -> bool:
        """Whether rounding may explain a difference that is larger than rounding should be.

        Where a weight has no counterpart, moving it by its rounding may turn a choice of experts,
        and all that follows: then right and wrong code are not told apart.
        """
        error = 0.0 if self.error is None else self.error
        return not self.differs and error > max(FLOOR, OPEN * self.roundoff)

    @property
    def limit(self) -> float:
        """The largest error of right code."""
        return max(FLOOR, MARGIN * self.noise)

    @property
    def differs(self) -> bool:
        """Whether both sides compute different functions."""
        return self.error is not None and self.error > self.limit


def same_function(rerun: Rerun, inquiry: Inquiry, *, wants_values: bool = False) -> Logic:
    """Compare one call of both sides in float64, and leave both as they are.

    Args:
        rerun: The candidate's call.
        inquiry: The reference before the same call.
        wants_values: Whether to keep all that both sides compute, where the functions are the
            same. Default False.
    """
    lost = rerun.side.lost
    if lost is not None:
        return Logic(problem=lost)
    ours, theirs = State(rerun.side.root), State(inquiry.reference.root)
    dice = RandomState()
    try:
        with _eagerly(), carried_weights(rerun.side.root, inquiry.reference.root):
            logic = _compared(rerun, inquiry, wants_values=wants_values)
    except Exception as error:
        logic = Logic(problem=f"float64 could not be asked: {trouble_of(error)}")
    finally:
        ours.restore()
        theirs.restore()
        dice.restore()
    if logic.problem is not None or logic.differs:
        rerun.side.lost = "what an earlier call left behind is not known in float64"
    return logic


def _compared(rerun: Rerun, inquiry: Inquiry, *, wants_values: bool) -> Logic:
    left = rerun.side.left, inquiry.reference.left
    passed = left[0] if inquiry.left is None else left[1]
    sides = candidate_side(rerun, left[0]), reference_side(inquiry, left[1], passed)
    if any(side.side.stage.elsewhere for side in sides):
        return Logic(problem="some modules run on other threads, where nothing can be widened")
    native = {} if rerun.left is None else rerun.left
    own = left_by(sides[1].root, (), {}, None) if inquiry.left is None else inquiry.left
    state = _state(rerun, inquiry, sides[0])
    carry(*sides, state)
    ours = outputs_of(sides[0].run(native=native))
    theirs = outputs_of(sides[1].run(native=own))
    if not paired(ours, theirs):
        return Logic(problem="the outputs of both sides have no tensors in common")
    if not any(bool(each.isfinite().any()) for each in theirs):
        return Logic(problem="no output of the reference is finite")
    idle = _idle(rerun, inquiry)
    error = largest_distance(ours, theirs, idle)
    if error <= FLOOR and not wants_values:
        return Logic(error)
    unshared = [
        _less(unshared_tensors(side.root, other.root, side.left), settled)
        for side, other, settled in zip(sides, sides[::-1], state.settled, strict=True)
    ]
    if error <= FLOOR:
        return Logic(error, values=known_values(*sides, unshared))
    noise = max(
        _moved(side, places, before)
        for side, places, before in zip(sides, unshared, (ours, theirs), strict=True)
    )
    found = Logic(error, noise, roundoff=max(map(roundoff_of, sides)))
    if not found.differs:
        return replace(found, values=known_values(*sides, unshared)) if wants_values else found
    if has_same_modules(*sides):
        return Logic(error, noise, fed_modules(*sides, max(FLOOR, MARGIN * noise), idle))
    if not has_parts(sides[0]):
        return Logic(error, noise, (FedModule("", error),))
    limit = max(FLOOR, MARGIN * noise)
    modules, unexplained = searched_modules(*sides, unshared, limit, idle)
    return Logic(error, noise, modules, unexplained=unexplained)


def roundoff_of(side: WideSide) -> float:
    """Return the roundoff of the coarsest weight of a side; float32's where it has none."""
    floating = [weight.dtype for weight in side.weights().values() if weight.is_floating_point()]
    return max((torch.finfo(dtype).eps / 2 for dtype in floating), default=2.0**-24)


def _state(rerun: Rerun, inquiry: Inquiry, candidate: WideSide) -> StateAnswer:
    """Return what is known of both sides' tensors; they are looked at once."""
    if rerun.side.state is None:
        root, reference = rerun.side.root, inquiry.reference
        kept = (
            changed_tensors(root, rerun.before),
            changed_tensors(reference.root, inquiry.state),
        )
        state = ask_state(root, reference.root, reference.given, kept=kept)
        if holds_codes(root):
            state = state.also(*quantised(candidate.tape(), reference.root, reference.given))
        rerun.side.state = state
    return rerun.side.state


def _less(unshared: dict[str, float], settled: frozenset[str]) -> dict[str, float]:
    return {name: roundoff for name, roundoff in unshared.items() if name not in settled}


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
