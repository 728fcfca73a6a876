"""Hypotheses about the functions in a region: another activation, one too many, one too few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from brickline.checking.execution.tape import READ, Ref, Step
from brickline.checking.explain.hypotheses.constants import value_place
from brickline.checking.explain.program import (
    LAST,
    SELF,
    Operation,
    Program,
    changed,
    operation,
)
from brickline.checking.explain.region import Region, Trial
from brickline.checking.explain.words import number_words, op_words, value_words

ATEN = torch.ops.aten
Operations = Sequence[Operation]
FUNCTIONS: dict[str, Operations] = {
    "gelu": [operation(ATEN.gelu.default, SELF)],
    "gelu (tanh)": [operation(ATEN.gelu.default, SELF, approximate="tanh")],
    "silu": [operation(ATEN.silu.default, SELF)],
    "relu": [operation(ATEN.relu.default, SELF)],
    "sigmoid": [operation(ATEN.sigmoid.default, SELF)],
    "tanh": [operation(ATEN.tanh.default, SELF)],
    "exp": [operation(ATEN.exp.default, SELF)],
    "log": [operation(ATEN.log.default, SELF)],
    "softplus": [operation(ATEN.softplus.default, SELF)],
    "elu": [operation(ATEN.elu.default, SELF)],
    "quick gelu": [
        operation(ATEN.mul.Scalar, SELF, 1.702),
        operation(ATEN.sigmoid.default, LAST),
        operation(ATEN.mul.Tensor, SELF, LAST),
    ],
    "relu squared": [operation(ATEN.relu.default, SELF), operation(ATEN.mul.Tensor, LAST, LAST)],
    "leaky relu": [operation(ATEN.leaky_relu.default, SELF)],
    "square": [operation(ATEN.mul.Tensor, SELF, SELF)],
    "sqrt": [operation(ATEN.sqrt.default, SELF)],
    "rsqrt": [operation(ATEN.rsqrt.default, SELF)],
    "reciprocal": [operation(ATEN.reciprocal.default, SELF)],
    "neg": [operation(ATEN.neg.default, SELF)],
    "abs": [operation(ATEN.abs.default, SELF)],
    "sin": [operation(ATEN.sin.default, SELF)],
    "cos": [operation(ATEN.cos.default, SELF)],
    "softsign": [
        operation(ATEN.abs.default, SELF),
        operation(ATEN.add.Scalar, LAST, 1.0),
        operation(ATEN.div.Tensor, SELF, LAST),
    ],
    "hardtanh": [operation(ATEN.hardtanh.default, SELF)],
    "log_sigmoid": [operation(ATEN.sigmoid.default, SELF), operation(ATEN.log.default, LAST)],
    "1 minus it": [operation(ATEN.neg.default, SELF), operation(ATEN.add.Scalar, LAST, 1.0)],
}
"""What an elementwise function is made of."""
MOST_CHAIN = 6
"""Operations of the candidate that one function takes the place of, at the most."""
DUAL = {
    "aten::add": (ATEN.sub.Tensor, ATEN.mul.Tensor),
    "aten::sub": (ATEN.add.Tensor,),
    "aten::mul": (ATEN.add.Tensor, ATEN.div.Tensor),
    "aten::div": (ATEN.mul.Tensor, ATEN.sub.Tensor),
    "aten::maximum": (ATEN.minimum.default,),
    "aten::minimum": (ATEN.maximum.default,),
    "aten::sin": (ATEN.cos.default,),
    "aten::cos": (ATEN.sin.default,),
    "aten::exp": (ATEN.sigmoid.default,),
    "aten::mean": (ATEN.sum.dim_IntList, ATEN.amax.default),
    "aten::sum": (ATEN.mean.dim, ATEN.amax.default),
    "aten::amax": (ATEN.mean.dim, ATEN.sum.dim_IntList, ATEN.amin.default),
}
"""Operations that are mistaken for one another."""


def other_functions(region: Region) -> Iterator[Trial]:
    """Yield the region with an elementwise function in the place of some operations."""
    for first, last, steps in _chains(region):
        replaced = ", ".join(dict.fromkeys(_with_numbers(step) for step in steps[::-1]))
        for name, operations in _functions(region):
            program = _cut_out(region.program, first, last, operations)
            where = value_words_of(region, first)
            words = f"it applies {replaced} to {where}, where {name} belongs"
            yield Trial(program, words, {"kind": "function", "ops": replaced, "right": name})


def missing_functions(region: Region) -> Iterator[Trial]:
    """Yield the region with an elementwise function of the reference's put in."""
    names = {step.name for step in region.reference_steps}
    for name, operations in _functions(region):
        if not _is_among(operations, names):
            continue
        for index in region.places:
            if region.is_float(index):
                program = region.program.inserted(index, operations)
                words = (
                    f"{name} is missing: the reference applies it to {value_place(region, index)}"
                )
                yield Trial(program, words, {"kind": "missing function", "right": name})


def dropped(region: Region) -> Iterator[Trial]:
    """Yield the region without one of its operations."""
    for step in reversed(region.program.steps):
        if len(step.outputs) != 1 or step.name == READ or step.name.endswith("_like"):
            continue
        output = region.known[step.outputs[0]]
        for place, source in enumerate(step.inputs):
            if region.known[source].shape != output.shape:
                continue
            others = [index for index in step.inputs if index != source]
            words = f"it has {_of(region, step, others)} too many, which the reference lacks"
            several = region.program.at_line_of(step)
            for steps in (several, [step]) if len(several) > 1 else ([step],):
                program = region.program
                for item in steps:
                    if place < len(item.inputs):
                        now = next(k for k in program.steps if k.outputs is item.outputs)
                        program = program.without(now, now.inputs[place])
                yield Trial(program, words, {"kind": "extra operation", "op": step.name})


def dual_operations(region: Region) -> Iterator[Trial]:
    """Yield the region with an operation that is easily mistaken in the place of one."""
    for step in reversed(region.program.steps):
        for func in DUAL.get(step.name, ()):
            other = changed(step, func=func)
            new = op_words(func)
            words = f"it computes {op_words(step)} where {new} belongs{_line(step)}"
            repair = {"kind": "operation", "op": step.name, "right": func._schema.name}
            yield Trial(region.program.with_step(step, other), words, repair)


def _of(region: Region, step: Step, others: Sequence[int]) -> str:
    numbers = [value for value in step.args[1:] if isinstance(value, int | float)]
    operands = [
        ("a mask: " if is_mask(region.known[index]) else "") + value_words_of(region, index)
        for index in others
    ] or [str(number) for number in numbers[:1]]
    return f"one {op_words(step)}" + (f" ({', '.join(operands)})" if operands else "")


def value_words_of(region: Region, index: int) -> str:
    """Return what a value of the region is called."""
    if index < len(region.ours.values):
        return value_words(region.ours, index)
    return value_place(region, index)


def is_mask(tensor: torch.Tensor) -> bool:
    """Return whether a tensor holds nothing but zeros, ones and fillers of a mask."""
    if tensor.dtype is torch.bool:
        return True
    plain = (tensor == 0) | (tensor == 1) | (tensor.abs() > 1e4)
    return tensor.numel() > 1 and bool(plain.all()) and bool((tensor != tensor.flatten()[0]).any())


def _line(step: Step) -> str:
    return "" if step.source is None else f" (line {step.source[1]})"


def _functions(region: Region) -> Iterator[tuple[str, Operations]]:
    """Yield functions, those of the reference with their own arguments first."""
    names = {step.name for step in region.reference_steps}
    for step in region.reference_steps:
        given = [*step.args[1:], *step.kwargs.values()]
        if step.name in _ELEMENTWISE and not any(isinstance(leaf, Ref) for leaf in given):
            label = _with_numbers(step)
            yield label, [operation(step.func, SELF, *step.args[1:], **step.kwargs)]
    near = sorted(FUNCTIONS, key=lambda name: not _is_among(FUNCTIONS[name], names))
    for name in near:
        yield name, FUNCTIONS[name]


def _with_numbers(step: Step) -> str:
    """Return an operation with the numbers that it is given."""
    given = [
        leaf for leaf in (*step.args, *step.kwargs.values()) if isinstance(leaf, int | float | str)
    ]
    name = op_words(step)
    return f"{name} ({', '.join(map(number_words, given))})" if given else name


def _is_among(operations: Operations, names: set[str]) -> bool:
    return all(item.name in names for item in operations)


_ELEMENTWISE = frozenset(item.name for operations in FUNCTIONS.values() for item in operations) | {
    "aten::pow",
    "aten::clamp",
    "aten::erf",
    "aten::hardswish",
    "aten::clamp_min",
    "aten::log1p",
}


def _chains(region: Region) -> Iterator[tuple[int, int, list[Step]]]:
    """Yield pairs of values of which the second is an elementwise function of the first alone."""
    program = region.program
    elementwise = [
        step
        for step in program.steps
        if (step.name in _ELEMENTWISE or step.name in ("aten::add", "aten::sub", "aten::div"))
        and len(step.outputs) == 1
    ]
    producers = {step.outputs[0]: step for step in elementwise}
    for last in reversed(elementwise):
        steps = [last]
        while len(steps) <= MOST_CHAIN:
            outputs = {step.outputs[0] for step in steps}
            edges = {index for step in steps for index in step.inputs} - outputs
            if len(edges) == 1:
                first = edges.pop()
                shapes = region.known[first].shape, region.known[last.outputs[0]].shape
                if shapes[0] == shapes[1] and region.is_float(first):
                    yield first, last.outputs[0], steps
                edges = {first}
            inner = [producers[index] for index in sorted(edges) if index in producers]
            fresh = [step for step in inner if step not in steps]
            if not fresh:
                break
            steps = [*steps, max(fresh, key=lambda step: step.number)]


def _cut_out(program: Program, first: int, last: int, operations: Operations) -> Program:
    """Return a program in which a function of one value takes the place of another value."""
    readers = program.readers(last)
    longer = program.inserted(first, operations, readers=())
    fresh = longer.fresh() - 1
    steps = [step for step in longer.steps if step in readers]
    moved = longer.reading(steps, {last: fresh})
    if program.output == last:
        return Program(moved.steps, moved.inputs, fresh)
    return moved
