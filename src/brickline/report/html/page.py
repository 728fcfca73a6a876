"""The shell of every HTML report: one self-contained file that asks for nothing over the network.

Owns how data and assets get into the file and how the file gets onto the disk; it knows nothing of
what a page shows. A page is a fixed document, a fixed set of assets and one block of JSON:

::

    <meta Content-Security-Policy>   only the styles and scripts below, by hash; no network at all
    <style>   base.css, then the page's own
    <body>    page.html: header, navigation, main, all empty
    <script type="application/json" id="data">   the document, every "<" and line separator escaped
    <script>  base.js, table.js, chart.js, then the page's own, which build everything from the data

Nothing from a run is ever part of the markup: the title is escaped, and scripts show every other
text through text nodes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from brickline.errors import RunError, UsageError
from brickline.whole_files import refuse_taken_file, whole_file

BASE_STYLES = ("base.css",)
BASE_SCRIPTS = ("base.js", "table.js", "chart.js")
MAX_BYTES = 4 * 2**20
"""What a page may weigh, whatever the run holds."""
MAX_NAME = 300
"""Characters of a name on a page; what is cut off is counted."""
MAX_LINES = 200
"""Lines of any list of texts."""
MAX_TEXT = 1200
"""Characters of one line."""
T = TypeVar("T")


@dataclass(frozen=True)
class PageOf(Generic[T]):
    """A kind of page: how one thing becomes a document that scripts show."""

    title: Callable[[T], str]
    """What the window is called."""
    document: Callable[[T], Mapping[str, Any]]
    """What the scripts show, as JSON values."""
    scripts: Sequence[str]
    styles: Sequence[str]

    def text(self, shown: T) -> str:
        """Return the page."""
        document = self.document(shown)
        return page(self.title(shown), document, scripts=self.scripts, styles=self.styles)

    def write(self, shown: T, path: str | os.PathLike[str], *, force: bool = False) -> Path:
        """Write the page to a file, whole or not at all, and return its path.

        Raises:
            UsageError: if the file is there and overwriting was not asked for.
            RunError: if the disk refuses.
        """
        return write_page(self.text(shown), path, force=force)


def page(
    title: str,
    document: Mapping[str, Any],
    *,
    scripts: Sequence[str],
    styles: Sequence[str] = (),
) -> str:
    """Return one self-contained page.

    Args:
        title: what the window is called.
        document: what the scripts show, as JSON values; numbers that are not finite become their
            names ("NaN", "Infinity", "-Infinity").
        scripts: files in ``assets`` that build the page, after the base scripts.
        styles: files in ``assets`` after the base style.
    """
    style = "\n".join(asset(name) for name in (*BASE_STYLES, *styles))
    code = [asset(name) for name in (*BASE_SCRIPTS, *scripts)]
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src {_hash(style)}",
            f"script-src {' '.join(_hash(text) for text in code)}",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    fields = {
        "POLICY": html.escape(policy, quote=True).replace("&#x27;", "'"),
        "TITLE": html.escape(_encodable(named(title))),
        "STYLE": style,
        "DATA": data_block(document),
        "SCRIPTS": "\n".join(f"<script>{text}</script>" for text in code),
    }
    text = asset("page.html")
    # Split once: what is filled in is never searched for further places.
    pieces = text.split("@@")
    return "".join(fields[each] if at % 2 else each for at, each in enumerate(pieces))


def write_page(text: str, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write a page to a file, whole or not at all, and return its path.

    Raises:
        UsageError: if the file is there and overwriting was not asked for.
        RunError: if the disk refuses.
    """
    target = Path(path)
    refuse_taken_page(target, force=force)
    try:
        with whole_file(target, force=force) as file:
            file.write(text.encode("utf-8"))
    except OSError as error:
        raise RunError(f"{target}: cannot write the page: {error.strerror}") from error
    return target


def refuse_taken_page(target: Path, *, force: bool) -> None:
    """Refuse a path that holds something, before the work of making a page is done."""
    if not os.path.isdir(target.parent):
        raise UsageError(f"{target}: there is no directory {target.parent}; make it first")
    refuse_taken_file(target, force=force)


def data_block(document: Mapping[str, Any]) -> str:
    """Return a document as JSON that no HTML parser finds an end or a comment in."""
    try:
        text = _json(document)
    except ValueError:
        text = _json(_finite(document))
    for each, escape in _ESCAPES.items():
        text = text.replace(each, escape)
    return text


def _json(document: Any) -> str:
    text = json.dumps(document, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    if _encodable(text) == text:
        return text
    # A lone surrogate fits into no UTF-8 file, and into JSON only as an escape.
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def packed(values: NDArray[Any]) -> dict[str, Any]:
    """Return a column as bytes in base64, which `brickline.unpack` makes a typed array of."""
    kind = values.dtype.str.lstrip("<>|=")
    little = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    return {"kind": kind, "data": base64.b64encode(little.tobytes()).decode("ascii")}


def named(text: str, limit: int = MAX_NAME) -> str:
    """Return a name cut to a length that a page can show."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}… ({len(text) - limit:,} more characters)"


def lines(texts: Iterable[object]) -> list[str]:
    """Return the first texts of a list, each cut to the length of a line."""
    return [named(str(each), MAX_TEXT) for each in islice(texts, MAX_LINES)]


@cache
def asset(name: str) -> str:
    """Return one file of ``assets`` as text."""
    return (files("brickline.report.html") / "assets" / name).read_text(encoding="utf-8")


_ESCAPES = {each: f"\\u{ord(each):04x}" for each in "<>&\u2028\u2029"}
"""What HTML or an old script parser would read something into, as JSON spells it otherwise."""


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def _encodable(text: str) -> str:
    """Return text that UTF-8 can hold; a lone surrogate becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "�")


def _finite(value: Any) -> Any:
    """Return what JSON can hold; numbers that are not finite become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return value
