"""What the compilers of all devices share: what their code depends on, and how they refuse."""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from pathlib import Path

from brickline.errors import CompileError
from brickline.kernel import Kernel

_CONTEXT_LINES = 2


def headers_digest(paths: list[Path]) -> str:
    """Return a hash of the headers that a kernel's text includes."""
    return sha256("".join(map(_header_digest, paths)).encode()).hexdigest()


@cache
def _header_digest(path: Path) -> str:
    return file_digest(path)  # of this installation: it does not change under a process


def file_digest(path: Path) -> str:
    """Return a hash of a file's contents."""
    return sha256(path.read_bytes()).hexdigest()


def compile_error(kernel: Kernel, log: str, command: str) -> CompileError:
    """Return the error for a source that a compiler refused: its words and the lines around."""
    message = f"kernel {kernel.name} does not compile"
    # gcc, clang: NAME:3:7: error: …; NVRTC: NAME(3): error: …
    name = re.escape(kernel.name)
    first = re.search(rf"^{name}[:(](\d+)[:)].*?error:? (.*)$", log, re.MULTILINE)
    if first is not None:
        line = int(first.group(1))
        message += f": line {line}: {first.group(2).strip()}\n{_lines_around(kernel.source, line)}"
    return CompileError(f"{message}\n{log.strip()}", log=log, command=command)


def _lines_around(source: str, line: int) -> str:
    lines = source.split("\n")  # as compilers count them
    first, last = max(1, line - _CONTEXT_LINES), min(len(lines), line + _CONTEXT_LINES)
    return "\n".join(
        f"{'>' if number == line else ' '} {number:>4} | {lines[number - 1]}"
        for number in range(first, last + 1)
    )
