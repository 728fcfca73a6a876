"""Rounding or not: the second look at values that the ratios hold to be wrong.

The candidate runs again from the state that it had. Three questions are asked of each suspicious
value. Is it the same again? Does the candidate's own program, executed in float64, give what the
reference gives (then its logic is right)? Is each of its operations within the rounding bound of
that operation in the dtype it works in (then its arithmetic is right)? Right logic and right
arithmetic that differ from the reference are another way to round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from brickline.checking.accusing import accused_values
from brickline.checking.blaming import blame
from brickline.checking.facts import CULPRIT_LIMIT, Fact
from brickline.checking.pairing import Pairing, is_boundary, precision
from brickline.checking.performance import Performance
from brickline.checking.recording import Operation, Recording, Value
from brickline.checking.segments import Segment, modules_of, origin_of, segments_of, writers_of
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import RandomState, State
from brickline.checking.stage import ARGUMENT, Key
from brickline.oracle.bounds import op_bound
from brickline.oracle.calls import Call as OpCall
from brickline.oracle.calls import NoExactForm
from brickline.oracle.ratios import Ratios, measure
from brickline.oracle.widen import unit_roundoff, written_arguments
from brickline.verdict import Verdict

SOMEWHERE = "something is wrong"
"""How a line begins that names several modules or none."""
EXCUSED_ULPS = 8.0
"""Another way to round is not excused beyond this many unit roundoffs of relative error…"""
EXCUSED_RATIO = 4.0
"""…unless the error is at most this often the reference's own."""
ALIKE = 0.01
"""Two errors of one value are the same up to this part of them."""
MOST_TOLD = 4
"""So many modules are told of those of which one is wrong."""


@dataclass
class Rerun:
    """The candidate's call, ready to be made again."""

    function: Callable[..., Any]
    side: Side
    call: Call
    before: State
    dice: RandomState
    left: Mapping[str, torch.Tensor] | None = None
    """What the call left behind natively, by place."""

    def perform(
        self,
        *,
        wide: bool = False,
        keep: bool = False,
        listener: Callable[[Value, Operation | None], torch.Tensor | None] | None = None,
    ) -> Recording:
        """Make the call again from the state in which it was made."""
        self.before.restore()
        self.dice.restore()
        wide = wide and not self.side.stage.elsewhere
        performance = Performance(
            self.side.stage,
            wide=wide,
            keep=keep,
            views=keep,
            listener=listener,
            parameters=self.side.parameters,
        )
        ready = self.call.copied(wide=wide)
        with torch.no_grad(), performance.performing():
            output = self.function(*ready.args, **ready.kwargs)
            replaced = performance.returned("", 0, output)
            performance.recording.output = output if replaced is None else replaced
        return performance.recording


class _Logic:
    """Listener: the candidate in float64 from the pairs on."""

    def __init__(self, recording: Recording, compared: set[Key], wanted: set[Key]) -> None:
        self.found: dict[Key, torch.Tensor] = {}
        self._recording = recording
        self._compared = compared
        self._wanted = wanted

    def __call__(self, value: Value, operation: Operation | None) -> torch.Tensor | None:
        if value.key in self._wanted:
            self.found[value.key] = value.tensor.clone()
        if value.key not in self._compared:
            return None
        kept = self._recording.by_key.get(value.key)
        if kept is None or kept.tensor.shape != value.tensor.shape:
            return None
        return torch.empty_like(value.tensor).copy_(kept.tensor)


class _Again:
    """Listener: the candidate once more, and each of its operations against its own bound."""

    def __init__(self, wanted: set[Key], held: set[Key]) -> None:
        self.found: dict[Key, torch.Tensor] = {}
        self.worst: dict[Key, float] = {}
        self._wanted = wanted
        self._held = held

    def __call__(self, value: Value, operation: Operation | None) -> None:
        if value.key in self._wanted:
            self.found[value.key] = value.tensor.clone()
        if value.key in self._held and operation is not None and not value.view:
            self.worst[value.key] = _arithmetic_ratio(value.tensor, value.key.out, operation)


def _arithmetic_ratio(made: torch.Tensor, number: int, operation: Operation) -> float:
    """Return the error of one operation to its rounding bound; 0 where no bound is known."""
    if not made.dtype.is_floating_point or written_arguments(operation.func):
        return 0.0
    call = OpCall(operation.func, operation.args, operation.kwargs)
    try:
        exact = call.exact()
        known = op_bound(call.func, call.args, call.kwargs, exact)
    except (NoExactForm, RuntimeError):
        return 0.0
    if known is None or number >= len(known.outputs):
        return 0.0
    limit, right = known.outputs[number], exact[number]
    if limit is None or right is None:
        return 0.0
    return measure(made, right, bound=limit.element).element


def arbitrate(
    facts: list[Fact],
    recording: Recording,
    pairing: Pairing,
    rerun: Rerun,
    work: torch.dtype,
) -> list[Fact]:
    """Settle the verdict of every suspicious fact and return those that stay guilty.

    Args:
        facts: All that was measured at one call.
        recording: The candidate's values.
        pairing: What they were held against.
        rerun: The candidate's call, ready to be made again.
        work: The dtype that the candidate works in; rounding to it is always allowed.
    """
    doubtful = [each for each in facts if each.suspicious]
    order = [
        (each.key, each.reference_key, each.part is None or each.part.columns is None)
        for each in facts
    ]
    ways = [segment for _, segment in segments_of(recording, order)]
    segments = {
        id(fact): way.values for fact, way in zip(facts, ways, strict=True) if fact.suspicious
    }
    working = accused_values(facts, ways, recording)
    wanted = {each.key for each in doubtful}
    held = {value.key for each in segments.values() for value in each}
    again = _Again(wanted, held)
    _performed(rerun, again)
    logic = _Logic(recording, _forced(recording, pairing, wanted), wanted)
    wide = _performed(rerun, logic, wide=True)
    guilty = []
    repeated = _repeated(facts, ways, recording)
    for fact in doubtful:
        accused = working[id(fact)]
        fact.modules = modules_of(accused, pairing.strangers, recording.constants)
        if not _repeats(fact, again):
            fact.verdict = Verdict.NONDETERMINISTIC
        elif wide and _is_rounding(fact, segments[id(fact)], logic, again, work):
            fact.verdict = Verdict.ROUNDING
        elif id(fact) in repeated:
            fact.verdict = Verdict.PROPAGATED
        else:
            fact.verdict = Verdict.CULPRIT
            guilty.append(fact)
    ask_the_writers(guilty, recording)
    blame(guilty, recording)
    return guilty


def ask_the_writers(guilty: list[Fact], recording: Recording) -> None:
    """Blame a wrong argument of the call on who wrote to it, where that is known."""
    named = [path for each in guilty if not _is_written(each) for path in each.modules]
    accused = [path for path in dict.fromkeys(named) if path]
    for fact in guilty:
        if not _is_written(fact) or fact.modules != ("",):
            continue
        writers = writers_of(recording, recording.by_key[fact.key])
        known = tuple(each for each in accused if any(_lies_in(path, each) for path in writers))
        if known or len(writers) == 1:
            fact.modules = known or writers


def _lies_in(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}.")


def _is_written(fact: Fact) -> bool:
    return fact.key.op.startswith(ARGUMENT)


def _repeated(facts: list[Fact], ways: Sequence[Segment], recording: Recording) -> set[int]:
    """Return the wrong facts, by `id`, about a value that was as wrong where it was handed on."""
    seen: dict[int, float] = {}
    found: set[int] = set()
    for fact, way in zip(facts, ways, strict=True):
        if not fact.suspicious:
            continue
        error = fact.ratios.relative_l2
        origin = origin_of(recording, recording.by_key[fact.key]).index
        if way.again and abs(seen.get(origin, 0.0) - error) <= ALIKE * error:
            found.add(id(fact))
        seen.setdefault(origin, error)
    return found


def leave_open(fact: Fact, display: Callable[[str], str]) -> None:
    """Say that something is wrong, and that it was not found out in which module."""
    names = [display(each) for each in fact.modules]
    told = ", ".join(names[:MOST_TOLD]) + (", …" if len(names) > MOST_TOLD else "")
    fact.verdict = Verdict.UNKNOWN
    fact.notes["reason"] = (
        f"{SOMEWHERE} in one of {told}; what lies between them could not be aligned"
        if len(names) > 1
        else f"{told} looks wrong, and repairing it changes little"
    )


def _forced(recording: Recording, pairing: Pairing, wanted: set[Key]) -> set[Key]:
    """Return the compared values, less those that are a wanted one before a boundary."""
    last: dict[int, int] = {}
    for key in wanted:
        value = recording.by_key[key]
        origin = origin_of(recording, value).index
        last[origin] = max(last.get(origin, 0), value.index)
    found: set[Key] = set()
    for key in pairing.candidate_keys():
        made = recording.by_key.get(key)
        if made is None:
            continue
        if made.index >= last.get(origin_of(recording, made).index, 0):
            found.add(key)
    return found


def _performed(rerun: Rerun, listener: Any, *, wide: bool = False) -> bool:
    """Run the candidate again; False where it cannot be run so."""
    try:
        rerun.perform(wide=wide, listener=listener)
    except Exception:
        return False
    return True


def _repeats(fact: Fact, again: _Again) -> bool:
    """Whether a second execution of the candidate is as wrong."""
    second = again.found.get(fact.key)
    if second is None or fact.actual is None or fact.exact is None:
        return True
    if fact.part is not None:
        second = fact.part.ours(second, fact.exact.shape)
    if second is None:
        return True
    if second.shape != fact.exact.shape or torch.equal(second, fact.actual):
        return True
    return measure(second, fact.exact, clean=fact.clean).z > CULPRIT_LIMIT


def _is_rounding(
    fact: Fact, segment: list[Value], logic: _Logic, again: _Again, work: torch.dtype
) -> bool:
    made, exact = logic.found.get(fact.key), fact.exact
    if made is None or exact is None or fact.part is None:
        return False
    ours = fact.part.ours(made, exact.shape)
    if ours is None or ours.shape != exact.shape:
        return False
    if fact.ratios.nonfinite or not fact.dtype.is_floating_point:
        return False
    if any(value.custom for value in segment) or _is_coarse(fact, segment, work):
        return False
    coarse = max((fact.dtype, work), key=unit_roundoff)
    same = _is_same_logic(measure(ours, exact, dtype=coarse), fact, coarse)
    if not same:
        return False
    worst = max((again.worst.get(value.key, 0.0) for value in segment), default=0.0)
    if worst > CULPRIT_LIMIT:
        return False
    small = fact.ratios.relative_l2 <= EXCUSED_ULPS * unit_roundoff(coarse)
    return small or fact.ratios.rmse <= EXCUSED_RATIO


def _is_same_logic(apart: Ratios, fact: Fact, coarse: torch.dtype) -> bool:
    """Whether two programs in float64 give the same, but for weights that one has made before.

    Such a weight is rounded once; small elements of what it makes may then be far apart, though
    all of them together differ by less than rounding.
    """
    if apart.z <= 1:
        return True
    together = apart.relative_l2 <= unit_roundoff(coarse) and apart.rmse <= 1
    return together and fact.ratios.z <= EXCUSED_RATIO


def _is_coarse(fact: Fact, segment: list[Value], work: torch.dtype) -> bool:
    """Whether something in the segment was kept more coarsely than what comes out and goes in."""
    fine = min(precision(fact.dtype if fact.clean is None else fact.clean.dtype), precision(work))
    return any(
        value.narrowest is not None and precision(value.narrowest) < fine for value in segment
    )


def unstable_values(recording: Recording, rerun: Rerun) -> int:
    """Run the candidate against itself; return how many values are not the same again."""
    count = 0

    def listener(value: Value, operation: Operation | None) -> None:
        nonlocal count
        kept = recording.by_key.get(value.key)
        if kept is None or kept.tensor.shape != value.tensor.shape or not is_boundary(value.key):
            return
        if not torch.equal(kept.tensor, value.tensor):
            count += not torch.equal(kept.tensor.nan_to_num(), value.tensor.nan_to_num())

    _performed(rerun, listener)
    return count
