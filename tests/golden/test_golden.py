"""Runs of every released format version are read for ever, with the same figures."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from make_run import figures, record

from brickline import Run
from brickline.abi import FORMAT_VERSION

HERE = Path(__file__).parent
VERSIONS = sorted(int(path.stem.partition("-")[2]) for path in HERE.glob("version-*.zip"))


@pytest.fixture(autouse=True)
def state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
    monkeypatch.delenv("BRICKLINE_RUN", raising=False)
    monkeypatch.delenv("RANK", raising=False)


def unpacked(version: int, directory: Path) -> Run:
    with zipfile.ZipFile(HERE / f"version-{version}.zip") as archive:
        archive.extractall(directory)
    return Run.open(directory)


def expected(version: int) -> Any:
    return json.loads((HERE / f"version-{version}.json").read_text(encoding="utf-8"))


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def test_every_version_has_a_golden_run() -> None:
    assert list(range(1, FORMAT_VERSION + 1)) == VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_run_gives_its_figures(version: int, tmp_path: Path) -> None:
    run = unpacked(version, tmp_path)
    assert run.manifest["version"] == version
    found, known = as_json(figures(run)), expected(version)
    assert found.keys() == known.keys()
    for name in known:
        assert found[name] == known[name], name


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_run_is_published(version: int, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    run = unpacked(version, tmp_path)
    assert not run.is_live
    directory = run.publish()
    assert directory is not None
    bricks = pq.read_table(directory / "bricks.parquet").to_pylist()
    counts: dict[str, int] = {}
    for row in bricks:
        counts[row["name"]] = counts.get(row["name"], 0) + row["count"]
    assert counts == {name: row["count"] for name, row in expected(version)["bricks"].items()}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_golden_run_is_small_and_says_nothing_of_its_maker(version: int) -> None:
    archive = HERE / f"version-{version}.zip"
    assert archive.stat().st_size < 100_000
    with zipfile.ZipFile(archive) as opened:
        assert sum(entry.file_size for entry in opened.infolist()) < 4 * 2**20
        for entry in opened.infolist():
            if entry.filename.endswith(".json"):
                document = json.loads(opened.read(entry))
                assert set(document["circumstances"]) <= {"brickline"}


def test_what_is_recorded_today_gives_the_same_figures(tmp_path: Path) -> None:
    record(tmp_path / "run")
    assert as_json(figures(Run.open(tmp_path / "run"))) == expected(FORMAT_VERSION)
