"""KernelStore: compiled code on disk, shared by all processes of one user.

It knows keys and bytes, nothing of kernels, compilers or devices. A key is 64 lower-case
hexadecimal digits, and whatever is stored under one key is interchangeable: a lost entry costs
time and nothing else. Exactly one producer of an entry, whoever asks at the same time::

    entry = store.get(key)
    if entry is None:
        with store.locked(key):
            entry = store.get(key)  # another process may have been first
            if entry is None:
                facts, blobs = produce()
                store.put(key, facts, blobs)

The files and their names are in `kernel_files`, the bytes of an entry in `kernel_entries`.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brickline.errors import CacheError, CacheUnavailable, UsageError
from brickline.kernel_entries import (
    MAX_ENTRY_BYTES,
    Damaged,
    Entry,
    Facts,
    encode_entry,
    open_entry,
    read_entry,
    read_header,
    verify_entry,
)
from brickline.kernel_files import KernelFiles, Removed, touch
from brickline.key_locks import KeyLock
from brickline.private_directory import publish, trusted_directory

MAX_BYTES = 1 << 30
"""The default bound of a store."""
LOCK_TIMEOUT_S = 600.0
"""Longer than a compilation. A holder that dies releases at once, so only a stopped one lasts."""

_NOT_THE_CALLER = (os.path.dirname(__file__) + os.sep, contextmanager.__code__.co_filename)


@dataclass(frozen=True)
class EntryInfo:
    """What the header of an entry says, unverified."""

    key: str
    bytes: int
    """The size of the whole file."""
    created: float
    """Seconds since the epoch."""
    used: float
    """Seconds since the epoch, at most a minute behind."""
    facts: Facts


@dataclass(frozen=True)
class Problem:
    """A file that is not the entry it should be."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"expected a sound entry, found {self.reason} - at {self.path}"


@dataclass(frozen=True)
class Statistics:
    """What the directory holds."""

    directory: Path
    entries: int
    bytes: int
    max_bytes: int
    aside: int
    """Damaged entries that were set aside."""


def default_directory() -> Path:
    """Return `$BRICKLINE_CACHE`, else `brickline/kernels` in `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        CacheUnavailable: if none of them is set and the user has no home.
    """
    chosen = os.environ.get("BRICKLINE_CACHE", "")
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen:
            return Path(chosen).expanduser()
        cache = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    except RuntimeError as error:
        raise CacheUnavailable(
            f"expected a home directory for the kernel cache, found none ({error}); "
            "set BRICKLINE_CACHE to an absolute path"
        ) from None
    return cache / "brickline" / "kernels"


class KernelStore:
    """Entries by key: written whole or not at all, verified when read, bounded in size.

    Any number of threads and processes may use one directory, and a store survives fork.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        max_bytes: int = MAX_BYTES,
        *,
        create: bool = True,
    ) -> None:
        """Open a store.

        Args:
            directory: Default `default_directory()`, so that all programs of a user share it.
            max_bytes: Least recently used entries beyond this are removed. Default 1 GiB, some ten
                thousand kernels. A process looks at what others have added after each sixteenth
                of the bound that it has added itself, so each may exceed the bound by that.
            create: Whether to make a store where there is none. Default True. False looks at one
                that is there: opening it writes nothing.

        Raises:
            UsageError: if the directory is no path or `max_bytes` no whole number above 0.
            CacheUnavailable: if the directory cannot be made or reached.
            CacheError: if it cannot be read, is another user's, can be written to by others, holds
                something else, or is no store and none is to be made.
        """
        if not _is_whole(max_bytes) or max_bytes < 1:
            raise UsageError(f"expected max_bytes as a whole number above 0, got {max_bytes!r}")
        self._advice = _advice(directory is None, create)
        place = default_directory() if directory is None else directory
        self.directory = trusted_directory(place, self._advice, create=create)
        self.max_bytes = max_bytes
        self._room_until_scan = 0
        self._noted: dict[Hashable, object] = {}
        self._files = KernelFiles(self.directory)
        self._files.check_version(self._advice, create=create)

    def __repr__(self) -> str:
        return f"KernelStore({str(self.directory)!r}, max_bytes={self.max_bytes})"

    def get(self, key: str) -> Entry | None:
        """Return the entry, or None where there is none that is whole and the user's own.

        A damaged or foreign file is set aside with a RuntimeWarning, once per key.
        """
        path = self._files.entry_path(key)
        try:
            descriptor = open_entry(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                self._set_aside(key, path, "a link or a socket", None)
            else:
                self._note_unreadable(key, path, error)
            return None
        try:
            found = os.fstat(descriptor)
            entry = read_entry(descriptor, found, key)
            touch(descriptor, found)
            return entry
        except Damaged as damage:
            self._set_aside(key, path, str(damage), found)
        except OSError as error:
            self._note_unreadable(key, path, error)
        finally:
            os.close(descriptor)
        return None

    def put(self, key: str, facts: Mapping[str, Any], blobs: Mapping[str, bytes]) -> bool:
        """Store an entry, in the place of any other with this key.

        Args:
            key: 64 lower-case hexadecimal digits.
            facts: Whatever JSON gives back unchanged.
            blobs: Bytes by name.

        Returns:
            Whether it is stored. False, with one RuntimeWarning for each cause, where the disk is
            full or read-only, or the entry larger than the bound: go on without.

        Raises:
            UsageError: if the key, the facts or the blobs are not as above.
        """
        path = self._files.entry_path(key)
        data = encode_entry(key, facts, blobs)
        limit = min(self.max_bytes, MAX_ENTRY_BYTES)
        if len(data) > limit:
            self._note(
                "size",
                f"expected an entry of at most {limit} bytes, got {len(data)} - for {path}; it is "
                f"not stored; max_bytes is {self.max_bytes}, and no entry may exceed "
                f"{MAX_ENTRY_BYTES}",
            )
            return False
        try:
            publish(path, data)
        except OSError as error:
            self._note(
                ("put", error.errno),
                f"cannot store {path}: {error.strerror}; going on without; free some space or mend "
                f"its permissions, else {self._advice}",
            )
            return False
        self._make_room(key, len(data))
        return True

    @contextmanager
    def locked(self, key: str, timeout: float = LOCK_TIMEOUT_S) -> Iterator[bool]:
        """Keep every other thread and process from this key's lock; they wait.

        A holder that dies releases the lock. A child forked inside the block does not hold it.

        Args:
            key: 64 lower-case hexadecimal digits.
            timeout: Seconds to wait for another holder. Default `LOCK_TIMEOUT_S`.

        Yields:
            Whether the lock is held. False where the directory cannot be written to, or where the
            time is up (with one RuntimeWarning per key, unless the timeout is 0): go on without
            it, at the price of doing the work twice.

        Raises:
            UsageError: if this thread holds the lock already, or the timeout is no number.
        """
        path = self._files.lock_path(key)
        _check_seconds("timeout", timeout)
        lock = KeyLock(path)
        if lock.is_held_here:
            raise UsageError(
                f"expected a lock that this thread does not hold, got it twice - at {lock.path}; "
                "what produces an entry must not ask for the same entry"
            )
        try:
            held = lock.acquire(timeout)
        except OSError:
            held = False
        else:
            if not held and timeout > 0:
                self._note(
                    ("lock", key),
                    f"expected a free lock within {timeout:g} s, found it held - at {lock.path}; "
                    f"going on without it; `fuser {lock.path}` names the process",
                )
        try:
            yield held
        finally:
            lock.release()

    def entries(self) -> Iterator[EntryInfo]:
        """Yield what the header of each entry says, by key; blobs are not read.

        An entry whose header is damaged is left out; `verify` reports it.
        """
        for file in self._files.entries():
            try:
                header, found = read_header(file.path, file.key)
            except (Damaged, OSError):
                continue
            yield EntryInfo(file.key, found.st_size, header.created, found.st_mtime, header.facts)

    def verify(self) -> list[Problem]:
        """Read everything and return what is damaged or foreign; nothing is changed.

        `get` sets a damaged entry aside when it meets it, and `clear` removes it.
        """
        problems = []
        for path, key in self._files.finished():
            try:
                if key is None:
                    raise Damaged("a name that no entry has")
                verify_entry(path, key)
            except FileNotFoundError:
                continue
            except Damaged as damage:
                problems.append(Problem(Path(path), str(damage)))
            except OSError as error:
                reason = f"something that cannot be read ({error.strerror})"
                problems.append(Problem(Path(path), reason))
        return problems

    def gc(self, max_bytes: int | None = None, older_than: float | None = None) -> Removed:
        """Remove least recently used entries, and what killed processes have left behind.

        Args:
            max_bytes: Bytes that may remain. Default the store's bound.
            older_than: Also remove what was not used for so many seconds. Default None: age alone
                makes no entry wrong.

        Raises:
            UsageError: if a bound is no number of at least 0, `max_bytes` no whole one.
            CacheError: if a file cannot be removed.
        """
        limit = self.max_bytes if max_bytes is None else max_bytes
        if not _is_whole(limit) or limit < 0:
            raise UsageError(f"expected max_bytes of at least 0, a whole number, got {limit!r}")
        if older_than is not None:
            _check_seconds("older_than", older_than)
        removed, _ = self._files.shrink(limit, older_than=older_than)
        self._files.sweep_locks()
        return removed

    def clear(self) -> Removed:
        """Remove every entry, and what was set aside.

        Other processes may read and write meanwhile: a reader gets a whole entry or none, and what
        a writer publishes later stays.

        Raises:
            CacheError: if a file cannot be removed.
        """
        removed, _ = self._files.shrink(-1)
        removed += self._files.clear_aside()
        self._files.sweep_locks()
        return removed

    def statistics(self) -> Statistics:
        """Return what the directory holds now."""
        sizes = [file.bytes for file in self._files.entries()]
        aside = len(self._files.aside())
        return Statistics(self.directory, len(sizes), sum(sizes), self.max_bytes, aside)

    def _note(self, about: Hashable, message: str) -> None:
        """Warn once about a thing. One dictionary call decides, so threads need no lock."""
        mine = object()
        if self._noted.setdefault(about, mine) is mine:
            warnings.warn(message, RuntimeWarning, stacklevel=callers_level())

    def _note_unreadable(self, key: str, path: str, error: OSError) -> None:
        self._note(key, f"cannot read {path}: {error.strerror}; it counts as missing")

    def _set_aside(self, key: str, path: str, reason: str, found: os.stat_result | None) -> None:
        """Move a damaged file out of the way; `found` is the one that was read, still open."""
        outcome = self._files.set_aside(key, path, found)
        if outcome is not None:
            self._note(key, f"{Problem(Path(path), reason)}; {outcome}, and counts as missing")

    def _make_room(self, key: str, added: int) -> None:
        """Keep the bound. Threads may lose a subtraction here, which the next scan mends."""
        self._room_until_scan -= added
        if self._room_until_scan >= 0:
            return
        try:
            _, total = self._files.shrink(self.max_bytes, keep=key)
        except CacheError as error:
            self._note("bound", f"the kernel cache exceeds its bound: {error}")
        else:
            self._room_until_scan = min(self.max_bytes - total, self.max_bytes // 16)


def _advice(is_default: bool, create: bool) -> str:
    """Return how to go on where a directory cannot be used."""
    if is_default:
        other = "choose another directory with BRICKLINE_CACHE"
    else:
        other = "name another directory" if create else "name another, or none for the user's own"
    return f"{other}, or do without a disk: KernelCache(disk=False)" if create else other


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):
            if float(value) >= 0:
                return
    raise UsageError(f"expected {name} of at least 0, in seconds, got {value!r}")


def callers_level() -> int:
    """Return the stacklevel, for who calls this, of the first frame outside of the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
        level, frame = level + 1, frame.f_back
    return level
