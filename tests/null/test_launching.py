"""Launches on NULL: every argument is checked, every refusal has its words, nothing is leaked."""

from __future__ import annotations

import gc
import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from brickline import _core
from brickline.buffers import Buffer
from brickline.cache import CachedKernel, KernelCache
from brickline.device.base import Program, open_device
from brickline.errors import InternalError, KernelError, LaunchError, SymbolicError
from brickline.kernel import Kernel, Param, Scalar
from brickline.launching import launch_guarded, make_launcher
from brickline.symbolic import Expr, Variable, ceil_div, maximum

NULL = open_device("NULL")
CACHE = KernelCache(disk=False)
LARGEST_F32 = float.fromhex("0x1.fffffep127")
BEYOND_F32 = float.fromhex("0x1.ffffffp127")
"""The smallest double that rounds to an infinite float."""
SOURCE = "BRICKLINE void {}(Block& block) {{}}"


def compiled(name: str, signature: list[Param | Scalar], **more: Any) -> CachedKernel:
    return CACHE.get_or_compile(Kernel(name, SOURCE.format(name), signature, **more), "NULL")


def buffer(
    *shape: int,
    dtype: str = "f32",
    address: int | None = None,
    read_only: bool = False,
    **more: Any,
) -> Buffer:
    if address is None:
        address = NULL.allocate(shape, dtype).address
    return Buffer.at_address(address, shape, dtype, read_only=read_only, **{"kind": 0} | more)


@pytest.fixture
def scale() -> CachedKernel:
    """y[i] = x[i] * by, for n elements."""
    return compiled(
        "scale",
        [
            Param("x", "f32", "n"),
            Param("y", "f32", "n", "write"),
            Scalar("n", low=1, high=10_000),
            Scalar("by", "f32"),
        ],
        global_size="ceil_div(n, 256)",
    )


@pytest.fixture
def arguments() -> dict[str, Any]:
    return {"x": buffer(8), "y": buffer(8), "n": 8, "by": 2.0}


# ---------------------------------------------------------------------------------------- placement


def test_arguments_by_position_by_name_and_mixed(
    scale: CachedKernel, arguments: dict[str, Any]
) -> None:
    x, y, n, by = arguments.values()
    assert scale.launch(x, y, n, by) is None
    scale.launch(x, y, n, by=by)
    scale.launch(x, y, by=by, n=n)
    for names in itertools.permutations(arguments):
        scale.launch(**{name: arguments[name] for name in names})
    computed = {"".join(["b", "y"]): by, "".join(["n"]): n}  # names that nobody has interned
    scale.launch(x, y, **computed)


def test_missing_surplus_and_twice(scale: CachedKernel, arguments: dict[str, Any]) -> None:
    x, y, n, by = arguments.values()
    for name in arguments:
        rest = {other: value for other, value in arguments.items() if other != name}
        with pytest.raises(LaunchError, match=f"kernel scale: argument {name} is missing"):
            scale.launch(**rest)
    with pytest.raises(LaunchError, match="kernel scale: argument x is missing"):
        scale.launch()
    with pytest.raises(LaunchError, match=r"kernel scale takes 4 arguments \(x, y, n, by\), got 5"):
        scale.launch(x, y, n, by, 3)
    with pytest.raises(LaunchError, match=r"takes 4 arguments .*, got 100"):
        scale.launch(*[x] * 100)
    with pytest.raises(LaunchError, match="kernel scale has no argument 'z'; it takes x, y, n, by"):
        scale.launch(x, y, n, by, z=3)
    with pytest.raises(LaunchError, match="kernel scale has no argument 'ä'"):
        scale.launch(x, y, n, **{"ä": by})
    with pytest.raises(LaunchError, match="kernel scale: argument n was given twice"):
        scale.launch(x, y, n, by, n=n)
    with pytest.raises(LaunchError, match="kernel scale: argument x was given twice"):
        scale.launch(x, y, x=x)


def test_streams_are_cudas_alone(scale: CachedKernel, arguments: dict[str, Any]) -> None:
    scale.launch(**arguments, stream=None)
    for stream in (0, 7, object()):
        with pytest.raises(LaunchError, match="kernel scale: NULL has no streams; leave stream="):
            scale.launch(**arguments, stream=stream)
    own = compiled("own_stream", [Param("stream", "f32", 1, "write"), Scalar("n")])
    own.launch(stream=buffer(1), n=0)
    with pytest.raises(LaunchError, match="argument stream was given twice"):
        own.launch(buffer(1), stream=buffer(1))


def test_sixty_four_arguments_and_no_more() -> None:
    def many(count: int) -> CachedKernel:
        scalars = [Scalar(f"s{each}") for each in range(count - 1)]
        return compiled(f"many{count}", [Param("y", "f32", 1, "write"), *scalars])

    most, y = many(64), buffer(1)
    most.launch(y, *range(63))
    most.launch(**{f"s{each}": each for each in reversed(range(63))}, y=y)
    with pytest.raises(LaunchError, match=r"kernel many64 takes 64 arguments .*, got 65"):
        most.launch(y, *range(64))
    with pytest.raises(LaunchError, match="kernel many64: argument s62 is missing"):
        most.launch(y, *range(62))
    with pytest.raises((LaunchError, KernelError), match="at most 64 arguments, got 65"):
        many(65)


def test_what_a_launcher_says_of_itself(scale: CachedKernel) -> None:
    launch = scale.launch
    assert isinstance(launch, _core.Launcher)
    assert (launch.name, launch.device, repr(launch)) == (
        "scale",
        "NULL",
        "<launch of scale on NULL>",
    )


# ------------------------------------------------------------------------------------------ scalars


@pytest.mark.parametrize(
    "value", [1, 10_000, np.int8(8), np.uint64(8), np.int32(1), np.array(5), 2**13]
)
def test_whole_numbers_within_bounds(scale: CachedKernel, value: Any) -> None:
    scale.launch(buffer(int(value)), buffer(int(value)), value, 1.0)


@pytest.mark.parametrize(
    "value",
    [0, -1, 10_001, 2**31, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, np.int64(-5), np.uint64(2**63)],
)
def test_whole_numbers_out_of_bounds(scale: CachedKernel, value: Any) -> None:
    with pytest.raises(SymbolicError) as refused:
        scale.launch(buffer(8), buffer(8), value, 1.0)
    assert str(refused.value) == (
        f"kernel scale: variable n: expected a value from 1 to 10000, got {value!r}"
    )


class Indexed:
    """An integer of somebody's own."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __index__(self) -> int:
        if isinstance(self.value, BaseException):
            raise self.value
        return int(self.value)

    def __repr__(self) -> str:
        return "Indexed()"


@pytest.mark.parametrize(
    "value",
    [
        *(True, False, np.True_, 8.0, np.float32(8), "8", None, [8], np.zeros(2, int), 8j),
        *(Indexed(TypeError("no")), Indexed(KeyError("no")), buffer(1)),
    ],
)
def test_what_is_no_whole_number(scale: CachedKernel, value: Any) -> None:
    with pytest.raises(SymbolicError, match="variable n: expected a whole number, got") as refused:
        scale.launch(buffer(8), buffer(8), value, 1.0)
    assert repr(value) in str(refused.value)


def test_numbers_that_cannot_be_printed(scale: CachedKernel) -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError("not now")

    for value in (10**5000, -(10**5000)):  # longer than Python turns into text
        with pytest.raises(SymbolicError, match="from 1 to 10000, got a value of type int"):
            scale.launch(buffer(8), buffer(8), value, 1.0)
        with pytest.raises(LaunchError, match="by: expected a number, got a value of type int"):
            scale.launch(buffer(8), buffer(8), 8, value)
    with pytest.raises(SymbolicError, match="got a value of type Shy"):
        scale.launch(buffer(8), buffer(8), Shy(), 1.0)
    with pytest.raises(LaunchError, match="got a value of type Shy"):
        scale.launch(buffer(8), buffer(8), 8, Shy())
    with pytest.raises(LaunchError) as refused:
        scale.launch(buffer(8), buffer(8), 8, "long" * 1000)
    assert len(str(refused.value)) < 300


def test_an_interrupt_is_no_wrong_argument(scale: CachedKernel) -> None:
    class Interrupted:
        def __float__(self) -> float:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scale.launch(buffer(8), buffer(8), Indexed(KeyboardInterrupt()), 1.0)
    with pytest.raises(KeyboardInterrupt):
        scale.launch(buffer(8), buffer(8), 8, Interrupted())


@pytest.mark.parametrize(
    "value",
    [
        *(0, -1, -1.0, 2**100, 3.4e38, -3.4e38, 1e-300, math.inf, -math.inf, math.nan),
        *(np.float16(2), np.array(2.0), np.int64(3), LARGEST_F32, np.nextafter(BEYOND_F32, 0)),
    ],
)
def test_floats(scale: CachedKernel, value: Any) -> None:
    scale.launch(buffer(8), buffer(8), 8, value)


@pytest.mark.parametrize("value", [True, np.True_, "1.0", None, 1j, [1.0], np.zeros(3), object()])
def test_what_is_no_number(scale: CachedKernel, value: Any) -> None:
    if value is np.True_:
        scale.launch(buffer(8), buffer(8), 8, value)  # NumPy itself makes it a float
        return
    with pytest.raises(LaunchError, match="kernel scale: by: expected a number, got"):
        scale.launch(buffer(8), buffer(8), 8, value)


@pytest.mark.parametrize("value", [1e39, -1e39, 1e308, 2**128, BEYOND_F32])
def test_finite_floats_do_not_become_infinite(scale: CachedKernel, value: Any) -> None:
    with pytest.raises(LaunchError, match="by: expected a number that fits f32, got"):
        scale.launch(buffer(8), buffer(8), 8, value)
    wide = compiled("wide", [Param("y", "f32", 1, "write"), Scalar("by", "f64")])
    wide.launch(buffer(1), value)


def test_bounds_of_all_of_64_bits() -> None:
    low, high = -(2**63), 2**63 - 1
    all_of_it = compiled(
        "all_of_it", [Param("y", "f32", 1, "write"), Scalar("n", low=low, high=high)]
    )
    for value in (low, -1, 0, high):
        all_of_it.launch(buffer(1), value)
    for value in (low - 1, high + 1):
        with pytest.raises(SymbolicError, match=f"expected a value from {low} to {high}"):
            all_of_it.launch(buffer(1), value)


# ------------------------------------------------------------------------------------------ buffers


def test_dtypes(scale: CachedKernel, arguments: dict[str, Any]) -> None:
    for dtype in ("f64", "bf16", "i32", "bool"):
        with pytest.raises(LaunchError, match=f"kernel scale: y: expected f32, got {dtype}"):
            scale.launch(**arguments | {"y": buffer(8, dtype=dtype)})


@pytest.mark.parametrize("shape", [(7,), (9,), (0,), (8, 1), (1, 8), (), (8,) * 8])
def test_shapes(scale: CachedKernel, arguments: dict[str, Any], shape: tuple[int, ...]) -> None:
    with pytest.raises(LaunchError) as refused:
        scale.launch(**arguments | {"x": buffer(*shape)})
    assert str(refused.value) == f"kernel scale: x: expected shape (8,), got {shape!r}"


def test_devices(scale: CachedKernel, arguments: dict[str, Any]) -> None:
    with pytest.raises(LaunchError) as refused:
        scale.launch(**arguments | {"x": np.zeros(8, np.float32)})
    assert str(refused.value) == (
        "kernel scale is compiled for NULL; x lies on CPU: copy it there with device.copy, or "
        "compile the kernel for CPU"
    )
    with pytest.raises(LaunchError, match="y lies on CUDA:3: copy it there"):
        scale.launch(**arguments | {"y": buffer(8, address=512, kind=2, number=3)})


def test_what_is_no_array(scale: CachedKernel, arguments: dict[str, Any]) -> None:
    for value in (None, 3, [1.0], "x", object()):
        with pytest.raises(LaunchError, match="kernel scale: y: expected a Buffer or an array"):
            scale.launch(**arguments | {"y": value})
    with pytest.raises(LaunchError, match="kernel scale: x: expected contiguous memory"):
        scale.launch(**arguments | {"x": np.zeros(16, np.float32)[::2]})
    with pytest.raises(LaunchError, match="kernel scale: x: expected a dtype"):
        scale.launch(**arguments | {"x": np.zeros(8, ">f4")})


def test_alignment() -> None:
    kernel = compiled(
        "aligned", [Param("x", "f32", 4, align=64), Param("y", "f32", "n", "write"), Scalar("n")]
    )
    kernel.launch(buffer(4, address=640), buffer(4), 4)
    with pytest.raises(LaunchError) as refused:
        kernel.launch(buffer(4, address=640 + 32), buffer(4), 4)
    assert str(refused.value) == (
        "kernel aligned: x: expected memory aligned to 64 bytes, got address 0x2a0; copy it, or "
        "begin the view at a multiple"
    )
    with pytest.raises(LaunchError, match="y: expected memory aligned to 4 bytes"):
        kernel.launch(buffer(4, address=640), buffer(4, address=6402), 4)
    kernel.launch(buffer(4, address=640), buffer(0, address=6402), 0)  # nothing lies there


def test_read_only_memory(scale: CachedKernel, arguments: dict[str, Any]) -> None:
    scale.launch(**arguments | {"x": buffer(8, read_only=True)})
    with pytest.raises(LaunchError) as refused:
        scale.launch(**arguments | {"y": buffer(8, read_only=True)})
    assert str(refused.value) == (
        "kernel scale writes to y, whose memory is read-only; pass a writable array"
    )


def test_overlap() -> None:
    kernel = compiled(
        "overlap",
        [
            Param("a", "f32", 8),
            Param("b", "f32", 8),
            Param("c", "f32", 8, "write"),
            Param("d", "f32", 8, "read-write"),
        ],
    )

    def at(*places: int) -> list[Buffer]:
        return [buffer(8, address=4096 + place) for place in places]

    kernel.launch(*at(0, 0, 32, 64))  # what is only read may be shared
    kernel.launch(*at(0, 16, 48, 80))
    for places, writer, shared, other in (
        ((0, 64, 0, 128), "c", 32, "a"),
        ((0, 64, 28, 128), "c", 4, "a"),
        ((4, 64, 0, 128), "c", 28, "a"),
        ((0, 64, 128, 92), "d", 4, "b"),
        ((0, 64, 128, 144), "c", 16, "d"),
        ((0, 64, 144, 128), "c", 16, "d"),
    ):
        with pytest.raises(LaunchError) as refused:
            kernel.launch(*at(*places))
        assert str(refused.value) == (
            f"kernel overlap writes to {writer}, which shares {shared} bytes with {other}; pass "
            "memory of its own, or declare one read-write argument"
        )


def test_empty_buffers_overlap_nothing() -> None:
    kernel = compiled("empty", [Param("x", "f32", "n"), Param("y", "f32", 8, "write"), Scalar("n")])
    kernel.launch(buffer(0, address=4100), buffer(8, address=4096), 0)


# -------------------------------------------------------------------------------------------- sizes


def sized(name: str, **sizes: Any) -> Callable[..., None]:
    signature = [
        Param("y", "f32", 1, "write"),
        Scalar("n", low=-(2**62)),
        Scalar("m", low=-(2**62)),
    ]
    kernel = compiled(name, signature, **sizes)
    return lambda n, m=0: kernel.launch(buffer(1), n, m)


@pytest.mark.parametrize("axis", range(3))
def test_blocks_along_each_axis(axis: int) -> None:
    most = (2**31 - 1, 65535, 65535)[axis]
    launch = sized(f"blocks{axis}", global_size=[*[1] * axis, "n", *[1] * (2 - axis)])
    launch(1)
    launch(most)
    for size in (0, -1, most + 1, 2**40, 2**62, -(2**62)):
        with pytest.raises(LaunchError) as refused:
            launch(size)
        assert str(refused.value) == (
            f"kernel blocks{axis}: global_size[{axis}] = n is {size} with n={size}, m=0; "
            f"NULL takes 1 to {most}" + (": skip the launch" if size < 1 else "")
        )


@pytest.mark.parametrize("axis", range(3))
def test_lanes_along_each_axis(axis: int) -> None:
    most = (1024, 1024, 64)[axis]
    launch = sized(f"lanes{axis}", local_size=[*[1] * axis, "n", *[1] * (2 - axis)])
    launch(1)
    launch(most)
    for size in (0, -1, most + 1, 2**32, 2**62):
        with pytest.raises(
            LaunchError,
            match=rf"local_size\[{axis}\] = n is {size} with .*takes 1 to {most}",
        ):
            launch(size)


def test_the_product_of_lanes() -> None:
    launch = sized("product", local_size=("n", "m"))
    launch(32, 32)
    launch(1, 1024)
    for n, m in ((33, 32), (1024, 2), (1024, 1024)):
        with pytest.raises(
            LaunchError, match=f"product: a block of {n * m} lanes; the device takes at most 1024"
        ):
            launch(n, m)


def test_shared_memory() -> None:
    launch = sized("shared", shared_bytes="n")
    launch(0)
    launch(1 << 20)
    for size in (-1, (1 << 20) + 1, 2**62):
        with pytest.raises(LaunchError, match=rf"shared_bytes = .* is {size} .*takes 0 to 1048576"):
            launch(size)


def test_arithmetic_of_sizes_is_checked() -> None:
    product = sized("multiplied", global_size="n * m")
    product(3, 4)
    for n, m in ((2**62, 2), (2**40, 2**40), (-(2**62), 4)):
        with pytest.raises(SymbolicError, match=r"kernel multiplied: global_size\[0\] leaves 64"):
            product(n, m)
    quotient = sized("divided", global_size="n // m", local_size="ceil_div(n, m)")
    quotient(7, 2)
    with pytest.raises(SymbolicError, match=r"kernel divided: global_size\[0\] divides by zero"):
        quotient(7, 0)
    shared = sized("modulo", shared_bytes="n % m")
    shared(7, 2)
    with pytest.raises(SymbolicError, match="kernel modulo: shared_bytes divides by zero"):
        shared(7, 0)


def test_arithmetic_of_shapes_is_checked() -> None:
    kernel = compiled(
        "shaped", [Param("y", "f32", ("n * m", "n // m"), "write"), Scalar("n"), Scalar("m")]
    )
    kernel.launch(buffer(6, 1), 3, 2)
    for shape in ((1, 1), (1,), (1, 1, 1)):
        with pytest.raises(SymbolicError, match="kernel shaped: the shape of y leaves 64 bits"):
            kernel.launch(buffer(*shape), 2**40, 2**40)
    for shape in ((0, 1), (1,)):
        with pytest.raises(SymbolicError, match="kernel shaped: the shape of y divides by zero"):
            kernel.launch(buffer(*shape), 3, 0)
    with pytest.raises(LaunchError, match=r"expected shape \(6, 1\), got \(6, 2\)"):
        kernel.launch(buffer(6, 2), 3, 2)


def test_a_shape_below_zero_fits_nothing() -> None:
    kernel = compiled("below", [Param("y", "f32", "n - 5", "write"), Scalar("n")])
    kernel.launch(buffer(0), 5)
    with pytest.raises(LaunchError, match=r"expected shape \(-2,\), got \(0,\)"):
        kernel.launch(buffer(0), 3)


def test_zero_sizes_of_a_kernel_that_allows_them() -> None:
    kernel = compiled(
        "zero",
        [Param("y", "f32", "n", "write"), Scalar("n")],
        global_size=maximum(1, ceil_div(Variable("n", 0, 2**62), 256)),
    )
    kernel.launch(buffer(0), 0)
    kernel.launch(buffer(257), 257)


# ---------------------------------------------------------------------------------------- lifetimes


def test_references_stay_level_whatever_happens(scale: CachedKernel) -> None:
    n, by, huge, text = int("300"), 2.5, 10**30, "no number"
    x, y, wrong = buffer(n), buffer(n), buffer(n + 1)
    array, strided = np.zeros(n, np.float32), np.zeros(2 * n, np.float32)[::2]
    launch = scale.launch
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, y, n, by), {}),
        ((x,), {"y": y, "n": n, "by": by}),
        ((x, y, n), {}),
        ((x, y, n, by, text), {}),
        ((x, y, n, by), {"zz": text}),
        ((x, y, n, by), {"n": n}),
        ((x, y, n, by), {"stream": text}),
        ((x, y, huge, by), {}),
        ((x, y, text, by), {}),
        ((x, y, Indexed(KeyError(text)), by), {}),
        ((x, y, n, text), {}),
        ((x, y, n, 1e300), {}),
        ((wrong, y, n, by), {}),
        ((x, array, n, by), {}),
        ((x, strided, n, by), {}),
        ((x, text, n, by), {}),
        ((x, x, n, by), {}),
        ((array, array, n, by), {}),
    ]
    watched = [x, y, n, by, huge, text, array, strided, wrong, launch, scale, LaunchError]

    def use() -> int:
        failures = 0
        for args, named in calls:
            try:
                launch(*args, **named)
            except (LaunchError, SymbolicError):
                failures += 1
        return failures

    assert use() == len(calls) - 2
    gc.collect()
    before = [sys.getrefcount(each) for each in watched]
    blocks = sys.getallocatedblocks()
    for _ in range(1000):
        use()
    gc.collect()
    assert [sys.getrefcount(each) for each in watched] == before
    assert sys.getallocatedblocks() - blocks < 300


def test_references_of_launchers_stay_level() -> None:
    kernel = Kernel("made", SOURCE.format("made"), [Param("y", "f32", 1, "write"), Scalar("n")])

    def owner() -> None:
        """Stands for a library."""

    def make() -> None:
        launch = make_launcher(kernel, NULL, Program(0, owner))
        launch(buffer(1), 3)

    make()
    before = sys.getrefcount(owner), sys.getallocatedblocks()
    for _ in range(1000):
        make()
    gc.collect()
    assert sys.getrefcount(owner) == before[0]
    assert sys.getallocatedblocks() - before[1] < 300


def test_declarations_that_make_no_launcher() -> None:
    one = Expr.of(1).program([])
    good: dict[str, Any] = {
        "name": "made",
        "arguments": (("y", True, 2, 2, 4, (one,)), ("n", False, 0, 0, 9)),
        "sizes": (one,) * 7,
        "size_texts": ("1",) * 7,
        "limits": (1024,) * 8,
        "kind": 0,
        "number": 0,
        "function": 0,
        "context": 0,
        "fault": 0,
        "owner": None,
        "convert": lambda value, launcher, name: value,
        "dtypes": ("?", "f64", "f32"),
    }
    launch = _core.Launcher(**good)
    launch(buffer(1), 3)
    with pytest.raises(LaunchError, match="kernel made: y is no buffer"):
        launch("x", 3)
    for bad, error in (
        ({"sizes": (b"",) * 7}, InternalError),
        ({"sizes": (b"x" * 15,) * 7}, InternalError),
        ({"sizes": (b"\xff" * 16,) * 7}, InternalError),
        ({"sizes": ("text",) * 7}, TypeError),
        ({"sizes": (one,) * 6}, LaunchError),
        ({"limits": (-1,) * 8}, OverflowError),
        ({"arguments": (("y", True, 2, 2, 4, (b"",)),)}, InternalError),
        ({"arguments": (("y", True, 2),)}, TypeError),
        ({"arguments": (("n", False, 0, 0, 2**70),)}, OverflowError),
    ):
        with pytest.raises(error):
            _core.Launcher(**good | bad)


def test_guard_zones_on_null_check_and_execute_nothing(
    scale: CachedKernel, arguments: dict[str, Any]
) -> None:
    launch_guarded(scale, arguments)
    with pytest.raises(LaunchError, match="argument by is missing"):
        launch_guarded(scale, {name: arguments[name] for name in ("x", "y", "n")})
