"""Runs as a database to be asked in SQL: DuckDB over their tables, closed to everything else.

`open_database` registers the views of `query_views` over the published tables of each run, or over
tables in memory where none can be published. Then the database is closed: it reads those tables and
no other file, loads nothing and writes nothing. How an answer looks is the matter of `report`.

Extra: ``query`` (duckdb). pyarrow, which takes longer to load than most questions to answer, is
loaded only where tables are made in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from brickline.errors import BricklineError, RunDamaged, UsageError
from brickline.query_views import (
    GIVEN,
    TABLES,
    VIEWS,
    about_views,
    listed,
    quoted,
    views_for,
)
from brickline.run.failures import problem_text
from brickline.run_directory import read_manifest, resolved
from brickline.run_paths import run_labels
from brickline.runs import Run
from brickline.table_index import published_rows
from brickline.verdict import DivergenceReport, VerdictRow

_AT_ONCE = 4096
_MAY_BE_DAMAGE = {
    *("Error", "FatalException", "InternalException", "InvalidInputException", "IOException"),
    *("OutOfMemoryException", "SerializationException"),
}
"""What DuckDB raises over a file whose bytes are wrong, and over a few questions."""
_RECORDED = ("bricks", "steps", "tiles", "traces")
_RUN_COLUMNS = {
    **dict.fromkeys(("run", "path", "id", "name", "created", "ended"), "VARCHAR"),
    "is_live": "BOOLEAN",
    **dict.fromkeys(("hostname", "cpu", "driver", "commit"), "VARCHAR"),
    "devices": "VARCHAR[]",
    **dict.fromkeys(("brickline", "python", "numpy", "torch", "triton", "cuda"), "VARCHAR"),
}
_FINDING_FIELDS = (
    *("name", "reference_name", "verdict", "layer_idx", "position", "ordinal", "direction"),
    *("brick", "op", "z", "local_error", "propagated_error", "share", "where", "cause", "repro"),
    "reason",
)
_NUMBERS = {
    **dict.fromkeys(("layer_idx", "position", "ordinal"), "BIGINT"),
    **dict.fromkeys(("z", "local_error", "propagated_error", "share"), "DOUBLE"),
}
_VIEW_ROWS = [
    f"({place}, {quoted(name)}, {quoted(about)})"
    for place, (name, about) in enumerate(about_views().items())
]
LIST_OF_VIEWS = f"""
SELECT views.name AS "view", about, string_agg(column_name, ', ' ORDER BY column_index) AS columns
FROM (VALUES {", ".join(_VIEW_ROWS)}) AS views(place, name, about)
JOIN duckdb_columns() ON table_name = views.name GROUP BY ALL ORDER BY any_value(place)
"""
"""What to ask for every view, what it holds, and its columns."""


@dataclass(frozen=True)
class Answer:
    """Rows that come as they are asked for; a second look finds none."""

    columns: tuple[str, ...]
    types: tuple[str, ...]
    """DuckDB's names of the columns' types."""
    rows: Iterator[tuple[Any, ...]] = field(repr=False)


@dataclass(frozen=True)
class _Source:
    """One run: its tables on disk, or the run itself."""

    label: str
    manifest: Mapping[str, Any]
    circumstances: Mapping[str, Any]
    path: Path
    published: Path | None
    run: Run | None
    is_live: bool
    is_empty: bool


class Database:
    """Views over some runs and reports; made by `open_database`, closed by `close` or `with`."""

    notes: list[str]
    """What is worth a word: a run that is still written, is empty or is damaged."""

    def __init__(self, connection: Any, notes: list[str], files: Sequence[Path] = ()) -> None:
        self._connection = connection
        self._files = files
        self._worker = ThreadPoolExecutor(1, "brickline-query")
        self.notes = notes

    def ask(self, sql: str) -> Answer:
        """Return the answer to one SELECT; DESCRIBE, SHOW and SUMMARIZE are such, too.

        Raises:
            UsageError: if DuckDB refuses it, in DuckDB's own words, or if it is something else.
        """
        import duckdb

        try:
            statements = self._connection.extract_statements(sql)
            kinds = [each.type for each in statements]
            if kinds != [duckdb.StatementType.SELECT]:
                raise UsageError(_not_one_select([each.name for each in kinds]))
            cursor = self._held(lambda: self._connection.execute(statements[0]))
            about = cursor.description
        except duckdb.Error as error:
            raise self._why(error) from None
        names, types = [each[0] for each in about], [str(each[1]) for each in about]
        return Answer(tuple(names), tuple(types), self._rows(cursor, duckdb.Error))

    def _why(self, error: Exception) -> BricklineError:
        """Return whose fault it is that DuckDB gave up: a damaged table's, or the question's."""
        if type(error).__name__ in _MAY_BE_DAMAGE:
            return _damage(self._files) or _refused(error)
        return _refused(error)

    def close(self) -> None:
        """Forget everything."""
        self._worker.shutdown()
        self._connection.close()

    def _rows(self, cursor: Any, refusal: type[Exception]) -> Iterator[tuple[Any, ...]]:
        try:
            while some := self._held(lambda: cursor.fetchmany(_AT_ONCE)):
                yield from some
        except refusal as error:
            raise self._why(error) from None

    def _held(self, work: Callable[[], Any]) -> Any:
        """Return what DuckDB gives, and end it on Ctrl-C, for which it looks only now and then."""
        future = self._worker.submit(work)
        try:
            return future.result()
        except KeyboardInterrupt:
            while not future.cancel() and not future.done():
                self._connection.interrupt()
                wait([future], timeout=0.1)
            raise

    def __enter__(self) -> Database:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_database(paths: Sequence[Path], sql: str | None = None) -> Database:
    """Open runs, and reports that `check` or `compare` kept, for questions.

    Args:
        paths: Runs and reports, at least one; see `run_paths.find_runs`.
        sql: The question, where it is known. Of a run whose tables are not published only what it
            names is then read. Default None: everything.

    Raises:
        UsageError: if the extra is missing, or nothing is given.
        RunError: if one of them cannot be read.
    """
    if not paths:
        raise UsageError("expected at least one run or kept report, got none")
    connection = _connect()
    files: list[Path] = []
    try:
        labels = dict(zip(paths, run_labels(paths), strict=True))
        sources = [_source(path, labels[path]) for path in paths if not path.is_file()]
        reports = {labels[path]: DivergenceReport.load(path) for path in paths if path.is_file()}
        views = views_for(sql)
        tables = [view for view in views if view in TABLES]
        directories = [each.published for each in sources if each.published]
        files = [each / f"{table}.parquet" for each in directories for table in tables]
        for view in views:
            if view in TABLES:
                _register_table(connection, view, sources)
            elif view in GIVEN:
                _register_given(connection, view, sources, reports)
            else:
                connection.execute(f"CREATE VIEW {view} AS {VIEWS[view].sql}")
        _shut(connection, files)
    except BaseException as error:
        connection.close()
        if type(error).__module__.endswith("duckdb"):
            raise _damage(files) or _unreadable(error, "tables/ of a run") from error
        raise
    return Database(connection, [note for each in sources for note in _notes(each)], files)


def _connect() -> Any:
    try:
        import duckdb
    except ImportError:
        raise UsageError(
            "asking runs in SQL needs duckdb, which is not installed; pip install brickline[query]"
        ) from None
    return duckdb.connect(
        config={"autoinstall_known_extensions": False, "autoload_known_extensions": False}
    )


def _shut(connection: Any, files: Sequence[Path]) -> None:
    """Leave the database the published tables and nothing else of the file system, for good."""
    for setting in (
        "temp_directory = ''",
        "python_enable_replacements = false",
        f"allowed_paths = {listed(map(str, files))}",
        "enable_external_access = false",
        "lock_configuration = true",
    ):
        connection.execute(f"SET {setting}")


def _source(path: Path, label: str) -> _Source:
    """Open a run: its published tables, which are published now where they can be, or itself."""
    directory = resolved(path)
    manifest = read_manifest(directory)
    rows = published_rows(directory, TABLES)
    if rows is not None:
        about = manifest.get("circumstances") or {}
        empty = not any(count for table, count in rows.items() if table in _RECORDED)
        return _Source(label, manifest, about, path, directory / "tables", None, False, empty)
    run = Run.open(path)
    empty = not any(len(part.nodes) + len(part.traces) for part in run.parts)
    published, is_live = run.publish(), run.is_live
    return _Source(label, manifest, run.circumstances, path, published, run, is_live, empty)


def _register_table(connection: Any, table: str, sources: Sequence[_Source]) -> None:
    """Make one table of all runs a view."""
    parts = []
    for number, source in enumerate(sources):
        if source.published is not None:
            rows = f"read_parquet({quoted(str(source.published / f'{table}.parquet'))})"
        else:
            from brickline.tables import table_from_run

            assert source.run is not None
            rows = f"_{number}_{table}"
            connection.register(rows, table_from_run(source.run, table))
        parts.append(f"SELECT {quoted(source.label)} AS run, * FROM {rows}")
    if not parts:
        from brickline.table_columns import SCHEMAS

        connection.register(f"_no_{table}", SCHEMAS[table].empty_table())
        parts.append(f"SELECT NULL::VARCHAR AS run, * FROM _no_{table}")
    connection.execute(f"CREATE VIEW {table} AS {' UNION ALL BY NAME '.join(parts)}")


def _register_given(
    connection: Any,
    view: str,
    sources: Sequence[_Source],
    reports: Mapping[str, DivergenceReport],
) -> None:
    """Make what manifests and reports say a table."""
    if view == "runs":
        _create(connection, view, _RUN_COLUMNS, [_run_columns(each) for each in sources])
        return
    names = VerdictRow._fields if view == "verdicts" else _FINDING_FIELDS
    kinds = {name: _NUMBERS.get(name, "VARCHAR") for name in names}
    sides = dict.fromkeys(("run", "candidate", "reference"), "VARCHAR")
    tables = [_report_columns(view, label, report) for label, report in reports.items()]
    _create(connection, view, sides | kinds, tables)


def _create(
    connection: Any, name: str, kinds: Mapping[str, str], tables: Sequence[Mapping[str, Any]]
) -> None:
    """Create a table and fill it by whole columns."""
    columns = ", ".join(f'"{column}" {kind}' for column, kind in kinds.items())
    connection.execute(f"CREATE TABLE {name} ({columns})")
    for table in tables:
        import pyarrow as pa

        connection.register("_given", pa.table({column: table[column] for column in kinds}))
        connection.execute(f"INSERT INTO {name} FROM _given")
        connection.unregister("_given")


def _run_columns(source: _Source) -> dict[str, list[Any]]:
    manifest, about = source.manifest, source.circumstances
    git = about.get("git")
    row = {name: about.get(name) for name in _RUN_COLUMNS}
    row |= {name: manifest.get(name) for name in ("id", "name", "created", "ended")}
    row |= {"run": source.label, "path": str(source.path), "is_live": source.is_live}
    row["commit"] = git.get("commit") if isinstance(git, Mapping) else None
    return {name: [_text_or_flag(value)] for name, value in row.items()}


def _report_columns(view: str, label: str, report: DivergenceReport) -> dict[str, Sequence[Any]]:
    """Return the verdicts or the findings of a report, with its label and the sides' names."""
    if view == "verdicts":
        found: dict[str, Sequence[Any]] = {**report.verdicts.columns}
    else:
        found = {
            name: [getattr(each, name) for each in report.findings] for name in _FINDING_FIELDS
        }
    length = len(found["name"])
    same = {"run": label, "candidate": report.candidate, "reference": report.reference}
    return found | {name: [text] * length for name, text in same.items()}


def _text_or_flag(value: Any) -> Any:
    """Return what a column of `runs` can hold; a manifest may have been edited by hand."""
    if value is None or isinstance(value, bool | str):
        return value
    return [str(each) for each in value] if isinstance(value, list) else str(value)


def _notes(source: _Source) -> Iterator[str]:
    if source.is_live:
        yield f"{source.path} is still being recorded; this is what it held a moment ago"
    if source.run is not None:
        yield from (
            f"{source.path}: {problem_text(problem, 'not read')}" for problem in source.run.problems
        )
    if source.is_empty:
        yield f"{source.path} is empty: no brick, step or launch was recorded into it"


def _refused(error: Exception) -> UsageError:
    """Return what DuckDB says of a question, without the traceback of a module that it lacks."""
    words = str(error).partition("Traceback (most recent")[0].rstrip()
    return UsageError(f"{words}\nThe views are: {', '.join(about_views())}")


def _damage(files: Sequence[Path]) -> RunDamaged | None:
    """Return which of some published tables is damaged, by reading them whole."""
    import duckdb

    for file in files:
        rows = f"SELECT * FROM read_parquet({quoted(str(file))}) AS rows"
        with _connect() as connection:  # one that a damaged file has not ended
            try:
                columns = connection.execute(f"DESCRIBE {rows}").fetchall()
                connection.execute(rows.replace("*", "bit_xor(hash(rows))", 1)).fetchall()
            except duckdb.Error as error:
                return _unreadable(error, str(file))
        from brickline.table_columns import SCHEMAS

        missing = {*SCHEMAS[file.stem].names} - {name for name, *_ in columns}
        if missing:
            return _unreadable(f"no column {min(missing)}", str(file))
    return None


def _unreadable(found: object, where: str) -> RunDamaged:
    words = str(found).partition("\n")[0].rstrip(" :")
    return RunDamaged(
        f"expected a published table that DuckDB can read, found {words} - at {where}; delete the"
        " directory tables/ there and it is made anew, the recording itself is not in it"
    )


def _not_one_select(kinds: Sequence[str]) -> str:
    got = "nothing" if not kinds else " and ".join(kinds)
    return (
        f"expected one SELECT (or DESCRIBE, SHOW, SUMMARIZE), got {got}; a run is only read, and"
        " PIVOT needs its values spelled out: PIVOT … ON … IN (…)"
    )
