"""Every README below examples/ is executed, command by command, and prints what it says.

How a page is followed is in `page_commands`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from page_commands import follow, page_environment, run

ROOT = Path(__file__).parents[2]
READMES = sorted((ROOT / "examples").glob("*/README.md"))
SCRIPTS = [
    path
    for path in sorted((ROOT / "examples").glob("*/*.py"))
    if path.parent.name != "gallery"  # run in test_gallery.py
    and re.search(r"^print", path.read_text(encoding="utf-8"), re.MULTILINE)
]


def identity(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("readme", READMES, ids=identity)
def test_the_commands_of_an_example_do_what_its_readme_says(readme: Path, tmp_path: Path) -> None:
    if readme.parent.name.startswith("hf_") or readme.parent.name == "gallery":
        pytest.importorskip("transformers")
    directory = tmp_path / readme.parent.name
    shutil.copytree(readme.parent, directory, ignore=shutil.ignore_patterns("__pycache__"))
    assert follow(readme, directory, page_environment(tmp_path))


@pytest.mark.parametrize("script", SCRIPTS, ids=identity)
def test_scripts_of_an_example_run(script: Path, tmp_path: Path) -> None:
    directory = tmp_path / script.parent.name
    shutil.copytree(script.parent, directory, ignore=shutil.ignore_patterns("__pycache__"))
    assert run(["python", script.name], directory, page_environment(tmp_path))


def test_every_folder_of_examples_has_a_readme_that_is_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for folder in sorted((ROOT / "examples").iterdir()):
        if folder.is_dir() and any(folder.glob("*.py")):
            assert (folder / "README.md").is_file()
            assert f"({folder.name}/README.md)" in listed
