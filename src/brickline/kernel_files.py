"""KernelFiles: the directory of a kernel store, and which of the files in it are the store's own.

The directory::

    VERSION                          "brickline-kernels 1"
    entries/ab/ab12….blk             an entry, see `kernel_entries`; modified when it was last used
    entries/ab/.ab12….blk.XXXX.tmp   an entry that is being written
    locks/ab/ab12….lock              exists while somebody produces the entry
    aside/TIME-ab12….blk             damaged entries, the latest 16

Whatever has another name is somebody else's and never touched, and a directory that holds other
things but no VERSION is refused. It knows names, sizes and ages: neither what an entry holds nor
when one is wanted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from brickline.errors import CacheError
from brickline.kernel_entries import KEY, check_key
from brickline.key_locks import KeyLock
from brickline.private_directory import listing, make_directory, publish

MAX_ASIDE = 16
"""Damaged entries that are kept to be looked at."""

_VERSION = b"brickline-kernels 1\n"
_TOUCH_S = 60.0
_ABANDONED_S = 3600.0
_TEMPORARY = re.compile(r"\.([0-9a-f]{64})\.blk\.[0-9a-f]{16}\.tmp")
_ASIDE = re.compile(r"[0-9]{20}-[0-9a-f]{64}\.blk")
_FOLDERS = frozenset({"entries", "locks", "aside"})
_VERSION_FILE = re.compile(r"VERSION|\.VERSION\.[0-9a-f]{16}\.tmp")


@dataclass(frozen=True)
class Removed:
    """What a cleaning has removed."""

    entries: int = 0
    bytes: int = 0
    """Includes damaged and abandoned files, which are no entries."""

    def __add__(self, other: Removed) -> Removed:
        return Removed(self.entries + other.entries, self.bytes + other.bytes)


class EntryFile(NamedTuple):
    """A file with the name of an entry."""

    key: str
    path: str
    bytes: int
    used: float


class KernelFiles:
    """The files of one store, by what they are for."""

    def __init__(self, directory: Path) -> None:
        """Look at a directory; nothing is read or made.

        Args:
            directory: One that this user alone writes to, see `trusted_directory`.
        """
        self.directory = directory
        self._entries = f"{directory}/entries"
        self._locks = f"{directory}/locks"
        self._aside = f"{directory}/aside"

    def check_version(self, advice: str, *, create: bool) -> None:
        """Raise CacheError unless the directory is a store, or may become one and does.

        Args:
            advice: How to choose another directory; ends each message.
            create: Whether to make a store where there is none.
        """
        path = f"{self.directory}/VERSION"
        try:
            with open(path, "rb") as file:
                found = file.read(64)
        except FileNotFoundError:
            found = b""
        except OSError as error:
            raise CacheError(f"cannot read {path}: {error.strerror}; {advice}") from error
        if not found.strip(b"\0"):  # a power cut may leave nothing, or zeros
            self._check_contents(advice, create)
            if create:
                with suppress(OSError):  # a directory that is read-only or full does without
                    publish(path, _VERSION)
        elif found != _VERSION:
            raise CacheError(
                f"expected {_VERSION.decode().strip()!r}, found "
                f"{found.decode(errors='replace').strip()!r} - at {path}; another version or "
                f"another program owns it: {advice}"
            )

    def _check_contents(self, advice: str, create: bool) -> None:
        """Raise CacheError unless a directory without VERSION can be a store nevertheless."""
        try:
            with os.scandir(self.directory) as items:
                names = {item.name for item in items}
        except OSError as error:
            raise CacheError(f"cannot read {self.directory}: {error.strerror}; {advice}") from error
        others = sorted(name for name in names - _FOLDERS if not _VERSION_FILE.fullmatch(name))
        if others:
            expected = "a kernel cache or an empty directory" if create else "a kernel cache"
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            what = f"no VERSION but {others[0]!r}{more}"
        elif not create and not names & _FOLDERS:
            expected, what = "a kernel cache", "none"
        else:
            return
        raise CacheError(f"expected {expected}, found {what} - at {self.directory}; {advice}")

    def entry_path(self, key: str) -> str:
        """Return where the entry of a key lies."""
        check_key(key)
        return f"{self._entries}/{key[:2]}/{key}.blk"

    def lock_path(self, key: str) -> str:
        """Return where the lock of a key lies."""
        check_key(key)
        return f"{self._locks}/{key[:2]}/{key}.lock"

    def entries(self) -> Iterator[EntryFile]:
        """Yield the files with the name of an entry, by key."""
        for shard, item in _sharded(self._entries):
            if file := _file_of(shard, item):
                yield file

    def finished(self) -> Iterator[tuple[str, str | None]]:
        """Yield the path of all among the entries that nobody is writing, and its key.

        The key is None where no entry has such a name.
        """
        for shard, item in _sharded(self._entries):
            if not _is_temporary(shard, item):
                yield item.path, _key_of(shard, item.name, ".blk")

    def aside(self) -> list[os.DirEntry[str]]:
        """Return what was set aside, oldest first; a directory is left alone."""
        return [
            item
            for item in listing(self._aside)
            if _ASIDE.fullmatch(item.name) and not item.is_dir(follow_symlinks=False)
        ]

    def set_aside(self, key: str, path: str, found: os.stat_result | None) -> str | None:
        """Move a damaged file out of the way and return what became of it.

        Args:
            key: Whose place it has.
            path: Where it is.
            found: The one that was read, still open; None where it could not be opened.

        Returns:
            A clause for a message, or None where it is no longer there.
        """
        target = f"{self._aside}/{time.time_ns():020}-{key}.blk"
        try:
            make_directory(self._aside)
            os.rename(path, target)
            if found is not None and not os.path.samestat(found, os.lstat(target)):
                os.rename(target, path)  # a writer has just replaced the damaged one
                return None
            for item in self.aside()[:-MAX_ASIDE]:
                _remove(item.path, Removed())
        except FileNotFoundError:
            return None  # another process has moved or removed it
        except (OSError, CacheError) as error:
            return f"it cannot be set aside ({error})"
        return f"it is now {target}"

    def clear_aside(self) -> Removed:
        """Remove what was set aside."""
        removed = Removed()
        for item in self.aside():
            with suppress(FileNotFoundError):
                size = item.stat(follow_symlinks=False).st_size
                removed += _remove(item.path, Removed(bytes=size))
        return removed

    def shrink(
        self, max_bytes: int, *, older_than: float | None = None, keep: str | None = None
    ) -> tuple[Removed, int]:
        """Remove entries until the rest fits, least recently used first; return the bytes left."""
        removed, files = Removed(), []
        for shard, item in _sharded(self._entries):
            if _is_temporary(shard, item):
                removed += _remove_abandoned(item)
            elif file := _file_of(shard, item):
                files.append(file)
        total = sum(file.bytes for file in files)
        oldest = float("-inf") if older_than is None else time.time() - older_than
        for file in sorted(files, key=lambda file: file.used):
            if total <= max_bytes and file.used >= oldest:
                break
            if file.key != keep:
                removed += _remove(file.path, Removed(1, file.bytes))
                total -= file.bytes
        return removed, total

    def sweep_locks(self) -> None:
        """Remove the lock files that nobody holds: their holders were killed."""
        for shard, item in _sharded(self._locks):
            lock = KeyLock(item.path)
            if (
                _key_of(shard, item.name, ".lock")
                and item.is_file(follow_symlinks=False)
                and not lock.is_held_here
            ):
                with suppress(OSError):
                    lock.acquire(0)
                    lock.release()


def _file_of(shard: str, item: os.DirEntry[str]) -> EntryFile | None:
    key = _key_of(shard, item.name, ".blk")
    if key is None or item.is_dir(follow_symlinks=False):
        return None
    try:
        found = item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    return EntryFile(key, item.path, found.st_size, found.st_mtime)


def _key_of(shard: str, name: str, suffix: str) -> str | None:
    key = name.removesuffix(suffix)
    return key if name == key + suffix and key[:2] == shard and KEY.fullmatch(key) else None


def _is_temporary(shard: str, item: os.DirEntry[str]) -> bool:
    name = _TEMPORARY.fullmatch(item.name)
    return name is not None and name[1][:2] == shard and not item.is_dir(follow_symlinks=False)


def _sharded(directory: str) -> Iterator[tuple[str, os.DirEntry[str]]]:
    for shard in listing(directory):
        if shard.is_dir(follow_symlinks=False):
            for item in listing(shard.path):
                yield shard.name, item


def touch(descriptor: int, found: os.stat_result) -> None:
    """Note that an entry is used, at most once a minute, so that readers seldom write."""
    if not 0 <= time.time() - found.st_mtime < _TOUCH_S:
        with suppress(OSError):
            os.utime(descriptor)


def _remove(path: str, counted: Removed) -> Removed:
    """Remove a file and return what it counts for: nothing where it is gone already."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return Removed()
    except OSError as error:
        raise CacheError(
            f"cannot remove {path}: {error.strerror}; mend its directory's permissions, or remove "
            "it yourself"
        ) from error
    return counted


def _remove_abandoned(item: os.DirEntry[str]) -> Removed:
    """Remove what a killed writer has left; one that runs needs less than an hour."""
    try:
        found = item.stat(follow_symlinks=False)
    except FileNotFoundError:
        return Removed()
    if time.time() - found.st_mtime < _ABANDONED_S:
        return Removed()
    return _remove(item.path, Removed(bytes=found.st_size))
