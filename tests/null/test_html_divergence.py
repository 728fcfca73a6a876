"""The page of a divergence report, without a browser: what it is given, and how much of it."""

from __future__ import annotations

import base64
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made_reports import (
    ACTS_IN,
    BARE,
    CULPRIT,
    CULPRIT_FINDING,
    EVIL,
    REPORT,
    SUSPECTED,
    many_verdicts,
)
from typer.testing import CliRunner

from brickline.commands import app
from brickline.errors import BricklineError
from brickline.report.html import error_curves, verdict_rows
from brickline.report.html.divergence_page import (
    divergence_document,
    divergence_page,
    write_divergence_page,
)
from brickline.report.html.verdict_rows import NO_NUMBER, ORDER, Texts
from brickline.verdict import (
    DivergenceReport,
    Finding,
    Status,
    Verdict,
    VerdictRow,
    VerdictTable,
)


def unpacked(column: dict[str, Any]) -> list[Any]:
    data = np.frombuffer(base64.b64decode(column["data"]), f"<{column['kind']}")
    return list(data.tolist())


def rows_of(packed: dict[str, Any], document: dict[str, Any]) -> list[dict[str, Any]]:
    """What ``verdicts.js`` makes of packed rows."""
    columns = {key: unpacked(value) for key, value in packed.items() if key != "count"}
    texts = [None, *document["texts"]]
    rows = []
    for at in range(packed["count"]):
        row = {key: values[at] for key, values in columns.items()}
        for key in ("name", "reference_name", "brick", "op", "direction"):
            row[key] = texts[row[key]]
        for key in ("layer_idx", "position", "ordinal"):
            row[key] = None if row[key] == NO_NUMBER else row[key]
        for key in ("z", "local_error", "propagated_error"):
            value = row[key]
            row[key] = None if math.isnan(value) else math.nan if value == -math.inf else value
        row["verdict"] = ORDER[row["verdict"]]
        rows.append(row)
    return rows


def test_the_document_holds_the_reports_figures() -> None:
    document = divergence_document(REPORT)
    assert (document["status"], document["estimated"]) == ("diverged", None)
    assert document["final_error"] == REPORT.final_error
    assert document["noise_floor"] == REPORT.noise_floor
    assert (document["compared"], document["total"]) == (574, 576)
    card = document["findings"][0]
    for name in ("z", "local_error", "propagated_error", "share", "where", "cause"):
        assert card[name] == getattr(CULPRIT_FINDING, name)
    assert card["repro"] == "python 'repro dir/model.layers.9.mlp.up.py'"
    assert not card["missing"]
    assert ["dtype", "bfloat16"] in [list(each) for each in card["facts"]]
    assert ["shape", "4, 128, 1024"] in [list(each) for each in card["facts"]]


def test_rows_are_the_reports_and_neither_identical_nor_rounding() -> None:
    document = divergence_document(REPORT)
    rows = rows_of(document["verdicts"]["rows"], document)
    told = [row for row in REPORT.verdicts if row.verdict not in verdict_rows.QUIET]
    assert len(rows) == len(told) == document["verdicts"]["told"]
    for shown, row in zip(rows, told, strict=True):
        assert {name: shown[name] for name in VerdictRow._fields} == row._asdict()
        assert REPORT.verdicts[shown["row"]] == row
    counts = dict(zip(document["verdicts"]["order"], document["verdicts"]["counts"], strict=True))
    assert {word: count for word, count in counts.items() if count} == REPORT.verdicts.counts()
    assert document["verdicts"]["left_out"] is None


def test_every_verdict_has_a_place_and_words() -> None:
    assert set(ORDER) == set(Verdict)
    script = (Path(verdict_rows.__file__).parent / "assets" / "verdicts.js").read_text()
    says = script[script.index("const SAYS") : script.index("// --- figures")]
    for verdict in Verdict:
        assert re.search(rf'"?{verdict}"?: "', says), verdict


def test_what_is_none_has_its_reason() -> None:
    card = divergence_document(SUSPECTED)["findings"][0]
    assert card["missing"] == ["z", "share", "repro"]
    assert card["why_missing"].startswith("fingerprints do not tell z")
    watched = divergence_document(REPORT)["findings"][1]
    assert watched["missing"] == ["propagated_error", "share", "where", "cause", "repro"]
    assert "watch" in watched["why_missing"]
    bare = replace(REPORT, findings=(Finding("a", Verdict.CULPRIT),))
    assert divergence_document(bare)["findings"][0]["why_missing"] == "the report does not say why"


def test_a_share_of_nothing_is_a_figure() -> None:
    report = replace(REPORT, findings=(replace(CULPRIT_FINDING, share=0.0, z=0.0),))
    assert divergence_document(report)["findings"][0]["missing"] == []


def test_what_came_from_fingerprints_is_an_estimate() -> None:
    document = divergence_document(SUSPECTED)
    assert "Estimated from fingerprints" in document["estimated"]
    assert document["findings"][0]["estimated"]
    assert divergence_document(DivergenceReport())["estimated"] is None


def test_the_curve_begins_with_the_call_in_which_the_culprit_acts() -> None:
    document = divergence_document(REPORT)
    depth = document["depth"]
    assert [each["position"] for each in depth["curves"]] == [0, 1, 2]
    assert depth["first"] == ACTS_IN
    rows = rows_of(depth["curves"][ACTS_IN]["rows"], document)
    assert len(rows) == depth["curves"][ACTS_IN]["of"] == 24 * 8
    assert [row["name"] for row in rows if row["verdict"] is Verdict.CULPRIT] == [CULPRIT]


def test_a_long_curve_keeps_the_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_curves, "MAX_POINTS", 20)
    document = divergence_document(REPORT)
    curve = document["depth"]["curves"][ACTS_IN]
    rows = rows_of(curve["rows"], document)
    assert (len(rows), curve["of"]) == (20, 192)
    assert CULPRIT in [row["name"] for row in rows]
    assert max(row["local_error"] for row in rows) == 0.31


def test_few_calls_are_drawn_and_the_rest_is_counted() -> None:
    table = many_verdicts(256 * 40)
    finding = replace(CULPRIT_FINDING, position=17, name="layers.0.mlp.up")
    depth = divergence_document(replace(REPORT, verdicts=table, findings=(finding,)))["depth"]
    assert depth["calls"] == 40
    positions = [each["position"] for each in depth["curves"]]
    assert len(positions) == error_curves.MAX_ALL_POINTS // 256
    assert positions == sorted(positions)
    assert {0, 17, 39} <= set(positions)
    assert positions[depth["first"]] == 17


def test_modules_that_stand_for_their_parts_are_no_points_unless_guilty() -> None:
    table = VerdictTable()
    for name, verdict in (
        ("Decoder", Verdict.PROPAGATED),
        ("layers.0", Verdict.PROPAGATED),
        ("layers.0.attn", Verdict.CULPRIT),
        ("layers.0.attn.q", Verdict.ROUNDING),
        ("layers.0.mlp", Verdict.PROPAGATED),
    ):
        table.append(
            VerdictRow(name, name, 0, 0, 0, "forward", None, None, verdict, 1.0, 1e-3, 1e-3)
        )
    document = divergence_document(replace(REPORT, verdicts=table, findings=()))
    rows = rows_of(document["depth"]["curves"][0]["rows"], document)
    assert [row["name"] for row in rows] == ["layers.0.attn", "layers.0.attn.q", "layers.0.mlp"]


def test_backward_has_a_curve_of_its_own() -> None:
    table = VerdictTable()
    for direction in ("forward", "backward"):
        for name in ("a", "b", "c"):
            table.append(
                VerdictRow(
                    name, name, None, 0, 0, direction, None, None, Verdict.WATCH, 1.0, 1e-3, None
                )
            )
    finding = Finding("b", Verdict.CULPRIT, position=0, direction="backward")
    depth = divergence_document(replace(REPORT, verdicts=table, findings=(finding,)))["depth"]
    assert [each["direction"] for each in depth["curves"]] == ["forward", "backward"]
    assert depth["first"] == 1


def test_at_most_20000_rows_and_the_rest_is_counted_by_brick() -> None:
    table = many_verdicts(30_000)
    document = divergence_document(replace(REPORT, verdicts=table))
    view = document["verdicts"]
    rows = rows_of(view["rows"], document)
    assert len(rows) == 20_000
    assert rows[-1]["verdict"] is Verdict.CULPRIT  # the last of 30,000, and kept
    left = view["left_out"]
    assert left["count"] == 10_000 == view["told"] - 20_000
    assert sum(count for _, _, count in left["groups"]) == left["count"]
    bricks = {brick for brick, _, _ in left["groups"]}
    assert bricks == {"RmsNorm", "OutputProjection"} | {
        f"layers.*.{part}" for part in ("attn.q", "attn.k", "attn.v", "mlp.up", "mlp.down")
    }
    assert len(divergence_page(replace(REPORT, verdicts=table)).encode()) < 4 * 2**20


def test_many_bricks_that_are_left_out_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_rows, "MAX_ROWS", 5)
    monkeypatch.setattr(verdict_rows, "MAX_GROUPS", 3)
    table = many_verdicts(256)
    left = divergence_document(replace(REPORT, verdicts=table))["verdicts"]["left_out"]
    assert len(left["groups"]) == 3
    assert left["more_groups"] == 4
    assert sum(count for _, _, count in left["groups"]) + left["more"] == left["count"] == 251


def test_very_long_names_keep_the_page_small() -> None:
    table = many_verdicts(20_000)
    table.columns["name"] = [f"{'x' * 4000}.{at}" for at in range(20_000)]
    text = divergence_page(replace(REPORT, verdicts=table))
    assert len(text.encode()) < 4 * 2**20
    texts = Texts()
    texts.numbers(table.columns["name"])
    names, cut = texts.listed()
    assert cut == 20_000
    assert names[7].endswith(".7")


def test_many_findings_and_lines_are_bounded() -> None:
    report = replace(
        REPORT,
        findings=(CULPRIT_FINDING,) * 1000,
        unmatched=tuple(f"candidate: launch {at}" for at in range(100_000)),
        next_command="n" * 100_000,
    )
    document = divergence_document(report)
    assert (len(document["findings"]), document["findings_count"]) == (200, 1000)
    assert (len(document["unmatched"]["lines"]), document["unmatched"]["of"]) == (200, 100_000)
    assert len(divergence_page(report).encode()) < 2**20


def test_nothing_of_the_report_is_markup() -> None:
    finding = replace(
        CULPRIT_FINDING, name=EVIL, cause=EVIL, where=EVIL, repro=EVIL, evidence={EVIL: EVIL}
    )
    report = replace(
        REPORT,
        candidate=EVIL,
        reference=EVIL,
        whys=(EVIL,),
        findings=(finding,),
        next_command=EVIL,
        circumstances=(EVIL,),
    )
    text = divergence_page(report)
    assert "<script>window" not in text
    assert "<img" not in text
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block is not None
    assert json.loads(block[1])["headline"].startswith(EVIL)


def test_numbers_that_are_not_finite_survive() -> None:
    table = VerdictTable()
    for local in (math.inf, math.nan, None):
        table.append(
            VerdictRow(
                "a", None, None, None, 0, "forward", None, None, Verdict.WATCH, None, local, None
            )
        )
    finding = replace(CULPRIT_FINDING, z=math.inf, share=math.nan)
    report = replace(REPORT, verdicts=table, findings=(finding,), final_error=math.nan)
    document = divergence_document(report)
    values = [row["local_error"] for row in rows_of(document["verdicts"]["rows"], document)]
    assert values[0] == math.inf
    assert math.isnan(values[1])
    assert values[2] is None
    assert '"z":"Infinity"' in divergence_page(report)


@pytest.mark.parametrize("status", list(Status))
def test_an_empty_report_has_a_page(status: Status) -> None:
    document = divergence_document(BARE[status])
    assert document["depth"]["curves"] == []
    assert document["verdicts"]["told"] == 0
    assert divergence_page(BARE[status]).startswith("<!doctype html>")


def test_a_page_is_written_whole_and_never_over_another(tmp_path: Path) -> None:
    path = write_divergence_page(REPORT, tmp_path / "page.html")
    assert path.read_text(encoding="utf-8") == divergence_page(REPORT)
    with pytest.raises(BricklineError, match="--force"):
        write_divergence_page(REPORT, path)
    write_divergence_page(SUSPECTED, path, force=True)
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    with pytest.raises(BricklineError):
        write_divergence_page(REPORT, tmp_path / "nowhere" / "page.html")


def test_a_saved_report_becomes_a_page(tmp_path: Path) -> None:
    saved = REPORT.save(tmp_path / "report.json")
    page = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(saved), "--html", str(page)])
    assert result.exit_code == 0
    assert str(page) in result.stdout
    assert page.read_text(encoding="utf-8") == divergence_page(DivergenceReport.load(saved))
    again = CliRunner().invoke(app, ["report", str(saved), "--html", str(page)])
    assert isinstance(again.exception, BricklineError)
