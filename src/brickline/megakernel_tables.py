"""What a megakernel did, as columns: tasks, workers, and what workers spent on tasks.

Plain data with checks; who measured it is the matter of the engines, how it looks that of `report`.
A task is a launch of a plan or a submission to a queue, an item one block of it, a region tasks
that a worker runs without a hop. Times are ns from the beginning of the run. What was not measured
is None, never invented.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.errors import UsageError

Column: TypeAlias = NDArray[np.int64]

MAX_COUNT = 2**62
"""No figure of a report is larger."""


class TaskState(IntEnum):
    """What became of a task."""

    DONE = 0
    PARTIAL = 1
    """Some of its items are done."""
    NOT_RUN = 2
    """None of them is: the run ended before."""
    SKIPPED = 3
    """Not run, because something that it needs faulted."""
    FAULTED = 4
    DEDUPED = 5
    """Its values are those of another task, which computed them."""


class WorkerState(StrEnum):
    """How a worker ended; in the order of ``MegaState``."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class WorkerTimes:
    """What one worker did."""

    items: int
    """That it executed."""
    skipped: int = 0
    """That it did not, because of a fault before them."""
    begin_ns: int | None = None
    end_ns: int | None = None
    work_ns: int | None = None
    """Inside items."""
    dependency_wait_ns: int | None = None
    """Waiting for other tasks."""
    data_wait_ns: int | None = None
    """Waiting for data under way."""
    ring_wait_ns: int | None = None
    """Its producer, waiting for room."""
    state: WorkerState = WorkerState.FINISHED
    task: int | None = None
    """Where it stands, if it has not finished."""
    missing: int | None = None
    """The task that it waits for, if it has not finished."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", WorkerState(self.state))
        for each in fields(self):
            if each.name != "state":
                _check_count(getattr(self, each.name), each.name, none=each.name not in _COUNTED)

    @property
    def span_ns(self) -> int | None:
        """From its beginning to its end."""
        if self.begin_ns is None or self.end_ns is None:
            return None
        return max(self.end_ns - self.begin_ns, 0)

    @property
    def is_hung(self) -> bool:
        """Whether it never came back from an item of `task`."""
        return self.state is WorkerState.HUNG

    @property
    def other_ns(self) -> int | None:
        """Neither in items nor waiting: finding work, signalling, publishing."""
        if self.span_ns is None or self.work_ns is None:
            return None
        waited = (self.dependency_wait_ns or 0) + (self.data_wait_ns or 0)
        return max(self.span_ns - self.work_ns - waited, 0)

    def longest_ns(self, run_ns: int) -> int:
        """Return how long it can have done anything in a run; clocks are inexact."""
        there = run_ns if self.span_ns is None else self.span_ns
        return there + there // 20 + 1_000_000

    def impossible(self, run_ns: int) -> list[str]:
        """Return the names of times that are longer than it was there."""
        longest = self.longest_ns(run_ns)
        return [name for name in _TIMES if (getattr(self, name) or 0) > longest]

    def possible(self, run_ns: int) -> WorkerTimes:
        """Return the same with None for those times: they were not measured in this run."""
        missing: dict[str, Any] = dict.fromkeys(self.impossible(run_ns))
        return replace(self, **missing) if missing else self


_COUNTED = ("items", "skipped")
_TIMES = ("work_ns", "dependency_wait_ns", "data_wait_ns", "ring_wait_ns")


@dataclass(frozen=True, slots=True)
class ItemFault:
    """An item that faulted."""

    task: int
    item: int
    code: str
    """As the op returned it, or stable, such as ``MK501``."""
    op: str
    words: str = ""
    """What the code means, where that is known."""
    retries: int = 0
    """How often the item was tried again."""

    def __post_init__(self) -> None:
        for name in ("task", "item", "retries"):
            _check_count(getattr(self, name), name)
        for name in ("code", "op", "words"):
            if not isinstance(getattr(self, name), str):
                raise UsageError(
                    f"a fault: expected {name} as text, got {getattr(self, name)!r:.80}"
                )


class OpTimes(NamedTuple):
    """One op over the whole run."""

    name: str
    tasks: int
    items: int | None
    """That were executed, those that faulted among them; None where it was not counted."""
    work_ns: int | None
    """Inside these items, over all workers; None where some of them were not measured."""
    wait_ns: int | None
    """That workers waited before these items could begin."""


class Task(NamedTuple):
    """One row of `Tasks`."""

    op: int
    items: int
    region: int
    alias: int
    brick: int
    layer: int
    done: int | None = None
    state: TaskState | None = None
    priority: int | None = None
    apart: int | None = None


@dataclass(frozen=True, eq=False)
class Tasks:
    """Columns with a row for each task, in the order of submission; `tasks[k]` is a row."""

    op: Column
    """Place in the report's `ops`."""
    items: Column
    region: Column
    alias: Column
    """The task that computed its values; -1 where it did so itself."""
    brick: Column
    """Place in the report's `bricks`; -1: none."""
    layer: Column
    """-1: none."""
    done: Column | None = None
    """Items that are done, where that is known of each task."""
    state: Column | None = None
    """`TaskState`."""
    priority: Column | None = None
    """0 is the most urgent."""
    apart: Column | None = None
    """Why it is in no region with one that it waits for, a number of `APART`; 0: it is, or waits
    for none."""

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Tasks:
        """Return tasks from columns; all but ``op`` and ``items`` may be left out.

        Raises:
            UsageError: A column is unknown, missing, no integers, or of another length.
        """
        known = [each.name for each in fields(cls)]
        strange = sorted(set(columns) - set(known))
        if strange:
            raise UsageError(f"tasks: expected columns {', '.join(known)}, got {strange[0]!r:.80}")
        given = {name: values for name, values in columns.items() if values is not None}
        for name in ("op", "items"):
            if name not in given:
                raise UsageError(f"tasks: expected a column {name}, got none")
        made = {name: column(values, f"tasks, {name}") for name, values in given.items()}
        count = len(made["op"])
        made.setdefault("region", np.arange(count, dtype=np.int64))
        for name in ("alias", "brick", "layer"):
            made.setdefault(name, np.full(count, -1, np.int64))
        for name, values in made.items():
            if len(values) != count:
                raise UsageError(f"tasks, {name}: expected {count} rows, got {len(values)}")
        return cls(**made)

    def check(self, ops: int, bricks: int) -> None:
        """Refuse rows that point nowhere.

        Raises:
            UsageError: Which row, and what it should hold.
        """
        count = len(self)
        check_range(self.op, 0, ops, "tasks, op")
        check_range(self.items, 0, MAX_COUNT, "tasks, items")
        check_range(self.region, 0, max(count, 1), "tasks, region")
        check_range(self.alias, -1, count, "tasks, alias")
        check_range(self.brick, -1, bricks, "tasks, brick")
        check_range(self.layer, -1, 2**31, "tasks, layer")
        late = np.flatnonzero(self.alias >= np.arange(count))
        if len(late):
            raise UsageError(
                f"tasks, alias: expected an earlier task, got {self.alias[late[0]]} at row "
                f"{late[0]}"
            )
        again = np.flatnonzero((self.alias >= 0) & (self.alias[self.alias] >= 0))
        if len(again):
            raise UsageError(
                f"tasks, alias: expected the task that computed it, got {self.alias[again[0]]}, an "
                f"alias itself, at row {again[0]}"
            )
        if self.done is not None:
            check_range(self.done, 0, MAX_COUNT, "tasks, done")
            over = np.flatnonzero(self.done > self.items)
            if len(over):
                raise UsageError(f"tasks, done: more than the items of task {over[0]}")
        if self.state is not None:
            check_range(self.state, 0, len(TaskState), "tasks, state")
        if self.priority is not None:
            check_range(self.priority, 0, 256, "tasks, priority")
        if self.apart is not None:
            check_range(self.apart, 0, 1000, "tasks, apart")

    def columns(self) -> dict[str, Column]:
        """Return the columns that are known, by name."""
        every = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: values for name, values in every.items() if values is not None}

    def __len__(self) -> int:
        return len(self.op)

    def __getitem__(self, task: int) -> Task:
        row: dict[str, Any] = {name: int(values[task]) for name, values in self.columns().items()}
        row["state"] = TaskState(row["state"]) if "state" in row else None
        return Task(**row)

    def __iter__(self) -> Iterator[Task]:
        return (self[task] for task in range(len(self)))


@dataclass(frozen=True, eq=False)
class Spans:
    """A row for each part of a task that a worker executed, where that was recorded."""

    worker: Column
    task: Column
    begin_ns: Column
    """The worker takes it up, and waits from here on: its waiting begins, if there is any."""
    ready_ns: Column
    """Nothing is missing any more: its work begins."""
    end_ns: Column
    """Its work ends."""
    items: Column

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Spans:
        """Return spans from columns, all of them needed.

        Raises:
            UsageError: A column is missing, no integers, or of another length.
        """
        names = [each.name for each in fields(cls)]
        if sorted(columns) != sorted(names):
            raise UsageError(
                f"spans: expected columns {', '.join(names)}, got {', '.join(sorted(columns)):.200}"
            )
        made = {name: column(columns[name], f"spans, {name}") for name in names}
        for name, values in made.items():
            if len(values) != len(made["worker"]):
                raise UsageError(
                    f"spans, {name}: expected {len(made['worker'])} rows, got {len(values)}"
                )
        return cls(**made)

    def check(self, workers: int, tasks: int) -> None:
        """Refuse rows that point nowhere, or end before they begin.

        Raises:
            UsageError: Which row, and what it should hold.
        """
        check_range(self.worker, 0, workers, "spans, worker")
        check_range(self.task, 0, tasks, "spans, task")
        check_range(self.items, 0, MAX_COUNT, "spans, items")
        check_range(self.begin_ns, 0, MAX_COUNT, "spans, begin_ns")
        check_range(self.end_ns, 0, MAX_COUNT, "spans, end_ns")
        wrong = np.flatnonzero((self.begin_ns > self.ready_ns) | (self.ready_ns > self.end_ns))
        if len(wrong):
            raise UsageError(f"spans: row {wrong[0]} is ready before it begins or after it ends")

    @property
    def work_ns(self) -> Column:
        """Inside items, by row."""
        return self.end_ns - self.ready_ns

    @property
    def wait_ns(self) -> Column:
        """Before the first item, by row."""
        return self.ready_ns - self.begin_ns

    def columns(self) -> dict[str, Column]:
        """Return every column by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def __len__(self) -> int:
        return len(self.worker)


@dataclass(frozen=True, eq=False)
class Regions:
    """A row for each region, by its number."""

    number: Column
    tasks: Column
    items: Column
    begin_ns: Column | None
    """The first work in it begins; waiting before that is in `wait_ns`."""
    end_ns: Column | None
    """The last work in it ends."""
    work_ns: Column | None
    wait_ns: Column | None

    @classmethod
    def of(cls, tasks: Tasks, spans: Spans | None) -> Regions:
        """Sum tasks, and what workers spent on them, by region; -1 where a region was not run."""
        number, place = np.unique(tasks.region, return_inverse=True)
        count = len(number)
        sums = (
            np.bincount(place, minlength=count).astype(np.int64),
            _summed(place, tasks.items, count),
        )
        if spans is None:
            return cls(number, *sums, None, None, None, None)
        at = place[spans.task]
        begin = np.full(count, MAX_COUNT, np.int64)
        end = np.full(count, -1, np.int64)
        np.minimum.at(begin, at, spans.ready_ns)
        np.maximum.at(end, at, spans.end_ns)
        begin[end < 0] = -1
        times = (_summed(at, spans.work_ns, count), _summed(at, spans.wait_ns, count))
        return cls(number, *sums, begin, end, *times)

    def __len__(self) -> int:
        return len(self.number)


# ------------------------------------------------------------------------------------------ checks


def column(values: Any, where: str) -> Column:
    """Return integers as a column.

    Raises:
        UsageError: They are something else, or too large.
    """
    try:
        found = np.asarray(values)
    except (ValueError, OverflowError):
        raise UsageError(f"{where}: expected a list of integers, got something else") from None
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise UsageError(
            f"{where}: expected a list of integers, got {found.dtype} of shape {list(found.shape)}"
        )
    if found.dtype.kind == "u" and found.size and int(found.max()) >= MAX_COUNT:
        raise UsageError(f"{where}: expected integers below {MAX_COUNT}, got {found.max()}")
    return found.astype(np.int64)


def check_range(values: Column, low: int, end: int, where: str) -> None:
    """Refuse a column with a value below `low`, or from `end` on.

    Raises:
        UsageError: Which row, and what it holds.
    """
    wrong = np.flatnonzero((values < low) | (values >= end))
    if len(wrong):
        row = wrong[0]
        raise UsageError(
            f"{where}: expected values from {low} to {end - 1}, got {values[row]} at row {row}"
        )


def _check_count(value: Any, where: str, *, none: bool = False) -> None:
    if value is None and none:
        return
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MAX_COUNT:
        raise UsageError(f"{where}: expected a number from 0 to {MAX_COUNT - 1}, got {value!r:.80}")


def _summed(place: NDArray[Any], values: Column, count: int) -> Column:
    sums = np.zeros(count, np.int64)
    np.add.at(sums, place, values)
    return sums
