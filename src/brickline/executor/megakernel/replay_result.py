"""What a replay found: the same bits, or the first launch, byte and block that differ.

Values only; how they are found is the matter of `replay`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ReplayStatus(StrEnum):
    """What a replay says."""

    SAME = "same"
    DIFFERS = "differs"
    INCONCLUSIVE = "inconclusive"
    """The log holds no digests, so nothing was compared."""


@dataclass(frozen=True)
class ReplayDifference:
    """The first launch that wrote something else, and where."""

    run: int
    task: int
    launch: str
    brick: str
    buffer: str
    begin: int
    """First byte of the buffer that differs; where it is not exact, a piece that holds it."""
    end: int
    is_exact: bool
    block: tuple[int, int, int] | None = None
    """The item that wrote it, where its kernel declares what a block touches."""
    dtype: str = ""
    element: int | None = None
    """Place of the element in the buffer, where it is exact."""
    recorded: str | None = None
    replayed: str | None = None
    why_not_exact: str = ""
    argument: str = ""
    """Of a submission: which element of which argument that is."""
    ran: str = ""
    """Of a submission: when and where the item ran that wrote it, as it was recorded."""
    fate: str = ""
    """Of a submission that ended otherwise, instead of a place in a buffer: how."""

    def __str__(self) -> str:
        if self.fate:
            return f"{self.launch}, {self.fate}"
        where = f"bytes {self.begin} to {self.end}"
        if self.is_exact:
            where = f"element {self.element} of {self.dtype}, byte {self.begin}: recorded "
            where += f"{self.recorded}, replayed {self.replayed}"
        brick = f", brick {self.brick}" if self.brick else ""
        words = f"{self.launch}{brick}, wrote something else to {self.buffer}, {where}"
        if self.argument:
            words += f"; that is {self.argument}"
        if self.block is not None:
            words += f"; block {self.block} writes it{self.ran}"
        elif self.is_exact:
            words += "; its kernel does not declare which block touches what"
        if self.why_not_exact:
            words += f"; {self.why_not_exact}"
        return words


@dataclass(frozen=True)
class ReplayResult:
    """What a replay found. True if every digest of the log was met."""

    plan: str
    recorded_on: str
    replayed_on: str
    runs: int
    launches: int
    """Of all runs."""
    compared: int
    """Pieces whose digests were compared."""
    pieces: int
    """Pieces that the log has digests of, as far as the replay came."""
    difference: ReplayDifference | None = None
    tasks: str = "launches"
    """What `launches` are: those of a plan, or submissions."""
    left_out: int = 0
    """Submissions that are not run again: not done, or computed by another one."""

    @property
    def status(self) -> ReplayStatus:
        """What it says, in one word."""
        if self.difference is not None:
            return ReplayStatus.DIFFERS
        return ReplayStatus.SAME if self.compared else ReplayStatus.INCONCLUSIVE

    @property
    def exit_status(self) -> int:
        """Return 0 for the same, 1 where it differs, 3 for inconclusive."""
        return {"same": 0, "differs": 1, "inconclusive": 3}[self.status]

    def __bool__(self) -> bool:
        return self.status is ReplayStatus.SAME

    def __str__(self) -> str:
        head = f"{self.plan}: recorded on {self.recorded_on}, replayed on {self.replayed_on}"
        if self.difference is not None:
            again = f" in run {self.difference.run}" if self.runs > 1 else ""
            return f"{head}: differs first{again} at {self.difference}"
        if not self.compared:
            return f"{head}: nothing was compared, because the log has no digests; record it again"
        runs = "" if self.runs == 1 else f" over {self.runs} runs"
        words = f"{head}: the same bits, {self.launches:,} {self.tasks}{runs}, {self.compared:,}"
        hidden = self.pieces - self.compared
        words += " pieces compared"
        words += f"; {hidden:,} more are overwritten later in the run" if hidden else ""
        left = f"; {self.left_out:,} more were deduped or not done, and are left out"
        return words + (left if self.left_out else "")
