"""The region behind a cut, the value that it should compute, and whether a variant computes it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from brickline.align.equality import CLIPPED, comparable, is_informative
from brickline.align.layouts import order_of_equals, orders_by_shape, shape_of
from brickline.checking.execution.tape import REFUSALS, Step, flat_of, shaped
from brickline.checking.explain.program import (
    LAST,
    SELF,
    Program,
    operation,
    program_of,
)
from brickline.checking.logic.known_values import KnownValues, is_plain_copy
from brickline.checking.logic.search import Cut, Search

CLOSER = 30.0
"""How many times closer a repair must come, beside being within the tolerance."""
MOST_STEPS = 400
"""Operations of a region; for a larger one no cause is looked for."""

MOST_SHAPES = 6
"""Shapes in which a value of the reference is looked at."""

ATEN = torch.ops.aten
Array = np.ndarray


class OutOfTimeError(Exception):
    """The time for hypotheses is over."""


@dataclass(frozen=True)
class Trial:
    """One hypothesis: a variant of the region, and what is said if it computes the right thing."""

    program: Program
    words: str
    repair: Mapping[str, Any] = field(default_factory=dict)


class Region:
    """What a candidate computes between values that are right and one that is not."""

    def __init__(
        self, search: Search, program: Program, partner: int, order: Array, end: float
    ) -> None:
        """Get ready.

        Args:
            search: That found the cut.
            program: The region.
            partner: The reference's value that it should compute.
            order: The order in which its elements lie in ours.
            end: When to stop, by `time.monotonic`.
        """
        self.search, self.program, self.partner, self.order = search, program, partner, order
        self.ours, self.theirs = search.ours, search.theirs
        self.end = end
        right = self.theirs.values[partner].flat[order]
        self.right = comparable(right)
        self.value = self.ours.values[program.output]
        self.right_tensor = shaped(right, self.value.tensor)
        self.tolerance = self.theirs.tolerances[partner] + self.ours.tolerances[self.value.index]
        self.known = program.run()
        self.gap = self._gap(self.known[program.output])

    @property
    def is_wrong(self) -> bool:
        """Whether the region, run alone, computes something else than the reference."""
        return self.gap > max(self.tolerance, 1e-300) and bool(np.isfinite(self.gap))

    # --- trials

    def output(self, program: Program) -> torch.Tensor | None:
        """Return what a variant computes; None where it cannot run."""
        if time.monotonic() > self.end:
            raise OutOfTimeError
        try:
            return program.run(self.program, self.known)[program.output]
        except REFUSALS:
            return None

    def agrees(self, program: Program) -> bool:
        """Return whether a variant computes the reference's value."""
        gap = self.gap_of(program)
        return bool(gap <= self.tolerance and gap * CLOSER <= self.gap)

    def gap_of(self, program: Program) -> float:
        """Return the largest error of a variant; infinite where it cannot run."""
        made = self.output(program)
        if made is None or made.numel() != self.value.tensor.numel():
            return float("inf")
        return self._gap(made)

    def residual(self, program: Program) -> Array | None:
        """Return how far each element of a variant is off; None where it cannot run."""
        made = self.output(program)
        if made is None or made.numel() != self.value.tensor.numel():
            return None
        elements = comparable(flat_of(made))
        plain = (np.abs(self.right) < CLIPPED) & (np.abs(elements) < CLIPPED)
        return np.where(plain, elements - self.right, 0.0)

    def _gap(self, tensor: torch.Tensor) -> float:
        return float(np.abs(comparable(flat_of(tensor)) - self.right).max(initial=0.0))

    # --- what there is

    def is_float(self, index: int) -> bool:
        """Return whether a value holds floating-point numbers."""
        return bool(self.known[index].dtype.is_floating_point)

    @cached_property
    def places(self) -> list[int]:
        """Values at which something may be inserted: those that are no copies of another."""
        steps = {index: step for step in self.program.steps for index in step.outputs}
        places: list[int] = []
        for index in self.program.values():
            step = steps.get(index)
            plain = step is not None and step.moves and len(step.inputs) == 1
            whole = plain and self.known[step.inputs[0]].numel() == self.known[index].numel()  # type: ignore[union-attr]
            if index == self.program.output or not whole:
                places.append(index)
        return places[::-1]

    # --- the reference's part

    @cached_property
    def there(self) -> dict[int, int]:
        """Our value for each of the reference's that the candidate has, too."""
        there: dict[int, int] = {}
        for index, partner in self.search.explained.items():
            if partner is None or index in self.search.healed:
                continue
            first = there.get(partner)
            if first is None or (
                self._is_whole(index, partner) and not self._is_whole(first, partner)
            ):
                there[partner] = index
        return there

    def _is_whole(self, index: int, partner: int) -> bool:
        return self.ours.values[index].flat.size == self.theirs.values[partner].flat.size

    @cached_property
    def sources(self) -> list[int]:
        """The reference's values from which it makes the right one, nearest first."""
        return self.theirs.sources(self.partner, set(self.there))

    @cached_property
    def reference(self) -> Program:
        """What the reference computes in the region's place."""
        inner = [index for index in self.sources if index not in self.there]
        return program_of(self.theirs.values, [*inner, self.partner], self.partner)

    @cached_property
    def reference_steps(self) -> list[Step]:
        """The reference's operations that compute something, nearest first."""
        return [step for step in reversed(self.reference.steps) if step.func is not None]

    @cached_property
    def reference_constants(self) -> list[float | int]:
        """Numbers among the arguments of the reference's operations."""
        leaves = [
            leaf
            for step in self.reference_steps
            if not step.moves
            for leaf in tree_leaves((step.args, step.kwargs))
            if isinstance(leaf, float | int) and not isinstance(leaf, bool)
        ]
        return list(dict.fromkeys(leaves))

    def tensors(self) -> Iterator[int]:
        """Yield the reference's weights and known values behind the right one, nearest first."""
        for index in self.sources:
            value = self.theirs.values[index]
            if value.floating and (not value.step.moves or index in self.there):
                yield index

    def orders_in(self, partner: int, shape: torch.Size) -> Iterator[Array]:
        """Yield the orders in which a value of the reference may stand in a shape of ours."""
        other = self.theirs.values[partner]
        size = other.flat.size
        wanted = shape_of(shape, size)
        if int(np.prod(wanted)) != size:
            return
        plain = np.arange(size)
        yield plain
        for order in orders_by_shape([wanted], shapes_of(self.theirs, partner)):
            if not np.array_equal(order, plain):
                yield order

    def in_layout(self, partner: int, shape: torch.Size) -> Iterator[torch.Tensor]:
        """Yield a value of the reference in the orders in which it may stand in a shape of ours."""
        other = self.theirs.values[partner]
        if not other.tensor.is_complex():
            for order in self.orders_in(partner, shape):
                yield torch.from_numpy(np.ascontiguousarray(other.flat[order])).reshape(shape)

    def as_reference(self) -> Program:
        """Return what the reference computes, from our values where they are the same as its."""
        inputs: dict[int, torch.Tensor] = {}
        for index, tensor in self.reference.inputs.items():
            mine = self.there.get(index)
            value = None if mine is None else self.ours.values[mine]
            inputs[index] = tensor
            same = value is not None and value.floating and value.flat.size == tensor.numel()
            if value is not None and same and is_informative(value.flat):
                other = self.theirs.values[index]
                order = order_of_equals(other.flat, value.flat)
                inputs[index] = shaped(value.flat[order], other.tensor)
        program = Program(self.reference.steps, inputs, self.partner)
        shape = list(self.value.tensor.shape)
        if np.array_equal(self.order, np.arange(self.order.size)):
            arranged = [operation(ATEN.reshape.default, SELF, shape)]
        else:
            arranged = [
                operation(ATEN.reshape.default, SELF, [-1]),
                operation(ATEN.index_select.default, LAST, 0, torch.from_numpy(self.order)),
                operation(ATEN.reshape.default, LAST, shape),
            ]
        return (
            program if self.value.tensor.is_complex() else program.inserted(self.partner, arranged)
        )


def shapes_of(side: KnownValues, index: int) -> list[tuple[int, ...]]:
    """Return the shapes in which a value is seen with its elements in the same order."""
    flat = side.values[index].flat
    shapes = [shape_of(side.values[index].shape, flat.size)]
    todo = [index]
    while todo and len(shapes) < MOST_SHAPES:
        for reader in side.readers(todo.pop()):
            value = side.values[reader]
            if is_plain_copy(side.tape, value) and np.array_equal(value.flat, flat, equal_nan=True):
                shapes.append(shape_of(value.shape, flat.size))
                todo.append(reader)
    joined = [(shape[0] * shape[1], *shape[2:]) for shape in shapes if len(shape) > 2]
    return list(dict.fromkeys([*shapes, *joined]))


def region_of(search: Search, cut: Cut, end: float) -> Region | None:
    """Return the region of a cut; None where it cannot be run alone."""
    values, first = search.ours.values, search.original.values
    if len(values) != len(first) or not cut.region:
        return None
    program = program_of(values, cut.region, cut.value)
    if len(program.steps) > MOST_STEPS:
        return None
    # What the region gets from outside of the call was repaired since, if it is the cut itself.
    own = {index: first[index].tensor for index in cut.region if index in program.inputs}
    program = replace(program, inputs={**program.inputs, **own})
    return _region(search, program, cut.partner, cut.order, end)


def handed_region(region: Region, cut: Cut) -> Region | None:
    """Return the value that a region is handed wrongly, as a region of its own without operations.

    None where it is handed nothing wrong, or where it is not clear what belongs there.
    """
    handed = cut.handed
    if handed is None or handed.partner is None or handed.value not in region.known:
        return None
    index, shape = handed.value, region.known[handed.value].shape
    other = region.theirs.values[handed.partner]
    for order in region.orders_in(handed.partner, shape):
        fresh = region.program.fresh()
        tensor = shaped(other.flat[order], region.known[index])
        program = region.program.with_input(fresh, tensor)
        program = program.reading(program.readers(index), {index: fresh})
        if region.agrees(program):
            own = Program((), {index: region.known[index]}, index)
            return _region(region.search, own, handed.partner, order, region.end)
    return None


def _region(
    search: Search, program: Program, partner: int, order: Array, end: float
) -> Region | None:
    try:
        region = Region(search, program, partner, order, end)
    except (*REFUSALS, KeyError):
        return None
    return region if region.is_wrong else None
