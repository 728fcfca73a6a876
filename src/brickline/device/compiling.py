"""What the compilers of all devices share: what their code depends on, and how they refuse."""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from pathlib import Path

from brickline.errors import CompileError
from brickline.kernel import Kernel
from brickline.kernel_source import expected_function

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
    message = f"kernel {kernel.name} does not compile{_headline(kernel, log)}"
    return CompileError(f"{message}\n{log.strip()}", log=log, command=command)


def _headline(kernel: Kernel, log: str) -> str:
    """Return the first error: in the source, else in the call of its function, else anywhere."""
    name = re.escape(kernel.name)
    line, words = _first_error(log, name)
    if words:
        return f": line {line}: {words}\n{_lines_around(kernel.source, line)}"
    _, words = _first_error(log, f"entry of {name}")
    if words and re.search("error: .*(?:at end of input|expected '}')", log):
        return f": {words}\nthe source leaves a brace open: look for a missing }}"
    if words and kernel.language != "cuda":
        return (
            f": {words}\nexpected `{expected_function(kernel)}` as the signature declares; change "
            "the function or the signature, or name it with entry="
        )
    words = words or _first_error(log, r"[^\n:(]+")[1]
    undefined = re.search("undefined (?:reference|symbol).*", log)  # a linker knows no lines
    words = words or (undefined[0] if undefined else "")
    # A header's error has the line that led to it beside it; NVRTC: at line 3 of NAME.
    led = re.search(rf"^{name}[:(](\d+)[:)]|at line (\d+) of {name}$", log, re.MULTILINE)
    if not words or led is None:
        return f": {words}" if words else ""
    line = int(led.group(1) or led.group(2))
    return f": line {line}: {words}\n{_lines_around(kernel.source, line)}"


def _first_error(log: str, file: str) -> tuple[int, str]:
    """Return the line and the words of the first error in a file, or no words."""
    # gcc, clang: NAME:3:7: error: …; NVRTC: NAME(3): error: …
    first = re.search(rf"^{file}[:(](\d+)[:)].*?error:? (.*)$", log, re.MULTILINE)
    return (0, "") if first is None else (int(first.group(1)), first.group(2).strip())


def _lines_around(source: str, line: int) -> str:
    lines = source.split("\n")  # as compilers count them
    first, last = max(1, line - _CONTEXT_LINES), min(len(lines), line + _CONTEXT_LINES)
    return "\n".join(
        f"{'>' if number == line else ' '} {number:>4} | {lines[number - 1]}"
        for number in range(first, last + 1)
    )
