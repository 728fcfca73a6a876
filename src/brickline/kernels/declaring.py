"""What the declarations of the kernels that ship are made of: sources, dtypes, bounds and faults.

It knows the files beside it and no kernel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeAlias

from numpy.typing import NDArray

from brickline.dtypes import DType, dtype_of
from brickline.errors import KernelError

Array: TypeAlias = NDArray[Any]

MOST_ROWS = 2**31 - 1
"""What CUDA allows along the first axis of a grid."""
MOST_SECOND = 2**16 - 1
"""What CUDA allows along the second."""
LONGEST = 2**40
"""Elements of a row."""
MOST_HEADS = 2**16 - 1
MOST_POSITIONS = 2**31 - 1

FAULT_TOKEN = 16
"""A token id lies outside of the table; the first code that is no fault of Block itself."""
FAULT_CAPACITY = 17
"""A position lies outside of the cache."""


def float_kind(dtype: object) -> DType:
    """Return the dtype of elements that a kernel computes with in float."""
    found = dtype_of(dtype)
    if found.kind != "float" or found.size_bytes > 4:
        raise KernelError(
            f"expected a float of at most 32 bits, got {found}; the kernels that ship compute in "
            "float"
        )
    return found


def index_kind(dtype: object) -> DType:
    """Return the dtype of token ids and places."""
    found = dtype_of(dtype)
    if found.name not in ("i32", "i64"):
        raise KernelError(f"expected i32 or i64 for ids, got {found}; convert the ids")
    return found


def count_of(value: object, name: str, most: int = 2**16) -> int:
    """Return a number that the code of a kernel is made for."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise KernelError(
            f"expected {name} as an integer from 1 to {most}, got {value!r:.80}; it is a constant "
            "of the compiled code"
        )
    return value


def source_of(*names: str) -> str:
    """Return the text of one file, or of several one after the other, the kernel's own last."""
    here = Path(__file__).parent
    return "\n".join((here / f"{name}.h").read_text(encoding="utf-8") for name in names)


def rows_of_block(count: int, rows: str) -> tuple[str, str]:
    """Return the first row of a block that takes `count` of them, and the one after its last."""
    return f"block_x * {count}", f"minimum((block_x + 1) * {count}, {rows})"


def piece(index: str, size: str | int) -> tuple[str, str]:
    """Return the bytes of piece `index` of a buffer that is cut into pieces of one size."""
    return f"({index}) * {size}", f"({index} + 1) * {size}"
