"""One side of a comparison: a run's launches, operands and fingerprints as columns.

Owns the reading of a run into NumPy columns in order of execution, and the vocabulary that both
sides share, so that equal names are equal numbers. Knows nothing of the other side.

::

    launches   row per launch, sorted by rank, direction and order of entry
    operands   row per tensor of a launch, sorted by launch; `first[i]:first[i + 1]` are those of i
    prints     row per fingerprint; an operand names it by its row, -1 where none was taken
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.align.keys import Ints, mixed
from brickline.align.names import kind_of
from brickline.align.sequences import Bools
from brickline.comparison.fingerprint_columns import CHUNK, FingerprintColumns
from brickline.run.failures import is_failure
from brickline.runs import Part, Run

PARAMETER_INDEX = 1000
"""Operands from this index on are parameters of the module itself."""
MOST_ARGUMENTS = 62
"""Arguments of a plan's launch of which is told whether they are ends."""
FLAT, MODULE, OP = 0, 1, 2
_LEVELS = {"module": MODULE, "op": OP}


class Vocabulary:
    """Numbers for the texts of both sides."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Return the number of a text; the first time, a new one."""
        known = self._numbers.setdefault(text, len(self.texts))
        if known == len(self.texts):
            self.texts.append(text)
        return known

    def __getitem__(self, number: int) -> str:
        return self.texts[number]


@dataclass(eq=False)
class Side:
    """A run's launches in order of execution; every array has one entry per launch or operand."""

    words: Vocabulary
    name: Ints
    kind: Ints
    """The name without the number of its layer: siblings in other layers are of one kind."""
    type: Ints
    """Class of the module, -1 where it is not known."""
    level: Ints
    layer: Ints
    position: Ints
    ordinal: Ints
    parent: Ints
    """Row of the enclosing launch, -1: none."""
    direction: Ints
    rank: Ints
    brick: Ints
    """Name of the brick, -1: none."""
    backend: Ints
    params: Ints
    source: Ints
    """Part and row in it, as part << 40 | row."""
    kernel: Ints
    """Name and digest of the kernel of a plan's launch, -1: no plan's."""
    entering: Ints
    """Which inputs of a plan's launch no launch before it writes, a bit for each; -1: no plan's."""
    results: Ints
    """Which outputs of a plan's launch no launch after it reads, likewise."""
    first: Ints
    role: Ints
    index: Ints
    tensor: NDArray[np.uint64]
    dtype: Ints
    elements: Ints
    width: Ints
    """Length of the last dimension, 1 for scalars."""
    form: NDArray[np.uint64]
    """Hash of the shape."""
    print: Ints
    prints: FingerprintColumns
    parameter_names: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Names of a module's own parameters by the number of its params text, where recorded."""
    problems: list[str] = field(default_factory=list)
    has_failures: bool = False
    """Whether brickline failed while it recorded: what is missing hides more than one launch."""

    def __len__(self) -> int:
        return len(self.name)

    @property
    def owner(self) -> Ints:
        """The launch of every operand."""
        return np.repeat(np.arange(len(self)), np.diff(self.first))

    def path(self, row: int) -> str:
        """Return the name of a launch: its module path, its brick in a plan, or its kernel."""
        return self.words[int(self.name[row])]

    def plan_of(self, row: int) -> dict[str, Any]:
        """Return what a plan noted of a launch; empty where it is none of a plan's."""
        found = _parsed(self.words[int(self.params[row])])
        return found if found.get("level") == "launch" else {}

    def has_children(self) -> Bools:
        """Return which launches enclose others."""
        found = np.zeros(len(self), bool)
        found[self.parent[self.parent >= 0]] = True
        return found

    def around(self, marked: Bools) -> Ints:
        """Return the innermost marked launch that encloses each launch, -1: none."""
        around = self.parent.copy()
        for _ in range(64):
            lost = (around >= 0) & ~marked[np.maximum(around, 0)]
            if not lost.any():
                break
            around[lost] = self.parent[around[lost]]
        return around


def side_from_run(run: Run, words: Vocabulary) -> Side:
    """Read a run's launches."""
    side = side_from_parts(run.parts, words)
    side.problems += [str(problem) for problem in run.problems]
    side.has_failures = any(map(is_failure, side.problems))
    return side


def side_from_parts(parts: Sequence[Part], words: Vocabulary) -> Side:
    """Read the launches of several parts, those of lower ranks first."""
    launches = [_launches_of(part, number, words) for number, part in enumerate(parts)]
    prints = FingerprintColumns([part.fingerprint_rows for part in parts])
    operands = [
        _operands_of(part, words, offset)
        for part, offset in zip(parts, prints.offsets, strict=False)
    ]
    bases = np.cumsum([0, *(len(each["name"]) for each in launches)])
    for each, owned, base in zip(launches, operands, bases, strict=False):
        each["parent"] = np.where(each["parent"] >= 0, each["parent"] + base, -1)
        owned["launch"] += np.where(owned["launch"] >= 0, base, 0)
    columns = _joined(launches) or _empty_launches()
    own = _joined(operands) or _empty_operands()
    order = np.lexsort((columns["trace"], columns["direction"], columns["part"], columns["rank"]))
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    columns = {name: values[order] for name, values in columns.items()}
    parent = columns["parent"]
    columns["parent"] = np.where(parent >= 0, place[parent], -1)
    kept = own["launch"] >= 0
    own = {name: values[kept] for name, values in own.items()}
    own["launch"] = place[own["launch"]]
    known = own["print"] >= 0
    own["print"][known] = np.where(prints.taken[own["print"][known]], own["print"][known], -1)
    sequence = np.lexsort((own["index"], own["role"], own["launch"]))
    own = {name: values[sequence] for name, values in own.items()}
    first = np.searchsorted(own.pop("launch"), np.arange(len(order) + 1))
    for name in ("trace", "part"):
        columns.pop(name)
    names: dict[int, tuple[str, ...]] = {}
    failed: list[int] = []
    for number in np.unique(columns["params"]):
        document = _parsed(words[int(number)]) if number >= 0 else {}
        found = document.get("parameters")
        if isinstance(found, list | tuple):
            names[int(number)] = tuple(map(str, found))
        if document.get("raised") is True:
            failed.append(int(number))
    side = Side(words, **columns, first=first, **own, prints=prints, parameter_names=names)
    side.problems += _unfinished(side, failed, parts)
    return side


def _unfinished(side: Side, failed: Sequence[int], parts: Sequence[Part]) -> Iterator[str]:
    """Say which calls of a root did not come to their end: nobody knows what they would make."""
    raised = np.flatnonzero(np.isin(side.params, failed) & (side.parent < 0))
    if len(raised):
        row = int(raised[0])
        rest = f", and {len(raised) - 1} more" if len(raised) > 1 else ""
        yield (
            f"call {int(side.position[row])} of {side.path(row)} raised{rest}; what comes after is "
            "not in the run"
        )
    lost = 0
    for part in parts:
        parents = part.traces["parent"]
        lost += int((~np.isin(parents, part.traces["trace"]) & (parents > 0)).sum())
    if lost:
        yield (
            f"{lost} launches lie in calls that did not end: the recording was cut off; record it "
            "again"
        )


def _joined(columns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    filled = [each for each in columns if len(next(iter(each.values())))]
    if not filled:
        return {}
    if len(filled) == 1:
        return dict(filled[0])
    return {name: np.concatenate([each[name] for each in filled]) for name in filled[0]}


def _launches_of(part: Part, number: int, words: Vocabulary) -> dict[str, Any]:
    rows = part.traces
    params, params_at = np.unique(rows["params"], return_inverse=True)
    documents = [_parsed(part.string(int(each))) for each in params]
    names, names_at = np.unique(rows["name"], return_inverse=True)
    texts = [part.string(int(each)) for each in names]
    # Plans are held against each other by their bricks: another kernel may do the same work.
    bricks = [_brick_of_launch(each) for each in documents]
    planned = np.array([bool(each) for each in bricks], bool)[params_at.reshape(-1)]
    slots = {int(each["slot"]): words.number(part.string(each["name"])) for each in part.slots}
    used, used_at = np.unique(rows["slot"], return_inverse=True)
    trace = rows["trace"].astype(np.int64)
    return {
        "name": np.where(
            planned,
            _looked_up([words.number(each) for each in bricks], params_at),
            _looked_up([words.number(text) for text in texts], names_at),
        ),
        "kind": np.where(
            planned,
            _looked_up([words.number(kind_of(each)) for each in bricks], params_at),
            _looked_up([words.number(kind_of(text)) for text in texts], names_at),
        ),
        "type": _looked_up([_type_number(each, words) for each in documents], params_at),
        "level": _looked_up(
            [_LEVELS.get(str(each.get("level")), FLAT) for each in documents], params_at
        ),
        "layer": rows["layer"].astype(np.int64),
        "position": rows["position"].astype(np.int64),
        "ordinal": np.where(planned, 0, rows["ordinal"].astype(np.int64)),
        "parent": _rows_of(rows["parent"].astype(np.int64), trace),
        "direction": rows["direction"].astype(np.int64),
        "rank": rows["rank"].astype(np.int64),
        "brick": _looked_up([slots.get(int(each), -1) for each in used], used_at),
        "backend": _words_of(part, rows["backend"], words),
        "params": _words_of(part, rows["params"], words),
        "source": (number << 40) + np.arange(len(rows), dtype=np.int64),
        "kernel": _looked_up([_kernel_number(each, words) for each in documents], params_at),
        "entering": _looked_up([_bits(each, "reads", "entering") for each in documents], params_at),
        "results": _looked_up([_bits(each, "writes", "results") for each in documents], params_at),
        "trace": trace,
        "part": np.full(len(rows), number, np.int64),
    }


def _operands_of(part: Part, words: Vocabulary, offset: int) -> dict[str, Any]:
    rows = part.operand_rows
    pieces = [
        _columns_of_operands(part, rows.read(begin, begin + CHUNK), words)
        for begin in range(0, len(rows), CHUNK)
    ]
    columns = _joined(pieces) or _empty_operands()
    traces = part.traces["trace"].astype(np.int64)
    columns["launch"] = _rows_of(columns["launch"], traces)
    prints = columns["print"]
    known = (prints > 0) & (prints <= len(part.fingerprint_rows))
    columns["print"] = np.where(known, prints - 1 + offset, -1)
    return columns


def _columns_of_operands(part: Part, rows: NDArray[Any], words: Vocabulary) -> dict[str, Any]:
    dimensions = np.minimum(rows["dimensions"].astype(np.int64), 8)
    shape = rows["shape"]
    last = shape[np.arange(len(rows)), np.maximum(dimensions - 1, 0)]
    elements = np.ones(len(rows), np.int64)
    form = dimensions.astype(np.uint64)
    for axis in range(int(dimensions.max(initial=0))):
        inside = axis < dimensions
        elements *= np.where(inside, shape[:, axis], 1)
        form = np.where(inside, mixed(form, shape[:, axis]), form)
    return {
        "launch": rows["trace"].astype(np.int64),
        "role": rows["role"].astype(np.int8),
        "index": rows["index"].astype(np.int32),
        "tensor": rows["tensor"].astype(np.uint64),
        "dtype": _words_of(part, rows["dtype"], words).astype(np.int32),
        "elements": elements,
        "width": np.where(dimensions > 0, last, 1),
        "form": form,
        "print": rows["fingerprint"].astype(np.int64),
    }


def _rows_of(wanted: Ints, traces: Ints) -> Ints:
    """Return the row of each trace id, -1 where there is none."""
    if not len(traces):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(traces, kind="stable")
    at = np.minimum(np.searchsorted(traces, wanted, sorter=order), len(traces) - 1)
    found = order[at]
    return np.where((traces[found] == wanted) & (wanted > 0), found, -1)


def _words_of(part: Part, numbers: NDArray[Any], words: Vocabulary) -> Ints:
    unique, at = np.unique(numbers, return_inverse=True)
    return _looked_up([words.number(part.string(int(each))) for each in unique], at)


def _looked_up(values: Iterable[int], at: NDArray[Any]) -> Ints:
    table = np.fromiter(values, np.int64)
    return table[at.reshape(-1)] if len(table) else np.empty(0, np.int64)


def _parsed(text: str) -> dict[str, Any]:
    if not text.startswith("{"):
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _type_number(document: dict[str, Any], words: Vocabulary) -> int:
    found = document.get("type")
    return words.number(found) if isinstance(found, str) else -1


def _brick_of_launch(document: dict[str, Any]) -> str:
    """Return the brick of a plan's launch, numbered within its layer; empty where none is noted."""
    found = document.get("brick")
    return found if document.get("level") == "launch" and isinstance(found, str) else ""


def _kernel_number(document: dict[str, Any], words: Vocabulary) -> int:
    found = document.get("kernel")
    planned = document.get("level") == "launch" and isinstance(found, str)
    return words.number(str(found)) if planned else -1


def arguments_of(document: dict[str, Any], which: str) -> list[tuple[str, str]]:
    """Return what a plan's launch "reads" or "writes": arguments with their buffers, in order."""
    found = document.get(which)
    pairs = found if isinstance(found, list) else []
    return [
        (str(each[0]), str(each[1])) for each in pairs if isinstance(each, list) and len(each) == 2
    ]


def _bits(document: dict[str, Any], which: str, ends: str) -> int:
    """Return which arguments a plan noted as its ends, a bit for each; -1 where it noted none."""
    noted = document.get(ends)
    if document.get("level") != "launch" or not isinstance(noted, list):
        return -1
    names = [argument for argument, _ in arguments_of(document, which)][:MOST_ARGUMENTS]
    return sum(1 << place for place, name in enumerate(names) if name in noted)


def _empty_launches() -> dict[str, Any]:
    names = "name kind type level layer position ordinal parent direction rank brick backend"
    names += " params source kernel entering results trace part"
    return {name: np.empty(0, np.int64) for name in names.split()}


def _empty_operands() -> dict[str, Any]:
    names = "launch role index tensor dtype elements width form print"
    wide = ("tensor", "form")
    return {name: np.empty(0, np.uint64 if name in wide else np.int64) for name in names.split()}


_LAUNCH: tuple[str, ...] = (
    "name",
    "kind",
    "type",
    "level",
    "layer",
    "position",
    "ordinal",
    "parent",
    "direction",
)
_LAUNCH += ("rank", "brick", "backend", "params", "source", "kernel", "entering", "results")
_OPERAND = ("role", "index", "tensor", "dtype", "elements", "width", "form", "print")


def modules_alone(side: Side) -> Side:
    """Return the side without the ops inside its modules; itself where it has only one of both."""
    keep = side.level != OP
    if keep.all() or not keep.any():
        return side
    place = np.cumsum(keep) - 1
    kept = keep[side.owner]
    columns = {name: getattr(side, name)[keep] for name in _LAUNCH}
    columns["parent"] = np.where(columns["parent"] >= 0, place[columns["parent"]], -1)
    first = np.concatenate([[0], np.cumsum(np.diff(side.first)[keep])])
    operands = {name: getattr(side, name)[kept] for name in _OPERAND}
    return replace(side, first=first, **columns, **operands)


def settings_of(side: Side, row: int) -> dict[str, Any]:
    """Return the settings of a launch's module, such as an eps; empty where none are recorded."""
    found = _parsed(side.words[int(side.params[row])]).get("settings")
    return found if isinstance(found, dict) else {}
