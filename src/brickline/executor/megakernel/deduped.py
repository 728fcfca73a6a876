"""Deduped: which launches of a plan compute what another has computed already, and are not run.

A launch is left out where an earlier one has the same kernel, declared pure, the same parameters
and the same versions of the same memory, and nobody has written to its output since. That is found
once: it holds at all values of the plan's variables, and memory may be bound anew only with the
overlaps that were planned. Knows launches and the planner, nothing of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from brickline.executor.megakernel.launch_columns import columns_of
from brickline.executor.megakernel.planning import Refusal, Tasks, plan_tasks
from brickline.plan_launches import Launch
from brickline.plan_words import counted


@dataclass(frozen=True, slots=True)
class Deduped:
    """Which launches are not run, and whom the others wait for then."""

    computed_by: tuple[int, ...]
    """Of each launch, the one that computes its values: itself, where it is run."""
    waits: tuple[tuple[int, ...], ...] | None = None
    """Of each launch that is run, those that it waits for; None: all are run, as was planned."""
    refused: tuple[Refusal, ...] = ()
    """Launches that repeat an earlier one and are run all the same, with why."""

    def is_run(self, launch: int) -> bool:
        """Whether a launch is run itself."""
        return self.computed_by[launch] == launch

    def waits_of(self, launch: Launch) -> Sequence[int]:
        """Return the launches that must have ended before one that is run begins."""
        return launch.waits_for if self.waits is None else self.waits[launch.number]

    def explain(self) -> str:
        """Say which launches are not run, and why others that repeat an earlier one are."""
        pairs = [(one, other) for one, other in enumerate(self.computed_by) if one != other]
        lines = [f"{len(pairs)} of {counted(len(self.computed_by), 'launch')} not run"]
        lines += [f"launch {one}: launch {other} computes the same" for one, other in pairs]
        lines += [
            f"launch {each.later} repeats launch {each.earlier} and is run: {each.code}: "
            + each.reason
            + ("" if each.other is None else f", by launch {each.other}")
            for each in self.refused
        ]
        return "\n".join(lines)


def all_run(launches: Sequence[Launch]) -> Deduped:
    """Return that nothing is left out."""
    return Deduped(tuple(range(len(launches))))


def find_deduped(launches: Sequence[Launch]) -> Deduped:
    """Return which launches are not run, in the order of the plan."""
    tasks = columns_of(launches)
    if len({_row(tasks, number) for number in range(len(launches))}) == len(launches):
        return all_run(launches)
    planned = plan_tasks(tasks, join=False)
    refused = tuple(planned.refusals)
    if not planned.deduped:
        return Deduped(tuple(range(len(launches))), None, refused)
    alias = planned.alias.tolist()
    return Deduped(
        tuple(number if other < 0 else other for number, other in enumerate(alias)),
        tuple(tuple(planned.waits_of(number)) for number in range(len(launches))),
        refused,
    )


def _row(tasks: Tasks, number: int) -> tuple[int, int, bytes]:
    """Return all that a launch has in common with one that it repeats."""
    return (
        int(tasks.op[number]),
        int(tasks.params[number]),
        tasks.accesses_of(number).tobytes(),
    )
