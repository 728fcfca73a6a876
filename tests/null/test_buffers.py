"""Buffers: arrays of others as they are, ours as others take them, and nothing copied or leaked."""

from __future__ import annotations

import array
import ctypes
import gc
import sys
import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from brickline import _core
from brickline.buffers import (
    ALIGNMENT,
    Buffer,
    aligned_memory,
    as_buffer,
    check_copy,
    copy_host,
)
from brickline.device.base import open_device
from brickline.dtypes import DTYPES
from brickline.errors import LaunchError, UsageError

NULL = open_device("NULL")
CPU = open_device("CPU")


class Exporter:
    """Another library's array, known by its DLPack alone."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self) -> Any:
        return self.array.__dlpack__()


class Strided:
    """A DLPack tensor of shape and strides that NumPy would not make."""

    class Tensor(ctypes.Structure):
        _fields_ = (
            ("data", ctypes.c_void_p),
            ("device_type", ctypes.c_int32),
            ("device_number", ctypes.c_int32),
            ("dimensions", ctypes.c_int32),
            ("code", ctypes.c_uint8),
            ("bits", ctypes.c_uint8),
            ("lanes", ctypes.c_uint16),
            ("shape", ctypes.POINTER(ctypes.c_int64)),
            ("strides", ctypes.POINTER(ctypes.c_int64)),
            ("byte_offset", ctypes.c_uint64),
            ("context", ctypes.c_void_p),
            ("deleter", ctypes.c_void_p),
        )

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None,
        *,
        dtype: tuple[int, int, int] = (2, 32, 1),
        device: tuple[int, int] = (1, 0),
        offset: int = 0,
    ) -> None:
        self.memory = np.arange(64, dtype=np.float32)
        many = ctypes.c_int64 * len(shape)
        self.sizes = many(*shape), many(*(strides or shape))
        self.tensor = self.Tensor(
            self.memory.ctypes.data,
            *device,
            len(shape),
            *dtype,
            self.sizes[0],
            self.sizes[1] if strides is not None else None,
            offset,
        )

    def __dlpack__(self) -> Any:
        make = ctypes.pythonapi.PyCapsule_New
        make.restype = ctypes.py_object
        make.argtypes = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
        return make(ctypes.addressof(self.tensor), b"dltensor", None)


class CudaArray:
    """What CuPy looks like; nobody reads its memory."""

    def __init__(self, **facts: Any) -> None:
        self.__cuda_array_interface__ = {
            "data": (4096, False),
            "shape": (2, 3),
            "typestr": "<f4",
            "version": 3,
        } | facts


def references(made: Any) -> int:
    """The count without this call's own."""
    return sys.getrefcount(made) - 2


# -------------------------------------------------------------------------------------------- NumPy


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_numpy_and_ml_dtypes_is_taken_as_it_is(name: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(DTYPES[name].numpy)
    buffer = as_buffer(array)
    assert (buffer.dtype, buffer.dtype_code) == (name, DTYPES[name].code)
    assert (buffer.shape, buffer.nbytes) == ((2, 3), array.nbytes)
    assert buffer.address == array.__array_interface__["data"][0]
    assert (buffer.device, buffer.kind, buffer.number) == ("CPU", 1, 0)
    assert buffer.owner is array
    assert not buffer.is_read_only
    again = buffer.numpy()
    assert again.dtype == array.dtype
    assert again.tobytes() == array.tobytes()
    again[0, 0] = 1
    assert array[0, 0] == 1, "the memory is shared"


def test_a_buffer_is_returned_as_it_is() -> None:
    buffer = as_buffer(np.zeros(3))
    assert as_buffer(buffer) is buffer


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3, 2)])
def test_zero_size(shape: tuple[int, ...]) -> None:
    buffer = as_buffer(np.zeros(shape, np.float32))
    assert (buffer.shape, buffer.nbytes) == (shape, 0)
    assert buffer.numpy().shape == shape
    assert memoryview(buffer).nbytes == 0
    assert np.from_dlpack(buffer).shape == shape


def test_a_single_element_has_no_dimensions() -> None:
    buffer = as_buffer(np.array(2.5))
    assert (buffer.shape, buffer.nbytes) == ((), 8)
    assert buffer.numpy() == 2.5
    assert np.from_dlpack(buffer).shape == ()


def test_read_only_memory_stays_read_only() -> None:
    array = np.arange(3.0)
    array.flags.writeable = False
    buffer = as_buffer(array)
    assert buffer.is_read_only
    assert memoryview(buffer).readonly
    assert not buffer.numpy().flags.writeable
    with pytest.raises(BufferError, match="read-only, which DLPack cannot say; copy it first"):
        buffer.__dlpack__()
    assert as_buffer(np.frombuffer(b"12345678")).is_read_only


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 4)).T[:, :2], np.zeros(8)[::2], np.zeros((2, 3), order="F"), np.zeros(4)[::-1]],
)
def test_other_strides_are_refused_with_the_remedy(array: Any) -> None:
    with pytest.raises(LaunchError, match=r"expected contiguous memory, got strides \(.*ascont"):
        as_buffer(array)


def test_axes_of_one_element_may_have_any_stride() -> None:
    array = np.zeros((4, 1, 6))[:, :, :][:1, :, ::1]
    assert as_buffer(array).shape == (1, 1, 6)
    column = np.zeros((3, 4))[:1, :]
    assert as_buffer(column).shape == (1, 4)


def test_eight_dimensions_and_no_more() -> None:
    assert as_buffer(np.zeros((1,) * 8)).shape == (1,) * 8
    with pytest.raises(LaunchError, match="at most 8 dimensions, got 9; reshape it"):
        as_buffer(np.zeros((1,) * 9))


@pytest.mark.parametrize(
    ("array", "named"),
    [
        (np.zeros(2, ">f4"), ">f4"),
        (np.array([object()]), "dtype('O')"),
        (np.zeros(2, "c8"), "complex64"),
        (np.zeros(2, "U3"), "<U3"),
        (np.zeros(2, "M8[s]"), "M8[s]"),
        (np.zeros(2, [("a", "f4"), ("b", "i4")]), "'a'"),
        (np.zeros(2, np.longdouble), "float128"),
    ],
)
def test_other_dtypes_are_refused_by_name(array: Any, named: str) -> None:
    with pytest.raises(LaunchError, match=r"expected a dtype .*; name one of these") as refused:
        as_buffer(array)
    assert named in str(refused.value)


@pytest.mark.parametrize("value", [3, 2.5, None, "text", [1.0], (1, 2), object(), dict])
def test_what_is_no_array_is_refused(value: Any) -> None:
    with pytest.raises(LaunchError, match=r"expected a Buffer or an array .*, got ") as refused:
        as_buffer(value)
    assert type(value).__name__ in str(refused.value)


def test_plain_memory_is_taken_by_the_buffer_protocol() -> None:
    for value, dtype in (
        (array.array("f", [1.0]), "f32"),
        (memoryview(bytearray(4)).cast("i"), "i32"),
        (bytearray(4), "u8"),
        ((ctypes.c_int16 * 2)(), "i16"),
    ):
        buffer = as_buffer(value)
        assert (buffer.dtype, buffer.nbytes, buffer.is_read_only) == (dtype, 4, False)
        assert buffer.address == np.asarray(value).__array_interface__["data"][0]
    assert as_buffer(b"abcd").is_read_only
    assert as_buffer(np.float32(1)).is_read_only
    with pytest.raises(LaunchError, match="expected contiguous memory"):
        as_buffer(memoryview(bytearray(8))[::2])
    with pytest.raises(LaunchError, match="expected a dtype"):
        as_buffer(array.array("u", "ab"))


def test_memory_that_grows_is_held() -> None:
    value = bytearray(4)
    buffer = as_buffer(value)
    with pytest.raises(BufferError, match="re-sized"):
        value.append(1)
    del buffer
    value.append(1)


def test_repr() -> None:
    assert repr(as_buffer(np.zeros((2, 3), np.float32))) == "<Buffer f32[2, 3] on CPU>"
    assert repr(as_buffer(np.zeros((), np.bool_))) == "<Buffer bool[] on CPU>"
    assert repr(NULL.allocate((4,), "bf16")) == "<Buffer bf16[4] on NULL>"


# ------------------------------------------------------------------------------------------- DLPack


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if dtype.size_bytes > 1])
def test_dlpack_carries_each_dtype(name: str) -> None:
    buffer = aligned_memory((2, 2), name)
    buffer.numpy()[...] = 1
    # NumPy knows no bf16.
    again = as_buffer(Exporter(buffer) if name == "bf16" else np.from_dlpack(buffer))
    assert (again.dtype, again.shape, again.address) == (name, (2, 2), buffer.address)


@pytest.mark.parametrize("name", DTYPES)
def test_our_own_capsules_come_back(name: str) -> None:
    buffer = aligned_memory((2, 0, 3), name)
    again = as_buffer(Exporter(buffer))
    assert (again.dtype, again.shape) == (name, (2, 0, 3))


def test_numpy_takes_a_buffer_without_a_copy() -> None:
    array = np.arange(6.0).reshape(2, 3)
    taken = np.from_dlpack(as_buffer(array))
    np.testing.assert_array_equal(taken, array)
    assert np.shares_memory(taken, array)


def test_a_buffer_takes_dlpack_without_a_copy() -> None:
    array = np.arange(6.0).reshape(2, 3)
    buffer = as_buffer(Exporter(array))
    assert buffer.address == array.__array_interface__["data"][0]
    assert (buffer.dtype, buffer.shape, buffer.device) == ("f64", (2, 3), "CPU")


def test_dlpack_refuses_what_it_cannot_say() -> None:
    buffer = aligned_memory((3,), "f32")
    assert buffer.__dlpack_device__() == (1, 0)
    with pytest.raises(BufferError, match="without a copy; copy the result"):
        buffer.__dlpack__(copy=True)
    with pytest.raises(BufferError, match="stays where it is"):
        buffer.__dlpack__(dl_device=(2, 0))
    with pytest.raises(BufferError, match="an address and no contents"):
        NULL.allocate((3,), "f32").__dlpack__()
    assert buffer.__dlpack__(copy=False, dl_device=(1, 0), stream=None, max_version=(1, 0))


def test_a_capsule_keeps_the_memory() -> None:
    array = np.arange(3.0)
    alive = weakref.ref(array)
    capsule = as_buffer(array).__dlpack__()
    del array
    assert alive() is not None
    del capsule
    assert alive() is None


def test_what_numpy_took_keeps_the_memory() -> None:
    array = np.arange(3.0)
    alive = weakref.ref(array)
    taken = np.from_dlpack(as_buffer(array))
    del array
    assert alive() is not None
    assert taken.tolist() == [0.0, 1.0, 2.0]
    del taken
    assert alive() is None


def test_a_taken_capsule_is_not_freed_twice_and_not_taken_again() -> None:
    buffer = aligned_memory((3,), "f32")
    before = references(buffer)

    class Once:
        def __init__(self) -> None:
            self.capsule = buffer.__dlpack__()

        def __dlpack__(self, **options: Any) -> Any:
            return self.capsule

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    once = Once()
    taken = np.from_dlpack(once)
    with pytest.raises(LaunchError, match="cannot use this Once"):
        as_buffer(once)
    del once, taken
    gc.collect()
    assert references(buffer) == before


def test_a_buffer_of_dlpack_keeps_the_memory() -> None:
    array = np.arange(3.0)
    alive = weakref.ref(array)
    buffer = as_buffer(Exporter(array))
    del array
    assert alive() is not None
    assert buffer.numpy().tolist() == [0.0, 1.0, 2.0]
    del buffer
    assert alive() is None


def test_strides_of_dlpack() -> None:
    assert as_buffer(Strided((2, 3), None)).shape == (2, 3)
    assert as_buffer(Strided((2, 3), (3, 1))).shape == (2, 3)
    assert as_buffer(Strided((1, 3), (7, 1))).shape == (1, 3), "one row has no next one"
    assert as_buffer(Strided((3, 1), (1, 9))).shape == (3, 1)
    assert as_buffer(Strided((0, 3), (5, 7))).shape == (0, 3)
    assert as_buffer(Strided((), ())).shape == ()
    for strides in ((1, 2), (4, 1), (-3, 1), (0, 1)):
        with pytest.raises(LaunchError, match="expected contiguous memory, got strides"):
            as_buffer(Strided((2, 3), strides))


def test_offsets_dtypes_and_devices_of_dlpack() -> None:
    made = Strided((3,), (1,), offset=8)
    assert as_buffer(made).numpy().tolist() == [2.0, 3.0, 4.0]
    for dtype in ((5, 64, 1), (2, 32, 4), (2, 128, 1), (3, 64, 1)):
        with pytest.raises(LaunchError, match="no dtype of ours is DLPack's"):
            as_buffer(Strided((3,), (1,), dtype=dtype))
    assert as_buffer(Strided((3,), (1,), device=(2, 3))).device == "CUDA:3"
    with pytest.raises(LaunchError, match="got DLPack's device type 10"):
        as_buffer(Strided((3,), (1,), device=(10, 0)))
    with pytest.raises(LaunchError, match="at most 8 dimensions"):
        as_buffer(Strided((1,) * 9, None))
    with pytest.raises(LaunchError, match="expected sizes from 0 on"):
        as_buffer(Strided((-1,), None))


@pytest.mark.parametrize("error", [BufferError, RuntimeError, TypeError, ValueError, KeyError])
def test_what_an_exporter_raises_is_said(error: type[Exception]) -> None:
    class Broken:
        def __dlpack__(self) -> Any:
            raise error("out of order")

    with pytest.raises(LaunchError, match=r"cannot use this Broken: .*out of order"):
        as_buffer(Broken())


def test_an_interrupt_is_no_error_of_an_array() -> None:
    class Interrupted:
        def __dlpack__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        as_buffer(Interrupted())


def test_what_is_no_capsule_is_refused() -> None:
    class Wrong:
        def __dlpack__(self) -> Any:
            return 3

    with pytest.raises(LaunchError, match="cannot use this Wrong"):
        as_buffer(Wrong())


# ------------------------------------------------------------------------ CUDA's array interface


def test_cuda_arrays_are_taken_by_their_interface() -> None:
    buffer = as_buffer(CudaArray())
    assert (buffer.device, buffer.shape, buffer.dtype) == ("CUDA:0", (2, 3), "f32")
    assert (buffer.address, buffer.nbytes, buffer.is_read_only) == (4096, 24, False)
    assert as_buffer(CudaArray(data=(64, True))).is_read_only
    assert as_buffer(CudaArray(strides=(12, 4))).shape == (2, 3)
    assert as_buffer(CudaArray(shape=(1, 3), strides=(400, 4))).shape == (1, 3)
    facts = buffer.__cuda_array_interface__
    assert facts["data"] == (4096, False)
    assert (facts["shape"], facts["typestr"], facts["strides"]) == ((2, 3), "<f4", None)


def test_cuda_arrays_that_do_not_fit() -> None:
    with pytest.raises(LaunchError, match=r"strides \(24, 8\); pass cupy.ascontiguousarray"):
        as_buffer(CudaArray(strides=(24, 8)))
    with pytest.raises(LaunchError, match="expected a dtype"):
        as_buffer(CudaArray(typestr="<c8"))
    broken = CudaArray()
    del broken.__cuda_array_interface__["shape"]
    with pytest.raises(LaunchError, match="cannot use this CudaArray: 'shape'"):
        as_buffer(broken)


def test_memory_of_cuda_is_not_read_on_the_host() -> None:
    buffer = as_buffer(CudaArray())
    with pytest.raises(BufferError, match="not the host's; copy it with its device's to_numpy"):
        memoryview(buffer)
    with pytest.raises(LaunchError, match=r"not host memory; .*open_device\('CUDA:0'\).to_numpy"):
        buffer.numpy()
    with pytest.raises(LaunchError, match="not host memory; copy with its own device"):
        copy_host(aligned_memory((2, 3), "f32"), buffer)
    assert not hasattr(aligned_memory((1,), "f32"), "__cuda_array_interface__")


# ------------------------------------------------------------------------------- memory of our own


def test_memory_of_our_own_is_aligned() -> None:
    for size in (0, 1, 3, 1000, 4096):
        for device in (CPU, NULL):
            buffer = device.allocate((size, 3), "bf16")
            assert buffer.address % ALIGNMENT == 0
            assert (buffer.nbytes, buffer.device) == (size * 6, device.name)


def test_buffers_of_null_never_overlap() -> None:
    made = [NULL.allocate((size,), "u8") for size in (0, 1, 255, 256, 257, 0, 5)]
    for one, next_one in pairwise(made):
        assert one.address + max(one.nbytes, 1) <= next_one.address


@pytest.mark.parametrize("device", [CPU, NULL])
def test_shapes_that_no_memory_has(device: Any) -> None:
    with pytest.raises(LaunchError, match=r"expected sizes from 0 on, got shape \(-1,\)"):
        device.allocate((-1,), "f32")
    with pytest.raises(UsageError, match="expected a dtype"):
        device.allocate((1,), "f31")
    with pytest.raises(LaunchError, match=r"expected shape as integers, got \(2.5,\)"):
        device.allocate((2.5,), "f32")
    for shape in ((2**62, 2), (2**40, 2**40), (2**64,), (2**70,)):
        with pytest.raises(UsageError, match=r"cannot allocate|within 64 bits"):
            device.allocate(shape, "f32")


def test_addresses_that_no_memory_has() -> None:
    for address in (-1, 2**64 - 4, 2**64, 2**100):
        with pytest.raises(LaunchError, match="expected memory within 64 bits"):
            Buffer.at_address(address, (3,), "f32")
    with pytest.raises(LaunchError, match=r"expected kind 0 \(NULL\), 1 \(CPU\) or 2 \(CUDA\)"):
        Buffer.at_address(0, (3,), "f32", kind=3)
    with pytest.raises(LaunchError, match="within 64 bits"):
        Buffer.at_address(0, (2**63, 0), "f32")


def test_another_place_with_the_same_shape() -> None:
    buffer = as_buffer(np.zeros((2, 3), np.int16))
    other = np.zeros(16, np.uint8)
    moved = buffer.at(other.__array_interface__["data"][0], owner=other, read_only=True)
    assert (moved.shape, moved.dtype, moved.device) == ((2, 3), "i16", "CPU")
    assert moved.owner is other
    assert moved.is_read_only


def test_copies_fit_or_are_refused() -> None:
    source, target = np.arange(4.0), np.zeros((2, 2))
    copy_host(as_buffer(target), as_buffer(source))
    assert target.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    copy_host(as_buffer(source[1:]), as_buffer(source[:-1]))
    assert source.tolist() == [0.0, 0.0, 1.0, 2.0], "an overlap is copied as if there were none"
    with pytest.raises(LaunchError, match="target has 32 bytes, source 24"):
        copy_host(as_buffer(source), as_buffer(np.zeros(3)))
    source.flags.writeable = False
    with pytest.raises(LaunchError, match="target of a copy is read-only; pass a writable array"):
        check_copy(as_buffer(source), as_buffer(target))
    copy_host(as_buffer(np.zeros(0)), as_buffer(np.zeros(0)))


def test_arrays_travel_to_a_device_and_back() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    buffer = CPU.from_numpy(array)
    assert buffer.address != array.__array_interface__["data"][0]
    back = CPU.to_numpy(buffer)
    np.testing.assert_array_equal(back, array)
    assert not np.shares_memory(back, buffer.numpy())
    np.testing.assert_array_equal(NULL.to_numpy(NULL.from_numpy(array)), np.zeros_like(array))
    with pytest.raises(LaunchError, match="a copy needs equal sizes"):
        NULL.copy(NULL.allocate((3,), "f32"), as_buffer(array))


def test_memory_of_null_is_nobodys() -> None:
    buffer = NULL.allocate((3,), "f32")
    with pytest.raises(BufferError, match="not the host's"):
        memoryview(buffer)
    with pytest.raises(LaunchError, match="not host memory"):
        buffer.numpy()
    with pytest.raises(LaunchError, match="not host memory"):
        CPU.to_numpy(buffer)


# ----------------------------------------------------------------------------------------- lifetime


def test_a_view_keeps_its_buffer_and_its_array() -> None:
    array = np.arange(3.0)
    alive = weakref.ref(array)
    view = memoryview(as_buffer(array))
    again = as_buffer(array).numpy()
    del array
    view.release()
    assert alive() is not None
    assert again.tolist() == [0.0, 1.0, 2.0]
    del again
    assert alive() is None


def test_a_buffer_in_a_cycle_is_collected() -> None:
    class Owner:
        pass

    owner: Any = Owner()
    owner.buffer = Buffer.at_address(64, (1,), "f32", owner=owner)
    alive, buffer_alive = weakref.ref(owner), weakref.ref(owner.buffer)
    del owner
    gc.collect()
    assert alive() is None
    assert buffer_alive() is None


def test_references_stay_level() -> None:
    array = np.arange(3.0)
    buffer = as_buffer(array)
    wrong = np.zeros((1,) * 9)
    strided = Strided((2, 3), (1, 2))
    watched = (array, buffer, wrong, strided, Buffer, np.dtype("f8"), None)

    def use() -> None:
        as_buffer(array)
        as_buffer(Exporter(array))
        np.from_dlpack(buffer)
        buffer.__dlpack__()
        memoryview(buffer).tolist()
        buffer.numpy()
        _ = (buffer.shape, buffer.device, buffer.owner, buffer.kind, repr(buffer))
        for value in (wrong, strided, 3):
            with pytest.raises(LaunchError):
                as_buffer(value)
        with pytest.raises(TypeError):
            _core.BufferCore(0, 0, 0, (1, "a"), 1, 0, False, array)
        with pytest.raises(OverflowError):
            _core.BufferCore(0, 0, 0, (1, 2**70), 1, 0, False, array)

    use()
    gc.collect()
    before = [sys.getrefcount(each) for each in watched]
    blocks = sys.getallocatedblocks()
    for _ in range(1000):
        use()
    gc.collect()
    after = [sys.getrefcount(each) for each in watched]
    assert all(abs(one - other) < 20 for one, other in zip(before, after, strict=True))
    assert sys.getallocatedblocks() - blocks < 500


def test_dlpack_says_what_is_read_only() -> None:
    array = np.arange(4, dtype=np.float32)

    class Exporter:
        def __init__(self, array: Any) -> None:
            self.array = array

        def __dlpack__(self, **options: Any) -> Any:
            return self.array.__dlpack__(**options)

    assert not as_buffer(Exporter(array)).is_read_only
    array.flags.writeable = False
    try:
        capsule_says = as_buffer(Exporter(array)).is_read_only
    except LaunchError:
        capsule_says = True  # NumPy before 2.1 refuses to export what is read-only
    assert capsule_says
