"""What a megakernel did, told to a profiler: tiles for parts of tasks, traces for tasks.

The times were taken inside the kernel. A tile of level macro lies at row worker and column task; a
trace spans a task from its first item to its last, on the run's clock, with its region, its items
and what it waited as params::

    {"level": "launch", "task": 7, "region": 3, "items": 128, "work_ns": 81200, "wait_ns": 900}

Of a queue tasks and regions have the numbers of submissions, and the level is "submission".
"""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from brickline.abi import NO_SLOT
from brickline.errors import UsageError
from brickline.megakernel_report import MegakernelReport
from brickline.tiles import TileLevel

if TYPE_CHECKING:
    from brickline.profiler import BrickProfiler


def tell_profiler(
    report: MegakernelReport, profiler: BrickProfiler, position: int = 0
) -> tuple[int, int]:
    """Record a run in a profiler; return how many tiles and traces that made.

    Args:
        report: Of a run that was traced.
        profiler: Who is told; nothing happens where it is disabled.
        position: Number of the run, as traces have it. Default 0.

    Raises:
        UsageError: The run was not traced, or does not say when it was.
    """
    if report.spans is None or report.began_unix_ns is None:
        raise UsageError(
            f"the run of {report.name} was not traced; prepare the plan, or make the Megakernel, "
            "with trace=True"
        )
    if not profiler.is_enabled():
        return 0, 0
    spans = report.spans
    ran = np.flatnonzero(spans.items)
    rows = (spans.worker, spans.task, spans.work_ns, spans.items)
    for worker, task, work, items in zip(*(each[ran].tolist() for each in rows), strict=True):
        number = report.first_submission + task
        profiler.tiles.record(TileLevel.MACRO, work, row=worker, column=number, elements=items)
    return len(ran), _tell_traces(report, profiler, position)


def _tell_traces(report: MegakernelReport, profiler: BrickProfiler, position: int) -> int:
    spans, tasks = report.spans, report.tasks
    assert spans is not None
    assert report.began_unix_ns is not None
    count = len(tasks)
    begin, end = np.full(count, np.iinfo(np.int64).max), np.full(count, -1, np.int64)
    work, wait, items = (np.zeros(count, np.int64) for _ in range(3))
    np.minimum.at(begin, spans.task, spans.ready_ns)
    np.maximum.at(end, spans.task, spans.end_ns)
    np.add.at(work, spans.task, spans.work_ns)
    np.add.at(wait, spans.task, spans.wait_ns)
    np.add.at(items, spans.task, spans.items)
    # The run's clock is not Unix time; both are read at about the same moment.
    began = report.began_unix_ns - time.time_ns() + profiler._now_ns()
    told = np.flatnonzero(items)
    kind, _, number = report.device.partition(":")
    seen: Counter[tuple[str, int]] = Counter()
    for task in told[np.argsort(end[told], kind="stable")].tolist():
        facts = {
            "level": "launch" if report.mode == "program" else "submission",
            "task": report.first_submission + task,
            "region": report.first_submission + int(tasks.region[task]),
            "items": int(items[task]),
            "work_ns": int(work[task]),
            "wait_ns": int(wait[task]),
        }
        name, layer = report.ops[tasks.op[task]], int(tasks.layer[task])
        seen[name, layer] += 1
        brick = int(tasks.brick[task])
        handle = None
        if brick >= 0:
            handle = profiler.brick(report.bricks[brick], None if layer < 0 else layer)
        profiler.traces.write(
            profiler.traces.reserve(),
            name=name,
            layer=layer,
            slot=NO_SLOT if handle is None else handle.slot,
            position=position,
            ordinal=seen[name, layer] - 1,
            backend=kind,
            device=int(number) if number else -1,
            params=json.dumps(facts),
            enqueue_ns=began,
            start_ns=began + int(begin[task]),
            end_ns=began + int(end[task]),
        )
    return len(told)
