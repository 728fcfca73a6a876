"""What a queue did, as a MegakernelReport: the core's counts, rows and records as figures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline import _core
from brickline.buffers import Buffer
from brickline.device.base import FAULTS as BLOCK_FAULTS
from brickline.executor.megakernel.planning import ACCESS_DTYPE
from brickline.executor.megakernel.queue_lineage import queue_lineage
from brickline.executor.megakernel.queue_refusals import FAULTS
from brickline.megakernel_flow import Flow
from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_tables import ItemFault, TaskState, WorkerState, WorkerTimes

ROW = np.dtype(
    [
        *((name, "<u4") for name in ("op", "items", "done", "alias", "follows")),
        ("state", "u1"),
        ("priority", "u1"),
        ("apart", "<u2"),
    ]
)
"""``MegaSubmissionRow``."""
RECORD = np.dtype(
    [
        *((name, "<u8") for name in ("begin", "ready", "end", "submission")),
        *((name, "<u4") for name in ("block", "worker")),
    ]
)
"""``MegaQueueRecord``."""
OPEN, DONE, FAULTED, SKIPPED, CANCELLED, ALIAS = range(6)
"""``MegaSubmissionState``."""
NOTHING = 0xFFFFFFFF
"""``MEGA_NOTHING``."""


@dataclass
class Period:
    """What the host measured since the queue was last empty at a report."""

    began_ns: int = 0
    """0: nothing was submitted."""
    published_ns: int = 0
    began_unix_ns: int = 0
    append_ns: int = 0
    peak_bytes: int = 0
    launches: int = 0
    """Times that workers were started."""


def queue_report(
    core: _core.MegaQueueCore,
    *,
    name: str,
    device: str,
    ops: Sequence[str],
    period: Period,
    now_ns: int,
    ended: str,
    lineage: Sequence[Sequence[str]] | None,
    trace: bool,
    outputs: Mapping[str, Buffer] | None,
    telemetry: Mapping[str, Any],
) -> MegakernelReport:
    """Return the report of everything since the queue was last empty at one.

    Args:
        core: The queue; its workers have left, or nothing is open.
        name: What it is called.
        device: Where its workers are.
        ops: Names of the ops.
        period: What the host measured.
        now_ns: The end.
        ended: What the last wait said: ``done``, ``expired``, ``stopped`` or ``hung``.
        lineage: Of each op the names of its buffers, where lineage was kept, else None.
        trace: Whether items were recorded.
        outputs: Named memory, of which lineage tells who wrote last to it.
        telemetry: What else was measured.
    """
    totals = core.totals()
    rows = np.frombuffer(core.rows(), ROW)
    first = core.first
    seen = (rows["state"] == OPEN) | (rows["state"] == ALIAS)
    done = totals["done"] + totals["deduped_done"] + int(rows["done"][seen].sum())
    wall_ns = now_ns - period.began_ns if period.began_ns else 0
    notes = []
    faults = _faults(core.faults(), first, rows, ops)
    gone = totals["submissions"] - len(rows)
    if gone > 0:
        notes.append(f"{gone} submissions before the rows of this report were counted, not kept")
    flow = writers = lineage_ns = None
    if lineage is not None:
        began = time.perf_counter_ns()
        flow, writers = _lineage(core, rows, first, lineage, outputs or {})
        lineage_ns = time.perf_counter_ns() - began
        for name in (name for name, found in writers.items() if not found):
            notes.append(f"output {name}: no submission of this report wrote to it")
    workers, by_op = core.workers(), core.ops()
    if trace and ended == "hung" and any(each["inside"] for each in workers):
        notes.append("what workers that hang have done is not in the trace")
    if totals["dropped_records"]:
        notes.append(f"{totals['dropped_records']} items were executed after the trace was full")
    records = np.frombuffer(core.records(), RECORD)
    return MegakernelReport.of_queue(
        name=name,
        device=device,
        ops=ops,
        tasks=_tasks(rows),
        workers=_workers(workers, first, wall_ns, ended, len(rows)),
        items_processed=done,
        items_remaining=totals["published"] + totals["deduped"] - done,
        wall_time_ns=wall_ns,
        spans=_spans(records, totals, first) if trace else None,
        waits=_waits(core) if trace else None,
        flow=flow,
        outputs=writers,
        faults=faults,
        telemetry=telemetry,
        queue_plan_ns=totals["plan_ns"] + period.append_ns,
        queue_publish_ns=totals["publish_ns"],
        backend_dispatch_ns=now_ns - period.published_ns if period.published_ns else None,
        lineage_ns=lineage_ns,
        published_items=totals["published"],
        deduped_items=totals["deduped"],
        items_faulted=totals["faulted"] + _missing_aliases(rows, FAULTED),
        items_skipped=totals["skipped"] + _missing_aliases(rows, SKIPPED),
        items_requeued=totals["requeued"],
        op_work_ns=tuple(work_ns for _, work_ns in by_op),
        op_items=tuple(items for items, _ in by_op),
        began_unix_ns=period.began_unix_ns or None,
        notes=tuple(notes),
        first_submission=first,
    )


def _missing_aliases(rows: NDArray[Any], state: int) -> int:
    """Return how many items are not there because what they repeat ended in a state."""
    deduped = rows[rows["state"] == ALIAS]
    ended = deduped[rows["state"][deduped["alias"]] == state]
    return int(ended["items"].sum()) - int(ended["done"].sum())


def _tasks(rows: NDArray[Any]) -> dict[str, Any]:
    states = np.array(
        [
            TaskState.NOT_RUN,
            TaskState.DONE,
            TaskState.FAULTED,
            TaskState.SKIPPED,
            TaskState.NOT_RUN,
            TaskState.DEDUPED,
        ]
    )[rows["state"]]
    is_open = (states == TaskState.NOT_RUN) & (rows["done"] > 0)
    states[is_open] = TaskState.PARTIAL
    states[is_open & (rows["done"] == rows["items"])] = TaskState.DONE
    return {
        "op": rows["op"],
        "items": rows["items"],
        "done": rows["done"],
        "alias": _alias(rows),
        "state": states,
        "priority": rows["priority"],
        "region": _regions(rows["follows"]),
        "apart": rows["apart"],
    }


def _alias(rows: NDArray[Any]) -> NDArray[np.int64]:
    """Return the row that computes each one's values, or -1 of one that does so itself."""
    return np.where(rows["state"] == ALIAS, rows["alias"].astype(np.int64), -1)


def _regions(follows: NDArray[Any]) -> NDArray[np.int64]:
    """Return the row of the first submission of each one's region."""
    own = np.arange(len(follows), dtype=np.int64)
    found = np.where(follows == NOTHING, own, follows.astype(np.int64))
    while not np.array_equal(further := found[found], found):
        found = further
    return found


def _faults(
    found: Sequence[tuple[int, int, int, int]], first: int, rows: NDArray[Any], ops: Sequence[str]
) -> list[ItemFault]:
    words = BLOCK_FAULTS | FAULTS
    return [
        ItemFault(
            submission,
            block,
            str(code),
            ops[rows["op"][submission - first]],
            words.get(code, "a code of its own, from block.fault"),
            attempts,
        )
        for submission, block, code, attempts in sorted(found)
        if submission >= first
    ]


def _workers(
    found: Sequence[Mapping[str, Any]], first: int, wall_ns: int, ended: str, tasks: int
) -> list[WorkerTimes]:
    state = WorkerState.FINISHED if ended == "done" else WorkerState.STOPPED
    return [
        WorkerTimes(
            items=each["items"],
            skipped=each["skipped"],
            begin_ns=0,
            end_ns=wall_ns,
            work_ns=each["work_ns"],
            dependency_wait_ns=each["wait_ns"],
            state=WorkerState.HUNG if ended == "hung" and each["inside"] else state,
            task=each["submission"]
            if each["inside"] and 0 <= each["submission"] - first < tasks
            else None,
        )
        for each in found
    ]


def _spans(records: NDArray[Any], totals: Mapping[str, Any], first: int) -> dict[str, Any]:
    rate, origin = totals["ns_per_tick"], totals["begin_tick"]

    def ns(name: str) -> NDArray[np.int64]:
        ticks = records[name].astype(np.int64) - np.int64(origin)
        found: NDArray[np.int64] = np.rint(np.maximum(ticks, 0) * rate).astype(np.int64)
        return found

    return {
        "worker": records["worker"],
        "task": (records["submission"] - first % 2**32) % 2**32,
        "begin_ns": ns("begin"),
        "ready_ns": ns("ready"),
        "end_ns": ns("end"),
        "items": np.ones(len(records), np.int64),
    }


def _lineage(
    core: _core.MegaQueueCore,
    rows: NDArray[Any],
    first: int,
    buffers: Sequence[Sequence[str]],
    outputs: Mapping[str, Buffer],
) -> tuple[Flow, dict[str, tuple[int, ...]]]:
    """Return who read whom, and the numbers of those that wrote last to named memory."""
    ends, accesses = core.accesses()
    flow, writers = queue_lineage(
        _begins(ends),
        np.frombuffer(accesses, ACCESS_DTYPE),
        _alias(rows),
        lambda row, place: f"{buffers[rows['op'][row]][place]} of submission {first + row}",
        {name: (each.address, each.address + each.nbytes) for name, each in outputs.items()},
    )
    return flow, {name: tuple(first + row for row in written) for name, written in writers.items()}


def _waits(core: _core.MegaQueueCore) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    ends, numbers = core.waits()
    return _begins(ends), np.frombuffer(numbers, np.uint32).astype(np.int64)


def _begins(ends: bytes) -> NDArray[np.int64]:
    return np.append(np.int64(0), np.frombuffer(ends, np.uint64).astype(np.int64))
