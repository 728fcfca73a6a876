"""QueueRecorder: logs what is submitted to a queue while it runs.

Memory is read when a submission is the first to touch it, and again when the host has learned that
submissions are done: by `wait`, `drain`, `report`, `clear`, or `open` that is 0. What a submission
wrote is digested then, unless a later one was to overwrite it. What the host writes in between is
noticed at the next submission that touches it, and begins another run of the log. Until then bytes
belong to the workers and are not looked at.

A queue that is not logged pays nothing; one that is keeps a copy of all memory that it has seen, on
the host also where the queue is on a GPU.
"""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from brickline.buffers import Buffer
from brickline.errors import PlanError
from brickline.executor.megakernel.queue_arguments import QueueOp
from brickline.executor.megakernel.queue_log import NO_ALIAS, QueueSubmissions
from brickline.executor.megakernel.queue_memory import Bytes, KnownBytes, Ranges
from brickline.executor.megakernel.queue_plan import Submission, SubmittedPlan, rows_of
from brickline.executor.megakernel.queue_refusals import refusal
from brickline.executor.megakernel.queue_report import (
    ALIAS,
    CANCELLED,
    DONE,
    FAULTED,
    OPEN,
    RECORD,
    ROW,
    SKIPPED,
)
from brickline.executor.megakernel.replay_log import ReplayLog
from brickline.executor.megakernel.replay_recording import KEPT_BYTES
from brickline.executor.megakernel.replay_runs import Contents, LoggedRun, Written
from brickline.megakernel_tables import TaskState

if TYPE_CHECKING:
    from brickline.executor.megakernel.queue import Megakernel

MAX_SUBMISSIONS = 1 << 20
"""A log that holds them is full."""
_STATES = {
    OPEN: TaskState.NOT_RUN,
    DONE: TaskState.DONE,
    FAULTED: TaskState.FAULTED,
    SKIPPED: TaskState.SKIPPED,
    CANCELLED: TaskState.NOT_RUN,
}


@dataclass(slots=True)
class _Run:
    """Submissions in a row, before which the host wrote."""

    first: int
    placed: list[tuple[int, Contents]] = field(default_factory=list)


class QueueRecorder:
    """Logs what is submitted inside of `recording`; `log` returns it.

    The order in which items ran is logged where the queue has ``trace=True``.

    Args:
        mega: The queue; nothing is open.
        contents: Whether the log keeps what memory held. Default None: where all of it has at most
            64 MiB.

    Raises:
        QueueError: Something is open, or an op cannot be a launch of a plan.
    """

    def __init__(self, mega: Megakernel, *, contents: bool | None = None) -> None:
        self._mega = weakref.ref(mega)
        self._core, self._lock = mega._core, mega._lock
        self._name, self._where, self._workers = mega.name, mega._where, mega.workers
        self._ops = list(mega._ops.values())
        self._retries = mega._retries
        self._contents = contents
        self._device, self._bytes_at = mega._place.name, mega._place.bytes_at
        self._check_ops()
        if self._core.open or self._core.pending:
            raise refusal("MK510", f"{self._where}, log", "submissions are open; drain it first")
        self._base = self._core.next
        self._submissions: list[Submission] = []
        self._pending: list[Submission] = []
        self._unsettled: list[int] = []
        self._batch_ends: list[int] = []
        self._faults: list[tuple[int, int, int]] = []
        self._items: list[tuple[int, int, int]] | None = [] if mega._trace else None
        self._runs = [_Run(0)]
        self._known, self._busy, self._lost = KnownBytes(), Ranges(), Ranges()
        self._buffers: set[tuple[int, int]] = set()
        """Address and bytes of all that was submitted."""
        self._kept_bytes = 0

    def _check_ops(self) -> None:
        for op in self._ops:
            taken = {each.name for each in op.kernel.signature} & {"brick", "layer"}
            if taken:
                raise refusal(
                    "MK511",
                    f"{self._where}, log",
                    f"op {op.name} has an argument {min(taken)}, which launches of a plan take for "
                    "themselves; rename it in the kernel",
                )

    @contextmanager
    def recording(self) -> Iterator[QueueRecorder]:
        """Log every submission inside of ``with``.

        Raises:
            QueueError: The queue is being logged already.
        """
        mega = self._mega()
        if mega is None or mega._feed.log is not None:
            raise refusal("MK511", f"{self._where}, log", "it is being logged; end that first")
        mega._feed.log = self
        try:
            yield self
        finally:
            mega._feed.log = None

    # ------------------------------------------------------------------------ what the queue tells

    def append(
        self,
        op: QueueOp,
        count: int,
        columns: Sequence[Any],
        held: Sequence[Buffer],
        priority: Any,
    ) -> None:
        """Take note of submissions that are checked and not published."""
        if self._core.pending == count:  # the first of a batch: what was pending is discarded
            self._pending = []
        rows = zip(*(rows_of(column, count) for column in columns), strict=True)
        levels = [priority] * count if np.ndim(priority) == 0 else priority.tolist()
        for arguments, level in zip(rows, levels, strict=True):
            self._pending.append(Submission(op, arguments, level, held))

    def begin_batch(self) -> None:
        """Look at the memory of what is about to be published, before workers may write to it.

        Raises:
            QueueError: The log is full.
        """
        if len(self._submissions) + len(self._pending) > MAX_SUBMISSIONS:
            raise refusal(
                "MK510",
                f"{self._where}, log",
                f"it holds {len(self._submissions)} submissions of at most {MAX_SUBMISSIONS}; log "
                "less, or close the queue and make another",
            )
        self._deduped = self._core.totals()["deduped"]
        buffers = {
            (each.address, each.nbytes)
            for submission in self._pending
            for each in submission.held
            if each.nbytes
        }
        seen: list[tuple[int, Bytes]] = []
        is_changed = False
        self._buffers |= buffers
        for address, nbytes in sorted(buffers):
            for begin, end in self._busy.without(address, address + nbytes):
                is_changed |= self._look(begin, end, seen)
        if is_changed and self._runs[-1].first < len(self._submissions):
            self._runs.append(_Run(len(self._submissions)))
        for begin, data in seen:
            self._place(begin, data)

    def _look(self, begin: int, end: int, seen: list[tuple[int, Bytes]]) -> bool:
        """Add bytes that were never seen, or that the host has changed; return if it has any."""
        is_changed = False
        for first, stop, known in self._known.parts(begin, end):
            now = self._bytes_at(first, stop)
            if known is not None:
                if np.array_equal(known, now) and not self._lost.touches(first, stop):
                    continue
                is_changed = True
            seen.append((first, now.copy()))
            self._known.put(first, now)
            self._lost.remove(first, stop)
        return is_changed

    def _place(self, begin: int, data: Bytes) -> None:
        self._kept_bytes += len(data)
        keep = self._contents
        if keep is None:
            keep = self._kept_bytes <= KEPT_BYTES
            if not keep:  # all of it, or none: half of it is of no use
                self._contents = False
                for run in self._runs:
                    run.placed = [(at, replace(each, data=None)) for at, each in run.placed]
        self._runs[-1].placed.append((begin, Contents.of(data.tobytes(), keep=keep)))

    def published(self, first: int) -> None:
        """Take what is pending as submitted; the first has this number in the queue."""
        number = len(self._submissions)
        if self._base + number != first:
            raise PlanError(
                f"{self._where}: expected submission {self._base + number}, got {first}; something "
                "was submitted that is not logged"
            )
        self._submissions += self._pending
        self._unsettled += range(number, len(self._submissions))
        self._batch_ends.append(len(self._submissions))
        for submission in self._pending:
            for begin, end in submission.ranges(written=False):
                self._busy.add(begin, end)
        self._pending = []
        if self._core.totals()["deduped"] != self._deduped:
            self._note_aliases(number)

    def _note_aliases(self, first: int) -> None:
        offset = self._core.first - self._base
        rows = np.frombuffer(self._core.rows(), ROW)
        for number in range(first, len(self._submissions)):
            row = rows[number - offset]
            if row["state"] == ALIAS:
                self._submissions[number].alias = int(row["alias"]) + offset
                self._submissions[number].state = TaskState.DEDUPED

    def settle(self) -> None:
        """Look at what finished submissions have written; the host knows that they are done."""
        self._core.collect()
        unsettled = [self._submissions[number] for number in self._unsettled]
        states = [self._core.state_of(self._base + number) for number in self._unsettled]
        later = Ranges()
        for submission, state in zip(reversed(unsettled), reversed(states), strict=True):
            if submission.alias != NO_ALIAS:
                continue
            submission.state = _STATES[state]
            for begin, end in submission.ranges(written=True):
                if state != OPEN:
                    for first, last in later.without(begin, end):
                        self._digest(submission, first, last)
                later.add(begin, end)
        still = [state == OPEN for state in states]
        self._busy = Ranges()
        for submission, is_open in zip(unsettled, still, strict=True):
            if not is_open:
                submission.held = ()
                continue
            for begin, end in submission.ranges(written=False):
                self._busy.add(begin, end)
        self._unsettled = [
            number for number, is_open in zip(self._unsettled, still, strict=True) if is_open
        ]

    def _digest(self, submission: Submission, begin: int, end: int) -> None:
        if submission.state is not TaskState.DONE:
            self._lost.add(begin, end)  # no replay has the same there
            return
        data = self._bytes_at(begin, end)
        submission.written.append(Written.of(0, begin, data.tobytes()))
        self._known.put(begin, data)
        self._lost.remove(begin, end)

    def finish(self, ended: str) -> None:
        """Take what the queue still has; its workers have left, or hang."""
        if ended not in ("hung", "foreign"):
            self.end_period()

    def settle_if_idle(self) -> None:
        """As `settle`, for a host that has seen that nothing is open; from any thread."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._core.open:
                self.settle()
        finally:
            self._lock.release()

    def end_period(self) -> None:
        """Take items and faults, before the queue forgets them."""
        self.settle()
        offset, known = self._core.first - self._base, len(self._submissions)
        for submission, block, code, _ in self._core.faults():
            if submission >= self._base:
                self._faults.append((submission - self._base, block, code))
        if self._items is None:
            return
        if self._core.totals()["dropped_records"]:
            self._items = None
            return
        records = np.frombuffer(self._core.records(), RECORD)
        records = records[np.argsort(records["ready"], kind="stable")]
        numbers = (records["submission"] - self._core.first % 2**32) % 2**32
        for number, block, worker in zip(
            numbers.tolist(), records["block"].tolist(), records["worker"].tolist(), strict=True
        ):
            if 0 <= number + offset < known:
                self._items.append((number + offset, block, worker))

    # ------------------------------------------------------------------------------------- the log

    def log(self) -> ReplayLog:
        """Return what was logged so far; what is not finished is in it as not run.

        Raises:
            PlanError: Nothing was submitted.
        """
        if not self._submissions:
            raise PlanError(f"{self._where}: nothing was submitted, so there is nothing to log")
        memory = SubmittedPlan(self._name, self._buffers, self._submissions)
        queue = QueueSubmissions(
            ops=tuple(op.name for op in self._ops),
            workers=self._workers,
            op=tuple(each.op.number for each in self._submissions),
            priority=tuple(each.priority for each in self._submissions),
            batch_ends=tuple(self._batch_ends),
            states=tuple(each.state for each in self._submissions),
            aliases=tuple(each.alias for each in self._submissions),
            faults=tuple(sorted(self._faults)),
            items=None if self._items is None else tuple(self._items),
            retry_codes=self._retries[0],
            retry_limit=self._retries[1],
        )
        runs = self._logged_runs(memory, queue)
        try:
            return ReplayLog.of(memory.plan, self._device, "queue", runs, queue)
        except PlanError:
            # A clock may not tell two items apart; then nothing is said rather than something else.
            unordered = [replace(run, order=None) for run in runs]
            return ReplayLog.of(memory.plan, self._device, "queue", unordered, queue)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path | None:
        """Write the log to a file, and return its path; None where nothing was submitted."""
        return self.log().save(path, overwrite=overwrite) if self._submissions else None

    def _logged_runs(self, memory: SubmittedPlan, queue: QueueSubmissions) -> list[LoggedRun]:
        runs = [each for each in self._runs if each.first < len(self._submissions)]
        ends = [*(each.first for each in runs[1:]), len(self._submissions)]
        orders = self._orders([each.first for each in runs], queue)
        return [
            LoggedRun(
                values={},
                memory={},
                order=order,
                written=tuple(
                    tuple(memory.moved(each) for each in submission.written)
                    for submission in self._submissions[run.first : end]
                ),
                first=run.first,
                placed=tuple(memory.placed(begin, each) for begin, each in run.placed),
            )
            for run, end, order in zip(runs, ends, orders, strict=True)
        ]

    def _orders(
        self, firsts: Sequence[int], queue: QueueSubmissions
    ) -> list[tuple[int, ...] | None]:
        """Return the submissions that were done in the order in which they began, run by run."""
        began = dict.fromkeys(number for number, _, _ in self._items or ())
        done = [number for number in began if queue.states[number] is TaskState.DONE]
        if len(done) != queue.states.count(TaskState.DONE):
            return [None] * len(firsts)
        found: list[list[int]] = [[] for _ in firsts]
        for number in done:
            found[bisect_right(firsts, number) - 1].append(number)
        return [tuple(each) for each in found]


def checked_path(where: str, path: Any, *, overwrite: bool = False) -> Path:
    """Return where a log can be written.

    Raises:
        QueueError: It is no path, or something lies there that is not to be replaced.
    """
    if not isinstance(path, str | os.PathLike):
        raise refusal("MK511", f"{where}, log", f"expected a file's path, got {path!r:.80}")
    target = Path(path)
    if os.path.isdir(target):
        raise refusal(
            "MK511", f"{where}, log", f"expected a file's path, got the directory {target!s:.400}"
        )
    if not overwrite and os.path.lexists(target):
        raise refusal(
            "MK511",
            f"{where}, log",
            f"{target!s:.400} is there already; choose another name, or overwrite=True",
        )
    if not os.path.isdir(target.parent):
        raise refusal("MK511", f"{where}, log", f"there is no directory {target.parent!s:.400}")
    return target
