"""What became slower: noise is named as seldom as promised, and a real change is found."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from brickline import BrickProfiler
from brickline.commands import app
from brickline.commands.against import relative_limit
from brickline.errors import BricklineError, UsageError
from brickline.profile import Profile
from brickline.profile_rows import StepStats
from brickline.regressions import (
    Changes,
    Direction,
    Kind,
    changes_between,
    interval_of,
    trimmed_mean,
)
from brickline.regressions.run_noise import FLOOR, noise_of
from brickline.report.against import signed
from brickline.stats import BrickStats
from brickline.student import student_quantile, student_tail

SEED = 20240229
BRICKS = [f"brick{number}" for number in range(12)]


# --- Student's t ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "freedom", "expected"),
    [
        (0.025, 1, 12.706205),
        (0.025, 4, 2.776445),
        (0.005, 10, 3.169273),
        (0.0005, 2, 31.599055),
        (0.001, 1e6, 3.090240),
    ],
)
def test_quantiles_are_those_of_the_tables(tail: float, freedom: float, expected: float) -> None:
    assert student_quantile(tail, freedom) == pytest.approx(expected, rel=1e-6)


@given(st.floats(1e-9, 0.49), st.floats(0.5, 500))
def test_quantile_and_tail_are_inverse(tail: float, freedom: float) -> None:
    assert student_tail(student_quantile(tail, freedom), freedom) == pytest.approx(tail, rel=1e-6)


def test_a_tail_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="tail"):
        student_quantile(0.7, 4)


# --- One figure of one run -----------------------------------------------------------------------


def test_the_figure_leaves_the_longest_out() -> None:
    durations = [10_000] * 190 + [5_000_000] * 10
    mean, spread = trimmed_mean(BrickStats.from_durations("b", durations))
    assert mean == pytest.approx(10_000, rel=0.03)
    assert spread < 600


@given(st.lists(st.integers(1, 10**9), min_size=10, max_size=60))
def test_the_figure_is_near_that_of_the_durations(durations: list[int]) -> None:
    kept = sorted(durations)[: len(durations) - -(-len(durations) // 20)]
    mean, _ = trimmed_mean(BrickStats.from_durations("b", durations))
    assert mean == pytest.approx(np.mean(kept), rel=0.05)


def test_a_narrow_brick_moves_by_less_than_a_bucket() -> None:
    one, other = (
        trimmed_mean(BrickStats.from_durations("b", [ns] * 200))[0] for ns in (10_000, 10_100)
    )
    assert other / one == pytest.approx(1.01, abs=0.003)


# --- How often it errs ---------------------------------------------------------------------------


def named(ours: Any, theirs: Any) -> list[bool]:
    """Which rows an interval without 0 is found for, as `changes_between` computes them."""
    noises = zip(noise_of(ours.tolist()), noise_of(theirs.tolist()), strict=True)
    rows = zip(ours.tolist(), theirs.tolist(), noises, strict=True)
    found = [interval_of(a, b, noise, 0.025, rows=len(ours)) for a, b, noise in rows]
    return [abs(each.middle) > each.half for each in found]


def side(rng: Any, rows: int, runs: int, own: float, shared: float, heavy: bool) -> Any:
    """Logarithms of run figures: noise of each brick, and what all bricks of a run share."""
    noise = rng.standard_t(3, (rows, runs)) if heavy else rng.standard_normal((rows, runs))
    return own * noise + shared * rng.standard_normal(runs)


@pytest.mark.parametrize(
    ("runs", "base_runs", "own", "shared", "louder", "heavy"),
    [
        (5, 5, 0.02, 0.0, 1.0, False),
        (3, 3, 0.02, 0.0, 1.0, False),
        (3, 3, 0.01, 0.03, 1.0, False),
        (5, 5, 0.01, 0.0, 1.0, True),
        (5, 5, 0.02, 0.01, 4.0, False),
        (3, 8, 0.02, 0.0, 0.25, False),
    ],
    ids=["five", "three", "a machine that drifts", "heavy tails", "a loud base", "a quiet base"],
)
def test_the_same_code_is_named_at_most_as_often_as_stated(
    runs: int, base_runs: int, own: float, shared: float, louder: float, heavy: bool
) -> None:
    rng, trials = np.random.default_rng(SEED), 300
    wrong = sum(
        any(
            named(
                side(rng, len(BRICKS), runs, own, shared, heavy),
                louder * side(rng, len(BRICKS), base_runs, own, shared, heavy),
            )
        )
        for _ in range(trials)
    )
    # 5 % of 300 are 15; more than 24 happen once in a hundred times at that rate.
    assert wrong <= 24


def groups(rng: Any, rows: int, runs: int) -> Any:
    """Every third brick shares noise, as bricks do that wait for memory."""
    shared = rng.standard_normal((3, runs))[np.arange(rows) % 3]
    return 0.01 * rng.standard_normal((rows, runs)) + 0.03 * shared


def halves(rng: Any, rows: int, runs: int) -> Any:
    """Every second brick has ten times the noise, so what is usual is nobody's."""
    louder = np.where(np.arange(rows) % 2, 10.0, 1.0)[:, None]
    return 0.01 * louder * rng.standard_normal((rows, runs))


def few_loud(rng: Any, rows: int, runs: int) -> Any:
    louder = np.where(np.arange(rows) < 2, 3.0, 1.0)[:, None]
    return 0.01 * louder * rng.standard_normal((rows, runs))


def heavy_drift(rng: Any, rows: int, runs: int) -> Any:
    return 0.01 * rng.standard_normal((rows, runs)) + 0.03 * rng.standard_t(3, runs)


@pytest.mark.parametrize(("base_runs", "louder"), [(3, 1.0), (8, 0.25)], ids=["like", "unlike"])
@pytest.mark.parametrize("noise", [groups, halves, few_loud, heavy_drift])
def test_borrowed_noise_names_no_more(noise: Any, base_runs: int, louder: float) -> None:
    rng, trials = np.random.default_rng(SEED), 300
    wrong = sum(
        any(named(noise(rng, 18, 3), louder * noise(rng, 18, base_runs))) for _ in range(trials)
    )
    assert wrong <= 24


@pytest.mark.parametrize(("noise", "share"), [(0.01, 1.0), (0.02, 0.98), (0.03, 0.9)])
def test_thirty_percent_are_found_with_three_repeats(noise: float, share: float) -> None:
    rng, trials, found = np.random.default_rng(SEED), 100, 0
    for _ in range(trials):
        ours, theirs = (side(rng, 30, 3, noise, 0.0, False) for _ in range(2))
        ours[4] += np.log1p(0.3)
        found += named(ours, theirs)[4]
    assert found >= share * trials


def test_a_steady_brick_is_found_among_noisy_ones() -> None:
    rng, trials, found = np.random.default_rng(SEED), 100, 0
    for _ in range(trials):
        ours, theirs = (halves(rng, 30, 3) for _ in range(2))
        ours[4] += np.log1p(0.3)
        found += named(ours, theirs)[4]
    assert found >= 0.9 * trials


@pytest.mark.parametrize("change", [0.10, -0.10])
def test_ten_percent_are_found_with_five_repeats(change: float) -> None:
    rng, trials, found = np.random.default_rng(SEED), 200, 0
    for _ in range(trials):
        ours = side(rng, len(BRICKS), 5, 0.015, 0.0, False)
        ours[4] += np.log1p(change)
        rows = named(ours, side(rng, len(BRICKS), 5, 0.015, 0.0, False))
        found += rows[4]
    assert found >= 0.95 * trials


def test_runs_that_agree_by_chance_prove_nothing() -> None:
    ours, theirs = [1.0, 1.0, 1.0], [1.0 + FLOOR, 1.0 + FLOOR, 1.0 + FLOOR]
    interval = interval_of(ours, theirs, noise_of([ours, theirs]), 0.025)
    assert abs(interval.middle) < interval.half


# --- Profiles ------------------------------------------------------------------------------------


def profile(
    rng: random.Random, slower: dict[str, float] | None = None, calls: int = 1, noise: float = 0.01
) -> Profile:
    machine = rng.lognormvariate(0, noise)
    rows = []
    for number, name in enumerate(BRICKS):
        typical = 20_000 * (number + 1) * machine * (slower or {}).get(name, 1.0)
        own = typical * rng.lognormvariate(0, noise)
        durations = [
            int(own * rng.lognormvariate(0, 0.05) * (30 if rng.random() < 0.01 else 1))
            for _ in range(100)
        ]
        rows.append(BrickStats.from_durations(name, durations, phase="decode", count=100 * calls))
    wall = [
        int(sum(row.total_ns for row in rows) / 100 * rng.lognormvariate(0, 0.02))
        for _ in range(100)
    ]
    step = StepStats("decode", BrickStats.from_durations("decode", wall, phase="decode"))
    return Profile("run", brick_phases=tuple(rows), steps={"decode": step})


def compared(slower: dict[str, float] | None, runs: int = 5, **options: Any) -> Changes:
    rng = random.Random(SEED)
    base = [profile(rng) for _ in range(runs)]
    return changes_between([profile(rng, slower, **options) for _ in range(runs)], base)


def test_the_brick_that_became_slower_is_named_alone() -> None:
    changes = compared({"brick7": 1.1})
    [row] = [each for each in changes.slower if each.kind is Kind.BRICK]
    assert row.name == "brick7"
    assert row.low < 0.1 < row.high
    assert not changes.faster
    assert changes.over(0.05) == (row,)
    assert not changes.over(0.2)
    assert changes.rows[0].kind is Kind.STEP
    assert changes.rows[1] is row


def test_the_same_code_changes_nothing() -> None:
    changes = compared(None)
    assert {row.direction for row in changes.rows} == {Direction.UNCHANGED}
    assert changes.common is None


def test_what_noise_leaves_open_is_counted() -> None:
    changes = compared(None, noise=0.2)
    assert not changes.over(0.05)
    estimates = [row for row in changes.rows if row.change > 0.05]
    assert estimates
    assert list(changes.unsure(0.05)) == estimates
    assert min(row.visible for row in changes.rows) > 0.05


@given(st.integers(3, 6), st.integers(0, 2**32), st.floats(-0.5, 1.0), st.floats(0.001, 0.2))
def test_a_row_is_slower_from_its_visible_size_on(
    runs: int, seed: int, change: float, noise: float
) -> None:
    rng = random.Random(seed)
    profiles = [
        Profile(
            "run",
            brick_phases=tuple(
                BrickStats.from_durations(
                    name, [int(1e6 * factor * rng.lognormvariate(0, noise))] * 9, phase="decode"
                )
                for name, factor in (("steady", 1.0), ("moved", 1.0 + change * (at >= runs)))
            ),
        )
        for at in range(2 * runs)
    ]
    for row in changes_between(profiles[runs:], profiles[:runs]).rows:
        assert (row.direction is Direction.SLOWER) == (row.change > row.visible)
        assert row.low is not None
        assert row.visible == pytest.approx((1 + row.change) / (1 + row.low) - 1)


def test_a_brick_that_became_faster_is_no_failure() -> None:
    changes = compared({"brick3": 0.8})
    assert [row.name for row in changes.faster] == ["brick3"]
    assert not changes.over(0.0)


def test_a_machine_that_became_slower_is_suspected() -> None:
    changes = compared(dict.fromkeys(BRICKS, 1.3))
    assert changes.common == pytest.approx(0.3, abs=0.05)


def test_fewer_than_three_runs_show_nothing() -> None:
    for runs in (1, 2):
        changes = compared({"brick7": 5.0}, runs=runs)
        assert not changes.enough
        assert {row.direction for row in changes.rows} == {Direction.UNCHANGED}
        assert not changes.over(0.05)
        assert "brick7" in {row.name for row in changes.unsure(0.05)}
        assert all(row.visible > 0 and row.low is None for row in changes.rows)


def test_more_runs_see_smaller_changes() -> None:
    sizes = [compared(None, runs=runs).visible for runs in (2, 3, 5, 10)]
    middles = [size[1] for size in sizes if size]
    assert len(middles) == 4
    assert middles == sorted(middles, reverse=True)


def test_one_run_is_as_noisy_as_those_of_the_other_side() -> None:
    rng = random.Random(SEED)
    base, new = [profile(rng) for _ in range(4)], [profile(rng)]
    one, alone = changes_between(new, base).visible, changes_between(new, base[:1]).visible
    assert one
    assert alone
    assert one[1] > alone[1]
    assert {row.noise is None for row in changes_between(new, base[:1]).rows} == {True}


def test_bricks_of_one_side_are_listed() -> None:
    rng = random.Random(SEED)
    base = [profile(rng) for _ in range(3)]
    ours = [
        Profile(
            "run", brick_phases=(*each.brick_phases[1:], BrickStats.from_durations("new", [5, 6]))
        )
        for each in (profile(rng) for _ in range(3))
    ]
    changes = changes_between(ours, base)
    assert [key.name for key in changes.only_here] == ["new"]
    assert {key.name for key in changes.only_base} == {"brick0", "step"}


def test_a_confidence_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match="confidence"):
        changes_between([], [], confidence=1.5)


# --- The command ---------------------------------------------------------------------------------


def recorded(path: Path, seed: int, slower: float = 1.0, calls: int = 1) -> Path:
    rng = random.Random(seed)
    machine = rng.lognormvariate(0, 0.01)
    with BrickProfiler("decode", enabled=True, device="NULL", path=path) as profiler:
        for _ in range(20):
            with profiler.step(tokens=1, phase="decode"):
                for name, ns in (
                    ("RmsNorm", 9e3),
                    ("AttentionScore", 6e4 * slower),
                    ("LmHead", 2e5),
                ):
                    for _ in range(calls if name == "RmsNorm" else 1):
                        with profiler.brick(name):
                            profiler.advance(int(ns * machine * rng.lognormvariate(0, 0.02)))
    return path


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sides")
    for number in range(4):
        recorded(folder / "base" / f"{number}.brick", number)
        recorded(folder / "slow" / f"{number}.brick", 10 + number, slower=1.15)
        recorded(folder / "same" / f"{number}.brick", 20 + number)
    return folder


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    if isinstance(result.exception, BricklineError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout


def test_a_directory_of_runs_is_a_side(sides: Path) -> None:
    status, out = call(sides / "slow", "--against", sides / "base")
    assert status == 0
    assert "4 runs against 4: of 3 bricks 1 slower, 0 faster" in out
    line = next(line for line in out.splitlines() if line.startswith("AttentionScore"))
    assert line.rstrip().endswith("slower")


def test_the_gate_fails_past_its_limit_alone(sides: Path) -> None:
    status, out = call(sides / "slow", "--against", sides / "base", "--fail-over", "5%")
    assert status == 1
    assert "FAILED" in out
    status, out = call(sides / "slow", "--against", sides / "base", "--fail-over", "40%")
    assert (status, "ok " in out, "unsure" in out) == (0, True, False)
    status, out = call(sides / "same", "--against", sides / "base", "--fail-over", "20%")
    assert (status, "no estimate is above 20.0 %" in out) == (0, True)
    assert "cannot be seen" in out


def test_runs_may_be_given_one_by_one_or_by_pattern(sides: Path) -> None:
    base = [
        each for number in range(3) for each in ("--against", sides / "base" / f"{number}.brick")
    ]
    status, out = call(sides / "same" / "[012].brick", *base, "--json")
    document = json.loads(out)
    assert (status, document["schema"], document["status"]) == (0, "brickline-changes", "compared")
    assert (document["runs"], document["base_runs"]) == (3, 3)
    assert {row["name"] for row in document["rows"]} == {
        "step",
        "RmsNorm",
        "AttentionScore",
        "LmHead",
    }


def words(out: str) -> str:
    return " ".join(out.split())


@pytest.mark.parametrize("runs", [1, 2])
def test_too_few_repeats_show_no_change(sides: Path, runs: int) -> None:
    base = [
        each for number in range(runs) for each in ("--against", sides / f"base/{number}.brick")
    ]
    slow, same = ([sides / f"{side}/{at}.brick" for at in range(runs)] for side in ("slow", "same"))
    status, out = call(*slow, *base)
    assert (status, "slower" in out.splitlines()[4]) == (0, False)
    assert re.search(rf"{runs} runs? against {runs}: changes below \d.* cannot be seen", words(out))
    assert ("how much one run differs from the next is unknown" in words(out)) == (runs == 1)
    assert call(*same, *base, "--fail-over", "50%")[0] == 0
    status, out = call(*slow, *base, "--fail-over", "5%")
    assert (status, "unsure" in out, "FAILED" in out) == (3, True, False)
    status, out = call(*slow, *base, "--fail-over", "5%", "--json")
    document = json.loads(out)
    assert (status, document["status"], document["enough_runs"]) == (3, "unsure", False)
    assert document["unsure"] >= 1
    assert all(row["visible"] > 0 and row["low"] is None for row in document["rows"])


def test_an_estimate_over_the_limit_passes_only_when_chance_is_excluded(tmp_path: Path) -> None:
    for number in range(3):
        recorded(tmp_path / "base" / f"{number}.brick", number)
        recorded(tmp_path / "new" / f"{number}.brick", 30 + number, slower=1.0 + 0.4 * number)
    status, out = call(tmp_path / "new", "--against", tmp_path / "base", "--fail-over", "5%")
    assert status == 3
    assert "unsure estimated above 5.0 %, but chance is not excluded:" in words(out)
    assert call(tmp_path / "new", "--against", tmp_path / "base", "--fail-over", "90%")[0] == 0
    assert call(tmp_path / "new", "--against", tmp_path / "base")[0] == 0


def test_thirty_percent_fail_in_three_runs(tmp_path: Path) -> None:
    for number in range(3):
        recorded(tmp_path / "base" / f"{number}.brick", number)
        recorded(tmp_path / "new" / f"{number}.brick", 40 + number, slower=1.3)
    status, out = call(tmp_path / "new", "--against", tmp_path / "base", "--fail-over", "5%")
    assert status == 1
    assert "3 runs against 3: changes below" in out
    _, out = call(tmp_path / "new", "--against", tmp_path / "base", "--json")
    document = json.loads(out)
    assert 0 < document["visible"]["least"] <= document["visible"]["most"] < 0.3


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (0.05, "+5.0 %"),
        (8.0, "+800.0 %"),
        (9.0, "× 10.0"),
        (1239122.86, "× 1,240,000"),
        (3e300, "× 3.00e+300"),
        (-0.8, "-80.0 %"),
        (-0.9996, "÷ 2,500"),
    ],
)
def test_a_ratio_that_no_percentage_says_is_a_factor(change: float, expected: str) -> None:
    assert signed(change) == expected


@pytest.mark.parametrize("runs", [1, 3])
def test_a_brick_that_took_nothing_in_the_base_is_new(tmp_path: Path, runs: int) -> None:
    for number in range(runs):
        for side, ns in (("base", 0), ("new", 3_100)):
            path = tmp_path / side / f"{number}.brick"
            with BrickProfiler("p", enabled=True, device="NULL", path=path) as profiler:
                for name, took in (("Norm", 9_000 + number), ("Copy", ns)):
                    for first in (1, *[took] * 20):
                        with profiler.brick(name):
                            profiler.advance(first)
    status, out = call(tmp_path / "new", "--against", tmp_path / "base", "--fail-over", "5%")
    assert status == (1 if runs == 3 else 3)
    assert "Copy new: 2.94 µs where the base had 0 ns" in words(out)
    assert not re.search(r"\d{4} %", out)


def test_runs_that_share_nothing_do_not_pass_the_gate(sides: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.brick"
    profiler = BrickProfiler("other", enabled=True, device="NULL", path=path)
    with profiler, profiler.brick("Other"):
        profiler.advance(10)
    arguments = path, "--against", sides / "base" / "0.brick"
    status, out = call(*arguments, "--json")
    assert (status, json.loads(out)["status"]) == (0, "nothing compared")
    status, out = call(*arguments, "--fail-over", "5%")
    assert (status, "timed on both sides" in out) == (2, True)


def test_a_brick_that_is_entered_more_often_is_mentioned(sides: Path, tmp_path: Path) -> None:
    for number in range(3):
        recorded(tmp_path / f"{number}.brick", 50 + number, calls=2)
    _, out = call(tmp_path, "--against", sides / "base")
    assert "RmsNorm (decode) is entered 2 times a step, in the base 1 times" in " ".join(
        out.split()
    )


def test_the_same_run_twice_is_no_repeat(sides: Path) -> None:
    status, words = call(sides / "base", "--against", sides / "base")
    assert (status, "twice" in words) == (2, True)


@pytest.mark.parametrize("text", ["5", "five%", "-5%", ""])
def test_a_limit_is_a_percentage(text: str) -> None:
    with pytest.raises(UsageError, match="percentage such as 5%"):
        relative_limit(text)


def test_a_limit_and_several_runs_need_a_base(sides: Path) -> None:
    status, said = call(sides / "base" / "0.brick", "--fail-over", "5%")
    assert (status, "goes with --against" in said) == (2, True)
    assert call(sides / "base" / "0.brick", sides / "base" / "1.brick")[0] == 2
    assert call(sides / "base", "--against", sides / "same", "--csv")[0] == 2
