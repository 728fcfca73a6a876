"""What commands write to standard output and standard error.

A document goes to a file or a pipe exactly as it is, as UTF-8. A terminal gets neither control nor
direction characters from it, because names in a run are a stranger's, and a terminal obeys them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from contextlib import suppress


def print_document(text: str | Iterable[str]) -> None:
    """Print a document, whole or in pieces, on standard output."""
    out = sys.stdout
    if out is None:  # closed by whoever started us
        return
    pieces = [text] if isinstance(text, str) else text
    if out.isatty():
        for piece in pieces:
            shown = harmless(piece).encode(out.encoding or "utf-8", "backslashreplace")
            out.write(shown.decode(out.encoding or "utf-8"))
        return
    out.flush()
    for piece in pieces:
        out.buffer.write(piece.encode("utf-8", "replace"))
    out.buffer.flush()


def say(words: str) -> None:
    """Say something on standard error, beside a document; nobody may be there to hear it."""
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):
        print(f"brickline: {harmless(words)}", file=sys.stderr, flush=True)


def harmless(text: str) -> str:
    """Return text that moves no cursor: what cannot be printed, as JSON spells it."""
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text
    )
