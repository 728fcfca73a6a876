"""What lies around each launch: what encloses it, and what had ended there before.

Owns largest values inside and before. Knows nothing of blame.
"""

from __future__ import annotations

import numpy as np

from brickline.align.keys import Ints
from brickline.align.sequences import Bools
from brickline.comparison.operands import Differences, Floats
from brickline.comparison.pairing import Alignment
from brickline.comparison.rounding.directions import Directions
from brickline.comparison.sides import PARAMETER_INDEX, Side
from brickline.comparison.weights import cleared_by_weights


class Scope:
    """What lies around each launch: its enclosing launch, and what had ended inside that before."""

    def __init__(
        self, a: Side, b: Side, alignment: Alignment, found: Differences, directions: Directions
    ) -> None:
        paired = alignment.partner >= 0
        outputs = found.outputs
        self.around = around = a.around(paired)
        self.last = _ends(a)
        told = paired | outputs.some
        cleared = cleared_by_weights(a, b, alignment, found, around)
        facts = {
            "delta": np.where(told & ~_to_be_added(a), outputs.delta, 0.0),
            "bias": np.where(told, directions.outputs.bias, 0.0),
            "peak": np.where(told, directions.outputs.peak, 0.0),
            "blind": (~outputs.known & (outputs.count > 0) & ~cleared).astype(float),
            "choice": (paired & (outputs.choice | outputs.resized | found.inputs.resized)) * 1.0,
            "unlike": (told & ~outputs.same & ~_to_be_added(a)) * 1.0,
            "broken": outputs.nonfinite * 1.0,
            "size": _sizes(a, found),
            "decided": _decided(a, found) * 1.0,
            "fused": (np.bincount(a.owner[found.fused], minlength=len(a)) > 0) * 1.0,
        }
        before = _Before(around, self.last)
        self.before = {name: before.largest(values) for name, values in facts.items()}
        self.inside = {
            name: np.maximum(_largest(values, around), _largest(values, a.parent))
            for name, values in facts.items()
        }
        self.roundoff = np.maximum(_largest(found.roundoff, around), found.roundoff)
        # Only what the blamed launch itself calls can hide a fault from it.
        unseen = facts["blind"]
        own = _Before(a.parent, self.last)
        self.blind_before = own.largest(unseen) > 0
        self.blind_inside = _largest(unseen, a.parent) > 0


class _Before:
    """Largest values among what had ended before a launch began, with the same surroundings."""

    def __init__(self, around: Ints, last: Ints) -> None:
        count = len(around)
        rows = np.arange(count)
        self._order = np.lexsort((last, around))
        ends = (around[self._order] + 1) * (count + 1) + last[self._order]
        self._place = np.searchsorted(ends, (around + 1) * (count + 1) + rows) - 1
        self._begins = np.ones(count, bool)
        self._begins[1:] = np.diff(around[self._order]) != 0
        first = np.searchsorted(around[self._order], around)
        self._none = self._place < first

    def largest(self, values: Floats) -> Floats:
        """Return the largest value before each launch, 0 where there is none."""
        if not len(values):
            return values
        found = running_largest(values[self._order], self._begins)[self._place]
        return np.where(self._none, 0.0, found)


def _ends(a: Side) -> Ints:
    """Return the last launch inside each launch, itself where it encloses none."""
    last = np.arange(len(a))
    inside = a.parent >= 0
    for _ in range(64):
        reach = last.copy()
        np.maximum.at(reach, a.parent[inside], last[inside])
        if (reach == last).all():
            break
        last = reach
    return last


def running_largest(values: Floats, begins: Bools) -> Floats:
    """Return the running maximum, which starts anew where a flag stands."""
    # Ranks make one running maximum serve all: each stretch starts above the one before.
    unique, rank = np.unique(values, return_inverse=True)
    lifted = rank.reshape(-1) + np.cumsum(begins) * np.int64(len(unique))
    out: Floats = unique[np.maximum.accumulate(lifted) % len(unique)]
    return out


def _largest(values: Floats, around: Ints) -> Floats:
    """Return the largest value inside each launch, 0 where there is none."""
    out = np.zeros(len(values))
    inside = around >= 0
    np.maximum.at(out, around[inside], values[inside])
    return out


def _to_be_added(a: Side) -> Bools:
    """Return which backward launches share their result with a later one.

    The gradient of a tensor that several use is the sum over them: it is there when the last of
    them has ended, and no sooner.
    """
    out = np.zeros(len(a), bool)
    if not (a.direction == 1).any():
        return out
    owner = a.owner
    made = np.flatnonzero(
        (a.role > 0) & (a.print >= 0) & (a.index < PARAMETER_INDEX) & (a.direction[owner] == 1)
    )
    last = np.zeros(len(a.prints), np.int64)
    np.maximum.at(last, a.print[made], owner[made])
    inside = _ends(a)
    out[owner[made[last[a.print[made]] > inside[owner[made]]]]] = True
    return out


def _decided(a: Side, found: Differences) -> Bools:
    """Return which launches put out a choice that is the same on both sides."""
    same = (a.role > 0) & found.discrete & found.same
    out: Bools = np.bincount(a.owner[same], minlength=len(a)) > 0
    return out


def _sizes(a: Side, found: Differences) -> Floats:
    """Return the largest root mean square among the outputs of each launch."""
    out = np.zeros(len(a))
    seen = (a.role > 0) & (a.print >= 0) & ~found.discrete & (a.elements > 0)
    rms = a.prints.l2[a.print[seen]] / np.sqrt(a.elements[seen])
    if len(rms):
        np.maximum.at(out, a.owner[seen], rms)
    return out
