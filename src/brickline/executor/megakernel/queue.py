"""Megakernel: a queue of kernels that workers execute while it is fed.

Workers live as long as the queue: threads on a CPU, blocks of one launch on a GPU. Every block of a
submission is an item of its own. What a submission waits for follows from the memory that it reads
and writes, byte by byte, in the order of submission. Whoever submits checks, plans and publishes;
see ``megakernel_queue.h`` for what happens then.
"""

from __future__ import annotations

import operator
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from brickline import _core
from brickline.buffers import Buffer
from brickline.cache import KernelCache
from brickline.device.base import Device, open_device
from brickline.errors import DeviceError
from brickline.executor.megakernel.queue_arguments import QueueOp
from brickline.executor.megakernel.queue_feed import Feed
from brickline.executor.megakernel.queue_held import Held
from brickline.executor.megakernel.queue_options import (
    MAX_SLOTS,
    Priority,
    checked_name,
    codes_of,
    count_of,
    flag_of,
    named_kernels,
    outputs_of,
    priorities_of,
    priority_of,
    seconds_of,
)
from brickline.executor.megakernel.queue_places import place_of
from brickline.executor.megakernel.queue_recording import QueueRecorder, checked_path
from brickline.executor.megakernel.queue_refusals import failed_error, refusal
from brickline.executor.megakernel.queue_report import Period, queue_report
from brickline.executor.megakernel.telling import tell_profiler
from brickline.kernel import Kernel
from brickline.megakernel_report import MegakernelReport
from brickline.megakernel_tables import TaskState
from brickline.profiler import BrickProfiler

__all__ = ["Megakernel", "Priority"]
_STATES = (None, TaskState.DONE, TaskState.FAULTED, TaskState.SKIPPED, TaskState.NOT_RUN)
_MOST_SEED = 2**62


class Megakernel:
    """Workers that execute submissions in any order that their memory allows.

    Use it from one thread at a time; `stop` may come from any. Between a submission and the moment
    at which it is done, its memory belongs to the workers.

    Example:
        >>> import numpy as np
        >>> from brickline.kernels.catalog import residual
        >>> a, b, y = np.ones(8, np.float32), np.ones(8, np.float32), np.zeros(8, np.float32)
        >>> with Megakernel("CPU", [residual()], workers=1) as mega:
        ...     number = mega.submit("residual", {"a": a, "b": b}, {"y": y}, {"n": 8})
        ...     report = mega.drain()
        >>> report.items_processed, float(y[0])
        (1, 2.0)
    """

    def __init__(
        self,
        device: str | Device = "CPU",
        ops: Sequence[Kernel] | Mapping[str, Kernel] = (),
        *,
        workers: int | None = None,
        slots: int = 1 << 16,
        memory_budget: int | None = None,
        retry_codes: Sequence[int] = (),
        retry_limit: int = 3,
        trace: bool = False,
        lineage: bool = False,
        dedupe: bool = True,
        fuse: bool = True,
        prove: bool = False,
        profiler: BrickProfiler | None = None,
        cache: KernelCache | None = None,
        log: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        name: str = "queue",
        delay_seed: int = 0,
    ) -> None:
        """Compile the ops and start the workers.

        Args:
            device: ``"CPU"``, or a GPU such as ``"CUDA:0"``, in whose memory arguments then are.
            ops: Kernels written against Block; by name, or under their own names.
            workers: Threads, or blocks of a GPU. Default None: one for each core that this process
                may use, or for each multiprocessor but one, which takes submissions in.
            slots: Most items that are submitted and not finished. Default 65,536.
            memory_budget: Most bytes of the queue's tables and of the memory of unfinished
                submissions together. Default None: no bound.
            retry_codes: Faults after which an item is tried again. Its op must then be one that
                can be executed twice. Default none.
            retry_limit: How often an item is tried again before it is faulted. Default 3.
            trace: Whether every item is recorded with its times. Default False.
            lineage: Whether the report tells whose values each submission read. Default False.
            dedupe: Whether submissions of one batch that compute the same into the same memory are
                executed once, where their kernel is pure. Default True.
            fuse: Whether a submission that needs of another one of its batch, block by block, what
                the same block writes is executed item after item by one worker. Default True.
            prove: Whether every batch is proved free of races, cycles and waits without a producer
                before it is published, by a validator that shares no code with the planner. Takes
                longer the more is open. Default False.
            profiler: Who is told a tile for each item and a trace for each submission, with every
                report that finds the queue empty; items are then recorded as with trace. Default
                None: nobody.
            cache: Where kernels are compiled. Default the user's cache.
            log: Where `close` writes a log of all submissions, for `brickline plan replay`; items
                are then recorded as with trace. Default None: nothing is logged.
            overwrite: Whether a log that is there is replaced. Default False.
            name: What reports call it.
            delay_seed: Other than 0 makes workers dawdle at random, to shake out races.

        Raises:
            QueueError: An option or a kernel does not fit.
            CompileError: A compiler refuses a source.
            DeviceError: The device refuses memory or workers.
        """
        self.name = checked_name(name)
        where = f"megakernel {name}"
        place = self._place = place_of(where, open_device(device), workers)
        self.workers = place.workers
        self.slots = count_of(where, "slots", slots, MAX_SLOTS)
        limit = count_of(where, "retry_limit", retry_limit, 1 << 20, least=0)
        codes = codes_of(where, "retry_codes", retry_codes)
        seed = count_of(where, "delay_seed", delay_seed, _MOST_SEED, least=0)
        is_traced, is_deduping = flag_of(where, "trace", trace), flag_of(where, "dedupe", dedupe)
        is_fusing, is_proved = flag_of(where, "fuse", fuse), flag_of(where, "prove", prove)
        self._lineage = flag_of(where, "lineage", lineage)
        self._overwrite = flag_of(where, "overwrite", overwrite)
        self.memory_budget = (
            None
            if memory_budget is None
            else count_of(where, "memory_budget", memory_budget, 2**62)
        )
        self._log_path = None
        if log is not None:
            self._log_path = checked_path(where, log, overwrite=self._overwrite)
        if profiler is not None and not isinstance(profiler, BrickProfiler):
            raise refusal(
                "MK511", f"{where}, profiler", f"expected a BrickProfiler, got {profiler!r:.80}"
            )
        if cache is not None and not isinstance(cache, KernelCache):
            raise refusal("MK511", f"{where}, cache", f"expected a KernelCache, got {cache!r:.80}")
        kernels = named_kernels(where, ops)
        recorded = is_traced or log is not None or profiler is not None
        tables = place.tables_bytes(self.slots, kernels, recorded=recorded)
        if self.memory_budget is not None and tables > self.memory_budget:
            raise refusal(
                "MK504",
                f"{where}, memory_budget",
                f"{self.slots} slots take {tables} bytes, got a budget of {self.memory_budget}; "
                "pass fewer slots, or a larger memory_budget",
            )
        compiler = KernelCache() if cache is None else cache
        before = compiler.statistics.compilations
        self._ops = place.compile(kernels, compiler)
        self._is_warm = compiler.statistics.compilations == before
        self._profiler, self._reports, self._has_reported = profiler, 0, False
        self._trace = recorded
        self._retries = (tuple(codes), limit)
        self._held = Held()
        try:
            self._core = _core.MegaQueueCore(
                [op.row() for op in self._ops.values()],
                place.limits,
                {
                    "workers": self.workers,
                    "slots": self.slots,
                    "retry_limit": limit,
                    "retry_codes": codes,
                    "recorded": self._trace,
                    "lineage": self._lineage,
                    "dedupe": is_deduping,
                    "fuse": is_fusing,
                    "prove": is_proved,
                    "delay_seed": seed,
                    "grace_ns": 1_500_000_000,
                    "held": [*self._ops.values(), place, self._held],
                    "device": place.core_options(),
                },
            )
        except RuntimeError as error:  # the driver's words
            raise DeviceError(f"{where}: {error}") from error
        self._lock = threading.Lock()
        self._feed = Feed(
            self._core, where, tuple(self._ops), place, self.slots, self.memory_budget, self._held
        )
        self._is_closed = False
        if self._log_path is not None:
            self._feed.log = QueueRecorder(self)
        self._end = weakref.finalize(self, _shut, self._core)

    # ---------------------------------------------------------------------------------- submitting

    def submit(
        self,
        op: str,
        reads: Any = None,
        writes: Any = None,
        params: Any = None,
        *,
        priority: Priority | int | str = Priority.NORMAL,
        wait: bool = True,
        stream: Any = None,
    ) -> int:
        """Submit one launch; each of its blocks is an item.

        Args:
            op: Which one.
            reads: Arrays that it reads alone, by name or in the order of the kernel's parameters.
            writes: Arrays that it writes, those that it also reads among them.
            params: Scalars, by name or in order.
            priority: "critical", "high", "normal", "low" or "idle". Default "normal".
            wait: Whether to wait for room where slots or memory_budget are used up. Default True.
            stream: On a GPU, the stream whose work so far it comes after: that is waited for here.
                Default None: torch's current one.

        Returns:
            The number of the submission.

        Raises:
            QueueError: It is refused; nothing was submitted.
            DeviceHung: An item of another submission never returned.
        """
        self._begin("submit")
        try:
            known, where = self._op(op)
            level = priority_of(where, priority)
            given = known.place(where, reads, writes, params)
            columns, held = known.columns(where, given, None)
            self._follow(where, stream)
            return self._feed.submit(known, where, 1, columns, held, level, given, wait=wait)
        finally:
            self._lock.release()

    def submit_many(
        self,
        op: str,
        reads: Any = None,
        writes: Any = None,
        params: Any = None,
        *,
        count: int | None = None,
        priority: Any = Priority.NORMAL,
        wait: bool = True,
        stream: Any = None,
    ) -> range:
        """Submit many launches of one op at once: all of them, or none.

        Args:
            op: Which one.
            reads: As of `submit`; of each parameter an array with a first axis more, whose rows are
                the submissions' memory, a list of arrays, or one array for all submissions.
            writes: As reads.
            params: Scalars, each a number for all submissions or an array with one for each.
            count: How many. Default None: as many as the first column has.
            priority: One for all, or an array of numbers from 0, critical, to 4, idle.
            wait: As of `submit`.
            stream: As of `submit`.

        Returns:
            The numbers of the submissions.

        Raises:
            QueueError: One of them is refused; nothing was submitted.
            DeviceHung: An item of another submission never returned.
        """
        with self._using("submit_many"):
            known, where = self._op(op)
            given = known.place(where, reads, writes, params)
            if count is None:
                total = known.count_of(where, given)
            else:
                total = count_of(where, "count", count, MAX_SLOTS, least=0)
            level = priorities_of(where, priority, total)
            columns, held = known.columns(where, given, total)
            if not total:
                return range(self._core.next, self._core.next)
            self._follow(where, stream)
            number = self._feed.submit(known, where, total, columns, held, level, given, wait=wait)
            return range(number, number + total)

    @contextmanager
    def batch(self, *, wait: bool = True) -> Iterator[None]:
        """Collect submissions, and publish them together at the end: all of them, or none.

        Where the block raises, nothing is submitted, and its numbers are given out again. A
        submission that is refused raises; whoever catches that inside the block submits the others.

        Args:
            wait: As of `submit`.
        """
        with self._using("batch"):
            flag_of(f"{self._where}, batch", "wait", wait)
            self._check_no_batch("batch")
            self._feed.begin_batch()
        try:
            yield
        except BaseException:
            self._feed.drop_batch()
            raise
        with self._using("batch"):
            self._feed.end_batch(wait=wait)

    # ------------------------------------------------------------------------------------- waiting

    def drain(
        self, max_wall_time: float | None = None, *, outputs: Mapping[str, Any] | None = None
    ) -> MegakernelReport:
        """Wait until everything is done, and return what happened.

        The report is of all that was submitted since the last one that found the queue empty. Where
        the time is up, workers leave after the item that each is at, and the report is partial:
        what remains is executed when something is submitted or drained again.

        Args:
            max_wall_time: Seconds, above 0. Default None: for ever; an op that never returns is
                then not noticed.
            outputs: Arrays by a name, so that a complete report tells who wrote them; needs
                lineage=True.

        Raises:
            QueueError: The time is no time, a batch is being collected, or another thread uses the
                queue.
            DeviceHung: An item has not returned 1.5 s after the time was up. The engine is dead;
                `report` tells what was done.
        """
        with self._using("drain", stopped=True):
            self._check_no_batch("drain")
            seconds = seconds_of(f"{self._where}, max_wall_time", max_wall_time)
            named = self._outputs(outputs)
            ended = "stopped" if self._core.state == "stopped" else self._core.drain(seconds)
            return self._report(ended, named)

    def wait(self, number: int, timeout: float | None = None) -> TaskState | None:
        """Wait for one submission.

        Args:
            number: As `submit` returned it.
            timeout: Seconds. Default None: for ever.

        Returns:
            What became of it, also where an earlier report has it; None where it is not finished
            when the time is up.

        Raises:
            QueueError: There is no such submission.
            DeviceHung: Workers did not leave after a stop.
        """
        with self._using("wait"):
            found = self._number(number)
            seconds = seconds_of(f"{self._where}, timeout", timeout)
            if self._core.wait(found, seconds) == "hung":
                raise self._feed.dead()
            self._feed.release()
            if self._feed.log is not None:
                self._feed.log.settle()
            return _STATES[self._core.state_of(found)]

    def stop(self) -> None:
        """Make workers leave for good, each after the item that it is at. From any thread.

        `report` then tells what was done and what was not. Nothing can be submitted any more.
        """
        if self.state not in ("closed", "foreign"):
            self._core.stop()

    def report(self) -> MegakernelReport:
        """Return what has happened since the last report that found the queue empty.

        Waits for workers that were told to stop; of a running queue, use `drain`. Of a queue that
        hangs it tells what was done, also after `close`.

        Raises:
            QueueError: Workers are running, and something is open; or a batch is being collected.
            DeviceHung: A worker does not leave; the next call tells what was done.
            DeviceError: The device failed, so nothing is known.
        """
        if self._core.state == "dead":
            return self._report_of_dead()
        with self._using("report", stopped=True):
            self._check_no_batch("report")
            state = self._core.state
            if state == "running" and self._core.open:
                raise refusal(
                    "MK510",
                    f"{self._where}, report",
                    f"workers are running, and {self._core.open} submissions are open; call "
                    "drain(), or stop() first",
                )
            ended = self._core.join() if state == "stopped" else "done"
            return self._report("expired" if state == "expired" else ended, None)

    def clear(self) -> MegakernelReport:
        """Make workers leave, cancel what is not done, and return what happened.

        The queue is empty afterwards, and takes submissions again.

        Raises:
            DeviceHung: A worker does not leave.
        """
        with self._using("clear"):
            self._check_no_batch("clear")
            ended = self._core.drain(1e-9)
            if ended == "hung":
                raise self._feed.dead()
            if ended == "expired":
                self._core.clear()
            return self._report(ended, None)

    def close(self) -> None:
        """Stop, wait for the workers to leave, and let go of all memory.

        Raises:
            DeviceHung: A worker does not leave. What it works on is kept for ever.
        """
        if self._is_closed:
            return
        self._is_closed = True
        was_dead = self._core.state == "dead"
        ended = self._end() if self._end.alive else ""
        if self._feed.log is not None and self._log_path is not None and ended != "foreign":
            self._feed.log.finish("hung" if was_dead else str(ended))
            self._feed.log.save(self._log_path, overwrite=self._overwrite)
        if ended == "hung" and not was_dead:
            raise self._feed.dead()

    # ------------------------------------------------------------------------------------ the rest

    @property
    def ops(self) -> Mapping[str, Kernel]:
        """The kernels by the names of ops."""
        return {name: op.kernel for name, op in self._ops.items()}

    @property
    def state(self) -> str:
        """running, expired (a time was up), stopped, dead, closed or, in a fork, foreign."""
        return "closed" if self._is_closed else self._core.state

    @property
    def open(self) -> int:
        """Submissions that are not finished."""
        found = self._core.open
        if not found and self._feed.log is not None:
            self._feed.log.settle_if_idle()
        return found

    def __enter__(self) -> Megakernel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        place = f"on {self._place.name}, {self.workers} workers"
        return f"<Megakernel {self.name} {place}, {self.state}>"

    # ---------------------------------------------------------------------------------- the inside

    @property
    def _where(self) -> str:
        return f"megakernel {self.name}"

    def _begin(self, what: str, *, stopped: bool = False) -> None:
        """Take the lock, for a queue that can be used."""
        state = self.state
        if state == "foreign":
            raise refusal(
                "MK506",
                f"{self._where}, {what}",
                "it was made by the process that forked this one, where its workers are; make "
                "another here",
            )
        if state == "closed" or (state == "stopped" and not stopped):
            raise refusal(
                "MK505", f"{self._where}, {what}", f"it is {state}; make another Megakernel"
            )
        if state == "dead":
            raise self._feed.dead()
        if not self._lock.acquire(blocking=False):
            raise self._in_use(what)

    def _in_use(self, what: str) -> Exception:
        return refusal(
            "MK506",
            f"{self._where}, {what}",
            "another thread is using it; use it from one thread at a time, or make one for each",
        )

    @contextmanager
    def _using(self, what: str, *, stopped: bool = False) -> Iterator[None]:
        self._begin(what, stopped=stopped)
        try:
            yield
        finally:
            self._lock.release()

    def _check_no_batch(self, what: str) -> None:
        if self._feed.is_collecting:
            raise refusal(
                "MK510",
                f"{self._where}, {what}",
                "a batch is being collected, and nothing of it is submitted yet; end it first",
            )

    def _number(self, number: Any) -> int:
        end = self._core.next
        try:
            found = operator.index(number)
        except TypeError:
            found = -1
        if not 0 <= found < end:
            known = f"0 to {end - 1} are submitted" if end else "nothing is submitted"
            raise refusal(
                "MK513",
                self._where,
                f"expected a number that submit returned, got {number!r:.80}; {known}, and those "
                "of a batch are when it ends",
            )
        return found

    def _op(self, name: str) -> tuple[QueueOp, str]:
        found = self._ops.get(name) if isinstance(name, str) else None
        if found is None:
            known = ", ".join(self._ops)
            raise refusal("MK502", self._where, f"expected one of {known}, got {name!r:.80}")
        return found, f"{self._where}, op {name}"

    def _follow(self, where: str, stream: Any) -> None:
        """Wait for what a stream was given before: workers are in no stream."""
        handle = self._place.stream_of(where, stream)
        if handle is not None:
            self._core.follow(handle)

    def _outputs(self, outputs: Mapping[str, Any] | None) -> dict[str, Buffer] | None:
        where = f"{self._where}, outputs"
        named = outputs_of(where, outputs)
        if named is not None and not self._lineage:
            raise refusal("MK511", where, "it keeps no lineage; pass lineage=True to Megakernel")
        if named and not self._feed.period.published_ns:
            raise refusal(
                "MK511",
                where,
                "nothing was submitted since the last report, so nothing wrote to them; leave them "
                "out, or pass them to the drain that follows their submissions",
            )
        return named

    def _report_of_dead(self) -> MegakernelReport:
        """Return what was done before an item never returned."""
        if self._core.failure:
            raise failed_error(self._where, self._core.failure)
        if not self._lock.acquire(blocking=False):
            raise self._in_use("report")
        try:
            self._core.collect()
            return self._made("hung", None)
        finally:
            self._lock.release()

    def _report(self, ended: str, outputs: dict[str, Buffer] | None) -> MegakernelReport:
        if ended == "hung":
            raise self._feed.dead()
        core = self._core
        core.collect()
        is_empty = not core.open
        if self._feed.log is not None:
            self._feed.log.end_period() if is_empty else self._feed.log.settle()
        made = self._made(ended, outputs if is_empty else None)
        if is_empty:
            if self._profiler is not None and made.spans is not None and made.began_unix_ns:
                tell_profiler(made, self._profiler, self._reports)
                self._reports += 1
            core.begin_again()
            self._feed.period = Period()
            self._has_reported = True
        self._feed.release()
        return made

    def _made(self, ended: str, outputs: Mapping[str, Buffer] | None) -> MegakernelReport:
        core, period, now_ns = self._core, self._feed.period, _core.monotonic_ns()
        traffic = core.traffic()
        return queue_report(
            core,
            name=self.name,
            device=self._place.name,
            ops=tuple(self._ops),
            period=period,
            now_ns=now_ns,
            ended=ended,
            lineage=[op.buffers for op in self._ops.values()] if self._lineage else None,
            trace=self._trace,
            outputs=outputs,
            telemetry={
                "bytes_uploaded": traffic["uploaded_bytes"],
                "bytes_read_back": traffic["read_back_bytes"],
                "kernel_launches": period.launches + traffic["launches"],
                "sync_points": core.totals()["waits"] + traffic["syncs"],
                "readback_buffers": traffic["reads"],
                "resident_allocations": traffic["allocations"],
                "compiled_cache_hit": self._is_warm or self._has_reported,
                "resident_cache_hit": self._has_reported and not traffic["allocations"],
                "execution_mode": self._place.execution_mode,
                "capacity": self.slots,
                "peak_memory_bytes": core.tables_bytes + period.peak_bytes,
                "memory_budget_bytes": self.memory_budget,
            },
        )


def _shut(core: _core.MegaQueueCore) -> str:
    """End the workers before the memory that they work on goes; the core keeps it if one hangs."""
    return "foreign" if core.state == "foreign" else core.close()
