"""The first half of ``brickline demo``: one decode in two versions, and the brick that is wrong.

The reference is the demo's model. The candidate is a port of it that adds up its products in
another order, which is harmless, and has one fault planted, which is not. Both are recorded as
runs. Then every brick of the reference is run in float64, and in float32, on the inputs that the
candidate's brick had: whatever is further from float64 than float32 must be is wrong by itself,
whatever came in. This is what `brickline.check` does for PyTorch, in NumPy and for one model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brickline.commands.demo_model import DemoModel, gated_silu, rms_norm, rotate, softmax
from brickline.commands.demo_weights import Floats, ModelConfig
from brickline.profiler import BrickProfiler
from brickline.verdict import (
    Coverage,
    DivergenceReport,
    Finding,
    Verdict,
    VerdictRow,
    VerdictTable,
    evidence_lines,
)

TOKENS = 24
PLANTED = "layers.3.mlp.norm"
PLANTED_EPSILON = 1e-3
"""The reference's is 1e-5; both are found in models that people run."""
CLEAN_RATIO = 2.0
"""A clean RMSE is at most this often that of the reference in the same dtype."""
FLOOR = 0.29 * 2**-23
"""Relative RMSE of rounding to float32 alone."""

Arrays = tuple[NDArray[Any], ...]


class Launch(NamedTuple):
    """One brick as it ran."""

    name: str
    layer: int
    position: int
    inputs: Arrays
    outputs: Arrays


@dataclass(frozen=True)
class Decode:
    """One decode, with everything that went in and out of its bricks."""

    launches: list[Launch]
    tokens: list[int]

    @property
    def logits(self) -> Floats:
        """What the last step ended with."""
        return self.launches[-1].outputs[0]


class Port(DemoModel):
    """The same model as somebody else would write it, with a fault in one brick."""

    faulty = True

    def project(self, x: Floats, weight: Floats) -> Floats:
        """Add up the two halves of each sum by themselves, as a split-K kernel does."""
        half = weight.shape[1] // 2
        first: Floats = x[:, :half] @ weight[:, :half].T
        return first + x[:, half:] @ weight[:, half:].T

    def norm(self, x: Floats, weight: Floats, name: str) -> Floats:
        """Normalise with the wrong epsilon where the fault is planted."""
        wrong = self.faulty and name == PLANTED
        return rms_norm(x, weight, PLANTED_EPSILON if wrong else self.config.norm_epsilon)


class RepairedPort(Port):
    """The port with the reference's brick in place of the culprit's: what is left of the error?"""

    faulty = False


def record_decode(
    kind: type[DemoModel],
    prompt: Sequence[int],
    path: Path | None,
    *,
    count: int = TOKENS,
    overwrite: bool = False,
) -> Decode:
    """Decode some tokens; with a path, leave a run whose launches carry fingerprints."""
    kept: list[Launch] = []
    recording = {"path": path, "overwrite": overwrite, "enabled": True} if path else {}
    with BrickProfiler(kind.__name__, **recording) as profiler:  # type: ignore[arg-type]
        position = 0

        def observe(name: str, layer: int, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            kept.append(Launch(name, layer, position, _copied(inputs), _copied(outputs)))
            if path is not None:
                at = layer if layer >= 0 else None
                profiler.trace(name, layer=at, position=position, inputs=inputs, outputs=outputs)

        model = kind(profiler, ModelConfig(), observe=observe)
        tokens = []
        for token in model.generate(prompt, count):
            tokens.append(token)
            position += 1
    return Decode(kept, tokens)


def _copied(arrays: Sequence[NDArray[Any]]) -> Arrays:
    return tuple(array.copy() for array in arrays)


# ---------------------------------------------------------------------- what others say about it


def first_not_close(
    candidate: Decode, reference: Decode, rtol: float, atol: float
) -> tuple[int, Launch | None]:
    """Return how many launches `numpy.allclose` tells apart, and the first of them."""
    apart = [
        ours
        for ours, theirs in zip(candidate.launches, reference.launches, strict=True)
        if not all(
            np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)
            for a, b in zip(ours.outputs, theirs.outputs, strict=True)
        )
    ]
    return len(apart), apart[0] if apart else None


# ------------------------------------------------------------------- the reference, brick by brick


class ReferenceBricks:
    """The model's bricks as plain functions, in the precision that is asked for."""

    def __init__(self, model: DemoModel, dtype: type[np.floating[Any]]) -> None:
        self._config = model.config
        self._dtype = dtype
        self._weights: dict[str, NDArray[Any]] = dict(self._named_weights(model))

    def _named_weights(self, model: DemoModel) -> Iterator[tuple[str, NDArray[Any]]]:
        yield "embedding", model.weights.embedding.astype(self._dtype)
        yield "final_norm", model.weights.final_norm.astype(self._dtype)
        yield "lm_head", model.weights.head.astype(self._dtype)
        for layer, w in enumerate(model.weights.layers):
            matrices = {"qkv": w.qkv, "output": w.output, "norm": w.attention_norm}
            for name, weight in matrices.items():
                yield f"layers.{layer}.attention.{name}", weight.astype(self._dtype)
            for name, weight in (
                ("gate", w.gate), ("up", w.up), ("down", w.down), ("norm", w.mlp_norm)
            ):  # fmt: skip
                yield f"layers.{layer}.mlp.{name}", weight.astype(self._dtype)

    def __call__(self, launch: Launch) -> Arrays:
        """Run a brick on the inputs of a launch."""
        kind = launch.name.rpartition(".")[2]
        inputs = [
            each.astype(self._dtype) if each.dtype.kind == "f" else each for each in launch.inputs
        ]
        made = self._run(kind, self._weights.get(launch.name), inputs)
        shaped = made if isinstance(made, tuple) else (made,)
        return tuple(
            each.reshape(output.shape) for each, output in zip(shaped, launch.outputs, strict=True)
        )

    def _run(self, kind: str, weight: Any, inputs: list[NDArray[Any]]) -> Any:
        match kind:
            case "embedding":
                return weight[inputs[0]]
            case "norm" | "final_norm":
                return rms_norm(inputs[0], weight, self._config.norm_epsilon)
            case "rope":
                qkv, cos, sin = inputs
                return rotate(qkv[:, : self._config.heads + self._config.kv_heads], cos, sin)
            case "cache":
                return tuple(each.swapaxes(0, 1) for each in inputs)
            case "scores":
                return self._scores(*inputs)
            case "softmax":
                return softmax(inputs[0].copy())
            case "mix":
                return self._mix(*inputs)
            case "activation":
                return gated_silu(inputs[0], inputs[1])
            case "add":
                return inputs[0] + inputs[1]
            case _:
                return inputs[0] @ weight.T

    def epsilon_that_explains(self, launch: Launch) -> str | None:
        """Say which epsilon makes a norm what it is, if one does down to the rounding."""
        if not launch.name.endswith("norm"):
            return None
        x, weight = launch.inputs[0].astype(self._dtype), self._weights[launch.name]
        plain = rms_norm(x, weight, 0.0)
        scale = (plain * plain).sum(axis=-1) / (plain * launch.outputs[0]).sum(axis=-1)
        fits = float(np.median((scale**2 - 1) * np.square(x).mean(axis=-1)))
        explained = rms_norm(x, weight, fits)
        if fits < 0 or _ratio(launch.outputs[0], explained, explained) > 2:
            return None
        own = self._config.norm_epsilon
        return f"an epsilon of {fits:.1e} in place of {own:.1e} explains all of it"

    def _scores(self, queries: NDArray[Any], keys: NDArray[Any]) -> NDArray[Any]:
        c, rows, end = self._config, len(queries), keys.shape[1]
        scaled = queries.swapaxes(0, 1) * self._dtype(1 / math.sqrt(c.head_dim))
        grouped = scaled.reshape(c.kv_heads, -1, c.head_dim)
        scores: NDArray[Any] = grouped @ keys.swapaxes(1, 2)
        future = np.arange(end) > np.arange(end - rows, end)[:, None]
        scores.reshape(c.heads, rows, end)[:, future] = -np.inf
        return scores

    def _mix(self, shares: NDArray[Any], values: NDArray[Any]) -> NDArray[Any]:
        c, rows = self._config, shares.shape[1] * self._config.kv_heads // self._config.heads
        mixed: NDArray[Any] = shares @ values
        return mixed.reshape(c.heads, rows, c.head_dim).swapaxes(0, 1)


# ------------------------------------------------------------------------------------- the verdicts


def check_decode(candidate: Decode, reference: Decode, repaired: Decode) -> DivergenceReport:
    """Hold every brick of the candidate to the reference's, on the candidate's own inputs.

    Args:
        candidate: the decode that is in question.
        reference: the decode that it should have been.
        repaired: the candidate's decode with the reference's brick in place of the culprit.
    """
    model = DemoModel(BrickProfiler("reference"), ModelConfig())
    exact, clean = ReferenceBricks(model, np.float64), ReferenceBricks(model, np.float32)
    table = VerdictTable()
    for ours, theirs in zip(candidate.launches, reference.launches, strict=True):
        table.append(_row(ours, theirs, exact(ours), clean(ours)))
    guilty = [row for row in table if row.verdict is Verdict.CULPRIT]
    # The repaired port answers for the share: what is left without the culprit is rounding.
    before, after = (_apart(each.logits, reference.logits) for each in (candidate, repaired))
    first = {each.name: each for each in reversed(candidate.launches)}
    findings = tuple(
        _finding(name, guilty, before, after, first[name], exact) for name in _names(guilty)
    )
    report = DivergenceReport(
        candidate="port",
        reference="model",
        findings=findings,
        verdicts=table,
        coverage=Coverage(len(table), len(candidate.launches)),
        noise_floor=after,
        final_error=before,
        kernels_compared=len(table),
    )
    return replace(report, whys=tuple(evidence_lines(report)))


def _row(ours: Launch, theirs: Launch, exact: Arrays, clean: Arrays) -> VerdictRow:
    z = max(map(_ratio, ours.outputs, exact, clean))
    carried = max(map(_apart, ours.outputs, theirs.outputs))
    if z > 2:
        verdict = Verdict.CULPRIT
    elif z > 1:
        verdict = Verdict.WATCH
    elif not carried:
        verdict = Verdict.IDENTICAL
    else:
        came = max((_apart(a, b) for a, b in zip(ours.inputs, theirs.inputs, strict=True)))
        verdict = Verdict.PROPAGATED if came > 1e-5 else Verdict.ROUNDING
    return VerdictRow(
        name=ours.name,
        reference_name=theirs.name,
        layer_idx=ours.layer if ours.layer >= 0 else None,
        position=ours.position,
        ordinal=0,
        direction="forward",
        brick=None,
        op=None,
        verdict=verdict,
        z=z,
        local_error=max(map(_apart, ours.outputs, exact)),
        propagated_error=carried,
    )


def _ratio(actual: NDArray[Any], exact: NDArray[Any], clean: NDArray[Any]) -> float:
    """Return the RMSE to the largest that a clean float32 brick has."""
    finite = np.isfinite(exact)
    right = exact[finite]
    limit = CLEAN_RATIO * max(_rms(clean[finite] - right), FLOOR * _rms(right), 1e-45)
    return _rms(actual[finite] - right) / limit


def _apart(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the relative L2 distance over what is finite."""
    finite = np.isfinite(b)
    size = _rms(b[finite])
    return _rms(a[finite].astype(np.float64) - b[finite]) / size if size else 0.0


def _rms(values: NDArray[Any]) -> float:
    return math.sqrt(np.mean(np.square(values, dtype=np.float64))) if values.size else 0.0


def _names(rows: Sequence[VerdictRow]) -> list[str]:
    return list(dict.fromkeys(row.name for row in rows))


def _finding(
    name: str,
    rows: Sequence[VerdictRow],
    before: float,
    after: float,
    launch: Launch,
    exact: ReferenceBricks,
) -> Finding:
    first = next(row for row in rows if row.name == name)
    every = [row for row in rows if row.name == name]
    return Finding(
        name=name,
        verdict=first.verdict,
        layer_idx=first.layer_idx,
        position=first.position,
        z=first.z,
        local_error=first.local_error,
        propagated_error=first.propagated_error,
        share=1 - after / before if len(_names(rows)) == 1 else None,
        where=f"every row, in each of {len(every)} calls",
        cause=exact.epsilon_that_explains(launch),
        reference_name=name,
        evidence={"repaired_to": after},
    )
