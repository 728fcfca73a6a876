"""How a drive that did not come to its end is told."""

from __future__ import annotations

from brickline.oracle.widen import is_out_of_memory


def ending(failure: BaseException) -> str:
    """Return one line: who ended the drive, and with which words."""
    if isinstance(failure, KeyboardInterrupt):
        return "interrupted: the report holds what was seen until then"
    if isinstance(failure, SystemExit):
        return f"the candidate or its drive ended the program: SystemExit({failure.code!r})"
    return f"the candidate or its drive raised {words_of(failure)}"


def trouble_of(error: BaseException) -> str:
    """Return why a call could not be checked, and what to do where memory was short."""
    if is_out_of_memory(error):
        return "memory ran out; check fewer tokens or a smaller batch"
    return words_of(error)


def words_of(error: BaseException) -> str:
    """Return an exception's kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")
