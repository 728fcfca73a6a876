"""Planning: what tasks wait for, which are computed already, which run together, and a proof of it.

A task is a launch or a submission; its blocks are its items. Tasks come as columns, one row each,
in the order of submission (`Tasks`, or `TaskBuilder` for one at a time). `plan_tasks` looks at the
bytes that they read and write, and nothing else: it knows neither kernels nor devices.
`check_schedule` proves what came out of it, or of anything else, with code of its own.

Codes are stable. A task that writes what one of the last few writers of its output wrote, from the
same ranges with the same parameters, is run after all because

=====  =========================================================================================
MK201  its op is not declared pure
MK202  it accumulates: running it twice adds twice
MK203  an input was written in between
MK204  an output was written in between
=====  =========================================================================================

A task is not joined to the region of the last one that it waits for because

=====  =========================================================================================
MK302  they have different numbers of blocks, which are shared out differently
MK303  a block of one touches what another block of the other writes, or the reverse
MK304  another task follows it already; a region is a chain
MK305  one of them accumulates, and is not finished before all of its blocks are
MK306  it waits for another task, too, which waits for the region: a cycle
MK307  it waits for another task, too, which may end after the region begins
=====  =========================================================================================

A plan or a schedule is refused, with a `PlanError` that has the code, because

=====  =========================================================================================
MK401  a task reads bytes that nobody wrote
MK402  a task waits for one that is not there
MK403  a task waits for one that is not run, as another computed the same
MK404  a task waits for one that does not signal
MK405  a task comes before one that it waits for: a cycle, or lists that contradict each other
MK406  two tasks touch the same bytes, one of them writes, and nothing keeps them in order: a race
MK407  a task is not exactly once in the list of each worker that has a part of it
MK408  there are more tasks than slots
MK409  a task that is not run differs from the one that stands for it
MK410  tasks of one region have different blocks or workers, or come in another order
=====  =========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from brickline import _core
from brickline.errors import PlanError

PURE = 1
"""Flag of a task: the same inputs give the same outputs, and nothing else changes."""
ATOMIC = 2
"""Flag of a task: its blocks add to one another's results."""
READ, WRITE = 1, 2
"""Modes of an access; 3 is both."""
ACCESS_DTYPE = np.dtype(
    [("begin", "<u8"), ("end", "<u8"), ("per_block", "<i8"), ("space", "<u4"), ("mode", "<u4")]
)
"""Bytes that a task touches.

Block b touches [begin + b * per_block, begin + (b + 1) * per_block), cut at end; any block may
touch all of [begin, end) where per_block is 0.
"""
NO_TASK = 2**32 - 1
"""No task, no region."""
SET = 2**31
"""Flag of an entry that is the number of a set of tasks."""

_Words = npt.NDArray[np.uint32]
_Longs = npt.NDArray[np.uint64]

REASONS = {
    201: "its op is not declared pure",
    202: "it accumulates, and twice adds twice",
    203: "an input was written in between",
    204: "an output was written in between",
    302: "they have different numbers of blocks",
    303: "a block of one touches what another block of the other writes",
    304: "another task follows it already",
    305: "one of them accumulates",
    306: "it also waits for a task that waits for the region",
    307: "it also waits for a task that may end after the region begins",
    401: "it reads bytes that nobody wrote",
    402: "it waits for a task that is not there",
    403: "it waits for a task that is not run",
    404: "it waits for a task that does not signal",
    405: "it comes before a task that it waits for",
    406: "it touches bytes of another task, and nothing keeps them in order",
    407: "it is not exactly once in the list of each worker that has a part of it",
    408: "there are more tasks than slots",
    409: "it differs from the task that stands for it",
    410: "its region has a task with other blocks or workers, or in another order",
}
"""Why, by the number of a code."""


class Refusal(NamedTuple):
    """Why two tasks were not made one, or were not joined."""

    earlier: int
    later: int
    code: str
    """As in the module's table."""
    other: int | None
    """The task that stands in the way, where it is a third one."""

    @property
    def reason(self) -> str:
        """The code in words."""
        return REASONS[int(self.code[2:])]


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks in the order of submission, as columns. Their arrays are not copied, so leave them."""

    op: _Words
    """What each does."""
    blocks: _Words
    """Items of each."""
    flags: _Words
    """`PURE`, `ATOMIC`."""
    param_begin: _Words
    """Where the words of each task begin in `params`; one more than tasks."""
    params: _Longs
    access_begin: _Words
    """Where the accesses of each task begin; one more than tasks."""
    accesses: npt.NDArray[np.void]
    """Rows of `ACCESS_DTYPE`."""
    core: _core.MegaColumns = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that columns fit each other.

        Raises:
            PlanError: They do not: a length, a dtype, a range that ends before it begins.
        """
        kinds: dict[str, npt.DTypeLike] = {"params": np.uint64, "accesses": ACCESS_DTYPE}
        for name in ("op", "blocks", "flags", "param_begin", "params", "access_begin", "accesses"):
            _check_column(getattr(self, name), kinds.get(name, np.uint32), f"column {name}")
        words = self.accesses.view(np.uint64).reshape(-1, 4)
        with _refusing("tasks"):
            core = _core.MegaColumns(
                self.op,
                self.blocks,
                self.flags,
                self.param_begin,
                self.params,
                self.access_begin,
                words,
            )
            core.check()
        object.__setattr__(self, "core", core)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.op)

    def accesses_of(self, task: int) -> npt.NDArray[np.void]:
        """Return the accesses of one task."""
        return self.accesses[self.access_begin[task] : self.access_begin[task + 1]]


class TaskBuilder:
    """Tasks one at a time, for those who have no columns.

    Example:
        >>> builder = TaskBuilder()
        >>> builder.add(0, writes=[(0, 0, 64)])
        0
        >>> builder.add(1, reads=[(0, 0, 64)], writes=[(1, 0, 64)])
        1
        >>> plan_tasks(builder.tasks(), join=False).waits_of(1)
        [0]
    """

    def __init__(self) -> None:
        """Begin without tasks."""
        self._rows: list[tuple[int, int, int]] = []
        self._params: list[Sequence[int]] = []
        self._accesses: list[list[tuple[int, int, int, int, int]]] = []

    def add(
        self,
        op: int,
        reads: Iterable[Sequence[int]] = (),
        writes: Iterable[Sequence[int]] = (),
        params: Sequence[int] = (),
        *,
        blocks: int = 1,
        flags: int = 0,
    ) -> int:
        """Add a task and return its number.

        Args:
            op: What it does.
            reads: (space, begin, end) or (space, begin, end, bytes of a block).
            writes: The same of what it writes.
            params: 64-bit words, which tell it from others of its op.
            blocks: Its items. Default 1.
            flags: `PURE`, `ATOMIC`. Default neither.
        """
        found = []
        for mode, ranges in ((READ, reads), (WRITE, writes)):
            for each in ranges:
                if not 3 <= len(each) <= 4:
                    raise PlanError(
                        f"expected (space, begin, end) or (space, begin, end, bytes of a block), "
                        f"got {each!r} - at task {len(self._rows)}"
                    )
                space, begin, end = each[:3]
                found.append((begin, end, each[3] if len(each) == 4 else 0, space, mode))
        self._rows.append((op, blocks, flags))
        self._params.append(params)
        self._accesses.append(found)
        return len(self._rows) - 1

    def tasks(self) -> Tasks:
        """Return all that were added, as columns."""
        try:
            rows = np.array(self._rows, np.uint32).reshape(-1, 3)
            params = np.array([word for each in self._params for word in each], np.uint64)
            accesses = np.array([row for each in self._accesses for row in each], ACCESS_DTYPE)
        except (OverflowError, ValueError, TypeError) as error:
            raise PlanError(
                f"expected numbers of 32 bits, and of 64 in params and bytes: {error}"
            ) from error
        op, blocks, flags = (np.ascontiguousarray(rows[:, k]) for k in range(3))
        return Tasks(
            op, blocks, flags, _begins(self._params), params, _begins(self._accesses), accesses
        )


@dataclass(frozen=True, slots=True)
class Initial:
    """What is written before the first task; to read what else no task wrote is an error."""

    ranges: Sequence[tuple[int, int, int]] = ()
    """(space, begin, end)."""


class PlannedTasks:
    """What `plan_tasks` found.

    Attributes:
        tasks: What was planned.
        alias: Of each task, the earlier one that computed the same, or -1. Such a task is not run.
        entry_begin: Where the entries of each task begin; one more than tasks.
        entries: What tasks wait for: a task, or `SET` and the number of a set. Members of a task's
            own region are left out: a worker runs them one after the other.
        set_begin: Where the members of each set begin; one more than sets.
        set_members: Tasks, ascending in each set.
        region: Of each task; `NO_TASK` where it is not run. What a region waits for has a lower
            number.
        order: Tasks that run, region by region.
        level: Of each task: 0 where it waits for nobody.
        critical: The tasks of the costliest chain.
        critical_cost: What it costs.
    """

    def __init__(self, tasks: Tasks, found: dict[str, Any]) -> None:
        """Take what the core found."""
        self.tasks = tasks
        self.alias: npt.NDArray[np.int32] = found["alias"]
        self.entry_begin: _Words = found["entry_begin"]
        self.entries: _Words = found["entries"]
        self.set_begin: _Longs = found["set_begin"]
        self.set_members: _Words = found["set_members"]
        self.region: _Words = found["region"]
        self.regions: int = found["regions"]
        self.order: _Words = found["order"]
        self.level: _Words = found["level"]
        self.critical: _Words = found["critical"]
        self.critical_cost: int = found["critical_cost"]
        self._refusals: _Words = found["refusals"]

    @property
    def deduped(self) -> int:
        """How many tasks are not run."""
        return len(self.tasks) - len(self.order)

    @property
    def refusal_rows(self) -> _Words:
        """All refusals as rows: earlier, later, number of the code, other task or `NO_TASK`."""
        return self._refusals

    @property
    def refusals(self) -> Iterator[Refusal]:
        """Why tasks were not made one, or not joined."""
        for earlier, later, code, other in self._refusals.tolist():
            yield Refusal(earlier, later, f"MK{code}", None if other == NO_TASK else other)

    @cached_property
    def waits(self) -> tuple[_Longs, _Words]:
        """Plain lists of what each task waits for: where they begin, and tasks, ascending."""
        return _core.mega_flat(self.entry_begin, self.entries, self.set_begin, self.set_members)

    def waits_of(self, task: int) -> list[int]:
        """Return what one task waits for."""
        begin, tasks = self.waits
        found: list[int] = tasks[int(begin[task]) : int(begin[task + 1])].tolist()
        return found

    def assign(self, workers: int, costs: _Longs | None = None) -> _Words:
        """Return the worker of each task's first part; part k is that plus k, modulo workers.

        Args:
            workers: How many there are.
            costs: Of one part of each task; each region goes where least is to be done. Default:
                regions take turns.
        """
        _check_workers(workers)
        if costs is not None:
            _check_column(costs, np.uint64, "costs")
        with _refusing("assignment"):
            return _core.mega_assign(self.order, self.region, self.tasks.blocks, costs, workers)

    def lists(self, workers: int, first_worker: _Words) -> tuple[_Longs, _Words]:
        """Return where each worker's list begins, and the tasks of all lists."""
        _check_workers(workers)
        _check_column(first_worker, np.uint32, "first_worker")
        with _refusing("lists"):
            return _core.mega_lists(self.order, self.tasks.blocks, first_worker, workers)


def plan_tasks(
    tasks: Tasks,
    *,
    dedupe: bool = True,
    join: bool = True,
    initial: Initial | None = None,
    costs: _Longs | None = None,
) -> PlannedTasks:
    """Find what tasks wait for, which are computed already, and which run together.

    Args:
        tasks: In the order of submission, which is the order that results must look like.
        dedupe: Whether tasks that would compute the same again are left out. Default True.
        join: Whether chains are joined to regions. Default True.
        initial: What is written before; default None: everything is.
        costs: Of each task, for the critical path. Default: all cost 1.

    Raises:
        PlanError: A column does not fit, or, with `initial`, a task reads what nobody wrote.
    """
    rows = None
    if initial is not None:
        made = [(begin, end, 0, space, 0) for space, begin, end in initial.ranges]
        rows = np.array(made, ACCESS_DTYPE).view(np.uint64).reshape(-1, 4)
    if costs is not None:
        _check_column(costs, np.uint64, "costs")
    with _refusing("tasks"):
        planned = PlannedTasks(tasks, _core.mega_plan(tasks.core, dedupe, join, rows, costs))
    if initial is not None:
        _check_written(planned)
    return planned


def check_schedule(
    planned: PlannedTasks,
    *,
    workers: int = 0,
    first_worker: _Words | None = None,
    lists: tuple[_Longs, _Words] | None = None,
    signals: npt.NDArray[np.uint8] | None = None,
    slots: int | None = None,
    waits: tuple[_Words, _Words] | None = None,
) -> None:
    """Prove that a schedule has no cycle, no race, no wait without a producer and slots enough.

    Args:
        planned: Tasks, aliases, waits, regions and their order.
        workers: How many have lists. Default 0: any worker takes any region.
        first_worker: The worker of each task's first part.
        lists: As `PlannedTasks.lists` returns them.
        signals: Whether a task signals, 1 or 0. Default: all do.
        slots: Tasks that there is room for. Default: enough.
        waits: Other waits than the planned ones: where those of each task begin, and tasks.

    Raises:
        PlanError: It cannot be run so; the message has the code and the tasks.
    """
    entry_begin, entries = waits or (planned.entry_begin, planned.entries)
    begins, members = lists if lists is not None else (None, None)
    columns = (
        (entry_begin, np.uint32, "the begins of waits"),
        (entries, np.uint32, "waits"),
        (first_worker, np.uint32, "first_worker"),
        (begins, np.uint64, "the begins of lists"),
        (members, np.uint32, "lists"),
        (signals, np.uint8, "signals"),
    )
    for column, dtype, name in columns:
        if column is not None:
            _check_column(column, dtype, name)
    if workers:
        _check_workers(workers)
    with _refusing("schedule"):
        code, task, other = _core.mega_validate(
            planned.tasks.core,
            planned.alias,
            entry_begin,
            entries,
            planned.set_begin,
            planned.set_members,
            planned.order,
            planned.region,
            signals,
            workers,
            first_worker,
            begins,
            members,
            2**64 - 1 if slots is None else slots,
        )
    if code:
        raise PlanError(_breach_text(code, task, other))


def _breach_text(code: int, task: int, other: int) -> str:
    beside = {407: "worker"}.get(code, "task")
    if code == 402 and other >= SET:
        beside, other = "set", other - SET
    where = "" if other == NO_TASK else f", {beside} {other}"
    return f"MK{code}: {REASONS[code]} - at task {task}{where}; {_STEPS[code]}"


_STEPS = {
    402: "wait for tasks of the same table alone",
    403: "wait for the one that stands for it, `alias`",
    404: "let it signal",
    405: "put it after all that it waits for, in every list",
    406: "let the later one wait for the earlier one",
    407: "make the lists with PlannedTasks.lists",
    408: "give more slots, or submit in parts",
    409: "run it, or plan again",
    410: "give the tasks of a region one first worker and one number of blocks",
}


def _check_written(planned: PlannedTasks) -> None:
    rows = planned.refusal_rows
    for task, _, _, access in rows[rows[:, 2] == 401].tolist():
        row = planned.tasks.accesses_of(task)[access]
        raise PlanError(
            f"MK401: {REASONS[401]} - at task {task}, bytes {row['begin']} to {row['end']} of "
            f"space {row['space']}; write them first, or name them in `initial`"
        )


def _check_column(column: object, dtype: npt.DTypeLike, name: str) -> None:
    wanted = np.dtype(dtype)
    if (
        not isinstance(column, np.ndarray)
        or column.dtype != wanted
        or column.ndim != 1
        or not column.flags.c_contiguous
    ):
        got = (
            f"{column.dtype} of {list(column.shape)}"
            if isinstance(column, np.ndarray)
            else type(column).__name__
        )
        raise PlanError(
            f"expected a contiguous array of {wanted} with one axis, got {got} - at {name}; "
            "convert it with numpy.ascontiguousarray"
        )


def _check_workers(workers: int) -> None:
    if not 1 <= workers < 2**20:
        raise PlanError(f"expected 1 to {2**20 - 1} workers, got {workers}")


def _begins(rows: Sequence[Sequence[object]]) -> _Words:
    begins = np.zeros(len(rows) + 1, np.uint32)
    np.cumsum([len(each) for each in rows], out=begins[1:])
    return begins


class _refusing:  # noqa: N801 - reads as a statement
    """Says where columns do not fit, in the core's words."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise PlanError(f"{error} - at {self._where}") from None
