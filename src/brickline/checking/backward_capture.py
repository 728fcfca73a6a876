"""What backward does in the candidate, module call by module call.

`Capture` follows the candidate's modules while gradients are enabled and keeps of each call a
`Visit`: what it was called with, what it returned, and for each backward pass the gradients that
arrived at its outputs and those that it gave for its inputs and its own parameters. Inputs and
parameters are handed to the call as aliases, so that a gradient is that of this call alone.
Knows nothing of the reference.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from brickline.checking.backward_tensors import (
    contained_tensors,
    floats_of,
    holds_gradient,
    inputs_of,
    is_replaceable,
    mapped,
    replaced,
    view_once,
)
from brickline.checking.backward_visits import Autocast, Gradients, Pass, Visit
from brickline.checking.sides import Call
from brickline.checking.snapshot import RandomState, snapshot, tensors_in
from brickline.checking.stage import Stage, is_compiled, takes_hooks


class Capture:
    """Follows the calls of one side and the gradients that come back through them."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.passes: dict[int, Pass] = {}
        self.position = 0
        self.off = False
        self._probe = _Probe()
        self._setting: Any = None
        self._stack: list[tuple[str, Visit | None]] = []
        self._calls: Counter[str] = Counter()
        self._aliased: list[tuple[Visit | None, dict[str, Any], dict[str, Any]]] = []

    def take(self) -> dict[int, Pass]:
        """Return the backward passes since the last time, and forget them."""
        taken, self.passes = self.passes, {}
        return taken

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the modules as long as this lasts."""
        hooks = []
        for path, module in self.stage.modules.items():
            if path and takes_hooks(module) and not _inside_compiled(path, self.stage.modules):
                hooks.append(
                    module.register_forward_pre_hook(
                        functools.partial(self._enter, path), with_kwargs=True
                    )
                )
                hooks.append(
                    module.register_forward_hook(
                        functools.partial(self._leave, path), with_kwargs=True, always_call=True
                    )
                )
        seen: set[int] = set()
        for module in self.stage.modules.values():
            for parameter in module._parameters.values():
                if parameter is not None and parameter.requires_grad and id(parameter) not in seen:
                    seen.add(id(parameter))
                    total = functools.partial(self._total, id(parameter))
                    hooks.append(parameter.register_hook(total))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._stack.clear()
            self._setting = None

    def followed(
        self, function: Callable[..., Any], number: int, setting: Any = None
    ) -> Callable[..., Any]:
        """Return the root's function such that its call is followed; its visits keep `setting`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.position, self._setting = number, setting
            self._calls.clear()
            self._stack.clear()
            root = self.stage.root
            given = self._enter("", root, args, kwargs)
            args, kwargs = (args, kwargs) if given is None else given
            try:
                output = function(*args, **kwargs)
            except BaseException:
                self._leave("", root, args, kwargs, None)
                raise
            replaced = self._leave("", root, args, kwargs, output)
            return output if replaced is None else replaced

        return call

    # Calls

    def _active(self) -> bool:
        return (
            torch.is_grad_enabled()
            and not self.off
            and not torch.compiler.is_compiling()
            and torch._C._functorch.peek_interpreter_stack() is None
        )

    def _enter(self, path: str, module: Any, args: Any, kwargs: Any) -> Any:
        if not self._active() or not _needs_gradient(module, args, kwargs):
            self._stack.append((path, None))
            return None
        with _disable_current_modes():
            visit = self._visit(path, module, args, kwargs)
            self._stack.append((path, visit))
            given = self._hand_in(visit, args, kwargs)
            self._alias_parameters(visit)
        return given

    def _visit(self, path: str, module: Any, args: Any, kwargs: Any) -> Visit:
        call = self._calls[path]
        self._calls[path] = call + 1
        with torch.no_grad():
            given = Call.taken(args, kwargs)
        visit = Visit(path, call, self.position, module, given, RandomState(), Autocast.taken())
        visit.setting = self._setting
        visit.contained = contained_tensors(args, kwargs)
        visit.weights = written_weights(module)
        above = next((each for _, each in reversed(self._stack) if each is not None), None)
        if above is not None:
            above.children.append(visit)
        return visit

    def _hand_in(self, visit: Visit, args: Any, kwargs: Any) -> Any:
        """Return the arguments with an alias for each tensor that needs a gradient."""
        known: dict[int, torch.Tensor] = {}
        numbers = iter(range(1 << 30))

        def alias(tensor: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            if not tensor.requires_grad:
                return tensor
            if id(tensor) in known:
                return known[id(tensor)]
            made = known[id(tensor)] = self._probe.alias(tensor)
            made.register_hook(functools.partial(self._note, visit, "inputs", number))
            visit.aliases[number] = (made, made._version)
            visit.inputs.add(number)
            return made

        return mapped((args, kwargs), alias)

    def _alias_parameters(self, visit: Visit) -> None:
        module = visit.module
        if not isinstance(module, torch.nn.Module) or is_compiled(module):
            return
        if isinstance(module, torch.nn.RNNBase):
            # It keeps a list of its weights between calls.
            return
        before, names = {}, {}
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            if hasattr(type(module), name):
                continue
            made = self._probe.alias(parameter)
            made.register_hook(functools.partial(self._note, visit, "parameters", name))
            if name in module.__dict__:
                before[name] = module.__dict__[name]
            names[name] = made
            module.__dict__[name] = made
        if names:
            self._aliased.append((visit, names, before))

    def _unalias_parameters(self, visit: Visit) -> None:
        while self._aliased:
            owner, names, before = self._aliased.pop()
            assert owner is not None
            attributes = owner.module.__dict__
            for name, made in names.items():
                if attributes.get(name) is made:
                    del attributes[name]
                if name in before:
                    attributes[name] = before[name]
            if owner is visit:
                return

    def _leave(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        while self._stack:
            current, visit = self._stack.pop()
            if visit is not None and any(owner is visit for owner, _, _ in self._aliased):
                self._unalias_parameters(visit)
            if current == path:
                break
        else:
            return None
        if visit is None or not self._active():
            return None
        with _disable_current_modes():
            return self._finish(visit, args, kwargs, output)

    def _finish(self, visit: Visit, args: Any, kwargs: Any, output: Any) -> Any:
        visit.random_after = RandomState()
        with torch.no_grad():
            visit.returned = snapshot(output)
        for number, (made, version) in visit.aliases.items():
            if made._version != version:
                visit.written.add(number)
        visit.aliases.clear()
        visit.hidden = _hides(visit, args, kwargs) or any(each.hidden for each in visit.children)
        tensors = [each for each in floats_of(output) if each.requires_grad]
        several = len({id(each) for each in tensors}) > 1
        if several:
            # One output may be made from another: what arrives from outside is told by an alias.
            visit.hidden = visit.hidden or not is_replaceable(output)
            known: dict[int, torch.Tensor] = {}
            output = replaced(output, lambda tensor: view_once(tensor, known))
        hooked: set[int] = set()
        for number, tensor in enumerate(floats_of(output)):
            if tensor.requires_grad:
                visit.outputs.add(number)
                if id(tensor) not in hooked:
                    hooked.add(id(tensor))
                    note = functools.partial(self._note, visit, "outputs", number)
                    tensor.register_hook(note)
        return output if several else None

    # Gradients

    def _note(self, visit: Visit, kind: str, key: int | str, gradient: torch.Tensor) -> None:
        if self.off:
            return
        task = torch._C._current_graph_task_id()
        if visit.recorded not in (None, task):
            return
        kept = _kept(gradient)
        known = visit.gradients.setdefault(task, Gradients())
        getattr(known, kind)[key] = kept
        if kind == "outputs":
            self._pass(task).visits[id(visit)] = visit
        if gradient.requires_grad:
            visit.recorded = task

    def _total(self, identity: int, gradient: torch.Tensor) -> None:
        if self.off:
            return
        task = torch._C._current_graph_task_id()
        self._pass(task).totals[identity] = _kept(gradient)

    def _pass(self, task: int) -> Pass:
        known = self.passes.get(task)
        if known is None:
            known = self.passes[task] = Pass(whole=self._probe.reached())
            torch.autograd.Variable._execution_engine.queue_callback(known.completed)
        return known


class _Same(torch.autograd.Function):
    """A leaf under another name: its gradient, sparse or dense, passes as it is."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, probe: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class _Probe:
    """A leaf that nobody asks for: a backward pass that goes there goes to every leaf."""

    def __init__(self) -> None:
        self._leaf = torch.zeros((), requires_grad=True)
        self._node = torch.autograd.graph.get_gradient_edge(self._leaf).node

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another name for a tensor; a leaf's carries the probe with it."""
        if not tensor.is_leaf:
            return tensor.view_as(tensor)
        made: torch.Tensor = _Same.apply(tensor, self._leaf)
        return made

    def reached(self) -> bool:
        """Whether the backward pass that runs goes to it."""
        return bool(torch._C._will_engine_execute_node(self._node))


def _kept(gradient: torch.Tensor) -> torch.Tensor:
    """Return a dense copy of a gradient."""
    with _disable_current_modes(), torch.no_grad():
        kept = gradient.detach()
        return kept.to_dense() if kept.layout is not torch.strided else kept.clone()


def _needs_gradient(module: Any, args: Any, kwargs: Any) -> bool:
    if isinstance(module, torch.nn.Module):
        if any(each.requires_grad for each in module.parameters()):
            return True
    elif callable(module):
        return True
    return any(each.requires_grad for each in inputs_of(Call(args, kwargs)))


def _hides(visit: Visit, args: Any, kwargs: Any) -> bool:
    """Whether a gradient can get in or out by other ways than arguments and results."""
    contained = contained_tensors(args, kwargs)
    visit.partial = bool(contained)
    followed = {id(each) for each in inputs_of(Call(args, kwargs))} | set(contained)
    for _, tensor in tensors_in((args, kwargs)):
        if tensor.requires_grad and id(tensor) not in followed:
            return True
    if contained != visit.contained:
        return True
    module = visit.module
    if not isinstance(module, torch.nn.Module):
        return False
    own = (*module.__dict__.items(), *module._buffers.items())
    return any(name not in _INTERNALS and holds_gradient(value) for name, value in own)


def written_weights(module: Any) -> int:
    """Return how often a module's weights have been written."""
    if not isinstance(module, torch.nn.Module):
        return 0
    return sum(each._version for each in module.parameters() if not each.is_inference())


_INTERNALS = frozenset(torch.nn.Module().__dict__)


def _inside_compiled(path: str, modules: Mapping[str, torch.nn.Module]) -> bool:
    """Whether torch.compile made a module or one that it lies in."""
    parts = path.split(".")
    above = [".".join(parts[:end]) for end in range(len(parts) + 1)]
    return any(is_compiled(modules[each]) for each in above if each in modules)
