"""Runs of launches made by hand, so that comparing is tested without recording anything."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline import abi
from brickline.comparison.sides import Side, Vocabulary, side_from_parts
from brickline.runs import Run

Array = NDArray[Any]


def _scattered(count: int) -> tuple[Array, Array]:
    """A bucket and a sign for each place."""
    mixed = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return (mixed & np.uint64(63)).astype(np.int64), np.where(mixed >> np.uint64(63), 1.0, -1.0)


def print_of(array: Array, dtype: str) -> Array:
    """A fingerprint's record: the columns that comparing reads."""
    row = np.zeros((), abi.FINGERPRINT)
    values = np.asarray(array, np.float64).reshape(-1)
    finite = np.isfinite(values)
    odd = np.flatnonzero(~finite)
    clean = np.where(finite, values, 0.0)
    bucket, sign = _scattered(len(values))
    code = hash((array.tobytes(), dtype)) & (2**64 - 1)
    row["hash"] = (code, code ^ 0x5555)
    row["sketch"] = np.bincount(bucket, weights=clean * sign, minlength=64)
    row["elements"] = len(values)
    row["l1"], row["l2"] = np.abs(clean).sum(), np.sqrt((clean**2).sum())
    row["total"], row["absmax"] = clean.sum(), np.abs(clean).max(initial=0.0)
    row["nan_count"], row["inf_count"] = np.isnan(values).sum(), np.isinf(values).sum()
    row["nonfinite_hash"] = hash(odd.tobytes()) & (2**63 - 1) if len(odd) else 0
    matrix = clean.reshape(-1, array.shape[-1] if array.ndim else 1)
    height, width = -(-len(matrix) // 32), 4 * -(-matrix.shape[1] // 128)
    for stripe in range(32):
        row["rows"][stripe] = matrix[stripe * height : (stripe + 1) * height].sum()
        row["columns"][stripe] = matrix[:, stripe * width : (stripe + 1) * width].sum()
    return row


@dataclass
class Launches:
    """Grows launch by launch; has the attributes of `brickline.runs.Part` that comparing reads."""

    strings: list[str] = field(default_factory=lambda: [""])
    trace_rows: list[Array] = field(default_factory=list)
    operand_list: list[Array] = field(default_factory=list)
    print_list: list[Array] = field(default_factory=list)
    slots: Array = field(default_factory=lambda: np.empty(0, abi.SLOT))
    header: dict[str, int] = field(default_factory=dict)
    path: Path = Path("hand-made.spool")
    """Where nothing lies, so that there are no twins."""

    def string(self, number: int) -> str:
        return self.strings[number]

    def string_id(self, text: str) -> int:
        if text not in self.strings:
            self.strings.append(text)
        return self.strings.index(text)

    def add(
        self,
        name: str,
        inputs: Sequence[Array] = (),
        outputs: Sequence[Array] = (),
        weights: Sequence[Array] = (),
        *,
        kind: str = "Linear",
        parent: int = 0,
        position: int = 0,
        layer: int = -1,
        direction: int = 0,
        level: str | None = "module",
        dtype: str = "float32",
        prints: bool = True,
    ) -> int:
        """Append a launch that began after all before it; return its id."""
        row = np.zeros((), abi.TRACE)
        trace = len(self.trace_rows) + 1
        row["trace"], row["parent"], row["name"] = trace, parent, self.string_id(name)
        row["position"], row["layer"], row["slot"] = position, layer, abi.NO_SLOT
        row["direction"], row["backend"] = direction, self.string_id("CPU")
        if level is not None:
            row["params"] = self.string_id(json.dumps({"level": level, "type": kind}))
        self.trace_rows.append(row)
        groups = ((0, 0, inputs), (0, 1000, weights), (1, 0, outputs))
        for role, start, arrays in groups:
            for index, array in enumerate(arrays, start):
                self._operand(trace, role, index, np.asarray(array), dtype, prints)
        return trace

    def _operand(
        self, trace: int, role: int, index: int, array: Array, dtype: str, prints: bool
    ) -> None:
        named = "int64" if array.dtype.kind in "iu" else dtype
        row = np.zeros((), abi.OPERAND)
        row["trace"], row["role"], row["index"] = trace, role, index
        row["dtype"], row["dimensions"] = self.string_id(named), array.ndim
        row["shape"][: array.ndim] = array.shape
        if prints:
            self.print_list.append(print_of(array, named))
            row["fingerprint"] = len(self.print_list)
        self.operand_list.append(row)

    @property
    def traces(self) -> Array:
        return np.array(self.trace_rows, abi.TRACE)

    @property
    def times_us(self) -> Array:
        return np.full(len(self.trace_rows), np.nan)

    @property
    def operand_rows(self) -> _Rows:
        return _Rows(np.array(self.operand_list, abi.OPERAND))

    @property
    def fingerprint_rows(self) -> Array:
        return np.array(self.print_list, abi.FINGERPRINT)

    def side(self, words: Vocabulary) -> Side:
        return side_from_parts([self], words)  # type: ignore[list-item]

    def run(self, name: str = "run.brick", **manifest: Any) -> Run:
        """The same as an opened run."""
        document = {"name": name, "facts": {}, "circumstances": {}} | manifest
        return Run(Path(name), document, [self], [], [], [])  # type: ignore[list-item]


@dataclass(frozen=True)
class _Rows:
    rows: Array

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, start: int, stop: int) -> Array:
        return self.rows[start:stop]


# --- A small decoder ------------------------------------------------------------------------------


@dataclass
class Decoder:
    """Blocks of two linear layers with a residual, in float32 or rounded to another grid."""

    layers: int = 4
    width: int = 64
    rows: int = 16
    noise: float = 0.0
    """Relative size of rounding differences that every module makes."""
    seed: int = 0
    prefix: str = "layers"
    faults: dict[str, Any] = field(default_factory=dict)
    """What a module does to its output, by name."""
    calls: int = 1
    weights: dict[str, Array] = field(default_factory=dict)

    def record(self) -> Launches:
        """Run it and keep what a recorder would."""
        out = Launches()
        drawn = np.random.default_rng(7)
        noise = np.random.default_rng(100 + self.seed)
        made = {
            (layer, part): drawn.standard_normal((self.width, self.width)) / np.sqrt(self.width)
            for layer in range(self.layers)
            for part in ("up", "down")
        }
        inputs = [drawn.standard_normal((self.rows, self.width)) for _ in range(self.calls)]
        for call, x in enumerate(inputs):
            self._call(out, call, x, made, noise)
        return out

    def _call(self, out: Launches, call: int, x: Array, made: dict[Any, Array], noise: Any) -> None:
        start = len(out.trace_rows)
        root = out.add("Decoder", [x], kind="Decoder", position=call)
        for layer in range(self.layers):
            name = f"{self.prefix}.{layer}"
            block = out.add(name, [x], kind="Block", parent=root, position=call, layer=layer)
            mine = len(out.trace_rows) - 1
            up = self._linear(out, f"{name}.up", x, made[layer, "up"], block, call, layer, noise)
            glued = self._done(name, np.tanh(up), noise)
            down = self._linear(
                out, f"{name}.down", glued, made[layer, "down"], block, call, layer, noise
            )
            x = self._done(f"{name}+", x + down, noise)
            out._operand(int(out.trace_rows[mine]["trace"]), 1, 0, x, "float32", True)
        out._operand(int(out.trace_rows[start]["trace"]), 1, 0, x, "float32", True)

    def _linear(
        self,
        out: Launches,
        name: str,
        x: Array,
        weight: Array,
        parent: int,
        call: int,
        layer: int,
        noise: Any,
    ) -> Array:
        weight = self.weights.get(name, weight)
        y = self._done(name, x @ weight, noise)
        out.add(name, [x], [y], [weight], parent=parent, position=call, layer=layer)
        return y

    def _done(self, name: str, value: Array, noise: Any) -> Array:
        if self.noise:
            value = value * (1 + self.noise * noise.standard_normal(value.shape))
        fault = self.faults.get(name)
        return value if fault is None else fault(value)
