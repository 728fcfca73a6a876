"""DType: the element types of kernels and buffers, and how each is spelt everywhere else.

One table for Python, C, CUDA and the records on disk. ml_dtypes is imported when the NumPy type of
a bf16 or fp8 is first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np

from brickline.errors import UsageError

Kind: TypeAlias = Literal["float", "int", "uint", "bool"]


@dataclass(frozen=True)
class DType:
    """An element type."""

    name: str
    """Its name here: ``"bf16"``."""
    code: int
    """Its number in records; never reused, and 0 is no dtype."""
    size_bytes: int
    kind: Kind
    numpy_name: str
    """Its name in NumPy, ml_dtypes and torch."""
    block_type: str
    """Its type in a source against ``brickline/kernel.h``."""
    c_type: str
    """Its type in plain C; 16- and 8-bit floats are passed as their bits."""
    cuda_type: str
    """Its type in CUDA C++ without standard headers."""

    @cached_property
    def numpy(self) -> np.dtype[Any]:
        """Its NumPy dtype; bf16 and fp8 are those of ml_dtypes."""
        try:
            return np.dtype(self.numpy_name)
        except TypeError:
            import ml_dtypes

            found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, self.numpy_name))
            return found

    def __str__(self) -> str:
        return self.name


# fmt: off
_TABLE = (
    DType("f64",    1,  8, "float", "float64",       "double",   "double",   "double"),
    DType("f32",    2,  4, "float", "float32",       "float",    "float",    "float"),
    DType("f16",    3,  2, "float", "float16",       "f16",      "uint16_t", "__half"),
    DType("bf16",   4,  2, "float", "bfloat16",      "bf16",     "uint16_t", "__nv_bfloat16"),
    DType("f8e4m3", 5,  1, "float", "float8_e4m3fn", "f8e4m3",   "uint8_t",  "__nv_fp8_e4m3"),
    DType("f8e5m2", 6,  1, "float", "float8_e5m2",   "f8e5m2",   "uint8_t",  "__nv_fp8_e5m2"),
    DType("i64",    7,  8, "int",   "int64",         "int64_t",  "int64_t",  "long long"),
    DType("i32",    8,  4, "int",   "int32",         "int32_t",  "int32_t",  "int"),
    DType("i16",    9,  2, "int",   "int16",         "int16_t",  "int16_t",  "short"),
    DType("i8",     10, 1, "int",   "int8",          "int8_t",   "int8_t",   "signed char"),
    DType("u64",    11, 8, "uint",  "uint64",        "uint64_t", "uint64_t", "unsigned long long"),
    DType("u32",    12, 4, "uint",  "uint32",        "uint32_t", "uint32_t", "unsigned int"),
    DType("u16",    13, 2, "uint",  "uint16",        "uint16_t", "uint16_t", "unsigned short"),
    DType("u8",     14, 1, "uint",  "uint8",         "uint8_t",  "uint8_t",  "unsigned char"),
    DType("bool",   15, 1, "bool",  "bool",          "bool",     "_Bool",    "bool"),
)
# fmt: on

DTYPES = MappingProxyType({dtype.name: dtype for dtype in _TABLE})
"""Every dtype by its name here."""

_BY_ANY_NAME = {dtype.numpy_name: dtype for dtype in _TABLE} | DTYPES


def dtype_of(value: object) -> DType:
    """Return the dtype that a name or another library's dtype stands for.

    Args:
        value: A `DType`, a name here or in NumPy or torch (``"f32"``, ``"float32"``,
            ``"torch.float32"``), a NumPy dtype or scalar type, or a torch dtype.

    Raises:
        UsageError: It stands for none of `DTYPES`.
    """
    found = value if isinstance(value, DType) else _BY_ANY_NAME.get(_name(value))
    if found is None:
        raise UsageError(
            f"expected a dtype ({', '.join(DTYPES)}), got {value!r:.80}; name one of these, or "
            "convert the array with astype"
        )
    return found


def _name(value: object) -> str:
    if isinstance(value, type) and issubclass(value, np.generic):
        value = np.dtype(value)
    if isinstance(value, np.dtype):
        return value.name if value.isnative else ""
    if isinstance(value, str) or type(value).__module__ == "torch":
        return str(value).removeprefix("torch.")
    return ""
