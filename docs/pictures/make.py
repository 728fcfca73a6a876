"""Every picture of the documentation, made by brickline itself from real runs.

python docs/pictures/make.py               # all of them; `make pictures` does this
python docs/pictures/make.py top regression

A how-to page, or the README of an example, is followed in a folder of its own, exactly as its test
follows it, and a picture is taken of what its commands write or print. Pages are shown by Chromium,
in light and in dark; terminals are drawn by rich and textual. Where the folder lies is left out of
what is printed.

A picture's name is its file's: `NAME-light.png` and `NAME-dark.png`, or `NAME.svg`.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOW_TO = ROOT / "docs" / "how-to"
EXAMPLES = ROOT / "examples"
THEMES = ("light", "dark")
COMMON = 64
"""Colours of a PNG that stay exactly as they are; the 192 others stand for what is near them."""
READY_MS = 30_000
BACKGROUND, FOREGROUND = (16, 20, 24), (214, 219, 225)
DARK = [
    (44, 50, 57),
    (229, 105, 111),
    (111, 191, 115),
    (224, 164, 88),
    (106, 155, 240),
    (190, 140, 230),
    (79, 179, 165),
    (214, 219, 225),
]
BRIGHT = [(122, 131, 142), *DARK[1:7], (255, 255, 255)]
"""Of a terminal, by ANSI number: those of `brickline top`."""
FONTS = '--sans: Inter, "Liberation Sans", Arial, sans-serif'


@dataclass(frozen=True)
class Shot:
    """Parts of a page that a how-to writes."""

    how_to: str
    """Its name, or that of an example."""
    html: str
    parts: tuple[str, ...]
    """Ids of the sections that are shown."""
    headline: bool = True
    width: int = 940
    css: str = ""

    def files(self, name: str) -> list[str]:
        """Return the files of a picture of this name."""
        return [f"{name}-{theme}.png" for theme in THEMES]


@dataclass(frozen=True)
class Printed:
    """What a command prints in the folder of a how-to, at the end of it or at a step."""

    how_to: str
    command: str
    columns: int = 92

    def files(self, name: str) -> list[str]:
        """Return the files of a picture of this name."""
        return [f"{name}.svg"]


@dataclass(frozen=True)
class Screen:
    """`brickline top` at a process that decodes."""

    columns: int = 124
    rows: int = 36

    def files(self, name: str) -> list[str]:
        """Return the files of a picture of this name."""
        return [f"{name}.svg"]


PICTURES: Mapping[str, Shot | Printed | Screen] = {
    "headline": Shot("different-text", "port.html", ("depth",)),
    "different-text": Shot(
        "different-text",
        "port.html",
        ("why", "findings"),
        css="#findings .card + .card { display: none }",
    ),
    "gallery": Shot(
        "gallery",
        "sliding_window.html",
        ("why", "findings", "repair"),
        css="#findings .card + .card { display: none }",
    ),
    "is-it-rounding": Shot("is-it-rounding", "own_norm.html", ("findings",)),
    "slow-brick": Shot("which-brick-is-slow", "before.html", ("bricks", "layers"), width=1100),
    "slow-timeline": Shot(
        "which-brick-is-slow", "before.html", ("timeline",), headline=False, width=1100
    ),
    "regression": Printed(
        "keep-it-from-regressing", "brickline report new --against base --fail-over 5%"
    ),
    "failed-test": Printed("keep-it-from-regressing", "pytest -q test_model.py", columns=100),
    "top": Screen(),
}


def names() -> list[str]:
    """Return the names of all files that are made here."""
    return [file for name, picture in PICTURES.items() for file in picture.files(name)]


def make(wanted: Sequence[str]) -> None:
    """Make pictures by name, following each how-to that they need once."""
    chosen = {name: PICTURES[name] for name in wanted}
    shots = {name: each for name, each in chosen.items() if isinstance(each, Shot)}
    printed = {name: each for name, each in chosen.items() if isinstance(each, Printed)}
    for how_to in dict.fromkeys(each.how_to for each in (*shots.values(), *printed.values())):
        with tempfile.TemporaryDirectory(prefix="brickline-pictures-") as place:
            directory = Path(place, "here")
            directory.mkdir()
            _follow(how_to, directory, {n: e for n, e in printed.items() if e.how_to == how_to})
            _shoot({n: e for n, e in shots.items() if e.how_to == how_to}, directory)
    for name, each in chosen.items():
        if isinstance(each, Screen):
            _watch(name, each)


def _follow(how_to: str, directory: Path, printed: Mapping[str, Printed]) -> None:
    """Follow a how-to; a command that is wanted prints in colour, and the last time counts."""
    from page_commands import follow, page_environment, run

    drawn: dict[str, str] = {}

    def runner(words: Sequence[str], where: Path, environment: dict[str, str], status: int) -> str:
        command = shlex.join(words)
        found = [name for name, each in printed.items() if each.command == command]
        if not found:
            return run(words, where, environment, status)
        columns = printed[found[0]].columns
        coloured = {key: value for key, value in environment.items() if key != "NO_COLOR"}
        coloured |= {"COLUMNS": str(columns), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
        text = run(words, where, coloured, status).replace(f"{where}/", "")
        drawn[f"{found[0]}.svg"] = _terminal(text, command, columns)
        return text

    print(f"following {how_to}", flush=True)
    environment = page_environment(directory.parent)
    page = HOW_TO / f"{how_to}.md"
    if not page.is_file():
        page = EXAMPLES / how_to / "README.md"
        shutil.copytree(page.parent, directory, dirs_exist_ok=True)
    follow(page, directory, environment, runner=runner, compare=False)
    for file, svg in drawn.items():
        _keep(file, svg.encode())


def _shoot(shots: Mapping[str, Shot], directory: Path) -> None:
    """Show pages in Chromium, and keep the parts that are wanted."""
    if not shots:
        return
    from chromium import chromium

    with chromium() as browser:
        for name, shot in shots.items():
            for theme in THEMES:
                context = browser.new_context(
                    viewport={"width": shot.width, "height": 300},
                    color_scheme=theme,
                    device_scale_factor=2,
                    bypass_csp=True,  # of the style that leaves parts out; the page has no other
                    reduced_motion="reduce",
                )
                page = context.new_page()
                page.goto((directory / shot.html).as_uri())
                page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=READY_MS)
                page.add_style_tag(content=_style(shot))
                page.wait_for_timeout(500)
                _keep(f"{name}-{theme}.png", _small(page.screenshot(full_page=True)))
                context.close()


def _style(shot: Shot) -> str:
    shown = "".join(f":not(#{part})" for part in shot.parts)
    first = "" if shot.headline else "main > :not(section) { display: none !important }"
    return f"""
        :root {{ {FONTS} }}
        .side, main > section{shown} {{ display: none !important }}
        .frame {{ display: block !important; min-height: 0 !important }}
        main {{ padding: 26px 30px 28px !important }}
        main > section {{ margin-top: {30 if shot.headline else 0}px }}
        {first} {shot.css}
    """


def _small(png: bytes) -> bytes:
    """Return the same picture with a palette: its commonest colours, then those between them."""
    from PIL import Image

    with Image.open(io.BytesIO(png)) as opened:
        image = opened.convert("RGB")
    counted = sorted(image.getcolors(image.width * image.height), reverse=True)
    common = [value for _, colour in counted[:COMMON] for value in colour]
    between = image.quantize(256 - len(common) // 3, Image.Quantize.MAXCOVERAGE).getpalette()
    palette = Image.new("P", (1, 1))
    palette.putpalette(common + between)
    out = io.BytesIO()
    image.quantize(palette=palette, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def _terminal(text: str, title: str, columns: int) -> str:
    from rich.console import Console
    from rich.terminal_theme import TerminalTheme
    from rich.text import Text

    console = Console(
        record=True, width=columns, file=io.StringIO(), force_terminal=True, legacy_windows=False
    )
    console.print(Text.from_ansi(text.strip("\n")))
    theme = TerminalTheme(BACKGROUND, FOREGROUND, DARK, BRIGHT)
    return _offline(console.export_svg(title=title, theme=theme, unique_id="terminal"))


def _offline(svg: str) -> str:
    """Return a drawing of a terminal that loads no font."""
    without = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    fonts = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
    return re.sub(r"Fira Code(, ?monospace)?", fonts, without)


def _watch(name: str, screen: Screen) -> None:
    """Draw `brickline top` at a process that decodes for as long as it takes."""
    print("watching a process", flush=True)
    with _decoding() as pid:
        svg = asyncio.run(_screenshot(pid, screen))
    _keep(f"{name}.svg", _offline(svg).encode())


DECODING = """
import sys
import brickline as bl
from brickline.commands.demo_model import DemoModel
from brickline.commands.demo_weights import ModelConfig

profiler = bl.BrickProfiler("decode", enabled=True, path=sys.argv[1])
print("ready", flush=True)
while True:
    list(DemoModel(profiler, ModelConfig()).generate([17, 4, 311, 9], 300))
"""


@contextmanager
def _decoding() -> Iterator[int]:
    with tempfile.TemporaryDirectory(prefix="brickline-pictures-") as place:
        command = [sys.executable, "-c", DECODING, str(Path(place, "decode.brick"))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield process.pid
        finally:
            process.kill()
            process.communicate()


async def _screenshot(pid: int, screen: Screen) -> str:
    from brickline.top.app import TopApp
    from brickline.top.watched import WatchedProcess

    with WatchedProcess(pid) as process:
        app = TopApp(process, 0.5)
        async with app.run_test(size=(screen.columns, screen.rows)) as pilot:
            await pilot.pause(20.0)  # as long as the trends reach back
            return app.export_screenshot(title=f"brickline top {pid}")


def _keep(file: str, data: bytes) -> None:
    (HERE / file).write_bytes(data)
    print(f"{file}: {len(data) / 1024:.0f} KiB", flush=True)


def main() -> None:
    """Make the pictures that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(PICTURES))
    wanted = parser.parse_args().names or list(PICTURES)
    unknown = [name for name in wanted if name not in PICTURES]
    if unknown:
        parser.error(f"expected names of {', '.join(PICTURES)}, got {unknown[0]}")
    sys.path[:0] = [str(ROOT / "tests" / part) for part in ("null", "browser")]
    from chromium import what_is_missing

    missing = what_is_missing()
    if missing and any(isinstance(PICTURES[name], Shot) for name in wanted):
        sys.exit(f"pictures of pages need Chromium: {missing}")
    make(wanted)


if __name__ == "__main__":
    main()
