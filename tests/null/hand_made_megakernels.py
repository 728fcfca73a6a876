"""Reports of megakernels made by hand: a decoder of two layers on four workers, and a queue."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.megakernel_flow import Flow
from brickline.megakernel_progress import FAULT, NO_TASK, PROGRESS, RECORD
from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_tables import ItemFault, WorkerTimes

OPS = ("rms_norm", "gemv", "attention", "silu_gate")
BRICKS = ("RmsNorm", "QkvProjection", "Attention", "Mlp")
LAYERS = 2
WORKERS = 4
ITEMS = (1, 8, 4, 8)
"""Of a task of each op."""
TICK_NS = 0.5
BEGAN_UNIX_NS = 1_700_000_000_000_000_000


def chain_flow(count: int, memory: Sequence[str] = ("x", "w")) -> Flow:
    """Each task reads the one before; the first reads x, every second one w."""
    begin = [0, *range(count)]
    given = [[0] if task == 0 else [1] if task % 2 else [] for task in range(count)]
    given_begin = np.cumsum([0, *map(len, given)])
    return Flow(begin, range(count - 1), given_begin, list(chain(*given)), memory)


def decoder_tasks() -> dict[str, list[int]]:
    """Columns of tasks: four ops a layer, one after the other."""
    tasks = range(LAYERS * len(OPS))
    return {
        "op": [task % len(OPS) for task in tasks],
        "items": [ITEMS[task % len(OPS)] for task in tasks],
        "region": [task // 2 for task in tasks],
        "brick": [task % len(OPS) for task in tasks],
        "layer": [task // len(OPS) for task in tasks],
    }


def decoder_rows() -> tuple[NDArray[Any], list[NDArray[Any]]]:
    """Progress and records of four workers: one task is 1,000 ticks an item, one after the other.

    Worker w begins w * 10 ns after the first, on a clock of its own that has another origin.
    """
    tasks, progress = decoder_tasks(), np.zeros(WORKERS, PROGRESS)
    records: list[list[tuple[int, ...]]] = [[] for _ in range(WORKERS)]
    length = [1000 * -(-items // WORKERS) for items in tasks["items"]]
    start = np.cumsum([0, *length])
    for task, items in enumerate(tasks["items"]):
        for worker in range(min(items, WORKERS)):
            share = items * (worker + 1) // min(items, WORKERS) - items * worker // min(
                items, WORKERS
            )
            ready = start[task]
            before = records[worker][-1][2] if records[worker] else 0
            records[worker].append((before, ready, ready + 1000 * share, task, share))
    for worker, rows in enumerate(records):
        origin = 10**9 * (worker + 1)
        late = int(worker * 10 / TICK_NS)
        end = int(start[-1])
        progress[worker] = (
            *(1, len(rows), NO_TASK, 0, sum(row[4] for row in rows), 0),
            *(
                5_000_000 + worker * 10,
                5_000_000 + round(end * TICK_NS),
                origin + late,
                origin + end,
            ),
            sum(row[2] - row[1] for row in rows),
            sum(max(row[1] - max(row[0], late), 0) for row in rows),
            *(0, 0, NO_TASK, 0, b""),
        )
    made = [
        np.array(
            [
                (
                    origin + max(row[0], late),
                    *(origin + max(each, late) for each in row[1:3]),
                    *row[3:],
                )
                for row in rows
            ],
            RECORD,
        )
        for rows, origin, late in zip(
            records,
            (10**9 * (worker + 1) for worker in range(WORKERS)),
            (int(worker * 10 / TICK_NS) for worker in range(WORKERS)),
            strict=True,
        )
    ]
    return progress, made


def decoder_waits() -> tuple[list[int], list[int]]:
    count = LAYERS * len(OPS)
    return [0, *range(count)], list(range(count - 1))


def decoder_report(**changes: Any) -> MegakernelReport:
    """A plan of eight launches that ran as one kernel, traced, with lineage."""
    progress, records = decoder_rows()
    given: dict[str, Any] = {
        "name": "decode",
        "device": "CPU",
        "ops": OPS,
        "bricks": BRICKS,
        "tasks": decoder_tasks(),
        "progress": progress,
        "records": records,
        "waits": decoder_waits(),
        "flow": chain_flow(LAYERS * len(OPS)),
        "outputs": {"logits": (7,), "cache": (1, 5)},
        "wall_time_ns": 60_000,
        "queue_plan_ns": 9_000,
        "queue_publish_ns": 2_000,
        "backend_dispatch_ns": 40_000,
        "lineage_ns": 3_000,
        "began_unix_ns": BEGAN_UNIX_NS,
        "telemetry": {
            "bytes_uploaded": 4096,
            "bytes_read_back": 1024,
            "kernel_launches": 1,
            "sync_points": 1,
            "compiled_cache_hit": True,
            "execution_mode": "threads",
            "peak_memory_bytes": 1 << 20,
            "memory_budget_bytes": 1 << 30,
        },
    }
    return MegakernelReport.of_program(**{**given, **changes})


def faulted_rows() -> NDArray[Any]:
    """A fault in item 3 of task 5."""
    faults = np.zeros(LAYERS * len(OPS), FAULT)
    faults[5] = (7, 3)
    return faults


def queue_report(**changes: Any) -> MegakernelReport:
    """Six submissions, one of them a duplicate, one faulted, one not run for it."""
    given: dict[str, Any] = {
        "name": "feed",
        "device": "CPU",
        "ops": ("copy", "add"),
        "tasks": {
            "op": [0, 1, 1, 0, 1, 1],
            "items": [4, 2, 2, 1, 3, 3],
            "alias": [-1, -1, 1, -1, -1, -1],
            "priority": [2, 2, 2, 0, 2, 4],
            "state": [0, 0, 5, 0, 4, 3],
            "done": [4, 2, 2, 1, 2, 0],
        },
        "workers": [
            WorkerTimes(6, 0, 0, 900, 700, 100, None, None),
            WorkerTimes(4, 3, 0, 900, 500, 300, None, None),
        ],
        "items_processed": 11,
        "items_remaining": 4,
        "published_items": 13,
        "deduped_items": 2,
        "items_skipped": 3,
        "items_requeued": 2,
        "op_work_ns": (500, 700),
        "faults": [ItemFault(4, 1, "MK503", "add", "the op returned 9", 2)],
        "flow": Flow([0, 0, 1, 2, 2, 3, 4], [0, 1, 1, 4], [0, 1, 1, 1, 2, 2, 2], [0, 0], ["x"]),
        "wall_time_ns": 1_200,
        "telemetry": {"capacity": 1024, "kernel_launches": 0, "sync_points": 1},
    }
    return MegakernelReport.of_queue(**{**given, **changes})
