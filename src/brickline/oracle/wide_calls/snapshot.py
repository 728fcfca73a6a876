"""Copies of calls and of state, so that a call can be made again as it was.

A snapshot keeps aliasing: two names for one tensor stay two names for one copy. Modules,
functions and classes are shared, everything else that can hold a tensor is copied.
"""

from __future__ import annotations

import copy
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from brickline.errors import BricklineError

_REFUSALS = (
    TypeError,
    AttributeError,
    ValueError,
    RuntimeError,
    OSError,
    copy.Error,
    BricklineError,
)
"""What an object may raise that does not want to be copied: it is shared."""
Convert = Callable[[torch.Tensor], torch.Tensor]

_SHARED = (
    torch.nn.Module,
    torch.dtype,
    torch.device,
    torch.Generator,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    type,
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
)


def holds_numbers(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements can be read one by one: neither sparse, quantised nor meta."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return plain and not tensor.is_meta and not tensor.is_nested


def snapshot(value: Any, convert: Convert | None = None) -> Any:
    """Return a deep copy of a call's arguments, each tensor detached and cloned.

    Args:
        value: Any structure of tensors, containers and objects.
        convert: Applied to each cloned tensor.
    """
    return copied(value, convert, {}, 0)


def copied(value: Any, convert: Convert | None, memo: dict[int, Any], depth: int = 0) -> Any:
    """Return a deep copy of a value; what `memo` holds by id is taken from there."""
    if isinstance(value, _SHARED) or depth > 40:
        return value
    known = memo.get(id(value))
    if known is not None:
        return known[0]
    result = _copy_of(value, convert, memo, depth + 1)
    # The original stays alive with its copy, so that its id stays its own.
    memo[id(value)] = (result, value)
    return result


def like_tuple(value: tuple[Any, ...], items: Iterable[Any]) -> Any:
    """Return other items in a tuple of the same kind, with the same names where it has any."""
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _copy_of(value: Any, convert: Convert | None, memo: dict[int, Any], depth: int) -> Any:
    if isinstance(value, torch.Tensor):
        return _tensor(value, convert)
    if isinstance(value, list) and type(value) is list:
        return [copied(each, convert, memo, depth) for each in value]
    if isinstance(value, tuple):
        return like_tuple(value, [copied(each, convert, memo, depth) for each in value])
    if type(value) is dict:
        return {key: copied(each, convert, memo, depth) for key, each in value.items()}
    if isinstance(value, set | frozenset | range | slice):
        return value if not isinstance(value, set) else set(value)
    return _object(value, convert, memo, depth)


def _tensor(value: torch.Tensor, convert: Convert | None) -> torch.Tensor:
    if value.layout is not torch.strided or value.is_meta:
        return value
    made = value.detach().clone()
    if convert is not None:
        made = convert(made)
    if value.requires_grad and made.dtype.is_floating_point:
        made.requires_grad_(True)
    return made


def _object(value: Any, convert: Convert | None, memo: dict[int, Any], depth: int) -> Any:
    try:
        made = copy.copy(value)
    except _REFUSALS:
        return value
    memo[id(value)] = (made, value)
    if isinstance(made, dict):
        for key, each in list(made.items()):
            dict.__setitem__(made, key, copied(each, convert, memo, depth))
    elif isinstance(made, list):
        made[:] = [copied(each, convert, memo, depth) for each in made]
    for name, each in list(getattr(made, "__dict__", {}).items()):
        made.__dict__[name] = copied(each, convert, memo, depth)
    return made


def tensors_in(value: Any, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a structure with its place, such as ``[0].keys[2]``."""
    yield from _walk(value, prefix, set(), 0)


def _walk(value: Any, place: str, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield place, value
        return
    if isinstance(value, _SHARED) or depth > 40 or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _walk(each, f"{place}[{key!r}]", seen, depth + 1)
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from _walk(each, f"{place}[{number}]", seen, depth + 1)
    if not isinstance(value, dict | list | tuple):
        for name, each in getattr(value, "__dict__", {}).items():
            yield from _walk(each, f"{place}.{name}", seen, depth + 1)


def leaves(value: Any) -> Iterator[Any]:
    """Yield what lies in a structure and is neither a container nor an object with attributes."""
    waiting, seen = [value], set()
    while waiting:
        current = waiting.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, (torch.Tensor, *_SHARED)):
            yield current
            continue
        if isinstance(current, Mapping):
            waiting += current.values()
        elif isinstance(current, list | tuple):
            waiting += current
        waiting += getattr(current, "__dict__", {}).values()


class State:
    """What a model's modules hold beside their parameters: buffers and plain attributes."""

    def __init__(self, root: Any) -> None:
        self._kept: list[tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = []
        named = dict(root.named_modules()) if isinstance(root, torch.nn.Module) else {}
        modules = named.values()
        self._paths = list(named)
        # Parameters may be held in lists too (those of recurrent layers are): they stay shared.
        self._shared: dict[int, Any] = {}
        if isinstance(root, torch.nn.Module):
            self._shared = {id(each): (each, each) for each in root.parameters()}
        memo = dict(self._shared)
        for module in modules:
            buffers = {name: copied(each, None, memo, 0) for name, each in module._buffers.items()}
            attributes = {
                name: copied(each, None, memo, 0)
                for name, each in module.__dict__.items()
                if is_state(name, each)
            }
            self._kept.append((module, buffers, attributes))

    def tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return what was kept, by the path of the module and the place in it."""
        found: dict[tuple[str, str], torch.Tensor] = {}
        for path, (_, buffers, attributes) in zip(self._paths, self._kept, strict=True):
            for name, each in (*buffers.items(), *attributes.items()):
                for place, tensor in tensors_in(each, name):
                    found[path, place] = tensor
        return found

    def restore(self) -> None:
        """Put everything back; tensors that are still there get their contents back in place."""
        memo = dict(self._shared)
        for module, buffers, attributes in self._kept:
            for name, kept in buffers.items():
                module._buffers[name] = _restored(module._buffers.get(name), kept, memo)
            for name in [each for each in module.__dict__ if is_state(each, module.__dict__[each])]:
                if name not in attributes:
                    del module.__dict__[name]
            for name, kept in attributes.items():
                module.__dict__[name] = _restored(module.__dict__.get(name), kept, memo)


def _restored(current: Any, kept: Any, memo: dict[int, Any]) -> Any:
    if isinstance(kept, torch.Tensor) and isinstance(current, torch.Tensor):
        same = current.shape == kept.shape and current.dtype == kept.dtype
        if same and current.device == kept.device and not current.is_inference():
            # What autograd has saved stays valid: its contents are what they were.
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(current):
                current.copy_(kept)
            return current
    return copied(kept, None, memo, 0)


_PLAIN = frozenset({"training", "forward", "_forward_hooks", "_forward_pre_hooks"})


def is_state(name: str, value: Any) -> bool:
    """Whether a module's attribute may change when it is called."""
    if name in _PLAIN or (name.startswith("_") and name in _MODULE_INTERNALS):
        return False
    return not isinstance(value, torch.nn.Module | types.FunctionType | type | str)


_MODULE_INTERNALS = frozenset(torch.nn.Module().__dict__)


class RandomState:
    """The global random generators, so that a call can draw the same numbers again."""

    def __init__(self) -> None:
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def restore(self) -> None:
        """Set the generators back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
