"""What may make a module compute another function than its counterpart: things that can be tried.

A trial exchanges one thing, a tensor or a setting, for the reference's. It is the cause where the
module then computes what its counterpart does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from brickline.checking.state.tensors import is_equal

MOST_ROWS = 4
"""Rows of a tensor that are named one by one."""


@dataclass(frozen=True)
class Trial:
    """One thing to exchange."""

    words: str
    """What the cause is, if this makes the difference vanish."""
    exchange: Callable[[], Any]
    restore: Callable[[], Any]

    @contextmanager
    def tried(self) -> Iterator[None]:
        """Exchange it as long as this lasts."""
        self.exchange()
        try:
            yield
        finally:
            self.restore()


def trials(module: torch.nn.Module, other: torch.nn.Module) -> Iterator[Trial]:
    """Yield what differs between a module and its counterpart, one thing at a time."""
    theirs = dict((*other.named_parameters(), *other.named_buffers()))
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        partner = theirs.get(name)
        if partner is not None and _may_stand_in(tensor, partner):
            data, new = tensor.data, partner.data.to(tensor.device)
            words = _tensor_words(name, data, new)
            yield Trial(words, partial(_put, tensor, new), partial(_put, tensor, data))
    ours, others = dict(module.named_modules()), dict(other.named_modules())
    for path in ours.keys() & others.keys():
        yield from _settings(path, ours[path], others[path])


def _may_stand_in(tensor: torch.Tensor, partner: torch.Tensor) -> bool:
    plain = tensor.layout is torch.strided and partner.layout is torch.strided
    return plain and tensor.shape == partner.shape and not is_equal(tensor, partner)


def _put(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


def _tensor_words(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> str:
    gap = (ours.double() - theirs.double()).abs()
    rows = gap.flatten(1).amax(1) if gap.ndim > 1 and gap.numel() else gap.flatten()
    odd = torch.nonzero(rows > 0).flatten().tolist()
    size = float(gap.norm() / theirs.double().norm()) if gap.numel() else 0.0
    if gap.ndim > 1 and 0 < len(odd) <= MOST_ROWS < len(rows):
        where = f"row {odd[0]}" if len(odd) == 1 else "rows " + ", ".join(map(str, odd))
        one, two = ours[odd].double(), theirs[odd].double()
        size = float((one - two).norm() / two.norm())
        return f"{where} of its {name} differs from the reference's by {size:.2g} (relative L2)"
    return f"its {name} differs from the reference's by {size:.2g} (relative L2)"


def _settings(path: str, module: torch.nn.Module, other: torch.nn.Module) -> Iterator[Trial]:
    own = vars(module)
    for name, value in vars(other).items():
        mine = own.get(name)
        is_setting = isinstance(value, bool | int | float | str) and name != "training"
        if is_setting and type(mine) is type(value) and mine != value:
            label = f"{path}.{name}" if path else name
            words = f"its {label} is {mine}; with the reference's {value} it is right"
            there = partial(setattr, module, name, value)
            yield Trial(words, there, partial(setattr, module, name, mine))
