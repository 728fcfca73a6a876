"""Kernels that the tool was not tuned on: in place, into an argument, views, structures, own ops.

The culprit is called by the function's name. An argument that a kernel writes to is part of what
it gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from localisation.callables import wrong
from localisation.cases import Case, Trio
from localisation.drives import Run
from localisation.planting import dtype_of

GROUP = "unseen drives"


def _drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5000 + seed)) * scale


def _run(*values: Any) -> Callable[[torch.dtype], Run]:
    def cast(value: Any, dtype: torch.dtype) -> Any:
        floating = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(dtype, copy=True) if floating else value

    return lambda dtype: Run(tuple(cast(each, dtype) for each in values))


# --- Plain ----------------------------------------------------------------------------------------


@dataclass
class Attended:
    """What flash attention gives: the output, and the log of the sum for backward."""

    out: Tensor
    lse: Tensor


def moments(x: Tensor) -> dict[str, Any]:
    var, mean = torch.var_mean(x, -1, correction=0)
    return {"out": (x - mean[..., None]) * torch.rsqrt(var + 1e-5)[..., None], "var": var, "n": 1}


def attended(q: Tensor, k: Tensor, v: Tensor) -> Attended:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return Attended(scores.softmax(-1) @ v, scores.logsumexp(-1))


def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, total.shape[-1:], weight, 1e-5), total


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return x.copy_(torch.cat([left * cos - right * sin, right * cos + left * sin], -1))


def write(cache: Tensor, k: Tensor, slots: Tensor) -> None:
    cache[:, slots] = k


def scaled_sum(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    return torch.add(a, b, alpha=0.5, out=out)


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def grouped(x: Tensor, weights: Tensor, sizes: tuple[int, ...]) -> Tensor:
    parts = [a @ w for a, w in zip(x.split(sizes), weights, strict=True)]
    return torch.cat(parts)


def route(x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    shares, chosen = (x @ gate).softmax(-1).topk(2, -1)
    return shares / shares.sum(-1, keepdim=True), chosen


def eight_bits(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    return x @ ((codes.to(x.dtype) - zero) * scale)


def prefix(x: Tensor) -> Tensor:
    return x.cumsum(-1)


def pieces(x: Tensor, weight: Tensor) -> list[Tensor]:
    return [F.silu(each @ weight) for each in x.split(16)]


def softcapped(x: Tensor) -> Tensor:
    return (torch.tanh(x / 30) * 30).softmax(-1)


def order(x: Tensor) -> Tensor:
    return torch.argsort(x, dim=-1, stable=True)


# --- By hand --------------------------------------------------------------------------------------


def two_pass_moments(x: Tensor, *, correction: int = 0) -> dict[str, Any]:
    wide = x.float()
    mean = wide.mean(-1, keepdim=True)
    var = (wide - mean).square().sum(-1) / (x.shape[-1] - correction)
    out = (wide - mean) * torch.rsqrt(var + 1e-5)[..., None]
    return {"out": out.to(x.dtype), "var": var.to(x.dtype), "n": 1}


def flash(q: Tensor, k: Tensor, v: Tensor, *, forget: bool = False) -> Attended:
    scores = q.float() @ k.float().mT * q.shape[-1] ** -0.5
    most = scores.amax(-1, keepdim=True)
    weights = (scores - most).exp()
    total = weights.sum(-1, keepdim=True)
    lse = total.log() + (0 if forget else most)
    return Attended((weights @ v.float() / total).to(q.dtype), lse[..., 0].to(q.dtype))


def fused_add_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, keep: bool = True
) -> tuple[Tensor, Tensor]:
    wide = x.float() + residual.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.float()
    return normed.to(x.dtype), wide.to(x.dtype) if keep else residual.clone()


def rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor, *, last: int = 0) -> Tensor:
    half = x.shape[-1] // 2
    left, right = x[..., : half - last].clone(), x[..., half : 2 * half - last].clone()
    cos, sin = cos[..., : half - last], sin[..., : half - last]
    x[..., : half - last].mul_(cos).sub_(right * sin)
    x[..., half : 2 * half - last].mul_(cos).add_(left * sin)
    return x


def write_each(cache: Tensor, k: Tensor, slots: Tensor, *, count: int = 99) -> None:
    for number, slot in enumerate(slots.tolist()[:count]):
        cache[:, slot].copy_(k[:, number])


def sum_in_tiles(a: Tensor, b: Tensor, out: Tensor, *, tail: bool = True) -> Tensor:
    end = a.shape[-1] if tail else a.shape[-1] // 32 * 32
    for n in range(0, end, 32):
        part = slice(n, min(n + 32, end))
        out[..., part] = a[..., part] + b[..., part] * 0.5
    return out


def heads_viewed(x: Tensor, count: int, *, inner: bool = False) -> Tensor:
    batch, length, width = x.shape
    if inner:
        return x.view(batch, length, width // count, count).permute(0, 3, 1, 2)
    return x.view(batch, length, count, width // count).permute(0, 2, 1, 3)


@torch.library.custom_op("unseen::grouped", mutates_args=())
def own_grouped(x: Tensor, weights: Tensor, sizes: list[int], last: int) -> Tensor:
    out, start = torch.zeros(x.shape[0], weights.shape[-1], dtype=x.dtype), 0
    for number, size in enumerate(sizes[: len(sizes) - last]):
        out[start : start + size] = x[start : start + size] @ weights[number]
        start += size
    return out


def grouped_op(x: Tensor, weights: Tensor, sizes: tuple[int, ...], *, last: int = 0) -> Tensor:
    return own_grouped(x, weights, list(sizes), last)


@torch.library.custom_op("unseen::write", mutates_args=("cache",))
def own_write(cache: Tensor, k: Tensor, slots: Tensor, shift: int) -> None:
    cache.index_copy_(1, (slots + shift) % cache.shape[1], k)


def write_op(cache: Tensor, k: Tensor, slots: Tensor, *, shift: int = 0) -> None:
    own_write(cache, k, slots, shift)


def route_by_hand(x: Tensor, gate: Tensor, *, norm: bool = True) -> tuple[Tensor, Tensor]:
    scores, chosen = (x @ gate).topk(2, -1)
    if norm:
        return scores.softmax(-1), chosen
    return (x @ gate).softmax(-1).gather(-1, chosen), chosen


def eight_bits_late(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, *, shifted: bool = True
) -> Tensor:
    out = x.float() @ codes.float()
    if shifted:
        out = out - x.float().sum(-1, keepdim=True) * zero.float()
    return (out * scale.float()).to(x.dtype)


def prefix_in_chunks(x: Tensor, *, carried: bool = True) -> Tensor:
    out, before = [], torch.zeros_like(x[..., :1], dtype=torch.float32)
    for part in x.float().split(24, -1):
        out.append(part.cumsum(-1) + before)
        before = before + part.sum(-1, keepdim=True) if carried or len(out) < 3 else before
    return torch.cat(out, -1).to(x.dtype)


def pieces_at_once(x: Tensor, weight: Tensor, *, stale: bool = False) -> list[Tensor]:
    out = list(F.silu(x @ weight).split(16))
    return [*out[:-1], out[-2]] if stale else out


class Capped(torch.autograd.Function):
    """Softmax of capped scores, by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, most: float) -> Tensor:
        capped = torch.tanh(x.float() / most) * most
        weights = (capped - capped.amax(-1, keepdim=True)).exp()
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype)


def capped_function(x: Tensor, *, most: float = 30.0) -> Tensor:
    return Capped.apply(x, most)


def order_of_rows(x: Tensor, *, all_rows: bool = True) -> Tensor:
    out = torch.stack([torch.argsort(each, stable=True) for each in x])
    if not all_rows:
        out[-1] = torch.arange(x.shape[1])
    return out


RUNS = {
    moments: _run(_drawn(24, 40, seed=1, scale=2)),
    attended: _run(*(_drawn(2, 3, 24, 16, seed=2 + n) for n in range(3))),
    add_norm: _run(_drawn(20, 64, seed=5), _drawn(20, 64, seed=6), _drawn(64, seed=7)),
    rotate: _run(_drawn(2, 10, 32, seed=8), *(_drawn(10, 16, seed=9 + n) for n in range(2))),
    write: _run(torch.zeros(2, 16, 8), _drawn(2, 5, 8, seed=11), torch.tensor([3, 4, 9, 0, 15])),
    scaled_sum: _run(_drawn(6, 100, seed=12), _drawn(6, 100, seed=13), torch.zeros(6, 100)),
    heads: _run(_drawn(2, 9, 48, seed=14), 4),
    grouped: _run(_drawn(30, 40, seed=15), _drawn(3, 40, 24, seed=16, scale=0.2), (12, 8, 10)),
    route: _run(_drawn(40, 32, seed=17), _drawn(32, 6, seed=18, scale=0.3)),
    eight_bits: _run(
        _drawn(12, 64, seed=19),
        torch.randint(0, 255, (64, 24), generator=torch.Generator().manual_seed(1)).byte(),
        _drawn(24, seed=20).abs() * 0.01,
        torch.full((24,), 127.0),
    ),
    prefix: _run(_drawn(8, 120, seed=21)),
    pieces: _run(_drawn(48, 32, seed=22), _drawn(32, 20, seed=23, scale=0.2)),
    softcapped: _run(_drawn(10, 60, seed=24, scale=25)),
    order: _run(_drawn(9, 33, seed=25)),
}

KERNELS: tuple[tuple[Callable[..., Any], Callable[..., Any], bool, tuple[str, ...]], ...] = (
    # Candidate, reference, whether it is right, regimes.
    (two_pass_moments, moments, True, ("same", "bf16")),
    (flash, attended, True, ("same",)),
    (fused_add_norm, add_norm, True, ("bf16",)),
    (rotate_in_place, rotate, True, ("same", "bf16")),
    (write_each, write, True, ("same",)),
    (sum_in_tiles, scaled_sum, True, ("bf16",)),
    (heads_viewed, heads, True, ("same",)),
    (grouped_op, grouped, True, ("bf16",)),
    (write_op, write, True, ("same",)),
    (route_by_hand, route, True, ("same",)),
    (eight_bits_late, eight_bits, True, ("same",)),
    (prefix_in_chunks, prefix, True, ("same",)),
    (pieces_at_once, pieces, True, ("same",)),
    (capped_function, softcapped, True, ("bf16",)),
    (order_of_rows, order, True, ("same",)),
    (wrong(two_pass_moments, correction=1), moments, False, ("same", "bf16")),
    (wrong(flash, forget=True), attended, False, ("same", "bf16")),
    (wrong(fused_add_norm, keep=False), add_norm, False, ("same",)),
    (wrong(rotate_in_place, last=2), rotate, False, ("same", "bf16")),
    (wrong(write_each, count=4), write, False, ("same",)),
    (wrong(sum_in_tiles, tail=False), scaled_sum, False, ("same", "bf16")),
    (wrong(heads_viewed, inner=True), heads, False, ("same",)),
    (wrong(grouped_op, last=1), grouped, False, ("same", "bf16")),
    (wrong(write_op, shift=1), write, False, ("same", "bf16")),
    (wrong(route_by_hand, norm=False), route, False, ("same",)),
    (wrong(eight_bits_late, shifted=False), eight_bits, False, ("same",)),
    (wrong(prefix_in_chunks, carried=False), prefix, False, ("same", "bf16")),
    (wrong(pieces_at_once, stale=True), pieces, False, ("same",)),
    (wrong(capped_function, most=29.0), softcapped, False, ("same",)),
    (wrong(order_of_rows, all_rows=False), order, False, ("same",)),
)


def cases() -> Iterator[Case]:
    """Yield each kernel in its regimes."""
    for candidate, reference, right, regimes in KERNELS:
        for regime in regimes:
            yield Case(
                name=f"unseen.kernel {candidate.__name__}/{regime}",
                group=GROUP,
                kind="harmless" if right else "kernel",
                regime=regime,
                make=functools.partial(Trio, candidate, reference, reference),
                run=RUNS[reference],
                dtype=dtype_of(regime),
                expected=None if right else "",
                position=None if right else 0,
            )
