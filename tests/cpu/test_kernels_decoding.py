"""The kernels of a decoder on CPU: rotary positions, caches, attention, tokens.

Properties over shapes and dtypes, against NumPy in float64 and against each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import arguments, drawn, rates

from brickline.dtypes import dtype_of
from brickline.errors import KernelError
from brickline.kernels import catalog
from brickline.references import run_reference

DTYPES = ("f32", "bf16", "f16")
ROUNDING = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}
SMALLEST = {"f32": 0.0, "f16": 2.0**-24, "bf16": 0.0}
"""The last place of a subnormal, where results get there."""

few = settings(max_examples=25, deadline=None)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 1000)


# ---------------------------------------------------------------------------------------- positions


@few
@given(
    dtypes,
    st.booleans(),
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 130),
    st.integers(0, 2**20),
    seeds,
)
def test_rope(
    host: Any,
    dtype: str,
    interleaved: bool,
    rows: int,
    heads: int,
    dim: int,
    position: int,
    seed: int,
) -> None:
    kernel = catalog.rope(dtype, interleaved=interleaved)
    scalars = {"rows": rows, "heads": heads, "dim": dim, "position": position}
    values = arguments(kernel, scalars, seed)
    assert host.load(kernel)(**values) == 0
    wide = {name: values[name].astype(np.float32) for name in ("x", "rates")}
    assert kernel.reference is not None
    expected = kernel.reference(**wide, **scalars).astype(np.float64)
    # Cosine, sine, two products and a sum are rounded: of a pair no larger than its length.
    lengths = np.abs(wide["x"]).max() * 2.0
    bound = ROUNDING[dtype] * np.abs(expected) + 4 * 2.0**-24 * lengths + SMALLEST[dtype]
    assert (np.abs(values["y"].astype(np.float64) - expected) <= bound).all()

    in_place = catalog.rope(dtype, interleaved=interleaved, in_place=True)
    turned = values["x"].copy()
    assert host.load(in_place)(y=turned, rates=values["rates"], **scalars) == 0
    assert turned.tobytes() == values["y"].tobytes()


def test_rope_at_position_zero_changes_nothing(host: Any) -> None:
    x = drawn((2, 3, 64), "f16", 1)
    y = np.zeros_like(x)
    sizes = {"rows": 1, "heads": 3, "dim": 64, "position": 0}
    assert host.load(catalog.rope("f16"))(x=x[:1], rates=rates(64), y=y[:1], **sizes) == 0
    assert y[:1].tobytes() == x[:1].tobytes()


@pytest.mark.parametrize("position", [1, 1000, 131_071, 2**31 - 1])
def test_cosines_and_sines_are_rounded_once(host: Any, position: int) -> None:
    unit = np.concatenate([np.ones(256), np.zeros(256)]).astype(np.float32).reshape(1, 1, 512)
    sizes = {"rows": 1, "heads": 1, "dim": 512, "position": position}
    for speeds in np.linspace(1e-6, 1.0, 4096).astype(np.float32).reshape(16, 256):
        found = np.empty_like(unit)
        assert host.load(catalog.rope("f32"))(x=unit, rates=speeds, y=found, **sizes) == 0
        angles = position * speeds.astype(np.float64)
        right = np.concatenate([np.cos(angles), np.sin(angles)])
        # Half a unit in the last place, and near zero what the angle's own rounding leaves open.
        np.testing.assert_allclose(found.reshape(-1), right, rtol=2.0**-24 * 1.01, atol=2e-10)


# ------------------------------------------------------------------------------------------- caches


@few
@given(
    dtypes,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(1, 20),
    st.data(),
)
def test_kv_append(
    host: Any, dtype: str, rows: int, kv_heads: int, dim: int, room: int, data: st.DataObject
) -> None:
    capacity = rows + room
    position = data.draw(st.integers(0, capacity - rows))
    kernel = catalog.kv_append(dtype)
    sizes = {"rows": rows, "kv_heads": kv_heads, "dim": dim, "capacity": capacity}
    values = arguments(kernel, sizes | {"position": position}, position)
    expected = run_reference(kernel, values)
    assert host.load(kernel)(**values) == 0
    for name in ("k_cache", "v_cache"):
        assert values[name].tobytes() == expected[name].tobytes()
    end = position + rows
    assert values["k_cache"][:, position:end].tobytes() == values["k"].swapaxes(0, 1).tobytes()


@pytest.mark.parametrize("position", [7, 9, 10, 2**31 - 1])
def test_rows_beyond_the_capacity_are_a_fault_and_not_written(host: Any, position: int) -> None:
    kernel = catalog.kv_append("f32")
    sizes = {"rows": 4, "kv_heads": 2, "dim": 8, "capacity": 10, "position": position}
    values = arguments(kernel, sizes)
    expected = run_reference(kernel, values)
    assert host.load(kernel)(**values) == catalog.FAULT_CAPACITY
    assert values["k_cache"].tobytes() == expected["k_cache"].tobytes()

    fused = catalog.rope_append("f32")
    sizes = {"heads": 4, "kv_heads": 2, "dim": 8, "capacity": 7, "position": position}
    values = arguments(fused, sizes)
    expected = run_reference(fused, values)
    assert host.load(fused)(**values) == catalog.FAULT_CAPACITY
    assert values["v_cache"].tobytes() == expected["v_cache"].tobytes()


@few
@given(
    dtypes,
    st.booleans(),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 80),
    st.integers(1, 30),
    st.data(),
)
def test_rope_append_has_the_bits_of_rope_and_kv_append(
    host: Any,
    dtype: str,
    interleaved: bool,
    heads: int,
    kv_heads: int,
    dim: int,
    capacity: int,
    data: st.DataObject,
) -> None:
    position = data.draw(st.integers(0, capacity - 1))
    kernel = catalog.rope_append(dtype, interleaved=interleaved)
    cache = {"kv_heads": kv_heads, "dim": dim, "capacity": capacity, "position": position}
    values = arguments(kernel, {"heads": heads, **cache}, position)
    q, k, v = np.split(values["qkv"].reshape(1, -1, dim), [heads, heads + kv_heads], axis=1)
    turn = host.load(catalog.rope(dtype, interleaved=interleaved))
    turned = [np.empty_like(part) for part in (q, k)]
    for part, out in zip((q, k), turned, strict=True):
        sizes = {"rows": 1, "heads": part.shape[1], "dim": dim, "position": position}
        assert turn(x=part, rates=values["rates"], y=out, **sizes) == 0
    keys, rows = values["k_cache"].copy(), values["v_cache"].copy()
    append = host.load(catalog.kv_append(dtype))
    assert append(k=turned[1], v=v, k_cache=keys, v_cache=rows, rows=1, **cache) == 0
    expected = np.concatenate([turned[0], k, v], axis=1).tobytes()
    assert host.load(kernel)(**values) == 0
    assert values["qkv"].tobytes() == expected
    assert values["k_cache"].tobytes() == keys.tobytes()
    assert values["v_cache"].tobytes() == rows.tobytes()


# ---------------------------------------------------------------------------------------- attention

SHAPES = [(4, 64, 64), (1, 128, 32), (3, 20, 8), (8, 16, 1), (2, 7, 64), (7, 80, 48)]
"""Queries a head of the caches, size of a head, positions of a block."""


def attend(host: Any, dtype: str, constants: dict[str, Any], values: dict[str, Any]) -> Any:
    """Run both kernels; the result is [heads, dim]."""
    decode = catalog.attention_decode(dtype, **constants)
    assert host.load(decode)(**values) == 0
    shape = {name: constants[name] for name in ("queries", "dim", "span")}
    combine = catalog.attention_combine(dtype, **shape)
    y = np.empty(values["q"].shape, values["q"].dtype)
    parts = {name: values[name] for name in ("largest", "total", "values")}
    sizes = {name: values[name] for name in ("kv_heads", "capacity")}
    assert host.load(combine)(**parts, y=y, **sizes) == 0
    return y


def attention_in_numpy(values: dict[str, Any], queries: int, cap: float | None) -> Any:
    kv_heads, length = values["kv_heads"], values["length"]
    q = values["q"].astype(np.float64).reshape(kv_heads, queries, -1)
    keys = values["k_cache"][:, :length].astype(np.float64)
    rows = values["v_cache"][:, :length].astype(np.float64)
    scores = np.einsum("hqd,hpd->hqp", q, keys) * np.float32(values["scale"])
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    shares = powers / powers.sum(axis=-1, keepdims=True)
    return (shares @ rows).reshape(values["q"].shape), shares


@pytest.mark.parametrize(("queries", "dim", "span"), SHAPES)
@settings(max_examples=12, deadline=None)
@given(
    dtypes,
    st.sampled_from([None, 3.0, 50.0]),
    st.integers(1, 4),
    st.integers(1, 300),
    seeds,
    st.data(),
)
def test_attention(
    host: Any,
    queries: int,
    dim: int,
    span: int,
    dtype: str,
    cap: float | None,
    kv_heads: int,
    capacity: int,
    seed: int,
    data: st.DataObject,
) -> None:
    length = data.draw(st.integers(1, capacity))
    constants = {"queries": queries, "dim": dim, "span": span, "soft_cap": cap}
    kernel = catalog.attention_decode(dtype, **constants)
    sizes = {"kv_heads": kv_heads, "capacity": capacity, "length": length}
    values = arguments(kernel, sizes | {"scale": dim**-0.5}, seed)
    for name in ("k_cache", "v_cache"):
        values[name][:, length:] = np.nan  # nobody looks there
    found = attend(host, dtype, constants, values)
    expected, shares = attention_in_numpy(values, queries, cap)
    # Scores are about 5 at most, of `dim` products each; so much of every share, then of the sum.
    sizes_of = np.einsum(
        "hqp,hpd->hqd", shares, np.abs(values["v_cache"][:, :length].astype(np.float64))
    ).reshape(expected.shape)
    bound = ROUNDING[dtype] * np.abs(expected) + 2.0**-24 * (4 * dim + span + 40) * sizes_of
    assert (np.abs(found.astype(np.float64) - expected) <= bound + SMALLEST[dtype]).all()


@pytest.mark.parametrize(("queries", "dim", "span"), [(4, 64, 64), (3, 20, 8), (2, 7, 16)])
@settings(max_examples=12, deadline=None)
@given(dtypes, st.booleans(), st.integers(1, 3), st.integers(1, 150), st.data())
def test_rope_attention_has_the_bits_of_rope_append_and_attention(
    host: Any,
    queries: int,
    dim: int,
    span: int,
    dtype: str,
    interleaved: bool,
    kv_heads: int,
    capacity: int,
    data: st.DataObject,
) -> None:
    position = data.draw(st.integers(0, capacity - 1))
    constants = {"queries": queries, "dim": dim, "span": span}
    fused = catalog.rope_attention(dtype, **constants, interleaved=interleaved)
    sizes = {"kv_heads": kv_heads, "capacity": capacity}
    values = arguments(fused, sizes | {"position": position, "scale": 0.2}, position)
    apart = {name: values[name].copy() for name in ("qkv", "k_cache", "v_cache")}
    heads = queries * kv_heads
    append = host.load(catalog.rope_append(dtype, interleaved=interleaved))
    place = {"heads": heads, "dim": dim, "position": position}
    assert append(**apart, rates=values["rates"], **sizes, **place) == 0
    parts = {name: np.empty_like(values[name]) for name in ("largest", "total", "values")}
    caches = {name: apart[name] for name in ("k_cache", "v_cache")}
    q = apart["qkv"][: heads * dim].reshape(heads, dim)
    decode = host.load(catalog.attention_decode(dtype, **constants))
    assert decode(q=q, **caches, **parts, **sizes, length=position + 1, scale=0.2) == 0
    before = values["qkv"].tobytes()
    assert host.load(fused)(**values) == 0
    assert values["qkv"].tobytes() == before
    for name, expected in {**caches, **parts}.items():
        assert values[name].tobytes() == expected.tobytes(), name


def test_a_grid_stays_while_the_length_grows_and_empty_parts_are_empty(host: Any) -> None:
    kernel = catalog.attention_decode("f32", queries=2, dim=16, span=8)
    sizes = {"kv_heads": 2, "capacity": 40, "scale": 0.25}
    grids = set()
    for length in (1, 8, 9, 40):
        grids.add(kernel.sizes(sizes | {"length": length}).global_size)
        values = arguments(kernel, sizes | {"length": length})
        assert host.load(kernel)(**values) == 0
        used = -(-length // 8)
        assert np.isfinite(values["largest"][:, :used]).all()
        assert (values["total"][:, :used] >= 1.0).all()
        assert (values["largest"][:, used:] == -np.inf).all()
        assert not values["total"][:, used:].any()
        assert not values["values"][:, used:].any()
    assert grids == {(5, 2, 1)}


def test_a_part_does_not_depend_on_later_positions(host: Any) -> None:
    constants = {"queries": 4, "dim": 64, "span": 32}
    kernel = catalog.attention_decode("bf16", **constants)
    sizes = {"kv_heads": 2, "capacity": 128, "scale": 0.125}
    short, long = (arguments(kernel, sizes | {"length": length}) for length in (64, 128))
    for values in (short, long):
        assert host.load(kernel)(**values) == 0
    assert short["values"][:, :2].tobytes() == long["values"][:, :2].tobytes()


def test_attention_beyond_the_capacity_is_a_fault(host: Any) -> None:
    kernel = catalog.attention_decode("f32", queries=2, dim=16, span=8)
    sizes = {"kv_heads": 1, "capacity": 20, "scale": 0.25}
    values, whole = (arguments(kernel, sizes | {"length": length}) for length in (21, 20))
    assert host.load(kernel)(**values) == catalog.FAULT_CAPACITY
    assert host.load(kernel)(**whole) == 0
    assert values["values"].tobytes() == whole["values"].tobytes()


def test_a_nan_reaches_the_result_and_no_other_head(host: Any) -> None:
    constants = {"queries": 2, "dim": 16, "span": 8}
    kernel = catalog.attention_decode("f32", **constants)
    sizes = {"kv_heads": 2, "capacity": 20, "length": 20, "scale": 0.25}
    values = arguments(kernel, sizes)
    values["k_cache"][1, 3, 5] = np.nan
    found = attend(host, "f32", constants, values)
    assert np.isfinite(found[:2]).all()
    assert np.isnan(found[2:]).all()


def test_soft_caps_over_all_sizes_of_scores(host: Any) -> None:
    kernel = catalog.attention_decode("f32", queries=1, dim=1, span=1, soft_cap=1.0)
    scores = np.concatenate([np.linspace(-12, 12, 3001), np.geomspace(1e-30, 1e30, 1000)])
    scores = scores.astype(np.float32)
    sizes = {"kv_heads": 1, "capacity": scores.size, "length": scores.size, "scale": 1.0}
    given = {"q": [1.0], "k_cache": scores}
    values = arguments(kernel, sizes, given=given)
    assert host.load(kernel)(**values) == 0
    np.testing.assert_allclose(
        values["largest"].reshape(-1), np.tanh(scores.astype(np.float64)), rtol=3 * 2.0**-23
    )


@pytest.mark.parametrize(
    ("constants", "words"),
    [
        ({"queries": 0}, "queries as an integer from 1"),
        ({"dim": 64.0}, "dim as an integer"),
        ({"span": 2000}, "span as an integer from 1 to 1024, got 2000"),
        ({"queries": 1024, "dim": 4096}, r"queries \* dim of at most 8192, got 1024 \* 4096"),
        ({"soft_cap": 0.0}, "soft_cap above 0"),
        ({"dtype": "f64"}, "at most 32 bits"),
    ],
)
def test_constants_that_no_attention_has(constants: dict[str, Any], words: str) -> None:
    with pytest.raises(KernelError, match=words):
        catalog.attention_decode(**constants)


# ------------------------------------------------------------------------------------------- tokens


@few
@given(
    dtypes,
    st.sampled_from(["i32", "i64"]),
    st.lists(st.integers(-3, 20), min_size=1, max_size=9),
    st.integers(1, 15),
    st.integers(1, 70),
)
def test_embedding(
    host: Any, dtype: str, index: str, ids: list[int], vocabulary: int, n: int
) -> None:
    kernel = catalog.embedding(dtype, index)
    sizes = {"rows": len(ids), "vocabulary": vocabulary, "n": n}
    values = arguments(kernel, sizes, given={"ids": ids})
    outside = any(not 0 <= each < vocabulary for each in ids)
    assert host.load(kernel)(**values) == (catalog.FAULT_TOKEN if outside else 0)
    for row, token in zip(values["y"], ids, strict=True):
        known = 0 <= token < vocabulary
        expected = values["table"][token] if known else np.zeros(n, row.dtype)
        assert row.tobytes() == expected.tobytes()


def argmax(host: Any, dtype: str, index: str, x: Any) -> Any:
    rows, n = x.shape
    tiles = catalog.argmax_tiles(dtype)
    values = arguments(tiles, {"rows": rows, "n": n}, given={"x": x})
    assert host.load(tiles)(**values) == 0
    parts = {name: values[name] for name in ("largest", "places")}
    y = np.full(rows, -1, dtype_of(index).numpy)
    assert host.load(catalog.argmax_combine(index))(**parts, y=y, rows=rows, n=n) == 0
    return y


@few
@given(dtypes, st.sampled_from(["i32", "i64"]), st.integers(1, 3), st.integers(1, 5000), st.data())
def test_argmax(host: Any, dtype: str, index: str, rows: int, n: int, data: st.DataObject) -> None:
    x = np.round(drawn((rows, n), "f32", n) * data.draw(st.sampled_from([1.0, 100.0])))
    for value in data.draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), max_size=3)):
        x[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, n - 1))] = value
    x = x.astype(dtype_of(dtype).numpy)
    found = argmax(host, dtype, index, x)
    assert found.tolist() == x.astype(np.float32).argmax(axis=-1).tolist()


def test_argmax_of_equal_and_hopeless_rows(host: Any) -> None:
    assert argmax(host, "f32", "i32", np.full((2, 3000), -np.inf, np.float32)).tolist() == [0, 0]
    zeros = np.zeros((1, 2050), np.float32)
    zeros[0, :3] = -0.0
    assert argmax(host, "f32", "i32", zeros).tolist() == [0]
    late = np.zeros((1, 128_256), np.float32)
    late[0, [4000, 128_255]] = 1.0
    assert argmax(host, "f32", "i64", late).tolist() == [4000]


def test_ids_are_integers() -> None:
    for maker in (lambda: catalog.embedding("f32", "i16"), lambda: catalog.argmax_combine("f32")):
        with pytest.raises(KernelError, match="expected i32 or i64 for ids"):
            maker()
