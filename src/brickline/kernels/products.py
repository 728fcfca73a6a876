"""Kernels that multiply by a matrix of weights: by a vector, or by few rows.

References compute in float64; see `catalog`.
"""

from __future__ import annotations

import numpy as np

from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.declaring import (
    LONGEST,
    MOST_ROWS,
    MOST_SECOND,
    Array,
    count_of,
    float_kind,
    rows_of_block,
    source_of,
)

COLUMNS = 64
"""Rows of x that a block of `gemm` multiplies with its weights."""


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
    matrix, vector = float_kind(weight), float_kind(weight if x is None else x)
    result = float_kind(y)
    first, end = rows_of_block(rows_per_block, "m")
    row_bytes = f"n * {matrix.size_bytes}"
    return Kernel(
        "gemv",
        source_of("gemv"),
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
        reference=gemv_in_numpy,
        defines={
            "Weight": matrix.block_type,
            "Input": vector.block_type,
            "Output": result.block_type,
            "ROWS": rows_per_block,
        },
    )


def gemv_in_numpy(*, w: Array, x: Array, m: int, n: int) -> Array:
    """The reference of `gemv`, and of kernels that contain it."""
    return (w.astype(np.float64) @ x.astype(np.float64)).astype(np.float32)


def gemm(
    weight: object = "bf16",
    x: object = None,
    y: object = None,
    *,
    bias: bool = False,
    rows_per_block: int = 4,
    lanes: int = 128,
) -> Kernel:
    """Rows of x times the rows of a matrix, y[m, n] = x[m, k] @ w[n, k]^T, accumulated in float.

    Made for few rows of x, up to 64 or so: weights pass once. Any number is right. Every row of y
    has the bits that `gemv` gives of that row of x.

    Args:
        weight: Dtype of the matrix. Default "bf16".
        x: Dtype of the rows. Default that of the matrix.
        y: Dtype of the result, and of the bias. Default that of the rows.
        bias: Whether an argument `bias` of n elements is added. Default False.
        rows_per_block: Rows of the matrix. Default 4, so that 2048 rows make 512 blocks.
        lanes: Default 128, a group for each of these rows.
    """
    matrix, rows = float_kind(weight), float_kind(weight if x is None else x)
    result = rows if y is None else float_kind(y)
    taken = count_of(rows_per_block, "rows_per_block")
    first, end = rows_of_block(taken, "n")
    top, bottom = f"block_y * {COLUMNS}", f"minimum((block_y + 1) * {COLUMNS}, m)"
    size = result.size_bytes
    added = Param("bias", result, "n", touches=(f"{first} * {size}", f"{end} * {size}"))
    return Kernel(
        "gemm",
        source_of("gemm"),
        [
            Param(
                "x",
                rows,
                ("m", "k"),
                touches=(f"{top} * k * {rows.size_bytes}", f"{bottom} * k * {rows.size_bytes}"),
                align=16,
            ),
            Param(
                "w",
                matrix,
                ("n", "k"),
                touches=(f"{first} * k * {matrix.size_bytes}", f"{end} * k * {matrix.size_bytes}"),
                align=16,
            ),
            *([added] if bias else []),
            Param(
                "y",
                result,
                ("m", "n"),
                "write",
                touches=(
                    f"({top} * n + {first}) * {size}",
                    f"(({bottom} - 1) * n + {end}) * {size}",
                ),
            ),
            Scalar("m", high=MOST_SECOND * COLUMNS),
            Scalar("n", high=MOST_ROWS),
            Scalar("k", high=LONGEST),
        ],
        global_size=(f"ceil_div(n, {taken})", f"ceil_div(m, {COLUMNS})"),
        local_size=lanes,
        flops="2 * m * n * k" + (" + m * n" if bias else ""),
        bytes=(
            f"n * k * {matrix.size_bytes} + m * k * {rows.size_bytes} + m * n * {size}"
            + (f" + n * {size}" if bias else "")
        ),
        reference=_gemm_bias if bias else _gemm,
        defines={
            "Weight": matrix.block_type,
            "Input": rows.block_type,
            "Output": result.block_type,
            "ROWS": taken,
            "COLUMNS": COLUMNS,
            "BIAS": int(bias),
        },
    )


def _gemm(*, x: Array, w: Array, m: int, n: int, k: int) -> Array:
    return (x.astype(np.float64) @ w.astype(np.float64).T).astype(np.float32)


def _gemm_bias(*, x: Array, w: Array, bias: Array, m: int, n: int, k: int) -> Array:
    return (x.astype(np.float64) @ w.astype(np.float64).T + bias).astype(np.float32)
