"""An encoder and a decoder with a shared table of distances, and a port of other nesting."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear
from localisation.drives import Run
from localisation.planting import change
from localisation.unseen_ports import ALL, FP32, right, unseen

# --- Encoder and decoder: distances in buckets, no scale, gated GELU ------------------------------


def buckets(queries: int, keys: int, both: bool, count: int = 8, far: int = 12) -> Tensor:
    """Return the bucket of each distance: exact when near, logarithmic when far."""
    apart = torch.arange(keys)[None] - torch.arange(queries)[:, None]
    out = torch.zeros_like(apart)
    if both:
        count //= 2
        out = (apart > 0) * count
        apart = apart.abs()
    else:
        apart = -apart.clamp(max=0)
    near = count // 2
    logs = torch.log(apart.clamp(min=1) / near) / math.log(far / near) * (count - near)
    return out + torch.where(apart < near, apart, (near + logs.long()).clamp(max=count - 1))


class T5Attention(nn.Module):
    """Attention that is not scaled, with a bias that is made elsewhere."""

    def __init__(self, dim: int, heads: int, head: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(dim, heads * head, bias=False) for _ in range(3))
        self.o = nn.Linear(heads * head, dim, bias=False)

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (self.split(f(y)) for f, y in ((self.q, x), (self.k, memory), (self.v, memory)))
        scores = self.scores(q, k) + bias
        return self.o((scores.float().softmax(-1).to(x.dtype) @ v).transpose(1, 2).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Gated(nn.Module):
    """The feed-forward gated by a GELU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.wo = nn.Linear(hidden, dim, bias=False)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.act(self.wi_0(x)) * self.wi_1(x))


class T5Block(nn.Module):
    """A block of either half."""

    def __init__(self, dim: int, cross: bool) -> None:
        super().__init__()
        self.norm_1, self.norm_3 = models.RMSNorm(dim, 1e-6), models.RMSNorm(dim, 1e-6)
        self.attention = T5Attention(dim, 4, 12)
        self.feed = Gated(dim, 2 * dim)
        if cross:
            self.norm_2, self.cross = models.RMSNorm(dim, 1e-6), T5Attention(dim, 4, 12)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        h = self.norm_1(x)
        x = x + self.attention(h, h, bias)
        if hasattr(self, "cross"):
            x = x + self.cross(self.norm_2(x), memory, hidden)
        return x + self.feed(self.norm_3(x))


class Distances(nn.Module):
    """The bias by distance, for all layers of one half."""

    def __init__(self, heads: int, both: bool) -> None:
        super().__init__()
        self.both = both
        self.table = nn.Embedding(8, heads)

    def forward(self, length: int) -> Tensor:
        return self.table(self.places(length)).permute(2, 0, 1)

    def places(self, length: int) -> Tensor:
        return buckets(length, length, self.both)


class T5(nn.Module):
    """Both halves; the head is the embedding, scaled."""

    def __init__(self, dim: int = 56) -> None:
        super().__init__()
        self.shared = nn.Embedding(101, dim)
        self.encoder_bias, self.decoder_bias = Distances(4, True), Distances(4, False)
        self.encoder = nn.ModuleList(T5Block(dim, False) for _ in range(2))
        self.encoder_norm = models.RMSNorm(dim, 1e-6)
        self.decoder = nn.ModuleList(T5Block(dim, True) for _ in range(2))
        self.decoder_norm = models.RMSNorm(dim, 1e-6)

    def forward(self, source: Tensor, target: Tensor, keep: Tensor) -> Tensor:
        memory = self.shared(source)
        low = torch.finfo(memory.dtype).min
        hidden = torch.zeros(keep.shape, dtype=memory.dtype).masked_fill(~keep, low)[:, None, None]
        bias = self.encoder_bias(source.shape[1]) + hidden
        for block in self.encoder:
            memory = block(memory, bias, memory, hidden)
        memory = self.encoder_norm(memory)
        x, length = self.shared(target), target.shape[1]
        future = torch.full((length, length), low, dtype=x.dtype).triu(1)
        bias = self.decoder_bias(length) + future
        for block in self.decoder:
            x = block(x, bias, memory, hidden)
        return F.linear(self.scaled(self.decoder_norm(x)), self.shared.weight)

    def scaled(self, x: Tensor) -> Tensor:
        return x * x.shape[-1] ** -0.5


def t5(*, outliers: bool = False) -> nn.Module:
    return models.weigh(T5(), 63, outliers)


def translation(dtype: torch.dtype) -> Run:
    keep = torch.ones(2, 15, dtype=torch.bool)
    keep[1, 9:] = False
    return Run((drives.tokens(18, length=15), drives.tokens(19, length=11), keep))


class PortedT5Attention(nn.Module):
    """The same by SDPA, with fused projections."""

    def __init__(self, norm: models.RMSNorm, of: T5Attention, cross: bool) -> None:
        super().__init__()
        self.heads, self.of_memory = of.heads, cross
        self.gain = nn.Parameter(norm.weight.detach().clone())
        self.query = linear(of.q.weight)
        self.pair = linear(of.v.weight, of.k.weight)
        self.merge = linear(of.o.weight)

    def forward(self, x: Tensor, bias: Tensor, memory: Tensor | None = None) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], self.gain, 1e-6)
        q = self.query(h).view(*x.shape[:2], self.heads, -1).transpose(1, 2)
        both = self.pair(h if memory is None else memory)
        v, k = both.view(*both.shape[:2], 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.factor(q))
        return x + self.merge(out.transpose(1, 2).reshape(*x.shape[:2], -1))

    def factor(self, q: Tensor) -> float:
        return 1.0


class PortedGated(nn.Module):
    """The same, both projections at once."""

    def __init__(self, norm: models.RMSNorm, of: Gated) -> None:
        super().__init__()
        self.gain = nn.Parameter(norm.weight.detach().clone())
        self.up = linear(of.wi_0.weight, of.wi_1.weight)
        self.down = linear(of.wo.weight)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(F.rms_norm(x, x.shape[-1:], self.gain, 1e-6)).chunk(2, -1)
        return x + self.down(self.bent(gate) * value)

    def bent(self, gate: Tensor) -> Tensor:
        cube = 0.044715 * gate * gate * gate
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + cube)))


class PortedT5(nn.Module):
    """Both halves as flat lists; the bias is looked up in tables of full size."""

    def __init__(self, model: T5) -> None:
        super().__init__()
        self.table = nn.Parameter(model.shared.weight.detach().clone())
        self.near_in = nn.Parameter(model.encoder_bias.table.weight.detach().T.clone())
        self.near_out = nn.Parameter(model.decoder_bias.table.weight.detach().T.clone())
        self.reading, self.writing = nn.ModuleList(), nn.ModuleList()
        for each in model.encoder:
            self.reading.append(PortedT5Attention(each.norm_1, each.attention, False))
            self.reading.append(PortedGated(each.norm_3, each.feed))
        for each in model.decoder:
            self.writing.append(PortedT5Attention(each.norm_1, each.attention, False))
            self.writing.append(PortedT5Attention(each.norm_2, each.cross, True))
            self.writing.append(PortedGated(each.norm_3, each.feed))
        self.read = nn.Parameter(model.encoder_norm.weight.detach().clone())
        self.written = nn.Parameter(model.decoder_norm.weight.detach().clone())

    def forward(self, source: Tensor, target: Tensor, keep: Tensor) -> Tensor:
        hidden = torch.where(keep, 0.0, -1e9)[:, None, None].to(self.table.dtype)
        bias = self.near_in[:, self.numbers(source.shape[1], True)] + hidden
        memory = self.table[source]
        for part in self.reading:
            memory = part(memory, bias) if isinstance(part, PortedT5Attention) else part(memory)
        memory = F.rms_norm(memory, memory.shape[-1:], self.read, 1e-6)
        x, length = self.table[target], target.shape[1]
        future = torch.full((length, length), -1e9, dtype=x.dtype).triu(1)
        bias = self.near_out[:, self.numbers(length, False)] + future
        for part in self.writing:
            if isinstance(part, PortedGated):
                x = part(x)
            else:
                x = part(x, hidden, memory) if part.of_memory else part(x, bias)
        x = F.rms_norm(x, x.shape[-1:], self.written, 1e-6)
        return (x @ self.table.mT) / math.sqrt(x.shape[-1])

    def numbers(self, length: int, both: bool) -> Tensor:
        return buckets(length, length, both)


@unseen(t5, "encoder_bias", "rope", run=translation, regimes=ALL)
def directions_exchanged(module, root):
    change(module, places=lambda self, places, length: places(length).mT)


@unseen(t5, "decoder.1.cross", "attention scale", run=translation)
def cross_is_scaled(module, root):
    change(module, scores=lambda self, scores, q, k: scores(q, k) * q.shape[-1] ** -0.5)


@unseen(t5, "encoder.1.feed.act", "activations", run=translation, regimes=FP32)
def erf_instead_of_tanh(module, root):
    module.approximate = "none"


@unseen(t5, "encoder_norm", "norm layers", run=translation)
def memory_not_normed(module, root):
    change(module, forward=lambda self, forward, x: x * self.weight)


@unseen(t5, "decoder.0.attention.v", "accumulation precision", run=translation, regimes=FP32)
def values_summed_in_fp16(module, root):
    def forward(self, forward, x):
        return (x.half().float() @ self.weight.half().float().T).half().to(x.dtype)

    change(module, forward=forward)


@unseen(t5, "reading.2", "attention scale", port=PortedT5, run=translation)
def ported_scale(module, root):
    change(module, factor=lambda self, factor, q: q.shape[-1] ** -0.5)


@unseen(t5, "writing.3", "norm layers", port=PortedT5, run=translation)
def ported_gain(module, root):
    module.gain.data[3:9] = module.gain.data[3:9].flip(0) * 1.1


@unseen(t5, "writing.4.pair", "head mapping", port=PortedT5, run=translation)
def ported_keys_and_values_exchanged(module, root):
    module.weight.data = module.weight.data.roll(48, 0)


@unseen(t5, "", "rope", port=PortedT5, run=translation)
def ported_decoder_looks_both_ways(module, root):
    change(module, numbers=lambda self, numbers, length, both: numbers(length, True))


@unseen(t5, "reading.1", "activations", port=PortedT5, run=translation, regimes=FP32)
def ported_sigmoid_gelu(module, root):
    change(module, bent=lambda self, bent, gate: gate * torch.sigmoid(1.702 * gate))


right("t5", t5, "reordered", "bf16", run=translation)
right("t5 ported", t5, *ALL, port=PortedT5, run=translation)
