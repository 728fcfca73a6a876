"""The tables of a program: rows that an engine is given, and what it made of them, as arrays.

The arrays are structs of ``include/brickline/megakernel.h``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.executor.megakernel.deduped import Deduped
from brickline.plan_launches import Launch

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


def engine_rows(
    launches: Sequence[Launch], ops: Sequence[int], joined: Sequence[bool], deduped: Deduped
) -> list[dict[str, Any]]:
    """Return a row for each launch, as an engine of the core takes it.

    Args:
        launches: The plan's.
        ops: The place of each launch's kernel among all.
        joined: Whether each launch is of the region of the last one before it that is run.
        deduped: Which ones are not run.
    """
    rows = []
    for launch, op, is_joined in zip(launches, ops, joined, strict=True):
        row: dict[str, Any] = {
            "op": op,
            "arguments": len(launch.arguments),
            "joined": is_joined,
        }
        if not deduped.is_run(launch.number):
            row["alias"] = deduped.computed_by[launch.number]
        elif deduped.waits is not None:
            row["waits"] = deduped.waits[launch.number]
        rows.append(row)
    return rows


def region_numbers(tasks: NDArray[Any]) -> NDArray[Any]:
    """Return the region of each launch; of one that is not run, that of the last before it."""
    begins = ((tasks["flags"] & JOINED) == 0) & (tasks["parts"] > 0)
    return np.asarray(np.cumsum(begins) - 1)


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
