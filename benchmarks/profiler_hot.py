"""Claims: what one brick costs in a hot loop, in units of one `time.perf_counter_ns()` call.

`with`, `start` and `stop`, or `mark` of a kept handle at most 1.3; `start_brick` and `stop_brick`
at most 1.6, the lookup of the id included; `with profiler.brick(id, layer=)` inline at most 2;
`with` while disabled at most 0.9; a name instead of an id at most 1.5 times the id.

A ring is folded many times within one repeat, so folding is in these figures.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import harness
from harness import Claim, Statement

SEED = 20251
CLOCK = "one time.perf_counter_ns()"
ID_FORM = "start_brick + stop_brick"
EMPTY_WITH = "with contextlib.nullcontext()"


@dataclass(frozen=True)
class Target:
    """A statement of brickline's, what it is measured in, and the most that it may cost."""

    statement: str
    unit: str
    at_most: float


TARGETS = (
    Target("with kept handle", CLOCK, 1.3),
    Target("handle.start + handle.stop", CLOCK, 1.3),
    Target("handle.mark", CLOCK, 1.3),
    Target(ID_FORM, CLOCK, 1.6),
    Target("with profiler.brick(id, layer=3)", CLOCK, 2.0),
    Target("disabled, with kept handle", CLOCK, 0.9),
    Target("start + stop by name", ID_FORM, 1.5),
)


def peers() -> list[Statement]:
    """The unit, and two costs of Python's own that put the figures in proportion."""
    from contextlib import nullcontext

    return [
        Statement(CLOCK, "clock()", "clock = now", {"now": time.perf_counter_ns}),
        Statement("two no-op C calls", "nop(None); nop(None)", "nop = call", {"call": callable}),
        Statement(EMPTY_WITH, "with nothing: pass", "nothing = kept", {"kept": nullcontext()}),
    ]


def brickline_statements() -> list[Statement]:
    """Written as users write: the handle and the profiler in locals, `bl` a global module."""
    import brickline as bl

    on = bl.BrickProfiler("benchmark hot", enabled=True)
    off = bl.BrickProfiler("benchmark hot, disabled")
    setup = "profiler = given; handle = profiler.brick(bl.BrickId.RMS_NORM, layer=3)"
    enabled, disabled = {"given": on, "bl": bl}, {"given": off, "bl": bl}
    forms = {
        "with kept handle": "with handle: pass",
        "handle.start + handle.stop": "handle.start(); handle.stop()",
        "handle.mark": "handle.mark()",
        ID_FORM: "t = profiler.start_brick(bl.BrickId.RMS_NORM); profiler.stop_brick(t, 1)",
        "start + stop by name": 't = profiler.start("RmsNorm"); profiler.stop(t, 1)',
        "with profiler.brick(id, layer=3)": (
            "with profiler.brick(bl.BrickId.RMS_NORM, layer=3): pass"
        ),
        "mark": "profiler.mark(bl.BrickId.RMS_NORM)",
    }
    return [
        *(Statement(name, code, setup, enabled) for name, code in forms.items()),
        *(Statement(f"disabled, {name}", code, setup, disabled) for name, code in forms.items()),
    ]


def worker(number: int, quick: bool) -> dict[str, Any]:
    """One process: nanoseconds of every statement, one value per repeat."""
    with harness.quiet():
        statements, absent = peers(), ""
        try:
            statements += brickline_statements()
        except ImportError as error:
            absent = f"{type(error).__name__}: {error}"
        repeats = 5 if quick else 15
        return {
            "absent": absent,
            "costs": harness.hot_loop(statements, repeats=repeats, seed=SEED + number),
        }


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measures and states the claims."""
    processes = 1 if quick else 3
    print(f"hot loop: seed {SEED}, {processes} process(es)", file=sys.stderr)
    answers = harness.in_processes(__file__, ["--quick"] if quick else [], processes)
    absent = answers[0]["absent"]
    return [claim_from_answers(target, answers, absent).as_dict() for target in TARGETS]


def claim_from_answers(target: Target, answers: list[dict[str, Any]], absent: str) -> Claim:
    """The median over processes of the median ratio of each; all values of a pair are adjacent."""
    title = f"hot loop, {target.statement}"
    unit = f"of {target.unit}"
    if absent:
        return Claim(title, None, unit, target.at_most, note=f"brickline is absent: {absent}")
    ratios = _ratios(target.statement, target.unit, answers)
    names = [name for name in answers[0]["costs"] if name not in (target.statement, target.unit)]
    others = {name: statistics.median(_ratios(name, target.unit, answers)) for name in names}
    spent = [statistics.median(answer["costs"][target.statement]) for answer in answers]
    unit_ns = [statistics.median(answer["costs"][target.unit]) for answer in answers]
    note = (
        f"{statistics.median(spent):.1f} ns of {statistics.median(unit_ns):.1f} ns; "
        f"{harness.spread(ratios, 2)} over processes"
    )
    return Claim(title, statistics.median(ratios), unit, target.at_most, others, note)


def _ratios(name: str, unit: str, answers: list[dict[str, Any]]) -> list[float]:
    return [
        statistics.median(
            [
                cost / base
                for cost, base in zip(answer["costs"][name], answer["costs"][unit], strict=True)
            ]
        )
        for answer in answers
    ]


if __name__ == "__main__":
    raise SystemExit(harness.main(run, worker, __doc__))
