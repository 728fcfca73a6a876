"""Every README below examples/ is executed, command by command, and prints what it says.

A ``console`` block is run line by line in a copy of its folder; ``# exit status N`` at the end of a
line says how it ends. The ``text`` block below it is what the last command prints. Figures differ
between machines and versions, so a figure is compared as "a figure", and a curve as "a curve".
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from test_docs_examples import NOT_RUN, VARIES, blocks_of

import brickline

ROOT = Path(__file__).parents[2]
READMES = sorted((ROOT / "examples").glob("*/README.md"))
SCRIPTS = [
    path
    for path in sorted((ROOT / "examples").glob("*/*.py"))
    if re.search(r"^print", path.read_text(encoding="utf-8"), re.MULTILINE)
]
STATUS = re.compile(r"# exit status (\d)\b")
FIGURE = re.compile(r"(?<![\w.])[<>~]?\s*[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?(?!\w)|\binf\b|\bnan\b")


def identity(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def without_figures(text: str) -> list[str]:
    """Return the words of each line, without figures, rules and curves."""
    lines = []
    for line in text.strip("\n").splitlines():
        plain = re.sub(r"[▁▂▃▄▅▆▇█─]+", "", line)
        plain = re.sub(r"^.*▲.*$", "▲", plain)
        plain = " ".join(FIGURE.sub("#", plain).split())
        lines.append(plain)
    return lines


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    package = str(Path(brickline.__file__).parents[1])
    inherited = {key: value for key, value in os.environ.items() if key != "BRICKLINE_RUN"}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONIOENCODING": "utf-8",
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "BRICKLINE_CACHE": str(tmp_path / "cache"),
    }


def run(words: list[str], directory: Path, environment: dict[str, str], status: int) -> str:
    programs = {"python": [sys.executable], "brickline": [sys.executable, "-m", "brickline"]}
    done = subprocess.run(
        [*programs[words[0]], *words[1:]],
        cwd=directory,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == status, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("readme", READMES, ids=identity)
def test_the_commands_of_an_example_do_what_its_readme_says(
    readme: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    if readme.parent.name.startswith("hf_"):
        pytest.importorskip("transformers")
    directory = tmp_path / readme.parent.name
    shutil.copytree(readme.parent, directory, ignore=shutil.ignore_patterns("__pycache__"))
    blocks = blocks_of(readme)
    executed = 0
    for block, below in pairwise([*blocks, blocks[-1]]):
        if block.language != "console" or NOT_RUN.fullmatch(block.above):
            continue
        for line in block.text.splitlines():
            found = STATUS.search(line)
            words = shlex.split(line, comments=True)
            printed = run(words, directory, environment, int(found[1]) if found else 0)
            executed += 1
        if below.language == "text" and not below.gap and below.above != VARIES:
            assert without_figures(printed) == without_figures(below.text), identity(readme)
    assert executed


@pytest.mark.parametrize("script", SCRIPTS, ids=identity)
def test_scripts_of_an_example_run(
    script: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    directory = tmp_path / script.parent.name
    shutil.copytree(script.parent, directory, ignore=shutil.ignore_patterns("__pycache__"))
    assert run(["python", script.name], directory, environment, 0)


def test_every_folder_of_examples_has_a_readme_that_is_listed() -> None:
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for folder in sorted((ROOT / "examples").iterdir()):
        if folder.is_dir() and any(folder.glob("*.py")):
            assert (folder / "README.md").is_file()
            assert f"({folder.name}/README.md)" in listed
