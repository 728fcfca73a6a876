"""What each table of a run holds: its columns, and how one part of a run fills them.

`SCHEMAS` is the list that `docs/run-format.md` explains. Each builder works on whole arrays. It
knows rows, not files; `tables` publishes what is built here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from brickline import abi
from brickline.bricks import BrickCategory
from brickline.dtypes import DTYPES
from brickline.errors import RunError
from brickline.graph_rows import (
    NO_STRING,
    TIMED,
    TRANSFER_EDGE,
    EdgeKind,
    NodeKind,
    TransferDirection,
)
from brickline.run.twin_rows import read_twins, row_dtype
from brickline.spools import Part

_AT_ONCE = 1 << 16
UNKNOWN = "(unknown)"
"""Stands for a name that a damaged spool does not hold."""

Rows: TypeAlias = NDArray[Any]


class Masked(NamedTuple):
    """Values and where they are absent."""

    values: Any
    absent: Rows


Columns: TypeAlias = dict[str, Any]

_TYPES = {
    "text": pa.string(),
    "flag": pa.bool_(),
    "i4": pa.int32(),
    "i8": pa.int64(),
    "u4": pa.uint32(),
    "u8": pa.uint64(),
    "f4": pa.float32(),
    "f8": pa.float64(),
    "u4s": pa.list_(pa.uint32()),
    "i8s": pa.list_(pa.int64()),
    "f4s": pa.list_(pa.float32()),
    "f8s": pa.list_(pa.float64()),
}

_PART = "part:text rank:u4 process:u4"
_LANE = "lane:u4 thread:u4 device:i4 stream:u8 clock_domain:text"
_SLOT = "slot:u4 name:text brick:i4 layer:i4 category:text"
_NODE = (
    "count:u8 timed:u8 total_ns:u8 min_ns:u8 max_ns:u8 shift_ns:u8 sum_squares:f8 exclusive_ns:u8 "
    "exclusive_count:u8 elements:u8 timed_elements:u8 bytes_in:u8 bytes_out:u8 flops:f8 cycles:u8 "
    "min_cycles:u8 max_cycles:u8 cycles_count:u8 host_ns:u8 host_bound:u8 out_of_order:u8 "
    "approximate:u8 first_ns:u8 last_ns:u8 zero_count:u8"
)
_STEP_NODE = _NODE.replace("elements", "tokens") + " elapsed_ns:u8"
_STORED = {"tokens": "elements", "timed_tokens": "timed_elements", "elapsed_ns": "host_ns"}
"""What a step's columns are called in a node."""
_TILE = "level:text owner:u4 owner_name:text"

_COLUMNS = {
    "parts": f"{_PART} created_unix_ns:u8 clock:text closed:flag anchor_ns:u8 anchor_unix_ns:u8 "
    "ns_per_tick:f8 lost_records:u8 orphan_exits:u8 abandoned_timers:u8 overhead_ns:f8 "
    "counting_ns:f8 pending_device_spans:u8 observing_ns:u8 waiting_ns:u8 file_bytes:u8",
    "lanes": f"{_PART} {_LANE} name:text threads:u4 closed:flag fold_ns:u8 folded:u8 lost:u8",
    "bricks": f"{_PART} {_LANE} {_SLOT} phase:text {_NODE}",
    "steps": f"{_PART} {_LANE} slot:u4 phase:text {_STEP_NODE}",
    "tiles": f"{_PART} {_LANE} {_SLOT} {_TILE} phase:text {_NODE}",
    "tile_cells": f"{_PART} {_LANE} {_SLOT} {_TILE} row:u4 column:u4 count:u8 total_ns:u8 "
    "min_ns:u8 max_ns:u8 flops:f8",
    "histograms": f"{_PART} {_LANE} {_SLOT} kind:text phase:text bucket:i4 lower_ns:f8 "
    "upper_ns:f8 count:u8",
    "timeline": f"{_PART} {_LANE} {_SLOT} kind:text phase:text step:u4 start_ns:u8 end_ns:u8 "
    "depth:u4 elements:u8 timed:flag out_of_order:flag approximate:flag host_bound:flag",
    "traces": "part:text trace:u8 parent:u8 ordinal:u4 name:text kernel_hash:u8 direction:text "
    "enqueue_ns:i8 start_ns:i8 end_ns:i8 time_us:f8 entries:u8 timed:u8 rank:u4 process:u4 "
    "thread:u4 device:i4 stream:u8 step:u4 phase:text clock_domain:text worker:i4 item:i8 "
    "region:i4 slot:u4 layer:i4 position:u4 input_checksum:u8 output_checksum:u8 params:text "
    "backend:text",
    "operands": f"{_PART} trace:u8 role:text index:u4 tensor:u8 version:u4 shape:i8s dtype:text "
    "strides:i8s fingerprint:u8",
    "fingerprints": f"{_PART} fingerprint:u8 hash:text dtype:text shape:i8s elements:u8 l1:f8 "
    "l2:f8 total:f8 absmax:f8 minimum:f8 maximum:f8 nan_count:u8 inf_count:u8 first_nan:i8 "
    "first_inf:i8 nonfinite_hash:u8 zeros:u8 subnormals:u8 saturated:u8 sketch:f8s rows:f4s "
    "columns:f4s",
    "twins": f"{_PART} name:text position:u4 ordinal:u4 role:text index:u4 roundoff:f8 noise:f8 "
    "hash:text shape:i8s elements:u8 l2:f8 total:f8 absmax:f8 nan_count:u8 inf_count:u8 sketch:f8s",
    "graph_nodes": f"{_PART} node:u4 kind:text name:text brick:i4 layer:i4 timing_ns:u8 "
    "start_ns:u8 elements:u8 source_hash:u8 grid:u4s block:u4s shared_bytes:u4 "
    "arithmetic_intensity:f8 achieved_tflops:f8 bytes:u8 direction:text source:text target:text "
    "file:text line:u4 poll_count:u8 yield_count:u8",
    "graph_edges": f"{_PART} edge:u4 source:u4 target:u4 kind:text weight:f4 bytes:u8 "
    "direction:text",
    "facts": f"{_PART} name:text value:f8",
}

SCHEMAS: Mapping[str, pa.Schema] = {
    table: pa.schema(
        [(name, _TYPES[kind]) for name, kind in (entry.split(":") for entry in columns.split())]
    )
    for table, columns in _COLUMNS.items()
}
"""The columns of every table, by name."""


# Columns that several tables share


def _texts(strings: Sequence[str], ids: Rows) -> pa.Array:
    numbers = ids.astype(np.int64)
    known = np.where(numbers < len(strings), numbers, len(strings))
    return pa.array([*strings, UNKNOWN], pa.string()).take(pa.array(known))


def _no_minus(values: Rows) -> Masked:
    return Masked(values, values < 0)


_DOMAINS = tuple(domain.name.lower() for domain in abi.ClockDomain)
_KINDS = tuple(kind.name.lower() for kind in abi.SlotKind)
_CATEGORIES = tuple(category.label for category in BrickCategory)
_CLOCKS = ("monotonic", "tsc", "cntvct", "manual")
_LEVELS = ("macro", "midi", "micro")
_NOTHING_YET = np.iinfo(np.uint64).max  # a minimum that nothing was compared with
_TRACE_PLAIN = (
    *("trace", "ordinal", "kernel_hash", "entries", "timed"),
    *("rank", "process", "thread", "step", "position"),
)
_TRACE_OPTIONAL = (
    *("enqueue_ns", "start_ns", "end_ns", "item"),
    *("device", "worker", "region", "layer"),
)
_FINGERPRINT_NUMBERS = (
    *("elements", "l1", "l2", "total", "absmax", "minimum", "maximum", "nan_count", "inf_count"),
    *("nonfinite_hash", "zeros", "subnormals", "saturated"),
)
_TWIN_NUMBERS = ("elements", "l2", "total", "absmax", "nan_count", "inf_count")
_DIRECTIONS = tuple(direction.label for direction in TransferDirection)


def _lane_columns(part: Part, lanes: Rows) -> Columns:
    known = {int(lane["lane"]): row for row, lane in enumerate(part.lanes)}
    distinct, place = np.unique(lanes, return_inverse=True)
    rows = np.array([known.get(int(lane), -1) for lane in distinct], np.int64)[place]

    def column(name: str, dtype: str, absent: int) -> Rows:
        return np.array([*(lane[name] for lane in part.lanes), absent], dtype)[rows]

    device = column("device", "<i4", -1)
    return {
        "lane": lanes,
        "thread": column("thread", "<u4", 0),
        "device": _no_minus(device),
        "stream": Masked(column("stream", "<u8", 0), device < 0),
        "clock_domain": _texts(_DOMAINS, column("clock_domain", "<u4", len(_DOMAINS))),
    }


def _slot_rows(part: Part, slots: Rows) -> Rows:
    """Return the definition of each slot; one that the spool does not hold is unknown."""
    unknown = np.zeros(1, abi.SLOT)
    unknown["slot"] = unknown["owner"] = abi.NO_SLOT
    unknown["name"], unknown["category"] = len(part.strings), BrickCategory.OTHER
    unknown["brick"] = unknown["layer"] = -1
    order = np.argsort(part.slots["slot"], kind="stable")
    known = np.concatenate([part.slots[order], unknown])  # NO_SLOT sorts last
    place = np.searchsorted(known["slot"], slots)
    return known[np.where(known["slot"][place] == slots, place, -1)]


def _slot_columns(part: Part, slots: Rows) -> Columns:
    rows = _slot_rows(part, slots)
    return {
        "slot": slots,
        "name": _texts(part.strings, rows["name"]),
        "brick": _no_minus(rows["brick"]),
        "layer": _no_minus(rows["layer"]),
        "category": _texts(_CATEGORIES, rows["category"]),
    }


def _tile_columns(part: Part, slots: Rows) -> Columns:
    rows = _slot_rows(part, slots)
    alone = rows["owner"] == abi.NO_SLOT
    owners = _slot_rows(part, rows["owner"])
    return {
        "level": _texts(_LEVELS, rows["level"]),
        "owner": Masked(rows["owner"], alone),
        "owner_name": Masked(_texts(part.strings, owners["name"]), alone),
    }


def _phase_texts(part: Part, phases: Rows) -> pa.Array:
    names = [part.phases.get(number, UNKNOWN) for number in range(256)]
    return _texts(names, phases)


def _node_columns(part: Part, kind: abi.SlotKind, columns: str = _NODE) -> Columns:
    chosen = _slot_rows(part, part.nodes["slot"])["kind"] == kind
    nodes, lanes = part.nodes[chosen], part.node_lanes[chosen]
    shared = _lane_columns(part, lanes)
    untimed, uncounted = nodes["timed"] == 0, nodes["cycles_count"] == 0
    host = pc.not_equal(shared["clock_domain"], "cuda").to_numpy(zero_copy_only=False)
    absent = {
        **dict.fromkeys(("min_ns", "max_ns", "shift_ns", "first_ns", "last_ns"), untimed),
        **dict.fromkeys(("cycles", "min_cycles", "max_cycles"), uncounted),
        **dict.fromkeys(("host_ns", "host_bound"), host),
        "elapsed_ns": nodes["host_ns"] == 0,
    }
    fields = [entry.partition(":")[0] for entry in columns.split()]
    found: Columns = {}
    for field in fields:
        values = nodes[_STORED.get(field, field)]
        found[field] = values
        if field in absent:
            found[field] = Masked(values, absent[field] | (values == _NOTHING_YET))
    phase = _phase_texts(part, nodes["phase"])
    return {**shared, **_slot_columns(part, nodes["slot"]), "phase": phase, **found}


# One builder per table


def _parts(part: Part) -> Columns:
    header = part.header
    fields = [entry.partition(":")[0] for entry in _COLUMNS["parts"].split()[3:]]
    columns: Columns = {field: [header.get(field)] for field in fields}
    return {
        **columns,
        "closed": [bool(header["closed"])],
        "clock": _texts(_CLOCKS, np.array([header["clock_kind"]])),
    }


def _lanes(part: Part) -> Columns:
    ids = np.array([lane["lane"] for lane in part.lanes], np.uint32)
    plain = ("name", "threads", "fold_ns", "folded", "lost")
    return {
        **_lane_columns(part, ids),
        **{name: [lane[name] for lane in part.lanes] for name in plain},
        "closed": [bool(lane["closed"]) for lane in part.lanes],
    }


def _bricks(part: Part) -> Columns:
    return _node_columns(part, abi.SlotKind.BRICK)


def _steps(part: Part) -> Columns:
    return _node_columns(part, abi.SlotKind.STEP, _STEP_NODE)


def _tiles(part: Part) -> Columns:
    columns = _node_columns(part, abi.SlotKind.TILE)
    return {**columns, **_tile_columns(part, columns["slot"])}


def _tile_cells(part: Part) -> Columns:
    cells = part.cells
    past = cells["row"] == abi.NO_SLOT
    return {
        **_lane_columns(part, part.cell_lanes),
        **_slot_columns(part, cells["slot"]),
        **_tile_columns(part, cells["slot"]),
        "row": Masked(cells["row"], past),
        "column": Masked(cells["column"], past),
        **{name: cells[name] for name in ("count", "total_ns", "min_ns", "max_ns", "flops")},
    }


def _histograms(part: Part) -> Columns:
    bins = part.bins
    nodes, lanes = part.nodes[bins["node"]], part.node_lanes[bins["node"]]
    buckets = 1 << abi.HIST_SCALE
    return {
        **_lane_columns(part, lanes),
        **_slot_columns(part, nodes["slot"]),
        "kind": _texts(_KINDS, _slot_rows(part, nodes["slot"])["kind"]),
        "phase": _phase_texts(part, nodes["phase"]),
        "bucket": bins["index"],
        "lower_ns": np.exp2(bins["index"] / buckets),
        "upper_ns": np.exp2((bins["index"] + 1) / buckets),
        "count": bins["count"],
    }


def _timeline(part: Part) -> Columns:
    records = part.recent
    flags = {
        "out_of_order": abi.RecordFlag.OUT_OF_ORDER,
        "approximate": abi.RecordFlag.APPROXIMATE,
        "host_bound": abi.RecordFlag.HOST_BOUND,
    }
    high = records["elements_high"].astype(np.uint64) << np.uint64(32)
    return {
        **_lane_columns(part, part.recent_lanes),
        **_slot_columns(part, records["slot"]),
        "kind": _texts(_KINDS, _slot_rows(part, records["slot"])["kind"]),
        "phase": _phase_texts(part, records["phase"]),
        "step": records["step"],
        "start_ns": records["start"],
        "end_ns": records["end"],
        "depth": records["depth"],
        "elements": high | records["elements_low"],
        "timed": (records["flags"] & int(abi.RecordFlag.UNTIMED)) == 0,
        **{name: (records["flags"] & int(flag)) != 0 for name, flag in flags.items()},
    }


def _traces(part: Part) -> Columns:
    rows = part.traces
    return {
        **{name: rows[name] for name in _TRACE_PLAIN},
        **{name: _no_minus(rows[name]) for name in _TRACE_OPTIONAL},
        **{name: _texts(part.strings, rows[name]) for name in ("name", "params", "backend")},
        "time_us": Masked(part.times_us, np.isnan(part.times_us)),
        "parent": Masked(rows["parent"], rows["parent"] == 0),
        "direction": _texts(("forward", "backward"), rows["direction"]),
        "stream": Masked(rows["stream"], rows["device"] < 0),
        "phase": _phase_texts(part, rows["phase"]),
        "clock_domain": _texts(_DOMAINS, rows["clock_domain"]),
        "slot": Masked(rows["slot"], rows["slot"] == abi.NO_SLOT),
        "input_checksum": Masked(rows["input_checksum"], rows["has_checksums"] & 1 == 0),
        "output_checksum": Masked(rows["output_checksum"], rows["has_checksums"] & 2 == 0),
    }


def _operands(part: Part, rows: Rows) -> Columns:
    sizes = np.minimum(rows["dimensions"], rows["shape"].shape[1])
    return {
        **{name: rows[name] for name in ("trace", "index", "tensor", "version")},
        "role": _texts(("input", "output", "both"), rows["role"]),
        "shape": _lists(rows["shape"], sizes),
        "dtype": _texts(part.strings, rows["dtype"]),
        "strides": _lists(rows["strides"], sizes),
        "fingerprint": Masked(rows["fingerprint"], rows["fingerprint"] == 0),
    }


def _fingerprints(rows: Rows, first: int) -> Columns:
    """Return the columns of some fingerprints, of which the first is this row of its part."""
    lost = rows["dtype"] == 0  # announced, and it never came
    names = {dtype.code: dtype.name for dtype in DTYPES.values()}
    sizes = np.where(lost, 0, np.minimum(rows["dimensions"], rows["shape"].shape[1]))
    return {
        "fingerprint": np.arange(first + 1, first + 1 + len(rows), dtype=np.uint64),
        "hash": Masked(_hex_texts(rows["hash"]), lost),
        "dtype": Masked(
            _texts([names.get(code, UNKNOWN) for code in range(256)], rows["dtype"]), lost
        ),
        "shape": _lists(rows["shape"], sizes, lost),
        **{name: Masked(rows[name], lost) for name in _FINGERPRINT_NUMBERS},
        **{
            name: Masked(rows[name], lost | (rows[name] < 0)) for name in ("first_nan", "first_inf")
        },
        **{
            name: _lists(rows[name], np.where(lost, 0, rows[name].shape[1]), lost)
            for name in ("sketch", "rows", "columns")
        },
    }


def _twins(part: Part) -> Columns:
    try:
        rows = read_twins(part.path)
    except RunError:  # the run says so as a problem of its own
        rows = np.empty(0, row_dtype())
    prints = rows["fingerprint"]
    sizes = np.minimum(prints["dimensions"], prints["shape"].shape[1])
    return {
        "name": _texts(part.strings, rows["name"]),
        **{name: rows[name] for name in ("position", "ordinal", "index", "roundoff")},
        "role": _texts(("input", "output"), rows["role"]),
        "noise": Masked(rows["noise"], np.isnan(rows["noise"])),
        "hash": _hex_texts(prints["hash"]),
        "shape": _lists(prints["shape"], sizes),
        **{name: prints[name] for name in _TWIN_NUMBERS},
        "sketch": _lists(prints["sketch"], np.full(len(prints), prints["sketch"].shape[1])),
    }


def _hex_texts(words: Rows) -> pa.Array:
    """Return 128 bits as text, the high word first; most readers have no such number."""
    return pa.array([f"{high:016x}{low:016x}" for low, high in words.tolist()], pa.string())


def _lists(values: Rows, sizes: Rows, absent: Rows | None = None) -> pa.Array:
    """Return the first `sizes[i]` values of each row as a list."""
    kept = np.arange(values.shape[1]) < sizes[:, None]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    mask = None if absent is None else pa.array(absent)
    flat = pa.array(np.ascontiguousarray(values)[kept])
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=mask)


def _graph_nodes(part: Part) -> Columns:
    nodes, strings = part.graph.nodes, part.graph.strings
    details = part.graph.details[part.graph.details["kind"] != TRANSFER_EDGE]
    detail, has = _details_of(details, len(nodes))
    kernel, transfer, function, task = (
        has & (nodes["kind"] == kind)
        for kind in (NodeKind.KERNEL, NodeKind.TRANSFER, NodeKind.FUNCTION, NodeKind.ASYNC_TASK)
    )
    sizes = np.where(kernel, 3, 0)

    def known(name: str, present: Rows) -> Masked:
        return Masked(detail[name], ~present)

    def text(name: str, present: Rows) -> Masked:
        return Masked(_texts(strings, detail[name]), ~present | (detail[name] == NO_STRING))

    def number(name: str) -> Masked:
        return Masked(detail[name], ~kernel | np.isnan(detail[name]))

    return {
        "node": np.arange(len(nodes), dtype=np.uint32),
        "kind": _texts([kind.label for kind in NodeKind], nodes["kind"]),
        "name": Masked(_texts(strings, nodes["name"]), nodes["name"] == NO_STRING),
        "brick": _no_minus(nodes["brick"]),
        "layer": _no_minus(nodes["layer"]),
        "timing_ns": Masked(nodes["timing_ns"], nodes["flags"] & TIMED == 0),
        "start_ns": Masked(nodes["start_ns"], nodes["start_ns"] == 0),
        "elements": nodes["elements"],
        "source_hash": Masked(detail["source_hash"], ~kernel | (detail["source_hash"] == 0)),
        "grid": _lists(detail["grid"], sizes, ~kernel),
        "block": _lists(detail["block"], sizes, ~kernel),
        "shared_bytes": known("shared_bytes", kernel),
        "arithmetic_intensity": number("arithmetic_intensity"),
        "achieved_tflops": number("achieved_tflops"),
        "bytes": known("bytes", transfer),
        "direction": Masked(_texts(_DIRECTIONS, detail["direction"]), ~transfer),
        "source": text("transfer_source", transfer),
        "target": text("transfer_target", transfer),
        "file": text("file", function),
        "line": Masked(detail["line"], ~function | (detail["line"] == 0)),
        "poll_count": known("poll_count", task),
        "yield_count": known("yield_count", task),
    }


def _graph_edges(part: Part) -> Columns:
    edges, count = part.graph.edges, len(part.graph.nodes)
    details = part.graph.details[part.graph.details["kind"] == TRANSFER_EDGE]
    detail, has = _details_of(details, len(edges))
    # A process killed while it added an edge may have left one whose node never arrived.
    whole = (edges["source"] < count) & (edges["target"] < count)
    edges, detail, has = edges[whole], detail[whole], has[whole]
    return {
        "edge": np.flatnonzero(whole).astype(np.uint32),
        **{name: edges[name] for name in ("source", "target", "weight")},
        "kind": _texts([kind.label for kind in EdgeKind], edges["kind"]),
        "bytes": Masked(detail["bytes"], ~has),
        "direction": Masked(_texts(_DIRECTIONS, detail["direction"]), ~has),
    }


def _details_of(details: Rows, count: int) -> tuple[Rows, Rows]:
    """Return the detail of each owner, by its number, and which of them have one."""
    rows, has = np.zeros(count, details.dtype), np.zeros(count, bool)
    inside = details[details["owner"] < count]
    rows[inside["owner"]] = inside
    has[inside["owner"]] = True
    return rows, has


def _facts(part: Part) -> Columns:
    return {"name": list(part.facts), "value": list(part.facts.values())}


BUILDERS: Mapping[str, Callable[[Part], Columns]] = {
    "parts": _parts,
    "lanes": _lanes,
    "bricks": _bricks,
    "steps": _steps,
    "tiles": _tiles,
    "tile_cells": _tile_cells,
    "histograms": _histograms,
    "timeline": _timeline,
    "traces": _traces,
    "twins": _twins,
    "graph_nodes": _graph_nodes,
    "graph_edges": _graph_edges,
    "facts": _facts,
}
"""How a table is filled; part, rank and process are the same in every row and left out."""


def columns_of(part: Part, table: str) -> Iterator[Columns]:
    """Return the columns of a table, in pieces where a part may hold more than fits into memory."""
    if table == "operands":
        for rows in part.operand_rows.chunks(_AT_ONCE):
            yield _operands(part, rows)
    elif table == "fingerprints":
        first = 0
        for rows in part.fingerprint_rows.chunks(_AT_ONCE):
            yield _fingerprints(rows, first)
            first += len(rows)
    else:
        yield BUILDERS[table](part)
