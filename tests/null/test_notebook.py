"""What profiles, profilers, graphs and reports show in a notebook: figures, and no foreign markup.

One notebook is executed by a real kernel; everything else is asked of the objects themselves.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hand_made import decode_part, profile_of
from hand_made_reports import BARE, CULPRIT, EVIL, REPORT, SUSPECTED, many_verdicts

import brickline as bl
from brickline.report.html.divergence_page import ESTIMATED
from brickline.report.notebook import MAX_BRICKS, MAX_LINES
from brickline.verdict import Status

TAGS = {"div", "style", "p", "b", "code", "table", "thead", "tbody", "tr", "th", "td", "span"}
TAGS |= {"svg", "title", "path", "details", "summary", "pre"}
ATTRIBUTES = {"class", "style", "role", "width", "height", "viewbox", "d", "stroke", "stroke-width"}
SAFE = re.compile(r"width:[0-9.]+%|[\w .()-]*")


class Shown(HTMLParser):
    """Parses an output as a browser would, and refuses what could act or load."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        for name, value in attrs:
            assert name in ATTRIBUTES
            assert value is not None
            assert SAFE.fullmatch(value), value
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" in self.open:
            assert "url" not in data
            assert "@import" not in data
            return
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        return "".join(self.texts)


def shown(value: Any) -> Shown:
    source = value._repr_html_()
    source.encode("utf-8")
    return Shown(source)


def test_the_figures_of_a_profile() -> None:
    profile = profile_of(decode_part(), name="decode")
    found = shown(profile)
    assert found.rows[0][:7] == ["Brick", "Count", "Avg", "p50", "p99", "Total", "Share"]
    assert [row[0] for row in found.rows[1:]] == [row.name for row in profile.bricks]
    assert found.rows[1][:3] == ["LmHead", "8", "350 µs"]
    assert found.rows[1][6] == f"{100 * profile.share(profile.bricks[0]):.1f} %"
    assert "8 steps, 8 tokens" in found.text
    assert "Attention" in found.text


def test_a_large_profile_stays_short() -> None:
    part = decode_part()
    for number in range(500):
        part.brick(f"Brick{number:03}" + "x" * 400, [10 + number])
    profile = profile_of(part, problems=tuple(f"part {number}" for number in range(99)))
    found = shown(profile)
    assert len(found.rows) == 1 + MAX_BRICKS
    assert f"and {504 - MAX_BRICKS} more bricks" in found.text
    assert f"and {99 + 1 - MAX_LINES} more" in found.text
    assert len(profile._repr_html_()) < 20_000


def test_profiles_without_anything() -> None:
    assert "Profiling is disabled" in shown(bl.BrickProfiler("off")).text
    assert "No brick was recorded" in shown(profile_of()).text
    assert "Still recording" in shown(profile_of(decode_part(), is_live=True)).text


def test_a_report_names_its_culprit() -> None:
    found = shown(REPORT)
    for words in (
        "port.py:model",
        "diverged",
        REPORT.headline,
        CULPRIT,
        "z 212",
        "share > 99.9 %",
        "and 1 more finding",
        "Error over depth, call 1",
        "The final output differs by 9.1e-02",
        "Compared 574 of 576",
        "TF32: on against off",
    ):
        assert words in found.text
    assert ["cause", REPORT.findings[0].cause] in found.rows
    assert ESTIMATED not in found.text
    assert ESTIMATED in shown(SUSPECTED).text
    assert CULPRIT in shown(REPORT.findings[0]).text


@pytest.mark.parametrize("status", Status)
def test_reports_without_anything(status: Status) -> None:
    assert str(status) in shown(BARE[status]).text


def test_errors_that_are_not_finite_are_drawn() -> None:
    table = many_verdicts(40)
    table.columns["local_error"][3] = float("nan")
    table.columns["propagated_error"][4] = float("inf")
    table.columns["local_error"][5] = None
    shown(replace(REPORT, verdicts=table))


def test_a_long_report_stays_short() -> None:
    report = replace(REPORT, verdicts=many_verdicts(20_000), unmatched=("aten.view",) * 5000)
    assert len(report._repr_html_()) < 20_000
    shown(report)


HOSTILE = (EVIL, "\udc80\x00", "-->", "</style><script>1</script>", "a" * 10_000, '" onload="x')


@pytest.mark.parametrize("words", HOSTILE, ids=range(len(HOSTILE)))
def test_nothing_of_a_run_becomes_markup(words: str) -> None:
    part = decode_part().brick(words.replace("\udc80", ""), [10**7])
    found = shown(profile_of(part, name=words, problems=(words,)))
    assert found.rows[1][0][:8] in words or "\\" in found.rows[1][0]
    finding = replace(
        REPORT.findings[0],
        name=words,
        where=words,
        cause=words,
        repro=words,
        reason=words,
        reference_name=words,
        op=words,
        direction=words,
    )
    shown(finding)
    shown(
        replace(
            REPORT,
            candidate=words,
            reference=words,
            findings=(finding,),
            whys=(words,),
            unmatched=(words,),
            circumstances=(words,),
        )
    )


def test_a_graph_shows_its_tree() -> None:
    with bl.BrickProfiler("graph", enabled=True, device="NULL", graph=True) as profiler:
        with profiler.step(tokens=1), profiler.brick("<b>evil</b>"):
            profiler.advance(2_000)
        assert "<b>evil</b>  2.0 µs" in shown(profiler.graph).text


def test_text_beside_the_picture_is_the_report_and_not_the_fields() -> None:
    class Printer:
        def text(self, words: str) -> None:
            self.words = words

    printer = Printer()
    REPORT._repr_pretty_(printer, False)
    assert printer.words == str(REPORT)
    profile_of(decode_part())._repr_pretty_(printer, False)
    assert "Bricks" in printer.words


def test_profiles_load_no_report_until_they_are_shown() -> None:
    code = "import sys, brickline.profile; print([m for m in sys.modules if '.report' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


CELLS = """
import brickline as bl
p = bl.BrickProfiler("decode <i>", enabled=True, device="NULL")
with p.step(tokens=1, phase="decode"):
    with p.brick("<img src=x onerror=alert(1)>"):
        p.advance(7_000)
p
---
p.profile()
---
from hand_made_reports import REPORT
REPORT
---
REPORT.findings[0]
"""


@pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None,
    reason="nbclient or ipykernel is not installed",
)
def test_a_real_notebook(tmp_path: Path) -> None:
    """In a process of its own, because a client of kernels warns of its own event loop."""
    code = f"""
import nbformat
from nbclient import NotebookClient
cells = {CELLS!r}.split("---")
notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""
    package = Path(bl.__file__).parents[1]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{package}:{Path(__file__).parent}",
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    import nbformat

    notebook = nbformat.read(tmp_path / "executed.ipynb", as_version=4)
    nbformat.validate(notebook)
    outputs = [cell.outputs[-1].data for cell in notebook.cells]
    views = [Shown(data["text/html"]) for data in outputs]
    assert views[0].rows[1][:3] == ["<img src=x onerror=alert(1)>", "1", "7.00 µs"]
    assert views[1].rows[1] == views[0].rows[1]
    assert CULPRIT in views[2].text
    assert CULPRIT in views[3].text
    assert "Bricks" in outputs[1]["text/plain"]
    assert outputs[2]["text/plain"].startswith("candidate port.py:model against")
