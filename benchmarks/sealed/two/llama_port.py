"""Llama 3 as Meta publishes it: complex rotary, a cache in each attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

DIM, LAYERS, HEADS, KV_HEADS, VOCABULARY, LENGTH = 64, 3, 4, 2, 160, 256
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
TRAINED_LENGTH, THETA, EPS = 256, 500000.0, 1e-5


class RMSNorm(nn.Module):
    """Root-mean-square norm with its statistics in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.type_as(x) * self.weight


def apply_scaling(freqs: Tensor) -> Tensor:
    """Stretch low frequencies, as Llama 3.1 does."""
    low = TRAINED_LENGTH / SCALING["low_freq_factor"]
    high = TRAINED_LENGTH / SCALING["high_freq_factor"]
    stretched = []
    for freq in freqs:
        wavelen = 2 * math.pi / freq
        if wavelen < high:
            stretched.append(freq)
        elif wavelen > low:
            stretched.append(freq / SCALING["factor"])
        else:
            smooth = (TRAINED_LENGTH / wavelen - SCALING["low_freq_factor"]) / (
                SCALING["high_freq_factor"] - SCALING["low_freq_factor"]
            )
            stretched.append((1 - smooth) * freq / SCALING["factor"] + smooth * freq)
    return torch.tensor(stretched, dtype=freqs.dtype)


def precompute_freqs_cis(dim: int, end: int, theta: float, scaled: bool = True) -> Tensor:
    """Return the rotations of all positions as complex numbers."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    if scaled:
        freqs = apply_scaling(freqs)
    angles = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate neighbouring pairs of (batch, length, heads, head_dim)."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * freqs_cis[None, :, None, :]).flatten(3)
    return turned.type_as(x)


def repeat_kv(x: Tensor, times: int) -> Tensor:
    """Repeat each head of (batch, length, heads, head_dim)."""
    return torch.repeat_interleave(x, times, dim=2)


class Attention(nn.Module):
    """Grouped-query attention that keeps its own cache."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = DIM // HEADS
        self.n_rep = HEADS // KV_HEADS
        self.scale = 1 / math.sqrt(self.head_dim)
        self.wq = nn.Linear(DIM, HEADS * self.head_dim, bias=False)
        self.wk = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wv = nn.Linear(DIM, KV_HEADS * self.head_dim, bias=False)
        self.wo = nn.Linear(HEADS * self.head_dim, DIM, bias=False)
        self.cache_k = torch.zeros(2, LENGTH, KV_HEADS, self.head_dim)
        self.cache_v = torch.zeros(2, LENGTH, KV_HEADS, self.head_dim)

    def turn(self, q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys by their positions."""
        return rotate(q, freqs_cis), rotate(k, freqs_cis)

    def slot(self, start: int) -> int:
        """Return where in the cache a chunk goes."""
        return start

    def shared(self, x: Tensor) -> Tensor:
        """Return the key or value heads as often as queries use them."""
        return repeat_kv(x, self.n_rep)

    def weights(self, q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
        """Return how much each query attends to each key."""
        scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * self.scale
        if mask is not None:
            scores = scores + mask
        return F.softmax(scores, dim=-1).type_as(q)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Return the mixed values, with heads second."""
        return torch.matmul(self.weights(q, k, mask), v)

    def forward(self, x: Tensor, start: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        """Return what attention adds to the residual."""
        size, length, _ = x.shape
        q = self.wq(x).view(size, length, -1, self.head_dim)
        k = self.wk(x).view(size, length, -1, self.head_dim)
        v = self.wv(x).view(size, length, -1, self.head_dim)
        q, k = self.turn(q, k, freqs_cis)
        self.cache_k, self.cache_v = self.cache_k.to(q), self.cache_v.to(q)
        slot = self.slot(start)
        self.cache_k[:size, slot : slot + length] = k
        self.cache_v[:size, slot : slot + length] = v
        keys = self.shared(self.cache_k[:size, : start + length])
        values = self.shared(self.cache_v[:size, : start + length])
        output = self.attend(*(each.transpose(1, 2) for each in (q, keys, values)), mask)
        return self.wo(output.transpose(1, 2).reshape(size, length, -1))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Linear(DIM, 2 * DIM, bias=False)
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)
        self.w3 = nn.Linear(DIM, 2 * DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the feed-forward adds to the residual."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Attention and feed-forward around a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.feed_forward = FeedForward()
        self.attention_norm = RMSNorm(DIM, EPS)
        self.ffn_norm = RMSNorm(DIM, EPS)

    def forward(self, x: Tensor, start: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        """Return the new residual."""
        h = x + self.attention(self.attention_norm(x), start, freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Transformer(nn.Module):
    """The whole model; called with the position of the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(TransformerBlock() for _ in range(LAYERS))
        self.norm = RMSNorm(DIM, EPS)
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)
        self.freqs_cis = precompute_freqs_cis(DIM // HEADS, LENGTH, THETA)

    def rotations(self, start: int, length: int) -> Tensor:
        """Return the rotations of the positions of a chunk."""
        return self.freqs_cis[start : start + length]

    def mask(self, h: Tensor, start: int) -> Tensor | None:
        """Return the causal mask of a chunk over all positions so far."""
        length = h.shape[1]
        if length == 1:
            return None
        mask = torch.full((length, length), float("-inf")).triu(diagonal=1)
        return torch.hstack([torch.zeros(length, start), mask]).type_as(h)

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Return the logits of a chunk of tokens."""
        h = self.tok_embeddings(tokens)
        freqs_cis, mask = self.rotations(start, tokens.shape[1]), self.mask(h, start)
        for layer in self.layers:
            h = layer(h, start, freqs_cis, mask)
        return self.output(self.norm(h)).float()


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Turn rows in halves, as transformers pairs them, into rows in neighbouring pairs."""
    head_dim = weight.shape[0] // heads
    return weight.view(heads, 2, head_dim // 2, -1).transpose(1, 2).reshape(weight.shape)


def converted(state: dict[str, Tensor]) -> Transformer:
    """Return Meta's model with the weights of transformers'."""
    model = Transformer()
    names = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
    names |= {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "self_attn": "attention"}
    names |= {"mlp": "feed_forward", "input_layernorm": "attention_norm", "lm_head": "output"}
    names |= {"post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings"}
    renamed = {}
    for name, weight in state.items():
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, HEADS if "q_proj" in name else KV_HEADS)
        parts = [names.get(part, part) for part in name.removeprefix("model.").split(".")]
        renamed[".".join(parts)] = weight.clone()
    model.load_state_dict(renamed)
    return model
