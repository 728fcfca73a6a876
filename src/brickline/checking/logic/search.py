"""Where the candidate leaves the reference, found by putting the reference's values in its place.

A cut is a value of the candidate with the reference's value that belongs there. It is believed only
if the candidate, going on from the reference's value, computes something that it did not compute
before and that the reference computes from that value, too. What is wrong then lies between the
cut and the values before it that are the reference's already.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from brickline.align.equality import comparable
from brickline.align.layouts import order_of_equals, orders_by_shape, shape_of
from brickline.checking.execution.tape import (
    ARGUMENT,
    CONSTANT,
    REFUSALS,
    WEIGHT,
    Replay,
    Tape,
    Value,
    flat_of,
    shaped,
)
from brickline.checking.logic.explaining import Explained, equal_values, explain
from brickline.checking.logic.frame_kinds import FrameKinds
from brickline.checking.logic.known_values import KnownValues, is_plain_copy
from brickline.checking.logic.makeup import Makeup

MOST_CUTS = 12
"""Faults that are looked for, one after the other."""
MOST_PARTNERS = 6
"""Values of the reference that are tried in the place of one of the candidate's."""
MOST_ORDERS = 6
"""Orders of elements in which each of them is tried."""
MOST_WRONG = 25
"""New values that may differ before a cut is given up."""
MOST_REORDERED = 6
"""How often an earlier value is found to lie in another order."""
MOST_TRIALS = 80
"""Orders that are tried for that."""
MOST_SOURCES = 60
"""Values of the reference before a cut that are tried inside of its region."""
CONTROL = frozenset({"aten::_local_scalar_dense", "aten::nonzero", "aten::item", "aten::unique"})
"""Operations after which code may go another way: the whole call is made again."""

Array = np.ndarray


@dataclass(frozen=True)
class Cut:
    """A value of the candidate, and the reference's that belongs there."""

    value: int
    partner: int
    order: Array
    region: tuple[int, ...] = ()
    """Values from the last that are right up to the cut, itself included."""
    handed: Handed | None = None
    """The input that is wrong, where the region computes the right thing from another one."""


@dataclass(frozen=True)
class Handed:
    """A value that a region reads in place of the one that it should."""

    step: int
    """The step that reads it."""
    value: int
    partner: int | None
    """The reference's value that it should read; None where two inputs are exchanged."""
    order: Array | None = None
    """How the reference's value lies in the one that is read."""


class OutOfTimeError(Exception):
    """The time for the search is over."""


class Search:
    """Finds cuts until both sides put out the same."""

    def __init__(
        self,
        ours: KnownValues,
        theirs: KnownValues,
        outputs: Sequence[tuple[int, int]],
        distance: Callable[[torch.Tensor, torch.Tensor], float],
        limit: float,
        rerun: Callable[[Mapping[int, Array]], Tape],
        weights: Mapping[str, torch.Tensor] | None = None,
        seconds: float = 60.0,
    ) -> None:
        """Get ready.

        Args:
            ours: What the candidate computes.
            theirs: What the reference computes.
            outputs: Pairs of outputs, by value.
            distance: Of two outputs.
            limit: Up to which they are the same.
            rerun: Makes the candidate's call with other elements in some of its values.
            weights: Of the candidate, by name. Default None: only those that are read are known.
            seconds: How long to look.
        """
        self.ours, self.theirs = ours, theirs
        self.bank = theirs.bank()
        self.makeup = Makeup(theirs.values)
        self.frames = FrameKinds(ours.tape)
        self.original = ours
        self._outputs, self._distance, self._limit = list(outputs), distance, limit
        self._rerun = rerun
        read = {value.name for value in ours.values if value.step.name == WEIGHT}
        self._idle = {name: each for name, each in (weights or {}).items() if name not in read}
        self._end = time.monotonic() + seconds
        self.explained = explain(ours, theirs, self.bank)
        self.healed: dict[int, int] = {}
        self._elements: dict[int, Array] = {}
        self._benign: set[tuple[object, ...]] = set()
        self.cuts: list[Cut] = []
        self.left = [self._apart()]
        """How far the outputs were apart before each cut, and after the last."""
        self.spent = False
        self._siblings: dict[tuple[object, ...], list[tuple[int, int]]] = {}
        self._healthy = ours
        """Where these lie."""

    # --- the loop

    def run(self) -> list[Cut]:
        """Return the cuts, in the order in which they were found."""
        try:
            while len(self.cuts) < MOST_CUTS and self.differing():
                cut = self._next_cut()
                if cut is None:
                    break
                self._heal(cut)
                self.cuts.append(cut)
                self.left.append(self._apart())
        except OutOfTimeError:
            self.spent = True
        return self.cuts

    @property
    def remainder(self) -> str | None:
        """Say what the cuts leave unexplained; None where they explain all."""
        if not self.differing():
            return None
        ended = "; the search ran out of time" if self.spent else ""
        apart = f"the outputs differ by {self.left[-1]:.2g}"
        return f"with {len(self.cuts)} places repaired {apart}{ended}"

    def differing(self) -> list[tuple[int, int]]:
        """Return the pairs of outputs that differ."""
        ours, theirs = self.ours.values, self.theirs.values
        return [
            (one, other)
            for one, other in self._outputs
            if self._differs(ours[one].tensor, theirs[other].tensor)
        ]

    def share(self, cut: Cut) -> float:
        """Return which part of the final difference went away with a cut."""
        place = self.cuts.index(cut)
        removed = self.left[place] - self.left[place + 1]
        return min(1.0, max(0.0, removed / self.left[0])) if self.left[0] > 0 else 0.0

    def _apart(self) -> float:
        pairs = ((self.ours.values[one], self.theirs.values[two]) for one, two in self._outputs)
        return max((self._distance(one.tensor, two.tensor) for one, two in pairs), default=0.0)

    def _differs(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return self._distance(one, other) > self._limit

    def _next_cut(self) -> Cut | None:
        self._learn_siblings()
        bad = self.differing()
        for one, _ in bad:
            self._unexplain(one)
        wrong = self.ours.behind((one for one, _ in bad), self.explained)
        self._benign |= self._written_otherwise(wrong)
        missing = self._missing(bad)
        cut = self._first_confirmed(sorted(wrong), missing)
        if cut is None:
            return None
        tape = self._going_on(cut)
        if tape is not None:
            # Later layers are healthy now, and show in which orders values lie.
            healed = {**self.healed, cut.value: cut.partner}
            self._learn_siblings(*self._explained_on(tape, healed))
        cut = self._refined(self._with_region(cut))
        for _ in range(MOST_REORDERED):
            inner = self._reordered(cut)
            if inner is None:
                break
            cut = self._refined(inner)
        return self._deeper(replace(cut, handed=self._handed(cut)))

    def _deeper(self, cut: Cut) -> Cut:
        """Follow a wrong input to where it is handed on: what reads it first may be right."""
        for _ in range(MOST_REORDERED):
            handed = cut.handed
            if handed is None or handed.partner is None or handed.order is None:
                break
            value = self.ours.values[handed.value]
            if value.step.func is None or value.step.moves:
                break
            known = self.explained[handed.value]
            self.explained[handed.value] = None
            inner = self._handed(self._with_region(Cut(value.index, handed.partner, handed.order)))
            if inner is None:
                self.explained[handed.value] = known
                break
            cut = replace(cut, handed=inner)
        return cut

    def _unexplain(self, index: int) -> None:
        """An output that differs is no value of the reference, nor are plain copies on its way."""
        while True:
            self.explained[index] = None
            value = self.ours.values[index]
            if not is_plain_copy(self.ours.tape, value):
                return
            index = value.step.inputs[0]

    def _missing(self, bad: Collection[tuple[int, int]]) -> list[int]:
        """Return the values behind the reference's outputs that the candidate lacks, in order."""
        there = {partner for partner in self.explained.values() if partner is not None}
        present: Explained = {index: index for index in there}
        for index in there:
            if index in self.bank:
                for other in self.bank.equals(self.theirs.values[index].flat):
                    present[other] = other
        for _, other in bad:
            present[other] = None
        return sorted(self.theirs.behind((other for _, other in bad), present))

    def _written_otherwise(self, wrong: Collection[int]) -> set[tuple[object, ...]]:
        """Return the places of values that healthy layers compute and the reference does not."""
        keys: set[tuple[object, ...]] = set()
        for value in self.ours.values:
            if self.explained[value.index] is None or value.step.moves:
                continue
            if value.index in self.healed:
                continue
            inner = self.ours.behind(value.step.inputs, self.explained)
            keys.update(
                self.ours.values[index].key
                for index in inner
                if index not in wrong and not self.ours.values[index].step.moves
            )
        return keys

    def idle_weights(self, weight: Value) -> list[str]:
        """Return the weights that the candidate never reads and that are one of the reference's."""
        tolerance = self.theirs.tolerances[weight.index]
        return [
            name
            for name, tensor in self._idle.items()
            if tensor.numel() == weight.shape.numel()
            and self._are_same(flat_of(tensor), weight.flat, tolerance)
        ]

    # --- orders

    def _learn_siblings(
        self, ours: KnownValues | None = None, explained: Explained | None = None
    ) -> None:
        """Learn in which orders the values of healthy layers lie in the reference's."""
        self._healthy = self.ours if ours is None else ours
        explained = self.explained if explained is None else explained
        siblings: defaultdict[tuple[object, ...], list[tuple[int, int]]] = defaultdict(list)
        for index, partner in explained.items():
            if partner is not None and index not in self.healed:
                value = self._healthy.values[index]
                if value.shape.numel() == self.theirs.values[partner].shape.numel():
                    siblings[value.key].append((index, partner))
        self._siblings = dict(siblings)

    def _is_usual(self, index: int, partner: int) -> bool:
        """Return whether values in the places of these two are equal in another layer."""
        key = self.theirs.values[partner].key
        pairs = self._siblings.get(self.ours.values[index].key, ())
        return any(one != index and self.theirs.values[two].key == key for one, two in pairs)

    def _orders(self, index: int, partner: int) -> Iterator[Array]:
        """Yield the orders in which one of the reference's values may lie in one of ours."""
        value, other = self.ours.values[index], self.theirs.values[partner]
        size = value.flat.size
        if other.flat.size != size:
            return
        for one, two in self._siblings.get(value.key, ()):
            if one == index or self.theirs.values[two].key != other.key:
                continue
            mine, right = self._healthy.values[one].flat, self.theirs.values[two].flat
            if mine.size == right.size == size:
                plain = np.abs(comparable(mine) - comparable(right)).max(initial=0.0)
                near = plain <= self.theirs.tolerances[two] + self.ours.tolerances[one]
                yield np.arange(size) if near else order_of_equals(mine, right)
                break
        shapes = self._shapes(self.ours, index), self._shapes(self.theirs, partner)
        yield from orders_by_shape(*shapes)

    @staticmethod
    def _shapes(side: KnownValues, index: int) -> list[tuple[int, ...]]:
        """Return the shapes in which a value is seen with its elements in the same order."""
        shapes = [_shape(side, index)]
        todo = [index]
        while todo and len(shapes) < 5:
            for reader in side.readers(todo.pop()):
                value = side.values[reader]
                if is_plain_copy(side.tape, value) and np.array_equal(
                    value.flat, side.values[index].flat, equal_nan=True
                ):
                    shapes.append(_shape(side, reader))
                    todo.append(reader)
        step = side.values[index].step
        while step.moves and len(step.inputs) == 1:
            source = side.values[step.inputs[0]]
            if not np.array_equal(source.flat, side.values[index].flat, equal_nan=True):
                break
            shapes.append(_shape(side, source.index))
            step = source.step
        return list(dict.fromkeys(shapes))

    # --- a cut

    def _first_confirmed(self, wrong: Sequence[int], missing: Sequence[int]) -> Cut | None:
        by_size: defaultdict[int, list[int]] = defaultdict(list)
        for partner in missing:
            other = self.theirs.values[partner]
            copied = is_plain_copy(self.theirs.tape, other) and other.step.inputs[0] in missing
            if other.floating and not copied:
                by_size[other.flat.size].append(partner)
        outputs = {one for one, _ in self._outputs}
        for index in wrong:
            value = self.ours.values[index]
            if value.step.name in (WEIGHT, CONSTANT) or not value.floating:
                continue
            copied = is_plain_copy(self.ours.tape, value) and value.step.inputs[0] in wrong
            if value.key in self._benign or copied:
                continue
            if not (self.ours.informative(index) or index in outputs):
                continue
            for partner, order in self._partners(index, by_size[value.flat.size]):
                cut = Cut(index, partner, order)
                if self._is_confirmed(cut):
                    return cut
        return None

    def _partners(self, index: int, among: Iterable[int]) -> Iterator[tuple[int, Array]]:
        """Yield what may belong in a value's place, the likeliest first."""
        mine = comparable(self.ours.values[index].flat)
        choices: list[tuple[float, int, int, Array]] = []
        for partner in among:
            right = comparable(self.theirs.values[partner].flat)
            usual = self._is_usual(index, partner)
            orders = itertools.islice(self._orders(index, partner), MOST_ORDERS)
            for number, order in enumerate(orders):
                gap = float(np.linalg.norm(mine - right[order]))
                size = float(np.linalg.norm(mine) + np.linalg.norm(right))
                choices.append((gap / max(size, 1e-300) - 0.5 * usual, partner, number, order))
        choices.sort(key=lambda choice: choice[:3])
        for _, partner, _, order in choices[:MOST_PARTNERS]:
            yield partner, order

    def _tensor(self, cut: Cut) -> torch.Tensor:
        elements = self.theirs.values[cut.partner].flat[cut.order]
        return shaped(elements, self.ours.values[cut.value].tensor)

    def _is_confirmed(self, cut: Cut) -> bool:
        """Return whether going on from the reference's value gives what the reference computes."""
        self._check_time()
        replay = Replay(self.ours.tape, {cut.value: self._tensor(cut)})
        later = self.theirs.after(cut.partner)
        own = self.theirs.values[cut.partner].flat
        affected = {cut.value}
        wrong = 0
        try:
            for value in replay.run():
                affected.add(value.index)
                if value.step.moves or not value.floating or is_statistic(value):
                    continue
                if self.explained.get(value.index) is not None:
                    continue
                if all(
                    source in affected or not self.ours.informative(source)
                    for source in value.step.inputs
                ):
                    continue
                elements = flat_of(replay.contents(value.index))
                for other in equal_values(self.ours, self.theirs, self.bank, value.index, elements):
                    known = self.theirs.values[other]
                    if other not in later or known.step.moves:
                        continue
                    if not self._are_same(known.flat, own, self.theirs.tolerances[other]):
                        return True
                wrong += 1
                if wrong > MOST_WRONG:
                    return False
        except REFUSALS:
            return False
        return self._repairs(replay)

    def _repairs(self, replay: Replay) -> bool:
        """Return whether outputs that differed are right now."""
        bad = [(one, other) for one, other in self.differing() if one in replay.values]
        return bool(bad) and not any(
            self._differs(replay.contents(one), self.theirs.values[other].tensor)
            for one, other in bad
        )

    @staticmethod
    def _are_same(one: Array, other: Array, tolerance: float) -> bool:
        if one.size != other.size:
            return False
        gap = np.abs(np.sort(comparable(one)) - np.sort(comparable(other)))
        return bool(gap.max(initial=0.0) <= tolerance)

    def _check_time(self) -> None:
        if time.monotonic() > self._end:
            raise OutOfTimeError

    # --- its region

    def _with_region(self, cut: Cut) -> Cut:
        stops = {**self.explained, cut.value: None}
        return replace(cut, region=tuple(sorted(self.ours.behind([cut.value], stops))))

    def _refined(self, cut: Cut) -> Cut:
        """Return the earliest cut in a region that makes the rest of it right."""
        for index in cut.region[:-1]:
            value = self.ours.values[index]
            if value.step.name == WEIGHT or is_plain_copy(self.ours.tape, value):
                continue
            for partner, order in self._inner_partners(cut, index):
                inner = Cut(index, partner, order)
                if self._makes_right(cut, values={index: self._tensor(inner)}):
                    return self._refined(self._with_region(inner))
        return cut

    def _reordered(self, cut: Cut) -> Cut | None:
        """Return the earliest value whose elements lie in an order that makes the cut wrong."""
        trials = 0
        for index in sorted(self.ours.behind([cut.value], {})):
            partner = self.explained[index]
            if partner is None or index == cut.value or index in self.healed:
                continue
            if self.ours.values[index].step.name == ARGUMENT:
                continue
            if not self.ours.informative(index) or self._is_usual_order(index, partner):
                continue
            for order in itertools.islice(self._orders(index, partner), MOST_ORDERS):
                if self._lies_in(index, partner, order):
                    continue
                trials += 1
                if trials > MOST_TRIALS:
                    return None
                inner = Cut(index, partner, order)
                if self._makes_right(cut, values={index: self._tensor(inner)}, region_only=False):
                    self._unexplain_disordered(index, order)
                    return self._with_region(inner)
        return None

    def _lies_in(self, index: int, partner: int, order: Array) -> bool:
        """Return whether a value is its partner in this order of elements."""
        mine = comparable(self.ours.values[index].flat)
        right = comparable(self.theirs.values[partner].flat)
        tolerance = self.theirs.tolerances[partner] + self.ours.tolerances[index]
        return bool(np.abs(mine - right[order]).max(initial=0.0) <= tolerance)

    def _is_usual_order(self, index: int, partner: int) -> bool:
        """Return whether a value lies in its partner as those in other layers do."""
        if not self._is_usual(index, partner):
            return False
        order = next(self._orders(index, partner), None)
        return order is not None and self._lies_in(index, partner, order)

    def _unexplain_disordered(self, index: int, order: Array) -> None:
        """A value in a wrong order is no value of the reference, nor are its like before it."""
        while True:
            partner = self.explained[index]
            self.explained[index] = None
            value = self.ours.values[index]
            if partner is None or not is_plain_copy(self.ours.tape, value):
                return
            index = value.step.inputs[0]
            orders = itertools.islice(self._orders(index, partner), 1)
            if any(self._lies_in(index, partner, plain) for plain in orders):
                return

    def _inner_partners(self, cut: Cut, index: int) -> Iterator[tuple[int, Array]]:
        """Yield values before the reference's that may belong in the place of one before ours."""
        value = self.ours.values[index]
        there = {partner for partner in self.explained.values() if partner is not None}
        sources = self.theirs.sources(self.origin(cut.partner), there)[:MOST_SOURCES]
        fit = [
            source
            for source in sources
            if self.theirs.values[source].flat.size == value.flat.size
            and self.theirs.values[source].floating == value.floating
            and not is_plain_copy(self.theirs.tape, self.theirs.values[source])
        ]
        for partner, order in self._partners(index, fit):
            right = self.theirs.values[partner].flat[order]
            tolerance = self.theirs.tolerances[partner] + self.ours.tolerances[index]
            if not self._are_same(right, value.flat, tolerance) or not (
                np.abs(comparable(right) - comparable(value.flat)).max(initial=0.0) <= tolerance
            ):
                yield partner, order

    def origin(self, partner: int) -> int:
        """Return the value of the reference that one is a copy of."""
        value = self.theirs.values[partner]
        while is_plain_copy(self.theirs.tape, value):
            value = self.theirs.values[value.step.inputs[0]]
        return value.index

    def _makes_right(
        self,
        cut: Cut,
        values: Mapping[int, torch.Tensor] | None = None,
        reads: Mapping[tuple[int, int], torch.Tensor] | None = None,
        *,
        region_only: bool = True,
    ) -> bool:
        """Return whether a region computes the reference's value after something was replaced."""
        self._check_time()
        if region_only:
            steps = dict.fromkeys(self.ours.values[index].step for index in cut.region)
            ordered = sorted(steps, key=lambda step: step.number)
        else:
            ordered = self.ours.tape.steps[: self.ours.values[cut.value].step.number + 1]
        replay = Replay(self.ours.tape, values, reads)
        try:
            for _ in replay.run(ordered):
                pass
        except REFUSALS:
            return False
        if cut.value not in replay.values:
            return False
        right = comparable(self.theirs.values[cut.partner].flat[cut.order])
        elements = comparable(flat_of(replay.contents(cut.value)))
        if elements.size != right.size:
            return False
        tolerance = self.theirs.tolerances[cut.partner] + self.ours.tolerances[cut.value]
        return bool(np.abs(elements - right).max(initial=0.0) <= tolerance)

    def _handed(self, cut: Cut) -> Handed | None:
        """Return the input that makes a region right when another one is in its place."""
        inside = set(cut.region)
        edges = [
            (step, source)
            for step in dict.fromkeys(self.ours.values[index].step for index in cut.region)
            for source in step.inputs
            if source not in inside or self.ours.values[source].step.name in (WEIGHT, CONSTANT)
        ]
        sources = list(dict.fromkeys(source for _, source in edges))
        for source in sources:
            readers = [step.number for step, other in edges if other == source]
            for partner, order in self._inner_partners(cut, source):
                tensor = self._tensor(Cut(source, partner, order))
                reads = {(number, source): tensor for number in readers}
                if self._makes_right(cut, reads=reads):
                    return Handed(readers[0], source, partner, order=order)
        joint = self._other_weights(cut)
        if joint is not None:
            return joint
        for one, other in itertools.combinations(sources, 2):
            mine, theirs = self.ours.values[one], self.ours.values[other]
            if mine.shape != theirs.shape or mine.floating != theirs.floating:
                continue
            reads = {(step.number, one): theirs.tensor for step, source in edges if source == one}
            reads |= {
                (step.number, other): mine.tensor for step, source in edges if source == other
            }
            if self._makes_right(cut, reads=reads):
                return Handed(edges[0][0].number, one, None)
        return None

    def _other_weights(self, cut: Cut) -> Handed | None:
        """Return a weight, where those of another module make the last operation right."""
        step = self.ours.values[cut.value].step
        partner = self.theirs.values[self.origin(cut.partner)].step
        mine = [source for source in step.inputs if self.ours.values[source].step.name == WEIGHT]
        right = [
            source for source in partner.inputs if self.theirs.values[source].step.name == WEIGHT
        ]
        if step.name != partner.name or len(mine) != len(right) or len(mine) < 2:
            return None
        if any(
            self.ours.values[one].shape != self.theirs.values[two].shape
            for one, two in zip(mine, right, strict=True)
        ):
            return None
        reads = {
            (step.number, one): self.theirs.values[two].tensor
            for one, two in zip(mine, right, strict=True)
        }
        if not self._makes_right(cut, reads=reads):
            return None
        return Handed(step.number, mine[0], right[0])

    # --- going on

    def _heal(self, cut: Cut) -> None:
        """Go on as if the candidate had computed the reference's value."""
        self._elements[cut.value] = flat_of(self._tensor(cut))
        self.healed[cut.value] = cut.partner
        tape = self._going_on(cut) or self._rerun(self._elements)
        self.ours, self.explained = self._explained_on(tape, self.healed)

    def _going_on(self, cut: Cut) -> Tape | None:
        """Return the tape with a cut repaired; None where the code may go another way then."""
        replay = Replay(self.ours.tape, {cut.value: self._tensor(cut)})
        try:
            touched = {value.step.name for value in replay.run()}
        except REFUSALS:
            return None
        if not CONTROL.isdisjoint(touched) or self._steers(replay):
            return None
        return with_values(self.ours.tape, replay.values)

    def _explained_on(self, tape: Tape, healed: Mapping[int, int]) -> tuple[KnownValues, Explained]:
        """Return what the values of a repaired tape are."""
        ours = self.ours.on(tape)
        earlier = (self.ours.tape, self.explained)
        return ours, explain(ours, self.theirs, self.bank, earlier, healed)

    def _steers(self, replay: Replay) -> bool:
        """Return whether a number was taken out of something that is another value now."""
        return any(
            not step.outputs and any(index in replay.values for index in step.inputs)
            for step in self.ours.tape.steps
        )


def is_statistic(value: Value) -> bool:
    """Return whether a value is a by-product that does not depend on all that went in."""
    return value.out > 0 and value.step.name.startswith("aten::native_")


def _shape(side: KnownValues, index: int) -> tuple[int, ...]:
    value = side.values[index]
    return shape_of(value.shape, value.flat.size)


def with_values(tape: Tape, others: Mapping[int, torch.Tensor]) -> Tape:
    """Return a tape with other contents in some of its values."""
    made = object.__new__(Tape)
    made.__dict__.update(tape.__dict__)
    made.values = [
        replace(value, tensor=others[value.index], _flat=None) if value.index in others else value
        for value in tape.values
    ]
    return made
