"""Launches of the kernels that ship, with arrays for all arguments, for tests of any device.

A case is small, and odd where it can be: no multiple of a vector, of a group or of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from brickline.dtypes import dtype_of
from brickline.kernel import Kernel
from brickline.kernels import catalog


@dataclass(frozen=True)
class Case:
    """How to launch a kernel of some dtype."""

    name: str
    kernel: Callable[[str], Kernel]
    scalars: dict[str, Any]
    ids: dict[str, tuple[int, ...]] | None = None
    """Contents of integer buffers."""

    def arguments(self, dtype: str, seed: int = 0) -> dict[str, Any]:
        """Arrays and scalars of one launch; what is only written holds ones in all bits."""
        return arguments(self.kernel(dtype), self.scalars, seed, self.ids or {})


def drawn(shape: Any, dtype: Any, seed: int, scale: float = 1.0) -> Any:
    """Normal numbers of a dtype."""
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(np.float32).astype(dtype_of(dtype).numpy)


def rates(dim: int, theta: float = 500_000.0) -> Any:
    """How fast the pairs of a head turn."""
    return (theta ** (-2.0 * np.arange(dim // 2) / max(dim, 1))).astype(np.float32)


def arguments(
    kernel: Kernel, scalars: dict[str, Any], seed: int = 0, given: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Arrays for every parameter, drawn unless given, and the scalars."""
    integers = {name: value for name, value in scalars.items() if isinstance(value, int)}
    found: dict[str, Any] = dict(scalars)
    for place, param in enumerate(kernel.params):
        shape = [size.evaluate(integers) for size in param.shape]
        dtype = dtype_of(param.dtype).numpy
        if given and param.name in given:
            found[param.name] = np.array(given[param.name], dtype).reshape(shape)
        elif not param.access.reads:
            found[param.name] = np.zeros(shape, dtype)
            found[param.name].reshape(-1).view(np.uint8)[...] = 0xFF
        elif param.name == "rates":
            found[param.name] = rates(2 * prod(shape))
        elif param.name == "total":  # of exponentials, the largest of them 1
            found[param.name] = 1.0 + np.abs(drawn(shape, param.dtype, seed * 100 + place))
        else:
            found[param.name] = drawn(shape, param.dtype, seed * 100 + place)
    return found


def _decode(**constants: Any) -> Callable[[str], Kernel]:
    return lambda dtype: catalog.attention_decode(dtype, **constants)


_HEADS = {"heads": 6, "kv_heads": 2, "dim": 20, "capacity": 9, "position": 5}
_ODD = {"queries": 3, "dim": 20, "span": 8}

CASES = [
    Case("rope", catalog.rope, {"rows": 3, "heads": 5, "dim": 34, "position": 1000}),
    Case("rope odd", catalog.rope, {"rows": 1, "heads": 1, "dim": 7, "position": 131_071}),
    Case(
        "rope interleaved",
        lambda dtype: catalog.rope(dtype, interleaved=True),
        {"rows": 2, "heads": 3, "dim": 64, "position": 77},
    ),
    Case(
        "rope in place",
        lambda dtype: catalog.rope(dtype, in_place=True),
        {"rows": 2, "heads": 3, "dim": 128, "position": 4095},
    ),
    Case(
        "rope interleaved in place",
        lambda dtype: catalog.rope(dtype, in_place=True, interleaved=True),
        {"rows": 1, "heads": 2, "dim": 9, "position": 3},
    ),
    Case(
        "kv_append",
        catalog.kv_append,
        {"rows": 3, "kv_heads": 2, "dim": 33, "capacity": 9, "position": 5},
    ),
    Case("rope_append", catalog.rope_append, _HEADS),
    Case(
        "rope_append large", catalog.rope_append, _HEADS | {"heads": 32, "kv_heads": 8, "dim": 64}
    ),
    Case(
        "rope_append interleaved",
        lambda dtype: catalog.rope_append(dtype, interleaved=True),
        _HEADS,
    ),
    Case(
        "attention_decode",
        _decode(),
        {"kv_heads": 3, "capacity": 200, "length": 150, "scale": 0.125},
    ),
    Case(
        "attention_decode wide",
        _decode(queries=8, dim=128, soft_cap=5.0),
        {"kv_heads": 2, "capacity": 130, "length": 130, "scale": 0.088},
    ),
    Case(
        "attention_decode odd",
        _decode(**_ODD, soft_cap=2.0),
        {"kv_heads": 2, "capacity": 37, "length": 21, "scale": 0.3},
    ),
    Case(
        "attention_decode first",
        _decode(**_ODD),
        {"kv_heads": 1, "capacity": 17, "length": 1, "scale": 0.3},
    ),
    Case(
        "rope_attention",
        catalog.rope_attention,
        {"kv_heads": 2, "capacity": 200, "position": 130, "scale": 0.125},
    ),
    Case(
        "rope_attention odd",
        lambda dtype: catalog.rope_attention(dtype, queries=3, dim=7, span=8, interleaved=True),
        {"kv_heads": 2, "capacity": 37, "position": 16, "scale": 0.4},
    ),
    Case("attention_combine", catalog.attention_combine, {"kv_heads": 3, "capacity": 200}),
    Case(
        "attention_combine odd",
        lambda dtype: catalog.attention_combine(dtype, **_ODD),
        {"kv_heads": 2, "capacity": 37},
    ),
    Case(
        "embedding",
        catalog.embedding,
        {"rows": 4, "vocabulary": 11, "n": 37},
        {"ids": (10, 0, 3, 3)},
    ),
    Case(
        "embedding i64",
        lambda dtype: catalog.embedding(dtype, "i64"),
        {"rows": 1, "vocabulary": 1, "n": 2048},
        {"ids": (0,)},
    ),
    Case("argmax_tiles", catalog.argmax_tiles, {"rows": 3, "n": 2500}),
    Case("argmax_tiles one", catalog.argmax_tiles, {"rows": 1, "n": 1}),
    Case(
        "argmax_combine",
        lambda dtype: catalog.argmax_combine("i64" if dtype == "f32" else "i32"),
        {"rows": 2, "n": 300_000},
        {"places": tuple(range(586))},
    ),
    Case("norm_gemv", catalog.norm_gemv, {"m": 33, "n": 2048, "eps": 1e-5}),
    Case("norm_gemv odd", catalog.norm_gemv, {"m": 5, "n": 333, "eps": 1e-6}),
    Case(
        "norm_gemv logits",
        lambda dtype: catalog.norm_gemv(dtype, "f32", rows_per_block=16),
        {"m": 100, "n": 520, "eps": 1e-5},
    ),
    Case("gated_gemv", catalog.gated_gemv, {"hidden": 30, "n": 1032}),
    Case("gated_gemv odd", catalog.gated_gemv, {"hidden": 3, "n": 77}),
    Case("gemv_residual", catalog.gemv_residual, {"m": 33, "n": 4104}),
    Case(
        "gemv_residual in place",
        lambda dtype: catalog.gemv_residual(dtype, in_place=True),
        {"m": 7, "n": 129},
    ),
    Case("layer_norm", catalog.layer_norm, {"rows": 3, "n": 1000, "eps": 1e-5}),
    Case("layer_norm one", catalog.layer_norm, {"rows": 1, "n": 1, "eps": 1e-5}),
    Case("gemm", lambda dtype: catalog.gemm(dtype, y="f32"), {"m": 9, "n": 13, "k": 1032}),
    Case("gemm odd", catalog.gemm, {"m": 3, "n": 5, "k": 77}),
    Case("gemm bias", lambda dtype: catalog.gemm(dtype, bias=True), {"m": 70, "n": 6, "k": 264}),
    Case("gelu_gate", catalog.gelu_gate, {"n": 1500}),
    Case("gelu_gate exact", lambda dtype: catalog.gelu_gate(dtype, exact=True), {"n": 1027}),
]
