"""No report contradicts itself, whatever its facts are; and what the headline says of each."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from brickline.report.divergence import report_text
from brickline.report.html.divergence_page import divergence_document
from brickline.report.notebook import divergence_html
from brickline.verdict import (
    CLEAN,
    GUILTY,
    Answer,
    Coverage,
    DivergenceReport,
    Finding,
    Status,
    Verdict,
    VerdictRow,
    VerdictTable,
    apply_accepted,
    arithmetic_answer,
)

NAMES = ("embed", "layers.0.attn", "layers.0.mlp", "layers.1.attn", "head")
FIGURES = st.sampled_from([None, 0.0, 1e-15, 3e-4, 0.02, 1.5, 40.0, math.inf, math.nan])
SHARES = st.sampled_from([None, 0.0, 1e-9, 0.0004, 0.0006, 0.5, 0.9999, 1.0, -0.2, math.nan])
WORDS = st.sampled_from([None, "eps: 1e-3 explains it", "is handed wrong positions by the model"])
NAMED = st.lists(st.sampled_from(NAMES), max_size=3).map(tuple)


@st.composite
def findings(draw: Any) -> Finding:
    return Finding(
        draw(st.sampled_from(NAMES)),
        draw(st.sampled_from(Verdict)),
        layer_idx=draw(st.sampled_from([None, 0])),
        position=draw(st.sampled_from([None, 0, 2])),
        op=draw(st.sampled_from([None, "aten.mm"])),
        direction=draw(st.sampled_from(["forward", "backward"])),
        z=draw(FIGURES),
        local_error=draw(FIGURES),
        share=draw(SHARES),
        cause=draw(WORDS),
        source=draw(st.sampled_from([None, "gpt.py:212"])),
        alternatives=draw(NAMED),
        members=draw(NAMED),
        reason=draw(WORDS),
    )


ANSWERS = st.none() | st.builds(
    Answer,
    st.sampled_from(["the outputs differ in float64", "all weights are equal"]),
    FIGURES,
    FIGURES,
    st.booleans(),
    st.sampled_from(["", "not shown behind flash_attention"]),
)


@st.composite
def tables(draw: Any) -> VerdictTable:
    table = VerdictTable()
    for _ in range(draw(st.integers(0, 4))):
        name = draw(st.sampled_from(NAMES))
        verdict = draw(st.sampled_from([Verdict.IDENTICAL, Verdict.ROUNDING, *Verdict]))
        figures = draw(FIGURES), draw(FIGURES), draw(FIGURES)
        table.append(VerdictRow(name, name, None, 0, 0, "forward", None, None, verdict, *figures))
    return table


FIELDS: dict[str, tuple[st.SearchStrategy[Any], Any]] = {
    "findings": (st.lists(findings(), max_size=3).map(tuple), ()),
    "state": (ANSWERS, None),
    "logic": (
        ANSWERS,
        Answer("in float64 the outputs differ by no more than rounding", 1e-15, 1e-12),
    ),
    "arithmetic": (ANSWERS, Answer("largest error relative to rounding, at head", 0.8, 2.0)),
    "repair": (st.sampled_from([None, {"tensor": "embed.weight", "permutation": [1, 0]}]), None),
    "verdicts": (tables(), VerdictTable()),
    "coverage": (st.builds(Coverage, st.integers(0, 4), st.integers(0, 4)), Coverage(4, 4)),
    "unshown": (st.sampled_from([(), ("the candidate raised in call 2",)]), ()),
    "unmatched": (st.sampled_from([(), ("reference: head, call 0",)]), ()),
    "noise_floor": (FIGURES, 1e-6),
    "final_error": (FIGURES, 2e-6),
}
"""Any value of each field, and one that leaves nothing open."""


@st.composite
def reports(draw: Any) -> DivergenceReport:
    """Reports in which any few facts, or all of them, are not those of a clean one."""
    odd = draw(st.sets(st.sampled_from(list(FIELDS)), max_size=3) | st.just(set(FIELDS)))
    return DivergenceReport(
        **{name: draw(any_) if name in odd else clean for name, (any_, clean) in FIELDS.items()}
    )


REPORTS = reports()


def in_one_line(text: str) -> str:
    return " ".join(text.split())


@given(REPORTS)
def test_a_matched_report_leaves_nothing_open(report: DivergenceReport) -> None:
    if not report.matched:
        return
    assert report.exit_status == 0
    assert not report.guilty
    assert {finding.verdict for finding in report.findings} <= CLEAN
    assert set(report.verdicts.columns["verdict"]) <= CLEAN
    for answer in report.answers.values():
        assert answer.figure is None or answer.limit is None or answer.figure <= answer.limit
    assert report.coverage.complete
    assert not report.unshown
    assert not report.unmatched
    assert report.final_error is None or math.isfinite(report.final_error)
    assert "above the limit" not in str(report)


@given(REPORTS)
def test_a_diverged_report_names_somebody_first(report: DivergenceReport) -> None:
    guilty = [finding for finding in report.findings if finding.verdict in GUILTY]
    assert report.diverged is bool(guilty)
    if guilty:
        assert report.exit_status == 1
        assert guilty[0].name in report.headline
        for name in guilty[0].alternatives:
            assert name in report.headline


@given(REPORTS)
def test_views_say_the_same(report: DivergenceReport) -> None:
    text = in_one_line(report_text(report, width=1000))
    document = divergence_document(report)
    kept = json.loads(report.to_json())
    notebook = divergence_html(report)
    assert f"against reference reference: {report.status} {in_one_line(report.headline)}" in text
    for view in (document, kept):
        assert (view["status"], view["headline"]) == (str(report.status), report.headline)
    assert f">{report.status}</b>" in notebook
    for question, answer in report.answers.items():
        assert f"{question.capitalize()} {answer}" in text
        assert {"question": question.capitalize(), "text": str(answer)}.items() <= next(
            entry for entry in document["answers"] if entry["question"] == question.capitalize()
        ).items()
        assert question.capitalize() in notebook
    assert ("Repair" in text) is (report.repair is not None)


@given(REPORTS)
def test_a_share_of_nothing_is_never_printed(report: DivergenceReport) -> None:
    for text in (str(report), json.dumps(divergence_document(report)), divergence_html(report)):
        assert not re.search(r"(?<![\d.])-?0\.0 %", text)


@given(REPORTS)
def test_a_report_survives_its_file(report: DivergenceReport) -> None:
    again = DivergenceReport.from_json(report.to_json())
    assert again.to_json() == report.to_json()
    assert (again.status, again.headline) == (report.status, report.headline)
    assert str(again) == str(report)


@given(REPORTS)
def test_accepting_differences_never_hides_another(report: DivergenceReport) -> None:
    accepted = apply_accepted(report, [{"brick": "head", "reason": "int8", "relative_l2": 0.1}])
    others = [finding for finding in report.guilty if finding.name != "head"]
    if others or any(row.verdict in GUILTY and row.name != "head" for row in report.verdicts):
        assert accepted.diverged
    if accepted.matched:
        assert report.unshown == report.unmatched == ()


def test_status_follows_every_change() -> None:
    culprit = Finding("head", Verdict.CULPRIT)
    report = DivergenceReport(findings=(culprit,), coverage=Coverage(3, 3))
    assert report.status is Status.DIVERGED
    assert replace(report, findings=()).status is Status.MATCHED
    assert replace(report, findings=(), unshown=("it raised",)).headline == "it raised"
    with pytest.raises(ValueError, match="status"):
        replace(report, status=Status.MATCHED)


@pytest.mark.parametrize(
    ("changes", "headline"),
    [
        (
            {"cause": "is handed wrong positions by the model", "source": "gpt.py:212"},
            "layers.1.attn is handed wrong positions by the model (gpt.py:212)",
        ),
        ({"position": 2}, "layers.1.attn is wrong from call 2 on"),
        ({"alternatives": ("layers.1.mlp",)}, "either layers.1.attn or layers.1.mlp is wrong"),
        (
            {"members": ("layers.1.attn", "layers.2.attn", "layers.3.attn"), "cause": "eps: 1e-3"},
            "layers.1.attn and 2 like it are wrong: eps: 1e-3",
        ),
        (
            {"verdict": Verdict.SUSPECT, "cause": "scaled by 1.01"},
            "layers.1.attn is the first suspect: scaled by 1.01",
        ),
        ({"verdict": Verdict.NONFINITE_ORIGIN}, "layers.1.attn is where values stop being finite"),
        (
            {"direction": "backward", "share": 0.5},
            "layers.1.attn is wrong in its backward pass; repairing it removes 50.0 % of the "
            "gradients' difference",
        ),
        ({"name": "RmsNorm", "layer_idx": 3}, "RmsNorm (layer 3) is wrong"),
    ],
)
def test_the_headline_says_who_what_and_how_sure(changes: dict[str, Any], headline: str) -> None:
    finding = replace(Finding("layers.1.attn", Verdict.CULPRIT, share=1e-5), **changes)
    assert DivergenceReport(findings=(finding,)).headline == headline


def test_an_answer_above_its_limit_is_never_a_match() -> None:
    logic = Answer("in float64 the outputs of call 0 differ", figure=0.02, limit=1e-12)
    report = DivergenceReport(logic=logic, coverage=Coverage(5, 5))
    assert report.status is Status.INCONCLUSIVE
    assert report.headline == (
        "logic: in float64 the outputs of call 0 differ (0.02, above the limit of 1e-12), and no "
        "module was named for it"
    )


def test_outputs_that_differ_by_more_than_rounding_are_never_a_match() -> None:
    report = DivergenceReport(coverage=Coverage(5, 5), final_error=0.3, noise_floor=1e-6)
    assert report.status is Status.INCONCLUSIVE
    assert "0.3" in report.headline
    assert replace(report, final_error=5e-6).status is Status.MATCHED
    assert replace(report, final_error=math.inf, noise_floor=None).status is Status.INCONCLUSIVE


def test_a_question_without_an_answer_is_told() -> None:
    unasked = Answer.not_asked("there is no reference")
    arithmetic = Answer("largest error relative to rounding, at head", 0.8, 2.0)
    report = DivergenceReport(logic=unasked, arithmetic=arithmetic, coverage=Coverage(5, 5))
    assert report.status is Status.MATCHED
    assert (
        report.headline
        == "all 5 values agree within rounding; logic not asked: there is no reference"
    )
    neither = replace(report, arithmetic=Answer("no op was executed again", shown=False))
    assert neither.status is Status.INCONCLUSIVE


def test_arithmetic_leaves_out_what_was_excused() -> None:
    table = VerdictTable()
    for name, verdict, z in (
        ("a", Verdict.ROUNDING, 0.7),
        ("b", Verdict.WATCH, 30.0),
        ("c", Verdict.UNKNOWN, 90.0),
    ):
        table.append(
            VerdictRow(name, name, None, 0, 0, "forward", None, None, verdict, z, None, None)
        )
    assert str(arithmetic_answer(table, 2.0, "coarse")) == (
        "largest error relative to rounding, at a (0.7, limit 2); larger in 1 of 2 values: coarse"
    )
    assert not arithmetic_answer(VerdictTable(), 2.0).shown


OLD = {"format": "brickline-divergence", "version": 1, "candidate": "a", "reference": "b"}


@pytest.mark.parametrize("status", list(Status))
def test_reports_of_earlier_versions_are_read(status: Status, tmp_path: Path) -> None:
    path = tmp_path / "old.json"
    path.write_text(json.dumps({**OLD, "status": status, "headline": "as it was said"}))
    report = DivergenceReport.load(path)
    assert report.status is Status.INCONCLUSIVE, "none of its facts shows more"
    assert ("as it was said" in report.headline) is (status is not Status.MATCHED)
