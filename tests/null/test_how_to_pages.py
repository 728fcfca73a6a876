"""The how-to pages: those without PyTorch are followed here, and all of them have a picture.

How a page is followed is in `page_commands`; what pictures there are, in docs/pictures/make.py.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from page_commands import follow, page_environment

ROOT = Path(__file__).parents[2]
HOW_TO = sorted((ROOT / "docs" / "how-to").glob("*.md"))
PICTURES = ROOT / "docs" / "pictures"
MENTION = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)|(?:src|srcset)=\"([^\"]+)\"")
MOST_BYTES = 1_500_000


def needs_torch(page: Path) -> bool:
    return "import torch" in page.read_text(encoding="utf-8")


def pictures_of(page: Path) -> set[Path]:
    """Return the pictures that a page shows."""
    found = MENTION.finditer(page.read_text(encoding="utf-8"))
    return {(page.parent / (each[1] or each[2])).resolve() for each in found}


def made() -> set[Path]:
    """Return what the maker of pictures says that it makes."""
    spec = importlib.util.spec_from_file_location("make_pictures", PICTURES / "make.py")
    assert spec is not None
    assert spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = maker  # where dataclasses look for their module
    spec.loader.exec_module(maker)
    return {PICTURES / name for name in maker.names()}


@pytest.mark.parametrize("page", [p for p in HOW_TO if not needs_torch(p)], ids=lambda p: p.stem)
def test_a_how_to_page_can_be_followed(page: Path, tmp_path: Path) -> None:
    directory = tmp_path / "here"
    directory.mkdir()
    assert follow(page, directory, page_environment(tmp_path))


@pytest.mark.parametrize("page", [*HOW_TO, ROOT / "README.md"], ids=lambda p: p.stem)
def test_a_page_shows_a_picture(page: Path) -> None:
    assert pictures_of(page)


def test_pages_show_every_picture_that_is_made_and_no_other() -> None:
    pages = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
    shown = set().union(*map(pictures_of, pages))
    kept = {path for path in PICTURES.iterdir() if path.suffix in (".png", ".svg")}
    assert shown == made() == kept


def test_pictures_are_small_and_load_nothing() -> None:
    assert sum(path.stat().st_size for path in made()) < MOST_BYTES
    for path in made():
        if path.suffix == ".svg":
            text = path.read_text(encoding="utf-8").replace("http://www.w3.org/", "")
            assert "http" not in text, path.name
            assert "@import" not in text, path.name
