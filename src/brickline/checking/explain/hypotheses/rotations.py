"""Hypotheses about rotations: halves turned against each other, or neighbours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import torch

from brickline.checking.explain.program import LAST, SELF, Program, operation
from brickline.checking.explain.region import Region, Trial

ATEN = torch.ops.aten
PARTS = frozenset(
    {"aten::slice", "aten::split", "aten::split_with_sizes", "aten::chunk", "aten::unbind"}
)
"""Operations that take a tensor apart."""
HALVES, NEIGHBOURS = "halves", "neighbours"

Pair = tuple[int, int, int, int]
"""A value, the dimension in which it was taken apart, and its two parts."""


def other_rotations(region: Region) -> Iterator[Trial]:
    """Yield the region with all that was cut into halves cut into neighbours, and the reverse."""
    pairs = _pairs(region)
    for kind, other in ((HALVES, NEIGHBOURS), (NEIGHBOURS, HALVES)):
        chosen = [pair for pair in pairs if _kind(region, pair) == kind]
        if not chosen:
            continue
        program = region.program
        for source, dim, one, second in chosen:
            whole = region.ours.values[source].tensor
            for index, tensor in zip((one, second), _parts(whole, dim, other), strict=True):
                program = _with_value(program, index, tensor)
        verb = "rotates" if all(_is_rotated(region, pair) for pair in chosen) else "combines"
        words = f"it {verb} {kind} with each other, where {other} belong"
        repair = {"kind": "rotation", "value": kind, "right": other}
        yield Trial(program, words, repair)
        for arranged in _rearranged(region, program):
            yield Trial(arranged, words, repair)


def _pairs(region: Region) -> list[Pair]:
    """Return the values that were taken apart into two parts of the same shape."""
    values = region.ours.values
    parts: defaultdict[tuple[int, torch.Size], list[int]] = defaultdict(list)
    for index in region.program.values():
        if index < len(values) and values[index].step.name in PARTS and values[index].floating:
            value = values[index]
            parts[value.step.inputs[0], value.shape].append(index)
    pairs: list[Pair] = []
    for (source, shape), several in parts.items():
        whole = values[source].shape
        if len(several) == 2 and len(whole) == len(shape):
            halved = [dim for dim in range(len(shape)) if whole[dim] == 2 * shape[dim]]
            if len(halved) == 1 and whole.numel() == 2 * shape.numel():
                pairs.append((source, halved[0], several[0], several[1]))
    return pairs


def _is_rotated(region: Region, pair: Pair) -> bool:
    """Return whether both parts are multiplied twice, by a cosine and by a sine."""
    readers = [region.program.readers(index) for index in pair[2:]]
    return all(sum(step.name == "aten::mul" for step in several) > 1 for several in readers) or any(
        step.name in ("aten::neg", "aten::view_as_complex")
        for several in readers
        for step in several
    )


def _kind(region: Region, pair: Pair) -> str | None:
    source, dim, one, second = pair
    values = region.ours.values
    for kind in (HALVES, NEIGHBOURS):
        first, last = _parts(values[source].tensor, dim, kind)
        if torch.equal(first, values[one].tensor) and torch.equal(last, values[second].tensor):
            return kind
    return None


def _parts(whole: torch.Tensor, dim: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    size = whole.shape[dim]
    places = torch.arange(size, device=whole.device)
    rows = places.reshape(2, -1) if kind == HALVES else places.reshape(-1, 2).T
    return whole.index_select(dim, rows[0]), whole.index_select(dim, rows[1])


def _with_value(program: Program, index: int, tensor: torch.Tensor) -> Program:
    """Return a program that reads a tensor from outside in the place of a value."""
    fresh = program.fresh()
    moved = program.with_input(fresh, tensor).reading(program.readers(index), {index: fresh})
    return replace(moved, output=fresh) if program.output == index else moved


def _rearranged(region: Region, program: Program) -> Iterator[Program]:
    """Yield a program whose output has halves for neighbours in one of its dimensions."""
    shape = list(region.value.tensor.shape)
    for dim, size in enumerate(shape):
        if size % 2 or size < 4:
            continue
        for cut in ([2, size // 2], [size // 2, 2]):
            parts = [*shape[:dim], *cut, *shape[dim + 1 :]]
            yield program.inserted(
                program.output,
                [
                    operation(ATEN.reshape.default, SELF, parts),
                    operation(ATEN.transpose.int, LAST, dim, dim + 1),
                    operation(ATEN.reshape.default, LAST, shape),
                ],
            )
