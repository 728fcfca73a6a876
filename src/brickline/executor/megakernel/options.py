"""What a plan is asked for as a megakernel, checked when it is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from brickline.errors import PlanError
from brickline.executor.megakernel.refusals import refusal
from brickline.plan_arguments import checked_flag

MAX_WORKERS = 1024
LONGEST_S = 1_000_000_000
"""Longest deadline; longer ones do not fit a clock of ns."""


@dataclass(frozen=True)
class MegakernelOptions:
    """Options of executor "megakernel"."""

    workers: int | None = None
    """Threads or blocks that share the items. Default None: as many as the device has cores."""
    max_wall_time: float | None = None
    """Seconds after which workers leave. Default None: never, because most plans end."""
    trace: bool = False
    """Whether every part of a launch is recorded with its times."""
    lineage: bool = False
    """Whether the report tells where every output came from."""
    dedupe: bool = True
    """Whether launches that compute the same into the same memory are run once."""

    @classmethod
    def checked(cls, where: str, executor: str, **given: Any) -> MegakernelOptions:
        """Return the options of `prepare`.

        Args:
            where: The plan, for the message.
            executor: The executor; any other than "megakernel" takes none of them.
            **given: The fields.

        Raises:
            PlanError: A value does not fit, or the executor is another one.
        """
        made = cls(**given)
        asked = [name for name, value in given.items() if value is not getattr(cls, name)]
        if executor != "megakernel" and asked:
            raise PlanError(
                f"{where}: {asked[0]} is an option of executor megakernel, got executor "
                f"{executor!r}; leave it out, or pass executor='megakernel'"
            )
        made._check(where)
        return made

    def _check(self, where: str) -> None:
        for name in ("trace", "lineage", "dedupe"):
            checked_flag(getattr(self, name), where, name)
        count, limit = self.workers, self.max_wall_time
        if count is not None and (
            not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_WORKERS
        ):
            got = f"{count!r:.80}, and expected 1 to {MAX_WORKERS}"
            raise refusal("MK108", f"{where}, workers", got)
        if limit is None:
            return
        is_number = isinstance(limit, int | float) and not isinstance(limit, bool)
        if not is_number or not math.isfinite(limit) or not 1e-9 <= limit <= LONGEST_S:
            got = f"{limit!r:.80}, and expected seconds above 0 and up to {LONGEST_S}"
            raise refusal("MK106", f"{where}, max_wall_time", got)

    @property
    def deadline_ns(self) -> int:
        """The deadline from the beginning of a run; 0: none."""
        return 0 if self.max_wall_time is None else max(round(self.max_wall_time * 1e9), 1)
