"""Which values of the candidate are values of the reference."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from brickline.align.equality import Bank, comparable
from brickline.align.layouts import order_of_equals, orders_by_shape, shape_of
from brickline.checking.execution.tape import Tape
from brickline.checking.logic.known_values import KnownValues, is_plain_copy

WIDE = 1e-5
"""Part of a value's RMS from which on a tolerance is wide."""
MOST_ORDERS = 6
"""Orders of elements that are looked at then."""
Explained = dict[int, "int | None"]
"""For each value of the candidate the reference's that it is equal to, or a part of."""


@dataclass
class _Order:
    """One order in which the elements of values in the same place of several layers lie."""

    order: np.ndarray
    members: list[int]


def explain(
    ours: KnownValues,
    theirs: KnownValues,
    bank: Bank[int],
    earlier: tuple[Tape, Explained] | None = None,
    healed: Mapping[int, int] | None = None,
) -> Explained:
    """Return what each value of the candidate is.

    Args:
        ours: The candidate's values.
        theirs: The reference's.
        bank: The latter by their elements.
        earlier: What an earlier tape's values are; those that did not change stay what they were.
        healed: What values are that took the place of the candidate's own.
    """
    healed = healed or {}
    explained: Explained = {}
    for value in ours.values:
        index = value.index
        if index in healed:
            explained[index] = healed[index]
        elif earlier is not None and _is_unchanged(earlier[0], value.index, value.tensor):
            explained[index] = earlier[1].get(index)
        elif is_plain_copy(ours.tape, value):
            explained[index] = explained[value.step.inputs[0]]
        elif ours.informative(index):
            explained[index] = _equal(ours, theirs, bank, index)
        else:
            explained[index] = None
    for index in _out_of_order(ours, theirs, explained, healed):
        explained[index] = None
    return explained


def _is_unchanged(tape: Tape, index: int, tensor: object) -> bool:
    return index < len(tape.values) and tape.values[index].tensor is tensor


def _equal(ours: KnownValues, theirs: KnownValues, bank: Bank[int], index: int) -> int | None:
    elements, tolerance = ours.values[index].flat, ours.tolerances[index]
    equals = equal_values(ours, theirs, bank, index, elements)
    if equals:
        return equals[0]
    if _is_wide(tolerance, elements):
        return None
    wholes = (
        whole
        for whole in bank.wholes(elements, tolerance)
        if not _is_wide(theirs.tolerances[whole], elements)
    )
    return next(wholes, None)


def equal_values(
    ours: KnownValues, theirs: KnownValues, bank: Bank[int], index: int, elements: np.ndarray
) -> list[int]:
    """Return the reference's values that have the elements of one of ours, the nearest first.

    Where the tolerance is wide, any two values of a kind have nearly the same sorted elements:
    then they must agree in place, in an order that the shapes allow.

    Args:
        ours: The candidate's values.
        theirs: The reference's.
        bank: The latter by their elements.
        index: Of the candidate's value.
        elements: What it holds, or would.
    """
    tolerance = ours.tolerances[index]
    equals = bank.equals(elements, tolerance)
    mine = comparable(elements)
    shape = shape_of(ours.values[index].shape, elements.size)
    kept: list[int] = []
    for other in equals:
        margin = tolerance + theirs.tolerances[other]
        if not _is_wide(margin, elements):
            kept.append(other)
            continue
        value = theirs.values[other]
        right = comparable(value.flat)
        shapes = [shape], [shape_of(value.shape, right.size)]
        orders = itertools.islice(orders_by_shape(*shapes), MOST_ORDERS)
        if any(np.abs(mine - right[order]).max(initial=0.0) <= margin for order in orders):
            kept.append(other)
    return kept


def _is_wide(tolerance: float, elements: np.ndarray) -> bool:
    size = np.sqrt(np.mean(np.square(comparable(elements)))) if elements.size else 0.0
    return bool(tolerance > WIDE * size)


def _out_of_order(
    ours: KnownValues,
    theirs: KnownValues,
    explained: Explained,
    healed: Collection[int] | Mapping[int, int],
) -> set[int]:
    """Return values with the right elements in another order than in the other layers."""
    places: defaultdict[tuple[object, ...], list[_Order]] = defaultdict(list)
    for value in ours.values:
        partner = explained[value.index]
        if partner is None or value.index in healed or value.step.moves:
            continue
        other = theirs.values[partner]
        if other.shape.numel() != value.shape.numel() or not value.step.inputs:
            continue
        mine, right = comparable(value.flat), comparable(other.flat)
        tolerance = theirs.tolerances[partner] + ours.tolerances[value.index]
        known = places[(value.key, other.key, mine.size)]
        for order in known:
            if np.abs(mine - right[order.order]).max(initial=0.0) <= tolerance:
                order.members.append(value.index)
                break
        else:
            plain = np.abs(mine - right).max(initial=0.0) <= tolerance
            places_of = np.arange(mine.size) if plain else order_of_equals(mine, right)
            known.append(_Order(places_of, [value.index]))
    odd: set[int] = set()
    for known in places.values():
        if len(known) > 1:
            usual = max(known, key=lambda order: (len(order.members), _is_plain(order.order)))
            odd.update(index for order in known if order is not usual for index in order.members)
    for value in ours.values if odd else ():
        if is_plain_copy(ours.tape, value) and value.step.inputs[0] in odd:
            odd.add(value.index)
    return odd - set(healed)


def _is_plain(order: np.ndarray) -> bool:
    return bool((order == np.arange(order.size)).all())
