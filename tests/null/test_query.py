"""Runs asked in SQL: the views say what the profile says, and nothing but the views can be read."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hand_made_reports import CULPRIT, decoder_verdicts
from profile_runs import HOSTILE, empty_run, hostile_run, rich_run, sampled_run
from rich.console import Console
from typer.testing import CliRunner

from brickline import BrickProfiler
from brickline.commands import app
from brickline.errors import BricklineError, NotARun, RunDamaged, RunVersion, UsageError
from brickline.profile import Profile, profile_from_run
from brickline.query import open_database
from brickline.query_views import GIVEN, TABLES, VIEWS, about_views, views_for
from brickline.report.answer import print_answer
from brickline.run_paths import find_runs, run_labels
from brickline.runs import Run
from brickline.table_columns import SCHEMAS
from brickline.verdict import DivergenceReport, Finding, Verdict

duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rich_run(tmp_path_factory.mktemp("runs") / "decode.brick", steps=8, layers=4)


@pytest.fixture(scope="module")
def profile(run: Path) -> Profile:
    return profile_from_run(Run.open(run))


def ask(paths: Path | list[Path], sql: str) -> list[tuple[Any, ...]]:
    given = [paths] if isinstance(paths, Path) else paths
    with open_database(given, sql) as database:
        return list(database.ask(sql).rows)


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["query", *map(str, arguments)])
    if isinstance(result.exception, BricklineError):
        return 2, result.stdout, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


# --- What the views say -----------------------------------------------------------------------


def close(found: Any, expected: Any) -> bool:
    return bool(found == pytest.approx(expected, rel=1e-9))


@pytest.mark.parametrize("view", ["brick_times", "layer_times", "phase_times"])
def test_bricks_are_those_of_the_profile(view: str, run: Path, profile: Profile) -> None:
    rows = {"brick_times": "bricks", "layer_times": "brick_layers", "phase_times": "brick_phases"}
    columns = "count, timed, total_ns, exclusive_ns, avg_us, min_us, max_us, p50_us, p90_us, p99_us"
    key = {"brick_times": "NULL", "layer_times": "layer", "phase_times": "phase"}[view]
    found = {
        (row[0], row[1]): row[2:] for row in ask(run, f"SELECT name, {key}, {columns} FROM {view}")
    }
    expected = getattr(profile, rows[view])
    assert len(found) == len(expected)
    for each in expected:
        by = {"brick_times": None, "layer_times": each.layer, "phase_times": each.phase}[view]
        figures = (each.count, each.timed, each.total_ns, each.exclusive_ns, each.avg_us)
        figures += (each.min_us, each.max_us, each.p50_ns / 1e3, each.p90_ns / 1e3)
        assert close(found[each.name, by], (*figures, each.p99_ns / 1e3))


def test_shares_are_those_of_the_profile(run: Path, profile: Profile) -> None:
    shares = dict(ask(run, "SELECT name, share FROM brick_times"))
    assert close(shares, {row.name: profile.share(row) for row in profile.bricks})


def test_shares_of_a_sampled_run_are_scaled(tmp_path: Path) -> None:
    path = sampled_run(tmp_path / "sampled.brick")
    expected = profile_from_run(Run.open(path)).steps["decode"]
    [(steps, timed, tokens, per_token)] = ask(
        path, "SELECT steps, timed, tokens, us_per_token FROM step_times"
    )
    assert (steps, timed, tokens) == (expected.count, expected.stats.timed, expected.tokens)
    assert close(per_token, expected.us_per_token)
    assert ask(path, "SELECT share FROM brick_times") == [(pytest.approx(1.0),)]


def test_steps_are_those_of_the_profile(run: Path, profile: Profile) -> None:
    found = ask(
        run, "SELECT phase, steps, tokens, us_per_token, tokens_per_s, p99_us FROM step_times"
    )
    assert {row[0] for row in found} == set(profile.steps)
    for phase, *figures in found:
        step = profile.steps[phase]
        expected = [step.count, step.tokens, step.us_per_token, step.tokens_per_s]
        assert close(figures, [*expected, step.stats.p99_ns / 1e3])


def test_launches_know_their_brick_and_tensors_their_launch(tmp_path: Path) -> None:
    with BrickProfiler(
        "traced", enabled=True, device="NULL", path=tmp_path / "t.brick"
    ) as profiler:
        brick = profiler.brick("RmsNorm", layer=3)
        with brick:
            profiler.advance(2_000)
            profiler.traces.write(
                profiler.traces.reserve(),
                name="rms",
                enqueue_ns=0,
                start_ns=500,
                end_ns=1_500,
                layer=3,
                slot=brick.slot,
            )
        profiler.trace("rope", layer=3, outputs=np.array([1.0, np.nan], np.float32))
    assert ask(
        tmp_path / "t.brick", "SELECT name, brick, duration_us FROM launches ORDER BY trace"
    ) == [
        ("rms", "RmsNorm", 1.0),
        ("rope", None, None),
    ]
    assert ask(tmp_path / "t.brick", "SELECT name, role, nan_count FROM tensors") == [
        ("rope", "output", 1)
    ]
    kernels = ask(
        tmp_path / "t.brick", "SELECT name, launches, timed, p99_us FROM kernel_times ORDER BY 1"
    )
    assert kernels == [("rms", 1, 1, 1.0), ("rope", 1, 0, None)]


def test_every_table_of_a_run_is_a_view_with_its_columns(run: Path) -> None:
    assert set(TABLES) == set(SCHEMAS)
    for table, schema in SCHEMAS.items():
        described = [row[0] for row in ask(run, f"DESCRIBE {table}")]
        assert described == ["run", *schema.names]


def test_every_view_is_listed_and_answers(run: Path) -> None:
    status, out, _ = call(run, "--json")
    listed = [row[0] for row in json.loads(out)["rows"]]
    assert status == 0
    assert listed == list(about_views())
    for view in listed:
        ask(run, f"SELECT * FROM {view} LIMIT 1")


def test_a_query_reads_what_it_names_and_what_that_is_made_of() -> None:
    assert views_for("SELECT * FROM Brick_Times") == ["bricks", "histograms", "brick_times"]
    assert views_for("SHOW TABLES") == views_for(None) == [*TABLES, *GIVEN, *VIEWS]


# --- Many runs and reports -----------------------------------------------------------------------


def test_many_runs_are_told_apart(tmp_path: Path) -> None:
    for number in range(3):
        rich_run(tmp_path / f"{number}.brick", steps=number + 1, layers=1)
    paths = find_runs([tmp_path])
    assert ask(paths, "SELECT run, steps FROM step_times WHERE phase = 'decode' ORDER BY run") == [
        ("0", 1),
        ("1", 2),
        ("2", 3),
    ]
    assert [row[0] for row in ask(paths, "SELECT name FROM runs")] == ["llama decode"] * 3
    status, out, _ = call(
        str(tmp_path / "*.brick"), "SELECT count(DISTINCT run) AS n FROM bricks", "--csv"
    )
    assert (status, out) == (0, "n\n3\n")


def test_labels_are_short_where_they_can_be() -> None:
    paths = [Path("/a/x.brick"), Path("/b/x.brick"), Path("/b/y.brick")]
    assert run_labels(paths) == ["/a/x.brick", "/b/x.brick", "y"]


def test_verdicts_and_findings_of_kept_reports(tmp_path: Path, run: Path) -> None:
    finding = Finding(CULPRIT, Verdict.CULPRIT, z=212.4, share=0.99, cause="a dropped tail")
    report = DivergenceReport("port", "model", findings=(finding,), verdicts=decoder_verdicts())
    kept = report.save(tmp_path / "port.json")
    found = ask([run, kept], "SELECT name, candidate, z FROM verdicts WHERE verdict = 'culprit'")
    assert found == [(CULPRIT, "port", 212.4)]
    assert ask([run, kept], "SELECT count(*) FROM verdicts") == [(len(report.verdicts),)]
    assert ask(kept, "SELECT run, name, share, cause FROM findings") == [
        ("port.json", CULPRIT, 0.99, "a dropped tail")
    ]
    assert ask(kept, "SELECT count(*) FROM traces") == [(0,)]


# --- What it looks like --------------------------------------------------------------------------


def test_csv_and_json_hold_every_value(run: Path) -> None:
    sql = "SELECT 'a,b' AS name, [1, 2] AS list, 1.5 AS figure, NULL AS nothing, 'nan'::DOUBLE AS n"
    _, out, _ = call(run, sql, "--csv")
    assert list(csv.reader(io.StringIO(out))) == [
        ["name", "list", "figure", "nothing", "n"],
        ["a,b", "[1, 2]", "1.5", "", "nan"],
    ]
    _, out, _ = call(run, sql, "--json")
    document = json.loads(out)
    assert document["schema"] == "brickline-query"
    assert document["rows"] == [["a,b", [1, 2], 1.5, None, "nan"]]
    assert [each["name"] for each in document["columns"]][:2] == ["name", "list"]


def test_names_are_text_and_move_no_cursor(tmp_path: Path) -> None:
    path = hostile_run(tmp_path / "hostile.brick")
    status, out, _ = call(path, "SELECT name FROM brick_times")
    assert status == 0
    assert "\x07" not in out
    assert "\x1b" not in out
    assert HOSTILE[1][:20] in out


@pytest.mark.parametrize("width", [40, 200])
def test_a_narrow_terminal_gets_rows_upright(run: Path, width: int) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    with open_database([run]) as database:
        print_answer(database.ask("FROM brick_times ORDER BY total_ns DESC"), console, limit=2)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert ("Row 2" in text) == (width == 40)
    assert "DownProjection" in text
    assert "the first 2 of " in text


# --- Closed --------------------------------------------------------------------------------------


def contents(path: Path) -> dict[str, str]:
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def test_the_file_system_is_out_of_reach(run: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    table = run / "tables" / "bricks.parquet"
    ask(run, "FROM bricks")
    before = contents(run)
    for sql in (
        f"SELECT * FROM read_csv('{secret}')",
        f"SELECT * FROM '{secret}'",
        f"SELECT * FROM read_text('{run / 'manifest.json'}')",
        f"SELECT * FROM glob('{tmp_path}/*')",
        f"COPY (SELECT 1 AS a) TO '{tmp_path / 'out.csv'}'",
        f"COPY (SELECT 1 AS a) TO '{table}' (USE_TMP_FILE false)",
        f"EXPLAIN ANALYZE COPY (SELECT 1 AS a) TO '{table}' (USE_TMP_FILE false)",
        f"COPY (PIVOT bricks ON name USING sum(count)) TO '{table}' (USE_TMP_FILE false)",
        f"ATTACH '{tmp_path / 'other.db'}'",
        f"EXPORT DATABASE '{tmp_path / 'exported'}'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "CREATE TABLE mine AS SELECT 1",
        "DROP VIEW bricks",
        "SELECT 1; SELECT 2",
        "CHECKPOINT",
        "",
    ):
        with open_database([run]) as database, pytest.raises(UsageError):
            list(database.ask(sql).rows)
    assert contents(run) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["secret.csv"]


def test_what_python_holds_is_no_table(run: Path) -> None:
    mine = [1, 2, 3]
    assert mine
    with pytest.raises(UsageError, match="mine"):
        ask(run, "SELECT * FROM mine")


# --- Bad input -----------------------------------------------------------------------------------


def test_bad_sql_is_answered_in_duckdbs_words_with_the_views(run: Path) -> None:
    status, _, words = call(run, "SELECT nme FROM bricks")
    assert status == 2
    assert 'column "nme" not found' in words
    assert "The views are: brick_times, " in words
    assert "traces" in words
    assert call(run, "SELEC name FROM bricks")[0] == 2
    status, _, words = call(run, "SELECT * FROM brickz LIMIT 1")
    assert (status, "brickz" in words) == (2, True)


def test_a_failure_while_rows_come_is_said_too(run: Path) -> None:
    status, _, words = call(run, "SELECT error('too late') FROM bricks")
    assert (status, "too late" in words) == (2, True)


def test_without_duckdb_it_says_what_to_install(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    status, _, words = call(run, "SELECT 1 AS one")
    assert status == 2
    assert "pip install brickline[query]" in words


def test_an_empty_run_answers_with_a_word(tmp_path: Path) -> None:
    path = empty_run(tmp_path / "empty.brick")
    for _ in range(2):  # read, and then published
        status, out, words = call(path, "SELECT name FROM brick_times")
        assert (status, out.strip().splitlines()[-1]) == (0, "no rows")
        assert "is empty" in words


def test_a_live_run_is_read_as_it_is_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "live.brick"
    with BrickProfiler("live", enabled=True, device="NULL", path=path) as profiler:
        for _ in range(5):
            with profiler.brick("RmsNorm"):
                profiler.advance(1_000)
        status, out, words = call(path, "SELECT name, count FROM brick_times", "--csv")
        assert (status, out) == (0, "name,count\nRmsNorm,5\n")
        assert "still being recorded" in words
        assert not (path / "tables").exists()
        assert ask(path, "SELECT is_live FROM runs") == [(True,)]


def test_a_run_of_a_newer_version_is_refused(tmp_path: Path, run: Path) -> None:
    path = empty_run(tmp_path / "newer.brick")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"version": 99}))
    with pytest.raises(RunVersion, match="99"):
        ask([run, path], "SELECT 1 AS one FROM bricks")


def test_what_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotARun, match="nowhere"):
        ask(tmp_path / "nowhere.brick", "SELECT 1 AS one FROM bricks")
    with pytest.raises(NotARun, match="none match"):
        find_runs([str(tmp_path / "*.brick")])
    assert call("SELECT 1 AS one FROM bricks")[0] == 2


def test_a_read_only_run_is_read_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = rich_run(tmp_path / "kept.brick", steps=2, layers=1)
    monkeypatch.setattr(Run, "publish", lambda self: None)
    before = contents(path)
    assert ask(path, "SELECT count(*) FROM step_times") == [(2,)]
    assert contents(path) == before


# --- Damaged tables ---------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = rich_run(tmp_path / "decode.brick", steps=2, layers=1)
    assert ask(path, "FROM bricks")
    return path / "tables" / "bricks.parquet"


@pytest.mark.parametrize("left", [0, 40, 1000])
def test_a_table_that_is_cut_off_is_made_anew(table: Path, left: int) -> None:
    whole = table.read_bytes()
    before = ask(table.parents[1], "FROM brick_times ORDER BY ALL")
    table.write_bytes(whole[:left])
    assert ask(table.parents[1], "FROM brick_times ORDER BY ALL") == before
    assert table.stat().st_size == len(whole)


def test_a_table_with_wrong_bytes_is_named(table: Path) -> None:
    whole = table.read_bytes()
    for first in (4, len(whole) // 2, len(whole) - 400):  # in pages, and in what describes them
        table.write_bytes(whole[:first] + b"\xff" * 300 + whole[first + 300 :])
        status, shown, said = call(table.parents[1], "SELECT * FROM bricks")
        assert (status, shown) == (2, "")
        assert str(table) in said
        assert "delete the directory tables/" in said
        assert "The views are" not in said


def test_a_table_without_its_columns_is_named(table: Path) -> None:
    import pyarrow.parquet as pq

    size = table.stat().st_size
    pq.write_table(SCHEMAS["lanes"].empty_table(), table)
    index = table.with_name("index.json")
    document = json.loads(index.read_text())
    document["bytes"]["bricks"] = table.stat().st_size
    index.write_text(json.dumps(document))
    assert table.stat().st_size != size
    with pytest.raises(RunDamaged, match=r"no column \w+ - at .*bricks\.parquet"):
        ask(table.parents[1], "FROM brick_times")


def test_a_question_is_not_blamed_on_a_table(table: Path) -> None:
    with pytest.raises(UsageError, match="Could not convert"):
        ask(table.parents[1], "SELECT name::INTEGER FROM bricks")
