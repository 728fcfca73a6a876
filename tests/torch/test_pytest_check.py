"""The fixture `brickline_check` on real models, and the examples of docs/testing.md in pytest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import brickline
from brickline.verdict import DivergenceReport

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
Runner = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Run pytest with this plugin alone, in a process of its own."""
    paths = [str(Path(brickline.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def call(*words: str) -> pytest.RunResult:
        fixed = ("-p", "brickline.pytest_plugin", "--strict-markers", "--brickline-reports", "kept")
        return pytester.runpytest_subprocess(*fixed, *words)

    return call


def blocks() -> dict[str, str]:
    """The page's test files, by name."""
    found = re.findall(r"```python\n# (test_\w+)\.py\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert [name for name, _ in found] == ["test_port", "test_speed"]
    return dict(found)


def test_the_examples_fail_as_the_page_says(pytester: pytest.Pytester, run: Runner) -> None:
    pytester.makepyfile(**blocks())
    result = run()
    result.assert_outcomes(failed=2)
    said = "\n".join(result.outlines)
    printed = re.findall(
        r"<!-- output varies -->\n```text\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL
    )
    for line in "\n".join(printed).splitlines():
        # Paths are those of some machine, and the worst element may be another.
        words = re.split(r"reports/|worst at|test_port-|test_speed-", line)[0]
        assert words in said, line
    (script,) = pytester.path.glob("kept/*.repro/repro_*.py")
    again = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert again.returncode == 1, again.stdout + again.stderr
    (saved,) = pytester.path.glob("kept/test_port-*.json")
    report = DivergenceReport.load(saved)
    assert report.culprits[0].name == "my_rms_norm"
    assert report.culprits[0].repro == str(script)
    assert saved.with_suffix(".html").is_file()


def test_what_passes_and_what_shows_nothing(pytester: pytest.Pytester, run: Runner) -> None:
    pytester.makepyfile("""
import torch

def linear(x, weight):
    return x @ weight

def raises(x, weight):
    raise ValueError("out of luck")

x, weight = torch.ones(4, 8), torch.eye(8)

def test_right(brickline_check):
    assert brickline_check(linear, x, weight, reference=torch.matmul).matched

def test_raises(brickline_check):
    brickline_check(raises, x, weight, reference=linear, repro=False)

def test_allowed(brickline_check):
    report = brickline_check(raises, x, weight, reference=linear, allow_inconclusive=True)
    assert not report.coverage.compared

def test_mistake(brickline_check):
    brickline_check(torch.nn.Linear, x)

def test_keyword(brickline_check):
    brickline_check(linear, x, weight, refrence=linear)
""")
    result = run()
    result.assert_outcomes(passed=2, failed=3)
    result.stdout.fnmatch_lines(
        [
            "E*Failed: not shown either way: *ValueError: out of luck",
            "E*Failed: brickline_check: candidate: expected a model, got the class Linear*",
            "E*TypeError:*unexpected keyword argument 'refrence'",
        ]
    )
    assert "pass allow_inconclusive=True" not in "\n".join(result.outlines)
    assert "pytest_reports.py" not in "\n".join(result.outlines)
