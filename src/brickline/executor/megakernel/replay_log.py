"""ReplayLog: what was run, over which memory, in which order, and digests of what launches wrote.

One JSON document, written whole or not at all. It holds the plan, so nothing else is needed to run
it again; of memory it holds digests, and the contents where they are small or asked for::

    {"format": "brickline-replay", "version": 1, "digest": "9c0e…",
     "log": {"kind": "plan", "plan": {…}, "device": "CPU", "executor": "serial",
             "made": "2026-11-16T04:00+00:00", "queue": null,
             "runs": [{"values": {"n": 7}, "order": [0, 1], "first": 0, "placed": [],
                       "memory": {"x": {"nbytes": 16, "digest": "ab…", "data": "eJxj…"}},
                       "written": [[[2, 0, 16, 4096, "5f3a…"]], …]}]}}

An entry of ``written`` is a list for each launch: buffer, first byte, end, bytes of a piece, and
16 hexadecimal digits for each piece.

The log of a plan has runs of all of its launches. In that of a queue (``"kind": "queue"``) every
submission is a launch, a run is submissions in a row, and memory that the host wrote before a run
is ``placed``, as buffer, first byte and contents; ``queue`` has what else was submitted, see
`queue_log`.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from brickline.documents import DocumentFormat
from brickline.errors import BricklineError, PlanError
from brickline.executor.megakernel.queue_log import QueueSubmissions, part_of
from brickline.executor.megakernel.replay_runs import LoggedRun, Written
from brickline.megakernel_tables import TaskState
from brickline.plan import Plan
from brickline.plan_buffers import Storage
from brickline.plan_files import plan_document, plan_from_document
from brickline.plan_launches import FloatVariable, Launch

DOCUMENT = DocumentFormat(
    "brickline-replay",
    version=1,
    key="log",
    name="replay log",
    remedy="record it again",
    damaged=PlanError,
    newer=PlanError,
    inaccessible=PlanError,
    sorts_keys=True,
    allows_nan=True,
)
MAX_RUNS = 10_000
"""Of a plan; those of a queue are at most as many as submissions."""


@dataclass(frozen=True)
class Piece:
    """A run as a plan of its own: every launch of it is executed."""

    plan: Plan
    run: LoggedRun
    """With the numbers of this plan's launches and buffers; what is placed has the log's."""
    numbers: tuple[int, ...] | None = None
    """Of a queue: which submission each launch is."""

    def submission(self, launch: int) -> int:
        """Return the number that a launch has in the log."""
        return launch if self.numbers is None else self.numbers[launch]


@dataclass(frozen=True)
class ReplayLog:
    """What was submitted and in which order it ran; see `replay`."""

    document: Mapping[str, Any]
    """The plan, as its file has it."""
    device: str
    executor: str
    runs: tuple[LoggedRun, ...] = ()
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    queue: QueueSubmissions | None = None
    """What is known of submissions; None of a plan."""
    built: Plan | None = field(default=None, repr=False, compare=False)
    """The plan of the document, where it was just made and nobody else has it."""

    def __post_init__(self) -> None:
        for name in ("device", "executor", "made"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or not value.isprintable():
                raise PlanError(f"replay log, {name}: expected text, got {value!r:.80}")
        if self.queue is None and len(self.runs) > MAX_RUNS:
            raise PlanError(f"replay log: expected at most {MAX_RUNS} runs, got {len(self.runs)}")
        _ = self.plan  # which is refused if it is damaged, also where there are no runs
        if self.queue is not None:
            self._check_queue(self.queue)
        for number, run in enumerate(self.runs):
            self._check_run(run, number)

    @classmethod
    def of(
        cls,
        plan: Plan,
        device: str,
        executor: str,
        runs: Sequence[LoggedRun],
        queue: QueueSubmissions | None = None,
    ) -> ReplayLog:
        """Return a log of runs of a plan, or of what was submitted to a queue.

        Raises:
            PlanError: Arrays of the plan overlap, or a run does not fit it.
        """
        built = None if queue is None else plan
        return cls(plan_document(plan), device, executor, tuple(runs), queue=queue, built=built)

    @property
    def kind(self) -> str:
        """Whose log it is: plan or queue."""
        return "plan" if self.queue is None else "queue"

    @cached_property
    def plan(self) -> Plan:
        """The plan; of a queue, with every submission as a launch."""
        return self.first_launches(None) if self.built is None else self.built

    @cached_property
    def _launches(self) -> Sequence[Launch]:
        return self.plan.launches

    @cached_property
    def _storages(self) -> Sequence[Storage]:
        return self.plan.storages

    def pieces(self, *, faulted: bool = False) -> Iterator[Piece]:
        """Yield every run as a plan whose launches are executed.

        Args:
            faulted: Of a queue: whether those are among them which faulted, were skipped or
                computed what another one did. Default False: those that were done.
        """
        queue = self.queue
        if queue is None:
            yield from (Piece(self.plan, run) for run in self.runs)
            return
        for run in self.runs:
            numbers = queue.executed(run.first, run.first + len(run.written), faulted=faulted)
            # What faulted has no place in the order.
            yield self._piece(replace(run, order=None) if faulted else run, numbers)

    def shortened(self, piece: Piece, launches: int) -> Plan:
        """Return the plan of a run with so many of its launches and all of its buffers."""
        if self.queue is None:
            return self.first_launches(launches)
        return part_of(piece.plan, range(launches), all_buffers=True)

    def first_launches(self, count: int | None) -> Plan:
        """Return the plan with so many of its launches."""
        return plan_from_document(self.document, "the plan of the replay log", launches=count)

    def _piece(self, run: LoggedRun, numbers: tuple[int, ...]) -> Piece:
        if len(numbers) == len(self._launches):
            return Piece(self.plan, run, numbers)
        part = part_of(self.plan, numbers)  # buffers that no launch touches are left out
        mine = {storage.name: storage.number for storage in part.storages}
        place = {number: at for at, number in enumerate(numbers)}
        translated = replace(
            run,
            order=None if run.order is None else tuple(place[number] for number in run.order),
            written=tuple(
                tuple(
                    each.moved(mine[self._storages[each.storage].name], 0)
                    for each in run.written[number - run.first]
                )
                for number in numbers
            ),
            first=0,
        )
        return Piece(part, translated, numbers)

    # -------------------------------------------------------------------------------------- checks

    def _check_queue(self, queue: QueueSubmissions) -> None:
        launches = self._launches
        queue.check(launches)
        if self.plan.variables:
            raise PlanError("replay log: a queue has no variables, and its plan has some")
        ends = [run.first + len(run.written) for run in self.runs]
        if [run.first for run in self.runs] != [0, *ends][: len(ends)] or [0, *ends][-1] != len(
            launches
        ):
            raise PlanError(
                f"replay log: expected runs of all {len(launches)} submissions, one after the other"
            )

    def _check_run(self, run: LoggedRun, number: int) -> None:
        plan, where = self.plan, f"replay log, run {number}"
        if set(run.values) != set(plan.variables):
            raise PlanError(
                f"{where}: expected values of {', '.join(plan.variables) or 'no variables'}, got "
                f"{', '.join(map(str, run.values)) or 'none':.200}"
            )
        for name, value in run.values.items():
            whole = not isinstance(plan.variables[name], FloatVariable)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise PlanError(f"{where}, {name}: expected a number, got {value!r:.80}")
        if self.queue is None:
            self._check_memory(run, where, all_of_it=number == 0)
            launches = self._launches
            if run.first or run.placed or len(run.written) != len(launches):
                raise PlanError(
                    f"{where}: expected digests of {len(launches)} launches, got {len(run.written)}"
                )
        else:
            self._check_placed(run, where)
            launches = self._launches[run.first : run.first + len(run.written)]
        for launch, entries in zip(launches, run.written, strict=True):
            _check_written(launch, entries, where)
        if self.queue is None:
            _check_order(launches, run.order, where)
        else:
            self._check_submissions(self.queue, run, where)

    def _check_memory(self, run: LoggedRun, where: str, *, all_of_it: bool) -> None:
        names = {storage.name: storage for storage in self.plan.storages}
        for name, contents in run.memory.items():
            if name not in names:
                raise PlanError(f"{where}: the plan has no buffer {name!r:.80}")
            if contents.nbytes != names[name].nbytes:
                raise PlanError(
                    f"{where}, {name}: expected {names[name].nbytes} bytes, got {contents.nbytes}"
                )
        missing = set(names) - set(run.memory) if all_of_it else set()
        if missing:
            raise PlanError(f"{where}: expected the memory of {min(missing)}, got none")

    def _check_placed(self, run: LoggedRun, where: str) -> None:
        storages = self._storages
        for each in run.placed:
            inside = each.storage < len(storages)
            if not inside or each.begin + each.contents.nbytes > storages[each.storage].nbytes:
                raise PlanError(
                    f"{where}: {each.contents.nbytes} bytes at {each.begin} of buffer "
                    f"{each.storage} lie outside of it"
                )
        if run.memory:
            raise PlanError(f"{where}: expected what the host placed, got memory of whole buffers")

    def _check_submissions(self, queue: QueueSubmissions, run: LoggedRun, where: str) -> None:
        end = run.first + len(run.written)
        done = queue.executed(run.first, end, faulted=False)
        for number, entries in enumerate(run.written, run.first):
            if entries and queue.states[number] is not TaskState.DONE:
                raise PlanError(f"{where}: submission {number} was not done, and has digests")
        if run.order is not None and sorted(run.order) != list(done):
            raise PlanError(f"{where}: expected an order of the {len(done)} that were done")
        if run.order is not None:
            piece = self._piece(run, done)
            _check_order(piece.plan.launches, piece.run.order, where)

    # --------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the log to a file, whole or not at all, and return its path.

        Raises:
            UsageError: The file is there and overwriting was not asked for.
            PlanError: The disk refuses, or the log is too large.
        """
        return DOCUMENT.write(DOCUMENT.text(_contents(self)), path, overwrite=overwrite)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ReplayLog:
        """Read a saved log.

        Raises:
            PlanError: It is damaged, contradicts itself, of a newer version or something else.
        """
        where = f"{path!s:.400}"
        return _log(DOCUMENT.contents(DOCUMENT.read(path), where), where)


def writes_of(launch: Launch) -> list[tuple[int, int, int]]:
    """Return buffer, first byte and end of all that a launch may write, each range once."""
    found = {
        (buffer.storage.number, buffer.offset, buffer.offset + buffer.span): None
        for param, buffer in launch.buffers()
        if param.access.writes and buffer.span
    }
    return list(found)


def _check_written(launch: Launch, entries: Sequence[Written], where: str) -> None:
    allowed = writes_of(launch)
    for each in entries:
        inside = any(
            storage == each.storage and begin <= each.begin < each.end <= end
            for storage, begin, end in allowed
        )
        if not inside or not each.is_sound():
            raise PlanError(
                f"{where}: digests of {launch} are of bytes that it does not write, or are not as "
                "many as pieces"
            )


def _check_order(launches: Sequence[Launch], order: Sequence[int] | None, where: str) -> None:
    if order is None:
        return
    if sorted(order) != list(range(len(launches))):
        raise PlanError(f"{where}: expected an order of all {len(launches)} launches, each once")
    place = {number: at for at, number in enumerate(order)}
    for launch in launches:
        for earlier in launch.waits_for:
            if place[earlier] > place[launch.number]:
                raise PlanError(
                    f"{where}: {launch} began before {launches[earlier]}, which it needs"
                )


# ------------------------------------------------------------------------------------------- JSON


def _contents(log: ReplayLog) -> dict[str, Any]:
    return {
        "kind": log.kind,
        "plan": log.document,
        "device": log.device,
        "executor": log.executor,
        "made": log.made,
        "queue": None if log.queue is None else log.queue.to_json(),
        "runs": [run.to_json() for run in log.runs],
    }


def _log(contents: Any, where: str) -> ReplayLog:
    try:
        kind, queue = contents["kind"], contents["queue"]
        if kind not in ("plan", "queue") or (kind == "plan") is not (queue is None):
            raise PlanError(f"expected the log of a plan or of a queue, got {kind!r:.80}")
        runs = tuple(LoggedRun.from_json(each) for each in contents["runs"])
        made = {name: contents[name] for name in ("device", "executor", "made")}
        submitted = None if queue is None else QueueSubmissions.from_json(queue)
        return ReplayLog(contents["plan"], runs=runs, queue=submitted, **made)
    except BricklineError as error:
        raise PlanError(f"{where}: {error}") from error
    except (
        *(KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError),
        *(OverflowError, zlib.error),
    ) as error:
        raise PlanError(
            f"{where} describes no replay log: {type(error).__name__}: {error!s:.200}"
        ) from None
