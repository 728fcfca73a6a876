"""`fnv1a_f32` and what the seed says of checksums: golden vectors, kinds of data, refusals."""

from __future__ import annotations

import math
import struct
from array import array
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from brickline.checksums import DivergenceInfo, KernelChecksum, fnv1a_f32, fnv1a_f32_of_all
from brickline.errors import UsageError

GOLDEN: list[tuple[list[float], int]] = [
    ([], 0xCBF29CE484222325),
    ([1.0, 2.0, 3.0, 4.0], 0x8FAA0A18FAF0FB98),
    ([1.0], 0x4B72477F9C5C2F98),
    ([float(np.nextafter(np.float32(1), np.float32(2)))], 0xAB77F17746270529),
    ([0.0], 0x4D25767F9DCE13F5),
    ([-0.0], 0x4D24F67F9DCD3A75),
    ([0.0] * 64, 0xD80AC658736BB725),
    ([float(n) for n in range(64)], 0x335B076C7DE57D88),
    ([float(n) for n in range(100)], 0x335B076C7DE57D88),
]
"""Of `brick_profiler.md` 1.1."""


def by_the_book(values: Any) -> int:
    """FNV-1a byte by byte."""
    found = 0xCBF29CE484222325
    for byte in np.asarray(values).reshape(-1)[:64].astype("<f4").tobytes():
        found = (found ^ byte) * 0x100000001B3 % 2**64
    return found


@pytest.mark.parametrize(("values", "expected"), GOLDEN, ids=lambda value: repr(value)[:24])
def test_golden_vectors(values: list[float], expected: int) -> None:
    kinds = [list, tuple, iter, lambda v: array("f", v), lambda v: np.array(v, np.float32)]
    kinds += [lambda v: np.array(v, np.float64), lambda v: memoryview(array("d", v))]
    for kind in kinds:
        assert fnv1a_f32(kind(values)) == expected


@given(arrays.arrays(np.float32, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0)))
def test_any_array_is_read_row_by_row(values: np.ndarray) -> None:
    expected = by_the_book(values)
    assert fnv1a_f32(values) == expected
    assert fnv1a_f32(np.asfortranarray(values)) == expected
    assert fnv1a_f32(values.reshape(-1).tolist()) == expected or np.isnan(values).any()
    if values.ndim > 1:
        assert fnv1a_f32(values.T) == by_the_book(values.T)


def test_a_large_transposed_array_is_not_copied() -> None:
    huge = np.broadcast_to(np.float32(3), (1 << 20, 1 << 20))  # 4 TiB where it is copied
    assert fnv1a_f32(huge) == fnv1a_f32(huge.T) == by_the_book([3.0] * 64)


@pytest.mark.parametrize(
    "dtype",
    [
        *(np.float64, np.float16, np.int64, np.uint8, bool),
        *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2),
    ],
)
def test_other_dtypes_become_f32(dtype: Any) -> None:
    values = np.array([0, 1, 2, 3, 1], dtype)
    assert fnv1a_f32(values) == by_the_book(values.astype(np.float32))


def test_too_large_for_f32_is_infinite() -> None:
    assert fnv1a_f32([1e300]) == fnv1a_f32(np.array([1e300])) == fnv1a_f32([math.inf])


def test_dlpack_is_read() -> None:
    class Speaker:
        def __init__(self, values: np.ndarray) -> None:
            self._values = values

        def __dlpack__(self, **options: Any) -> Any:
            return self._values.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self._values.__dlpack_device__()

    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert fnv1a_f32(Speaker(values)) == by_the_book(values)


def test_a_buffer_of_any_dtype_is_read() -> None:
    import brickline as bl

    values = np.arange(6).astype(ml_dtypes.bfloat16)
    assert fnv1a_f32(bl.as_buffer(values)) == by_the_book(values.astype(np.float32))


@pytest.mark.parametrize(
    "data",
    [
        *("text", b"bytes", None, 3, {"a": 1}, ["a"], [None], [1j], [[1.0], [2.0, 3.0]]),
        *(np.array([1j]), np.array(["a"]), np.array([object()]), np.zeros(2, "f4,f4")),
    ],
    ids=lambda data: repr(data)[:20],
)
def test_what_is_no_number_is_refused(data: Any) -> None:
    with pytest.raises(UsageError, match="data: expected"):
        fnv1a_f32(data)


def test_of_several_tensors_each_takes_part() -> None:
    one, other = np.arange(100, dtype=np.float32), np.ones(3, np.float32)
    assert fnv1a_f32_of_all([one]) == fnv1a_f32(one)
    assert fnv1a_f32_of_all([one, other]) not in (fnv1a_f32(one), fnv1a_f32_of_all([other, one]))


@given(st.lists(st.floats(width=32), max_size=80))
def test_equal_lists_have_equal_checksums_and_others_do_not(values: list[float]) -> None:
    assert fnv1a_f32(values) == fnv1a_f32(list(values))
    for place in range(min(len(values), 64)):
        changed = list(values)
        bits = struct.unpack("<I", struct.pack("<f", values[place]))[0] ^ 1
        changed[place] = struct.unpack("<f", struct.pack("<I", bits))[0]
        if not math.isnan(changed[place]) and not math.isnan(values[place]):
            assert fnv1a_f32(changed) != fnv1a_f32(values)


def test_one_line_says_where_and_what() -> None:
    info = DivergenceInfo("rope_neox", 3, 7, 0x1A, 0xFF)
    assert str(info) == (
        'DIVERGENCE in "rope_neox" (layer 3, pos 7): '
        "expected 0x000000000000001A, got 0x00000000000000FF"
    )
    assert KernelChecksum("rope", 0, 1, 2)._fields == (
        *("name", "layer_idx", "position", "checksum"),
    )
