"""README and docs: links lead somewhere, and examples name verbs and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    if (ROOT / name).is_file()
]
PAGES += sorted(ROOT.glob("docs/**/*.md")) + sorted(ROOT.glob("benchmarks/**/*.md"))
PAGES += sorted(ROOT.glob("examples/**/*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|!\[[^\]]*\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^(?:\$ |> )?brickline +([a-z][a-z-]*)", re.MULTILINE)


def without_code(text: str) -> str:
    return re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)


def commands_of(text: str) -> set[str]:
    """The verbs that the page's console examples use."""
    blocks = re.findall(r"```(?:console|bash|sh|shell)\n(.*?)```", text, re.DOTALL)
    return {verb for block in blocks for verb in COMMAND.findall(block)}


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return set(plain)


def identity(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_relative_links_resolve(page: Path) -> None:
    for found in LINK.finditer(without_code(page.read_text(encoding="utf-8"))):
        target = found[1] or found[2]
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        resolved = (page.parent / path).resolve() if path else page
        assert resolved.exists(), f"{identity(page)} links to {target}"
        assert resolved.is_relative_to(ROOT), f"{identity(page)} links out of the repository"
        if anchor and resolved.suffix == ".md":
            assert anchor in anchors(resolved.read_text(encoding="utf-8")), target


def verbs() -> set[str]:
    from brickline.commands import VERBS

    return set(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=identity)
def test_examples_name_real_verbs(page: Path) -> None:
    assert commands_of(page.read_text(encoding="utf-8")) <= verbs()


def test_every_refusal_of_a_megakernel_has_its_row() -> None:
    from brickline.executor.megakernel import refusals, regions

    text = (ROOT / "docs/megakernel.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (MK[13]\d\d) \|", text, re.MULTILINE)
    assert rows == [*refusals.REASONS, *regions.REASONS]


def test_every_verb_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if len(text.splitlines()) < 10:
        pytest.skip("the README is not written yet")
    assert verbs() <= commands_of(text)


def test_the_first_screen_of_the_readme() -> None:
    """One sentence; install, demo; a short example; its output; then the two make commands."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if len(text.splitlines()) < 10:
        pytest.skip("the README is not written yet")
    order = ["pip install .", "brickline demo", "BrickProfiler", "make demo", "make test"]
    places = [text.find(each) for each in order]
    assert -1 not in places
    assert places == sorted(places)


def test_every_page_is_linked_from_the_readme_or_another_page() -> None:
    readme = ROOT / "README.md"
    if len(readme.read_text(encoding="utf-8").splitlines()) < 10:
        pytest.skip("the README is not written yet")
    linked: set[Path] = set()
    for page in PAGES:
        for found in LINK.finditer(without_code(page.read_text(encoding="utf-8"))):
            linked.add((page.parent / (found[1] or found[2]).partition("#")[0]).resolve())
    lost = {identity(page) for page in PAGES if page.parent.name == "docs" and page not in linked}
    assert lost <= {"docs/README.md"}
