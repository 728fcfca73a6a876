"""Replay: a log of what ran is run again, elsewhere, and compared down to the first item.

`replay_recording` makes a log of the runs of a prepared plan. `replay` runs the plan of a log
again, over the same memory, on any device and executor, and compares what launches wrote by digest.
Serially it compares launch by launch; else it runs all of the plan, compares what no later launch
overwrites, and then runs shorter plans until it has the first launch that differs. Where the log's
own side can be run again here, the first byte that differs is named, and the block that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.cache import KernelCache
from brickline.device.base import Device, open_device
from brickline.dtypes import DTYPES
from brickline.errors import BricklineError, DeviceError, PlanError
from brickline.executor.megakernel.replay_log import LoggedRun, ReplayLog, Written, digest_of
from brickline.executor.megakernel.replay_memory import (
    Range,
    block_that_touches,
    first_difference,
    read_bytes,
    surviving,
)
from brickline.executor.megakernel.replay_recording import Outcome, stepped, watched
from brickline.executor.megakernel.replay_result import ReplayDifference, ReplayResult
from brickline.executor.parallel import Choice
from brickline.executor.prepared import PreparedPlan, prepare

Memory = Mapping[str, NDArray[Any]]


def replay(
    log: ReplayLog,
    device: str | Device = "CPU",
    executor: str = "serial",
    *,
    bind: Mapping[str, Any] | None = None,
    cache: KernelCache | None = None,
    threads: int | None = None,
) -> ReplayResult:
    """Run what a log holds again, and compare.

    Args:
        log: What to run.
        device: Where. Default ``"CPU"``.
        executor: How. Default "serial", which compares every launch.
        bind: Arrays of buffers whose contents the log does not hold, by name.
        cache: Where kernels are compiled. Default the user's cache.
        threads: As of `Plan.prepare`.

    Raises:
        PlanError: Contents are missing or not those of the recorded run, or the plan cannot be
            prepared there.
    """
    side = _Side(open_device(device), executor, cache, threads)
    if not side.device.kind:
        raise PlanError(
            f"memory of {side.device.name} has no contents to compare; replay elsewhere"
        )
    return _Replay(log, side, bind or {}).result()


@dataclass(frozen=True)
class _Side:
    """Where and how a log is run."""

    device: Device
    executor: str
    cache: KernelCache | None
    threads: int | None

    def prepared(self, log: ReplayLog, launches: int | None = None) -> PreparedPlan:
        made = prepare(
            log.plan if launches is None else log.first_launches(launches),
            self.device,
            self.executor,
            cache=self.cache,
            threads=self.threads,
        )
        # Not the way that happens to be faster: what was asked for is what is compared.
        if isinstance(made._run, Choice) and made._core.can_overlap:
            made._run.choose(1)
        return made

    def __str__(self) -> str:
        return f"{self.device.name}, {self.executor}"


class _Differs(Exception):  # noqa: N818 - a finding, raised to end a run and caught here
    def __init__(self, number: int, at: Range, digest: str, data: bytes) -> None:
        super().__init__(number)
        self.number, self.at, self.digest, self.data = number, at, digest, data


class _Replay:
    """One replay: what it runs, and what it has compared so far."""

    def __init__(self, log: ReplayLog, side: _Side, bind: Mapping[str, Any]) -> None:
        self._log, self._side = log, side
        self._launches = log.plan.launches
        names = {storage.name for storage in log.plan.storages}
        for name in bind:
            if name not in names:
                raise PlanError(f"plan {log.plan.name} has no buffer {name!r:.80}")
        self._bind = {name: np.ascontiguousarray(array) for name, array in bind.items()}
        self._compared = self._pieces = 0

    def result(self) -> ReplayResult:
        """Run every recorded run, up to the first that differs."""
        log, difference = self._log, None
        prepared = self._side.prepared(log)
        for number, run in enumerate(log.runs):
            self._place(prepared, run, number)
            before = {name: prepared.read(name) for name in prepared.buffers}
            found = self._run(prepared, run, before)
            if found is not None:
                difference = self._explained(found, run, number, before)
                break
        return ReplayResult(
            plan=log.plan.name,
            recorded_on=f"{log.device}, {log.executor}",
            replayed_on=str(self._side),
            runs=len(log.runs),
            launches=len(log.runs) * len(self._launches),
            compared=self._compared,
            pieces=self._pieces,
            difference=difference,
        )

    def _place(self, prepared: PreparedPlan, run: LoggedRun, number: int) -> None:
        """Write what buffers held before a recorded run."""
        for name, contents in run.memory.items():
            array = self._bind.get(name) if number == 0 else None
            if array is None:
                array = contents.array(prepared._memory.storage(name))
            if array is None:
                remedy = "give them with bind= (--bind NAME=FILE.npy, or --random SEED)"
                if number:
                    remedy = "record it again with contents=True (--contents)"
                raise PlanError(
                    f"run {number}: the log does not hold the {contents.nbytes} bytes of {name}; "
                    f"{remedy}"
                )
            if digest_of(array.tobytes()) != contents.digest:
                raise PlanError(
                    f"run {number}: {name} is not what it was when the log was recorded, its "
                    "digest is another; give the same contents"
                )
            if contents.nbytes:
                prepared.write(name, array)

    # ------------------------------------------------------------------------------------- running

    def _run(self, prepared: PreparedPlan, run: LoggedRun, before: Memory) -> _Differs | None:
        """Run once, and return the first that differs."""
        if self._side.executor == "serial":
            try:
                with watched(prepared, _Stepping(self, prepared, run)):
                    prepared(**run.values).synchronize()
            except _Differs as differs:
                return differs
            return None
        prepared(**run.values).synchronize()
        found = self._compare_left(prepared, run, len(self._launches), count=True)
        return found and self._earliest(found, run, before)

    def compare_step(self, prepared: PreparedPlan, number: int, run: LoggedRun) -> None:
        """Hold what a launch has just written to its digests; raise what differs."""
        for written in run.written[number]:
            self._pieces += len(written)
            self._compared += len(written)
            _hold(prepared, number, written, list(written.pieces()))

    def _compare_left(
        self, prepared: PreparedPlan, run: LoggedRun, launches: int, *, count: bool
    ) -> _Differs | None:
        """Hold what is left of outputs to their digests; return the first that differs."""
        kept = surviving(self._launches[:launches])
        for number in range(launches):
            for written in run.written[number]:
                pieces = [
                    each for each in written.pieces() if _is_left(kept[number], written, *each[:2])
                ]
                if count:
                    self._pieces += len(written)
                    self._compared += len(pieces)
                try:
                    _hold(prepared, number, written, pieces)
                except _Differs as found:
                    return found
        return None

    def _earliest(self, found: _Differs, run: LoggedRun, before: Memory) -> _Differs:
        """Look for an earlier launch whose output was overwritten: run the plan up to it alone."""
        first, best = 0, found
        while first < best.number:
            middle = (first + best.number) // 2
            shorter = _restored(self._side, self._log, before, middle + 1)
            shorter(**run.values).synchronize()
            earlier = self._compare_left(shorter, run, middle + 1, count=False)
            if earlier is None:
                first = middle + 1
            else:
                best = earlier
        return best

    # ----------------------------------------------------------------------------------- explaining

    def _explained(
        self, found: _Differs, run: LoggedRun, number: int, before: Memory
    ) -> ReplayDifference:
        launch, (storage, begin, end) = self._launches[found.number], found.at
        told = ReplayDifference(
            run=number,
            task=found.number,
            launch=str(launch),
            brick=launch.brick,
            buffer=self._log.plan.storages[storage].name,
            begin=begin,
            end=end,
            is_exact=False,
            dtype=self._log.plan.storages[storage].dtype,
        )
        recorded, why = self._recorded(found, run, before)
        if recorded is None:
            block = block_that_touches(launch, dict(run.values), storage, begin)
            alone = block_that_touches(launch, dict(run.values), storage, end - 1) == block
            return replace(told, block=block if alone else None, why_not_exact=why)
        place = first_difference(recorded, found.data)
        assert place is not None
        byte = begin + place
        item = DTYPES[told.dtype].size_bytes
        at = byte // item * item - begin
        return replace(
            told,
            begin=byte,
            end=byte + 1,
            is_exact=True,
            element=byte // item,
            recorded=_value(recorded, at, told.dtype),
            replayed=_value(found.data, at, told.dtype),
            block=block_that_touches(launch, dict(run.values), storage, byte),
        )

    def _recorded(
        self, found: _Differs, run: LoggedRun, before: Memory
    ) -> tuple[bytes | None, str]:
        """Return the recorded bytes, from running the log's side again; or None and why not."""
        log = self._log
        try:
            device = open_device(log.device)
        except DeviceError:
            device = open_device("CPU")
        side = _Side(device, "serial", self._side.cache, None)
        try:
            again = _restored(side, log, before, found.number + 1)
            again(**run.values).synchronize()
            data = read_bytes(again, *found.at)
        except BricklineError as error:
            return None, f"the recorded side cannot be run again here: {error!s:.200}"
        if digest_of(data) == found.digest:
            return data, ""
        return None, (f"which byte is not known: {side} does not give the recorded bits either")


class _Stepping:
    """Runs launches one at a time, in the recorded order, and compares each."""

    def __init__(self, whole: _Replay, prepared: PreparedPlan, run: LoggedRun) -> None:
        self._whole, self._prepared, self._run = whole, prepared, run

    def run(self, stream: int, position: int) -> Outcome:
        launches = self._prepared.launches
        order = range(len(launches)) if self._run.order is None else self._run.order
        for done, number in enumerate(order):
            outcome = stepped(self._prepared, launches[number], stream)
            if outcome[1]:
                return done, outcome[1], number
            self._whole.compare_step(self._prepared, number, self._run)
        return len(launches), 0, -1


def _restored(side: _Side, log: ReplayLog, before: Memory, launches: int) -> PreparedPlan:
    """Return the first launches of a plan, prepared over the memory before a run."""
    made = side.prepared(log, launches)
    for name, array in before.items():
        if array.nbytes:
            made.write(name, array)
    return made


def _hold(
    prepared: PreparedPlan, number: int, written: Written, pieces: Sequence[tuple[int, int, str]]
) -> None:
    if not pieces:
        return
    first = pieces[0][0]
    data = read_bytes(prepared, written.storage, first, pieces[-1][1])
    for begin, end, digest in pieces:
        piece = data[begin - first : end - first]
        if digest_of(piece) != digest:
            raise _Differs(number, (written.storage, begin, end), digest, piece)


def _is_left(kept: Sequence[Range], written: Written, begin: int, end: int) -> bool:
    return any(
        storage == written.storage and first <= begin and end <= last
        for storage, first, last in kept
    )


def _value(data: bytes, at: int, dtype: str) -> str:
    """Return an element as it is printed; its bytes where a piece holds a part of it alone."""
    size = DTYPES[dtype].size_bytes
    raw = data[max(at, 0) : at + size]
    if len(raw) < size:
        return raw.hex()
    return str(np.frombuffer(raw, np.uint8).view(DTYPES[dtype].numpy)[0])
