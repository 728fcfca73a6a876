"""A port of BERT as for an engine: fused projections, the segment folded into the positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import BertModel

WIDTH, HEADS, INNER, VOCABULARY, LENGTH = 384, 12, 1536, 4000, 64


class Embed(nn.Module):
    """Word and position rows, the row of the only segment added to the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, WIDTH)
        self.where = nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the first states."""
        positions = torch.arange(ids.shape[1], device=ids.device)
        return self.norm(self.word(ids) + self.where(positions))


class Mix(nn.Module):
    """Attention with one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = (WIDTH // HEADS) ** -0.5
        self.explicit = False

    def split(self, states: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values as (3, batch, heads, length, head)."""
        batch, length, _ = states.shape
        return self.qkv(states).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)

    def attend(self, q: Any, k: Any, v: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the mixed values per head."""
        if not self.explicit:
            return functional.scaled_dot_product_attention(q, k, v, bias, scale=self.scale)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = q.to(wide) @ k.to(wide).mT * self.scale
        if bias is not None:
            scores = scores + bias
        return scores.softmax(-1).to(v.dtype) @ v

    def forward(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return what is added to the states."""
        q, k, v = self.split(states)
        return self.out(self.attend(q, k, v, bias).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return what is added to the states."""
        return self.down(functional.gelu(self.up(states)))


class Layer(nn.Module):
    """One layer, each part normalised after it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()
        self.norm_a = nn.LayerNorm(WIDTH, eps=1e-12)
        self.ffn = FeedForward()
        self.norm_b = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the next states."""
        states = self.norm_a(states + self.mix(states, bias))
        return self.norm_b(states + self.ffn(states))


class Pool(nn.Module):
    """The mean over the real tokens."""

    def forward(self, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return one vector per text, of length 1."""
        wide = torch.promote_types(states.dtype, torch.float32)
        summed = (states.to(wide) * mask[..., None]).sum(1)
        return functional.normalize(summed / mask.sum(1, keepdim=True), dim=-1).to(states.dtype)


class Port(nn.Module):
    """The encoder; takes the lengths of the texts out of the mask."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = Embed()
        self.stack = nn.ModuleList(Layer() for _ in range(layers))
        self.pool = Pool()
        self.fill = "min"

    def bias(self, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what is added to the scores."""
        if mask.all():
            return None
        fill = float("-inf") if self.fill == "inf" else torch.finfo(dtype).min
        bias = torch.zeros(mask.shape, dtype=dtype).masked_fill(mask == 0, fill)
        return bias[:, None, None]

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states, 0 at padding, and one vector per text."""
        states = self.embed(ids)
        bias = self.bias(mask, states.dtype)
        for layer in self.stack:
            states = layer(states, bias)
        return states * mask[..., None], self.pool(states, mask)


def convert(net: BertModel, port: Port) -> None:
    """Load the weights of transformers' model."""

    def copy(to: nn.Module, source: nn.Module) -> None:
        to.load_state_dict(source.state_dict())

    words = net.embeddings
    copy(port.embed.word, words.word_embeddings)
    segment = words.token_type_embeddings.weight[0]
    port.embed.where.weight.copy_(words.position_embeddings.weight + segment)
    copy(port.embed.norm, words.LayerNorm)
    for ours, theirs in zip(port.stack, net.encoder.layer, strict=True):
        attention = theirs.attention.self
        parts = (attention.query, attention.key, attention.value)
        ours.mix.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
        ours.mix.qkv.bias.copy_(torch.cat([part.bias for part in parts]))
        copy(ours.mix.out, theirs.attention.output.dense)
        copy(ours.norm_a, theirs.attention.output.LayerNorm)
        copy(ours.ffn.up, theirs.intermediate.dense)
        copy(ours.ffn.down, theirs.output.dense)
        copy(ours.norm_b, theirs.output.LayerNorm)
