"""Which launches of a plan form a region: a chain that a worker runs part by part, without a wait.

A launch joins the region of the one before it where it waits for that one, has as many blocks, and
no block of it touches what another block of a member writes, or the reverse. That is proved from
`Param.touches`, for all values of the plan's variables at once; what cannot be proved is refused,
with a code. Knows launches and expressions, nothing of workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice, product
from operator import add, mul

from brickline.errors import SymbolicError
from brickline.executor.megakernel.refusals import block_count
from brickline.kernel import BLOCK_INDEX, Param
from brickline.plan_buffers import PlanBuffer
from brickline.plan_launches import Launch
from brickline.plan_words import counted
from brickline.symbolic import Expr
from brickline.symbolic_ops import Op

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

    def __init__(self, joined: Sequence[bool], refused: Sequence[NotJoined]) -> None:
        self.joined = tuple(joined)
        """Whether each launch is of the region of the one before it."""
        self.refused = tuple(refused)
        """Of every other launch but the first, why it is not."""
        members: list[list[int]] = []
        for number, is_joined in enumerate(self.joined):
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
        return Regions(joined, sorted(refused, key=lambda each: each.launch))

    def explain(self) -> str:
        """Say which launches run together, and why the others do not."""
        together = [each for each in self if len(each) > 1]
        lines = [f"{counted(len(self.joined), 'launch')} in {counted(len(self), 'region')}"]
        lines += [
            f"launches {each[0]} to {each[-1]} are one region: a worker runs its part of them "
            "without a wait"
            for each in together
        ]
        return "\n".join([*lines, *map(str, self.refused)])


def find_regions(launches: Sequence[Launch]) -> Regions:
    """Return the regions of launches, in the order of the plan."""
    joined, refused = [False] * len(launches), []
    region: list[Launch] = []
    for launch in launches:
        found = _why_not(region, launch) if region else None
        if region and found is None:
            joined[launch.number] = True
        else:
            region = []
        if found is not None:
            refused.append(NotJoined(launch.number, *found))
        region.append(launch)
    return Regions(joined, refused)


def _why_not(region: Sequence[Launch], launch: Launch) -> tuple[str, str] | None:
    """Return the code and the detail that keep a launch out of a region; None: it joins."""
    before = region[-1]
    if before.number not in launch.waits_for:
        return "MK301", f"neither touches what {before} writes, nor writes what it reads"
    for each in (before, launch):
        if not each.kernel.host_parallel_safe:
            return "MK310", f"{each} has a kernel with host_parallel_safe=False"
    blocks, others = block_count(launch), block_count(before)
    if blocks is not others:
        return "MK302", f"{blocks}, and {before} has {others}"
    for member in region:
        for mine, theirs in _shared(launch, member):
            found = _why_not_beside(launch, mine, member, theirs, is_single=blocks.value == 1)
            if found is not None:
                return found
    return None


Use = tuple[Param, PlanBuffer]


def _shared(launch: Launch, member: Launch) -> Iterator[tuple[Use, Use]]:
    """Yield the buffers of two launches that overlap, where one of the launches writes."""
    for mine in launch.buffers():
        for theirs in member.buffers():
            if not (mine[0].access.writes or theirs[0].access.writes):
                continue
            space, begin, end = mine[1].range
            other_space, other_begin, other_end = theirs[1].range
            if space == other_space and begin < other_end and other_begin < end:
                yield mine, theirs


def _why_not_beside(
    launch: Launch, mine: Use, member: Launch, theirs: Use, *, is_single: bool
) -> tuple[str, str] | None:
    place = f"{mine[0].name}, {mine[1].name}, which {member} calls {theirs[0].name}"
    if mine[0].accumulate is not None or theirs[0].accumulate is not None:
        return "MK305", place
    if is_single:
        return None
    for each in (launch, member):
        if list(each.sizes[1:3]) != [1, 1]:
            return "MK303", f"{place}; {each} has blocks along more than one axis"
    ranges = []
    for each, (param, buffer) in ((launch, mine), (member, theirs)):
        found = block_range(each, param, buffer)
        if found is None:
            return "MK303", f"{place}; {each} does not declare which part of it block_x touches"
        ranges.append(found)
    if _are_apart(ranges[0], ranges[1]) and _are_apart(ranges[1], ranges[0]):
        return None
    return "MK303", f"{place}; ranges of blocks cannot be shown to be apart"


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Bytes that a block touches, over block_x and the plan's variables."""

    begin: Expr
    end: Expr
    base: int
    """From where both are counted."""


def block_range(launch: Launch, param: Param, buffer: PlanBuffer) -> BlockRange | None:
    """Return what a block of a launch touches of a buffer.

    None where that is not declared, or depends on more than block_x and the plan's variables.
    """
    if param.touches is None:
        return None
    pairs = zip(launch.kernel.signature, launch.arguments, strict=True)
    values = {
        declared.name: given
        for declared, given in pairs
        if not isinstance(declared, Param) and isinstance(given, int | Expr)
    }
    named = {each.name for value in values.values() for each in Expr.of(value).variables}
    if named & {index.name for index in BLOCK_INDEX}:  # of the plan, and not the block's place
        return None
    try:
        begin, end = (each.substitute(values) for each in param.touches)
    except SymbolicError:
        return None
    others = {index.name for index in BLOCK_INDEX[1:]}
    if others & {each.name for each in begin.variables | end.variables}:
        return None
    return BlockRange(begin, end, buffer.range[1])


def _are_apart(first: BlockRange, second: BlockRange) -> bool:
    """Whether no block touches of the second what a later block touches of the first.

    The first begins no earlier with each block, and with the next block not before the second has
    ended: so it does with all blocks that follow.
    """
    try:
        following = first.begin.substitute({"block_x": BLOCK_INDEX[0] + 1})
        shifted = following + (first.base - second.base)
        return _is_never_below(following, first.begin) and _is_never_below(shifted, second.end)
    except SymbolicError:  # an expression grew too large
        return False


def _is_never_below(left: Expr, right: Expr) -> bool:
    """Whether one value is at least the other, whatever the variables are."""
    return any((left - each).low >= 0 for each in _bounds(right))


def _bounds(value: Expr) -> list[Expr]:
    """Return values that are never below one: itself, and those with operands for a minimum."""
    if value.op is Op.MIN:
        return [value, *(bound for each in value.args for bound in _bounds(each))]
    if value.op is Op.MUL and all(each.low >= 0 for each in value.args):
        return [reduce(mul, each) for each in _choices(value.args)]
    if value.op is Op.ADD:
        return [reduce(add, each) for each in _choices(value.args)]
    return [value]


def _choices(operands: Sequence[Expr]) -> list[tuple[Expr, ...]]:
    """Return operands with bounds in their places, a few of many."""
    return list(islice(product(*map(_bounds, operands)), 64))
