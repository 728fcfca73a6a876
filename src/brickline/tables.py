"""The Parquet tables of a run: built in memory, and published beside its spools.

This is the looking half: it imports pyarrow, and nothing that records imports it. What the tables
hold is the matter of `table_columns`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from brickline.errors import UsageError
from brickline.spools import Part
from brickline.table_columns import SCHEMAS, Columns, Masked, columns_of
from brickline.table_index import TABLES_VERSION, is_up_to_date, source_of_run, write_index

if TYPE_CHECKING:
    from brickline.runs import Run


def table_from_run(run: Run, name: str) -> pa.Table:
    """Build one table in memory, whether or not the run can be written to.

    Raises:
        UsageError: if there is no such table.
    """
    if name not in SCHEMAS:
        raise UsageError(f"expected one of {', '.join(SCHEMAS)}, got {name!r}")
    schema = _schema_of(run, name)
    return pa.concat_tables([schema.empty_table(), *_tables_of(run, name, schema)])


def publish_tables(run: Run) -> Path:
    """Write every table of the run beside its spools, unless they are up to date.

    Each table is written under another name and renamed, and the index, which says what the
    tables were made from, comes last.

    Raises:
        OSError: if the disk refuses.
    """
    directory = run.path / "tables"
    if is_up_to_date(run, SCHEMAS):
        return directory
    directory.mkdir(mode=0o700, exist_ok=True)
    rows = {name: _publish(run, name, directory) for name in SCHEMAS}
    document = {
        "complete": all(part.final for part in run.parts),
        "source": source_of_run(run),
        "rows": rows,
        "bytes": {name: (directory / f"{name}.parquet").stat().st_size for name in SCHEMAS},
        "problems": len(run.problems),
    }
    write_index(directory, document)
    return directory


def _publish(run: Run, name: str, directory: Path) -> int:
    schema = _schema_of(run, name)
    rows = 0
    with (
        _replacing(directory / f"{name}.parquet") as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        for table in _tables_of(run, name, schema):
            rows += table.num_rows
            if table.num_rows:
                writer.write_table(table)
    return rows


@contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _schema_of(run: Run, name: str) -> pa.Schema:
    about = {
        "brickline.format": "brickline-table",
        "brickline.version": str(TABLES_VERSION),
        "brickline.table": name,
        "brickline.run": run.manifest["id"],
        "brickline.run_version": str(run.manifest["version"]),
    }
    return SCHEMAS[name].with_metadata(about)


def _tables_of(run: Run, name: str, schema: pa.Schema) -> Iterator[pa.Table]:
    for part in run.parts:
        for columns in columns_of(part, name):
            yield _table_from_columns(part, columns, schema)


def _table_from_columns(part: Part, columns: Columns, schema: pa.Schema) -> pa.Table:
    length = max((len(_values(column)) for column in columns.values()), default=0)
    same = {"part": part.name, "rank": part.rank, "process": part.process}
    arrays = []
    for field in schema:
        column = columns.get(field.name)
        if column is None:
            arrays.append(pa.repeat(pa.scalar(same[field.name], field.type), length))
        else:
            arrays.append(_array(column, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def _values(column: Any) -> Any:
    return column.values if isinstance(column, Masked) else column


def _array(column: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(column, pa.Array):
        return column.cast(kind)
    if isinstance(column, Masked):
        if isinstance(column.values, pa.Array):
            absent = pa.array(column.absent)
            return pc.if_else(absent, pa.scalar(None, kind), column.values.cast(kind))
        return pa.array(np.ascontiguousarray(column.values), mask=column.absent).cast(kind)
    if isinstance(column, np.ndarray):
        return pa.array(np.ascontiguousarray(column)).cast(kind)
    return pa.array(column, type=kind)
