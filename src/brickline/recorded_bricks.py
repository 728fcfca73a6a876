"""RecordedBricks: the calls of `BrickProfiler` that read what was measured.

All of them read a `Profile` of what is recorded up to then; the looking half is loaded when the
first of them is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from brickline.bricks import BrickCategory, BrickId
from brickline.peaks import load_peaks

if TYPE_CHECKING:
    from pathlib import Path

    from brickline.device.base import Clock
    from brickline.profile import Profile
    from brickline.spools import Part
    from brickline.stats import BrickStats, CategoryStats


class RecordedBricks:
    """What a profiler says of bricks; a base of `BrickProfiler`, never used alone."""

    __slots__ = ()

    if TYPE_CHECKING:
        name: str
        _clock: Clock
        _spool: Path | None

        def _part(self) -> Part | None: ...

    def profile(self) -> Profile:
        """Return everything recorded up to now as a `Profile`."""
        from brickline.profile import Profile, peaks_from_document, profile_from_parts

        part = self._part()
        if part is None:
            return Profile(self.name, enabled=False)
        peaks = peaks_from_document(load_peaks(self._clock.name))
        is_live = self._spool is not None
        return profile_from_parts([part], name=self.name, peaks=peaks, is_live=is_live)

    def brick_stats(self, brick: BrickId | str) -> BrickStats:
        """Return the statistics of a brick; count 0 where it never ran."""
        from brickline.stats import BrickStats

        found = self.profile().brick(brick)
        if found is not None:
            return found
        known = BrickId(brick) if isinstance(brick, int) else BrickId.from_name(brick)
        if known is None:
            return BrickStats(str(brick))
        return BrickStats(known.label, known, known.category)

    def stats(self, name: str) -> BrickStats | None:
        """Return the statistics of a brick by name, or None where it never ran."""
        return self.profile().brick(name)

    def all_brick_stats(self) -> list[BrickStats]:
        """Return the statistics of every brick that ran, longest total first."""
        return list(self.profile().bricks)

    def category_stats(self) -> list[CategoryStats]:
        """Return statistics of every category, indexed by `BrickCategory`."""
        from brickline.stats import CategoryStats

        known = self.profile().categories
        return [known.get(each, CategoryStats(each.label)) for each in BrickCategory]

    def total_ns(self) -> int:
        """Return the sum of inclusive brick time."""
        return self.profile().total_ns

    def total_elements(self) -> int:
        """Return the sum of elements over all bricks; these are not tokens."""
        return self.profile().total_elements

    def total_tokens(self) -> int:
        """Return the tokens of all steps."""
        return self.profile().total_tokens

    def total_throughput(self) -> float:
        """Return elements per second of brick time."""
        return self.profile().total_throughput

    def summary(self) -> str:
        """Return the brick table as text; a disabled profiler says how to enable it."""
        from brickline.report.text import profile_text

        return profile_text(self.profile())

    def to_json(self) -> str:
        """Return the profile as versioned JSON."""
        from brickline.report.as_json import profile_json

        return profile_json(self.profile())

    def _repr_html_(self) -> str:
        from brickline.report.notebook import profile_html

        return profile_html(self.profile())
