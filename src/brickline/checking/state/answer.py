"""What is said of the weights and buffers of two sides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch

from brickline.checking.state.grids import Grid
from brickline.checking.state.terms import Term


class Kind(StrEnum):
    """How a tensor of one side is the other's."""

    SAME = "same"
    ROUNDED = "rounded"
    LAYOUT = "layout"
    FOLDED = "folded"
    QUANTISED = "quantised"
    DIFFERS = "differs"
    MISSING = "missing"
    EXTRA = "extra"


FITTING = (Kind.SAME, Kind.ROUNDED, Kind.LAYOUT, Kind.FOLDED, Kind.QUANTISED)


@dataclass(frozen=True)
class Carried:
    """A value that a side computes with in float64 in place of its own tensor."""

    term: Term
    within: torch.Tensor | None = None
    """Elements that are the term's; the others stay the side's own. None: all are."""
    complete: bool = True
    """Whether it is known of every element what it should be."""


@dataclass(frozen=True)
class TensorAnswer:
    """One tensor of the candidate, or one of the reference's that the candidate lacks."""

    name: str
    kind: Kind
    partner: str = ""
    """What it is on the other side, in words."""
    rows: tuple[int, ...] = ()
    """Rows in which elements differ beyond rounding."""
    differing: float = 0.0
    """Part of the elements that do."""
    error: float = 0.0
    """Relative L2 of those rows."""
    grid: Grid | None = None

    @property
    def words(self) -> str:
        """Say how it differs, or what it is."""
        if self.kind is Kind.MISSING:
            return f"the reference's {self.name} is nowhere in the candidate"
        if self.kind is Kind.EXTRA:
            return f"{self.name} is nowhere in the reference"
        if self.grid is not None:
            said = f"{self.name} is the reference's {self.partner} {self.grid.words}"
            return f"{said}, except in {self.place}" if self.rows else said
        if self.rows:
            return (
                f"{self.place} of {self.name} differs from the reference's {self.partner} by "
                + (f"{self.error:.2g} (relative L2)")
            )
        return f"{self.name}: {self.kind} ({self.partner})"

    @property
    def place(self) -> str:
        """Say which rows differ."""
        if len(self.rows) == 1:
            return f"row {self.rows[0]}"
        some = ", ".join(map(str, self.rows[:3]))
        return f"rows {some}" + (f" and {len(self.rows) - 3} more" if len(self.rows) > 3 else "")


@dataclass(frozen=True)
class StateAnswer:
    """Whether the weights and buffers are the same, up to layout, folding, rounding and grids."""

    tensors: tuple[TensorAnswer, ...] = ()
    candidate: dict[str, Carried] = field(default_factory=dict)
    """What the candidate computes with in float64 in place of its own tensors."""
    reference: dict[str, Carried] = field(default_factory=dict)
    """The same of the reference."""
    effective: dict[str, torch.Tensor] = field(default_factory=dict)
    """Quantised weights that the reference computes with in place of its own."""
    settled: tuple[frozenset[str], frozenset[str]] = (frozenset(), frozenset())
    """Tensors of each side that are the other's, however they are held."""

    def also(
        self, answers: Sequence[TensorAnswer], values: Mapping[str, torch.Tensor]
    ) -> StateAnswer:
        """Return the answer with weights that the candidate computes from codes."""
        modules = {each.name.rpartition(".")[0] for each in answers}
        kept = tuple(
            each
            for each in self.tensors
            if not (each.kind is Kind.MISSING and each.name in values)
            and not (each.kind is Kind.EXTRA and each.name.rpartition(".")[0] in modules)
        )
        ours, theirs = self.settled
        return replace(
            self,
            tensors=(*kept, *answers),
            effective={**self.effective, **values},
            settled=(ours, theirs | set(values)),
        )

    @property
    def differing(self) -> tuple[TensorAnswer, ...]:
        """Return what differs beyond rounding, and beyond a grid."""
        return tuple(each for each in self.tensors if each.rows or each.kind is Kind.DIFFERS)

    @property
    def unknown(self) -> tuple[TensorAnswer, ...]:
        """Return what only one side holds."""
        return tuple(each for each in self.tensors if each.kind in (Kind.MISSING, Kind.EXTRA))

    @property
    def grids(self) -> tuple[Grid, ...]:
        """Return the grids on which quantised tensors lie."""
        return tuple(each.grid for each in self.tensors if each.grid is not None)

    @property
    def line(self) -> str:
        """Say it in one line."""
        whole = [each for each in self.tensors if each.kind is not Kind.MISSING]
        if not whole:
            return "neither side holds weights"
        fitting = [each for each in whole if each.kind in FITTING and not each.rows]
        counts = Counter(each.kind for each in fitting)
        parts = [
            f"{counts[kind]} {words}"
            for kind, words in (
                (Kind.LAYOUT, "in another layout"),
                (Kind.FOLDED, "with something folded in"),
                (Kind.ROUNDED, "rounded"),
                (Kind.QUANTISED, f"quantised {_largest(self.grids)}"),
            )
            if counts[kind]
        ]
        line = f"{len(fitting)} of {len(whole)} tensors are the reference's"
        line += f" ({', '.join(parts)})" if parts else ""
        faults = [each.words for each in self.differing]
        line += f"; {_several(faults)}" if faults else ""
        missing = sum(each.kind is Kind.MISSING for each in self.tensors)
        return line + (f"; {missing} of the reference's are nowhere in it" if missing else "")


def _largest(grids: Sequence[Grid]) -> str:
    return max(grids, key=lambda grid: grid.error).words if grids else ""


def _several(words: Sequence[str]) -> str:
    more = f", and {len(words) - 2} more" if len(words) > 2 else ""
    return "; ".join(words[:2]) + more
