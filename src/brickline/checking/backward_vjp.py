"""The reference's gradients for one call of the candidate.

The reference's module is run on the candidate's inputs and takes the gradients that arrived at the
candidate's outputs. Calls of modules inside it that the candidate made too are not run again: they
return what the candidate's returned and give back the gradients that the candidate's gave, so that
only the module's own work is judged. Runs in the dtype that it is given or in float64.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.func import functional_call
from torch.utils._pytree import tree_map

from brickline.checking.backward_tensors import floats_of, inputs_of, mapped, replaced
from brickline.checking.backward_visits import Visit
from brickline.checking.sides import Call
from brickline.checking.snapshot import snapshot
from brickline.oracle.widen import MOVES, Widened, is_narrow, is_view, unit_roundoff

Gradient: TypeAlias = torch.Tensor | None
Key: TypeAlias = tuple[str, Any]
"""Where a gradient is found in an outcome: the field, and the key in it."""

MOST_WEIGHTS = 1 << 30
"""Bytes of float64 weights that may be made for one call."""


class TooLargeError(Exception):
    """The module's weights in float64 would take too much memory."""


class DifferentError(Exception):
    """The reference's module is called or returns in another way."""


class OtherCallError(Exception):
    """A module inside is called in another way than the candidate's."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


@dataclass(eq=False)
class Outcome:
    """What one run of the reference gave."""

    inputs: dict[int, Gradient] = field(default_factory=dict)
    parameters: dict[str, Gradient] = field(default_factory=dict)
    """By name in the candidate's module."""
    direct: dict[str, Gradient] = field(default_factory=dict)
    """The same of weights whose owners inside were not run: as the module itself reads them."""
    arrivals: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    """Gradients at outputs of calls inside, by number of the child and of its output."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    child_inputs: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    """What calls inside were called with, by number of the child and of its input."""
    narrow: bool = False
    """Whether something had no float64 form."""
    free: set[str] = field(default_factory=set)
    """Paths inside that the reference ran by itself."""

    @property
    def read(self) -> frozenset[str]:
        """Names of the weights that the module reads itself although another one owns them."""
        return frozenset(name for name, each in self.direct.items() if each is not None)


@dataclass(eq=False)
class Partner:
    """The reference's counterpart of one of the candidate's modules."""

    module: Any
    parameters: Mapping[str, str]
    """Names in the candidate's module to names in the reference's, of parameters to be compared."""
    children: Mapping[str, torch.nn.Module]
    """The reference's modules by paths of the candidate's that they stand for."""
    transposed: frozenset[str] = frozenset()
    """Parameters that lie the other way round in the reference, by the candidate's name."""


def gradients(
    partner: Partner,
    visit: Visit,
    task: int,
    *,
    wide: bool,
    seed: int | None = None,
    every_operation: bool = False,
    direct: Collection[str] = (),
) -> Outcome:
    """Run the reference for one call.

    Args:
        partner: What stands for the candidate's module.
        visit: The candidate's call.
        task: The backward pass.
        wide: Run in float64; otherwise in the candidate's dtypes.
        seed: Disturb every value that comes in by its rounding, to see how far that carries.
        every_operation: Disturb what every operation makes, too.
        direct: Weights that the module reads itself, as a run in the candidate's dtypes has shown.
    """
    without: set[str] = set()
    while True:
        try:
            run = _Run(partner, visit, task, wide, seed, without, None, every_operation)
            run.direct = frozenset(direct)
            return run.outcome()
        except OtherCallError as error:
            without.add(error.path)


def gradient_of(outcome: Outcome, key: tuple[str, Any]) -> torch.Tensor | None:
    """Return one gradient of an outcome."""
    found: torch.Tensor | None = getattr(outcome, key[0]).get(key[1])
    return found


def projection(
    partner: Partner, visit: Visit, task: int, shift: Mapping[Key, torch.Tensor]
) -> tuple[float, float]:
    """Return the outputs in float64 along the arriving gradients, with something shifted.

    Beside the sum, that of its terms' sizes, in proportion to which it is rounded.
    """
    return _Run(partner, visit, task, True, None, set(), shift).projection()


class _Run:
    def __init__(
        self,
        partner: Partner,
        visit: Visit,
        task: int,
        wide: bool,
        seed: int | None,
        without: set[str],
        shift: Mapping[Key, torch.Tensor] | None = None,
        every_operation: bool = False,
    ) -> None:
        self._without, self._shift = without, shift or {}
        self.direct: frozenset[str] = frozenset()
        self.partner, self.visit, self.task, self.wide = partner, visit, task, wide
        self.result = Outcome()
        self._leaves: dict[int, torch.Tensor] = {}
        self._anchors: list[torch.Tensor] = []
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        floats = [each.dtype for each in floats_of(visit.returned)]
        self._every = None
        if seed is not None and every_operation and floats:
            self._every = (unit_roundoff(floats[0]), seed)

    def outcome(self) -> Outcome:
        """Run forward, then backward."""
        with torch.enable_grad(), self._widened():
            output, weights = self._forward()
            self._differentiate(output, weights)
        return self.result

    def projection(self) -> tuple[float, float]:
        """Run forward only."""
        with torch.no_grad(), self._widened():
            output, _ = self._forward()
            outputs = floats_of(output)
            known = self.visit.gradients[self.task].outputs
            terms = [outputs[n].double() * each.double() for n, each in known.items()]
            return (
                float(sum(each.sum() for each in terms)),
                float(sum(each.abs().sum() for each in terms)),
            )

    @contextmanager
    def _widened(self) -> Iterator[None]:
        if not self.wide:
            yield
            return
        with Widened() if self._every is None else _Rounding(self._every) as mode:
            yield
        self.result.narrow = bool(mode.narrow_ops)

    def _forward(self) -> tuple[Any, dict[str, torch.Tensor]]:
        visit = self.visit
        args, kwargs = self._arguments()
        weights = self._weights()
        with ExitStack() as stack:
            stack.enter_context(self._forcing())
            visit.random.restore()
            if not self.wide:
                stack.enter_context(visit.autocast.again())
            output = self._call(weights, args, kwargs)
        return output, weights

    # What goes in

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a value of the candidate as this run takes it."""
        tensor = tensor.detach()
        if not (self.wide and is_narrow(tensor)):
            return tensor
        made = tensor.double()
        if self._generator is None:
            return made
        noise = torch.randn(made.shape, generator=self._generator, dtype=torch.float64)
        return made * (1 + unit_roundoff(tensor.dtype) * noise.to(made.device))

    def _shifted(self, tensor: torch.Tensor, key: Key) -> torch.Tensor:
        by = self._shift.get(key)
        return tensor if by is None else tensor + by

    def _arguments(self) -> tuple[Any, Any]:
        given = self.visit.given
        held = snapshot((given.args, dict(given.kwargs)))
        numbers = iter(range(1 << 30))
        known: dict[int, torch.Tensor] = {}
        passed: dict[int, torch.Tensor] = {}

        def prepare(tensor: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            if id(tensor) not in known:
                leaf = self._shifted(self.value(tensor).clone(), ("inputs", number))
                known[id(tensor)] = leaf.requires_grad_(number in self.visit.inputs)
                # In-place operations need something that is no leaf.
                passed[id(tensor)] = leaf.clone() if leaf.requires_grad else leaf
            if number in self.visit.inputs:
                self._leaves[number] = known[id(tensor)]
            return passed[id(tensor)]

        args, kwargs = mapped(held, prepare)
        if self.wide:
            args, kwargs = _rest_widened(args, kwargs)
        return args, kwargs

    def _weights(self) -> dict[str, torch.Tensor]:
        module = self.partner.module
        if not isinstance(module, torch.nn.Module):
            return {}
        skipped = {id(each) for each in self._standing_modules().values()}
        ours = {theirs: name for name, theirs in self.partner.parameters.items()}
        made: dict[str, torch.Tensor] = {}
        tied: dict[int, torch.Tensor] = {}
        size = 0
        for prefix, part in _parts(module, skipped):
            for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                if tensor is None:
                    continue
                full = f"{prefix}{name}"
                if id(tensor) in tied:
                    made[full] = tied[id(tensor)]
                    continue
                if self.wide and is_narrow(tensor):
                    size += 8 * tensor.numel()
                    if size > MOST_WEIGHTS:
                        raise TooLargeError
                value = self.value(tensor)
                if name in part._buffers:
                    value = value.clone()
                elif full in ours and value.dtype.is_floating_point:
                    value = self._shifted(value.clone(), ("parameters", ours[full]))
                    value.requires_grad_(True)
                made[full] = tied[id(tensor)] = value
        for name in self.direct:
            full = self.partner.parameters[name]
            made[full] = self.value(module.get_parameter(full)).clone().requires_grad_(True)
        return made

    def _call(self, weights: dict[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
        module = self.partner.module
        if not isinstance(module, torch.nn.Module):
            return module(*args, **kwargs)
        return functional_call(module, weights, args, kwargs)

    # Calls inside

    def _standing_modules(self) -> dict[str, torch.nn.Module]:
        """Return the modules inside whose calls are not run, by the candidate's path."""
        children = self.visit.children
        unknown = {each.path for each in children if not each.told} | self._without
        found = {}
        for path in {each.path for each in children} - unknown:
            module = self.partner.children.get(path)
            if module is not None and module is not self.partner.module:
                found[path] = module
        return found

    @contextmanager
    def _forcing(self) -> Iterator[None]:
        """Let calls inside give what the candidate's gave."""
        queues: defaultdict[str, deque[int]] = defaultdict(deque)
        for number, child in enumerate(self.visit.children):
            queues[child.path].append(number)
        standing = self._standing_modules()
        self.result.free |= queues.keys() - standing.keys()
        changed: list[tuple[torch.nn.Module, Any]] = []
        try:
            for path, module in standing.items():
                changed.append((module, module.__dict__.get("forward")))
                forward = self._standing(path, module.forward, queues[path])
                module.__dict__["forward"] = forward
            yield
            for path in standing:
                if queues[path]:
                    # The reference does that work without calling the module.
                    raise OtherCallError(path)
        finally:
            for module, had in changed:
                if had is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.__dict__["forward"] = had

    def _standing(
        self, path: str, original: Callable[..., Any], queue: deque[int]
    ) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not queue:
                self.result.free.add(path)
                return original(*args, **kwargs)
            number = queue.popleft()
            child = self.visit.children[number]
            given = inputs_of(Call(args, kwargs))
            theirs = inputs_of(child.given)
            if [each.shape for each in given] != [each.shape for each in theirs]:
                raise OtherCallError(path)
            if any(
                mine.requires_grad < each.requires_grad
                for mine, each in zip(theirs, given, strict=True)
            ):
                # The candidate was not asked for a gradient that the reference needs.
                raise OtherCallError(path)
            for index, tensor in enumerate(given):
                self.result.child_inputs[number, index] = tensor.detach()
            anchor = torch.zeros((), requires_grad=True)
            self._anchors.append(anchor)
            produced = _Stand.apply(self, number, anchor, *given)
            if child.random_after is not None:
                child.random_after.restore()
            return _returned(child.returned, produced)

        return forward

    # What comes back

    def _differentiate(self, output: Any, weights: dict[str, torch.Tensor]) -> None:
        outputs = floats_of(output)
        theirs = floats_of(self.visit.returned)
        if [each.shape for each in outputs] != [each.shape for each in theirs]:
            raise DifferentError("the reference returns other shapes")
        self.result.outputs = [each.detach() for each in outputs]
        known = self.visit.gradients[self.task].outputs
        heads, cotangents = [], []
        for number, gradient in known.items():
            if outputs[number].requires_grad:
                heads.append(outputs[number])
                arrived = self.value(gradient)
                cotangents.append(arrived.to(outputs[number].dtype))
        names = [
            (ours, weights[name])
            for ours, name in self.partner.parameters.items()
            if name in weights and weights[name].requires_grad and ours not in self.direct
        ]
        others = {name: weights[self.partner.parameters[name]] for name in self.direct}
        others = others or self._unread(weights)
        wanted = [
            *self._leaves.values(),
            *(each for _, each in names),
            *self._anchors,
            *others.values(),
        ]
        found: tuple[Gradient, ...] = (None,) * len(wanted)
        if heads and wanted:
            found = torch.autograd.grad(heads, wanted, cotangents, allow_unused=True)
        self.result.inputs = dict(zip(self._leaves, found, strict=False))
        own = found[len(self._leaves) : len(self._leaves) + len(names)]
        self.result.parameters = {
            ours: _dense(each) for (ours, _), each in zip(names, own, strict=True)
        }
        rest = found[len(found) - len(others) :]
        self.result.direct = {name: _dense(each) for name, each in zip(others, rest, strict=True)}

    def _unread(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the weights of calls inside that are not run, where only one module has them."""
        module = self.partner.module
        missing = [each for each in self.partner.parameters.items() if each[1] not in weights]
        if self.wide or not missing or not isinstance(module, torch.nn.Module):
            return {}
        named = dict(module.named_parameters(remove_duplicate=False))
        holders = Counter(map(id, named.values()))
        return {
            ours: named[name]
            for ours, name in missing
            if named[name].requires_grad and holders[id(named[name])] == 1
        }


class _Rounding(Widened):
    """Executes in float64 and disturbs what each operation makes as rounding would."""

    def __init__(self, every: tuple[float, int]) -> None:
        super().__init__()
        self._unit, seed = every
        self._generator = torch.Generator().manual_seed(seed)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation wide, and round."""
        result = super().execute(func, args, kwargs)
        if is_view(func) or func._schema.name in MOVES or func._schema.is_mutable:
            return result
        return tree_map(self._rounded, result)

    def _rounded(self, value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.dtype is torch.float64):
            return value
        noise = torch.empty(value.shape, dtype=torch.float64)
        noise.uniform_(-self._unit, self._unit, generator=self._generator)
        return value * (1 + noise.to(value.device))


class _Stand(torch.autograd.Function):
    """Stands for a call inside: the candidate's outputs, and the candidate's gradients."""

    @staticmethod
    def forward(ctx: Any, run: _Run, number: int, anchor: torch.Tensor, *inputs: Any) -> Any:
        child = run.visit.children[number]
        ctx.run, ctx.number = run, number
        ctx.inputs = [(each.shape, each.dtype, each.device) for each in inputs]
        ctx.set_materialize_grads(False)
        made = [run.value(each).clone() for each in floats_of(child.returned)]
        still = [each for n, each in enumerate(made) if n not in child.outputs]
        ctx.mark_non_differentiable(*still)
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *arrived: Any) -> Any:
        run, number = ctx.run, ctx.number
        child = run.visit.children[number]
        for index, gradient in enumerate(arrived):
            if index in child.outputs:
                run.result.arrivals[number, index] = gradient
        known = child.gradients.get(run.task)
        back: list[Gradient] = []
        for index, (_, dtype, device) in enumerate(ctx.inputs):
            gradient = None if known is None else known.inputs.get(index)
            if gradient is not None:
                gradient = run.value(gradient).to(device=device, dtype=dtype)
            back.append(gradient)
        return None, None, torch.zeros(()), *back


def _returned(structure: Any, tensors: tuple[torch.Tensor, ...]) -> Any:
    """Return a copy of what the candidate's call returned, with these tensors in it."""
    order = iter(tensors)
    return replaced(snapshot(structure), lambda _: next(order))


def _rest_widened(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Widen the tensors that are kept in objects; those in tuples are wide already."""

    def convert(value: Any) -> Any:
        if isinstance(value, torch.Tensor | tuple):
            return value
        return snapshot(value, lambda tensor: tensor.double() if is_narrow(tensor) else tensor)

    return tuple(map(convert, args)), {name: convert(each) for name, each in kwargs.items()}


def _parts(module: torch.nn.Module, skipped: set[int]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a module and those inside it with the prefix of their names, except under some."""

    def walk(prefix: str, part: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
        yield prefix, part
        for name, child in part._modules.items():
            if child is not None and id(child) not in skipped:
                yield from walk(f"{prefix}{name}.", child)

    yield from walk("", module)


def _dense(gradient: Gradient) -> Gradient:
    if gradient is not None and gradient.layout is not torch.strided:
        return gradient.to_dense()
    return gradient
