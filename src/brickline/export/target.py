"""Where an export goes: written beside its place and renamed, so that a file is whole or absent.

It knows paths and bytes, not what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from brickline.errors import ExportError, UsageError


def refuse_taken_target(target: Path, *, force: bool) -> None:
    """Refuse a path that holds something, before the work of an export is done.

    Raises:
        UsageError: if a directory lies there, or a file and replacing it was not asked for.
    """
    if target.is_dir():
        raise UsageError(f"expected a file to export to, got the directory {target}")
    if target.exists() and not force:
        raise UsageError(f"{target} is there already; choose another name, or use --force")


@contextmanager
def placed(target: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes its place when everything is in it.

    Raises:
        UsageError: as `refuse_taken_target` does.
        ExportError: if the disk refuses; nothing is left behind.
    """
    refuse_taken_target(target, force=force)
    staged = target.with_name(f".{target.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with open(staged, "xb") as file:
            yield file
        os.replace(staged, target)
    except BaseException as error:
        with suppress(OSError):
            staged.unlink()
        if isinstance(error, OSError):
            raise ExportError(
                f"cannot write {target}: {error.strerror}; choose another place with -o"
            ) from error
        raise
