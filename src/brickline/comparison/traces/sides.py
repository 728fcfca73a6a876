"""One side of the seed's comparison: the launches that a run holds, as they were recorded.

Reads traces, operands and the identities of fingerprints from a run's parts. What two sides have
in common is the matter of `comparison`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from brickline.spools import Part, Rows
from brickline.traces import KernelTrace

PARAMETERS_FROM = 1000
"""Operands from this index on are a module's own parameters, not what it was given."""

Identity: TypeAlias = tuple[bytes, ...]
"""Hash, dtype and shape of some tensors; empty where none was fingerprinted."""

_IDENTITY = ("hash", "dtype", "dimensions", "shape")
_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class TraceSide:
    """The launches of one run, in order, with what is known of their tensors."""

    traces: Sequence[KernelTrace]
    name: str = ""
    inputs: Sequence[Identity] = ()
    """By launch; empty where no launch has fingerprints."""
    outputs: Sequence[Identity] = ()
    records: Callable[[int], list[bytes]] | None = None
    """Gives the fingerprints of a launch's outputs."""
    note: str = ""
    """Why there may be none, for who finds none."""

    @property
    def total_time_us(self) -> float | None:
        """What the launches took together; None where none was timed."""
        return math.fsum(trace.time_us for trace in self.traces) or None

    @property
    def backends(self) -> str:
        """Who executed the launches, as they were recorded."""
        return ", ".join(sorted({trace.backend for trace in self.traces if trace.backend}))

    def label(self, role: str) -> str:
        """Return what this side is called in a report."""
        name = self.name or role
        return f"{name} ({self.backends})" if self.backends else name


def side_from_parts(parts: Iterable[Part], name: str = "", note: str = "") -> TraceSide:
    """Return the launches of a run's parts, in the order in which they ended in each."""
    sides = [_side_from_part(part) for part in parts if len(part.traces)]
    starts = np.cumsum([0, *(len(side.traces) for side in sides)])

    def records(index: int) -> list[bytes]:
        place = int(np.searchsorted(starts, index, "right")) - 1
        found = sides[place].records
        return found(index - int(starts[place])) if found is not None else []

    return TraceSide(
        [trace for side in sides for trace in side.traces],
        name,
        [identity for side in sides for identity in side.inputs],
        [identity for side in sides for identity in side.outputs],
        records,
        note,
    )


def _side_from_part(part: Part) -> TraceSide:
    operands = part.operands
    taken = operands[
        (operands["fingerprint"] > 0) & (operands["fingerprint"] <= len(part.fingerprint_rows))
    ]
    identities = _identities(part, taken["fingerprint"])
    inputs = (taken["role"] == 0) & (taken["index"] < PARAMETERS_FROM)
    given = _by_trace(taken, inputs)
    made = _by_trace(taken, taken["role"] != 0)
    ids = part.traces["trace"].tolist()

    def records(index: int) -> list[bytes]:
        rows = made.get(ids[index], [])
        found = part.fingerprint_rows.take(taken["fingerprint"][rows].astype(np.int64) - 1)
        return [row.tobytes() for row in found]

    def identity(rows: list[int]) -> Identity:
        known = tuple(identities[row] for row in rows)
        return known if all(known) else ()

    return TraceSide(
        traces_from_part(part),
        part.name,
        [identity(given.get(trace, [])) for trace in ids],
        [identity(made.get(trace, [])) for trace in ids],
        records,
    )


def _identities(part: Part, numbers: Rows) -> list[bytes]:
    """Return hash, dtype and shape of fingerprints by id; empty for one that never came."""
    found: list[bytes] = []
    for start in range(0, len(numbers), _AT_ONCE):
        rows = part.fingerprint_rows.take(numbers[start : start + _AT_ONCE].astype(np.int64) - 1)
        columns = [rows[field].reshape(len(rows), -1) for field in _IDENTITY]
        parts = [np.ascontiguousarray(column).view(np.uint8) for column in columns]
        keys = np.concatenate(parts, axis=1)
        came = rows["dtype"] != 0
        found += [key.tobytes() if whole else b"" for key, whole in zip(keys, came, strict=True)]
    return found


def _by_trace(operands: Rows, chosen: Rows) -> dict[int, list[int]]:
    """Return the chosen rows of each launch, by index."""
    found: dict[int, list[int]] = defaultdict(list)
    rows = np.flatnonzero(chosen)
    order = rows[np.argsort(operands["index"][rows], kind="stable")]
    for row, trace in zip(order.tolist(), operands["trace"][order].tolist(), strict=True):
        found[trace].append(row)
    return found


def traces_from_part(part: Part, chosen: Rows | None = None) -> list[KernelTrace]:
    """Return launches of a part in the order in which they ended; all of them by default."""
    kept = slice(None) if chosen is None else chosen
    rows, times = part.traces[kept], np.nan_to_num(part.times_us[kept]).tolist()
    columns = ("name", "layer", "position", "backend", "params")
    sums = ("input_checksum", "output_checksum", "has_checksums")
    text = part.string
    return [
        KernelTrace(
            text(name),
            None if layer < 0 else layer,
            position,
            text(backend),
            text(params),
            time_us,
            given if has & 1 else None,
            made if has & 2 else None,
        )
        for name, layer, position, backend, params, given, made, has, time_us in zip(
            *(rows[column].tolist() for column in columns + sums), times, strict=True
        )
    ]
