"""``brickline export``: every form, and what it says when something is not as it should be."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import export_runs
import profile_runs
import pytest
from typer.testing import CliRunner

from brickline import BrickProfiler
from brickline.commands import app
from brickline.errors import ExportError, NotARun, RunVersion, UsageError
from brickline.profile import profile_from_run
from brickline.runs import Run
from brickline.whole_files import whole_file


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "rich.brick"
    return profile_runs.rich_run(path, steps=3, layers=2)


def export(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_csv_json_and_dot_are_those_of_the_reports(rich: Path) -> None:
    profile = profile_from_run(Run.open(rich))
    rows = list(csv.DictReader(io.StringIO(export(rich, "--to", "csv").stdout)))
    assert [row["name"] for row in rows if row["table"] == "brick"] == [
        row.name for row in profile.bricks
    ]
    document = json.loads(export(rich, "--to", "json").stdout)
    assert document["schema"] == "brickline-profile"
    assert document["total_ns"] == profile.total_ns
    dot = export(rich, "--to", "dot").stdout
    assert dot.startswith("digraph")
    assert "LmHead" in dot


@pytest.mark.parametrize("form", ["perfetto", "prometheus", "dot", "csv", "json"])
def test_a_file_is_written_whole_and_not_replaced(rich: Path, form: str, tmp_path: Path) -> None:
    target = tmp_path / "out"
    result = export(rich, "--to", form, "-o", target)
    assert result.exit_code == 0, result.output
    assert f"wrote {target}" in result.stderr
    written = target.read_bytes()
    assert written
    again = export(rich, "--to", form, "-o", target)
    assert isinstance(again.exception, UsageError)
    assert "--force" in str(again.exception)
    assert export(rich, "--to", form, "-o", target, "--force").exit_code == 0
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_perfetto_is_named_after_the_run(
    rich: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = export(rich, "--to", "perfetto")
    assert (tmp_path / "rich.perfetto-trace").stat().st_size > 1000
    assert "ui.perfetto.dev" in result.stderr


@pytest.mark.parametrize("form", ["perfetto", "otlp"])
def test_a_run_without_a_timeline_holds_its_bricks(tmp_path: Path, form: str) -> None:
    if form == "otlp":
        pytest.importorskip("opentelemetry.proto", reason="opentelemetry-proto is not installed")
    path = tmp_path / "brief.brick"
    profiler = BrickProfiler("brief", enabled=True, device="NULL", path=path)
    with profiler, profiler.step(tokens=1, phase="decode"), profiler.brick("RmsNorm"):
        profiler.advance(1_000)
    result = export(path, "--to", form, "-o", tmp_path / "out")
    assert result.exit_code == 0
    assert "2 slices" in result.stderr or "2 spans" in result.stderr
    assert "from their first entry to their last" in result.stderr
    (written,) = [*tmp_path.glob("out"), *tmp_path.glob("out.traces.pb")]
    assert b"RmsNorm" in written.read_bytes()


def test_what_cannot_be_written_is_said_and_leaves_nothing(rich: Path, tmp_path: Path) -> None:
    missing = export(rich, "--to", "perfetto", "-o", tmp_path / "no" / "such")
    assert isinstance(missing.exception, ExportError)
    assert "No such file or directory" in str(missing.exception)
    folder = export(rich, "--to", "csv", "-o", tmp_path)
    assert isinstance(folder.exception, UsageError)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_what_was_there(rich: Path, tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    target = tmp_path / "out"
    target.write_text("before", encoding="utf-8")

    def fill() -> None:
        with whole_file(target, force=True), open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")

    with pytest.raises(OSError, match="No space left"):
        fill()
    assert target.read_text(encoding="utf-8") == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "csv", "--endpoint", "http://127.0.0.1:1"], "--endpoint is for --to otlp"),
        (["--to", "csv", "--serve"], "--serve is for --to prometheus"),
        (["--to", "prometheus", "--serve", "-o", "x"], "got both"),
        (["--to", "otlp", "--endpoint", "nowhere"], "expected an endpoint"),
        (["--to", "otlp", "--endpoint", "http://me:secret@127.0.0.1:1"], "are not sent"),
    ],
)
def test_options_of_other_forms_are_refused(rich: Path, arguments: list[str], words: str) -> None:
    result = export(rich, *arguments)
    assert isinstance(result.exception, UsageError)
    assert words in str(result.exception)


def test_a_run_without_a_graph_says_how_to_draw_one(tmp_path: Path) -> None:
    result = export(export_runs.launched_run(tmp_path / "run.brick"), "--to", "dot")
    assert isinstance(result.exception, UsageError)
    assert "graph=True" in str(result.exception)


@pytest.mark.parametrize("form", ["perfetto", "prometheus", "csv", "json"])
def test_an_empty_run_is_exported(tmp_path: Path, form: str) -> None:
    run = profile_runs.empty_run(tmp_path / "run.brick")
    result = export(run, "--to", form, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    if form == "perfetto":
        assert "timeline_steps" in result.stderr


def test_a_live_run_says_so(tmp_path: Path) -> None:
    with BrickProfiler("live", enabled=True, device="NULL", path=tmp_path / "run.brick"):
        result = export(tmp_path / "run.brick", "--to", "csv")
    assert result.exit_code == 0
    assert "still being recorded" in result.stderr


def test_no_run_and_a_newer_run_are_refused(tmp_path: Path) -> None:
    assert isinstance(export(tmp_path, "--to", "csv").exception, NotARun)
    run = profile_runs.empty_run(tmp_path / "run.brick")
    manifest = json.loads((run / "manifest.json").read_text(encoding="utf-8"))
    (run / "manifest.json").write_text(json.dumps(manifest | {"version": 99}), encoding="utf-8")
    for form in ("perfetto", "prometheus", "csv"):
        assert isinstance(export(run, "--to", form).exception, RunVersion)
    assert isinstance(export(run, "--to", "prometheus", "--serve").exception, RunVersion)


@pytest.mark.parametrize("form", ["perfetto", "prometheus", "dot", "csv", "json"])
def test_hostile_names_harm_no_form(tmp_path: Path, form: str) -> None:
    run = profile_runs.hostile_run(tmp_path / "run.brick")
    result = export(run, "--to", form, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    if form != "perfetto":
        (tmp_path / "out").read_bytes().decode("utf-8")


def test_otlp_without_its_package_names_the_extra(
    rich: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.startswith("opentelemetry.proto"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    result = export(rich, "--to", "otlp", "-o", os.devnull + "-never")
    assert isinstance(result.exception, UsageError)
    assert "pip install 'brickline[otel]'" in str(result.exception)
