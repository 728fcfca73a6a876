"""Checksums: what the seed takes of a tensor, and what it says of two that differ.

Bit-compatible, and blind from the 65th value on. Knows NumPy arrays, torch tensors and DLPack, but
neither launches nor runs; `fingerprints` sees all of a tensor.
"""

from __future__ import annotations

import itertools
import math
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from brickline import _core
from brickline.errors import UsageError

CHECKSUM_FLOATS = 64
"""How many floats `fnv1a_f32` looks at; the seed's number."""


def layer_words(layer: int | None) -> str:
    """Return where a launch stands, in words."""
    return "outside layers" if layer is None else f"layer {layer}"


class KernelChecksum(NamedTuple):
    """The checksum of what one launch put out."""

    name: str
    layer_idx: int | None
    position: int
    checksum: int


@dataclass(frozen=True)
class DivergenceInfo:
    """The first launch whose checksum is not that of the reference."""

    kernel_name: str
    layer_idx: int | None
    position: int
    expected_checksum: int
    actual_checksum: int

    def __str__(self) -> str:
        return (
            f'DIVERGENCE in "{self.kernel_name}" '
            f"({layer_words(self.layer_idx)}, pos {self.position}): "
            f"expected 0x{self.expected_checksum:016X}, got 0x{self.actual_checksum:016X}"
        )


def fnv1a_f32(data: Any) -> int:
    """Return the seed's checksum: FNV-1a, 64 bits, of the first 64 values as little-endian f32.

    Neither length nor shape nor dtype takes part, and a difference from the 65th value on is not
    seen; `fingerprint` sees all of a tensor.

    Args:
        data: Numbers in order: a sequence, a NumPy array, a torch tensor on any device, or what
            speaks DLPack. Several dimensions are read row by row; other dtypes become f32.

    Raises:
        UsageError: if it holds anything but real numbers.

    Example:
        >>> hex(fnv1a_f32([1.0, 2.0, 3.0, 4.0]))
        '0x8faa0a18faf0fb98'
    """
    return _core.fnv1a_64(f32_bytes(data))


def fnv1a_f32_of_all(tensors: Iterable[Any]) -> int:
    """Return one checksum of several tensors: over the first 64 values of each, one by one.

    Of a single tensor it is `fnv1a_f32`.
    """
    return _core.fnv1a_64(b"".join(map(f32_bytes, tensors)))


def f32_bytes(data: Any) -> bytes:
    """Return the first 64 values as little-endian f32.

    Raises:
        UsageError: if it holds anything but real numbers.
    """
    if isinstance(data, str | bytes | Mapping) or data is None:
        raise UsageError(f"data: expected numbers, got {data!r:.60}")
    try:
        if isinstance(data, list | tuple) and not (data and isinstance(data[0], list | tuple)):
            return array("f", data[:CHECKSUM_FLOATS]).tobytes()
        if isinstance(data, getattr(sys.modules.get("torch"), "Tensor", ())):
            return _first_of_tensor(data)
        return _first_of_array(_as_array(data))
    except (TypeError, ValueError, OverflowError, RuntimeError, BufferError) as error:
        raise UsageError(
            f"data: expected real numbers, got {type(data).__name__} ({error}); "
            "give a list, a NumPy array, a dense torch tensor or what speaks DLPack"
        ) from None


def _as_array(data: Any) -> Any:
    import numpy as np

    if isinstance(data, np.ndarray):
        return data
    if hasattr(data, "first_values"):  # memory of a device, of which no more is copied
        return data.first_values(CHECKSUM_FLOATS)
    if hasattr(data, "__array__") or isinstance(data, Sequence):
        return np.asarray(data)
    if hasattr(data, "__dlpack__"):
        # A Buffer gives dtypes that NumPy's DLPack does not know.
        return data.numpy() if hasattr(data, "numpy") else np.from_dlpack(data)
    if isinstance(data, Iterable):
        return np.asarray(list(itertools.islice(data, CHECKSUM_FLOATS)))
    raise TypeError("no numbers")


def _first_of_array(data: Any) -> bytes:
    import numpy as np

    values = _first_rows(data).reshape(-1)[:CHECKSUM_FLOATS]
    if values.dtype != np.float32:
        # ml_dtypes are of kind V
        if values.dtype.kind not in "fiubV" or values.dtype.names or values.dtype.hasobject:
            raise TypeError(f"dtype {values.dtype}")
        with np.errstate(over="ignore", invalid="ignore"):
            values = values.astype(np.float32)
    found: bytes = values.astype("<f4", copy=False).tobytes()
    return found


def _first_of_tensor(tensor: Any) -> bytes:
    torch = sys.modules["torch"]
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
        raise TypeError(f"{tensor.layout} on {tensor.device}, {tensor.dtype}")
    if tensor.is_quantized:
        raise TypeError(f"quantised {tensor.dtype}")
    first = _first_rows(tensor.detach()).reshape(-1)[:CHECKSUM_FLOATS]
    found: bytes = first.to(torch.float32).cpu().numpy().tobytes()
    return found


def _first_rows(data: Any) -> Any:
    """Return a view with at least the first 64 values, so that a stride costs no large copy."""
    while data.ndim > 1:
        rest = math.prod(data.shape[1:])
        if rest == 0:
            return data
        data = data[: -(-CHECKSUM_FLOATS // rest)]
        if data.shape[0] != 1:
            return data
        data = data[0]
    return data
