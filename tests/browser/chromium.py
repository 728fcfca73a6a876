"""A Chromium with a profile of its own, through Playwright: for tests, and pictures of docs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def _program() -> str | None:
    named = os.environ.get("BRICKLINE_CHROMIUM")
    return named or next(filter(None, map(shutil.which, PROGRAMS)), None)


def what_is_missing() -> str | None:
    """Return in words what is needed and not there."""
    if _program() is None:
        return "chromium is not on PATH (apt-get install chromium)"
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed (pip install playwright)"
    return None


@contextmanager
def chromium() -> Iterator[Any]:
    """Start a browser, and end it."""
    from playwright.sync_api import sync_playwright

    with (
        tempfile.TemporaryDirectory(prefix="brickline-chromium-") as home,
        sync_playwright() as play,
    ):
        started = play.chromium.launch(
            executable_path=_program(), args=QUIET, env={**os.environ, "HOME": home}
        )
        try:
            yield started
        finally:
            started.close()
