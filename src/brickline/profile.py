"""Profile: where the time of one run went, per brick, category, layer, phase, lane, step and tile.

Made from the parts of a run by pure arithmetic. It never starts a device and knows nothing of how
a report looks; whether the figures hold together is asked of `profile_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from brickline.bricks import BrickCategory, BrickId
from brickline.errors import UsageError
from brickline.node_table import node_table, timeline_of
from brickline.profile_checks import ProfileFinding, check_profile
from brickline.profile_rows import (
    TILE_LEVELS,
    LaneStats,
    Recording,
    Span,
    StepStats,
    TileStats,
)
from brickline.profile_tables import (
    brick_rows,
    category_rows,
    coverage_of,
    lane_rows,
    recording_of,
    step_rows,
    tile_cells,
    tile_level_rows,
    tile_rows,
)
from brickline.stats import BrickStats, CategoryStats, Peaks, merge

if TYPE_CHECKING:
    from brickline.runs import Part, Run


@dataclass(frozen=True)
class Profile:
    """The tables of one run. Shares are of exclusive time, so nested bricks count once."""

    name: str
    bricks: tuple[BrickStats, ...] = ()
    """One row per brick, longest total first."""
    brick_layers: tuple[BrickStats, ...] = ()
    brick_phases: tuple[BrickStats, ...] = ()
    categories: Mapping[BrickCategory, CategoryStats] = field(default_factory=dict)
    layers: Mapping[int, CategoryStats] = field(default_factory=dict)
    phases: Mapping[str, CategoryStats] = field(default_factory=dict)
    lanes: tuple[LaneStats, ...] = ()
    steps: Mapping[str, StepStats] = field(default_factory=dict)
    """By phase."""
    tiles: tuple[TileStats, ...] = ()
    """Per level and brick."""
    tile_levels: tuple[TileStats, ...] = ()
    """Per level."""
    coverage: float | None = None
    """Part of the steps' wall time that is inside bricks; None without steps."""
    recording: Recording = field(default_factory=Recording)
    peaks: Peaks | None = None
    facts: Mapping[str, float] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict, repr=False)
    problems: tuple[str, ...] = ()
    is_live: bool = False
    enabled: bool = True
    """False for a profiler that was never enabled."""
    parts: Sequence[Part] = field(default=(), repr=False, compare=False)

    @classmethod
    def from_run(cls, run: Run) -> Profile:
        """Read a run; `profile_from_run` under another name."""
        if not hasattr(run, "parts"):
            raise UsageError(f"run: expected a Run, as Run.open returns it, got {run!r:.80}")
        return profile_from_run(run)

    @property
    def total_ns(self) -> int:
        """Sum of inclusive brick time, as published; nested bricks count more than once."""
        return sum(brick.total_ns for brick in self.bricks)

    @property
    def exclusive_ns(self) -> int:
        """Sum of exclusive brick time."""
        return sum(brick.exclusive_ns for brick in self.bricks)

    @property
    def total_elements(self) -> int:
        """Sum of elements over all bricks. These are not tokens."""
        return sum(brick.total_elements for brick in self.bricks)

    @property
    def total_throughput(self) -> float:
        """Elements per second of brick time."""
        elements = sum(brick.timed_elements for brick in self.bricks)
        return elements * 1e9 / self.total_ns if self.total_ns else 0.0

    @property
    def total_tokens(self) -> int:
        """Tokens of all steps."""
        return sum(step.tokens for step in self.steps.values())

    @property
    def wall_ns(self) -> int:
        """Time of all timed steps, one after the other."""
        return sum(step.wall_ns for step in self.steps.values())

    @cached_property
    def decode(self) -> StepStats | None:
        """The steps that per-token figures are made of: phase "decode", else all of them."""
        if "decode" in self.steps or not self.steps:
            return self.steps.get("decode")
        rows = list(self.steps.values())
        return StepStats(rows[0].phase, merge([row.stats for row in rows]))

    @property
    def us_per_token(self) -> float | None:
        """Wall time per decoded token; None where no token was counted."""
        return (self.decode.us_per_token or None) if self.decode else None

    @cached_property
    def share_total_ns(self) -> float:
        """What the shares of all bricks add up to."""
        return sum(brick.share_ns for brick in self.bricks)

    def share(self, row: BrickStats | CategoryStats) -> float:
        """Return a row's part of all brick time, from 0 to 1."""
        return row.share_ns / self.share_total_ns if self.share_total_ns else 0.0

    def brick(self, brick: BrickId | str) -> BrickStats | None:
        """Return the row of a brick by id, name or alias; None where the run has none."""
        if not isinstance(brick, int | str):
            raise UsageError(f"brick: expected a BrickId or a name, got {brick!r:.80}")
        if isinstance(brick, int) and not 0 <= brick < BrickId.COUNT:
            raise UsageError(f"brick: expected an id from 0 to {BrickId.COUNT - 1}, got {brick!r}")
        known = BrickId(brick) if isinstance(brick, int) else BrickId.from_name(brick)
        name = known.label if known is not None else brick
        return next((row for row in self.bricks if row.name == name), None)

    def of_tile_levels(self, levels: Iterable[int]) -> tuple[TileStats, ...]:
        """Return the row of each level, all zeros where it has no tiles."""
        known = {row.level: row for row in self.tile_levels}
        wanted = list(levels) if isinstance(levels, Iterable) else [levels]
        for level in wanted:
            if not isinstance(level, int) or not 0 <= level < len(TILE_LEVELS):
                raise UsageError(f"levels: expected TileLevels, got {level!r:.80}")
        return tuple(
            known.get(level) or TileStats(TILE_LEVELS[level], level=int(level)) for level in wanted
        )

    @property
    def overhead_share(self) -> float | None:
        """What recording took, as a part of the steps' wall time; None without steps."""
        return self.recording.overhead_ns / self.wall_ns if self.wall_ns else None

    @cached_property
    def timeline(self) -> list[Span]:
        """The entries of the last steps, where a timeline was asked for."""
        return timeline_of(self.parts)

    def validate(self, repeats: Sequence[Profile] | None = None) -> list[ProfileFinding]:
        """Check that the figures hold together; see `profile_checks.check_profile`.

        Args:
            repeats: profiles of the same work, for the variation between them.
        """
        given = () if repeats is None else repeats
        if not isinstance(given, Sequence) or not all(isinstance(x, Profile) for x in given):
            raise UsageError(f"repeats: expected a list of Profiles, got {given!r:.80}")
        return check_profile(self, given)

    def _repr_html_(self) -> str:
        from brickline.report.notebook import profile_html

        return profile_html(self)

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from brickline.report.text import profile_text

        printer.text(profile_text(self))


def profile_from_run(run: Run) -> Profile:
    """Make the tables of a run, live or finished."""
    return profile_from_parts(
        run.parts,
        name=run.name,
        manifest=run.manifest,
        peaks=peaks_from_document(run.peaks),
        problems=tuple(str(problem) for problem in run.problems),
        is_live=run.is_live,
    )


def profile_from_part(part: Part, name: str = "profile") -> Profile:
    """Make the tables of one process."""
    return profile_from_parts([part], name=name)


def profile_from_parts(
    parts: Sequence[Part],
    *,
    name: str = "profile",
    manifest: Mapping[str, Any] | None = None,
    peaks: Peaks | None = None,
    problems: tuple[str, ...] | None = None,
    is_live: bool = False,
) -> Profile:
    """Make the tables of several processes together.

    Args:
        parts: one of each process.
        name: what the profile is called.
        manifest: of the run, where there is one.
        peaks: of the machine, where they were measured.
        problems: what was not read or recorded. Default None: what the parts say of themselves.
        is_live: whether it is still being recorded.
    """
    if problems is None:
        problems = tuple(each for part in parts for each in part.problems)
    table = node_table(parts)
    slots = table.slots
    bricks = sorted(brick_rows(table), key=lambda row: (-row.total_ns, row.name))
    categories = category_rows(table, slots["category"].astype(np.int64))
    phases = category_rows(table, table.phase_ids)
    brick_phases = brick_rows(table, phase=True)
    steps = step_rows(table)
    tiles = tile_rows(table, tile_cells(parts))
    return Profile(
        name=name,
        bricks=tuple(bricks),
        brick_layers=tuple(brick_rows(table, layer=True)),
        brick_phases=tuple(brick_phases),
        categories={
            known: replace(categories[known], name=known.label)
            for known in BrickCategory
            if known in categories
        },
        layers=category_rows(table, slots["layer"].astype(np.int64)),
        phases={
            table.phases[at]: replace(row, name=table.phases[at]) for at, row in phases.items()
        },
        lanes=lane_rows(table),
        steps=steps,
        tiles=tiles,
        tile_levels=tile_level_rows(tiles),
        coverage=coverage_of(table, steps, brick_phases),
        recording=recording_of(parts, table),
        peaks=peaks,
        facts={fact: value for part in parts for fact, value in part.facts.items()},
        manifest=manifest or {},
        problems=problems,
        is_live=is_live,
        parts=parts,
    )


def peaks_from_document(peaks: Mapping[str, Any] | None) -> Peaks | None:
    """Return measured peaks from their "gflops" and "gbps"; None where they are not both there."""
    try:
        return Peaks(float(peaks["gflops"]), float(peaks["gbps"])) if peaks else None
    except (KeyError, TypeError, ValueError):
        return None
