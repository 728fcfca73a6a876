"""A prepared plan as a module: a child for every launch, named by brick and layer.

So a plan on one device is held against the same plan on another as any two models are, and the
culprit is a launch. Children are functions of what they read; memory that no launch writes is their
weights. Of a strided view they take and return its elements alone. What the plan itself holds is
copied, so a check changes nothing of it. Run in float64, a child computes its kernel's NumPy
reference, or what the kernel makes where it has none; what it hands on is kept in the plan's own
dtypes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from brickline.checking.kernels import TORCH_DTYPES
from brickline.checking.strided import elements_of, launch_strided
from brickline.dtypes import DTYPES
from brickline.errors import UsageError
from brickline.executor.prepared import PreparedPlan
from brickline.kernel import Kernel, Param
from brickline.plan_buffers import PlanBuffer
from brickline.plan_launches import Launch, evaluated, launch_names, results, written_storages
from brickline.symbolic import Expr

Start: TypeAlias = Callable[[Mapping[str, torch.Tensor], Mapping[str, Any]], None]
"""Launches on tensors and scalars, each by name, and waits."""
ROUNDED = 2.0
ROUNDED_SUM = 1 / 32
"""Unit roundoffs of inputs that a right kernel's rounding amounts to: some, and of a sum of K terms
√K/32, which the lanes of the shipped matrix-vector products stay below up to 65,536 terms."""


class LaunchModule(nn.Module):
    """One launch of a plan: takes what it reads, returns what it writes.

    Args:
        launch: The launch.
        device: Where its kernel runs.
        start: What launches it.
        weights: What it reads and no launch writes, by argument.
        exact: Whether it is what its kernel's NumPy reference computes.
    """

    def __init__(
        self,
        launch: Launch,
        device: torch.device,
        start: Start,
        weights: Mapping[str, torch.Tensor],
        *,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self._launch = launch
        self._device = device
        self._start = start
        self._is_exact = exact
        self.given = tuple(
            param.name
            for param, _ in launch.buffers()
            if param.access.reads and param.name not in weights
        )
        """Arguments of a call, in order."""
        self.written = tuple(param.name for param, _ in launch.buffers() if param.access.writes)
        for name, tensor in weights.items():
            self.register_buffer(name, tensor, persistent=False)
        self.values: dict[str, Any] = {}
        """Of the call that comes next, set by the plan's module: scalars and shapes by name, and
        whether it is run in float64."""

    def extra_repr(self) -> str:
        """Return the kernel's name."""
        return self._launch.kernel.name

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Launch on copies, and return what is written."""
        scalars, shapes = self.values["scalars"], self.values["shapes"]
        read = dict(zip(self.given, inputs, strict=True)) | dict(self.named_buffers())
        wide = self.values["wide"]
        # A launch is one operation. Who watches torch would see memory that changes by itself.
        with _disable_current_modes():
            if self._is_exact or (wide and self._launch.kernel.reference is not None):
                results = self._exact(read, scalars, wide=wide)
            else:
                results = self._launched(read, scalars, shapes)
            if inputs:
                results = tuple(each.to(inputs[0].device) for each in results)
        return results[0] if len(results) == 1 else results

    def _launched(
        self,
        read: Mapping[str, torch.Tensor],
        scalars: Mapping[str, Any],
        shapes: Mapping[str, Any],
    ) -> tuple[torch.Tensor, ...]:
        where = self._device
        arguments: dict[str, torch.Tensor] = {}
        for param in self._launch.kernel.params:
            tensor = read.get(param.name)
            if tensor is None:
                dtype = TORCH_DTYPES[param.dtype]
                tensor = torch.zeros(shapes[param.name], dtype=dtype, device=where)
            elif param.access.writes:
                tensor = tensor.to(where, copy=True)
            arguments[param.name] = tensor.to(where, TORCH_DTYPES[param.dtype]).contiguous()
        self._start(arguments, scalars)
        return tuple(arguments[name] for name in self.written)

    def _exact(
        self, read: Mapping[str, torch.Tensor], scalars: Mapping[str, Any], *, wide: bool
    ) -> tuple[torch.Tensor, ...]:
        kernel = self._launch.kernel
        assert kernel.reference is not None
        arrays = {
            name: tensor.detach().cpu().double().numpy()
            if tensor.is_floating_point()
            else tensor.detach().cpu().numpy()
            for name, tensor in read.items()
        }
        if not wide and _is_rounded(kernel):
            arrays |= _shaken(kernel, arrays)
        made = kernel.reference(**arrays, **scalars)
        results = made if isinstance(made, tuple) else (made,)
        written = [param for param in kernel.params if param.access.writes]
        return tuple(
            _tensor(each, torch.float64 if wide else TORCH_DTYPES[param.dtype])
            for param, each in zip(written, map(np.asarray, results), strict=True)
        )


class PlanModule(nn.Module):
    """All launches of a prepared plan over a copy of its memory.

    Called as the plan is: with variables by name. It returns what no launch reads afterwards.

    Args:
        prepared: The plan.
        by_reference: Whether every launch is what its kernel's NumPy reference computes.
    """

    def __init__(self, prepared: PreparedPlan, *, by_reference: bool = False) -> None:
        super().__init__()
        self._prepared = prepared
        self._values = dict(prepared.values)
        launches = prepared.launches
        changed = written_storages(launches)
        memory = [torch.from_dlpack(_bytes(each)) for each in prepared.buffers.values()]
        self._memory = [
            tensor.clone() if number in changed else tensor for number, tensor in enumerate(memory)
        ]
        self.register_buffer("one", torch.ones(1), persistent=False)
        self._children: list[LaunchModule] = []
        for launch, cached, name in zip(
            launches, prepared.kernels, launch_names(launches), strict=True
        ):
            weights = {
                param.name: self._view(launch, param, buffer)
                for param, buffer in launch.buffers()
                if buffer.storage.number not in changed and not _varies(buffer)
            }
            start = self._start(launch, cached)
            where = torch_device(prepared.device)
            child = LaunchModule(launch, where, start, weights, exact=by_reference)
            self._children.append(child)
            _add(self, launch, name, child)
        self._results = _named(results(launches))

    def _start(self, launch: Launch, cached: Any) -> Start:
        device, cache = self._prepared.device, self._prepared.cache
        params, where = launch.kernel.params, torch_device(device)

        def launched(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
            cached.launch(**tensors, **scalars)
            if where.type == "cuda":
                torch.cuda.synchronize(where)

        def strided(tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, Any]) -> None:
            strides = {each.name: launch.strides(each, self._values) for each in params}
            launch_strided(
                launch, tensors, scalars, strides, self._memory, device=device, cache=cache
            )

        return strided if any(param.strides is not None for param in params) else launched

    def _view(self, launch: Launch, param: Param, buffer: PlanBuffer) -> torch.Tensor:
        shape = [evaluated(size, self._values) for size in buffer.shape]
        return elements_of(self._memory, buffer, shape, launch.strides(param, self._values))

    def forward(self, **changes: Any) -> Any:
        """Run every launch."""
        unknown = sorted(set(changes) - set(self._values))
        if unknown:
            raise UsageError(
                f"plan {self._prepared.plan.name} has no variable {', '.join(unknown)}; a check "
                "changes variables and writes buffers with write(name, array)"
            )
        self._values |= changes
        # A model is run in float64 operation by operation; its launches are none of torch's.
        wide = (self.one * 1.0).dtype is torch.float64
        for launch, child in zip(self._prepared.launches, self._children, strict=True):
            buffers = {
                param.name: self._view(launch, param, buffer) for param, buffer in launch.buffers()
            }
            child.values = {
                "scalars": launch.scalars(self._values),
                "shapes": {name: tuple(view.shape) for name, view in buffers.items()},
                "wide": wide,
            }
            made = child(*(_handed(buffers[name], wide=wide) for name in child.given))
            results = made if isinstance(made, tuple) else (made,)
            for name, result in zip(child.written, results, strict=True):
                buffers[name].copy_(result.reshape(buffers[name].shape))
        return {name: self._view(*result).clone() for name, result in self._results.items()}

    def write(self, name: str, array: Any) -> None:
        """Copy an array into the memory of a buffer."""
        source = torch.as_tensor(array) if not isinstance(array, torch.Tensor) else array
        memory = self._memory[self._number(name)]
        memory.copy_(source.contiguous().reshape(-1).view(torch.uint8).to(memory.device))

    def read(self, name: str) -> Any:
        """Return a buffer as the plan's `read` does."""
        raw, whole = self._memory[self._number(name)].cpu().numpy(), self._prepared.buffers[name]
        return raw.view(DTYPES[whole.dtype].numpy).reshape(whole.shape)

    def _number(self, name: str) -> int:
        names = list(self._prepared.buffers)
        if name not in names:
            raise UsageError(
                f"plan {self._prepared.plan.name} has no buffer {name!r}; it has {', '.join(names)}"
            )
        return names.index(name)


def held_by_reference(prepared: PreparedPlan) -> PlanModule:
    """Return the plan with every launch as its kernel's NumPy reference.

    Raises:
        UsageError: A kernel has no reference.
    """
    without = sorted({each.kernel.name for each in prepared.launches if not each.kernel.reference})
    if without:
        raise UsageError(
            f"check: kernels {', '.join(without)} have no reference= in NumPy to be held to; give "
            "check another prepared plan as reference="
        )
    return PlanModule(prepared, by_reference=True)


def torch_device(name: str) -> torch.device:
    """Return torch's device of a device's name."""
    return torch.device("cpu") if name == "CPU" else torch.device(name.lower())


def _bytes(buffer: Any) -> Any:
    return type(buffer).at_address(
        buffer.address,
        (buffer.nbytes,),
        "u8",
        kind=buffer.kind,
        number=buffer.number,
        owner=buffer,
    )


def _tensor(array: Any, dtype: torch.dtype) -> torch.Tensor:
    if array.dtype.kind != "f":
        return torch.from_numpy(np.ascontiguousarray(array))
    return torch.from_numpy(np.ascontiguousarray(array, np.float64)).to(dtype)


def _is_rounded(kernel: Kernel) -> bool:
    """Whether all that a kernel writes is rounded; a choice is right or wrong."""
    written = [TORCH_DTYPES[param.dtype] for param in kernel.params if param.access.writes]
    return all(dtype.is_floating_point for dtype in written)


def _shaken(kernel: Kernel, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return what a kernel only reads, moved by what a float32 accumulator's rounding amounts to.

    A reference that computes in float64 does not show how far a right kernel may be from it; its
    results for such inputs do. Memory that is also written stays as it is, or it would drift.
    """
    read = [each.name for each in kernel.params if not each.access.writes]
    given = {name: arrays[name] for name in read if arrays[name].dtype.kind == "f"}
    longest = max((size for each in given.values() for size in each.shape), default=1)
    step = (ROUNDED + ROUNDED_SUM * math.sqrt(longest)) * torch.finfo(torch.float32).eps / 2
    signs = np.random.default_rng(0)
    moved = {}
    for name, array in given.items():
        for axis, size in enumerate(array.shape):
            along = [1] * axis + [size] + [1] * (array.ndim - axis - 1)
            array = array * (1 + step * signs.choice([-1.0, 1.0], size)).reshape(along)
        moved[name] = array
    return moved


def _handed(tensor: torch.Tensor, *, wide: bool) -> torch.Tensor:
    """Return what a launch is given: a copy, in float64 where the plan is run so."""
    return tensor.double() if wide and tensor.is_floating_point() else tensor.clone()


def _varies(buffer: PlanBuffer) -> bool:
    """Whether a buffer's shape depends on variables, so that it is handed over at each call."""
    return any(isinstance(size, Expr) for size in buffer.shape)


def _add(root: nn.Module, launch: Launch, name: str, child: LaunchModule) -> None:
    parent = root
    if launch.layer is not None:
        for part in ("layers", str(launch.layer)):
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            found = parent._modules[part]
            assert found is not None
            parent = found
    parent.add_module(name.replace(".", "_"), child)


def _named(
    found: Sequence[tuple[Launch, Param, PlanBuffer]],
) -> dict[str, tuple[Launch, Param, PlanBuffer]]:
    """Return results by their buffer's name, with their place where it has several."""
    views = Counter(buffer.name for _, _, buffer in found)
    return {
        buffer.name if views[buffer.name] == 1 else repr(buffer): (launch, param, buffer)
        for launch, param, buffer in found
    }
