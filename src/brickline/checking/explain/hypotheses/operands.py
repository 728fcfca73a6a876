"""Hypotheses about operands: a tensor of the reference's that is missing, or one read wrongly."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from brickline.checking.execution.tape import Ref
from brickline.checking.explain.hypotheses.constants import value_place
from brickline.checking.explain.hypotheses.functions import is_mask, value_words_of
from brickline.checking.explain.program import SELF, Program, operation
from brickline.checking.explain.region import Region, Trial
from brickline.checking.explain.words import value_words

ATEN = torch.ops.aten
MOST_TENSORS = 10
"""Tensors of the reference that are put in."""
MOST_LAYOUTS = 3
"""Orders of its elements in which each of them is."""
ARITHMETIC = {
    "+": ATEN.add.Tensor,
    "-": ATEN.sub.Tensor,
    "*": ATEN.mul.Tensor,
    "/": ATEN.div.Tensor,
}


def missing_operands(region: Region) -> Iterator[Trial]:
    """Yield the region with a tensor of the reference added, subtracted, multiplied or divided."""
    for partner in itertools.islice(region.tensors(), MOST_TENSORS):
        for index in region.places:
            if not region.is_float(index):
                continue
            if is_mask(region.theirs.values[partner].tensor):
                continue
            for tensor in _fitting(region, partner, region.known[index].shape):
                for sign, func in ARITHMETIC.items():
                    fresh = region.program.fresh()
                    program = Program(
                        region.program.steps,
                        {**region.program.inputs, fresh: tensor},
                        region.program.output,
                    ).inserted(index, [operation(func, SELF, Ref(fresh))])
                    words = _words(region, partner, index, sign)
                    name = value_words(region.theirs, partner)
                    repair = {"kind": "operand", "op": sign, "tensor": name}
                    yield Trial(program, words, repair)


def exchanged_inputs(region: Region) -> Iterator[Trial]:
    """Yield the region with two of its inputs exchanged, or one taken in another's place."""
    inputs = [index for index in region.program.inputs if region.program.readers(index)]
    for one, other in itertools.combinations(inputs, 2):
        if region.known[one].shape != region.known[other].shape:
            continue
        program = region.program.reading(region.program.steps, {one: other, other: one})
        first, second = value_words_of(region, one), value_words_of(region, other)
        words = f"it reads {first} in the place of {second}, and the other way round"
        yield Trial(program, words, {"kind": "exchanged inputs", "inputs": [first, second]})
    for step in reversed(region.program.steps):
        for source in step.inputs:
            for other, tensor in _elsewhere(region, source):
                program = region.program.with_input(other, tensor).reading([step], {source: other})
                first, second = value_words_of(region, source), value_words_of(region, other)
                words = f"it reads {first} in the place of {second}"
                repair = {"kind": "input", "input": first, "right": second}
                yield Trial(program, words, repair)


def _elsewhere(region: Region, source: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield values of ours that the reference needs here, of the shape of another one."""
    shape = region.known[source].shape
    known = [region.there[partner] for partner in region.sources if partner in region.there]
    for index in dict.fromkeys([*known, *region.program.inputs]):
        if index != source and index < len(region.ours.values):
            tensor = region.known.get(index, region.ours.values[index].tensor)
            if tensor.shape == shape and region.program.producer(index) is None:
                yield index, tensor


def _fitting(region: Region, partner: int, shape: torch.Size) -> Iterator[torch.Tensor]:
    """Yield a tensor of the reference in shapes that can be added to one of ours."""
    other = region.theirs.values[partner]
    if other.tensor.numel() > shape.numel() or other.tensor.is_complex():
        return
    if other.tensor.numel() == shape.numel() and len(shape) > 1:
        yield from itertools.islice(region.in_layout(partner, shape), MOST_LAYOUTS)
        return
    squeezed = other.tensor.squeeze()
    if squeezed.ndim == 0:
        yield squeezed
    elif squeezed.ndim == 1:
        for dim in reversed(range(len(shape))):
            if shape[dim] == squeezed.numel():
                yield squeezed.reshape(-1, *[1] * (len(shape) - dim - 1))
        if len(shape) > 1 and shape[-1] * shape[-2] == squeezed.numel():
            yield squeezed.reshape(shape[-2], shape[-1])
    else:
        try:
            fits = torch.broadcast_shapes(squeezed.shape, shape) == shape
        except RuntimeError:
            fits = False
        if fits:
            yield squeezed


def _words(region: Region, partner: int, index: int, sign: str) -> str:
    name = value_words(region.theirs, partner)
    where = value_place(region, index)
    mine = region.there.get(partner)
    own = mine is not None and mine in region.program.inputs
    label = f"the reference's {name.removeprefix('the ').removeprefix('a ')}"
    if sign == "+":
        return f"{label} is not added to {where}"
    if sign == "-":
        often = " twice" if own else ", which the reference does not do there"
        return f"{label} is added to {where}{often}"
    if sign == "*":
        return f"{where} is not multiplied by {label}"
    return f"{where} is not divided by {label}, or multiplied by it once too often"
