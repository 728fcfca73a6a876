"""Qwen 2 MoE, with an expert that all share; its port gathers weights for each token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_fourth import BOTH, fourth, harmless


def same(of: nn.Linear) -> nn.Linear:
    """Return a copy of a layer with a bias."""
    return linear(of.weight, bias=of.bias.detach())


def turned(x: Tensor, base: float, factor: float = 1.0) -> Tensor:
    """Rotate halves; time is the last but one."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * base ** -(torch.arange(half) / half)
    cos, sin = (factor * angles.cos()).to(x.dtype), (factor * angles.sin()).to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class QwenExpert(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class QwenMoe(nn.Module):
    """Two of six experts, whose shares do not sum to one, and the shared one through a gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, 6, bias=False)
        self.experts = nn.ModuleList(QwenExpert(dim, 40) for _ in range(6))
        self.shared_expert = QwenExpert(dim, 64)
        self.shared_expert_gate = nn.Linear(dim, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(flat).softmax(-1, dtype=torch.float32).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            made = expert(flat[rows]) * shares[rows, slot, None].to(x.dtype)
            out = self.added(out, rows, made)
        shared = torch.sigmoid(self.shared_expert_gate(flat)) * self.shared_expert(flat)
        return (out + shared).view_as(x)

    def added(self, out: Tensor, rows: Tensor, made: Tensor) -> Tensor:
        return out.index_add(0, rows, made)


class QwenMoeAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scaling = heads, (dim // heads) ** -0.5
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(dim, dim) for _ in range(3))
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = turned(q, 1e6) @ turned(k, 1e6).mT * self.scaling
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class QwenMoeLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = QwenMoeAttention(dim, 4), QwenMoe(dim)
        self.input_layernorm = nn.RMSNorm(dim, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class QwenMoeModel(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(QwenMoeLayer(dim) for _ in range(2))
        self.norm, self.lm_head = nn.RMSNorm(dim, eps=1e-6), nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def qwen_moe(*, outliers: bool = False) -> nn.Module:
    return models.weigh(QwenMoeModel(), 431, outliers)


class TopK(nn.Module):
    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.proj = linear(of.weight)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.chosen(self.proj(x).float())

    def chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores.softmax(-1).topk(2, -1)


class SharedFeed(nn.Module):
    def __init__(self, of: QwenExpert) -> None:
        super().__init__()
        self.w13 = linear(of.gate_proj.weight, of.up_proj.weight)
        self.w2 = linear(of.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.gated(*self.w13(x).chunk(2, -1)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class Gathered(nn.Module):
    """Gathers for each token the weights of its experts."""

    def __init__(self, of: QwenMoe) -> None:
        super().__init__()
        self.router, self.shared = TopK(of.gate), SharedFeed(of.shared_expert)
        self.w1, self.w3, self.w2 = (
            nn.Parameter(torch.stack([e.get_parameter(f"{n}.weight").detach() for e in of.experts]))
            for n in ("gate_proj", "up_proj", "down_proj")
        )
        self.shared_gate = nn.Parameter(of.shared_expert_gate.weight.detach()[0].clone())

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x)
        made = self.made(x, shares.to(x.dtype), chosen)
        return made + self.shared(x) * self.opened((x * self.shared_gate).sum(-1, keepdim=True))

    def made(self, x: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        gate = torch.einsum("btkhc,btc->btkh", self.w1[chosen], x)
        up = torch.einsum("btkhc,btc->btkh", self.w3[chosen], x)
        each = torch.einsum("btkch,btkh->btkc", self.w2[chosen], F.silu(gate) * up)
        return torch.einsum("btkc,btk->btc", each, shares)

    def opened(self, x: Tensor) -> Tensor:
        return x.sigmoid()


class GatheredBlock(nn.Module):
    def __init__(self, of: QwenMoeLayer) -> None:
        super().__init__()
        a = of.self_attn
        self.g1, self.g2 = (
            nn.Parameter(e.weight.detach().clone())
            for e in (of.input_layernorm, of.post_attention_layernorm)
        )
        self.q, self.k, self.v = (same(e) for e in (a.q_proj, a.k_proj, a.v_proj))
        self.o, self.moe = linear(a.o_proj.weight), Gathered(of.mlp)

    def forward(self, x: Tensor) -> Tensor:
        h = F.rms_norm(x, (48,), self.g1, 1e-6)
        q, k, v = (f(h).view(*h.shape[:2], 4, 12).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = turned(q, 1e6), turned(k, 1e6)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(seen.transpose(1, 2).reshape(x.shape))
        return x + self.moe(F.rms_norm(x, (48,), self.g2, 1e-6))


class GatheredMoe(nn.Module):
    def __init__(self, model: QwenMoeModel) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.blocks = nn.Sequential(*map(GatheredBlock, model.layers))
        self.g = nn.Parameter(model.norm.weight.detach().clone())
        self.head = linear(model.lm_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(F.rms_norm(self.blocks(self.wte(tokens)), (48,), self.g, 1e-6))


@fourth(qwen_moe, "blocks.1.moe.router", "routing", port=GatheredMoe, regimes=BOTH)
def qwen_moe_shares_sum_to_one(module, root):
    def chosen(self, chosen, scores):
        shares, which = chosen(scores)
        return shares / shares.sum(-1, keepdim=True), which

    change(module, chosen=chosen)


@fourth(qwen_moe, "blocks.0.moe", "routing", port=GatheredMoe)
def qwen_moe_shared_gate_without_sigmoid(module, root):
    change(module, opened=lambda self, opened, x: x)


@fourth(qwen_moe, "blocks.1.moe", "routing", port=GatheredMoe)
def qwen_moe_shares_on_the_way_in(module, root):
    def made(self, made, x, shares, chosen):
        x = x[:, :, None] * shares[..., None]
        gate = torch.einsum("btkhc,btkc->btkh", self.w1[chosen], x)
        up = torch.einsum("btkhc,btkc->btkh", self.w3[chosen], x)
        return torch.einsum("btkch,btkh->btc", self.w2[chosen], F.silu(gate) * up)

    change(module, made=made)


@fourth(qwen_moe, "blocks.0.moe", "weights", port=GatheredMoe)
def qwen_moe_experts_in_order_of_names(module, root):
    module.w2.data = module.w2.data[[0, 2, 1, 3, 4, 5]]


@fourth(qwen_moe, "blocks.1.moe.shared", "activations", port=GatheredMoe, regimes=BOTH)
def qwen_moe_up_is_the_gate(module, root):
    change(module, gated=lambda self, gated, gate, up: gated(up, gate))


@fourth(qwen_moe, "layers.1.mlp", "routing", against=GatheredMoe, regimes=BOTH)
def qwen_moe_last_expert_only(module, root):
    change(module, added=lambda self, added, out, rows, made: out.index_copy(0, rows, made))


@fourth(qwen_moe, "layers.0.mlp.experts.3.down_proj", "weights", against=GatheredMoe)
def qwen_moe_expert_loaded_twice(module, root):
    module.weight.data = root.layers[0].mlp.experts[2].down_proj.weight.data.clone()


harmless("qwen moe gathered", qwen_moe, "same", "bf16", port=GatheredMoe)
harmless("qwen moe against gathered", qwen_moe, "same", against=GatheredMoe)
