"""The floating-point tensors in arguments and outputs: counted in one order, and replaced.

Arguments are looked into through tuples alone, because a list or a dictionary is the caller's and
may be kept; outputs also through lists and mappings. Knows nothing of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from brickline.checking.sides import Call
from brickline.checking.snapshot import like_tuple, tensors_in


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return arguments with their floating-point tensors replaced; tuples only are looked into."""
    args, kwargs = value
    return (
        tuple(_mapped(each, function) for each in args),
        {name: _mapped(each, function) for name, each in kwargs.items()},
    )


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if _is_float(value):
        return function(value)
    if isinstance(value, tuple):
        return like_tuple(value, [_mapped(each, function) for each in value])
    return value


def inputs_of(call: Call) -> list[torch.Tensor]:
    """Return the floating-point tensors of a call, in the order of `mapped`."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped((call.args, call.kwargs), note)
    return found


def floats_of(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors that were returned, in order."""
    if _is_float(output):
        return [output]
    if isinstance(output, Mapping):
        return [each for item in output.values() for each in floats_of(item)]
    if isinstance(output, list | tuple):
        return [each for item in output for each in floats_of(item)]
    return []


def replaced(output: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return what was returned with its floating-point tensors replaced."""
    if _is_float(output):
        return function(output)
    if isinstance(output, tuple):
        return like_tuple(output, [replaced(each, function) for each in output])
    if isinstance(output, dict | list):
        for key, each in output.items() if isinstance(output, dict) else enumerate(output):
            made = replaced(each, function)
            if made is not each:
                output[key] = made
    return output


def is_replaceable(output: Any) -> bool:
    """Whether every tensor that needs a gradient is among those that can be replaced."""
    every = {id(each) for _, each in tensors_in(output) if each.requires_grad}
    return every <= {id(each) for each in floats_of(output)}


def view_once(tensor: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return an alias of a tensor that needs a gradient, the same one each time."""
    if not tensor.requires_grad:
        return tensor
    if id(tensor) not in known:
        known[id(tensor)] = tensor.view_as(tensor)
    return known[id(tensor)]


def _is_float(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.layout is torch.strided
        and not value.is_meta
    )


def contained_tensors(args: Any, kwargs: Any) -> tuple[int, ...]:
    """Return the ids of tensors that need a gradient and lie in lists or dictionaries."""
    found: list[int] = []

    def walk(value: Any, inside: bool) -> None:
        if isinstance(value, torch.Tensor):
            if inside and value.requires_grad:
                found.append(id(value))
        elif type(value) in (list, dict):
            for each in value.values() if isinstance(value, dict) else value:
                walk(each, True)
        elif isinstance(value, tuple):
            for each in value:
                walk(each, inside)

    for each in (*args, *kwargs.values()):
        walk(each, False)
    return tuple(found)


def holds_gradient(value: Any) -> bool:
    """Whether a structure holds a tensor that a gradient goes back through."""
    if isinstance(value, torch.Tensor):
        return value.requires_grad and not value.is_leaf
    if isinstance(value, list | tuple):
        return any(holds_gradient(each) for each in value)
    if type(value) is dict:
        return any(holds_gradient(each) for each in value.values())
    return False
