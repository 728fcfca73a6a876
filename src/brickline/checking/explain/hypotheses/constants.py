"""Hypotheses about the numbers in a region: epsilons, scales, dimensions, shifts, modes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from brickline.checking.execution.tape import Step
from brickline.checking.explain.program import SELF, Program, changed, operation
from brickline.checking.explain.region import Region, Trial
from brickline.checking.explain.words import number_words, op_words, value_words

ATEN = torch.ops.aten
TRIES = 12
"""Newton steps after which a number is not solved for any further."""
PARALLEL = 0.2
"""Cosine of the difference and what a number does to it, below which it is not solved for."""
EPSILON_OPS = frozenset({"aten::rsqrt", "aten::sqrt", "aten::pow"})
ADDITIONS = frozenset({"aten::add", "aten::sub", "aten::rsub", "aten::add_", "aten::sub_"})
FACTORS = frozenset({"aten::mul", "aten::div", "aten::mul_", "aten::div_"})
TURNS = frozenset({"aten::roll", "aten::rot90", "aten::triu", "aten::tril"})
"""Operations whose whole numbers are shifts, for which the other direction makes sense."""
MODES = {"none": "tanh", "tanh": "none"}
FIXED = frozenset({"dtype", "device", "layout", "memory_format", "pin_memory", "implicit"})
"""Arguments that change no numbers in float64."""

FACTORIES = frozenset({"aten::ones", "aten::zeros", "aten::full", "aten::empty"})
SIZES = ("size", "shape", "implicit")
"""Arguments of these, and of views, that other sizes would not fit."""


def changed_constants(region: Region) -> Iterator[Trial]:
    """Yield the region with one argument of one operation changed."""
    steps = [step for step in reversed(region.program.steps) if step.func is not None]
    for step in sorted(steps, key=lambda step: step.moves):
        for leaf, name, old in arguments(step):
            for new in _others(region, step, old):
                words = _words(region, step, name, old, new)
                repair = _repair(step, name, old, new)
                for steps in _groups(region, step, leaf, old):
                    yield Trial(_with_leaves(region.program, steps, leaf, new), words, repair)


def solved_constants(region: Region) -> Iterator[Trial]:
    """Yield the region with one number replaced by the one that fits best."""
    for step in reversed(region.program.steps):
        if step.func is None:
            continue
        for leaf, name, old in arguments(step):
            if isinstance(old, bool) or not isinstance(old, int | float) or step.moves:
                continue
            if isinstance(old, int) and step.name not in ADDITIONS | FACTORS:
                continue
            if not region.is_float(step.outputs[0]):
                continue
            for steps in _groups(region, step, leaf, old):

                def variant(new: float, steps: Sequence[Step] = steps, leaf: int = leaf) -> Program:
                    return _with_leaves(region.program, steps, leaf, new)

                new = solved(region, variant, float(old))
                if new is not None and not math.isclose(new, float(old), rel_tol=1e-4):
                    words = _words(region, step, name, old, new)
                    yield Trial(variant(new), words, _repair(step, name, old, new))


def missing_constants(region: Region) -> Iterator[Trial]:
    """Yield the region with a value multiplied by a number, or with one added."""
    known = region.reference_constants
    for index in region.places:
        if not region.is_float(index):
            continue
        for func, start in ((ATEN.mul.Scalar, 1.0), (ATEN.add.Scalar, 0.0)):

            def variant(new: float, index: int = index, func: Any = func) -> Program:
                return region.program.inserted(index, [operation(func, SELF, new)])

            new = solved(region, variant, start)
            if new is None or not is_plain(new, known):
                continue
            verb = "multiplied by" if func is ATEN.mul.Scalar else "added to"
            where = value_place(region, index)
            words = (
                f"{where} is to be multiplied by {number_words(new)}"
                if verb == "multiplied by"
                else f"{number_words(new)} is to be added to {where}"
            )
            repair = {"kind": "missing constant", "op": op_words(func), "value": new}
            yield Trial(variant(new), words, repair)


# --- arguments


def arguments(step: Step) -> Iterator[tuple[int, str, Any]]:
    """Yield the numbers, words and flags that an operation is given, with place and name."""
    flat, _ = tree_flatten((step.args, step.kwargs))
    names = _names(step)
    for leaf, value in enumerate(flat):
        name = names[leaf]
        if isinstance(value, bool | int | float | str) and name.split("[")[0] not in FIXED:
            if name.startswith(SIZES) and (step.moves or step.name in FACTORIES):
                continue
            yield leaf, name, value


def _groups(region: Region, step: Step, leaf: int, old: Any) -> Iterator[list[Step]]:
    """Yield the steps at one line of code that are given the same, then the step alone."""
    same = [
        item
        for item in region.program.at_line_of(step)
        if any(place == leaf and value == old for place, _, value in arguments(item))
    ]
    if len(same) > 1 and same[0].number == max(item.number for item in same):
        yield same
    yield [step]


def _with_leaves(program: Program, steps: Sequence[Step], leaf: int, new: Any) -> Program:
    for step in steps:
        program = program.with_step(step, with_leaf(step, leaf, new))
    return program


def _names(step: Step) -> list[str]:
    schema = [argument.name for argument in step.func._schema.arguments]
    names: list[str] = []
    for place, value in enumerate(step.args):
        size = len(tree_flatten(value)[0])
        name = schema[place] if place < len(schema) else f"argument {place}"
        names += (
            [name]
            if size == 1 and not isinstance(value, list | tuple)
            else [f"{name}[{k}]" for k in range(size)]
        )
    for name, value in step.kwargs.items():
        names += [name] * len(tree_flatten(value)[0])
    return names


def with_leaf(step: Step, leaf: int, new: Any) -> Step:
    """Return a step with one leaf of its arguments replaced."""
    flat, shape = tree_flatten((step.args, step.kwargs))
    flat[leaf] = new
    args, kwargs = tree_unflatten(flat, shape)
    return changed(step, args, kwargs)


def _others(region: Region, step: Step, old: Any) -> list[Any]:
    if isinstance(old, str):
        return [MODES[old]] if old in MODES else []
    if isinstance(old, bool):
        return [not old]
    same = [
        value
        for other in region.reference_steps
        if other.name == step.name
        for _, _, value in arguments(other)
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    if isinstance(old, float):
        near = [*same, *region.reference_constants]
        inverse = [1.0 / value for value in near if value]
        choices: list[Any] = [float(value) for value in (*near, *inverse)]
    elif step.moves or step.name not in ADDITIONS | FACTORS:
        whole = [value for value in same if isinstance(value, int)]
        choices = [*whole, old + 1, old - 1, old + 2, old - 2, 0, 1, -1, -2]
        if step.name in TURNS:
            choices.append(-old)
    else:
        choices = [*same, *region.reference_constants, old + 1, old - 1, -old]
    return [value for value in dict.fromkeys(choices) if value != old]


# --- solving


def solved(region: Region, variant: Callable[[float], Program], start: float) -> float | None:
    """Return the number with which a variant computes the right thing; None where there is none."""
    number = start
    for round_number in range(TRIES):
        step = 1e-6 * max(abs(number), 1e-3)
        here = region.residual(variant(number))
        there = region.residual(variant(number + step))
        if here is None or there is None:
            return None
        slope = (there - here) / step
        steepness, gap = float(slope @ slope), float(np.linalg.norm(here))
        if not steepness or not math.isfinite(steepness) or not math.isfinite(gap):
            return None
        cosine = abs(float(slope @ here)) / (math.sqrt(steepness) * max(gap, 1e-300))
        if round_number == 0 and cosine < PARALLEL:
            return None
        after = number - float(slope @ here) / steepness
        if region.agrees(variant(after)):
            return _rounded(region, variant, after)
        if round_number > 2 and cosine < 1e-3:
            return None
        number = after
    return None


def _rounded(region: Region, variant: Callable[[float], Program], number: float) -> float:
    """Return the shortest number that fits about as well as the best one."""
    best = region.gap_of(variant(number))
    choices = [value for value in region.reference_constants if value]
    near = [value for value in choices if math.isclose(value, number, rel_tol=0.05)]
    rounded = [float(f"{number:.{digits}g}") for digits in (1, 2, 3, 6, 9)]
    for choice in (*map(float, near), *rounded):
        gap = region.gap_of(variant(choice))
        if gap <= region.tolerance and gap <= max(3 * best, 1e-3 * region.tolerance):
            return choice
    return number


def is_plain(number: float, known: list[float | int]) -> bool:
    """Return whether a solved number is one that somebody would write."""
    near = [1.0, *known, *(1.0 / value for value in known if value)]
    if any(math.isclose(number, value, rel_tol=1e-9) for value in near):
        return True
    plain = (number, 1.0 / number if number else 0.0, number * number)
    return any(
        math.isclose(value, float(f"{value:.3g}"), rel_tol=1e-9)
        for value in (*plain, *((1.0 / plain[2],) if number else ()))
    )


# --- words


def value_place(region: Region, index: int) -> str:
    """Return how a value in the region is called."""
    step = region.program.producer(index)
    if step is None and index < len(region.ours.values):
        return value_words(region.ours, index)
    assert step is not None
    return f"the output of {op_words(step)}"


def _words(region: Region, step: Step, name: str, old: Any, new: Any) -> str:
    label = _label(region, step, name)
    known = any(
        new == value
        for other in region.reference_steps
        if other.name == step.name or (isinstance(new, float) and not other.moves)
        for _, _, value in arguments(other)
    )
    right = "the reference's " if known else ""
    return (
        f"{label} is {number_words(old)} in {op_words(step)}; "
        f"with {right}{number_words(new)} it is right"
    )


def _label(region: Region, step: Step, name: str) -> str:
    plain = name.split("[")[0]
    whole = [index for index in step.outputs if index < len(region.ours.values)]
    after = {region.ours.values[k].step.name for index in whole for k in region.ours.readers(index)}
    if plain in ("other", "alpha") and step.name in ADDITIONS and after & EPSILON_OPS:
        return "the epsilon"
    labels = {"other": "the constant", "self": "the base", "eps": "eps", "value": "the value"}
    return labels.get(plain, f"{name}")


def _repair(step: Step, name: str, old: Any, new: Any) -> dict[str, Any]:
    return {"kind": "constant", "op": step.name, "argument": name, "value": old, "right": new}


def dimension_orders(region: Region) -> Iterator[Trial]:
    """Yield the region with the dimensions of one list exchanged."""
    for step in reversed(region.program.steps):
        if step.func is None:
            continue
        for place, value in enumerate(step.args):
            whole = isinstance(value, list | tuple) and all(type(item) is int for item in value)
            if not whole or not 1 <= len(value) <= 5:
                continue
            name = step.func._schema.arguments[place].name
            for other in _lists(region, step, list(value)):
                args = (*step.args[:place], other, *step.args[place + 1 :])
                words = f"{name} is {list(value)} in {op_words(step)}; with {other} it is right"
                repair = _repair(step, name, list(value), other)
                yield Trial(region.program.with_step(step, changed(step, args)), words, repair)


def _lists(region: Region, step: Step, value: list[int]) -> list[list[int]]:
    lists = [list(items) for items in itertools.permutations(value)]
    for other in region.reference_steps:
        if other.name == step.name:
            lists += [list(arg) for arg in other.args if isinstance(arg, list | tuple)]
    if "dim" in [argument.name for argument in step.func._schema.arguments]:
        lists += [[dim] for dim in range(-4, 0)] + [[-1, -2], [-2, -3], [-1, -3], [-1, -2, -3]]
    unique = dict.fromkeys(tuple(items) for items in lists if all(type(k) is int for k in items))
    return [list(items) for items in unique if list(items) != value]
