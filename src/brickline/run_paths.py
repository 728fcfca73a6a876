"""Which runs a command line means: paths, patterns, and directories that hold runs.

It knows where runs lie, not what is in them.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from brickline.errors import NotARun
from brickline.run_directory import MANIFEST, resolved


def find_runs(given: Iterable[str | Path]) -> list[Path]:
    """Return the runs, and other files, that are meant, in the order given.

    A pattern stands for what it matches, by name. A directory that is no run stands for the runs
    in it, as far as there are any; else it is kept, and whoever opens it says what it is.

    Raises:
        NotARun: if a pattern matches nothing.
    """
    found: dict[Path, None] = {}
    for each in given:
        for path in _matching(str(each)):
            found.update(dict.fromkeys(_inside(path)))
    return list(found)


def _matching(text: str) -> list[Path]:
    if Path(text).exists() or not glob.has_magic(text):
        return [Path(text)]
    matched = sorted(map(Path, glob.glob(text)))
    if not matched:
        raise NotARun(f"expected a run, or a pattern that matches some, got {text!r}: none match")
    return matched


def _inside(path: Path) -> list[Path]:
    if not path.is_dir() or (path / MANIFEST).is_file():
        return [path]
    return sorted(entry.parent for entry in path.glob(f"*/{MANIFEST}")) or [path]


def run_labels(paths: Sequence[Path]) -> list[str]:
    """Return short names by which the paths can be told apart: their own, or else whole paths."""
    short = [resolved(path).name.removesuffix(".brick") for path in paths]
    often = Counter(short)
    return [
        name if often[name] == 1 else str(path) for name, path in zip(short, paths, strict=True)
    ]
