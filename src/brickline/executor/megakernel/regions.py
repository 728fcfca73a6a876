"""Which launches of a plan form a region: a chain that a worker runs part by part, without a wait.

A launch joins the region of the one before it where it waits for that one, has as many blocks, and
no block of it touches what another block of a member writes, or the reverse. Launches that are not
run (`deduped`) stand in between nobody. That is proved from
`Param.touches`, for all values of the plan's variables at once; what cannot be proved is refused,
with a code. Knows launches and expressions, nothing of workers.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from brickline.executor.megakernel.block_ranges import BlockRange, are_apart, block_range
from brickline.executor.megakernel.deduped import Deduped, all_run
from brickline.executor.megakernel.refusals import block_count
from brickline.plan_launches import Launch
from brickline.plan_words import counted

REASONS = {
    "MK301": "it does not wait for the launch before it",
    "MK302": "it has another number of blocks",
    "MK303": "a block of it may touch what another block of the region writes, or the reverse",
    "MK305": "its blocks, or those of the region, add to one another's results",
    "MK310": "its kernel, or one of the region, may not run beside others",
}
"""Why a launch does not join the region of the one before it."""


@dataclass(frozen=True, slots=True)
class NotJoined:
    """Why a launch begins a region of its own."""

    launch: int
    code: str
    """One of `REASONS`."""
    detail: str
    """What of the launch it is."""

    def __str__(self) -> str:
        return f"launch {self.launch}: {self.code}: {REASONS[self.code]}: {self.detail}"


class Regions(Sequence[tuple[int, ...]]):
    """The regions of a plan, each as the numbers of its launches, in order."""

    def __init__(
        self, joined: Sequence[bool], refused: Sequence[NotJoined], not_run: Collection[int] = ()
    ) -> None:
        self.joined = tuple(joined)
        """Whether each launch is of the region of the last one before it that is run."""
        self.refused = tuple(refused)
        """Of every other launch that is run but the first, why it is not."""
        self._not_run = frozenset(not_run)
        members: list[list[int]] = []
        for number, is_joined in enumerate(self.joined):
            if number in self._not_run:
                continue
            if is_joined:
                members[-1].append(number)
            else:
                members.append([number])
        self._members = tuple(map(tuple, members))

    def __getitem__(self, index: int) -> tuple[int, ...]:  # type: ignore[override]
        return self._members[index]

    def __len__(self) -> int:
        return len(self._members)

    def without(self, launch: int, detail: str) -> Regions:
        """Return the same regions with one cut before a launch."""
        joined = list(self.joined)
        joined[launch] = False
        refused = [*self.refused, NotJoined(launch, "MK303", detail)]
        return Regions(joined, sorted(refused, key=lambda each: each.launch), self._not_run)

    def explain(self) -> str:
        """Say which launches run together, and why the others do not."""
        together = [each for each in self if len(each) > 1]
        launches = counted(len(self.joined) - len(self._not_run), "launch")
        lines = [f"{launches} in {counted(len(self), 'region')}"]
        lines += [
            f"launches {_listed(each)} are one region: a worker runs its part of them without a "
            "wait"
            for each in together
        ]
        return "\n".join([*lines, *map(str, self.refused)])


def _listed(launches: Sequence[int]) -> str:
    """Return the numbers of launches; of those in a row, the first and the last."""
    first, last = launches[0], launches[-1]
    if last - first == len(launches) - 1:
        return f"{first} to {last}"
    return ", ".join(map(str, launches))


def find_regions(launches: Sequence[Launch], deduped: Deduped | None = None) -> Regions:
    """Return the regions of launches, in the order of the plan.

    Args:
        launches: All of a plan.
        deduped: Which of them are not run. Default None: all are.
    """
    deduped = all_run(launches) if deduped is None else deduped
    joined, refused = [False] * len(launches), []
    region: _Region | None = None
    for launch in launches:
        if not deduped.is_run(launch.number):
            continue
        uses = list(_uses_of(launch))
        found = None if region is None else region.why_not(launch, uses, deduped.waits_of(launch))
        if found is not None:
            refused.append(NotJoined(launch.number, *found))
        joined[launch.number] = region is not None and found is None
        if region is None or found is not None:
            region = _Region()
        region.add(launch, uses)
    not_run = [each.number for each in launches if not deduped.is_run(each.number)]
    return Regions(joined, refused, not_run)


@dataclass(frozen=True, slots=True)
class _Use:
    """A buffer of a launch; equal where the blocks of both touch the same bytes in the same way."""

    space: Hashable
    begin: int
    end: int
    writes: bool
    accumulates: bool
    blocks: BlockRange | None
    """What a block touches, where that is declared."""
    has_one_axis: bool
    """Whether the launch has blocks along one axis alone."""
    launch: Launch = field(compare=False)
    name: str = field(compare=False)
    buffer: str = field(compare=False)

    def meets(self, other: _Use) -> bool:
        """Whether both touch the same bytes, and one of them writes."""
        is_apart = self.end <= other.begin or other.end <= self.begin
        return (self.writes or other.writes) and not is_apart


def _uses_of(launch: Launch) -> Iterator[_Use]:
    has_one_axis = list(launch.sizes[1:3]) == [1, 1]
    for param, buffer in launch.buffers():
        yield _Use(
            *buffer.range,
            writes=param.access.writes,
            accumulates=param.accumulate is not None,
            blocks=block_range(launch, param, buffer),
            has_one_axis=has_one_axis,
            launch=launch,
            name=param.name,
            buffer=buffer.name,
        )


class _Region:
    """A region that grows: its last launch, and what all of them touch, each use once."""

    def __init__(self) -> None:
        self._last: Launch | None = None
        self._uses: dict[Hashable, dict[_Use, None]] = {}

    def add(self, launch: Launch, uses: Sequence[_Use]) -> None:
        self._last = launch
        for use in uses:
            self._uses.setdefault(use.space, {}).setdefault(use)

    def why_not(
        self, launch: Launch, uses: Sequence[_Use], waits: Sequence[int]
    ) -> tuple[str, str] | None:
        """Return the code and the detail that keep a launch out of it; None: it joins."""
        before = self._last
        assert before is not None
        if before.number not in waits:
            return "MK301", f"neither touches what {before} writes, nor writes what it reads"
        for each in (before, launch):
            if not each.kernel.host_parallel_safe:
                return "MK310", f"{each} has a kernel with host_parallel_safe=False"
        blocks, others = block_count(launch), block_count(before)
        if blocks is not others:
            return "MK302", f"{blocks}, and {before} has {others}"
        for mine in uses:
            for theirs in self._uses.get(mine.space, ()):
                if mine.meets(theirs):
                    found = _why_not_beside(mine, theirs, is_single=blocks.value == 1)
                    if found is not None:
                        return found
        return None


def _why_not_beside(mine: _Use, theirs: _Use, *, is_single: bool) -> tuple[str, str] | None:
    place = f"{mine.name}, {mine.buffer}, which {theirs.launch} calls {theirs.name}"
    if mine.accumulates or theirs.accumulates:
        return "MK305", place
    if is_single:
        return None
    for each in (mine, theirs):
        if not each.has_one_axis:
            return "MK303", f"{place}; {each.launch} has blocks along more than one axis"
        if each.blocks is None:
            missing = f"{each.launch} does not declare which part of it block_x touches"
            return "MK303", f"{place}; {missing}"
    assert mine.blocks is not None
    assert theirs.blocks is not None
    if are_apart(mine.blocks, theirs.blocks) and are_apart(theirs.blocks, mine.blocks):
        return None
    return "MK303", f"{place}; ranges of blocks cannot be shown to be apart"
