"""What a profiler learns of a prepared plan: bricks, nodes with their dependencies, fingerprints.

Launches are run one at a time inside their bricks; those of a parallel run are timed by the core
and told afterwards, and those of a CUDA graph are captured once more with the profiler's events
between them. A megakernel is run as it is: its workers take the times, and it is waited for. With
fingerprints every launch is run by itself, waited for, and its memory read.

A traced launch has as its params::

    {"level": "launch", "plan": "mlp", "brick": "Residual#2", "kernel": "residual_1f0c93aa",
     "reads": [["a", "x"], ["b", "hidden"]], "writes": [["y", "y"]],
     "entering": ["a"], "results": ["y"], "settings": {"n": 7}}

`brick` is numbered where a layer has several of one name, so that no two launches share it. `reads`
and `writes` have each argument with its buffer, in the order of the trace's inputs and outputs;
`entering` what no launch before it writes, `results` what no launch after it reads.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from brickline.buffers import Buffer
from brickline.device.base import Device, Event, open_device
from brickline.errors import DeviceError
from brickline.executor.megakernel.program import ProgramExecutor
from brickline.executor.megakernel.telling import tell_profiler
from brickline.graph import EdgeKind, KernelRegistry, TransferDirection
from brickline.kernel import Param
from brickline.launch_traces import write_launch
from brickline.plan_buffers import PlanBuffer
from brickline.plan_launches import Launch, entering, evaluated, launch_names, results
from brickline.symbolic import Expr

if TYPE_CHECKING:
    from brickline.executor.prepared import PreparedPlan
    from brickline.profiler import BrickProfiler

_Result = TypeVar("_Result")
Outcome = tuple[int, int, int]
Times = Sequence[tuple[int, int] | None]
"""When each launch began and ended, in ns of the host's clock; None: not known, or not run."""


class Watcher:
    """Runs a prepared plan for a profiler.

    Args:
        prepared: What is run.
        profiler: Who is told.
        fingerprints: Whether launches are traced with their tensors.
    """

    def __init__(self, prepared: PreparedPlan, profiler: BrickProfiler, fingerprints: bool) -> None:
        self._prepared = prepared
        self._profiler = profiler
        self._fingerprints = fingerprints
        self._core = prepared._core
        run, is_whole = prepared._run, not fingerprints
        self._program = run if isinstance(run, ProgramExecutor) and is_whole else None
        """What runs all launches as one program; None where they are run by themselves."""
        is_parallel = prepared.executor == "parallel" and prepared.device == "CPU"
        self._overlaps = self._program is not None or (is_parallel and is_whole)
        """Whether launches are told after a run, with the times that were taken within it."""
        self._launches: Sequence[Launch] = prepared._launches
        hashes = {each.kernel.source for each in self._launches}
        self._hashes = {source: KernelRegistry.hash_source(source) for source in hashes}
        self._handles = [self._handle(launch) for launch in self._launches]
        self._varying = [
            launch.number
            for launch in self._launches
            if any(isinstance(each, Expr) for each in launch.work)
        ]
        self._facts = _facts_of(prepared.plan.name, self._launches) if fingerprints else []
        self._ordinals = _ordinals_of(self._launches)
        self._drawn: list[int | None] = []
        """The node of each launch's brick; None where the profiler drew none."""
        self._captured: int | None = None
        self._drawn_transfers = False
        self._execution_ns = 0
        """How long the plan itself has taken in the run under way."""

    def _handle(self, launch: Launch) -> Any:
        flops, moved = (evaluated(each, self._prepared.values) for each in launch.work)
        return self._profiler.brick(
            launch.brick, launch.layer, flops=float(flops or 0), bytes=moved or 0
        )

    def run(self, stream: int, position: int) -> Outcome:
        """Run every launch and tell the profiler; arguments and result are an executor's."""
        if not self._profiler.is_enabled():
            return self._prepared._run.run(stream)
        now = self._profiler._now_ns
        began_ns, self._execution_ns = now(), 0
        try:
            return self._run(stream, position)
        finally:
            self._profiler._spend(now() - began_ns - self._execution_ns)

    def _executed(self, call: Callable[..., _Result], *args: Any, **options: Any) -> _Result:
        """Call what executes the plan, or waits for it: the rest of a run is spent on watching."""
        began_ns = self._profiler._now_ns()
        try:
            return call(*args, **options)
        finally:
            self._execution_ns += self._profiler._now_ns() - began_ns

    def _run(self, stream: int, position: int) -> Outcome:
        for number in self._varying:
            self._handles[number] = self._handle(self._launches[number])
        draw = self._profiler.is_graph_enabled()
        self._core.set_timed(draw or self._overlaps or self._fingerprints)
        self._drawn = []
        self._profiler._take_drawn()
        outcome = self._ran(stream, position)
        if outcome[1]:
            return outcome
        times = self._times() if draw or self._overlaps else ()
        if self._overlaps:
            self._tell_times(times)
        if self._program is not None:
            self._tell_parts(self._program, position)
        if draw:
            self._draw(times)
        return outcome

    def _ran(self, stream: int, position: int) -> Outcome:
        if self._fingerprints:
            return self._traced(stream, position)
        if self._program is not None:
            return self._executed(self._program.run, stream, is_watched=True)
        if self._overlaps:
            return self._executed(self._prepared._run.run, stream)
        if self._prepared.executor == "graph":
            return self._replayed(stream)
        return self._one_by_one(stream)

    def _times(self) -> Times:
        """Return when each launch of the last run began and ended, where that is known."""
        if self._program is not None:
            return self._program.times()
        if self._prepared.device == "CPU":
            return [(began, ended) for _, began, ended in self._core.times()]
        return [None] * len(self._launches)

    def _one_by_one(self, stream: int) -> Outcome:
        outcome = (0, 0, -1)
        for number, handle in enumerate(self._handles):
            with handle:
                outcome = self._executed(self._core.run_serial, stream, number, number + 1)
            self._note_brick()
            if outcome[1]:
                return number, outcome[1], number
        return len(self._handles), 0, outcome[2]

    def _note_brick(self) -> None:
        """Note which node the brick that was just left has become."""
        if self._profiler.is_graph_enabled():
            self._drawn.append(self._profiler._take_drawn())

    def _tell_times(self, times: Times) -> None:
        for launch, time in zip(self._launches, times, strict=True):
            if time is None:
                continue
            began, ended = time
            flops, moved = (evaluated(each, self._prepared.values) for each in launch.work)
            self._profiler.timers.record_elapsed(
                launch.brick,
                max(ended - began, 0),
                layer=launch.layer,
                bytes_in=moved or 0,
                flops=float(flops or 0),
            )

    def _tell_parts(self, program: ProgramExecutor, position: int) -> None:
        """Tell what each worker of a megakernel did, where that was asked for."""
        if program.options.trace and program.report is not None:
            tell_profiler(program.report, self._profiler, position)

    def _replayed(self, stream: int) -> Outcome:
        """Replay a graph in which the profiler's events stand between the launches."""
        if self._captured is None:
            self._captured = self._capture()
        with self._profiler.replay(self._captured):
            return self._executed(self._core.run_captured, stream)

    def _capture(self) -> int:
        device = self._prepared._device
        with device.capture_stream() as stream, self._profiler.capture() as number:
            problem = self._core.begin_capture(stream)
            try:
                for at, handle in enumerate(self._handles):
                    with handle:
                        problem = problem or self._core.capture_launch(at)
            finally:
                problem = self._core.end_capture() or problem
        if problem:
            raise DeviceError(f"plan {self._prepared.plan.name}: cannot be captured: {problem}")
        return number

    # ------------------------------------------------------------------------------- fingerprints

    def _traced(self, stream: int, position: int) -> Outcome:
        device, values = self._prepared._device, self._prepared.values
        events = (device.event(), device.event()) if device.name.startswith("CUDA") else None
        for launch, handle, facts in zip(self._launches, self._handles, self._facts, strict=True):
            given = list(launch.buffers())
            inputs = [
                self._tensor(launch, param, each, changes=param.access.writes)
                for param, each in given
                if param.access.reads
            ]
            with handle:
                if events is not None:
                    events[0].record(stream)
                outcome = self._executed(
                    self._core.run_serial, stream, launch.number, launch.number + 1
                )
                if events is not None:
                    events[1].record(stream)
            self._note_brick()
            if outcome[1]:
                return launch.number, outcome[1], launch.number
            self._executed(device.synchronize)
            ended_ns, time_us = self._time_of(launch.number, events)
            write_launch(
                self._profiler.traces,
                ended_ns,
                name=launch.kernel.name,
                layer=launch.layer,
                position=position,
                inputs=inputs,
                outputs=[
                    self._tensor(launch, param, each)
                    for param, each in given
                    if param.access.writes
                ],
                params={**facts, "settings": launch.scalars(values)},
                time_us=time_us,
                backend=self._prepared.device.partition(":")[0],
                slot=handle.slot,
                ordinal=self._ordinals[launch.number],
                kernel_hash=self._hashes[launch.kernel.source],
            )
        return len(self._launches), 0, -1

    def _time_of(self, number: int, events: tuple[Event, Event] | None) -> tuple[int, float | None]:
        """Return when a launch ended and how long it took, on a device between two events."""
        if events is not None:
            return self._profiler._now_ns(), events[1].ns_since(events[0]) / 1e3
        if self._prepared.device != "CPU":
            return self._profiler._now_ns(), None
        ((_, began, ended),) = self._core.times(number, number + 1)
        return ended, (ended - began) / 1e3

    def _tensor(
        self, launch: Launch, param: Param, given: PlanBuffer, *, changes: bool = False
    ) -> Buffer | NDArray[Any]:
        """Return what a launch is given, at the values of this run; a copy if that changes.

        A strided view is copied to the host: its elements alone are traced.
        """
        values, device = self._prepared.values, self._prepared._device
        shape = [evaluated(size, values) for size in given.shape]
        strides = launch.strides(param, values)
        if strides is None:
            buffer = self._buffer(given, shape)
            return _kept(device, buffer) if changes else buffer
        last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
        stretch = device.to_numpy(self._buffer(given, [0 if 0 in shape else last + 1]))
        steps = [step * given.itemsize for step in strides]
        return np.lib.stride_tricks.as_strided(stretch, shape, steps, writeable=False)

    def _buffer(self, given: PlanBuffer, shape: Sequence[int]) -> Buffer:
        """Return memory of the plan from a buffer's first element on."""
        whole = self._prepared._memory.buffers[given.storage.number]
        kind = Buffer if self._prepared.device == "CPU" else _OnDevice
        return kind.at_address(
            whole.address + given.offset,
            shape,
            given.dtype,
            kind=whole.kind,
            number=whole.number,
            owner=whole,
        )

    # -------------------------------------------------------------------------------------- graph

    def _draw(self, times: Times) -> None:
        """Add a kernel for each launch to its brick, and an edge for each that it waited for.

        One that was not run has no time, and follows the one that computed its values. A brick that
        the profiler did not draw, as one whose time was told after the run, is added as well.
        """
        graph, prepared = self._profiler.graph, self._prepared
        if not self._drawn_transfers:
            self._drawn_transfers = True
            for copy in prepared._memory.transfers:
                to_device = copy.target != "CPU"
                graph.add_transfer(
                    f"{copy.source}:{copy.name}",
                    copy.target,
                    copy.nbytes,
                    TransferDirection.HOST_TO_DEVICE
                    if to_device
                    else TransferDirection.DEVICE_TO_HOST,
                )
        nodes: list[int] = []
        bricks = self._drawn or [None] * len(self._launches)
        for launch, drawn, time in zip(self._launches, bricks, times, strict=True):
            sizes = [evaluated(size, prepared.values) for size in launch.sizes]
            span = {} if time is None else {"timing_ns": max(time[1] - time[0], 0)}
            span |= {} if time is None else {"start_ns": time[0]}
            brick = drawn
            if brick is None:
                brick = graph.record_brick(
                    launch.brick, layer=launch.layer, sequence=not self._overlaps, **span
                )
            nodes.append(
                graph.add_kernel(
                    launch.kernel.name,
                    self._hashes[launch.kernel.source],
                    tuple(sizes[:3]),
                    tuple(sizes[3:6]),
                    sizes[6],
                    **span,
                )
            )
            graph.add_edge(brick, nodes[-1], EdgeKind.LAUNCHES)
            for earlier in self._waits(launch):
                graph.add_dependency(nodes[earlier], nodes[-1])

    def _waits(self, launch: Launch) -> Sequence[int]:
        program = self._program
        if program is None or program.deduped.is_run(launch.number):
            return launch.waits_for
        return [program.deduped.computed_by[launch.number]]


class _OnDevice(Buffer):
    """Memory of a device that is traced: a checksum may have its first values."""

    __slots__ = ()

    def first_values(self, count: int) -> NDArray[Any]:
        """Return up to so many values from its beginning."""
        count = min(math.prod(self.shape), count)
        first = Buffer.at_address(
            self.address, (count,), self.dtype, kind=self.kind, number=self.number, owner=self
        )
        return open_device(self.device).to_numpy(first)


def _facts_of(plan: str, launches: Sequence[Launch]) -> list[dict[str, Any]]:
    """Return what a trace says of each launch, whatever the values of a run."""
    first = entering(launches)
    last = {(launch.number, param.name) for launch, param, _ in results(launches)}
    found = []
    for launch, brick in zip(launches, launch_names(launches), strict=True):
        named = [(param, (param.name, buffer.name)) for param, buffer in launch.buffers()]
        numbered = [(launch.number, param.name) for param, _ in named]
        found.append(
            {
                "level": "launch",
                "plan": plan,
                "brick": brick,
                "kernel": launch.kernel.short,
                "reads": [names for param, names in named if param.access.reads],
                "writes": [names for param, names in named if param.access.writes],
                "entering": [place[1] for place in numbered if place in first],
                "results": [place[1] for place in numbered if place in last],
            }
        )
    return found


def _ordinals_of(launches: Sequence[Launch]) -> list[int]:
    """Return of each launch how many before it have its kernel's name and its layer."""
    seen: Counter[tuple[str, int | None]] = Counter()
    found = []
    for launch in launches:
        found.append(seen[launch.kernel.name, launch.layer])
        seen[launch.kernel.name, launch.layer] += 1
    return found


def _kept(device: Device, buffer: Buffer) -> Buffer:
    """Return a copy of what a launch is about to change."""
    copy = device.allocate(buffer.shape, buffer.dtype)
    if buffer.nbytes:
        device.copy(copy, buffer)
    return type(buffer).at_address(
        copy.address, copy.shape, copy.dtype, kind=copy.kind, number=copy.number, owner=copy
    )
