"""Kernels that reduce a row and scale it: RMS norm, layer norm, softmax.

References compute in float64; see `catalog`.
"""

from __future__ import annotations

import numpy as np

from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.declaring import LONGEST, MOST_ROWS, Array, float_kind, piece, source_of

KEPT = 4096
"""Longest row whose exponentials `softmax` keeps in shared memory: 16 KiB, which every device has
several times."""


def rms_norm(dtype: object = "f32") -> Kernel:
    """Rows of x over the root of their mean square, times a weight per column."""
    kind = float_kind(dtype)
    row = piece("block_x", f"n * {kind.size_bytes}")
    return Kernel(
        "rms_norm",
        source_of("fetch", "squares", "rms_norm"),
        [
            Param("x", kind, ("rows", "n"), touches=row, align=16),
            Param("weight", kind, "n", align=16),
            Param("y", kind, ("rows", "n"), "write", touches=row, align=16),
            Scalar("rows", high=MOST_ROWS),
            Scalar("n", high=LONGEST),
            Scalar("eps", "f32"),
        ],
        global_size="rows",
        local_size=256,
        flops="rows * (4 * n + 3)",
        bytes=f"(2 * rows + 1) * n * {kind.size_bytes}",
        reference=rms_norm_in_numpy,
        defines={"Element": kind.block_type},
    )


def rms_norm_in_numpy(*, x: Array, weight: Array, rows: int, n: int, eps: float) -> Array:
    """The reference of `rms_norm`, and of kernels that begin with it."""
    wide = x.astype(np.float64)
    root = np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    result: Array = wide / root * weight
    return result.astype(np.float32)


def layer_norm(dtype: object = "f32") -> Kernel:
    """Rows of x less their mean, over their deviation, times a weight plus a bias per column."""
    kind = float_kind(dtype)
    row = piece("block_x", f"n * {kind.size_bytes}")
    return Kernel(
        "layer_norm",
        source_of("layer_norm"),
        [
            Param("x", kind, ("rows", "n"), touches=row),
            Param("weight", kind, "n"),
            Param("bias", kind, "n"),
            Param("y", kind, ("rows", "n"), "write", touches=row),
            Scalar("rows", high=MOST_ROWS),
            Scalar("n", high=LONGEST),
            Scalar("eps", "f32"),
        ],
        global_size="rows",
        local_size=256,
        flops="rows * (8 * n + 4)",
        bytes=f"(2 * rows + 2) * n * {kind.size_bytes}",
        reference=_layer_norm,
        defines={"Element": kind.block_type},
    )


def _layer_norm(*, x: Array, weight: Array, bias: Array, rows: int, n: int, eps: float) -> Array:
    wide = x.astype(np.float64)
    apart = wide - wide.mean(axis=-1, keepdims=True)
    root = np.sqrt(np.mean(apart * apart, axis=-1, keepdims=True) + eps)
    result: Array = apart / root * weight + bias
    return result.astype(np.float32)


def softmax(dtype: object = "f32") -> Kernel:
    """The softmax of every row."""
    kind = float_kind(dtype)
    row = piece("block_x", f"n * {kind.size_bytes}")
    return Kernel(
        "softmax",
        source_of("softmax"),
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
