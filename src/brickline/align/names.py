"""Names of two sides: which path of one is which path of the other.

Owns the mapping that a user gives, the number of a layer in a path, and the names that are shown
where one does not exist. Paths are dotted, as those of modules and parameters are. Knows nothing of
values.
"""

from __future__ import annotations

import re
from collections import abc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from brickline.errors import UsageError

_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")
SHOWN = 3
"""Names that an error shows."""


def kind_of(path: str) -> str:
    """Return a path without the number of its layer: siblings in other layers are of one kind."""
    return _LAYER.sub("#", path, count=1)


def nearest_names(name: str, names: Iterable[str], count: int = SHOWN) -> list[str]:
    """Return the names most like one, the nearest first; those of a pattern have ``*`` too."""
    known = dict.fromkeys(_LAYER.sub("*", other) if "*" in name else other for other in names)
    return get_close_matches(name, list(known), n=count, cutoff=0.4)


@dataclass(frozen=True)
class _Pattern:
    text: str
    others: tuple[str, ...]
    expression: re.Pattern[str]

    @property
    def rank(self) -> tuple[int, int]:
        """Patterns of more components go first, and those with fewer ``*`` among them."""
        return -self.text.count("."), self.text.count("*")

    def partners(self, path: str) -> Iterator[str]:
        """Yield what stands for a path on the other side, what lies below a match included."""
        match = self.expression.fullmatch(path)
        if match is None:
            return
        *parts, rest = match.groups(default="")
        for other in self.others:
            values = iter(parts)
            yield re.sub(r"\*", lambda _, values=values: next(values), other) + rest  # type: ignore[misc]


class Mapping:
    """Which names of the reference stand for a name of the candidate, as a user wrote it.

    ``{"blocks.*.attn.wqkv": ["layers.*.self_attn.q_proj", "layers.*.self_attn.k_proj"]}``: a ``*``
    is anything but a dot, and the first one of the other side stands for the same as the first one
    of this side. What lies below a mapped name is mapped with it, where the reference has it. Where
    several patterns match a name, that of most components counts, then that with fewest ``*``.

    Args:
        patterns: Names or patterns of the candidate, each with one or several of the reference.
        ours: Every name of the candidate.
        theirs: Every name of the reference.

    Raises:
        UsageError: if a pattern matches no name of the candidate, or names something that the
            reference does not have; the message shows the nearest names.
    """

    def __init__(
        self,
        patterns: abc.Mapping[str, str | Sequence[str]],
        ours: Iterable[str],
        theirs: Iterable[str],
    ) -> None:
        names, self._theirs = list(ours), frozenset(theirs)
        self._patterns = sorted(_read(patterns), key=lambda pattern: pattern.rank)
        for pattern in self._patterns:
            self._validate(pattern, names)

    def partner(self, path: str) -> tuple[str, ...]:
        """Return the reference's names for one of the candidate's; empty where none is mapped."""
        for pattern in self._patterns:
            names = tuple(name for name in pattern.partners(path) if name in self._theirs)
            if names:
                return names
        return ()

    def _validate(self, pattern: _Pattern, names: Sequence[str]) -> None:
        """Raise where a pattern matches nothing, or gives a name that does not exist."""
        matches = [
            (path, match)
            for path in names
            if (match := pattern.expression.fullmatch(path)) and not match.groups()[-1]
        ]
        if not matches:
            raise UsageError(
                f"map: {pattern.text!r} matches no name of the candidate"
                f"{_shown(pattern.text, names)}"
            )
        for path, _ in matches:
            for text, name in zip(pattern.others, pattern.partners(path), strict=True):
                if name not in self._theirs:
                    raise UsageError(
                        f"map: {text!r} gives {name!r} for {path!r}, which the reference does not "
                        f"have{_shown(name, self._theirs)}"
                    )


def _read(patterns: object) -> Iterator[_Pattern]:
    if not isinstance(patterns, abc.Mapping):
        raise UsageError(
            "map: expected a dictionary from names of the candidate to names of the reference, "
            f"got {type(patterns).__name__}"
        )
    for text, given in patterns.items():
        others = (given,) if isinstance(given, str) else given
        if not isinstance(text, str) or not _are_names(others):
            raise UsageError(
                f"map: expected a name, and a name or a list of names of the reference for it, got "
                f"{text!r}: {given!r}"
            )
        for other in others:
            if other.count("*") > text.count("*"):
                raise UsageError(
                    f"map: {other!r} has more * than {text!r}, so that it is not known what they "
                    "stand for; use as many in both"
                )
        expression = "([^.]+)".join(re.escape(part) for part in text.split("*"))
        yield _Pattern(text, tuple(others), re.compile(rf"{expression}((?:\..*)?)"))


def _are_names(values: object) -> bool:
    return (
        isinstance(values, Sequence)
        and len(values) > 0
        and all(isinstance(value, str) for value in values)
    )


def _shown(name: str, names: Iterable[str]) -> str:
    """Return the end of an error: the names that may have been meant."""
    close = nearest_names(name, names)
    return f"; the nearest are {', '.join(map(repr, close))}" if close else ""
