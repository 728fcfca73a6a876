"""What a region computes and what the reference computes in its place, as short expressions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from brickline.align.equality import comparable
from brickline.checking.execution.tape import CONSTANT, READ, WEIGHT, Ref, Step, flat_of
from brickline.checking.explain.program import Program
from brickline.checking.explain.region import Region, Trial
from brickline.checking.explain.words import number_words, op_words, value_words
from brickline.checking.logic.known_values import KnownValues

LONGEST = 120
"""Characters of an expression; longer ones tell nobody anything."""
MOST_OPERATIONS = 8
LETTERS = "abcdefgh"
SILENT = frozenset(
    {
        "view",
        "expand",
        "clone",
        "unsafe_view",
        "unsqueeze",
        "squeeze",
        "to_copy",
        "contiguous",
        "detach",
        "alias",
        "lift_fresh",
        "t",
        "transpose",
        "permute",
    }
)
"""Operations that only change shapes."""


def other_expressions(region: Region) -> Iterator[Trial]:
    """Yield the reference's operations on the same inputs, if both sides are short."""
    if not _in_order(region):
        return
    letters: dict[object, str] = {}
    names: dict[str, str] = {}
    ours = _expression(region, region.program, region.ours, letters, names)
    theirs = _expression(region, region.reference, region.theirs, letters, names)
    if ours is None or theirs is None or ours == theirs:
        return
    if theirs in names and (ours in names or theirs not in _letters(ours)):
        return  # nothing is said by that
    if not _letters(ours) & _letters(theirs) and names:
        return
    mine, right = _letters(ours), _letters(theirs)
    if not (mine <= right or right <= mine) and _skeleton(ours) != _skeleton(theirs):
        return  # weights may be folded, and then other operations are no difference
    if any(names[letter] in _own_weights(region) for letter in mine - right) and (
        _skeleton(ours) != _skeleton(theirs)
    ):
        return
    with_names = ", ".join(f"{letter} {name}" for letter, name in names.items())
    where = f", with {with_names}" if names else ""
    words = f"it computes {ours} where the reference computes {theirs}{where}"
    yield Trial(
        region.as_reference(), words, {"kind": "expression", "value": ours, "right": theirs}
    )


def _in_order(region: Region) -> bool:
    """Return whether all that both sides read lies in them in orders that shapes explain."""
    for index in region.program.inputs:
        known = index < len(region.ours.values)
        partner = region.search.explained.get(index) if known else None
        if partner is None or index in region.search.healed:
            continue
        mine = region.known[index]
        size = region.theirs.values[partner].tensor.numel()
        if not mine.dtype.is_floating_point or mine.numel() != size:
            continue
        gap = region.ours.tolerances[index] + region.theirs.tolerances[partner]
        same = comparable(flat_of(mine))
        layouts = region.in_layout(partner, mine.shape)
        if all(
            np.abs(comparable(flat_of(tensor)) - same).max(initial=0.0) > gap for tensor in layouts
        ):
            return False
    return True


def _own_weights(region: Region) -> set[str]:
    values = region.ours.values
    return {
        value_words(region.ours, index)
        for index in region.program.inputs
        if index < len(values) and values[index].step.name in (WEIGHT, CONSTANT)
    }


def _skeleton(expression: str) -> str:
    return re.sub(r"\b[a-h]\b", "_", expression)


def _letters(expression: str) -> set[str]:
    return {word for word in re.split(r"\W+", expression) if word in LETTERS and word}


def _expression(
    region: Region,
    program: Program,
    side: KnownValues,
    letters: dict[object, str],
    names: dict[str, str],
) -> str | None:
    producers = {index: step for step in program.steps for index in step.outputs}
    computed = [step for step in program.steps if op_words(step) not in SILENT]
    if len(computed) > MOST_OPERATIONS:
        return None

    def letter(index: int) -> str:
        partner = region.search.explained.get(index) if side is region.ours else index
        size = side.values[index].tensor.numel()
        key: object = (side is region.ours, index)
        if partner is not None:
            key = ("shared", partner, size)
        if key not in letters:
            if len(letters) == len(LETTERS):
                raise OverflowError
            letters[key] = LETTERS[len(letters)]
            whole = None if partner is None else region.theirs.values[partner].tensor.numel()
            part = "" if whole is None or whole <= size else f"{size} of the {whole} elements of "
            names[letters[key]] = part + value_words(side, index)
        return letters[key]

    def text(leaf: Any) -> str | None:
        if isinstance(leaf, Ref):
            step = producers.get(leaf.index)
            return letter(leaf.index) if step is None else of(step, leaf.index)
        if isinstance(leaf, list | tuple):
            return "[" + ", ".join(filter(None, map(text, leaf))) + "]"
        if isinstance(leaf, torch.Tensor):
            return "a table"
        plain = leaf is None or isinstance(leaf, torch.dtype | torch.device | torch.layout)
        return None if plain else number_words(leaf)

    def of(step: Step, index: int) -> str:
        name = op_words(step)
        if step.name == READ:
            return "read(" + ", ".join(filter(None, map(text, map(Ref, step.inputs)))) + ")"
        if name in SILENT:
            return text(Ref(step.inputs[0])) or ""
        parts = [text(arg) for arg in step.args]
        parts += [
            f"{key}={text(arg)}"
            for key, arg in step.kwargs.items()
            if key not in _HIDDEN and text(arg) is not None
        ]
        many = f"[{step.outputs.index(index)}]" if len(step.outputs) > 1 and step.moves else ""
        return f"{name}({', '.join(filter(None, parts))}){many}"

    try:
        expression = text(Ref(program.output)) or ""
    except (OverflowError, RecursionError):
        return None
    return expression if len(expression) <= LONGEST else None


_HIDDEN = frozenset({"dtype", "device", "layout", "memory_format", "pin_memory", "non_blocking"})
