"""What an execution graph is made of: kinds, nodes, edges, and their rows as bytes.

Owns the words and the byte layout (drawn in ``src/core/graph_rows.h``); knows nothing of scopes,
analyses or exports. NumPy is imported only where arrays are asked for.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from brickline.bricks import BrickId

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NO_STRING = NO_DETAIL = NO_NODE = 0xFFFFFFFF
TIMED = 1


class NodeKind(IntEnum):
    """What a node stands for."""

    BRICK = 0
    KERNEL = 1
    TRANSFER = 2
    FUNCTION = 3
    LAYER = 4
    ASYNC_TASK = 5

    @property
    def label(self) -> str:
        """The name shown in exports, such as ``AsyncTask``."""
        return ("Brick", "Kernel", "Transfer", "Function", "Layer", "AsyncTask")[self]


class EdgeKind(IntEnum):
    """What an edge says.

    ``CALLS``, ``CONTAINS`` and ``LAUNCHES`` say what lies inside what. ``SEQUENCE``,
    ``DEPENDS_ON`` and ``TRANSFER`` are dependencies: the target starts after the source finished.
    """

    CALLS = 0
    CONTAINS = 1
    LAUNCHES = 2
    SEQUENCE = 3
    DEPENDS_ON = 4
    TRANSFER = 5

    @property
    def label(self) -> str:
        """The name shown in exports, such as ``DependsOn``."""
        return ("Calls", "Contains", "Launches", "Sequence", "DependsOn", "Transfer")[self]

    @property
    def is_dependency(self) -> bool:
        """Whether the target waits for the source."""
        return self >= EdgeKind.SEQUENCE


class TransferDirection(IntEnum):
    """Which way bytes moved."""

    HOST_TO_DEVICE = 0
    DEVICE_TO_HOST = 1
    DEVICE_TO_DEVICE = 2

    @property
    def label(self) -> str:
        """``H2D``, ``D2H`` or ``D2D``."""
        return ("H2D", "D2H", "D2D")[self]


@dataclass(frozen=True, slots=True)
class KernelDetail:
    """How a kernel was launched, and how fast it ran where that was measured."""

    source_hash: int
    """FNV-1a of the source or PTX (`KernelRegistry.register` returns it), 0: not known."""
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    arithmetic_intensity: float | None
    """FLOP per byte."""
    achieved_tflops: float | None


@dataclass(frozen=True, slots=True)
class TransferDetail:
    """What a transfer moved, and between which places."""

    source: str
    target: str
    size_bytes: int
    direction: TransferDirection


@dataclass(frozen=True, slots=True)
class FunctionDetail:
    """Where a function is written."""

    file: str | None
    line: int | None


@dataclass(frozen=True, slots=True)
class AsyncTaskDetail:
    """How often a task was polled and gave way; the time in polls is the node's ``timing_ns``."""

    poll_count: int
    yield_count: int


Detail = KernelDetail | TransferDetail | FunctionDetail | AsyncTaskDetail


@dataclass(frozen=True, slots=True)
class GraphNode:
    """One node as it was added."""

    id: int
    kind: NodeKind
    name: str
    """Layers are called ``Layer3``, transfers ``H2D:host->gpu``."""
    timing_ns: int | None = None
    """Inclusive time; None where nothing was measured."""
    elements: int = 0
    start_ns: int | None = None
    brick: BrickId | None = None
    """None for dynamic bricks and for everything that is not a brick."""
    layer: int | None = None
    detail: Detail | None = None


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """One edge as it was added."""

    source: int
    target: int
    kind: EdgeKind
    weight: float = 1.0
    """Kept in single precision."""
    size_bytes: int | None = None
    """Bytes moved, on ``TRANSFER`` edges that say so."""
    direction: TransferDirection | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GraphTables:
    """A whole graph as tables, as a run stores it. Positions are ids."""

    strings: list[str]
    nodes: npt.NDArray[np.void]
    """Rows of `node_dtype`."""
    edges: npt.NDArray[np.void]
    """Rows of `edge_dtype`."""
    details: npt.NDArray[np.void]
    """Rows of `detail_dtype`; which fields count depends on ``kind``."""


NODE = struct.Struct("<QQQIIihBB")
EDGE = struct.Struct("<IIfB3x")
DETAIL_HEAD = struct.Struct("<IBB2x")
_KERNEL = struct.Struct("<Qdd7I")
_TRANSFER = struct.Struct("<QII")
_FUNCTION = struct.Struct("<II")
_TASK = struct.Struct("<QQ")
DETAIL_BYTES = 64
TRANSFER_EDGE = 4


@cache
def node_dtype() -> np.dtype[np.void]:
    """The NumPy layout of a node row."""
    import numpy as np

    fields = ["timing_ns", "elements", "start_ns", "name", "detail", "layer", "brick"]
    formats = ["<u8", "<u8", "<u8", "<u4", "<u4", "<i4", "<i2"]
    layout: Any = [*zip(fields, formats, strict=True), ("kind", "u1"), ("flags", "u1")]
    dtype: np.dtype[np.void] = np.dtype(layout)
    return dtype


@cache
def edge_dtype() -> np.dtype[np.void]:
    """The NumPy layout of an edge row."""
    import numpy as np

    fields: Any = {
        "names": ["source", "target", "weight", "kind"],
        "formats": ["<u4", "<u4", "<f4", "u1"],
        "offsets": [0, 4, 8, 12],
        "itemsize": EDGE.size,
    }
    dtype: np.dtype[np.void] = np.dtype(fields)
    return dtype


@cache
def detail_dtype() -> np.dtype[np.void]:
    """The NumPy layout of a detail row; fields of different kinds share their bytes."""
    import numpy as np

    layout = {
        "owner": ("<u4", 0), "kind": ("u1", 4), "direction": ("u1", 5),
        "source_hash": ("<u8", 8), "arithmetic_intensity": ("<f8", 16),
        "achieved_tflops": ("<f8", 24), "grid": ("<u4", 32, 3), "block": ("<u4", 44, 3),
        "shared_bytes": ("<u4", 56),
        "bytes": ("<u8", 8), "transfer_source": ("<u4", 16), "transfer_target": ("<u4", 20),
        "file": ("<u4", 8), "line": ("<u4", 12),
        "poll_count": ("<u8", 8), "yield_count": ("<u8", 16),
    }  # fmt: skip
    fields: Any = {
        "names": list(layout),
        "formats": [(row[0], row[2]) if len(row) == 3 else row[0] for row in layout.values()],
        "offsets": [row[1] for row in layout.values()],
        "itemsize": DETAIL_BYTES,
    }
    dtype: np.dtype[np.void] = np.dtype(fields)
    return dtype


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _detail(kind: NodeKind, row: bytes, source: str, target: str) -> Detail | None:
    body = row[DETAIL_HEAD.size :]
    if kind is NodeKind.KERNEL:
        source_hash, intensity, tflops, *sizes = _KERNEL.unpack_from(body)
        gx, gy, gz, bx, by, bz, shared = sizes
        known = (_known(intensity), _known(tflops))
        return KernelDetail(source_hash, (gx, gy, gz), (bx, by, bz), shared, *known)
    if kind is NodeKind.TRANSFER:
        direction = TransferDirection(DETAIL_HEAD.unpack_from(row)[2])
        return TransferDetail(source, target, _TRANSFER.unpack_from(body)[0], direction)
    if kind is NodeKind.FUNCTION:
        file, line = _FUNCTION.unpack_from(body)
        return FunctionDetail(None if file == NO_STRING else source, line or None)
    if kind is NodeKind.ASYNC_TASK:
        return AsyncTaskDetail(*_TASK.unpack_from(body))
    return None


def _node(node_id: int, row: Sequence[Any], name: str, detail: Detail | None) -> GraphNode:
    timing_ns, elements, start_ns, _, _, layer, brick, kind, flags = row
    return GraphNode(
        node_id,
        NodeKind(kind),
        name,
        timing_ns if flags & TIMED else None,
        elements,
        start_ns or None,
        BrickId(brick) if brick >= 0 else None,
        layer if layer >= 0 else None,
        detail,
    )


def node_from_row(
    node_id: int, row: bytes, detail: bytes | None, name: str, source: str, target: str
) -> GraphNode:
    """Return the node that a row and its detail describe."""
    values = NODE.unpack(row)
    parsed = _detail(NodeKind(values[7]), detail, source, target) if detail else None
    return _node(node_id, values, name, parsed)


def nodes_from_tables(strings: list[str], nodes: bytes, details: bytes) -> Iterator[GraphNode]:
    """Yield every node of the tables that ``GraphStore.tables`` returns, in id order."""
    for node_id, values in enumerate(NODE.iter_unpack(nodes)):
        index, kind = values[4], NodeKind(values[7])
        detail = None
        if index != NO_DETAIL:
            row = details[index * DETAIL_BYTES : (index + 1) * DETAIL_BYTES]
            detail = _detail(kind, row, *_texts(kind, row, strings))
        yield _node(node_id, values, strings[values[3]], detail)


def _texts(kind: NodeKind, row: bytes, strings: list[str]) -> tuple[str, str]:
    body = row[DETAIL_HEAD.size :]
    ids: tuple[int, ...] = ()
    if kind is NodeKind.TRANSFER:
        ids = _TRANSFER.unpack_from(body)[1:]
    elif kind is NodeKind.FUNCTION:
        ids = _FUNCTION.unpack_from(body)[:1]
    texts = [strings[text] if text != NO_STRING else "" for text in ids] + ["", ""]
    return texts[0], texts[1]


def edges_from_tables(edges: bytes, details: bytes) -> Iterator[GraphEdge]:
    """Yield every edge of the tables that ``GraphStore.tables`` returns, in order."""
    moved: dict[int, tuple[int, TransferDirection]] = {}
    for at in range(0, len(details), DETAIL_BYTES):
        owner, kind, direction = DETAIL_HEAD.unpack_from(details, at)
        if kind == TRANSFER_EDGE:
            size_bytes = _TRANSFER.unpack_from(details, at + DETAIL_HEAD.size)[0]
            moved[owner] = size_bytes, TransferDirection(direction)
    for index, (source, target, weight, kind) in enumerate(EDGE.iter_unpack(edges)):
        yield GraphEdge(source, target, EdgeKind(kind), weight, *moved.get(index, (None, None)))
