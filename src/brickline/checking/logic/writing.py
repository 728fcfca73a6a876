"""What is said of the logic: findings, and the answer that is always there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from brickline.checking.logic.functions import Logic
from brickline.checking.stage import layer_of
from brickline.verdict import Answer, Finding, Verdict

DIFFERENT = "the two sides compute different functions"
"""How the reason begins where no module could be named."""


class Judged(Protocol):
    """One call."""

    number: int
    logic: Logic | None


def logic_findings(
    calls: Iterable[Judged], display: Callable[[str], str], brick: Callable[[str], str | None]
) -> list[Finding]:
    """Return who computes another function in the first call that differs."""
    for call in calls:
        logic = call.logic
        if logic is None or not logic.differs:
            continue
        evidence = {"float64_output_error": logic.error, "float64_noise": logic.noise}
        if not logic.modules:
            reason = f"{DIFFERENT}: {logic_answer([call])}; no single module could be named"
            return [Finding(display(""), Verdict.UNKNOWN, position=call.number, reason=reason)]
        return [
            Finding(
                name=display(fed.name),
                verdict=Verdict.CULPRIT,
                layer_idx=layer_of(fed.name),
                position=call.number,
                brick=brick(fed.name),
                local_error=fed.error,
                share=fed.share,
                cause=fed.cause,
                alternatives=tuple(display(path) for path in fed.alternatives),
                source=fed.source,
                reference_name=display(fed.name) if fed.counterpart is None else fed.counterpart,
                members=tuple(display(path) for path in fed.members),
                reason=fed.reason,
                evidence=evidence if fed.repair is None else {**evidence, "repair": fed.repair},
            )
            for fed in logic.modules
        ]
    return []


def logic_answer(calls: Iterable[Judged]) -> Answer:
    """Say how far the outputs are apart in float64, in the call in which they are furthest."""
    known = [(call.number, call.logic) for call in calls if call.logic is not None]
    compared = [(number, logic) for number, logic in known if logic.error is not None]
    if not compared:
        problem = next((logic.problem for _, logic in known), None)
        if problem is None:
            return Answer.not_asked("no call was completed on both sides")
        return Answer(f"not compared in float64: {problem}", shown=False)
    number, logic = max(compared, key=lambda pair: (pair[1].error or 0.0) / pair[1].limit)
    if not logic.error:
        return Answer("in float64 the outputs are the same to the bit")
    if logic.is_open:
        return Answer(
            f"in float64 the outputs of call {number} differ by {logic.error:.2g}, and moving "
            f"weights by their rounding changes them by {logic.noise:.2g}: not told apart",
            shown=False,
        )
    line = f"in float64 the outputs of call {number} differ by no more than rounding"
    if logic.differs:
        line = f"in float64 the outputs of call {number} differ"
    if math.isinf(logic.error):
        line = f"{line}: not finite in the same places, or one side's are all zero"
    return Answer(line, logic.error, logic.limit)
