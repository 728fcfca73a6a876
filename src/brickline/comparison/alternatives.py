"""What else may explain a suspect: a tensor nobody could compare, a factor that is taken back.

Owns the reasons to name nobody where a unit stands out. Knows suspects by their unit alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from brickline.align.keys import Ints
from brickline.comparison.operands import Differences, moved
from brickline.comparison.pairing import Alignment
from brickline.comparison.report.places import scale_of_difference
from brickline.comparison.sides import PARAMETER_INDEX, Side
from brickline.comparison.similarity import NEAR
from brickline.comparison.triage import GRAD, LEAF, Units
from brickline.comparison.weights import odd_ones

LESS = 0.6
"""Part of a difference below which another that was given the same tensor clears it."""
TAKEN_BACK = 0.3
"""Part of an error, in absolute size, below which it has been taken back by what follows."""


class Alternatives:
    """Reasons not to blame, of one pair of runs."""

    def __init__(
        self, a: Side, b: Side, alignment: Alignment, found: Differences, units: Units
    ) -> None:
        self.a, self.b, self.alignment = a, b, alignment
        self.found, self.units = found, units
        self.hash = _hashes(a)
        self.order = np.argsort(self.hash, kind="stable")
        self.order = self.order[a.print[self.order] >= 0]
        self.leaf = ~a.has_children()
        self.around = a.around(found.outputs.known)
        self.theirs = np.unique(_hashes(b)[b.print >= 0])
        self.odd = odd_ones(a, b, found)
        fused = np.bincount(found.owner[found.fused], minlength=len(a)) > 0
        self.upset = (units.mode == LEAF) & fused[units.row] & (units.ratio > units.limit)
        self.port = bool((units.foreign & (units.mode != GRAD)).any())

    def of(self, unit: int) -> str | None:
        """Return why a unit that stands out may be right, None where nothing speaks for it."""
        if self._has_unseen_table(unit):
            return "it was given a tensor that has no counterpart"
        if self.port and self._is_taken_back(unit):
            return "what follows takes it back"
        if self._has_upset_part(unit):
            return "a part of it that is measured by its stripes differs too"
        if self._has_other_users(unit):
            return "its parameter is used elsewhere too"
        return None

    # --- what was given and not compared

    def _has_unseen_table(self, unit: int) -> bool:
        """Return whether it was given something that all layers share and nobody could compare.

        Tables of angles, masks and biases are made once and handed to every layer; the first that
        uses a wrong one stands out. One that is right elsewhere, or the reference's, is right.
        """
        if not self.units.foreign[unit]:
            return False
        own = self._unseen(int(self.units.blamed[unit]))
        return any(self._is_doubtful(int(each), unit) for each in own)

    def _unseen(self, row: int) -> Ints:
        a, found = self.a, self.found
        own = np.arange(a.first[row], a.first[row + 1])
        lost = (a.role[own] == 0) & (a.index[own] < PARAMETER_INDEX) & (a.elements[own] > 1)
        unseen: Ints = own[lost & np.isnan(found.delta[own])]
        return unseen

    def _is_doubtful(self, operand: int, unit: int) -> bool:
        a, found, units = self.a, self.found, self.units
        same = self._same(operand)
        owners = found.owner[same]
        row = int(units.blamed[unit])
        shared = (
            (a.role[same] == 0) & (a.kind[owners] == a.kind[row]) & (a.name[owners] != a.name[row])
        )
        from_outside = (a.parent[owners] < 0) & (a.role[same] == 0)
        near = ~np.isnan(found.delta[same]) & (found.delta[same] < NEAR)
        if not shared.any() or from_outside.any() or near.any():
            return False
        if a.print[operand] >= 0 and np.isin(self.hash[operand], self.theirs):
            return False
        # A wrong one adds as much to each that uses it, whatever came in.
        like = np.isin(units.blamed, owners[shared]) & (units.mode == units.mode[unit])
        like &= (a.kind[units.row] == a.kind[units.row[unit]]) & units.known
        return not bool((like & (units.target < LESS * units.target[unit])).any())

    def _same(self, operand: int) -> Ints:
        """Return where the same tensor is an operand: by contents, else by identity."""
        a = self.a
        if a.print[operand] >= 0:
            return self._holding(self.hash[[operand]])
        return np.flatnonzero((a.tensor == a.tensor[operand]) & (a.elements == a.elements[operand]))

    def _holding(self, hashes: NDArray[np.uint64]) -> Ints:
        """Return the operands with one of these contents."""
        ordered = self.hash[self.order]
        begin = np.searchsorted(ordered, hashes)
        end = np.searchsorted(ordered, hashes, side="right")
        pieces = [self.order[one:two] for one, two in zip(begin, end, strict=True)]
        return np.concatenate([np.empty(0, np.int64), *pieces])

    def _has_upset_part(self, unit: int) -> bool:
        """Return whether a fused child stands out: stripes see a part of its error only."""
        units = self.units
        if units.mode[unit] == LEAF:
            return False
        inside = self.a.parent[units.row] == units.blamed[unit]
        return bool((inside & self.upset & (np.arange(len(units)) < unit)).any())

    def blamed(self, row: int) -> int:
        """Return who is to blame: a child whose weights lie otherwise than its siblings'."""
        odd = self.odd[self.a.parent[self.odd] == row]
        return int(odd[0]) if len(odd) == 1 else row

    # --- what is taken back

    def _is_taken_back(self, unit: int) -> bool:
        """Return whether the error of a leaf is gone after the next step that can be seen.

        A port folds a factor into a weight and leaves it out elsewhere, or keeps its columns in
        another order: what uses the output, or the module around it, then puts out what the
        reference does.
        """
        a, units = self.a, self.units
        row = int(units.row[unit])
        if units.mode[unit] != LEAF or a.direction[row] == 1:
            return False
        error = self._error(row)
        if error is None:
            return False
        ends = self._users(row)
        if not ends and (self._factor(row) is not None or self._is_moved(row)):
            around = int(self.around[row])
            ends = [around] if around >= 0 else []
        elif not all(self._has_other_weights(each) for each in ends):
            return False
        return bool(ends) and all(self._is_smaller(each, unit, error) for each in ends)

    def _has_other_weights(self, row: int) -> bool:
        """Return whether a launch may take something back: its weights are not the reference's."""
        held, limit = self.found.parameters, 2 * self.found.roundoff[row]
        return bool(held.count[row] > 0 and not (held.known[row] and held.delta[row] <= limit))

    def _is_smaller(self, row: int, unit: int, error: float) -> bool:
        after = self._error(row)
        relative = self.found.outputs.delta[row] / self.units.target[unit]
        return after is not None and bool(relative < TAKEN_BACK) and after < TAKEN_BACK * error

    def _factor(self, row: int) -> float | None:
        """Return the factor between outputs or weights, where a factor is all that differs."""
        a, found = self.a, self.found
        own = np.arange(a.first[row], a.first[row + 1])
        own = own[(a.print[own] >= 0) & (found.other[own] >= 0) & (found.delta[own] > 0)]
        own = own[self.b.print[found.other[own]] >= 0]
        made = own[a.role[own] > 0]
        weights = own[(a.role[own] == 0) & (a.index[own] >= PARAMETER_INDEX)]
        for operands in (made, weights):
            if len(operands) == 1:
                at = int(operands[0])
                factor = scale_of_difference(a, at, self.b, int(found.other[at]))
                if factor is not None:
                    return factor
        return None

    def _is_moved(self, row: int) -> bool:
        """Return whether the outputs hold the reference's elements at other places."""
        a, found = self.a, self.found
        own = np.arange(a.first[row], a.first[row + 1])
        own = own[(a.role[own] > 0) & (a.print[own] >= 0) & (found.other[own] >= 0)]
        own = own[self.b.print[found.other[own]] >= 0]
        there = moved(a, self.b, a.print[own], self.b.print[found.other[own]])
        return len(own) > 0 and bool(there.all())

    def _error(self, row: int) -> float | None:
        """Return the absolute size of a launch's error; None where not all was compared."""
        a, found = self.a, self.found
        if not found.outputs.known[row]:
            return None
        own = np.arange(a.first[row], a.first[row + 1])
        own = own[(a.role[own] > 0) & ~found.discrete[own] & (a.print[own] >= 0)]
        other = found.other[own]
        size = np.where(
            other >= 0, self.b.prints.l2[self.b.print[other]], a.prints.l2[a.print[own]]
        )
        return float(np.max(found.delta[own] * size, initial=0.0))

    def _users(self, row: int) -> list[int]:
        """Return the leaves that were given what a launch put out."""
        a = self.a
        own = np.arange(a.first[row], a.first[row + 1])
        made = self.hash[own[(a.role[own] > 0) & (a.print[own] >= 0)]]
        given = self._holding(np.unique(made))
        given = given[(a.role[given] == 0) & (a.index[given] < PARAMETER_INDEX)]
        users = np.unique(self.found.owner[given])
        return [int(each) for each in users if self.leaf[each] and a.direction[each] == 0]

    # --- gradients

    def _has_other_users(self, unit: int) -> bool:
        """Return whether a table's gradient has more rows than were looked up: it is tied."""
        a, units = self.a, self.units
        row = int(units.row[unit])
        if units.mode[unit] != GRAD or "Embedding" not in self._type(row):
            return False
        own = np.arange(a.first[row], a.first[row + 1])
        looked_up = int(a.elements[own[a.role[own] == 0]].max(initial=0))
        made = own[(a.role[own] > 0) & (a.index[own] >= PARAMETER_INDEX) & (a.print[own] >= 0)]
        for operand in made.tolist():
            other = int(self.found.other[operand])
            prints = [(a, operand)] + ([(self.b, other)] if other >= 0 else [])
            for side, at in prints:
                zeros = int(side.prints.records(side.print[[at]])["zeros"][0])
                if int(side.elements[at]) - zeros > looked_up:
                    return True
        return False

    def _type(self, row: int) -> str:
        number = int(self.a.type[row])
        return self.a.words[number] if number >= 0 else ""


def _hashes(side: Side) -> NDArray[np.uint64]:
    out = np.zeros(len(side.print), np.uint64)
    seen = side.print >= 0
    out[seen] = side.prints.hash[side.print[seen], 0]
    return out
