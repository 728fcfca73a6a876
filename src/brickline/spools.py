"""The spools of a run: finding them, reading them as arrays, and who writes them right now.

The native core reads a spool's bytes; here they become NumPy arrays with the columns of `abi`. It
knows files and processes, not what a brick means, and it never writes.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from brickline import _core, abi
from brickline.disk_rows import DiskRows
from brickline.errors import RunDamaged, RunError, RunVersion
from brickline.graph_rows import NO_STRING, GraphTables, detail_dtype, edge_dtype, node_dtype

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Rows: TypeAlias = "NDArray[Any]"

_NAME = re.compile(r"(\d+)-(\d+)\.spool")
_GRAPH = frozenset(
    {abi.Table.GRAPH_NODE, abi.Table.GRAPH_EDGE, abi.Table.GRAPH_DETAIL, abi.Table.GRAPH_STRING}
)
_HEAD = struct.Struct("<8s4IQ2I")  # SpoolHeader in abi.h from its start up to `closed`


@dataclass(frozen=True, eq=False)
class Part:
    """What one spool holds, as arrays; `abi` describes their columns."""

    path: Path
    header: Mapping[str, Any]
    lanes: Sequence[Mapping[str, Any]]
    nodes: Rows
    node_lanes: Rows
    bins: Rows
    cells: Rows
    cell_lanes: Rows
    recent: Rows
    recent_lanes: Rows
    strings: Sequence[str]
    slots: Rows
    traces: Rows
    trace_times: Rows
    """Times that the callers of some traces gave; `times_us` has those of all."""
    operand_rows: DiskRows
    """The operands of all traces, on disk; `operands` loads them."""
    fingerprint_rows: DiskRows
    """The fingerprints, on disk: the one with id n is row n - 1; `fingerprints` loads them."""
    graph: GraphTables
    """The execution graph since it was last cleared; empty where none was drawn."""
    facts: Mapping[str, float]
    """Named numbers; where one was noted twice, the last."""
    problems: Sequence[str]
    """What was left out because it is damaged or cut off."""
    stamp: tuple[int, int]
    """Size and time of change in ns of the file, taken before it was read."""
    final: bool
    """Whether nobody was writing to it any more when it was read."""

    @property
    def name(self) -> str:
        """The spool's name without its ending, unique within the run."""
        return self.path.stem

    @property
    def process(self) -> int:
        """The process that recorded it."""
        return int(self.header["process"])

    @property
    def rank(self) -> int:
        """The rank of that process among those of a distributed job."""
        return int(self.header["rank"])

    @cached_property
    def phases(self) -> dict[int, str]:
        """Names of the phases by id; the empty name stands for work outside any."""
        steps = self.slots[self.slots["kind"] == abi.SlotKind.STEP]
        return {0: ""} | {int(row["level"]): self.string(row["name"]) for row in steps}

    def hold(self) -> None:
        """Keep the file open, so that what is on disk can be read after it was deleted."""
        self.operand_rows.hold()
        self.fingerprint_rows.hold()

    @cached_property
    def times_us(self) -> Rows:
        """How long each trace took, as its caller said or its clock; NaN where it is not known."""
        import numpy as np

        rows, given = self.traces, self.trace_times
        start, end = rows["start_ns"], rows["end_ns"]
        known = (rows["timed"] > 0) & (start >= 0) & (end >= start)
        times: Rows = np.where(known, (end - start) / 1e3, np.nan)
        order = np.argsort(rows["trace"], kind="stable")
        place = np.searchsorted(rows["trace"], given["trace"], sorter=order)
        # A trace comes after its time, so the last time may be of a trace that never came.
        inside = place < len(rows)
        at, given = order[place[inside]], given[inside]
        came = rows["trace"][at] == given["trace"]
        times[at[came]] = given["time_us"][came]
        return times

    @cached_property
    def operands(self) -> Rows:
        """All operands, in memory."""
        return self.operand_rows.read()

    @cached_property
    def fingerprints(self) -> Rows:
        """All fingerprints, in memory; up to a KiB each, so a long run is better read in pieces.

        A row of zeros stands for one that was announced and never came.
        """
        return self.fingerprint_rows.read()

    def string(self, number: int) -> str:
        """Return a string by its id."""
        return self.strings[number] if number < len(self.strings) else f"string {number}"


def read_part(spool: Path) -> Part:
    """Read one spool.

    Raises:
        RunDamaged: if it is truncated or inconsistent.
        RunVersion: if a newer brickline wrote it.
        RunError: if it cannot be read.
    """
    with _spool_errors(spool):
        # Taken first: what is written meanwhile then counts as not read.
        stamp, final = stamp_of_spool(spool), not _is_written(spool)
        return _part_from_snapshot(spool, _core.read_spool(os.fspath(spool)), stamp, final)


def read_statistics(spool: Path) -> Part:
    """Read what a spool has of nodes, slots and facts; cheap enough for ten times a second.

    Traces, graph, tile cells and the timeline are empty, and whether somebody still writes is not
    asked, because that means reading the memory map of the process.

    Raises:
        RunError: as `read_part` does.
    """
    with _spool_errors(spool):
        snapshot = _core.read_spool(os.fspath(spool), statistics_only=True)
        return _part_from_snapshot(spool, snapshot, (0, 0), final=False)


@contextmanager
def _spool_errors(spool: Path) -> Iterator[None]:
    """Turn what a spool or the disk refuses into RunError."""
    try:
        yield
    except _core.SpoolError as error:
        text, code = error.args
        if code == "version":
            raise RunVersion(text) from None
        if code == "io":
            raise RunError(text) from None
        raise RunDamaged(f"{text}; the run's other partitions are read without it") from None
    except OSError as error:
        raise RunError(f"cannot read {spool}: {error.strerror}; check its permissions") from error
    except (ValueError, KeyError, IndexError) as error:
        raise RunDamaged(f"expected whole rows, found {error} - at {spool}") from None


def live_processes(path: str | os.PathLike[str]) -> list[int]:
    """Return the processes that record into the run at this moment."""
    written = filter(_is_written, spools_of_run(Path(path)))
    return sorted({_spool_owner(spool)[0] for spool in written})


def stamp_of_spool(spool: Path) -> tuple[int, int]:
    """Return size and time of change in nanoseconds."""
    state = spool.stat()
    return state.st_size, state.st_mtime_ns


def _part_from_snapshot(
    spool: Path, snapshot: Mapping[str, Any], stamp: tuple[int, int], final: bool
) -> Part:
    import numpy as np  # not with the module: a disabled profiler reads nothing

    tables, strings = snapshot["tables"], snapshot["strings"]

    def rows(table: abi.Table, dtype: np.dtype[Any]) -> Rows:
        return np.frombuffer(tables.get(int(table), b""), dtype)

    def on_disk(table: abi.Table, dtype: np.dtype[Any]) -> DiskRows:
        return DiskRows(spool, dtype, snapshot["spans"].get(int(table), ()))

    facts = rows(abi.Table.FACT, abi.FACT)
    problems = list(snapshot.get("problems", ()))
    try:
        graph = _graph_from_tables(tables) if tables.keys() & _GRAPH else _no_graph()
    except ValueError as error:
        # The statistics do not depend on the graph, so they are read without it.
        problems.append(f"damaged graph tables, left out: {error}")
        graph = _no_graph()
    part = Part(
        path=spool,
        header=snapshot["header"],
        lanes=snapshot["lanes"],
        nodes=np.frombuffer(snapshot["nodes"], abi.NODE),
        node_lanes=np.frombuffer(snapshot["node_lanes"], "<u4"),
        bins=np.frombuffer(snapshot["bins"], abi.BIN),
        cells=np.frombuffer(snapshot["cells"], abi.CELL),
        cell_lanes=np.frombuffer(snapshot["cell_lanes"], "<u4"),
        recent=np.frombuffer(snapshot["recent"], abi.RECORD),
        recent_lanes=np.frombuffer(snapshot["recent_lanes"], "<u4"),
        strings=strings,
        slots=rows(abi.Table.SLOT, abi.SLOT),
        traces=rows(abi.Table.TRACE, abi.TRACE),
        trace_times=rows(abi.Table.TRACE_TIME, abi.TRACE_TIME),
        operand_rows=on_disk(abi.Table.OPERAND, abi.OPERAND),
        fingerprint_rows=on_disk(abi.Table.FINGERPRINT, abi.FINGERPRINT),
        graph=graph,
        facts={strings[row["name"]]: float(row["value"]) for row in facts},
        problems=problems,
        stamp=stamp,
        final=final,
    )
    for table, lanes in (
        (part.nodes, part.node_lanes),
        (part.cells, part.cell_lanes),
        (part.recent, part.recent_lanes),
    ):
        if len(table) != len(lanes):
            raise ValueError(f"{len(table)} rows on {len(lanes)} lanes")
    return part


@cache
def _no_graph() -> GraphTables:
    return _graph_from_tables({})


def _graph_from_tables(tables: Mapping[int, bytes]) -> GraphTables:
    """Return the newest graph: a row of ones in each table marks where the one before ended."""
    import numpy as np

    kinds = (abi.Table.GRAPH_NODE, abi.Table.GRAPH_EDGE, abi.Table.GRAPH_DETAIL)
    dtypes = (node_dtype(), edge_dtype(), detail_dtype())
    found = [
        _since_clear(np.frombuffer(tables.get(int(kind), b""), dtype))
        for kind, dtype in zip(kinds, dtypes, strict=True)
    ]
    strings, clears = _graph_strings(tables.get(int(abi.Table.GRAPH_STRING), b""))
    # A process killed while it cleared has marked some tables only: the rest is the old graph's.
    newest = max(clears, *(count for _, count in found))
    nodes, edges, details = (rows if count == newest else rows[:0] for rows, count in found)
    return GraphTables(strings if clears == newest else [], nodes, edges, details)


def _since_clear(rows: Rows) -> tuple[Rows, int]:
    import numpy as np

    ones = (rows.view(np.uint8).reshape(len(rows), rows.itemsize) == 0xFF).all(axis=1)
    marks = np.flatnonzero(ones)
    return (rows[marks[-1] + 1 :], len(marks)) if len(marks) else (rows, 0)


def _graph_strings(rows: bytes) -> tuple[list[str], int]:
    """Return the texts of StringRow entries (id, length, UTF-8 padded to 8 bytes) and the marks."""
    strings: list[str] = []
    offset = clears = 0
    while offset + 8 <= len(rows):
        number, length = struct.unpack_from("<2I", rows, offset)
        offset += 8
        if number == length == NO_STRING:
            strings, clears = [], clears + 1
            continue
        if number != len(strings) or length > len(rows) - offset:
            raise ValueError(f"graph string {number} after {len(strings)}")
        strings.append(rows[offset : offset + length].decode("utf-8", "replace"))
        offset += (length + 7) // 8 * 8
    return strings, clears


def spools_of_run(directory: Path) -> list[Path]:
    """Return the spools of a run by process and number; [] where there are none."""
    try:
        names = os.listdir(directory / "spool")
    except OSError:
        return []
    matched = [match for name in names if (match := _NAME.fullmatch(name))]
    matched.sort(key=lambda match: (int(match[1]), int(match[2])))
    return [directory / "spool" / match[0] for match in matched]


def process_of_spool(spool: Path) -> int:
    """Return the process id in a spool's name."""
    return int(spool.stem.partition("-")[0])


def has_begun(spool: Path) -> bool:
    """Return False for a spool whose process ended before its header was written."""
    with suppress(OSError), open(spool, "rb") as file:
        head = file.read(12)
        return any(head[:8]) and any(head[8:])
    return True


def _is_written(spool: Path) -> bool:
    process, closed = _spool_owner(spool)
    return bool(process) and not closed and _maps(process, spool)


def _spool_owner(spool: Path) -> tuple[int, bool]:
    with suppress(OSError, struct.error), open(spool, "rb") as file:
        _, _, _, process, _, _, _, closed = _HEAD.unpack(file.read(_HEAD.size))
        return process, bool(closed)
    return 0, True


def _maps(process: int, spool: Path) -> bool:
    try:
        identity = spool.stat().st_ino
        return any(
            path == str(spool) or (inode == identity and Path(path).name == spool.name)
            for path, inode in _mapped_files(process)
        )
    except PermissionError:
        return True  # a live process of another user: better to call it live than to miss it
    except OSError:
        return False


def _mapped_files(process: int) -> Iterator[tuple[str, int]]:
    with open(f"/proc/{process}/maps", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6:
                yield fields[5], int(fields[4])
