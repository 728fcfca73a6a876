"""Random tensors of one device, dtype and distribution, and the templates that make calls of them.

Fan-in reaches 16,384; one case in six has outlier channels, a hundred times as large.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

FANS = (16, 64, 100, 256, 768, 1000, 1024, 2048, 4096, 8192, 11008, 16384)


DISTRIBUTIONS = ("normal", "outliers", "positive", "offset", "small", "large")


@dataclass
class Draw:
    """Random tensors of one device, dtype and distribution."""

    random: random.Random
    device: str
    dtype: torch.dtype
    largest: int
    """Most elements of one tensor."""
    distribution: str = "normal"
    _generator: Any = None

    def seed(self, number: int) -> None:
        """Start a new case."""
        self._generator = torch.Generator(device="cpu").manual_seed(number)
        self.distribution = self.random.choice(DISTRIBUTIONS)

    def __call__(self, *shape: int, scale: float = 1.0, plain: bool = False) -> torch.Tensor:
        """Return a tensor of the case's distribution; a plain one is normal."""
        value = torch.randn(shape, generator=self._generator)
        kind = "normal" if plain else self.distribution
        if kind == "outliers" and len(shape):
            width = shape[-1]
            chosen = torch.randperm(width, generator=self._generator)[: max(1, width // 64)]
            value[..., chosen] *= 100
        elif kind == "positive":
            value = value.abs()
        elif kind == "offset":
            value = value + 3
        elif kind == "small":
            value = value * 1e-3
        elif kind == "large":
            value = value * 30
        return (value * scale).to(self.device, self.dtype)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """Return indices below `high`."""
        return torch.randint(0, high, shape, generator=self._generator).to(self.device)

    def mask(self, *shape: int) -> torch.Tensor:
        """Return booleans."""
        return (torch.rand(shape, generator=self._generator) < 0.5).to(self.device)

    def rows(self, width: int) -> int:
        """Return a number of rows such that a tensor of them is not too large."""
        most = max(1, min(96, self.largest // max(width, 1)))
        return self.random.randint(1, most)

    def fan(self) -> int:
        """Return a fan-in."""
        return self.random.choice([each for each in FANS if each <= self.largest])

    def pick(self, *values: Any) -> Any:
        """Return one of some values."""
        return self.random.choice(values)


Made = tuple[Any, tuple[Any, ...], dict[str, Any]]


TEMPLATES: dict[str, Callable[[Draw], Made]] = {}


def template(function: Callable[[Draw], Made]) -> Callable[[Draw], Made]:
    TEMPLATES[function.__name__] = function
    return function
