"""Claims: planning of a megakernel takes at most 0.1 us an item, and lineage under a second.

* Dependencies, dedupe, regions and validation from arrays, at 100,000 and 200,000 items: at most
  100 ns an item; and twice as many items take at most 2.2 times as long.
* Lineage of 100,000 items: under 1 s.

Items are independent; a chain of levels 128 wide, in which each waits for all of the level before,
as tasks of 128 blocks and as tasks of one; and what the layers of a decoder do. Times are CPU time
of one process on one core. The peer in the same run is `brickline.hazards.Tracker`, which finds the
same dependencies in Python, on as many tasks as it takes a second for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
from harness import Claim

from brickline.executor.megakernel.planning import (
    ACCESS_DTYPE,
    PURE,
    PlannedTasks,
    Tasks,
    check_schedule,
    plan_tasks,
)
from brickline.hazards import Tracker
from brickline.lineage import Lineage

MOST_NS = 100.0
MOST_GROWTH = 2.2
MOST_LINEAGE_S = 1.0
WORKERS = 128
WIDTH = 128
PEER_TASKS = 2_000


def _tasks(rows: np.ndarray, per_task: int, blocks: np.ndarray) -> Tasks:
    """Tasks that all have as many accesses, each with one parameter of its own."""
    count = len(blocks)
    return Tasks(
        op=(np.arange(count) % 7).astype(np.uint32),
        blocks=blocks.astype(np.uint32),
        flags=np.full(count, PURE, np.uint32),
        param_begin=np.arange(count + 1, dtype=np.uint32),
        params=np.arange(count, dtype=np.uint64),
        access_begin=np.arange(0, len(rows) + 1, per_task, dtype=np.uint32),
        accesses=rows,
    )


def _rows(count: int, per_task: int) -> np.ndarray:
    rows = np.zeros((count, per_task), ACCESS_DTYPE)
    rows["mode"] = 1
    rows["mode"][:, -1] = 2
    return rows


def independent(items: int) -> Tasks:
    """Each reads 64 bytes of its own and writes 64 others."""
    rows = _rows(items, 2)
    rows["begin"] = 64 * np.arange(items, dtype=np.uint64)[:, None]
    rows["end"] = rows["begin"] + 64
    rows["space"][:, 1] = 1
    return _tasks(rows.reshape(-1), 2, np.ones(items))


def levels_of_tasks(items: int) -> Tasks:
    """Each task reads all of the level before and writes one piece of its own."""
    rows = _rows(items, 2)
    level, k = np.divmod(np.arange(items, dtype=np.uint64), WIDTH)
    rows["end"][:, 0] = 64 * WIDTH
    rows["begin"][:, 1], rows["end"][:, 1] = 64 * k, 64 * k + 64
    rows["space"][:, 0], rows["space"][:, 1] = level % 2, (level + 1) % 2
    return _tasks(rows.reshape(-1), 2, np.ones(items))


def levels_of_blocks(items: int) -> Tasks:
    """The same with a task of 128 blocks for each level."""
    levels = np.arange(items // WIDTH)
    rows = _rows(len(levels), 2)
    rows["end"] = 64 * WIDTH
    rows["per_block"][:, 1] = 64
    rows["space"][:, 0], rows["space"][:, 1] = levels % 2, (levels + 1) % 2
    return _tasks(rows.reshape(-1), 2, np.full(len(levels), WIDTH))


# Of one layer: what is read (two buffers or weights) and written, blocks, bytes of a block.
STREAM, NORMED, QUERY, KEY, VALUE, MIXED, GATE, UP, HIDDEN = range(9)
WEIGHTS = 100
LAYER = (
    (STREAM, STREAM, NORMED, 1, 0),
    (NORMED, WEIGHTS, QUERY, 32, 128),
    (NORMED, WEIGHTS + 1, KEY, 8, 128),
    (NORMED, WEIGHTS + 2, VALUE, 8, 128),
    (QUERY, KEY, MIXED, 32, 128),
    (MIXED, VALUE, QUERY, 32, 128),
    (QUERY, WEIGHTS + 3, MIXED, 32, 128),
    (MIXED, STREAM, STREAM, 32, 128),
    (STREAM, STREAM, NORMED, 1, 0),
    (NORMED, WEIGHTS + 4, GATE, 64, 128),
    (NORMED, WEIGHTS + 5, UP, 64, 128),
    (GATE, UP, HIDDEN, 64, 128),
    (HIDDEN, WEIGHTS + 6, MIXED, 32, 128),
    (MIXED, STREAM, STREAM, 32, 128),
)


def decoder(items: int) -> Tasks:
    """Layers of a decoder, token after token, as tasks of as many blocks as the kernels have."""
    layer = np.array(LAYER)
    blocks = np.tile(layer[:, 3], 1 + items // int(layer[:, 3].sum()))
    blocks = blocks[: 1 + int(np.searchsorted(np.cumsum(blocks), items))]
    return _decoder(blocks, layer)


def decoder_of_tasks(items: int) -> Tasks:
    """The same, where every launch has one block."""
    return _decoder(np.ones(items, np.int64), np.array(LAYER))


def _decoder(blocks: np.ndarray, layer: np.ndarray) -> Tasks:
    count = len(blocks)
    number, kind = np.divmod(np.arange(count), len(layer))
    rows = _rows(count, 3)
    for k in range(3):
        space = layer[kind, k]
        rows["space"][:, k] = space + np.where(space >= WEIGHTS, number % 16 * 7, 0)
    rows["end"] = 8192
    rows["end"][:, 2] = 128 * layer[kind, 3]
    rows["per_block"][:, 2] = np.where(blocks > 1, layer[kind, 4], 0)
    is_elementwise = np.isin(kind, (7, 11, 13)) & (blocks > 1)
    for k in range(2):
        rows["end"][:, k] = np.where(is_elementwise, 128 * layer[kind, 3], rows["end"][:, k])
        rows["per_block"][:, k] = np.where(is_elementwise, 128, 0)
    return _tasks(rows.reshape(-1), 3, blocks)


GRAPHS: dict[str, Callable[[int], Tasks]] = {
    "independent items": independent,
    "levels of 128 tasks": levels_of_tasks,
    "levels of 128 blocks": levels_of_blocks,
    "a decoder, one block a launch": decoder_of_tasks,
    "a decoder": decoder,
}


def _cpu_ns(call: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time_ns()
        call()
        best = min(best, time.process_time_ns() - began)
    return best


def plan_and_validate(tasks: Tasks) -> None:
    """What is done before a launch, from arrays."""
    check_schedule(plan_tasks(tasks))


def validating_lists_ns(planned: PlannedTasks, repeats: int) -> float:
    """Validation of what workers with lists of their own do."""
    first = planned.assign(WORKERS)
    lists = planned.lists(WORKERS, first)
    return _cpu_ns(
        lambda: check_schedule(planned, workers=WORKERS, first_worker=first, lists=lists), repeats
    )


def peer_ns(tasks: Tasks) -> float:
    """Dependencies alone, in Python, an item."""
    count = min(len(tasks), PEER_TASKS)
    rows = tasks.accesses[: tasks.access_begin[count]].tolist()
    begins = tasks.access_begin[: count + 1].tolist()
    tracker = Tracker()
    began = time.process_time_ns()
    for task in range(count):
        for begin, end, _, space, mode in rows[begins[task] : begins[task + 1]]:
            (tracker.read if mode == 1 else tracker.write)(task, space, begin, end)
    return (time.process_time_ns() - began) / int(tasks.blocks[:count].sum())


def claims_of(name: str, make: Callable[[int], Tasks], repeats: int) -> list[dict[str, Any]]:
    """Planning at two sizes, how it grows, and lineage."""
    claims, spent = [], {}
    for items in (100_000, 200_000):
        tasks = make(items)
        blocks = int(tasks.blocks.sum())
        planning = _cpu_ns(lambda t=tasks: plan_tasks(t), repeats) / blocks
        spent[items] = _cpu_ns(lambda t=tasks: plan_and_validate(t), repeats) / blocks
        planned = plan_tasks(tasks)
        listed = validating_lists_ns(planned, repeats)
        claims.append(
            Claim(
                f"megakernel: planning and validating {items:,} items, {name}",
                spent[items],
                "ns an item",
                MOST_NS,
                {f"hazards.Tracker in Python, {name}": peer_ns(tasks)},
                f"{len(tasks):,} tasks, {planned.regions:,} regions, {len(planned.entries):,} "
                f"entries; planning alone {planning:.1f} ns, validation with lists of {WORKERS} "
                f"workers {listed / blocks:.1f} ns",
            ).as_dict()
        )
    growth = 2 * spent[200_000] / spent[100_000]
    claims.append(
        Claim(
            f"megakernel: twice as many items, {name}", growth, "of 100,000's", MOST_GROWTH
        ).as_dict()
    )
    tasks = make(100_000)
    lineage_s = _cpu_ns(lambda: Lineage(tasks), repeats) / 1e9
    note = f"{len(Lineage(tasks).of(len(tasks) - 1)):,} tasks contributed to the last one"
    claims.append(
        Claim(
            f"megakernel: lineage of 100,000 items, {name}",
            lineage_s,
            "s",
            MOST_LINEAGE_S,
            note=note,
        ).as_dict()
    )
    return claims


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every claim of this file."""
    claims = []
    with harness.quiet():
        for name, make in GRAPHS.items():
            claims += claims_of(name, make, 3 if quick else 15)
    return claims


if __name__ == "__main__":
    raise SystemExit(harness.main(run, None, __doc__))
