"""A path that a caller gives, before anything is asked of the file system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from brickline.errors import UsageError


def given_path(value: Any, what: str = "path") -> Path:
    """Return a path that a system call may take; whether something is there is not looked at.

    Raises:
        UsageError: if it is no path, or holds a NUL.
    """
    try:
        text = os.fsdecode(value)
    except TypeError:
        text = "\0"
    if "\0" in text:
        raise UsageError(f"{what}: expected a path as a str or os.PathLike, got {value!r:.200}")
    return Path(text)
