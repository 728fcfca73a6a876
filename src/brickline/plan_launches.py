"""Launch: one launch of a plan, with its arguments, its shape and whom it waits for.

Data, and what follows from several launches or from the values of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from brickline.hazards import Hazard, Tracker
from brickline.kernel import Kernel, Param
from brickline.plan_buffers import Extent, PlanBuffer
from brickline.symbolic import Expr


@dataclass(frozen=True, eq=False, slots=True)
class FloatVariable:
    """A floating-point number of a plan whose value is given at each run."""

    name: str
    default: float


Argument: TypeAlias = PlanBuffer | int | float | Expr | FloatVariable
SIZES = (
    *(f"global_size[{axis}]" for axis in range(3)),
    *(f"local_size[{axis}]" for axis in range(3)),
    "shared_bytes",
)
"""What a launch shape has, in the launcher's order."""


@dataclass(frozen=True, eq=False, slots=True)
class Launch:
    """One launch of a plan."""

    number: int
    kernel: Kernel
    arguments: tuple[Argument, ...]
    """In the order of the kernel's signature."""
    sizes: tuple[Extent, ...]
    """The launch shape, in the order of `SIZES`."""
    brick: str
    layer: int | None
    hazards: tuple[Hazard, ...]
    """Every byte range for which it waits, and for whom."""
    waits_for: tuple[int, ...]
    """The launches that must have ended before it begins, in order."""
    work: tuple[Extent | None, Extent | None] = (None, None)
    """Estimated floating-point operations and bytes, where the kernel tells."""

    def buffers(self) -> Iterator[tuple[Param, PlanBuffer]]:
        """Yield its buffers with their parameters."""
        for declared, given in zip(self.kernel.signature, self.arguments, strict=True):
            if isinstance(declared, Param):
                assert isinstance(given, PlanBuffer)
                yield declared, given

    def scalars(self, values: Mapping[str, int | float]) -> dict[str, Any]:
        """Return its scalars by name, at the values of a run."""
        pairs = zip(self.kernel.signature, self.arguments, strict=True)
        return {
            declared.name: evaluated(given, values)
            for declared, given in pairs
            if not isinstance(declared, Param)
        }

    def strides(self, param: Param, values: Mapping[str, int | float]) -> tuple[int, ...] | None:
        """Return how far apart its kernel finds a buffer's elements, by axis, at a run's values.

        None where they follow each other.
        """
        if param.strides is None:
            return None
        integers = integers_of(self.scalars(values))
        return tuple(step.evaluate(integers) for step in param.strides)

    def __str__(self) -> str:
        where = "" if self.layer is None else f", layer {self.layer}"
        return f"launch {self.number} ({self.kernel.name}{where})"


def integers_of(values: Mapping[str, int | float]) -> dict[str, int]:
    """Return the values that expressions are of."""
    return {name: value for name, value in values.items() if isinstance(value, int)}


def evaluated(given: Any, values: Mapping[str, int | float]) -> Any:
    """Return a scalar or size of a launch at the values of a run."""
    if isinstance(given, Expr):
        return given.evaluate(integers_of(values))
    return values[given.name] if isinstance(given, FloatVariable) else given


def launch_names(launches: Iterable[Launch]) -> list[str]:
    """Return a name for each launch that no other launch of its layer has: its brick, numbered."""
    seen: dict[tuple[str, int | None], int] = {}
    names = []
    for launch in launches:
        name = launch.brick
        count = seen[name, launch.layer] = seen.get((name, launch.layer), 0) + 1
        names.append(name if count == 1 else f"{name}#{count}")
    return names


def entering(launches: Iterable[Launch]) -> frozenset[tuple[int, str]]:
    """Return what launches read and none before them writes, by number and argument."""
    written = Tracker()
    found: set[tuple[int, str]] = set()
    for launch in launches:
        for param, buffer in launch.buffers():
            if param.access.reads and written.writer(*buffer.range) is None:
                found.add((launch.number, param.name))
        for param, buffer in launch.buffers():
            if param.access.writes:
                written.write(launch.number, *buffer.range)
    return frozenset(found)


def results(launches: Iterable[Launch]) -> list[tuple[Launch, Param, PlanBuffer]]:
    """Return what launches write and none after them reads."""
    found: list[tuple[Launch, Param, PlanBuffer]] = []
    for launch in launches:
        for param, buffer in launch.buffers():
            if param.access.reads:
                found = [each for each in found if not _overlap(each[2], buffer)]
        for param, buffer in launch.buffers():
            if param.access.writes:
                found = [each for each in found if not _covers(buffer, each[2])]
                found.append((launch, param, buffer))
    return found


def _overlap(one: PlanBuffer, other: PlanBuffer) -> bool:
    (space, begin, end), (other_space, other_begin, other_end) = one.range, other.range
    return space == other_space and max(begin, other_begin) < min(end, other_end)


def _covers(one: PlanBuffer, other: PlanBuffer) -> bool:
    """Whether all elements of one view lie in another; of strided ones, where they are the same."""
    (space, begin, end), (other_space, other_begin, other_end) = one.range, other.range
    inside = space == other_space and begin <= other_begin and other_end <= end
    same = (one.offset, one.shape, one.strides) == (other.offset, other.shape, other.strides)
    return inside and (one.strides is None or same)


def written_storages(launches: Iterable[Launch]) -> frozenset[int]:
    """Return the numbers of the storages that launches write to."""
    return frozenset(
        buffer.storage.number
        for launch in launches
        for param, buffer in launch.buffers()
        if param.access.writes
    )


def alignments(launches: Iterable[Launch]) -> dict[int, int]:
    """Return the most that a kernel asks of each storage's address, by number."""
    found: dict[int, int] = {}
    for launch in launches:
        for param, buffer in launch.buffers():
            number = buffer.storage.number
            found[number] = max(param.align, found.get(number, 1))
    return found
