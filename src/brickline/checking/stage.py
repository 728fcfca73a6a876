"""A model on stage: which module is at work, and which of its operations this is.

`Stage` follows the modules of one side through their calls and gives every operation a key that
is the same in every execution of the same code::

    Key("layers.0.attn", call=0, op="aten::mm", number=2)     the third mm of that module's call

Knows nothing of the other side.
"""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from brickline.adapters.torch_sites import layers_said, name_of

OUTPUT = "output"
"""Pseudo-operation: the value with which a module returns."""

INPUT = "input"
"""Pseudo-operation: what a module is called with, made by its caller."""
OPERAND = "operand "
"""Pseudo-operation: what is multiplied with a weight."""
ARGUMENT = "argument"
"""Pseudo-operation: a tensor of the root's call after it was written."""


class Key(NamedTuple):
    """One operation of one module call."""

    path: str
    call: int
    op: str
    number: int
    out: int = 0


def family_of(path: str) -> str:
    """Return what a name has in common with those in its place in other layers."""
    return re.sub(r"\d+", "*", path)


class Stage:
    """One side of a check: a module or another callable, with its submodules by path."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.modules = dict(_modules_of(root))
        self._aliases: defaultdict[int, list[str]] = defaultdict(list)
        for path, module in self.modules.items():
            self._aliases[id(module)].append(path)
        self.name = _name_of(root)
        self._stack: list[tuple[str, int]] = []
        self._calls: Counter[str] = Counter()
        self._ops: Counter[tuple[str, int, str]] = Counter()
        self._hooks: list[Any] = []
        self.on_leave: Callable[[str, int, Any], Any] | None = None
        """Called with path, call and output when a module returns; may return another output."""
        self.on_enter: Callable[[str, int, Any, Any], Any] | None = None
        """Called with path, call and arguments; may return other arguments."""
        self.callers: dict[tuple[str, int], tuple[str, int]] = {}
        """Which call made which call, in the current call of the root."""
        self._thread = threading.get_ident()
        self.elsewhere = 0
        """Calls of modules on other threads than the root's: nobody sees their operations."""

    @property
    def path(self) -> str:
        """Path of the innermost module at work; the root's is empty."""
        return self._stack[-1][0] if self._stack else ""

    def boundary(self, path: str) -> str:
        """Return the TorchScript module that a path lies in, whose inside is one brick."""
        parts = path.split(".")
        above = [".".join(parts[:end]) for end in range(1, len(parts))]
        script = torch.jit.ScriptModule
        return next((each for each in above if isinstance(self.modules.get(each), script)), path)

    def next_key(self, op: str) -> Key:
        """Return the key of the operation that is about to run."""
        path, call = self._stack[-1] if self._stack else ("", 0)
        place = (path, call, op)
        number = self._ops[place]
        self._ops[place] = number + 1
        return Key(path, call, op, number)

    def begin(self) -> None:
        """Start counting anew: one call of the root."""
        self._thread = threading.get_ident()
        self._stack.clear()
        self._calls.clear()
        self._ops.clear()
        self.callers = {}

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the modules as long as this lasts."""
        for path, module in self.modules.items():
            first = self._aliases[id(module)][0] == path
            if path and first and not is_compiled(module):
                # What TorchScript compiled refuses hooks, but a call from Python does run them.
                self._hooks.append(
                    torch.nn.Module.register_forward_pre_hook(
                        module,
                        functools.partial(self._enter, path),
                        with_kwargs=True,
                        prepend=True,
                    )
                )
                self._hooks.append(
                    torch.nn.Module.register_forward_hook(
                        module,
                        functools.partial(self._leave, path),
                        with_kwargs=True,
                        always_call=True,
                    )
                )
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _alias(self, path: str, module: Any) -> str:
        """Return the name of a module with several names that its caller calls it by."""
        names = self._aliases[id(module)]
        if len(names) == 1:
            return path
        caller = self.path
        inside = [each for each in names if not caller or each.startswith(f"{caller}.")]
        return min(inside, key=lambda each: each.count(".")) if inside else path

    def _enter(self, path: str, module: Any, args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            self.elsewhere += 1
            return None
        path = self._alias(path, module)
        call = self._calls[path]
        self._calls[path] = call + 1
        self.callers[path, call] = self._stack[-1] if self._stack else ("", 0)
        given = None if self.on_enter is None else self.on_enter(path, call, args, kwargs)
        self._stack.append((path, call))
        return given

    def _leave(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if threading.get_ident() != self._thread:
            return None
        names = self._aliases[id(module)]
        while self._stack:
            current, call = self._stack.pop()
            if current in names:
                if self.on_leave is not None:
                    return self.on_leave(current, call, output)
                break
        return None

    def display(self, path: str) -> str:
        """Return the name under which a path is reported."""
        return path or self.name


def takes_hooks(module: Any) -> bool:
    """Whether gradients can be followed into a module: TorchScript's are part of what calls it."""
    return not isinstance(module, torch.jit.ScriptModule)


def is_compiled(module: Any) -> bool:
    """Whether torch.compile made it: its inside is one region."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def layer_of(path: str) -> int | None:
    """Return the layer that a dotted path says: its number under a usual name, else its first."""
    return next((number for _, number in layers_said(path)), None)


def _name_of(root: Any) -> str:
    if isinstance(root, torch.nn.Module):
        return name_of(root)
    if isinstance(root, functools.partial):
        return _name_of(root.func)
    name = getattr(root, "__name__", None) or getattr(root, "name", None)
    return str(name or type(root).__name__)


def _modules_of(root: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    if isinstance(root, torch.nn.Module):
        yield from root.named_modules(remove_duplicate=False)
        return
    seen: set[int] = set()
    for name, module in _modules_in_reach(root):
        for path, each in module.named_modules():
            if id(each) not in seen:
                seen.add(id(each))
                yield (f"{name}.{path}" if path else name), each


def _modules_in_reach(function: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules that a function closes over, is bound to or names globally."""
    if isinstance(function, functools.partial):
        yield from _modules_in_reach(function.func)
        for number, value in enumerate(function.args):
            if isinstance(value, torch.nn.Module):
                yield f"arg{number}", value
        return
    owner = getattr(function, "__self__", None)
    if isinstance(owner, torch.nn.Module):
        yield type(owner).__name__, owner
    target = inspect.unwrap(getattr(function, "__func__", function))
    code = getattr(target, "__code__", None)
    if code is None:
        return
    for name, cell in zip(code.co_freevars, target.__closure__ or (), strict=False):
        try:
            value = cell.cell_contents
        except ValueError:
            continue
        if isinstance(value, torch.nn.Module):
            yield name, value
    for name in code.co_names:
        value = target.__globals__.get(name)
        if isinstance(value, torch.nn.Module):
            yield name, value
