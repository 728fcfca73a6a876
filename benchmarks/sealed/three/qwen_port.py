"""Qwen3-MoE as an inference engine writes it: fused projections, flat tokens, residual apart."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Normalises, after adding the residual where one is given."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """Return x over its root mean square."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None):
        """Return the norm, and the sum where a residual came in."""
        if residual is None:
            return self.normed(x)
        residual = x + residual
        return self.normed(residual), residual


class RotaryEmbedding(nn.Module):
    """Rotates the halves of each head by a table of angles."""

    def __init__(self, head_dim: int, longest: int, base: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2).float() / head_dim)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        angles = torch.outer(torch.arange(longest).float(), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def angles(self, positions: torch.Tensor, like: torch.Tensor):
        """Return cosines and sines of shape (tokens, 1, half)."""
        cos, sin = self.cos_sin_cache[positions].to(like.dtype).chunk(2, -1)
        return cos.unsqueeze(1), sin.unsqueeze(1)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return the rotated heads."""
        heads = x.view(x.shape[0], -1, self.head_dim)
        one, two = heads.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).flatten(1)

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor):
        """Return the rotated queries and keys."""
        cos, sin = self.angles(positions, q)
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)


class Attention(nn.Module):
    """The backend: causal attention within each sequence, over a cache where one is kept."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, slots: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.slots = slots
        cache = torch.zeros(max(slots, 1), kv_heads, head_dim)
        self.register_buffer("k_cache", cache, persistent=False)
        self.register_buffer("v_cache", cache.clone(), persistent=False)

    def expand(self, x: torch.Tensor) -> torch.Tensor:
        """Give each query head its key or value head."""
        return x.repeat_interleave(self.heads // self.kv_heads, dim=1)

    def clear(self, positions: torch.Tensor, like: torch.Tensor) -> None:
        """Forget what was kept when a sequence begins."""
        if int(positions[0]) == 0:
            self.k_cache = torch.zeros_like(self.k_cache, dtype=like.dtype)
            self.v_cache = torch.zeros_like(self.v_cache, dtype=like.dtype)

    def write(self, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put new keys and values into the cache."""
        self.clear(positions, k)
        self.k_cache[positions] = k
        self.v_cache[positions] = v

    def visible(self, positions: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """Return which keys each query sees."""
        if self.slots:
            return torch.arange(int(positions[-1]) + 1)[None, :] <= positions[:, None]
        earlier = positions[None, :] <= positions[:, None]
        return earlier & (segments[None, :] == segments[:, None])

    def attend(self, q, k, v, seen: torch.Tensor) -> torch.Tensor:
        """Return the attention of (heads, tokens, width)."""
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)

    def forward(self, q, k, v, positions: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """Return what each token takes from the others, flat."""
        q = q.view(-1, self.heads, self.head_dim)
        k, v = (x.view(-1, self.kv_heads, self.head_dim) for x in (k, v))
        if self.slots:
            self.write(positions, k, v)
            filled = int(positions[-1]) + 1
            k, v = self.k_cache[:filled], self.v_cache[:filled]
        q, k, v = (x.transpose(0, 1) for x in (q, self.expand(k), self.expand(v)))
        return self.attend(q, k, v, self.visible(positions, segments)).transpose(0, 1).flatten(1)


class Qwen3MoeAttention(nn.Module):
    """Projections, norms of the heads, rotation and the backend."""

    def __init__(self, config, slots: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_size = config.num_attention_heads * self.head_dim
        self.kv_size = config.num_key_value_heads * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        base = config.rope_parameters["rope_theta"]
        self.rotary_emb = RotaryEmbedding(self.head_dim, 128, base)
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.attn = Attention(heads, kv_heads, self.head_dim, slots)

    def by_head(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return x normalised head by head."""
        return norm(x.view(x.shape[0], -1, self.head_dim)).flatten(1)

    def forward(self, positions, hidden: torch.Tensor, segments) -> torch.Tensor:
        """Return the attention's output."""
        q, k, v = self.qkv_proj(hidden).split([self.q_size, self.kv_size, self.kv_size], -1)
        q, k = self.by_head(self.q_norm, q), self.by_head(self.k_norm, k)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v, positions, segments))


class FusedMoE(nn.Module):
    """Chooses experts by their logits and runs them."""

    def __init__(self, config) -> None:
        super().__init__()
        experts, width = config.num_experts, config.moe_intermediate_size
        self.top_k = config.num_experts_per_tok
        self.w13_weight = nn.Parameter(torch.empty(experts, 2 * width, config.hidden_size))
        self.w2_weight = nn.Parameter(torch.empty(experts, config.hidden_size, width))

    def select(self, logits: torch.Tensor):
        """Return the weights of the chosen experts and which they are."""
        weights, chosen = torch.softmax(logits.float(), -1).topk(self.top_k, -1)
        return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen

    def expert(self, x: torch.Tensor, index: int) -> torch.Tensor:
        """Return what one expert makes of its tokens."""
        gate, up = functional.linear(x, self.w13_weight[index]).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.w2_weight[index])

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of the chosen experts."""
        weights, chosen = self.select(logits)
        out = torch.zeros_like(hidden)
        for index in range(self.w13_weight.shape[0]):
            token, slot = torch.where(chosen == index)
            if token.numel():
                done = self.expert(hidden[token], index) * weights[token, slot, None]
                out.index_add_(0, token, done.to(out.dtype))
        return out


class Qwen3MoeSparseMoeBlock(nn.Module):
    """The router and its experts."""

    def __init__(self, config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = FusedMoE(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the experts' sum."""
        return self.experts(hidden, self.gate(hidden))


class Qwen3MoeDecoderLayer(nn.Module):
    """One layer; takes and gives (hidden, residual)."""

    def __init__(self, config, slots: int) -> None:
        super().__init__()
        self.self_attn = Qwen3MoeAttention(config, slots)
        self.mlp = Qwen3MoeSparseMoeBlock(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, positions, hidden, residual, segments):
        """Return what the MLP puts out, and the residual that is not yet added to it."""
        if residual is None:
            residual = hidden
            hidden = self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden, segments)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Qwen3MoeModel(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config, slots: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = [Qwen3MoeDecoderLayer(config, slots) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, input_ids, positions, segments) -> torch.Tensor:
        """Return the last hidden states."""
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual, segments)
        return self.norm(hidden, residual)[0]


class Qwen3MoeForCausalLM(nn.Module):
    """The model and its head; sequences are packed one behind the other."""

    def __init__(self, config, slots: int = 0) -> None:
        super().__init__()
        self.model = Qwen3MoeModel(config, slots)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.model.embed_tokens.weight

    def positions(self, start: int, count: int) -> torch.Tensor:
        """Return the positions of a step."""
        return torch.arange(start, start + count)

    def forward(self, input_ids: torch.Tensor, places) -> torch.Tensor:
        """Return logits, of packed tokens with positions or of a step that starts at a number."""
        if isinstance(places, int):
            flat = input_ids.flatten()
            places = self.positions(places, flat.numel())
            hidden = self.model(flat, places, torch.zeros_like(places)).unsqueeze(0)
        else:
            hidden = self.model(input_ids, places, (places == 0).cumsum(0))
        return self.lm_head(hidden)


def load(port: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Fuse the projections of a transformers checkpoint."""
    fused: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        name = name.replace("experts.gate_up_proj", "experts.w13_weight")
        name = name.replace("experts.down_proj", "experts.w2_weight")
        if "q_proj" in name:
            parts = [weights[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            fused[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            fused[name] = weight.clone()
    missing, unexpected = port.load_state_dict(fused, strict=False)
    assert not unexpected
    assert all("lm_head" in name for name in missing)
