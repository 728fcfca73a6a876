"""Torch's recurrent layers, made to run in float64 and the same way in every dtype.

They refuse inputs of another dtype than their weights, and on the CPU oneDNN does a whole layer in
one operation that has no float64 form.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


class Recurrent:
    """Sees to the recurrent layers of one execution while they are at work."""

    def __init__(self, *, wide: bool, in_steps: bool) -> None:
        """Say how layers run.

        Args:
            wide: Whether in float64.
            in_steps: Whether they take their steps one by one, as they do in float64.
        """
        self._wide = wide
        self._in_steps = in_steps
        self._open = ExitStack()
        self._weights: dict[torch.nn.RNNBase, Any] = {}
        """Those of layers at work, as they were."""

    def enter(self, module: Any) -> bool:
        """Begin a call of a module; whether it is a layer whose inputs must be wide."""
        if not isinstance(module, torch.nn.RNNBase):
            return False
        if self._in_steps:
            self._open.enter_context(_without_onednn())
        if self._wide and module not in self._weights:
            self._weights[module] = module._flat_weights
            module._flat_weights = [
                each if each is None else each.detach().double() for each in module._flat_weights
            ]
        return self._wide

    def leave(self, module: Any) -> None:
        """End a call of a module."""
        if isinstance(module, torch.nn.RNNBase):
            self._open.close()
            if module in self._weights:
                module._flat_weights = self._weights.pop(module)

    def close(self) -> None:
        """Leave no trace, also of a call that raised."""
        self._open.close()
        for module, weights in self._weights.items():
            module._flat_weights = weights
        self._weights.clear()


@contextmanager
def _without_onednn() -> Iterator[None]:
    """Do without oneDNN's operations, which have no float64 form, as long as this lasts."""
    before = torch._C._get_mkldnn_enabled()
    # torch.backends.mkldnn.flags sets TF32 as well, and warns of it.
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
