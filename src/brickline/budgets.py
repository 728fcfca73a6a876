"""Budgets: how long bricks, categories and tokens may take, written in TOML and held to a profile.

::

    [bricks]
    RmsNorm = 3.0                                  # a bare number: average microseconds per entry
    AttentionScore = { avg = 12.0, p99 = 30.0 }    # microseconds; avg p50 p90 p99 p999 max
    LmHead = { us_per_token = 600.0 }              # all its entries together, per token

    [categories]
    Attention = { us_per_token = 900.0 }

    [total]
    us_per_token = 2500.0

An exceeded budget is a result, not an exception. A file that cannot be understood is an exception,
because a typo would otherwise be a budget that nobody checks.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any, Literal, TypeAlias

from brickline.bricks import BrickCategory, BrickId
from brickline.errors import BudgetError
from brickline.files.paths import given_path
from brickline.profile import Profile
from brickline.stats import BrickStats, CategoryStats

Scope: TypeAlias = Literal["bricks", "categories", "total"]

PER_TOKEN = "us_per_token"
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
METRICS: Mapping[Scope, tuple[str, ...]] = {
    "bricks": ("avg", *_QUANTILES, "max", PER_TOKEN),
    "categories": ("avg", PER_TOKEN),
    "total": (PER_TOKEN,),
}
"""What can be limited; a trailing ``_us`` is allowed on all but the last."""


@dataclass(frozen=True)
class Budget:
    """One limit."""

    scope: Scope
    name: str
    """Of the brick or category; empty for the total."""
    metric: str
    limit_us: float

    @property
    def key(self) -> str:
        """Where it stands in the file."""
        return ".".join(part for part in (self.scope, self.name, self.metric) if part)


@dataclass(frozen=True)
class Budgets:
    """The limits of one file."""

    budgets: tuple[Budget, ...]
    source: str = "budgets"
    """Where they come from, for messages."""


@dataclass(frozen=True)
class BudgetResult:
    """One limit held to a profile."""

    budget: Budget
    measured_us: float | None
    """None where the run does not contain it; that counts as failed."""

    @property
    def passed(self) -> bool:
        """Whether it was measured and kept."""
        return self.measured_us is not None and self.measured_us <= self.budget.limit_us

    @property
    def ratio(self) -> float | None:
        """Measured over limit."""
        return None if self.measured_us is None else self.measured_us / self.budget.limit_us

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        key, limit = self.budget.key, self.budget.limit_us
        if self.measured_us is None:
            return f"{key}: not measured, limit {limit:g} µs; the run has no such figure"
        words = "within" if self.passed else "exceeds"
        return f"{key}: {self.measured_us:.2f} µs {words} {limit:g} µs ({self.ratio:.2f} of it)"


def load_budgets(path: str | os.PathLike[str]) -> Budgets:
    """Read a budget file.

    Raises:
        BudgetError: if it is not there, is not TOML, or has a key or value that means nothing.
    """
    where = str(path)
    try:
        text = given_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise BudgetError(f"expected a budget file at {where}, but {reason}") from None
    return parse_budgets(text, source=where)


def parse_budgets(text: str, source: str = "budgets") -> Budgets:
    """Read budgets from TOML; see `load_budgets`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BudgetError(f"expected TOML in {source}: {error}") from None
    return budgets_from_document(document, source)


def budgets_from_document(document: Mapping[str, Any], source: str = "budgets") -> Budgets:
    """Read budgets from the tables that a file would hold; see `load_budgets`."""
    budgets: list[Budget] = []
    for scope, table in document.items():
        known = _known_key(scope, METRICS, source, scope)
        if not isinstance(table, dict):
            raise BudgetError(
                f"expected a table [{scope}] in {source}, got {table!r} - at {scope}; "
                f"write [{scope}] on a line of its own and the limits below it"
            )
        budgets += _parse_table(known, table, source)
    if not budgets:
        raise BudgetError(f"expected limits in {source}, found none; write for example {_EXAMPLE}")
    return Budgets(tuple(budgets), source)


_EXAMPLE = "[total] us_per_token = 2500.0"


def _known_key(key: str, known: Iterable[Any], source: str, at: str) -> Any:
    names = list(known)
    if key in names:
        return key
    raise BudgetError(
        f"expected one of {', '.join(names)} in {source}, got {key!r} - at {at}"
        f"{_nearest(key, names)}"
    )


def _nearest(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _parse_table(scope: Scope, table: dict[str, Any], source: str) -> list[Budget]:
    if scope == "total":
        return _parse_limits(scope, "", table, source)
    budgets: list[Budget] = []
    for key, value in table.items():
        name = _category_name(key, source) if scope == "categories" else _brick_name(key)
        if any(budget.name == name for budget in budgets):
            raise BudgetError(f"expected one budget for {name} in {source}, got two - at {key}")
        limits = value if isinstance(value, dict) else {"avg": value}
        budgets += _parse_limits(scope, name, limits, source)
    return budgets


def _category_name(key: str, source: str) -> str:
    labels = [category.label for category in BrickCategory]
    return str(_known_key(key, labels, source, f"categories.{key}"))


def _brick_name(key: str) -> str:
    known = BrickId.from_name(key)
    return key if known is None else known.label


def _parse_limits(scope: Scope, name: str, limits: dict[str, Any], source: str) -> list[Budget]:
    budgets = []
    for key, value in limits.items():
        at = ".".join(part for part in (scope, name, key) if part)
        metric = key if key == PER_TOKEN else key.removesuffix("_us")
        _known_key(metric, METRICS[scope], source, at)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (is_number and isfinite(value) and value > 0):
            raise BudgetError(
                f"expected a positive number of microseconds in {source}, got {value!r} - at {at}"
            )
        budgets.append(Budget(scope, name, metric, float(value)))
    return budgets


def check_budgets(profile: Profile, budgets: Budgets) -> list[BudgetResult]:
    """Hold every limit to a profile, in the order of the file.

    Raises:
        BudgetError: if a budget names a brick that neither the run nor the vocabulary has, and
            that reads like one of them. A name like none of them is reported as not measured.
    """
    names = {row.name for row in profile.bricks}
    for budget in budgets.budgets:
        if budget.scope == "bricks":
            _refuse_typo(budget, names, budgets.source)
    return [BudgetResult(budget, _measure_us(profile, budget)) for budget in budgets.budgets]


def _refuse_typo(budget: Budget, names: set[str], source: str) -> None:
    if budget.name in names or BrickId.from_name(budget.name) is not None:
        return
    known = names | {brick.label for brick in BrickId.ALL}
    hint = _nearest(budget.name, sorted(known))
    if hint:
        raise BudgetError(
            f"expected a brick of the run in {source}, got {budget.name!r}"
            f" - at bricks.{budget.name}{hint}"
        )


def _measure_us(profile: Profile, budget: Budget) -> float | None:
    if budget.scope == "total":
        return profile.us_per_token
    if budget.scope == "bricks":
        brick = profile.brick(budget.name)
        return None if brick is None else _measure_brick(profile, brick, budget.metric)
    category = next((row for row in profile.categories.values() if row.name == budget.name), None)
    return None if category is None else _measure_category(profile, category, budget.metric)


def _measure_brick(profile: Profile, brick: BrickStats, metric: str) -> float | None:
    if not brick.timed:
        return None
    if metric == PER_TOKEN:
        rows = [row for row in profile.brick_phases if row.name == brick.name]
        return _per_token(profile, {row: row.estimated_total_ns for row in rows})
    if metric in _QUANTILES:
        return brick.quantile_ns(_QUANTILES[metric]) / 1e3
    return brick.max_us if metric == "max" else brick.avg_us


def _measure_category(profile: Profile, category: CategoryStats, metric: str) -> float | None:
    if not category.timed:
        return None
    if metric == "avg":
        return category.avg_us
    rows = [row for row in profile.brick_phases if row.category.label == category.name]
    # Exclusive time, so that a brick within a brick of the category counts once.
    return _per_token(profile, {row: row.share_ns for row in rows})


def _per_token(profile: Profile, times_ns: Mapping[BrickStats, float]) -> float | None:
    """Return the time per token: of the decode phase, where the run has one."""
    if profile.decode is None or not profile.decode.tokens:
        return None
    in_decode = [
        time_ns
        for row, time_ns in times_ns.items()
        if "decode" not in profile.steps or row.phase == "decode"
    ]
    return sum(in_decode) / 1e3 / profile.decode.tokens
