"""The text of a divergence report: what comes first, that it fits, and that it stays short."""

from __future__ import annotations

import io
import math
import shlex
from dataclasses import replace

import pytest
from hand_made_reports import BARE
from rich.cells import cell_len
from rich.console import Console

from brickline.report.divergence import print_divergence, report_text, shorten
from brickline.report.error_curve import ErrorCurve, error_curve
from brickline.report.figures import Look
from brickline.verdict import (
    Coverage,
    DivergenceReport,
    Finding,
    Status,
    Verdict,
    VerdictRow,
    VerdictTable,
)

EVIL = "[red]a[/red][link=x]\x1b[31m\nb"
NAMES = [f"layers.{layer}.{part}" for layer in range(6) for part in ("norm", "attn", "mlp.up")]
GUILTY = NAMES.index("layers.3.mlp.up")


def row(name: str, place: int, **fields: object) -> VerdictRow:
    verdict = Verdict.ROUNDING if place < GUILTY else Verdict.PROPAGATED
    given: dict[str, object] = {
        "name": name,
        "reference_name": name,
        "layer_idx": place // 3,
        "position": 0,
        "ordinal": 0,
        "direction": "forward",
        "brick": None,
        "op": None,
        "verdict": Verdict.CULPRIT if place == GUILTY else verdict,
        "z": 40.0 if place == GUILTY else 0.4,
        "local_error": 3e-2 if place == GUILTY else 2e-8,
        "propagated_error": 1e-7 if place < GUILTY else 3e-2,
    }
    return VerdictRow(**(given | fields))  # type: ignore[arg-type]


def verdicts() -> VerdictTable:
    table = VerdictTable()
    for place, name in enumerate(NAMES):
        table.append(row(name, place))
    return table


CULPRIT = Finding(
    name="layers.3.mlp.up",
    verdict=Verdict.CULPRIT,
    layer_idx=3,
    position=0,
    op="aten.mm",
    z=412.3,
    local_error=3.1e-2,
    propagated_error=3.1e-2,
    share=0.99998,
    where="columns 240 to 255 of every row",
    cause="a dropped tail: the result equals that of the first 240 of 256 terms",
    repro="repro/layers.3.mlp.up.py",
    reference_name="model.layers.3.up_proj",
)
REPORT = DivergenceReport(
    candidate="port.py:port",
    reference="model.py:model",
    findings=(CULPRIT, Finding("layers.4.norm", Verdict.WATCH, z=1.3, local_error=1e-6)),
    verdicts=verdicts(),
    coverage=Coverage(18, 20, ("layers.5.rope: an op without a float64 form",)),
    unmatched=tuple(f"reference: aten.view ({number})" for number in range(9)),
    noise_floor=1.2e-6,
    final_error=9.1e-2,
    whys=("The final output differs by 9.1e-02.", "Repairing layers.3.mlp.up leaves 2.0e-06."),
    circumstances=("attention: eager against sdpa",),
    next_command="brickline check --runs port.brick model.brick",
)


def printed(report: DivergenceReport, encoding: str = "utf-8", **options: object) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_divergence(report, Console(file=stream, width=80, **options))  # type: ignore[arg-type]
    stream.flush()
    stream.seek(0)
    return stream.read()


def test_roles_and_headline_come_first():
    lines = report_text(REPORT, width=80).splitlines()
    assert lines[0] == "candidate port.py:port against reference model.py:model: diverged"
    assert lines[1].startswith(
        "layers.3.mlp.up is wrong: a dropped tail: the result equals that of"
    )


def test_everything_a_person_needs_is_there():
    text = report_text(REPORT, width=80)
    for words in (
        "Repairing layers.3.mlp.up leaves 2.0e-06.",
        "columns 240 to 255 of every row",
        "a dropped tail",
        "held to  model.layers.3.up_proj",
        "repro/layers.3.mlp.up.py (it contains weights and inputs)",
        "The final output differs by 9.1e-02 (relative L2); rounding alone makes 1.2e-06.",
        "Compared 18 of 20: 11 rounding, 6 propagated, 1 culprit.",
        "an op without a float64 form",
        "Without a partner (9)",
        "and 5 more",
        "attention: eager against sdpa",
        "brickline check --runs port.brick model.brick",
    ):
        assert words in text
    found = next(line for line in text.splitlines() if line.startswith("layers.3.mlp.up   "))
    words = " ".join(found.split())
    assert words == "layers.3.mlp.up culprit 412 3.1e-02 > 99.9 % 0 3.1e-02"


def test_the_curve_points_at_the_culprit():
    lines = report_text(REPORT, width=80).splitlines()
    at = lines.index("Error over depth, call 0: 1e-08 to 3.0e-02")
    local, propagated, pointer = lines[at + 1 : at + 4]
    column = len("propagated  ") + GUILTY
    assert local[column] == "█"
    assert set(local[12:column] + local[column + 1 :]) == {"▁"}
    assert propagated[column:] == "█" * (len(NAMES) - GUILTY)
    assert pointer[column] == "▲"
    assert "layers.3.mlp.up" in pointer


@pytest.mark.parametrize("width", [16, 20, 40, 60, 80, 100, 200])
@pytest.mark.parametrize("name", ["layers.3.mlp.up", "x" * 300, "a.b" * 90])
def test_lines_fit_the_width(width: int, name: str):
    finding = replace(CULPRIT, name=name, where="w" * 200, repro="/" + "r" * 200)
    report = replace(REPORT, findings=(finding,), candidate=name, unmatched=(name,))
    assert max(map(len, report_text(report, width=width).splitlines())) <= width


def test_a_long_name_keeps_both_ends():
    name = "model.layers.31.self_attention.q_proj"
    assert shorten(name, 21, Look()) == "model.…tention.q_proj"
    assert len(shorten("x" * 99, 21, Look())) == 21
    assert shorten("abc", 3, Look()) == "abc"
    assert shorten("abcd", 2, Look()) == "ab"


def test_names_are_never_markup_nor_control():
    finding = replace(CULPRIT, name=EVIL, cause=EVIL, where=EVIL, repro=EVIL)
    report = replace(REPORT, findings=(finding,), candidate=EVIL, whys=(EVIL,))
    report = replace(report, unmatched=(EVIL,), circumstances=(EVIL,), next_command=EVIL)
    for text in (report_text(report, width=100), printed(report)):
        assert "\x1b" not in text
        assert text.count("[red]a[/red][link=x]\\x1b[31m\\nb") >= 7


def test_a_long_command_can_be_copied_as_it_stands():
    command = "brickline check --runs " + " ".join(
        f"/some/long/place/number/{n}.brick" for n in "ab"
    )
    lines = report_text(replace(REPORT, next_command=command), width=60).splitlines()
    shown = lines[lines.index("Next") + 1 :]
    assert len(shown) > 1
    assert all(line.endswith(" \\") for line in shown[:-1])
    assert shlex.split("\n".join(shown).replace("\\\n", " ")) == shlex.split(command)


def test_wide_characters_fit_too():
    report = replace(REPORT, findings=(replace(CULPRIT, name="層" * 60, where="列" * 90),))
    for width in (20, 41, 80):
        assert max(map(cell_len, report_text(report, width=width).splitlines())) <= width


def test_a_stream_without_unicode_gets_plain_characters():
    text = printed(REPORT, encoding="ascii")
    assert "^ layers.3.mlp.up" in text
    assert text.isascii()


def test_what_is_no_terminal_gets_no_colour():
    assert "\x1b" not in printed(REPORT)
    assert "\x1b" in printed(REPORT, force_terminal=True, color_system="standard")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(value: float):
    table = verdicts()
    table.columns["local_error"][4] = value
    table.columns["propagated_error"][5] = value
    finding = replace(CULPRIT, z=value, local_error=value, share=value, propagated_error=value)
    report = replace(
        REPORT, findings=(finding,), verdicts=table, noise_floor=value, final_error=value
    )
    text = report_text(report, width=80)
    assert str(value) in text
    assert "!" in next(line for line in text.splitlines() if line.startswith("local "))
    again = DivergenceReport.from_json(report.to_json())
    assert report_text(again, width=80) == text


def test_everything_may_be_unknown():
    finding = Finding("k", Verdict.SUSPECT, reason="fingerprints alone cannot know z, share, repro")
    text = report_text(DivergenceReport(findings=(finding,)), width=80)
    assert "k is the first suspect" in text
    assert "fingerprints alone cannot know z" in text
    assert "Share" not in text


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (Status.MATCHED, "the only value agrees within rounding"),
        (Status.INCONCLUSIVE, "nothing could be compared"),
    ],
)
def test_an_empty_report_says_so(status: Status, words: str):
    text = report_text(BARE[status], width=80)
    assert words in text
    assert ("Nothing was compared." in text) is (status is Status.INCONCLUSIVE)
    assert f"candidate candidate against reference reference: {status}" in text


def test_the_text_stays_short():
    table = VerdictTable()
    for place in range(20_000):
        table.append(row(f"op.{place}", place, local_error=1e-7 * (1 + place % 7)))
    many = tuple(replace(CULPRIT, name=f"op.{place}") for place in range(3_000))
    texts = tuple(f"launch {place} " + "x" * 5_000 for place in range(3_000))
    report = replace(
        REPORT,
        findings=many,
        verdicts=table,
        unmatched=texts,
        duplicates=texts,
        circumstances=texts,
        whys=texts[:20],
        coverage=Coverage(20_000, 20_000, texts),
    )
    text = report_text(report, width=80)
    assert len(text.splitlines()) < 350
    assert "Findings (the first 10 of 3000)" in text
    assert "and 2996 more" in text


def test_the_curve_is_of_the_call_in_which_the_culprit_acts():
    table = verdicts()
    for place, name in enumerate(NAMES):
        table.append(row(name, place, position=1, local_error=0.5))
    assert error_curve(table, 0).local == error_curve(verdicts(), 0).local
    assert set(error_curve(table, 1).local) == {0.5}
    later = replace(REPORT, verdicts=table, findings=(replace(CULPRIT, position=1),))
    assert "Error over depth, call 1" in report_text(later, width=80)


def test_a_module_that_was_entered_before_its_parts_is_left_out():
    table = VerdictTable()
    for place, name in enumerate(["Decoder", "layers.0", "layers.0.norm", "layers.0.mlp", "head"]):
        table.append(row(name, place))
    assert error_curve(table, 0).names == ("layers.0.norm", "layers.0.mlp", "head")
    table.append(row("layers.0", 9, op="aten.add"))
    assert error_curve(table, 0).names[-1] == "layers.0"


def test_neighbours_are_drawn_by_their_largest():
    values = [1e-8] * 100
    values[57] = 1e-1
    curve = ErrorCurve([str(place) for place in range(100)], values, [None] * 100)
    drawn = curve.draw(values, 10, unicode=True)
    assert drawn == "▁▁▁▁▁█▁▁▁▁"
    assert curve.column("57", 10) == 5
    assert curve.column("absent", 10) is None
    twice = ErrorCurve(["a", "b", "a"], [1e-9, 1e-9, math.nan], [None] * 3)
    assert twice.column("a", 10) == 2
    assert curve.draw([None] * 100, 10, unicode=False) == " " * 10


def test_a_single_error_stands_out_whatever_its_size():
    for error in (1e-9, 0.11, 1.0, 1e5, 1e-300):
        values = [0.0, error, 0.0]
        curve = ErrorCurve(["a", "b", "c"], values, values)
        assert curve.draw(values, 10, unicode=True) == "▁█▁"


def test_a_curve_of_zeros_is_not_drawn():
    table = VerdictTable()
    for place, name in enumerate(NAMES):
        table.append(row(name, place, local_error=0.0, propagated_error=0.0))
    report = replace(REPORT, verdicts=table, findings=())
    assert "Error over depth" not in report_text(report, width=80)
