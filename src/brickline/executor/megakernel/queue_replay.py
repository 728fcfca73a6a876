"""QueueRunner: runs the launches of a replay log as submissions to a queue.

Batches and priorities are those that were recorded; launches of a plan are submitted one by one.
Knows how to say what a submission is, and notices which ended otherwise than recorded; bytes are
compared by `replay`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import groupby
from types import TracebackType
from typing import Any

from brickline.buffers import Buffer
from brickline.cache import KernelCache
from brickline.device.base import Device
from brickline.executor.megakernel.queue import Megakernel, Priority
from brickline.executor.megakernel.replay_log import Piece, ReplayLog
from brickline.executor.prepared import PreparedPlan
from brickline.kernel import Kernel
from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_tables import TaskState
from brickline.plan_buffers import PlanBuffer
from brickline.plan_launches import Launch, evaluated

QUEUE = "queue"
"""The name of this way to run launches, among the executors of a replay."""
LEAST_SLOTS = 1 << 12
CPU = 1
"""Kind of a device whose workers are threads."""
_WORDS = {
    TaskState.DONE: "done",
    TaskState.FAULTED: "faulted",
    TaskState.SKIPPED: "skipped",
    TaskState.NOT_RUN: "not run",
    TaskState.PARTIAL: "not finished",
}


class QueueRunner:
    """A queue for the runs of a log; made when the first is run, closed at the end of ``with``."""

    def __init__(
        self, log: ReplayLog, device: Device, cache: KernelCache | None, workers: int | None
    ) -> None:
        self._log, self._device, self._cache, self._workers = log, device, cache, workers
        self._mega: Megakernel | None = None
        self._names: dict[str, str] = {}
        """Names of ops by what tells them apart: an op of the log, or a kernel's digest."""
        self.fate: tuple[int, str] | None = None
        """The first submission of the last run that ended otherwise than recorded, and how."""

    def __enter__(self) -> QueueRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._mega is not None:
            self._mega.close()
            self._mega = None

    def watcher(self, prepared: PreparedPlan, piece: Piece) -> _Submitting:
        """Return what submits the launches of a prepared plan, in the place of its executor."""
        return _Submitting(self, prepared, piece)

    def run(self, prepared: PreparedPlan, piece: Piece) -> None:
        """Submit the launches of a prepared plan, and wait for them."""
        batches = list(self._batches(piece, len(prepared.launches)))
        values = piece.run.values
        blocks = [
            evaluated(x, values) * evaluated(y, values) * evaluated(z, values)
            for x, y, z in (launch.sizes[:3] for launch in prepared.launches)
        ]
        mega = self._queue(max(sum(blocks[each] for each in batch) for batch in batches))
        for batch in batches:
            with mega.batch():
                for number in batch:
                    self._submit(mega, prepared, piece, number)
        report = mega.drain()
        self.fate = self._other_fate(report, piece)
        if self._device.kind != CPU:
            self._close()  # its launch ends: while it runs, nobody can wait for the device

    def _batches(self, piece: Piece, launches: int) -> Iterator[list[int]]:
        """Yield the launches of a run by the batches in which they were submitted."""
        queue = self._log.queue
        ends: Sequence[int] = range(1, launches + 1) if queue is None else queue.batch_ends
        numbers = range(launches)
        for _, batch in groupby(numbers, lambda each: bisect_right(ends, piece.submission(each))):
            yield list(batch)

    def _queue(self, items: int) -> Megakernel:
        """Return a queue that has room for so many items."""
        if self._mega is not None and self._mega.slots < items:
            self._close()
        if self._mega is None:
            submitted = self._log.queue
            self._mega = Megakernel(
                self._device,
                self._ops(),
                workers=self._workers,
                slots=max(items, LEAST_SLOTS),
                retry_codes=() if submitted is None else submitted.retry_codes,
                retry_limit=0 if submitted is None else submitted.retry_limit,
                cache=self._cache,
                name=self._log.plan.name,
            )
        return self._mega

    def _ops(self) -> dict[str, Kernel]:
        found: dict[str, Kernel] = {}
        self._names = {}
        for number, launch in enumerate(self._log.plan.launches):
            key = self._key(number, launch)
            if key not in self._names:
                name = self._op_name(number, launch)
                self._names[key] = name if name not in found else f"{name} {len(found)}"
                found[self._names[key]] = launch.kernel
        return found

    def _key(self, number: int, launch: Launch) -> str:
        queue = self._log.queue
        return launch.kernel.digest if queue is None else queue.ops[queue.op[number]]

    def _op_name(self, number: int, launch: Launch) -> str:
        queue = self._log.queue
        return launch.kernel.name if queue is None else queue.ops[queue.op[number]]

    def _submit(self, mega: Megakernel, prepared: PreparedPlan, piece: Piece, number: int) -> None:
        launch, values = prepared.launches[number], piece.run.values
        queue, submission = self._log.queue, piece.submission(number)
        reads: dict[str, Buffer] = {}
        writes: dict[str, Buffer] = {}
        for param, given in launch.buffers():
            part = _part(prepared, given, values)
            (writes if param.access.writes else reads)[param.name] = part
        mega.submit(
            self._names[self._key(submission, launch)],
            reads,
            writes,
            launch.scalars(values),
            priority=Priority.NORMAL if queue is None else queue.priority[submission],
        )

    # ---------------------------------------------------------------------------------- what it was

    def words(self, number: int) -> str:
        """Return what a launch of the log is called."""
        launch = self._log.plan.launches[number]
        if self._log.queue is None:
            return str(launch)
        return f"submission {number} ({self._op_name(number, launch)})"

    def argument(self, launch: Launch, storage: int, byte: int) -> str:
        """Return which element of which argument a byte of a buffer is."""
        for param, given in launch.buffers():
            here = byte - given.offset
            if param.access.writes and given.storage.number == storage and 0 <= here < given.span:
                return f"element {here // given.itemsize} of its argument {param.name}"
        return ""

    def ran(self, number: int, launch: Launch, block: tuple[int, int, int] | None) -> str:
        """Return when and where an item ran, as it was recorded; empty if that is not known."""
        queue = self._log.queue
        if queue is None or block is None:
            return ""
        wide, high = (int(evaluated(size, {})) for size in launch.sizes[:2])
        found = queue.place_of(number, block[0] + wide * (block[1] + high * block[2]))
        if found is None:
            return ""
        return f", recorded as item {found[0]} to begin, on worker {found[1]}"

    def _other_fate(self, report: MegakernelReport, piece: Piece) -> tuple[int, str] | None:
        queue = self._log.queue
        faults: dict[int, tuple[int, int]] = {}
        for each in reversed(report.faults):
            faults[each.task - report.first_submission] = (each.item, int(each.code))
        assert report.tasks.state is not None
        for number, word in enumerate(report.tasks.state.tolist()):
            state, submission = TaskState(word), piece.submission(number)
            recorded = TaskState.DONE if queue is None else queue.states[submission]
            if TaskState.DEDUPED in (state, recorded):
                continue
            fault = None if queue is None else queue.fault_of(submission)
            if state is not recorded or faults.get(number) != fault:
                return submission, (
                    f"was recorded as {_fate(recorded, fault)}, and replayed as "
                    f"{_fate(state, faults.get(number))}"
                )
        return None


class _Submitting:
    """Submits launches; has the face of who watches a plan."""

    def __init__(self, runner: QueueRunner, prepared: PreparedPlan, piece: Piece) -> None:
        self._runner, self._prepared, self._piece = runner, prepared, piece

    def run(self, stream: int, position: int) -> tuple[int, int, int]:
        self._runner.run(self._prepared, self._piece)
        return len(self._prepared.launches), 0, -1


def _part(prepared: PreparedPlan, given: PlanBuffer, values: Any) -> Buffer:
    """Return the memory of an argument."""
    whole = prepared._memory.buffers[given.storage.number]
    return Buffer.at_address(
        whole.address + given.offset,
        [int(evaluated(size, values)) for size in given.shape],
        given.dtype,
        kind=whole.kind,
        number=whole.number,
        owner=whole,
    )


def _fate(state: TaskState, fault: tuple[int, int] | None) -> str:
    if fault is None:
        return _WORDS[state]
    return f"{_WORDS[state]} (fault {fault[1]} at item {fault[0]})"
