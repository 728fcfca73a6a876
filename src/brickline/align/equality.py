"""Which values are equal, whatever order their elements lie in.

Two values are equal when their sorted elements are, within a tolerance that was measured. Values
with too few distinct elements, such as masks and positions, prove nothing and are never equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

FILLER = 1e30
"""Magnitude from which on an element is the filler of a mask, as infinity is."""
CLIPPED = 1e6
"""In its place; so is what is larger than this, which no tolerance could be measured for."""
FEW = 8
"""Distinct elements that a value needs to carry evidence; smaller ones need half their size."""
GLANCED = 4096
"""Elements that are looked at for that."""
QUANTILES = 8
"""Elements by which a sorted value is looked up before all of them are compared."""

Name = TypeVar("Name", bound=Hashable)


def comparable(elements: np.ndarray) -> np.ndarray:
    """Return elements with every filler of a mask the same, and NaN as one of their own."""
    finite = np.nan_to_num(elements, nan=0.9 * CLIPPED, posinf=CLIPPED, neginf=-CLIPPED)
    clipped: np.ndarray = np.clip(finite, -CLIPPED, CLIPPED)
    return clipped


def is_informative(elements: np.ndarray) -> bool:
    """Return whether being equal to these elements proves anything."""
    if elements.size < 2:
        return False
    some = elements[:GLANCED]
    with np.errstate(invalid="ignore"):
        some = some[np.abs(some) < CLIPPED]
        fractions = some[some != np.round(some)]
    return np.unique(fractions).size >= min(FEW, (elements.size + 1) // 2)


@dataclass
class _Shelf:
    """Values of one size."""

    names: list[Hashable] = field(default_factory=list)
    quantiles: list[np.ndarray] = field(default_factory=list)
    table: np.ndarray | None = None
    """All quantiles, and the tolerance in the last column."""


class Bank(Generic[Name]):
    """Values by their elements."""

    def __init__(self) -> None:
        self._sorted: dict[Name, np.ndarray] = {}
        self._tolerance: dict[Name, float] = {}
        self._shelves: defaultdict[int, _Shelf] = defaultdict(_Shelf)

    def __contains__(self, name: Name) -> bool:
        return name in self._sorted

    def add(self, name: Name, elements: np.ndarray, tolerance: float) -> None:
        """Add a value, unless it proves nothing.

        Args:
            name: Of the value.
            elements: In any order.
            tolerance: How far an element of an equal value may be.
        """
        if not is_informative(elements):
            return
        ordered = np.sort(comparable(elements))
        self._sorted[name], self._tolerance[name] = ordered, tolerance
        shelf = self._shelves[ordered.size]
        shelf.names.append(name)
        shelf.quantiles.append(np.append(_quantiles(ordered), tolerance))
        shelf.table = None

    def tolerance(self, name: Name) -> float:
        """Return how far an element of an equal value may be."""
        return self._tolerance[name]

    def equals(self, elements: np.ndarray, tolerance: float = 0.0) -> list[Name]:
        """Return the values with the same elements, the nearest first."""
        shelf = self._shelves.get(elements.size)
        if shelf is None or not is_informative(elements):
            return []
        ordered = np.sort(comparable(elements))
        if shelf.table is None:
            shelf.table = np.array(shelf.quantiles)
        gaps = np.abs(shelf.table[:, :-1] - _quantiles(ordered)).max(axis=1)
        near = np.flatnonzero(gaps <= shelf.table[:, -1] + tolerance)
        names: list[Name] = [shelf.names[k] for k in near[np.argsort(gaps[near], kind="stable")]]
        return [name for name in names if self._is_equal(name, ordered, tolerance)]

    def is_equal(self, name: Name, elements: np.ndarray, tolerance: float = 0.0) -> bool:
        """Return whether a value has these elements."""
        known = self._sorted.get(name)
        if known is None or known.size != elements.size:
            return False
        return self._is_equal(name, np.sort(comparable(elements)), tolerance)

    def _is_equal(self, name: Name, ordered: np.ndarray, tolerance: float) -> bool:
        gap = np.abs(self._sorted[name] - ordered).max(initial=0.0)
        return bool(gap <= self._tolerance[name] + tolerance)

    def wholes(self, elements: np.ndarray, tolerance: float = 0.0) -> list[Name]:
        """Return the values of which these elements are a part or a repetition."""
        some = np.unique(comparable(elements))
        if some.size < FEW or not is_informative(elements):
            return []
        glance = some[:: max(1, some.size // 6)]
        return [
            name
            for name, known in self._sorted.items()
            if self._spans(name, some, tolerance)
            and _inside(glance, known, self._tolerance[name] + tolerance).all()
            and _inside(some, known, self._tolerance[name] + tolerance).all()
        ]

    def _spans(self, name: Name, some: np.ndarray, tolerance: float) -> bool:
        known, margin = self._sorted[name], self._tolerance[name] + tolerance
        return bool(known[0] - margin <= some[0] and some[-1] <= known[-1] + margin)

    def parts(self, elements: np.ndarray, tolerance: float = 0.0) -> list[Name]:
        """Return whole values that these elements consist of; none where some are left over."""
        ordered = np.sort(comparable(elements))
        covered = np.zeros(ordered.size, dtype=bool)
        names: list[Name] = []
        for name, known in sorted(self._sorted.items(), key=lambda item: -item[1].size):
            margin = self._tolerance[name] + tolerance
            smaller = FEW <= known.size < ordered.size
            if not smaller or known[0] < ordered[0] - margin or known[-1] > ordered[-1] + margin:
                continue
            glance = known[:: max(1, known.size // 6)]
            if not _inside(glance, ordered, margin).all():
                continue
            if _inside(known, ordered, margin).all():
                covered |= _inside(ordered, known, margin)
                names.append(name)
                if covered.all():
                    return names
        return []

    def items(self) -> Iterator[tuple[Name, np.ndarray]]:
        """Yield each value with its elements in ascending order."""
        yield from self._sorted.items()


def _quantiles(ordered: np.ndarray) -> np.ndarray:
    places = np.linspace(0, ordered.size - 1, QUANTILES).astype(int)
    chosen: np.ndarray = ordered[places]
    return chosen


def _inside(some: np.ndarray, known: np.ndarray, tolerance: float) -> np.ndarray:
    """Return which elements are in a sorted array, within a tolerance."""
    if known.size < 2:
        return np.abs(some - known[0]) <= tolerance if known.size else np.zeros(some.size, bool)
    at = np.clip(np.searchsorted(known, some), 1, known.size - 1)
    gaps: np.ndarray = np.minimum(np.abs(known[at] - some), np.abs(known[at - 1] - some))
    return gaps <= tolerance
