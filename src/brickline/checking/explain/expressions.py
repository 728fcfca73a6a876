"""What a region computes and what the reference computes in its place, as short expressions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from brickline.checking.execution.tape import READ, Ref, Step
from brickline.checking.explain.program import Program
from brickline.checking.explain.region import Region, Trial
from brickline.checking.explain.words import number_words, op_words, value_words
from brickline.checking.logic.known_values import KnownValues

LONGEST = 140
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
    letters: dict[object, str] = {}
    names: dict[str, str] = {}
    ours = _expression(region, region.program, region.ours, letters, names)
    theirs = _expression(region, region.reference, region.theirs, letters, names)
    if ours is None or theirs is None or ours == theirs:
        return
    with_names = ", ".join(f"{letter} {name}" for letter, name in names.items())
    where = f", with {with_names}" if names else ""
    words = f"it computes {ours} where the reference computes {theirs}{where}"
    program = Program(region.reference.steps, region.own_inputs(), region.partner)
    yield Trial(program, words, {"kind": "expression", "value": ours, "right": theirs})


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
        key: object = ("shared", partner) if partner is not None else (side is region.ours, index)
        if key not in letters:
            if len(letters) == len(LETTERS):
                raise OverflowError
            letters[key] = LETTERS[len(letters)]
            names[letters[key]] = value_words(side, index)
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
