"""Launches that nothing encloses: what comes from outside and what goes out, by contents."""

from __future__ import annotations

import numpy as np
from hand_made_launches import Array, Launches

from brickline.comparison.comparing import compare
from brickline.kernels.catalog import residual
from brickline.plan import Plan
from brickline.plan_launches import entering, results
from brickline.verdict import Status


def drawn(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((8, 16))


def traced(x: Array, *, wrong: float = 1.0, other: float = 1.0) -> Launches:
    """Two launches that follow each other, and one beside them; none is in a model."""
    out = Launches()
    doubled = 2 * x * wrong
    out.add("double", [x], [doubled], level=None, layer=0)
    out.add("turn", [doubled], [-doubled], level=None, layer=0)
    out.add("beside", [drawn(5)], [drawn(5) ** 2 * other], level=None)
    return out


def test_a_wrong_launch_is_no_other_input() -> None:
    report = compare(traced(drawn(1), wrong=1.01).run("c"), traced(drawn(1)).run("r"))
    assert report.headline == "double (layer 0) is the first suspect: scaled by 1.01"
    told = "\n".join(report.whys)
    assert "was given" not in told
    assert "output 0 of turn (layer 0) differs by 9.8e-03" in told
    assert "output 0 of beside is the same to the bit" in told
    assert report.next_command is not None
    assert "bl.check(candidate, *inputs" in report.next_command


def test_a_launch_that_is_wrong_in_two_layers_is_named_in_both() -> None:
    def layers(wrong: float) -> Launches:
        out = Launches()
        for layer in range(2):
            x = drawn(layer)
            out.add("double", [x], [2 * x * wrong], level=None, layer=layer)
        return out

    report = compare(layers(1.01).run("c"), layers(1.0).run("r"))
    assert [(each.name, each.layer_idx) for each in report.findings] == [
        ("double", 0),
        ("double", 1),
    ]


def test_every_output_counts() -> None:
    report = compare(traced(drawn(1), other=1.01).run("c"), traced(drawn(1)).run("r"))
    assert [each.name for each in report.findings] == ["beside"]
    assert report.final_error is not None
    assert report.final_error > 5e-3
    assert report.outputs == 2


def test_an_other_input_is_named_by_its_launch() -> None:
    report = compare(traced(drawn(2)).run("c"), traced(drawn(1)).run("r"))
    assert report.status is Status.INCONCLUSIVE
    assert report.headline.startswith("double (layer 0) was given another input 0, which differs")


def test_what_a_plan_reads_first_and_writes_last() -> None:
    plan = Plan("ends")
    x, y, z = (plan.buffer(name, 8, "f32") for name in "xyz")
    plan.launch(residual(), a=x, b=x, y=y, n=8)
    plan.launch(residual(), a=y[:4], b=x[:4], y=z[:4], n=4)
    plan.launch(residual(), a=y[4:], b=x[4:], y=z[4:], n=4)
    plan.launch(residual(), a=z[:2], b=z[2:4], y=x[:2], n=2)
    assert entering(plan.launches) == {(0, "a"), (0, "b"), (1, "b"), (2, "b")}
    found = [(launch.number, repr(buffer)) for launch, _, buffer in results(plan.launches)]
    assert found == [(2, "<z+16 f32[4]>"), (3, "<x f32[2]>")]
    plan.launch(residual(), a=y, b=x, y=z, n=8)
    assert [launch.number for launch, _, _ in results(plan.launches)] == [4]
