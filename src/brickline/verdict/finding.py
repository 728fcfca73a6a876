"""One thing worth a person's attention: `Finding`. How it is put into a sentence is in `words`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from brickline.verdict.verdicts import GUILTY, Verdict


@dataclass(frozen=True)
class Finding:
    """One thing worth a person's attention, with all that is known about it."""

    name: str
    """Dotted module path, or the name of the kernel or function, on the candidate's side."""
    verdict: Verdict
    layer_idx: int | None = None
    position: int | None = None
    """Number of the root's call, from 0, in which it first acts."""
    ordinal: int = 0
    """Repetition within that call."""
    brick: str | None = None
    """Name of the `BrickId`, or of the dynamic brick."""
    op: str | None = None
    """The operation inside, such as ``aten.mm``, where one was singled out."""
    direction: str = "forward"
    """``forward`` or ``backward``."""
    z: float | None = None
    """Largest of the three ratios; 1 is the clean limit. None from fingerprints alone."""
    local_error: float | None = None
    """Relative L2 of what it adds to its own inputs' error."""
    propagated_error: float | None = None
    """Relative L2 of its output to that of the other side."""
    share: float | None = None
    """Part of the final difference that goes away when it is repaired, from 0 to 1."""
    where: str | None = None
    """Which rows, columns or elements."""
    cause: str | None = None
    """Likely cause, in words. One that begins with "is" is read on from the name, as in "is handed
    wrong positions by the model"."""
    source: str | None = None
    """Where the code stands, as ``file:line``."""
    alternatives: tuple[str, ...] = ()
    """Modules that the evidence does not exclude beside `name`."""
    members: tuple[str, ...] = ()
    """All modules that share this fault, `name` among them; empty where it is alone."""
    repro: str | None = None
    """Path of a script that shows it alone."""
    reference_name: str | None = None
    """What it was compared with."""
    reason: str | None = None
    """Why it is accepted, or why a field above is None."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Measured facts behind the verdict, by name."""

    @property
    def is_guilty(self) -> bool:
        """Whether it makes a report diverged."""
        return self.verdict in GUILTY

    @property
    def names(self) -> tuple[str, ...]:
        """All modules that it is about: its own, those that it may be, and those that share it."""
        return tuple(dict.fromkeys((self.name, *self.alternatives, *self.members)))

    @property
    def title(self) -> str:
        """The name, with the layer where no part of the name is its number.

        Example:
            >>> Finding("layers.3.up", Verdict.WATCH, 3).title
            'layers.3.up'
            >>> Finding("RmsNorm", Verdict.WATCH, 3).title
            'RmsNorm (layer 3)'
        """
        if self.layer_idx is None or str(self.layer_idx) in self.name.split("."):
            return self.name
        return f"{self.name} (layer {self.layer_idx})"

    def _repr_html_(self) -> str:
        from brickline.report.notebook import finding_html

        return finding_html(self)
