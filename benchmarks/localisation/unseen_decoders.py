"""A decoder with soft caps and windows; the port keeps heads in groups."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_ports import ALL, FP32, right, unseen

# --- Soft caps, windows in every second layer, norms before and after -----------------------------


class GemmaNorm(nn.Module):
    """Root mean square norm whose weight is added to one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(dim))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight()).to(x.dtype)

    def weight(self) -> Tensor:
        return 1 + self.gain.float()


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


class GemmaAttention(nn.Module):
    """Grouped queries, rotation, a soft cap, perhaps a window."""

    def __init__(self, dim: int, window: int | None) -> None:
        super().__init__()
        self.heads, self.groups, self.head, self.window = 6, 2, 16, window
        self.q_proj = nn.Linear(dim, 96, bias=False)
        self.k_proj = nn.Linear(dim, 32, bias=False)
        self.v_proj = nn.Linear(dim, 32, bias=False)
        self.o_proj = nn.Linear(96, dim, bias=False)
        self.base, self.cap = 10000.0, 5.0

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self.angles(x.shape[1])
        q, k = models.rotated(q, cos.to(x), sin.to(x)), models.rotated(k, cos.to(x), sin.to(x))
        k, v = self.repeated(k), self.repeated(v)
        scores = self.squashed(q @ k.mT * 24**-0.5)
        scores = scores.masked_fill(~self.seen(x.shape[1]), float("-inf"))
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.head, 2, dtype=torch.float32) / self.head
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self.base**-steps
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    def repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.groups, 1)

    def squashed(self, scores: Tensor) -> Tensor:
        return capped(scores, self.cap)

    def seen(self, length: int) -> Tensor:
        places = torch.arange(length)
        apart = places[:, None] - places
        return (apart >= 0) & (apart < (self.window or length))


class GeGLU(nn.Module):
    """The feed-forward gated by a GELU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class GemmaLayer(nn.Module):
    """Norms on both sides of both parts."""

    def __init__(self, dim: int, window: int | None) -> None:
        super().__init__()
        self.input_norm, self.attended_norm, self.feed_norm, self.fed_norm = (
            GemmaNorm(dim) for _ in range(4)
        )
        self.attn, self.mlp = GemmaAttention(dim, window), GeGLU(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attended_norm(self.attn(self.input_norm(x)))
        return self.last(x, self.fed_norm(self.mlp(self.feed_norm(x))))

    def last(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out


class Gemma(nn.Module):
    """The decoder; the embedding is scaled, the head is capped."""

    def __init__(self, dim: int = 60) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(GemmaLayer(dim, (5, None, 5)[n]) for n in range(3))
        self.norm = GemmaNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.scaled(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.capped(F.linear(self.norm(x), self.embed.weight))

    def scaled(self, x: Tensor) -> Tensor:
        return x * torch.tensor(math.sqrt(x.shape[-1]), dtype=x.dtype)

    def capped(self, logits: Tensor) -> Tensor:
        return capped(logits, 15.0)


def gemma(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Gemma(), 71, outliers)


class GroupedLayer(nn.Module):
    """The same in one module: heads kept in groups, einsum, norms of torch."""

    def __init__(self, of: GemmaLayer) -> None:
        super().__init__()
        a, m = of.attn, of.mlp
        self.window, self.shape = a.window, (a.groups, a.heads // a.groups, a.head)
        self.qkv = linear(a.q_proj.weight, a.k_proj.weight, a.v_proj.weight)
        self.proj = linear(a.o_proj.weight)
        self.gu = nn.Parameter(
            torch.stack([m.gate_proj.weight.detach(), m.up_proj.weight.detach()], 1)
        )
        self.dn = linear(m.down_proj.weight)
        norms = (of.input_norm, of.attended_norm, of.feed_norm, of.fed_norm)
        self.gains = nn.Parameter(torch.stack([1 + each.gain.detach() for each in norms]))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.normed(self.attended(self.normed(x, 0), turn), 1)
        h = torch.einsum("btc,hnc->btnh", self.normed(x, 2), self.gu)
        h = F.gelu(h[:, :, 0], approximate="tanh") * h[:, :, 1]
        return x + self.normed(self.dn(h), 3)

    def normed(self, x: Tensor, which: int) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gains[which], 1e-6)

    def attended(self, x: Tensor, turn: Tensor) -> Tensor:
        groups, each, head = self.shape
        sizes = [groups * each * head, groups * head, groups * head]
        q, k, v = self.qkv(x).split(sizes, -1)
        q = self.turned(q.unflatten(-1, (groups, each, head)), turn[:, None, None])
        k = self.turned(k.unflatten(-1, (groups, head)), turn[:, None])
        v = v.unflatten(-1, (groups, head))
        scores = self.scores(q, k)
        scores = torch.where(self.visible(x.shape[1]), scores, -1e30)
        return self.proj(torch.einsum("bgets,bsgd->btged", scores.softmax(-1), v).flatten(2))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 5.0 * torch.tanh(torch.einsum("btged,bsgd->bgets", q / 24**0.5, k) / 5.0)

    def turned(self, x: Tensor, turn: Tensor) -> Tensor:
        pairs = torch.complex(*(half.contiguous() for half in x.float().chunk(2, -1)))
        pairs = pairs * turn
        return torch.cat([pairs.real, pairs.imag], -1).to(x.dtype)

    def visible(self, length: int) -> Tensor:
        full = torch.ones(length, length, dtype=torch.bool).tril()
        return full if self.window is None else full & ~full.tril(-self.window)


class GroupedGemma(nn.Module):
    """The same, with complex rotations made once."""

    def __init__(self, model: Gemma) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(model.embed.weight.detach().clone(), freeze=False)
        self.stack = nn.ModuleList(GroupedLayer(each) for each in model.layers)
        self.gain = nn.Parameter(1 + model.norm.gain.detach())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x * x.new_tensor(x.shape[-1] ** 0.5)
        turn = self.turns(tokens.shape[1])
        for layer in self.stack:
            x = layer(x, turn)
        logits = F.rms_norm(x, x.shape[-1:], self.gain, 1e-6) @ self.table.weight.T
        return self.last(logits)

    def turns(self, length: int) -> Tensor:
        rates = 1.0 / (10000.0 ** (torch.arange(8, dtype=torch.float32) / 8))
        angles = torch.outer(torch.arange(length, dtype=torch.float32), rates)
        return torch.polar(torch.ones_like(angles), angles)

    def last(self, logits: Tensor) -> Tensor:
        return (logits / 15.0).tanh() * 15.0


@unseen(gemma, "layers.0.attn", "softcap", regimes=ALL)
def scores_not_capped(module, root):
    change(module, squashed=lambda self, squashed, scores: scores)


@unseen(gemma, "layers.2.attn", "masks")
def window_one_larger(module, root):
    module.window = 6


@unseen(gemma, "layers.1.attn", "rope", regimes=FP32)
def theta(module, root):
    module.base = 8000.0


@unseen(gemma, "layers.1.attn", "head mapping")
def heads_interleaved(module, root):
    change(module, repeated=lambda self, repeated, x: x.repeat(1, 3, 1, 1))


@unseen(gemma, "layers.1.fed_norm", "norm layers", regimes=ALL)
def gain_without_the_one(module, root):
    change(module, weight=lambda self, weight: self.gain.float())


@unseen(gemma, "", "scale")
def embedding_not_scaled(module, root):
    change(module, scaled=lambda self, scaled, x: x)


@unseen(gemma, "", "softcap")
def logits_not_capped(module, root):
    change(module, capped=lambda self, capped, logits: logits)


@unseen(gemma, "layers.2", "residuals")
def residual_of_the_norm(module, root):
    change(module, last=lambda self, last, x, out: self.feed_norm(x) + out)


@unseen(gemma, "stack.2", "masks", port=GroupedGemma)
def grouped_window_one_smaller(module, root):
    module.window = 4


@unseen(gemma, "stack.1", "softcap", port=GroupedGemma, regimes=FP32)
def grouped_capped_by_clamp(module, root):
    def scores(self, scores, q, k):
        return torch.einsum("btged,bsgd->bgets", q / 24**0.5, k).clamp(-5, 5)

    change(module, scores=scores)


@unseen(gemma, "stack.1.qkv", "weights", port=GroupedGemma)
def grouped_key_of_the_other_group(module, root):
    module.weight.data[96:128] = module.weight.data[96:128].roll(16, 0)


@unseen(gemma, "stack.0", "rope", port=GroupedGemma)
def grouped_turned_backwards(module, root):
    change(module, turned=lambda self, turned, x, turn: turned(x, turn.conj()))


@unseen(gemma, "stack.2", "norm layers", port=GroupedGemma)
def grouped_norms_exchanged(module, root):
    module.gains.data[[1, 3]] = module.gains.data[[3, 1]]


@unseen(gemma, "", "softcap", port=GroupedGemma)
def grouped_cap_of_30(module, root):
    change(module, last=lambda self, last, logits: (logits / 30.0).tanh() * 30.0)


right("gemma", gemma, *ALL)
right("gemma grouped", gemma, *ALL, port=GroupedGemma)
