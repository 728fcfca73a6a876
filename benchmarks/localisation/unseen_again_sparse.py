"""An encoder that sees a window and some places that see all; the port goes block by block."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_again import BOTH, again, harmless

GLOBAL = 2
"""So many places at the start see all, and are seen by all."""


class LongAttention(nn.Module):
    """A window for most places; the first ones have projections of their own."""

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.query_global, self.key_global, self.value_global = (
            nn.Linear(dim, dim) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        local = self.attended(self.query(x), self.key(x), self.value(x), self.seen(x.shape[1]))
        first = self.query_global(x[:, :GLOBAL])
        wide = self.attended(first, self.key_global(x), self.value_global(x), None)
        return torch.cat([wide, local[:, GLOBAL:]], 1)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if seen is not None:
            scores = scores.masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def seen(self, length: int) -> Tensor:
        places = torch.arange(length)
        near = (places[:, None] - places).abs() <= self.window
        return near | (places < GLOBAL)


class LongLayer(nn.Module):
    """Norms after both parts."""

    def __init__(self, dim: int, heads: int, window: int) -> None:
        super().__init__()
        self.attention = LongAttention(dim, heads, window)
        self.output, self.norm1 = nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.intermediate, self.result = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.output(self.attention(x)))
        return self.norm2(x + self.result(F.gelu(self.intermediate(x))))


class Longformer(nn.Module):
    """The encoder, and a class from the first place."""

    def __init__(self, dim: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(101, dim), nn.Embedding(16, dim)
        self.norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(LongLayer(dim, heads, window) for window in (2, 4, 4))
        self.classifier = nn.Linear(dim, 7)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(self.embed(tokens) + self.places(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return x, self.classifier(torch.tanh(x[:, 0]))


def longformer(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Longformer(), 231, outliers)


class BlockAttention(nn.Module):
    """The window by blocks of places, with both neighbours; the first places beside them."""

    def __init__(self, of: LongLayer) -> None:
        super().__init__()
        a = of.attention
        self.heads, self.window, self.block = a.heads, a.window, 4
        near, wide = (a.query, a.key, a.value), (a.query_global, a.key_global, a.value_global)
        self.near = linear(
            *(e.weight for e in near), bias=torch.cat([e.bias.detach() for e in near])
        )
        self.first = linear(wide[0].weight, bias=wide[0].bias.detach())
        self.wide = linear(
            *(e.weight for e in wide[1:]), bias=torch.cat([e.bias.detach() for e in wide[1:]])
        )
        self.proj = linear(of.output.weight, bias=of.output.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(each) for each in self.near(x).chunk(3, -1))
        local = self.by_blocks(q * q.shape[-1] ** -0.5, k, v)
        gk, gv = (self.split(each) for each in self.wide(x).chunk(2, -1))
        top = F.scaled_dot_product_attention(self.split(self.first(x[:, :GLOBAL])), gk, gv)
        out = torch.cat([top, local[:, :, GLOBAL:]], 2)
        return self.proj(out.transpose(1, 2).reshape(x.shape))

    def split(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def by_blocks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        size, length = self.block, q.shape[2]
        out = []
        for start in range(0, length, size):
            rows = torch.arange(start, start + size)
            low, high = self.reach(start, length)
            columns = torch.cat([torch.arange(GLOBAL), torch.arange(max(low, GLOBAL), high)])
            hidden = (rows[:, None] - columns).abs() > self.window
            scores = torch.einsum("bhid,bhjd->bhij", q[:, :, rows], k[:, :, columns])
            scores = scores - 1e9 * (hidden & (columns >= GLOBAL)).to(scores.dtype)
            out.append(torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v[:, :, columns]))
        return torch.cat(out, 2)

    def reach(self, start: int, length: int) -> tuple[int, int]:
        return max(0, start - self.block), min(length, start + 2 * self.block)


class BlockLayer(nn.Module):
    """Attention and feed-forward as parts."""

    def __init__(self, of: LongLayer) -> None:
        super().__init__()
        self.attn, self.ln_a, self.ln_b = (
            BlockAttention(of),
            norm_like(of.norm1),
            norm_like(of.norm2),
        )
        self.ffn = nn.Sequential(
            linear(of.intermediate.weight, bias=of.intermediate.bias.detach()),
            nn.GELU(),
            linear(of.result.weight, bias=of.result.bias.detach()),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_a(self.attn(x) + x)
        return self.ln_b(self.ffn(x) + x)


class BlockLongformer(nn.Module):
    """The same, block by block."""

    def __init__(self, model: Longformer) -> None:
        super().__init__()
        self.words = nn.Embedding.from_pretrained(model.embed.weight.detach().clone())
        self.positions = nn.Parameter(model.places.weight.detach().clone())
        self.ln = norm_like(model.norm)
        self.body = nn.ModuleList(BlockLayer(each) for each in model.layers)
        self.pooled = linear(model.classifier.weight, bias=model.classifier.bias.detach())

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.ln(self.words(tokens) + self.positions[: tokens.shape[1]])
        for layer in self.body:
            x = layer(x)
        return x, self.pooled(self.first(x))

    def first(self, x: Tensor) -> Tensor:
        return torch.tanh(x[:, 0])


@again(longformer, "body.1.attn", "masks", port=BlockLongformer, regimes=BOTH)
def longformer_no_block_after(module, root):
    change(
        module, reach=lambda self, reach, start, length: (max(0, start - 4), min(length, start + 4))
    )


@again(longformer, "body.0.attn", "masks", port=BlockLongformer)
def longformer_window_of_another_layer(module, root):
    module.window = 3


@again(longformer, "body.2.attn", "structure", port=BlockLongformer, regimes=BOTH)
def longformer_local_keys_for_all(module, root):
    change(
        module,
        by_blocks=lambda self, by_blocks, q, k, v: by_blocks(q, k, v.roll(1, 2)),
    )


@again(longformer, "body.1.attn.wide", "weights", port=BlockLongformer)
def longformer_global_values_stale(module, root):
    module.weight.data[48:] = root.body[0].attn.wide.weight.data[48:].clone()


@again(longformer, "", "structure", port=BlockLongformer)
def longformer_last_place_pooled(module, root):
    change(module, first=lambda self, first, x: torch.tanh(x[:, -1]))


@again(longformer, "body.2", "structure", port=BlockLongformer, regimes=BOTH)
def longformer_residual_lost(module, root):
    def forward(self, forward, x):
        x = self.ln_a(self.attn(x) + x)
        return self.ln_b(self.ffn(x))

    change(module, forward=forward)


@again(longformer, "layers.1.attention", "masks", against=BlockLongformer)
def longformer_first_not_seen(module, root):
    def seen(self, seen, length):
        places = torch.arange(length)
        return (places[:, None] - places).abs() <= self.window

    change(module, seen=seen)


@again(longformer, "layers.2.attention.query_global", "weights", against=BlockLongformer)
def longformer_global_query_is_local(module, root):
    module.load_state_dict(root.layers[2].attention.query.state_dict())


harmless("longformer in blocks", longformer, "same", "reordered", "bf16", port=BlockLongformer)
harmless("longformer against blocks", longformer, against=BlockLongformer)
