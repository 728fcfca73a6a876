"""brickline/kernel.h on CPU: every feature of Block, and the order of a reduction to the bit.

`tree` is that order once more, in Python. The CPU is held to it here, CUDA to the CPU elsewhere.
"""

from __future__ import annotations

import mmap
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from brickline.dtypes import dtype_of
from brickline.errors import KernelError
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernel_source import (
    CPU_HEADERS,
    CUDA_HEADERS,
    INCLUDE_DIRECTORY,
    cpu_source,
    cuda_source,
    entry_point,
    headers,
)

LANES = (1, 7, 32, 48, 128, 1000, 1024)
FAULT_SHARED, FAULT_RAGGED, FAULT_NO_GROUP, FAULT_LANES, FAULT_CODE = 2, 3, 4, 5, 6
LAST_OWN_FAULT = 2**32 - 2
SMALL = ("bf16", "f16", "f8e5m2", "f8e4m3")
CANONICAL_NAN = {"bf16": 0x7FC0, "f16": 0x7E00, "f8e5m2": 0x7E, "f8e4m3": 0x7F}


def cast(values: Any, dtype: str = "f32") -> Any:
    """A copy of values of this dtype."""
    with np.errstate(invalid="ignore"):  # of a signalling NaN
        return np.array(values).astype(dtype_of(dtype).numpy)


def numbers(count: int, seed: int = 0) -> Any:
    """Floats over many magnitudes, so that the order of a sum shows in its bits."""
    rng = np.random.default_rng(seed)
    scales = np.exp2(rng.integers(-12, 12, count))
    return cast(rng.standard_normal(count) * scales)


def body(code: str, arguments: str = "float* y", name: str = "probe") -> str:
    return f"BRICKLINE void {name}(Block& block, {arguments}) {{\n{code}\n}}\n"


# --- The order of a reduction ---------------------------------------------------------------------


def halved(values: list[Any], first_distance: int, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine p[k] with p[k + d] for d halving; a partner that does not exist is skipped."""
    values = list(values)
    distance = first_distance
    while distance:
        for k in range(distance):
            if k + distance < len(values):
                values[k] = combine(values[k], values[k + distance])
        distance //= 2
    return values[0]


def tree(
    values: Any, lanes: int, identity: Any, combine: Callable[[Any, Any], Any], width: int = 1
) -> Any:
    """A reduction of a block as the top of reductions.h defines it."""
    partials = [[identity] * width for _ in range(lanes)]
    for i, value in enumerate(values):
        lane = partials[i // width % lanes]
        lane[i % width] = combine(lane[i % width], value)
    by_lane = [halved(lane, width // 2, combine) for lane in partials]
    groups = [by_lane[first : first + 32] for first in range(0, lanes, 32)]
    return halved([halved(group, 16, combine) for group in groups], 16, combine)


def add(a: Any, b: Any) -> Any:
    return a + b


REDUCTIONS = Kernel(
    "reductions",
    body(
        """
    const auto add = [](float a, float b) { return a + b; };
    const auto value = [&](int64_t i) { return x[i]; };
    const float sum = block.sum(n, value);
    const float largest = block.max(n, value);
    const float product =
        block.reduce(n, 1.0f, [](float a, float b) { return a * b + 0.5f * a; }, value);
    const float wide = block.reduce_vector<4>(n / 4 * 4, 0.0f, add,
        [&](Vector<float, 4>& sums, int64_t i) {
            for (int k = 0; k < 4; ++k) sums[k] += x[i + k];
        });
    const int64_t count = block.sum(n, [&](int64_t i) { return i; });
    block.once([&] { y[0] = sum; y[1] = largest; y[2] = product; y[3] = wide; total[0] = count; });
""",
        "const float* x, float* y, int64_t* total, int64_t n, int64_t lanes",
        "reductions",
    ),
    [
        Param("x", "f32", "n"),
        Param("y", "f32", 4, "write"),
        Param("total", "i64", 1, "write"),
        Scalar("n"),
        Scalar("lanes", low=1, high=1024),
    ],
    local_size="lanes",
)


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("count", [0, 1, 31, 33, 257, 4099])
def test_a_reduction_has_the_bits_of_the_documented_order(
    host: Any, lanes: int, count: int
) -> None:
    x, y, total = numbers(count, seed=count + lanes), np.zeros(4, np.float32), np.zeros(1, np.int64)
    assert host.load(REDUCTIONS)(x=x, y=y, total=total, n=count, lanes=lanes) == 0
    zero, one, half = np.float32(0), np.float32(1), np.float32(0.5)
    assert y[0] == tree(x, lanes, zero, add)
    assert y[1] == (x.max() if count else -np.inf)
    with np.errstate(all="ignore"):
        expected = tree(x, lanes, one, lambda a, b: a * b + half * a)
    np.testing.assert_array_equal(y[2], expected)
    assert y[3] == tree(x[: count // 4 * 4], lanes, zero, add, width=4)
    assert total[0] == count * (count - 1) // 2


def test_a_block_of_too_many_lanes_is_a_fault(host: Any) -> None:
    source = body("const float n = block.sum(10, [](int64_t i) { return 1.0f; }); y[0] = n;")
    signature = [Param("y", "f32", 1, "write")]
    y = np.zeros(1, np.float32)
    assert host.load(Kernel("probe", source, signature, local_size=1025))(y=y) == FAULT_LANES
    assert host.load(Kernel("probe", source, signature, local_size=(32, 32)))(y=y) == 0
    assert y[0] == 10


def test_a_nan_is_the_maximum_wherever_it_stands(host: Any) -> None:
    for place in (0, 40, 99):
        x, y = numbers(100), np.zeros(4, np.float32)
        x[place] = np.nan
        host.load(REDUCTIONS)(x=x, y=y, total=np.zeros(1, np.int64), n=100, lanes=64)
        assert np.isnan(y[1])


def test_integers_have_a_largest_value_of_no_index(host: Any) -> None:
    source = body(
        """
    block.once([&] { y[0] = 0; });
    y[0] = block.max(0, [](int64_t i) { return i; });
    y[1] = block.max(0, [](int64_t i) { return uint64_t(i); });
    y[2] = block.max(0, [](int64_t i) { return int32_t(i); });
    y[3] = block.max(3, [](int64_t i) { return int32_t(i - 5); });
""",
        "int64_t* y",
    )
    y = np.zeros(4, np.int64)
    assert host.load(Kernel("probe", source, [Param("y", "i64", 4, "write")]))(y=y) == 0
    assert y.tolist() == [-(2**63), 0, -(2**31), -3]


@pytest.mark.parametrize(
    ("value", "call"),
    [
        ("int8_t(i)", "block.sum"),
        ("int16_t(i)", "block.max"),
        ("bf16(1.0f)", "block.sum"),
        ("f16(1.0f)", "block.max"),
        ("i > 0", "group.sum"),
    ],
)
def test_small_values_are_not_reduced(host: Any, tmp_path: Path, value: str, call: str) -> None:
    """CUDA exchanges words of 4 bytes; what it refuses is refused here, in the same words."""
    code = f"y[0] = float({call}(9, [&](int64_t i) {{ return {value}; }}));"
    if call.startswith("group"):
        code = f"block.groups(1, [&](Group& group, int64_t) {{ {code} }});"
    kernel = Kernel("small", body(code), [Param("y", "f32", 1, "write")], entry="probe")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        host.compile(kernel, tmp_path / "small.so")
    errors = re.findall("error: (.*)", caught.value.stderr)
    assert "reduce values of 4 or 8 bytes" in errors[0]
    assert "return float(x[i])" in errors[0]


def test_a_struct_is_reduced_as_well(host: Any) -> None:
    """The place of the largest element, the first one among equals."""
    source = """
struct Best { float value; int32_t place; };
BRICKLINE void probe(Block& block, const float* x, int64_t* y, int64_t n) {
    const Best none = {-1.0f, -1};
    const Best best = block.reduce(n, none,
        [](Best a, Best b) {
            const bool second = b.value > a.value || (b.value == a.value && b.place < a.place);
            return second ? b : a;
        },
        [&](int64_t i) { return Best{x[i], int32_t(i)}; });
    block.once([&] { y[0] = best.place; });
}
"""
    kernel = Kernel(
        "probe",
        source,
        [Param("x", "f32", "n"), Param("y", "i64", 1, "write"), Scalar("n")],
        local_size=96,
    )
    x, y = cast(np.random.default_rng(1).integers(0, 50, 500)), np.zeros(1, np.int64)
    host.load(kernel)(x=x, y=y, n=500)
    assert y[0] == np.argmax(x)


# --- Blocks, ranges, vectors ----------------------------------------------------------------------

GRID = Kernel(
    "grid",
    body(
        """
    const int64_t at = block.index(0) + block.blocks(0) * (block.index(1)
                     + block.blocks(1) * block.index(2));
    block.once([&] { y[at] += 1 + at * 1000 + block.lanes(); });
""",
        "int64_t* y",
        "grid",
    ),
    [Param("y", "i64", 24, "read-write")],
    global_size=(2, 3, 4),
    local_size=(4, 2, 3),
)


def test_every_block_of_a_grid_runs_once_whoever_executes_it(host: Any) -> None:
    whole, parts = np.zeros(24, np.int64), np.zeros(24, np.int64)
    kernel = host.load(GRID)
    kernel(y=whole)
    for first, last in ((5, 24), (0, 5), (3, 3)):
        kernel(blocks=(first, last), y=parts)
    assert whole.tolist() == [25 + 1000 * at for at in range(24)]
    assert parts.tolist() == whole.tolist()


EACH = Kernel(
    "each",
    body(
        """
    block.each(n, [&](int64_t i) { y[i] = 2.0f * x[i]; });
    block.sync();
    block.each_vector<4>(m, [&](int64_t i) {
        auto v = load<4>(y + i);
        for (int k = 0; k < 4; ++k) v[k] += 1.0f;
        store<4>(y + i, v);
    });
""",
        "const float* x, float* y, int64_t n, int64_t m",
        "each",
    ),
    [Param("x", "f32", "n"), Param("y", "f32", "n", "write", align=16), Scalar("n"), Scalar("m")],
)


@pytest.mark.parametrize("count", [0, 1, 4, 31, 127, 128, 1001])
def test_each_index_is_met_once(host: Any, count: int) -> None:
    x, y = numbers(count + 3), np.zeros(count + 3, np.float32)
    whole = count // 4 * 4
    assert host.load(EACH)(x=x, y=y, n=count, m=whole) == 0
    expected = 2 * x
    expected[:whole] += 1
    expected[count:] = 0
    np.testing.assert_array_equal(y, expected)


def test_a_vector_form_refuses_a_ragged_length(host: Any) -> None:
    x, y = numbers(16), np.zeros(16, np.float32)
    assert host.load(EACH)(x=x, y=y, n=16, m=7) == FAULT_RAGGED
    np.testing.assert_array_equal(y[:4], 2 * x[:4] + 1)
    np.testing.assert_array_equal(y[4:], 2 * x[4:])


COPIES = """
template <int W> BRICKLINE void copy(Block& block, const Element* x, Element* y, int64_t n) {
    block.each_vector<W>(n, [&](int64_t i) {
        store<W>(y + i, i / W % 2 ? load<W>(x + i) : stream<W>(x + i));
    });
}
BRICKLINE void copies(Block& block, const Element* x, Element* y, int64_t n) {
    copy<1>(block, x, y, n);
    copy<2>(block, x, y + n, n);
    copy<4>(block, x, y + 2 * n, n);
    copy<8>(block, x, y + 3 * n, n);
    copy<16>(block, x, y + 4 * n, n);
}
"""


@pytest.mark.parametrize("dtype", ["f64", "f32", "bf16", "f8e4m3", "i64", "i16", "u8"])
def test_vectors_of_every_width_are_read_and_written(host: Any, dtype: str) -> None:
    kind = dtype_of(dtype)
    kernel = Kernel(
        "copies",
        COPIES,
        [
            Param("x", dtype, "n", align=16),
            Param("y", dtype, "5 * n", "write", align=16),
            Scalar("n"),
        ],
        defines={"Element": kind.block_type},
    )
    n = 64
    x, y = np.zeros(n, kind.numpy), np.zeros(5 * n, kind.numpy)
    x.view(np.uint8)[...] = np.random.default_rng(2).integers(0, 256, n * kind.size_bytes)
    assert host.load(kernel)(x=x, y=y, n=n) == 0
    assert y.tobytes() == 5 * x.tobytes()


# --- Groups ---------------------------------------------------------------------------------------

GROUPS = Kernel(
    "groups",
    body(
        """
    block.groups(rows, [&](Group& group, int64_t row) {
        const float* in = x + row * n;
        const float sum = group.sum(n, [&](int64_t i) { return in[i]; });
        const float largest = group.max(n, [&](int64_t i) { return in[i]; });
        group.each(n, [&](int64_t i) { z[row * n + i] = in[i] + sum; });
        group.sync();
        group.each_vector<2>(n, [&](int64_t i) { z[row * n + i] += 1.0f; });
        group.once([&] { y[2 * row] = sum; y[2 * row + 1] = largest; });
    });
""",
        "const float* x, float* y, float* z, int64_t rows, int64_t n, int64_t lanes",
        "groups",
    ),
    [
        Param("x", "f32", ("rows", "n")),
        Param("y", "f32", ("rows", 2), "write"),
        Param("z", "f32", ("rows", "n"), "write"),
        Scalar("rows"),
        Scalar("n"),
        Scalar("lanes", low=1, high=1024),
    ],
    local_size="lanes",
)


@pytest.mark.parametrize("lanes", [32, 40, 256])
@pytest.mark.parametrize("n", [0, 2, 32, 998])
def test_a_group_works_on_one_row(host: Any, lanes: int, n: int) -> None:
    rows = 5
    x = numbers(rows * n).reshape(rows, n)
    y, z = np.zeros((rows, 2), np.float32), np.zeros((rows, n), np.float32)
    assert host.load(GROUPS)(x=x, y=y, z=z, rows=rows, n=n, lanes=lanes) == 0
    for row in range(rows):
        assert y[row, 0] == tree(x[row], 32, np.float32(0), add)
        assert y[row, 1] == (x[row].max() if n else -np.inf)
        expected = x[row] + y[row, 0]
        expected[::2] += 1
        np.testing.assert_array_equal(z[row], expected)


def test_groups_need_32_lanes_and_whole_vectors(host: Any) -> None:
    x, y, z = numbers(6).reshape(2, 3), np.zeros((2, 2), np.float32), np.zeros((2, 3), np.float32)
    kernel = host.load(GROUPS)
    assert kernel(x=x, y=y, z=z, rows=2, n=3, lanes=16) == FAULT_NO_GROUP
    assert not y.any()
    assert kernel(x=x, y=y, z=z, rows=2, n=3, lanes=64) == FAULT_RAGGED


def dot_kernel(a: str, b: str) -> Kernel:
    return Kernel(
        "dots",
        body(
            """
    block.groups(1, [&](Group& group, int64_t) {
        const float sum = group.dot(n, a, b);
        group.once([&] { y[0] = sum; });
    });
""",
            "const Left* a, const Right* b, float* y, int64_t n",
            "dots",
        ),
        [
            Param("a", a, "n", align=16),
            Param("b", b, "n", align=16),
            Param("y", "f32", 1, "write"),
            Scalar("n"),
        ],
        defines={"Left": dtype_of(a).block_type, "Right": dtype_of(b).block_type},
    )


@pytest.mark.parametrize(
    ("left", "right"),
    [("f32", "f32"), ("bf16", "bf16"), ("bf16", "f32"), ("f16", "f16"), ("f8e4m3", "bf16")],
)
def test_an_inner_product_has_the_bits_of_the_documented_order(
    host: Any, left: str, right: str
) -> None:
    width = 16 // dtype_of(left).size_bytes
    for n in (0, 1, width, 7 * width, 32 * width, 33 * width, 96 * width + 5, 128 * width):
        a, b = cast(numbers(n, 3) / 64, left), cast(numbers(n, 4), right)
        y = np.zeros(1, np.float32)
        assert host.load(dot_kernel(left, right))(a=a, b=b, y=y, n=n) == 0
        products = a.astype(np.float32) * b.astype(np.float32)
        expected = tree(products, 32, np.float32(0), add, width if n % width == 0 else 1)
        assert y[0] == expected, f"n={n}"


# --- Shared memory, faults, atomics ---------------------------------------------------------------


def test_shared_memory_is_handed_out_in_turn_and_ends(host: Any) -> None:
    source = body(
        """
    uint8_t* const bytes = block.shared<uint8_t>(3);
    double* const numbers = block.shared<double>(4);
    block.each(3, [&](int64_t i) { bytes[i] = uint8_t(i); });
    block.each(4, [&](int64_t i) { numbers[i] = 10.0 + double(i); });
    block.sync();
    block.once([&] {
        y[0] = reinterpret_cast<unsigned char*>(numbers) - bytes;
        y[1] = bytes[2] + int64_t(numbers[3]);
        y[2] = reinterpret_cast<uintptr_t>(bytes) % 16;
        y[3] = block.shared<float>(0) != nullptr;
        float* const beyond = block.shared<float>(100'000);
        y[4] = reinterpret_cast<uintptr_t>(beyond) % 16;
        for (int i = 0; i < 100'000; ++i) beyond[i] = 1;
        y[5] = block.shared<float>(-1) != nullptr;
        y[6] = block.shared<float>(int64_t(1) << 62) == nullptr;
        y[7] = reinterpret_cast<unsigned char*>(block.shared<float>(4)) - bytes;
        *block.shared<uint8_t>(1) = 1;
        y[8] = *block.shared<uint8_t>(1);
    });
""",
        "int64_t* y",
    )
    kernel = host.load(
        Kernel("probe", source, [Param("y", "i64", 9, "write")], shared_bytes=16 + 32 + 16)
    )
    y = np.zeros(9, np.int64)
    assert kernel(y=y) == FAULT_SHARED
    assert y.tolist() == [16, 15, 0, 1, 0, 1, 1, 48, 0]


def test_the_first_fault_stays(host: Any) -> None:
    source = body("block.once([&] { y[0] += 1; }); block.fault(block.index() == 2 ? 17 : 0);")
    signature = [Param("y", "f32", 1, "read-write")]
    kernel = host.load(Kernel("probe", source, signature, global_size=5))
    y = np.zeros(1, np.float32)
    assert kernel(y=y, blocks=(0, 2)) == 0
    assert kernel(y=y) == 17
    assert y[0] == 7
    source = body("block.fault(FIRST_OWN_FAULT + uint32_t(block.index()));")
    assert host.load(Kernel("probe", source, signature, global_size=5))(y=y) == 16


@pytest.mark.parametrize("whose", ["block", "group"])
def test_a_fault_is_recorded_whatever_its_code(host: Any, whose: str) -> None:
    call = {
        "block": "block.fault(code);",
        "group": "block.groups(1, [&](Group& group, int64_t) { group.fault(code); });",
    }[whose]
    kernel = host.load(
        Kernel(
            "probe",
            body(call, "float* y, int64_t code"),
            [Param("y", "f32", 1, "read-write"), Scalar("code", low=-(1 << 62))],
            local_size=32,
        )
    )
    y = np.zeros(1, np.float32)
    for code in (0, 1, 16, 2**31, LAST_OWN_FAULT):
        assert kernel(y=y, code=code) == code
    for code in (LAST_OWN_FAULT + 1, 2**32, 2**32 + 17, 2**62, -1, -(2**32), -(2**62)):
        assert kernel(y=y, code=code) == FAULT_CODE, "none is cut down to another code, or to none"


@pytest.mark.parametrize("dtype", ["f32", "f64", "i32", "u32", "i64", "u64"])
def test_atomic_additions_of_all_lanes_and_blocks_arrive(host: Any, dtype: str) -> None:
    kind = dtype_of(dtype)
    kernel = Kernel(
        "probe",
        body("block.each(100, [&](int64_t i) { block.atomic_add(y, Element(i)); });", "Element* y"),
        [Param("y", dtype, 1, "read-write", accumulate="add")],
        global_size=3,
        defines={"Element": kind.block_type},
    )
    y = np.zeros(1, kind.numpy)
    assert host.load(kernel)(y=y) == 0
    assert y[0] == 3 * 4950


def test_indices_are_64_bits_wide(host: Any) -> None:
    """A sparse buffer of 6 GiB, of which a page at either place is touched."""
    source = body(
        """
    const uint8_t* const row = x + block.index() * n;
    const int64_t sum = block.sum(10, [&](int64_t i) { return int64_t(row[i]); });
    block.once([&] { y[0] = sum; });
""",
        "const uint8_t* x, int64_t* y, int64_t n",
    )
    kernel = Kernel(
        "probe",
        source,
        [Param("x", "u8", ("4", "n")), Param("y", "i64", 1, "write"), Scalar("n")],
        global_size=4,
    )
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    n, flags = 2**31, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    with mmap.mmap(-1, 3 * n + 4096, flags=flags) as memory:
        memory[3 * n : 3 * n + 10] = bytes(range(10))
        x = np.frombuffer(memory, np.uint8)
        y = np.zeros(1, np.int64)
        assert host.load(kernel)(blocks=(3, 4), x=x, y=y, n=n) == 0
        assert y[0] == 45
        del x


# --- Element types --------------------------------------------------------------------------------


def conversion(dtype: str) -> Kernel:
    return Kernel(
        "conversion",
        body(
            """
    block.each(n, [&](int64_t i) { wide[i] = float(narrow_in[i]); });
    block.each(m, [&](int64_t i) { narrow[i] = Element(floats[i]); });
""",
            "const Element* narrow_in, float* wide, const float* floats, Element* narrow, "
            "int64_t n, int64_t m",
            "conversion",
        ),
        [
            Param("narrow_in", dtype, "n"),
            Param("wide", "f32", "n", "write"),
            Param("floats", "f32", "m"),
            Param("narrow", dtype, "m", "write"),
            Scalar("n"),
            Scalar("m"),
        ],
        defines={"Element": dtype_of(dtype).block_type},
    )


def hard_floats(every: Any) -> Any:
    """Every value of a type, every tie between neighbours, both sides of each, and random bits."""
    finite = np.unique(every[np.isfinite(every)]).astype(np.float64)
    ties = (finite[1:] + finite[:-1]) / 2
    beyond = finite[-1] + (finite[-1] - finite[-2]) * np.array([0.5, 1, 2])
    centre = np.concatenate([finite, ties, beyond, -beyond]).astype(np.float32)
    around = [np.nextafter(centre, np.float32(end)) for end in (-np.inf, np.inf)]
    random = np.random.default_rng(5).integers(0, 2**32, 400_000, np.uint32).view(np.float32)
    special = np.array([0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-45, -1e-45], np.float32)
    return cast(np.concatenate([centre, *around, random, special]))


@pytest.mark.parametrize("dtype", SMALL)
def test_every_value_is_converted_as_ml_dtypes_does(host: Any, dtype: str) -> None:
    kind = dtype_of(dtype)
    raw = np.uint16 if kind.size_bytes == 2 else np.uint8
    every = np.zeros(2 ** (8 * kind.size_bytes), raw)
    every[...] = np.arange(len(every))
    with np.errstate(all="ignore"):
        expected_wide = every.view(kind.numpy).astype(np.float32)
        floats = hard_floats(expected_wide)
        expected = floats.astype(kind.numpy)
    wide, narrow = np.zeros(len(every), np.float32), np.zeros(len(floats), raw)
    kernel = host.load(conversion(dtype))
    kernel(narrow_in=every, wide=wide, floats=floats, narrow=narrow, n=len(every), m=len(floats))
    nan = np.isnan(expected_wide)
    np.testing.assert_array_equal(np.isnan(wide), nan)
    np.testing.assert_array_equal(wide.view(np.uint32)[~nan], expected_wide.view(np.uint32)[~nan])
    nan = np.isnan(expected.astype(np.float32))
    assert set(narrow[nan].tolist()) == {CANONICAL_NAN[dtype]}
    np.testing.assert_array_equal(narrow[~nan], expected.view(raw)[~nan])


def test_the_dtypes_of_numpy_are_the_ones_meant() -> None:
    assert dtype_of("f8e4m3").numpy == np.dtype(ml_dtypes.float8_e4m3fn)
    assert dtype_of("f8e5m2").numpy == np.dtype(ml_dtypes.float8_e5m2)


# --- Arithmetic -----------------------------------------------------------------------------------

FUNCTIONS = Kernel(
    "functions",
    body(
        """
    block.each(n, [&](int64_t i) {
        const float a = x[i], b = x[n - 1 - i];
        y[i] = exp(a);
        y[n + i] = log(a);
        y[2 * n + i] = sqrt(a);
        y[3 * n + i] = rsqrt(a);
        y[4 * n + i] = tanh(a);
        y[5 * n + i] = fabs(a);
        y[6 * n + i] = fma(a, b, -1.0f);
        y[7 * n + i] = minimum(a, b);
        y[8 * n + i] = maximum(a, b);
        y[9 * n + i] = a * b - 1.0f;
    });
""",
        "const float* x, float* y, int64_t n",
        "functions",
    ),
    [Param("x", "f32", "n"), Param("y", "f32", (10, "n"), "write"), Scalar("n")],
)


def units(found: Any, exact: Any) -> Any:
    """Distance in units of the last place of the exact value, as a float."""
    spacing = np.spacing(np.maximum(np.abs(exact), 2.0**-126).astype(np.float32))
    return np.abs(found.astype(np.float64) - exact) / spacing


def test_functions_of_floats(host: Any) -> None:
    rng = np.random.default_rng(6)
    edges = [0, -0.0, 1, -1, 88.72283, 88.7229, -87.33655, -103.97, -103.98, 1e-45, 3e38, -3e38]
    bits = rng.integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    x = np.concatenate(
        [cast(edges), cast(rng.uniform(-104, 89, 400_000)), bits, cast([np.inf, -np.inf, np.nan])]
    )
    y = np.zeros((10, len(x)), np.float32)
    assert host.load(FUNCTIONS)(x=x, y=y, n=len(x)) == 0
    with np.errstate(all="ignore"):
        wide, other = x.astype(np.float64), x[::-1]
        exact = np.exp(wide)
        fits = exact < np.finfo(np.float32).max
        assert units(y[0][fits], exact[fits]).max() <= 1.0
        np.testing.assert_array_equal(y[0][~fits], exact[~fits].astype(np.float32))
        positive = (x > 0) & np.isfinite(x)
        assert units(y[1][positive], np.log(wide[positive])).max() <= 2.0
        assert np.isnan(y[1][x < 0]).all()
        np.testing.assert_array_equal(y[2], np.sqrt(x))
        np.testing.assert_array_equal(y[3], np.float32(1) / np.sqrt(x))
        finite = np.isfinite(x)
        assert units(y[4][finite], np.tanh(wide[finite])).max() <= 3.0
        np.testing.assert_array_equal(y[5], np.abs(x))
        fused = (wide * other.astype(np.float64) - 1.0).astype(np.float32)
        known = ~np.isnan(fused)  # a few are rounded twice, in double and in float
        assert np.mean(y[6][known] == fused[known]) > 0.9999
        assert np.mean(y[6][known] == y[9][known]) < 0.9999
        np.testing.assert_array_equal(y[7], np.minimum(x, other))
        np.testing.assert_array_equal(y[8], np.maximum(x, other))
        np.testing.assert_array_equal(y[9], x * other - np.float32(1))


@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_functions_for_angles_powers_and_whole_numbers(host: Any, dtype: str) -> None:
    kernel = Kernel(
        "angles",
        body(
            """
    block.each(n, [&](int64_t i) {
        const Element a = x[i];
        y[i] = sin(a);
        y[n + i] = cos(a);
        y[2 * n + i] = floor(a);
        y[3 * n + i] = ceil(a);
        y[4 * n + i] = pow(a < 0 ? -a : a, a / 8);
    });
    static_assert(sizeof(sin(x[0])) == sizeof(Element) && sizeof(pow(x[0], x[0])) == sizeof(Element)
                  && sizeof(floor(x[0])) == sizeof(Element), "a float stays one");
""",
            "const Element* x, Element* y, int64_t n",
            "angles",
        ),
        [Param("x", dtype, "n"), Param("y", dtype, (5, "n"), "write"), Scalar("n")],
        defines={"Element": dtype_of(dtype).block_type},
    )
    edges = [0, -0.0, 0.5, -0.5, 1, -1, 1e-45, 999.5, -999.5]
    x = cast(edges + list(np.random.default_rng(8).uniform(-40, 40, 10_000)), dtype)
    y = np.zeros((5, len(x)), x.dtype)
    assert host.load(kernel)(x=x, y=y, n=len(x)) == 0
    wide = x.astype(np.longdouble)
    power = np.abs(wide) ** (x / 8).astype(np.longdouble)
    fits = (power < np.finfo(x.dtype).max) & (power > np.finfo(x.dtype).tiny)
    for row, exact in zip(y[[0, 1, 4]], (np.sin(wide), np.cos(wide), power), strict=True):
        spacing = np.spacing(np.abs(exact[fits]).astype(x.dtype))
        assert (np.abs(row[fits] - exact[fits]) / spacing).max() <= 2
    np.testing.assert_array_equal(y[2], np.floor(x))
    np.testing.assert_array_equal(y[3], np.ceil(x))


# --- Generated text -------------------------------------------------------------------------------


def test_a_mistake_is_reported_at_the_users_own_line(host: Any, tmp_path: Path) -> None:
    source = body("\n    y[0] = nonsense;\n")
    kernel = Kernel("mistaken", source, [Param("y", "f32", 1, "write")], entry="probe")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        host.compile(kernel, tmp_path / "mistaken.so")
    assert re.search(r"^mistaken:3:\d+: error: .*nonsense", caught.value.stderr, re.MULTILINE)


def test_macros_end_with_the_source(host: Any) -> None:
    kernel = Kernel(
        "probe",
        body("block.once([&] { y[0] = launch; });"),
        [Param("y", "f32", 1, "write")],
        defines={"launch": 2.5},
    )
    y = np.zeros(1, np.float32)
    host.load(kernel)(y=y)
    assert y[0] == 2.5


def test_scalars_arrive_as_their_own_type(host: Any) -> None:
    kinds = ("i32", "i64", "f32", "f64")
    arguments = ", ".join(f"{dtype_of(kind).block_type} a_{kind}" for kind in kinds)
    code = "".join(f"y[{at}] = double(a_{kind});" for at, kind in enumerate(kinds))
    kernel = Kernel(
        "probe",
        body(f"block.once([&] {{ {code} }});", f"double* y, {arguments}"),
        [
            Param("y", "f64", len(kinds), "write"),
            Scalar("a_i32", "i32", low=-7),
            Scalar("a_i64", "i64", low=-7),
            Scalar("a_f32", "f32"),
            Scalar("a_f64", "f64"),
        ],
    )
    y = np.zeros(len(kinds), np.float64)
    host.load(kernel)(y=y, a_i32=-3, a_i64=2**40, a_f32=0.5, a_f64=-0.1)
    assert y.tolist() == [-3, 2**40, 0.5, -0.1]


def test_plain_c_is_called_once_as_it_is(host: Any) -> None:
    source = """
#include <math.h>
#include <stdint.h>
void halve(const uint16_t* restrict bits, double* y, int64_t n, float by) {
    for (int64_t i = 0; i < n; ++i) y[i] = sqrt((double)bits[i]) * by;
}
"""
    kernel = Kernel(
        "halve",
        source,
        [
            Param("bits", "bf16", "n"),
            Param("y", "f64", "n", "write"),
            Scalar("n"),
            Scalar("by", "f32"),
        ],
        language="c",
    )
    bits, y = np.zeros(4, np.uint16), np.zeros(4, np.float64)
    bits[...] = [1, 4, 9, 16]
    host.load(kernel)(bits=bits, y=y, n=4, by=0.5)
    assert y.tolist() == [0.5, 1, 1.5, 2]


def test_the_text_for_cuda_has_the_same_source_and_a_fault_word() -> None:
    text = cuda_source(GROUPS)
    assert GROUPS.source in text
    assert GROUPS.source in cpu_source(GROUPS)
    name = entry_point(GROUPS)
    assert re.search(rf'extern "C" __global__ void \n{name}\(.*, uint32_t\* fault\)', text)
    exact = "static_cast<void (*)(Block&, const float*, float*, int64_t*, int64_t, int64_t)>"
    for text in (cpu_source(REDUCTIONS), cuda_source(REDUCTIONS)):
        assert f"sizeof({exact}(user::reductions))" in text, "the types that both devices ask for"
    assert "__launch_bounds__(24)" in cuda_source(GRID)
    assert len({entry_point(kernel) for kernel in (GROUPS, GRID, EACH, REDUCTIONS)}) == 4


def test_cuda_code_stays_as_it_is_and_each_language_keeps_to_its_device() -> None:
    source = 'extern "C" __global__ void own(float* y) { y[threadIdx.x] = 1; }'
    y = Param("y", "f32", 32, "write")
    cuda = Kernel("own", source, [y], local_size=32, language="cuda")
    assert source in cuda_source(cuda)
    assert entry_point(cuda) == "own"
    with pytest.raises(KernelError, match="got CUDA code - at kernel own"):
        cpu_source(cuda)
    plain = Kernel("plain", "void plain(float* y) { y[0] = 1; }", [y], language="c")
    with pytest.raises(KernelError, match="got plain C - at kernel plain"):
        cuda_source(plain)
    assert [path.name for path in headers(plain, cuda=False)] == ["launch.h"]
    assert headers(cuda, cuda=True) == []


@pytest.mark.parametrize(
    ("root", "names"), [("entry_cpu", CPU_HEADERS), ("entry_cuda", CUDA_HEADERS)]
)
def test_the_lists_of_headers_are_what_is_included(root: str, names: tuple[str, ...]) -> None:
    found, waiting = set(), [root]
    while waiting:
        name = waiting.pop()
        found.add(name)
        text = (INCLUDE_DIRECTORY / "brickline" / f"{name}.h").read_text(encoding="utf-8")
        if name == "platform" and root == "entry_cuda":
            text = text.partition("#else  // a host compiler")[0]
        waiting += set(re.findall(r'#include "brickline/(\w+)\.h"', text)) - found
    assert found == set(names)


def test_only_the_platform_asks_which_compiler_it_is() -> None:
    for path in (INCLUDE_DIRECTORY / "brickline").glob("*.h"):
        asks = re.search(r"__CUDACC|__CUDA_ARCH__", path.read_text(encoding="utf-8"))
        assert bool(asks) == (path.name == "platform.h"), path.name
