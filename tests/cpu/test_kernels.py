"""The kernels that ship, on CPU, against their NumPy references."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from brickline.dtypes import dtype_of
from brickline.kernel import Kernel
from brickline.kernels.catalog import (
    gelu_gate,
    gemv,
    layer_norm,
    residual,
    rms_norm,
    silu_gate,
    softmax,
)

DTYPES = ("f32", "bf16", "f16")
ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
"""Half a unit in the last place of 1, of a type that rounds to nearest."""


def run(host: Any, kernel: Kernel, inputs: dict[str, Any], **scalars: Any) -> tuple[Any, Any]:
    """What the kernel computes and what its reference does, both as float32."""
    out = next(param for param in kernel.params if param.access.writes)
    shape = [size.evaluate(scalars) for size in out.shape]
    result = np.zeros(shape, dtype_of(out.dtype).numpy)
    result.view(np.uint8)[...] = 0xFF  # a NaN, which stays where nothing is written
    assert host.load(kernel)(**inputs, **{out.name: result}, **scalars) == 0
    wide = {name: array.astype(np.float32) for name, array in inputs.items()}
    assert kernel.reference is not None
    return result.astype(np.float32), kernel.reference(**wide, **scalars)


def drawn(shape: Any, dtype: str, seed: int, scale: float = 1.0) -> Any:
    values = np.random.default_rng(seed).standard_normal(shape) * scale
    return values.astype(np.float32).astype(dtype_of(dtype).numpy)


def close(found: Any, expected: Any, dtype: str, units: float, floor: float = 0.0) -> None:
    """Within `units` float roundings, and one rounding to the dtype."""
    relative = units * 2.0**-24 + (ROUNDING[dtype] if dtype != "f32" else 0)
    smallest = 2.0**-25 if dtype == "f16" else 0.0  # half its last subnormal
    np.testing.assert_allclose(found, expected, rtol=relative, atol=floor + smallest)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 31), (2, 256), (1, 2048), (4, 4099)])
def test_rms_norm(host: Any, dtype: str, rows: int, n: int) -> None:
    inputs = {"x": drawn((rows, n), dtype, 0), "weight": drawn(n, dtype, 1)}
    close(*run(host, rms_norm(dtype), inputs, rows=rows, n=n, eps=1e-5), dtype, units=8)


def test_rms_norm_of_zeros_is_zero(host: Any) -> None:
    inputs = {"x": np.zeros((2, 8), np.float32), "weight": drawn(8, "f32", 1)}
    found, _ = run(host, rms_norm(), inputs, rows=2, n=8, eps=1e-5)
    assert not found.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 31), (2, 256), (1, 2048), (4, 4099)])
def test_layer_norm(host: Any, dtype: str, rows: int, n: int) -> None:
    inputs = {"x": drawn((rows, n), dtype, 0), "weight": drawn(n, dtype, 1)}
    inputs["bias"] = drawn(n, dtype, 2)
    found, expected = run(host, layer_norm(dtype), inputs, rows=rows, n=n, eps=1e-5)
    # The bias may cancel what stands before it, of which the mean is known to a few units only.
    close(found, expected, dtype, units=8, floor=64 * 2.0**-24)


def test_layer_norm_of_rows_far_from_zero(host: Any) -> None:
    x = (np.float32(4096) + drawn((2, 512), "f32", 3)).astype(np.float32)
    inputs = {"x": x, "weight": np.ones(512, np.float32), "bias": np.zeros(512, np.float32)}
    found, expected = run(host, layer_norm(), inputs, rows=2, n=512, eps=1e-5)
    # The mean is off by a unit in its last place; the variance does not cancel.
    np.testing.assert_allclose(found, expected, atol=2.0**-10)


def test_layer_norm_of_a_constant_row_is_its_bias(host: Any) -> None:
    inputs = {"x": np.full((1, 64), 3.0, np.float32), "weight": drawn(64, "f32", 4)}
    inputs["bias"] = drawn(64, "f32", 5)
    found, _ = run(host, layer_norm(), inputs, rows=1, n=64, eps=1e-5)
    assert found[0].tobytes() == inputs["bias"].tobytes()


@pytest.mark.parametrize(
    ("weight", "x", "y"),
    [
        ("f32", "f32", "f32"),
        ("bf16", "bf16", "f32"),
        ("bf16", "bf16", "bf16"),
        ("bf16", "f32", "f32"),
        ("f16", "f16", "f16"),
        ("f8e4m3", "bf16", "f32"),
    ],
)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (7, 33), (8, 256), (9, 2048), (33, 1000), (3, 16)])
def test_gemv(host: Any, weight: str, x: str, y: str, m: int, n: int) -> None:
    inputs = {"w": drawn((m, n), weight, 2), "x": drawn(n, x, 3)}
    found, expected = run(host, gemv(weight, x, y), inputs, m=m, n=n)
    # Of any order of summation: rounding errors are bounded by the sum of sizes.
    sizes = np.abs(inputs["w"].astype(np.float64)) @ np.abs(inputs["x"].astype(np.float64))
    bound = (n + 1) * 2.0**-24 * sizes + ROUNDING[y] * np.abs(expected)
    assert (np.abs(found.astype(np.float64) - expected) <= bound).all()


@pytest.mark.parametrize(("rows_per_block", "lanes"), [(1, 32), (8, 128), (16, 256), (5, 96)])
def test_gemv_has_the_same_bits_whoever_takes_a_row(
    host: Any, rows_per_block: int, lanes: int
) -> None:
    inputs = {"w": drawn((19, 512), "bf16", 4), "x": drawn(512, "bf16", 5)}
    usual, _ = run(host, gemv("bf16"), inputs, m=19, n=512)
    other = gemv("bf16", rows_per_block=rows_per_block, lanes=lanes)
    found, _ = run(host, other, inputs, m=19, n=512)
    assert found.tobytes() == usual.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (3, 31), (32, 1024), (2, 4096), (2, 4097)])
def test_softmax(host: Any, dtype: str, rows: int, n: int) -> None:
    inputs = {"x": drawn((rows, n), dtype, 6, scale=5.0)}
    # exp: its argument is rounded, so a large one moves it by as many units as it has halves.
    close(*run(host, softmax(dtype), inputs, rows=rows, n=n), dtype, units=64)


def test_softmax_survives_large_and_infinite_scores(host: Any) -> None:
    x = drawn((3, 64), "f32", 7, scale=1e30)
    x[1, 5:] = -np.inf
    x[2, 3] = np.nan
    found, expected = run(host, softmax(), {"x": x}, rows=3, n=64)
    close(found[:2], expected[:2], "f32", units=64)
    assert not found[1, 5:].any()
    assert np.isnan(found[2]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 31, 1024, 1025, 8192])
def test_silu_gate(host: Any, dtype: str, n: int) -> None:
    inputs = {"gate": drawn(n, dtype, 8, scale=4.0), "up": drawn(n, dtype, 9)}
    close(*run(host, silu_gate(dtype), inputs, n=n), dtype, units=8)


def test_silu_gate_of_large_gates(host: Any) -> None:
    gate, up = np.array([1000, -1000, 88, -103], np.float32), np.ones(4, np.float32)
    found, expected = run(host, silu_gate(), {"gate": gate, "up": up}, n=4)
    close(found, expected, "f32", units=8, floor=1e-36)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 31, 1024, 1025, 8192])
def test_gelu_gate(host: Any, dtype: str, n: int, exact: bool) -> None:
    inputs = {"gate": drawn(n, dtype, 8, scale=2.0), "up": drawn(n, dtype, 9)}
    # A gate far below zero has an exponent of -2 u, which is rounded.
    found, expected = run(host, gelu_gate(dtype, exact=exact), inputs, n=n)
    close(found, expected, dtype, units=16 if exact else 200)


@pytest.mark.parametrize("exact", [False, True])
def test_gelu_gate_over_all_gates(host: Any, exact: bool) -> None:
    gate = np.concatenate([np.linspace(-13, 13, 20_001), [1e3, -1e3, 1e30, -1e30, np.inf]])
    inputs = {"gate": gate.astype(np.float32), "up": np.ones(gate.size, np.float32)}
    found, expected = run(host, gelu_gate(exact=exact), inputs, n=gate.size)
    # Of the form by tanh an exponent of about -80 is rounded, so far out that nobody looks.
    close(found, expected, "f32", units=16 if exact else 300, floor=1e-36)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 31, 1024, 1025, 8192])
def test_residual(host: Any, dtype: str, n: int) -> None:
    inputs = {"a": drawn(n, dtype, 10), "b": drawn(n, dtype, 11)}
    close(*run(host, residual(dtype), inputs, n=n), dtype, units=1)


@pytest.mark.parametrize("kernel", [rms_norm(), gemv(), softmax(), silu_gate(), residual()])
def test_what_a_block_touches_covers_every_buffer_once(kernel: Kernel) -> None:
    values = {"rows": 5, "m": 21, "n": 2100, "eps": 1e-5}
    values = {name: value for name, value in values.items() if name in kernel.var_names}
    shape = kernel.sizes(values)
    integers = {name: value for name, value in values.items() if name != "eps"}
    for param in kernel.params:
        if param.touches is None:
            continue
        ranges = [
            [end.evaluate({**integers, "block_x": block}) for end in param.touches]
            for block in range(shape.global_size[0])
        ]
        size = prod(each.evaluate(integers) for each in param.shape)
        ends = [0, *(end for pair in ranges for end in pair)]
        assert ends[0::2] == [*ends[1::2], ends[-1]][: len(ends[0::2])]
        assert ends[-1] == size * dtype_of(param.dtype).size_bytes


@pytest.mark.parametrize("kernel", [rms_norm(), gemv(), softmax(), silu_gate(), residual()])
def test_estimates_are_declared(kernel: Kernel) -> None:
    values = dict.fromkeys(kernel.var_names, 64)
    assert kernel.flops is not None
    assert kernel.bytes is not None
    assert kernel.flops.evaluate(values) > 0
    assert kernel.bytes.evaluate(values) > 0
