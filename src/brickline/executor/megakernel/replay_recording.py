"""ReplayRecorder: logs the runs of a prepared plan while somebody else runs it.

It takes the place of who watches a plan. Memory is read before a run and after it, so logging is
slow; a plan that is not logged pays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from brickline.errors import PlanError
from brickline.executor.megakernel.replay_log import ReplayLog, writes_of
from brickline.executor.megakernel.replay_memory import digests_of, read_bytes, surviving
from brickline.executor.megakernel.replay_runs import Contents, LoggedRun, Written, digest_of
from brickline.executor.prepared import PreparedPlan
from brickline.plan_launches import Launch

KEPT_BYTES = 64 << 20
"""Memory up to this size is kept in a log unless it is asked otherwise."""
Outcome = tuple[int, int, int]


class ReplayRecorder:
    """Logs the runs of a prepared plan inside of `recording`; `log` returns them.

    Args:
        prepared: What is run. Nobody else may watch it meanwhile.
        digests: Whether what launches write is digested. Default True. A serial plan is then run
            launch by launch; of another one, what no later launch overwrites is digested.
        contents: Whether the log keeps what buffers held before a run. Default None: where all of
            it has at most 64 MiB.

    Raises:
        PlanError: Memory of the device has no contents, or the plan cannot be written to a file.
    """

    def __init__(
        self, prepared: PreparedPlan, *, digests: bool = True, contents: bool | None = None
    ) -> None:
        if not prepared._device.kind:
            raise PlanError(
                f"plan {prepared.plan.name}: memory of {prepared.device} has no contents to log; "
                "prepare it for CPU or CUDA:n"
            )
        self._prepared = prepared
        self._digests = digests
        total = sum(storage.nbytes for storage in prepared.plan.storages)
        self._keep = total <= KEPT_BYTES if contents is None else contents
        self._after: dict[str, str] = {}
        self._runs: list[LoggedRun] = []
        ReplayLog.of(prepared.plan, prepared.device, prepared.executor, ())
        if len(prepared.plan.launches) != len(prepared.launches):
            raise PlanError(f"plan {prepared.plan.name} has grown since; prepare it again")

    @contextmanager
    def recording(self) -> Iterator[ReplayRecorder]:
        """Log every run inside of ``with``.

        Raises:
            PlanError: A profiler watches the plan.
        """
        with watched(self._prepared, self):
            yield self

    def log(self) -> ReplayLog:
        """Return what was logged so far."""
        prepared = self._prepared
        return ReplayLog.of(prepared.plan, prepared.device, prepared.executor, self._runs)

    def run(self, stream: int, position: int) -> Outcome:
        """Run every launch and log it; arguments and result are an executor's."""
        prepared = self._prepared
        memory = self._changed()
        values = prepared.values
        count = len(prepared.launches)
        order: Sequence[int] | None = range(count)
        if self._digests and prepared.executor == "serial":
            written: list[tuple[Written, ...]] = []
            for launch in prepared.launches:
                outcome = stepped(prepared, launch, stream)
                if outcome[1]:
                    return outcome
                written.append(digests_of(prepared, writes_of(launch)))
        else:
            prepared._core.set_timed(True)
            outcome = prepared._run.run(stream)
            prepared._device.synchronize()
            if outcome[1]:
                return outcome
            order = began_order(prepared)
            kept = surviving(prepared.launches) if self._digests else [[]] * count
            written = [digests_of(prepared, ranges) for ranges in kept]
        self._after = {name: self._digest(name) for name in prepared.buffers}
        given = None if order is None else tuple(order)
        self._runs.append(LoggedRun(values, memory, given, tuple(written)))
        return count, 0, -1

    def _changed(self) -> dict[str, Contents]:
        """Return what buffers hold, of those that are not as the last run left them."""
        found = {}
        for storage in self._prepared.plan.storages:
            data = read_bytes(self._prepared, storage.number, 0, storage.nbytes)
            contents = Contents.of(data, keep=self._keep)
            if self._after.get(storage.name) != contents.digest:
                found[storage.name] = contents
        return found

    def _digest(self, name: str) -> str:
        number = self._prepared._memory.storage(name).number
        nbytes = self._prepared.plan.storages[number].nbytes
        return digest_of(read_bytes(self._prepared, number, 0, nbytes))


def record(
    prepared: PreparedPlan,
    /,
    *,
    digests: bool = True,
    contents: bool | None = None,
    **changes: Any,
) -> ReplayLog:
    """Run a prepared plan once, and return the log.

    Args:
        prepared: What is run.
        digests: As of `ReplayRecorder`.
        contents: As of `ReplayRecorder`.
        **changes: Variables and buffers by name, as a call of the plan takes them.

    Raises:
        PlanError: As of `ReplayRecorder`, and as the call does.
    """
    recorder = ReplayRecorder(prepared, digests=digests, contents=contents)
    with recorder.recording():
        prepared(**changes)
    return recorder.log()


@contextmanager
def watched(prepared: PreparedPlan, watcher: Any) -> Iterator[None]:
    """Let somebody run the launches of a prepared plan in the place of its executor.

    Raises:
        PlanError: Somebody does already.
    """
    if prepared._watcher is not None:
        raise PlanError(
            f"plan {prepared.plan.name} is watched by a profiler; stop it with watch(None), or "
            "prepare the plan once more"
        )
    prepared._watcher = watcher
    try:
        yield
    finally:
        prepared._watcher = None


def stepped(prepared: PreparedPlan, launch: Launch, stream: int) -> Outcome:
    """Run one launch and wait for it; return an executor's outcome."""
    outcome = prepared._core.run_serial(stream, launch.number, launch.number + 1)
    prepared._device.synchronize()
    return (launch.number, outcome[1], launch.number) if outcome[1] else outcome


def began_order(prepared: PreparedPlan) -> Sequence[int] | None:
    """Return the launches of the last run in the order in which they began, where that is known."""
    if prepared.executor == "megakernel":
        order = _traced_order(prepared)
    elif prepared.device == "CPU":
        times = prepared._core.times()
        order = sorted(range(len(times)), key=lambda number: (times[number][1], number))
    else:
        order = None
    if order is None:
        return None
    place = {number: at for at, number in enumerate(order)}
    # A clock may not tell two launches apart; then nothing is said rather than something wrong.
    waits = (
        (launch.number, earlier) for launch in prepared.launches for earlier in launch.waits_for
    )
    return order if all(place[earlier] < place[later] for later, earlier in waits) else None


def _traced_order(prepared: PreparedPlan) -> list[int] | None:
    """Return the order in which launches of a megakernel began; None where it was not traced."""
    report = prepared.report
    count = len(prepared.launches)
    if report is None or report.spans is None or len(set(report.spans.task.tolist())) < count:
        return None
    began = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(began, report.spans.task, report.spans.ready_ns)
    found: list[int] = np.argsort(began, kind="stable").tolist()
    return found
