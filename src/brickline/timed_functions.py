"""Functions each of whose calls is one entry of a brick: what `@profiler.brick(...)` makes.

The native core calls `decorate` when a brick is called with a function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from brickline import _core

_Function = TypeVar("_Function", bound=Callable[..., Any])


def decorate(handle: _core.BrickHandle, function: _Function) -> _Function:
    """Return `function` with each call as one entry of the brick.

    A coroutine function is timed over its awaits, and a generator from its first value to its last;
    entries that overlap in one thread are marked out of order and have no exclusive time.
    """
    wrapper: Any
    # Entries of these may overlap in one thread, so each has a timer of its own.
    core, name, layer = handle.profiler, handle.name, handle.layer
    if inspect.isasyncgenfunction(function):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            timer = core.start(name, layer)
            try:
                async for value in function(*args, **kwargs):
                    yield value
            finally:
                core._stop_handle(timer, handle)

    elif inspect.iscoroutinefunction(function):

        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            timer = core.start(name, layer)
            try:
                return await function(*args, **kwargs)
            finally:
                core._stop_handle(timer, handle)

    elif inspect.isgeneratorfunction(function):

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            timer = core.start(name, layer)
            try:
                return (yield from function(*args, **kwargs))
            finally:
                core._stop_handle(timer, handle)

    else:
        wrapper = handle.wrap(function)
    return functools.update_wrapper(wrapper, function)  # type: ignore[return-value]
