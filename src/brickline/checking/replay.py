"""`check_runs`: two runs that hold tensors, executed again op by op.

Each recorded op of the candidate is held against its own float64 execution, and against the
reference's constants on the candidate's inputs; each module of torch whose settings were recorded,
against the reference's weights and settings on the candidate's inputs. What stands out is a culprit
with its z. What cannot be executed again keeps what `compare` says of it. The model is not needed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from brickline.comparison.comparing import Given, compare, opened
from brickline.comparison.pairing import Alignment, align
from brickline.comparison.report.report import REPLAY
from brickline.comparison.report.run_pair import name_of
from brickline.comparison.sides import OP, PARAMETER_INDEX, Side, Vocabulary, side_from_run
from brickline.errors import RunError
from brickline.fingerprints import Fingerprint
from brickline.oracle.calls import Call
from brickline.oracle.holding import CULPRIT, Held, hold
from brickline.oracle.ratios import Ratios, measure
from brickline.oracle.widen import widened
from brickline.run_tensors import load_tensor, tensor_names
from brickline.runs import Run
from brickline.verdict import Answer, Coverage, DivergenceReport, Finding, Verdict

MODULES: tuple[str, ...] = ("Linear", "LayerNorm", "RMSNorm", "GroupNorm", "Embedding")
MODULES += ("SiLU", "GELU", "ReLU", "Sigmoid", "Tanh", "Softmax", "LeakyReLU", "ELU", "Softplus")
"""Modules of torch that settings and parameters describe in full, and that keep nothing."""

STATE = Answer.not_asked("two runs are compared through what they recorded")
LOGIC = Answer.not_asked("it needs the models: bl.check(candidate, ..., reference=...)")


def check_runs(candidate: Given, reference: Given) -> DivergenceReport:
    """Prove or clear what `compare` suspects, by executing again what two runs hold.

    Args:
        candidate: The run in question; recorded with ``tensors="all"``, best with ``level="op"``.
        reference: The run it is held against.

    Raises:
        UsageError: if an argument is neither a path nor a run.
        RunError: if a path holds no readable run.
    """
    ours, theirs = opened(candidate, "candidate"), opened(reference, "reference")
    first = compare(ours, theirs)
    if not tensor_names(ours.path):
        why = (
            f"{ours.path.name} holds no tensors, so nothing was executed again; record it with "
            'bl.record(path, model, level="op", tensors="all")'
        )
        return replace(
            first,
            state=STATE,
            logic=LOGIC,
            arithmetic=Answer.not_asked(why),
        )
    words = Vocabulary()
    a, b = side_from_run(ours, words), side_from_run(theirs, words)
    replay = _Replay(ours, theirs, a, b, align(a, b))
    culprits = list(replay.culprits())
    return _merged(first, culprits, replay)


@dataclass
class _Replay:
    """Executes a run's launches again."""

    ours: Run
    theirs: Run
    a: Side
    b: Side
    alignment: Alignment
    executed: int = 0
    refused: int = 0

    def culprits(self) -> Iterator[Finding]:
        """Yield what is wrong, in the order of execution, each name once."""
        named: set[str] = set()
        for row in range(len(self.a)):
            if self.a.direction[row]:
                continue
            finding = self._op(row) if self.a.level[row] == OP else self._module(row)
            if finding is not None and finding.name not in named:
                named.add(finding.name)
                yield finding

    # --- ops

    def _op(self, row: int) -> Finding | None:
        document = _document(self.a, row)
        func = _function(self.a.path(row))
        inputs = self._tensors(self.ours, self.a, row, outputs=False)
        outputs = self._tensors(self.ours, self.a, row, outputs=True)
        if func is None or inputs is None or outputs is None or not outputs:
            self.refused += 1
            return None
        try:
            call = _call(func, document, inputs)
            held = hold(call, list(outputs))
        except (ValueError, KeyError, IndexError, RuntimeError):
            self.refused += 1
            return None
        self.executed += 1
        if held is not None and held.verdict in (Verdict.CULPRIT, Verdict.NONFINITE_ORIGIN):
            return self._finding(row, held.verdict, held.z, held.ratios, _words(held))
        return self._other_constants(row, func, document, inputs, outputs)

    def _other_constants(
        self,
        row: int,
        func: Any,
        document: Mapping[str, Any],
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
    ) -> Finding | None:
        """Hold an op against the reference's constants on its own inputs."""
        other = int(self.alignment.partner[row])
        if other < 0 or self.a.name[row] != self.b.name[other]:
            return None
        theirs = _document(self.b, other)
        if all(document.get(key) == theirs.get(key) for key in ("args", "kwargs")):
            return None
        try:
            held = hold(_call(func, theirs, inputs), list(outputs))
        except (ValueError, KeyError, IndexError, RuntimeError):
            return None
        if held is None or held.verdict is not Verdict.CULPRIT:
            return None
        cause = f"called with {_constants(document)}, reference {_constants(theirs)}"
        return self._finding(row, held.verdict, held.z, held.ratios, cause)

    # --- modules

    def _module(self, row: int) -> Finding | None:
        other = int(self.alignment.partner[row])
        if other < 0:
            return None
        theirs = _document(self.b, other)
        if theirs.get("type") not in MODULES:
            return None
        inputs = self._tensors(self.ours, self.a, row, outputs=False)
        outputs = self._tensors(self.ours, self.a, row, outputs=True)
        weights = self._tensors(self.theirs, self.b, other, outputs=False, parameters=True)
        module = None if weights is None or not inputs else _built(theirs, weights, inputs[0])
        if module is None or not inputs or not outputs or weights is None:
            self.refused += 1
            return None
        names = theirs.get("parameters", [])
        try:
            ratios = _hold_module(module, dict(zip(names, weights, strict=True)), inputs, outputs)
        except (RuntimeError, ValueError, TypeError, KeyError):
            self.refused += 1
            return None
        self.executed += 1
        if ratios.z <= CULPRIT:
            return None
        cause = self._module_cause(row, other, theirs)
        return self._finding(row, Verdict.CULPRIT, ratios.z, ratios, cause)

    def _module_cause(self, row: int, other: int, theirs: Mapping[str, Any]) -> str | None:
        settings = _document(self.a, row).get("settings"), theirs.get("settings")
        if settings[0] != settings[1]:
            return f"its settings are {settings[0]}, reference {settings[1]}"
        ours = self._tensors(self.ours, self.a, row, outputs=False, parameters=True) or ()
        held = self._tensors(self.theirs, self.b, other, outputs=False, parameters=True) or ()
        for name, mine, their in zip(theirs.get("parameters", ()), ours, held, strict=False):
            if mine.shape != their.shape or not torch.equal(
                mine.double(), their.to(mine.dtype).double()
            ):
                return f"its {name} is not the reference's"
        return None

    # --- parts

    def _tensors(
        self, run: Run, side: Side, row: int, *, outputs: bool, parameters: bool = False
    ) -> list[torch.Tensor] | None:
        """Return a launch's tensors from disk; None where one was not kept."""
        found = []
        for operand in range(int(side.first[row]), int(side.first[row + 1])):
            is_parameter = int(side.index[operand]) >= PARAMETER_INDEX
            if (side.role[operand] > 0) != outputs or is_parameter != parameters:
                continue
            if side.print[operand] < 0:
                return None
            record = side.prints.records(side.print[[operand]])[0]
            try:
                array = load_tensor(run.path, Fingerprint.from_bytes(record.tobytes()))
            except RunError:
                return None
            found.append(_as_torch(array))
        return found

    def _finding(
        self, row: int, verdict: Verdict, z: float | None, ratios: Ratios | None, cause: str | None
    ) -> Finding:
        a, is_op = self.a, bool(self.a.level[row] == OP)
        parent = int(a.parent[row])
        layer, brick = int(a.layer[row]), int(a.brick[row])
        other = int(self.alignment.partner[row])
        return Finding(
            name=name_of(a, row),
            verdict=verdict,
            layer_idx=None if layer < 0 else layer,
            position=int(a.position[row]),
            ordinal=int(a.ordinal[parent if is_op and parent >= 0 else row]),
            brick=None if brick < 0 else a.words[brick],
            op=a.path(row) if is_op else None,
            z=z,
            local_error=None if ratios is None else ratios.relative_l2,
            cause=cause,
            reference_name=self.b.path(other) if other >= 0 else None,
            reason="share and repro need the model: bl.check(candidate, ..., reference=...)",
            evidence={} if ratios is None else {"largest": ratios.largest, "worst": ratios.worst},
        )


def _hold_module(
    module: nn.Module,
    weights: Mapping[str, torch.Tensor],
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
) -> Ratios:
    """Hold an output against a module in float64, and in the candidate's own dtype."""
    narrow = outputs[0].dtype
    # The reference's weights as the candidate would hold them, made once and widened.
    own = {
        name: each.to(narrow) if each.is_floating_point() else each
        for name, each in weights.items()
    }
    with torch.no_grad():
        wide, given = widened((own, tuple(inputs)))
        exact = torch.func.functional_call(module.double(), wide, given)
        clean = torch.func.functional_call(module.to(narrow), own, tuple(inputs))
    return measure(outputs[0], exact, clean=clean)


def _built(
    document: Mapping[str, Any], weights: Sequence[torch.Tensor], given_to: torch.Tensor
) -> nn.Module | None:
    """Return the module of torch that a trace describes; its parameters come later."""
    kind, settings = str(document.get("type")), document.get("settings", {})
    if not isinstance(settings, dict):
        return None
    given = {name: value for name, value in settings.items() if name != "inplace"}
    if kind in ("LayerNorm", "RMSNorm"):
        given["normalized_shape"] = weights[0].shape if weights else given_to.shape[-1:]
    if "bias" not in given and "parameters" in document and kind not in ("RMSNorm", "Embedding"):
        given["bias"] = "bias" in document["parameters"]
    try:
        with torch.device("meta"):
            module: nn.Module = getattr(nn, kind)(**given)
    except (TypeError, ValueError, RuntimeError):
        return None
    return module.eval()


def _document(side: Side, row: int) -> Mapping[str, Any]:
    try:
        document = json.loads(side.words[int(side.params[row])] or "{}")
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _function(name: str) -> Any:
    """Return the op of a name such as ``aten.mm.default``; None where torch has no such op."""
    parts = name.split(".")
    if len(parts) != 3:
        return None
    try:
        return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
    except (AttributeError, RuntimeError):
        return None


def _call(func: Any, document: Mapping[str, Any], inputs: Sequence[torch.Tensor]) -> Call:
    args = tuple(_decoded(each, inputs) for each in document["args"])
    kwargs = {name: _decoded(each, inputs) for name, each in document.get("kwargs", {}).items()}
    return Call(func, args, kwargs)


def _decoded(value: Any, inputs: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(each, inputs) for each in value]
    if not isinstance(value, dict):
        return value
    (kind, inner) = next(iter(value.items()))
    if kind == "tensor":
        return inputs[int(inner)]
    if kind in ("dtype", "layout", "memory_format"):
        return getattr(torch, inner)
    if kind == "device":
        return torch.device("cpu")
    if kind == "float":
        return float(inner)
    if kind == "complex":
        return complex(*inner)
    raise ValueError(f"an argument of {kind} cannot be made again")


def _as_torch(array: Any) -> torch.Tensor:
    """Return an array of any of brickline's dtypes as a tensor."""
    name = str(array.dtype)
    narrow = {
        "bfloat16": "bfloat16",
        "float8_e4m3fn": "float8_e4m3fn",
        "float8_e5m2": "float8_e5m2",
    }
    if name in narrow:
        bits = np.ascontiguousarray(array).view(
            np.uint16 if array.dtype.itemsize == 2 else np.uint8
        )
        return torch.from_numpy(bits.copy()).view(getattr(torch, narrow[name]))
    return torch.from_numpy(np.array(array))


def _words(held: Held) -> str | None:
    return held.reason if held.verdict is Verdict.NONFINITE_ORIGIN else None


def _constants(document: Mapping[str, Any]) -> str:
    shown = [each for each in document.get("args", ()) if not isinstance(each, dict)]
    return json.dumps([*shown, *document.get("kwargs", {}).items()])


def _merged(
    first: DivergenceReport, culprits: Sequence[Finding], replay: _Replay
) -> DivergenceReport:
    """Return the comparison's report with what was proved, the largest part first."""
    proved = {each.name for each in culprits}
    order = {finding.name: place for place, finding in enumerate(first.findings)}
    ranked = sorted(
        culprits, key=lambda each: (order.get(each.name, len(order)), -(each.local_error or 0.0))
    )
    rest = [each for each in first.findings if each.name not in proved]
    notes = [each for each in first.coverage.notes if not each.endswith(REPLAY)]
    if replay.refused:
        notes.append(
            f"{replay.refused} launches could not be executed again, for want of their tensors or "
            "of a description"
        )
    coverage = Coverage(first.coverage.compared, first.coverage.total, tuple(notes))
    places = {each.name: each.where for each in first.findings}
    ranked = [replace(each, where=each.where or places.get(each.name)) for each in ranked]
    line = f"{replay.executed} launches were executed again in float64"
    figure = max((each.z for each in ranked if each.z is not None), default=None)
    return replace(
        first,
        findings=(*ranked, *rest),
        state=STATE,
        logic=LOGIC,
        arithmetic=Answer(line, figure, CULPRIT, shown=replay.executed > 0),
        coverage=coverage,
        next_command=None if ranked else first.next_command,
    )
