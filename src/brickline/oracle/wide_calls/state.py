"""State for one more call: what a model holds in float64, moved by its rounding, or copied.

Knows nothing of why the call is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from brickline.oracle.wide_calls.snapshot import Convert, copied, is_state, leaves
from brickline.oracle.widen import is_narrow

_TABLES = ("_parameters", "_buffers", "_modules")


@contextmanager
def held_wide(
    tensors: Iterable[torch.Tensor],
    widened: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.double,
) -> Iterator[None]:
    """Hold the floating-point ones among some tensors in float64 as long as this lasts.

    Args:
        tensors: To be held.
        widened: Makes a tensor wide. Default `torch.Tensor.double`.
    """
    kept = [(tensor, tensor.data) for tensor in tensors if is_narrow(tensor)]
    try:
        for tensor, data in kept:
            tensor.data = widened(data)
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


@contextmanager
def wide_constants() -> Iterator[None]:
    """Make constants, and quotients of integers, in float64 as long as this lasts."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def nudge(tensor: torch.Tensor, roundoff: float, generator: torch.Generator) -> torch.Tensor:
    """Return a tensor in float64, each element moved by up to one rounding."""
    # Drawn on the CPU, so that it is the same everywhere.
    draw = torch.rand(tensor.shape, generator=generator, dtype=torch.float64)
    factors = (1 + roundoff * (2 * draw - 1)).to(tensor.device)
    return (tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()) * factors


@contextmanager
def copied_state(root: torch.nn.Module, convert: Convert) -> Iterator[None]:
    """Let a model work on copies of its buffers and attributes as long as this lasts.

    The tensors and objects that it holds are put aside, not written to, and are back afterwards.
    Parameters stay as they are.

    Args:
        root: The model.
        convert: Applied to each copied tensor.
    """
    modules = list(root.modules())
    kept = [
        (module, dict(module.__dict__), [dict(getattr(module, name)) for name in _TABLES])
        for module in modules
    ]
    memo: dict[int, Any] = {id(each): (each, each) for each in root.parameters()}
    try:
        for module in modules:
            for name, value in module._buffers.items():
                module._buffers[name] = copied(value, convert, memo)
            for name, value in list(module.__dict__.items()):
                if is_state(name, value):
                    module.__dict__[name] = copied(value, convert, memo)
        yield
    finally:
        for module, attributes, tables in kept:
            _put_back(module.__dict__, attributes)
            for name, table in zip(_TABLES, tables, strict=True):
                _put_back(module.__dict__[name], table)


def _put_back(current: dict[str, Any], kept: dict[str, Any]) -> None:
    """Give a dictionary the entries that it had; another thread may read it meanwhile."""
    for name in [name for name in current if name not in kept]:
        del current[name]
    for name, value in kept.items():
        if current.get(name, kept) is not value:
            current[name] = value


def generators_of(root: torch.nn.Module, given: Any) -> list[torch.Generator]:
    """Return the random generators that a model holds or is given: copies share them."""
    held = [
        value
        for module in root.modules()
        for name, value in module.__dict__.items()
        if is_state(name, value)
    ]
    return [leaf for leaf in leaves((given, held)) if isinstance(leaf, torch.Generator)]
