"""QueueSubmissions: what a replay log keeps of submissions beside their launches.

Ops by name, priorities, batches, what became of each submission, faults, and the items in the order
in which they began. Values and their checks; how they are recorded is the matter of
`queue_recording`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from brickline.errors import PlanError
from brickline.megakernel_tables import TaskState
from brickline.plan import Plan
from brickline.plan_buffers import PlanBuffer
from brickline.plan_launches import Argument, Launch

NO_ALIAS = -1
FATES = (
    *(TaskState.DONE, TaskState.NOT_RUN, TaskState.SKIPPED),
    *(TaskState.FAULTED, TaskState.DEDUPED),
)
"""What may have become of a submission."""
_COLUMNS = ("op", "priority", "batch_ends", "states", "aliases")


@dataclass(frozen=True)
class QueueSubmissions:
    """What is known of submissions, by their numbers in the log."""

    ops: tuple[str, ...]
    """Names of the ops."""
    workers: int
    op: tuple[int, ...]
    priority: tuple[int, ...]
    batch_ends: tuple[int, ...]
    """The submission after the last of each batch."""
    states: tuple[TaskState, ...]
    aliases: tuple[int, ...]
    """Of a deduped one, the submission that computed it; else -1."""
    faults: tuple[tuple[int, int, int], ...] = ()
    """Submission, item and code."""
    items: tuple[tuple[int, int, int], ...] | None = None
    """Submission, item and worker, in the order in which items began; None where none were kept."""
    retry_codes: tuple[int, ...] = ()
    retry_limit: int = 0

    def __len__(self) -> int:
        return len(self.op)

    def executed(self, begin: int, end: int, *, faulted: bool) -> tuple[int, ...]:
        """Return the submissions of a range that were done, or else all that were decided."""
        unwanted = {TaskState.NOT_RUN}
        if not faulted:
            unwanted |= set(TaskState) - {TaskState.DONE}
        return tuple(number for number in range(begin, end) if self.states[number] not in unwanted)

    def fault_of(self, submission: int) -> tuple[int, int] | None:
        """Return the first item of a submission that faulted, and its code."""
        found = [(item, code) for number, item, code in self.faults if number == submission]
        return min(found, default=None)

    def place_of(self, submission: int, item: int) -> tuple[int, int] | None:
        """Return as which an item began, from 0 on, and on which worker; None if not known."""
        for place, (number, block, worker) in enumerate(self.items or ()):
            if (number, block) == (submission, item):
                return place, worker
        return None

    def check(self, launches: Sequence[Launch]) -> None:
        """Hold it against the launches of its submissions.

        Raises:
            PlanError: It contradicts itself or them.
        """
        count = len(launches)
        for name in ("op", "priority", "states", "aliases"):
            if len(getattr(self, name)) != count:
                raise PlanError(
                    f"replay log, {name}: expected one for each of {count} submissions, got "
                    f"{len(getattr(self, name))}"
                )
        ends = (0, *self.batch_ends)
        if any(first >= second for first, second in pairwise(ends)) or ends[-1] != count:
            raise PlanError(f"replay log: expected batches of all {count} submissions, in order")
        kernels: dict[int, str] = {}
        for launch, op in zip(launches, self.op, strict=True):
            known = kernels.setdefault(op, launch.kernel.digest)
            if op >= len(self.ops) or known != launch.kernel.digest:
                raise PlanError(f"replay log, {launch}: expected the kernel of its op, got op {op}")
        if max(self.priority, default=0) > 4:
            raise PlanError(f"replay log: expected priorities to 4, got {max(self.priority)}")
        self._check_fates()
        self._check_items(launches)

    def _check_fates(self) -> None:
        for number, (state, alias) in enumerate(zip(self.states, self.aliases, strict=True)):
            is_alias = state is TaskState.DEDUPED
            computed = 0 <= alias < number and self.states[alias] is not TaskState.DEDUPED
            if state not in FATES or (not computed if is_alias else alias != NO_ALIAS):
                raise PlanError(
                    f"replay log, submission {number}: expected what became of it, got state "
                    f"{int(state)} and alias {alias}"
                )
        faulted = {number for number, _, _ in self.faults}
        if any(
            number >= len(self) or self.states[number] not in (TaskState.FAULTED, TaskState.NOT_RUN)
            for number in faulted
        ):
            raise PlanError("replay log: there are faults of submissions that did not fault")

    def _check_items(self, launches: Sequence[Launch]) -> None:
        blocks = [blocks_of(launch) for launch in launches]
        if any(worker >= self.workers for _, _, worker in self.items or ()):
            raise PlanError(f"replay log: expected workers below {self.workers}")
        numbered = [(number, item) for number, item, _ in (*self.faults, *(self.items or ()))]
        for number, item in numbered:
            if number >= len(blocks) or item >= blocks[number]:
                raise PlanError(
                    f"replay log: there is no item {item} of submission {number} to have run"
                )

    # ---------------------------------------------------------------------------------------- JSON

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "ops": list(self.ops),
            "workers": self.workers,
            **{name: [int(each) for each in getattr(self, name)] for name in _COLUMNS},
            "faults": [list(each) for each in self.faults],
            "items": None if self.items is None else [list(each) for each in self.items],
            "retry_codes": list(self.retry_codes),
            "retry_limit": self.retry_limit,
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> QueueSubmissions:
        """Read what `to_json` returned.

        Raises:
            PlanError: A value is something else.
        """
        names = entry["ops"]
        if not isinstance(names, list) or len(set(map(str, names))) != len(names):
            raise PlanError(f"ops: expected names, each once, got {names!r:.80}")
        for name in names:
            if not isinstance(name, str) or not name:
                raise PlanError(f"ops: expected names, got {name!r:.80}")
        items = entry["items"]
        return cls(
            ops=tuple(names),
            workers=natural(entry["workers"]),
            op=_naturals(entry["op"]),
            priority=_naturals(entry["priority"]),
            batch_ends=_naturals(entry["batch_ends"]),
            states=tuple(TaskState(each) for each in _naturals(entry["states"])),
            aliases=tuple(
                NO_ALIAS if each == NO_ALIAS else natural(each) for each in entry["aliases"]
            ),
            faults=_triples(entry["faults"]),
            items=None if items is None else _triples(items),
            retry_codes=_naturals(entry["retry_codes"]),
            retry_limit=natural(entry["retry_limit"]),
        )


def blocks_of(launch: Launch) -> int:
    """Return how many items a submission has."""
    return math.prod(size if isinstance(size, int) else 0 for size in launch.sizes[:3])


def part_of(plan: Plan, numbers: Iterable[int], *, all_buffers: bool = False) -> Plan:
    """Return a plan of some launches of one that has no variables.

    Args:
        plan: Whose launches.
        numbers: Which, in order.
        all_buffers: Whether buffers that they do not touch are kept, too, with their numbers.
    """
    made = Plan(plan.name)
    whole: dict[int, PlanBuffer] = {}
    if all_buffers:
        for storage in plan.storages:
            whole[storage.number] = made.buffer(storage.name, storage.shape, storage.dtype)

    def own(given: Argument) -> Any:
        if not isinstance(given, PlanBuffer):
            return given
        storage = given.storage
        if storage.number not in whole:
            whole[storage.number] = made.buffer(storage.name, storage.shape, storage.dtype)
        mine = whole[storage.number].storage
        return PlanBuffer(made, mine, given.offset, given.shape, given.dtype, given.strides)

    launches = plan.launches
    for number in numbers:
        launch = launches[number]
        names = (declared.name for declared in launch.kernel.signature)
        given = {name: own(each) for name, each in zip(names, launch.arguments, strict=True)}
        made.launch(launch.kernel, brick=launch.brick, layer=launch.layer, **given)
    return made


def natural(value: Any) -> int:
    """Return a number from 0 on, as a file must have it.

    Raises:
        PlanError: It is something else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise PlanError(f"expected a number from 0 on, got {value!r:.80}")
    return value


def _naturals(values: Any) -> tuple[int, ...]:
    return tuple(map(natural, values))


def _triples(values: Any) -> tuple[tuple[int, int, int], ...]:
    found = []
    for each in values:
        first, second, third = map(natural, each)
        found.append((first, second, third))
    return tuple(found)
