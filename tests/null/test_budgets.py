"""Budgets: what a file may say, what it is told when it says something else, and the gate."""

from __future__ import annotations

from pathlib import Path

import pytest
from hand_made import decode_part, profile_of

from brickline.budgets import BudgetResult, Budgets, check_budgets, load_budgets, parse_budgets
from brickline.errors import BudgetError


def results(text: str) -> dict[str, BudgetResult]:
    found = check_budgets(profile_of(decode_part()), parse_budgets(text))
    return {result.budget.key: result for result in found}


def test_every_scope_and_metric():
    found = results("""
        [bricks]
        RmsNorm = 11.0
        LmHead = { avg = 351, p99_us = 351, max = 349.5, us_per_token = 351 }
        [categories]
        Norm = 9.0
        FFN = { us_per_token = 321.0 }
        [total]
        us_per_token = 999.0
    """)
    assert {key: result.passed for key, result in found.items()} == {
        "bricks.RmsNorm.avg": True,
        "bricks.LmHead.avg": True,
        "bricks.LmHead.p99": True,
        "bricks.LmHead.max": False,
        "bricks.LmHead.us_per_token": True,
        "categories.Norm.avg": False,
        "categories.FFN.us_per_token": True,
        "total.us_per_token": False,
    }
    assert found["categories.FFN.us_per_token"].measured_us == pytest.approx(320.0)
    exceeded = found["total.us_per_token"]
    assert (exceeded.measured_us, exceeded.ratio) == (1000.0, pytest.approx(1.001, abs=1e-3))
    assert str(exceeded) == "total.us_per_token: 1000.00 µs exceeds 999 µs (1.00 of it)"
    assert not exceeded


def test_an_alias_leads_to_its_brick():
    assert results("bricks.Head = 400.0")["bricks.LmHead.avg"].passed


@pytest.mark.parametrize("name", ["Embedding", "SomethingElseEntirely"])
def test_a_brick_that_the_run_lacks_fails_as_not_measured(name: str):
    (result,) = results(f"bricks.{name} = 1.0").values()
    assert result.measured_us is None
    assert result.ratio is None
    assert not result.passed
    assert "not measured" in str(result)


def test_tokens_that_were_never_counted_fail_as_not_measured():
    (result,) = check_budgets(profile_of(), parse_budgets("total.us_per_token = 1"))
    assert not result.passed


def test_a_dynamic_brick_may_have_a_budget():
    part = decode_part().brick("RmsNorms", [1000])
    (result,) = check_budgets(profile_of(part), parse_budgets("bricks.RmsNorms = 2.0"))
    assert result.passed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[brick]\nRmsNorm = 1.0", r"'brick' - at brick; did you mean 'bricks'\?"),
        ("bricks = 3", r"expected a table \[bricks\]"),
        ("[bricks]\nRmsNorm = 0", "positive number of microseconds .* got 0 - at bricks.RmsNorm"),
        ("[bricks]\nRmsNorm = true", "got True"),
        ("[bricks]\nRmsNorm = nan", "got nan"),
        ("[bricks]\nRmsNorm = 'fast'", "got 'fast'"),
        ("[bricks]\nRmsNorm = { p98 = 1.0 }", "'p98' - at bricks.RmsNorm.p98; did you mean 'p9"),
        ("[bricks]\nHead = 1\nLmHead = 2", "one budget for LmHead"),
        ("[categories]\nAtention = 1.0", r"did you mean 'Attention'\?"),
        ("[categories]\nNorm = { p99 = 1.0 }", "expected one of avg, us_per_token"),
        ("[total]\nus_per_tokn = 1.0", r"did you mean 'us_per_token'\?"),
        ("", "found none"),
        ("[bricks", "expected TOML in some.toml"),
    ],
)
def test_a_file_that_means_nothing_is_refused(text: str, words: str):
    with pytest.raises(BudgetError, match=words) as caught:
        parse_budgets(text, source="some.toml")
    assert "some.toml" in str(caught.value)


def test_a_misspelt_brick_is_refused_once_the_run_is_known():
    budgets = parse_budgets("bricks.RmsNrom = 3.0", source="some.toml")
    with pytest.raises(BudgetError, match=r"some\.toml.*'RmsNrom'.*did you mean 'RmsNorm'\?"):
        check_budgets(profile_of(decode_part()), budgets)


def test_loading(tmp_path: Path):
    path = tmp_path / "budget.toml"
    with pytest.raises(BudgetError, match="No such file"):
        load_budgets(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(BudgetError, match="not UTF-8"):
        load_budgets(path)
    path.write_text("[total]\nus_per_token = 1")
    assert isinstance(load_budgets(path), Budgets)
    assert load_budgets(path).source == str(path)
