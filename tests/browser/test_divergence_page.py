"""The page of a divergence report in Chromium: it opens clean, answers, and says what is true."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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

from brickline.report.divergence import error_figure
from brickline.report.html.divergence_page import write_divergence_page
from brickline.verdict import DivergenceReport, Status, Verdict, VerdictRow, VerdictTable

Open = Callable[..., Any]
TOLD = [row for row in REPORT.verdicts if row.verdict not in (Verdict.IDENTICAL, Verdict.ROUNDING)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_divergence_page(REPORT, tmp_path_factory.mktemp("page") / "report.html")


def made(report: DivergenceReport, tmp_path: Path) -> Path:
    return write_divergence_page(report, tmp_path / "report.html")


def first_rows(opened: Any, column: int, count: int = 5) -> list[str]:
    cells = opened.page.locator("#verdicts tbody tr[data-at]")
    return [cells.nth(at).locator("th, td").nth(column).inner_text() for at in range(count)]


def columns(opened: Any) -> list[str]:
    heads = opened.page.locator("#verdicts thead button").all_inner_texts()
    return [text.strip(" ▲▼\n") for text in heads]


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 768, 360])
def test_it_opens_clean_and_fits(open_page: Open, path: Path, theme: str, width: int) -> None:
    opened = open_page(path, theme=theme, width=width)
    assert opened.overflow_px <= 0
    opened.shoot(f"divergence-{width}-{theme}")
    assert opened.text("#status") == "diverged"


def test_the_headline_says_who_and_both_roles(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    words = opened.text(".masthead")
    for text in ("diverged", "candidate", "port.py:model", "reference", "original.py:model"):
        assert text in words
    assert opened.text("h1") == REPORT.headline
    assert opened.page.locator(".chain li").all_inner_texts() == list(REPORT.whys)
    assert REPORT.next_command in opened.text("#next pre")


def test_questions_and_the_repair_are_answered(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    words = opened.text(".answers")
    for question, answer in REPORT.answers.items():
        assert question.capitalize() in words
        assert str(answer) in words
    assert "256" in opened.text("#repair")
    assert "port.py:88" in opened.text("#finding-1")
    assert opened.page.locator(".answers").count() == 1


def test_the_figures_are_the_reports(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    figures = opened.text(".figures")
    assert error_figure(REPORT.final_error) in figures
    assert error_figure(REPORT.noise_floor) in figures
    assert "574 of 576" in figures
    card = opened.text("#finding-1")
    for text in (CULPRIT, "culprit", "212", "3.1e-01", "3.4e-01", "> 99.9 %", "layer 9", "call 1"):
        assert text in card, text
    assert CULPRIT_FINDING.cause in card
    assert CULPRIT_FINDING.where in card
    assert "transformer.h.9.mlp.up" in card
    strip = opened.page.locator("#verdicts .strip").get_attribute("aria-label")
    for word, count in REPORT.verdicts.counts().items():
        assert f"{count} {word}" in strip
    assert f"{len(TOLD)} verdicts" in opened.text("#verdicts .said")


def test_every_row_is_the_reports(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    titles = columns(opened)
    opened.page.get_by_role("button", name="Order").click()
    rows = opened.page.locator("#verdicts tbody tr[data-at]")
    for at, row in enumerate(TOLD[:12]):
        cells = dict(zip(titles, rows.nth(at).locator("th, td").all_inner_texts(), strict=True))
        assert cells["Brick"] == row.name
        assert cells["Verdict"] == row.verdict
        assert cells["Layer"] == str(row.layer_idx)
        assert cells["Call"] == str(row.position)
        assert cells["Local error"] == error_figure(row.local_error)
        assert cells["Output error"] == error_figure(row.propagated_error)
        assert float(cells["z"]) == pytest.approx(row.z, rel=5e-3)
    rows.nth(0).click()
    opened_row = opened.text("#verdicts tr.opened")
    assert repr(TOLD[0].local_error) in opened_row


def test_it_sorts(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    at = columns(opened).index("Local error")
    opened.page.get_by_role("button", name="Local error").click()
    found = first_rows(opened, at)
    largest = sorted((row.local_error for row in TOLD), reverse=True)[:5]
    assert found == [error_figure(value) for value in largest]
    head = opened.page.locator("#verdicts thead th").nth(at)
    assert head.get_attribute("aria-sort") == "descending"
    opened.page.get_by_role("button", name="Local error").click()
    smallest = sorted(row.local_error for row in TOLD)[:5]
    assert first_rows(opened, at) == [error_figure(value) for value in smallest]


def test_it_filters_by_text_and_verdict(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    opened.page.fill("#verdicts input[type=search]", "layers.12 mlp")
    expected = [row for row in TOLD if "layers.12" in row.name and "mlp" in row.name]
    assert opened.text("#verdicts .said") == f"{len(expected)} of {len(TOLD)} verdicts"
    assert all("layers.12" in name for name in first_rows(opened, 0, len(expected)))
    opened.page.fill("#verdicts input[type=search]", "")
    opened.page.locator("#verdicts .choices button", has_text="culprit").click()
    assert opened.text("#verdicts .said") == f"1 of {len(TOLD)} verdicts"
    assert first_rows(opened, 0, 1) == [CULPRIT]
    opened.page.fill("#verdicts input[type=search]", "nothing of that name")
    assert "No verdicts match" in opened.text("#verdicts tbody")


def test_the_repro_is_copied_and_can_be_selected(open_page: Open, path: Path) -> None:
    opened = open_page(path, permissions=["clipboard-read", "clipboard-write"])
    expected = "python 'repro dir/model.layers.9.mlp.up.py'"
    assert opened.text("#finding-1 .repro pre") == expected
    opened.page.locator("#finding-1 .repro button").click()
    opened.page.wait_for_selector("#finding-1 .repro button:has-text('Copied')")
    assert opened.page.evaluate("navigator.clipboard.readText()") == expected
    opened.page.locator("#finding-1 .repro pre").dblclick()
    assert expected in opened.page.evaluate("String(getSelection())")


def test_without_a_clipboard_the_repro_is_copied_too(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    opened.page.evaluate("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    opened.page.evaluate(
        "document.addEventListener('copy', () => { window.copied = String(getSelection()) "
        "|| document.activeElement.value })"
    )
    opened.page.locator("#finding-1 .repro button").click()
    opened.page.wait_for_selector("#finding-1 .repro button:has-text('Copied')")
    assert "repro dir" in opened.page.evaluate("window.copied")


def test_the_curve_marks_the_culprit_and_answers_keys(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    assert CULPRIT in opened.text("#depth .readout")
    assert opened.page.locator("#depth .marks circle").count() == 1
    curve = opened.page.locator("#depth .curve")
    rows = [row for row in REPORT.verdicts if row.position == ACTS_IN]
    guilty = [row.name for row in rows].index(CULPRIT)
    assert curve.get_attribute("aria-valuenow") == str(guilty + 1)
    curve.focus()
    opened.page.keyboard.press("ArrowRight")
    after = opened.text("#depth .readout")
    assert rows[guilty + 1].name in after
    assert error_figure(rows[guilty + 1].local_error) in after
    assert error_figure(rows[guilty + 1].local_error / rows[guilty + 1].z) in after
    opened.page.keyboard.press("Home")
    assert rows[0].name in opened.text("#depth .readout")
    opened.page.keyboard.press("Enter")
    assert rows[0].name in opened.page.locator("#verdicts input[type=search]").input_value()


def test_the_curve_answers_the_pointer_and_another_call(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    curve = opened.page.locator("#depth .curve")
    curve.scroll_into_view_if_needed()
    box = curve.bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] - 14, box["y"] + 100)
    assert "model.layers.23.mlp.down" in opened.text("#depth .readout")
    opened.page.select_option("#depth select", label="call 0")
    assert opened.page.locator("#depth .marks circle").count() == 0
    assert "call 0" in opened.text("#depth")


def test_the_theme_can_be_switched(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    colour = "getComputedStyle(document.body).backgroundColor"
    before = opened.page.evaluate(colour)
    opened.page.keyboard.press("t")
    assert opened.page.evaluate(colour) != before
    opened.page.click("#theme")
    assert opened.page.evaluate(colour) == before


def test_it_is_used_by_keyboard_alone(open_page: Open, path: Path) -> None:
    opened = open_page(path)
    opened.page.keyboard.press("/")
    opened.page.keyboard.type("culprit")
    assert opened.text("#verdicts .said").startswith("1 of")
    opened.page.keyboard.press("Tab")
    for _ in range(40):
        opened.page.keyboard.press("Tab")
        if opened.page.evaluate("document.activeElement.matches('#verdicts tr[data-at]')"):
            break
    opened.page.keyboard.press("Enter")
    assert "held to" in opened.text("#verdicts tr.opened")
    opened.page.keyboard.press("Escape")
    assert opened.page.locator("#verdicts tr.opened").count() == 0


def test_what_is_not_known_says_why_and_estimates_say_so(open_page: Open, tmp_path: Path) -> None:
    opened = open_page(made(SUSPECTED, tmp_path))
    card = opened.text("#finding-1")
    assert "Not known: z, share, repro." in card
    assert "a re-execution does" in card
    assert "≈ 3.1e-01" in card
    assert "Estimated from fingerprints" in opened.text("#verdicts .lead")
    assert "Estimated from fingerprints" in opened.text("#depth .lead")
    assert "z" not in columns(opened)
    assert "≈" in opened.text(".figures")
    assert "2.1e-03" in opened.text("#depth .legend")
    opened.shoot("divergence-estimated")


def test_markup_in_names_stays_text(open_page: Open, tmp_path: Path) -> None:
    table = VerdictTable()
    for place in range(3):
        table.append(
            VerdictRow(
                f"{EVIL}{place}",
                EVIL,
                0,
                0,
                0,
                "forward",
                EVIL,
                EVIL,
                Verdict.CULPRIT,
                9.0,
                1e-2,
                1e-2,
            )
        )
    finding = replace(
        CULPRIT_FINDING,
        name=EVIL,
        cause=EVIL,
        where=EVIL,
        repro=EVIL,
        reason=EVIL,
        evidence={EVIL: EVIL},
    )
    report = replace(
        REPORT,
        candidate=EVIL,
        reference=EVIL,
        whys=(EVIL,),
        findings=(finding,),
        verdicts=table,
        unmatched=(EVIL,),
        circumstances=(EVIL,),
        next_command=EVIL,
    )
    for width in (1280, 360):
        opened = open_page(replace_file(report, tmp_path, width), width=width)
        assert opened.page.evaluate("window.evil") is None
        assert opened.page.locator("main img, main script").count() == 0
        assert opened.text("h1").startswith("</script><script>window.evil=1</script><img src=x")
        assert "\u202e" not in opened.text("main")
        opened.page.locator("#verdicts tr[data-at]").first.click()
        assert opened.page.evaluate("window.evil") is None
        assert opened.overflow_px <= 0
    opened.shoot("divergence-markup")


def replace_file(report: DivergenceReport, tmp_path: Path, width: int) -> Path:
    return write_divergence_page(report, tmp_path / f"{width}.html")


def test_20000_rows_and_the_rest_counted(open_page: Open, tmp_path: Path) -> None:
    report = replace(REPORT, verdicts=many_verdicts(30_000))
    opened = open_page(made(report, tmp_path))
    assert opened.text("#verdicts .said") == "20,000 verdicts"
    words = opened.text(".leftout")
    assert "10,000 more verdicts are not listed" in words
    assert "RmsNorm" in words
    assert opened.page.locator("#verdicts > .body > .table tbody tr[data-at]").count() < 100
    assert first_rows(opened, 1, 1) == ["culprit"]
    opened.page.evaluate("document.querySelector('#verdicts .scroller').scrollTop = 1e7")
    opened.page.wait_for_selector("#verdicts tr[aria-rowindex='20001']")
    assert "A sample" not in opened.text("#depth")
    opened.shoot("divergence-many")


def test_a_curve_that_is_a_sample_says_so(open_page: Open, tmp_path: Path) -> None:
    table = many_verdicts(2000)
    table.columns["position"] = [0] * len(table)
    opened = open_page(made(replace(REPORT, verdicts=table, findings=()), tmp_path))
    assert "A sample: 800 of 2,000 bricks are drawn" in opened.text("#depth")
    assert opened.page.locator("#depth .marks circle").count() == 1


def test_an_infinite_error_is_drawn_and_said(open_page: Open, tmp_path: Path) -> None:
    table = VerdictTable({name: values[:] for name, values in REPORT.verdicts.columns.items()})
    at = next(place for place, row in enumerate(table) if row.verdict is Verdict.CULPRIT)
    table.columns["verdict"][at] = Verdict.NONFINITE_ORIGIN
    table.columns["z"][at] = table.columns["propagated_error"][at] = float("inf")
    opened = open_page(made(replace(REPORT, verdicts=table), tmp_path))
    assert opened.page.locator("#depth .broken").count() == 1
    assert "∞" in opened.text("#verdicts tbody")


@pytest.mark.parametrize("status", list(Status))
def test_an_empty_report_opens(open_page: Open, tmp_path: Path, status: Status) -> None:
    opened = open_page(made(BARE[status], tmp_path), width=360)
    assert opened.text("#status") == status
    assert ("Nothing was compared" in opened.text("#coverage")) is (status != "matched")
    assert opened.overflow_px <= 0
