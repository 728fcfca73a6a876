"""A recorded run as plain rows, for tests of recording."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from brickline.runs import Run


@dataclass(frozen=True)
class Tensor:
    """One operand."""

    role: int
    index: int
    number: int
    version: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    fingerprint: bytes | None


@dataclass(frozen=True)
class Row:
    """One trace."""

    trace: int
    parent: int
    name: str
    layer: int
    position: int
    ordinal: int
    direction: int
    backend: str
    brick: str | None
    params: dict[str, Any]
    operands: tuple[Tensor, ...]
    enqueue_ns: int
    start_ns: int
    end_ns: int

    def of(self, role: int) -> list[Tensor]:
        """Operands of a role that are no parameters."""
        return [each for each in self.operands if each.role == role and each.index < 1000]

    @property
    def inputs(self) -> list[Tensor]:
        return self.of(0)

    @property
    def outputs(self) -> list[Tensor]:
        return self.of(1)

    @property
    def weights(self) -> list[Tensor]:
        return [each for each in self.operands if each.index >= 1000]


def rows_of(path: Path | str, part: int = 0) -> list[Row]:
    """The traces of a run in order of entry."""
    run = Run.open(path)
    found = run.parts[part]
    prints = found.fingerprints
    slots = {int(slot["slot"]): found.string(slot["name"]) for slot in found.slots}

    def tensor(row: Any) -> Tensor:
        number = int(row["fingerprint"])
        return Tensor(
            int(row["role"]),
            int(row["index"]),
            int(row["tensor"]),
            int(row["version"]),
            found.string(row["dtype"]),
            tuple(int(each) for each in row["shape"][: row["dimensions"]]),
            tuple(int(each) for each in row["strides"][: row["dimensions"]]),
            prints[number - 1].tobytes() if number else None,
        )

    operands: dict[int, list[Tensor]] = {}
    for row in found.operands:
        operands.setdefault(int(row["trace"]), []).append(tensor(row))
    return [
        Row(
            int(row["trace"]),
            int(row["parent"]),
            found.string(row["name"]),
            int(row["layer"]),
            int(row["position"]),
            int(row["ordinal"]),
            int(row["direction"]),
            found.string(row["backend"]),
            slots.get(int(row["slot"])),
            json.loads(found.string(row["params"])),
            tuple(operands.get(int(row["trace"]), ())),
            int(row["enqueue_ns"]),
            int(row["start_ns"]),
            int(row["end_ns"]),
        )
        for row in found.traces[np.argsort(found.traces["trace"])]
    ]


def facts_of(path: Path | str) -> dict[str, Any]:
    """What a recording noted in the manifest."""
    facts: dict[str, Any] = Run.open(path).manifest["facts"]["recording"]
    return facts
