"""A few operations of a tape as a program that can be changed and run.

Values keep the numbers that they have on the tape; those of inserted operations begin at `FRESH`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from brickline.checking.execution.tape import READ, Frame, Ref, Replay, Step, Value

FRESH = 1_000_000_000
"""The first number of a value that no tape has."""

TRUSTING = (
    "aten::native_",
    "aten::_native_",
    "aten::im2col",
    "aten::col2im",
    "aten::unfold",
    "aten::as_strided",
    "aten::convolution",
    "aten::_convolution",
    "aten::_cdist",
    "aten::_fft",
    "aten::_thnn",
    "aten::_embedding_bag",
    "aten::_scaled_dot",
    "aten::avg_pool",
    "aten::max_pool",
    "aten::upsample",
    "aten::grid_sampler",
    "aten::scatter",
    "aten::index_put",
    "aten::_index_put",
    "aten::put",
    "aten::repeat_interleave",
)
"""How operations begin that rely on the sizes and whole numbers they are given.

With others some of them read and write beyond their tensors. So they run as they did, and no other
way.
"""

Tensors = Mapping[int, torch.Tensor]


@dataclass(frozen=True)
class Operation:
    """An operation that is on no tape; it reads `SELF` and `LAST`."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its name, such as ``aten::mul``."""
        name: str = self.func._schema.name
        return name


def operation(func: Any, *args: Any, **kwargs: Any) -> Operation:
    """Return an operation with its arguments."""
    return Operation(func, args, kwargs)


SELF, LAST = Ref(-1), Ref(-2)
"""The value at which operations are inserted, and what the last of them made."""


@dataclass(frozen=True)
class Program:
    """Operations in order, what they read from outside, and the value that counts."""

    steps: tuple[Step, ...]
    inputs: Tensors
    output: int

    # --- running

    def run(self, base: Program | None = None, known: Tensors | None = None) -> Tensors:
        """Return every value.

        Args:
            base: A program of which this is a variant. Default None.
            known: The values of that program; those that nothing changed are not computed again.
        """
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return self._run(base, known)
        finally:
            torch.set_default_dtype(before)

    def _run(self, base: Program | None, known: Tensors | None) -> Tensors:
        sizes = None if base is None or known is None else base.sizes(known)
        run = _Run(dict(self.inputs), sizes)
        unchanged = set() if base is None else set(base.steps)
        for step in self.steps:
            if step in unchanged and known is not None and self._is_known(step, run, known):
                run.values.update({index: known[index] for index in step.outputs})
            else:
                run.execute(step)
        return run.values

    def sizes(self, known: Tensors) -> frozenset[Hashable]:
        """Return with which sizes and whole numbers operations ran that rely on them."""
        return frozenset(_sizes(step, known) for step in self.steps if _is_trusting(step))

    @staticmethod
    def _is_known(step: Step, run: _Run, known: Tensors) -> bool:
        return all(run.values.get(index) is known.get(index) for index in step.inputs) and all(
            index in known for index in step.outputs
        )

    # --- asking

    def producer(self, index: int) -> Step | None:
        """Return the step that computes a value; None where it comes from outside."""
        return next((step for step in self.steps if index in step.outputs), None)

    def at_line_of(self, step: Step) -> list[Step]:
        """Return the steps of the same operation at the same line of code, the given one first."""
        same = [
            item
            for item in self.steps
            if item.name == step.name and item.source == step.source is not None
        ]
        return [step, *(item for item in same if not _is_same(item, step))]

    def readers(self, index: int) -> list[Step]:
        """Return the steps that read a value."""
        return [step for step in self.steps if index in step.inputs]

    def values(self) -> list[int]:
        """Return every value that something reads, in order, and the output."""
        read = {index for step in self.steps for index in step.inputs}
        ordered = [*self.inputs, *(index for step in self.steps for index in step.outputs)]
        return [index for index in ordered if index in read or index == self.output]

    # --- changing

    def with_input(self, index: int, tensor: torch.Tensor) -> Program:
        """Return the program with another tensor from outside."""
        return replace(self, inputs={**self.inputs, index: tensor})

    def with_step(self, step: Step, other: Step) -> Program:
        """Return the program with another operation in the place of one."""
        steps = tuple(other if _is_same(item, step) else item for item in self.steps)
        return replace(self, steps=steps)

    def reading(self, steps: Iterable[Step], other: Mapping[int, int]) -> Program:
        """Return the program with some steps that read other values than they did."""
        chosen = {id(step.outputs) for step in steps}
        return replace(
            self,
            steps=tuple(
                reading(step, other) if id(step.outputs) in chosen else step for step in self.steps
            ),
        )

    def without(self, step: Step, kept: int) -> Program:
        """Return the program without a step, with one of its inputs in the place of its output."""
        output = step.outputs[0]
        steps = tuple(item for item in self.steps if not _is_same(item, step))
        shorter = replace(self, steps=steps).reading(steps, {output: kept})
        return replace(shorter, output=kept) if self.output == output else shorter

    def inserted(
        self,
        index: int,
        operations: Sequence[Operation],
        readers: Iterable[Step] | None = None,
    ) -> Program:
        """Return the program with operations between a value and what reads it.

        Args:
            index: The value; `SELF` stands for it, `LAST` for what the operation before made.
            operations: In order.
            readers: The steps that read the result. Default None: all, and the program's output.
        """
        producer = self.producer(index)
        place = 0 if producer is None else self.steps.index(producer) + 1
        frame = self._frame(producer, index)
        fresh = self.fresh()
        names = {-1: index, -2: index}
        steps: list[Step] = []
        for operation in operations:
            args, kwargs = tree_map(
                lambda leaf: _named(leaf, names), (operation.args, dict(operation.kwargs))
            )
            steps.append(_step(operation.func, args, kwargs, frame, fresh))
            names[-2] = fresh
            fresh += 1
        last = names[-2]
        chosen = None if readers is None else {id(step.outputs) for step in readers}
        rest = tuple(
            reading(step, {index: last}) if chosen is None or id(step.outputs) in chosen else step
            for step in self.steps[place:]
        )
        output = last if chosen is None and self.output == index else self.output
        return Program((*self.steps[:place], *steps, *rest), self.inputs, output)

    def after(self, first: Program, index: int) -> Program:
        """Return the program with what another makes of a value in the value's place."""
        steps = tuple(reading(step, {index: first.output}) for step in self.steps)
        return Program((*first.steps, *steps), {**self.inputs, **first.inputs}, self.output)

    def fresh(self) -> int:
        """Return a number that no value has."""
        return max((*self.inputs, *(k for step in self.steps for k in step.outputs), FRESH - 1)) + 1

    def _frame(self, producer: Step | None, index: int) -> Frame:
        near = producer or next(iter(self.readers(index)), None)
        return Frame("", 0, None, 0) if near is None else near.frame


def _is_trusting(step: Step) -> bool:
    return step.name.startswith(TRUSTING)


def _sizes(step: Step, values: Tensors) -> Hashable:
    """Return the shapes and whole numbers that an operation is given."""
    leaves = tree_leaves((step.args, step.kwargs))
    return step.name, tuple(
        tuple(values[leaf.index].shape) if isinstance(leaf, Ref) else repr(leaf)
        for leaf in leaves
        if isinstance(leaf, Ref | int | bool)
    )


class _Run(Replay):
    """Runs steps one after the other on what is known."""

    def __init__(
        self, values: dict[int, torch.Tensor], sizes: frozenset[Hashable] | None = None
    ) -> None:
        self.values = values
        self._sizes = sizes

    def execute(self, step: Step) -> None:
        strange = self._sizes is not None and _is_trusting(step)
        if strange and _sizes(step, self.values) not in (self._sizes or ()):
            raise ValueError(f"{step.name} is not run with sizes that it did not have")
        results = self._again(step)
        self.values.update(zip(step.outputs, results, strict=True))

    def _read(self, step: Step, index: int) -> torch.Tensor:
        return self.values[index]


def program_of(values: Sequence[Value], region: Iterable[int], output: int) -> Program:
    """Return the operations behind some values of a tape."""
    chosen = [values[index] for index in sorted(region)]
    steps = dict.fromkeys(
        value.step for value in chosen if value.step.func is not None or value.step.name == READ
    )
    ordered = tuple(sorted(steps, key=lambda step: step.number))
    computed = {index for step in ordered for index in step.outputs}
    read = [index for step in ordered for index in step.inputs if index not in computed]
    if output not in computed:
        read.append(output)
    return Program(ordered, {index: values[index].tensor for index in dict.fromkeys(read)}, output)


def _step(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], frame: Frame, output: int
) -> Step:
    name = func._schema.name
    inputs = inputs_of((args, kwargs))
    return Step(-1, name, frame, -1, None, func, args, kwargs, inputs, [output])


def changed(
    step: Step,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    func: Any = None,
) -> Step:
    """Return a step with other arguments."""
    args = step.args if args is None else args
    kwargs = step.kwargs if kwargs is None else dict(kwargs)
    func = step.func if func is None else func
    name = step.name if func is None else func._schema.name
    inputs = step.inputs if step.name == READ else inputs_of((args, kwargs))
    return replace(step, name=name, func=func, args=args, kwargs=kwargs, inputs=inputs)


def reading(step: Step, other: Mapping[int, int]) -> Step:
    """Return a step that reads other values."""
    if not any(index in other for index in step.inputs):
        return step
    if step.name == READ:
        return replace(step, inputs=tuple(other.get(index, index) for index in step.inputs))
    args, kwargs = tree_map(lambda leaf: _named(leaf, other), (step.args, step.kwargs))
    return changed(step, args, kwargs)


def inputs_of(arguments: Any) -> tuple[int, ...]:
    """Return the values among arguments."""
    leaves = tree_leaves(arguments)
    return tuple(dict.fromkeys(leaf.index for leaf in leaves if isinstance(leaf, Ref)))


def _is_same(step: Step, other: Step) -> bool:
    """Return whether a step is another one, perhaps with other arguments."""
    return step.outputs is other.outputs


def _named(leaf: Any, names: Mapping[int, int]) -> Any:
    return Ref(names.get(leaf.index, leaf.index)) if isinstance(leaf, Ref) else leaf
