"""Python's view of the structs against the compiled core: a field added on one side alone fails."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import brickline
from brickline import _core, abi
from brickline.graph_rows import detail_dtype, edge_dtype, node_dtype

HEADER = Path(brickline.__file__).parent / "include" / "brickline" / "abi.h"

DTYPES: dict[str, np.dtype] = {
    "BrickRecord": abi.RECORD,
    "Node": abi.NODE,
    "TileCell": abi.CELL,
    "SlotRow": abi.SLOT,
    "TraceRow": abi.TRACE,
    "TraceTimeRow": abi.TRACE_TIME,
    "OperandRow": abi.OPERAND,
    "FactRow": abi.FACT,
    "FingerprintRow": abi.FINGERPRINT,
    "BinRow": abi.BIN,
}
"""Every struct that Python reads as rows."""

WIDTHS = {"char": "S1", "double": "<f8", "float": "<f4"} | {
    f"{sign}int{bits}_t": f"{'u' if sign else 'i'}{bits // 8}"
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}


def test_every_size_is_the_cores() -> None:
    layout = _core.layout()
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == {
        name: layout[name] for name in DTYPES
    }


def test_every_offset_is_the_cores() -> None:
    offsets = _core.layout()["offsets"]
    assert offsets
    for name, offset in offsets.items():
        struct, field = name.split(".")
        assert DTYPES[struct].fields is not None
        assert DTYPES[struct].fields[field][1] == offset, name


def header_struct(name: str) -> np.dtype:
    """The struct as the header spells it, field by field."""
    text = re.sub(r"//.*", "", HEADER.read_text(encoding="utf-8"))
    body = re.search(rf"struct {name} \{{(.*?)\n\}};", text, re.DOTALL)
    assert body is not None, f"{HEADER} has no struct {name}"
    constants = {
        key: int(value, 0) for key, value in re.findall(r"constexpr \w+ (\w+) = (\d+);", text)
    }
    fields = []
    for kind, field, count in re.findall(r"(\w+) (\w+)(?:\[(\w+)\])?;", body[1]):
        if count:
            size = int(count) if count.isdecimal() else constants[count]
            fields.append((field, WIDTHS[kind], (size,)))
        else:
            fields.append((field, WIDTHS[kind]))
    return np.dtype(fields, align=True)


@pytest.mark.parametrize("name", sorted(set(DTYPES) - {"BinRow"}))
def test_every_field_is_the_headers(name: str) -> None:
    """Names, order, kinds and places; the core's list of offsets holds only some of them."""
    header, mine = header_struct(name), DTYPES[name]
    assert mine.names == header.names
    assert mine.fields is not None
    assert header.fields is not None
    for field in mine.names or ():
        assert mine.fields[field][:2] == header.fields[field][:2], f"{name}.{field}"
    assert mine.itemsize == header.itemsize


def test_constants_are_the_headers() -> None:
    text = HEADER.read_text(encoding="utf-8")

    def constant(name: str) -> float:
        found = re.search(rf"constexpr \w+ {name} = ([^;]+);", text)
        assert found is not None, name
        value = found[1].replace("ull", "").rstrip("u")
        return float(eval(value, {"HIST_CHUNKS": abi.HIST_CHUNKS, "HIST_CHUNK_BINS": 128}))

    assert constant("SPOOL_VERSION") == abi.FORMAT_VERSION
    names = ["HIST_SCALE", "HIST_CHUNKS", "HIST_BINS", "MAX_DEPTH", "MAX_ELEMENTS", "MAX_FLOPS"]
    names += ["SKETCH_BUCKETS", "STRIPES", "FINGERPRINT_DIMENSIONS", "FINGERPRINT_VERSION"]
    for name in names:
        assert getattr(abi, name) == constant(name)


@pytest.mark.parametrize(
    ("mine", "theirs", "prefix"),
    [
        (abi.SlotKind, "SlotKind", ""),
        (abi.ClockDomain, "ClockDomain", ""),
        (abi.Table, "ExtentKind", ""),
        (abi.RecordFlag, "RecordFlag", "RECORD_"),
    ],
)
def test_enumerations_are_the_headers(mine: type, theirs: str, prefix: str) -> None:
    text = re.sub(r"//.*", "", HEADER.read_text(encoding="utf-8"))
    body = re.search(rf"enum (?:class )?{theirs} : \w+ \{{(.*?)\}};", text, re.DOTALL)
    assert body is not None
    found = {
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removeprefix(prefix)).upper(): int(value)
        for name, value in re.findall(r"(\w+) = (\d+)", body[1])
    }
    if theirs == "ExtentKind":
        found = {name: value for name, value in found.items() if value >= 16}
    assert {member.name: int(member) for member in mine} == found  # type: ignore[attr-defined]


def test_graph_rows_are_the_cores() -> None:
    """A graph with one of everything goes through the core's rows and back."""
    from brickline import ExecutionGraph
    from brickline.graph import TransferDirection

    graph = ExecutionGraph()
    with graph.scope(graph.add_layer(3, timing_ns=70)):
        graph.record_brick("RmsNorm", timing_ns=5, elements=6, layer=3, start_ns=9)
        graph.record_kernel_launch("k", 2**63, (1, 2, 3), (4, 5, 6), 7, timing_ns=8)
        graph.record_transfer("a", "b", 9, TransferDirection.HOST_TO_DEVICE, timing_ns=10)
    graph.add_function("f", "file", 11)
    graph.add_async_task("t", 12, 13, 14)
    tables = graph.tables()
    assert (len(tables.nodes), len(tables.edges)) == (graph.num_nodes, graph.num_edges)
    for rows, dtype in (
        (tables.nodes, node_dtype()),
        (tables.edges, edge_dtype()),
        (tables.details, detail_dtype()),
    ):
        assert rows.dtype == dtype
    again = ExecutionGraph.from_tables(tables)
    assert again.nodes() == graph.nodes()
    assert again.edges() == graph.edges()
