"""BrickProfiler: time, tiles, graph and traces of model work, into a run on disk.

A facade over `.timers`, `.tiles`, `.graph` and `.traces`. It owns the run's life (opening, forking,
closing, saving); measuring is the native core's, reading that of `recorded_bricks` and
`traced_launches`, and of devices it knows `device.base` alone.
"""

from __future__ import annotations

import atexit
import importlib
import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from brickline import _core, abi
from brickline.bricks import BrickId
from brickline.device.base import Sampling, SyncMode, open_clock
from brickline.errors import CountError, RunError, UsageError
from brickline.graph import ExecutionGraph
from brickline.measurement_cost import EntryCosts, entry_costs
from brickline.peaks import load_peaks
from brickline.recorded_bricks import RecordedBricks
from brickline.runs import RunWriter
from brickline.spools import Part, read_part
from brickline.tiles import Tiles
from brickline.timers import TimerCalls, Timers, checked_count, checked_flag
from brickline.traced_launches import TracedLaunches
from brickline.traces import Traces

if TYPE_CHECKING:
    from brickline.verdict import DivergenceReport

RUN_VARIABLE = "BRICKLINE_RUN"
"""Set by `brickline run`: every profiler records into the run that it names."""

RECORDS_PER_STEP = 1024
"""Room kept for each step of a timeline; longer steps make the timeline shorter."""

_core.set_vocabulary(
    [(brick.label, int(brick.category), (brick.label, *brick.aliases)) for brick in BrickId.ALL]
)


class BrickProfiler(_core.ProfilerCore, RecordedBricks, TimerCalls, TracedLaunches):
    """Measures bricks; disabled by default, and then free.

    Args:
        name: What the run is called in reports.
        enabled: Record from the start. Default False.
        device: Whose clock times bricks: ``"CPU"`` (default), ``"CUDA:n"``, or ``"NULL"``, whose
            time moves only by `advance`.
        stream: The stream that bricks run on. Default: torch's current one at each brick.
        sync_mode: When the host waits for the device; see `SyncMode`. Default DEFERRED.
        sampling: Which steps and layers are timed. Default: all on a CPU, every 128th step on CUDA.
        path: Where the run goes. Default: the user's state directory, and then it is removed at
            exit unless `save` is called.
        overwrite: Replace a run at `path`. Default False.
        timeline_steps: Keep every entry of about this many last steps. Default 0: statistics only,
            whose size does not grow with time.
        graph: Draw each brick into the execution graph. Default False: it takes nothing.

    Example:
        >>> profiler = BrickProfiler("decode", enabled=True)
        >>> with profiler.step(tokens=1, phase="decode"), profiler.brick(BrickId.RMS_NORM, layer=0):
        ...     pass
        >>> profiler.brick_stats(BrickId.RMS_NORM).count
        1
    """

    __slots__ = (
        "_clock",
        "_facts",
        "_final",
        "_graph",
        "_graph_enabled",
        "_overwrite",
        "_path",
        "_rank",
        "_report",
        "_spool",
        "_timeline_steps",
        "_writer",
        "name",
        "sampling",
        "sync_mode",
        "tiles",
        "timers",
        "traces",
    )

    def __init__(
        self,
        name: str = "profile",
        *,
        enabled: bool = False,
        device: str = "CPU",
        stream: Any = None,
        sync_mode: SyncMode | str = SyncMode.DEFERRED,
        sampling: Sampling | None = None,
        path: str | os.PathLike[str] | None = None,
        overwrite: bool = False,
        timeline_steps: int = 0,
        graph: bool = False,
    ) -> None:
        if not isinstance(name, str):
            raise UsageError(f"name: expected a str, got {type(name).__name__}")
        if name.encode("utf-8", "replace").decode() != name:
            raise UsageError(f"name: expected valid Unicode, got {name!r}; no file can hold it")
        self.name = name
        self._clock = open_clock(device, stream)
        self.sync_mode = SyncMode.parse(sync_mode)
        self.sampling = (
            self._clock.default_sampling if sampling is None else _checked_sampling(sampling)
        )
        self._path = path
        self._overwrite = overwrite
        self._timeline_steps = checked_count("timeline_steps", timeline_steps, 4096)
        rank = os.environ.get("RANK", "")
        self._rank = int(rank) if rank.isdecimal() and int(rank) < 2**31 else 0
        self._writer: RunWriter | None = None
        self._spool: Path | None = None
        self._final: Part | None = None
        self._report: DivergenceReport | None = None
        self._facts: dict[str, float] = {}
        self._graph = self._new_graph()
        self._draw(checked_flag("graph", graph))
        self._clock.prepare(self)
        self.timers = Timers(self)
        self.tiles = Tiles(
            self,
            lambda levels: self.profile().of_tile_levels(levels),
            lambda: self._forget_statistics(abi.SlotKind.TILE),
        )
        self.traces = Traces(self, self._rank)
        self._apply_options()
        _live.add(self)
        if enabled or RUN_VARIABLE in os.environ:
            self.enable()

    # ------------------------------------------------------------------------------ life of the run

    def enable(self) -> None:
        """Record from now on; the first call makes the run."""
        if self._spool is None:
            self._open_run()
        self._set_enabled(True)

    def disable(self) -> None:
        """Stop recording; what is recorded stays, and `enable` goes on."""
        self._set_enabled(False)

    def _require_run(self) -> None:
        """Make the run for what is handed over while nothing is measured."""
        if self._spool is not None:
            return
        if self._writer is not None and self._writer.closed:
            raise UsageError(
                f"the profiler {self.name!r} was closed, and its run is finished; call enable() to "
                "begin another run, or use another profiler"
            )
        self._open_run()

    def _open_run(self) -> None:
        joined = os.environ.get(RUN_VARIABLE)
        if self._writer is None or self._writer.closed:
            if joined:
                self._writer = RunWriter.join(joined)
            else:
                self._writer = RunWriter.create(
                    self._path,
                    name=self.name,
                    overwrite=self._overwrite,
                    peaks=load_peaks(self._clock.name),
                )
        self._final = None
        self._open_spool(self._writer)

    def _open_spool(self, writer: RunWriter) -> None:
        # Reading needs it. Loaded now, it delays nobody who waits for a profiler to stop.
        importlib.import_module("numpy")
        self._spool = writer.spool_path()
        self._open(str(self._spool), self._rank, self._timeline_steps * RECORDS_PER_STEP)
        self.traces.begin()
        try:
            self._clock.attach(self)
        except BaseException:
            self._close()
            self._spool = None
            if writer.owner:
                writer.discard()
            self._writer = None
            raise
        self._apply_options()
        self._set_overhead(*(entry_costs() if self._has_costs else EntryCosts(0.0, 0.0)))
        for name, value in self._facts.items():
            self._fact(name, value)
        _core.connect_graph(self, self._graph.store, self._graph_enabled)

    @property
    def _has_costs(self) -> bool:
        """Whether its clock moves while it measures; that of NULL moves only when told to."""
        return self._clock.name != "NULL"

    def _apply_options(self) -> None:
        self._configure(
            sync=int(self.sync_mode),
            sample_steps=self.sampling.steps,
            sample_layers=self.sampling.layers,
        )

    def close(self) -> None:
        """Finish the run; statistics stay readable, and `enable` begins another run.

        Raises:
            RunError: if the disk became full while recording; what was recorded before is kept.
        """
        if self._spool is None:
            return
        full = bool(self._where()["full_disk"])
        self.traces.finish()
        self._set_enabled(False)
        self._drain()
        self._close()
        with suppress(RunError):
            self._final = read_part(self._spool)
            if self._writer is not None and self._writer.temporary:
                self._final.hold()  # its file is deleted below
        spool, self._spool = self._spool, None
        writer = self._writer
        if writer is not None and not _is_shared(writer):
            writer.close()
            if writer.temporary:
                writer.discard()
        if full:
            raise RunError(
                f"the disk of {spool.parent} is full: entries of bricks that were new by then are "
                "counted as lost; free some space and record again"
            )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Keep the run at `path`, and go on recording.

        Raises:
            RunExists: if the path is taken and `overwrite` is False.
        """
        if self._writer is None or (self._writer.closed and self._writer.temporary):
            raise UsageError(
                "there is nothing to save: this profiler was never enabled, or it was closed "
                "without a path; call save() before close(), or give path= to BrickProfiler"
            )
        self._flush()
        self._drain()
        saved = self._writer.move_to(path, overwrite=overwrite)
        if self._spool is not None:
            moved = self._writer.path / "spool" / self._spool.name
            if moved.exists():
                self._spool = moved
        return saved

    @property
    def path(self) -> Path | None:
        """Where the run lies; None before the profiler was ever enabled."""
        return None if self._writer is None else self._writer.path

    def reset(self) -> None:
        """Forget everything recorded: statistics, tiles, graph, traces, pending spans and marks."""
        self.timers._restart()
        self.traces._restart()
        self._facts.clear()
        self._final = None
        self._report = None
        if self._spool is None or self._writer is None:
            self._graph.clear()
            return
        enabled = self.is_enabled()
        self._close()
        self._spool.unlink(missing_ok=True)
        self._graph.clear()
        self._open_spool(self._writer)
        self._set_enabled(enabled)

    def reset_brick(self, brick: BrickId | str) -> None:
        """Forget the statistics of one brick, in all its layers and phases, and go on recording.

        Traces, the graph and the timeline keep what happened. To correct a figure, reset the brick
        and give the right ones to `record_elapsed`.

        Raises:
            UsageError: if there is no such brick id, or the profiler was closed.
        """
        self._forget_statistics(abi.SlotKind.BRICK, brick)

    def _forget_statistics(self, kind: abi.SlotKind, brick: BrickId | str | None = None) -> None:
        if self._writer is not None and self._writer.closed:
            raise UsageError(f"the profiler {self.name!r} was closed, and its run is finished")
        self._drain()
        self._forget(kind, brick)

    def __enter__(self) -> BrickProfiler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -------------------------------------------------------------------------------------- marking

    def set_sync_mode(self, mode: SyncMode | str) -> None:
        """Change when the host waits for the device."""
        self.sync_mode = SyncMode.parse(mode)
        self._apply_options()

    def set_sampling(self, sampling: Sampling) -> None:
        """Change which steps and layers are timed."""
        self.sampling = _checked_sampling(sampling)
        self._apply_options()

    def advance(self, duration_ns: int) -> None:
        """Move the time of a profiler on device NULL."""
        if self._clock.name != "NULL":
            raise UsageError("only the clock of device='NULL' can be moved")
        self._advance(duration_ns)

    def drain(self) -> None:
        """Resolve the device spans that have executed, without waiting for the others.

        The device's own synchronise waits. Reading statistics and closing drain by themselves.
        """
        self._drain()

    @contextmanager
    def capture(self) -> Iterator[int]:
        """Around a CUDA graph's capture: its bricks become event nodes; gives its number."""
        if not self.is_enabled():
            yield 0
            return
        graph = self._begin_capture()
        try:
            yield graph
        finally:
            self._end_capture()

    @contextmanager
    def replay(self, graph: int) -> Iterator[None]:
        """Around each replay of a captured graph, so that its bricks are read and counted."""
        graph = checked_count("graph", graph, 2**32 - 1)
        if not self.is_enabled() or not graph:
            yield
            return
        self._before_replay(graph)
        try:
            yield
        finally:
            self._replayed(graph)

    def set_l2_cache_hit_rate(self, rate: float) -> None:
        """Note a measured L2 hit rate; clamped to 0..1."""
        if not isinstance(rate, int | float) or rate != rate:
            raise CountError(f"rate: expected a number from 0 to 1, got {rate!r}")
        self._note_fact("l2_cache_hit_rate", min(1.0, max(0.0, rate)))

    def l2_cache_hit_rate(self) -> float | None:
        """Return the L2 hit rate that was noted, if any."""
        return self._facts.get("l2_cache_hit_rate")

    def set_zero_copy(self, enabled: bool) -> None:
        """Note whether memory transfers are zero-copy."""
        self._note_fact("zero_copy", float(checked_flag("enabled", enabled)))

    def is_zero_copy(self) -> bool:
        """Whether transfers were noted as zero-copy."""
        return bool(self._facts.get("zero_copy"))

    def _note_fact(self, name: str, value: float) -> None:
        """Keep a fact for every run of this profiler, and write it into the one that is open."""
        self._facts[name] = float(value)
        self._fact(name, float(value))

    # ------------------------------------------------------------------------- what was recorded

    @property
    def graph(self) -> ExecutionGraph:
        """The execution graph, up to now; it takes nothing while it is disabled."""
        self._flush()
        return self._graph

    def enable_graph(self) -> None:
        """Draw each brick into the execution graph from now on, and take what is added to it."""
        self._draw(True)

    def disable_graph(self) -> None:
        """Draw no more bricks and ignore what is added; what was drawn stays."""
        self._draw(False)

    def is_graph_enabled(self) -> bool:
        """Whether the execution graph takes bricks and what is added to it."""
        return self._graph_enabled

    def _new_graph(self) -> ExecutionGraph:
        graph = ExecutionGraph()
        graph.follow(self)
        return graph

    def _draw(self, enabled: bool) -> None:
        self._graph_enabled = enabled
        _core.connect_graph(self, self._graph.store, enabled)

    def _part(self) -> Part | None:
        """Return what is recorded up to now."""
        if self._spool is None:
            return self._final
        self._flush()
        self._drain()
        return read_part(self._spool)

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a profiler belongs to the process that made it, so it is not copied or pickled; make "
            "one in each process, or fork: a forked child records into the same run by itself"
        )

    def __repr__(self) -> str:
        state = "enabled" if self.is_enabled() else "disabled"
        return f"<BrickProfiler {self.name!r}, {state}, {self._clock.name}>"


def _checked_sampling(sampling: Sampling) -> Sampling:
    if not isinstance(sampling, Sampling):
        raise UsageError(f"sampling: expected Sampling(steps=, layers=), got {sampling!r}")
    return sampling


_core.adopt_methods(BrickProfiler)


# ------------------------------------------------------------------------------- exit and fork

_live: weakref.WeakSet[BrickProfiler] = weakref.WeakSet()


def _is_shared(writer: RunWriter) -> bool:
    """Whether another profiler of this process still records into the same run."""
    return any(other._writer is writer and other._spool is not None for other in list(_live))


def close_all() -> None:
    """Close every profiler of this process, as at its exit."""
    with ExitStack() as closing:  # each of them, and then a bug in one is said
        for profiler in list(_live):
            closing.callback(_close_if_it_can_be, profiler)


def _close_if_it_can_be(profiler: BrickProfiler) -> None:
    with suppress(RunError, UsageError):  # a full disk, or a device that the program has lost
        profiler.close()


def _after_fork_in_child() -> None:
    """Give the child partitions of its own in the same runs; the parent's are left alone."""
    _core.after_fork_in_child()
    for profiler in list(_live):
        profiler.timers._drop_pending()  # the parent finalizes them
        if profiler._spool is None:
            continue
        enabled = profiler.is_enabled()
        writer, profiler._writer, profiler._spool = profiler._writer, None, None
        profiler._abandon()  # before anything else: the mapping is still the parent's
        if not enabled or writer is None:
            continue
        # The run has gone, its disk is full, or a device cannot be used after a fork.
        with suppress(RunError, UsageError, OSError, RuntimeError):
            profiler._writer = RunWriter.join(writer.path)
            profiler._graph = profiler._new_graph()
            profiler._open_spool(profiler._writer)
            profiler._set_enabled(True)


atexit.register(close_all)
os.register_at_fork(after_in_child=_after_fork_in_child)
