"""Hypotheses about orders of elements: heads exchanged, positions shifted, groups interleaved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from brickline.align.equality import comparable
from brickline.checking.execution.tape import Ref, flat_of
from brickline.checking.explain.hypotheses.constants import value_place
from brickline.checking.explain.hypotheses.functions import value_words_of
from brickline.checking.explain.hypotheses.slices import (
    DIFFER,
    dims_of,
    order_words,
    permutation,
    places_of,
    slice_words,
)
from brickline.checking.explain.program import LAST, SELF, Operation, Program, operation
from brickline.checking.explain.region import Region, Trial

ATEN = torch.ops.aten
Order = tuple[int, tuple[int, ...]]
"""A dimension, and for each of its slices where it is found."""
MOST_ORDERS = 4
"""Orders in which one input is tried."""
MOST_BLIND = 24
"""Places at which plain orders are tried without a sign of them."""


def reordered_inputs(region: Region) -> Iterator[Trial]:
    """Yield the region with what it reads in the order in which the reference has it."""
    orders: dict[int, list[Order]] = {}
    facts: dict[Order, str] = {}
    for index in region.program.inputs:
        for dim, places in _input_orders(region, index):
            right = permutation(places)
            if right is not None and len(orders.get(index, ())) < MOST_ORDERS:
                order = dim, tuple(right)
                orders.setdefault(index, []).append(order)
                facts.setdefault(order, _order_fact(region, index, dim, places))
    for index, several in orders.items():
        for order in dict.fromkeys(several):
            yield _reordered(region, {index: order}, facts)
    for chosen in itertools.combinations(orders, 2):
        for pair in itertools.product(*(dict.fromkeys(orders[index]) for index in chosen)):
            yield _reordered(region, dict(zip(chosen, pair, strict=True)), facts)


def _input_orders(region: Region, index: int) -> Iterator[tuple[int, list[int | None]]]:
    partner = region.search.explained.get(index) if index < len(region.ours.values) else None
    if partner is None or not region.is_float(index):
        return
    shape = region.known[index].shape
    if region.theirs.values[partner].tensor.numel() != shape.numel():
        return
    mine = comparable(flat_of(region.known[index])).reshape(shape)
    tolerance = region.theirs.tolerances[partner] + region.ours.tolerances[index]
    for tensor in region.in_layout(partner, shape):
        right = comparable(flat_of(tensor)).reshape(shape)
        for dim in dims_of(shape):
            places = places_of(mine, right, dim, tolerance)
            if None not in places:
                yield dim, places


def _order_fact(region: Region, index: int, dim: int, places: Sequence[int | None]) -> str:
    known = [int(place) for place in places if place is not None]
    shape = region.known[index].shape
    elements = np.moveaxis(flat_of(region.known[index]).reshape(shape), dim, 0)
    rows = elements.reshape(len(known), -1)
    _, labels = np.unique(np.round(rows, 9), axis=0, return_inverse=True)
    labels = labels.reshape(-1)
    if len(set(labels.tolist())) * 2 <= len(known):
        first = list(dict.fromkeys(labels.tolist()))
        own = [first.index(k) for k in labels.tolist()]
        inverse = permutation(known) or known
        right = [own[k] for k in inverse]
        return f"repeated as {_short(own)}, where the reference repeats them as {_short(right)}"
    return f"along dimension {dim}, {order_words(known)}"


def _short(labels: list[int]) -> str:
    return " ".join(map(str, labels[:12])) + (" …" if len(labels) > 12 else "")


def _reordered(region: Region, orders: Mapping[int, Order], facts: Mapping[Order, str]) -> Trial:
    program = region.program
    for index, (dim, right) in orders.items():
        program = program.inserted(index, [_select(region, index, dim, right)])
    names = [value_words_of(region, index) for index in orders]
    places = [{"dimension": dim, "order": list(right)} for dim, right in orders.values()]
    verb = "are" if len(names) > 1 else "is"
    fact = "; ".join(dict.fromkeys(facts[order] for order in orders.values()))
    words = f"{' and '.join(names)} {verb} in another order than the reference's: {fact}"
    return Trial(program, words, {"kind": "order", "tensors": names, "orders": places})


def _select(region: Region, index: int, dim: int, inverse: Sequence[int]) -> Operation:
    places = torch.tensor(list(inverse), device=region.known[index].device)
    return operation(ATEN.index_select.default, SELF, dim, places)


def wrong_slices(region: Region) -> Iterator[Trial]:
    """Yield the region with slices of its output put right, where only some of them are wrong."""
    index = region.program.output
    shape = region.value.tensor.shape
    made = region.known[index]
    if made.shape != shape or not made.dtype.is_floating_point:
        return
    mine = comparable(flat_of(made)).reshape(shape)
    right = region.right.reshape(shape)
    for dim in dims_of(shape):
        places = places_of(mine, right, dim, region.tolerance)
        words = slice_words(mine, right, dim, places)
        if words is None or DIFFER in words:
            continue
        wrong = [k for k, place in enumerate(places) if place != k]
        repair: dict[str, Any] = {"kind": "slices", "dimension": dim, "slices": wrong}
        inverse = permutation(places)
        where = value_place(region, index)
        if inverse is not None:
            repair = {"kind": "order", "dimension": dim, "order": inverse}
            program = region.program.inserted(index, [_select(region, index, dim, inverse)])
        else:
            program = _mended(region, dim, wrong)
        yield Trial(
            program, f"in {where}, along dimension {dim} (size {shape[dim]}), {words}", repair
        )


def _mended(region: Region, dim: int, wrong: Sequence[int]) -> Program:
    """Return the region with the reference's slices in the place of some of its output's."""
    index, fresh = region.program.output, region.program.fresh()
    mask = torch.zeros(region.value.tensor.shape[dim], dtype=torch.bool)
    mask[list(wrong)] = True
    shape = [1] * region.value.tensor.ndim
    shape[dim] = -1
    inputs = {**region.program.inputs, fresh: region.right_tensor}
    longer = Program(region.program.steps, inputs, index)
    where = operation(
        ATEN.where.self, mask.reshape(shape).to(region.value.tensor.device), Ref(fresh), SELF
    )
    return longer.inserted(index, [where])


def plain_orders(region: Region) -> Iterator[Trial]:
    """Yield the region with one of its values in another order that somebody may have meant."""
    for index in region.places[:MOST_BLIND]:
        tensor = region.known[index]
        if tensor.ndim < 1 or tensor.numel() < 2 or tensor.is_complex():
            continue
        for operations, words in _plain(tensor.shape):
            program = region.program.inserted(index, operations)
            where = value_place(region, index)
            yield Trial(program, f"{where} is {words}", {"kind": "order", "right": words})


def _strided(size: int, groups: int) -> list[int]:
    return np.arange(size).reshape(groups, -1).T.reshape(-1).tolist()


def _plain(shape: torch.Size) -> Iterator[tuple[list[Operation], str]]:
    for dim in dims_of(shape):
        size = shape[dim]
        along = f"along dimension {dim} (size {size})"
        for shift in (1, -1, 2, -2):
            if size > abs(shift):
                yield (
                    [operation(ATEN.roll.default, SELF, [-shift], [dim])],
                    f"shifted by {shift} {along}",
                )
        yield [operation(ATEN.flip.default, SELF, [dim])], f"reversed {along}"
        for groups in (k for k in range(2, size) if size % k == 0):
            if groups > 16 and size // groups > 16:
                continue
            parts = [*shape[:dim], groups, size // groups, *shape[dim + 1 :]]
            yield (
                [
                    operation(ATEN.reshape.default, SELF, parts),
                    operation(ATEN.transpose.int, LAST, dim, dim + 1),
                    operation(ATEN.reshape.default, LAST, list(shape)),
                ],
                f"in another order {along}: {order_words(_strided(size, groups))}",
            )
            if groups == 2:
                yield (
                    [operation(ATEN.roll.default, SELF, [size // 2], [dim])],
                    f"in another order {along}: its two halves are exchanged",
                )
    for one in range(len(shape)):
        for other in range(one + 1, len(shape)):
            if 1 in (shape[one], shape[other]):
                continue
            dims = f"dimensions {one} and {other}"
            transposed = operation(ATEN.transpose.int, SELF, one, other)
            if shape[one] == shape[other]:
                yield [transposed], f"transposed ({dims})"
                continue
            swapped = list(shape)
            swapped[one], swapped[other] = swapped[other], swapped[one]
            yield (
                [transposed, operation(ATEN.reshape.default, LAST, list(shape))],
                f"without the exchange of {dims} before it is reshaped",
            )
            yield (
                [
                    operation(ATEN.reshape.default, SELF, swapped),
                    operation(ATEN.transpose.int, LAST, one, other),
                ],
                f"with {dims} exchanged before it is reshaped",
            )
