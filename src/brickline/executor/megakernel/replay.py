"""Replay: a log of what ran is run again, elsewhere, and compared down to the first item.

`replay_recording` makes a log of the runs of a prepared plan, `queue_recording` one of what was
submitted to a queue. `replay` runs a log again, over the same memory, on any device and executor,
and compares what launches wrote by digest. Serially it compares launch by launch; else it runs all
of a run, compares what no later launch overwrites, and then runs shorter plans until it has the
first launch that differs. Where the log's own side can be run again here, the first byte that
differs is named, and the block that wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.cache import KernelCache
from brickline.device.base import Device, open_device
from brickline.dtypes import DTYPES
from brickline.errors import BricklineError, DeviceError, PlanError
from brickline.executor.megakernel.queue_replay import QUEUE, QueueRunner
from brickline.executor.megakernel.replay_log import Piece, ReplayLog, writes_of
from brickline.executor.megakernel.replay_memory import (
    Range,
    block_that_touches,
    digests_of,
    first_difference,
    read_bytes,
    surviving,
)
from brickline.executor.megakernel.replay_recording import Outcome, stepped, watched
from brickline.executor.megakernel.replay_result import ReplayDifference, ReplayResult
from brickline.executor.megakernel.replay_runs import (
    Contents,
    LoggedRun,
    Written,
    array_of,
    digest_of,
)
from brickline.executor.parallel import Choice
from brickline.executor.prepared import EXECUTORS, PreparedPlan, prepare
from brickline.executor.room import check_room
from brickline.megakernel_tables import TaskState
from brickline.plan import Plan

Memory = Mapping[str, NDArray[Any]]
Filled = dict[tuple[int, int], list[tuple[str, Written]]]
"""Digests of what a launch of a run wrote, by run and launch of the log, with buffers by name."""


def replay(
    log: ReplayLog,
    device: str | Device = "CPU",
    executor: str = "serial",
    *,
    bind: Mapping[str, Any] | None = None,
    cache: KernelCache | None = None,
    threads: int | None = None,
    every: bool = False,
) -> ReplayResult:
    """Run what a log holds again, and compare.

    Args:
        log: What to run.
        device: Where. Default ``"CPU"``.
        executor: How. Default "serial", which compares every launch. "queue" submits every launch
            to a `Megakernel`.
        bind: Arrays of buffers whose contents the log does not hold, by name.
        cache: Where kernels are compiled. Default the user's cache.
        threads: As of `Plan.prepare`; of "queue", its workers.
        every: Whether outputs that the log has no digests of, because they were overwritten, are
            compared, too: with those of a serial run on the log's own device, or a CPU, which must
            give the digests that the log has. Default False.

    Raises:
        PlanError: Contents are missing or not those of the recorded run, or the plan cannot be
            prepared there.
        QueueError: A kernel cannot be an op of a queue.
    """
    if executor not in (*EXECUTORS, QUEUE):
        known = ", ".join((*EXECUTORS, QUEUE))
        raise PlanError(f"expected executor {known}, got {executor!r:.80}")
    side = _Side(open_device(device), executor, cache, threads)
    if not side.device.kind:
        raise PlanError(
            f"memory of {side.device.name} has no contents to compare; replay elsewhere"
        )
    given, filled = bind or {}, None
    if every:
        reference = _Replay(log, _recorded_side(log, cache), given)
        reference.filled = {}
        found = reference.result()
        if found.difference is not None:
            return found
        filled = reference.filled
    return _Replay(log, side, given, filled).result()


@dataclass(frozen=True)
class _Side:
    """Where and how a log is run."""

    device: Device
    executor: str
    cache: KernelCache | None
    threads: int | None

    def prepared(self, plan: Plan) -> PreparedPlan:
        is_queue = self.executor == QUEUE  # which needs the memory of a plan, and no executor
        made = prepare(
            plan,
            self.device,
            "serial" if is_queue else self.executor,
            cache=self.cache,
            threads=None if is_queue else self.threads,
        )
        # Not the way that happens to be faster: what was asked for is what is compared.
        if isinstance(made._run, Choice) and made._core.can_overlap:
            made._run.choose(1)
        return made

    def __str__(self) -> str:
        return f"{self.device.name}, {self.executor}"


def _recorded_side(log: ReplayLog, cache: KernelCache | None) -> _Side:
    """Return what stands for the side of a log."""
    try:
        device = open_device(log.device)
    except DeviceError:
        device = open_device("CPU")
    return _Side(device, "serial", cache, None)


class _Differs(Exception):  # noqa: N818 - a finding, raised to end a run and caught here
    def __init__(self, number: int, at: Range, digest: str, data: bytes) -> None:
        super().__init__(number)
        self.number, self.at, self.digest, self.data = number, at, digest, data


class _Replay:
    """One replay: what it runs, and what it has compared so far."""

    def __init__(
        self,
        log: ReplayLog,
        side: _Side,
        bind: Mapping[str, Any],
        fuller: Filled | None = None,
    ) -> None:
        self._log, self._side, self._fuller = log, side, fuller
        self._bind = {name: np.ascontiguousarray(array) for name, array in bind.items()}
        self._compared = self._pieces = self._launches = 0
        self._fate: tuple[int, str] | None = None
        """Of the last run in a queue: the first launch that ended otherwise, and how."""
        self._sizes = {storage.name: storage.nbytes for storage in log.plan.storages}
        for name in bind:
            if name not in self._sizes:
                raise PlanError(f"plan {log.plan.name} has no buffer {name!r:.80}")
        if log.queue is not None:  # of which a copy is kept between runs
            check_room(log.plan.name, log.plan.storages, open_device("CPU"))
        self._queue = QueueRunner(log, side.device, side.cache, side.threads)
        self._bytes: dict[str, NDArray[np.uint8]] = {}
        """Of a queue's log: what buffers hold between runs, whose plans have them or not."""
        self.filled: Filled | None = None
        """Where digests of everything that launches write are kept, if they are asked for."""

    def result(self) -> ReplayResult:
        """Run every recorded run, up to the first that differs."""
        log, difference = self._log, None
        prepared: PreparedPlan | None = None
        with self._queue:
            for number, piece in enumerate(log.pieces(faulted=self._side.executor == QUEUE)):
                self._launches += len(piece.plan.launches)
                if log.queue is not None:
                    self._place_parts(piece.run, number)
                    if not piece.plan.launches:
                        continue
                if prepared is None or prepared.plan is not piece.plan:
                    prepared = self._side.prepared(piece.plan)
                difference = self._one(prepared, self._with_fuller(piece, number), number)
                if difference is not None:
                    break
        return ReplayResult(
            plan=log.plan.name,
            recorded_on=f"{log.device}, {log.executor}",
            replayed_on=str(self._side),
            runs=len(log.runs),
            launches=self._launches,
            compared=self._compared,
            pieces=self._pieces,
            difference=difference,
            tasks="launches" if log.queue is None else "submissions",
            left_out=0 if log.queue is None else len(log.queue) - self._launches,
        )

    def _one(self, prepared: PreparedPlan, piece: Piece, number: int) -> ReplayDifference | None:
        """Run one run; return what differs."""
        if self._log.queue is None:
            self._place(prepared, piece.run, number)
        else:
            for storage in piece.plan.storages:
                if storage.nbytes:
                    whole = array_of(self._whole(storage.name), storage)
                    prepared.write(storage.name, whole)
        before = {name: prepared.read(name) for name in prepared.buffers}
        found = self._run(prepared, piece, before, number)
        told = None if found is None else self._explained(found, piece, number, before)
        fate = self._fate
        if fate is not None and (told is None or fate[0] <= told.task):
            launch = self._queue.words(fate[0])
            told = ReplayDifference(number, fate[0], launch, "", "", 0, 0, False, fate=fate[1])
        if self._log.queue is not None and told is None:
            for storage in piece.plan.storages:
                left = read_bytes(prepared, storage.number, 0, storage.nbytes)
                self._bytes[storage.name] = np.frombuffer(left, np.uint8).copy()
        return told

    def _with_fuller(self, piece: Piece, number: int) -> Piece:
        """Return a run with digests of everything, where they were made."""
        if self._fuller is None:
            return piece
        mine = {storage.name: storage.number for storage in piece.plan.storages}
        written = tuple(
            tuple(
                each.moved(mine[name], 0)
                for name, each in self._fuller.get((number, piece.submission(launch)), ())
            )
            for launch in range(len(piece.plan.launches))
        )
        return replace(piece, run=replace(piece.run, written=written))

    # -------------------------------------------------------------------------------------- memory

    def _place(self, prepared: PreparedPlan, run: LoggedRun, number: int) -> None:
        """Write what buffers held before a recorded run of a plan."""
        for name, contents in run.memory.items():
            array = self._bind.get(name) if number == 0 else None
            if array is None:
                array = contents.array(prepared._memory.storage(name))
            self._check_given(array, contents, name, number, is_first=not number)
            if contents.nbytes:
                prepared.write(name, array)

    def _place_parts(self, run: LoggedRun, number: int) -> None:
        """Take what the host had written before a recorded run of a queue."""
        storages = self._log.plan.storages if run.placed else ()
        for each in run.placed:
            name = storages[each.storage].name
            begin, end = each.begin, each.begin + each.contents.nbytes
            data = each.contents.bytes()
            if data is None and name in self._bind:
                data = self._bind[name].reshape(-1).view(np.uint8)[begin:end]
            self._check_given(data, each.contents, name, number, is_first=name not in self._bytes)
            assert data is not None
            self._whole(name)[begin:end] = data

    def _whole(self, name: str) -> NDArray[np.uint8]:
        """Return the bytes of a buffer of a queue's log; what nobody has written is zero."""
        found = self._bytes.get(name)
        if found is None:
            found = self._bytes[name] = np.zeros(self._sizes[name], np.uint8)
        return found

    def _check_given(
        self, data: NDArray[Any] | None, contents: Contents, name: str, run: int, *, is_first: bool
    ) -> None:
        if data is None:
            remedy = "give them with bind= (--bind NAME=FILE.npy, or --random SEED)"
            if not is_first:
                remedy = "record it again with contents=True (--contents)"
            raise PlanError(
                f"run {run}: the log does not hold the {contents.nbytes} bytes of {name}; {remedy}"
            )
        if digest_of(data.tobytes()) != contents.digest:
            raise PlanError(
                f"run {run}: {name} is not what it was when the log was recorded, its digest is "
                "another; give the same contents"
            )

    # ------------------------------------------------------------------------------------- running

    def _run(
        self, prepared: PreparedPlan, piece: Piece, before: Memory, number: int
    ) -> _Differs | None:
        """Run once, and return the first that differs."""
        run = piece.run
        if self._side.executor == "serial":
            try:
                with watched(prepared, _Stepping(self, prepared, piece, number)):
                    prepared(**run.values).synchronize()
            except _Differs as differs:
                return differs
            return None
        self._run_whole(prepared, piece)
        self._fate = self._queue.fate
        found = self._compare_left(prepared, piece, len(piece.plan.launches), count=True)
        return found and self._earliest(found, piece, before)

    def _run_whole(self, prepared: PreparedPlan, piece: Piece) -> None:
        values = piece.run.values
        if self._side.executor != QUEUE:
            prepared(**values).synchronize()
            return
        with watched(prepared, self._queue.watcher(prepared, piece)):
            prepared(**values).synchronize()

    def compare_step(self, prepared: PreparedPlan, number: int, piece: Piece) -> None:
        """Hold what a launch has just written to its digests; raise what differs."""
        for written in piece.run.written[number]:
            self._pieces += len(written)
            self._compared += len(written)
            _hold(prepared, number, written, list(written.pieces()))

    def fill(self, prepared: PreparedPlan, number: int, piece: Piece, run: int) -> None:
        """Keep digests of everything that a launch has just written."""
        if self.filled is None:
            return
        names = [storage.name for storage in piece.plan.storages]
        made = digests_of(prepared, writes_of(prepared.launches[number]))
        self.filled[run, piece.submission(number)] = [(names[each.storage], each) for each in made]

    def _compare_left(
        self, prepared: PreparedPlan, piece: Piece, launches: int, *, count: bool
    ) -> _Differs | None:
        """Hold what is left of outputs to their digests; return the first that differs."""
        writers = [number for number in range(launches) if not self._is_alias(piece, number)]
        kept = dict(
            zip(writers, surviving([piece.plan.launches[each] for each in writers]), strict=True)
        )
        for number in writers:
            for written in piece.run.written[number]:
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

    def _is_alias(self, piece: Piece, number: int) -> bool:
        queue = self._log.queue
        if queue is None:
            return False
        return queue.states[piece.submission(number)] is TaskState.DEDUPED

    def _earliest(self, found: _Differs, piece: Piece, before: Memory) -> _Differs:
        """Look for an earlier launch whose output was overwritten: run the plan up to it alone."""
        first, best = 0, found
        while first < best.number:
            middle = (first + best.number) // 2
            shorter = _restored(self._side, self._log, piece, before, middle + 1)
            self._run_whole(shorter, piece)
            earlier = self._compare_left(shorter, piece, middle + 1, count=False)
            if earlier is None:
                first = middle + 1
            else:
                best = earlier
        return best

    # ----------------------------------------------------------------------------------- explaining

    def _explained(
        self, found: _Differs, piece: Piece, number: int, before: Memory
    ) -> ReplayDifference:
        launches, values = piece.plan.launches, dict(piece.run.values)
        launch, (storage, begin, end) = launches[found.number], found.at
        task, is_queue = piece.submission(found.number), self._log.queue is not None
        told = ReplayDifference(
            run=number,
            task=task,
            launch=self._queue.words(task) if is_queue else str(launch),
            brick="" if is_queue else launch.brick,
            buffer=piece.plan.storages[storage].name,
            begin=begin,
            end=end,
            is_exact=False,
            dtype=piece.plan.storages[storage].dtype,
        )
        recorded, why = self._recorded(found, piece, number, before)
        if recorded is None:
            block = block_that_touches(launch, values, storage, begin)
            alone = block_that_touches(launch, values, storage, end - 1) == block
            return replace(told, block=block if alone else None, why_not_exact=why)
        place = first_difference(recorded, found.data)
        assert place is not None
        byte = begin + place
        item = DTYPES[told.dtype].size_bytes
        at = byte // item * item - begin
        block = block_that_touches(launch, values, storage, byte)
        return replace(
            told,
            begin=byte,
            end=byte + 1,
            is_exact=True,
            element=byte // item,
            recorded=_value(recorded, at, told.dtype),
            replayed=_value(found.data, at, told.dtype),
            block=block,
            argument=self._queue.argument(launch, storage, byte) if is_queue else "",
            ran=self._queue.ran(task, launch, block) if is_queue else "",
        )

    def _recorded(
        self, found: _Differs, piece: Piece, number: int, before: Memory
    ) -> tuple[bytes | None, str]:
        """Return the recorded bytes, from running the log's side again; or None and why not."""
        log, (storage, begin, end) = self._log, found.at
        side = _recorded_side(log, self._side.cache)
        name, launch = piece.plan.storages[storage].name, found.number
        if self._side.executor == QUEUE and log.queue is not None:  # what faulted is left out
            done = next(islice(log.pieces(), number, None))
            assert done.numbers is not None
            launch, piece = done.numbers.index(piece.submission(launch)), done
        try:
            again = _restored(side, log, piece, before, launch + 1)
            again(**piece.run.values).synchronize()
            data = read_bytes(again, again._memory.storage(name).number, begin, end)
        except BricklineError as error:
            return None, f"the recorded side cannot be run again here: {error!s:.200}"
        if digest_of(data) == found.digest:
            return data, ""
        return None, (f"which byte is not known: {side} does not give the recorded bits either")


class _Stepping:
    """Runs launches one at a time, in the recorded order, and compares each."""

    def __init__(self, whole: _Replay, prepared: PreparedPlan, piece: Piece, run: int) -> None:
        self._whole, self._prepared, self._piece, self._run = whole, prepared, piece, run

    def run(self, stream: int, position: int) -> Outcome:
        launches, order = self._prepared.launches, self._piece.run.order
        for done, number in enumerate(range(len(launches)) if order is None else order):
            outcome = stepped(self._prepared, launches[number], stream)
            if outcome[1]:
                return done, outcome[1], number
            self._whole.compare_step(self._prepared, number, self._piece)
            self._whole.fill(self._prepared, number, self._piece, self._run)
        return len(launches), 0, -1


def _restored(
    side: _Side, log: ReplayLog, piece: Piece, before: Memory, launches: int
) -> PreparedPlan:
    """Return the first launches of a run, prepared over the memory before it."""
    made = side.prepared(log.shortened(piece, launches))
    for name in made.buffers:
        if before[name].nbytes:
            made.write(name, before[name])
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
