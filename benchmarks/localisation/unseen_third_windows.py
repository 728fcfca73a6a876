"""A decoder that sees so far and no further in every other layer, and caps its scores: Gemma.

The port scales queries first, does not repeat keys and values, and has torch's own norms.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_third import BOTH, harmless, third

# --- Windows in every other layer, capped scores --------------------------------------------------


class GemmaNorm(nn.Module):
    """One is added to the weight."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.scale.float())).type_as(x)


class GemmaAttention(nn.Module):
    def __init__(self, dim: int, window: int | None) -> None:
        super().__init__()
        self.window, self.cap, self.per = window, 20.0, 24
        self.q_proj = nn.Linear(dim, 64, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, 32, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(64, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, 16)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.rope(q), self.rope(k)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = self.capped(q @ k.mT * self.per**-0.5)
        scores = scores.masked_fill(~self.seen(x.shape[1]), float("-inf"))
        out = scores.float().softmax(-1).to(x.dtype) @ v
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def rope(self, x: Tensor) -> Tensor:
        rates = 10000.0 ** -(torch.arange(8).float() / 8)
        angles = torch.arange(x.shape[2]).float()[:, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def capped(self, scores: Tensor) -> Tensor:
        return self.cap * torch.tanh(scores / self.cap)

    def seen(self, length: int) -> Tensor:
        all_ = torch.ones(length, length, dtype=torch.bool)
        return all_.tril() if self.window is None else all_.tril().triu(1 - self.window)


class GemmaLayer(nn.Module):
    """A norm before and after each part."""

    def __init__(self, dim: int, window: int | None) -> None:
        super().__init__()
        self.input_norm, self.post_attn, self.pre_ff, self.post_ff = (
            GemmaNorm(dim) for _ in range(4)
        )
        self.attn = GemmaAttention(dim, window)
        self.gate, self.up = (nn.Linear(dim, 112, bias=False) for _ in range(2))
        self.down = nn.Linear(112, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post_attn(self.attn(self.input_norm(x)))
        h = self.pre_ff(x)
        return x + self.post_ff(self.down(F.gelu(self.gate(h), approximate="tanh") * self.up(h)))


class Gemma(nn.Module):
    def __init__(self, dim: int = 56) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(GemmaLayer(dim, None if n % 2 else 5) for n in range(3))
        self.norm = GemmaNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * torch.tensor(self.embed.embedding_dim**0.5).to(self.embed.weight)
        for layer in self.layers:
            x = layer(x)
        return 30.0 * torch.tanh(F.linear(self.norm(x), self.embed.weight) / 30.0)


def gemma(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Gemma(), 351, outliers)


def plain(of: GemmaNorm) -> nn.RMSNorm:
    """Return the norm of torch that does the same."""
    out = nn.RMSNorm(of.scale.shape[0], eps=of.eps)
    out.weight.data = 1 + of.scale.detach()
    return out


class Windowed(nn.Module):
    """Queries are scaled at first; keys and values are not repeated."""

    def __init__(self, of: GemmaAttention) -> None:
        super().__init__()
        self.reach, self.cap, self.per = of.window or 10**6, of.cap, of.per
        self.wqkv = linear(of.q_proj.weight, of.k_proj.weight, of.v_proj.weight)
        self.wo = linear(of.o_proj.weight)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (8, 16)).split((4, 2, 2), 2)
        q, k = self.turned(q, turn) * self.per**-0.5, self.turned(k, turn)
        scores = self.soft(torch.einsum("bqgnd,bkgd->bgnqk", self.grouped(q), k))
        places = torch.arange(x.shape[1])
        scores = torch.where(self.near(places[:, None] - places), scores, -torch.inf)
        seen = torch.einsum("bgnqk,bkgd->bqgnd", scores.softmax(-1), v)
        return self.wo(self.joined(seen))

    def grouped(self, q: Tensor) -> Tensor:
        return q.unflatten(2, (2, 2))

    def joined(self, seen: Tensor) -> Tensor:
        return seen.flatten(2)

    def soft(self, scores: Tensor) -> Tensor:
        return torch.tanh(scores / self.cap) * self.cap

    def near(self, apart: Tensor) -> Tensor:
        return (apart >= 0) & (apart < self.reach)

    def turned(self, x: Tensor, turn: Tensor) -> Tensor:
        cos, sin = turn[0][:, None].to(x.dtype), turn[1][:, None].to(x.dtype)
        return x * cos + torch.cat((-x[..., 8:], x[..., :8]), -1) * sin


class WindowedBlock(nn.Module):
    def __init__(self, of: GemmaLayer) -> None:
        super().__init__()
        self.norms = nn.ModuleList(
            plain(each) for each in (of.input_norm, of.post_attn, of.pre_ff, of.post_ff)
        )
        self.attention = Windowed(of.attn)
        self.w13, self.w2 = linear(of.gate.weight, of.up.weight), linear(of.down.weight)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = self.norms[1](self.attention(self.norms[0](x), turn)) + x
        a, b = self.w13(self.norms[2](x)).chunk(2, -1)
        return self.norms[3](self.w2(F.gelu(a, approximate="tanh") * b)) + x


class WindowedGemma(nn.Module):
    def __init__(self, model: Gemma) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed.weight.detach().clone())
        self.h = nn.ModuleList(WindowedBlock(each) for each in model.layers)
        self.last, self.head = plain(model.norm), linear(model.embed.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedded(tokens)
        rates = torch.exp(torch.arange(8) * (-torch.log(torch.tensor(10000.0)) / 8))
        angles = torch.outer(torch.arange(tokens.shape[1]).to(rates), rates).tile(2)
        for block in self.h:
            x = block(x, torch.stack((angles.cos(), angles.sin())))
        return self.limited(self.head(self.last(x)))

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens) * torch.tensor(56**0.5).to(self.wte.weight)

    def limited(self, x: Tensor) -> Tensor:
        return torch.tanh(x / 30) * 30


@third(gemma, "h.0.attention", "masks", port=WindowedGemma, regimes=BOTH)
def gemma_window_of_one_more(module, root):
    module.reach += 1


@third(gemma, "h.1.attention", "masks", port=WindowedGemma)
def gemma_window_in_the_wrong_layer(module, root):
    module.reach = 5


@third(gemma, "h.2.attention", "scale", port=WindowedGemma, regimes=BOTH)
def gemma_scores_not_capped(module, root):
    change(module, soft=lambda self, soft, scores: scores)


@third(gemma, "h.1.attention", "scale", port=WindowedGemma)
def gemma_scale_of_the_head(module, root):
    module.per = 16


@third(gemma, "h.1.norms.3", "norm layers", port=WindowedGemma, regimes=BOTH)
def gemma_one_not_added(module, root):
    module.weight.data -= 1


@third(gemma, "", "scale", port=WindowedGemma)
def gemma_embedding_not_scaled(module, root):
    change(module, embedded=lambda self, embedded, tokens: self.wte(tokens))


@third(gemma, "", "scale", port=WindowedGemma)
def gemma_logits_not_capped(module, root):
    change(module, limited=lambda self, limited, x: x)


@third(gemma, "h.0.attention", "heads", port=WindowedGemma)
def gemma_groups_the_other_way(module, root):
    change(
        module,
        grouped=lambda self, grouped, q: q.unflatten(2, (2, 2)).transpose(2, 3),
        joined=lambda self, joined, seen: seen.transpose(2, 3).flatten(2),
    )


@third(gemma, "layers.2.attn", "masks", against=WindowedGemma)
def gemma_window_of_one_less(module, root):
    module.window -= 1


@third(gemma, "layers.1.attn", "positions", against=WindowedGemma)
def gemma_keys_rotated_late(module, root):
    def rope(self, rope, x):
        if x.shape[1] == 4:
            return rope(x)
        return rope(F.pad(x, (0, 0, 1, 0)))[:, :, 1:]

    change(module, rope=rope)


harmless("gemma windowed", gemma, "same", "bf16", port=WindowedGemma)
harmless("gemma against windowed", gemma, "same", against=WindowedGemma)
