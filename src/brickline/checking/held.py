"""Partners and what was measured with them: where every second thought begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from brickline.checking.facts import Fact
from brickline.checking.pairing import Pairing
from brickline.checking.stage import Key


@dataclass(frozen=True)
class Held:
    """The candidate held against the reference with some partners."""

    pairing: Pairing
    facts: list[Fact]

    @property
    def errors(self) -> dict[Key, float]:
        """Relative L2 of what is wrong, by the reference's keys."""
        return {
            each.reference_key: each.ratios.relative_l2 for each in self.facts if each.suspicious
        }

    @property
    def wrong(self) -> set[Key]:
        """The reference's keys of what rounding does not explain."""
        return set(self.errors)


Hold = Callable[[Pairing], Held]
"""Runs the reference on partners and measures."""
