"""The tables of a program as arrays: structs of ``include/brickline/megakernel.h``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

TASK = np.dtype(
    [
        *((name, "<u4") for name in ("op", "flags", "lanes", "shared_bytes")),
        ("grid", "<u4", 3),
        *((name, "<u4") for name in ("blocks", "first_worker", "parts")),
        *((name, "<u4") for name in ("first_argument", "arguments", "first_wait", "waits")),
        *((name, "<u4") for name in ("stream", "row_bytes", "block_rows", "rows")),
        ("reserved", "<u4", 2),
    ]
)
"""``MegaTask``."""
WAIT = np.dtype([("task", "<u4"), ("parts", "<u4")])
"""``MegaWait``."""
SIGNALS, JOINED = 1, 2
"""MEGA_SIGNALS and MEGA_JOINED."""


class ProgramTables(ABC):
    """The tables that an engine of the core has made, read."""

    @abstractmethod
    def _table(self, name: str) -> bytes:
        """Return a table as the core has it."""

    def tasks(self) -> NDArray[Any]:
        """Return a row for each launch."""
        return np.frombuffer(self._table("tasks"), TASK)

    def waits(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the launches that each one waits for: first places and one more, and launches."""
        tasks = self.tasks()
        begin = np.append(tasks["first_wait"], tasks["waits"][-1:] + tasks["first_wait"][-1:])
        return begin.astype(np.int64), np.frombuffer(self._table("waits"), WAIT)["task"]

    def lists(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return where the list of each worker begins and one more, and the launches of all."""
        begin = np.frombuffer(self._table("list_begin"), np.uint32)
        return begin, np.frombuffer(self._table("lists"), np.uint32)
