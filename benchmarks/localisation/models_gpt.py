"""A decoder of the GPT-2 family: LayerNorm, learned positions, one projection for q, k and v.

Each step that people get wrong is a method, so that `faults` can override exactly that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localisation.sizes import Size


class GPTAttention(nn.Module):
    """Attention with one projection and a mask kept as a buffer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.c_attn = nn.Linear(size.dim, 3 * size.dim)
        self.c_proj = nn.Linear(size.dim, size.dim)
        self.attn_dropout = nn.Dropout(0.1)
        self.scale = size.head**-0.5
        seen = torch.ones(size.length, size.length, dtype=torch.bool).tril()
        self.register_buffer("bias", seen, persistent=False)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(part) for part in self.parts(self.c_attn(x)))
        out = self.attend(q, k, v, self.seen(x.shape[1], padding))
        return self.c_proj(self.merge(out))

    def parts(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv.chunk(3, -1)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def seen(self, length: int, padding: Tensor | None) -> Tensor:
        seen = self.bias[:length, :length]
        return seen if padding is None else seen & padding[:, None, None, :]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3)) * self.scale
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return self.attn_dropout(scores.softmax(-1)) @ v

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


class GPTFeed(nn.Module):
    """The feed-forward with GELU."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.c_fc = nn.Linear(size.dim, 4 * size.dim)
        self.act = nn.GELU()
        self.c_proj = nn.Linear(4 * size.dim, size.dim)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class GPTBlock(nn.Module):
    """One block, norms first."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(size.dim)
        self.attn = GPTAttention(size)
        self.ln_2 = nn.LayerNorm(size.dim)
        self.mlp = GPTFeed(size)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.add(x, self.attn(self.ln_1(x), padding))
        return self.add_last(x, self.mlp(self.ln_2(x)))

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out

    def add_last(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out


class GPT2(nn.Module):
    """A decoder of the GPT-2 family."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.wte = nn.Embedding(size.vocab, size.dim)
        self.wpe = nn.Embedding(size.length, size.dim)
        self.h = nn.ModuleList(GPTBlock(size) for _ in range(size.layers))
        self.ln_f = nn.LayerNorm(size.dim)
        self.lm_head = nn.Linear(size.dim, size.vocab, bias=False)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.wte(tokens) + self.wpe(self.places(tokens))
        for block in self.h:
            x = block(x, padding)
        return self.lm_head(self.ln_f(x))

    def places(self, tokens: Tensor) -> Tensor:
        return torch.arange(tokens.shape[1], device=tokens.device)
