"""KeyLock: one thread of one process at a time, for as long as it lives.

It knows a path, and nothing of what is guarded.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from threading import get_ident

from brickline.private_directory import open_private

_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.02


class KeyLock:
    """An flock on a file that exists only while the lock is held or waited for.

    The holder removes the file before it releases. So whoever gets the lock looks whether the file
    it has locked is still the one at the path, and begins anew where it is not. The system releases
    the lock of a process that dies; then the file stays until the next release.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._owner = (path, get_ident())
        self._descriptor = -1

    @property
    def is_held_here(self) -> bool:
        """Whether this thread holds the path's lock, by this object or another."""
        return self._owner in _open_locks

    def acquire(self, timeout: float) -> bool:
        """Return whether the lock is held, after waiting so many seconds at most.

        Raises:
            OSError: if the file cannot be made or locked.
        """
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE_S
        try:
            while not self._try():
                left = deadline - time.monotonic()
                if left <= 0:
                    self._close()
                    return False
                time.sleep(min(pause, left))
                pause = min(2 * pause, _LAST_PAUSE_S)
        except BaseException:
            self._close()
            raise
        return True

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._descriptor >= 0:
            with suppress(OSError):
                if self._is_at_path():
                    os.unlink(self.path)
            self._close()

    def _try(self) -> bool:
        if self._descriptor < 0:
            self._descriptor = open_private(self.path, _OPEN)
            _open_locks[self._owner] = self
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if self._is_at_path():
            return True
        self._close()
        return False

    def _is_at_path(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._descriptor < 0:
            return
        _open_locks.pop(self._owner, None)
        # Closing alone keeps the lock where a fork has copied the descriptor and not closed it.
        with suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def _forget(self) -> None:
        """Close the copy that a fork has made; the parent's lock stays."""
        os.close(self._descriptor)
        self._descriptor = -1


_open_locks: dict[tuple[str, int], KeyLock] = {}
"""By path and thread; changed by single dictionary calls alone, so it needs no lock itself."""


def _forget_locks() -> None:
    for lock in _open_locks.values():
        lock._forget()
    _open_locks.clear()


os.register_at_fork(after_in_child=_forget_locks)
