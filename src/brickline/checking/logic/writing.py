"""What is said of the logic: findings, and one line that is always there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Protocol

from brickline.checking.logic.functions import Logic
from brickline.checking.stage import layer_of
from brickline.verdicts import Finding, Verdict

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
            reason = f"{DIFFERENT}: {logic_line([call])}; no single module could be named"
            return [Finding(display(""), Verdict.UNKNOWN, position=call.number, reason=reason)]
        return [
            Finding(
                name=display(fed.name),
                verdict=Verdict.CULPRIT,
                layer_idx=layer_of(fed.name),
                position=call.number,
                brick=brick(fed.name),
                local_error=fed.error,
                cause=fed.cause,
                reference_name=display(fed.name),
                reason="fed what its counterpart was given, it puts out something else in float64",
                evidence=evidence if fed.repair is None else {**evidence, "repair": fed.repair},
            )
            for fed in logic.modules
        ]
    return []


def logic_line(calls: Iterable[Judged]) -> str | None:
    """Say how far the outputs are apart in float64; None where nobody asked."""
    known = [call for call in calls if call.logic is not None]
    asked = [call for call in known if call.logic is not None and call.logic.error is not None]
    if not asked:
        problem = next((call.logic.problem for call in known if call.logic is not None), None)
        return None if problem is None else f"not compared in float64: {problem}"
    worst = max(asked, key=lambda call: (call.logic.error or 0.0) if call.logic else 0.0)
    logic = worst.logic
    assert logic is not None
    if not logic.error:
        return "in float64 the outputs are the same to the bit"
    outputs = f"in float64 the outputs of call {worst.number}"
    if math.isinf(logic.error):
        return f"{outputs} are not finite in the same places, or one side's are all zero"
    line = f"{outputs} differ by {logic.error:.2g}"
    if logic.noise:
        line += f", and those of right code by up to {logic.noise:.2g}"
    return line
