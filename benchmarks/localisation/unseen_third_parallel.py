"""Decoders whose attention and MLP run side by side: Phi, NeoX and Falcon, and ports of each.

The ports merge both halves into one product, or keep them apart where the model had them together.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_third import BOTH, harmless, third


def same(of: nn.Linear) -> nn.Linear:
    """Return a copy of a layer with a bias."""
    return linear(of.weight, bias=of.bias.detach())


# --- One norm, both halves, part of each head rotated ---------------------------------------------


class PhiAttention(nn.Module):
    def __init__(self, dim: int, heads: int, part: int) -> None:
        super().__init__()
        self.heads, self.part = heads, part
        self.q_proj, self.k_proj, self.v_proj, self.dense = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.turned(q), self.turned(k)
        scores = (q.float() @ k.float().mT) / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1).to(x.dtype)
        return self.dense((weights @ v).transpose(1, 2).flatten(2))

    def turned(self, x: Tensor) -> Tensor:
        turn, keep = x[..., : self.part], x[..., self.part :]
        rates = 10000.0 ** -(torch.arange(0, self.part, 2).float() / self.part)
        angles = torch.arange(x.shape[2]).float()[:, None] * rates
        cos, sin = (torch.cat((f, f), -1).to(x.dtype) for f in (angles.cos(), angles.sin()))
        a, b = turn.chunk(2, -1)
        return torch.cat((turn * cos + torch.cat((-b, a), -1) * sin, keep), -1)


class PhiLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(dim)
        self.self_attn = PhiAttention(dim, 4, 8)
        self.fc1, self.fc2 = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        return self.self_attn(h) + self.fed(x, h) + x

    def fed(self, x: Tensor, h: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(h), approximate="tanh"))


class Phi(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(PhiLayer(dim) for _ in range(3))
        self.final_layernorm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, 101)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_layernorm(x))


def phi(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Phi(), 341, outliers)


class MergedBlock(nn.Module):
    """One product into both halves, one out of both."""

    def __init__(self, of: PhiLayer) -> None:
        super().__init__()
        a = of.self_attn
        self.heads, self.part, self.ln = a.heads, a.part, norm_like(of.input_layernorm)
        into = (a.q_proj, a.k_proj, a.v_proj, of.fc1)
        self.wi = linear(
            *(each.weight for each in into), bias=torch.cat([each.bias.detach() for each in into])
        )
        both = torch.cat((a.dense.weight, of.fc2.weight), 1)
        self.wo = linear(both, bias=(a.dense.bias + of.fc2.bias).detach())
        self.of_mlp = of.fc2.bias.tolist()

    def forward(self, x: Tensor) -> Tensor:
        d = x.shape[-1]
        qkv, h = self.wi(self.ln(x)).split((3 * d, 3 * d), -1)
        return x + self.wo(torch.cat((self.attend(qkv), self.act(h)), -1))

    def act(self, h: Tensor) -> Tensor:
        return 0.5 * h * (1 + torch.tanh(0.7978845608028654 * (h + 0.044715 * h**3)))

    def attend(self, qkv: Tensor) -> Tensor:
        q, k, v = self.parted(qkv)
        q, k = self.spun(q), self.spun(k)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return seen.transpose(1, 2).flatten(2)

    def parted(self, qkv: Tensor) -> Tensor:
        return qkv.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)

    def spun(self, x: Tensor) -> Tensor:
        half = self.part // 2
        angles = torch.arange(x.shape[2])[:, None] / 10000.0 ** (torch.arange(half) / half)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1)


class MergedPhi(nn.Module):
    def __init__(self, model: Phi) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.h = nn.ModuleList(MergedBlock(each) for each in model.layers)
        self.ln_f, self.head = norm_like(model.final_layernorm), same(model.lm_head)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.head(self.ln_f(x))


@third(phi, "h.0", "positions", port=MergedPhi, regimes=BOTH)
def phi_whole_heads_rotated(module, root):
    module.part = 16


@third(phi, "h.1.wo", "weights", port=MergedPhi, regimes=BOTH)
def phi_bias_of_one_half_only(module, root):
    module.bias.data.copy_(torch.tensor(root.h[1].of_mlp))


@third(phi, "h.2", "activations", port=MergedPhi)
def phi_exact_gelu(module, root):
    change(module, act=lambda self, act, h: F.gelu(h))


@third(phi, "h.1", "heads", port=MergedPhi, regimes=BOTH)
def phi_split_by_head_first(module, root):
    def parted(self, parted, qkv):
        return qkv.unflatten(-1, (self.heads, 3, -1)).permute(3, 0, 2, 1, 4)

    change(module, parted=parted)


@third(phi, "head", "weights", port=MergedPhi)
def phi_no_bias_of_the_head(module, root):
    module.bias.data.zero_()


@third(phi, "h.0.wo", "weights", port=MergedPhi)
def phi_halves_of_the_way_out(module, root):
    module.weight.data = torch.cat((module.weight.data[:, 64:], module.weight.data[:, :64]), 1)


@third(phi, "layers.1", "residuals", against=MergedPhi, regimes=BOTH)
def phi_mlp_of_what_is_not_normed(module, root):
    change(module, fed=lambda self, fed, x, h: fed(x, x))


@third(phi, "layers.2.self_attn", "positions", against=MergedPhi)
def phi_last_part_rotated(module, root):
    def turned(self, turned, x):
        return turned(x.roll(self.part, -1)).roll(-self.part, -1)

    change(module, turned=turned)


@third(phi, "layers.1.fc1", "weights", against=MergedPhi)
def phi_first_bias_forgotten(module, root):
    module.bias.data.zero_()


harmless("phi merged", phi, "same", "bf16", port=MergedPhi)
harmless("phi against merged", phi, "same", "bf16", against=MergedPhi)


# --- Two norms, both halves, heads interleaved ----------------------------------------------------


class NeoxAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.rotary_ndims = heads, dim // heads // 2
        self.query_key_value, self.dense = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.query_key_value(x).view(b, t, self.heads, -1).transpose(1, 2).chunk(3, -1)
        n = self.rotary_ndims
        rates = 1.0 / 10000 ** (torch.arange(0, n, 2).float() / n)
        angles = torch.einsum("t,r->tr", torch.arange(t).float(), rates).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = (
            torch.cat((e[..., :n] * cos + self.half(e[..., :n]) * sin, e[..., n:]), -1)
            for e in (q, k)
        )
        scores = q @ k.mT * q.shape[-1] ** -0.5
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, torch.finfo(x.dtype).min).float().softmax(-1)
        return self.dense((weights.to(x.dtype) @ v).transpose(1, 2).reshape(b, t, -1))

    def half(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)


class NeoxMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense_h_to_4h, self.dense_4h_to_h = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))


class NeoxLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.mlp = NeoxAttention(dim, heads), NeoxMLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.attention(self.input_layernorm(x))
        return x + seen + self.mlp(self.post_attention_layernorm(x))


class Neox(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.embed_in = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(NeoxLayer(dim, 3) for _ in range(3))
        self.final_layer_norm, self.embed_out = nn.LayerNorm(dim), nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_in(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed_out(self.final_layer_norm(x))


def neox(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Neox(), 342, outliers)


class Heads(nn.Module):
    """Attention with rotation by complex numbers, on a layout that is already split."""

    def __init__(self, of: NeoxAttention) -> None:
        super().__init__()
        self.n, self.heads = of.rotary_ndims, of.heads
        weight = of.query_key_value.weight.detach().unflatten(0, (of.heads, 3, -1))
        bias = of.query_key_value.bias.detach().unflatten(0, (of.heads, 3, -1))
        self.wqkv = linear(
            weight.transpose(0, 1).flatten(0, 2), bias=bias.transpose(0, 1).flatten()
        )
        self.wo = same(of.dense)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = self.rope(q), self.rope(k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(seen.transpose(1, 2).flatten(2))

    def rope(self, x: Tensor) -> Tensor:
        pair = self.pairs(x[..., : self.n]).float()
        rates = 10000.0 ** -(torch.arange(self.n // 2) / (self.n // 2))
        angles = torch.outer(torch.arange(x.shape[1]).to(rates), rates)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        made = torch.view_as_real(torch.view_as_complex(pair.contiguous()) * turn).to(x.dtype)
        return torch.cat((self.unpaired(made), x[..., self.n :]), -1)

    def pairs(self, x: Tensor) -> Tensor:
        return torch.stack(x.chunk(2, -1), -1)

    def unpaired(self, x: Tensor) -> Tensor:
        return x.transpose(-1, -2).flatten(-2)


class SideBySide(nn.Module):
    def __init__(self, of: NeoxLayer) -> None:
        super().__init__()
        self.norm_a, self.norm_m = (
            norm_like(each) for each in (of.input_layernorm, of.post_attention_layernorm)
        )
        self.attn = Heads(of.attention)
        self.mlp = nn.Sequential(same(of.mlp.dense_h_to_4h), nn.GELU(), same(of.mlp.dense_4h_to_h))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm_m(x)) + self.attn(self.norm_a(x)) + x


class SideNeox(nn.Module):
    def __init__(self, model: Neox) -> None:
        super().__init__()
        self.tok = nn.Embedding.from_pretrained(model.embed_in.weight.detach().clone())
        self.body = nn.Sequential(*(SideBySide(each) for each in model.layers))
        self.norm, self.out = norm_like(model.final_layer_norm), linear(model.embed_out.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.norm(self.body(self.tok(tokens))))


@third(neox, "body.1", "residuals", port=SideNeox, regimes=BOTH)
def neox_one_after_the_other(module, root):
    def forward(self, forward, x):
        x = x + self.attn(self.norm_a(x))
        return x + self.mlp(self.norm_m(x))

    change(module, forward=forward)


@third(neox, "body.0", "norm layers", port=SideNeox)
def neox_one_norm_for_both(module, root):
    def forward(self, forward, x):
        h = self.norm_a(x)
        return self.mlp(h) + self.attn(h) + x

    change(module, forward=forward)


@third(neox, "body.2.attn", "positions", port=SideNeox, regimes=BOTH)
def neox_pairs_of_gptj(module, root):
    change(
        module,
        pairs=lambda self, pairs, x: x.unflatten(-1, (-1, 2)),
        unpaired=lambda self, unpaired, x: x.flatten(-2),
    )


@third(neox, "body.1.attn.wqkv", "weights", port=SideNeox)
def neox_rows_left_interleaved(module, root):
    old = root.body[1].attn.wqkv
    old.weight.data = old.weight.data.unflatten(0, (3, 3, -1)).transpose(0, 1).flatten(0, 2)


@third(neox, "body.2.mlp.1", "activations", port=SideNeox)
def neox_gelu_by_tanh(module, root):
    module.approximate = "tanh"


@third(neox, "layers.0.attention", "positions", against=SideNeox)
def neox_rotates_backwards(module, root):
    change(module, half=lambda self, half, x: -half(x))


@third(neox, "layers.2.post_attention_layernorm", "norm layers", against=SideNeox)
def neox_epsilon_of_bert(module, root):
    module.eps = 1e-3


harmless("neox side by side", neox, "same", "reordered", "bf16", port=SideNeox)
harmless("neox against side", neox, "same", against=SideNeox)
