"""ProgramExecutor: a prepared plan as one program of items that workers share out and execute.

Workers walk static lists and wait for each other by counters; nothing of Python or of a host stands
between two launches. A fault keeps what depends on it from running, and nothing else. Decides
regions, words what went wrong, and makes the report; how items are run is an engine's matter.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from brickline import _core
from brickline.cache import CachedKernel, KernelCache
from brickline.device.base import Device, fault_words
from brickline.errors import DeadlineReached, DeviceHung, InternalError, LaunchError
from brickline.executor.megakernel.cpu import CpuEngine
from brickline.executor.megakernel.cuda import CudaEngine
from brickline.executor.megakernel.deduped import Deduped, all_run, find_deduped
from brickline.executor.megakernel.flow import flow_of
from brickline.executor.megakernel.options import MegakernelOptions
from brickline.executor.megakernel.proving import RACE, Prover
from brickline.executor.megakernel.refusals import refusal
from brickline.executor.megakernel.regions import Regions, find_regions
from brickline.executor.megakernel.tables import region_numbers
from brickline.megakernel_progress import NO_TASK, spans_from_records
from brickline.megakernel_report import MegakernelReport
from brickline.plan_launches import Launch
from brickline.plan_words import counted


class ProgramExecutor:
    """Runs a plan on workers: threads of the host, or blocks of one launch on CUDA.

    Args:
        name: The plan's, for reports and messages.
        device: Where it runs.
        cache: Where a megakernel for CUDA is compiled.
        core: The launches with their arguments.
        launches: The plan's.
        kernels: The compiled kernel of each.
        options: What was asked for.
        values: Of the plan's variables at the next run; the plan changes them.
        memory_bytes: Of all buffers.
        compilations: How many the cache had made before this plan asked it for anything.
        held: What items use: code and memory.
    """

    def __init__(
        self,
        name: str,
        device: Device,
        cache: KernelCache,
        core: _core.PlanCore,
        launches: Sequence[Launch],
        kernels: Sequence[CachedKernel],
        options: MegakernelOptions,
        values: Mapping[str, int | float],
        memory_bytes: int,
        compilations: int,
        held: object,
    ) -> None:
        began = time.perf_counter_ns()
        self._name = name
        self._device = device
        self._cache = cache
        self._core = core
        self._kernels = kernels
        self._values = values
        self._held = held
        self._launches = launches
        self.options = options
        """What was asked for."""
        self._memory_bytes = memory_bytes
        self.delay_seed = 0
        """Other than 0, workers dawdle at random before items and signals, for tests."""
        places: dict[str, tuple[int, str]] = {}
        for launch in launches:
            places.setdefault(launch.kernel.digest, (len(places), launch.kernel.name))
        self._ops = [places[launch.kernel.digest][0] for launch in launches]
        self._op_names = [kernel for _, kernel in places.values()]
        self.deduped: Deduped = find_deduped(launches) if options.dedupe else all_run(launches)
        self.regions: Regions = find_regions(launches, self.deduped)
        self._compile_ns = 0
        self.engine = self._made()
        self._prover = Prover(launches, self.deduped.computed_by)
        self._proved = 0
        self._ran = False
        self._ran_with: Mapping[str, int | float] | None = None
        self._report: MegakernelReport | None = None
        if not self.engine.refresh():
            self._prove()
        self._planned_ns = time.perf_counter_ns() - began
        """Time of planning that belongs to the next run, with that of compiling."""
        self._plan_ns = 0
        self._is_compiled = cache.statistics.compilations > compilations
        """Whether something was compiled for the next run."""
        self._was_compiled = False

    def _made(self) -> CpuEngine | CudaEngine:
        options = self.options
        if self._device.kind == _CUDA:
            engine = CudaEngine(
                self._core,
                self._launches,
                self._kernels,
                self._ops,
                self.regions.joined,
                self._device,
                self._cache,
                deduped=self.deduped,
                where=f"plan {self._name}",
                workers=options.workers,
                trace=options.trace,
            )
            self._compile_ns += engine.compile_ns
            return engine
        return CpuEngine(
            self._core,
            self._launches,
            self._ops,
            self.regions.joined,
            self.deduped,
            options.workers,
            options.trace,
            self._held,
        )

    def _prove(self) -> None:
        """See that no worker waits for ever and no item races with another, at these values.

        Where the proof cannot follow why launches are joined, they are not.
        """
        while (breach := self._prover.breach(self.engine, self._values)) is not None:
            code, launch, other = breach
            if code != RACE or not self.regions.joined[launch]:
                raise InternalError(
                    f"plan {self._name}: MK{code}: {self._launches[launch]} beside launch {other} "
                    "cannot be run as it was planned; please report this"
                )
            detail = f"blocks beside those of launch {other}, at {dict(self._values)}"
            self.regions = self.regions.without(launch, detail)
            self.engine = self._made()
            self.engine.refresh()
        self._proved = self.engine.structure_version

    def run(self, stream: int, *, is_watched: bool = False) -> tuple[int, int, int]:
        """Run every item; return how many launches are done, an error's code, and which failed.

        On CUDA a run without a deadline is enqueued; `settle` tells what came of it.

        Args:
            stream: Of CUDA, where it is enqueued.
            is_watched: Whether it is recorded for `times`, and waited for. Default False.

        Raises:
            DeadlineReached: The deadline came first.
            LaunchError: `stop` was called, or the machine gives no threads.
            DeviceHung: An item has not returned two seconds after the deadline.
            PlanError: A launch has more blocks than a worker can count.
            InternalError: The tables could not be proved right. Nothing has run.
        """
        if self.engine.is_dead:
            raise self._hung("an earlier run left an item that has not returned")
        self._report, self._ran = None, False
        self.engine.set_trace(self.options.trace or is_watched)
        began = time.perf_counter_ns()
        problem = self.engine.refresh()
        if problem:
            raise refusal("MK105", f"plan {self._name}", problem)
        if self._proved != self.engine.structure_version:
            self._prove()
            self._planned_ns += time.perf_counter_ns() - began
        self._plan_ns = self._planned_ns - self._compile_ns
        self._planned_ns = self._compile_ns = 0
        self._was_compiled, self._is_compiled = self._is_compiled, False
        if self.options.lineage:  # a report may be made when the values are others
            self._ran_with = dict(self._values)
        self._ran = True
        try:
            outcome = self.engine.run(self.options.deadline_ns, self.delay_seed, stream)
        except BaseException as error:  # a handler of a signal raised
            if self.engine.is_dead:
                error.add_note(str(self._hung("an item has not returned")))
            raise
        if outcome["problem"]:
            self._ran = False
            raise LaunchError(f"nothing was run: {outcome['problem']}")
        return self.settle() if is_watched else self._ended(outcome)

    def settle(self) -> tuple[int, int, int]:
        """Wait for the last run; return and raise what `run` does."""
        return self._ended(self.engine.outcome()) if self._ran else (0, 0, -1)

    def _ended(self, outcome: dict[str, Any]) -> tuple[int, int, int]:
        if outcome["state"] == "hung":
            raise self._hung("an item has not returned")
        if outcome["state"] == "stopped":
            raise self._stopped(outcome)
        return outcome["done"], outcome["code"], outcome["where"]

    def times(self) -> list[tuple[int, int] | None]:
        """Return when each launch of the last run, a watched one, began and ended.

        Taken where items run, in ns of the host's clock; None of a launch that was not run.
        """
        records = self.engine.records()
        assert records is not None
        spans = spans_from_records(self.engine.progress(), records)
        count = len(self._launches)
        begin, end = np.full(count, np.iinfo(np.int64).max), np.full(count, -1, np.int64)
        np.minimum.at(begin, spans.task, spans.ready_ns)
        np.maximum.at(end, spans.task, spans.end_ns)
        began = self.engine.outcome()["begin_ns"]
        pairs = zip(begin.tolist(), end.tolist(), strict=True)
        return [None if last < 0 else (began + first, began + last) for first, last in pairs]

    def stop(self) -> None:
        """End the run that is under way in another thread, each worker after its item."""
        self.engine.stop()

    def take_stopped(self) -> int | None:
        """Return how many launches were finished when a signal ended a run; told once."""
        return self.engine.take_stopped()

    # ------------------------------------------------------------------------------------- words

    def failed_text(self) -> str:
        """Say which item of the last run faulted, and what was not run because of it."""
        outcome = self.engine.outcome()
        skipped = sum(is_skipped for _, is_skipped in self.engine.ends())
        words = f"item {outcome['block']}"
        if skipped:
            waits = "waits for it was" if skipped == 1 else "wait for it were"
            words += f", so that {counted(skipped, 'launch')} that {waits} not run"
        return words

    def _stopped(self, outcome: dict[str, Any]) -> LaunchError:
        items = outcome["items"] + outcome["remaining"]
        account = (
            f"{outcome['items']} of {items} items were executed and {outcome['remaining']} remain; "
            f"{outcome['done']} of {len(self._launches)} launches had finished, their results "
            "stay, and the report tells more"
        )
        if outcome["reason"] == "deadline":
            limit = self.options.max_wall_time
            return DeadlineReached(f"max_wall_time of {limit} s came first: {account}")
        return LaunchError(f"stop() ended the run: {account}")

    def _hung(self, what: str) -> DeviceHung:
        """Return the error of a worker that does not come back: its item, and who waits for it."""
        progress, tasks = self.engine.progress(), self.engine.tasks()
        stuck = [number for number, row in enumerate(progress) if row["state"] == _HUNG]
        waiting = [
            (number, row)
            for number, row in enumerate(progress)
            if row["state"] != _HUNG and row["missing"] != NO_TASK
        ]
        worker = stuck[0]
        at = progress[worker]
        number = int(at["task"])
        item = self._first_block(tasks[number], worker) + int(at["blocks"])
        words = [f"{what}: item {item} of {self._launches[number]}, on worker {worker}"]
        if self.options.max_wall_time is not None:
            words[0] += f", with max_wall_time={self.options.max_wall_time} s"
        words += [
            f"worker {other} waits for {self._launches[row['missing']]}, of which {row['arrived']} "
            f"of {tasks[row['missing']]['parts']} parts have come"
            for other, row in waiting
        ]
        words.append(self.engine.after_a_hang)
        missing = int(waiting[0][1]["missing"]) if waiting else None
        return DeviceHung("; ".join(words), number, item, worker, missing)

    def _first_block(self, task: Any, worker: int) -> int:
        part = (worker - int(task["first_worker"])) % self.engine.workers
        return int(task["blocks"]) * part // int(task["parts"])

    # ------------------------------------------------------------------------------------ report

    @property
    def report(self) -> MegakernelReport | None:
        """What the last run did, made when it is asked for; None before the first."""
        if self._report is None and self._ran:
            self._report = self._reported()
        return self._report

    def _reported(self) -> MegakernelReport:
        engine, outcome = self.engine, self.engine.outcome()
        tasks, done = engine.tasks(), engine.items_done()
        bricks = sorted({launch.brick for launch in self._launches})
        computed_by = np.array(self.deduped.computed_by)
        is_run = computed_by == np.arange(len(computed_by))
        columns = {
            "op": self._ops,
            "items": tasks["blocks"],
            "region": region_numbers(tasks)[computed_by],
            "alias": np.where(is_run, -1, computed_by),
            "brick": [bricks.index(launch.brick) for launch in self._launches],
            "layer": [-1 if each.layer is None else each.layer for each in self._launches],
            "done": done,
        }
        began = time.perf_counter_ns()
        flow, outputs, lineage_ns = None, None, None
        if self._ran_with is not None:
            flow, outputs = flow_of(self._launches, self.deduped.computed_by, self._ran_with)
            lineage_ns = time.perf_counter_ns() - began
        faults = engine.faults()
        codes = np.unique(faults["code"][faults["code"] != 0]).tolist()
        return MegakernelReport.of_program(
            name=self._name,
            device=self._device.name,
            ops=self._op_names,
            tasks=columns,
            progress=engine.progress(),
            wall_time_ns=self._plan_ns + outcome["end_ns"] - outcome["asked_ns"],
            bricks=bricks,
            records=engine.records(),
            faults=faults,
            fault_words={code: fault_words(code) for code in codes},
            waits=engine.waits(),
            flow=flow,
            outputs=outputs,
            telemetry={
                "resident_cache_hit": not self._plan_ns,
                **engine.telemetry(),  # of a device, tables may be placed anew for other reasons
                "compiled_cache_hit": not self._was_compiled,
                "sync_points": 1,
                "execution_mode": engine.execution_mode,
                "peak_memory_bytes": self._memory_bytes,
            },
            queue_plan_ns=self._plan_ns,
            queue_publish_ns=outcome["begin_ns"] - outcome["asked_ns"],
            backend_dispatch_ns=outcome["end_ns"] - outcome["begin_ns"],
            lineage_ns=lineage_ns,
            items_faulted=outcome["items"] - int(done[is_run].sum()),
            op_items=self._op_items(),
            began_unix_ns=time.time_ns() - (_core.monotonic_ns() - outcome["begin_ns"]),
        )

    def _op_items(self) -> tuple[int, ...] | None:
        """Return how many items of each op were executed; None where an engine cannot tell."""
        executed = self.engine.items_executed()
        if executed is None:
            return None
        sums = np.bincount(self._ops, executed, minlength=len(self._op_names))
        return tuple(sums.astype(np.int64).tolist())


_HUNG = 3
"""MegaState::Hung."""
_CUDA = 2
"""Kind of a device whose workers are blocks."""
