"""Execution in float64: the same program, each of its operations wide.

`Widened` is a dispatch mode. Under it every operation gets its floating-point tensors as float64
and returns float64, whatever casts the program asks for: ``x.float()`` and ``softmax(dtype=...)``
stay wide. Weights are widened for the one operation that reads them, so that a model needs no
wide copy. Knows nothing of what the results are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from brickline.oracle.wide_products import is_large_product, product_in_parts

MOVES = frozenset(
    {
        "aten::embedding",
        "aten::index_select",
        "aten::gather",
        "aten::slice_scatter",
        "aten::take",
    }
)
"""Operations that copy elements: what they copied is widened, so that a large table is not."""
WARY = frozenset({"rms_norm"})
"""Functions that warn of a mixture of dtypes before they come to their operations."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to nearest."""
    return float(torch.finfo(dtype).eps) / 2


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory is exhausted, on any device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    words = str(error)
    return isinstance(error, RuntimeError) and (
        "not enough memory" in words or "can't allocate memory" in words or "out of memory" in words
    )


def is_narrow(value: Any) -> bool:
    """Whether it is a floating-point tensor that float64 would widen."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dtype is not torch.float64
    )


def widened(value: Any) -> Any:
    """Return a structure with its floating-point tensors in float64, exactly.

    Dtypes and complex tensors stay as they are; `calls.widen` widens those as well.
    """
    return tree_map(lambda each: each.double() if is_narrow(each) else each, value)


@lru_cache(maxsize=4096)
def is_view(func: torch._ops.OpOverload) -> bool:
    """Whether the operation returns an alias of an argument that it does not write to."""
    schema = func._schema
    aliases = any(each.alias_info is not None for each in schema.returns)
    return aliases and not schema.is_mutable


@lru_cache(maxsize=4096)
def written_arguments(func: torch._ops.OpOverload) -> tuple[int | str, ...]:
    """Return which arguments an operation writes to as its schema says, by position or keyword.

    `calls.written` adds those that some schemas keep silent about.
    """
    found: list[int | str] = []
    for number, each in enumerate(func._schema.arguments):
        if each.alias_info is not None and each.alias_info.is_write:
            found.append(each.name if each.kwarg_only else number)
    return tuple(found)


class WideFunctions(TorchFunctionMode):
    """Helps functions that refuse a mixture of dtypes before they come to their operations.

    Args:
        told: Context in which a function runs wide, given each narrow tensor with its wide copy.
    """

    def __init__(self, told: Callable[[list[Any]], AbstractContextManager[None]] | None) -> None:
        super().__init__()
        self._told = told

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call it; where dtypes are mixed and that is refused, call it wide."""
        named = dict(kwargs or {})
        if getattr(func, "__name__", "") in WARY:
            return self._wide(func, tuple(args), named)
        try:
            return func(*args, **named)
        except RuntimeError as error:
            mixed = any(map(is_narrow, tree_leaves((tuple(args), named))))
            if not mixed or is_out_of_memory(error):
                raise
            return self._wide(func, tuple(args), named)

    def _wide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wide = widened((args, kwargs))
        if self._told is None:
            return func(*wide[0], **wide[1])
        pairs = zip(tree_leaves((args, kwargs)), tree_leaves(wide), strict=True)
        with self._told([each for each in pairs if each[0] is not each[1]]):
            return func(*wide[0], **wide[1])


class Widened(TorchDispatchMode):
    """Executes every operation in float64."""

    def __init__(self) -> None:
        super().__init__()
        self._functions: list[WideFunctions] = []
        self.narrow_ops: set[str] = set()
        """Operations that have no float64 form and ran in their own dtype."""
        self.starved = False
        """Memory ran out in the last operation, and it ran in float32; the user resets it."""

    functions = WideFunctions
    """What helps functions that refuse a mixture of dtypes."""
    starves = False
    """Whether the program goes on where memory runs out in one operation; else that is raised."""
    told: Callable[[list[Any]], AbstractContextManager[None]] | None = None
    """Context in which a function runs that had to be given wide copies."""
    wide = True
    """Whether operations run in float64; a mode that inherits may switch it off."""

    def __enter__(self) -> Any:
        if self.wide:
            self._functions.append(self.functions(self.told))
            self._functions[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if self._functions:
            self._functions.pop().__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self.execute(func, tuple(args), dict(kwargs or {}))

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation wide."""
        try:
            return self._run_wide(func, args, kwargs)
        except (RuntimeError, MemoryError) as error:
            if not self.starves or not is_out_of_memory(error):
                raise
        # Here, so that the tensors of the attempt are gone with its frames.
        return self._starve(func, args, kwargs)

    def _run_wide(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_view(func):
            return func(*args, **kwargs)
        if func._schema.name in MOVES:
            return widened(func(*args, **kwargs))
        if is_large_product(func, args):
            return product_in_parts(args, kwargs)
        wide_args = tuple(_wide_argument(each) for each in args)
        wide_kwargs = {name: _wide_argument(each) for name, each in kwargs.items()}
        written = written_arguments(func)
        try:
            result = func(*wide_args, **wide_kwargs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            if is_out_of_memory(error):
                raise
            return self._run_narrow(func, args, kwargs, error)
        return self._written_back(written, args, kwargs, wide_args, wide_kwargs, result)

    def _run_narrow(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
    ) -> Any:
        """Run an operation that refuses float64 in float32, if it takes that."""
        original = func.namespace == "aten"
        try:
            result = func(*tree_map(_narrowed, args), **tree_map(_narrowed, kwargs))
        except (RuntimeError, NotImplementedError, TypeError):
            if original and not any(is_narrow(each) for each in args):
                raise error from None
            result = func(*args, **kwargs)
        self.narrow_ops.add(str(func))
        return widened(result)

    def _starve(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation in float32, for which memory ran out in float64."""
        self.starved = True
        narrow_args, narrow_kwargs = tree_map(_narrowed, args), tree_map(_narrowed, kwargs)
        result = func(*narrow_args, **narrow_kwargs)
        written = written_arguments(func)
        result = self._written_back(written, args, kwargs, narrow_args, narrow_kwargs, result)
        try:
            return widened(result)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        return result

    @staticmethod
    def _written_back(
        written: tuple[int | str, ...],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        wide_args: tuple[Any, ...],
        wide_kwargs: dict[str, Any],
        result: Any,
    ) -> Any:
        """Copy what was written to a wide copy into the tensor that was meant."""
        replaced: dict[int, Any] = {}
        for where in written:
            if isinstance(where, int):
                if where >= len(args):
                    continue
                meant, wide = args[where], wide_args[where]
            else:
                if where not in kwargs:
                    continue
                meant, wide = kwargs[where], wide_kwargs[where]
            for target, source in zip(_tensors(meant), _tensors(wide), strict=True):
                if target is not source:
                    target.copy_(source)
                    replaced[id(source)] = target
        if not replaced:
            return result
        return tree_map(lambda each: replaced.get(id(each), each), result)


def _narrowed(value: Any) -> Any:
    """Return a float64 tensor in float32, and anything else as it is."""
    is_wide = isinstance(value, torch.Tensor) and value.dtype is torch.float64
    return value.float() if is_wide else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [each for each in value if isinstance(each, torch.Tensor)]
    return []


def _wide_argument(value: Any) -> Any:
    """Return an argument of an operation wide, dtypes that it asks for included."""
    if isinstance(value, torch.Tensor):
        return value.double() if is_narrow(value) else value
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    if isinstance(value, list | tuple):
        return type(value)(_wide_argument(each) for each in value)
    return value
