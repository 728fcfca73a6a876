"""Kernels that Triton compiled, as cached kernels: their code, resources and launch shape.

They are read-only: Triton keeps and launches them. Nothing is compiled here; what a function has
been launched with is what is found.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any, NoReturn

from brickline.cache import CachedKernel
from brickline.device.base import Program
from brickline.errors import LaunchError, UsageError
from brickline.symbolic import Expr, Variable

_GRID = tuple(Variable(f"grid_{axis}", 1, 2**31 - 1) for axis in "xyz")


def triton_kernels(function: Any) -> list[CachedKernel]:
    """Return what Triton has compiled of a function, one for each device and specialisation.

    The grid is the caller's at each launch, so `global_size` is ``grid_x``, ``grid_y`` and
    ``grid_z``. Triton does not say which pointers a kernel writes to: `outs` and `ins` both hold
    all of them, which is safe to schedule by. `code` is PTX.

    Args:
        function: What ``triton.jit`` or ``triton.autotune`` made.

    Raises:
        UsageError: if it is something else.
    """
    inner = function
    while hasattr(inner, "fn") and not hasattr(inner, "device_caches"):
        inner = inner.fn  # an autotuner, or heuristics
    caches = getattr(inner, "device_caches", None)
    if not isinstance(caches, Mapping):
        raise UsageError(
            f"expected a function of triton.jit or triton.autotune, got {type(function).__name__}"
        )
    return [
        _cached_kernel(compiled, int(device))
        for device, (compiled_by_key, *_) in caches.items()
        for compiled in compiled_by_key.values()
        if hasattr(compiled, "asm")
    ]


def _cached_kernel(compiled: Any, device: int) -> CachedKernel:
    metadata = compiled.metadata
    arguments = [
        (name, str(kind))
        for name, kind in compiled.src.signature.items()
        if str(kind) != "constexpr"
    ]
    pointers = tuple(at for at, (_, kind) in enumerate(arguments) if kind.startswith("*"))
    slots = tuple(range(len(pointers)))
    ptx = compiled.asm.get("ptx", "")
    binary = compiled.asm.get("cubin", b"")
    lanes = metadata.num_warps * 32
    resources = {
        "shared_bytes": int(metadata.shared),
        "registers": getattr(compiled, "n_regs", None),
        "spilled_bytes": getattr(compiled, "n_spills", None),
        "max_lanes": getattr(compiled, "n_max_threads", None),
    }

    def launch(*args: Any, **named: Any) -> NoReturn:
        raise LaunchError(
            f"kernel {compiled.name} is Triton's; launch it with {compiled.name}[grid]"
        )

    return CachedKernel(
        program=Program(int(getattr(compiled, "function", None) or 0), compiled),
        device=f"CUDA:{device}",
        code=ptx,
        entry_point=compiled.name,
        var_names=tuple(name for name, kind in arguments if not kind.startswith("*")),
        globals=pointers,
        outs=slots,
        ins=slots,
        host_parallel_safe=False,
        global_size=(_GRID[0], _GRID[1], _GRID[2]),
        local_size=(Expr.of(lanes), Expr.of(1), Expr.of(1)),
        kernel=None,
        key=sha256(binary or ptx.encode()).hexdigest(),
        launch=launch,
        resources={name: value for name, value in resources.items() if value is not None},
        nbytes=len(binary) + len(ptx),
    )
