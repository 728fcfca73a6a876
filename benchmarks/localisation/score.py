"""Runs every tool on every case and counts what each named.

An outcome is **named** (the expected module first, and in a decode loop at the expected position),
**wrong** (another module, or any module where nothing is wrong), **missed** (nothing named),
**inconclusive**, or **raised**. A case whose fault cannot be observed counts only if something
wrong is named. Knows the tools by their public names only.
"""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from localisation import rules
from localisation.cases import GROUPS, Case
from localisation.observable import FACTOR, ratio

SCRIPT = "fp64 script"
TIMED = ("decode", "transformers", "held out", "unseen drives")
"""Groups in which the position must be the expected one too."""
OUTCOMES = ("named", "wrong", "missed", "inconclusive", "raised")


@dataclass(frozen=True)
class Answer:
    """What one tool says of one case."""

    names: tuple[str, ...] = ()
    """The modules it holds guilty, the first one first."""
    position: int | None = None
    inconclusive: bool = False
    error: str | None = None
    text: str = ""
    """What else it says, for a person."""


@dataclass(frozen=True)
class Row:
    """One tool on one case."""

    case: str
    group: str
    kind: str
    tool: str
    expected: str | None
    position: int | None
    observable: bool
    ratio: float
    outcome: str
    named: str | None
    named_position: int | None
    extra: tuple[str, ...]
    """Modules it holds guilty in which nothing was planted."""
    seconds: float
    text: str


def score(cases: Iterable[Case], tools: Iterable[str]) -> Iterator[Row]:
    """Yield a row for each tool and case; the models of a case are let go after it."""
    wanted = tuple(tools)
    for case in cases:
        effect = 0.0 if case.harmless else ratio(case)
        for tool, (answer, seconds) in _answers(case, wanted).items():
            yield _row(case, tool, answer, effect, seconds)
        case.forget()


def _row(case: Case, tool: str, answer: Answer, effect: float, seconds: float) -> Row:
    planted = {
        case.named(each)
        for each in ((case.expected, *case.also) if case.expected is not None else ())
    }
    return Row(
        case=case.name,
        group=case.group,
        kind=case.kind,
        tool=tool,
        expected=None if case.expected is None else case.named(case.expected),
        position=case.position,
        observable=not case.harmless and effect > FACTOR,
        ratio=effect,
        outcome=outcome(case, answer),
        named=answer.names[0] if answer.names else None,
        named_position=answer.position,
        extra=tuple(each for each in answer.names if each not in planted),
        seconds=seconds,
        text=answer.error or answer.text,
    )


def outcome(case: Case, answer: Answer) -> str:
    """Return what an answer is worth."""
    if answer.error is not None:
        return "raised"
    if answer.names:
        if case.expected is None or answer.names[0] != case.named(case.expected):
            return "wrong"
        late = answer.position is not None and answer.position != case.position
        return "wrong" if late else "named"
    if answer.inconclusive:
        return "inconclusive"
    return "named" if case.harmless else "missed"


# --- The tools ------------------------------------------------------------------------------------


def _answers(case: Case, tools: tuple[str, ...]) -> dict[str, tuple[Answer, float]]:
    if case.reference is None:
        tools = tuple(each for each in tools if each == "check")
    out: dict[str, tuple[Answer, float]] = {}
    for name, function in (("check", by_check), ("compare", by_compare), (SCRIPT, by_script)):
        if name in tools and (name != "compare" or isinstance(case.candidate, nn.Module)):
            out[name] = _timed(function, case)
    if any(each in rules.RULES for each in tools):
        start = time.perf_counter()
        try:
            found = {name: _named(case, each) for name, each in rules.first_by_rules(case).items()}
        except Exception as error:
            found = {name: Answer(error=_told(error)) for name in rules.RULES}
        seconds = (time.perf_counter() - start) / len(found)
        out |= {name: (found[name], seconds) for name in tools if name in found}
    return out


def _timed(function: Callable[[Case], Answer], case: Case) -> tuple[Answer, float]:
    start = time.perf_counter()
    try:
        answer = function(case)
    except Exception as error:
        answer = Answer(error=_told(error))
    return answer, time.perf_counter() - start


def _told(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def _named(case: Case, path: str | None) -> Answer:
    return Answer() if path is None else Answer((case.named(path),))


def by_script(case: Case) -> Answer:
    """The strongest simple script."""
    return _named(case, rules.first_by_script(case))


def by_check(case: Case) -> Answer:
    """`brickline.check`."""
    import brickline

    torch.manual_seed(11)
    report = brickline.check(
        case.candidate,
        *case.args,
        reference=case.reference,
        drive=case.drive,
        repro=False,
    )
    return from_report(case, report)


def by_compare(case: Case) -> Answer:
    """`brickline.record` on each side by itself, then `brickline.compare`."""
    import brickline

    with tempfile.TemporaryDirectory() as directory:
        paths = []
        for name, model in (("candidate", case.candidate), ("reference", case.reference)):
            paths.append(Path(directory) / name)
            dtype = next((each.dtype for each in model.parameters()), torch.float32)
            run = case.run(dtype)
            torch.manual_seed(11)
            with brickline.record(paths[-1], model):
                run(model)
        answer = from_report(case, brickline.compare(*paths))
    # What a module keeps is not in a run: such a fault shows one call late.
    return replace(answer, position=None)


def from_report(case: Case, report: Any) -> Answer:
    """Return whom a report holds guilty; a drop-out that is left on may be nondeterministic."""
    guilty = list(report.culprits) or list(report.suspects)
    if not guilty:
        guilty = [each for each in report.findings if str(each.verdict) == "nondeterministic"]
    first = guilty[0] if guilty else None
    timed = case.group in TIMED and first is not None
    return Answer(
        names=tuple(dict.fromkeys(case.named(each.name) for each in guilty)),
        position=first.position if first is not None and timed else None,
        inconclusive=str(report.status) == "inconclusive",
        text=report.headline,
    )


# --- Counting -------------------------------------------------------------------------------------


def counts(rows: Iterable[Row]) -> dict[tuple[str, str], dict[str, int]]:
    """Return how often each outcome came, by group and tool; unobservable misses are left out."""
    out: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        kept = out.setdefault((row.group, row.tool), dict.fromkeys((*OUTCOMES, "extra", "of"), 0))
        if row.expected is None or row.observable or row.outcome in ("wrong", "raised"):
            kept[row.outcome] += 1
            kept["of"] += 1
        kept["extra"] += row.outcome != "wrong" and bool(row.extra)
    return out


def table(rows: list[Row]) -> str:
    """Return the counts as lines of text: named/wrong/missed/inconclusive of all, by group."""
    tools = list(dict.fromkeys(row.tool for row in rows))
    found = counts(rows)
    width = max(map(len, GROUPS)) + 2
    lines = ["named/wrong/missed/inconclusive (+extra: further modules held guilty; !: raised)", ""]
    lines.append(" " * width + "".join(f"{tool:>18}" for tool in tools))
    for group in GROUPS:
        if any((group, tool) in found for tool in tools):
            cells = (_cell(found.get((group, tool))) for tool in tools)
            lines.append(f"{group:{width}}" + "".join(f"{cell:>18}" for cell in cells))
    hidden = {row.case for row in rows if row.expected is not None and not row.observable}
    lines += ["", f"{len({row.case for row in rows})} cases, {len(hidden)} not observable"]
    return "\n".join(lines)


def _cell(count: dict[str, int] | None) -> str:
    if count is None:
        return "–"
    text = "/".join(str(count[each]) for each in OUTCOMES[:4])
    return (
        text
        + (f"+{count['extra']}" if count["extra"] else "")
        + (f"!{count['raised']}" if count["raised"] else "")
    )


def as_dict(row: Row) -> dict[str, Any]:
    """Return a row as JSON holds it."""
    out = asdict(row)
    out["ratio"] = None if row.ratio == float("inf") else row.ratio
    return out
