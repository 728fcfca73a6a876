"""TracedLaunches: the calls of `BrickProfiler` that record launches and compare them.

`traces` writes, `comparison` reads and compares; what reads tensors is loaded when it is first
used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from brickline.checksums import DivergenceInfo, KernelChecksum
from brickline.errors import UsageError
from brickline.runs import Run
from brickline.spools import Part
from brickline.timers import checked_count
from brickline.traces import KernelTrace, Traces

if TYPE_CHECKING:
    from brickline.comparison.traces.sides import TraceSide
    from brickline.device.base import Clock
    from brickline.verdict import DivergenceReport


class TracedLaunches:
    """What a profiler knows of launches; a base of `BrickProfiler`, never used alone."""

    __slots__ = ()

    if TYPE_CHECKING:
        name: str
        traces: Traces
        _clock: Clock
        _report: DivergenceReport | None

        def is_enabled(self) -> bool: ...  # noqa: D102
        def _now_ns(self) -> int: ...
        def _spend(self, ns: int, /) -> None: ...
        def _require_run(self) -> None: ...
        def _part(self) -> Part | None: ...

    def add_trace(self, trace: KernelTrace) -> None:
        """Append a kernel launch to the run, which is made if there is none yet.

        What is handed over is kept whether or not the profiler is enabled: that says what it
        measures by itself.

        Raises:
            UsageError: if it is no `KernelTrace`, or the profiler was closed.
        """
        if not isinstance(trace, KernelTrace):
            raise UsageError(f"trace: expected a KernelTrace, got {trace!r:.60}")
        self._require_run()
        self.traces.add(trace)

    def trace(
        self,
        name: str,
        layer: int | None = None,
        position: int = 0,
        *,
        inputs: Any = (),
        outputs: Any = (),
        params: str | Mapping[str, Any] = "",
        time_us: float | None = None,
        backend: str | None = None,
    ) -> KernelTrace | None:
        """Append a launch of your own kernel, with checksums and fingerprints of its tensors.

        Called after the launch, and with `inputs` that it has not changed. Tensors on a device are
        read there, and the host waits for them.

        Args:
            name: Of the kernel.
            layer: Default None: outside layers.
            position: Number of the pass, or place in the sequence. Default 0.
            inputs: A tensor or several: torch, NumPy, or what speaks DLPack.
            outputs: As `inputs`.
            params: Launch parameters: JSON text, or a mapping.
            time_us: How long it took. Default None: not known.
            backend: Who executed it. Default: where its tensors lie, ``"CPU"`` or ``"CUDA"``.

        Returns:
            The launch as it is compared, or None when disabled.

        Raises:
            UsageError: if something given is of another kind, or a tensor cannot be read.
        """
        if not self.is_enabled():
            return None
        from brickline.launch_traces import write_launch

        ended_ns = self._now_ns()
        trace = write_launch(
            self.traces,
            ended_ns,
            name=name,
            layer=layer,
            position=position,
            inputs=inputs,
            outputs=outputs,
            params=params,
            time_us=time_us,
            backend=backend,
        )
        self._spend(self._now_ns() - ended_ns)
        return trace

    def kernel_traces(self) -> list[KernelTrace]:
        """Return the launches recorded up to now, in the order in which they ended."""
        return self._kernel_traces()

    def traces_for_kernel(self, kernel_name: str) -> list[KernelTrace]:
        """Return the launches of one kernel."""
        return [each for each in self._kernel_traces() if each.kernel_name == kernel_name]

    def traces_for_layer(self, layer_idx: int | None) -> list[KernelTrace]:
        """Return the launches within one layer; those outside layers for None."""
        wanted = -1 if layer_idx is None else checked_count("layer_idx", layer_idx, 2**31 - 1)
        return self._kernel_traces(wanted)

    @property
    def total_time_us(self) -> float:
        """How long the launches recorded up to now took together, as far as they were timed."""
        part = self._part()
        if part is None:
            return 0.0
        times = part.times_us
        return math.fsum(times[times == times])  # without those that are not known

    def compare(self, reference: TracedLaunches | Run | Iterable[KernelTrace]) -> DivergenceReport:
        """Hold this profiler's launches, the candidate, against a reference's.

        Launches are matched by kernel name, layer and position, and compared bit by bit, as far
        as checksums and fingerprints saw their tensors; `brickline.compare` also tells rounding
        from errors.

        Args:
            reference: Another profiler, a run, or traces.

        Raises:
            UsageError: if the reference is of another kind.
        """
        from brickline.comparison.traces.comparison import compare_traces

        return compare_traces(self._trace_side(), _side_of(reference))

    def compare_and_mark(
        self, reference: TracedLaunches | Run | Iterable[KernelTrace]
    ) -> DivergenceReport:
        """Compare, and keep the outcome for `is_diverged` and `divergence_diagnosis`."""
        self._report = self.compare(reference)  # type: ignore[misc]  # a slot of the profiler
        return self._report

    def is_diverged(self) -> bool:
        """Whether the last `compare_and_mark` found a difference."""
        return self._report is not None and self._report.first_divergent_kernel is not None

    @property
    def diverged(self) -> bool:
        """The same as an attribute."""
        return self.is_diverged()

    @property
    def divergence_diagnosis(self) -> str:
        """What the last `compare_and_mark` found; empty before the first."""
        return "" if self._report is None else self._report.diagnosis

    def record_checksum(self, name: str, layer_idx: int | None, position: int, data: Any) -> None:
        """Append a launch of which only the checksum of its output is known; see `fnv1a_f32`."""
        if self.is_enabled():
            backend = self._clock.name.partition(":")[0]
            known = KernelTrace(name, layer_idx, position, backend)
            self.traces.add(known.with_output_checksum(data))

    def get_checksums(self) -> list[KernelChecksum]:
        """Return the output checksums of all launches since `reset_checksums`."""
        part = self._part()
        if part is None:
            return []
        rows = part.traces
        chosen = (rows["has_checksums"] & 2 != 0) & (rows["trace"] > self.traces.checksums_from)
        from brickline.comparison.traces.sides import traces_from_part

        return [
            KernelChecksum(
                each.kernel_name, each.layer_idx, each.position, each.output_checksum or 0
            )
            for each in traces_from_part(part, chosen)
        ]

    def find_divergence(
        self, reference: TracedLaunches | Iterable[KernelChecksum]
    ) -> DivergenceInfo | None:
        """Return the first checksum that is not that of the reference.

        None says that no difference was found among the launches that both have, be it none at
        all; `compare` says what was compared.
        """
        from brickline.comparison.traces.comparison import first_divergence

        known = reference.get_checksums() if isinstance(reference, TracedLaunches) else reference
        return first_divergence(self.get_checksums(), known)

    def reset_checksums(self) -> None:
        """Leave what is recorded so far out of `get_checksums` and `find_divergence`."""
        self.traces.forget_checksums()

    def _kernel_traces(self, layer: int | None = None) -> list[KernelTrace]:
        from brickline.comparison.traces.sides import traces_from_part

        part = self._part()
        if part is None:
            return []
        return traces_from_part(part, None if layer is None else part.traces["layer"] == layer)

    def _trace_side(self) -> TraceSide:
        from brickline.comparison.traces.sides import side_from_parts

        part, note = self._part(), ""
        if not self.is_enabled() and part is None:
            note = f"the profiler {self.name!r} was never enabled, so it recorded nothing"
        return side_from_parts([] if part is None else [part], self.name, note)


def _side_of(reference: TracedLaunches | Run | Iterable[KernelTrace]) -> Any:
    from brickline.comparison.traces.sides import side_from_parts

    if isinstance(reference, TracedLaunches):
        return reference._trace_side()
    if isinstance(reference, Run):
        return side_from_parts(reference.parts, reference.name)
    return reference
