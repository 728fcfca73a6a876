"""The float64 oracle on CUDA: clean kernels are cleared, wrong ones are found."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from torch import nn  # noqa: E402

from brickline.checking.alone import check_alone  # noqa: E402
from brickline.oracle.calls import Call, outputs_of  # noqa: E402
from brickline.oracle.holding import hold  # noqa: E402
from brickline.verdict import Status, Verdict  # noqa: E402

aten = torch.ops.aten
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def held(func: Any, *args: Any) -> Any:
    return hold(Call(func, args, {}), outputs_of(func, args, {}, func(*args)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fan", [100, 2048, 16384])
def test_products_are_clean_however_cublas_splits_them(dtype: Any, fan: int) -> None:
    for rows, columns in ((1, 64), (34, 76), (256, 512)):
        left = torch.randn(rows, fan, device="cuda").to(dtype)
        right = torch.randn(fan, columns, device="cuda").to(dtype) * fan**-0.5
        found = held(aten.mm.default, left, right)
        assert found.verdict in (Verdict.IDENTICAL, Verdict.ROUNDING), (rows, columns, found.z)


def test_tf32_products_are_seen_unless_they_are_allowed() -> None:
    left, right = torch.randn(128, 2048, device="cuda"), torch.randn(2048, 128, device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        made = left @ right
        allowed = hold(Call(aten.mm.default, (left, right), {}), [made])
        torch.backends.cuda.matmul.allow_tf32 = False
        refused = hold(Call(aten.mm.default, (left, right), {}), [made])
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert allowed.verdict in (Verdict.ROUNDING, Verdict.WATCH)
    assert "TF32" in allowed.allowed
    assert refused.verdict is Verdict.CULPRIT


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_every_fused_attention_is_clean(dtype: Any, causal: bool) -> None:
    q, k, v = (torch.randn(2, 4, 80, 64, device="cuda").to(dtype) for _ in range(3))
    efficient = aten._scaled_dot_product_efficient_attention.default
    calls = [held(efficient, q, k, v, None, True, 0.0, causal)]
    if dtype is not torch.float32:
        flash = aten._scaled_dot_product_flash_attention.default
        calls.append(held(flash, q, k, v, 0.0, causal))
        cudnn = aten._scaled_dot_product_cudnn_attention.default
        calls.append(held(cudnn, q, k, v, None, True, 0.0, causal))
    for found in calls:
        assert found.verdict in (Verdict.IDENTICAL, Verdict.ROUNDING), (found.z, found.reason)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_backward_on_the_devices_thread_is_seen_with_its_modules(dtype: Any) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).to("cuda", dtype)
    x = torch.randn(2, 33, 64, device="cuda").to(dtype)
    report = check_alone(model, drive=lambda model: model(x).square().sum().backward())
    assert report.status is Status.MATCHED, report.coverage.notes
    backward = {row.name for row in report.verdicts if row.direction == "backward"}
    assert {"layers.0.linear1", "layers.1.norm2", "layers.0.self_attn"} <= backward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_convolutional_network_is_cleared(dtype: Any) -> None:
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.GroupNorm(4, 16), nn.ConvTranspose2d(16, 8, 2, 2), nn.AdaptiveAvgPool2d(1)),
    ).to("cuda", dtype)
    x = torch.randn(4, 3, 16, 16, device="cuda").to(dtype)
    report = check_alone(model, drive=lambda model: model(x).sum().backward())
    assert report.status is Status.MATCHED, (report.findings, report.coverage.notes)


@triton.jit
def increment(x, y, n, SIZE: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


def test_a_triton_kernel_that_is_launched_past_torch_is_noticed() -> None:
    class Kernel(nn.Module):
        def forward(self, x: Any) -> Any:
            y = torch.empty_like(x)
            increment[(4,)](x, y, 1000, SIZE=256)
            return y * 2

    report = check_alone(Kernel(), (torch.randn(1000, device="cuda"),))
    assert report.status is Status.INCONCLUSIVE
    assert any("changed without an operation" in note for note in report.coverage.notes)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_compiled_module_is_held_at_its_boundary() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).cuda())
    with torch.no_grad():
        report = check_alone(model, (torch.randn(32, 64, device="cuda"),))
    assert report.status is Status.MATCHED
    assert len(report.verdicts) == 1
