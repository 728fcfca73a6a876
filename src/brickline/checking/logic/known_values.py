"""What one side computes, and how far right code may be from it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

import numpy as np

from brickline.align.equality import CLIPPED, Bank, comparable, is_informative
from brickline.checking.execution.tape import Tape, Value

FLOOR = 1e-12
"""Part of a value's largest element that float64 may lose on the way."""
MARGIN = 10.0
"""How often the measured noise an element must be off to be another one."""


class KnownValues:
    """A tape with the tolerances of its values."""

    def __init__(self, tape: Tape, moved: Tape | None = None) -> None:
        """Measure.

        Args:
            tape: The call.
            moved: The call once more, with what is not shared moved by its rounding.
        """
        self.tape = tape
        self.values = tape.values
        others = {} if moved is None else dict(zip(_places(moved), moved.values, strict=True))
        self._places = _places(tape)
        self.tolerances = [
            _tolerance(value, others.get(place))
            for value, place in zip(tape.values, self._places, strict=True)
        ]
        self._informative: dict[int, bool] = {}
        self._readers: dict[int, list[int]] | None = None
        self._after: dict[int, frozenset[int]] = {}

    def on(self, tape: Tape) -> KnownValues:
        """Return another tape of the same call with the tolerances of this one."""
        other = object.__new__(KnownValues)
        other.tape, other.values = tape, tape.values
        same = len(tape.values) == len(self.values) and tape.steps is self.tape.steps
        other._places = self._places if same else _places(tape)
        known = dict(zip(self._places, self.tolerances, strict=True))
        other.tolerances = [known.get(place, 0.0) for place in other._places]
        other._informative, other._after = {}, {}
        other._readers = self._readers if same else None
        return other

    def informative(self, index: int) -> bool:
        """Return whether being equal to a value proves anything."""
        known = self._informative.get(index)
        if known is None:
            value = self.values[index]
            known = value.floating and is_informative(value.flat)
            self._informative[index] = known
        return known

    def bank(self) -> Bank[int]:
        """Return all values by their elements."""
        bank: Bank[int] = Bank()
        for value in self.values:
            if value.floating and not is_plain_copy(self.tape, value):
                bank.add(value.index, value.flat, self.tolerances[value.index])
        return bank

    def readers(self, index: int) -> list[int]:
        """Return the values that were made directly from one."""
        if self._readers is None:
            readers: defaultdict[int, list[int]] = defaultdict(list)
            for value in self.values:
                for source in value.step.inputs:
                    readers[source].append(value.index)
            self._readers = dict(readers)
        return self._readers.get(index, [])

    def after(self, index: int) -> frozenset[int]:
        """Return the values that one went into."""
        known = self._after.get(index)
        if known is None:
            seen: set[int] = set()
            todo = [index]
            while todo:
                fresh = [reader for reader in self.readers(todo.pop()) if reader not in seen]
                seen.update(fresh)
                todo += fresh
            known = self._after[index] = frozenset(seen)
        return known

    def behind(self, indices: Iterable[int], stops: Mapping[int, object]) -> set[int]:
        """Return values and what they were made from, up to those that are no part of it.

        Args:
            indices: Where to begin.
            stops: Values with something other than None end the walk and are left out.
        """
        seen: set[int] = set()
        todo = list(indices)
        while todo:
            index = todo.pop()
            if index in seen or stops.get(index) is not None:
                continue
            seen.add(index)
            todo += self.values[index].step.inputs
        return seen

    def sources(self, index: int, stops: Collection[int]) -> list[int]:
        """Return what a value is made from, nearest first; stops are included and end the walk."""
        seen = dict.fromkeys([index])
        todo = [index]
        while todo:
            fresh = []
            for inner in todo:
                for source in self.values[inner].step.inputs:
                    if source not in seen:
                        seen[source] = None
                        if source not in stops:
                            fresh.append(source)
            todo = fresh
        return list(seen)[1:]


def is_plain_copy(tape: Tape, value: Value) -> bool:
    """Return whether a value has all the elements of the one that it was made from."""
    step = value.step
    if not step.moves or len(step.inputs) != 1:
        return False
    return bool(tape.values[step.inputs[0]].shape.numel() == value.shape.numel())


def _places(tape: Tape) -> list[tuple[object, ...]]:
    """Return what is the same of each value in every run of the same call.

    Operations are counted by name: where a weight is wide already, code casts it once less.
    """
    counts: Counter[tuple[object, ...]] = Counter()
    places: list[tuple[object, ...]] = []
    for value in tape.values:
        step = value.step
        place = (step.frame.path, step.frame.call, step.name, value.out, value.name)
        places.append((*place, counts[place]))
        counts[place] += 1
    return places


def _tolerance(value: Value, moved: Value | None) -> float:
    if not value.floating:
        return 0.0
    elements = comparable(value.flat)
    plain = np.abs(elements) < CLIPPED
    size = float(np.abs(elements[plain]).max(initial=0.0))
    noise = 0.0
    if moved is not None and moved.shape == value.shape:
        noise = float(np.abs(comparable(moved.flat) - elements)[plain].max(initial=0.0))
    return MARGIN * noise + FLOOR * size
