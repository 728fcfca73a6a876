"""One call of an aten operation, by the names of its schema, narrow as made and wide on demand.

Knows how to read a call and how to execute it in float64 on its own inputs. Knows nothing of
bounds, and holds no tensor longer than the call is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from brickline.oracle.widen import is_out_of_memory, unit_roundoff, written_arguments

WIDE = {torch.complex64: torch.complex128, torch.complex32: torch.complex128}
EXACT_FORMS: dict[str, Callable[[Call], Sequence[torch.Tensor | None]]] = {}
"""Operations without a float64 kernel, by schema name, with what they mean."""


class NoExactForm(Exception):  # noqa: N818
    """The operation cannot be executed in float64; the message says why."""


def exact_form(
    *names: str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what operations without a float64 kernel mean, named with blanks."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        each = " ".join(names).split()
        EXACT_FORMS.update((f"aten::{name}", function) for name in each)
        return function

    return register


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for floating point, complex128 for complex, else the dtype itself."""
    return torch.float64 if dtype.is_floating_point else WIDE.get(dtype, dtype)


def widen(value: Any) -> Any:
    """Return a value with its tensors and dtypes wide; tensors that are wide are themselves."""
    if isinstance(value, torch.Tensor):
        return value.to(wide_dtype(value.dtype))
    if isinstance(value, torch.dtype):
        return wide_dtype(value)
    if isinstance(value, list | tuple):
        return type(value)(widen(each) for each in value)
    if isinstance(value, dict):
        return {name: widen(each) for name, each in value.items()}
    return value


UNSAID = {
    f"aten::{name}": ("running_mean", "running_var")
    for name in (
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
        "_batch_norm_with_update",
        "_native_batch_norm_legit",
    )
}
"""Arguments that are written to although some schemas do not say so."""


@lru_cache(maxsize=4096)
def written(func: Any) -> tuple[int | str, ...]:
    """Return which arguments an operation writes to, those in `UNSAID` included."""
    found = list(written_arguments(func))
    for number, each in enumerate(func._schema.arguments):
        if each.name in UNSAID.get(func._schema.name, ()) and number not in found:
            found.append(number)
    return tuple(found)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a structure, in order, each once."""
    found: list[torch.Tensor] = []
    for each in tree_leaves(value):
        if isinstance(each, torch.Tensor) and all(each is not other for other in found):
            found.append(each)
    return found


def outputs_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> list[torch.Tensor | None]:
    """Return what a call made: its results in order, then what it wrote to besides."""
    made: list[torch.Tensor | None] = [
        each if isinstance(each, torch.Tensor) else None for each in tree_leaves(result)
    ]
    for where in written(func):
        if isinstance(where, int):
            target = args[where] if where < len(args) else None
        else:
            target = kwargs.get(where)
        for each in tensors_of(target):
            if all(each is not other for other in made):
                made.append(each)
    return made


@dataclass(frozen=True)
class Call:
    """An operation with its arguments as they were before it ran."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Return the schema's name without the overload, such as ``aten::mm``."""
        return str(self.func._schema.name)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, defaults included."""
        found: dict[str, Any] = {}
        for number, each in enumerate(self.func._schema.arguments):
            if each.name in self.kwargs:
                found[each.name] = self.kwargs[each.name]
            elif not each.kwarg_only and number < len(self.args):
                found[each.name] = self.args[number]
            elif each.has_default_value():
                found[each.name] = each.default_value
        return found

    def get(self, name: str, default: Any = None) -> Any:
        """Return an argument as it was given."""
        return self.arguments.get(name, default)

    def wide(self, name: str) -> Any:
        """Return an argument in float64."""
        return widen(self.arguments.get(name))

    @cached_property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors that go in."""
        return tensors_of((self.args, dict(self.kwargs)))

    @cached_property
    def narrow(self) -> list[torch.Tensor]:
        """The floating-point and complex tensors that go in."""
        return [each for each in self.inputs if each.dtype.is_floating_point or each.is_complex()]

    @property
    def device(self) -> str:
        """Return ``cpu``, ``cuda``, ..."""
        kinds = {each.device.type for each in self.inputs} - {"cpu"}
        return kinds.pop() if kinds else "cpu"

    @property
    def unit(self) -> float:
        """Return the unit roundoff of the narrowest floating-point input; 0 without one."""
        return max((unit_roundoff(real_dtype(each.dtype)) for each in self.narrow), default=0.0)

    def mapped(self, change: Callable[[Any], Any]) -> Any:
        """Execute the operation with every argument changed, in float64; return its results."""
        arguments = tree_map(change, (widen(self.args), widen(dict(self.kwargs))))
        return self.func(*arguments[0], **arguments[1])

    def exact(self) -> list[torch.Tensor | None]:
        """Return what the operation makes in float64: results, then written arguments.

        Raises:
            NoExactForm: if it refuses float64.
        """
        form = EXACT_FORMS.get(self.name)
        if form is not None:
            return list(form(self))
        made = self._executed()
        short = [each for each in made if each is not None and _is_narrow(each)]
        if short and self.get("dtype") is None and self._takes("dtype"):
            # It makes a tensor from numbers, in torch's default dtype.
            made = self._executed(dtype=torch.float64)
            short = [each for each in made if each is not None and _is_narrow(each)]
        if short:
            raise NoExactForm(f"it returns {short[0].dtype} whatever it is given")
        return made

    def _executed(self, **more: Any) -> list[torch.Tensor | None]:
        args, kwargs = self._fresh()
        kwargs |= more
        try:
            result = self.func(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            if is_out_of_memory(error):
                raise
            raise NoExactForm(_first_line(error)) from error
        return outputs_of(self.func, args, kwargs, result)

    def _takes(self, name: str) -> bool:
        return any(each.name == name for each in self.func._schema.arguments)

    def _fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return wide arguments; those that are written to are copies."""
        args, kwargs = list(widen(self.args)), dict(widen(dict(self.kwargs)))
        for where in written(self.func):
            holder: Any = args if isinstance(where, int) else kwargs
            if isinstance(where, int) and where >= len(args):
                continue
            if isinstance(where, str) and where not in kwargs:
                continue
            holder[where] = tree_map(_copied, holder[where])
        return tuple(args), kwargs


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a complex dtype's parts, or the dtype itself."""
    return dtype.to_real() if dtype.is_complex else dtype


def _is_narrow(value: torch.Tensor) -> bool:
    return value.dtype is not wide_dtype(value.dtype)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
