"""What workers of a program leave behind, read as figures: progress, records and faults.

The rows are the structs of ``include/brickline/megakernel.h``. A worker counts ticks of its own
clock, and knows two moments of a clock that all workers share: its beginning and its end. Every
time becomes ns from the beginning of the first worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.errors import UsageError
from brickline.megakernel_tables import (
    Column,
    ItemFault,
    Spans,
    Tasks,
    TaskState,
    WorkerState,
    WorkerTimes,
)

PROGRESS = np.dtype(
    [
        *((name, "<u4") for name in ("state", "position", "task", "blocks")),
        *((name, "<u8") for name in ("items", "skipped", "begin_ns", "end_ns", "begin", "end")),
        *((name, "<u8") for name in ("work", "dependency_wait", "data_wait", "ring_wait")),
        *((name, "<u4") for name in ("missing", "arrived")),
        ("padding", "V24"),
    ]
)
"""``MegaProgress``."""
RECORD = np.dtype(
    [(name, "<u8") for name in ("begin", "ready", "end")] + [("task", "<u4"), ("blocks", "<u4")]
)
"""``MegaRecord``."""
FAULT = np.dtype([("code", "<u4"), ("block", "<u4")])
"""``MegaFault``."""
NO_TASK = 0xFFFFFFFF
FINISHED = 1


def checked_rows(rows: Any, dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """Return rows of a struct.

    Raises:
        UsageError: They are rows of something else.
    """
    found: NDArray[Any] = np.asarray(rows)
    if found.dtype != dtype or found.ndim != 1:
        raise UsageError(f"{name}: expected rows of {dtype.names}, got {found.dtype}")
    return found


def worker_times(progress: NDArray[Any]) -> tuple[WorkerTimes, ...]:
    """Return what each worker did."""
    origin = _origin(progress)
    return tuple(_worker(row, origin) for row in progress)


def _origin(progress: NDArray[Any]) -> int:
    begun = progress["begin_ns"][progress["begin_ns"] > 0]
    return int(begun.min()) if len(begun) else 0


def ns_per_tick(row: Any) -> float:
    """Return the length of a tick of a worker's own clock; 1 where it saw no time pass."""
    ticks = int(row["end"]) - int(row["begin"])
    ns = int(row["end_ns"]) - int(row["begin_ns"])
    return ns / ticks if ticks > 0 and ns > 0 else 1.0


def _worker(row: Any, origin: int) -> WorkerTimes:
    state, rate = int(row["state"]), ns_per_tick(row)
    if not 0 <= state < len(WorkerState):
        raise UsageError(f"progress: expected a state below {len(WorkerState)}, got {state}")

    def task(name: str) -> int | None:
        number = int(row[name])
        return None if state == FINISHED or number == NO_TASK else number

    def ns(name: str) -> int:
        return round(int(row[name]) * rate)

    begun, left = int(row["begin_ns"]) > 0, int(row["end_ns"]) >= int(row["begin_ns"])
    return WorkerTimes(
        items=int(row["items"]),
        skipped=int(row["skipped"]),
        begin_ns=int(row["begin_ns"]) - origin if begun else None,
        end_ns=int(row["end_ns"]) - origin if begun and left else None,
        work_ns=ns("work"),
        dependency_wait_ns=ns("dependency_wait"),
        data_wait_ns=ns("data_wait"),
        ring_wait_ns=ns("ring_wait"),
        state=tuple(WorkerState)[state],
        task=task("task"),
        missing=task("missing"),
    )


def spans_from_records(progress: NDArray[Any], records: Sequence[NDArray[Any]]) -> Spans:
    """Return what each worker recorded, on the clock that all share.

    Raises:
        UsageError: There are not as many as workers, or they are no records.
    """
    if len(records) != len(progress):
        raise UsageError(f"records: expected {len(progress)} workers, got {len(records)}")
    origin = _origin(progress)
    parts: dict[str, list[Any]] = {name: [] for name in Spans.__dataclass_fields__}
    for worker, (row, given) in enumerate(zip(progress, records, strict=True)):
        rows = checked_rows(given, RECORD, f"records of worker {worker}")
        shift, rate = int(row["begin_ns"]) - origin, ns_per_tick(row)
        for name in ("begin", "ready", "end"):
            ticks = rows[name].astype(np.int64) - np.int64(row["begin"])
            parts[f"{name}_ns"].append(np.rint(ticks * rate).astype(np.int64) + shift)
        parts["worker"].append(np.full(len(rows), worker, np.int64))
        parts["task"].append(rows["task"].astype(np.int64))
        parts["items"].append(rows["blocks"].astype(np.int64))
    empty = [np.empty(0, np.int64)]
    return Spans.of({name: np.concatenate(empty + each) for name, each in parts.items()})


def tasks_with_state(
    tasks: Tasks, progress: NDArray[Any], spans: Spans | None, codes: Column
) -> Tasks:
    """Add how many items of each task are done, and its state, where the tables tell.

    The item of a fault is executed and not done; of a task one fault is known, its first.
    """
    if len(codes) != len(tasks):
        raise UsageError(f"faults: expected a row for each of {len(tasks)} tasks, got {len(codes)}")
    columns: dict[str, Any] = tasks.columns()
    own = tasks.alias < 0
    finished = bool((progress["state"] == FINISHED).all())
    if "done" not in columns:
        if spans is not None:
            spans.check(len(progress), len(tasks))
            ran = np.zeros(len(tasks), np.int64)
            np.add.at(ran, spans.task, spans.items)
        elif finished and not codes.any():
            ran = tasks.items
        else:
            return tasks
        done = np.where(own, np.maximum(ran - (codes != 0), 0), 0)
        columns["done"] = np.where(own, done, done[np.maximum(tasks.alias, 0)])
    if "state" not in columns:
        done, items = columns["done"], tasks.items
        nothing = TaskState.SKIPPED if finished and codes.any() else TaskState.NOT_RUN
        state = np.where(done >= items, int(TaskState.DONE), int(TaskState.PARTIAL))
        state[(done == 0) & (items > 0)] = int(nothing)
        state[codes != 0] = int(TaskState.FAULTED)
        state[~own] = int(TaskState.DEDUPED)
        columns["state"] = state
    return Tasks.of(columns)


def item_faults(
    faults: NDArray[Any], tasks: Tasks, ops: Sequence[str], words: Mapping[int, str]
) -> tuple[ItemFault, ...]:
    """Return the first fault of each task that has one."""
    return tuple(
        ItemFault(
            task,
            int(faults["block"][task]),
            str(int(faults["code"][task])),
            ops[tasks.op[task]],
            words.get(int(faults["code"][task]), ""),
        )
        for task in np.flatnonzero(faults["code"]).tolist()
    )
