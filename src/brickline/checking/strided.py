"""Strided views of a plan's memory in a check: their elements, and a launch over them.

A kernel that declares strides finds its elements as far apart as in the plan, in a copy of all that
lies between them. Knows memory and one launch, nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from brickline.cache import KernelCache
from brickline.checking.kernels import TORCH_DTYPES
from brickline.errors import LaunchError
from brickline.kernel import Param
from brickline.plan import Plan
from brickline.plan_buffers import PlanBuffer
from brickline.plan_launches import Launch


def elements_of(
    memory: Sequence[torch.Tensor],
    buffer: PlanBuffer,
    shape: Sequence[int],
    strides: Sequence[int] | None,
) -> torch.Tensor:
    """Return a buffer's elements where they lie.

    Args:
        memory: The bytes of every storage of the plan.
        buffer: What is looked at.
        shape: Its sizes now.
        strides: Elements from one to the next by axis; None where they follow each other.
    """
    steps = strides or tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return _stretch(memory, buffer, shape, steps).as_strided(tuple(shape), tuple(steps))


def _stretch(
    memory: Sequence[torch.Tensor],
    buffer: PlanBuffer,
    shape: Sequence[int],
    strides: Sequence[int],
) -> torch.Tensor:
    """Return a buffer's memory from its first element to its last."""
    steps = zip(shape, strides, strict=True)
    count = 1 + sum((size - 1) * step for size, step in steps) if 0 not in shape else 0
    part = memory[buffer.storage.number][buffer.offset :][: count * buffer.itemsize]
    return part.view(TORCH_DTYPES[buffer.dtype])


def launch_strided(
    launch: Launch,
    tensors: Mapping[str, torch.Tensor],
    scalars: Mapping[str, Any],
    strides: Mapping[str, tuple[int, ...] | None],
    memory: Sequence[torch.Tensor],
    *,
    device: str,
    cache: KernelCache,
) -> None:
    """Launch a kernel that declares strides, and wait; what it writes is then in the tensors.

    Args:
        launch: The launch of the plan.
        tensors: The elements of every buffer, by argument; contiguous, and on the device.
        scalars: By argument.
        strides: How far apart the kernel finds them, by argument; None where they follow each
            other.
        memory: The bytes of every storage of the plan, on the device. They stay as they are.
        device: Where it runs.
        cache: Where its kernel is compiled.

    Raises:
        LaunchError: The kernel wrote between the elements of a view.
    """
    plan = Plan(launch.kernel.name)
    arguments: dict[str, Any] = dict(scalars)
    copies: list[tuple[Param, PlanBuffer, _Copy]] = []
    for param, buffer in launch.buffers():
        tensor, steps = tensors[param.name], strides[param.name]
        if steps is None:
            arguments[param.name] = plan.buffer(f"given_{param.name}", array=tensor)
            continue
        copy = _Copy(_stretch(memory, buffer, tensor.shape, steps), tensor, steps)
        whole = plan.buffer(f"given_{param.name}", array=copy.stretch)
        arguments[param.name] = whole.view(tuple(tensor.shape), strides=steps)
        copies.append((param, buffer, copy))
    plan.launch(launch.kernel, **arguments)
    plan.prepare(device, cache=cache)().synchronize()
    for param, buffer, copy in copies:
        strayed = copy.changed_between()
        if strayed:
            raise LaunchError(
                f"{launch} writes between the elements of {param.name}, {buffer!r}: first "
                f"{strayed[0]} elements after the first of them, {len(strayed)} in all; look at "
                "the kernel's strides"
            )
        if param.access.writes:
            tensors[param.name].copy_(copy.elements)


class _Copy:
    """A copy of a stretch of memory, with a tensor's elements in their places.

    Args:
        stretch: From the first element to the last.
        tensor: The elements.
        strides: How far apart they lie.
    """

    def __init__(
        self, stretch: torch.Tensor, tensor: torch.Tensor, strides: tuple[int, ...]
    ) -> None:
        self.stretch = stretch.clone()
        self.elements = self.stretch.as_strided(tuple(tensor.shape), strides)
        self.elements.copy_(tensor)
        self._before = self.stretch.clone()

    def changed_between(self) -> list[int]:
        """Return the places of what has other bits than before and is none of the elements."""
        between = torch.ones(self.stretch.shape, dtype=torch.bool, device=self.stretch.device)
        between.as_strided(self.elements.shape, self.elements.stride()).fill_(False)
        now, before = (
            each.view(torch.uint8).reshape(len(each), -1) for each in (self.stretch, self._before)
        )
        places: list[int] = (between & (now != before).any(dim=1)).nonzero().flatten().tolist()
        return places
