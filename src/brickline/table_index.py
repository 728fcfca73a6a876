"""The index of a run's published tables: what they were made from, and whether that still holds.

Knows neither columns nor rows, so it needs no pyarrow: whoever only wants to know whether the
tables are there does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brickline.documents import parsed_json
from brickline.run_directory import write_json
from brickline.spools import spools_of_run, stamp_of_spool

if TYPE_CHECKING:
    from brickline.runs import Run

TABLES_VERSION = 3
"""Version of the columns; tables of another version are published anew."""


def write_index(directory: Path, document: Mapping[str, Any]) -> None:
    """Write the index beside its tables, whole or not at all; it comes after them."""
    about = {"format": "brickline-tables", "version": TABLES_VERSION}
    write_json(directory / "index.json", {**about, **document})


def source_of_run(run: Run) -> dict[str, list[int]]:
    """Return size and time of every spool as it was when it was read."""
    read = {part.path: part.stamp for part in run.parts}
    spools = spools_of_run(run.path)
    return {spool.name: list(read.get(spool) or stamp_of_spool(spool)) for spool in spools}


def is_up_to_date(run: Run, tables: Iterable[str] = ()) -> bool:
    """Return whether a run's tables lie there whole, made from its spools as they were read.

    Args:
        run: whose tables.
        tables: names that must be there beside those that the index lists.
    """
    return _current(run.path / "tables", source_of_run(run), tables) is not None


def published_rows(path: Path, tables: Iterable[str]) -> dict[str, int] | None:
    """Return how many rows each published table of a run has, without reading a spool.

    None where the tables are missing, cut off or out of date, or where something was left out of
    them because it is damaged: whoever opens the run itself is told so.
    """
    source = {spool.name: list(stamp_of_spool(spool)) for spool in spools_of_run(path)}
    found = _current(path / "tables", source, tables)
    if found is None or found.get("problems") != 0:
        return None
    rows: dict[str, int] = found["rows"]
    return rows


def _current(
    directory: Path, source: Mapping[str, list[int]], tables: Iterable[str]
) -> dict[str, Any] | None:
    try:
        found = parsed_json((directory / "index.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    holds = (
        isinstance(found, dict)
        and found.get("version") == TABLES_VERSION
        and found.get("complete") is True
        and found.get("source") == source
        and isinstance(found.get("rows"), dict)
        and isinstance(found.get("bytes"), dict)
        and all(
            _size(directory / f"{name}.parquet") == found["bytes"].get(name)
            for name in {*found["bytes"], *tables}
        )
    )
    return found if holds else None


def _size(file: Path) -> int:
    """Return how many bytes a file has; -1 where there is none."""
    try:
        return file.stat().st_size if file.is_file() else -1
    except OSError:
        return -1
