"""DeepSeek-V3 as an inference engine writes it: latent attention with absorbed weights."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of x."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class YarnRotaryEmbedding(nn.Module):
    """Tables of angles, stretched as YaRN does."""

    def __init__(self, dim: int, rope: dict, longest: int = 128) -> None:
        super().__init__()
        factor, original = rope["factor"], rope["original_max_position_embeddings"]
        base = rope["rope_theta"]
        powers = base ** (torch.arange(0, dim, 2).float() / dim)
        low = math.floor(self.turning(rope["beta_fast"], dim, base, original))
        high = math.ceil(self.turning(rope["beta_slow"], dim, base, original))
        low, high = max(low, 0), min(high, dim - 1)
        ramp = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0, 1)
        frequencies = ramp / (factor * powers) + (1 - ramp) / powers
        angles = torch.outer(torch.arange(longest).float(), frequencies)
        scale = yarn_mscale(factor, rope["mscale"]) / yarn_mscale(factor, rope["mscale_all_dim"])
        self.register_buffer("cos_cached", angles.cos() * scale, persistent=False)
        self.register_buffer("sin_cached", angles.sin() * scale, persistent=False)

    @staticmethod
    def turning(turns: float, dim: int, base: float, original: int) -> float:
        """Return the dimension that turns so often within the original length."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    def forward(self, positions: torch.Tensor, dtype: torch.dtype):
        """Return cosines and sines of the positions."""
        return self.cos_cached[positions].to(dtype), self.sin_cached[positions].to(dtype)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return by how much attention is sharpened for a context so much longer."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


class MLAAttention(nn.Module):
    """Attention over latents: keys' weights are absorbed by queries, values' by the output."""

    def __init__(self, config) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.q_rank, self.rank = config.q_lora_rank, config.kv_lora_rank
        width, rank = config.hidden_size, config.kv_lora_rank
        inner = config.q_lora_rank + rank + self.rope
        self.fused_qkv_a_proj = nn.Linear(width, inner, bias=False)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank)
        self.q_b_proj = nn.Linear(
            config.q_lora_rank, self.heads * (self.nope + self.rope), bias=False
        )
        self.kv_a_layernorm = RMSNorm(rank)
        self.w_kc = nn.Parameter(torch.empty(self.heads, self.nope, rank))
        self.w_vc = nn.Parameter(torch.empty(self.heads, rank, config.v_head_dim))
        self.o_proj = nn.Linear(self.heads * config.v_head_dim, width, bias=False)
        rope = config.rope_parameters
        mscale = yarn_mscale(rope["factor"], rope["mscale_all_dim"])
        self.scaling = (self.nope + self.rope) ** -0.5 * mscale * mscale
        self.register_buffer("kv_cache", torch.zeros(1, 0, rank + self.rope), persistent=False)

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate neighbours; x is (batch, tokens, heads, width)."""
        one, two = x[..., 0::2], x[..., 1::2]
        cos, sin = cos[:, None], sin[:, None]
        return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(-2)

    def keep(self, latent: torch.Tensor, start: int | None) -> torch.Tensor:
        """Return this step's latents behind those of the steps before."""
        if start is None:
            return latent
        self.kv_cache = torch.cat((self.kv_cache[:, :start], latent), 1) if start else latent
        return self.kv_cache

    def weigh(self, scores: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        """Return the latents weighed by the softmax of the scores."""
        weights = scores.softmax(-1, dtype=torch.float32).to(scores.dtype)
        return torch.einsum("bhqk,bkr->bqhr", weights, latent)

    def latents(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor):
        """Return the queries by part, and latents beside the rotated key that heads share."""
        q, latent, k_pe = self.fused_qkv_a_proj(hidden).split(
            [self.q_rank, self.rank, self.rope], -1
        )
        q = self.q_b_proj(self.q_a_layernorm(q)).unflatten(-1, (self.heads, -1))
        q_nope, q_pe = q.split([self.nope, self.rope], -1)
        q_pe = self.rotate(q_pe, cos, sin)
        k_pe = self.rotate(k_pe.unsqueeze(2), cos, sin).squeeze(2)
        return q_nope, q_pe, torch.cat((self.kv_a_layernorm(latent), k_pe), -1)

    def forward(self, hidden, cos, sin, start: int | None) -> torch.Tensor:
        """Return the attention's output."""
        q_nope, q_pe, new = self.latents(hidden, cos, sin)
        q_latent = torch.einsum("bqhn,hnr->bqhr", q_nope, self.w_kc)
        kept = self.keep(new, start)
        scores = torch.einsum("bqhr,bkr->bhqk", torch.cat((q_latent, q_pe), -1), kept)
        scores = scores * self.scaling
        hidden_keys = self.future(scores.shape[-2], scores.shape[-1])
        scores = scores.masked_fill(hidden_keys, -torch.inf)
        taken = self.weigh(scores, kept[..., : self.rank])
        return self.o_proj(torch.einsum("bqhr,hrv->bqhv", taken, self.w_vc).flatten(2))

    def future(self, queries: int, keys: int) -> torch.Tensor:
        """Return which keys come after each query."""
        return torch.ones(queries, keys).triu(keys - queries + 1).bool()


class DeepseekMLP(nn.Module):
    """Gated MLP with gate and up fused."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


class MoEGate(nn.Module):
    """Chooses experts within the best groups by biased sigmoids."""

    def __init__(self, config) -> None:
        super().__init__()
        self.groups, self.top_groups = config.n_group, config.topk_group
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        bias = torch.zeros(config.n_routed_experts)
        self.register_buffer("e_score_correction_bias", bias)

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        """Return each expert's sigmoid."""
        return functional.linear(x.float(), self.weight.float()).sigmoid()

    def of_groups(self, biased: torch.Tensor) -> torch.Tensor:
        """Return what groups are chosen by, from (tokens, groups, experts)."""
        return biased.topk(2, -1)[0].sum(-1)

    def choose(self, scores: torch.Tensor) -> torch.Tensor:
        """Return which experts run."""
        biased = (scores + self.e_score_correction_bias).unflatten(-1, (self.groups, -1))
        best = self.of_groups(biased).topk(self.top_groups, -1)[1]
        allowed = torch.zeros(biased.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        return biased.masked_fill(~allowed[..., None], -torch.inf).flatten(-2).topk(self.top_k)[1]

    def forward(self, x: torch.Tensor):
        """Return the weights of the chosen experts and which they are."""
        scores = self.scores(x)
        chosen = self.choose(scores)
        weights = scores.gather(-1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen


class DeepseekExperts(nn.Module):
    """The routed experts' weights."""

    def __init__(self, config) -> None:
        super().__init__()
        count, inner, width = (
            config.n_routed_experts,
            config.moe_intermediate_size,
            config.hidden_size,
        )
        self.w13 = nn.Parameter(torch.empty(count, 2 * inner, width))
        self.w2 = nn.Parameter(torch.empty(count, width, inner))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor):
        """Return the weighted sum over the chosen experts."""
        out = torch.zeros_like(x)
        for index in range(len(self.w13)):
            token, slot = torch.where(chosen == index)
            if token.numel():
                gate, up = functional.linear(x[token], self.w13[index]).chunk(2, -1)
                done = functional.linear(functional.silu(gate) * up, self.w2[index])
                done = done * weights[token, slot, None]
                out.index_add_(0, token, done.to(out.dtype))
        return out


class DeepseekMoE(nn.Module):
    """Routed and shared experts."""

    def __init__(self, config) -> None:
        super().__init__()
        self.routed_scaling_factor = config.routed_scaling_factor
        self.gate = MoEGate(config)
        self.experts = DeepseekExperts(config)
        inner = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = DeepseekMLP(config.hidden_size, inner)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the sum of both kinds."""
        x = hidden.flatten(0, 1)
        weights, chosen = self.gate(x)
        routed = self.experts(x, weights, chosen) * self.routed_scaling_factor
        return (routed + self.shared_experts(x)).view_as(hidden)


class DeepseekDecoderLayer(nn.Module):
    """One layer."""

    def __init__(self, config, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = MLAAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = index < config.first_k_dense_replace
        self.mlp = (
            DeepseekMLP(config.hidden_size, config.intermediate_size)
            if dense
            else DeepseekMoE(config)
        )

    def forward(self, hidden, cos, sin, start: int | None) -> torch.Tensor:
        """Return the hidden states after this layer."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, start)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DeepseekForCausalLM(nn.Module):
    """Embedding, layers, norm and head."""

    def __init__(self, config) -> None:
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = YarnRotaryEmbedding(config.qk_rope_head_dim, config.rope_parameters)
        self.layers = nn.ModuleList(
            DeepseekDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: torch.Tensor, start: int | None = None) -> torch.Tensor:
        """Return logits; with a start, of a step whose past is kept."""
        hidden = self.embed(input_ids)
        positions = torch.arange(input_ids.shape[1]) + (start or 0)
        cos, sin = self.rotary_emb(positions, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, start)
        return self.head(self.norm(hidden))


def load(port: nn.Module, weights: dict[str, torch.Tensor], config) -> None:
    """Fuse and absorb the weights of a transformers checkpoint."""
    renamed = {}
    for name, weight in weights.items():
        name = name.removeprefix("model.").replace("embed_tokens", "embed")
        name = name.replace("lm_head", "head").replace("experts.gate_up_proj", "experts.w13")
        name = name.replace("experts.down_proj", "experts.w2")
        renamed[name.replace("shared_experts.w2", "shared_experts.down_proj")] = weight.clone()
    for name in list(renamed):
        if name.endswith("gate_proj.weight"):
            fused = torch.cat((renamed.pop(name), renamed.pop(name.replace("gate_", "up_"))))
            renamed[name.replace("gate_proj", "gate_up_proj")] = fused
        elif name.endswith("q_a_proj.weight"):
            rest = renamed.pop(name.replace("q_a_proj", "kv_a_proj_with_mqa"))
            fused = torch.cat((renamed.pop(name), rest))
            renamed[name.replace("q_a_proj", "fused_qkv_a_proj")] = fused
        elif name.endswith("kv_b_proj.weight"):
            parts = renamed.pop(name).unflatten(0, (config.num_attention_heads, -1))
            keys, values = parts.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            renamed[name.replace("kv_b_proj.weight", "w_kc")] = keys
            renamed[name.replace("kv_b_proj.weight", "w_vc")] = values.transpose(1, 2)
    port.load_state_dict(renamed)
