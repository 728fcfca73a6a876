"""`compare` of two recorded runs of a plan: its launches, inputs and outputs by their names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brickline as bl
from brickline.decoder import Decoder
from brickline.decoder_weights import DecoderConfig, random_weights
from brickline.kernel import Kernel
from brickline.kernels.catalog import residual, rms_norm, silu_gate
from brickline.runs import Run


def drawn(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def changed(kernel: Kernel, old: str, new: str) -> Kernel:
    assert old in kernel.source
    return Kernel.from_json(kernel.to_json() | {"source": kernel.source.replace(old, new)})


WRONG_GATE = changed(silu_gate(), "exp(-g)", "exp(-1.05f * g)")


def record(
    path: Path,
    *,
    gate: Kernel | None = None,
    side: Kernel | None = None,
    layers: int = 2,
    eps: float = 1e-5,
    weight: int = 1,
    inputs: Sequence[int | None] = (0, 1),
    sizes: Sequence[int] = (64, 32),
) -> Path:
    """Run a plan with two outputs, x and side, once for each input; None leaves x as it is."""
    plan = bl.Plan("mlp")
    n = plan.variable("n", 1, 64)
    x, h, a = (plan.buffer(name, (4, 64), "f32") for name in ("x", "h", "a"))
    w = plan.buffer("w", array=1 + drawn(64, seed=weight) / 8, read_only=True)
    up, made = plan.buffer("up", 256, "f32"), plan.buffer("side", n, "f32")
    for layer in range(layers):
        flat = h.reshape(256)
        plan.launch(
            *(rms_norm(),),
            **{"x": x, "weight": w, "y": h, "rows": 4, "n": 64, "eps": eps},
            brick="RmsNorm",
            layer=layer,
        )
        kernel = (gate if layer == 1 else None) or silu_gate()
        arguments = {"gate": flat, "up": up, "y": a.reshape(256), "n": 256}
        plan.launch(kernel, **arguments, brick="Activation", layer=layer)
        arguments = {"a": a.reshape(256), "b": flat, "y": x.reshape(256), "n": 256}
        plan.launch(residual(), **arguments, brick="Residual", layer=layer)
    arguments = {"gate": a.view(n), "up": up.view(n), "y": made, "n": n}
    plan.launch(side or silu_gate(), **arguments, brick="Side")
    with bl.BrickProfiler(path.stem, enabled=True, path=path) as profiler:
        prepared = plan.prepare(profiler=profiler, fingerprints=True)
        prepared.write("up", drawn(256, seed=9))
        for seed, size in zip(inputs, sizes, strict=True):
            if seed is not None:
                prepared.write("x", drawn(4, 64, seed=10 + seed))
            prepared(n=size)
    return path


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "right.brick")


SAME = ("output x of Residual (layer 1) is the same", "output side of Side is the same")


def test_a_launch_notes_its_arguments_and_which_of_them_are_ends(right: Path) -> None:
    (part,) = Run.open(right).parts
    first, *_, last = [json.loads(part.string(row["params"])) for row in part.traces][:7]
    assert first == {
        "level": "launch",
        "plan": "mlp",
        "brick": "RmsNorm",
        "kernel": rms_norm().short,
        "reads": [["x", "x"], ["weight", "w"]],
        "writes": [["y", "h"]],
        "entering": ["x", "weight"],
        "results": [],
        "settings": {"rows": 4, "n": 64, "eps": 1e-5},
    }
    assert (last["entering"], last["results"]) == (["up"], ["y"])


def test_every_output_of_equal_runs_is_said_to_be_the_same(right: Path, tmp_path: Path) -> None:
    report = bl.compare(record(tmp_path / "again.brick"), right)
    assert report.status == "matched"
    assert [why.partition(" to the bit")[0] for why in report.whys[1:]] == list(SAME)
    assert (report.final_error, report.outputs) == (0, 2)
    assert "The largest difference of 2 final outputs is 0" in str(report)


def test_a_wrong_kernel_is_named_with_its_layer_and_all_that_comes_of_it(
    right: Path, tmp_path: Path
) -> None:
    report = bl.compare(record(tmp_path / "wrong.brick", gate=WRONG_GATE), right)
    assert report.headline.startswith(
        "Activation (layer 1) is the first suspect: its kernel is silu_gate_"
    )
    assert WRONG_GATE.short in report.headline
    told = "\n".join(report.whys)
    assert "was given" not in told
    assert "the same to the bit, and rounding explains" in told
    for output in ("output x of Residual (layer 1)", "output side of Side"):
        assert f"{output} differs by " in told
    assert report.final_error is not None
    assert report.final_error > 1e-3
    assert "▲ Activation (layer 1)" in str(report)
    assert report.next_command is not None
    assert "both prepared plans" in report.next_command
    assert "record" not in report.next_command


def test_an_output_that_differs_is_told_beside_one_that_does_not(
    right: Path, tmp_path: Path
) -> None:
    for name, options in (("first", {"gate": WRONG_GATE}), ("last", {"side": WRONG_GATE})):
        report = bl.compare(record(tmp_path / f"{name}.brick", **options), right)
        same = [why for why in report.whys if why.startswith(SAME)]
        assert same == ([] if name == "first" else [f"{SAME[0]} to the bit"])
    assert report.findings[0].name == "Side"
    assert report.final_error is not None
    assert report.final_error > 1e-3


def test_other_settings_are_the_cause(right: Path, tmp_path: Path) -> None:
    report = bl.compare(record(tmp_path / "eps.brick", eps=0.1), right)
    assert report.headline == (
        "RmsNorm (layer 0) is the first suspect: its settings differ: eps 0.1, reference 1e-05"
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": (5, 1)}, "RmsNorm (layer 0) in call 0 was given another x, which differs by"),
        ({"inputs": (0, 5)}, "RmsNorm (layer 0) in call 1 was given another x, which differs by"),
        ({"weight": 2}, "RmsNorm (layer 0) in call 0 was given another weight (buffer w), which"),
        ({"sizes": (64, 16)}, "Side in call 1 was launched with n=16, reference 32"),
    ],
    ids=["first call", "second call", "weights", "size"],
)
def test_what_was_given_otherwise_is_named(
    right: Path, tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    report = bl.compare(record(tmp_path / "other.brick", **options), right)
    assert report.status == "inconclusive"
    assert report.headline.startswith(said)
    assert sum("was given" in why or "was launched" in why for why in report.whys) == 1
    if "sizes" in options:
        assert "output side of Side in call 1 has 16 elements, reference 32" in report.whys
        assert report.final_error is None


def test_what_a_plan_keeps_from_call_to_call_is_no_input(tmp_path: Path) -> None:
    kept = record(tmp_path / "kept.brick", inputs=(0, None))
    wrong = record(tmp_path / "wrong.brick", inputs=(0, None), gate=WRONG_GATE)
    report = bl.compare(wrong, kept)
    assert report.findings[0].position == 0
    assert not [why for why in report.whys if "was given" in why]
    # Where one side was given something and the other went on, it is one.
    report = bl.compare(kept, record(tmp_path / "written.brick"))
    assert report.headline.startswith("RmsNorm (layer 0) in call 1 was given another x")


def test_runs_of_other_lengths_say_who_has_more(right: Path, tmp_path: Path) -> None:
    report = bl.compare(record(tmp_path / "short.brick", inputs=(0,), sizes=(64,)), right)
    assert report.status == "inconclusive"
    assert report.headline == (
        "the 7 launches that both runs have agree; the reference has 7 more without a counterpart, "
        "from RmsNorm (layer 0) in call 1 on"
    )
    report = bl.compare(record(tmp_path / "deep.brick", layers=3), right)
    assert report.status == "inconclusive"
    assert (
        "the candidate has 6 more without a counterpart, from RmsNorm (layer 2) in call 0 on"
        in (report.headline)
    )
    assert "candidate: RmsNorm (layer 2), call 0" in report.unmatched


def test_kernels_that_do_more_under_the_same_name_are_not_blamed(tmp_path: Path) -> None:
    config = DecoderConfig(layers=1)
    weights = random_weights(config, dtype="f32")
    paths = []
    for fused in (False, True):
        paths.append(tmp_path / f"{fused}.brick")
        with bl.BrickProfiler("decoder", enabled=True, path=paths[-1]) as profiler:
            decoding = Decoder(config, dtype="f32", fused=fused).prepare(weights)
            decoding.prepared.watch(profiler, fingerprints=True)
            decoding.generate([1, 2], 1)
    report = bl.compare(*paths)
    assert report.status == "inconclusive"
    assert not report.findings
    assert any("output token" in why and "the same to the bit" in why for why in report.whys)


def test_other_tokens_are_named(tmp_path: Path) -> None:
    config = DecoderConfig(layers=1)
    weights = random_weights(config, dtype="f32")
    paths = []
    for prompt in ([1, 7], [1, 2]):
        paths.append(tmp_path / f"{prompt[1]}.brick")
        with bl.BrickProfiler("decoder", enabled=True, path=paths[-1]) as profiler:
            decoding = Decoder(config, dtype="f32").prepare(weights)
            decoding.prepared.watch(profiler, fingerprints=True)
            decoding.generate(prompt, 1)
    report = bl.compare(*paths)
    assert report.headline.startswith("Embedding in call 1 was given another ids (buffer token):")


def test_of_a_strided_view_its_elements_alone_are_compared(tmp_path: Path) -> None:
    def column(path: Path, beside: float) -> Path:
        source = """
        BRICKLINE void twice(Block& block, const float* x, float* y, int64_t m, int64_t step) {
            block.each(m, [&](int64_t r) { y[r * step] = 2.0f * x[r * step]; });
        }
        """
        sizes = [bl.Scalar("m", low=1), bl.Scalar("step", low=1)]
        buffers = [
            bl.Param("x", "f32", "m", strides="step"),
            bl.Param("y", "f32", "m", "write", strides="step"),
        ]
        plan = bl.Plan("column")
        x, y = plan.buffer("x", (8, 4), "f32"), plan.buffer("y", (8, 4), "f32")
        views = {"x": x.view(8, 1, strides=(4,)), "y": y.view(8, 1, strides=(4,))}
        plan.launch(Kernel("twice", source, [*buffers, *sizes]), **views, m=8, step=4)
        with bl.BrickProfiler("column", enabled=True, path=path) as profiler:
            prepared = plan.prepare(profiler=profiler, fingerprints=True)
            values = np.full((8, 4), beside, np.float32)
            values[:, 1] = range(8)
            prepared.write("x", values)
            prepared.write("y", values)
            prepared()
        return path

    report = bl.compare(column(tmp_path / "a.brick", 1.0), column(tmp_path / "b.brick", 2.0))
    assert report.status == "matched", str(report)


def test_without_fingerprints_it_is_said_how_a_plan_gets_them(right: Path, tmp_path: Path) -> None:
    plan = bl.Plan("timed")
    x = plan.buffer("x", 8, "f32")
    plan.launch(residual(), a=x, b=x, y=plan.buffer("y", 8, "f32"), n=8)
    with bl.BrickProfiler("timed", enabled=True, path=tmp_path / "timed.brick") as profiler:
        plan.prepare(profiler=profiler)()
    report = bl.compare(tmp_path / "timed.brick", right)
    assert "prepared.watch(profiler, fingerprints=True)" in report.headline
