"""Snapshots of the screen as text.

BRICKLINE_UPDATE_SNAPSHOTS=1 python -m pytest tests/tui     # writes them anew; review the diff
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textual", reason="the interface needs textual: pip install brickline[tui]")

from hand_made_process import screen_text
from textual.app import App

SNAPSHOTS = Path(__file__).parent / "snapshots"


@pytest.fixture
def check_snapshot() -> Callable[[App[Any], str], None]:
    def check(app: App[Any], name: str) -> None:
        file, shown = SNAPSHOTS / f"{name}.txt", screen_text(app)
        if os.environ.get("BRICKLINE_UPDATE_SNAPSHOTS"):
            file.write_text(shown, encoding="utf-8")
        assert shown == file.read_text(encoding="utf-8")

    return check
