"""A plan on workers of the host: the engine of the core, and what it leaves behind, as arrays."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline import _core
from brickline.executor.megakernel.deduped import Deduped
from brickline.executor.megakernel.tables import ProgramTables, engine_rows
from brickline.megakernel_progress import FAULT, PROGRESS, RECORD
from brickline.plan_launches import Launch


class CpuEngine(ProgramTables):
    """Runs all launches of a plan on threads that share out the blocks.

    Args:
        core: The launches with their arguments.
        launches: The plan's.
        ops: The place of each launch's kernel among all.
        joined: Whether each launch is of the region of the last one before it that is run.
        deduped: Which launches are not run.
        workers: How many share the blocks. Default None: one for each core.
        trace: Whether parts of launches are recorded as they are executed.
        held: What items use, code and memory; it stays for good where one never returns.
    """

    execution_mode = "threads"
    after_a_hang = (
        "its thread cannot be ended and may still write to the plan's memory, which stays; this "
        "plan does not run again: end the process, or prepare it with other memory"
    )

    def __init__(
        self,
        core: _core.PlanCore,
        launches: Sequence[Launch],
        ops: Sequence[int],
        joined: Sequence[bool],
        deduped: Deduped,
        workers: int | None,
        trace: bool,
        held: object,
    ) -> None:
        self.workers = len(os.sched_getaffinity(0)) if workers is None else workers
        self._trace = trace
        rows = engine_rows(launches, ops, joined, deduped)
        self._core = _core.MegaCpuCore(core, rows, self.workers, held)

    def set_trace(self, trace: bool) -> None:
        """Say whether the next runs are recorded."""
        self._trace = trace

    def run(self, deadline_ns: int, delay_seed: int, stream: int = 0) -> dict[str, Any]:
        """Run every item; return what came of it. A host has no streams."""
        return self._core.run(deadline_ns, self._trace, delay_seed)

    def outcome(self) -> dict[str, Any]:
        """Return what came of the last run."""
        return self._core.outcome()

    def stop(self) -> None:
        """End the run that is under way, each worker after the item that it is at."""
        self._core.stop()

    def take_stopped(self) -> int | None:
        """Return how many launches were finished when a signal ended a run; told once."""
        return self._core.take_stopped()

    def refresh(self) -> str | None:
        """Follow the plan's variables and addresses; return why it cannot be run, if so."""
        return self._core.refresh()

    @property
    def structure_version(self) -> int:
        """Counts changes of the tables but for arguments."""
        return self._core.structure_version

    @property
    def is_dead(self) -> bool:
        """Whether an item of a run never returned."""
        return self._core.is_dead

    def telemetry(self) -> dict[str, int]:
        """Return what the last run moved and allocated: nothing, memory is the host's."""
        return {
            "bytes_uploaded": 0,
            "bytes_read_back": 0,
            "readback_buffers": 0,
            "resident_allocations": 0,
            "kernel_launches": 1,
        }

    def _table(self, name: str) -> bytes:
        return bytes(self._core.table(name))

    # ----------------------------------------------------------------------------- of the last run

    def progress(self) -> NDArray[Any]:
        """Return what each worker has done."""
        return np.frombuffer(self._table("progress"), PROGRESS)

    def faults(self) -> NDArray[Any]:
        """Return the first fault of each launch."""
        return np.frombuffer(self._table("faults"), FAULT)

    def items_done(self) -> NDArray[Any]:
        """Return how many items of each launch are done: executed without a fault."""
        return np.frombuffer(self._table("items_done"), np.uint64).astype(np.int64)

    def items_executed(self) -> NDArray[Any]:
        """Return how many items of each launch were executed, those that faulted among them."""
        return np.frombuffer(self._table("items_executed"), np.uint64).astype(np.int64)

    def records(self) -> list[NDArray[Any]] | None:
        """Return what each worker recorded, entry by entry; None without a trace."""
        if not self._trace:
            return None
        rows = np.frombuffer(self._table("records"), RECORD)
        begin = self.lists()[0].astype(np.int64)
        parts = (rows[first:end] for first, end in pairwise(begin))
        return [part[part["end"] > 0] for part in parts]  # empty where a worker did not come to

    def ends(self) -> list[tuple[bool, bool]]:
        """Return of each launch whether it is finished, and whether part of it was skipped."""
        return self._core.ends()
