"""A directory that one user alone writes to, and files that appear in it whole or not at all.

It knows nothing of what the files hold.
"""

from __future__ import annotations

import os
import shlex
import stat
from contextlib import suppress
from pathlib import Path

from brickline.errors import CacheError, CacheUnavailable, UsageError

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def trusted_directory(
    directory: str | os.PathLike[str], advice: str, *, create: bool = True
) -> Path:
    """Return the directory without links.

    What lies above it is not looked at: whoever can exchange the directory still cannot make files
    that belong to this user, which readers ask for with `distrust_of_file`.

    Args:
        directory: A path, which may begin with `~`.
        advice: How to choose another directory; ends each message. What was found is never advised
            to be removed or given away: it may be anything, a mistyped `/etc` too.
        create: Whether to make it where it is missing. Default True.

    Raises:
        UsageError: if it is no path.
        CacheUnavailable: if it cannot be made or reached.
        CacheError: if it is not found, is another user's, or others can write to it.
    """
    given = _absolute(directory)
    real, me = os.path.realpath(given), os.geteuid()
    try:
        if create:
            make_directory(real)
        found, link = os.stat(real), os.lstat(given)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            raise CacheError(
                f"expected a directory, found nothing - at {given}; {advice}"
            ) from None
        raise CacheUnavailable(
            f"cannot use the cache directory {given}: {error.strerror}; {advice}"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        raise CacheError(f"expected a directory, found a file - at {given}; {advice}")
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (me, 0):
        raise CacheError(
            f"expected a directory of user {me}, found a link of user {link.st_uid} to {real} - at "
            f"{given}; {advice}"
        )
    if found.st_uid != me:
        raise CacheError(
            f"expected a directory of user {me}, found one of user {found.st_uid} - at {given}; "
            f"{advice}"
        )
    if found.st_mode & 0o022:
        mend = ""
        if is_vacant(real) and not found.st_mode & stat.S_ISVTX:  # made so by a lenient umask
            mend = f"if nobody else uses it, `chmod go-w {shlex.quote(real)}`; else "
        raise CacheError(
            f"expected a directory that only user {me} can write to, found mode "
            f"{stat.S_IMODE(found.st_mode):04o} - at {given}; {mend}{advice}"
        )
    return Path(real)


def is_vacant(path: str | os.PathLike[str]) -> bool:
    """Return whether there is nothing at the path, or an empty directory."""
    try:
        with os.scandir(path) as items:
            return next(items, None) is None
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _absolute(directory: str | os.PathLike[str]) -> str:
    path = os.fspath(directory) if isinstance(directory, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path or "\0" in path or not _is_encodable(path):
        raise UsageError(f"expected the path of a directory, got {directory!r}")
    return os.path.abspath(os.path.expanduser(path))


def _is_encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


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
