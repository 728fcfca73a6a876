"""A process that is being watched: which spools it records into, and whether it still lives.

Reads /proc and opens spools for reading; it never signals, stops or writes to the process. A spool
is opened as soon as it is seen and read through its descriptor from then on, so that a run which
is removed when the process ends can still be read. The memory map of the process is read seldom:
the kernel holds the process's own lock while it writes the map out.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from brickline.errors import ProcessError, RunError
from brickline.runs import Part
from brickline.spools import read_part, read_statistics

_MAPPING = re.compile(r"(\S+) \S+ \S+ \S+ (\d+) +(/.*\.spool)(?: \(deleted\))?")
"""A line of /proc/PID/maps: addresses, permissions, offset, device, inode, path."""
LOOK_AROUND_S = 1.0
"""How often new spools are looked for."""


class WatchedProcess:
    """Opens what a live process records; a context manager.

    Raises:
        ProcessError: if the process is gone, is not ours to read, or records nothing.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.ended = False
        self._spools: dict[int, int] = {}
        self._paths: dict[int, Path] = {}
        self._lock = threading.Lock()
        self._looked_s = float("-inf")
        self._started = _start_time(pid)
        if self._started is None:
            raise ProcessError(
                f"expected a live process, found none with id {pid};"
                " `brickline report RUN` shows what a finished one has recorded"
            )
        self._pidfd = _pidfd(pid)
        try:
            self._look_around()
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
        """Return all that is recorded by now, without spools that cannot be read at this moment."""
        return self._read(read_part)

    def statistics(self) -> list[Part]:
        """Return nodes, slots and facts by now, as `spools.read_statistics` does."""
        return self._read(read_statistics)

    @property
    def paths(self) -> list[Path]:
        """Where the spools lie, as their process names them."""
        return [path for path, _ in self._places()]

    @contextmanager
    def held_spools(self) -> Iterator[list[tuple[Path, Path]]]:
        """Give for each spool where it lies and a path that opens it, to any thread.

        What is given stays readable inside the block, even where the process begins anew.
        """
        held: list[tuple[Path, int]] = []
        try:
            with self._lock:
                held += [(path, os.dup(descriptor)) for path, descriptor in self._places()]
            yield [(path, _through(descriptor)) for path, descriptor in held]
        finally:
            for _, descriptor in held:
                os.close(descriptor)

    def _places(self) -> list[tuple[Path, int]]:
        return [(self._paths[inode], descriptor) for inode, descriptor in self._spools.items()]

    def _read(self, read: Callable[[Path], Part]) -> list[Part]:
        if not self.ended and time.monotonic() - self._looked_s >= LOOK_AROUND_S:
            with suppress(OSError):
                self._look_around()
        parts = []
        for descriptor in self._spools.values():
            with suppress(RunError):
                parts.append(read(_through(descriptor)))
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

    def _look_around(self) -> None:
        """Open the spools that the process maps now, and let go of those that it has deleted."""
        self._looked_s = time.monotonic()
        mapped = set()
        for line in Path(f"/proc/{self.pid}/maps").read_text(errors="surrogateescape").splitlines():
            # Most lines of a large process name libraries.
            found = _MAPPING.fullmatch(line) if ".spool" in line else None
            if not found:
                continue
            mapped.add(int(found[2]))
            if int(found[2]) not in self._spools:
                self._open(found[1], int(found[2]), found[3])
        # A profiler that was reset goes on in another spool. Where none is left, its last is shown.
        for inode in set(self._spools) - mapped if mapped else ():
            if os.fstat(self._spools[inode]).st_nlink == 0:
                with self._lock:
                    os.close(self._spools.pop(inode))

    def _open(self, addresses: str, inode: int, path: str) -> None:
        # As this process sees it, as that process sees it, and without a name.
        places = (
            path,
            f"/proc/{self.pid}/root{path}",
            f"/proc/{self.pid}/map_files/{addresses}",
        )
        for place in places:
            descriptor = _open_inode(place, inode)
            if descriptor is not None:
                named = Path(path if place == path else f"/proc/{self.pid}/root{path}")
                with self._lock:
                    self._paths[inode], self._spools[inode] = named, descriptor
                return


def _through(descriptor: int) -> Path:
    return Path(f"/proc/self/fd/{descriptor}")


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
