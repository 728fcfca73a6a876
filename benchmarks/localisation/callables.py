"""Candidates that are functions: a hand-written kernel held against the plain one.

The culprit is called by the function's name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localisation.cases import Case, Trio
from localisation.drives import Run
from localisation.planting import dtype_of

Kernel = Callable[..., Any]


def _drawn(*shape: int, seed: int = 0, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    generator = torch.Generator().manual_seed(3000 + seed)
    return torch.randn(shape, generator=generator) * scale + mean


def _run(*tensors: Tensor) -> Callable[[torch.dtype], Run]:
    return lambda dtype: Run(tuple(each.to(dtype) for each in tensors))


# --- Plain kernels and their arguments ------------------------------------------------------------


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate) * (x @ up)) @ down


RUNS = {
    softmax: _run(_drawn(16, 96, scale=4)),
    rms_norm: _run(_drawn(24, 128, seed=1), _drawn(128, seed=2)),
    layer_norm: _run(_drawn(24, 128, seed=3, mean=20), _drawn(128, seed=4), _drawn(128, seed=5)),
    matmul: _run(_drawn(48, 200, seed=6), _drawn(200, 40, seed=7)),
    attention: _run(*(_drawn(2, 3, 40, 16, seed=8 + n) for n in range(3))),
    swiglu: _run(
        _drawn(20, 64, seed=11),
        *(_drawn(64, 160, seed=12 + n, scale=0.12) for n in range(2)),
        _drawn(160, 64, seed=14, scale=0.08),
    ),
}


# --- Kernels by hand, right unless a factor says otherwise ----------------------------------------


def tiled_matmul(a: Tensor, b: Tensor, *, tile: int = 64, keep_tail: bool = True) -> Tensor:
    ends = range(0, a.shape[1] if keep_tail else a.shape[1] - tile + 1, tile)
    parts = [a[:, n : n + tile].float() @ b[n : n + tile].float() for n in ends]
    return functools.reduce(torch.add, parts).to(a.dtype)


def low_matmul(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros(a.shape[0], b.shape[1], dtype=torch.bfloat16)
    for n in range(0, a.shape[1], 8):
        out += (a[:, n : n + 8] @ b[n : n + 8]).to(torch.bfloat16)
    return out.to(a.dtype)


def online_attention(q: Tensor, k: Tensor, v: Tensor, *, rescale: bool = True) -> Tensor:
    """Attention block by block, as flash attention does."""
    dtype, (q, k, v) = q.dtype, (each.float() for each in (q, k, v))
    most = torch.full_like(q[..., :1], float("-inf"))
    total, out = torch.zeros_like(q[..., :1]), torch.zeros_like(q)
    for key, value in zip(k.split(16, 2), v.split(16, 2), strict=True):
        scores = q @ key.mT * q.shape[-1] ** -0.5
        larger = torch.maximum(most, scores.amax(-1, keepdim=True))
        weights = (scores - larger).exp()
        factor = (most - larger).exp()
        total = total * factor + weights.sum(-1, keepdim=True)
        out = out * (factor if rescale else 1) + weights @ value
        most = larger
    return (out / total).to(dtype)


def one_pass_layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean, square = x.mean(-1, keepdim=True), x.square().mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(square - mean * mean + 1e-5) * weight + bias


def naive_softmax(x: Tensor) -> Tensor:
    weights = (x * 8).half().exp()
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


def eps_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * weight


def fused_swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, *, last: int = 0) -> Tensor:
    dtype, (x, gate, up, down) = x.dtype, (each.float() for each in (x, gate, up, down))
    out = torch.zeros_like(x)
    for n in range(0, gate.shape[1] - last, 32):
        part = slice(n, n + 32)
        out = out + (F.silu(x @ gate[:, part]) * (x @ up[:, part])) @ down[part]
    return out.to(dtype)


def wrong(kernel: Kernel, **how: Any) -> Kernel:
    """Return a kernel with an argument set, under a name of its own."""

    @functools.wraps(kernel)
    def called(*args: Tensor) -> Any:
        return kernel(*args, **how)

    called.__name__ = f"wrong_{kernel.__name__}"
    return called


KERNELS: tuple[tuple[Kernel, Kernel, bool], ...] = (
    # Candidate, reference, whether it is right.
    (tiled_matmul, matmul, True),
    (online_attention, attention, True),
    (fused_swiglu, swiglu, True),
    (wrong(tiled_matmul, keep_tail=False), matmul, False),
    (low_matmul, matmul, False),
    (wrong(online_attention, rescale=False), attention, False),
    (one_pass_layer_norm, layer_norm, False),
    (naive_softmax, softmax, False),
    (eps_rms_norm, rms_norm, False),
    (wrong(fused_swiglu, last=32), swiglu, False),
)


def cases() -> Iterator[Case]:
    """Yield each kernel in fp32 and bf16."""
    for candidate, reference, right in KERNELS:
        for regime in ("same", "bf16"):
            yield Case(
                name=f"callable.{candidate.__name__}/{regime}",
                group="callables and structures",
                kind="kernel",
                regime=regime,
                make=lambda c=candidate, r=reference: Trio(c, r, r),
                run=RUNS[reference],
                dtype=dtype_of(regime),
                expected=None if right else "",
                position=None if right else 0,
            )
