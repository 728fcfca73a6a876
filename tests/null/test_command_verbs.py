"""The verbs of the command line: all are listed, and only the one that is called is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from profile_runs import rich_run
from typer.testing import CliRunner

from brickline.commands import VERBS, app

LOADED = """
import json, sys
from brickline.__main__ import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def loaded_by(*arguments: object) -> set[str]:
    """Return the modules that a command loads; what it prints does not matter."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *map(str, arguments)], capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    return set(json.loads(done.stderr.splitlines()[-1]))


def verbs_in(modules: set[str]) -> set[str]:
    return {verb for verb in VERBS if f"brickline.commands.{verb}" in modules}


def test_the_help_lists_every_verb_in_order() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output.partition("Commands:\n")[2].splitlines()
    assert tuple(line.split()[0] for line in shown) == VERBS
    assert all(len(line.split()) > 3 for line in shown)


def test_every_file_of_a_verb_is_listed() -> None:
    import brickline.commands

    files = Path(brickline.commands.__file__).parent.glob("*.py")
    opening = {file.stem: file.read_text(encoding="utf-8")[:100] for file in files}
    found = {name for name, text in opening.items() if text.startswith(f'"""``brickline {name}``')}
    assert found == set(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_of_its_own(verb: str) -> None:
    done = CliRunner().invoke(app, [verb, "--help"])
    assert done.exit_code == 0, done.output
    assert f" {verb} " in done.output.splitlines()[0]


def test_the_version_loads_no_verb() -> None:
    assert verbs_in(loaded_by("--version")) == set()


def test_a_question_loads_its_verb_and_no_tables(tmp_path: Path) -> None:
    """What `brickline query` takes is mostly what it loads."""
    pytest.importorskip("duckdb", reason="duckdb is not installed")
    run = rich_run(tmp_path / "a.brick", steps=2, layers=1)
    question = ("query", run, "FROM brick_times LIMIT 1")
    loaded_by(*question)  # publishes the tables
    modules = loaded_by(*question)
    assert verbs_in(modules) == {"query"}
    assert not modules & {"numpy", "pyarrow", "torch", "brickline.profile", "brickline.tables"}


def test_a_second_report_loads_no_tables(tmp_path: Path) -> None:
    run = rich_run(tmp_path / "a.brick", steps=2, layers=1)
    assert "pyarrow" in loaded_by("report", run)  # publishes the tables
    modules = loaded_by("report", run)
    assert verbs_in(modules) == {"report"}
    assert not modules & {"pyarrow", "torch", "duckdb", "textual"}


def test_an_unknown_verb_is_answered_with_one_like_it() -> None:
    done = CliRunner().invoke(app, ["repotr", "x.brick"])
    assert done.exit_code == 2
    assert "report" in done.output


def test_a_benchmark_says_why_a_figure_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "harness.py").write_text("")
    claim = {"name": "speed", "figure": None, "unit": "s", "target": 1, "met": None, "peers": {}}
    claim["note"] = "not measured: [no] chromium"
    (folder / "mine.py").write_text(f"def run(quick=False): return [{claim!r}]")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "mine"])
    assert (done.exit_code, "· speed: not measured: [no] chromium" in done.output) == (3, True)
