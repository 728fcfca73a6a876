"""The declarations of the kernels that ship: one function each, from dtypes to a `Kernel`.

A reference takes the buffers that the kernel reads and its scalars by name, 16- and 8-bit floats
widened to float32, computes in float64 and returns what the kernel writes. It knows no device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.dtypes import DType, dtype_of
from brickline.errors import KernelError
from brickline.kernel import Kernel, Param, Scalar

Array: TypeAlias = NDArray[Any]

TILE = 1024
"""Elements of a block of an elementwise kernel."""
KEPT = 4096
"""Longest row whose exponentials `softmax` keeps in shared memory: 16 KiB, which every device has
several times."""
MOST_ROWS = 2**31 - 1
"""What CUDA allows along the first axis of a grid."""
LONGEST = 2**40
"""Elements of a row."""


def rms_norm(dtype: object = "f32") -> Kernel:
    """Rows of x over the root of their mean square, times a weight per column."""
    kind = _float(dtype)
    row = (f"block_x * n * {kind.size_bytes}", f"(block_x + 1) * n * {kind.size_bytes}")
    return Kernel(
        "rms_norm",
        _source("rms_norm"),
        [
            Param("x", kind, ("rows", "n"), touches=row),
            Param("weight", kind, "n"),
            Param("y", kind, ("rows", "n"), "write", touches=row),
            Scalar("rows", high=MOST_ROWS),
            Scalar("n", high=LONGEST),
            Scalar("eps", "f32"),
        ],
        global_size="rows",
        local_size=256,
        flops="rows * (4 * n + 3)",
        bytes=f"(2 * rows + 1) * n * {kind.size_bytes}",
        reference=_rms_norm,
        defines={"Element": kind.block_type},
    )


def _rms_norm(*, x: Array, weight: Array, rows: int, n: int, eps: float) -> Array:
    wide = x.astype(np.float64)
    root = np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    result: Array = wide / root * weight
    return result.astype(np.float32)


def gemv(
    weight: object = "bf16",
    x: object = None,
    y: object = "f32",
    *,
    rows_per_block: int = 8,
    lanes: int = 256,
) -> Kernel:
    """A matrix times a vector, accumulated in float.

    Args:
        weight: Dtype of the matrix. Default "bf16".
        x: Dtype of the vector. Default that of the matrix.
        y: Dtype of the result. Default "f32".
        rows_per_block: Default 8, a row for each group, so that a matrix of 2048 rows still
            occupies every SM of a large device.
        lanes: Default 256.
    """
    matrix, vector, result = _float(weight), _float(weight if x is None else x), _float(y)
    first, end = f"block_x * {rows_per_block}", f"minimum((block_x + 1) * {rows_per_block}, m)"
    row_bytes = f"n * {matrix.size_bytes}"
    return Kernel(
        "gemv",
        _source("gemv"),
        [
            Param(
                "w",
                matrix,
                ("m", "n"),
                touches=(f"{first} * {row_bytes}", f"{end} * {row_bytes}"),
                align=16,
            ),
            Param("x", vector, "n", align=16),
            Param(
                "y",
                result,
                "m",
                "write",
                touches=(f"{first} * {result.size_bytes}", f"{end} * {result.size_bytes}"),
            ),
            Scalar("m", high=MOST_ROWS),
            Scalar("n", high=LONGEST),
        ],
        global_size=f"ceil_div(m, {rows_per_block})",
        local_size=lanes,
        flops="2 * m * n",
        bytes=f"m * {row_bytes} + n * {vector.size_bytes} + m * {result.size_bytes}",
        reference=_gemv,
        defines={
            "Weight": matrix.block_type,
            "Input": vector.block_type,
            "Output": result.block_type,
            "ROWS": rows_per_block,
        },
    )


def _gemv(*, w: Array, x: Array, m: int, n: int) -> Array:
    return (w.astype(np.float64) @ x.astype(np.float64)).astype(np.float32)


def softmax(dtype: object = "f32") -> Kernel:
    """The softmax of every row."""
    kind = _float(dtype)
    row = (f"block_x * n * {kind.size_bytes}", f"(block_x + 1) * n * {kind.size_bytes}")
    return Kernel(
        "softmax",
        _source("softmax"),
        [
            Param("x", kind, ("rows", "n"), touches=row),
            Param("y", kind, ("rows", "n"), "write", touches=row),
            Scalar("rows", high=MOST_ROWS),
            Scalar("n", high=LONGEST),
        ],
        global_size="rows",
        local_size=128,
        shared_bytes=f"minimum(n, {KEPT}) * 4",
        flops="rows * n * 5",
        bytes=f"2 * rows * n * {kind.size_bytes}",
        reference=_softmax,
        defines={"Element": kind.block_type, "KEPT": KEPT},
    )


def _softmax(*, x: Array, rows: int, n: int) -> Array:
    wide = x.astype(np.float64)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    result: Array = powers / powers.sum(axis=-1, keepdims=True)
    return result.astype(np.float32)


def silu_gate(dtype: object = "f32") -> Kernel:
    """The gated activation of a feed-forward layer: gate times its sigmoid, times up."""
    return _elementwise("silu_gate", dtype, ("gate", "up"), flops=5, reference=_silu_gate)


def _silu_gate(*, gate: Array, up: Array, n: int) -> Array:
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):  # a gate of -1000 gives minus zero
        return (wide / (1.0 + np.exp(-wide)) * up).astype(np.float32)


def residual(dtype: object = "f32") -> Kernel:
    """The sum of two vectors."""
    return _elementwise("residual", dtype, ("a", "b"), flops=1, reference=_residual)


def _residual(*, a: Array, b: Array, n: int) -> Array:
    return (a.astype(np.float64) + b).astype(np.float32)


def _elementwise(
    name: str, dtype: object, inputs: tuple[str, ...], *, flops: int, reference: Any
) -> Kernel:
    """Declare a kernel of vectors of n elements whose result is called y."""
    kind = _float(dtype)
    tile = f"{TILE} * {kind.size_bytes}"
    touches = (f"block_x * {tile}", f"minimum((block_x + 1) * {tile}, n * {kind.size_bytes})")
    return Kernel(
        name,
        _source(name),
        [
            *(Param(each, kind, "n", touches=touches) for each in inputs),
            Param("y", kind, "n", "write", touches=touches),
            Scalar("n", high=LONGEST),
        ],
        global_size=f"ceil_div(n, {TILE})",
        local_size=256,
        flops=f"{flops} * n",
        bytes=f"{len(inputs) + 1} * n * {kind.size_bytes}",
        reference=reference,
        defines={"Element": kind.block_type, "TILE": TILE},
    )


def _float(dtype: object) -> DType:
    found = dtype_of(dtype)
    if found.kind != "float" or found.size_bytes > 4:
        raise KernelError(
            f"expected a float of at most 32 bits, got {found}; the kernels that ship compute in "
            "float"
        )
    return found


def _source(name: str) -> str:
    return (Path(__file__).parent / f"{name}.h").read_text(encoding="utf-8")
