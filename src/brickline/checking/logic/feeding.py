"""Which modules compute another function: each is fed what its counterpart was given.

In float64, and from the state in which the call began. What a module is handed is then the
reference's, so that no error of an earlier one reaches it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from brickline.checking.explain.repro import ShownRegion
from brickline.checking.logic.causes import Trial, trials
from brickline.checking.logic.outputs import largest_distance, outputs_of
from brickline.checking.logic.wide_sides import WideSide
from brickline.checking.snapshot import RandomState, snapshot, tensors_in
from brickline.checking.state.tensors import plain_name
from brickline.oracle.wide_calls.state import held_wide
from brickline.oracle.widen import Widened, is_out_of_memory

Modules = dict[str, torch.nn.Module]
MOST_BYTES = 4 << 30
"""What is kept of a call at the most; modules that return later are not fed."""


@dataclass(frozen=True)
class FedModule:
    """A module that puts out something else, though it was fed what its counterpart was."""

    name: str
    error: float
    """Relative L2 of its output to its counterpart's, in float64."""
    cause: str | None = None
    """What makes the difference vanish, in words."""
    alternatives: tuple[str, ...] = ()
    """Modules that the evidence does not exclude either."""
    source: str | None = None
    """File and line of the operation that shows it."""
    counterpart: str | None = None
    """The module of the reference that computes the right thing. Default None: of the same name."""
    members: tuple[str, ...] = ()
    """Modules of other layers with the same fault."""
    share: float | None = None
    """Part of the final difference that went away when it was repaired, in float64."""
    reason: str = "fed what its counterpart was given, it puts out something else in float64"
    """What showed it."""
    repair: Mapping[str, Any] | None = None
    """The cause as data: its kind, where it is, and what belongs there."""
    shown: ShownRegion | None = None
    """The operations that are wrong, for a repro."""


@dataclass(frozen=True)
class _Fed:
    """One call of a module of the reference."""

    name: str
    args: Any
    kwargs: Any
    output: Any
    dice: RandomState


def has_parts(side: WideSide) -> bool:
    """Return whether there is a module that could be named in place of the whole."""
    return len(side.side.stage.modules) > 1


def has_same_modules(candidate: WideSide, reference: WideSide) -> bool:
    """Return whether the modules of both sides have the same names."""
    ours, theirs = _both(candidate.root, reference.root)
    return bool(ours) and ours.keys() == theirs.keys()


def fed_modules(
    candidate: WideSide, reference: WideSide, limit: float, idle: torch.Tensor | None = None
) -> tuple[FedModule, ...]:
    """Return the innermost modules of the candidate that put out something else, in order.

    Args:
        candidate: Before its call.
        reference: Before the same call.
        limit: Relative L2 up to which outputs are the same.
        idle: Which tokens of a batch have no answer. Default None: all have one.
    """

    def error_of(fed: _Fed, trial: Trial | None = None, side: WideSide = candidate) -> float | None:
        output = _output(side, ours[fed.name], fed, trial)
        if isinstance(output, _Refused):
            return None
        return largest_distance(outputs_of(output), outputs_of(fed.output), idle)

    def removes(trial: Trial, fed: _Fed) -> bool:
        error = error_of(fed, trial)
        return error is not None and error <= limit

    ours, theirs = _both(candidate.root, reference.root)
    found: list[FedModule] = []
    calls, refused = _calls(reference, theirs)
    for fed in calls:
        if any(_is_inside(part, fed.name) for part in refused):
            continue  # what it puts out tells of that part
        parts = [other.name for other in found if _is_inside(other.name, fed.name)]
        with _exchanged(ours, theirs, parts):
            error = error_of(fed, side=_carrying(candidate, reference, parts))
        if error is None:
            refused.append(fed.name)
        elif error > limit:
            tried = trials(ours[fed.name], theirs[fed.name])
            cause = next((each.words for each in tried if removes(each, fed)), None)
            found.append(FedModule(fed.name, error, cause))
    return tuple(found)


@contextmanager
def _exchanged(ours: Modules, theirs: Modules, names: list[str]) -> Iterator[None]:
    """Let modules of the reference work in the place of the candidate's as long as this lasts."""
    places = [(ours[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names if name]
    kept = [(module, name, module._modules[name]) for module, name in places]
    layers = [weight for name in names if name for weight in _recurrent_weights(theirs[name])]
    try:
        for (module, name, _), full in zip(kept, names, strict=True):
            module._modules[name] = theirs[full]
        with held_wide(layers):
            yield
    finally:
        for module, name, own in kept:
            module._modules[name] = own


def _carrying(candidate: WideSide, reference: WideSide, names: list[str]) -> WideSide:
    """Return the candidate with what both sides compute with, where some modules are exchanged."""

    def is_theirs(tensor: str) -> bool:
        return any(name and tensor.startswith(f"{name}.") for name in names)

    kept = {name: each for name, each in candidate.carried.items() if not is_theirs(name)}
    theirs = {name: each for name, each in reference.carried.items() if is_theirs(name)}
    return replace(candidate, carried=kept | theirs)


def _both(candidate: Any, reference: Any) -> tuple[Modules, Modules]:
    """Return the modules of both sides by name, without what TorchScript on either side hides."""
    ours, theirs = _modules(candidate), _modules(reference)
    closed = {
        name
        for name, module in (*ours.items(), *theirs.items())
        if isinstance(module, torch.jit.ScriptModule)
    }

    def seen(modules: Modules) -> Modules:
        return {
            name: module
            for name, module in modules.items()
            if not any(name != each and _is_inside(name, each) for each in closed)
        }

    return seen(ours), seen(theirs)


def _modules(root: Any) -> Modules:
    if not isinstance(root, torch.nn.Module):
        return {}
    return {plain_name(path): module for path, module in root.named_modules()}


def _is_inside(name: str, around: str) -> bool:
    return not around or name == around or name.startswith(f"{around}.")


def _calls(reference: WideSide, modules: Modules) -> tuple[list[_Fed], list[str]]:
    """Return the first call of each module of the reference, in the order in which they end.

    And the modules whose calls there was no room for.
    """
    made: list[_Fed] = []
    left_out: list[str] = []
    begun: dict[str, list[tuple[Any, Any, RandomState]]] = {}
    left = MOST_BYTES
    # Modules of TorchScript refuse hooks, but a call from Python runs them.
    register_before = torch.nn.Module.register_forward_pre_hook
    register_after = torch.nn.Module.register_forward_hook
    with ExitStack() as stack:
        for name, module in modules.items():

            def before(_: Any, args: Any, kwargs: Any, name: str = name) -> None:
                if name in begun:
                    return
                if left <= 0:
                    left_out.append(name)
                    return
                held = snapshot((args, kwargs))
                begun[name] = [(*held, RandomState())]

            def after(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                nonlocal left
                if begun.get(name):
                    given, named, dice = begun[name].pop()
                    made.append(_Fed(name, given, named, snapshot(output), dice))
                    left -= _size(made[-1])

            if name:
                stack.callback(register_before(module, before, with_kwargs=True).remove)
                stack.callback(register_after(module, after, with_kwargs=True).remove)
        output = reference.run()
    call = reference.call.copied(wide=True)
    made.append(_Fed("", call.args, call.kwargs, output, reference.dice))
    return made, left_out


def _size(fed: _Fed) -> int:
    tensors = [each for _, each in tensors_in((fed.args, fed.kwargs, fed.output))]
    return sum(each.numel() * each.element_size() for each in tensors)


class _Refused:
    """In place of an output: a module takes no such call, for example in float64."""


def _output(
    candidate: WideSide, module: torch.nn.Module, fed: _Fed, trial: Trial | None
) -> Any | _Refused:
    """Return what a module makes of its counterpart's inputs."""
    changed = nullcontext() if trial is None else trial.tried()
    device = candidate.side.device
    args, kwargs = snapshot(
        (fed.args, fed.kwargs), lambda tensor: tensor if device is None else tensor.to(device)
    )
    try:
        if not fed.name:
            return candidate.run(prepared=changed)
        with candidate.ready(), changed, held_wide(_recurrent_weights(module)), Widened():
            fed.dice.restore()
            return snapshot(module(*args, **kwargs))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return _Refused()


def _recurrent_weights(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the weights of recurrent layers, whose kernels take no mixture of dtypes."""
    layers = [each for each in module.modules() if isinstance(each, torch.nn.RNNBase)]
    return [weight for layer in layers for weight in layer.parameters()]
