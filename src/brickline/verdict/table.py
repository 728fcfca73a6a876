"""A verdict for every pair that was compared: `VerdictRow` and `VerdictTable`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from brickline.verdict.verdicts import Verdict


class VerdictRow(NamedTuple):
    """One row of the table of verdicts."""

    name: str
    reference_name: str | None
    layer_idx: int | None
    position: int | None
    ordinal: int
    direction: str
    brick: str | None
    op: str | None
    verdict: Verdict
    z: float | None
    local_error: float | None
    propagated_error: float | None


class VerdictTable(Sequence[VerdictRow]):
    """A verdict for every pair that was compared, in the order of execution, by column."""

    def __init__(self, columns: Mapping[str, Sequence[Any]] | None = None) -> None:
        given = columns or {}
        self.columns: dict[str, list[Any]] = {
            name: list(given.get(name, ())) for name in VerdictRow._fields
        }

    def append(self, row: VerdictRow) -> None:
        """Add a row at the end."""
        for name, value in zip(VerdictRow._fields, row, strict=True):
            self.columns[name].append(value)

    def counts(self) -> dict[str, int]:
        """Return how often each verdict was given, the most frequent first."""
        return {str(each): count for each, count in Counter(self.columns["verdict"]).most_common()}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VerdictTable) and self.columns == other.columns

    __hash__ = None  # type: ignore[assignment]  # rows can be added

    def __len__(self) -> int:
        return len(self.columns["name"])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return VerdictTable({name: values[index] for name, values in self.columns.items()})
        return VerdictRow(*(self.columns[name][index] for name in VerdictRow._fields))

    def __iter__(self) -> Iterator[VerdictRow]:
        return map(VerdictRow._make, zip(*self.columns.values(), strict=True))
