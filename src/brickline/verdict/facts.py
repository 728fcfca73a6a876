"""What a comparison measured: `Facts`, from which status and headline follow.

Holds no opinion: `status` says what the facts amount to, `words` puts them into sentences, and
`report` joins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from brickline.traces import KernelTrace
from brickline.verdict.answer import QUESTIONS, Answer
from brickline.verdict.finding import Finding
from brickline.verdict.table import VerdictTable
from brickline.verdict.verdicts import Verdict


@dataclass(frozen=True)
class Coverage:
    """How much of the candidate was seen."""

    compared: int = 0
    """Ops or launches with a verdict other than unknown."""
    total: int = 0
    """Ops or launches of the candidate that could be compared."""
    notes: tuple[str, ...] = ()
    """What could not be observed, and why."""

    @property
    def complete(self) -> bool:
        """Whether everything was compared, and there was something to compare."""
        return 0 < self.total <= self.compared


@dataclass(frozen=True)
class Facts:
    """Everything that a comparison measured and could not measure."""

    candidate: str = "candidate"
    """What the first side is."""
    reference: str = "reference"
    """What the second side is; for a check without one, how it was checked."""
    findings: tuple[Finding, ...] = ()
    """Ranked: what explains most of the final difference first."""
    state: Answer | None = None
    """Are the weights and buffers the same? None in reports of `compare` and of traces."""
    logic: Answer | None = None
    """Do both sides compute the same function in float64?"""
    arithmetic: Answer | None = None
    """Does each op compute what float64 computes of its own inputs, up to rounding?"""
    repair: Mapping[str, Any] | None = None
    """What removes the difference, as data: which tensor, which permutation, which constant."""
    verdicts: VerdictTable = field(default_factory=VerdictTable)
    coverage: Coverage = field(default_factory=Coverage)
    unshown: tuple[str, ...] = ()
    """What keeps the report from being matched and is not in its figures; the first is the
    headline of a report that is inconclusive."""
    unmatched: tuple[str, ...] = ()
    """Ops or launches of one side that were compared with nothing, each with its side."""
    duplicates: tuple[str, ...] = ()
    """Launches that cannot be told apart by their key."""
    noise_floor: float | None = None
    """Relative L2 of the final output that rounding or nondeterminism alone makes."""
    final_error: float | None = None
    """Relative L2 of the final output to the reference's."""
    whys: tuple[str, ...] = ()
    """The chain from what is seen to what causes it, from measured facts."""
    circumstances: tuple[str, ...] = ()
    """Differences between the two sides' circumstances."""
    next_command: str | None = None
    """What would prove the top suspect."""
    first_divergent_kernel: KernelTrace | None = None
    expected_trace: KernelTrace | None = None
    actual_trace: KernelTrace | None = None
    kernels_compared: int = 0
    diagnosis: str = ""
    """The first difference between two lists of traces, in full; empty in other reports."""
    total_time_us: float | None = None
    """What the candidate's launches took together, of launches that were traced with their time."""
    reference_total_time_us: float | None = None
    outputs: int = 1
    """Final outputs: the final error and the noise floor are those of the one that differs most."""

    @property
    def guilty(self) -> tuple[Finding, ...]:
        """The findings that make the report diverged."""
        return tuple(finding for finding in self.findings if finding.is_guilty)

    @property
    def culprits(self) -> tuple[Finding, ...]:
        """The findings that are shown to be wrong by re-execution."""
        return tuple(finding for finding in self.guilty if finding.verdict is not Verdict.SUSPECT)

    @property
    def suspects(self) -> tuple[Finding, ...]:
        """The findings that fingerprints alone point at."""
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.SUSPECT)

    @property
    def accepted(self) -> tuple[Finding, ...]:
        """The findings that are known and intended."""
        return tuple(finding for finding in self.findings if finding.verdict is Verdict.ACCEPTED)

    @property
    def answers(self) -> dict[str, Answer]:
        """The answers to the questions of `check`, by question; empty in other reports."""
        answers = ((question, getattr(self, question)) for question in QUESTIONS)
        return {question: answer for question, answer in answers if answer is not None}
