"""What became slower: noise is named as seldom as promised, and a real change is found."""

from __future__ import annotations

import json
import random
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
    FLOOR,
    QUIETEST,
    Changes,
    Direction,
    Kind,
    changes_between,
    interval_of,
    trimmed_mean,
)
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
    least = [QUIETEST * np.median(side.var(axis=1, ddof=1)) for side in (ours, theirs)]
    tail = 0.025 / len(ours)
    found = (interval_of(list(a), list(b), tail, least) for a, b in zip(ours, theirs, strict=True))
    return [each.low > 0 or each.high < 0 for each in found]


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
    interval = interval_of([1.0, 1.0, 1.0], [1.0 + FLOOR, 1.0 + FLOOR, 1.0 + FLOOR], 0.025)
    assert interval.low < 0 < interval.high


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
    assert len(changes.open_past(0.05)) > len(BRICKS) / 2


def test_a_brick_that_became_faster_is_no_failure() -> None:
    changes = compared({"brick3": 0.8})
    assert [row.name for row in changes.faster] == ["brick3"]
    assert not changes.over(0.0)


def test_a_machine_that_became_slower_is_suspected() -> None:
    changes = compared(dict.fromkeys(BRICKS, 1.3))
    assert changes.common == pytest.approx(0.3, abs=0.05)


def test_fewer_than_three_runs_show_nothing() -> None:
    changes = compared({"brick7": 5.0}, runs=2)
    assert not changes.enough
    assert not changes.rows


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
    assert call(sides / "same", "--against", sides / "base", "--fail-over", "0%")[0] == 0


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


def test_too_few_repeats_are_no_answer(sides: Path) -> None:
    status, out = call(sides / "slow" / "0.brick", "--against", sides / "base")
    assert status == 3
    assert out.startswith("not enough repeats")
    arguments = (
        sides / "slow" / "0.brick",
        "--against",
        sides / "base",
        "--json",
        "--fail-over",
        "5%",
    )
    status, out = call(*arguments)
    assert (status, json.loads(out)["status"]) == (3, "not enough repeats")


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
