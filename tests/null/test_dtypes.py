"""DTypes: one table, and every name that leads into it."""

from __future__ import annotations

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from brickline.dtypes import DTYPES, DType, dtype_of
from brickline.errors import UsageError

NAMES = "f64 f32 f16 bf16 f8e4m3 f8e5m2 i64 i32 i16 i8 u64 u32 u16 u8 bool"


class TorchDtype:
    """Stands in for torch.dtype, which prints as torch.float32."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


TorchDtype.__module__ = "torch"


def test_the_table_is_complete():
    assert " ".join(DTYPES) == NAMES
    assert [dtype.code for dtype in DTYPES.values()] == list(range(1, 16))
    with pytest.raises(TypeError):
        DTYPES["f4"] = DTYPES["f8e4m3"]  # type: ignore[index]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_spelling_leads_back(dtype: DType):
    assert dtype.numpy.itemsize == dtype.size_bytes
    spellings = [dtype, dtype.name, dtype.numpy, dtype.numpy.type, dtype.numpy_name]
    spellings += [f"torch.{dtype.numpy_name}", TorchDtype(dtype.numpy_name)]
    for spelling in spellings:
        assert dtype_of(spelling) is dtype


def test_small_floats_are_those_of_ml_dtypes():
    assert DTYPES["bf16"].numpy == ml_dtypes.bfloat16
    assert DTYPES["f8e4m3"].numpy == ml_dtypes.float8_e4m3fn
    assert DTYPES["f8e5m2"].numpy == ml_dtypes.float8_e5m2


@pytest.mark.parametrize(
    "value",
    [
        *("f31", "", "torch.", "complex64", "float8_e4m3", "F32", b"f32", None, 32, []),
        *(float, int, object, np.complex64, np.float32(1), ml_dtypes.float8_e4m3),
        *(np.dtype("M8[ns]"), np.dtype("U4"), np.dtype([("a", "f4")])),
        *(np.dtype("f4").newbyteorder(), TorchDtype("qint8")),
    ],
    ids=repr,
)
def test_anything_else_is_refused(value: object):
    with pytest.raises(UsageError, match=r"expected a dtype \(f64, f32, .*got .*; name one"):
        dtype_of(value)


def test_ml_dtypes_is_not_imported_before_it_is_needed():
    code = (
        "import sys, brickline.kernel\n"
        "assert 'ml_dtypes' not in sys.modules\n"
        "from brickline.dtypes import DTYPES\n"
        "assert DTYPES['bf16'].numpy.name == 'bfloat16' and 'ml_dtypes' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
