"""What a plan says of itself: why each launch waits, and why two may or may not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from brickline.errors import PlanError
from brickline.hazards import Hazard, HazardKind
from brickline.plan_launches import Launch
from brickline.symbolic_values import integer_of

if TYPE_CHECKING:
    from brickline.plan import Plan

SHORT = {
    HazardKind.READ_AFTER_WRITE: "reads",
    HazardKind.WRITE_AFTER_READ: "overwrites what is read",
    HazardKind.WRITE_AFTER_WRITE: "overwrites",
}


def explain_plan(plan: Plan) -> str:
    """Return a line for each launch, and under it one for each launch that it waits for."""
    launches = plan.launches
    edges = sum(len(launch.waits_for) for launch in launches)
    depth = _depths(launches)
    longest = max(depth, default=0)
    lines = [
        f"plan {plan.name}: {counted(len(launches), 'launch')} over "
        f"{counted(len(plan.storages), 'buffer')}, {counted(edges, 'edge')}; the longest chain has "
        f"{counted(longest, 'launch')}"
    ]
    for launch in launches:
        layer = "" if launch.layer is None else f"  layer {launch.layer}"
        brick = "" if launch.brick == launch.kernel.name else f"  {launch.brick}"
        lines.append(f"{launch.number:>4}  {launch.kernel.name}{brick}{layer}")
        for earlier in launch.waits_for:
            reasons = [hazard for hazard in launch.hazards if hazard.earlier == earlier]
            lines.append(f"        after {launches[earlier]}: {_reasons(launch, reasons)}")
        if not launch.kernel.host_parallel_safe:
            lines.append("        alone: the kernel is not host_parallel_safe")
    return "\n".join(lines)


def check_has_launches(plan: Plan) -> None:
    """Refuse a plan that has nothing to run.

    Raises:
        PlanError: It has no launches.
    """
    if not plan.launches:
        raise PlanError(f"plan {plan.name} has no launches; add some with plan.launch")


def explain_pair(plan: Plan, first: int, second: int) -> str:
    """Say whether two launches may overlap, and why not."""
    check_has_launches(plan)
    launches = plan.launches
    numbers = []
    for given in (first, second):
        number = integer_of(given)
        if number is None or not 0 <= number < len(launches):
            got = f"{given}; pass its number" if isinstance(given, Launch) else f"{given!r:.80}"
            raise PlanError(
                f"expected the number of a launch from 0 to {len(launches) - 1}, got {got}"
            )
        numbers.append(number)
    earlier, later = (launches[number] for number in sorted(numbers))
    if earlier is later:
        raise PlanError(f"expected two launches, got {earlier} twice")
    direct = [hazard for hazard in later.hazards if hazard.earlier == earlier.number]
    if direct:
        return f"{later} waits for {earlier}: it {_reasons(later, direct)}"
    way = _way(launches, earlier.number, later.number)
    if way:
        through = ", then ".join(str(launches[number]) for number in way[1:-1])
        return f"{later} waits for {earlier} through {through}"
    alone = [each for each in (earlier, later) if not each.kernel.host_parallel_safe]
    if alone:
        names = " and ".join(map(str, alone))
        return (
            f"{earlier} and {later} share no memory that either writes, but {names} runs alone on "
            "a CPU: a kernel that is not host_parallel_safe"
        )
    return f"{earlier} and {later} may overlap: neither touches what the other writes"


def _reasons(launch: Launch, hazards: Iterable[Hazard]) -> str:
    """Return the hazards in words, one for each kind and buffer."""
    ranges: dict[tuple[HazardKind, str], tuple[int, int]] = {}
    for hazard in hazards:
        name, base = _whose(launch, hazard)
        begin, end = hazard.begin - base, hazard.end - base
        known = ranges.get((hazard.kind, name))
        if known is not None:
            begin, end = min(begin, known[0]), max(end, known[1])
        ranges[hazard.kind, name] = begin, end
    return "; ".join(
        f"{SHORT[kind]} {name} bytes {begin} to {end}"
        for (kind, name), (begin, end) in ranges.items()
    )


def _whose(launch: Launch, hazard: Hazard) -> tuple[str, int]:
    """Return the name of the buffer that a hazard is about, and where it begins."""
    for _, buffer in launch.buffers():
        space, begin, end = buffer.range
        if space == hazard.space and max(begin, hazard.begin) < min(end, hazard.end):
            return buffer.name, buffer.storage.base
    return "memory", 0


def _depths(launches: Sequence[Launch]) -> list[int]:
    """Return how many launches the longest chain to each one has."""
    depth: list[int] = []
    for launch in launches:
        depth.append(1 + max((depth[each] for each in launch.waits_for), default=0))
    return depth


def _way(launches: Sequence[Launch], first: int, last: int) -> list[int] | None:
    """Return a chain of launches that wait for one another, from the first to the last."""
    came: dict[int, int] = {}
    front = [last]
    while front:
        number = front.pop()
        for earlier in launches[number].waits_for:
            if earlier < first or earlier in came:
                continue
            came[earlier] = number
            if earlier == first:
                way = [first]
                while way[-1] != last:
                    way.append(came[way[-1]])
                return way
            front.append(earlier)
    return None


def counted(number: int, what: str) -> str:
    """Return so many of something, in words.

    Example:
        >>> counted(1, "launch"), counted(2, "launch")
        ('1 launch', '2 launches')
    """
    plural = f"{what}es" if what.endswith("ch") else f"{what}s"
    return f"{number} {what if number == 1 else plural}"
