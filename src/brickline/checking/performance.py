"""One execution of one side, operation by operation, with every value it makes.

`Performance` is a dispatch mode over a `Stage`. It runs the operations in their own dtype or in
float64, notes each value with its key and what it was made from, and asks a listener whether to go
on with another value instead. Views and copies are no values of their own: they pass on what they
were made from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from brickline.checking.op_kinds import CONTRACTIONS, PASSING, SHAPED
from brickline.checking.recording import Listener, Operation, Recording, Value
from brickline.checking.snapshot import holds_numbers
from brickline.checking.stage import ARGUMENT, INPUT, OPERAND, OUTPUT, Key, Stage, is_compiled
from brickline.oracle.wide_calls.recurrent import Recurrent
from brickline.oracle.widen import Widened, is_view, written_arguments


class Performance(Widened):
    """Executes and notes."""

    def __init__(
        self,
        stage: Stage,
        *,
        wide: bool = False,
        listener: Listener | None = None,
        keep: bool = True,
        views: bool = False,
        parameters: Mapping[int, str] | None = None,
        in_steps: bool = False,
    ) -> None:
        super().__init__()
        self.stage = stage
        self.wide = wide
        self.listener = listener
        self.keep = keep
        self.views = views
        self.recording = Recording()
        self._parameters = dict(parameters or {})
        self._copied: set[int] = set()
        """Where copies of weights lie, in another dtype for example."""
        self.told = self._knowing_copies
        self._producers: dict[int, frozenset[int]] = {}
        self._narrowest: dict[int, torch.dtype] = {}
        self._crossed: dict[tuple[int, int], int] = {}
        """Values at boundaries by where they lie and how large they are."""
        self._holders: defaultdict[int, list[Value]] = defaultdict(list)
        self._count = 0
        self._paused: list[ExitStack] = []
        self._crossings: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        self._entered: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        self._stood_in: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """What a call was given by its caller, and the tensors that it got in their place."""
        self._written: set[int] = set()
        """Where something was written while such calls were at work."""
        self._recurrent = Recurrent(wide=wide, in_steps=in_steps)
        self._quiet = False
        self._starved: set[int] = set()
        """Values that are less exact than float64, because memory ran out."""

    starves = True

    # Execution

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        positional, named = tuple(args), dict(kwargs or {})
        if self._quiet or not isinstance(func, torch._ops.OpOverload):
            return func(*positional, **named)
        written = written_arguments(func)
        if written and self.keep:
            self._preserve(written, positional, named)
        if written and self._stood_in:
            self._written.update(map(_storage, _meant(written, positional, named)))
        if self._parameters and func._schema.name in CONTRACTIONS:
            positional = self._offer_operand(func, positional)
        run = self.execute if self.wide else _as_it_is
        result = run(func, positional, named)
        return self._note(func, positional, named, written, result)

    @contextmanager
    def _knowing_copies(self, pairs: list[Any]) -> Iterator[None]:
        """Know wide copies of weights by the names of the weights, as long as this lasts."""
        known: list[int] = []
        for narrow, wide in pairs:
            name = self._parameters.get(_storage(narrow))
            if name is not None:
                known.append(_storage(wide))
                self._parameters[known[-1]] = name
        try:
            yield
        finally:
            for place in known:
                self._parameters.pop(place, None)

    def _offer_operand(self, func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Note what a weight is multiplied with: a value that both sides have in common."""
        number = CONTRACTIONS[func._schema.name]
        names = [self._parameters.get(_storage(each)) for each in _flat(args)]
        if number >= len(args) or not any(names):
            return args
        tensor = args[number]
        place = _storage(tensor)
        if place in self._parameters:
            number = 1 - number if number < 2 else number
            tensor = args[number]
            place = _storage(tensor)
            if place in self._parameters or not isinstance(tensor, torch.Tensor):
                return args
        key = self.stage.next_key(OPERAND + func._schema.name)
        value = Value(
            self._count,
            key,
            tensor,
            self._made_from(tensor),
            tuple(each for each in names if each is not None),
        )
        value.caller = self._maker(place, key)
        value.narrowest = self._narrowest.get(place)
        self._count += 1
        if self.keep:
            self._holders[place].append(value)
        replaced = self._offer(value, None)
        if replaced is None:
            self._cross(tensor, value.index)
            return args
        self._producers[_storage(replaced)] = frozenset({value.index})
        return (*args[:number], replaced, *args[number + 1 :])

    def _maker(self, place: int, key: Key) -> str:
        """Return the module that made an operand: the caller where it was handed in."""
        where = (key.path, key.call)
        if place in self._entered.get(where, ()):
            return self.stage.callers.get(where, ("", 0))[0]
        return key.path

    def _preserve(self, written: Sequence[int | str], args: Any, kwargs: Any) -> None:
        """Copy noted values that are about to be written over."""
        for tensor in _meant(written, args, kwargs):
            for value in self._holders.pop(_storage(tensor), ()):
                value.tensor = value.tensor.clone()

    def _note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        written: Sequence[int | str],
        result: Any,
    ) -> Any:
        name = func._schema.name
        view = is_view(func)
        if (view and not self.views) or name in PASSING:
            if not view:
                given = ((), {}) if name in SHAPED else (args, kwargs)
                self._pass_on(*given, result, bool(written))
                if self.starved:
                    self._starved.update(*map(self._made_from, _flat(result)))
                    self.starved = False
            return result
        given = ((), {}) if name in SHAPED else (args, kwargs)
        sources, parameters, narrowest = self._sources(*given)
        starved, self.starved = self.starved, False
        base = self.stage.next_key(name)
        flat, shape = tree_flatten(result)
        changed = False
        operation = Operation(func, args, kwargs)
        for number, tensor in enumerate(flat):
            if not isinstance(tensor, torch.Tensor) or not holds_numbers(tensor):
                continue
            value = Value(
                self._count,
                base._replace(out=number),
                tensor,
                sources,
                parameters,
                narrowest,
                view,
                func.namespace not in ("aten", "prims"),
                starved,
            )
            self._count += 1
            replaced = self._offer(value, operation)
            if replaced is not None and not view:
                if written:
                    tensor.copy_(replaced)
                else:
                    flat[number] = tensor = replaced
                    changed = True
            if not view:
                self._hold(value, tensor, bool(written))
        return tree_unflatten(flat, shape) if changed else result

    def _offer(self, value: Value, operation: Operation | None) -> torch.Tensor | None:
        if self.keep:
            self.recording.add(value)
        value.starved = value.starved or not self._starved.isdisjoint(value.inputs)
        replaced = None if self.listener is None else self.listener(value, operation)
        if value.starved and replaced is None:
            self._starved.add(value.index)
        return replaced

    def _hold(self, value: Value, tensor: torch.Tensor, written: bool) -> None:
        place = _storage(tensor)
        earlier = self._producers.get(place, frozenset()) if written else frozenset()
        self._producers[place] = earlier | {value.index}
        self._forget_crossings(place)
        self._forget_copy(place)
        self._narrowest.pop(place, None)
        if self.keep:
            self._holders[place].append(value)

    def _forget_copy(self, place: int) -> None:
        """No copy of a weight lies there any more."""
        if place in self._copied:
            self._copied.discard(place)
            self._parameters.pop(place, None)

    def _copied_name(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> str | None:
        """Return the name of the weight that a tensor is a copy of; None where it is none."""
        if len(given) != 1 or len(made) != 1 or given[0].numel() != made[0].numel():
            return None
        return self._parameters.get(_storage(given[0]))

    def _forget_crossings(self, place: int) -> None:
        """Something new lies there."""
        for key in self._crossings.pop(place, ()):
            self._crossed.pop(key, None)

    def _made_from(self, tensor: torch.Tensor) -> tuple[int, ...]:
        crossed = self._crossed.get(_spot(tensor))
        if crossed is not None:
            return (crossed,)
        return tuple(sorted(self._producers.get(_storage(tensor), ())))

    def _cross(self, tensor: torch.Tensor, index: int) -> None:
        key = _spot(tensor)
        self._crossed[key] = index
        self._crossings[_storage(tensor)].append(key)

    def _pass_on(self, args: Any, kwargs: Any, result: Any, written: bool) -> None:
        """What a copy is made from is what its source was made from."""
        sources: set[int] = set()
        coarse: torch.dtype | None = None
        for tensor in _flat((args, kwargs)):
            sources |= self._producers.get(_storage(tensor), frozenset())
            coarse = _coarser(coarse, self._narrowest.get(_storage(tensor)))
            if tensor.dtype.is_floating_point:
                coarse = _coarser(coarse, tensor.dtype)
        name = None if written else self._copied_name(_flat((args, kwargs)), _flat(result))
        for tensor in _flat(result):
            place = _storage(tensor)
            earlier = self._producers.get(place, frozenset()) if written else frozenset()
            self._producers[place] = earlier | frozenset(sources)
            self._forget_crossings(place)
            self._forget_copy(place)
            if name is not None and place not in self._parameters:
                self._parameters[place] = name
                self._copied.add(place)
            if tensor.dtype.is_floating_point:
                coarse = _coarser(coarse, tensor.dtype)
            if coarse is not None:
                self._narrowest[place] = coarse

    def _sources(
        self, args: Any, kwargs: Any
    ) -> tuple[tuple[int, ...], tuple[str, ...], torch.dtype | None]:
        sources: set[int] = set()
        parameters: list[str] = []
        coarse: torch.dtype | None = None
        for tensor in _flat((args, kwargs)):
            place = _storage(tensor)
            name = self._parameters.get(place)
            if name is not None and name not in parameters:
                parameters.append(name)
            crossed = self._crossed.get(_spot(tensor))
            found = self._producers.get(place)
            if crossed is not None:
                sources.add(crossed)
            elif found is not None:
                sources |= found
            if tensor.dtype.is_floating_point and name is None:
                coarse = _coarser(coarse, self._narrowest.get(place, tensor.dtype))
        return tuple(sorted(sources)), tuple(parameters), coarse

    # Modules

    @contextmanager
    def performing(self) -> Iterator[None]:
        """Follow the stage and note its values as long as this lasts."""
        stage = self.stage
        stage.begin()
        stage.on_leave, stage.on_enter = self._leave, self._enter
        try:
            with self:
                yield
        finally:
            for paused in self._paused:
                paused.close()
            self._paused.clear()
            self._recurrent.close()
            stage.on_leave = stage.on_enter = None
            self.recording.callers = stage.callers
            self.recording.narrow_ops |= self.narrow_ops

    def _enter(self, path: str, call: int, args: Any, kwargs: Any) -> Any:
        given = self._boundary(Key(path, call, INPUT, 0), (args, kwargs))
        if self._recurrent.enter(self.stage.modules[path]):
            given = self._widened((args, kwargs) if given is None else given)
        if is_compiled(self.stage.modules[path]):
            paused = ExitStack()
            paused.enter_context(_disable_current_modes())
            self._paused.append(paused)
        return given

    def _leave(self, path: str, call: int, output: Any) -> Any:
        if is_compiled(self.stage.modules[path]) and self._paused:
            self._paused.pop().close()
        self._recurrent.leave(self.stage.modules[path])
        self._hand_back(path, call)
        return self.returned(path, call, output)

    def _hand_back(self, path: str, call: int) -> None:
        """Write what a call wrote into a tensor that stood in for its caller's to the latter."""
        for own, other in self._stood_in.pop((path, call), ()):
            if _storage(other) not in self._written:
                continue
            self._written.add(_storage(own))
            self._quiet = True
            try:
                self._preserve((0,), (own,), {})
                own.copy_(other)
            finally:
                self._quiet = False
            made = self._producers.get(_storage(other), frozenset())
            place = _storage(own)
            self._producers[place] = self._producers.get(place, frozenset()) | made
            self._forget_crossings(place)

    def _widened(self, given: Any) -> Any:
        """Return wide inputs: what was only looked up may be as narrow as the table."""
        flat, shape = tree_flatten(given)
        for number, tensor in enumerate(flat):
            if isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point:
                flat[number] = wide = tensor.double()
                self._producers[_storage(wide)] = frozenset(self._made_from(tensor))
        return tree_unflatten(flat, shape)

    def settle(self) -> None:
        """Copy nothing more: the call is over and its values are the driver's to change."""
        for holders in self._holders.values():
            for value in holders:
                if value.key.op == OUTPUT and not value.key.path:
                    value.tensor = value.tensor.detach().clone()
        self._holders.clear()

    def note_written(self, place: str, tensor: torch.Tensor) -> None:
        """Note a tensor of the call that the call has written."""
        self._quiet = True
        try:
            key = Key("", 0, f"{ARGUMENT}{place}", 0)
            sources = self._made_from(tensor)
            value = Value(self._count, key, tensor.detach().clone(), sources)
            self._count += 1
            self._offer(value, None)
        finally:
            self._quiet = False

    def returned(self, path: str, call: int, output: Any) -> Any:
        """Note what a module returns with; return another output where the listener wants one."""
        return self._boundary(Key(path, call, OUTPUT, 0), output)

    def _boundary(self, base: Key, values: Any) -> Any:
        """Note the tensors that cross a module's boundary; None where they stay as they are."""
        self._quiet = True
        try:
            return self._crossing(base, values)
        finally:
            self._quiet = False

    def _crossing(self, base: Key, values: Any) -> Any:
        flat, shape = tree_flatten(values)
        changed = False
        for number, tensor in enumerate(flat):
            if not isinstance(tensor, torch.Tensor) or not holds_numbers(tensor):
                continue
            place = _storage(tensor)
            if place in self._parameters:
                continue
            if base.op == INPUT:
                self._entered[base.path, base.call].add(place)
            sources = self._made_from(tensor)
            if not sources and base.op == OUTPUT:
                self.recording.opaque += 1
            key = base._replace(out=number)
            value = Value(self._count, key, tensor, sources)
            value.caller = self.stage.path if base.op == INPUT else base.path
            value.narrowest = self._narrowest.get(place)
            self._count += 1
            if self.keep:
                self._holders[place].append(value)
            replaced = self._offer(value, None)
            if replaced is not None:
                flat[number] = replaced
                changed = True
                self._producers[_storage(replaced)] = frozenset({value.index})
                if base.op == INPUT:
                    self._entered[base.path, base.call].add(_storage(replaced))
                    stood_in = self._stood_in.setdefault((base.path, base.call), [])
                    stood_in.append((tensor, replaced))
                    self._written.discard(_storage(replaced))
            else:
                self._cross(tensor, value.index)
        return tree_unflatten(flat, shape) if changed else None


def _as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _flat(value: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(value)[0] if isinstance(each, torch.Tensor)]


def _meant(written: Sequence[int | str], args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors that an operation writes to."""
    return _flat([args[each] if isinstance(each, int) else kwargs.get(each) for each in written])


def _storage(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def _spot(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor's first element lies, and how many it has."""
    try:
        return tensor.data_ptr(), tensor.numel()
    except (RuntimeError, NotImplementedError):
        return id(tensor), tensor.numel()


def _coarser(a: torch.dtype | None, b: torch.dtype | None) -> torch.dtype | None:
    if a is None or b is None:
        return a if b is None else b
    return a if torch.finfo(a).eps >= torch.finfo(b).eps else b


def parameters_by_storage(root: Any) -> dict[int, str]:
    """Return the names of a module's parameters and buffers by where they lie."""
    found: dict[int, str] = {}
    if isinstance(root, torch.nn.Module):
        for name, tensor in (*root.named_parameters(), *root.named_buffers()):
            found.setdefault(_storage(tensor), name)
    return found
