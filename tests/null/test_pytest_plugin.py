"""The pytest plugin in real test runs: what passes, what fails, what it says and leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path

import pytest
from hand_made_reports import CULPRIT, CULPRIT_FINDING, EVIL, REPORT

import brickline
from brickline import pytest_plugin
from brickline.pytest_reports import divergence_words
from brickline.verdict import Coverage, DivergenceReport, Verdict

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
Runner = Callable[..., pytest.RunResult]

RECORDS = """
import pytest
from pytest import mark

@pytest.fixture
def p(brickline_profiler):
    with brickline_profiler.step(tokens=2, phase="decode"):
        for duration in (3_000, 5_000):
            with brickline_profiler.brick("RmsNorm", layer=0):
                brickline_profiler.advance(duration)
    return brickline_profiler

pytestmark = mark.brickline_profiler(device="NULL")
"""
"""Two entries of RmsNorm, of 3 and 5 µs; their step of two tokens takes 8."""


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Run pytest with this plugin alone, in a process of its own, with warnings as errors."""
    package = str(Path(brickline.__file__).parents[1])
    paths = [package, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("BRICKLINE_RUN", raising=False)

    def call(*words: str) -> pytest.RunResult:
        fixed = ("-p", "brickline.pytest_plugin", "--strict-markers", "-W", "error")
        return pytester.runpytest_subprocess(*fixed, *words)

    return call


def text_of(result: pytest.RunResult) -> str:
    return "\n".join(result.outlines)


# ----------------------------------------------------------------------------------------- budgets


def test_budgets_pass_and_fail(pytester: pytest.Pytester, run: Runner) -> None:
    pytester.path.joinpath("budgets.toml").write_text(
        "[bricks]\nRmsNorm = 4.5\n[total]\nus_per_token = 3.5\n"
    )
    pytester.makepyfile(
        RECORDS
        + """
@mark.brickline_budget("RmsNorm", 4.0, max_us=5, p50_us=5.1)
@mark.brickline_budget(category="Norm", us_per_token=4.0)
@mark.brickline_budget(us_per_token=4.0)
def test_within(p): pass

@mark.brickline_budget("RmsNorm", 3.9, max_us=5)
def test_average(p): pass

@mark.brickline_budget(file="budgets.toml")
def test_file(p): pass

@mark.brickline_budget("LmHead", 1.0)
def test_not_measured(p): pass

@mark.brickline_budget("RmsNorm", 1.0)
class TestNearest:
    @mark.brickline_budget("RmsNorm", 4.0)
    def test_wins(self, p): pass

    def test_of_the_class(self, p): pass

@mark.xfail(strict=True)
@mark.brickline_budget("RmsNorm", 1.0)
def test_known_to_be_slow(p): pass

@mark.brickline_budget("RmsNorm", 1.0)
def test_of_its_own(p): assert 1 == 2
"""
    )
    result = run("--brickline-reports", "kept/here")
    result.assert_outcomes(passed=2, failed=5, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "bricks.RmsNorm.avg: 4.00 µs exceeds 3.9 µs (1.03 of it)",
            "  ok       bricks.RmsNorm.max: 5.00 µs within 5 µs (1.00 of it)",
            "  report   */kept/here/*test_average-*.html",
            "total.us_per_token: 4.00 µs exceeds 3.5 µs (1.14 of it)",
            "bricks.LmHead.avg: not measured, limit 1 µs; the run has no such figure",
            "*brickline reports*",
            "*/kept/here/*test_average-*.html",
        ]
    )
    said = text_of(result)
    assert "Traceback" not in said
    assert "pytest_plugin.py" not in said
    pages = re.findall(r"^/.*\.html$", said, re.MULTILINE)
    assert len(pages) == 5, "of each failed test, and not of the expected failure"
    for page in pages:
        assert "<!doctype html>" in Path(page).read_text(encoding="utf-8").lower()
    (average,) = pytester.path.glob("kept/here/*test_average-*.json")
    document = json.loads(average.read_text(encoding="utf-8"))
    assert document["bricks"][0]["count"] == 2
    assert [each["passed"] for each in document["budgets"]] == [False, True]


def test_marks_that_mean_nothing_are_refused(pytester: pytest.Pytester, run: Runner) -> None:
    pytester.path.joinpath("bad.toml").write_text("[brick]\nRmsNorm = 4.5\n")
    pytester.makepyfile(
        RECORDS
        + """
@mark.brickline_budget("RmsNorm", 4.0)
def test_without_a_profiler(): pass

@mark.brickline_budget("RmsNorm", p98_us=4.0)
def test_metric(p): pass

@mark.brickline_budget("RmsNorm")
def test_no_limit(p): pass

@mark.brickline_budget("RmsNorm", -1)
def test_negative(p): pass

@mark.brickline_budget("RmsNorm", 1, 2)
def test_too_many(p): pass

@mark.brickline_budget(3.0)
def test_no_name(p): pass

@mark.brickline_budget(3.0, p99_us=1)
def test_number_for_a_name(p): pass

@mark.brickline_budget("RmsNorm", category="Norm", avg_us=1)
def test_both(p): pass

@mark.brickline_budget(category="Nrom", avg_us=1)
def test_category(p): pass

@mark.brickline_budget("RmsNorm", 1, file="bad.toml")
def test_file_and_more(p): pass

@mark.brickline_budget(file="bad.toml")
def test_bad_file(p): pass

@mark.brickline_budget(file="none.toml")
def test_no_file(p): pass

@mark.brickline_budget("RmsNorm", 1.0)
@mark.brickline_budget("RmsNorm", 2.0)
def test_twice(p): pass

@mark.brickline_profiler(devcie="NULL")
def test_option(p): pass

@mark.brickline_profiler("NULL")
def test_positional(p): pass

@mark.brickline_profiler(device="GPU?")
def test_device(p): pass

@mark.brickline_budget("RmsNrom", 1.0)
def test_typo(p): pass
"""
    )
    result = run()
    result.assert_outcomes(errors=16, failed=1)
    said = text_of(result)
    for words in (
        "the mark brickline_budget acts on what the fixture brickline_profiler records",
        "got 'p98' - at bricks.RmsNorm.p98_us; did you mean 'p99'?",
        "expected a limit in the mark brickline_budget of test_no_limit, got none; for example",
        "got -1 - at bricks.RmsNorm.avg",
        "expected a brick and its average in the mark brickline_budget of test_too_many",
        "expected a limit in the mark brickline_budget of test_no_name",
        "expected the name of a brick in the mark brickline_budget of test_number_for_a_name",
        "expected a brick or category= in the mark brickline_budget of test_both, got both",
        "got 'Nrom' - at categories.Nrom; did you mean 'Norm'?",
        "expected file= alone in the mark brickline_budget of test_file_and_more",
        "bad.toml, got 'brick' - at brick; did you mean 'bricks'?",
        "none.toml, but No such file or directory",
        "expected one limit for bricks.RmsNorm.avg in the mark brickline_budget of test_twice",
        "got 'devcie'; did you mean 'device'?",
        "expected keywords in the mark brickline_profiler, got 'NULL'",
        "GPU?",
        "brickline_budget: expected a brick of the run in the mark brickline_budget of test_typo,"
        " got 'RmsNrom' - at bricks.RmsNrom; did you mean 'RmsNorm'?",
    ):
        assert words in said
    assert "Traceback" not in said
    assert "brickline reports" not in said


# ------------------------------------------------------------------------------------------ checks

PATCHED = """
import pytest
from hand_made_reports import REPORT, EVIL
from dataclasses import replace
from brickline import pytest_reports
from brickline.errors import UsageError
from brickline.verdict import Coverage, DivergenceReport

ANSWERS = {
    "diverged": REPORT,
    "matched": DivergenceReport(coverage=Coverage(1, 1)),
    "unclear": DivergenceReport(
        coverage=Coverage(3, 5, ("call 0: nothing was seen",)),
    ),
}

@pytest.fixture(autouse=True)
def answers(monkeypatch):
    def check(candidate, *args, **options):
        if candidate not in ANSWERS:
            raise UsageError("candidate: expected a model, got a word")
        return ANSWERS[candidate]
    monkeypatch.setattr(pytest_reports, "check", check)
"""


def test_a_check_fails_with_its_culprit(pytester: pytest.Pytester, run: Runner) -> None:
    pytester.makeconftest(PATCHED)
    pytester.makepyfile("""
def test_matched(brickline_check): assert brickline_check("matched", reference="x").matched
def test_culprit(brickline_check):
    brickline_check("diverged")
def test_unclear(brickline_check):
    brickline_check("unclear")
def test_allowed(brickline_check):
    assert not brickline_check("unclear", allow_inconclusive=True)
def test_mistake(brickline_check):
    brickline_check("nothing")
def test_two(brickline_check, brickline_profiler):
    with brickline_profiler.brick("RmsNorm"):
        pass
    brickline_check("diverged")
""")
    result = run()
    result.assert_outcomes(passed=2, failed=4)
    result.stdout.fnmatch_lines(
        [
            '>*brickline_check("diverged")',
            f"E*Failed: {CULPRIT} is wrong from call 1 on: a dropped tail*",
            f"E*culprit: {CULPRIT}",
            "E*where    columns 240 to 255 of every row",
            "E*cause    a dropped tail*",
            "E*repro    repro dir/*",
            "E*report   */.pytest_cache/d/brickline/*test_culprit-*.html",
            "E*Failed: not shown either way: call 0: nothing was seen",
            "E*pass allow_inconclusive=True*",
            "E*Compared 3 of 5.",
            "E*Failed: brickline_check: candidate: expected a model, got a word",
            "*brickline reports*",
            "*test_culprit-*.html",
            f"FAILED *::test_culprit - Failed: {CULPRIT[:7]}*",
        ]
    )
    said = text_of(result)
    assert "pytest_reports.py" not in said, "no frame of ours"
    assert "During handling" not in said
    kept = pytester.path / ".pytest_cache/d/brickline"
    (culprit,) = kept.glob("*test_culprit-*.json")
    assert DivergenceReport.load(culprit).headline == REPORT.headline
    assert len([*kept.glob("*test_two-*.html")]) == 2, "the report, and the profile"
    assert not [*kept.glob("*test_allowed*"), *kept.glob("*test_mistake*")]


def test_a_passing_run_takes_old_reports_away(pytester: pytest.Pytester, run: Runner) -> None:
    pytester.makepyfile(
        RECORDS
        + """
import os

@mark.brickline_budget("RmsNorm", float(os.environ["LIMIT"]))
def test_limit(p): pass
"""
    )
    for limit, left in (("1", 2), ("9", 0)):
        os.environ["LIMIT"] = limit
        try:
            run()
        finally:
            del os.environ["LIMIT"]
        assert len([*pytester.path.glob(".pytest_cache/d/brickline/*")]) == left


FAILS_TWICE = (
    RECORDS
    + """
@mark.brickline_budget("RmsNorm", 1.0)
@mark.parametrize("name", ["a", "b/../c\\u00e9 %s"])
def test_limit(p, name): pass
"""
)


@pytest.mark.skipif(find_spec("xdist") is None, reason="pytest-xdist is not installed")
def test_reports_of_workers_reach_the_summary(pytester: pytest.Pytester, run: Runner) -> None:
    pytester.makepyfile(FAILS_TWICE)
    result = run("-p", "xdist", "-n", "2", "-q", "--brickline-reports", "here")
    result.assert_outcomes(failed=2)
    pages = re.findall(r"^/.*\.html$", text_of(result), re.MULTILINE)
    assert len({*pages}) == 2
    assert {Path(page).parent for page in pages} == {pytester.path / "here"}


def test_without_a_cache_reports_go_to_a_temporary_folder(
    pytester: pytest.Pytester, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(pytester.mkdir("elsewhere")))
    pytester.makepyfile(FAILS_TWICE)
    run("-p", "no:cacheprovider").assert_outcomes(failed=2)
    assert len([*pytester.path.glob("elsewhere/brickline-reports-*/*.html")]) == 2


def test_a_folder_that_cannot_be_made(pytester: pytest.Pytester, run: Runner) -> None:
    pytester.makepyfile(FAILS_TWICE)
    pytester.path.joinpath("file").write_text("")
    refused = run("--brickline-reports", "file")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    refused.stderr.fnmatch_lines(["*--brickline-reports: expected a folder, got the file */file"])
    result = run("--brickline-reports", "file/below")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["bricks.RmsNorm.avg*", "  report   none: *"])


# ------------------------------------------------------------------------------------------- words


def test_words_of_a_hostile_report_stay_in_their_line() -> None:
    finding = replace(CULPRIT_FINDING, name=EVIL, where="a\nb\x1b[31m", cause="\udc80")
    words = [*divergence_words(replace(REPORT, findings=(finding,) * 5))]
    assert all(line.isprintable() for line in words)
    assert words[-1] == "  and 2 more"


def test_words_of_a_report_without_findings() -> None:
    unclear = DivergenceReport(
        coverage=Coverage(0, 0, ("why", "first", "second", "third", "fourth")),
    )
    assert [*divergence_words(unclear)][1:] == [
        "  Compared 0 of 0.",
        *(f"  not seen: {note}" for note in ("first", "second", "third")),
    ]
    unknown = replace(CULPRIT_FINDING, verdict=Verdict.UNKNOWN, reason="it was not executed")
    words = [*divergence_words(replace(unclear, findings=(unknown,)))]
    assert f"  unknown: {CULPRIT}" in words
    assert "    note     it was not executed" in words


# --------------------------------------------------------------------------------- those who do not


def test_the_entry_point_leads_to_the_plugin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    ((name, value),) = project["entry-points"]["pytest11"].items()
    assert EntryPoint(name, value, "pytest11").load() is pytest_plugin


def test_a_run_that_does_not_use_it_loads_nothing() -> None:
    code = """
import sys, pytest
before = set(sys.modules)
import brickline.pytest_plugin
print(sorted(name for name in set(sys.modules) - before))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(brickline.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True
    )
    assert done.stdout.strip() == "['brickline', 'brickline.pytest_plugin']"
