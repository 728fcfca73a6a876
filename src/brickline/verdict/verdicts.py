"""The words of a comparison: `Verdict` for one op, `Status` for the whole."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """What is said of one op."""

    IDENTICAL = "identical"
    """The same bits."""
    ROUNDING = "rounding"
    """Different, and no more than rounding explains."""
    WATCH = "watch"
    """More than the clean limit and less than twice it: listed, never the headline."""
    PROPAGATED = "propagated"
    """The error came with the inputs."""
    AMPLIFIED = "amplified"
    """The error came with the inputs and the op made it much larger."""
    SUSPECT = "suspect"
    """Fingerprints alone point here; a re-execution would prove it."""
    CULPRIT = "culprit"
    """Re-executed on its own inputs, it is wrong, again and again."""
    NONDETERMINISTIC = "nondeterministic"
    """Two executions of the same side differ by as much."""
    STRUCTURAL = "structural"
    """Another op, shape or dtype than on the other side."""
    TIE = "tie"
    """A choice between values that rounding cannot tell apart."""
    NONFINITE_ORIGIN = "non-finite origin"
    """Finite inputs, and an output that is not."""
    UNOBSERVABLE = "unobservable"
    """A difference of this size cannot be seen here."""
    UNKNOWN = "unknown"
    """Not shown either way; the reason is given."""
    ACCEPTED = "accepted"
    """Known and intended, within the accepted size."""


GUILTY = frozenset({Verdict.CULPRIT, Verdict.SUSPECT, Verdict.NONFINITE_ORIGIN})
"""Verdicts that make a report diverged."""
CLEAN = frozenset(
    {Verdict.IDENTICAL, Verdict.ROUNDING, Verdict.WATCH, Verdict.PROPAGATED, Verdict.AMPLIFIED}
    | {Verdict.TIE, Verdict.ACCEPTED}
)
"""Verdicts that leave a report matched."""


class Status(StrEnum):
    """What is said of the whole."""

    MATCHED = "matched"
    DIVERGED = "diverged"
    INCONCLUSIVE = "inconclusive"
