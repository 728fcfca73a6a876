"""What is submitted to a queue, on its way to the workers: appended, let in by memory, published.

Nothing of a batch reaches a worker before all of it is checked and has room. Knows nothing of
waiting for what is done, of reports, and of who may use a queue when.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from brickline import _core
from brickline.buffers import Buffer
from brickline.executor.megakernel.queue_arguments import QueueOp
from brickline.executor.megakernel.queue_held import Held
from brickline.executor.megakernel.queue_options import FOREVER, flag_of
from brickline.executor.megakernel.queue_places import Place
from brickline.executor.megakernel.queue_refusals import (
    column_text,
    dead_error,
    failed_error,
    refusal,
)
from brickline.executor.megakernel.queue_report import Period
from brickline.kernel import Scalar

if TYPE_CHECKING:
    from brickline.executor.megakernel.queue_recording import QueueRecorder


class Feed:
    """The way into one queue.

    Args:
        core: The queue.
        where: What errors call it.
        ops: Names of the ops.
        place: Where its workers are.
        slots: Most items that are not finished.
        memory_budget: Most bytes of tables and of unfinished submissions; None: no bound.
        held: What keeps their memory.
    """

    def __init__(
        self,
        core: _core.MegaQueueCore,
        where: str,
        ops: Sequence[str],
        place: Place,
        slots: int,
        memory_budget: int | None,
        held: Held,
    ) -> None:
        self._core, self._where, self._ops, self._place = core, where, tuple(ops), place
        self._slots, self._memory_budget, self._held = slots, memory_budget, held
        self._batch: list[Buffer] | None = None
        self._pending = 0
        self.period = Period(launches=place.starts)
        self.log: QueueRecorder | None = None
        """Who is told of every submission."""

    @property
    def is_collecting(self) -> bool:
        """Whether a batch is being collected, of which nothing is submitted yet."""
        return self._batch is not None

    def begin_batch(self) -> None:
        """Collect what is submitted from here on."""
        self._batch = []

    def drop_batch(self) -> None:
        """Submit nothing of what was collected."""
        self._core.discard()
        self._batch, self._pending = None, 0

    def end_batch(self, *, wait: bool) -> None:
        """Publish what was collected: all of it, or none."""
        held, self._batch = self._batch, None
        if held is not None and self._core.pending:
            self._publish(f"{self._where}, a batch", held, wait=wait)

    def submit(
        self,
        op: QueueOp,
        where: str,
        count: int,
        columns: list[Any],
        held: list[Buffer],
        priority: Any,
        given: Sequence[Any],
        *,
        wait: bool,
    ) -> int:
        """Submit several launches of one op, or collect them; return the first one's number.

        Args:
            op: Which one.
            where: What errors call them.
            count: How many.
            columns: Their arguments.
            held: Their memory.
            priority: One for all, or one for each.
            given: The arguments as they were passed, for errors.
            wait: Whether to wait for room.
        """
        began_ns = _core.monotonic_ns()
        if not self.period.began_ns:
            self.period.began_ns = began_ns
            self.period.began_unix_ns = time.time_ns()
        refused = self._core.append(op.number, count, columns, priority)
        if refused is not None:
            raise self._refused(op, where, count, refused, given)
        if self.log is not None:
            self.log.append(op, count, columns, held, priority)
        number = self._core.next + self._pending
        if self._batch is not None:
            self._batch += held
            self._pending += count
        self.period.append_ns += _core.monotonic_ns() - began_ns
        return number if self._batch is not None else self._publish(where, held, wait=wait)

    def release(self) -> None:
        """Let go of the memory of what has finished."""
        for batch in self._core.take_finished_batches():
            self._held.release(batch)

    def dead(self) -> Exception:
        """Return what to raise where the queue is dead."""
        return dead_error(self._core, self._where, self._ops, self._place.after_a_hang)

    def _refused(
        self,
        op: QueueOp,
        where: str,
        count: int,
        refused: tuple[Any, ...],
        given: Sequence[Any],
    ) -> Exception:
        values = {
            each.name: value if np.ndim(value) == 0 else value[refused[1]]
            for each, value in zip(op.kernel.signature, given, strict=True)
            if isinstance(each, Scalar)
        }
        if self._batch is None:
            self._core.discard()
        place = f"{where}, submission {refused[1]} of {count}" if count > 1 else where
        return refusal("MK507", place, column_text(op.kernel, refused, values, self._place.limits))

    def _publish(self, where: str, held: list[Buffer], *, wait: bool) -> int:
        self._pending = 0
        try:
            flag_of(where, "wait", wait)
            self._make_room(where, held, wait=wait)
            if self.log is not None:
                self.log.begin_batch()
        except BaseException:
            self._core.discard()
            raise
        if not self.period.published_ns:
            self.period.published_ns = _core.monotonic_ns()
        refused, first, jobs, items, finished = self._core.publish(FOREVER if wait else 0.0)
        for batch in finished:
            self._held.release(batch)
        if refused:
            raise self._not_published(where, refused, jobs, items)
        self._held.hold(first, held)
        if self.log is not None:
            self.log.published(first)
        self.period.peak_bytes = max(self.period.peak_bytes, self._held.nbytes)
        return first

    def _not_published(self, where: str, refused: str, jobs: int, items: int) -> Exception:
        if refused in ("grid", "items"):
            return refusal(
                "MK503",
                where,
                f"{items} items of {jobs} submissions, expected at most {self._slots}; pass slots= "
                "to Megakernel, or submit in parts",
            )
        if refused == "waiting":
            return refusal(
                "MK510", where, f"{items} items, and the slots are taken; drain first, or wait=True"
            )
        if refused == "state":
            if self._core.state == "dead":
                return self.dead()
            return refusal("MK505", where, "it was stopped; make another Megakernel")
        if self._core.failure:
            return failed_error(where, self._core.failure)
        return refusal(
            "MK512", where, f"{refused}: {self._core.problem or 'a bug'}; make another Megakernel"
        )

    def _make_room(self, where: str, held: list[Buffer], *, wait: bool) -> None:
        """The memory gate: before anything is published."""
        if self._memory_budget is None:
            return
        while True:
            tables = self._core.tables_bytes
            needed = tables + self._held.nbytes + self._held.more_with(held)
            if needed <= self._memory_budget:
                return
            if not self._held.batches:
                raise refusal(
                    "MK504",
                    where,
                    f"its memory and {tables} bytes of tables take {needed} bytes, got a budget of "
                    f"{self._memory_budget}; submit in parts, or pass a larger memory_budget",
                )
            if not wait:
                raise refusal(
                    "MK510",
                    where,
                    f"{needed} bytes are needed of {self._memory_budget}, and unfinished "
                    "submissions hold some; drain first, or wait=True",
                )
            if self._core.wait(min(self._held.batches), FOREVER) == "hung":
                raise self.dead()
            held_before = len(self._held.batches)
            self.release()
            if len(self._held.batches) == held_before and not self._core.open:
                raise refusal(
                    "MK504",
                    where,
                    "memory of submissions that faulted is kept until the next report; call drain",
                )
