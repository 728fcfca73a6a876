"""A process that is being watched: which spools it records into, and whether it still lives.

Reads /proc and opens spools for reading; it never signals, stops or writes to the process. A spool
is opened as soon as it is seen and read through its descriptor from then on, so that a run which
is removed when the process ends can still be read.
"""

from __future__ import annotations

import os
import re
import select
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from brickline.errors import ProcessError, RunError
from brickline.runs import Part
from brickline.spools import read_part

_MAPPING = re.compile(r"(\S+) \S+ \S+ \S+ (\d+) +(/.*\.spool)(?: \(deleted\))?")
"""A line of /proc/PID/maps: addresses, permissions, offset, device, inode, path."""


class WatchedProcess:
    """Opens what a live process records; a context manager.

    Raises:
        ProcessError: if the process is gone, is not ours to read, or records nothing.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = False
        self._spools: dict[int, int] = {}
        self._started = _start_time(pid)
        if self._started is None:
            raise ProcessError(
                f"expected a live process, found none with id {pid};"
                " `brickline report RUN` shows what a finished one has recorded"
            )
        self._pidfd = _pidfd(pid)
        try:
            self._open_spools()
        except PermissionError:
            self.close()
            raise ProcessError(
                f"process {pid} may not be read: it belongs to another user or is protected;"
                " watch it as its user or as root"
            ) from None
        except OSError:
            self.ended = True
        if not self._spools:
            self.close()
            raise ProcessError(
                f"process {pid} records no bricks; enable its profiler with"
                " BrickProfiler(enabled=True), or start it with `brickline run`"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every descriptor."""
        for descriptor in self._spools.values():
            os.close(descriptor)
        self._spools.clear()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def parts(self) -> list[Part]:
        """Return what is recorded by now, without spools that cannot be read at this moment."""
        if not self.ended:
            with suppress(OSError):
                self._open_spools()
        parts = []
        for descriptor in self._spools.values():
            with suppress(RunError):
                parts.append(read_part(Path(f"/proc/self/fd/{descriptor}")))
        return parts

    def wait(self, seconds: float) -> bool:
        """Wait for the time or for the end of the process; return whether it has ended."""
        if self._pidfd is not None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            self.ended = bool(poll.poll(seconds * 1e3)) or self.ended
        else:
            time.sleep(seconds)
            self.ended = _start_time(self.pid) != self._started
        return self.ended

    def _open_spools(self) -> None:
        """Open the spools that the process maps and that are not open yet."""
        for line in Path(f"/proc/{self.pid}/maps").read_text(errors="surrogateescape").splitlines():
            found = _MAPPING.fullmatch(line)
            if not found or int(found[2]) in self._spools:
                continue
            # As this process sees it, as that process sees it, and without a name.
            names = (
                found[3],
                f"/proc/{self.pid}/root{found[3]}",
                f"/proc/{self.pid}/map_files/{found[1]}",
            )
            for name in names:
                descriptor = _open_inode(name, int(found[2]))
                if descriptor is not None:
                    self._spools[int(found[2])] = descriptor
                    break


def _open_inode(name: str, inode: int) -> int | None:
    """Open a file if it is the one that is mapped, and not another of the same name."""
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    if os.fstat(descriptor).st_ino == inode:
        return descriptor
    os.close(descriptor)
    return None


def _start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks; None where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def _pidfd(pid: int) -> int | None:
    with suppress(OSError):
        return os.pidfd_open(pid)
    return None
