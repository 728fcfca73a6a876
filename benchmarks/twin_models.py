"""The models of `twins.py`: two decoders, and a port of the first with other operations.

Written without the product: plain torch, sizes that a CPU records in milliseconds. The port has the
same module names and weights, and computes each of them another way.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS, GROUPS, LAYERS, WORDS = 64, 4, 2, 3, 160
HEAD = WIDTH // HEADS


class RmsNorm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + 0.1 * torch.randn(WIDTH)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    def __init__(self, base: float = 10_000.0) -> None:
        super().__init__()
        self.base = base

    def forward(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        powers = torch.arange(0, HEAD, 2, device=positions.device).float() / HEAD
        angles = positions.float()[:, None] / self.base**powers
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Attention(nn.Module):
    """Grouped queries; `kind` is eager or sdpa."""

    def __init__(self, kind: str = "eager") -> None:
        super().__init__()
        self.kind, self.scale, self.repeats = kind, HEAD**-0.5, True
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.v = nn.Linear(WIDTH, GROUPS * HEAD, bias=False)
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def shares(self, scores: Tensor) -> Tensor:
        return scores.float().softmax(-1).to(scores.dtype)

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(HEADS // GROUPS, 1)

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            part(x).view(batch, length, -1, HEAD).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = rotated(q, *table), rotated(k, *table)
        k, v = self.spread(k), self.spread(v)
        if self.kind == "sdpa":
            y = functional.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        else:
            scores = (q @ k.transpose(2, 3)) * self.scale
            y = self.shares(scores.masked_fill(~mask, torch.finfo(scores.dtype).min)) @ v
        return self.o(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def act(self, x: Tensor) -> Tensor:
        return functional.silu(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_norm, self.attention = RmsNorm(), Attention()
        self.post_norm, self.mlp = RmsNorm(), Mlp()
        self.kept = 1.0

    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        x = x * self.kept + self.attention(self.input_norm(x), table, mask)
        return x + self.mlp(self.post_norm(x))


class Llama(nn.Module):
    """Pre-norm, rotary positions, grouped queries, gated SiLU."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rotary = nn.Embedding(WORDS, WIDTH), Rotary()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = RmsNorm(), nn.Linear(WIDTH, WORDS, bias=False)
        self.shift = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        length = tokens.shape[1]
        table = self.rotary(torch.arange(length, device=x.device), x)
        ones = torch.ones(length, length, dtype=torch.bool, device=x.device)
        mask = ones.tril(self.shift)
        for layer in self.layers:
            x = layer(x, table, mask)
        return self.head(self.norm(x))


# --- the port


class FusedNorm(RmsNorm):
    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (WIDTH,), self.weight, self.eps)


class ComplexRotary(Rotary):
    def forward(self, positions: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        powers = torch.arange(HEAD // 2, device=positions.device) * (-2 / HEAD)
        turns = torch.polar(
            torch.ones(len(positions), HEAD // 2, dtype=torch.float64, device=positions.device),
            torch.outer(positions.double(), self.base ** powers.double()),
        )
        turns = torch.cat([turns, turns], -1)
        return turns.real.to(like.dtype), turns.imag.to(like.dtype)


class EinsumAttention(Attention):
    def forward(self, x: Tensor, table: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        cos, sin = (part[:, None] for part in table)
        q, k, v = (part(x).unflatten(-1, (-1, HEAD)) for part in (self.q, self.k, self.v))
        q, k = (part * cos + self.turned(part) * sin for part in (q, k))
        q = q.unflatten(2, (GROUPS, HEADS // GROUPS))
        scores = torch.einsum("bqgrd,bkgd->bgrqk", q * self.scale, k)
        scores = scores + torch.where(mask, 0.0, float("-inf")).to(scores.dtype)
        shares = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
        return self.o(torch.einsum("bgrqk,bkgd->bqgrd", shares, v).flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat([two.neg(), one], -1)


class SplitMlp(Mlp):
    """Sums the products of the down projection in three parts."""

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x) * (self.gate(x) * torch.sigmoid(self.gate(x)))
        return self.down(wide)


PORTED = {
    RmsNorm: FusedNorm,
    Rotary: ComplexRotary,
    Attention: EinsumAttention,
    Mlp: SplitMlp,
}


def ported(model: nn.Module) -> nn.Module:
    """Give every module of a model the code of its port; names and weights stay."""
    for module in model.modules():
        module.__class__ = PORTED.get(type(module), type(module))
    return model


# --- the second decoder


class SplitLinear(nn.Linear):
    """A product whose terms are summed up in four parts, the last first."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(x.chunk(4, -1), self.weight.chunk(4, -1), strict=True)
        total = sum((part @ weight.T for part, weight in reversed(list(pairs))))
        return total if self.bias is None else total + self.bias


class Cached(nn.Module):
    """Attention over keys and values that the caller keeps, by layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.late = 0

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        before = cache[0].shape[2] if cache else 0
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        if before and self.late:
            v = v.roll(self.late, 2)
        cache[:] = [k, v]
        mask = torch.ones(length, before + length, dtype=torch.bool, device=x.device).tril(before)
        y = functional.scaled_dot_product_attention(q, k, v, mask)
        return self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(WIDTH), Cached()
        self.ln_2, self.fc = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.act, self.proj = nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        return x + self.proj(self.act(self.fc(self.ln_2(x))))


class Gpt(nn.Module):
    """Learned positions, LayerNorm, one product for q, k and v, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(64, WIDTH)
        self.h = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.offset = 0

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        caches = [[] for _ in self.h] if caches is None else caches
        before = caches[0][0].shape[2] if caches[0] else 0
        positions = torch.arange(tokens.shape[1], device=tokens.device) + before + self.offset
        x = self.wte(tokens) + self.wpe(positions)
        for block, cache in zip(self.h, caches, strict=True):
            x = block(x, cache)
        return self.lm_head(self.ln_f(x))


def llama() -> nn.Module:
    torch.manual_seed(11)
    return Llama().eval()


def gpt() -> nn.Module:
    torch.manual_seed(12)
    return Gpt().eval()
