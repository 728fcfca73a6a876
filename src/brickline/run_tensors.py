"""The tensors of a run: files named by what they hold, written once, whole or not at all.

A name is made of the fingerprint's hash, dtype and shape, so whoever has the fingerprint of an
operand finds its tensor, and equal tensors share a file. What is read is held against its name.
Knows NumPy arrays (bf16 and fp8 are those of ml_dtypes) and torch tensors, not who recorded them.

::

    RUN/tensors/6f0c…2a-bf16-4x128         hash in 32 hexadecimal digits, dtype, shape
    | "BRICKTNS" | version u32 | header bytes u32 | JSON and spaces | elements, row by row |
    0            8             12                 16                header bytes

The JSON is ``{"dtype": "bf16", "shape": [4, 128], "bytes": 1024}``; elements are little-endian and
start at a multiple of 64.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brickline.dtypes import DTYPES, DType, dtype_of
from brickline.errors import RunDamaged, RunError, RunVersion, UsageError
from brickline.fingerprints import Fingerprint
from brickline.fingerprints import fingerprint as fingerprint_of
from brickline.run_directory import disk_errors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

MAGIC = b"BRICKTNS"
VERSION = 1
DIRECTORY = "tensors"

_HEAD = struct.Struct("<8s2I")
_ALIGNMENT = 64
_LARGEST_HEADER = 1 << 16
_NAME = re.compile(r"([0-9a-f]{32})-([a-z0-9]+)-(scalar|\d+(?:x\d+)*)")
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def tensor_name(content_hash: int, dtype: str, shape: Sequence[int]) -> str:
    """Return the name of the file that holds a tensor."""
    return f"{content_hash:032x}-{dtype_of(dtype)}-{'x'.join(map(str, shape)) or 'scalar'}"


def save_tensor(
    run: str | os.PathLike[str], fingerprint: Fingerprint | bytes | None, tensor: Any
) -> Path:
    """Keep a tensor in a run, unless it is there already, and return its file.

    Args:
        run: The run's directory.
        fingerprint: Its fingerprint, or the record of it; None: it is taken here.
        tensor: A NumPy array, a torch tensor on any device, or what speaks DLPack.

    Raises:
        UsageError: if its dtype is none of brickline's, or the fingerprint is another tensor's.
        RunError: if the disk refuses; nothing is left behind.
    """
    array = host_array(tensor)
    known = fingerprint_of(array) if fingerprint is None else _named(fingerprint)
    dtype = dtype_of(array.dtype)
    if (dtype_of(known.dtype), tuple(known.shape)) != (dtype, array.shape):
        raise UsageError(
            f"expected the fingerprint of this tensor, {dtype}{list(array.shape)}, got one of "
            f"{known.dtype}{list(known.shape)}"
        )
    directory = Path(run) / DIRECTORY
    file = directory / tensor_name(known.hash, dtype.name, array.shape)
    header = _header(dtype, array)
    if _has_size(file, len(header) + array.nbytes):
        return file
    with disk_errors(Path(run), array.nbytes):
        directory.mkdir(mode=0o700, exist_ok=True)
        _write(file, header, array)
    return file


def load_tensor(run: str | os.PathLike[str], fingerprint: Fingerprint | bytes | str) -> Array:
    """Return a tensor of a run, by its fingerprint or the name of its file.

    Raises:
        RunError: if the run does not hold it, or it cannot be read.
        RunDamaged: if it is cut off, or holds something else than its name says.
        RunVersion: if a newer brickline wrote it.
    """
    if not isinstance(fingerprint, str):
        fingerprint = _name_of(fingerprint)
    if _NAME.fullmatch(fingerprint) is None:
        raise UsageError(f"expected a name HASH-DTYPE-SHAPE, got {fingerprint!r:.80}")
    file = Path(run) / DIRECTORY / fingerprint
    try:
        array = _read(file)
    except FileNotFoundError:
        raise RunError(
            f"the run holds no tensor {fingerprint}; record it with tensors='all' - at {run}"
        ) from None
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror}; check its permissions") from error
    found = tensor_name(fingerprint_of(array).hash, dtype_of(array.dtype).name, array.shape)
    if found != fingerprint:
        raise RunDamaged(f"expected what its name says, found {found} - at {file}")
    return array


def has_tensor(run: str | os.PathLike[str], fingerprint: Fingerprint | bytes) -> bool:
    """Whether a run holds a tensor, by its fingerprint."""
    return (Path(run) / DIRECTORY / _name_of(fingerprint)).is_file()


def tensor_names(run: str | os.PathLike[str]) -> list[str]:
    """Return the names of all tensors that a run holds."""
    try:
        return sorted(filter(_NAME.fullmatch, os.listdir(Path(run) / DIRECTORY)))
    except OSError:
        return []


def _named(fingerprint: Fingerprint | bytes) -> Fingerprint:
    return Fingerprint.from_bytes(fingerprint) if isinstance(fingerprint, bytes) else fingerprint


def _name_of(fingerprint: Fingerprint | bytes) -> str:
    known = _named(fingerprint)
    return tensor_name(known.hash, known.dtype, known.shape)


def host_array(tensor: Any) -> Array:
    """Return a tensor's elements as an array in host memory, row by row; copied if need be.

    Raises:
        UsageError: if it is no dense tensor of a dtype of brickline's.
    """
    try:
        torch = sys.modules.get("torch")
        if isinstance(tensor, getattr(torch, "Tensor", ())):
            return _from_torch(tensor)
        if isinstance(tensor, np.generic):
            tensor = np.asarray(tensor)
        if not isinstance(tensor, np.ndarray):
            is_buffer = hasattr(tensor, "__dlpack__") and hasattr(tensor, "numpy")
            tensor = tensor.numpy() if is_buffer else np.from_dlpack(tensor)
        dtype_of(tensor.dtype)
        array: Array = tensor if tensor.flags.c_contiguous else tensor.copy(order="C")
        return array
    except (AttributeError, TypeError, ValueError, RuntimeError, BufferError) as error:
        raise UsageError(
            f"expected a dense tensor of torch, NumPy or DLPack, got {type(tensor).__name__}: "
            f"{error}"
        ) from error


def _from_torch(tensor: Any) -> Array:
    torch = sys.modules["torch"]
    dtype = dtype_of(tensor.dtype)
    if tensor.layout != torch.strided or tensor.is_meta:
        raise UsageError(
            f"expected a dense tensor with contents, got {tensor.layout} on {tensor.device}"
        )
    plain = tensor.detach().resolve_neg().cpu().contiguous()
    # NumPy knows neither bf16 nor fp8, so these cross as their bits.
    bits: Array = plain.reshape(-1).view(torch.uint8).numpy()
    return bits.view(dtype.numpy).reshape(tuple(tensor.shape))


def _header(dtype: DType, array: Array) -> bytes:
    about = {"dtype": dtype.name, "shape": list(array.shape), "bytes": array.nbytes}
    text = json.dumps(about).encode()
    length = -(-(_HEAD.size + len(text)) // _ALIGNMENT) * _ALIGNMENT
    return _HEAD.pack(MAGIC, VERSION, length) + text.ljust(length - _HEAD.size)


def _has_size(file: Path, size: int) -> bool:
    """Whether it is there as it should be; one that a power cut has shortened is written anew."""
    with suppress(OSError):
        return file.stat().st_size == size
    return False


def _write(file: Path, header: bytes, array: Array) -> None:
    staged = file.with_name(f".{os.getpid()}-{os.urandom(4).hex()}.tmp")
    descriptor = os.open(staged, _CREATE, 0o600)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as out:
            for rest in (memoryview(header), array.reshape(-1).view(np.uint8).data):
                while rest:
                    rest = rest[out.write(rest) :]
        os.replace(staged, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(staged)
        raise


def _read(file: Path) -> Array:
    with open(file, "rb") as source:
        size = os.fstat(source.fileno()).st_size
        head = source.read(_HEAD.size)
        if len(head) < _HEAD.size or head[: len(MAGIC)] != MAGIC:
            raise RunDamaged(f"expected a tensor, found something else - at {file}")
        _, version, length = _HEAD.unpack(head)
        if version > VERSION:
            raise RunVersion(
                f"expected version {VERSION} or older, found {version} - at {file}; "
                "upgrade with `pip install --upgrade brickline`"
            )
        if not _HEAD.size <= length <= min(size, _LARGEST_HEADER):
            raise RunDamaged(f"expected a header within {size} bytes, found {length} - at {file}")
        dtype, shape = _checked_header(source.read(length - _HEAD.size), size - length, file)
        array = np.fromfile(source, np.uint8, size - length)
    if array.nbytes != size - length:
        raise RunDamaged(f"expected {size - length} bytes, found {array.nbytes} - at {file}")
    return array.view(dtype.numpy).reshape(shape)


def _checked_header(text: bytes, room: int, file: Path) -> tuple[DType, tuple[int, ...]]:
    try:
        about = json.loads(text)
        dtype, shape = DTYPES[about["dtype"]], tuple(about["shape"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunDamaged(f"expected dtype and shape in the header: {error!r} - at {file}") from None
    if any(type(length) is not int or length < 0 for length in shape):
        raise RunDamaged(f"expected sizes from 0 on, found {list(shape)!r:.80} - at {file}")
    expected = math.prod(shape) * dtype.size_bytes
    if about.get("bytes") != expected or room != expected:
        raise RunDamaged(
            f"expected {expected} bytes for {dtype}{list(shape)}, found {room} - at {file}"
        )
    return dtype, shape
