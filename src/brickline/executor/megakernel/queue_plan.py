"""Submission and SubmittedPlan: what was submitted to a queue, and the plan that it amounts to.

A submission has addresses; a plan has buffers with names, so that it can be run where nothing lies
at those addresses. Knows neither files nor when anything ran.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from brickline.buffers import Buffer
from brickline.dtypes import DTYPES
from brickline.executor.megakernel.queue_arguments import QueueOp
from brickline.executor.megakernel.queue_log import NO_ALIAS
from brickline.executor.megakernel.replay_runs import Contents, Placed, Written
from brickline.kernel import Param
from brickline.megakernel_tables import TaskState
from brickline.plan import Plan
from brickline.plan_buffers import PlanBuffer, Storage


@dataclass(slots=True)
class Submission:
    """One submission, with addresses in the place of buffers."""

    op: QueueOp
    arguments: tuple[Any, ...]
    """By signature: address, bytes and shape of a buffer, or a number."""
    priority: int
    held: Sequence[Buffer]
    """Keeps its memory until it was looked at."""
    state: TaskState = TaskState.NOT_RUN
    alias: int = NO_ALIAS
    written: list[Written] = field(default_factory=list)
    """Digests of what it wrote, by address."""

    def ranges(self, *, written: bool) -> Iterator[tuple[int, int]]:
        """Yield the addresses of what it writes, or of all that it touches."""
        for declared, given in zip(self.op.kernel.signature, self.arguments, strict=True):
            wanted = isinstance(declared, Param) and (declared.access.writes or not written)
            if wanted and given[1]:
                yield given[0], given[0] + given[1]


class SubmittedPlan:
    """A plan whose launches are submissions; arrays that overlap are one buffer of it.

    Args:
        name: What the queue is called.
        buffers: Address and bytes of every array.
        submissions: Whose arguments lie in them.
    """

    def __init__(
        self, name: str, buffers: Iterable[tuple[int, int]], submissions: Sequence[Submission]
    ) -> None:
        self.plan = Plan(name if name.isprintable() else "queue")
        params = [
            each
            for op in {submission.op.number: submission.op for submission in submissions}.values()
            for each in op.kernel.params
        ]
        # A buffer begins at a multiple, so that what was aligned is aligned in it, too.
        align = max((param.align for param in params), default=1)
        self._begins: list[int] = []
        self._ends: list[int] = []
        for address, nbytes in sorted(buffers):
            if self._ends and address // align * align < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], address + nbytes)
                continue
            self._begins.append(address // align * align)
            self._ends.append(address + nbytes)
        self._storages: dict[int, Storage] = {}
        dtypes = self._dtypes(submissions)
        nothing: PlanBuffer | None = None
        for submission in submissions:
            arguments: dict[str, Any] = {}
            for declared, given in zip(
                submission.op.kernel.signature, submission.arguments, strict=True
            ):
                if not isinstance(declared, Param):
                    arguments[declared.name] = given
                    continue
                address, nbytes, shape = given
                if not nbytes:
                    nothing = nothing or self.plan.buffer(self._unused("nothing"), 0, "u8")
                    storage, offset = nothing.storage, 0
                else:
                    storage = self._storage(address, declared, dtypes)
                    offset = address - self._begins[self._at(address)]
                arguments[declared.name] = PlanBuffer(
                    self.plan, storage, offset, tuple(shape), declared.dtype
                )
            self.plan.launch(submission.op.kernel, **arguments)

    def moved(self, written: Written) -> Written:
        """Return digests of addresses as those of a buffer."""
        at = self._at(written.begin)
        return written.moved(self._storages[at].number, -self._begins[at])

    def placed(self, begin: int, contents: Contents) -> Placed:
        """Return contents of addresses as those of a buffer."""
        at = self._at(begin)
        return Placed(self._storages[at].number, begin - self._begins[at], contents)

    def _at(self, address: int) -> int:
        return bisect_right(self._begins, address) - 1

    def _dtypes(self, submissions: Sequence[Submission]) -> dict[int, set[str]]:
        """Return as what the bytes of each buffer are taken."""
        found: dict[int, set[str]] = {}
        for submission in submissions:
            signature = submission.op.kernel.signature
            for declared, given in zip(signature, submission.arguments, strict=True):
                if isinstance(declared, Param) and given[1]:
                    found.setdefault(self._at(given[0]), set()).add(declared.dtype)
        return found

    def _storage(self, address: int, param: Param, dtypes: dict[int, set[str]]) -> Storage:
        at = self._at(address)
        found = self._storages.get(at)
        if found is None:
            nbytes = self._ends[at] - self._begins[at]
            (dtype, *others) = dtypes[at]
            size = DTYPES[dtype].size_bytes
            if others or nbytes % size:
                dtype, size = "u8", 1
            made = self.plan.buffer(self._unused(param.name), nbytes // size, dtype)
            found = self._storages[at] = made.storage
        return found

    def _unused(self, name: str) -> str:
        """Return a name that no buffer of the plan has."""
        taken, count = name, 0
        while taken in self.plan._names or taken == "stream":
            count += 1
            taken = f"{name}_{count}"
        return taken


def rows_of(column: Any, count: int) -> Iterable[Any]:
    """Return what a column holds for each submission; see `QueueOp.columns`."""
    if isinstance(column, np.ndarray):
        return cast("list[Any]", column.tolist())
    if not isinstance(column, tuple):
        return [column] * count
    address, step, nbytes, shape = column
    places = address.tolist() if step is None else [address + job * step for job in range(count)]
    return [(place, nbytes, shape) for place in places]
