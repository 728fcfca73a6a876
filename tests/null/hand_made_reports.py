"""Divergence reports made by hand: a decoder of 24 layers in which one projection is wrong."""

from __future__ import annotations

import random
from dataclasses import replace

from brickline.verdict import (
    Answer,
    Coverage,
    DivergenceReport,
    Finding,
    Status,
    Verdict,
    VerdictRow,
    VerdictTable,
)

PARTS = ("attn.norm", "attn.q", "attn.k", "attn.v", "attn.o", "mlp.norm", "mlp.up", "mlp.down")
BRICKS = {"attn.norm": "RmsNorm", "mlp.norm": "RmsNorm", "attn.o": "OutputProjection"}
LAYERS = 24
CALLS = 3
CULPRIT = "model.layers.9.mlp.up"
ACTS_IN = 1
"""The call in which the culprit acts."""
EVIL = '</script><script>window.evil=1</script><img src=x onerror="window.evil=2">&amp;[red]\u202ex'
"""Markup, an entity, rich's markup and a character that turns the direction of text."""


def decoder_verdicts(*, estimated: bool = False) -> VerdictTable:
    """A row for each part of each layer in each call; without z where it is estimated."""
    draw = random.Random(0)
    table = VerdictTable()
    for call in range(CALLS):
        propagated = 1e-8
        for layer in range(LAYERS):
            for part in PARTS:
                name = f"model.layers.{layer}.{part}"
                guilty = name == CULPRIT and call == ACTS_IN
                z = 212.4 if guilty else draw.lognormvariate(-1.1, 0.35)
                local = 0.31 if guilty else 1.1e-3 * z * draw.lognormvariate(0, 0.3)
                propagated = max(propagated * draw.lognormvariate(0.01, 0.05), local * 1.1)
                table.append(
                    VerdictRow(
                        name=name,
                        reference_name=name.replace("model.layers", "transformer.h"),
                        layer_idx=layer,
                        position=call,
                        ordinal=0,
                        direction="forward",
                        brick=BRICKS.get(part),
                        op=None,
                        verdict=_verdict(guilty, estimated, propagated, z),
                        z=None if estimated else z,
                        local_error=local,
                        propagated_error=propagated,
                    )
                )
    return table


def _verdict(guilty: bool, estimated: bool, propagated: float, z: float) -> Verdict:
    if guilty:
        return Verdict.SUSPECT if estimated else Verdict.CULPRIT
    if propagated > 0.05:
        return Verdict.PROPAGATED
    return Verdict.WATCH if z > 0.9 else Verdict.ROUNDING


CULPRIT_FINDING = Finding(
    name=CULPRIT,
    verdict=Verdict.CULPRIT,
    layer_idx=9,
    position=ACTS_IN,
    op="aten.mm",
    z=212.4,
    local_error=0.31,
    propagated_error=0.3412,
    share=0.9997,
    where="columns 240 to 255 of every row",
    cause="a dropped tail: the result equals that of the first 240 of 256 terms",
    source="port.py:88",
    repro="repro dir/model.layers.9.mlp.up.py",
    reference_name="transformer.h.9.mlp.up",
    evidence={"element": 212.4, "rmse": 180.25, "dtype": "bfloat16", "shape": [4, 128, 1024]},
)
WATCHED = Finding("model.layers.4.attn.norm", Verdict.WATCH, 4, 0, z=1.31, local_error=1.2e-6)
REPORT = DivergenceReport(
    candidate="port.py:model",
    reference="original.py:model",
    findings=(CULPRIT_FINDING, WATCHED),
    state=Answer.not_asked("the weights of one side are quantised"),
    logic=Answer("in float64 the outputs of call 1 differ", figure=0.09, limit=1e-12),
    arithmetic=Answer(f"largest error relative to rounding, at {CULPRIT}", 212.4, 2.0),
    repair={"constant": "columns", "value": 256, "in place of": 240},
    verdicts=decoder_verdicts(),
    coverage=Coverage(574, 576, ("layers.5.rope: an op without a float64 form",)),
    unmatched=tuple(f"reference: aten.view ({number})" for number in range(9)),
    noise_floor=1.2e-6,
    final_error=0.091,
    whys=(
        "the output of call 1 differs by 0.091 (relative L2); rounding alone makes 1.2e-06",
        f"on its own inputs {CULPRIT} is 0.31 away from transformer.h.9.mlp.up in float64",
        "with its value repaired the output differs by 2.1e-06",
    ),
    circumstances=("attention: eager against sdpa", "TF32: on against off"),
    next_command="brickline check port.py:model --reference original.py:model --drive loop.py:run",
)
SUSPECTED = replace(
    REPORT,
    findings=(
        replace(
            CULPRIT_FINDING,
            verdict=Verdict.SUSPECT,
            z=None,
            share=None,
            repro=None,
            reason="fingerprints do not tell z, share and a repro; a re-execution does",
        ),
    ),
    verdicts=decoder_verdicts(estimated=True),
    noise_floor=2.1e-3,
)
"""The same from fingerprints alone."""

BARE = {
    Status.MATCHED: DivergenceReport(coverage=Coverage(1, 1)),
    Status.DIVERGED: DivergenceReport(findings=(Finding("a", Verdict.CULPRIT),)),
    Status.INCONCLUSIVE: DivergenceReport(),
}
"""The least that gives a report each status."""


def many_verdicts(count: int, verdict: Verdict = Verdict.PROPAGATED) -> VerdictTable:
    """So many rows of one verdict, call after call, with a culprit at the very end."""
    names = [f"layers.{layer}.{part}" for layer in range(32) for part in PARTS]
    places = range(count)
    columns = {
        "name": [names[at % len(names)] for at in places],
        "reference_name": [names[at % len(names)] for at in places],
        "layer_idx": [at % len(names) // len(PARTS) for at in places],
        "position": [at // len(names) for at in places],
        "ordinal": [0] * count,
        "direction": ["forward"] * count,
        "brick": [BRICKS.get(PARTS[at % len(PARTS)]) for at in places],
        "op": [None] * count,
        "verdict": [verdict] * (count - 1) + [Verdict.CULPRIT],
        "z": [0.5] * (count - 1) + [30.0],
        "local_error": [(1 + at % 97) * 1e-5 for at in places],
        "propagated_error": [(1 + at % 89) * 1e-3 for at in places],
    }
    return VerdictTable(columns)
