"""Error over depth as a line of blocks: where it begins, and whether it grows.

Reads the table of verdicts by column, so a million rows cost no more than a pass over them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from brickline.verdict import VerdictTable

BLOCKS = "▁▂▃▄▅▆▇█"
PLAIN = "_.:-=+*#"
NOT_FINITE = "!"
"""Drawn where an error is not a finite number."""
MOST_DECADES = 12
"""Errors further below the largest than this are drawn as the smallest."""


@dataclass(frozen=True)
class ErrorCurve:
    """The errors of one call of the model, in the order of execution."""

    names: Sequence[str]
    local: Sequence[float | None]
    propagated: Sequence[float | None]
    layers: Sequence[int | None] = ()

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        values = [*self.local, *self.propagated]
        return not any(value is not None and (value > 0 or math.isnan(value)) for value in values)

    def limits(self) -> tuple[float, float]:
        """Return the errors between which is drawn: a power of ten, and the largest finite one."""
        found = [
            value
            for value in (*self.local, *self.propagated)
            if value is not None and 0 < value < math.inf
        ]
        if not found:
            return 0.1, 1.0
        top = math.log10(max(found))
        low = min(math.floor(math.log10(min(found))), math.floor(top) - 1)
        return 10.0 ** max(low, math.floor(top) - MOST_DECADES), max(found)

    def draw(self, values: Sequence[float | None], width: int, *, unicode: bool) -> str:
        """Return one character for each op, or for each group of neighbours: their largest."""
        low, high = map(math.log10, self.limits())
        groups = groups_of(len(values), width)
        return "".join(
            _drawn(values[a:b], low, high, BLOCKS if unicode else PLAIN) for a, b in groups
        )

    def column(self, name: str, width: int, layer: int | None = None) -> int | None:
        """Return where the op of that name is drawn, the worst where there are several, or None.

        Args:
            name: The op's.
            width: Columns of the drawing.
            layer: The op's layer, where several have its name. Default None: not known.
        """
        places = [at for at, each in enumerate(self.names) if each == name]
        if layer is not None and self.layers:
            places = [at for at in places if self.layers[at] == layer] or places
        if not places:
            return None
        place = max(places, key=lambda at: size_of(self.local[at]))
        groups = groups_of(len(self.names), width)
        return next(at for at, (first, end) in enumerate(groups) if first <= place < end)


def error_curve(table: VerdictTable, position: int | None) -> ErrorCurve:
    """Return the forward errors of one call of the model; of all rows where it is None.

    A module that was entered before its parts stands for all of them, so it is left out.
    """
    columns = table.columns
    rows = [
        (name, op, layer, local, propagated)
        for name, layer, at, op, direction, local, propagated in zip(
            columns["name"],
            columns["layer_idx"],
            columns["position"],
            columns["op"],
            columns["direction"],
            columns["local_error"],
            columns["propagated_error"],
            strict=True,
        )
        if direction != "backward" and (position is None or at is None or at == position)
    ]
    parts = [rows[place] for place in parts_of([row[0] for row in rows], [row[1] for row in rows])]
    names, _, layers, local, propagated = zip(*parts, strict=True) if parts else ((),) * 5
    return ErrorCurve(names, local, propagated, layers)


def parts_of(names: Sequence[str], ops: Sequence[str | None]) -> list[int]:
    """Return which rows of one call are parts, not a module that stands for several of them."""
    wholes = {whole for name in set(names) for whole in _wholes(name)}
    classes = [name for name in names if _is_class(name)]
    # Bricks of a plan are written so too, and there are several.
    if len(classes) == 1 and classes[0] == names[0]:
        wholes.add(names[0])
    return [
        place
        for place, (name, op) in enumerate(zip(names, ops, strict=True))
        if op is not None or name not in wholes
    ]


def _wholes(name: str) -> Iterator[str]:
    """Give the dotted paths that hold this one."""
    at = name.rfind(".")
    while at > 0:
        yield name[:at]
        at = name.rfind(".", 0, at)


def _is_class(name: str) -> bool:
    """Whether it is the root, which carries the name of its class."""
    return "." not in name and name[:1].isupper()


def size_of(value: float | None) -> float:
    """Return an error for comparing: what is not a number is the largest, none the smallest."""
    if value is None:
        return -1.0
    return math.inf if math.isnan(value) else value


def groups_of(count: int, width: int) -> list[tuple[int, int]]:
    """Return where each of at most so many groups of neighbours begins and ends."""
    shown = min(count, width)
    return [(at * count // shown, (at + 1) * count // shown) for at in range(shown)]


def _drawn(values: Sequence[float | None], low: float, high: float, levels: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return " "
    if not all(math.isfinite(value) for value in known):
        return NOT_FINITE
    largest = max(known)
    if largest <= 0:
        return levels[0]
    share = (math.log10(largest) - low) / (high - low)
    return levels[min(max(math.ceil(share * len(levels)) - 1, 0), len(levels) - 1)]
