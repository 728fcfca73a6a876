"""Decoders of the Llama family: dense, as a mixture, with weights in four bits, with a cache.

Each step that people get wrong (rotation, mask, head mapping, residual, routing) is a method, so
that `faults` can override exactly that. Knows nothing of faults, ports or scores.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation.sizes import Size

# --- Llama: RMSNorm, RoPE, grouped queries, SwiGLU; three ways to keep keys and values ------------


class RMSNorm(nn.Module):
    """Root mean square norm, in float32 inside, as the libraries do."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Rotary(nn.Module):
    """Cosines and sines of the positions."""

    def __init__(self, head: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head, self.base = head, base

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.head, 2, dtype=torch.float32, device=x.device)
        angles = positions.to(torch.float32)[:, None] * self.base ** (-steps / self.head)
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of each head: x is [B, H, T, D], cos and sin are [T, D]."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    """Grouped-query attention, spelled out."""

    state: tuple[str, ...] = ()
    """Attributes that are kept between calls."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = size.heads, size.kv_heads, size.head
        self.q_proj = nn.Linear(size.dim, size.heads * size.head, bias=False)
        self.k_proj = nn.Linear(size.dim, size.kv_heads * size.head, bias=False)
        self.v_proj = nn.Linear(size.dim, size.kv_heads * size.head, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head, size.dim, bias=False)
        self.scale = size.head**-0.5

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache: Any = None
    ) -> Tensor:
        q = self.split(self.q_proj(x), self.heads)
        k = self.split(self.k_proj(x), self.kv_heads)
        v = self.split(self.v_proj(x), self.kv_heads)
        q, k = self.rotate_q(q, cos, sin), self.rotate_k(k, cos, sin)
        k, v = self.remember(k, v, positions, cache)
        seen = self.visible(positions, k.shape[2])
        out = self.attend(q, self.spread(k), self.spread(v), seen)
        return self.o_proj(self.merge(out))

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.head).transpose(1, 2)

    def rotate_q(self, q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotated(q, cos, sin)

    def rotate_k(self, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotated(k, cos, sin)

    def remember(
        self, k: Tensor, v: Tensor, positions: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        return k, v

    def visible(self, positions: Tensor, keys: int) -> Tensor:
        return torch.arange(keys, device=positions.device)[None, :] <= positions[:, None]

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.kv_heads, 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = (q @ k.transpose(2, 3)) * self.scale
        scores = scores.masked_fill(~seen, float("-inf"))
        return self.weights(scores).to(q.dtype) @ v

    def weights(self, scores: Tensor) -> Tensor:
        return F.softmax(scores, -1, dtype=torch.float32)

    def merge(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


class BufferedAttention(Attention):
    """Keys and values in buffers of full length, written at the positions."""

    state = ("k_cache", "v_cache")

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        shape = (size.batch, size.kv_heads, size.length, size.head)
        self.register_buffer("k_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape), persistent=False)

    def remember(
        self, k: Tensor, v: Tensor, positions: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        slots = self.slots(positions)
        self.k_cache[: k.shape[0], :, slots] = k
        self.v_cache[: v.shape[0], :, slots] = v
        end = int(positions[-1]) + 1
        return self.k_cache[: k.shape[0], :, :end], self.v_cache[: v.shape[0], :, :end]

    def slots(self, positions: Tensor) -> Tensor:
        return positions

    def reset(self) -> None:
        self.k_cache.zero_()
        self.v_cache.zero_()


class GrowingAttention(Attention):
    """Keys and values as plain attributes that grow with each call."""

    state = ("past_k", "past_v")

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.past_k: Tensor | None = None
        self.past_v: Tensor | None = None

    def remember(
        self, k: Tensor, v: Tensor, positions: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        self.past_k = k if self.past_k is None else torch.cat([self.past_k, k], 2)
        self.past_v = v if self.past_v is None else torch.cat([self.past_v, v], 2)
        return self.past_k, self.past_v

    def reset(self) -> None:
        self.past_k = self.past_v = None


class Cache:
    """Keys and values of every layer, handed in by the caller and added to in place."""

    def __init__(self, layers: int) -> None:
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        old_k, old_v = self.keys[layer], self.values[layer]
        self.keys[layer] = k if old_k is None else torch.cat([old_k, k], 2)
        self.values[layer] = v if old_v is None else torch.cat([old_v, v], 2)
        return self.keys[layer], self.values[layer]


class CacheAttention(Attention):
    """Keys and values in a `Cache` that comes with the call."""

    layer = 0

    def remember(
        self, k: Tensor, v: Tensor, positions: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor]:
        return cache.update(self.layer, k, v)


class SwiGLU(nn.Module):
    """The gated feed-forward."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.dim, size.hidden, bias=False)
        self.up_proj = nn.Linear(size.dim, size.hidden, bias=False)
        self.down_proj = nn.Linear(size.hidden, size.dim, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up


class Router(nn.Module):
    """Chooses two experts for a token and says how much each counts."""

    def __init__(self, size: Size, chosen: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size.experts, size.dim))
        self.chosen = chosen

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.scores(x).softmax(-1, dtype=torch.float32)
        return self.choose(shares, x.dtype)

    def scores(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)

    def choose(self, shares: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shares, chosen = shares.topk(self.chosen, -1)
        return self.shared(shares).to(dtype), chosen

    def shared(self, shares: Tensor) -> Tensor:
        return shares / shares.sum(-1, keepdim=True)


class Mixture(nn.Module):
    """A mixture of feed-forwards."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = Router(size)
        self.experts = nn.ModuleList(SwiGLU(size) for _ in range(size.experts))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(self.sent(chosen) == number)
            if len(token):
                out.index_add_(0, token, self.counted(expert(flat[token]), shares[token, rank]))
        return out.view_as(x)

    def sent(self, chosen: Tensor) -> Tensor:
        return chosen

    def counted(self, out: Tensor, share: Tensor) -> Tensor:
        return out * share[:, None]


class LlamaLayer(nn.Module):
    """One block: norm, attention, norm, feed-forward, two residuals."""

    def __init__(self, size: Size, attention: type[Attention], feed: type[nn.Module]) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(size.dim)
        self.self_attn = attention(size)
        self.post_attention_layernorm = RMSNorm(size.dim)
        self.mlp = feed(size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, cache: Any = None
    ) -> Tensor:
        x = self.add(x, self.self_attn(self.input_layernorm(x), cos, sin, positions, cache))
        return self.add_last(x, self.mlp(self.post_attention_layernorm(x)))

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out

    def add_last(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out


class Llama(nn.Module):
    """A decoder of the Llama family."""

    def __init__(
        self,
        size: Size,
        attention: type[Attention] = Attention,
        feed: type[nn.Module] = SwiGLU,
    ) -> None:
        super().__init__()
        self.size = size
        self.embed_tokens = nn.Embedding(size.vocab, size.dim)
        self.rotary_emb = Rotary(size.head)
        self.layers = nn.ModuleList(LlamaLayer(size, attention, feed) for _ in range(size.layers))
        self.norm = RMSNorm(size.dim)
        self.lm_head = nn.Linear(size.dim, size.vocab, bias=False)
        for number, layer in enumerate(self.layers):
            layer.self_attn.layer = number

    def forward(self, tokens: Tensor, positions: Tensor | None = None, cache: Any = None) -> Tensor:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(x, positions)
        for layer in self.layers:
            x = layer(x, cos, sin, positions, cache)
        return self.lm_head(self.norm(x))

    def reset(self) -> None:
        """Forget the keys and values kept."""
        for layer in self.layers:
            if hasattr(layer.self_attn, "reset"):
                layer.self_attn.reset()

    def new_cache(self) -> Cache:
        """Return an empty cache to be handed in."""
        return Cache(len(self.layers))


# --- Quantised weights: four bits, groups along the fan-in, two to a byte -------------------------


class QuantLinear(nn.Module):
    """A linear layer whose weights are held in four bits."""

    def __init__(self, linear: nn.Linear, group: int = 16) -> None:
        super().__init__()
        self.group = group
        rows, columns = linear.weight.shape
        blocks = linear.weight.detach().view(rows, columns // group, group)
        low, high = blocks.amin(-1), blocks.amax(-1)
        self.register_buffer("scales", (high - low) / 15)
        self.register_buffer("zeros", torch.round(-low / self.scales))
        codes = torch.round(blocks / self.scales[..., None] + self.zeros[..., None]).clamp(0, 15)
        codes = codes.to(torch.uint8).view(rows, columns)
        self.register_buffer("packed", codes[:, 0::2] | (codes[:, 1::2] << 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight())

    def weight(self) -> Tensor:
        codes = self.unpacked(self.packed)
        blocks = codes.view(codes.shape[0], -1, self.group).to(self.scales.dtype)
        return ((blocks - self.zeros[..., None]) * self.scales[..., None]).view(codes.shape)

    def unpacked(self, packed: Tensor) -> Tensor:
        return torch.stack([packed & 15, packed >> 4], -1).flatten(1)
