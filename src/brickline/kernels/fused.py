"""Kernels that do the work of several in one launch, for decoding token by token.

Each has the bits of the kernels that it takes the place of. References compute in float64 without
the roundings between those; see `catalog`.
"""

from __future__ import annotations

import numpy as np

from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.declaring import (
    LONGEST,
    MOST_ROWS,
    Array,
    count_of,
    float_kind,
    rows_of_block,
    source_of,
)
from brickline.kernels.elementwise import silu_gate_in_numpy
from brickline.kernels.norms import rms_norm_in_numpy
from brickline.kernels.products import gemv_in_numpy

NORM_LANES = 256
"""As many as `rms_norm` has: the order of its sum depends on it."""


def norm_gemv(dtype: object = "bf16", y: object = None, *, rows_per_block: int = 4) -> Kernel:
    """A matrix times the RMS norm of a vector: `rms_norm` and `gemv` in one launch.

    Args:
        dtype: Of matrix, vector and weight of the norm. Default "bf16".
        y: Dtype of the result. Default `dtype`; "f32" for logits.
        rows_per_block: Default 4, so that a matrix of 2048 rows makes 512 blocks; 8, a row for
            each group, from 3072 rows on, and 64 on a CPU, which norm the vector less often. The
            bits stay. Of many thousand rows on a GPU, `rms_norm` and `gemv` are faster.
    """
    kind = float_kind(dtype)
    result = kind if y is None else float_kind(y)
    taken = count_of(rows_per_block, "rows_per_block")
    first, end = rows_of_block(taken, "m")
    row = f"n * {kind.size_bytes}"
    size = result.size_bytes
    return Kernel(
        "norm_gemv",
        source_of("squares", "normed", "norm_gemv"),
        [
            Param("w", kind, ("m", "n"), touches=(f"{first} * {row}", f"{end} * {row}"), align=16),
            Param("x", kind, "n", align=16),
            Param("weight", kind, "n", align=16),
            Param("y", result, "m", "write", touches=(f"{first} * {size}", f"{end} * {size}")),
            Scalar("m", high=MOST_ROWS),
            Scalar("n", high=LONGEST),
            Scalar("eps", "f32"),
        ],
        global_size=f"ceil_div(m, {taken})",
        local_size=NORM_LANES,
        shared_bytes=row,
        flops="2 * m * n + 4 * n + 3",
        bytes=f"m * {row} + 2 * {row} + m * {size}",
        reference=_norm_gemv,
        defines={"Element": kind.block_type, "Output": result.block_type, "ROWS": taken},
    )


def _norm_gemv(*, w: Array, x: Array, weight: Array, m: int, n: int, eps: float) -> Array:
    normed = rms_norm_in_numpy(x=x, weight=weight, rows=1, n=n, eps=eps)
    return (w.astype(np.float64) @ normed.astype(np.float64)).astype(np.float32)


def gated_gemv(dtype: object = "bf16", *, pairs_per_block: int = 8) -> Kernel:
    """The first half of a gated feed-forward layer: two `gemv` and `silu_gate` in one launch.

    Args:
        dtype: Of everything. Default "bf16".
        pairs_per_block: Rows of gate, and of up, that a block takes. Default 8, a pair for each
            group.
    """
    kind = float_kind(dtype)
    pairs = count_of(pairs_per_block, "pairs_per_block")
    first, end = rows_of_block(pairs, "hidden")
    row, size = f"n * {kind.size_bytes}", kind.size_bytes
    return Kernel(
        "gated_gemv",
        source_of("gated_gemv"),
        [
            Param(
                "w",
                kind,
                ("2 * hidden", "n"),
                # From its first row of gate to its last one of up; what lies between, others read.
                touches=(f"{first} * {row}", f"(hidden + {end}) * {row}"),
                align=16,
            ),
            Param("x", kind, "n", align=16),
            Param("y", kind, "hidden", "write", touches=(f"{first} * {size}", f"{end} * {size}")),
            Scalar("hidden", high=MOST_ROWS),
            Scalar("n", high=LONGEST),
        ],
        global_size=f"ceil_div(hidden, {pairs})",
        local_size=256,
        flops="4 * hidden * n + 5 * hidden",
        bytes=f"(2 * hidden + 1) * {row} + hidden * {size}",
        reference=_gated_gemv,
        defines={"Element": kind.block_type, "PAIRS": pairs},
    )


def _gated_gemv(*, w: Array, x: Array, hidden: int, n: int) -> Array:
    both = gemv_in_numpy(w=w, x=x, m=2 * hidden, n=n)
    return silu_gate_in_numpy(gate=both[:hidden], up=both[hidden:], n=hidden)


def gemv_residual(
    dtype: object = "bf16", *, in_place: bool = False, rows_per_block: int = 4, lanes: int = 128
) -> Kernel:
    """A vector plus a matrix times another: `gemv` and `residual` in one launch.

    Args:
        dtype: Of everything. Default "bf16".
        in_place: Whether y holds the residual stream and is added to. Default False: there is an
            argument `residual`, and y is written.
        rows_per_block: Default 4, so that a matrix of 2048 rows makes 512 blocks.
        lanes: Default 128, a group for each of these rows.
    """
    kind = float_kind(dtype)
    taken = count_of(rows_per_block, "rows_per_block")
    first, end = rows_of_block(taken, "m")
    row, size = f"n * {kind.size_bytes}", kind.size_bytes
    rows = (f"{first} * {size}", f"{end} * {size}")
    stream = (
        [Param("y", kind, "m", "read-write", touches=rows)]
        if in_place
        else [
            Param("residual", kind, "m", touches=rows),
            Param("y", kind, "m", "write", touches=rows),
        ]
    )
    return Kernel(
        "gemv_residual",
        source_of("gemv_residual"),
        [
            Param("w", kind, ("m", "n"), touches=(f"{first} * {row}", f"{end} * {row}"), align=16),
            Param("x", kind, "n", align=16),
            *stream,
            Scalar("m", high=MOST_ROWS),
            Scalar("n", high=LONGEST),
        ],
        global_size=f"ceil_div(m, {taken})",
        local_size=lanes,
        flops="2 * m * n + m",
        bytes=f"(m + 1) * {row} + 2 * m * {size}",
        reference=_gemv_in_place if in_place else _gemv_residual,
        defines={"Element": kind.block_type, "ROWS": taken, "IN_PLACE": int(in_place)},
    )


def _gemv_residual(*, w: Array, x: Array, residual: Array, m: int, n: int) -> Array:
    return (w.astype(np.float64) @ x.astype(np.float64) + residual).astype(np.float32)


def _gemv_in_place(*, w: Array, x: Array, y: Array, m: int, n: int) -> Array:
    return _gemv_residual(w=w, x=x, residual=y, m=m, n=n)
