"""Pages as a stranger follows them, from the top down, in a folder of their own.

A ``python`` or ``toml`` block whose first line is ``# NAME.py`` or ``# NAME.toml`` is written to
that file. A ``console`` block is run line by line; ``# exit status N`` at the end of a line says
how it ends. The ``text`` block below it is what the last command prints. Figures differ between
machines and versions, so a figure is compared as "a figure", and a curve as "a curve". Where more
than figures depends on how a processor rounds, ``<!-- output varies below the first line -->``
stands above the text. What `test_docs_examples` says of marks above a block holds here too.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import unified_diff
from itertools import pairwise
from pathlib import Path

from test_docs_examples import NOT_RUN, VARIES, Block, blocks_of

import brickline

VARIES_BELOW = "<!-- output varies below the first line -->"
STATUS = re.compile(r"# exit status (\d)\b")
FILE = re.compile(r"# (\w+\.(?:py|toml))")
FIGURE = re.compile(r"(?<![\w.])[<>~]?\s*[-+]?\d+(?:[.,]\d+)*(?:e[-+]?\d+)?(?!\w)|\binf\b|\bnan\b")
PROGRAMS = {
    "python": [sys.executable],
    "brickline": [sys.executable, "-m", "brickline"],
    "pytest": [sys.executable, "-m", "pytest"],
}


def page_environment(state: Path) -> dict[str, str]:
    """Return that of a stranger: this brickline, its plugin for pytest, and a state of its own."""
    package = str(Path(brickline.__file__).parents[1])
    inherited = {key: value for key, value in os.environ.items() if key != "BRICKLINE_RUN"}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONIOENCODING": "utf-8",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTEST_PLUGINS": "brickline.pytest_plugin",
        "COLUMNS": "80",
        "NO_COLOR": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "XDG_STATE_HOME": str(state / "state"),
    }


def run(
    words: Sequence[str], directory: Path, environment: Mapping[str, str], status: int = 0
) -> str:
    """Run a command of a page, and return what it prints."""
    done = subprocess.run(
        [*PROGRAMS[words[0]], *words[1:]],
        cwd=directory,
        env=environment,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert done.returncode == status, f"{shlex.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def follow(
    page: Path,
    directory: Path,
    environment: Mapping[str, str],
    *,
    runner: Callable[..., str] = run,
    compare: bool = True,
) -> int:
    """Write the files of a page and run its commands; return how many were run.

    Args:
        page: The page.
        directory: Where.
        environment: Of the commands; see `page_environment`.
        runner: Called in place of `run`.
        compare: Whether what is printed has to be what the page says.
    """
    blocks, executed = blocks_of(page), 0
    for block, below in pairwise([*blocks, blocks[-1]]):
        if NOT_RUN.fullmatch(block.above):
            continue
        _write(block, directory)
        if block.language != "console":
            continue
        for line in block.text.splitlines():
            found = STATUS.search(line)
            words = shlex.split(line, comments=True)
            printed = runner(words, directory, environment, int(found[1]) if found else 0)
            executed += 1
        told = below.language == "text" and not below.gap and below.above != VARIES
        if compare and told:
            said, shown = without_figures(below.text), without_figures(printed)
            if below.above == VARIES_BELOW:
                said, shown = said[:1], shown[:1]
            place = f"{page.name}:{below.line}"
            assert said == shown, "\n".join(unified_diff(said, shown, place, "printed"))
    return executed


def _write(block: Block, directory: Path) -> None:
    found = FILE.fullmatch(block.text.partition("\n")[0])
    if block.language in ("python", "toml") and found:
        (directory / found[1]).write_text(block.text + "\n", encoding="utf-8")


def without_figures(text: str) -> list[str]:
    """Return the words of each line, without figures, rules and curves."""
    lines = []
    for line in text.strip("\n").splitlines():
        plain = re.sub(r"[▁▂▃▄▅▆▇█─]+", "", line)
        plain = re.sub(r"^.*▲.*$", "▲", plain)
        plain = " ".join(FIGURE.sub("#", plain).split())
        lines.append(plain)
    return lines
