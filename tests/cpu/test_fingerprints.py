"""Fingerprints on the CPU against a definition in NumPy, and what two of them say."""

from __future__ import annotations

import math
import pickle
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fingerprint_reference import bucket, reference, sign
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from brickline import _core, abi
from brickline.buffers import as_buffer
from brickline.dtypes import DTYPES
from brickline.errors import RunDamaged, RunVersion, UsageError
from brickline.fingerprints import (
    Estimate,
    Fingerprint,
    distance,
    distances,
    fingerprint,
    fingerprint_bytes,
    view_of,
)

Array = NDArray[Any]
ENGINES = _core.fingerprint_engines()
SHAPES = [(), (1,), (7,), (64,), (3, 5), (33, 100), (40, 128), (5, 1024), (17, 67), (2, 3, 700)]
SHAPES += [(3000, 2), (0, 4), (4, 0), (1, 5000), (3072,)]
CLOSE = ("sketch", "l1", "l2", "total")
SINGLE = ("rows", "columns")
SLOW = settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))


def values(name: str, shape: tuple[int, ...], seed: int = 0) -> Array:
    """An array of a dtype with all that is unusual in it."""
    dtype, rng, elements = DTYPES[name], np.random.default_rng(seed), math.prod(shape)
    if dtype.kind == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind != "float":
        info = np.iinfo(dtype.numpy)
        array = rng.integers(info.min, info.max, shape, dtype.numpy, endpoint=True)
        array.reshape(-1)[:2] = (info.max, 0)[: min(2, elements)]
        return array
    array = 3 * rng.standard_normal(elements)
    if elements > 10:
        info = ml_dtypes.finfo(dtype.numpy)
        array[3], array[5], array[7] = math.nan, math.inf, 0.0
        array[elements // 2], array[8] = -math.inf, float(info.smallest_subnormal)
        if name != "f64":  # whose stripes would overflow a float
            array[-1] = float(info.max)
    with np.errstate(all="ignore"):
        return array.astype(dtype.numpy).reshape(shape)


def with_engine(array: Array, engine: int) -> Fingerprint:
    view = view_of(array)
    return Fingerprint(
        _core.fingerprint(view.address, view.dtype, view.shape, view.strides, engine)
    )


def check_is_reference(found: Fingerprint, array: Array) -> None:
    expected, row = reference(array), found.record[0]
    assert tuple(int(half) for half in row["hash"]) == expected["hash"]
    scale = max(expected["l1"], 1e-300)
    for name, value in expected.items():
        if name in CLOSE:
            assert np.allclose(row[name], value, rtol=1e-13, atol=1e-14 * scale), name
        elif name in SINGLE:
            assert np.allclose(row[name], value, rtol=2e-7, atol=1e-14 * scale), name
        elif name != "hash":
            assert row[name] == value, name


@pytest.mark.parametrize("engine", range(len(ENGINES)), ids=ENGINES)
@pytest.mark.parametrize("name", list(DTYPES))
def test_every_dtype_is_as_defined(name: str, engine: int) -> None:
    for seed, shape in enumerate(SHAPES):
        array = values(name, shape, seed)
        check_is_reference(with_engine(array, engine), array)


@pytest.mark.parametrize("engine", range(len(ENGINES)), ids=ENGINES)
def test_units_agree_on_large_tensors(engine: int) -> None:
    for shape in [(300, 4096), (64, 11008), (2000, 768), (500, 1000), (1 << 20,), (3, 100_003)]:
        array = np.random.default_rng(1).standard_normal(shape, np.float32)
        a, b = with_engine(array, engine).record[0], with_engine(array, 0).record[0]
        assert (a["hash"] == b["hash"]).all()
        assert np.abs(a["sketch"] - b["sketch"]).max() <= 1e-13 * b["l2"]
        assert a["l2"] == pytest.approx(b["l2"], rel=1e-13)
        width = 4 * math.ceil(shape[-1] / 128)
        height = math.ceil(math.prod(shape) // shape[-1] / 32)
        matrix = array.reshape(-1, shape[-1]).astype(np.float64)
        if shape[-1] % 4 == 0:
            for k in range(32):
                rows = matrix[k * height : (k + 1) * height].sum()
                columns = matrix[:, k * width : (k + 1) * width].sum()
                assert a["rows"][k] == pytest.approx(rows, rel=1e-6, abs=1e-6)
                assert a["columns"][k] == pytest.approx(columns, rel=1e-6, abs=1e-6)


@st.composite
def layouts(draw: st.DrawFn) -> Array:
    """A view with odd strides: permuted, stepped, reversed, broadcast, cut."""
    sides = draw(st.lists(st.integers(1, 40), min_size=0, max_size=4))
    name = draw(st.sampled_from(["f64", "f32", "bf16", "f8e5m2", "i16", "u8", "i64"]))
    array = values(name, tuple(sides), draw(st.integers(0, 9)))
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    for axis in range(array.ndim):
        step = draw(st.sampled_from([1, 1, 2, 3, -1, -2]))
        array = array[(slice(None),) * axis + (slice(draw(st.integers(0, 3)), None, step),)]
    if draw(st.booleans()):
        array = np.broadcast_to(array[..., None], (*array.shape, draw(st.integers(1, 5))))
    return array


@SLOW
@given(array=layouts())
def test_layout_does_not_show(array: Array) -> None:
    strided, dense = (
        fingerprint(array),
        fingerprint(np.ascontiguousarray(array).reshape(array.shape)),
    )
    assert strided == dense
    a, b = strided.record[0], dense.record[0]
    for name in abi.FINGERPRINT.names or ():
        if name in CLOSE or name in SINGLE:
            assert np.allclose(a[name], b[name], rtol=1e-6 if name in SINGLE else 1e-13)
        else:
            assert np.array_equal(a[name], b[name]), name


def test_large_layouts_do_not_show() -> None:
    base = np.random.default_rng(0).standard_normal((130, 70, 90), np.float32)
    views = [base.transpose(2, 1, 0), base.transpose(1, 0, 2), base[::-1, ::2, 5:], base.T[:, ::-1]]
    views += [np.broadcast_to(base[:1], (9, 70, 90)), base.reshape(-1)[1::7]]
    views += [np.random.default_rng(0).standard_normal((2, 70_001), np.float32).T]
    for view in views:
        assert fingerprint(view) == fingerprint(np.ascontiguousarray(view))


@SLOW
@given(
    elements=st.integers(2, 3000),
    seed=st.integers(0, 99),
    name=st.sampled_from(["f32", "bf16", "f8e4m3", "i64", "f64"]),
    data=st.data(),
)
def test_any_swap_and_any_changed_bit_is_seen(
    elements: int, seed: int, name: str, data: st.DataObject
) -> None:
    bits = np.random.default_rng(seed).integers(
        0, 256, elements * DTYPES[name].size_bytes, np.uint8
    )
    array = bits.view(DTYPES[name].numpy)
    before = fingerprint(array)
    place, other = (data.draw(st.integers(0, elements - 1)) for _ in range(2))
    changed = bits.copy()
    changed[place * DTYPES[name].size_bytes] ^= 1 << data.draw(st.integers(0, 7))
    assert fingerprint(changed.view(DTYPES[name].numpy)).hash != before.hash
    size = DTYPES[name].size_bytes
    swapped = bits.reshape(-1, size).copy()
    swapped[[place, other]] = swapped[[other, place]]
    is_same = np.array_equal(swapped.reshape(-1), bits)
    assert (fingerprint(swapped.reshape(-1).view(DTYPES[name].numpy)) == before) == is_same


def test_what_order_blind_hashes_miss_is_seen() -> None:
    matrix = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    before = fingerprint(matrix)
    swapped, flipped, overwritten = matrix.copy(), matrix.copy(), matrix.copy()
    swapped[[3, 700]] = swapped[[700, 3]]
    flipped[5] *= -1
    overwritten[8:10] = overwritten[6:8]
    one_ulp = matrix.copy()
    one_ulp[17, 23] = np.nextafter(one_ulp[17, 23], np.float32(9))
    for changed in (swapped, matrix.T, flipped, overwritten, one_ulp):
        far = distance(fingerprint(changed), before)
        true = np.linalg.norm(changed.astype(float) - matrix) / np.linalg.norm(matrix)
        assert not far.identical
        assert far.relative_l2 == pytest.approx(true, rel=0.4)


def test_pairs_of_equal_changes_are_seen() -> None:
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 5000, np.uint32)
    seen = {fingerprint(bits.view(np.float32)).hash}
    for _ in range(300):
        changed = bits.copy()
        changed[rng.choice(5000, 2, replace=False)] ^= np.uint32(1 << rng.integers(32))
        seen.add(fingerprint(changed.view(np.float32)).hash)
    assert len(seen) == 301


@SLOW
@given(elements=st.integers(1, 4000), seed=st.integers(0, 99))
def test_the_sketch_is_linear_and_knows_no_dtype(elements: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((2, elements))
    joined = fingerprint(a + b).sketch
    apart = fingerprint(a).sketch + fingerprint(b).sketch
    assert np.abs(joined - apart).max() <= 1e-12 * np.linalg.norm(np.abs(a) + np.abs(b))
    narrow = a.astype(ml_dtypes.bfloat16)
    wide = fingerprint(narrow.astype(np.float64))
    assert np.allclose(fingerprint(narrow).sketch, wide.sketch, rtol=0, atol=1e-12 * wide.l2)


def test_buckets_and_signs_are_even() -> None:
    counts = np.zeros(64)
    signs = 0.0
    for index in range(64 * 512):
        counts[bucket(index)] += 1
        signs += sign(index)
    assert (counts == 512).all()
    assert abs(signs) < 4 * math.sqrt(64 * 512)


@pytest.mark.parametrize("kind", ["noise", "constant", "column", "row", "rank one", "scale"])
def test_estimates_are_as_good_as_they_say(kind: str) -> None:
    rng = np.random.default_rng(7)
    off = []
    for _ in range(60):
        a = rng.standard_normal((48, 256))
        d = np.zeros_like(a)
        if kind == "noise":
            d = rng.standard_normal(a.shape)
        elif kind == "constant":
            d = rng.permutation(np.full(a.shape, 1.0) * rng.choice([-1, 1]))
        elif kind == "column":
            d[:, rng.integers(256)] = 1
        elif kind == "row":
            d[rng.integers(48)] = rng.standard_normal(256)
        elif kind == "rank one":
            d = np.outer(rng.standard_normal(48), rng.standard_normal(256))
        else:
            d = 10 * a
        far = distance(fingerprint(a + 1e-3 * d), fingerprint(a))
        true = 1e-3 * np.linalg.norm(d) / np.linalg.norm(a)
        off.append((far.relative_l2 - true) / far.relative_l2.uncertainty)
        assert far.relative_l2.uncertainty == pytest.approx(far.relative_l2 / 11.3, rel=0.01)
    assert max(map(abs, off)) < 5
    assert np.std(off) < 1.5


def test_cosine_and_scale() -> None:
    rng = np.random.default_rng(0)
    for cosine in (-0.9, 0.0, 0.5, 0.99, 0.9999):
        off_cosine, off_scale = [], []
        for _ in range(40):
            a = rng.standard_normal(5000)
            noise = rng.standard_normal(5000)
            b = 3 * (cosine * a + math.sqrt(1 - cosine**2) * noise)
            far = distance(fingerprint(a), fingerprint(b))
            true = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            off_cosine.append((far.cosine - true) / far.cosine.uncertainty)
            off_scale.append((far.scale - a @ b / (b @ b)) / far.scale.uncertainty)
        assert np.std(off_cosine) < 1.5
        assert np.std(off_scale) < 1.5
        assert max(map(abs, off_cosine + off_scale)) < 6


def test_identical_tensors_are_exactly_so() -> None:
    array = values("f32", (33, 70))
    far = distance(fingerprint(array), fingerprint(array.copy()))
    assert far.identical
    assert (far.relative_l2, far.cosine, far.scale) == (0.0, 1.0, 1.0)
    assert far.relative_l2.uncertainty == far.cosine.uncertainty == far.scale.uncertainty == 0


def test_equal_values_of_other_dtypes_are_not_identical() -> None:
    narrow = np.arange(500).astype(ml_dtypes.bfloat16)
    far = distance(fingerprint(narrow), fingerprint(narrow.astype(np.float32)))
    assert not far.identical
    assert far.relative_l2 == 0
    assert far.cosine == pytest.approx(1)


def test_zeros() -> None:
    zero, some = np.zeros(100, np.float32), np.ones(100, np.float32)
    assert distance(fingerprint(zero), fingerprint(-zero)).relative_l2 == 0
    assert distance(fingerprint(some), fingerprint(zero)).relative_l2 == math.inf
    back = distance(fingerprint(zero), fingerprint(some))
    assert (back.relative_l2, back.scale) == (1.0, 0.0)
    assert math.isnan(back.cosine)
    empty = fingerprint(np.zeros((0, 3)))
    assert empty.elements == 0
    assert distance(empty, empty).identical


def test_nonfinite_places() -> None:
    a = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    b, c = a.copy(), a.copy()
    b[5], c[6] = math.nan, math.nan
    far = distance(fingerprint(b), fingerprint(c))
    assert (far.same_nonfinite, far.relative_l2) == (False, math.inf)
    near = distance(fingerprint(b), fingerprint(b * np.float32(1.5)))
    assert near.same_nonfinite
    assert near.relative_l2 == pytest.approx(1 / 3, rel=0.3)
    taken = fingerprint(b)
    assert (taken.nan_count, taken.first_nan, taken.first_inf) == (1, 5, None)
    c[6] = math.inf
    minus = c.copy()
    minus[6] = -math.inf
    assert fingerprint(c).nonfinite_hash != fingerprint(minus).nonfinite_hash


def test_huge_and_tiny_doubles_keep_their_distance() -> None:
    a = np.random.default_rng(0).standard_normal(1000)
    for factor in (1e200, 1e-200):
        far = distance(fingerprint(a * factor * 1.1), fingerprint(a * factor))
        assert far.relative_l2 == pytest.approx(0.1, rel=0.5)


def test_shapes_must_agree() -> None:
    a, b = fingerprint(np.zeros((3, 4))), fingerprint(np.zeros((4, 3)))
    with pytest.raises(UsageError, match=r"one shape, got \(3, 4\) and \(4, 3\)"):
        distance(a, b)
    with pytest.raises(UsageError, match="two fingerprints, got int"):
        distance(1, fingerprint(np.ones(3)))  # type: ignore[arg-type]


def test_many_distances_are_those_of_pairs() -> None:
    rng = np.random.default_rng(0)
    arrays = [values("f32", (20, 30), seed) for seed in range(6)]
    arrays += [np.zeros((20, 30), np.float32), rng.standard_normal((20, 31)).astype(np.float32)]
    rows = np.concatenate([fingerprint(array).record for array in arrays])
    found = distances(rows, np.roll(rows, 1), piece=3)
    assert len(found) == len(rows)
    for k in range(6):
        pair = Fingerprint(rows[k].tobytes()), Fingerprint(np.roll(rows, 1)[k].tobytes())
        if pair[0].shape != pair[1].shape:
            assert not found[k]["comparable"]
            continue
        one = distance(*pair)
        assert found[k]["relative_l2"] == one.relative_l2
        assert found[k]["cosine_sigma"] == one.cosine.uncertainty
    assert np.isnan(found[7]["relative_l2"])
    assert not distances(np.zeros(1, abi.FINGERPRINT), rows)["comparable"].any()
    assert len(distances(rows[:0], rows[:0])) == 0
    with pytest.raises(UsageError, match="as many records of both, got 2 and 3"):
        distances(rows[:2], rows[:3])


def test_records_go_around() -> None:
    taken = fingerprint(values("bf16", (5, 6, 7)))
    again = Fingerprint.from_bytes(taken.to_bytes())
    assert again == taken == pickle.loads(pickle.dumps(taken))
    assert hash(again) == hash(taken)
    assert len(taken.to_bytes()) == abi.FINGERPRINT.itemsize <= 1024
    assert (taken.dtype, taken.shape, taken.elements) == ("bf16", (5, 6, 7), 210)
    assert taken != fingerprint(values("bf16", (5, 42)))
    assert "bf16[5, 6, 7]" in repr(taken)
    with pytest.raises(RunDamaged, match="expected a fingerprint of 1016 bytes, got 3"):
        Fingerprint(b"abc")
    newer = taken.record.copy()
    newer["version"] = 99
    with pytest.raises(RunVersion, match="got 99"):
        Fingerprint(newer.tobytes())
    with pytest.raises(RunDamaged, match="dtype 0"):
        Fingerprint(bytes(abi.FINGERPRINT.itemsize))


def test_an_estimate_is_a_number() -> None:
    about = Estimate(0.5, 0.01)
    assert about == 0.5
    assert repr(about) == "0.5 ± 0.01"
    assert pickle.loads(pickle.dumps(about)).uncertainty == 0.01


def test_other_arrays() -> None:
    array = values("f32", (6, 5))
    expected = fingerprint(array)
    assert fingerprint(as_buffer(array)) == expected

    class Exchanged:
        def __dlpack__(self, **options: Any) -> Any:
            return array.T.__dlpack__(**options)

    assert fingerprint(Exchanged()) == fingerprint(np.ascontiguousarray(array.T))
    assert fingerprint(np.float32(3)).shape == ()
    packed = np.zeros(7, [("a", "u1"), ("x", "<f4")])
    packed["x"] = np.arange(7)
    assert fingerprint(packed["x"]) == fingerprint(np.arange(7, dtype=np.float32))
    read_only = array.copy()
    read_only.flags.writeable = False
    assert fingerprint(read_only) == expected


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        ([1.0, 2.0], "expected a tensor of torch or NumPy"),
        (np.zeros(3, complex), "real view"),
        (np.array([None]), "make it an array of numbers"),
        (np.zeros(3, ">f4"), "make it native"),
        (np.zeros((1,) * 13), "at most 12 dimensions, got 13; reshape"),
    ],
)
def test_what_is_no_tensor_is_refused(tensor: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fingerprint(tensor)


def test_threads_do_not_disturb_each_other() -> None:
    arrays = [np.random.default_rng(k).standard_normal((400, 300)) for k in range(4)]
    expected = [fingerprint_bytes(array) for array in arrays]
    found: list[Any] = [None] * 4

    def take(k: int) -> None:
        found[k] = [fingerprint_bytes(arrays[k].T.copy().T) for _ in range(5)]

    threads = [threading.Thread(target=take, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(4):
        assert {Fingerprint(record).hash for record in found[k]} == {Fingerprint(expected[k]).hash}
