"""Keeping what a live process has recorded as a run of its own, which every command opens.

The process is asked for nothing and goes on. The run appears whole or not at all: it is prepared
beside its place and renamed. It knows files; what they mean is the matter of `runs`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from uuid import uuid4

from brickline import abi
from brickline.errors import RunError
from brickline.run_directory import (
    FORMAT,
    MANIFEST,
    Document,
    copy_file,
    disk_errors,
    read_manifest,
    refuse_full,
    refuse_taken,
    resolved,
    staging_for,
    write_json,
)
from brickline.runs import Run
from brickline.top.watched import WatchedProcess


def save_snapshot(process: WatchedProcess, path: str | os.PathLike[str]) -> Path:
    """Copy what the process has recorded by now into a new run, and publish its tables.

    All that its spools hold is kept: statistics, traces, fingerprints, graph. Tensors that were
    kept whole stay with the process's own run.

    Raises:
        RunExists: if the path is taken.
        RunError: if the disk refuses, or a spool does not come to rest; nothing is left behind.
    """
    target = resolved(path)
    with process.held_spools() as spools:
        needed = sum(opened.stat().st_size for _, opened in spools)
        with disk_errors(target, needed):
            refuse_taken(target, overwrite=False)
            target.parent.mkdir(parents=True, exist_ok=True)
            refuse_full(target, needed)
            with staging_for(target, overwrite=False) as staging:
                (staging / "spool").mkdir(mode=0o700)
                for known, opened in spools:
                    copy_file(opened, staging / "spool" / _free_name(staging, known, process.pid))
                write_json(staging / MANIFEST, _manifest_of_snapshot(process))
    Run.open(target).publish()
    return target


def recorded_name(process: WatchedProcess) -> str:
    """Return what the process calls its run; its number where that is not known."""
    manifest = _manifest_of_process(process)
    return str(manifest["name"]) if manifest else f"process {process.pid}"


def proposed_path(process: WatchedProcess) -> str:
    """Return a free name in the working directory for the next snapshot."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", recorded_name(process)).strip("-.")[:48] or "run"
    first = f"{safe}-{stamp}"
    names = (f"{first}.brick", *(f"{first}-{number}.brick" for number in range(2, 1000)))
    return next((name for name in names if not os.path.lexists(name)), names[0])


def _manifest_of_snapshot(process: WatchedProcess) -> Document:
    taken = datetime.now(UTC).isoformat(timespec="microseconds")
    # Where the process has deleted its run, as it does with one that nobody asked to keep, what it
    # recorded is still there, but under which circumstances is not known.
    known = _manifest_of_process(process) or {
        "format": FORMAT,
        "version": abi.FORMAT_VERSION,
        "id": uuid4().hex,
        "name": f"process {process.pid}",
        "created": taken,
        "peaks": None,
        "facts": {},
        "circumstances": {"pid": process.pid},
        "changed": {},
    }
    return {**known, "ended": None, "snapshot": {"process": process.pid, "taken": taken}}


def _manifest_of_process(process: WatchedProcess) -> Mapping[str, object] | None:
    for known in process.paths:
        with suppress(RunError):
            return read_manifest(known.parent.parent)
    return None


def _free_name(staging: Path, known: Path, pid: int) -> str:
    """Return the spool's own name, or another where spools of two runs have the same."""
    name, number = known.name, 0
    while (staging / "spool" / name).exists():
        name, number = f"{pid}-{number}.spool", number + 1
    return name
