"""What `check` answers to one of its three questions: `Answer`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from brickline.verdict.table import VerdictTable
from brickline.verdict.verdicts import CLEAN, Verdict

QUESTIONS = ("state", "logic", "arithmetic")
"""The questions, in their order; each is a field of a report."""


@dataclass(frozen=True)
class Answer:
    """The answer to one question, with the figure that it rests on.

    Example:
        >>> print(Answer("the outputs differ in float64", figure=0.024, limit=1e-12))
        the outputs differ in float64 (0.024, above the limit of 1e-12)
    """

    line: str
    """The answer in words, without its figure."""
    figure: float | None = None
    """What was measured."""
    limit: float | None = None
    """Above it, the answer is no."""
    shown: bool = True
    """Whether the question was answered."""
    note: str = ""
    """What is not shown, or was left out."""

    @classmethod
    def not_asked(cls, why: str) -> Answer:
        """Return what stands in place of an answer where a question was not asked."""
        return cls(f"not asked: {why}", shown=False)

    @property
    def exceeds(self) -> bool:
        """Whether the figure is above its limit; one that is not a number always is."""
        return not (self.figure is None or self.limit is None or self.figure <= self.limit)

    def __str__(self) -> str:
        text = self.line
        if self.figure is not None:
            text += f" ({self.figure:.2g}{self._limit_words()})"
        return f"{text}; {self.note}" if self.note else text

    def _limit_words(self) -> str:
        if self.limit is None:
            return ""
        words = ", above the limit of" if self.exceeds else ", limit"
        return f"{words} {self.limit:.2g}"


def arithmetic_answer(table: VerdictTable, limit: float, excuse: str = "") -> Answer:
    """Return the largest error of any op on its own inputs, in units of what rounding makes.

    Args:
        table: The verdicts, with the z of every op that was executed again.
        limit: The largest z of right code.
        excuse: Why a value beyond it may have a clean verdict; such values are counted apart.
    """
    rows = [row for row in table if row.z is not None and row.verdict is not Verdict.UNKNOWN]
    judged = [row for row in rows if row.verdict not in CLEAN or _size(row.z) <= limit]
    excused = len(rows) - len(judged)
    note = f"larger in {excused} of {len(rows)} values: {excuse}" if excused else ""
    if not judged:
        return Answer("no op was executed again", shown=bool(excused), note=note)
    worst = max(judged, key=lambda row: _size(row.z))
    at = f", at {worst.name}" if worst.z else ""
    return Answer(f"largest error relative to rounding{at}", worst.z, limit, note=note)


def _size(z: float | None) -> float:
    return math.inf if z is None or math.isnan(z) else z
