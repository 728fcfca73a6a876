"""What an optimiser does to the candidate between two calls is done to the reference too.

A training step changes weights. The reference follows by the same change, so that weights that
differed before still differ by as much, and the next call is compared on equal terms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from brickline.oracle.widen import is_out_of_memory

MOST_BYTES = 1 << 29
"""Weights larger than this in all are not kept beside, and their changes are not followed."""


class Weights:
    """The candidate's weights after its last call, and the reference's as they were at first."""

    def __init__(self, candidate: Any, reference: Any) -> None:
        self._ours = _parameters(candidate)
        self._theirs = _parameters(reference)
        self._versions = {name: each._version for name, each in self._ours.items()}
        self._kept: dict[str, torch.Tensor] = {}
        self._first: dict[str, torch.Tensor] = {}

    def keep(self) -> None:
        """Remember the weights after a call that an optimiser may follow."""
        size = sum(each.numel() * each.element_size() for each in self._ours.values())
        if torch.is_grad_enabled() and size <= MOST_BYTES:
            try:
                self._kept = {name: each.detach().clone() for name, each in self._ours.items()}
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self._kept = {}

    def known(self) -> bool:
        """Whether the candidate's weights as its last call had them are at hand."""
        return all(
            name in self._kept
            for name, each in self._ours.items()
            if each._version != self._versions[name]
        )

    @contextmanager
    def as_called(self) -> Iterator[None]:
        """Give the candidate the weights of its last call, as long as this lasts."""
        now: dict[str, torch.Tensor] = {}
        for name, mine in self._ours.items():
            if mine._version != self._versions[name] and name in self._kept:
                now[name] = mine.detach().clone()
                _overwrite(mine, self._kept[name])
        try:
            yield
        finally:
            for name, data in now.items():
                _overwrite(self._ours[name], data)

    def follow(self) -> str | None:
        """Change the reference as the candidate has changed; say why where that cannot be done."""
        changed = [
            name for name, each in self._ours.items() if each._version != self._versions[name]
        ]
        if not changed:
            return None
        self._versions = {name: each._version for name, each in self._ours.items()}
        for name in changed:
            mine, theirs = self._ours[name], self._theirs.get(name)
            if theirs is None or theirs.shape != mine.shape or name not in self._kept:
                return (
                    f"the candidate's weights have changed ({name}) and the reference's cannot "
                    "follow; check one step at a time"
                )
        with torch.no_grad():
            for name in changed:
                theirs = self._theirs[name]
                self._first.setdefault(name, theirs.detach().clone())
                step = self._ours[name].double() - self._kept[name].double()
                theirs.copy_((theirs.double() + step.to(theirs.device)).to(theirs.dtype))
        return None

    def restore(self) -> None:
        """Give the reference its own weights back."""
        with torch.no_grad():
            for name, first in self._first.items():
                self._theirs[name].copy_(first)


def _overwrite(tensor: torch.Tensor, contents: torch.Tensor) -> None:
    """Change what a weight holds for a while; nobody is told."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tensor):
        tensor.copy_(contents)


def _parameters(root: Any) -> dict[str, torch.nn.Parameter]:
    return dict(root.named_parameters()) if isinstance(root, torch.nn.Module) else {}
