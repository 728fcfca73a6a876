"""Files that are whole or not there: written beside their place and renamed.

It knows paths and bytes, not what is in them. A link is followed, so that it stays one; devices,
pipes and directories are never replaced.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from brickline.errors import UsageError

FORCE = "--force (force=True)"
OVERWRITE = "overwrite=True, on the command line --force"


def refuse_taken_file(target: Path, *, force: bool, how: str = FORCE) -> None:
    """Refuse a path that holds something, before the work for it is done.

    Args:
        target: The path.
        force: Whether replacing a file was asked for.
        how: What asks for it, for the message.

    Raises:
        UsageError: if a directory or a device lies there, or a file and replacing it was not asked
            for.
    """
    if os.path.isdir(target):
        raise UsageError(f"expected a file to write, got the directory {target}")
    if os.path.exists(target) and not os.path.isfile(target):
        raise UsageError(
            f"expected a file to write, got {target}, which is a device or a pipe and is not "
            "replaced; choose another name"
        )
    if os.path.exists(target) and not force:
        raise UsageError(f"{target} is there already; choose another name, or use {how}")


@contextmanager
def whole_file(target: Path, *, force: bool, how: str = FORCE) -> Iterator[BinaryIO]:
    """Give a file to write to, which takes its place when everything is in it.

    Raises:
        UsageError: as `refuse_taken_file` does.
        OSError: if the disk refuses; nothing is left behind, and what was there stays.
    """
    refuse_taken_file(target, force=force, how=how)
    place = os.path.realpath(target)
    staged = os.path.join(os.path.dirname(place), f".{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        with open(staged, "xb") as file:
            yield file
        os.replace(staged, place)
    except BaseException:
        with suppress(OSError):
            os.unlink(staged)
        raise
