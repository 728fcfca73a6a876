"""NumPy's view of the structs in `include/brickline/abi.h`.

Knows layouts only. `tests/contracts/test_abi.py` holds every size and offset against the compiled
core, so a field added on one side alone fails. The dtypes are made when they are first asked for:
a program whose profiler stays disabled need not load NumPy.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

FORMAT_VERSION = 1
"""Version of the spool and of the run that holds it."""
HIST_SCALE = 4
HIST_CHUNKS = 6
HIST_BINS = 768
MAX_DEPTH = 64
MAX_ELEMENTS = (1 << 40) - 1
MAX_FLOPS = 1e30
NO_SLOT = 0xFFFFFFFF


class SlotKind(IntEnum):
    """What a slot stands for."""

    BRICK = 0
    STEP = 1
    TILE = 2


class ClockDomain(IntEnum):
    """Whose clock a lane's times are on."""

    HOST = 0
    CUDA = 1
    MANUAL = 2


class Table(IntEnum):
    """Append-only tables of a spool (`ExtentKind` from 16 on)."""

    STRING = 16
    SLOT = 17
    TRACE = 18
    OPERAND = 19
    FINGERPRINT = 20
    GRAPH_NODE = 21
    GRAPH_EDGE = 22
    GRAPH_DETAIL = 23
    GRAPH_STRING = 24
    FACT = 25
    TRACE_TIME = 26


class RecordFlag(IntFlag):
    """Flags of one brick record."""

    OUT_OF_ORDER = 1
    APPROXIMATE = 2
    UNTIMED = 4
    TILE = 8
    WORK = 16
    HOST_BOUND = 32
    IS_WORK = 64
    EXACT = 128


_RECORD = [
    ("start", "<u8"),
    ("end", "<u8"),
    ("slot", "<u4"),
    ("elements_low", "<u4"),
    ("depth", "u1"),
    ("phase", "u1"),
    ("flags", "u1"),
    ("elements_high", "u1"),
    ("step", "<u4"),
]

_NODE = [
    ("slot", "<u4"),
    ("phase", "<u2"),
    ("reserved16", "<u2"),
    ("count", "<u8"),
    ("timed", "<u8"),
    ("total_ns", "<u8"),
    ("min_ns", "<u8"),
    ("max_ns", "<u8"),
    ("shift_ns", "<u8"),
    ("sum_squares", "<f8"),
    ("exclusive_ns", "<u8"),
    ("exclusive_count", "<u8"),
    ("elements", "<u8"),
    ("timed_elements", "<u8"),
    ("bytes_in", "<u8"),
    ("bytes_out", "<u8"),
    ("flops", "<f8"),
    ("cycles", "<u8"),
    ("min_cycles", "<u8"),
    ("max_cycles", "<u8"),
    ("cycles_count", "<u8"),
    ("host_ns", "<u8"),
    ("host_bound", "<u8"),
    ("out_of_order", "<u8"),
    ("approximate", "<u8"),
    ("first_ns", "<u8"),
    ("last_ns", "<u8"),
    ("zero_count", "<u8"),
    ("chunk", "<u4", (HIST_CHUNKS,)),
    ("batch", "<u8"),
    ("reserved", "<u8"),
]

_CELL = [
    ("slot", "<u4"),
    ("row", "<u4"),
    ("column", "<u4"),
    ("reserved32", "<u4"),
    ("count", "<u8"),
    ("total_ns", "<u8"),
    ("min_ns", "<u8"),
    ("max_ns", "<u8"),
    ("flops", "<f8"),
    ("batch", "<u8"),
]

_BIN = [("node", "<u4"), ("index", "<i4"), ("count", "<u8")]
"""One filled histogram bucket: row in the node array, bucket index (base 2, scale 4), count."""

_SLOT = [
    ("slot", "<u4"),
    ("kind", "<u4"),
    ("name", "<u4"),
    ("brick", "<i4"),
    ("layer", "<i4"),
    ("category", "<u4"),
    ("level", "<u4"),
    ("owner", "<u4"),
]

_TRACE = [
    ("trace", "<u8"),
    ("parent", "<u8"),
    ("kernel_hash", "<u8"),
    ("stream", "<u8"),
    ("entries", "<u8"),
    ("timed", "<u8"),
    ("enqueue_ns", "<i8"),
    ("start_ns", "<i8"),
    ("end_ns", "<i8"),
    ("item", "<i8"),
    ("input_checksum", "<u8"),
    ("output_checksum", "<u8"),
    ("name", "<u4"),
    ("slot", "<u4"),
    ("layer", "<i4"),
    ("position", "<u4"),
    ("ordinal", "<u4"),
    ("rank", "<u4"),
    ("process", "<u4"),
    ("thread", "<u4"),
    ("device", "<i4"),
    ("step", "<u4"),
    ("clock_domain", "<u4"),
    ("worker", "<i4"),
    ("region", "<i4"),
    ("params", "<u4"),
    ("backend", "<u4"),
    ("phase", "u1"),
    ("direction", "u1"),
    ("has_checksums", "u1"),
    ("reserved", "u1"),
]

_TRACE_TIME = [("trace", "<u8"), ("time_us", "<f8")]
"""How long a launch took, where its caller said so; `_TRACE` has whole ns between two moments."""

_OPERAND = [
    ("trace", "<u8"),
    ("tensor", "<u8"),
    ("fingerprint", "<u8"),
    ("role", "<u4"),
    ("index", "<u4"),
    ("version", "<u4"),
    ("dtype", "<u4"),
    ("dimensions", "<u4"),
    ("reserved", "<u4"),
    ("shape", "<i8", (8,)),
    ("strides", "<i8", (8,)),
]

SKETCH_BUCKETS = 64
STRIPES = 32
FINGERPRINT_DIMENSIONS = 12
FINGERPRINT_VERSION = 1

_FINGERPRINT = [
    ("hash", "<u8", (2,)),
    ("sketch", "<f8", (SKETCH_BUCKETS,)),
    ("rows", "<f4", (STRIPES,)),
    ("columns", "<f4", (STRIPES,)),
    ("l1", "<f8"),
    ("l2", "<f8"),
    ("total", "<f8"),
    ("absmax", "<f8"),
    ("minimum", "<f8"),
    ("maximum", "<f8"),
    ("elements", "<u8"),
    ("nan_count", "<u8"),
    ("inf_count", "<u8"),
    ("first_nan", "<i8"),
    ("first_inf", "<i8"),
    ("nonfinite_hash", "<u8"),
    ("zeros", "<u8"),
    ("subnormals", "<u8"),
    ("saturated", "<u8"),
    ("dtype", "<u4"),
    ("dimensions", "<u4"),
    ("shape", "<i8", (FINGERPRINT_DIMENSIONS,)),
    ("version", "<u4"),
    ("reserved", "<u4"),
]
"""What is kept of one tensor: `FingerprintRow`."""

_FACT = [("name", "<u4"), ("reserved", "<u4"), ("value", "<f8")]

_LAYOUTS: dict[str, list[Any]] = {
    "RECORD": _RECORD,
    "NODE": _NODE,
    "CELL": _CELL,
    "BIN": _BIN,
    "SLOT": _SLOT,
    "TRACE": _TRACE,
    "TRACE_TIME": _TRACE_TIME,
    "OPERAND": _OPERAND,
    "FINGERPRINT": _FINGERPRINT,
    "FACT": _FACT,
}


def __getattr__(name: str) -> np.dtype[Any]:
    """Make a dtype."""
    layout = _LAYOUTS.get(name)
    if layout is None:
        raise AttributeError(f"module 'brickline.abi' has no attribute {name!r}")
    import numpy as np

    dtype: np.dtype[Any] = np.dtype(layout)
    globals()[name] = dtype
    return dtype
