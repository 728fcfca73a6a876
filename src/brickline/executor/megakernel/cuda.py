"""A plan as one cooperative launch on CUDA: its code, where its tables lie, what a run left.

A run is enqueued; with a deadline it is waited for, so that an item that never returns is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline import _core
from brickline.buffers import Buffer
from brickline.cache import CachedKernel, KernelCache
from brickline.executor.megakernel.deduped import Deduped, all_run
from brickline.executor.megakernel.refusals import refusal
from brickline.executor.megakernel.source import ENTRY, HELPERS, megakernel_source
from brickline.executor.megakernel.streams import SLOT_BYTES, RowStream, row_stream
from brickline.executor.megakernel.tables import JOINED, ProgramTables, engine_rows
from brickline.kernel import Kernel
from brickline.megakernel_progress import FAULT, NO_TASK, PROGRESS, RECORD
from brickline.plan_launches import Launch, written_storages

RING_SLOTS = 12
"""Slots of 16 KiB: more than a multiprocessor must have under way to use all of the bandwidth."""
WORKER_BYTES = 4096
"""MEGA_WORKER_BYTES: shared memory that a worker needs for itself."""
COUNTER_WORDS = 32
"""MEGA_COUNTER_STEP."""
GRACE_NS = 1_500_000_000
"""How long after the deadline items may take to end before a worker reports that it hangs."""
GIVE_UP_NS = 1_900_000_000
"""How long after the deadline the host waits for a run to end, or for such a report."""
WARP = 32
REGISTERS = 65_536
"""Of a multiprocessor."""
_HUNG = 3
"""MegaState::Hung."""


class CudaEngine(ProgramTables):
    """Runs all launches of a plan with one launch.

    Args:
        core: The launches with their arguments.
        launches: The plan's.
        kernels: The compiled kernel of each.
        ops: The place of each launch's kernel among all.
        joined: Whether each launch is of the region of the last one before it that is run.
        device: A GPU.
        cache: Where the megakernel is compiled.
        deduped: Which launches are not run. Default None: all are.
        where: The plan, for messages.
        workers: Blocks of the launch. Default None: one for each multiprocessor.
        trace: Whether entries of lists are recorded as they are executed.
        ring: Whether rows are copied ahead, where a kernel streams some.

    Raises:
        PlanError: The device or a launch is none for a megakernel; with a code.
    """

    execution_mode = "cooperative launch"
    after_a_hang = (
        "a launch cannot be ended, and everything that this process does on the device waits for "
        "it, also what frees memory: end the process, the CUDA context cannot survive it"
    )

    def __init__(
        self,
        core: _core.PlanCore,
        launches: Sequence[Launch],
        kernels: Sequence[CachedKernel],
        ops: Sequence[int],
        joined: Sequence[bool],
        device: Any,
        cache: KernelCache,
        *,
        deduped: Deduped | None = None,
        where: str = "a plan",
        workers: int | None = None,
        trace: bool = False,
        ring: bool = True,
    ) -> None:
        self._device = device
        self._allocations = 0
        self._launches = launches
        self._where = where
        self._trace = trace
        if not self._device.is_cooperative:
            raise refusal("MK107", where, device.name)
        if device.compute_capability < (9, 0):
            major, minor = device.compute_capability
            raise refusal("MK110", where, f"{device.name} of {major}.{minor}")
        self.workers = self._device.multiprocessors if workers is None else workers
        if self.workers > self._device.multiprocessors:
            got = f"{self.workers} workers on {self._device.multiprocessors} multiprocessors"
            raise refusal("MK108", f"{where}, workers", got)
        self.consumers = max(_lanes(launch, where) for launch in launches)
        self._check_registers(launches, kernels, where)
        sources = {op: launch.kernel for op, launch in zip(ops, launches, strict=True)}
        unit = _engine_kernel([sources[op] for op in range(len(sources))], self.consumers)
        began = time.perf_counter_ns()
        self.compiled = cache.get_or_compile(unit, device)
        self.compile_ns = time.perf_counter_ns() - began
        """Time to compile it, or to find it compiled; planning is something else."""
        written = written_storages(launches)
        self.streams = [row_stream(launch, written) if ring else None for launch in launches]
        deduped = all_run(launches) if deduped is None else deduped
        self._computed_by = np.array(deduped.computed_by)
        rows = engine_rows(launches, ops, joined, deduped)
        for row, each in zip(rows, self.streams, strict=True):
            row |= {} if each is None else _stream_row(each)
        self._core = _core.MegaCudaCore(core, rows, self.workers)
        self._counters = self._zeros(2 * len(launches) * COUNTER_WORDS)
        self._faults = self._zeros(2 * len(launches))
        self._stopped = self._zeros(1)
        self._progress = self._mapped(self.workers * PROGRESS.itemsize)
        self._stop = self._mapped(64)
        self._tables: Buffer | None = None
        self._records: Buffer | None = None
        self._executed: Buffer | None = None
        self.ring_slots = 0
        self._placed = 0
        self._is_unclear = False
        self.is_dead = False
        """Whether an item of a run never returned."""
        self._asked_ns = self._begin_ns = self._seen_ns = 0
        self._is_behind = False
        self._was_asked = False
        self._uploaded_before = 0
        self._read: dict[str, NDArray[Any]] = {}
        self._counted = self._allocated = 0
        self._is_resident = self._was_resident = False
        self._outcome: dict[str, Any] | None = None

    def _check_registers(
        self, launches: Sequence[Launch], kernels: Sequence[CachedKernel], where: str
    ) -> None:
        # A quarter of a multiprocessor has a quarter of its registers, and of its warps.
        warps = -(-(self.consumers + HELPERS) // (4 * WARP)) * 4
        room = REGISTERS // (warps * WARP) // 8 * 8
        for launch, cached in zip(launches, kernels, strict=True):
            needed = cached.resources.get("registers", 0)
            if needed > room:
                got = f"{needed} registers a lane; a worker of {self.consumers} lanes has {room}"
                raise refusal("MK103", f"{where}, {launch}", got)

    def _zeros(self, words: int) -> Buffer:
        self._allocations += 1
        zeros: Buffer = self._device.zeros((words,), "u32")
        return zeros

    def _mapped(self, nbytes: int) -> Any:
        self._allocations += 1
        return self._device.allocate_mapped(nbytes)

    # ------------------------------------------------------------------------------------- running

    def set_trace(self, trace: bool) -> None:
        """Say whether the next runs are recorded."""
        if trace != self._trace:
            self._trace = trace
            self._placed = 0

    def run(self, deadline_ns: int = 0, delay_seed: int = 0, stream: int = 0) -> dict[str, Any]:
        """Enqueue a run, and with a deadline wait for it; return what came of it so far."""
        self._asked_ns = _core.monotonic_ns()
        self._outcome, self._was_asked = None, False
        problem = self.refresh()
        if problem:
            return _nothing(problem)
        self._is_behind = self._trace and not self._device.is_idle(stream)
        if self._is_unclear:
            self._core.clear(stream)
            self._stop.bytes[:] = 0
            self._is_unclear = False
        self._progress.bytes[:] = 0
        self._read = {}
        self._allocated, self._counted = self._allocations - self._counted, self._allocations
        self._was_resident, self._is_resident = self._is_resident, True
        self._uploaded_before = self._core.facts()["uploaded_bytes"]
        _, code, _ = self._core.run(stream, deadline_ns, GRACE_NS if deadline_ns else 0, delay_seed)
        self._begin_ns = _core.monotonic_ns()
        if code:
            return _nothing(self._core.failure_text(code))
        if deadline_ns and not self._waited(stream, deadline_ns):
            self.is_dead = True
            return self.outcome()
        if deadline_ns:
            return self.outcome()
        return {
            "problem": "",
            "state": "finished",
            "done": len(self._launches),
            "code": 0,
            "where": -1,
        }

    def _waited(self, stream: int, deadline_ns: int) -> bool:
        """Return whether a run has ended, at the latest some time after its deadline."""
        until = time.monotonic_ns() + deadline_ns + GIVE_UP_NS
        pause = 1e-5
        while not self._device.is_idle(stream):
            if time.monotonic_ns() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)
        return True

    def refresh(self) -> str | None:
        """Follow the plan's variables and addresses; return why it cannot be run, if so."""
        problem = self._core.refresh()
        if problem:
            return problem
        facts = self._core.facts()
        if facts["structure_version"] != self._placed:
            self._place(facts)
        return None

    def _place(self, facts: Mapping[str, int]) -> None:
        """Make room for tables, whose sizes follow the plan's variables."""
        self._tables = self._room(self._tables, facts["tables_bytes"])
        self._executed = self._room(self._executed, facts["entries"] * 4)
        if self._trace:
            self._records = self._room(self._records, facts["entries"] * RECORD.itemsize)
        item_bytes = -(-facts["shared_bytes"] // 128) * 128
        room = self._device.limits.shared_bytes - WORKER_BYTES - item_bytes
        if room < 0:
            got = f"{facts['shared_bytes']} bytes of {facts['shared_bytes'] + room}"
            raise refusal("MK102", self._where, got)
        has_streams = any(each is not None for each in self.streams)
        self.ring_slots = min(RING_SLOTS, room // SLOT_BYTES) if has_streams else 0
        self._core.place(
            {
                "function": self.compiled.program.function,
                "threads": self.consumers + HELPERS,
                "dynamic_bytes": WORKER_BYTES + item_bytes + self.ring_slots * SLOT_BYTES,
                "ring_slots": self.ring_slots,
                "slot_bytes": SLOT_BYTES,
                "item_bytes": item_bytes,
                "tables": self._tables.address,
                "tables_bytes": self._tables.nbytes,
                "counters": self._counters.address,
                "faults": self._faults.address,
                "progress": self._progress.address,
                "stop": self._stop.address,
                "stopped": self._stopped.address,
                "records": self._records.address if self._trace and self._records else 0,
                "executed": self._executed.address,
            }
        )
        self._is_unclear = True  # counters that an earlier structure used may not be zero
        self._is_resident = False
        self._placed = facts["structure_version"]

    def _room(self, buffer: Buffer | None, nbytes: int) -> Buffer:
        if buffer is not None and buffer.nbytes >= nbytes:
            return buffer
        self._allocations += 1
        fresh: Buffer = self._device.allocate((max(nbytes, 1),), "u8")
        return fresh

    def stop(self) -> None:
        """End the run that is under way, each worker after the item that it is at."""
        self._was_asked = True
        self._stop.bytes.view(np.uint32)[0] = 1
        self._is_unclear = True

    def take_stopped(self) -> int | None:
        """Return None: signals end no run on a device."""
        return None

    @property
    def structure_version(self) -> int:
        """Counts changes of tasks, lists and waits."""
        return int(self._core.facts()["structure_version"])

    def _table(self, name: str) -> bytes:
        return bytes(self._core.table(name))

    # ------------------------------------------------------------------------------------ outcomes

    def outcome(self) -> dict[str, Any]:
        """Return what came of the last run, when it has ended or is given up."""
        if self._outcome is None:
            if not self.is_dead:
                self._device.synchronize()
            self._seen_ns = _core.monotonic_ns()
            self._outcome = self._found()
            if self._outcome["state"] != "finished" or self._outcome["code"]:
                self._is_unclear = True
        return self._outcome

    def _found(self) -> dict[str, Any]:
        progress, facts = self.progress(), self._core.facts()
        begun = progress["begin_ns"][progress["begin_ns"] > 0]
        device_ns = int(progress["end_ns"].max() - begun.min()) if len(begun) else 0
        # What ran before it in its stream may have kept it; then its end tells when it was.
        begin_ns = self._begin_ns
        if self._is_behind:
            begin_ns = max(begin_ns, self._seen_ns - device_ns)
        items, skipped = int(progress["items"].sum()), int(progress["skipped"].sum())
        found: dict[str, Any] = {
            "problem": "",
            "state": "finished",
            "reason": "none",
            "items": items,
            "skipped": skipped,
            "remaining": facts["items"] - items,
            "done": 0,
            "where": -1,
            "code": 0,
            "block": 0,
            "asked_ns": self._asked_ns,
            "begin_ns": begin_ns,
            "end_ns": begin_ns + device_ns,
        }
        if self.is_dead or (progress["state"] == _HUNG).any():
            self.is_dead = True
            return found | {"state": "hung", "end_ns": _core.monotonic_ns()}
        if (progress["state"] != 1).any():
            reason = "asked" if self._was_asked else "deadline"
            found |= {"state": "stopped", "reason": reason}
        faults = self.faults()
        ends = self.ends()
        found["done"] = sum(is_finished for is_finished, _ in ends)
        faulted = np.flatnonzero(faults["code"])
        if len(faulted):
            where = int(faulted[0])
            found |= {
                "where": where,
                "code": int(faults["code"][where]),
                "block": int(faults["block"][where]),
            }
        return found

    def progress(self) -> NDArray[Any]:
        """Return what each worker has done."""
        return np.array(self._progress.bytes.view(PROGRESS))

    def faults(self) -> NDArray[Any]:
        """Return the first fault of each launch."""
        if self.is_dead:
            return np.zeros(len(self._launches), FAULT)
        found = self._read_back("faults", self._faults).view(FAULT).copy()
        found["block"] = np.where(found["code"] != 0, ~found["block"], 0)
        return np.asarray(found)

    def _read_back(self, name: str, buffer: Buffer) -> NDArray[Any]:
        """Return what the last run left in a buffer; it is copied once."""
        found = self._read.get(name)
        if found is None:
            found = self._read[name] = self._device.to_numpy(buffer)
        return found

    def items_done(self) -> NDArray[Any]:
        """Return how many items of each launch are done: executed without a fault."""
        counts = np.zeros(len(self._launches), np.int64)
        if self.is_dead or self._executed is None:
            return counts
        _, lists = self.lists()
        told = self._read_back("executed", self._executed).view(np.uint32)[: len(lists)]
        executed = np.where(told == NO_TASK, self._shares(), told)
        reached = self._reached()
        np.add.at(counts, lists[reached], executed[reached])
        return np.asarray(counts[self._computed_by])

    def items_executed(self) -> NDArray[Any] | None:
        """Return how many items of each launch were executed, those that faulted among them.

        None where several launches have faults: how many each has is not counted.
        """
        faulted = np.flatnonzero(self.faults()["code"])
        if self.is_dead or len(faulted) > 1:
            return None
        is_run = self._computed_by == np.arange(len(self._launches))
        executed = np.where(is_run, self.items_done(), 0)
        executed[faulted] += self.outcome()["items"] - executed.sum()
        return np.asarray(executed)

    def _shares(self) -> NDArray[Any]:
        """Return how many blocks each entry of all lists has."""
        begin, lists = self.lists()
        ends = begin.astype(np.int64)
        workers = np.repeat(np.arange(self.workers), ends[1:] - ends[:-1])
        tasks = self.tasks()[lists]
        blocks, parts = tasks["blocks"].astype(np.int64), tasks["parts"].astype(np.int64)
        part = (workers - tasks["first_worker"]) % self.workers
        return np.asarray(blocks * (part + 1) // parts - blocks * part // parts)

    def _reached(self) -> NDArray[Any]:
        """Return of each entry of all lists whether a worker executed some of it."""
        begin, progress = self.lists()[0].astype(np.int64), self.progress()
        count = progress["position"].astype(np.int64) + (progress["blocks"] > 0)
        places = np.arange(begin[-1])
        workers = np.searchsorted(begin, places, side="right") - 1
        return np.asarray(places - begin[workers] < count[workers])

    def records(self) -> list[NDArray[Any]] | None:
        """Return what each worker recorded, entry by entry; None without a trace."""
        if not self._trace or self._records is None or self.is_dead:
            return None
        begin, _ = self.lists()
        rows = self._read_back("records", self._records).view(RECORD)
        progress = self.progress()
        counts = progress["position"] + (progress["blocks"] > 0)  # with the part that was left
        return [rows[first : first + count] for first, count in zip(begin, counts, strict=False)]

    def ends(self) -> list[tuple[bool, bool]]:
        """Return of each launch whether it is finished, and whether part of it was skipped."""
        tasks, done, faults = self.tasks(), self.items_done(), self.faults()
        begin, waits = self.waits()
        skipped = np.zeros(len(tasks), bool)
        lost = faults["code"] != 0
        before = self._members_before(tasks)
        for number in np.flatnonzero(done < tasks["blocks"]):  # in order, so producers come first
            producers = waits[begin[number] : begin[number + 1]]
            skipped[number] = lost[producers].any() or (
                before[number] >= 0 and lost[before[number]]
            )
            lost[number] |= skipped[number]
        return list(zip((done >= tasks["blocks"]).tolist(), skipped.tolist(), strict=True))

    def _members_before(self, tasks: NDArray[Any]) -> NDArray[Any]:
        """Return of each launch the one before it in its region; -1 where there is none."""
        runs = np.flatnonzero(tasks["parts"])
        before = np.full(len(tasks), -1)
        before[runs[1:]] = runs[:-1]
        return np.where(tasks["flags"] & JOINED, before, -1)

    def telemetry(self) -> dict[str, int]:
        """Return what the last run moved and allocated, and what was read of it so far."""
        read = [self._progress.bytes, *self._read.values()]
        return {
            "bytes_uploaded": self._core.facts()["uploaded_bytes"] - self._uploaded_before,
            "bytes_read_back": sum(each.nbytes for each in read),
            "readback_buffers": len(read),
            "resident_allocations": self._allocated,
            "resident_cache_hit": self._was_resident,
            "kernel_launches": 1,
        }


def _nothing(problem: str) -> dict[str, Any]:
    return {"problem": problem, "state": "finished", "done": 0, "code": 0, "where": -1}


def _lanes(launch: Launch, where: str) -> int:
    """Return the lanes of a block, which the engine is compiled for.

    Raises:
        PlanError: They depend on variables, or are no multiple of a warp.
    """
    lanes = 1
    for size in launch.sizes[3:6]:
        if not isinstance(size, int):
            raise refusal("MK109", f"{where}, {launch}", f"local_size {size}")
        lanes *= size
    if lanes % WARP or lanes + HELPERS > 1024:
        raise refusal("MK109", f"{where}, {launch}", f"local_size {lanes}")
    return lanes


def _stream_row(stream: RowStream) -> dict[str, int]:
    return {
        "stream": stream.argument,
        "row_bytes": stream.row_bytes,
        "block_rows": stream.block_rows,
        "rows": stream.rows,
    }


def _engine_kernel(kernels: Sequence[Kernel], consumers: int) -> Kernel:
    return Kernel(
        "megakernel",
        megakernel_source(kernels, consumers),
        [],
        entry=ENTRY,
        language="megakernel",
        local_size=consumers + HELPERS,
    )
