"""Phi-3 with factors on its rotations and ModernBERT with windows on both sides, and ports.

The first port has apart what the model has fused; the second has all rows in one long row, as one
runs it without pads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_fourth import BOTH, fourth, harmless

# --- A factor for each rate -----------------------------------------------------------------------


class PhiNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class PhiRotary(nn.Module):
    """Three quarters of a head; each rate has its factor, and all are made a little longer."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = (1.0, 1.12, 1.4, 1.9, 2.6, 3.5)
        self.scaling = math.sqrt(1 + math.log(32) / math.log(4096))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rates = 1.0 / (torch.tensor(self.factors) * 10000.0 ** (torch.arange(0, 12, 2) / 12))
        angles = torch.arange(x.shape[1]).float()[:, None] * rates
        angles = torch.cat((angles, angles), -1)
        return (self.scaling * angles.cos()).to(x.dtype), (self.scaling * angles.sin()).to(x.dtype)


class PhiAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(dim, (4 + 2 * 2) * 16, bias=False)
        self.o_proj = nn.Linear(4 * 16, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.parted(self.qkv_proj(x))
        q, k, v = (each.view(b, t, -1, 16).transpose(1, 2) for each in (q, k, v))
        q, k = self.rotated(q, cos, sin), self.rotated(k, cos, sin)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.transpose(2, 3) * 16**-0.5
        scores = scores + torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        weights = F.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, t, -1))

    def parted(self, qkv: Tensor) -> tuple[Tensor, ...]:
        return qkv[..., :64], qkv[..., 64:96], qkv[..., 96:]

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turn, rest = x[..., :12], x[..., 12:]
        half = torch.cat((-turn[..., 6:], turn[..., :6]), -1)
        return torch.cat((turn * cos + half * sin, rest), -1)


class PhiMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(dim, 2 * 108, bias=False)
        self.down_proj = nn.Linear(108, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.activation(gate))

    def activation(self, x: Tensor) -> Tensor:
        return F.silu(x)


class PhiLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = PhiAttention(dim), PhiMLP(dim)
        self.input_layernorm, self.post_attention_layernorm = PhiNorm(dim), PhiNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Phi3(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed_tokens, self.rotary_emb = nn.Embedding(101, dim), PhiRotary()
        self.layers = nn.ModuleList(PhiLayer(dim) for _ in range(3))
        self.norm, self.lm_head = PhiNorm(dim), nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(x)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def phi3(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Phi3(), 441, outliers)


def rms(of: PhiNorm) -> nn.RMSNorm:
    """Return the norm of torch that does the same."""
    out = nn.RMSNorm(of.weight.shape[0], eps=of.variance_epsilon)
    out.weight.data = of.weight.detach().clone()
    return out


class Turns(nn.Module):
    """The angles, and how much longer things get; made as one table."""

    def __init__(self, of: PhiRotary) -> None:
        super().__init__()
        self.factors, self.longer = list(of.factors), of.scaling

    def forward(self, length: int) -> Tensor:
        plain = [10000.0 ** (n / 6) for n in range(6)]
        periods = torch.tensor([a * b for a, b in zip(self.factors, plain, strict=True)])
        angles = torch.arange(length)[:, None] / periods
        return torch.stack((angles.cos(), angles.sin())) * self.longer


class ApartAttention(nn.Module):
    def __init__(self, of: PhiAttention) -> None:
        super().__init__()
        self.q, self.k, self.v = map(linear, of.qkv_proj.weight.split((64, 32, 32)))
        self.o = linear(of.o_proj.weight)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        q, k = (self.turned(e, *table.to(x.dtype)) for e in (q, k))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(seen.transpose(1, 2).flatten(2))

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b, rest = x.split((6, 6, 4), -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


class ApartMLP(nn.Module):
    def __init__(self, of: PhiMLP) -> None:
        super().__init__()
        self.gate, self.up = map(linear, of.gate_up_proj.weight.chunk(2))
        self.down, self.act = linear(of.down_proj.weight), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.gate(x), self.up(x)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act(gate) * up


class ApartBlock(nn.Module):
    def __init__(self, of: PhiLayer) -> None:
        super().__init__()
        self.norm1, self.norm2 = rms(of.input_layernorm), rms(of.post_attention_layernorm)
        self.attn, self.mlp = ApartAttention(of.self_attn), ApartMLP(of.mlp)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = self.attn(self.norm1(x), table) + x
        return self.fed(x)

    def fed(self, x: Tensor) -> Tensor:
        return self.mlp(self.norm2(x)) + x


class ApartPhi3(nn.Module):
    def __init__(self, model: Phi3) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.rope, self.last = Turns(model.rotary_emb), rms(model.norm)
        self.blocks = nn.ModuleList(map(ApartBlock, model.layers))
        self.head = linear(model.lm_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x, table = self.wte(tokens), self.rope(tokens.shape[1])
        for block in self.blocks:
            x = block(x, table)
        return self.head(self.last(x))


@fourth(phi3, "rope", "positions", port=ApartPhi3, regimes=BOTH)
def phi3_rates_without_factors(module, root):
    module.factors = [1.0] * 6


@fourth(phi3, "rope", "scale", port=ApartPhi3)
def phi3_turns_without_scaling(module, root):
    module.longer = 1.0


@fourth(phi3, "blocks.0.attn.v", "weights", port=ApartPhi3)
def phi3_values_cut_at_the_keys(module, root):
    module.weight.data = root.blocks[0].attn.k.weight.data.clone()


@fourth(phi3, "blocks.1.attn", "positions", port=ApartPhi3, regimes=BOTH)
def phi3_last_part_rotated(module, root):
    def turned(self, turned, x, cos, sin):
        return turned(x.roll(-4, -1), cos, sin).roll(4, -1)

    change(module, turned=turned)


@fourth(phi3, "blocks.2.mlp", "activations", port=ApartPhi3)
def phi3_activation_of_the_product(module, root):
    change(module, gated=lambda self, gated, gate, up: self.act(gate * up))


@fourth(phi3, "blocks.0", "residuals", port=ApartPhi3)
def phi3_mlp_without_residual(module, root):
    change(module, fed=lambda self, fed, x: self.mlp(self.norm2(x)))


@fourth(phi3, "layers.2.self_attn", "heads", against=ApartPhi3, regimes=BOTH)
def phi3_values_before_keys(module, root):
    change(module, parted=lambda self, parted, qkv: [parted(qkv)[n] for n in (0, 2, 1)])


@fourth(phi3, "layers.1.mlp", "activations", against=ApartPhi3)
def phi3_gelu_for_silu(module, root):
    change(module, activation=lambda self, activation, x: F.gelu(x))


harmless("phi-3 apart", phi3, "same", "bf16", port=ApartPhi3)
harmless("phi-3 against apart", phi3, "same", against=ApartPhi3)


# --- An encoder with windows ----------------------------------------------------------------------


class ModernAttention(nn.Module):
    """Global, or four to either side; the bases differ."""

    def __init__(self, dim: int, heads: int, local: bool) -> None:
        super().__init__()
        self.heads, self.local, self.base = heads, local, 10000.0 if local else 160000.0
        self.Wqkv, self.Wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.Wqkv(x).view(b, t, 3, self.heads, -1).transpose(1, 3).unbind(2)
        q, k = self.placed(q, k)
        places = torch.arange(t)
        far = (places[:, None] - places).abs() > (4 if self.local else t)
        mask = torch.zeros(t, t, dtype=x.dtype).masked_fill(far, torch.finfo(x.dtype).min)
        weights = F.softmax(q @ k.mT * (d // self.heads) ** -0.5 + mask, -1, dtype=torch.float32)
        return self.Wo((weights.to(x.dtype) @ v).transpose(1, 2).reshape(b, t, d))

    def placed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.rope(q), self.rope(k)

    def rope(self, x: Tensor) -> Tensor:
        rates = self.base ** -(torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
        angles = torch.outer(torch.arange(x.shape[2]).float(), rates).repeat(1, 2)
        a, b = x.chunk(2, -1)
        turned = torch.cat((-b, a), -1)
        return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


class ModernMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.Wi, self.Wo = nn.Linear(dim, 160, bias=False), nn.Linear(80, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        given, gate = self.Wi(x).chunk(2, -1)
        return self.Wo(F.gelu(given) * gate)


class ModernLayer(nn.Module):
    def __init__(self, dim: int, number: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(dim, bias=False) if number else nn.Identity()
        self.attn, self.mlp = ModernAttention(dim, 4, number % 3 != 0), ModernMLP(dim)
        self.mlp_norm = nn.LayerNorm(dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class ModernHead(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(dim, dim, bias=False), nn.LayerNorm(dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(F.gelu(self.dense(x)))


class ModernBert(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(101, dim)
        self.norm, self.final_norm = (nn.LayerNorm(dim, bias=False) for _ in range(2))
        self.layers = nn.ModuleList(ModernLayer(dim, each) for each in range(4))
        self.head, self.decoder = ModernHead(dim), nn.Linear(dim, 101)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tok_embeddings(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.decoder(self.head(self.final_norm(x)))


def modernbert(*, outliers: bool = False) -> nn.Module:
    return models.weigh(ModernBert(), 442, outliers)


class OneRow(nn.Module):
    """All rows in one: tokens, channels; who belongs together is told by numbers."""

    def __init__(self, of: ModernAttention) -> None:
        super().__init__()
        self.reach, self.base = 4 if of.local else 10**6, of.base
        self.q, self.k, self.v = map(linear, of.Wqkv.weight.chunk(3))
        self.out = linear(of.Wo.weight)

    def forward(self, x: Tensor, row: Tensor, place: Tensor) -> Tensor:
        q, k, v = (f(x).view(-1, 4, 12).transpose(0, 1) for f in (self.q, self.k, self.v))
        angles = place[:, None] / self.base ** (torch.arange(6) / 6)
        turn = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = self.spun(q, *turn), self.spun(k, *turn)
        seen = F.scaled_dot_product_attention(q[None], k[None], v[None], self.seen(row, place))
        return self.out(seen[0].transpose(0, 1).flatten(1))

    def spun(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x[..., :6], x[..., 6:]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def seen(self, row: Tensor, place: Tensor) -> Tensor:
        near = (place[:, None] - place).abs() <= self.reach
        return near & (row[:, None] == row)


class OneRowLayer(nn.Module):
    def __init__(self, of: ModernLayer) -> None:
        super().__init__()
        first = getattr(of.attn_norm, "weight", None)
        self.g1 = None if first is None else nn.Parameter(first.detach().clone())
        self.g2 = nn.Parameter(of.mlp_norm.weight.detach().clone())
        self.attn, self.wi = OneRow(of.attn), linear(of.mlp.Wi.weight)
        self.wo = linear(of.mlp.Wo.weight)

    def forward(self, x: Tensor, row: Tensor, place: Tensor) -> Tensor:
        x = x + self.attn(self.first(x), row, place)
        return x + self.wo(self.gated(self.wi(F.layer_norm(x, (48,), self.g2))))

    def first(self, x: Tensor) -> Tensor:
        return x if self.g1 is None else F.layer_norm(x, (48,), self.g1)

    def gated(self, h: Tensor) -> Tensor:
        return F.gelu(h[..., :80]) * h[..., 80:]


class OneRowBert(nn.Module):
    def __init__(self, model: ModernBert) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(model.tok_embeddings.weight.detach().clone())
        self.encoder = nn.ModuleList(map(OneRowLayer, model.layers))
        olds = (model.norm, model.final_norm, model.head.norm)
        self.g_in, self.g_out, self.g_head = (nn.Parameter(e.weight.detach().clone()) for e in olds)
        self.dense = linear(model.head.dense.weight)
        self.decode = linear(model.decoder.weight, bias=model.decoder.bias.detach())

    def forward(self, tokens: Tensor) -> Tensor:
        rows, length = tokens.shape
        row = torch.arange(rows).repeat_interleave(length)
        place = torch.arange(length).repeat(rows)
        x = F.layer_norm(self.table(tokens.flatten()), (48,), self.g_in)
        for layer in self.encoder:
            x = layer(x, row, place)
        x = self.act(self.dense(F.layer_norm(x, (48,), self.g_out)))
        return self.decode(F.layer_norm(x, (48,), self.g_head)).view(rows, length, -1)

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x)


@fourth(modernbert, "encoder.1.attn", "masks", port=OneRowBert, regimes=BOTH)
def modernbert_whole_window_to_either_side(module, root):
    module.reach = 8


@fourth(modernbert, "encoder.0.attn", "masks", port=OneRowBert, regimes=BOTH)
def modernbert_rows_see_each_other(module, root):
    def seen(self, seen, row, place):
        return seen(torch.zeros_like(row), place)

    change(module, seen=seen)


@fourth(modernbert, "encoder.0", "norm layers", port=OneRowBert)
def modernbert_first_layer_normed(module, root):
    change(module, first=lambda self, first, x: F.layer_norm(x, (48,)))


@fourth(modernbert, "encoder.2", "activations", port=OneRowBert, regimes=BOTH)
def modernbert_gate_first(module, root):
    change(module, gated=lambda self, gated, h: gated(h.roll(80, -1)))


@fourth(modernbert, "", "activations", port=OneRowBert)
def modernbert_head_by_tanh(module, root):
    change(module, act=lambda self, act, x: F.gelu(x, approximate="tanh"))


@fourth(modernbert, "layers.2.attn", "positions", against=OneRowBert, regimes=BOTH)
def modernbert_only_queries_rotated(module, root):
    change(module, placed=lambda self, placed, q, k: (self.rope(q), k))


@fourth(modernbert, "head.norm", "norm layers", against=OneRowBert)
def modernbert_epsilon_of_bert(module, root):
    module.eps = 1e-12


harmless("modernbert in one row", modernbert, "same", "bf16", port=OneRowBert)
harmless("modernbert against one row", modernbert, "same", against=OneRowBert)
