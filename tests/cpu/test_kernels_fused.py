"""Kernels that take the place of several: on CPU, the same bits as those one after the other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import drawn

from brickline.dtypes import dtype_of
from brickline.kernels import catalog

dtypes = st.sampled_from(["f32", "bf16", "f16"])
sizes = st.one_of(st.integers(1, 600), st.sampled_from([8, 256, 1024, 2048, 4104]))
few = settings(max_examples=30, deadline=None)


def normed(host: Any, dtype: str, x: Any, weight: Any, eps: float) -> Any:
    y = np.empty_like(x)
    kernel = host.load(catalog.rms_norm(dtype))
    assert kernel(x=x[None], weight=weight, y=y[None], rows=1, n=x.size, eps=eps) == 0
    return y


def product(host: Any, dtype: str, w: Any, x: Any, result: str | None = None) -> Any:
    kernel = catalog.gemv(dtype, dtype, result or dtype)
    y = np.empty(len(w), dtype_of(result or dtype).numpy)
    assert host.load(kernel)(w=w, x=x, y=y, m=len(w), n=x.size) == 0
    return y


@few
@given(dtypes, st.integers(1, 40), sizes, st.booleans(), st.sampled_from([1, 4, 16]))
def test_norm_gemv(host: Any, dtype: str, m: int, n: int, logits: bool, rows: int) -> None:
    w, x, weight = drawn((m, n), dtype, 1), drawn(n, dtype, 2), drawn(n, dtype, 3)
    result = "f32" if logits else dtype
    kernel = catalog.norm_gemv(dtype, result, rows_per_block=rows)
    y = np.empty(m, dtype_of(result).numpy)
    assert host.load(kernel)(w=w, x=x, weight=weight, y=y, m=m, n=n, eps=1e-5) == 0
    expected = product(host, dtype, w, normed(host, dtype, x, weight, 1e-5), result)
    assert y.tobytes() == expected.tobytes()


@few
@given(dtypes, st.integers(1, 30), sizes, st.sampled_from([1, 4, 5]))
def test_gated_gemv(host: Any, dtype: str, hidden: int, n: int, pairs: int) -> None:
    w, x = drawn((2 * hidden, n), dtype, 4), drawn(n, dtype, 5)
    kernel = catalog.gated_gemv(dtype, pairs_per_block=pairs)
    y = np.empty(hidden, dtype_of(dtype).numpy)
    assert host.load(kernel)(w=w, x=x, y=y, hidden=hidden, n=n) == 0
    both = product(host, dtype, w, x)
    expected = np.empty_like(y)
    gate = host.load(catalog.silu_gate(dtype))
    assert gate(gate=both[:hidden], up=both[hidden:], y=expected, n=hidden) == 0
    assert y.tobytes() == expected.tobytes()


@few
@given(dtypes, st.integers(1, 40), sizes)
def test_gemv_residual(host: Any, dtype: str, m: int, n: int) -> None:
    w, x, stream = drawn((m, n), dtype, 7), drawn(n, dtype, 8), drawn(m, dtype, 9)
    expected = np.empty_like(stream)
    add = host.load(catalog.residual(dtype))
    assert add(a=stream, b=product(host, dtype, w, x), y=expected, n=m) == 0
    y = np.empty_like(stream)
    apart = host.load(catalog.gemv_residual(dtype))
    assert apart(w=w, x=x, residual=stream, y=y, m=m, n=n) == 0
    assert y.tobytes() == expected.tobytes()
    in_place = host.load(catalog.gemv_residual(dtype, in_place=True))
    assert in_place(w=w, x=x, y=stream, m=m, n=n) == 0
    assert stream.tobytes() == expected.tobytes()


@few
@given(dtypes, st.integers(1, 70), st.integers(1, 20), sizes)
def test_every_row_of_gemm_is_a_gemv(host: Any, dtype: str, m: int, n: int, k: int) -> None:
    x, w = drawn((m, k), dtype, 10), drawn((n, k), dtype, 11)
    y = np.empty((m, n), np.float32)
    assert host.load(catalog.gemm(dtype, y="f32"))(x=x, w=w, y=y, m=m, n=n, k=k) == 0
    for row in {0, m // 2, m - 1}:
        assert y[row].tobytes() == product(host, dtype, w, x[row].copy(), "f32").tobytes()


@few
@given(dtypes, st.integers(1, 10), st.integers(1, 20), sizes)
def test_the_bias_of_gemm_is_added_last(host: Any, dtype: str, m: int, n: int, k: int) -> None:
    x, w, bias = drawn((m, k), dtype, 10), drawn((n, k), dtype, 11), drawn(n, "f32", 12)
    plain, y = np.empty((m, n), np.float32), np.empty((m, n), np.float32)
    sizes_of = {"m": m, "n": n, "k": k}
    assert host.load(catalog.gemm(dtype, y="f32"))(x=x, w=w, y=plain, **sizes_of) == 0
    biased = catalog.gemm(dtype, y="f32", bias=True)
    assert host.load(biased)(x=x, w=w, bias=bias, y=y, **sizes_of) == 0
    assert y.tobytes() == (plain + bias).tobytes()


@pytest.mark.parametrize("maker", [catalog.norm_gemv, catalog.gemv_residual, catalog.gemm])
def test_a_matrix_of_2048_rows_occupies_every_sm_twice(maker: Any) -> None:
    values = {"m": 2048, "n": 2048, "k": 2048}
    kernel = maker("bf16")
    scalars = {name: values.get(name, 1e-5) for name in kernel.var_names}
    assert np.prod(kernel.sizes(scalars).global_size) >= 2 * 132
