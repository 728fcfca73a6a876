"""Plans on a GPU: every executor gives the CPU's bits, and says what went wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brickline as bl
from brickline.decoder import Decoder
from brickline.decoder_weights import DecoderConfig, random_weights
from brickline.errors import LaunchError, PlanError, SymbolicError
from brickline.kernel import Kernel
from brickline.kernels.catalog import residual, rms_norm, silu_gate
from brickline.plan import Plan

EXECUTORS = ("serial", "parallel", "graph", "megakernel")
N = 3000
RUNS = 12
"""Enough for `parallel` to try both ways and to choose one."""


def random_plan(seed: int) -> Plan:
    """Return launches with random dependencies over eight buffers, and one size that varies."""
    rng = random.Random(seed)
    plan = Plan(f"random{seed}")
    n = plan.variable("n", 1, N)
    buffers = [plan.buffer(f"b{k}", N, "f32") for k in range(8)]
    weight = plan.buffer("weight", N, "f32", read_only=True)
    for _ in range(30):
        a, b, y = rng.sample(buffers, 3)
        size = rng.choice([N, n])
        match rng.randrange(3):
            case 0:
                plan.launch(residual(), a=a, b=b, y=y, n=size)
            case 1:
                plan.launch(silu_gate(), gate=a, up=b, y=y, n=size)
            case _:
                plan.launch(
                    rms_norm(),
                    x=a.reshape((1, N)),
                    weight=weight,
                    y=y.reshape((1, N)),
                    rows=1,
                    n=N,
                    eps=1e-5,
                )
    return plan


def results(plan: Plan, device: str, executor: str) -> list[bytes]:
    prepared = plan.prepare(device, executor)
    rng = np.random.default_rng(1)
    for storage in plan.storages:
        # Small enough to stay finite: which NaN comes of two is a device's own choice.
        prepared.write(storage.name, 0.01 * rng.standard_normal(storage.shape, dtype=np.float32))
    for run in range(RUNS):
        prepared(n=1 + 211 * run)
    return [prepared.read(storage.name).tobytes() for storage in plan.storages]


@pytest.mark.parametrize("seed", range(6))
def test_every_executor_gives_the_bits_of_the_cpu(seed: int) -> None:
    plan = random_plan(seed)
    expected = results(plan, "CPU", "serial")
    for executor in EXECUTORS:
        assert results(plan, "CUDA:0", executor) == expected, executor


def test_a_graph_is_patched_and_never_made_again() -> None:
    plan = random_plan(3)
    prepared = plan.prepare("CUDA:0", "graph")
    before = prepared._core.graph_facts()
    for run in range(5):
        prepared(n=1 + run)
    prepared.synchronize()
    after = prepared._core.graph_facts()
    varying = sum(
        any(not isinstance(s, int) for s in each.sizes)
        or any(str(a) == "n" for a in each.arguments)
        for each in plan.launches
    )
    assert after["instantiations"] == before["instantiations"] == 1
    assert 0 < after["patched"] - before["patched"] <= 5 * varying


def test_rebound_tensors_are_used_and_checked(torch: Any) -> None:
    plan = Plan("rebind")
    x, y = (plan.buffer(name, 64, "f32") for name in "xy")
    plan.launch(residual(), a=x, b=x, y=y, n=64)
    for executor in EXECUTORS:
        prepared = plan.prepare("CUDA:0", executor)
        mine = torch.full((64,), 3.0, device="cuda")
        assert (prepared(x=mine).read("y") == 6.0).all()
        result = torch.zeros(64, device="cuda")
        prepared(y=result)
        torch.cuda.synchronize()
        assert (result == 6.0).all()
        with pytest.raises(PlanError, match="overlap"):
            prepared(y=mine)
        with pytest.raises(PlanError, match="CPU"):
            prepared(x=np.zeros(64, np.float32))
        mine.resize_(1 << 20)
        with pytest.raises(PlanError, match="resized"):
            prepared()


def test_launches_go_to_the_given_stream(torch: Any) -> None:
    plan = Plan("streams")
    x, y = (plan.buffer(name, 1 << 20, "f32") for name in "xy")
    plan.launch(residual(), a=x, b=x, y=y, n=1 << 20)
    for executor in EXECUTORS:
        prepared = plan.prepare("CUDA:0", executor)
        x_tensor = torch.zeros(1 << 20, device="cuda")
        y_tensor = torch.zeros(1 << 20, device="cuda")
        prepared(x=x_tensor, y=y_tensor)
        side = torch.cuda.Stream()
        for _ in range(RUNS):
            with torch.cuda.stream(side):
                torch.cuda._sleep(2_000_000)
                x_tensor.add_(1.0)
                prepared()
            side.synchronize()
            assert torch.equal(y_tensor, 2 * x_tensor)


FAULTY = """
BRICKLINE void faulty(Block& block, const float* x, float* y, int64_t n, int64_t bad) {
    block.each(n, [&](int64_t i) { y[i] = x[i] + 1.0f; });
    if (bad) block.fault(20);
}
"""


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_fault_names_the_launch_and_poisons_the_plan(executor: str) -> None:
    kernel = Kernel(
        "faulty",
        FAULTY,
        [
            bl.Param("x", "f32", "n"),
            bl.Param("y", "f32", "n", "write"),
            bl.Scalar("n"),
            bl.Scalar("bad"),
        ],
    )
    plan = Plan("faults")
    bad = plan.variable("bad", 0, 1)
    a, b, c = (plan.buffer(name, 64, "f32") for name in "abc")
    plan.launch(kernel, x=a, y=b, n=64, bad=0)
    plan.launch(kernel, x=b, y=c, n=64, bad=bad)
    prepared = plan.prepare("CUDA:0", executor)
    prepared(bad=0).synchronize()
    prepared(bad=1)
    with pytest.raises(LaunchError, match=r"launch 1 \(faulty\).*fault 20"):
        prepared.synchronize()
    with pytest.raises(PlanError, match="reset"):
        prepared(bad=0)
    prepared.reset()
    assert (prepared(bad=0).read("c") == 2.0).all()
    with pytest.raises(SymbolicError, match="bad"):
        prepared(bad=2)


def small_decoder(dtype: str) -> tuple[Decoder, dict[str, Any]]:
    config = DecoderConfig(
        vocabulary=5000,
        dim=256,
        hidden=704,
        layers=3,
        heads=8,
        kv_heads=2,
        head_dim=32,
        capacity=200,
    )
    return Decoder(config, dtype=dtype), random_weights(config, dtype=dtype, seed=3)


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_a_decoder_gives_the_same_tokens_and_bits_everywhere(dtype: str) -> None:
    decoder, weights = small_decoder(dtype)
    expected = decoder.prepare(weights)
    tokens = expected.generate([1, 2, 3], 40)
    logits = expected.logits().tobytes()
    for executor in EXECUTORS:
        decoding = decoder.prepare(weights, "CUDA:0", executor)
        assert decoding.generate([1, 2, 3], 40) == tokens
        assert decoding.logits().tobytes() == logits


def test_two_recorded_devices_compare_as_equal(tmp_path: Path) -> None:
    decoder, weights = small_decoder("bf16")
    for device in ("CPU", "CUDA:0"):
        path = tmp_path / f"{device[:3]}.brick"
        with bl.BrickProfiler("decode", enabled=True, path=path) as profiler:
            decoding = decoder.prepare(weights, device, profiler=profiler, fingerprints=True)
            decoding.generate([1, 2], 3)
    report = bl.compare(tmp_path / "CUD.brick", tmp_path / "CPU.brick")
    assert report.status == "matched", str(report)


def test_a_wrong_kernel_on_cuda_is_named_by_check() -> None:
    decoder, weights = small_decoder("bf16")
    reference = decoder.prepare(weights)
    right = decoder.prepare(weights, "CUDA:0", "graph")
    drive = lambda model: [model(position=position) for position in range(2)]  # noqa: E731
    report = bl.check(right.prepared, reference=reference.prepared, drive=drive, repro=False)
    assert report.status == "matched", str(report)
    plan = Plan.load(_with_a_wrong_rope(decoder))
    bind = {**weights, "rates": decoder.config.rates()}
    wrong = plan.prepare("CUDA:0", "graph", bind=bind)
    report = bl.check(wrong, reference=reference.prepared, drive=drive, repro=False)
    assert report.status == "diverged"
    assert "RopeEmbedding" in str(report.findings[0].name), str(report)


def column_plan(factor: str = "2.0f") -> Plan:
    """Write a multiple of one column of x into a column of y."""
    source = f"""
    BRICKLINE void multiple(Block& block, const float* x, float* y, int64_t m, int64_t step) {{
        block.each(m, [&](int64_t r) {{ y[r * step] = {factor} * x[r * step]; }});
    }}
    """
    arguments = [
        bl.Param("x", "f32", "m", strides="step"),
        bl.Param("y", "f32", "m", "write", strides="step"),
        *(bl.Scalar(name, low=1) for name in ("m", "step")),
    ]
    plan = Plan("column")
    x, y = (plan.buffer(name, (64, 5), "f32") for name in "xy")
    kernel = Kernel("multiple", source, arguments, reference=lambda x, **_: 2.0 * x)
    views = {"x": x.view(64, 1, strides=(5,)), "y": y.view(64, 3, strides=(5,))}
    plan.launch(kernel, **views, m=64, step=5)
    return plan


def test_strided_views_are_checked_and_traced_on_cuda(tmp_path: Path) -> None:
    values = np.random.default_rng(2).standard_normal((64, 5), dtype=np.float32)
    plans = {}
    for device in ("CPU", "CUDA:0"):
        path = tmp_path / f"{device[:3]}.brick"
        with bl.BrickProfiler("column", enabled=True, path=path) as profiler:
            plans[device] = column_plan().prepare(device, profiler=profiler, fingerprints=True)
            plans[device].write("x", values)
            plans[device]()
    assert bl.compare(tmp_path / "CUD.brick", tmp_path / "CPU.brick").status == "matched"
    drive = lambda plan: plan()  # noqa: E731
    report = bl.check(plans["CUDA:0"], reference=plans["CPU"], drive=drive)
    assert report.status == "matched", str(report)
    wrong = column_plan("2.02f").prepare("CUDA:0", "graph")
    wrong.write("x", values)
    for reference in (plans["CPU"], None):
        report = bl.check(wrong, reference=reference, drive=drive, repro=False)
        assert [each.name for each in report.findings] == ["multiple"], str(report)


def _with_a_wrong_rope(decoder: Decoder) -> Path:
    """Save the plan with a kernel that turns a little too far."""
    import json
    import tempfile

    from brickline.plan_files import _digest

    path = Path(tempfile.mkdtemp()) / "wrong.plan"
    decoder.plan.save(path)
    document = json.loads(path.read_text())
    for kernel in document["plan"]["kernels"]:
        if kernel["name"] == "rope_append":
            kernel["source"] = kernel["source"].replace("position", "(position + 1)", 0)
            kernel["source"] = kernel["source"].replace("rates[", "1.01f * rates[")
            assert "1.01f" in kernel["source"]
    document["digest"] = _digest(document["plan"])
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_profiler_on_the_device_sees_every_launch(torch: Any, executor: str) -> None:
    decoder, weights = small_decoder("bf16")
    profiler = bl.BrickProfiler(
        "plan", enabled=True, device="CUDA:0", sampling=bl.Sampling(steps=1)
    )
    decoding = decoder.prepare(weights, "CUDA:0", executor, profiler=profiler)
    decoding.generate([1], 6)
    torch.cuda.synchronize()
    profiler.drain()
    layers = decoder.config.layers
    stats = profiler.brick_stats("QkvProjection")
    assert stats.count == 6 * layers
    assert stats.timed > 0
    assert stats.total_ns > 0
    profiler.close()
