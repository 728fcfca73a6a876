"""Each bug of examples/gallery is put on the module that has it, as docs/gallery.md says.

BRICKLINE_UPDATE_SNAPSHOTS=1 writes what the examples print into the page; review the diff and the
prose around it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from page_commands import page_environment, run, without_figures
from test_docs_examples import PART_OF, Block, blocks_of

import brickline as bl

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "examples" / "gallery"
PAGE = ROOT / "docs" / "gallery.md"
HELD = ("original", "port")
"""Modules that the examples import."""

CULPRITS = {
    "decode_position": r"blocks\.\d\.attention\.rotary",
    "exact_gelu": r"blocks\.\d\.feed",
    "norm_eps": r"norm|blocks\.\d\.norm_\d",
    "norm_offset": r"norm|blocks\.\d\.norm_\d",
    "padding": r"blocks\.0\.attention",
    "residual_per_rank": r"blocks\.\d",
    "rope_pairs": r"blocks\.\d\.attention\.rotary",
    "rounded_norm": r"norm|blocks\.\d\.norm_\d",
    "routing": r"blocks\.\d\.feed",
    "shared_keys": r"blocks\.\d\.attention",
    "sliding_window": r"blocks\.\d\.attention",
    "soft_cap": r"blocks\.\d\.attention",
}
"""The modules that are wrong, by example."""
UNSEEN = {
    "padding": "what is not finite ends the search in float64, and no module is named",
    "rounded_norm": "each op rounds as its dtype allows",
}
"""Examples in which `check` names nothing."""
HEALTHY = {
    "Gemma": {},
    "Gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Mixtral": {"num_local_experts": 4, "sliding_window": None},
}


@pytest.fixture(autouse=True)
def gallery(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(GALLERY)
    monkeypatch.setenv("COLUMNS", "400")
    yield
    for name in HELD:
        sys.modules.pop(name, None)


@cache
def printed(name: str) -> tuple[dict[str, Any], str]:
    """Run an example; return what it defines and what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        namespace = runpy.run_path(str(GALLERY / f"{name}.py"))
    return namespace, out.getvalue()


def test_every_example_is_here() -> None:
    scripts = {path.stem for path in GALLERY.glob("*.py")}
    assert scripts == {*CULPRITS, *HELD, "torchtune_gemma2"}


def examples(failing: Mapping[str, str]) -> list[Any]:
    """Return all examples; those for which a test fails are expected to."""
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=failing[name]))
        if name in failing
        else name
        for name in CULPRITS
    ]


def is_wrong(name: str, finding: bl.Finding) -> bool:
    """Return whether a finding is of a module that is wrong, or does not tell it from others."""
    return any(re.fullmatch(CULPRITS[name], each) for each in (finding.name, *finding.alternatives))


@pytest.mark.parametrize("name", examples(UNSEEN))
def test_the_module_that_is_wrong_is_named(name: str) -> None:
    report = printed(name)[0]["report"]
    assert report.status == "diverged", report
    assert is_wrong(name, report.culprits[0]), report


@pytest.mark.parametrize("name", CULPRITS)
def test_no_culprit_is_a_healthy_module_alone(name: str) -> None:
    for finding in printed(name)[0]["report"].culprits:
        assert is_wrong(name, finding), finding


@pytest.mark.parametrize("name", CULPRITS)
def test_no_share_is_more_than_all(name: str) -> None:
    shares = [finding.share or 0.0 for finding in printed(name)[0]["report"].findings]
    assert all(0 <= share <= 1 for share in shares)


@pytest.mark.parametrize("name", HEALTHY)
def test_the_port_itself_matches(name: str) -> None:
    from original import drawn, prompt
    from port import port_of

    model = drawn(name, **HEALTHY[name])
    report = bl.check(port_of(model), prompt(), reference=model, repro=False)
    assert report.status == "matched", report


def blocks_by_example() -> Iterator[tuple[str, Block]]:
    """Yield what the page says of each example, below the part of it that is wrong."""
    example = None
    for block in blocks_of(PAGE):
        part = PART_OF.fullmatch(block.above)
        if part is not None:
            example = Path(part[1]).stem
        elif example is not None and block.language == "text":
            yield example, block
            example = None


def relative(text: str) -> str:
    """Return a report whose paths begin at the checkout, or at a package."""
    return re.sub(r"/\S*/site-packages/", "", text.replace(f"{ROOT}/", ""))


@pytest.mark.parametrize(
    ("name", "block"), [pytest.param(*entry, id=entry[0]) for entry in blocks_by_example()]
)
def test_the_page_shows_what_an_example_prints(name: str, block: Block, tmp_path: Path) -> None:
    if name == "torchtune_gemma2":
        if not find_spec("torchtune"):
            pytest.skip("torchtune is not installed")
        # In a process of its own: it leaves placeholders for packages among the modules.
        text = run(["python", f"{name}.py"], GALLERY, page_environment(tmp_path))
    else:
        text = printed(name)[1]
    text = relative(text)
    if os.environ.get("BRICKLINE_UPDATE_SNAPSHOTS"):
        lines = text.partition("\n\n")[0].splitlines()
        if name != "torchtune_gemma2":  # a report, whose headline goes over lines
            lines = [lines[0], *textwrap.wrap(" ".join(lines[1:]), 80, break_long_words=False)]
        page = PAGE.read_text(encoding="utf-8").replace(block.text, "\n".join(lines), 1)
        PAGE.write_text(page, encoding="utf-8")
        return
    said, shown = (" ".join(without_figures(part)).split() for part in (block.text, text))
    assert shown[: len(said)] == said


def test_the_page_shows_every_example() -> None:
    assert {name for name, _ in blocks_by_example()} == {*CULPRITS, "torchtune_gemma2"}
