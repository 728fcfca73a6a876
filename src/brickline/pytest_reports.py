"""What a failed test says and leaves behind: the culprit or the exceeded budget, JSON and a page.

Owns the words of a failure, and where reports lie; how a report looks is the matter of `report`.
A folder keeps the reports of each test's last run: a test's next run removes its old ones.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from brickline.budgets import BudgetResult, check_budgets
from brickline.checker import Progress, check
from brickline.errors import BricklineError, RunError
from brickline.profile import Profile
from brickline.profiler import BrickProfiler
from brickline.pytest_marks import budgets_of
from brickline.pytest_plugin import OPTION, PROPERTY
from brickline.report.as_json import profile_json
from brickline.report.divergence import detail_lines
from brickline.report.figures import Look
from brickline.report.html.divergence_page import write_divergence_page
from brickline.report.html.page import write_page
from brickline.report.html.profile_page import profile_page
from brickline.verdict import GUILTY, DivergenceReport, Status

MAX_TOLD = 3
"""Culprits, and notes on what was not seen, that a failure tells; the rest is counted."""
MAX_STEM = 80
"""Characters of a test's name in the names of its files."""

_fallback = pytest.StashKey[Path]()
_reports = pytest.StashKey["Reports"]()


class Reports:
    """The files of one test, by the name that its id gives them."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item
        self._directory = reports_directory(item.config)
        plain = re.sub(r"[^\w.-]+", "-", item.nodeid, flags=re.ASCII).replace(".py-", "-")
        digest = hashlib.sha256(item.nodeid.encode("utf-8", "replace")).hexdigest()[:8]
        self._stem = f"{plain[-MAX_STEM:].strip('-._')}-{digest}"
        self._count = 0

    @classmethod
    def begin(cls, item: pytest.Item) -> Reports:
        """Return the files of a test that begins; those of an earlier run are removed."""
        reports = item.stash[_reports] = cls(item)
        reports._forget()
        return reports

    @classmethod
    def of(cls, item: pytest.Item) -> Reports:
        """Return the files of a test that has begun."""
        return item.stash[_reports]

    @property
    def repro_directory(self) -> Path:
        """Where scripts go that show a culprit alone."""
        return self._directory / f"{self._stem}.repro"

    def _forget(self) -> None:
        old = [*self._directory.glob(f"{self._stem}*.json"), *self.repro_directory.glob("repro_*")]
        for path in [*old, *self._directory.glob(f"{self._stem}*.html")]:
            path.unlink(missing_ok=True)

    def leave(self, write: Callable[[Path, Path], object]) -> Iterator[str]:
        """Let a JSON document and a page be written, and give the lines that name them."""
        self._count += 1
        stem = self._stem if self._count == 1 else f"{self._stem}-{self._count}"
        document, page = (self._directory / f"{stem}.{kind}" for kind in ("json", "html"))
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            write(document, page)
        except (RunError, OSError) as error:
            yield f"  report   none: {error}"
            return
        self._item.user_properties.append((PROPERTY, str(page)))
        yield f"  report   {page}"
        yield f"           {document.name} beside it"


def reports_directory(config: pytest.Config) -> Path:
    """Return the folder that was asked for; else one in pytest's cache, else a temporary one."""
    given = config.getoption(OPTION)
    if given is not None:
        return Path(given)
    cache = getattr(config, "cache", None)
    if cache is not None:
        try:
            return Path(cache.mkdir("brickline"))
        except OSError:
            pass
    if _fallback not in config.stash:
        config.stash[_fallback] = Path(tempfile.mkdtemp(prefix="brickline-reports-"))
    return config.stash[_fallback]


@dataclass
class CandidateCheck:
    """What the fixture `brickline_check` gives a test."""

    item: pytest.Item
    reports: Reports = field(repr=False)

    def __call__(
        self,
        candidate: Any,
        *args: Any,
        reference: Any = None,
        drive: Callable[[Any], Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        accept: Any = None,
        progress: Progress | None = None,
        repro: Any = None,
        allow_inconclusive: bool = False,
    ) -> DivergenceReport:
        """Check as `brickline.check` does, and fail the test unless the two sides agree.

        Args:
            candidate: A `torch.nn.Module`, or any callable on tensors.
            *args: What to call it with, where `drive` is not given.
            reference: What it should compute. Default: each op's own float64.
            drive: Runs the candidate as its user does, in place of `args`.
            kwargs: Keyword arguments that go with `args`.
            accept: Differences that are intended: a path of a TOML file, or its entries.
            progress: Called with calls done, calls in all if known, and a word.
            repro: Directory for scripts that show each culprit alone; False for none. Default:
                beside the report.
            allow_inconclusive: Let the test pass where nothing was shown either way. Default
                False, because such a check would not notice a bug.
        """
        __tracebackhide__ = True
        mistake = None
        try:
            report = check(
                candidate,
                *args,
                reference=reference,
                drive=drive,
                kwargs=kwargs,
                accept=accept,
                progress=progress,
                repro=self.reports.repro_directory if repro is None else repro,
            )
        except BricklineError as error:
            mistake = str(error)
        if mistake is not None:
            pytest.fail(f"brickline_check: {mistake}")
        if report.matched or (allow_inconclusive and report.status is Status.INCONCLUSIVE):
            return report
        pytest.fail("\n".join([*divergence_words(report), *self._leave(report)]))

    def _leave(self, report: DivergenceReport) -> Iterator[str]:
        def write(document: Path, page: Path) -> None:
            report.save(document, overwrite=True)
            write_divergence_page(report, page, force=True)

        return self.reports.leave(write)


def divergence_words(report: DivergenceReport) -> Iterator[str]:
    """Give what a person needs first: the headline, then each culprit's place, cause and repro."""
    plain = Look().plain
    inconclusive = report.status is Status.INCONCLUSIVE
    first = report.headline
    yield plain(first)
    if inconclusive and report.coverage.compared:
        yield "  If that is enough for this test, pass allow_inconclusive=True."
    guilty = [each for each in report.findings if each.verdict in GUILTY]
    told = guilty[:MAX_TOLD] or [each for each in report.findings if each.reason][:MAX_TOLD]
    for finding in told:
        yield plain(f"  {finding.verdict}: {finding.name}")
        yield from (plain(f"    {label:<8} {text}") for label, text in detail_lines(finding))
    if len(guilty) > MAX_TOLD:
        yield f"  and {len(guilty) - MAX_TOLD} more"
    if inconclusive or not told:
        notes = [note for note in report.coverage.notes if note not in first]
        yield f"  Compared {report.coverage.compared} of {report.coverage.total}."
        yield from (plain(f"  not seen: {note}") for note in notes[:MAX_TOLD])


def hold_to_budgets(item: pytest.Item, profiler: BrickProfiler) -> None:
    """Fail the test where what it recorded exceeds a budget of its marks."""
    mistake, profile = None, profiler.profile()
    try:
        results = [each for given in budgets_of(item) for each in check_budgets(profile, given)]
    except BricklineError as error:
        mistake, results = str(error), []
    if mistake is not None:
        pytest.fail(f"brickline_budget: {mistake}", pytrace=False)
    if all(results):
        return
    words = budget_words(results)
    pytest.fail("\n".join([*words, *_leave(item, profile, results)]), pytrace=False)


def budget_words(results: Sequence[BudgetResult]) -> Iterator[str]:
    """Give the worst budget first, then all of them."""
    plain = Look().plain
    failed = [each for each in results if not each]
    worst = max(failed, key=lambda each: float("inf") if each.ratio is None else each.ratio)
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    yield plain(f"{worst}{more}")
    if len(results) > 1:
        for result in sorted(results, key=bool):
            yield plain(f"  {'ok' if result else 'FAILED':<8} {result}")


def leave_profile(item: pytest.Item, profiler: BrickProfiler) -> list[str]:
    """Leave the profile of a test that failed for a reason of its own; return lines that say so."""
    try:
        profile = profiler.profile()
    except BricklineError as error:
        return [f"  report   none: {error}"]
    return list(_leave(item, profile, None)) if profile.bricks else []


def _leave(
    item: pytest.Item, profile: Profile, results: Sequence[BudgetResult] | None
) -> Iterator[str]:
    def write(document: Path, page: Path) -> None:
        text = profile_json(profile, budgets=results)
        document.write_text(text, encoding="utf-8", errors="replace")
        write_page(profile_page(profile, budgets=results), page, force=True)

    return Reports.of(item).leave(write)
