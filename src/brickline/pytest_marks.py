"""What the marks of the pytest plugin mean: budgets, and how a test's profiler records.

Reads marks into the values of `budgets` and the options of `BrickProfiler`. A mark that cannot be
understood ends its test in setup, with words and without a traceback: a budget that nobody checks
would otherwise pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pytest

from brickline.bricks import BrickId
from brickline.budgets import Budget, Budgets, budgets_from_document, load_budgets
from brickline.errors import BricklineError, UsageError
from brickline.profiler import BrickProfiler

EXAMPLE = '@pytest.mark.brickline_budget("RmsNorm", p99_us=30.0)'
OPTIONS = ("device", "stream", "sync_mode", "sampling", "timeline_steps", "graph")
"""What the mark may ask of a profiler; its name and place are the test's."""


def check_marks(item: pytest.Item) -> None:
    """Fail the test's setup unless its marks can be understood and have a profiler to act on."""
    try:
        marks = [name for name in ("brickline_budget", "brickline_profiler") if _has(item, name)]
        if "brickline_profiler" not in getattr(item, "fixturenames", ()):
            raise UsageError(
                f"the mark {marks[0]} acts on what the fixture brickline_profiler records, and "
                "the test does not use it; add brickline_profiler to the test's arguments"
            )
        budgets_of(item)
        profiler_options(item)
    except BricklineError as error:
        words = str(error)
    else:
        return
    pytest.fail(f"brickline: {words}", pytrace=False)


def open_profiler(item: pytest.Item, path: Path) -> BrickProfiler:
    """Return an enabled profiler of the test, recording into a run at `path`."""
    try:
        return BrickProfiler(item.name, enabled=True, path=path, **profiler_options(item))
    except BricklineError as error:
        words = str(error)
    pytest.fail(f"brickline_profiler: {words}", pytrace=False)


def _has(item: pytest.Item, name: str) -> bool:
    return item.get_closest_marker(name) is not None


def profiler_options(item: pytest.Item) -> Mapping[str, Any]:
    """Return how the test's profiler records: the nearest mark's options.

    Raises:
        UsageError: if the mark has an argument that means nothing.
    """
    mark = item.get_closest_marker("brickline_profiler")
    if mark is None:
        return {}
    if mark.args:
        raise UsageError(
            f"expected keywords in the mark brickline_profiler, got {mark.args[0]!r}; for example "
            '@pytest.mark.brickline_profiler(device="CUDA:0")'
        )
    for key in mark.kwargs:
        if key not in OPTIONS:
            close = get_close_matches(key, OPTIONS, n=1, cutoff=0.6)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(
                f"expected one of {', '.join(OPTIONS)} in the mark brickline_profiler, "
                f"got {key!r}{hint}"
            )
    return mark.kwargs


def budgets_of(item: pytest.Item) -> list[Budgets]:
    """Return the limits of a test's marks; of two for one figure, that of the nearer mark.

    Raises:
        BudgetError: if a limit means nothing, or a file cannot be read.
        UsageError: if a mark is written in no known way, or one test has two limits for a figure.
    """
    found: list[Budgets] = []
    set_by: dict[str, object] = {}
    for node, mark in item.iter_markers_with_node("brickline_budget"):
        made = _budgets(mark, item)
        kept = [each for each in made.budgets if _is_nearest(each, node, set_by, made.source)]
        found.append(Budgets(tuple(kept), made.source))
    # Marks come nearest first; people read them from the outside in.
    return found[::-1]


def _is_nearest(budget: Budget, node: object, set_by: dict[str, object], source: str) -> bool:
    if budget.key not in set_by:
        set_by[budget.key] = node
        return True
    if set_by[budget.key] is node:
        raise UsageError(f"expected one limit for {budget.key} in {source}, got two")
    return False


def _budgets(mark: pytest.Mark, item: pytest.Item) -> Budgets:
    source = f"the mark brickline_budget of {item.name}"
    limits = dict(mark.kwargs)
    category, file = limits.pop("category", None), limits.pop("file", None)
    if file is not None:
        if mark.args or category is not None or limits:
            raise UsageError(f"expected file= alone in {source}; write a second mark for the rest")
        return load_budgets(item.path.parent / file)
    return budgets_from_document(dict(_tables(mark.args, category, limits, source)), source)


def _tables(
    args: tuple[Any, ...], category: Any, limits: dict[str, Any], source: str
) -> Iterator[tuple[str, Any]]:
    """Give the one table that a budget file would hold for this mark."""
    if len(args) > 2:
        raise UsageError(f"expected a brick and its average in {source}, got {args!r}")
    if len(args) == 2:
        limits = {"avg": args[1]} | limits
    if not limits:
        raise UsageError(f"expected a limit in {source}, got none; for example {EXAMPLE}")
    brick = args[0] if args else None
    name = brick.label if isinstance(brick, BrickId) else brick
    if args and category is not None:
        raise UsageError(f"expected a brick or category= in {source}, got both")
    if args and not (isinstance(name, str) and name):
        raise UsageError(
            f"expected the name of a brick in {source}, got {brick!r}; for example {EXAMPLE}"
        )
    if category is not None:
        yield "categories", {str(category): limits}
    elif args:
        yield "bricks", {name: limits}
    else:
        yield "total", limits
