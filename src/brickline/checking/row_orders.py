"""In which order the rows of two partners lie: by batch or by place first, cut into windows.

Partners by weight hold one row for each place, and two people may keep the places in another order.
That is asked only where the two sides keep them in another shape, and answered by the values, while
the reference runs on what is paired already. Where shapes agree, another order of rows is a fault.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace

import torch

from brickline.checking.forcing import in_place_of
from brickline.checking.pairing import Layout, Pairing, Part, Partner, RowOrder, is_boundary
from brickline.checking.recording import Operation, Recording, Value
from brickline.checking.stage import INPUT, OPERAND, Key
from brickline.oracle.widen import unit_roundoff

NEAR = 16.0
"""Rows are the same if they differ by at most this many unit roundoffs…"""
NEAR_FLOOR = 2e-4
"""…or by this much, as relative L2."""
MOST_LEADING = 4
"""Values of more dimensions before the last are not looked at in other orders of them."""
CLOSER = 0.5
"""An order is believed without being near if it leaves at most this part of the difference."""

Leading = tuple[int, ...]


def spread_of(recording: Recording, value: Value) -> Leading | None:
    """Return how a value's rows are kept: its dimensions before the last, where it is not flat."""
    way: list[Value] = [value]
    if value.key.op.startswith(OPERAND):
        # It may be a copy in another order of what its module was called with.
        given = recording.by_key.get(Key(value.key.path, value.key.call, INPUT, 0))
        way += [given] if given is not None else []
        way.reverse()
    for _ in range(MOST_LEADING):
        source = recording.by_index.get(way[-1].inputs[0]) if len(way[-1].inputs) == 1 else None
        if source is None or not (way[-1].view or is_boundary(way[-1].key)):
            break
        way.append(source)
    views = recording.views.get(value.index, ())
    handed = [each for each in recording.readings.get(value.index, ()) if is_boundary(each.key)]
    for each in (*way, *views, *handed):
        same = each.tensor.shape[-1:] == value.tensor.shape[-1:]
        if same and each.tensor.numel() == value.tensor.numel() and each.tensor.ndim > 2:
            return tuple(size for size in each.tensor.shape[:-1] if size > 1)
    return None


class RowOrders:
    """Listener of a reference that runs on the candidate's values: lays the rows of partners."""

    def __init__(
        self, pairing: Pairing, candidate: Recording, spreads: Mapping[Key, Leading | None]
    ) -> None:
        self._pairing = pairing
        self._candidate = candidate
        self._spreads = spreads
        self._known: dict[tuple[Leading | None, Leading | None], RowOrder] = {}

    def __call__(self, value: Value, operation: Operation | None) -> torch.Tensor | None:
        """Find out how the rows of a partner lie, and go on with what the candidate had."""
        if value.key in self._spreads:
            for table in (self._pairing.partners, self._pairing.guesses):
                if value.key in table:
                    parts = table[value.key].parts
                    table[value.key] = Partner(tuple(self._laid(each, value) for each in parts))
        partner = self._pairing.partners.get(value.key)
        if partner is None:
            return None
        pieces = partner.pieces(self._candidate, value.tensor)
        return in_place_of(value.tensor, pieces) if pieces else None

    def _laid(self, part: Part, value: Value) -> Part:
        ours = self._candidate.by_key.get(part.key)
        if ours is None or part.fit is not None or part.near is not None:
            return part
        theirs = self._spreads[value.key]
        spread = (spread_of(self._candidate, ours), theirs)
        if None in spread or spread[0] == spread[1]:
            return part
        plain = part.ours(ours.tensor, value.tensor.shape)
        if plain is None:
            return part
        right = part.theirs(value.tensor)
        right = right.reshape(-1, right.shape[-1]).double()
        left = plain.reshape(right.shape).to(right.device).double()
        near = max(NEAR * unit_roundoff(ours.tensor.dtype), NEAR_FLOOR)
        found = self._order(left, right, theirs or (), near, spread)
        return part if found is None else replace(part, rows=found)

    def _order(
        self,
        left: torch.Tensor,
        right: torch.Tensor,
        leading: Leading,
        near: float,
        spread: tuple[Leading | None, Leading | None],
    ) -> RowOrder | None:
        choices: list[RowOrder | None] = [None]
        if spread in self._known:
            choices.append(self._known[spread])
        choices += _transposed(leading)
        choices.append(_matched(left, right, near))
        size = float(right.norm()) or 1.0
        plain = _distance(left, right, None) / size
        best: tuple[float, RowOrder | None] = (plain, None)
        for each in choices:
            apart = _distance(left, right, each) / size
            if apart <= near:
                if each is not None:
                    self._known[spread] = each
                return each
            if apart < min(best[0], CLOSER * plain):
                best = (apart, each)
        # Something is wrong here: it lies as what was right before it.
        return best[1] if best[1] is not None else self._known.get(spread)


def _transposed(leading: Leading) -> list[RowOrder]:
    """Return the orders of rows in which whole dimensions change places."""
    if not 1 < len(leading) <= MOST_LEADING:
        return []
    places = torch.arange(torch.Size(leading).numel())
    found: list[RowOrder] = []
    for order in itertools.permutations(range(len(leading))):
        if list(order) != sorted(order):
            laid = Layout(order)(places, torch.Size(leading))
            if laid is not None:
                found.append(RowOrder(laid.reshape(-1)))
    return found


def _matched(left: torch.Tensor, right: torch.Tensor, near: float) -> RowOrder | None:
    """Return the order in which each row of one is a row of the other, if there is one."""
    key = torch.cos(torch.arange(left.shape[1], dtype=torch.float64) * 1.618 + 0.5).to(left.device)
    mine, theirs = (left * key).sum(1).sort(), (right * key).sum(1).sort()
    order = torch.empty_like(mine.indices)
    order[theirs.indices] = mine.indices
    found = RowOrder(order)
    size = float(right.norm())
    return found if _distance(left, right, found) <= near * size else None


def _distance(left: torch.Tensor, right: torch.Tensor, order: RowOrder | None) -> float:
    laid = left if order is None else order(left)
    if laid is None:
        return float("inf")
    return float((laid - right).norm())
