"""Buffer: memory of a device, one's own or an array's, without a copy.

`as_buffer` takes NumPy arrays, torch tensors and whatever speaks DLPack or CUDA's array interface;
a Buffer speaks them in return. Memory is contiguous and stays where it is: a copy between devices
is made by `Device.copy` alone, where it is asked for.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline import _core
from brickline.dtypes import DTYPES, DType, dtype_of
from brickline.errors import BricklineError, LaunchError, UsageError

ALIGNMENT = 256
"""Bytes that memory of our own is aligned to, as CUDA's allocations are."""
_CPU, _CUDA = 1, 2
_BY_CODE = {dtype.code: dtype for dtype in DTYPES.values()}
_DLPACK_KINDS = {"int": 0, "uint": 1, "float": 2, "bool": 6}
_DLPACK_CODES = {"bf16": 4, "f8e4m3": 10, "f8e5m2": 12}


def _dlpack_code(dtype: DType) -> int:
    return _DLPACK_CODES.get(dtype.name, _DLPACK_KINDS[dtype.kind])


_codes: dict[Any, int] = {}


def _code_of(dtype: Any) -> int:
    """Return the code of a NumPy or torch dtype, from the second time on without a search."""
    code = _codes.get(dtype)
    if code is None:
        code = _codes[dtype] = dtype_of(dtype).code
    return code


_BY_DLPACK = {(_dlpack_code(each), 8 * each.size_bytes): each for each in DTYPES.values()}


def _integers(what: str, given: Any) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, given))
    except TypeError:
        raise LaunchError(f"expected {what} as integers, got {given!r:.80}") from None


class Buffer(_core.BufferCore):
    """Contiguous memory of one device, with a shape and a dtype.

    It keeps the array that it was made from alive. Host memory supports the buffer protocol;
    NumPy, torch and CuPy take any Buffer through DLPack without a copy.
    """

    __slots__ = ()

    @classmethod
    def at_address(
        cls,
        address: int,
        shape: Sequence[int],
        dtype: str | DType,
        *,
        kind: int = _CPU,
        number: int = 0,
        read_only: bool = False,
        owner: object = None,
    ) -> Buffer:
        """Return a buffer over memory that ``owner`` keeps.

        Raises:
            LaunchError: if the memory is none that a device can address.
        """
        found, sizes = dtype_of(dtype), _integers("shape", shape)
        address, kind, number = _integers("address, kind and number", (address, kind, number))
        if not (0 <= kind < 2**31 and 0 <= number < 2**31):
            raise LaunchError(f"expected a device's kind and number, got {kind} and {number}")
        if any(size < 0 for size in sizes):
            raise LaunchError(f"expected sizes from 0 on, got shape {sizes}")
        nbytes = math.prod(sizes) * found.size_bytes
        if not 0 <= address <= address + nbytes < 2**64 or max(sizes, default=0) >= 2**63:
            raise LaunchError(
                f"expected memory within 64 bits, got {nbytes} bytes at address {address:#x}"
            )
        return cls(address, nbytes, found.code, sizes, kind, number, read_only, owner)

    @property
    def dtype(self) -> str:
        """Name of its element type."""
        return _BY_CODE[self.dtype_code].name

    def at(self, address: int, *, owner: object, read_only: bool = False) -> Buffer:
        """Return a buffer of this shape and dtype over other memory of the same device."""
        return Buffer.at_address(
            address,
            self.shape,
            self.dtype,
            kind=self.kind,
            number=self.number,
            read_only=read_only,
            owner=owner,
        )

    def numpy(self) -> NDArray[Any]:
        """Return host memory as a NumPy array, without a copy.

        Raises:
            LaunchError: if the memory is a device's; `Device.to_numpy` copies that.
        """
        if self.kind != _CPU:
            raise LaunchError(
                f"{self!r} is not host memory; copy it with open_device({self.device!r})"
                ".to_numpy(buffer)"
            )
        return _host_bytes(self).view(DTYPES[self.dtype].numpy).reshape(self.shape)

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a DLPack capsule; see the array API standard."""
        if copy:
            raise BufferError("a Buffer is exchanged without a copy; copy the result")
        if self.kind not in (_CPU, _CUDA):
            raise BufferError(f"{self!r} has an address and no contents")
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"{self!r} stays where it is; copy it with Device.copy")
        if self.is_read_only:
            raise BufferError("this memory is read-only, which DLPack cannot say; copy it first")
        dtype = DTYPES[self.dtype]
        return self._dlpack(_dlpack_code(dtype), 8 * dtype.size_bytes)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number of the device's kind, and the device's own."""
        return self.kind, self.number

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """CUDA's array interface; AttributeError for host memory."""
        if self.kind != _CUDA:
            raise AttributeError("this memory is not a CUDA device's")
        return {
            "data": (self.address, self.is_read_only),
            "shape": self.shape,
            "strides": None,
            "typestr": DTYPES[self.dtype].numpy.str,
            "version": 3,
        }

    def __repr__(self) -> str:
        return f"<Buffer {self.dtype}{list(self.shape)} on {self.device}>"


def as_buffer(value: Any) -> Buffer:
    """Return an array's memory as a buffer, without a copy.

    Args:
        value: A Buffer, a NumPy array (bf16 and fp8 are those of ml_dtypes), a torch tensor, an
            object with ``__cuda_array_interface__`` or ``__dlpack__``, or one with the buffer
            protocol, such as a bytearray or an ``array.array``.

    Raises:
        LaunchError: if it is no array, not contiguous, or of another dtype than kernels take.
    """
    if isinstance(value, Buffer):
        return value
    try:
        if isinstance(value, np.ndarray):
            return _from_numpy(value)
        torch = sys.modules.get("torch")
        if isinstance(value, getattr(torch, "Tensor", ())):
            return _from_torch(value)
        if hasattr(value, "__cuda_array_interface__"):
            return _from_cuda_interface(value)
        if hasattr(value, "__dlpack__"):
            return _from_dlpack(value)
        if _is_memory(value):
            return _from_numpy(np.asarray(memoryview(value)))
    except LaunchError:
        raise
    except BricklineError as error:
        raise LaunchError(str(error)) from error
    except (BufferError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise LaunchError(f"cannot use this {type(value).__name__}: {error}") from error
    raise LaunchError(
        f"expected a Buffer or an array of NumPy, torch or CuPy, got {type(value).__name__}"
    )


def _is_memory(value: Any) -> bool:
    try:
        memoryview(value).release()
    except TypeError:
        return False
    return True


def _from_numpy(array: NDArray[Any]) -> Buffer:
    code = _code_of(array.dtype)
    if not array.flags.c_contiguous:
        _refuse_strides(array.strides, "np.ascontiguousarray(array)")
    address, read_only = array.__array_interface__["data"]
    return Buffer(address, array.nbytes, code, array.shape, _CPU, 0, read_only, array)


def _from_torch(tensor: Any) -> Buffer:
    # On the way of every launch that is given tensors, so it asks torch as little as it can.
    code = _code_of(tensor.dtype)
    if not tensor.is_contiguous():
        _refuse_strides(tensor.stride(), "tensor.contiguous()")
    if tensor.is_neg():
        raise LaunchError("expected values as memory holds them; pass tensor.resolve_neg()")
    number, kind = 0, _CPU
    if tensor.is_cuda:
        number, kind = tensor.get_device(), _CUDA
    elif not tensor.is_cpu:
        raise LaunchError(f"expected a tensor on cpu or cuda, got {tensor.device}")
    nbytes, shape = tensor.nbytes, tuple(tensor.shape)
    return Buffer(tensor.data_ptr(), nbytes, code, shape, kind, number, False, tensor)


def _from_cuda_interface(array: Any) -> Buffer:
    facts = array.__cuda_array_interface__
    itemsize = np.dtype(facts["typestr"]).itemsize
    if not _is_dense(facts["shape"], facts.get("strides"), itemsize):
        _refuse_strides(facts["strides"], "cupy.ascontiguousarray(array)")
    device = getattr(getattr(array, "device", None), "id", 0)
    address, read_only = facts["data"]
    return Buffer.at_address(
        address,
        facts["shape"],
        dtype_of(getattr(array, "dtype", np.dtype(facts["typestr"]))),
        kind=_CUDA,
        number=int(device),
        read_only=read_only,
        owner=array,
    )


def _from_dlpack(array: Any) -> Buffer:
    try:
        capsule = array.__dlpack__(max_version=(1, 0))  # which says what is read-only
    except TypeError:
        capsule = array.__dlpack__()
    facts = _core.dlpack_facts(capsule)
    address, shape, strides, code, bits, lanes, kind, number, read_only = facts
    dtype = _BY_DLPACK.get((code, bits)) if lanes == 1 else None
    if dtype is None:
        raise LaunchError(f"no dtype of ours is DLPack's ({code}, {bits} bits, {lanes} lanes)")
    if kind not in (_CPU, _CUDA):
        raise LaunchError(f"expected memory of a CPU or of CUDA, got DLPack's device type {kind}")
    if strides is not None and not _is_dense(shape, strides, 1):
        _refuse_strides(strides, "a contiguous copy")
    return Buffer.at_address(
        address,
        shape,
        dtype,
        kind=kind,
        number=number if kind == _CUDA else 0,
        read_only=read_only,
        owner=capsule,
    )


def _is_dense(shape: Sequence[int], strides: Sequence[int] | None, step: int) -> bool:
    """Whether elements follow each other; the stride of an axis that has one of them is any."""
    if strides is None or 0 in shape:
        return True
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _refuse_strides(strides: Sequence[int], remedy: str) -> None:
    raise LaunchError(f"expected contiguous memory, got strides {tuple(strides)}; pass {remedy}")


def aligned_memory(shape: Sequence[int], dtype: str) -> Buffer:
    """Return fresh host memory, aligned to `ALIGNMENT` bytes."""
    nbytes = max(0, math.prod(_integers("shape", shape))) * dtype_of(dtype).size_bytes
    try:
        memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    except (MemoryError, OverflowError, ValueError) as error:
        raise UsageError(f"cannot allocate {nbytes} bytes of host memory: {error}") from error
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    address = memory.__array_interface__["data"][0] + start
    return Buffer.at_address(address, shape, dtype, owner=memory)


def check_copy(target: Buffer, source: Buffer) -> None:
    """Refuse a copy between buffers of other sizes, or into memory that is read-only.

    Raises:
        LaunchError: if the two do not fit.
    """
    if target.nbytes != source.nbytes:
        raise LaunchError(
            f"a copy needs equal sizes: target has {target.nbytes} bytes, source {source.nbytes}"
        )
    if target.is_read_only:
        raise LaunchError("the target of a copy is read-only; pass a writable array")


def copy_host(target: Buffer, source: Buffer) -> None:
    """Copy between two buffers of host memory."""
    check_copy(target, source)
    for buffer in (target, source):
        if buffer.kind != _CPU:
            raise LaunchError(f"{buffer!r} is not host memory; copy with its own device")
    _host_bytes(target)[:] = _host_bytes(source)


def _host_bytes(buffer: Buffer) -> NDArray[np.uint8]:
    if not buffer.nbytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview(buffer), np.uint8)
