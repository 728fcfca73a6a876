"""Every how-to page that needs PyTorch can be followed: see `page_commands`."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_commands import follow, page_environment
from test_how_to_pages import HOW_TO, needs_torch

PAGES = [page for page in HOW_TO if needs_torch(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_how_to_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    directory = tmp_path / "here"
    directory.mkdir()
    assert follow(page, directory, page_environment(tmp_path))
