"""The reference on the candidate's own inputs.

The reference runs once more, and wherever one of its values has a partner it is compared and then
replaced by it, so that everything that follows starts from what the candidate had. What is left
at each pair is the error made between it and the pairs before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from brickline.checking.ends import tensors_in_objects, unshown_elements
from brickline.checking.facts import CULPRIT_LIMIT, Fact, verdict_of
from brickline.checking.masks import without_idle
from brickline.checking.pairing import Pairing, Part
from brickline.checking.performance import Performance
from brickline.checking.recording import Operation, Recording, Value
from brickline.checking.sides import Call, Side
from brickline.checking.snapshot import holds_numbers
from brickline.checking.stage import Key
from brickline.oracle.ratios import Ratios, measure
from brickline.oracle.widen import is_out_of_memory
from brickline.verdict import Verdict

SAME = Ratios(0.0, 0.0, 0.0, 0.0, 0.0, 0)
STARVED = "memory ran out in float64"
"""Why a value was not held to anything."""


def perform(
    side: Side,
    call: Call,
    *,
    wide: bool = False,
    keep: bool = True,
    views: bool = False,
    listener: Callable[[Value, Operation | None], torch.Tensor | None] | None = None,
) -> Recording:
    """Execute a side once on a copy of a call, and return what it made.

    Operations on other threads cannot be widened; such a side stays in its own dtype.
    """
    wide = wide and not side.stage.elsewhere
    performance = Performance(
        side.stage,
        wide=wide,
        keep=keep,
        views=views,
        listener=listener,
        parameters=side.parameters,
        in_steps=True,
    )
    ready = call.copied(device=side.device, wide=wide)
    if call.dice is not None:
        call.dice.restore()
    with torch.no_grad(), performance.performing():
        output = side.run(ready)
        replaced = performance.returned("", 0, output)
        performance.recording.output = output if replaced is None else replaced
        objects_returned(performance, output, ready)
        arguments_written(performance, call, ready)
    return performance.recording


def objects_returned(performance: Performance, output: Any, call: Call) -> None:
    """Note the tensors inside objects that the root returns, but for those of its arguments."""
    given = {id(each) for each in call.places().values()}
    for place, tensor in tensors_in_objects(output):
        if id(tensor) not in given and holds_numbers(tensor):
            performance.note_written(place, tensor)


def arguments_written(performance: Performance, before: Call, after: Call) -> None:
    """Note the tensors of a call that it has changed, as values that the root returns."""
    earlier = before.places()
    changed = {}
    for place, tensor in after.places().items():
        if not holds_numbers(tensor):
            continue
        kept = earlier.get(place)
        if kept is None or kept.shape != tensor.shape or not _same_contents(kept, tensor):
            changed[place] = tensor
    for place, tensor in changed.items():
        performance.note_written(place, tensor)


def _same_contents(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not torch.strided or b.layout is not torch.strided or a.is_meta:
        return True
    if a.device != b.device or a.dtype != b.dtype:
        b = b.to(a.device, a.dtype)
    return bool(torch.equal(a, b) or torch.equal(a.nan_to_num(), b.nan_to_num()))


class Clean:
    """Listener of the pass in the candidate's dtype: keeps what the reference makes."""

    def __init__(self, pairing: Pairing, candidate: Recording) -> None:
        self.values: dict[Key, torch.Tensor] = {}
        self._pairing = pairing
        self._candidate = candidate

    def __call__(self, value: Value, operation: Operation | None) -> torch.Tensor | None:
        """Keep what the reference made and go on with what the candidate had."""
        pieces = self._pairing.pieces(value, self._candidate)
        if not pieces:
            return None
        ours = pieces[0][1]
        whole = pieces[0][0].place is None and ours.dtype == value.tensor.dtype
        if whole and ours.device == value.tensor.device and torch.equal(ours, value.tensor):
            # What is the same is kept once.
            self.values[value.key] = ours
        else:
            self.values[value.key] = value.tensor.clone()
        return in_place_of(value.tensor, pieces)

    def is_near(self, key: Key, near: float) -> bool:
        """Whether what the reference made is what the candidate had, up to a relative L2."""
        made = self.values.get(key)
        if made is None or not made.dtype.is_floating_point:
            return made is not None
        return all(
            bool(
                (ours.to(made.device).double() - part.theirs(made).double()).norm()
                <= near * part.theirs(made).double().norm()
            )
            for part, ours in self._pairing.pieces(Value(-1, key, made), self._candidate)
        )


class Exact:
    """Listener of the pass in float64: measures, then goes on with the candidate's value."""

    def __init__(
        self,
        pairing: Pairing,
        candidate: Recording,
        clean: dict[Key, torch.Tensor],
        keep_above: float = 1.0,
        idle: torch.Tensor | None = None,
    ) -> None:
        self.facts: list[Fact] = []
        self.excused = 0
        """Values that differ in the answers of idle queries alone."""
        self._idle = idle
        self._pairing = pairing
        self._candidate = candidate
        self._clean = clean
        self._keep_above = keep_above

    def __call__(self, value: Value, operation: Operation | None) -> torch.Tensor | None:
        """Measure what the candidate had and go on with it."""
        pieces = self._pairing.pieces(value, self._candidate)
        if not pieces:
            return None
        for part, ours in pieces:
            self.facts.append(self._fact(value, part, ours))
        return in_place_of(value.tensor, pieces)

    def measured(self) -> list[Fact]:
        """Return all facts in the order of the pass in the candidate's dtype.

        What came up there only, because float64 took another way, is held against what it was.
        """
        order = {key: number for number, key in enumerate(self._clean)}
        seen = {each.reference_key for each in self.facts}
        for key, right in self._clean.items():
            if key in seen:
                continue
            value = Value(-1, key, right)
            for part, ours in self._pairing.pieces(value, self._candidate):
                self.facts.append(self._fact(value, part, ours))
        return sorted(self.facts, key=lambda each: order.get(each.reference_key, len(order)))

    def _fact(self, value: Value, part: Part, ours: torch.Tensor) -> Fact:
        clean = self._clean.get(value.key)
        exact = part.theirs(value.tensor)
        kind = ours.dtype
        if clean is not None:
            clean = part.theirs(clean) if clean.shape == value.tensor.shape else None
        if clean is not None and clean.dtype == kind and _same_bits(ours, clean):
            shape = tuple(ours.shape)
            return Fact(part.key, value.key, SAME, Verdict.IDENTICAL, kind, shape, part=part)
        ratios = None if value.starved else _measured(ours, exact, clean)
        if ratios is None:
            return self._starved(value, part, ours)
        if ratios.z > CULPRIT_LIMIT:
            ratios = self._without_idle(ours, exact, clean) or ratios
        fact = Fact(part.key, value.key, ratios, verdict_of(ratios.z), kind, tuple(ours.shape))
        fact.part = part
        fact.notes["unshown"] = unshown_elements(ours, exact)
        if ratios.z > self._keep_above:
            fact.actual, fact.clean, fact.exact = ours, clean, exact.clone()
        return fact

    def _without_idle(
        self, ours: torch.Tensor, exact: torch.Tensor, clean: torch.Tensor | None
    ) -> Ratios | None:
        """Measure without the answers of idle queries; None where that excuses nothing."""
        made = None if self._idle is None else without_idle(self._idle, ours, exact)
        ratios = None if made is None else _measured(made, exact, clean)
        if ratios is None or ratios.z > CULPRIT_LIMIT:
            return None
        self.excused += 1
        return ratios

    def _starved(self, value: Value, part: Part, ours: torch.Tensor) -> Fact:
        fact = Fact(part.key, value.key, SAME, Verdict.UNKNOWN, ours.dtype, tuple(ours.shape))
        fact.part = part
        fact.notes["reason"] = STARVED
        return fact


def is_starved(fact: Fact) -> bool:
    """Whether a value was not held to anything, because memory ran out."""
    return fact.notes.get("reason") == STARVED


def _measured(ours: torch.Tensor, exact: torch.Tensor, clean: torch.Tensor | None) -> Ratios | None:
    """Measure one value; None where memory runs out."""
    try:
        return measure(ours, exact, clean=clean)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    return None


def _same_bits(ours: torch.Tensor, clean: torch.Tensor) -> bool:
    if ours.device != clean.device:
        ours = ours.to(clean.device)
    if ours.data_ptr() == clean.data_ptr() or torch.equal(ours, clean):
        return True
    if not ours.dtype.is_floating_point:
        return False
    both = ours.isnan() & clean.isnan()
    return bool(both.any()) and bool(((ours == clean) | both).all())


def in_place_of(theirs: torch.Tensor, pieces: list[tuple[Part, torch.Tensor]]) -> torch.Tensor:
    """Return the candidate's value with the layout, dtype and device of the reference's."""
    made = torch.empty_like(theirs)
    if pieces[0][0].place is None:
        return made.copy_(pieces[0][1])
    made.copy_(theirs)
    for part, ours in pieces:
        if part.place is not None:
            made[..., part.place.to(made.device)] = ours.to(made.device, made.dtype)
    return made
