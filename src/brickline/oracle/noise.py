"""Rounding at random: a program in float64 with the errors that float32 kernels would make.

Under `Noisy` each operation's float64 result is moved by as much as its rounding is expected to
move it when it accumulates in float32. The result tells how far a clean execution of the whole may
end up, whichever way its operations are fused. Knows no particular program.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from brickline.oracle.bounds import op_bound
from brickline.oracle.calls import written
from brickline.oracle.widen import Widened, is_view


class Noisy(Widened):
    """Executes every operation in float64 and adds the noise of float32."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def execute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation wide, and move what it makes."""
        result = super().execute(func, args, kwargs)
        if is_view(func) or written(func):
            return result
        flat, shape = tree_flatten(result)
        if not any(_is_wide(each) for each in flat):
            return result
        noises = self._noises(func, args, kwargs, flat)
        moved = [
            each if noise is None else each + noise * self._draw(each)
            for each, noise in zip(flat, noises, strict=True)
        ]
        return tree_unflatten(moved, shape)

    def _noises(self, func: Any, args: Any, kwargs: Any, made: list[Any]) -> list[Any]:
        exact = [each if isinstance(each, torch.Tensor) else None for each in made]
        narrow = tree_map(_narrow, (args, kwargs))
        try:
            bound = op_bound(func, narrow[0], narrow[1], exact, [torch.float32] * len(exact))
        except (RuntimeError, TypeError, ValueError, AssertionError, IndexError, KeyError):
            bound = None
        if bound is None or not bound.outputs:
            return [None] * len(made)
        noises = [None if each is None else each.noise for each in bound.outputs]
        return [
            noise if noise is not None and _is_wide(each) and noise.shape == each.shape else None
            for noise, each in zip(noises, made, strict=True)
        ]

    def _draw(self, like: torch.Tensor) -> torch.Tensor:
        made = torch.randn(like.shape, generator=self._generator, dtype=torch.float64)
        return made.to(like.device)


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float64


def _narrow(value: Any) -> Any:
    return value.float() if _is_wide(value) else value
