"""MegakernelReport: what one run of a megakernel did, and where every output came from.

Values only: engines make it with `of_program` and `of_queue`, `report` shows it. Saved as one JSON
document, whose digest is over everything below ``report``::

    {"format": "brickline-megakernel", "version": 1, "digest": "3b1f…",
     "report": {"name": "decode", "mode": "program", "items_processed": 812, "telemetry": {…},
                "tasks": {"op": [0, 1, …], "items": [8, 4, …], …}, "lineage": {…}, …}}
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.errors import UsageError
from brickline.megakernel_flow import Flow, NoLineage, RegionLineage
from brickline.megakernel_progress import (
    FAULT,
    PROGRESS,
    checked_rows,
    item_faults,
    spans_from_records,
    tasks_with_state,
    worker_times,
)
from brickline.megakernel_regions import regions_text
from brickline.megakernel_tables import (
    MAX_COUNT,
    ItemFault,
    OpTimes,
    Regions,
    Spans,
    Tasks,
    WorkerTimes,
)
from brickline.megakernel_telemetry import (
    MegakernelTelemetry,
    frontier_density_bps,
    occupancy_bps,
    pressure_of,
    topology_of,
)

PHASES = ("queue_plan_ns", "queue_publish_ns", "backend_dispatch_ns", "lineage_ns")
"""What the host spent its time on, in order."""
_COUNTS = ("items_processed", "items_remaining", "wall_time_ns", "first_submission")
_MAYBE_COUNTS = (
    *(*PHASES, "deduped_items", "published_items", "lineage_items", "items_faulted"),
    *("items_skipped", "items_requeued", "began_unix_ns"),
)


@dataclass(frozen=True, eq=False)
class MegakernelReport:
    """What one run did; every figure is measured, or None."""

    name: str
    """What was run."""
    mode: str
    """``program`` or ``queue``."""
    device: str
    items_processed: int
    """Items that are done, deduped ones whose values are there included."""
    items_remaining: int
    """Items that are not: the run was stopped, they faulted, or something that they need did."""
    wall_time_ns: int
    """All of it: planning, where that belongs to this run, and the run."""
    queue_plan_ns: int | None = None
    """Host: dependencies, dedupe, fusion, assignment, validation. What `prepare` planned belongs to
    the first run; 0 of a run that planned nothing."""
    queue_publish_ns: int | None = None
    """Host: writing tables or slots and publishing them."""
    backend_dispatch_ns: int | None = None
    """From the launch of the workers until they have left, as the host sees it."""
    lineage_ns: int | None = None
    """Host: lineage; None where it was off."""
    deduped_items: int | None = None
    """Items that were not published, because another computes the same."""
    published_items: int | None = None
    lineage_items: int | None = None
    """Items whose sources are known."""
    items_faulted: int | None = None
    """Of those that remain: they ran and reported a fault."""
    items_skipped: int | None = None
    """Of those that remain: not run, because something that they need faulted."""
    items_requeued: int | None = None
    """How often an item was put back to be tried again."""
    telemetry: MegakernelTelemetry = field(default_factory=MegakernelTelemetry)
    workers: tuple[WorkerTimes, ...] = ()
    ops: tuple[str, ...] = ()
    """Names of the functions."""
    op_work_ns: tuple[int, ...] | None = None
    """Time inside the items of each op, where it was counted and not recorded span by span."""
    op_items: tuple[int, ...] | None = None
    """Items of each op that were executed, each time that one was, where it was counted."""
    bricks: tuple[str, ...] = ()
    """Names of the units of model work that tasks belong to."""
    tasks: Tasks = field(default_factory=lambda: Tasks.of({"op": (), "items": ()}))
    spans: Spans | None = None
    flow: Flow | None = None
    """Where values came from; None where lineage was off."""
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tasks that wrote last to named memory, by its name."""
    faults: tuple[ItemFault, ...] = ()
    began_unix_ns: int | None = None
    """When the workers began, in Unix time: 0 of every time below."""
    notes: tuple[str, ...] = ()
    """What else is worth knowing, such as why something was not measured."""
    first_submission: int = 0
    """The number of the first row of `tasks`: of a queue, as `submit` returned it. Faults, workers
    and outputs have such numbers, and `explain` takes them; `tasks`, `spans`, `flow` and
    `region_lineage` have rows."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Tells it from other reports."""

    def __post_init__(self) -> None:
        for name in ("name", "device", "id"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise UsageError(f"{name}: expected text, got {getattr(self, name)!r:.80}")
        if self.mode not in ("program", "queue"):
            raise UsageError(f"mode: expected program or queue, got {self.mode!r:.80}")
        for name in (*_COUNTS, *_MAYBE_COUNTS):
            _check_count(name, getattr(self, name), none=name in _MAYBE_COUNTS)
        self._check_tables()
        self._check_sums()

    def _check_tables(self) -> None:
        self.tasks.check(len(self.ops), len(self.bricks))
        if self.spans is not None:
            self.spans.check(len(self.workers), len(self.tasks))
        if self.flow is not None and len(self.flow) != len(self.tasks):
            raise UsageError(f"lineage: expected {len(self.tasks)} tasks, got {len(self.flow)}")
        for name in ("op_work_ns", "op_items"):
            each_op = getattr(self, name)
            if each_op is not None and len(each_op) != len(self.ops):
                raise UsageError(f"{name}: expected {len(self.ops)}, got {len(each_op)}")
            for value in each_op or ():
                _check_count(name, value, none=False)
        for name, writers in self.outputs.items():
            for task in writers:
                self._check_task(task, f"output {name!r:.80}")
        for fault in self.faults:
            self._check_task(fault.task, "a fault")
            items = int(self.tasks.items[fault.task - self.first_submission])
            if fault.item >= items:
                raise UsageError(
                    f"a fault: expected an item below {items} of task {fault.task}, got "
                    f"{fault.item}"
                )
        for number, worker in enumerate(self.workers):
            self._check_worker(number, worker)

    def _check_worker(self, number: int, worker: WorkerTimes) -> None:
        for task in (worker.task, worker.missing):
            if task is not None:
                self._check_task(task, f"worker {number}")
        for name in worker.impossible(self.wall_time_ns):
            raise UsageError(
                f"worker {number}, {name}: expected at most "
                f"{worker.longest_ns(self.wall_time_ns)}, because it was not there for longer, got "
                f"{getattr(worker, name)}"
            )

    def _check_task(self, task: Any, where: str) -> None:
        first, end = self.first_submission, self.first_submission + len(self.tasks)
        if first == end:
            raise UsageError(f"{where}: the report has no tasks, got {task!r:.80}")
        if not isinstance(task, int) or isinstance(task, bool) or not first <= task < end:
            raise UsageError(
                f"{where}: expected a task from {first} to {end - 1}, got {task!r:.80}"
            )

    def _check_sums(self) -> None:
        found = self.items_processed + self.items_remaining
        if self.published_items is not None:
            expected = self.published_items + (self.deduped_items or 0)
            if found != expected:
                raise UsageError(
                    f"expected {expected} items processed and remaining, as many as were published "
                    f"and deduped, got {found}"
                )
        known = {"lineage_items": self.lineage_items, "items of tasks": int(self.tasks.items.sum())}
        for name, value in known.items():
            if value is not None and value > found:
                raise UsageError(
                    f"{name}: expected at most {found}, as many as were submitted, got {value}"
                )
        done = 0 if self.tasks.done is None else int(self.tasks.done.sum())
        if done > self.items_processed:
            raise UsageError(
                f"tasks, done: expected at most {self.items_processed} together, as many as were "
                f"processed, got {done}"
            )
        left = (self.items_faulted or 0) + (self.items_skipped or 0)
        if left > self.items_remaining:
            raise UsageError(
                f"expected at most {self.items_remaining} items faulted and skipped, as many as "
                f"remain, got {left}"
            )

    # ----------------------------------------------------------------------------- what follows

    @property
    def wall_time(self) -> float:
        """Wall-clock time in seconds."""
        return self.wall_time_ns / 1e9

    @property
    def is_complete(self) -> bool:
        """Whether every item is done."""
        return self.items_remaining == 0

    @property
    def imbalance(self) -> float | None:
        """Work of the busiest worker to the mean: 1 is even. None where it was not measured."""
        work = [worker.work_ns for worker in self.workers if worker.work_ns is not None]
        if len(work) != len(self.workers) or not sum(work):
            return None
        return max(work) * len(work) / sum(work)

    @property
    def region_lineage(self) -> Sequence[tuple[int, ...]]:
        """Of each region, the tasks that contributed to it; empty where lineage was off."""
        return NoLineage() if self.flow is None else RegionLineage(self.tasks, self.flow)

    @cached_property
    def regions(self) -> Regions:
        """Tasks, items and times by region."""
        return Regions.of(self.tasks, self.spans)

    def explain_regions(self) -> str:
        """Say which submissions of a queue are one region, and why others are not.

        Raises:
            UsageError: It is the report of a plan.
        """
        if self.mode != "queue":
            raise UsageError(
                f"{self.name} is a plan: print(prepared.regions.explain()) says it of launches"
            )
        return regions_text(self.tasks, self.first_submission)

    @cached_property
    def op_times(self) -> tuple[OpTimes, ...]:
        """Tasks, items and times by op, those with most work first."""
        count, own = len(self.ops), self.tasks.alias < 0
        tasks = np.bincount(self.tasks.op[own], minlength=count).tolist()
        items = self._executed_by_op()
        work: Sequence[Any] = self.op_work_ns or [None] * count
        wait: Sequence[Any] = [None] * count
        if self.spans is not None:
            at = self.tasks.op[self.spans.task]
            recorded, worked, waited = (
                np.bincount(at, values, minlength=count).astype(np.int64).tolist()
                for values in (self.spans.items, self.spans.work_ns, self.spans.wait_ns)
            )
            inside = [each.task for each in self.workers if each.is_hung and each.task is not None]
            hung = set(self.tasks.op[list(self.rows_of(inside))].tolist())
            whole = [
                (items[op] is None or recorded[op] >= items[op]) and op not in hung
                for op in range(count)
            ]
            wait = [value if whole[op] else None for op, value in enumerate(waited)]
            if self.op_work_ns is None:
                work = [value if whole[op] else None for op, value in enumerate(worked)]
        rows = map(OpTimes, self.ops, tasks, items, work, wait)
        return tuple(sorted(rows, key=lambda row: (-(row.work_ns or 0), -(row.items or 0))))

    def _executed_by_op(self) -> Sequence[int | None]:
        """Return how many items of each op were executed, as far as that is known."""
        tasks, count = self.tasks, len(self.ops)
        if self.op_items is not None:
            return self.op_items
        known = tasks.items if self.is_complete else tasks.done
        if known is None:
            return [None] * count
        own = tasks.alias < 0
        found: list[int | None] = (
            np.bincount(tasks.op[own], known[own], minlength=count).astype(np.int64).tolist()
        )
        faulted = set(tasks.op[list(self.rows_of(each.task for each in self.faults))].tolist())
        for op in faulted:  # which of several ops had how many faults was not counted
            more, done = self.items_faulted, found[op] or 0
            found[op] = None if len(faulted) > 1 or more is None else done + more
        return found

    @property
    def not_measured(self) -> list[str]:
        """The names of figures that are None."""
        mine = [name for name in _MAYBE_COUNTS if getattr(self, name) is None]
        known = self.telemetry.known()
        return mine + [
            f"telemetry.{name}" for name in self.telemetry.__dataclass_fields__ if name not in known
        ]

    # ---------------------------------------------------------------------------------- lineage

    def task_name(self, task: int) -> str:
        """Return what a task is called: its number, op, brick and layer.

        Args:
            task: Its number: of a queue, as `submit` returned it, and not a row of `tasks`.

        Raises:
            UsageError: There is no such task.
        """
        task = task.__index__() if hasattr(task, "__index__") else task
        self._check_task(task, "task_name")
        word = "launch" if self.mode == "program" else "submission"
        row = task - self.first_submission
        op = self.ops[self.tasks.op[row]]
        brick, layer = int(self.tasks.brick[row]), int(self.tasks.layer[row])
        named = [op] if brick < 0 or self.bricks[brick] == op else [op, self.bricks[brick]]
        named += [] if layer < 0 else [f"layer {layer}"]
        return f"{word} {task} ({', '.join(named)})"

    def rows_of(self, tasks: Iterable[int]) -> tuple[int, ...]:
        """Return the rows of tasks by their numbers."""
        return tuple(task - self.first_submission for task in tasks)

    def writers(self, output: int | str) -> tuple[int, ...]:
        """Return the tasks that made an output: a task by its number, or memory by its name.

        Raises:
            UsageError: There is no such task or memory; the message has what there is.
        """
        first, last = self.first_submission, self.first_submission + len(self.tasks) - 1
        if isinstance(output, str):
            found = self.outputs.get(output)
            if found is None and self.flow is None:
                raise UsageError(
                    f"the run of {self.name} kept no lineage; run it again with lineage=True"
                )
            if found is None:
                names = ", ".join(list(self.outputs)[:20]) or "none"
                raise UsageError(
                    f"{self.name} has no output {output!r:.80}; its outputs are {names:.800}, and "
                    f"tasks have numbers from {first} to {last}"
                )
            return found
        if isinstance(output, bool) or not hasattr(output, "__index__"):
            raise UsageError(f"expected a task's number or an output's name, got {output!r:.80}")
        number = output.__index__()
        if not first <= number <= last:
            known = f"a task from {first} to {last}" if first <= last else "no task: there is none"
            raise UsageError(f"expected {known}, got {number}; or name an output")
        return (number,)

    def explain(self, output: int | str, *, limit: int | None = 100) -> str:
        """Say where an output came from: every task that contributed, back to given memory.

        Args:
            output: A task's number, or the name of memory that was written.
            limit: Lines at most. Default 100; None: all.

        Raises:
            UsageError: There is no such output, or lineage was off.
        """
        from brickline.report.megakernel_lineage import lineage_text

        return lineage_text(self, output, limit)

    # ------------------------------------------------------------------------------------ views

    def __str__(self) -> str:
        from brickline.report.megakernel import megakernel_text

        return megakernel_text(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(str(self))

    def write_page(self, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write one HTML page that opens offline, and return its path.

        Raises:
            UsageError: The file is there and overwriting was not asked for.
            RunError: The disk refuses.
        """
        from brickline.report.html.megakernel_page import write_megakernel_page

        return write_megakernel_page(self, path, force=force)

    # ------------------------------------------------------------------------------------ files

    def to_json(self) -> str:
        """Return the report as one JSON document; `from_json` reads it again."""
        from brickline.megakernel_files import report_json

        return report_json(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> MegakernelReport:
        """Read what `to_json` wrote.

        Raises:
            RunDamaged: It is damaged, contradicts itself or is something else.
            RunVersion: A newer brickline wrote it.
        """
        from brickline.megakernel_files import report_from_json

        return report_from_json(text)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the report to a file, whole or not at all, and return its path.

        Args:
            path: Where to; usually ``NAME.megakernel.json``.
            overwrite: Whether a file that is there is replaced. Default False.

        Raises:
            UsageError: The file is there and overwriting was not asked for.
            RunError: The disk refuses.
        """
        from brickline.megakernel_files import save_report

        return save_report(self, path, overwrite=overwrite)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> MegakernelReport:
        """Read a saved report.

        Raises:
            RunError: The file cannot be read, is damaged or from a newer brickline.
        """
        from brickline.megakernel_files import load_report

        return load_report(path)

    # --------------------------------------------------------------------------------- factories

    @classmethod
    def of_program(
        cls,
        *,
        name: str,
        device: str,
        ops: Sequence[str],
        tasks: Mapping[str, Any],
        progress: NDArray[Any],
        wall_time_ns: int,
        bricks: Sequence[str] = (),
        records: Sequence[NDArray[Any]] | None = None,
        faults: NDArray[Any] | None = None,
        fault_words: Mapping[int, str] | None = None,
        waits: tuple[Any, Any] | None = None,
        flow: Flow | None = None,
        outputs: Mapping[str, Sequence[int]] | None = None,
        telemetry: Mapping[str, Any] | None = None,
        **figures: Any,
    ) -> MegakernelReport:
        """Return the report of a plan that ran as one kernel.

        Args:
            name: The plan's.
            device: ``CPU`` or ``CUDA:n``.
            ops: Names of the functions.
            tasks: Columns of `Tasks`, one row for each launch in order; ``op`` and ``items`` at
                least. ``done`` is found from `records`, or from all workers having finished.
            progress: Rows of `megakernel_progress.PROGRESS`, one for each worker, as the run
                left them.
            wall_time_ns: Of all of it.
            bricks: Names that ``tasks["brick"]`` points into.
            records: Rows of `RECORD` of each worker, where tracing was on.
            faults: Rows of `FAULT`, one for each task: code 0 is none.
            fault_words: What codes mean.
            waits: First place of each task in the second array and one more, and the tasks that
                each one waits for: tells the frontier, with `records`.
            flow: Lineage, where it was on.
            outputs: Tasks that wrote last to named memory.
            telemetry: Fields of `MegakernelTelemetry` that were measured. ``occupancy_bps``,
                ``frontier_density_bps``, ``topology`` and ``pressure`` follow from the rest.
            **figures: Other fields: the phases, ``deduped_items``, ``op_items``,
                ``began_unix_ns``, ``notes``.

        Raises:
            UsageError: The data contradict each other.
        """
        rows = checked_rows(progress, PROGRESS, "progress")
        spans = None if records is None else spans_from_records(rows, records)
        table = Tasks.of(tasks)
        table.check(len(ops), len(bricks))
        reported = np.zeros(len(table), FAULT) if faults is None else faults
        reported = checked_rows(reported, FAULT, "faults")
        table = tasks_with_state(table, rows, spans, reported["code"].astype(np.int64))
        own = table.alias < 0
        published, deduped = int(table.items[own].sum()), int(table.items[~own].sum())
        found = item_faults(reported, table, ops, fault_words or {})
        if table.done is not None:
            processed = int(table.done.sum())
        else:  # which items the run left is not known, so none of the deduped ones counts
            processed = max(int(rows["items"].sum()) - len(found), 0)
        defaults = {
            "published_items": published,
            "deduped_items": deduped,
            "items_faulted": len(found),
            "items_skipped": int(rows["skipped"].sum()),
        }
        return cls._made(
            name=name,
            mode="program",
            device=device,
            ops=tuple(ops),
            tasks=table,
            bricks=tuple(bricks),
            workers=worker_times(rows),
            spans=spans,
            flow=flow,
            outputs=outputs,
            faults=found,
            telemetry={"capacity": published, **(telemetry or {})},
            waits=waits,
            items_processed=processed,
            items_remaining=published + deduped - processed,
            wall_time_ns=wall_time_ns,
            **{**defaults, **figures},
        )

    @classmethod
    def of_queue(
        cls,
        *,
        name: str,
        device: str,
        ops: Sequence[str],
        tasks: Mapping[str, Any],
        workers: Sequence[WorkerTimes],
        items_processed: int,
        items_remaining: int,
        wall_time_ns: int,
        bricks: Sequence[str] = (),
        spans: Mapping[str, Any] | None = None,
        waits: tuple[Any, Any] | None = None,
        flow: Flow | None = None,
        outputs: Mapping[str, Sequence[int]] | None = None,
        faults: Sequence[ItemFault] = (),
        telemetry: Mapping[str, Any] | None = None,
        **figures: Any,
    ) -> MegakernelReport:
        """Return the report of a queue that was fed while it ran.

        Args:
            name: What the queue is called.
            device: ``CPU`` or ``CUDA:n``.
            ops: Names of the functions.
            tasks: Columns of `Tasks`, one row for each submission in order; ``op`` and ``items`` at
                least.
            workers: What each worker did, times in ns from the beginning of the run.
            items_processed: Items that are done.
            items_remaining: Items that are not.
            wall_time_ns: Of all of it.
            bricks: Names that ``tasks["brick"]`` points into.
            spans: Columns of `Spans`, where they were recorded.
            waits: As of `of_program`.
            flow: Lineage, where it was on.
            outputs: Submissions that wrote last to named memory.
            faults: Items that faulted.
            telemetry: Fields of `MegakernelTelemetry` that were measured.
            **figures: Other fields: the phases, ``published_items``, ``deduped_items``,
                ``items_skipped``, ``items_requeued``, ``op_work_ns``, ``op_items``,
                ``began_unix_ns``, ``notes``.

        Raises:
            UsageError: The data contradict each other.
        """
        return cls._made(
            name=name,
            mode="queue",
            device=device,
            ops=tuple(ops),
            tasks=Tasks.of(tasks),
            bricks=tuple(bricks),
            workers=tuple(workers),
            spans=None if spans is None else Spans.of(spans),
            flow=flow,
            outputs=outputs,
            faults=tuple(faults),
            telemetry=dict(telemetry or {}),
            waits=waits,
            items_processed=items_processed,
            items_remaining=items_remaining,
            wall_time_ns=wall_time_ns,
            **{"items_faulted": len(faults), **figures},
        )

    @classmethod
    def _made(
        cls,
        *,
        telemetry: dict[str, Any],
        waits: tuple[Any, Any] | None,
        outputs: Mapping[str, Sequence[int]] | None,
        tasks: Tasks,
        workers: tuple[WorkerTimes, ...],
        spans: Spans | None,
        flow: Flow | None,
        **fields: Any,
    ) -> MegakernelReport:
        """Add what follows from the rest, and leave out times that no worker can have had."""
        run_ns = fields["wall_time_ns"]
        workers = tuple(each.possible(run_ns) for each in workers)
        items = fields["items_processed"] + fields["items_remaining"]
        time_ns = fields.get("backend_dispatch_ns") or fields["wall_time_ns"]
        telemetry.setdefault("occupancy_bps", occupancy_bps(workers, time_ns))
        if waits is not None:
            begin, earlier = (np.asarray(each, np.int64) for each in waits)
            density = frontier_density_bps(spans, begin, earlier, tasks.region, len(workers))
            telemetry.setdefault("frontier_density_bps", density)
        memory = (telemetry.get("peak_memory_bytes"), telemetry.get("memory_budget_bytes"))
        topology = topology_of(items, telemetry.get("frontier_density_bps"), *memory)
        telemetry.setdefault("topology", topology)
        requeued = fields.get("items_requeued") or 0
        telemetry.setdefault("pressure", pressure_of(items, len(workers), requeued))
        if flow is not None:
            fields.setdefault("lineage_items", int(tasks.items.sum()))
        strange = set(telemetry) - set(MegakernelTelemetry.__dataclass_fields__)
        if strange:
            raise UsageError(f"telemetry has no field {min(strange)!r:.80}")
        return cls(
            tasks=tasks,
            workers=workers,
            spans=spans,
            flow=flow,
            outputs={key: tuple(map(int, each)) for key, each in (outputs or {}).items()},
            telemetry=MegakernelTelemetry(**telemetry),
            **fields,
        )


def _check_count(name: str, value: Any, *, none: bool) -> None:
    if value is None and none:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_COUNT:
        raise UsageError(f"{name}: expected a number from 0 to {MAX_COUNT - 1}, got {value!r:.80}")
