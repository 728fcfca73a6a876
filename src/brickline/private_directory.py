"""A directory that one user alone writes to, and files that appear in it whole or not at all.

It knows nothing of what the files hold.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from brickline.errors import CacheError

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OTHER = "or choose another directory with BRICKLINE_CACHE"


def trusted_directory(directory: str | os.PathLike[str]) -> Path:
    """Return the directory without links, made where it was missing.

    What lies above it is not looked at: whoever can exchange the directory still cannot make files
    that belong to this user, which readers ask for with `distrust_of_file`.

    Raises:
        CacheError: if it cannot be made, is another user's, or can be written to by others.
    """
    given = os.path.abspath(os.path.expanduser(directory))
    real, me = os.path.realpath(given), os.geteuid()
    try:
        make_directory(real)
        found, link = os.stat(real), os.lstat(given)
    except OSError as error:
        raise CacheError(
            f"cannot use the cache directory {given}: {error.strerror}; mend that, {_OTHER}"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise CacheError(f"expected a directory, found a file - at {given}; remove it, {_OTHER}")
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (me, 0):
        raise CacheError(
            f"expected a directory of user {me}, found a link of user {link.st_uid} to {real} - at "
            f"{given}; remove it, {_OTHER}"
        )
    if found.st_uid != me:
        raise CacheError(
            f"expected a directory of user {me}, found one of user {found.st_uid} - at {given}; "
            f"`chown` it if its contents can be trusted, {_OTHER}"
        )
    if found.st_mode & 0o022:
        raise CacheError(
            f"expected a directory that only user {me} can write to, found mode "
            f"{stat.S_IMODE(found.st_mode):04o} - at {given}; `chmod go-w` it if its contents can "
            f"be trusted, {_OTHER}"
        )
    return Path(real)


def distrust_of_file(found: os.stat_result) -> str | None:
    """Return why what is found cannot be a file that this user alone has written, or None."""
    if not stat.S_ISREG(found.st_mode):
        return "something that is no file"
    if found.st_uid != os.geteuid():
        return f"a file of user {found.st_uid}"
    if found.st_mode & 0o022:
        return f"a file that others can write to, mode {stat.S_IMODE(found.st_mode):04o}"
    return None


def make_directory(path: str) -> None:
    """Make a directory and what is missing above it, each for the user alone."""
    try:
        os.mkdir(path, 0o700)
    except FileNotFoundError:
        make_directory(os.path.dirname(path))
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    except FileExistsError:
        pass


def open_private(path: str, flags: int) -> int:
    """Open a file that may be created, in a directory that may be missing."""
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        make_directory(os.path.dirname(path))
        return os.open(path, flags, 0o600)


def publish(path: str, data: bytes) -> None:
    """Let the path hold these bytes, or what it held before; nobody sees anything between.

    The file is not synced, so a power cut may leave another content: readers must check it. A
    killed writer may leave a file `.NAME.XXXXXXXXXXXXXXXX.tmp` beside it.
    """
    directory, name = os.path.split(path)
    temporary = f"{directory}/.{name}.{os.urandom(8).hex()}.tmp"
    descriptor = open_private(temporary, _CREATE)
    try:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def listing(directory: str) -> list[os.DirEntry[str]]:
    """Return what a directory holds, by name; nothing where it is missing or cannot be read."""
    try:
        with os.scandir(directory) as items:
            return sorted(items, key=lambda item: item.name)
    except OSError:
        return []
