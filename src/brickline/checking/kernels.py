"""A `Kernel` as a callable on tensors: compiled for where they are, returning what it writes.

It takes all arguments of the kernel, or all but the buffers that it only writes; those are then
made for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from brickline.cache import KernelCache
from brickline.errors import UsageError
from brickline.kernel import Kernel
from brickline.kernel_arguments import Param

TORCH_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "i8": torch.int8,
    "u8": torch.uint8,
    "bool": torch.bool,
}


def as_callable(kernel: Kernel) -> Callable[..., Any]:
    """Return a function that launches the kernel on its arguments and returns those it writes."""
    cache = KernelCache()
    every = [each.name for each in kernel.signature]
    made = [
        each
        for each in kernel.signature
        if isinstance(each, Param) and each.access.writes and not each.access.reads
    ]
    given_names = [name for name in every if name not in {each.name for each in made}]
    written = {each.name for each in kernel.params if each.access.writes}

    def launch(*args: Any, **kwargs: Any) -> Any:
        names = every if len(args) + len(kwargs) == len(every) else given_names
        if len(args) + len(kwargs) != len(names):
            raise UsageError(
                f"{kernel.name}: expected {len(every)} arguments ({', '.join(every)}), or "
                f"{len(given_names)} without those it only writes, got {len(args) + len(kwargs)}"
            )
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        device = next(
            (each.device for each in given.values() if isinstance(each, torch.Tensor)),
            torch.device("cpu"),
        )
        scalars = {name: each for name, each in given.items() if isinstance(each, int)}
        for param in made:
            if param.name not in given:
                shape = [size.evaluate(scalars) for size in param.shape]
                given[param.name] = torch.zeros(
                    shape, dtype=TORCH_DTYPES[param.dtype], device=device
                )
        where = "CPU" if device.type == "cpu" else f"CUDA:{device.index or 0}"
        cache.get_or_compile(kernel, where).launch(**given)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        results = tuple(given[name] for name in every if name in written)
        return results[0] if len(results) == 1 else results

    launch.__name__ = kernel.name
    return launch
