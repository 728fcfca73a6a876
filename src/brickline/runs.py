"""The run on disk: the seam between the half that records and the half that looks.

`RunWriter` makes the directory, its manifest and the names of its spools; `Run` reads them back
as NumPy arrays. What a spool holds is the native core's matter and what Parquet holds is that of
`tables`; neither class knows what a brick means. The recording side imports nothing heavy.
`docs/run-format.md` describes every file.

::

    RUN/manifest.json        what this is, and the circumstances of the process that made it
    RUN/joined/PID-N.json    the circumstances of every process that joined it
    RUN/processes.jsonl      the processes that `brickline run` saw
    RUN/spool/PID-N.spool    what was recorded, one file per process and profiler
    RUN/tensors/HASH         tensors, named by their contents
    RUN/tables/*.parquet     published from the spools by the looking half
"""

from __future__ import annotations

import json
import math
import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from brickline import abi
from brickline.circumstances import (
    changed_circumstances,
    gather_circumstances,
    git_dirty,
    merge_circumstances,
)
from brickline.errors import BricklineError, InternalError, RunDamaged, RunError
from brickline.run.failures import failure_texts
from brickline.run.twin_rows import twin_problem
from brickline.run_directory import (
    FORMAT,
    MANIFEST,
    PROCESSES,
    Document,
    copy_file,
    default_run_path,
    disk_errors,
    files_of_run,
    read_manifest,
    refuse_full,
    refuse_taken,
    remove_run,
    rename_run,
    resolved,
    staging_for,
    write_json,
)
from brickline.spools import (
    Part,
    has_begun,
    live_processes,
    process_of_spool,
    read_part,
    spools_of_run,
)
from brickline.table_index import is_up_to_date

__all__ = ["Part", "Run", "RunWriter", "live_processes", "read_manifest"]


class RunWriter:
    """One process's hold on a run that is being recorded: made by `create` or `join`.

    Every call may be made from any thread. In a forked child the inherited object does nothing;
    the child joins the run by its path.
    """

    path: Path
    """Where the run lies now; `move_to` changes it."""
    id: str
    """The run's own id, the same for every process that records into it."""
    name: str
    temporary: bool
    """True for a run in the state directory that nobody asked to keep."""
    closed: bool

    def __init__(self, path: Path, manifest: Document, document: Document, file: str) -> None:
        self.path = path
        self.id = manifest["id"]
        self.name = manifest["name"]
        self.temporary = False
        self.closed = False
        self._document = document
        self._file = file
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._copy: Path | None = None
        self._numbers: set[int] = set()

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        name: str,
        overwrite: bool = False,
        weights_hash: str | None = None,
        peaks: Mapping[str, float] | None = None,
    ) -> RunWriter:
        """Make a new run, complete with its manifest before its name appears.

        Args:
            path: The directory to make. Default: a unique one in the user's state directory.
            name: What the run is called in reports.
            overwrite: Replace a run that lies there. Default False, because a recording can seldom
                be repeated. Anything but a run is never replaced.
            weights_hash: Hash of the model's weights, where it is known.
            peaks: Measured peaks of this machine, by name.

        Raises:
            RunExists: if the path is taken.
            RunError: if the disk refuses.
        """
        target = resolved(default_run_path(name) if path is None else path)
        manifest: Document = {
            "format": FORMAT,
            "version": abi.FORMAT_VERSION,
            "id": uuid.uuid4().hex,
            "name": name,
            "created": _utc_now(),
            "ended": None,
            "peaks": _json_value(peaks),
            "facts": {},
            "circumstances": gather_circumstances(weights_hash=weights_hash),
            "changed": {},
        }
        with disk_errors(target):
            refuse_taken(target, overwrite)
            target.parent.mkdir(parents=True, exist_ok=True)
            with staging_for(target, overwrite) as staging:
                (staging / "spool").mkdir(mode=0o700)
                write_json(staging / MANIFEST, manifest)
        writer = cls(target, manifest, manifest, MANIFEST)
        writer.temporary = path is None
        return writer

    @classmethod
    def join(cls, path: str | os.PathLike[str]) -> RunWriter:
        """Record into a run that another process, or this one, has made.

        Raises:
            NotARun: if no run lies there; and the other errors of `read_manifest`.
        """
        target = resolved(path)
        manifest = read_manifest(target)
        document: Document = {
            "process": os.getpid(),
            "created": _utc_now(),
            "ended": None,
            "peaks": None,
            "facts": {},
            "circumstances": gather_circumstances(),
            "changed": {},
        }
        file = f"joined/{os.getpid()}-{_random_number()}.json"
        with disk_errors(target):
            (target / "joined").mkdir(mode=0o700, exist_ok=True)
            write_json(target / file, document)
        return cls(target, manifest, document, file)

    @property
    def owner(self) -> bool:
        """Whether this writer made the run, rather than joined it."""
        return self._file == MANIFEST

    def spool_path(self, process: int | None = None) -> Path:
        """Return a name for a new spool that nobody else is given; the core creates the file.

        The maker of a run counts from 0. Those who join draw numbers at random, because processes
        in other containers or on other machines may have the same process id.
        """
        owner = os.getpid() if process is None else process
        with self._lock:
            while True:
                number = len(self._numbers) if self.owner else _random_number()
                path = self.path / "spool" / f"{owner}-{number}.spool"
                taken = number in self._numbers or path.exists()
                self._numbers.add(number)
                if not taken:
                    return path

    def note(self, *, peaks: Mapping[str, float] | None = None, **facts: Any) -> None:
        """Add named facts to the manifest, atomically; the last value of a name counts."""
        if os.getpid() != self._process:
            return
        with self._lock, disk_errors(self.path):
            if peaks is not None:
                self._document["peaks"] = _json_value(peaks)
            self._document["facts"].update(_json_value(facts))
            self._write()

    def close(self, **facts: Any) -> None:
        """Note when the recording ended, what became known meanwhile, and `facts`.

        The spools are closed by whoever writes them, before this. A second call does nothing.

        Raises:
            RunError: if the disk refuses; the manifest is then as it was.
        """
        if os.getpid() != self._process:
            return
        with self._lock:
            if self.closed:
                return
            self.closed = True
            first, now = self._document["circumstances"], gather_circumstances()
            if not self.temporary and first["cwd"]:
                now["git"]["dirty"] = git_dirty(Path(first["cwd"]))
            self._document["changed"] = changed_circumstances(first, now)
            self._document["circumstances"] = merge_circumstances(first, now)
            self._document["ended"] = _utc_now()
            try:
                self.note(**facts)
            finally:
                if self._copy is not None:
                    self._leave_for(self.copy_to(self._copy, overwrite=True))

    def move_to(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Keep the run under another name; recording goes on.

        On the same filesystem this is a rename. From one filesystem to another `path` holds a copy
        from now on, which `close` brings up to date before it deletes the original. A run that was
        joined belongs to its maker: it is copied and stays.

        Raises:
            RunExists: if the path is taken.
            RunError: if the disk refuses; the run is then where it was.
        """
        with self._lock:
            target = resolved(path)
            if target == self.path:
                self.temporary = False
                return target
            if self.owner:
                with disk_errors(target):
                    refuse_taken(target, overwrite)
                    target.parent.mkdir(parents=True, exist_ok=True)
                if rename_run(self.path, target, overwrite):
                    self.path, self.temporary = target, False
                    return target
            self.copy_to(target, overwrite=overwrite)
            self.temporary = False
            if self.closed:
                self._leave_for(target)
            else:
                self._copy = target
            return target

    def copy_to(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Copy all that is recorded so far; the copy appears whole or not at all.

        Raises:
            RunExists: if the path is taken.
            RunError: if the disk refuses, with the bytes needed; nothing is left behind.
        """
        target = resolved(path)
        if self.path == target or self.path in target.parents:
            raise RunError(f"expected a path outside the run {self.path}, got {target}")
        files = files_of_run(self.path)
        needed = sum(file.stat().st_size for file in files)
        with disk_errors(target, needed):
            refuse_taken(target, overwrite)
            target.parent.mkdir(parents=True, exist_ok=True)
            refuse_full(target, needed)
            with staging_for(target, overwrite) as staging:
                for file in files:
                    copy_file(file, staging / file.relative_to(self.path))
                (staging / "spool").mkdir(mode=0o700, exist_ok=True)
        return target

    def discard(self) -> None:
        """Delete the run, if it is still the one that this writer made."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self.closed = True
            if self.owner and self._still_there():
                remove_run(self.path)

    def _leave_for(self, target: Path) -> None:
        """Delete the original of a finished copy, unless it is not ours or still written to."""
        if self.owner and not live_processes(self.path):
            remove_run(self.path)
            self.path, self._copy = target, None

    def _write(self) -> None:
        # The path may hold another run by now: somebody moved this one, or overwrote it.
        if self._still_there():
            write_json(self.path / self._file, self._document)

    def _still_there(self) -> bool:
        with suppress(RunError):
            return bool(read_manifest(self.path)["id"] == self.id)
        return False


@dataclass(frozen=True, eq=False)
class Run:
    """A run as it was when it was opened."""

    path: Path
    manifest: Document
    parts: list[Part]
    problems: list[BricklineError]
    """What is damaged or cut off, and what broke inside brickline while it recorded, which is an
    `InternalError`; everything else can be read."""
    joined: list[Document]
    """The documents of the processes that joined, in order of time."""
    processes: list[Document]
    """What `brickline run` saw: pid, argv and parent of every process it started or followed."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Run:
        """Read a run, live or finished.

        Raises:
            NotARun: if the path holds something else, or nothing.
            RunVersion: if a newer brickline wrote it.
            RunDamaged: if the manifest, or every partition, is damaged.
        """
        directory = resolved(path)
        manifest = read_manifest(directory)
        parts: list[Part] = []
        problems: list[BricklineError] = []
        for spool in spools_of_run(directory):
            if not has_begun(spool):
                continue
            try:
                part = read_part(spool)
            except RunError as error:
                problems.append(error)
                continue
            parts.append(part)
            problems += [RunDamaged(f"{text} - at {spool}") for text in part.problems]
            problems += [found for found in (twin_problem(spool),) if found is not None]
        if problems and not parts:
            raise problems[0]
        joined = sorted(_joined_documents(directory), key=lambda one: str(one.get("created")))
        problems += [InternalError(text) for text in _failures_in((manifest, *joined))]
        return cls(directory, manifest, parts, problems, joined, _process_lines(directory))

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.manifest["name"])

    @cached_property
    def circumstances(self) -> Document:
        """The maker's circumstances; what it did not know is filled from those who joined."""
        merged: Document = {}
        for document in (self.manifest, *self.joined):
            found = document.get("circumstances")
            if isinstance(found, dict):
                merged = merge_circumstances(merged, found)
        return merged

    @cached_property
    def peaks(self) -> dict[str, float]:
        """Measured peaks of the machine, by name; empty where none were measured."""
        for document in (self.manifest, *self.joined):
            peaks = document.get("peaks")
            if isinstance(peaks, dict) and peaks:
                return dict(peaks)
        return {}

    @property
    def is_live(self) -> bool:
        """Whether some process records into it at this moment."""
        return bool(live_processes(self.path))

    @property
    def unfollowed(self) -> list[Document]:
        """Processes that `brickline run` saw and that left no partition."""
        recorded = {process_of_spool(spool) for spool in spools_of_run(self.path)}
        return [process for process in self.processes if process.get("pid") not in recorded]

    def publish(self, *, force: bool = False) -> Path | None:
        """Write the Parquet tables, unless they are up to date, and return their directory.

        Args:
            force: Publish a live run too, as it was when it was opened. Default False, because
                the tables of a live run are out of date at once.

        Returns:
            None where nothing could be published: the run is live, or cannot be written to.
            `tables.table_from_run` gives the same tables in memory.
        """
        if self.is_live and not force:
            return None
        try:
            if is_up_to_date(self):  # asked without pyarrow, which takes long to load
                return self.path / "tables"
            from brickline.tables import publish_tables

            return publish_tables(self)
        except OSError:
            return None


def failures_of_run(directory: Path) -> list[str]:
    """Return what broke inside brickline while it recorded, a sentence for each kind.

    Raises:
        RunError: if the manifest cannot be read.
    """
    return list(_failures_in((read_manifest(directory), *_joined_documents(directory))))


def _failures_in(documents: Iterable[Document]) -> Iterator[str]:
    for document in documents:
        facts = document.get("facts")
        noted = facts.get("recording") if isinstance(facts, dict) else None
        if isinstance(noted, dict):
            yield from failure_texts(noted.get("failures"))


def _joined_documents(directory: Path) -> Iterator[Document]:
    for file in sorted((directory / "joined").glob("*.json")):
        with suppress(OSError, ValueError, RecursionError):
            document = json.loads(file.read_text(encoding="utf-8"))
            if isinstance(document, dict):
                yield document


def _process_lines(directory: Path) -> list[Document]:
    """Return the whole lines; the last may be cut off where `brickline run` was killed."""
    lines: list[Document] = []
    with suppress(OSError):
        for line in (directory / PROCESSES).read_text(encoding="utf-8").splitlines():
            with suppress(ValueError, RecursionError):
                entry = json.loads(line)
                if isinstance(entry, dict):
                    lines.append(entry)
    return lines


def _random_number() -> int:
    return int.from_bytes(os.urandom(4), "little")


def _utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _json_value(value: Any) -> Any:
    """Return the value as JSON can hold it; a number that is not finite becomes None."""
    if isinstance(value, Mapping):
        return {str(key): _json_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(entry) for entry in value]
    if type(value).__module__ == "numpy" and hasattr(value, "item"):
        return _json_value(value.item())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
