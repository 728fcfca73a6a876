"""A DivergenceReport as one HTML page: what the page's scripts are given.

Owns the headline, the cards of findings, the lists, and how much of each a page holds; verdicts
and curves have modules of their own, drawing is the scripts' matter. What a report does not know
is None here too, with its reason; what is an estimate is marked as one.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from brickline.report.divergence import share_figure
from brickline.report.html.error_curves import curves_view
from brickline.report.html.page import MAX_LINES, MAX_TEXT, PageOf, lines, named
from brickline.report.html.verdict_rows import Texts, verdicts_view
from brickline.verdict import GUILTY, Answer, DivergenceReport, Finding, Verdict

SCRIPTS = ("verdicts.js", "curve.js", "findings.js", "divergence.js")
STYLES = ("divergence.css",)
MAX_CARDS = 200
"""Cards of findings; they come ranked."""
MAX_FACTS = 40
"""Facts behind one finding."""
ESTIMATED = (
    "Estimated from fingerprints: each error is known to about 9 % of itself (one standard "
    "deviation)."
)
"""What docs/fingerprints.md says of `relative_l2`."""

_FIGURES = ("z", "local_error", "propagated_error", "share", "where", "cause", "repro")


def divergence_document(report: DivergenceReport) -> dict[str, Any]:
    """Return what the page's scripts show, as JSON values."""
    texts = Texts()
    estimated = is_estimated(report)
    view: dict[str, Any] = {
        "status": str(report.status),
        "candidate": named(report.candidate),
        "reference": named(report.reference),
        "headline": named(report.headline, MAX_TEXT),
        "estimated": ESTIMATED if estimated else None,
        "final_error": report.final_error,
        "outputs": report.outputs,
        "noise_floor": report.noise_floor,
        "answers": [_answer(question, answer) for question, answer in report.answers.items()],
        "repair": _facts(report.repair or {}),
        "whys": _lines(report.whys),
        "next_command": report.next_command and named(report.next_command, 4 * MAX_TEXT),
        "parted": _parted(report),
        "findings": [_card(each, estimated) for each in report.findings[:MAX_CARDS]],
        "findings_count": len(report.findings),
        "guilty_count": sum(each.verdict in GUILTY for each in report.findings),
        "verdicts": verdicts_view(report.verdicts, texts),
        "depth": curves_view(report, texts),
        "compared": report.coverage.compared,
        "total": report.coverage.total,
        "notes": _lines(report.coverage.notes),
        "unmatched": _lines(report.unmatched),
        "duplicates": _lines(report.duplicates),
        "circumstances": _lines(report.circumstances),
    }
    view["texts"], view["texts_cut"] = texts.listed()
    return view


PAGE = PageOf(
    title=lambda report: f"{report.candidate} against {report.reference} · brickline",
    document=divergence_document,
    scripts=SCRIPTS,
    styles=STYLES,
)
divergence_page = PAGE.text
write_divergence_page = PAGE.write


def is_estimated(report: DivergenceReport) -> bool:
    """Whether its errors come from fingerprints: nothing was executed again, so there is no z."""
    columns = report.verdicts.columns
    if any(each is not None for each in columns["z"]):
        return False
    if any(each.z is not None for each in report.findings):
        return False
    known = (*columns["local_error"], *columns["propagated_error"])
    return any(each is not None for each in known) or any(
        each.propagated_error is not None for each in report.findings
    )


def _answer(question: str, answer: Answer) -> dict[str, Any]:
    kind = "bad" if answer.exceeds else "good" if answer.shown else "warn"
    return {"question": question.capitalize(), "kind": kind, "text": named(str(answer), MAX_TEXT)}


# --- findings -------------------------------------------------------------------------------------


def _card(finding: Finding, estimated: bool) -> dict[str, Any]:
    known = {each: getattr(finding, each) for each in _FIGURES}
    return {
        "name": named(finding.name),
        "verdict": str(finding.verdict),
        "layer_idx": finding.layer_idx,
        "position": finding.position,
        "ordinal": finding.ordinal,
        "brick": finding.brick and named(str(finding.brick)),
        "op": finding.op and named(str(finding.op)),
        "direction": finding.direction,
        "held_to": finding.reference_name and named(finding.reference_name),
        "estimated": estimated or finding.verdict is Verdict.SUSPECT,
        "z": finding.z,
        "local_error": finding.local_error,
        "propagated_error": finding.propagated_error,
        "share": finding.share,
        "share_text": share_figure(finding.share) or None,
        "where": finding.where and named(finding.where, MAX_TEXT),
        "cause": finding.cause and named(finding.cause, MAX_TEXT),
        "source": finding.source and named(finding.source, MAX_TEXT),
        "alternatives": named(", ".join(finding.alternatives), MAX_TEXT),
        "members": named(", ".join(finding.members), MAX_TEXT),
        "repro": _repro_command(finding),
        "reason": finding.reason and named(finding.reason, MAX_TEXT),
        "missing": [each for each in _FIGURES if not known[each] and known[each] != 0],
        "why_missing": _why_missing(finding),
        "facts": _facts(finding.evidence),
    }


def _repro_command(finding: Finding) -> str | None:
    """Return the command that shows it alone, as a shell reads it."""
    if not finding.repro:
        return None
    path = "".join(each if each.isprintable() else "?" for each in finding.repro)
    return f"python {shlex.quote(path)}"


def _why_missing(finding: Finding) -> str:
    """Return why figures of a finding are None, where it does not say so itself."""
    if finding.reason:
        return named(finding.reason, MAX_TEXT)
    if finding.verdict in GUILTY:
        return "the report does not say why"
    return f"they are not looked for where the verdict is {finding.verdict}"


def _facts(evidence: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [(named(str(name)), _fact(value)) for name, value in list(evidence.items())[:MAX_FACTS]]
    more = len(evidence) - len(facts)
    return [*facts, ("…", f"{more} more facts")] if more else facts


def _fact(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str | int) or value is None:
        return named(str(value), MAX_TEXT)
    if isinstance(value, Mapping):
        return named(", ".join(f"{key}: {_fact(each)}" for key, each in value.items()), MAX_TEXT)
    if isinstance(value, Sequence):
        return named(", ".join(map(_fact, value[:MAX_LINES])) or "none", MAX_TEXT)
    return _fact(float(value)) if hasattr(value, "__float__") else named(str(value), MAX_TEXT)


# --- lists ----------------------------------------------------------------------------------------


def _lines(texts: Sequence[Any]) -> dict[str, Any]:
    """Return the first lines of a list and how many there are."""
    return {"lines": lines(texts), "of": len(texts)}


def _parted(report: DivergenceReport) -> list[dict[str, Any]]:
    """Return the first launch that parts, on both sides, where launches were compared."""
    sides = (
        ("candidate", report.actual_trace or report.first_divergent_kernel),
        ("reference", report.expected_trace),
    )
    return [{"side": side, "pairs": list(_launch(trace))} for side, trace in sides if trace]


def _launch(trace: Any) -> Iterator[tuple[str, str]]:
    fields = asdict(trace)
    yield "kernel", named(fields["kernel_name"])
    if fields["layer_idx"] is not None:
        yield "layer", str(fields["layer_idx"])
    yield "call", str(fields["position"])
    yield "backend", named(fields["backend"] or "not recorded")
    if fields["time_us"] and math.isfinite(fields["time_us"]):
        yield "time", f"{fields['time_us']:.3g} µs"
    for name in ("input_checksum", "output_checksum"):
        if fields[name] is not None:
            yield name.replace("_", " "), f"0x{fields[name]:016X}"
    if fields["params"]:
        yield "parameters", named(fields["params"])
