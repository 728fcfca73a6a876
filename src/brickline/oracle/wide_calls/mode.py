"""The dispatch mode under which a call is made again in float64 beside its native run.

`WideCall` is `Widened` with what such a call needs besides: constants that the program makes are
wide, random numbers are those that the native run draws, weights can be moved by their rounding,
and a write to memory that is not the call's own is refused before it happens. It changes nothing
outside its thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from brickline.oracle.calls import written
from brickline.oracle.widen import (
    MOVES,
    WideFunctions,
    Widened,
    is_narrow,
    is_view,
    unit_roundoff,
    widened,
)

_CONSTANTS = frozenset({torch.tensor, torch.as_tensor, torch.asarray})
_PRODUCTS = frozenset({torch.ops.aten.mm.default, torch.ops.aten.addmm.default})
ROUNDED = 3.0**-0.5
"""Root mean square of a rounding to nearest, in units of the largest."""


class ForeignWrite(Exception):  # noqa: N818
    """The call would write to memory that is not its own: the native run would see it."""


class _WideFunctions(WideFunctions):
    """Makes tensors of Python's numbers in float64 as well: torch would round them."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call a function; make a constant wide."""
        result = super().__torch_function__(func, types, args, kwargs)
        if func not in _CONSTANTS:
            return result
        named = dict(kwargs or {})
        if not is_narrow(result) or named.get("dtype") is not None:
            return result
        values = args[0] if args else named.get("data")
        if isinstance(values, torch.Tensor) or hasattr(values, "__array__"):
            return result
        return func(*args, **{**named, "dtype": torch.float64})


class WideCall(Widened):
    """Executes one call in float64.

    Args:
        working: Dtype in which the native run draws its random numbers.
        moved: Whether weights are moved by their own rounding.
    """

    def __init__(self, working: torch.dtype, *, moved: bool = False) -> None:
        super().__init__()
        self._working = working
        self.is_moved = moved
        """Whether weights are moved by their own rounding."""
        self._generator = torch.Generator().manual_seed(20)
        self._signs: dict[tuple[int, int], torch.Tensor] = {}
        self._owned: set[int] = set()
        self.roundoff = 0.0
        """The coarsest rounding by which something was moved."""

    functions = _WideFunctions

    def own(self, tensors: Iterable[Any]) -> None:
        """Let the call write to tensors: copies that it was given, or what it has made."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._owned.add(_memory(tensor))

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation wide."""
        if is_view(func):
            return func(*args, **kwargs)
        places = written(func)
        if places:
            self._check_written(func, places, args, kwargs)
        if _is_random(func, args, kwargs):
            result = self._drawn(func, places, args, kwargs)
        else:
            result = self._executed(func, places, args, kwargs)
        self.own(tree_leaves(result))
        return result

    def _executed(self, func: Any, places: Any, args: Any, kwargs: Any) -> Any:
        moves = func._schema.name in MOVES
        if self.is_moved and not moves:
            if func in _PRODUCTS and is_narrow(args[-1]):
                # Moving columns of the left factor does to the product what a moved weight does.
                left = args[-2].double() * self._factor(args[-2].shape[-1], args[-1])
                args = (*map(self.widen, args[:-2]), left, args[-1])
            else:
                args, kwargs = tree_map(self.widen, args), tree_map(self.widen, kwargs)
        result = super().execute(func, args, kwargs)
        if self.is_moved and moves and is_narrow(args[0]) and result.dim():
            return result * self._factor(result.shape[-1], args[0])
        if not places and any(map(is_narrow, tree_leaves(result))):
            return self._made_wide(func, args, kwargs, result)
        return result

    def _made_wide(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Make a constant, or what comes of integers alone, once more in float64."""
        wide_args, wide_kwargs = args, dict(kwargs)
        if any(isinstance(each, torch.Tensor) for each in tree_leaves((args, kwargs))):
            wide_args = tree_map(_as_float, args)
        elif any(argument.name == "dtype" for argument in func._schema.arguments):
            wide_kwargs["dtype"] = torch.float64
        try:
            return widened(func(*wide_args, **wide_kwargs))
        except (RuntimeError, TypeError, IndexError):
            return widened(result)

    def _drawn(self, func: Any, places: Any, args: Any, kwargs: Any) -> Any:
        """Draw what the native run draws: numbers in its dtype."""
        narrow_args, narrow_kwargs = tree_map(self._native, args), tree_map(self._native, kwargs)
        result = func(*narrow_args, **narrow_kwargs)
        result = self._written_back(places, args, kwargs, narrow_args, narrow_kwargs, result)
        return widened(result)

    def _native(self, value: Any) -> Any:
        if value is torch.float64:
            return self._working
        is_wide = isinstance(value, torch.Tensor) and value.dtype is torch.float64
        return value.to(self._working) if is_wide else value

    def _check_written(self, func: Any, places: Any, args: Any, kwargs: Any) -> None:
        for place in places:
            if isinstance(place, int):
                target = args[place] if place < len(args) else None
            else:
                target = kwargs.get(place)
            for tensor in tree_leaves(target):
                if isinstance(tensor, torch.Tensor) and _memory(tensor) not in self._owned:
                    raise ForeignWrite(
                        f"{func} writes to a tensor that is neither an argument nor the model's "
                        "buffer or attribute"
                    )

    # Weights and inputs moved by their own rounding

    def widen(self, value: Any) -> Any:
        """Return a tensor in float64, moved where that is asked for; other values as they are."""
        if not is_narrow(value):
            return value
        wide = value.double()
        if not self.is_moved:
            return wide
        if not wide.dim():
            return wide * self._factor(1, value)[0]
        if wide.dim() == 1:
            return wide * self._factor(wide.shape[0], value)
        columns, rows = (self._signs_of(wide.shape[end], value) for end in (-1, -2))
        return torch.addcmul(wide, wide * columns, rows[:, None], value=self._amplitude(value))

    def _factor(self, length: int, value: torch.Tensor) -> torch.Tensor:
        return 1 + self._amplitude(value) * self._signs_of(length, value)

    def _amplitude(self, value: torch.Tensor) -> float:
        self.roundoff = max(self.roundoff, unit_roundoff(value.dtype))
        return ROUNDED * unit_roundoff(value.dtype)

    def _signs_of(self, length: int, value: torch.Tensor) -> torch.Tensor:
        """Return signs at random: a tensor has the same ones wherever it is used."""
        key = length, _memory(value)
        signs = self._signs.get(key)
        if signs is None:
            draw = torch.randint(0, 2, (length,), generator=self._generator)
            signs = self._signs[key] = (2 * draw.double() - 1).to(value.device)
        return signs


def _is_random(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws numbers: attention is marked so, and draws for dropout alone."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for number, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            return bool(argument.default_value if given is None else given)
    return True


def _as_float(value: Any) -> Any:
    """Return a tensor of integers in float64."""
    is_whole = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
    return value.double() if is_whole and not value.is_complex() else value


def _memory(tensor: torch.Tensor) -> int:
    """Return what tells the memory of a tensor from any other that is there at the same time."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return id(tensor)
