"""Entries of accepted differences: read, checked, and matched with names.

Owns the form of the file, which `accepted` shows. What an entry does to a report is not
known here.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

from brickline.errors import AcceptError
from brickline.verdict.finding import Finding
from brickline.verdict.table import VerdictRow
from brickline.verdict.verdicts import Verdict

ACCEPTABLE = frozenset(
    {Verdict.CULPRIT, Verdict.SUSPECT, Verdict.STRUCTURAL, Verdict.NONDETERMINISTIC}
)
"""Verdicts that an entry can cover. Non-finite values have no size, so no entry covers them."""
NEEDS_ENTRY = ACCEPTABLE | {Verdict.NONFINITE_ORIGIN, Verdict.ACCEPTED}


KEYS = ("brick", "reason", "relative_l2")


@dataclass(frozen=True)
class Accepted:
    """One entry."""

    brick: str
    """Glob over dotted names: ``*`` stands for one part, ``**`` for any number of parts."""
    reason: str
    relative_l2: float
    """Largest accepted relative L2 of the brick's own error."""
    source: str = "accept"
    """Where the entry stands, for messages."""

    def __post_init__(self) -> None:
        _check_glob(self.brick, self.source)
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise AcceptError(
                f"expected a reason, got {self.reason!r} - at {self.source}.reason; "
                "say in a few words why the difference is intended"
            )
        size = self.relative_l2
        if isinstance(size, bool) or not isinstance(size, int | float) or not 0 <= size < math.inf:
            raise AcceptError(
                f"expected a finite relative L2 from 0 on, got {size!r} - at "
                f"{self.source}.relative_l2; the report gives each finding's error"
            )

    def covers(self, name: str | None) -> bool:
        """Return whether the glob fits a name."""
        return name is not None and fits_name(self.brick.split("."), name.split("."))


Given: TypeAlias = (
    str | os.PathLike[str] | Accepted | Mapping[str, Any] | Iterable[Accepted | Mapping[str, Any]]
)
"""A path, one entry, or several; an entry is an `Accepted` or a mapping with its keys."""


def load_accepted(given: Given | None) -> tuple[Accepted, ...]:
    """Return the entries of a file, or of a list that stands for one; None has none.

    Raises:
        AcceptError: if the file is not there, is not TOML, or an entry means nothing.
    """
    if given is None:
        return ()
    if isinstance(given, str | os.PathLike):
        return parse_accepted(_read(given), source=os.fspath(given))
    if isinstance(given, Accepted):
        return (given,)
    if isinstance(given, Mapping):
        return (_entry(given, "accept"),)
    if not isinstance(given, Iterable):
        raise AcceptError(
            f"expected a path or a list of entries, got {type(given).__name__} - at accept; "
            f"write for example accept=[{_EXAMPLE}]"
        )
    return tuple(_entry(each, f"accept[{index}]") for index, each in enumerate(given))


def parse_accepted(text: str, source: str = "accept") -> tuple[Accepted, ...]:
    """Read entries from TOML; see `load_accepted`."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise AcceptError(f"expected TOML in {source}: {error}; see docs/accepting.md") from None
    unknown = [key for key in document if key != "accept"]
    if unknown:
        raise AcceptError(
            f"expected [[accept]] in {source}, got {unknown[0]!r}; "
            "begin each entry with [[accept]] on a line of its own"
        )
    entries = document.get("accept", [])
    if not isinstance(entries, list):
        raise AcceptError(
            f"expected [[accept]] in {source}, got [accept]; double the brackets of each entry"
        )
    return tuple(_entry(each, f"{source}: accept[{index}]") for index, each in enumerate(entries))


_EXAMPLE = '{"brick": "layers.*.mlp", "reason": "tanh-GELU", "relative_l2": 1e-3}'


def _read(path: str | os.PathLike[str]) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise AcceptError(
            f"expected accepted differences at {os.fspath(path)}, but {reason}; "
            "brickline check --write-accept FILE proposes them"
        ) from None


def _entry(given: Any, at: str) -> Accepted:
    if isinstance(given, Accepted):
        return given
    if not isinstance(given, Mapping):
        raise AcceptError(
            f"expected an entry with {', '.join(KEYS)}, got {given!r} - at {at}; "
            f"write for example {_EXAMPLE}"
        )
    for key in given:
        if key not in KEYS:
            close = get_close_matches(str(key), KEYS, n=1, cutoff=0.6)
            hint = f"did you mean {close[0]!r}?" if close else "take it out"
            raise AcceptError(f"expected {', '.join(KEYS)}, got {key!r} - at {at}; {hint}")
    for key in KEYS:
        if key not in given:
            raise AcceptError(
                f"expected {', '.join(KEYS)}, {key} is missing - at {at}; "
                f"write for example {_EXAMPLE}"
            )
    return Accepted(given["brick"], given["reason"], given["relative_l2"], at)


def _check_glob(glob: Any, at: str) -> None:
    problem = None
    if not isinstance(glob, str) or not glob.strip():
        problem = "the dotted name of a brick"
    elif glob != glob.strip():
        problem = "a name without spaces around it"
    elif any(part == "" for part in glob.split(".")):
        problem = "a name between any two dots"
    elif any("**" in part and part != "**" for part in glob.split(".")):
        problem = "** as a part of its own"
    elif any(_is_unclosed(part) for part in glob.split(".")):
        problem = "a closing ] within the part (a literal [ is written [[])"
    if problem:
        raise AcceptError(
            f"expected {problem}, got {glob!r} - at {at}.brick; write for example 'layers.*.mlp'"
        )


def _is_unclosed(part: str) -> bool:
    at = part.find("[")
    while at >= 0:
        # As fnmatch reads it: a ] directly behind [ or [! is a member, not the end.
        start = at + 2 if part[at + 1 : at + 2] == "!" else at + 1
        end = part.find("]", start + 1)
        if end < 0:
            return True
        at = part.find("[", end)
    return False


def fits_name(glob: Sequence[str], name: Sequence[str]) -> bool:
    """Return whether the parts of a glob fit the parts of a name."""
    if not glob:
        return not name
    if glob[0] == "**":
        return any(fits_name(glob[1:], name[start:]) for start in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], glob[0]) and fits_name(glob[1:], name[1:])


def size_of(each: Finding | VerdictRow) -> float | None:
    """Return the relative L2 of its own error, or of its output where its own is not known."""
    return each.propagated_error if each.local_error is None else each.local_error


def key_of(row: VerdictRow) -> tuple[Any, ...]:
    """Return which op a row is about."""
    return (row.name, row.op, row.direction)


def keys_of(finding: Finding) -> set[tuple[Any, ...]]:
    """Return the same of the rows that a finding is about."""
    return {(name, finding.op, finding.direction) for name in finding.names}
