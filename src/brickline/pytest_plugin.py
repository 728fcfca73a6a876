"""The pytest plugin: `brickline_check`, `brickline_profiler`, and budgets of bricks as marks.

Owns the option, the marks, the fixtures, and when each comes into play. pytest loads it wherever
brickline is installed, so it imports pytest alone: what marks mean is in `pytest_marks`, what a
failed test says and leaves behind in `pytest_reports`, both loaded by the first test that asks.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from brickline.profiler import BrickProfiler
    from brickline.pytest_reports import CandidateCheck, Reports

OPTION = "--brickline-reports"
MARKS = {
    "brickline_budget": (
        "brickline_budget(brick, avg_us=None, *, category=None, file=None, **limits_us): "
        "fail the test when what brickline_profiler recorded takes longer, for example "
        '("RmsNorm", p99_us=30.0), (us_per_token=2500.0) or (file="budgets.toml")'
    ),
    "brickline_profiler": (
        "brickline_profiler(*, device, stream, sync_mode, sampling, timeline_steps, graph): "
        "how the fixture brickline_profiler records"
    ),
}
PROPERTY = "brickline_report"
"""Name of the property under which a test's reports travel, also to JUnit's XML."""

_HELD = "brickline-held-tests"
_profiler = pytest.StashKey["BrickProfiler"]()
_left = pytest.StashKey[bool]()
"""Whether the budgets were asked, and have said themselves what there is to say."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the one option."""
    parser.getgroup("brickline").addoption(
        OPTION,
        metavar="DIR",
        help="Where reports of failed checks and budgets go; default: in pytest's cache.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks, and refuse a folder for reports that is none."""
    for line in MARKS.values():
        config.addinivalue_line("markers", line)
    given = config.getoption(OPTION)
    if given is None:
        return
    directory = Path(config.invocation_params.dir, given)
    if directory.exists() and not directory.is_dir():
        raise pytest.UsageError(f"{OPTION}: expected a folder, got the file {directory}")
    # Workers of pytest-xdist are given the options, and may have another working directory.
    config.option.brickline_reports = str(directory)


@pytest.fixture
def _brickline_reports(request: pytest.FixtureRequest) -> Reports:
    """Return where the test's reports go, once for each time that it runs."""
    from brickline.pytest_reports import Reports

    return Reports.begin(request.node)


@pytest.fixture
def brickline_check(request: pytest.FixtureRequest, _brickline_reports: Reports) -> CandidateCheck:
    """Check a candidate against a reference as `brickline.check` does; a culprit fails the test.

    Called with the arguments of `brickline.check`, it returns the report. The test fails with the
    culprit's name, place, cause and repro, and a report is left behind. A check that shows nothing
    either way fails too, unless it is called with ``allow_inconclusive=True``.
    """
    from brickline.pytest_reports import CandidateCheck

    return CandidateCheck(request.node, _brickline_reports)


@pytest.fixture
def brickline_profiler(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    _brickline_reports: Reports,
) -> Iterator[BrickProfiler]:
    """Return an enabled `BrickProfiler`, whose figures are held to the test's budgets.

    The mark ``brickline_profiler(device="CUDA:0", ...)`` says how it records.
    """
    from brickline.pytest_marks import open_profiler

    _hold_tests(request.config)
    request.node.stash[_left] = False
    run = tmp_path_factory.mktemp("brickline") / "run.brick"
    profiler = open_profiler(request.node, run)
    request.node.stash[_profiler] = profiler
    try:
        yield profiler
    finally:
        del request.node.stash[_profiler]
        profiler.close()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Act on tests only where one of them has a mark of ours."""
    if any(_is_marked(item) for item in session.items):
        _hold_tests(session.config)


def _is_marked(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in MARKS)


def _hold_tests(config: pytest.Config) -> None:
    """Let the hooks below run for each test; without them other people's tests cost nothing."""
    if not config.pluginmanager.has_plugin(_HELD):
        config.pluginmanager.register(HeldTests(), _HELD)


class HeldTests:
    """What happens around each test, where some test has a mark or a profiler."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Refuse marks that mean nothing before the test runs."""
        if _is_marked(item):
            from brickline.pytest_marks import check_marks

            check_marks(item)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Hold what a passing test recorded to its budgets."""
        result = yield
        profiler = item.stash.get(_profiler, None)
        if profiler is not None and item.get_closest_marker("brickline_budget") is not None:
            from brickline.pytest_reports import hold_to_budgets

            item.stash[_left] = True
            hold_to_budgets(item, profiler)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Leave the profile of a test behind that failed for another reason than its budgets."""
        report = yield
        profiler = item.stash.get(_profiler, None)
        if profiler is None or call.when != "call" or not report.failed or item.stash[_left]:
            return report
        from brickline.pytest_reports import leave_profile

        lines = leave_profile(item, profiler)
        if lines:
            report.sections.append(("brickline", "\n".join(lines)))
            report.user_properties = list(item.user_properties)
        return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the reports of the tests that failed."""
    found: dict[str, None] = {}
    for outcome in ("failed", "error"):
        for report in terminalreporter.stats.get(outcome, ()):
            properties = getattr(report, "user_properties", ())
            found |= {str(value): None for name, value in properties if name == PROPERTY}
    if found:
        terminalreporter.write_sep("=", "brickline reports")
        for path in found:
            terminalreporter.write_line(path)
