"""Pages in a real Chromium, through Playwright; without them everything here is skipped.

A test opens a page with `open_page`. An error on the page or in its console, or a request for
anything but the file itself, fails the test at its end. `Opened.shoot` keeps a picture in
``artefacts/`` beside this file, which git ignores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import chromium, what_is_missing

ARTEFACTS = Path(__file__).parent / "artefacts"
READY_MS = 20_000
"""The most that a page may take on a busy machine; what it should take, a benchmark says."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = what_is_missing()
    for item in items:
        if "tests/browser/" in item.path.as_posix() and reason:
            item.add_marker(pytest.mark.skip(reason=reason))


class Opened:
    """One page in a window of its own, and what went wrong in it."""

    def __init__(self, context: Any) -> None:
        self.page = context.new_page()
        self.page.set_default_timeout(READY_MS)
        self.problems: list[str] = []
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        self.page.on("request", self._request)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.problems.append(f"console {message.type}: {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith(("file:", "data:")):
            self.problems.append(f"it asked for {request.url}")

    def load(self, path: Path) -> Opened:
        """Open a file and wait until every section is built."""
        self.page.goto(path.resolve().as_uri())
        self.page.wait_for_selector("html[data-ready=yes]", state="attached")
        return self

    def shoot(self, name: str, *, whole: bool = True) -> Path:
        """Keep a picture of the page, or of the window, as a test artefact."""
        ARTEFACTS.mkdir(exist_ok=True)
        path = ARTEFACTS / f"{name}.png"
        self.page.screenshot(path=str(path), full_page=whole)
        return path

    def text(self, selector: str) -> str:
        """Return the text of the first element that matches, as it is seen."""
        return str(self.page.locator(selector).first.inner_text())

    @property
    def overflow_px(self) -> int:
        """How many pixels the page is wider than its window."""
        root = "document.documentElement"
        return int(self.page.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))


# Of a module, not of the session: while Playwright's loop runs, no test may run one of its own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A Chromium with a profile of its own."""
    with chromium() as started:
        yield started


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Opened]]:
    """Open pages: ``open_page(path, width=360, theme="dark")`` gives an `Opened`."""
    opened: list[Opened] = []

    def open_one(
        path: Path, *, width: int = 1280, height: int = 900, theme: str = "light", **options: Any
    ) -> Opened:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, **options
        )
        opened.append(Opened(context))
        return opened[-1].load(path)

    yield open_one
    for each in opened:
        each.page.context.close()
    problems = [problem for each in opened for problem in each.problems]
    assert not problems, "the page is not clean:\n" + "\n".join(problems)
