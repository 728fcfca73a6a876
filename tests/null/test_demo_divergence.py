"""The demo's divergence: the planted brick is named, nothing else is, and rounding is cleared."""

from __future__ import annotations

import numpy as np
import pytest

from brickline import BrickProfiler
from brickline.commands.demo import PROMPT
from brickline.commands.demo_divergence import (
    PLANTED,
    Decode,
    Port,
    ReferenceBricks,
    RepairedPort,
    check_decode,
    first_not_close,
    record_decode,
)
from brickline.commands.demo_model import DemoModel
from brickline.commands.demo_weights import Floats, ModelConfig
from brickline.report.divergence import report_text
from brickline.verdict import Status, Verdict


def decoded(kind: type[DemoModel]) -> Decode:
    return record_decode(kind, PROMPT, None, count=6)


@pytest.fixture(scope="module")
def reference() -> Decode:
    return decoded(DemoModel)


@pytest.fixture(scope="module")
def candidate() -> Decode:
    return decoded(Port)


@pytest.fixture(scope="module")
def repaired() -> Decode:
    return decoded(RepairedPort)


def test_the_planted_brick_and_nothing_else_is_named(candidate, reference, repaired):
    report = check_decode(candidate, reference, repaired)
    assert report.status is Status.DIVERGED
    (culprit,) = report.culprits
    assert culprit.name == PLANTED
    assert culprit.layer_idx == 3
    assert culprit.share == pytest.approx(1, abs=0.01)
    assert culprit.cause == "an epsilon of 1.0e-03 in place of 1.0e-05 explains all of it"
    others = [row for row in report.verdicts if row.name != PLANTED]
    assert max(row.z for row in others) <= 1
    assert {row.verdict for row in report.verdicts if row.name == PLANTED} == {Verdict.CULPRIT}
    text = report_text(report, width=80)
    assert f"{PLANTED} is wrong: an epsilon of 1.0e-03" in text
    assert "▲" in text


def test_allclose_says_too_much_or_nothing(candidate, reference):
    count, first = first_not_close(candidate, reference, rtol=1e-5, atol=1e-8)
    assert count > len(candidate.launches) // 2
    assert first is not None
    assert first.name.startswith("layers.0")
    assert first_not_close(candidate, reference, rtol=1e-3, atol=1e-3) == (0, None)


def test_a_port_without_the_fault_is_cleared(reference, repaired):
    report = check_decode(repaired, reference, repaired)
    assert report.status is Status.MATCHED
    assert not report.findings
    assert max(row.z for row in report.verdicts) <= 1
    assert "all 558 values agree" in report_text(report, width=80)


class DropsTail(RepairedPort):
    """Forgets the last block of a sum in one projection, from the third call on."""

    def project(self, x: Floats, weight: Floats) -> Floats:
        made = super().project(x, weight)
        if self.length >= len(PROMPT) + 1 and weight is self.weights.layers[2].down:
            made = made - x[:, -16:] @ weight[:, -16:].T
        return made


def test_a_fault_from_some_step_on_is_named_with_that_step(reference, repaired):
    report = check_decode(decoded(DropsTail), reference, repaired)
    (culprit,) = report.culprits
    assert (culprit.name, culprit.position, culprit.cause) == ("layers.2.mlp.down", 2, None)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_plain_bricks_are_those_of_the_model(dtype, reference):
    model = DemoModel(BrickProfiler("m"), ModelConfig())
    bricks = ReferenceBricks(model, dtype)
    for launch in reference.launches:
        for made, output in zip(bricks(launch), launch.outputs, strict=True):
            assert made.dtype == dtype
            np.testing.assert_allclose(made, output, rtol=2e-5, atol=2e-5)


def test_an_observer_changes_no_token(reference):
    bare = DemoModel(BrickProfiler("m"), ModelConfig())
    assert list(bare.generate(PROMPT, 6)) == reference.tokens
