"""A prepared plan as a module: a child for every launch, named by brick and layer.

So a plan on one device is held against the same plan on another as any two models are, and the
culprit is a launch. Children are functions of what they read; memory that no launch writes is their
weights. What the plan itself holds is copied, so a check changes nothing of it. Run in float64, a
child computes its kernel's NumPy reference, or what the kernel makes where it has none; what it
hands on is kept in the plan's own dtypes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from brickline.checking.kernels import TORCH_DTYPES
from brickline.dtypes import DTYPES
from brickline.errors import UsageError
from brickline.executor.prepared import PreparedPlan
from brickline.plan_buffers import PlanBuffer
from brickline.plan_launches import Launch, evaluated, launch_names, written_storages
from brickline.symbolic import Expr


class LaunchModule(nn.Module):
    """One launch of a plan: takes what it reads, returns what it writes."""

    def __init__(
        self,
        launch: Launch,
        cached: Any,
        weights: Mapping[str, torch.Tensor],
        *,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self._launch = launch
        self._cached = cached
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
        """Scalars and shapes of the call that comes next, by name; set by the plan's module."""

    def extra_repr(self) -> str:
        """Return the kernel's name."""
        return self._launch.kernel.name

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Launch on copies, and return what is written."""
        scalars, shapes = self.values["scalars"], self.values["shapes"]
        read = dict(zip(self.given, inputs, strict=True)) | dict(self.named_buffers())
        wide = any(tensor.dtype is torch.float64 for tensor in read.values())
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
        where = torch_device(self._cached.device)
        arguments: dict[str, Any] = dict(scalars)
        for param in self._launch.kernel.params:
            tensor = read.get(param.name)
            if tensor is None:
                dtype = TORCH_DTYPES[param.dtype]
                tensor = torch.zeros(shapes[param.name], dtype=dtype, device=where)
            elif param.access.writes:
                tensor = tensor.to(where, copy=True)
            arguments[param.name] = tensor.to(where, TORCH_DTYPES[param.dtype]).contiguous()
        self._cached.launch(**arguments)
        if where.type == "cuda":
            torch.cuda.synchronize(where)
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
                param.name: self._view(buffer)
                for param, buffer in launch.buffers()
                if buffer.storage.number not in changed and not _varies(buffer)
            }
            child = LaunchModule(launch, cached, weights, exact=by_reference)
            self._children.append(child)
            _add(self, launch, name, child)
        self._results = _results(launches)

    def _view(self, buffer: PlanBuffer) -> torch.Tensor:
        if buffer.strides is not None:
            raise UsageError(
                f"check: a launch of plan {self._prepared.plan.name} takes the strided view "
                f"{buffer!r}, which a check cannot hand to a kernel by itself; record both sides "
                "with fingerprints and compare the runs"
            )
        shape = [evaluated(size, self._values) for size in buffer.shape]
        dtype = TORCH_DTYPES[buffer.dtype]
        nbytes = int(np.prod(shape, dtype=np.int64)) * buffer.itemsize
        part = self._memory[buffer.storage.number][buffer.offset : buffer.offset + nbytes]
        return part.view(dtype).reshape(shape)

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
            buffers = {param.name: self._view(buffer) for param, buffer in launch.buffers()}
            child.values = {
                "scalars": launch.scalars(self._values),
                "shapes": {name: tuple(view.shape) for name, view in buffers.items()},
            }
            made = child(*(_handed(buffers[name], wide=wide) for name in child.given))
            results = made if isinstance(made, tuple) else (made,)
            for name, result in zip(child.written, results, strict=True):
                buffers[name].copy_(result.reshape(buffers[name].shape))
        return {buffer.name: self._view(buffer).clone() for buffer in self._results}

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


def _results(launches: Any) -> list[PlanBuffer]:
    """Return what is written and not read by a later launch."""
    found: dict[int, PlanBuffer] = {}
    for launch in launches:
        for param, buffer in launch.buffers():
            if param.access.reads:
                found.pop(buffer.storage.number, None)
        for param, buffer in launch.buffers():
            if param.access.writes:
                found[buffer.storage.number] = buffer
    return list(found.values())
