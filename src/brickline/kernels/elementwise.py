"""Kernels that treat every element alike: gated activations and sums.

References compute in float64; see `catalog`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.declaring import LONGEST, Array, float_kind, source_of

TILE = 1024
"""Elements of a block."""


def silu_gate(dtype: object = "f32") -> Kernel:
    """The gated activation of a feed-forward layer: gate times its sigmoid, times up."""
    return _elementwise("silu_gate", dtype, ("gate", "up"), flops=5, reference=silu_gate_in_numpy)


def silu_gate_in_numpy(*, gate: Array, up: Array, n: int) -> Array:
    """The reference of `silu_gate`, and of kernels that end with it."""
    wide = gate.astype(np.float64)
    with np.errstate(over="ignore"):  # a gate of -1000 gives minus zero
        return (wide / (1.0 + np.exp(-wide)) * up).astype(np.float32)


def gelu_gate(dtype: object = "f32", *, exact: bool = False) -> Kernel:
    """The gated activation of Gemma and others: gelu of gate, times up.

    Args:
        dtype: Default "f32".
        exact: Default False, the form by tanh (``gelu_pytorch_tanh``); True for the normal
            distribution itself.
    """
    return _elementwise(
        "gelu_gate",
        dtype,
        ("gate", "up"),
        flops=30 if exact else 10,
        reference=_gelu_gate_exact if exact else _gelu_gate_tanh,
        uses=("curves",) if exact else (),
        defines={"EXACT": int(exact)},
    )


def _gelu_gate_exact(*, gate: Array, up: Array, n: int) -> Array:
    wide = gate.astype(np.float64)
    tail = np.array([math.erfc(-value / math.sqrt(2.0)) for value in wide], np.float64)
    return (wide * (0.5 * tail) * up).astype(np.float32)


def _gelu_gate_tanh(*, gate: Array, up: Array, n: int) -> Array:
    wide = gate.astype(np.float64)
    u = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * wide**3)
    with np.errstate(over="ignore"):
        return (wide / (1.0 + np.exp(-2.0 * u)) * up).astype(np.float32)


def residual(dtype: object = "f32") -> Kernel:
    """The sum of two vectors."""
    return _elementwise("residual", dtype, ("a", "b"), flops=1, reference=_residual)


def _residual(*, a: Array, b: Array, n: int) -> Array:
    return (a.astype(np.float64) + b).astype(np.float32)


def _elementwise(
    name: str,
    dtype: object,
    inputs: tuple[str, ...],
    *,
    flops: int,
    reference: Callable[..., Any],
    uses: tuple[str, ...] = (),
    defines: dict[str, int] | None = None,
) -> Kernel:
    """Declare a kernel of vectors of n elements whose result is called y."""
    kind = float_kind(dtype)
    tile = f"{TILE} * {kind.size_bytes}"
    touches = (f"block_x * {tile}", f"minimum((block_x + 1) * {tile}, n * {kind.size_bytes})")
    return Kernel(
        name,
        source_of(*uses, name),
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
        defines={"Element": kind.block_type, "TILE": TILE, **(defines or {})},
    )
