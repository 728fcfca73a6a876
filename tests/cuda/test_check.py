"""`check` where the candidate runs on a GPU: against a CPU reference, and kernels by hand."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import brickline as bl  # noqa: E402


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * (
            self.weight
        )


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width: int = 256, layers: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def reference():
    torch.manual_seed(0)
    return Net().eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cuda_model_is_cleared_against_its_cpu_reference(reference, dtype) -> None:
    candidate = copy.deepcopy(reference).to("cuda", dtype)
    x = torch.randn(4, 37, 256, dtype=dtype, device="cuda")
    report = bl.check(candidate, x, reference=reference)
    assert report.status == "matched", str(report)
    assert not report.culprits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_row_is_named_against_the_cpu(reference, dtype) -> None:
    candidate = copy.deepcopy(reference).to("cuda", dtype)
    with torch.no_grad():
        candidate.blocks[1].down.weight[3] *= 1.5
    x = torch.randn(4, 37, 256, dtype=dtype, device="cuda")
    report = bl.check(candidate, x, reference=reference, repro=False)
    assert [each.name for each in report.culprits] == ["blocks.1.down"], str(report)
    assert report.culprits[0].share > 0.99


def test_tf32_is_named(reference) -> None:
    candidate = copy.deepcopy(reference).cuda()
    x = torch.randn(4, 37, 256, device="cuda")
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        report = bl.check(candidate, x, reference=reference, repro=False)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert report.status == "diverged", str(report)
    assert {each.name.split(".")[-1] for each in report.culprits} <= {"up", "down"}


def test_a_broken_triton_kernel_in_a_model_is_named(reference) -> None:
    triton = pytest.importorskip("triton")
    from kernels_in_triton import broken_norm

    assert triton

    class TritonNorm(Norm):
        def forward(self, x):
            return broken_norm(x, self.weight, 1e-6)

    candidate = copy.deepcopy(reference).cuda()
    candidate.blocks[2].norm.__class__ = TritonNorm
    x = torch.randn(4, 37, 256, device="cuda")
    report = bl.check(candidate, x, reference=reference, repro=False)
    assert [each.name for each in report.culprits] == ["blocks.2.norm"], str(report)


def test_a_broken_cuda_kernel_is_named() -> None:
    source = (
        "BRICKLINE void scale(Block& block, const float* x, float* y, int64_t n) {"
        "  int64_t first = block.index() * 1024, left = n - first;"
        "  block.each(left < 1024 ? left : 1024, [&](int64_t i) {"
        "    y[first + i] = x[first + i] * (first + i == 5 ? 2.001f : 2.0f); });"
        "}"
    )
    kernel = bl.Kernel(
        "scale",
        source,
        [bl.Param("x", "f32", "n"), bl.Param("y", "f32", "n", "write"), bl.Scalar("n", low=1)],
        global_size="ceil_div(n, 1024)",
    )
    x = torch.randn(3000, device="cuda")
    report = bl.check(kernel, x, 3000, reference=lambda x, n: x * 2, repro=False)
    assert [each.name for each in report.culprits] == ["scale"], str(report)
    assert "5" in report.culprits[0].where


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_on_cuda_is_cleared(reference, dtype) -> None:
    candidate = torch.compile(copy.deepcopy(reference).to("cuda", dtype))
    x = torch.randn(4, 37, 256, dtype=dtype, device="cuda")
    with torch.no_grad():
        report = bl.check(candidate, x, reference=reference.to("cuda", dtype), repro=False)
    assert report.status == "matched", str(report)
