"""Every example in README, docs and examples runs, and prints what the page says it prints.

The ``python`` blocks of a page share one namespace and run in order. A ``text`` block that follows
one is what it prints. A comment directly above a block says otherwise:

- ``<!-- not run: reason -->``: the block is not executed.
- ``<!-- output: FILE -->``: the block is a part of FILE, which is executed instead.
- ``<!-- output varies -->``: the text is real output of some machine, and is not compared.

Links, anchors and verbs are checked in ``tests/contracts/test_docs.py``.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

import brickline

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
SCRIPTS = sorted(EXAMPLES.glob("*.py"))

NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
PART_OF = re.compile(r"<!-- output: (\S+) -->")
VARIES = "<!-- output varies -->"

DRIVER = """
import contextlib, io, json, sys
namespace = {"__name__": "__main__"}
printed = []
for page, line, code in json.load(sys.stdin):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\\n" * line + code, page, "exec"), namespace)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""
"""Executes blocks, padded so that a traceback gives the page's line, and says what each printed."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    line: int
    """Of its fence, from 1 on."""
    text: str
    above: str
    """The line directly above its fence."""
    gap: bool
    """Whether prose stands between it and the block before it."""


def blocks_of(page: Path) -> list[Block]:
    return list(_blocks(page.read_text(encoding="utf-8").splitlines()))


def _blocks(lines: Sequence[str]) -> Iterator[Block]:
    at, end_of_last = 0, -1
    while at < len(lines):
        if not lines[at].startswith("```"):
            at += 1
            continue
        end = next(n for n in range(at + 1, len(lines)) if lines[n].startswith("```"))
        between = [line for line in lines[end_of_last + 1 : at] if line and "<!--" not in line]
        yield Block(
            language=lines[at].removeprefix("```").strip(),
            line=at + 1,
            text="\n".join(lines[at + 1 : end]),
            above=lines[at - 1] if at else "",
            gap=bool(between),
        )
        at, end_of_last = end + 1, end


def runs(block: Block) -> bool:
    marked = NOT_RUN.fullmatch(block.above) or PART_OF.fullmatch(block.above)
    return block.language == "python" and not marked


def outputs(blocks: Sequence[Block]) -> dict[int, str]:
    """Return the text that stands below a block, by the block's line."""
    return {
        block.line: text.text
        for block, text in pairwise(blocks)
        if runs(block) and text.language == "text" and not text.gap and text.above != VARIES
    }


def identity(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a stranger: this brickline, a state directory of its own, and one BLAS thread."""
    inherited = {key: value for key, value in os.environ.items() if key != "BRICKLINE_RUN"}
    package = str(Path(brickline.__file__).parents[1])
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONIOENCODING": "utf-8",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "OPENBLAS_NUM_THREADS": "1",
    }


def finish(
    command: Sequence[str], directory: Path, environment: dict[str, str], given: str = ""
) -> str:
    done = subprocess.run(
        command,
        cwd=directory,
        env=environment,
        input=given,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip("\n").splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_python_blocks_run_and_print_what_the_page_says(
    page: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    blocks = blocks_of(page)
    executed = [block for block in blocks if runs(block)]
    if not executed:
        return
    if any("import torch" in block.text for block in executed) and not find_spec("torch"):
        pytest.skip("the page's examples need torch")
    if any("brickline.query" in block.text for block in executed) and not find_spec("duckdb"):
        pytest.skip("the page's examples need duckdb, which is not installed")
    given = json.dumps([(identity(page), block.line, block.text) for block in executed])
    command = [sys.executable, "-W", "error", "-c", DRIVER]
    printed = json.loads(finish(command, tmp_path, environment, given))
    expected = outputs(blocks)
    for block, out in zip(executed, printed, strict=True):
        if block.line in expected:
            assert trimmed(out) == trimmed(expected[block.line]), f"{identity(page)}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_blocks_that_are_parts_of_an_example_stand_in_it(page: Path) -> None:
    for block in blocks_of(page):
        found = PART_OF.fullmatch(block.above)
        if block.language != "python" or found is None:
            continue
        source = (ROOT / found[1]).read_text(encoding="utf-8")
        plain = re.sub(r" *# (noqa|fmt)\b.*", "", source)
        assert block.text in plain, f"{identity(page)}:{block.line} differs from {found[1]}"


@pytest.mark.parametrize("script", SCRIPTS, ids=identity)
def test_examples_run(script: Path, tmp_path: Path, environment: dict[str, str]) -> None:
    out = finish([sys.executable, "-W", "error", str(script)], tmp_path, environment)
    assert "Bricks" in out


def commands_of(page: Path) -> list[list[str]]:
    """Return the commands of a page's console blocks, with this Python in place of the user's."""
    call = [sys.executable, "-c", "from brickline.commands import main; main()"]
    replaced = {"python": [sys.executable], "brickline": call}
    found = []
    for block in blocks_of(page):
        lines = block.text.splitlines() if block.language == "console" else []
        for program, *arguments in (shlex.split(line, comments=True) for line in lines):
            found.append([*replaced[program], *arguments])
    return found


def test_the_commands_of_the_examples_readme_run(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    directory = tmp_path / "examples"
    shutil.copytree(EXAMPLES, directory, ignore=shutil.ignore_patterns("*.brick", "__pycache__"))
    commands = commands_of(EXAMPLES / "README.md")
    assert commands
    for command in commands:
        finish(command, directory, environment)
    assert (directory / "again.brick" / "manifest.json").is_file()
