"""The directory of a run: its manifest, its place, and how it is replaced, copied and removed.

Everything appears whole or not at all: documents are written beside their name and renamed, a
directory is prepared beside its place and renamed. It knows nothing of what spools hold.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from brickline import abi
from brickline.errors import NotARun, RunDamaged, RunError, RunExists, RunVersion
from brickline.files.paths import given_path
from brickline.spool_copies import copy_spool
from brickline.spools import live_processes, spools_of_run

Document: TypeAlias = dict[str, Any]

FORMAT = "brickline-run"
MANIFEST = "manifest.json"
PROCESSES = "processes.jsonl"
ENTRIES = frozenset({MANIFEST, PROCESSES, "joined", "spool", "tables", "tensors"})
"""All that a run's directory holds. Overwriting deletes nothing else."""

_TAKEN = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR)


def read_manifest(path: str | os.PathLike[str]) -> Document:
    """Return the manifest of a run without reading what was recorded.

    Raises:
        NotARun: if the path holds something else, or nothing.
        RunVersion: if a newer brickline wrote it.
        RunDamaged: if the manifest is cut off or contradicts itself.
        RunError: if it cannot be read.
    """
    directory = Path(path)
    file = directory / MANIFEST
    hint = "check the path, or record a run with `brickline run -o OUT SCRIPT`"
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        if spools_of_run(directory):
            raise RunDamaged(
                f"expected {MANIFEST} beside the spools, found none - at {directory}; "
                "restore it from another run of the same version to read the recording"
            ) from None
        found = "a directory without one" if directory.is_dir() else "a file"
        found = found if directory.exists() else "nothing"
        raise NotARun(
            f"expected a run (a directory with {MANIFEST}), found {found} - at {directory}; {hint}"
        ) from None
    except UnicodeDecodeError as error:
        raise RunDamaged(f"expected UTF-8, found {error.reason} - at {file}") from None
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror}; check its permissions") from error
    return _checked_manifest(text, file, hint)


def default_run_path(name: str) -> Path:
    """Return a unique path in the user's state directory, or in the temporary one without it."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:48] or "run"
    return _runs_directory() / f"{stamp}-{safe}-{os.getpid()}-{os.urandom(4).hex()}.brick"


def write_json(path: Path, document: Document) -> None:
    """Write a document so that the path holds the old one or the new one, whole, at any moment.

    Half of a surrogate pair, which stands for a byte of a command line that is no UTF-8, becomes a
    question mark: no reader of JSON has to take it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    text = json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _checked_manifest(text: str, file: Path, hint: str) -> Document:
    try:
        manifest = json.loads(text)
        json.dumps(manifest, ensure_ascii=False).encode()  # refuses halves of surrogate pairs
    except (ValueError, RecursionError) as error:
        raise RunDamaged(
            f"expected JSON, found {error} - at {file}; the spools beside it are untouched, and "
            "a manifest of another run of the same version makes them readable"
        ) from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        found = manifest.get("format") if isinstance(manifest, dict) else type(manifest).__name__
        raise NotARun(f'expected "format": "{FORMAT}", found {found!r} - at {file}; {hint}')
    version = manifest.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise RunDamaged(f"expected a whole version of at least 1, found {version!r} - at {file}")
    if version > abi.FORMAT_VERSION:
        raise RunVersion(
            f"expected version {abi.FORMAT_VERSION} or older, found {version} - at {file}; "
            "upgrade with `pip install --upgrade brickline`"
        )
    for key in ("id", "name"):
        if not isinstance(manifest.get(key), str):
            raise RunDamaged(f'expected a text "{key}", found {manifest.get(key)!r} - at {file}')
    return manifest


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path without links, so that a run keeps its place when cwd changes.

    Raises:
        UsageError: if it is no path.
        RunError: if it is not valid UTF-8: what is recorded and reported names it.
    """
    given = given_path(path)
    try:
        absolute = os.path.realpath(os.path.expanduser(given))
        absolute.encode()
    except UnicodeEncodeError:
        raise RunError(
            f"expected a path in valid UTF-8, got {os.path.abspath(given)!a}; choose another, or "
            "rename what lies there or above it"
        ) from None
    return Path(absolute)


def state_directory(*, make: bool = True) -> Path | None:
    """Return the user's state directory for brickline, or None where it cannot be written to.

    Args:
        make: Make it where it is missing. Default True; who only reads leaves no trace.
    """
    state = os.environ.get("XDG_STATE_HOME", "")
    with suppress(OSError, RuntimeError):
        base = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
        directory = base / "brickline"
        if make:
            (directory / "runs").mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(directory, os.W_OK | os.X_OK):
            return directory.resolve()
    return None


def _runs_directory() -> Path:
    directory = state_directory()
    if directory is not None:
        return directory / "runs"
    from tempfile import gettempdir

    return Path(gettempdir()).resolve()


def refuse_taken(target: Path, overwrite: bool) -> None:
    """Raise RunExists unless the target is free, or a finished run that may be replaced."""
    if not os.path.lexists(target):
        return
    try:
        read_manifest(target)
    except RunVersion:
        pass
    except RunError:
        raise RunExists(
            f"{target} exists and holds no sound run, so overwrite=True and --force leave it "
            "alone; choose another path, or remove it yourself"
        ) from None
    if not overwrite:
        raise RunExists(
            f"{target} exists; pass overwrite=True (--force on the command line) to replace the "
            "run, or choose another path"
        )
    foreign = sorted(name for name in os.listdir(target) if not _is_ours(name))
    if foreign:
        raise RunExists(
            f"{target} holds {foreign[0]!r}, which is no part of a run, so overwrite=True and "
            "--force leave it alone; move it away, or choose another path"
        )
    others = [process for process in live_processes(target) if process != os.getpid()]
    if others:
        raise RunExists(
            f"process {others[0]} is recording into {target}; stop it before replacing the run "
            "with overwrite=True or --force, or choose another path"
        )


def _is_ours(name: str) -> bool:
    return name in ENTRIES or (name.startswith(".") and name.endswith(".tmp"))


@contextmanager
def staging_for(target: Path, overwrite: bool) -> Iterator[Path]:
    """Give a directory beside the target that takes its place when the block succeeds."""
    staging = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}.new")
    staging.mkdir(mode=0o700)
    try:
        yield staging
        _put(staging, target, overwrite)
    except BaseException:
        remove_run(staging)
        raise


def _put(source: Path, target: Path, overwrite: bool) -> None:
    """Rename a directory to the target; a run that lies there is put aside first, then deleted."""
    aside = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}.old")
    replaces = overwrite and os.path.lexists(target)
    if replaces:
        os.rename(target, aside)
    try:
        os.rename(source, target)
    except BaseException as error:
        if replaces:
            os.rename(aside, target)
        if isinstance(error, OSError) and error.errno in _TAKEN:
            raise RunExists(
                f"{target} has appeared meanwhile; pass overwrite=True (--force on the command "
                "line) to replace it, or choose another path"
            ) from None
        raise
    with suppress(OSError):
        _sync(target.parent)
    if replaces:
        remove_run(aside)


def rename_run(source: Path, target: Path, overwrite: bool) -> bool:
    """Rename a run; False where the target is on another filesystem and it must be copied."""
    try:
        with disk_errors(target):
            _put(source, target, overwrite)
    except RunError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EXDEV:
            return False
        raise
    return True


def remove_run(directory: Path) -> None:
    """Delete a run's directory, as far as it can be."""
    from shutil import rmtree

    rmtree(directory, ignore_errors=True)


def files_of_run(directory: Path) -> list[Path]:
    """Return every file that belongs to the run."""
    entries = [directory / name for name in sorted(ENTRIES)]
    below = [file for entry in entries if entry.is_dir() for file in sorted(entry.rglob("*"))]
    return [file for file in (*entries, *below) if file.is_file()]


def copy_file(source: Path, target: Path) -> None:
    """Copy one file of a run durably, with its time; a spool that is written to is copied whole.

    Raises:
        RunError: if the spool does not come to rest.
    """
    from shutil import copyfile

    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    copy = copy_spool if target.suffix == ".spool" else copyfile
    copy(source, target)
    target.chmod(0o600)
    times = source.stat()
    os.utime(target, ns=(times.st_atime_ns, times.st_mtime_ns))
    _sync(target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_full(target: Path, needed: int) -> None:
    """Raise RunError where the target's disk has less free than is needed."""
    state = os.statvfs(target.parent)
    free = state.f_bavail * state.f_frsize
    if free < needed:
        _raise_full(target, needed, f"{free} are free")


@contextmanager
def disk_errors(target: Path, needed: int | None = None) -> Iterator[None]:
    """Turn what the disk refuses into RunError with the next step."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            _raise_full(target, needed, error.strerror or "no space is left", error)
        raise RunError(
            f"cannot write the run {target}: {error.strerror or error}; "
            "check the path and its permissions, or choose another with path="
        ) from error


def _raise_full(
    target: Path, needed: int | None, found: str, cause: OSError | None = None
) -> NoReturn:
    size = "some kilobytes" if needed is None else f"{needed} bytes"
    raise RunError(
        f"the run {target} needs {size}, but {found}; free some space, or choose a path on "
        "another disk; nothing recorded so far is lost"
    ) from cause
