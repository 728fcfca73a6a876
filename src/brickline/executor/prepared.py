"""PreparedPlan: a plan compiled for a device, its memory placed, ready to run again and again.

A run takes changed variables and buffers by name; what does not change is not looked at. A run that
fails poisons the plan until `reset`: half of its results are new and half are old. How launches
are executed is a strategy of its own (`serial`, `parallel`, `graph`, `megakernel`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from brickline import _core
from brickline.buffers import Buffer, as_buffer
from brickline.cache import CachedKernel, KernelCache
from brickline.device.base import Device, fault_text, open_device
from brickline.errors import LaunchError, PlanError
from brickline.executor.graph import GraphExecutor
from brickline.executor.guarding import GuardedExecutor
from brickline.executor.megakernel.deduped import Deduped
from brickline.executor.megakernel.options import MegakernelOptions
from brickline.executor.megakernel.program import ProgramExecutor
from brickline.executor.megakernel.refusals import check_launches
from brickline.executor.megakernel.regions import Regions
from brickline.executor.memory import PlanMemory
from brickline.executor.options import check_options, check_watching
from brickline.executor.parallel import Choice, ParallelExecutor, StreamsExecutor
from brickline.executor.refusals import Refused, limit_numbers, refusal_text
from brickline.executor.rows import launch_rows, variable_rows
from brickline.executor.serial import SerialExecutor
from brickline.executor.watching import Watcher
from brickline.megakernel_report import MegakernelReport
from brickline.plan import Plan
from brickline.plan_arguments import checked_number
from brickline.plan_launches import FloatVariable, Launch, alignments, written_storages
from brickline.plan_words import check_has_launches
from brickline.symbolic_values import value_of

if TYPE_CHECKING:
    from brickline.profiler import BrickProfiler

EXECUTORS = ("serial", "parallel", "graph", "megakernel")
LOOK_AGAIN = 4096
"""Runs after which `parallel` tries again which way is faster."""


class Executor(Protocol):
    """A way to run all launches of a prepared plan."""

    def run(self, stream: int) -> tuple[int, int, int]:
        """Run, or enqueue; return how many launches are done, an error's code, and which failed."""


def prepare(
    plan: Plan,
    device: str | Device = "CPU",
    executor: str = "serial",
    *,
    bind: Mapping[str, Any] | None = None,
    cache: KernelCache | None = None,
    threads: int | None = None,
    checked: bool = False,
    profiler: BrickProfiler | None = None,
    fingerprints: bool = False,
    workers: int | None = None,
    max_wall_time: float | None = None,
    trace: bool = False,
    lineage: bool = False,
    dedupe: bool = True,
) -> PreparedPlan:
    """Compile every kernel of a plan, place its memory, and return what runs.

    Args:
        plan: What to run.
        device: ``"CPU"``, ``"CUDA:n"``, or ``"NULL"``, which checks and executes nothing.
        executor: "serial", "parallel", "megakernel" or, on CUDA, "graph".
        bind: Memory by the name of a buffer of the plan. Default none: allocated, and zero.
        cache: Where kernels are compiled. Default one in the user's cache directory.
        threads: Most threads of "parallel" on a CPU, or streams on CUDA. Default: all cores, 4
            streams.
        checked: Look for writes out of bounds after each launch; slow. Default False.
        profiler: Whom to tell of every launch. Default nobody.
        fingerprints: Whether the profiler also gets a fingerprint of every launch. Default False.
        workers: Of "megakernel": how many share the blocks of launches. Default: one a core.
        max_wall_time: Of "megakernel": seconds after which a run ends, between two items.
            Default None: when it is done.
        trace: Of "megakernel": whether the report has the times of every part of a launch.
            Default False.
        lineage: Of "megakernel": whether the report tells where outputs came from. Default False.
        dedupe: Of "megakernel": whether launches that compute the same into the same memory are
            run once, where their kernel is pure. Default True.

    Raises:
        PlanError: The plan has no launches, or something that it is given does not fit. What a
            megakernel refuses has a code, such as MK101.
        CompileError: A compiler refuses a source.
        DeviceError: The device is absent.
    """
    if executor not in EXECUTORS:
        raise PlanError(f"expected executor {', '.join(EXECUTORS)}, got {executor!r:.80}")
    check_has_launches(plan)
    check_options(f"plan {plan.name}", cache, checked, profiler, fingerprints)
    mega = MegakernelOptions.checked(
        f"plan {plan.name}",
        executor,
        workers=workers,
        max_wall_time=max_wall_time,
        trace=trace,
        lineage=lineage,
        dedupe=dedupe,
    )
    opened = open_device(device)
    if executor == "graph" and opened.kind != CUDA:
        raise PlanError(
            f"executor graph is CUDA's; {opened.name} runs plans with serial, parallel or "
            "megakernel"
        )
    if executor == "megakernel":
        check_launches(f"plan {plan.name}", plan.launches, opened.limits.shared_bytes)
    bound = {} if bind is None else bind
    made = PreparedPlan(plan, opened, executor, bound, cache, threads, checked, mega)
    if profiler is not None:
        made.watch(profiler, fingerprints=fingerprints)
    return made


CUDA = 2
"""Kind of a device with streams and graphs."""


class PreparedPlan:
    """A plan that runs on one device.

    Call it with what changes: variables by name, and buffers by name to use other memory from then
    on. On CUDA a run is enqueued; `read` and `synchronize` wait. Made by `Plan.prepare`.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        executor: str,
        bind: Mapping[str, Any],
        cache: KernelCache | None,
        threads: int | None,
        checked: bool,
        mega: MegakernelOptions,
    ) -> None:
        self.plan = plan
        self.device = device.name
        self.executor = executor
        self._device = device
        self._launches = plan.launches
        self.cache = KernelCache() if cache is None else cache
        """Where its kernels were compiled."""
        self._compilations = self.cache.statistics.compilations
        self._kernels = _compiled(self.cache, self._launches, device)
        """What keeps the code loaded."""
        self._memory = PlanMemory(
            plan.name,
            plan.storages,
            tuple(plan.variables),
            device,
            bind,
            alignments(self._launches),
            written_storages(self._launches),
        )
        self._names = tuple(plan.variables)
        self._values: dict[str, int | float] = dict(plan.defaults)
        self._lock = threading.Lock()
        self._poison: str | None = None
        self._runs = 0
        self._faults = _fault_words(device, len(self._launches))
        self._core = _core.PlanCore(
            kind=device.kind,
            number=device.number,
            context=self._kernels[0].program.context,
            variables=variable_rows(plan.variables.values()),
            storages=len(plan.storages),
            launches=launch_rows(self._launches, self._kernels, self._names, self._faults),
            limits=limit_numbers(device.limits),
        )
        for number, buffer in enumerate(self._memory.buffers):
            self._core.bind(number, buffer.address)
        self._set(self._values)
        self._run = self._strategy(executor, threads, checked, mega)
        self._watcher: Watcher | None = None

    def _strategy(
        self, executor: str, threads: int | None, checked: bool, mega: MegakernelOptions
    ) -> Executor:
        if checked:
            return GuardedExecutor(self._core, self._launches, self._memory, self._device)
        if executor == "graph":
            return GraphExecutor(self._core, self.plan.name)
        if executor == "megakernel" and self._device.kind:
            return self._program(mega)
        if executor == "parallel" and self._device.kind == CUDA:
            return StreamsExecutor(self._core, self._device, threads)
        if executor == "parallel" and self._device.kind:
            return ParallelExecutor(self._core, threads)
        return SerialExecutor(self._core)

    def _program(self, mega: MegakernelOptions) -> ProgramExecutor:
        return ProgramExecutor(
            self.plan.name,
            self._device,
            self.cache,
            self._core,
            self._launches,
            self._kernels,
            mega,
            self._values,
            sum(buffer.nbytes for buffer in self._memory.buffers),
            self._compilations,
            held=(self._kernels, self._memory),
        )

    # ------------------------------------------------------------------------------------- running

    def __call__(self, /, *unnamed: Any, stream: Any = None, **changes: Any) -> PreparedPlan:
        """Run every launch; on CUDA, enqueue them.

        Args:
            *unnamed: Nothing: everything is given by name.
            stream: The stream to launch into. Default torch's current one, on CUDA.
            **changes: Variables by name, and buffers by name. They stay until they change again.

        Returns:
            The plan itself, so that ``prepared(n=7).read("y")`` reads a result.

        Raises:
            PlanError: A name is unknown, memory does not fit or moved, or the plan is poisoned.
            SymbolicError: A value is out of its bounds. Nothing has run then.
            LaunchError: A launch failed: which one, and what had finished. The plan is poisoned.
            DeadlineReached: max_wall_time came first; `report` is partial. The plan is poisoned.
            DeviceHung: An item has not returned two seconds after max_wall_time. The plan does
                not run again.
            KeyboardInterrupt: Or what else the handler of a signal raises. No launch begins any
                more, and the plan is poisoned.
        """
        if unnamed:
            raise PlanError(
                f"plan {self.plan.name}: expected variables and buffers by name, as in "
                f"prepared({next(iter(self._names), 'x')}=...), got {unnamed[0]!r:.80} without one"
            )
        with self._running():
            if changes:
                self._change(changes)
            self._memory.check_moved()
            handle = self._device.stream_handle(stream)
            watcher = self._watcher
            try:
                outcome = (
                    self._run.run(handle) if watcher is None else watcher.run(handle, self._runs)
                )
            except BaseException as error:
                # A second signal may come while the text is made: Python looks for them at calls.
                self._poison = f"plan {self.plan.name} failed"
                self._poison = self._stopped_text(error)
                raise
            self._runs += 1
            if not self._runs % LOOK_AGAIN and isinstance(self._run, Choice):
                self._run.look_again()
            if outcome[1]:
                self._fail(*outcome)
        return self

    @contextmanager
    def _running(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise PlanError(
                f"plan {self.plan.name} is running in another thread; prepare it once for each"
            )
        try:
            if self._poison is not None:
                raise PlanError(f"{self._poison}{self._remedy}")
            yield
        finally:
            self._lock.release()

    def _change(self, changes: Mapping[str, Any]) -> None:
        values = {name: value for name, value in changes.items() if name in self._values}
        arrays = {name: array for name, array in changes.items() if name not in values}
        buffers = self._memory.check_bindings(arrays)
        if values:
            self._set(values)
        for name, buffer in buffers.items():  # all or nothing: two may change places
            self._core.bind(*self._memory.rebind(name, arrays[name], buffer))

    def _set(self, changes: Mapping[str, Any]) -> None:
        where = f"plan {self.plan.name}"
        values = dict(self._values)
        for name in changes:
            variable = self.plan.variables[name]
            if isinstance(variable, FloatVariable):
                values[name] = checked_number(changes[name], f"{where}, {name}")
            else:
                values[name] = value_of(variable, changes, where)
        refused = self._core.set([values[name] for name in self._names])
        if refused is not None:
            found = Refused(*refused)
            launch = self._launches[found.launch]
            words = refusal_text(launch, found, values, self._device.limits)
            raise PlanError(f"{where} on {self.device}, {launch}: {words}")
        self._values.update(values)  # a megakernel looks at them

    def _fail(self, done: int, code: int, number: int) -> None:
        launch = self._launches[number] if number >= 0 else None
        if self._core.failed_call:
            reason = f"CUDA's driver refused: {self._core.driver_text(code)}"
        else:
            reason = f"reported {fault_text(code)}"
        place = str(launch or "a launch")
        if isinstance(self._run, ProgramExecutor):
            reason += f" at {self._run.failed_text()}"
        self._poison = f"plan {self.plan.name} failed at {place}, which {reason}"
        raise LaunchError(
            f"{self._poison}; {self._finished_text(done)}. Call reset() before running it again"
        )

    @property
    def _remedy(self) -> str:
        """What makes a plan that failed run again; nothing does where an item never returned."""
        run = self._run
        if not isinstance(run, ProgramExecutor) or not run.engine.is_dead:
            return "; call reset() to run it again"
        after = run.engine.after_a_hang
        return "" if after in str(self._poison) else f"; an item has not returned: {after}"

    def _stopped_text(self, error: BaseException) -> str:
        """Return what stopped a run: an exception of Python's."""
        run = self._run if isinstance(self._run, ProgramExecutor) else self._core
        done = run.take_stopped()
        reason = str(error) or type(error).__name__
        if done is None:
            return f"plan {self.plan.name} failed: {reason}"
        return f"plan {self.plan.name} was stopped by {reason}; {self._finished_text(done)}"

    def _finished_text(self, done: int) -> str:
        return f"{done} of {len(self._launches)} launches had finished, their results stay"

    def reset(self) -> None:
        """Let a plan that failed run again, from its first launch; memory is left as it is."""
        with self._lock:
            self._poison = None
            self._runs = 0
            if self._faults is not None:
                zeros = np.zeros(self._faults.shape, np.uint32)
                self._device.copy(self._faults, as_buffer(zeros))

    def synchronize(self) -> None:
        """Wait for everything that was run.

        Raises:
            LaunchError: A kernel reported a fault on the device: which launch. The plan is
                poisoned.
        """
        if isinstance(self._run, ProgramExecutor):
            self._settle(self._run)
            return
        self._device.synchronize()
        if self._faults is None:
            return
        words = self._device.to_numpy(self._faults)
        if words.any():
            number = int(np.flatnonzero(words)[0])
            self._fail(number, int(words[number]), number)

    def _settle(self, run: ProgramExecutor) -> None:
        """Wait for a megakernel, and raise what became of it unless that is known."""
        if self._poison is not None:
            return
        try:
            outcome = run.settle()
        except LaunchError as error:
            self._poison = self._stopped_text(error)
            raise
        if outcome[1]:
            self._fail(*outcome)

    def stop(self) -> None:
        """End the run that is under way in another thread, between two items.

        The run raises LaunchError, and the plan is poisoned until `reset`. Where nothing runs,
        nothing happens.

        Raises:
            PlanError: The executor is another one than "megakernel".
        """
        if not isinstance(self._run, ProgramExecutor):
            raise PlanError(
                f"plan {self.plan.name}: stop() is for executor megakernel, got {self.executor}; "
                "prepare it so, or end a run with Ctrl-C"
            )
        self._run.stop()

    @property
    def report(self) -> MegakernelReport | None:
        """What the last run did, as a megakernel; None before the first, or of other executors."""
        return self._run.report if isinstance(self._run, ProgramExecutor) else None

    @property
    def deduped(self) -> Deduped | None:
        """Which launches are not run because another computes the same; None of other executors."""
        return self._run.deduped if isinstance(self._run, ProgramExecutor) else None

    @property
    def regions(self) -> Regions | None:
        """Which launches workers run without a wait in between; None of other executors."""
        return self._run.regions if isinstance(self._run, ProgramExecutor) else None

    # -------------------------------------------------------------------------------------- memory

    @property
    def launches(self) -> Sequence[Launch]:
        """The launches that were prepared, in order; the plan itself may have grown since."""
        return self._launches

    @property
    def kernels(self) -> Sequence[CachedKernel]:
        """The compiled kernel of each launch."""
        return self._kernels

    @property
    def values(self) -> Mapping[str, int | float]:
        """The values of the variables at the next run."""
        return dict(self._values)

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """The memory of each buffer of the plan, by name."""
        return self._memory.by_name()

    def write(self, name: str, array: Any) -> None:
        """Copy an array into a buffer of the plan.

        Raises:
            PlanError: There is no such buffer.
            LaunchError: The array has another size or dtype.
        """
        self._memory.write(name, array)

    def read(self, name: str) -> NDArray[Any]:
        """Wait, and return a copy of a buffer of the plan.

        Raises:
            PlanError: There is no such buffer.
            LaunchError: A kernel reported a fault.
        """
        storage = self._memory.storage(name)
        self._memory.check_moved()
        self.synchronize()
        return self._device.to_numpy(self._memory.buffers[storage.number])

    # ------------------------------------------------------------------------------------ watching

    def watch(self, profiler: BrickProfiler | None, *, fingerprints: bool = False) -> None:
        """Tell a profiler of every launch from now on; None stops it.

        Args:
            profiler: It gets a brick for each launch and, where its graph is enabled, a node with
                the launches that it waited for.
            fingerprints: Whether it also gets a trace of each launch with fingerprints of what
                went in and came out, so that two runs can be compared. Default False.

        Raises:
            PlanError: It is no profiler, there is none for the fingerprints, or the plan is
                checked. Who watches stays.
        """
        checked = isinstance(self._run, GuardedExecutor)
        check_watching(f"plan {self.plan.name}", profiler, fingerprints, checked=checked)
        self._watcher = None if profiler is None else Watcher(self, profiler, fingerprints)

    def __repr__(self) -> str:
        state = ", poisoned" if self._poison else ""
        return f"<PreparedPlan {self.plan.name} on {self.device}, {self.executor}{state}>"


def _compiled(cache: KernelCache, launches: Any, device: Device) -> tuple[CachedKernel, ...]:
    known: dict[str, CachedKernel] = {}
    for launch in launches:
        if launch.kernel.digest not in known:
            known[launch.kernel.digest] = cache.get_or_compile(launch.kernel, device)
    return tuple(known[launch.kernel.digest] for launch in launches)


def _fault_words(device: Device, count: int) -> Buffer | None:
    """Return a word for each launch, where the device's own one would not tell them apart."""
    if device.kind != CUDA:
        return None
    words = device.allocate((count,), "u32")
    device.copy(words, as_buffer(np.zeros(count, np.uint32)))
    return words
