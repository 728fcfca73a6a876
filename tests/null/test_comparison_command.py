"""``brickline compare`` on runs on disk: its exit status, its documents, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hand_made_launches import Decoder, Launches
from typer.testing import CliRunner

from brickline import abi
from brickline.commands import app
from brickline.comparison.comparing import compare
from brickline.errors import BricklineError
from brickline.profiler import BrickProfiler
from brickline.verdict import DivergenceReport, Status


def written(path: Path, launches: Launches) -> Path:
    """The launches as a run on disk."""
    profiler = BrickProfiler(path.stem, enabled=True, path=path)
    numbers = {at: profiler._intern(text) for at, text in enumerate(launches.strings)}
    traces, operands = launches.traces.copy(), launches.operand_rows.rows.copy()
    for rows, names in ((traces, ("name", "params", "backend")), (operands, ("dtype",))):
        for name in names:
            rows[name] = [numbers[int(each)] for each in rows[name]]
    profiler._append(int(abi.Table.FINGERPRINT), launches.fingerprint_rows.tobytes())
    profiler._append(int(abi.Table.OPERAND), operands.tobytes())
    profiler._append(int(abi.Table.TRACE), traces.tobytes())
    profiler.close()
    return path


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    faulty = Decoder(faults={"layers.2.up": lambda x: x * 1.1}).record()
    return (
        written(tmp_path / "candidate.brick", faulty),
        written(tmp_path / "reference.brick", Decoder().record()),
    )


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    if isinstance(result.exception, BricklineError):
        return 2, str(result.exception)
    return result.exit_code, result.stdout


def test_diverged_is_one_and_says_who(pair: tuple[Path, Path]) -> None:
    status, text = run(*pair)
    assert status == 1
    assert "candidate.brick" in text
    assert "layers.2.up" in text
    assert "--runs" in text


def test_matched_is_zero(pair: tuple[Path, Path]) -> None:
    assert run(pair[1], pair[1])[0] == 0


def test_json_and_a_saved_report_are_the_report(pair: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    status, text = run(*pair, "--json", "-o", out)
    assert status == 1
    assert json.loads(text)["status"] == "diverged"
    assert DivergenceReport.load(out).findings[0].name == "layers.2.up"
    assert run(*pair, "-o", out)[0] == 2
    assert run(*pair, "-o", out, "--force")[0] == 1


def test_an_accepted_difference_stays_listed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    accept = tmp_path / "accept.toml"
    accept.write_text('[[accept]]\nbrick = "layers.2.up"\nreason = "ours"\nrelative_l2 = 0.5\n')
    status, text = run(*pair, "--accept", accept)
    assert status in (0, 3)
    assert "layers.2.up" in text


def test_nothing_to_compare_is_three(pair: tuple[Path, Path], tmp_path: Path) -> None:
    empty = written(tmp_path / "empty.brick", Launches())
    status, text = run(empty, pair[1])
    assert status == 3
    assert "holds no launches" in text


def test_no_run_is_two(pair: tuple[Path, Path], tmp_path: Path) -> None:
    status, text = run(tmp_path / "nothing.brick", pair[1])
    assert status == 2
    assert "expected a run" in text


@pytest.mark.parametrize("at", [0.3, 0.6, 0.95])
def test_a_cut_run_is_never_matched(pair: tuple[Path, Path], at: float) -> None:
    spool = next((pair[0] / "spool").glob("*.spool"))
    contents = spool.read_bytes()
    spool.write_bytes(contents[: int(at * len(contents))])
    try:
        report = compare(*pair)
    except BricklineError:
        return
    assert report.status is not Status.MATCHED


@pytest.mark.parametrize("seed", range(12))
def test_random_damage_raises_nothing_else(pair: tuple[Path, Path], seed: int) -> None:
    spool = next((pair[0] / "spool").glob("*.spool"))
    contents = bytearray(spool.read_bytes())
    drawn = np.random.default_rng(seed)
    for place in drawn.integers(4096, len(contents), 40):
        contents[place] = drawn.integers(256)
    spool.write_bytes(bytes(contents))
    try:
        compare(*pair)
    except BricklineError:
        return


def test_html_is_written_beside_the_text_and_changes_no_status(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    status, text = run(*pair, "--html", page)
    assert status == 1
    assert "layers.2.up" in text
    assert "layers.2.up" in page.read_text(encoding="utf-8")
    assert run(*pair, "--html", page)[0] == 2
    assert run(*pair, "--html", page, "--force")[0] == 1
    assert run(pair[1], pair[1], "--html", tmp_path / "same.html", "--json")[0] == 0
