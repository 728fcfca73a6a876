"""Fingerprint: a record of about a KiB of one tensor, from which others can be told apart later.

`fingerprint` takes it, on the device where the tensor lies, whatever its strides; `distance` says
how far two tensors are apart, from their fingerprints alone. The definition is that of
``include/brickline/fingerprint.h``. Knows neither runs nor profilers.
"""

from __future__ import annotations

import sys
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brickline import _core, abi
from brickline.buffers import Buffer
from brickline.dtypes import DTYPES, dtype_of
from brickline.errors import RunDamaged, RunVersion, UsageError
from brickline.estimates import Distance, Estimate, distance, distances

__all__ = [
    "Distance",
    "Estimate",
    "Fingerprint",
    "TensorView",
    "distance",
    "distances",
    "fingerprint",
    "fingerprint_bytes",
    "view_of",
]

RECORD_BYTES = 1016
"""Size of a record."""
_CPU, _CUDA = 1, 2
_NAMES = {dtype.code: dtype.name for dtype in DTYPES.values()}
BY_DLPACK = {
    (code, 8 * dtype.size_bytes): dtype.code
    for dtype in DTYPES.values()
    for code, kind in ((0, "int"), (1, "uint"), (2, "float"), (6, "bool"))
    if dtype.kind == kind and dtype.name not in ("bf16", "f8e4m3", "f8e5m2")
}
BY_DLPACK |= {(4, 16): DTYPES["bf16"].code, (10, 8): DTYPES["f8e4m3"].code}
BY_DLPACK |= {(12, 8): DTYPES["f8e5m2"].code}


class TensorView(NamedTuple):
    """A tensor as memory holds it."""

    address: int
    dtype: int
    """Code of its dtype."""
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In elements; None: contiguous."""
    kind: int
    """1 CPU, 2 CUDA."""
    number: int
    """Number of the device."""
    owner: object
    """What keeps the memory."""


class Fingerprint:
    """What is known of a tensor: its hash, its sketch and its statistics.

    Two are equal where dtype, shape and hash are: the tensors hold the same bits.
    """

    def __init__(self, record: bytes) -> None:
        if not isinstance(record, bytes | bytearray | memoryview):
            raise UsageError(f"expected a fingerprint's record as bytes, got {record!r:.80}")
        if len(record) != RECORD_BYTES:
            raise RunDamaged(
                f"expected a fingerprint of {RECORD_BYTES} bytes, got {len(record)}; the record is "
                "cut, or none of a fingerprint"
            )
        self._bytes = bytes(record)
        version, code = int(self._row["version"]), int(self._row["dtype"])
        if version > abi.FINGERPRINT_VERSION:
            raise RunVersion(
                f"expected a fingerprint of version {abi.FINGERPRINT_VERSION} or older, got "
                f"{version}; update brickline"
            )
        if code not in _NAMES or self._row["dimensions"] > abi.FINGERPRINT_DIMENSIONS:
            raise RunDamaged(f"a fingerprint names a dtype {code} that there is not")

    @classmethod
    def from_bytes(cls, record: bytes) -> Fingerprint:
        """Return the fingerprint of a record.

        Raises:
            RunDamaged: The bytes are none of a fingerprint.
            RunVersion: They are of a newer version.
        """
        return cls(record)

    def to_bytes(self) -> bytes:
        """Return the record."""
        return self._bytes

    @cached_property
    def record(self) -> NDArray[Any]:
        """The record as an array of one row, of dtype `abi.FINGERPRINT`."""
        return np.frombuffer(self._bytes, abi.FINGERPRINT)

    @property
    def _row(self) -> Any:
        return self.record[0]

    @property
    def dtype(self) -> str:
        """Name of the tensor's element type."""
        return _NAMES[int(self._row["dtype"])]

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(int(size) for size in self._row["shape"][: int(self._row["dimensions"])])

    @property
    def elements(self) -> int:
        """How many elements the tensor has."""
        return int(self._row["elements"])

    @property
    def hash(self) -> int:
        """128 bits of all elements at their logical positions."""
        low, high = self._row["hash"]
        return int(low) | int(high) << 64

    @property
    def sketch(self) -> NDArray[np.float64]:
        """64 signed sums of finite values: the linear sketch."""
        sketch: NDArray[np.float64] = self._row["sketch"]
        return sketch

    @property
    def rows(self) -> NDArray[np.float32]:
        """Sums of finite values over 32 stripes of rows; rows are all dimensions but the last."""
        rows: NDArray[np.float32] = self._row["rows"]
        return rows

    @property
    def columns(self) -> NDArray[np.float32]:
        """Sums of finite values over 32 stripes of columns, the last dimension."""
        columns: NDArray[np.float32] = self._row["columns"]
        return columns

    @property
    def stripe_height(self) -> int:
        """How many rows one of `rows` sums up."""
        rows = self.elements // self._columns
        return max(1, -(-rows // abi.STRIPES))

    @property
    def stripe_width(self) -> int:
        """How many columns one of `columns` sums up."""
        return 4 * -(-self._columns // (4 * abi.STRIPES))

    @property
    def _columns(self) -> int:
        return max(1, self.shape[-1]) if self.shape else 1

    @property
    def l1(self) -> float:
        """Sum of the magnitudes of finite values."""
        return float(self._row["l1"])

    @property
    def l2(self) -> float:
        """Root of the sum of the squares of finite values."""
        return float(self._row["l2"])

    @property
    def total(self) -> float:
        """Sum of finite values."""
        return float(self._row["total"])

    @property
    def absmax(self) -> float:
        """Largest magnitude of a finite value."""
        return float(self._row["absmax"])

    @property
    def minimum(self) -> float:
        """Smallest finite value; 0 where there is none."""
        return float(self._row["minimum"])

    @property
    def maximum(self) -> float:
        """Largest finite value; 0 where there is none."""
        return float(self._row["maximum"])

    @property
    def nan_count(self) -> int:
        """How many elements are NaN."""
        return int(self._row["nan_count"])

    @property
    def inf_count(self) -> int:
        """How many elements are infinite."""
        return int(self._row["inf_count"])

    @property
    def first_nan(self) -> int | None:
        """Logical index of the first NaN; None: there is none."""
        found = int(self._row["first_nan"])
        return None if found < 0 else found

    @property
    def first_inf(self) -> int | None:
        """Logical index of the first infinite value; None: there is none."""
        found = int(self._row["first_inf"])
        return None if found < 0 else found

    @property
    def nonfinite_hash(self) -> int:
        """64 bits of where NaN, Inf and -Inf stand; 0 where there are none."""
        return int(self._row["nonfinite_hash"])

    @property
    def zeros(self) -> int:
        """How many elements are zero."""
        return int(self._row["zeros"])

    @property
    def subnormals(self) -> int:
        """How many elements are subnormal in the tensor's own dtype."""
        return int(self._row["subnormals"])

    @property
    def saturated(self) -> int:
        """How many elements are the largest or the smallest value that the dtype holds."""
        return int(self._row["saturated"])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return (self.dtype, self.shape, self.hash) == (other.dtype, other.shape, other.hash)

    def __hash__(self) -> int:
        return hash((self.dtype, self.shape, self.hash))

    def __reduce__(self) -> tuple[type[Fingerprint], tuple[bytes]]:
        return type(self), (self._bytes,)

    def __repr__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        return f"<Fingerprint {self.dtype}[{shape}] {self.hash:032x} l2={self.l2:.6g}>"


def fingerprint(tensor: Any) -> Fingerprint:
    """Return the fingerprint of a tensor, wherever it lies and whatever its strides.

    Args:
        tensor: A torch tensor on CPU or CUDA, a NumPy array (bf16 and fp8 are those of ml_dtypes),
            a Buffer, or anything with ``__dlpack__``. A CUDA tensor is read on its device, on the
            current stream, and waited for.

    Raises:
        UsageError: It is no dense array of a known dtype; the message says what to do.
    """
    return Fingerprint(fingerprint_bytes(tensor))


def fingerprint_bytes(tensor: Any) -> bytes:
    """Return the record of a tensor's fingerprint; what `Fingerprint.from_bytes` takes.

    Args:
        tensor: As `fingerprint`.

    Raises:
        UsageError: It is no dense array of a known dtype; the message says what to do.
    """
    view = view_of(tensor)
    if view.kind == _CPU:
        return _core.fingerprint(view.address, view.dtype, view.shape, view.strides)
    from brickline.fingerprint_cuda import fingerprint_on_cuda

    return fingerprint_on_cuda(view)


def view_of(tensor: Any) -> TensorView:
    """Return where the elements of a tensor lie, without a copy wherever that can be.

    Raises:
        UsageError: It is no dense array of a known dtype; the message says what to do.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _view_of_torch(torch, tensor)
    if isinstance(tensor, np.ndarray | np.generic):
        return _view_of_numpy(np.asarray(tensor))
    if isinstance(tensor, Buffer):
        return _view_of_buffer(tensor)
    if hasattr(tensor, "__dlpack__"):
        return _view_of_dlpack(tensor)
    raise UsageError(
        f"expected a tensor of torch or NumPy, or an object with __dlpack__, got "
        f"{type(tensor).__name__}; convert it with numpy.asarray"
    )


_codes: dict[Any, int] = {}


def _code_of(dtype: Any) -> int:
    code = _codes.get(dtype)
    if code is None:
        try:
            code = dtype_of(dtype).code
        except UsageError:
            raise UsageError(
                f"expected elements of one of {', '.join(DTYPES)}, got {dtype}; {_remedy(dtype)}"
            ) from None
        _codes[dtype] = code
    return code


def _remedy(dtype: Any) -> str:
    name = str(dtype)
    if "complex" in name:
        return "take the fingerprint of its real view, torch.view_as_real(x) or x.view(np.float64)"
    if "qint" in name or "quint" in name:
        return "take that of its integers, x.int_repr(), or of its values, x.dequantize()"
    if name == "object":
        return "make it an array of numbers with astype"
    if name[:1] in "<>=" and name[1:2] in "iuf":
        return "make it native with x.astype(x.dtype.newbyteorder('='))"
    return "convert it first"


def _view_of_torch(torch: Any, tensor: Any) -> TensorView:
    # On the way of every tensor that is recorded, so it asks torch as little as it can.
    dtype = _codes.get(tensor.dtype)
    if dtype is None or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        _refuse_torch(torch, tensor)
        dtype = _code_of(tensor.dtype)
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    number, kind = 0, _CPU
    if tensor.is_cuda:
        number, kind = tensor.get_device(), _CUDA
    elif not tensor.is_cpu:
        _refuse_torch(torch, tensor)
        raise UsageError(
            f"expected a tensor on cpu or cuda, got one on {tensor.device}; pass tensor.cpu()"
        )
    try:
        address = tensor.data_ptr()
    except RuntimeError as error:
        raise UsageError(
            f"this {type(tensor).__name__} has no memory of its own ({error}); pass the plain "
            "tensor that it wraps"
        ) from error
    shape = tensor.shape
    if not address and tensor.numel():
        _refuse_shape_alone(tensor)
    strides = None if tensor.is_contiguous() else tensor.stride()
    return TensorView(address, dtype, shape, strides, kind, number, tensor)


def _refuse_shape_alone(tensor: Any) -> None:
    raise UsageError(
        f"this {type(tensor).__name__} has a shape and no elements; run the model on real tensors"
    )


def _refuse_torch(torch: Any, tensor: Any) -> None:
    fake = sys.modules.get("torch._subclasses.fake_tensor")
    if fake is not None and isinstance(tensor, fake.FakeTensor):
        _refuse_shape_alone(tensor)
    if tensor.is_meta:
        raise UsageError(
            "expected a tensor with elements, got one on meta, which has a shape alone; "
            "materialise it, for example with module.to_empty(device='cpu')"
        )
    if tensor.is_quantized:
        _code_of(tensor.dtype)
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"expected a dense tensor, got layout {tensor.layout}; pass tensor.to_dense(), or the "
            "tensors of its values and indices"
        )


def _view_of_numpy(array: NDArray[Any]) -> TensorView:
    dtype = _code_of(array.dtype)
    size = array.itemsize
    strides: tuple[int, ...] | None = None
    if not array.flags.aligned or any(stride % size for stride in array.strides):
        array = np.ascontiguousarray(array)
    elif not array.flags.c_contiguous:
        strides = tuple(stride // size for stride in array.strides)
    address = array.__array_interface__["data"][0]
    return TensorView(address, dtype, array.shape, strides, _CPU, 0, array)


def _view_of_buffer(buffer: Buffer) -> TensorView:
    if buffer.kind not in (_CPU, _CUDA):
        raise UsageError(f"{buffer!r} has an address and no contents; use a device that computes")
    return TensorView(
        buffer.address, buffer.dtype_code, buffer.shape, None, buffer.kind, buffer.number, buffer
    )


def _view_of_dlpack(array: Any) -> TensorView:
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except TypeError:
        capsule = array.__dlpack__()
    except (BufferError, RuntimeError, ValueError) as error:
        raise UsageError(f"cannot use this {type(array).__name__}: {error}") from error
    facts = _core.dlpack_facts(capsule)
    address, shape, strides, code, bits, lanes, kind, number, _ = facts
    dtype = BY_DLPACK.get((code, bits)) if lanes == 1 else None
    if dtype is None:
        raise UsageError(
            f"expected elements of one of {', '.join(DTYPES)}, got DLPack's type ({code}, {bits} "
            f"bits, {lanes} lanes); convert the array first"
        )
    if kind not in (_CPU, _CUDA):
        raise UsageError(f"expected memory of a CPU or of CUDA, got DLPack's device type {kind}")
    return TensorView(address, dtype, shape, strides, kind, number, (array, capsule))
