"""A port of T5 as an engine has it: fused projections, one bias per stack, plain caches."""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional
from transformers import T5ForConditionalGeneration

LAYERS, WIDTH, HEADS, HEAD, INNER, VOCABULARY = 3, 64, 4, 16, 128, 200
BUCKETS, FARTHEST = 16, 24


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return the same in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised states."""
        scale = (wide(x).pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide(x) * scale).to(x.dtype) * self.weight


class Distance(nn.Module):
    """The bias of the scores, by the distance of query and key."""

    def __init__(self, both_ways: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(BUCKETS, HEADS)
        self.both_ways = both_ways
        self.farthest = FARTHEST

    def forward(self, queries: int, keys: int, offset: int = 0) -> torch.Tensor:
        """Return (1, heads, queries, keys)."""
        distance = torch.arange(keys)[None] - torch.arange(offset, offset + queries)[:, None]
        return self.table(self.buckets(distance)).permute(2, 0, 1)[None]

    def buckets(self, distance: torch.Tensor) -> torch.Tensor:
        """Return the row of the table for each distance."""
        count = BUCKETS
        first = torch.zeros_like(distance)
        if self.both_ways:
            count //= 2
            first = (distance > 0) * count
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = count // 2
        ratio = torch.log(distance.clamp(min=1) / exact) / math.log(self.farthest / exact)
        coarse = (exact + (ratio * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(distance < exact, distance, coarse)


class Mixing(nn.Module):
    """What both kinds of attention share."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def attend(self, q: Any, k: Any, v: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the mixed values, heads side by side."""
        scores = wide(q) @ wide(k).mT
        if bias is not None:
            scores = scores + bias
        mixed = scores.softmax(-1).to(v.dtype) @ v
        return self.proj(rearrange(mixed, "b h n d -> b n (h d)"))


class SelfMixing(Mixing):
    """Attention to the own stack."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD, bias=False)

    def forward(self, x: torch.Tensor, bias: Any, cache: dict[str, Any] | None) -> torch.Tensor:
        """Return what is added to the states."""
        q, k, v = rearrange(self.qkv(x), "b n (t h d) -> t b h n d", t=3, h=HEADS)
        if cache is not None:
            k, v = self.remember(cache, k, v)
        return self.attend(q, k, v, bias)

    def remember(self, cache: dict[str, Any], k: Any, v: Any) -> tuple[Any, Any]:
        """Append to the cache and return all of it."""
        if "k" in cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache["k"], cache["v"] = k, v
        return k, v


class CrossMixing(Mixing):
    """Attention to the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD, bias=False)
        self.kv = nn.Linear(WIDTH, 2 * HEADS * HEAD, bias=False)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, bias: Any) -> torch.Tensor:
        """Return what is added to the states."""
        q = rearrange(self.q(x), "b n (h d) -> b h n d", h=HEADS)
        k, v = rearrange(self.kv(memory), "b n (t h d) -> t b h n d", t=2, h=HEADS)
        return self.attend(q, k, v, bias)


class FeedForward(nn.Module):
    """Gated projections, the gate first."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to the states."""
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.gelu(gate, approximate="tanh") * up)


class Block(nn.Module):
    """One layer of either stack."""

    def __init__(self, crossed: bool) -> None:
        super().__init__()
        self.norm_mix = Norm()
        self.mix = SelfMixing()
        if crossed:
            self.norm_cross = Norm()
            self.cross = CrossMixing()
        self.norm_ffn = Norm()
        self.ffn = FeedForward()
        self.crossed = crossed

    def forward(
        self, x: torch.Tensor, bias: Any, memory: Any = None, hidden: Any = None, cache: Any = None
    ) -> torch.Tensor:
        """Return the next states."""
        x = x + self.mix(self.norm_mix(x), bias, cache)
        if self.crossed:
            x = x + self.cross(self.norm_cross(x), memory, hidden)
        return x + self.ffn(self.norm_ffn(x))


class Encoder(nn.Module):
    """The stack that sees all of the source."""

    def __init__(self) -> None:
        super().__init__()
        self.distance = Distance(both_ways=True)
        self.blocks = nn.ModuleList(Block(crossed=False) for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return what the decoder attends to."""
        bias = self.distance(x.shape[1], x.shape[1])
        if hidden is not None:
            bias = bias + hidden
        for block in self.blocks:
            x = block(x, bias)
        return self.norm(x)


class Decoder(nn.Module):
    """The stack that sees what came before."""

    def __init__(self) -> None:
        super().__init__()
        self.distance = Distance(both_ways=False)
        self.blocks = nn.ModuleList(Block(crossed=True) for _ in range(LAYERS))
        self.norm = Norm()

    def forward(self, x: torch.Tensor, memory: torch.Tensor, hidden: Any, caches: Any) -> Any:
        """Return the last states."""
        past = caches[0]["k"].shape[2] if caches and caches[0] else 0
        bias = self.bias(x.shape[1], past)
        for index, block in enumerate(self.blocks):
            x = block(x, bias, memory, hidden, caches[index] if caches else None)
        return self.norm(x)

    def bias(self, new: int, past: int) -> torch.Tensor:
        """Return what is added to the scores of the new tokens."""
        bias = self.distance(new, past + new, past)
        later = torch.ones(new, past + new, dtype=torch.bool).triu(past + 1)
        return bias.masked_fill(later, torch.finfo(bias.dtype).min)


class Port(nn.Module):
    """Both stacks; the head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = Encoder()
        self.decoder = Decoder()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def new_cache(self) -> dict[str, Any]:
        """Return an empty cache."""
        return {"layers": [{} for _ in range(LAYERS)]}

    def forward(
        self,
        source: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Return the logits of the targets; with a cache, these are the decoder's inputs."""
        hidden = self.hide(mask)
        memory = None if cache is None else cache.get("memory")
        if memory is None:
            memory = self.encoder(self.embed(source), hidden)
        if cache is not None:
            cache["memory"] = memory
        ids = targets if cache is not None else self.shifted(targets)
        x = self.decoder(self.embed(ids), memory, hidden, cache and cache["layers"])
        return self.head(self.scaled(x))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return the states as a head that is the embedding wants them."""
        return x * WIDTH**-0.5

    def hide(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return what hides the padding of the source."""
        if mask is None:
            return None
        dtype = self.embed.weight.dtype
        return torch.zeros(mask.shape, dtype=dtype).masked_fill(
            mask == 0, torch.finfo(dtype).min / 2
        )[:, None, None]

    def shifted(self, targets: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the decoder: the start token, then the targets but the last."""
        return functional.pad(targets, (1, 0))[:, :-1]


def convert(net: T5ForConditionalGeneration, port: Port) -> None:
    """Load the weights of transformers' model."""
    port.embed.weight.copy_(net.shared.weight)
    port.head.weight = port.embed.weight
    for ours, theirs in ((port.encoder, net.encoder), (port.decoder, net.decoder)):
        first = theirs.block[0].layer[0].SelfAttention
        ours.distance.table.weight.copy_(first.relative_attention_bias.weight)
        ours.norm.weight.copy_(theirs.final_layer_norm.weight)
        for block, source in zip(ours.blocks, theirs.block, strict=True):
            mixing, *crossing, ffn = source.layer
            block.norm_mix.weight.copy_(mixing.layer_norm.weight)
            part = mixing.SelfAttention
            block.mix.qkv.weight.copy_(torch.cat([part.q.weight, part.k.weight, part.v.weight]))
            block.mix.proj.weight.copy_(part.o.weight)
            for cross in crossing:
                block.norm_cross.weight.copy_(cross.layer_norm.weight)
                part = cross.EncDecAttention
                block.cross.q.weight.copy_(part.q.weight)
                block.cross.kv.weight.copy_(torch.cat([part.k.weight, part.v.weight]))
                block.cross.proj.weight.copy_(part.o.weight)
            block.norm_ffn.weight.copy_(ffn.layer_norm.weight)
            dense = ffn.DenseReluDense
            block.ffn.up.weight.copy_(torch.cat([dense.wi_0.weight, dense.wi_1.weight]))
            block.ffn.down.weight.copy_(dense.wo.weight)
