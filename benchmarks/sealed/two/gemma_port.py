"""Gemma 2 as Google's PyTorch code has it: one fused projection, caches written by index."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

DIM, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 4, 2, 24, 96
VOCABULARY, LENGTH, WINDOW, EPS, THETA = 150, 64, 6, 1e-6, 10000.0
QUERY_SCALAR, SCORE_CAP, LOGIT_CAP = 16, 4.0, 2.0
LOCAL, GLOBAL = "local", "global"


class RMSNorm(nn.Module):
    """Norm whose weight is an offset from one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.eps = EPS
        self.add_unit_offset = True
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return x normed."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        weight = self.weight.float()
        return (wide * (1 + weight if self.add_unit_offset else weight)).type_as(x)


def precompute_freqs_cis(dim: int, end: int, theta: float = THETA) -> Tensor:
    """Return the rotations of all positions as complex numbers."""
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2).float() / dim))
    angles = torch.outer(torch.arange(end).float(), freqs)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary_emb(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Rotate the halves of (batch, length, heads, head_dim)."""
    pairs = torch.view_as_complex(torch.stack(x.float().chunk(2, dim=-1), dim=-1))
    turned = torch.view_as_real(pairs * freqs_cis[:, :, None, :])
    return torch.cat((turned[..., 0], turned[..., 1]), dim=-1).type_as(x)


class GemmaMLP(nn.Module):
    """Gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(DIM, INNER, bias=False)
        self.up_proj = nn.Linear(DIM, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the feed-forward adds, before its norm."""
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class GemmaAttention(nn.Module):
    """Attention with capped scores, over all positions or a window of them."""

    def __init__(self, attn_type: str) -> None:
        super().__init__()
        self.attn_type = attn_type
        self.scaling = QUERY_SCALAR**-0.5
        self.attn_logit_softcapping: float | None = SCORE_CAP
        self.qkv_proj = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        kv_write_indices: Tensor,
        kv_cache: tuple[Tensor, Tensor],
        mask: Tensor,
        local_mask: Tensor,
    ) -> Tensor:
        """Return what attention adds, before its norm."""
        size, length, _ = x.shape
        qkv = self.qkv_proj(x).view(size, length, -1, HEAD_DIM)
        xq, xk, xv = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        xq, xk = apply_rotary_emb(xq, freqs_cis), apply_rotary_emb(xk, freqs_cis)
        k_cache, v_cache = kv_cache
        k_cache.index_copy_(1, kv_write_indices, xk)
        v_cache.index_copy_(1, kv_write_indices, xv)
        key = k_cache[:, : mask.shape[-1]].repeat_interleave(HEADS // KV_HEADS, dim=2)
        value = v_cache[:, : mask.shape[-1]].repeat_interleave(HEADS // KV_HEADS, dim=2)
        q, k, v = (each.transpose(1, 2) for each in (xq * self.scaling, key, value))
        scores = torch.matmul(q, k.transpose(2, 3))
        if self.attn_logit_softcapping is not None:
            scores = scores / self.attn_logit_softcapping
            scores = torch.tanh(scores)
            scores = scores * self.attn_logit_softcapping
        scores = scores + (local_mask if self.attn_type == LOCAL else mask)
        output = torch.matmul(self.softmax(scores).type_as(q), v)
        return self.o_proj(output.transpose(1, 2).reshape(size, length, -1))

    def softmax(self, scores: Tensor) -> Tensor:
        """Return the weights of all keys."""
        return F.softmax(scores.float(), dim=-1)


class Gemma2DecoderLayer(nn.Module):
    """Attention and feed-forward, each between two norms."""

    def __init__(self, attn_type: str) -> None:
        super().__init__()
        self.self_attn = GemmaAttention(attn_type)
        self.mlp = GemmaMLP()
        self.input_layernorm = RMSNorm(DIM)
        self.post_attention_layernorm = RMSNorm(DIM)
        self.pre_feedforward_layernorm = RMSNorm(DIM)
        self.post_feedforward_layernorm = RMSNorm(DIM)

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        """Return the new residual."""
        residual = x
        x = self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), *context))
        x = residual + x
        residual = x
        x = self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return residual + x


class GemmaModel(nn.Module):
    """The layers and the last norm."""

    def __init__(self) -> None:
        super().__init__()
        types = [LOCAL if index % 2 == 0 else GLOBAL for index in range(LAYERS)]
        self.layers = nn.ModuleList(Gemma2DecoderLayer(each) for each in types)
        self.norm = RMSNorm(DIM)

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        kv_write_indices: Tensor,
        kv_caches: list[tuple[Tensor, Tensor]],
        mask: Tensor,
        local_mask: Tensor,
    ) -> Tensor:
        """Return the last hidden states."""
        for layer, cache in zip(self.layers, kv_caches, strict=True):
            x = layer(x, freqs_cis, kv_write_indices, cache, mask, local_mask)
        return self.norm(x)


class Sampler(nn.Module):
    """Turns hidden states into logits."""

    def __init__(self) -> None:
        super().__init__()
        self.final_logit_softcapping: float | None = LOGIT_CAP

    def forward(self, embedding: Tensor, hidden_states: Tensor) -> Tensor:
        """Return capped logits."""
        logits = torch.matmul(hidden_states, embedding.t())
        if self.final_logit_softcapping is not None:
            logits = logits / self.final_logit_softcapping
            logits = torch.tanh(logits)
            logits = logits * self.final_logit_softcapping
        return logits


class GemmaForCausalLM(nn.Module):
    """The whole model; called with the position of the first token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedder = nn.Embedding(VOCABULARY, DIM)
        self.model = GemmaModel()
        self.sampler = Sampler()
        self.freqs_cis = precompute_freqs_cis(HEAD_DIM, LENGTH)
        self.normalizer = DIM**0.5
        self.window = WINDOW
        self.kv_caches: list[tuple[Tensor, Tensor]] = []

    def fresh_caches(self, like: Tensor) -> None:
        """Forget what was read."""
        shape = (like.shape[0], LENGTH, KV_HEADS, HEAD_DIM)
        self.kv_caches = [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(LAYERS)]

    def positions(self, tokens: Tensor, start: int, real: Tensor) -> Tensor:
        """Return the position of each token; padding does not count."""
        return (real.long().cumsum(-1) - 1).clamp(min=0)[:, start : start + tokens.shape[1]]

    def masks(self, h: Tensor, start: int, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is added to the scores of global and of local layers."""
        queries = torch.arange(start, start + h.shape[1])[:, None]
        keys = torch.arange(start + h.shape[1])[None]
        real = real[:, None, :] | (keys == queries)  # padding sees itself, or its row is empty
        seen = (keys <= queries) & real
        near = seen & (keys > queries - self.window)
        return self.additive(seen, h), self.additive(near, h)

    def additive(self, seen: Tensor, h: Tensor) -> Tensor:
        """Return zero where a key is seen, and the least number elsewhere."""
        mask = torch.zeros(seen.shape, dtype=h.dtype)
        return mask.masked_fill(~seen, torch.finfo(h.dtype).min)[:, None]

    def forward(self, tokens: Tensor, start: int = 0, real: Tensor | None = None) -> Tensor:
        """Return the logits of a chunk; real tells tokens (so far) from padding."""
        size, length = tokens.shape
        if real is None:
            real = torch.ones(size, start + length, dtype=torch.bool)
        h = self.embedder(tokens)
        h = h * torch.tensor(self.normalizer, dtype=h.dtype)
        if start == 0:
            self.fresh_caches(h)
        freqs_cis = self.freqs_cis[self.positions(tokens, start, real)]
        written = torch.arange(start, start + length)
        h = self.model(h, freqs_cis, written, self.kv_caches, *self.masks(h, start, real))
        logits = self.sampler(self.embedder.weight, h)
        return logits.masked_fill(~real[:, start:, None], 0)


def converted(state: dict[str, Tensor]) -> GemmaForCausalLM:
    """Return Google's model with the weights of transformers'."""
    model = GemmaForCausalLM()
    renamed = {"embedder.weight": state["model.embed_tokens.weight"].clone()}
    for name, weight in state.items():
        if "q_proj" in name:
            fused = [state[name.replace("q_proj", each)] for each in ("q_proj", "k_proj", "v_proj")]
            renamed[name.replace("q_proj", "qkv_proj")] = torch.cat(fused)
        elif not any(each in name for each in ("k_proj", "v_proj", "embed_tokens", "lm_head")):
            renamed[name] = weight.clone()
    model.load_state_dict(renamed)
    return model
