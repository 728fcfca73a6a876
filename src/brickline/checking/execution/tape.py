"""Everything that one call of one side computes in float64, ready to be computed again in part.

`Tape` is a dispatch mode. It notes each operation with the module at work, the line of code, the
values that it read and those that it made; `replay` computes some of them again after a value was
replaced. A value is one tensor at one time: writing to a tensor makes a new value, and reading a
tensor of whose memory a part was written since makes one, too. Weights, arguments and other
tensors from outside are values that no operation made.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

import brickline
from brickline.checking.snapshot import holds_numbers
from brickline.checking.stage import Stage, family_of
from brickline.oracle.calls import written
from brickline.oracle.wide_calls.recurrent import Recurrent
from brickline.oracle.widen import Widened, is_view

READ = "read"
"""Name of the step that puts together what lies in partly overwritten memory."""
WEIGHT, ARGUMENT, CONSTANT = "weight", "argument", "constant"
"""Names of the steps that stand for tensors from outside."""
RESHAPING = frozenset(
    {
        "aten::clone",
        "aten::_unsafe_view",
        "aten::_to_copy",
        "aten::lift_fresh_copy",
        "aten::contiguous",
        "aten::_reshape_copy",
        "aten::view_copy",
    }
)
"""Operations that put out the elements they read, as views do."""


@dataclass(eq=False, slots=True)
class Frame:
    """One call of one module."""

    path: str
    call: int
    parent: Frame | None
    begun: int
    """Number of values that existed when it began."""
    given: frozenset[int] = frozenset()
    """Values that it was called with."""
    returned: tuple[int, ...] = ()
    """Values that it returned with."""
    counts: Counter[str] = field(default_factory=Counter)
    """Operations of its own so far, by name."""

    def line(self) -> Iterator[Frame]:
        """Yield the frame, its caller, the caller's caller and so on."""
        frame: Frame | None = self
        while frame is not None:
            yield frame
            frame = frame.parent


@dataclass(eq=False, slots=True)
class Step:
    """One operation, or the arrival of one tensor from outside."""

    number: int
    name: str
    frame: Frame
    ordinal: int
    """Number among the frame's own operations of this name."""
    source: tuple[str, int] | None = None
    """File and line of the code that asked for it."""
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Tensors are `Ref` in both."""
    inputs: tuple[int, ...] = ()
    outputs: list[int] = field(default_factory=list)
    moves: bool = False
    """Whether it only moves elements: a view or a copy."""
    writes: tuple[int, ...] = ()
    """Values that are gone after it, since it wrote over them."""
    geometries: tuple[Geometry, ...] = ()
    """Of a `READ`: where each input lies in the memory, and last where it reads."""

    @property
    def key(self) -> tuple[str, int, str]:
        """What it has in common with those in its place in other layers."""
        return family_of(self.frame.path), self.ordinal, self.name


Geometry = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, sizes and strides of a tensor in its memory."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor among the arguments of an operation."""

    index: int


@dataclass(eq=False, slots=True)
class Value:
    """One tensor at one time."""

    index: int
    step: Step
    out: int
    shape: torch.Size
    floating: bool
    tensor: torch.Tensor
    """Its contents; in float64 where they are floating-point numbers."""
    name: str = ""
    """Of a weight or argument: which."""
    _flat: np.ndarray | None = None

    @property
    def flat(self) -> np.ndarray:
        """Its elements in order, as float64."""
        if self._flat is None:
            self._flat = flat_of(self.tensor)
        return self._flat

    @property
    def key(self) -> tuple[str, int, str, int]:
        """What it has in common with those in its place in other layers."""
        return (*self.step.key, self.out)


def flat_of(tensor: torch.Tensor) -> np.ndarray:
    """Return a tensor's elements in order, as float64; a complex number is two."""
    plain = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    flat: np.ndarray = plain.detach().double().cpu().contiguous().numpy().reshape(-1)
    return flat


class Tape(Widened):
    """Notes one call; see the module."""

    def __init__(
        self,
        stage: Stage,
        weights: Mapping[str, torch.Tensor],
        replaced: Mapping[int, np.ndarray] | None = None,
        tables: Collection[str] = (),
    ) -> None:
        """Get ready for one call.

        Args:
            stage: The side's modules.
            weights: Its parameters and buffers by name.
            replaced: Elements that take the place of a value's, by its index. Default None.
            tables: Names of weights that are no parameters. Default: none.
        """
        super().__init__()
        self.tables: set[int] = set()
        """Values that are buffers or other tensors of modules, and no parameters."""
        self._table_names = frozenset(tables)
        self.values: list[Value] = []
        self.steps: list[Step] = []
        self.outputs: list[int] = []
        self.frames: list[Frame] = []
        self._stage = stage
        self._replaced = dict(replaced or {})
        self._weights = {_place(each): (name, each) for name, each in weights.items()}
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._spots: dict[tuple[int, Geometry], int] = {}
        """The last value at each place in memory."""
        self._alive: list[torch.Tensor] = []
        self._written: dict[int, list[tuple[int, Geometry]]] = {}
        root = Frame("", 0, None, 0)
        self.frames.append(root)
        self._stack = [root]
        self._recurrent = Recurrent(wide=True, in_steps=True)

    # --- noting

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is computed as long as this lasts."""
        stage = self._stage
        stage.begin()
        stage.on_enter, stage.on_leave = self._enter, self._leave
        try:
            with self:
                yield
        finally:
            self._recurrent.close()
            stage.on_enter = stage.on_leave = None

    def argument(self, name: str, tensor: torch.Tensor) -> None:
        """Say that a tensor is an argument of the call."""
        if holds_numbers(tensor):
            self._from_outside(tensor, ARGUMENT, name)

    def returned(self, tensors: Sequence[torch.Tensor]) -> None:
        """Say what the call returns."""
        self.outputs = [self._index_of(each) for each in tensors]

    def forget_tensors(self) -> None:
        """Keep no tensor of the call itself; its values stay."""
        self._known.clear()
        self._alive.clear()
        self._spots.clear()
        self._written.clear()
        self._weights.clear()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        positional, named = tuple(args), dict(kwargs or {})
        if not isinstance(func, torch._ops.OpOverload):
            return func(*positional, **named)
        step = self._step(func, positional, named)
        result = self.execute(func, positional, named)
        return self._made(step, func, positional, named, result)

    def _step(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
        name = func._schema.name
        frame = self._stack[-1]
        templates = tree_map(self._ref, (args, kwargs))
        inputs = [leaf.index for leaf in tree_leaves(templates) if isinstance(leaf, Ref)]
        step = Step(
            len(self.steps),
            name,
            frame,
            frame.counts[name],
            _source(),
            func,
            templates[0],
            templates[1],
            tuple(dict.fromkeys(inputs)),
            moves=is_view(func) or name in RESHAPING,
        )
        frame.counts[name] += 1
        self.steps.append(step)
        return step

    def _ref(self, leaf: Any) -> Any:
        readable = isinstance(leaf, torch.Tensor) and holds_numbers(leaf)
        return Ref(self._index_of(leaf)) if readable else leaf

    def _made(
        self, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Any:
        targets = _targets(func, args, kwargs)
        flat, shape = tree_flatten(result)
        changed = False
        for number, tensor in enumerate(flat):
            if not isinstance(tensor, torch.Tensor) or not holds_numbers(tensor):
                continue
            target = any(tensor is each for each in targets)
            fresh = self._replacement(tensor, written=target)
            if fresh is not None:
                flat[number] = tensor = fresh
                changed = True
            self._note(step, tensor, written=target)
        for tensor in targets:
            if holds_numbers(tensor) and not any(tensor is each for each in flat):
                self._replacement(tensor, written=True)
                self._note(step, tensor, written=True)
        return tree_unflatten_like(flat, shape) if changed else result

    def _replacement(self, tensor: torch.Tensor, *, written: bool) -> torch.Tensor | None:
        """Put other elements in the place of a value that was just made, where that is wanted."""
        elements = self._replaced.get(len(self.values))
        if elements is None:
            return None
        other = shaped(elements, tensor)
        if written:
            tensor.copy_(other)
            return None
        return other

    def _note(self, step: Step, tensor: torch.Tensor, *, written: bool) -> None:
        index = len(self.values)
        place = _place(tensor)
        if written:
            earlier = self._known.get(id(tensor))
            if earlier is not None:
                step.writes = (*step.writes, earlier[1])
            self._written.setdefault(place, []).append((index, _geometry(tensor)))
        elif not step.moves:
            self._written.pop(place, None)
        self._keep(index, step, tensor)

    def _keep(self, index: int, step: Step, tensor: torch.Tensor, name: str = "") -> None:
        contents = tensor.detach()
        wide = contents.double() if contents.dtype.is_floating_point else contents
        if wide is contents or wide.data_ptr() == contents.data_ptr():
            wide = wide.clone(memory_format=torch.contiguous_format)
        value = Value(
            index,
            step,
            len(step.outputs),
            tensor.shape,
            tensor.dtype.is_floating_point or tensor.dtype.is_complex,
            wide,
            name,
        )
        step.outputs.append(index)
        self.values.append(value)
        self._known[id(tensor)] = (weakref.ref(tensor), index)
        self._spots[_place(tensor), _geometry(tensor)] = index

    # --- reading

    def _index_of(self, tensor: torch.Tensor) -> int:
        """Return the value that a tensor holds now."""
        known = self._known.get(id(tensor))
        alive = known is not None and known[0]() is tensor
        base = known[1] if known is not None and alive else self._leaf(tensor)
        written = self._written.get(_place(tensor), ())
        later = [(index, place) for index, place in written if index > base]
        if not later:
            return base
        frame = self._stack[-1]
        own = _geometry(tensor)
        step = Step(
            len(self.steps),
            READ,
            frame,
            frame.counts[READ],
            inputs=(base, *(index for index, _ in later)),
            moves=True,
            geometries=(own, *(place for _, place in later), own),
        )
        frame.counts[READ] += 1
        self.steps.append(step)
        index = len(self.values)
        self._keep(index, step, tensor)
        return index

    def _leaf(self, tensor: torch.Tensor) -> int:
        """Return the value of a tensor that no operation put out."""
        place = (_place(tensor), _geometry(tensor))
        index = self._spots.get(place)
        if index is not None and _is_same(self.values[index].tensor, tensor):
            self._known[id(tensor)] = (weakref.ref(tensor), index)
            return index
        name, weight = self._weights.get(place[0], ("", None))
        is_whole = weight is not None and _geometry(weight) == place[1]
        return self._from_outside(tensor, WEIGHT if is_whole else CONSTANT, name)

    def _from_outside(self, tensor: torch.Tensor, kind: str, name: str) -> int:
        index = len(self.values)
        step = Step(len(self.steps), kind, self._stack[-1], -1)
        self.steps.append(step)
        fresh = self._replacement(tensor, written=False) if kind == CONSTANT else None
        self._keep(index, step, tensor if fresh is None else fresh, name)
        if kind == CONSTANT or name in self._table_names:
            self.tables.add(index)
        self._known[id(tensor)] = (weakref.ref(tensor), index)
        self._spots[_place(tensor), _geometry(tensor)] = index
        self._alive.append(tensor)
        return index

    # --- modules

    def _enter(self, path: str, call: int, args: Any, kwargs: Any) -> Any:
        given = None
        if self._recurrent.enter(self._stage.modules[path]):
            given = tree_map(_widened, (args, kwargs))
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
        indices = frozenset(self._index_of(each) for each in tensors if holds_numbers(each))
        frame = Frame(path, call, self._stack[-1], len(self.values), indices)
        self.frames.append(frame)
        self._stack.append(frame)
        return given

    def _leave(self, path: str, call: int, output: Any) -> Any:
        self._recurrent.leave(self._stage.modules[path])
        while len(self._stack) > 1:
            frame = self._stack.pop()
            if frame.path == path and frame.call == call:
                tensors = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
                frame.returned = tuple(
                    self._index_of(each) for each in tensors if holds_numbers(each)
                )
                break
        return None


def shaped(elements: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Return elements as a tensor of the shape, kind and device of another."""
    made = torch.from_numpy(np.ascontiguousarray(elements))
    if like.is_complex():
        made = torch.view_as_complex(made.view(*like.shape, 2))
    return made.to(like.device, like.dtype).reshape(like.shape)


def tree_unflatten_like(flat: list[Any], shape: Any) -> Any:
    """Return a result with other tensors in it."""
    return torch.utils._pytree.tree_unflatten(flat, shape)


def _widened(leaf: Any) -> Any:
    floating = isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
    return leaf.double() if floating else leaf


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to."""
    targets: list[torch.Tensor] = []
    for where in written(func):
        if isinstance(where, int):
            part = args[where] if where < len(args) else None
        else:
            part = kwargs.get(where)
        targets += [leaf for leaf in tree_leaves(part) if isinstance(leaf, torch.Tensor)]
    return targets


def _place(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _is_same(contents: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether a value still has the elements of a tensor."""
    return bool(contents.shape == tensor.shape and torch.equal(contents, tensor.to(contents.dtype)))


def _geometry(tensor: torch.Tensor) -> Geometry:
    return int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


_HIDDEN = tuple(
    os.path.dirname(file) + os.sep for file in (torch.__file__ or "", brickline.__file__ or "")
)
"""Where code lies that nobody wants to be shown."""


def _source() -> tuple[str, int] | None:
    """Return the innermost line of code that is neither PyTorch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_HIDDEN, "<")):
            return name, frame.f_lineno
        frame = frame.f_back  # type: ignore[assignment]
    return None


# --- computing again

REFUSALS = (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, OverflowError)
"""What an operation raises where it does not take what was put in the place of its arguments."""
INDEXED = {
    "aten::embedding": (0, 1, 0),
    "aten::index_select": (0, 2, None),
    "aten::gather": (0, 2, None),
    "aten::scatter": (0, 2, None),
    "aten::scatter_add": (0, 2, None),
    "aten::index_add": (0, 2, None),
    "aten::index_copy": (0, 2, None),
}
"""Operations that look elements up: which argument holds them, which says where, along which of its
dimensions; None: that is the argument in between."""


def check_indices(name: str, args: tuple[Any, ...]) -> None:
    """Refuse places that a table does not have: on a GPU looking there ends the process.

    Raises:
        IndexError: One of them is outside.
    """
    pairs: list[tuple[torch.Tensor, int]] = []
    if name == "aten::index":
        pairs = [
            (places, args[0].shape[dim])
            for dim, places in enumerate(args[1])
            if places is not None and places.dtype is not torch.bool
        ]
    elif name.rstrip("_") in INDEXED:
        table, where, dim = INDEXED[name.rstrip("_")]
        size = args[table].shape[args[1] if dim is None else dim]
        pairs = [(args[where], size)]
    for places, size in pairs:
        if places.numel() and not -size <= int(places.min()) <= int(places.max()) < size:
            raise IndexError(f"{name}: places up to {int(places.max())} of {size}")


class Replay:
    """Values of a tape after some of them were replaced; computed when they are asked for."""

    def __init__(
        self,
        tape: Tape,
        values: Mapping[int, torch.Tensor] | None = None,
        reads: Mapping[tuple[int, int], torch.Tensor] | None = None,
    ) -> None:
        """Say what is replaced.

        Args:
            tape: What was computed.
            values: Contents in place of those of a value, for all that read it.
            reads: Contents in place of those of a value, for one step: by step and value.
        """
        self.tape = tape
        self.values: dict[int, torch.Tensor] = dict(values or {})
        """Contents of the values that are other ones now."""
        self._reads = dict(reads or {})
        self._fixed = set(self.values)

    def run(self, steps: Sequence[Step] | None = None) -> Iterator[Value]:
        """Compute again what depends on what was replaced, and yield each value after it.

        Args:
            steps: The steps that may be computed again, in order. Default None: all.
        """
        wanted_steps = {step for step, _ in self._reads}
        first = min((*self.values, *(self._first_value(step) for step in wanted_steps)), default=0)
        for step in self.tape.steps if steps is None else steps:
            if not step.outputs or (step.func is None and step.name != READ):
                continue
            if step.outputs[-1] < first:
                continue
            touched = step.number in wanted_steps
            if not touched and not any(index in self.values for index in step.inputs):
                continue
            results = self._again(step)
            for index, tensor in zip(step.outputs, results, strict=True):
                if index not in self._fixed:
                    self.values[index] = tensor
                    yield self.tape.values[index]

    def _first_value(self, step: int) -> int:
        outputs = self.tape.steps[step].outputs
        return outputs[0] if outputs else len(self.tape.values)

    def contents(self, index: int) -> torch.Tensor:
        """Return what a value is now."""
        tensor = self.values.get(index)
        return self.tape.values[index].tensor if tensor is None else tensor

    def _read(self, step: Step, index: int) -> torch.Tensor:
        other = self._reads.get((step.number, index))
        return self.contents(index) if other is None else other

    def _again(self, step: Step) -> list[torch.Tensor]:
        if step.name == READ:
            return [self._put_together(step)]
        clones: dict[int, torch.Tensor] = {}

        def tensor_of(leaf: Any) -> Any:
            if not isinstance(leaf, Ref):
                return leaf
            tensor = self._read(step, leaf.index)
            if leaf.index not in step.writes:
                return tensor
            return clones.setdefault(leaf.index, tensor.clone())

        args, kwargs = tree_map(tensor_of, (step.args, step.kwargs))
        check_indices(step.name, args)
        result = Widened().execute(step.func, args, kwargs)
        flat = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and holds_numbers(leaf)
        ]
        for target in _targets(step.func, args, kwargs):
            if holds_numbers(target) and not any(target is leaf for leaf in flat):
                flat.append(target)
        return [leaf.detach() for leaf in flat]

    def _put_together(self, step: Step) -> torch.Tensor:
        tensors = [self._read(step, index) for index in step.inputs]
        *places, own = step.geometries
        size = max(_extent(place) for place in step.geometries)
        memory = torch.zeros(size, dtype=tensors[0].dtype, device=tensors[0].device)
        for tensor, (offset, shape, strides) in zip(tensors, places, strict=True):
            memory.as_strided(shape, strides, offset).copy_(tensor.reshape(shape))
        return memory.as_strided(own[1], own[2], own[0]).contiguous()


def _extent(place: Geometry) -> int:
    offset, shape, strides = place
    if not all(shape):
        return offset + 1
    steps = zip(shape, strides, strict=True)
    return offset + sum((size - 1) * stride for size, stride in steps) + 1
