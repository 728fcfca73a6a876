"""Granite with its four multipliers and StarCoder 2 with a bias everywhere, and their ports.

The first port has every multiplier in some weight; the second multiplies by matrices that go from
input to output and keeps tables of its rotations in buffers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_fourth import BOTH, fourth, harmless


def rotate_half(x: Tensor) -> Tensor:
    """Return the second half negated, then the first."""
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


# --- Multipliers ----------------------------------------------------------------------------------


class GraniteNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * (wide.pow(2).mean(-1, True) + self.eps).rsqrt()).to(x.dtype)


class GraniteAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv: int, multiplier: float) -> None:
        super().__init__()
        self.heads, self.kv, self.head, self.scaling = heads, kv, dim // heads, multiplier
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, kv * self.head, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            f(x).view(b, t, -1, self.head).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = (e.repeat_interleave(self.heads // self.kv, 1) for e in (k, v))
        scores = (q @ k.mT) * self.scaling
        scores = scores + torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
        return self.o_proj((weights @ v).transpose(1, 2).reshape(b, t, -1))


class GraniteMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class GraniteLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = GraniteAttention(dim, 4, 1, 0.125), GraniteMLP(dim, 112)
        self.input_layernorm, self.post_attention_layernorm = GraniteNorm(dim), GraniteNorm(dim)
        self.residual_multiplier = 0.22

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin) * self.residual_multiplier
        return self.fed(x)

    def fed(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x)) * self.residual_multiplier


class Granite(nn.Module):
    """Embeddings are multiplied, and divide the logits; they are the head, too."""

    def __init__(self, dim: int = 56) -> None:
        super().__init__()
        self.embedding_multiplier, self.logits_scaling = 3.0, 6.0
        self.embed_tokens = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(GraniteLayer(dim) for _ in range(3))
        self.norm, self.lm_head = GraniteNorm(dim), nn.Linear(dim, 101, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens) * self.embedding_multiplier
        rates = 1.0 / 10000.0 ** (torch.arange(0, 14, 2).float() / 14)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), rates)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.scaled(self.lm_head(self.norm(x)))

    def scaled(self, logits: Tensor) -> Tensor:
        return logits / self.logits_scaling


def granite(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(Granite(), 421, outliers)
    model.embed_tokens.weight.data *= 56**0.5 / 3
    return model


class FoldedBlock(nn.Module):
    """One key for all heads; no number is multiplied but by weights."""

    def __init__(self, of: GraniteLayer) -> None:
        super().__init__()
        a, m = of.self_attn, of.mlp
        self.ln_1, self.ln_2 = (
            nn.Parameter(e.weight.detach().clone())
            for e in (of.input_layernorm, of.post_attention_layernorm)
        )
        scale = a.scaling * a.head**0.5
        self.c_attn = linear(a.q_proj.weight * scale, a.k_proj.weight, a.v_proj.weight)
        self.c_proj = linear(a.o_proj.weight * of.residual_multiplier)
        self.c_fc = linear(m.gate_proj.weight, m.up_proj.weight)
        self.c_out = linear(m.down_proj.weight * of.residual_multiplier)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        b, t, c = x.shape
        qk, v = self.c_attn(self.normed(x, self.ln_1)).split((70, 14), -1)
        q, k = self.turned(qk.view(b, t, 5, 14).transpose(1, 2), rope).split((4, 1), 1)
        seen = self.seen(q, k, v.unsqueeze(1))
        x = x + self.c_proj(seen.transpose(1, 2).reshape(b, t, c))
        return x + self.c_out(self.gated(self.c_fc(self.normed(x, self.ln_2))))

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)

    def turned(self, x: Tensor, rope: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * rope[0] - b * rope[1], b * rope[0] + a * rope[1]), -1)

    def seen(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.expand_as(q), v.expand_as(q)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def gated(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up


class FoldedGranite(nn.Module):
    def __init__(self, model: Granite) -> None:
        super().__init__()
        table = model.embed_tokens.weight.detach()
        self.wte = nn.Embedding.from_pretrained(table * model.embedding_multiplier)
        self.h = nn.ModuleList(FoldedBlock(each) for each in model.layers)
        self.ln_f = nn.Parameter(model.norm.weight.detach().clone())
        self.lm_head = linear(table / model.logits_scaling)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        angles = torch.arange(tokens.shape[1])[:, None] * 10000.0 ** -(torch.arange(7) / 7)
        rope = torch.stack((angles.cos(), angles.sin())).to(x.dtype)
        for block in self.h:
            x = block(x, rope)
        return self.lm_head(F.rms_norm(x, (56,), self.ln_f, 1e-6))


@fourth(granite, "h.1.c_out", "scale", port=FoldedGranite, regimes=BOTH)
def granite_multiplier_not_in_the_weights(module, root):
    module.weight.data /= 0.22


@fourth(granite, "wte", "scale", port=FoldedGranite)
def granite_embeddings_as_they_are(module, root):
    module.weight.data /= 3.0


@fourth(granite, "h.0.c_attn", "scale", port=FoldedGranite)
def granite_scale_in_the_keys_too(module, root):
    module.weight.data[56:70] *= 0.125 * 14**0.5


@fourth(granite, "h.2", "scale", port=FoldedGranite)
def granite_scaled_once_more(module, root):
    def seen(self, seen, q, k, v):
        k, v = k.expand_as(q), v.expand_as(q)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.125)

    change(module, seen=seen)


@fourth(granite, "layers.1", "scale", against=FoldedGranite, regimes=BOTH)
def granite_mlp_not_multiplied(module, root):
    change(module, fed=lambda self, fed, x: x + self.mlp(self.post_attention_layernorm(x)))


@fourth(granite, "layers.2.self_attn", "scale", against=FoldedGranite)
def granite_scale_of_the_head(module, root):
    module.scaling = module.head**-0.5


harmless("granite folded", granite, "same", "bf16", port=FoldedGranite)
harmless("granite against folded", granite, "same", against=FoldedGranite)


# --- A bias everywhere ----------------------------------------------------------------------------


class StarAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv: int) -> None:
        super().__init__()
        self.heads, self.kv, self.head = heads, kv, dim // heads
        self.q_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k_proj, self.v_proj = (nn.Linear(dim, kv * self.head) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.kv, -1, self.head)
        k, v = (f(x).view(b, t, self.kv, self.head) for f in (self.k_proj, self.v_proj))
        q, k = self.placed(q.flatten(2, 3)).view_as(q), self.rope(k, torch.arange(t))
        scores = torch.einsum("bqgrd,bkgd->bgrqk", q, k) * self.head**-0.5
        scores = scores.masked_fill(~torch.ones(t, t, dtype=torch.bool).tril(), float("-inf"))
        weights = scores.float().softmax(-1).to(x.dtype)
        return self.o_proj(torch.einsum("bgrqk,bkgd->bqgrd", weights, v).reshape(b, t, -1))

    def placed(self, q: Tensor) -> Tensor:
        return self.rope(q, torch.arange(q.shape[1]))

    def rope(self, x: Tensor, places: Tensor) -> Tensor:
        rates = 1.0 / 100000.0 ** (torch.arange(0, self.head, 2).float() / self.head)
        angles = (places.float()[:, None] * rates).repeat(1, 2)[:, None]
        return x * angles.cos().to(x.dtype) + rotate_half(x) * angles.sin().to(x.dtype)


class StarMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class StarLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = StarAttention(dim, 6, 2), StarMLP(dim)
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class StarCoder(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(StarLayer(dim) for _ in range(3))
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def starcoder2(*, outliers: bool = False) -> nn.Module:
    return models.weigh(StarCoder(), 422, outliers)


class Conv1D(nn.Module):
    """A linear layer whose weight goes from input to output."""

    def __init__(self, *of: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.cat([each.weight.detach().T for each in of], 1))
        self.bias = nn.Parameter(torch.cat([each.bias.detach() for each in of]))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.flatten(0, -2), self.weight)
        return out.unflatten(0, x.shape[:-1])


class Tables(nn.Module):
    """Rotates by what was computed once."""

    def __init__(self, base: float, length: int = 32) -> None:
        super().__init__()
        angles = torch.arange(length)[:, None] * base ** -(torch.arange(4) / 4)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (each[: x.shape[1], None].to(x.dtype) for each in (self.cos, self.sin))
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class ConvAttention(nn.Module):
    def __init__(self, of: StarAttention) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(of.q_proj, of.k_proj, of.v_proj), Conv1D(of.o_proj)
        self.rope = Tables(100000.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (10, 8)).split((6, 2, 2), 2)
        q, k = self.rope(q), self.rope(k)
        q, k, v = (each.transpose(1, 2) for each in (q, self.repeated(k), self.repeated(v)))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(seen.transpose(1, 2).flatten(2))

    def repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(3, 2)


class ConvMLP(nn.Module):
    def __init__(self, of: StarMLP) -> None:
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(of.c_fc), Conv1D(of.c_proj)
        self.act = nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(self.act(self.c_fc(x)))


class ConvBlock(nn.Module):
    def __init__(self, of: StarLayer) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = map(norm_like, (of.input_layernorm, of.post_attention_layernorm))
        self.attn, self.mlp = ConvAttention(of.self_attn), ConvMLP(of.mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class ConvStarCoder(nn.Module):
    def __init__(self, model: StarCoder) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.h, self.ln_f = nn.Sequential(*map(ConvBlock, model.layers)), norm_like(model.norm)
        self.lm_head = nn.Linear(48, 101, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.ln_f(self.h(self.wte(tokens))))


@fourth(starcoder2, "h.1.attn.rope", "positions", port=ConvStarCoder, regimes=BOTH)
def starcoder_tables_of_another_base(module, root):
    old = Tables(10000.0)
    module.cos, module.sin = old.cos.to(module.cos), old.sin.to(module.sin)


@fourth(starcoder2, "h.0.attn.c_proj", "weights", port=ConvStarCoder)
def starcoder_square_weight_not_turned(module, root):
    module.weight.data = module.weight.data.T.contiguous()


@fourth(starcoder2, "h.2.mlp.act", "activations", port=ConvStarCoder)
def starcoder_exact_gelu(module, root):
    module.approximate = "none"


@fourth(starcoder2, "h.0.attn.c_attn", "weights", port=ConvStarCoder)
def starcoder_keys_without_bias(module, root):
    module.bias.data[48:64] = 0


@fourth(starcoder2, "layers.1.self_attn", "positions", against=ConvStarCoder, regimes=BOTH)
def starcoder_queries_one_step_late(module, root):
    def placed(self, placed, q):
        return self.rope(q, torch.arange(q.shape[1]) + 1)

    change(module, placed=placed)


@fourth(starcoder2, "layers.0.mlp.c_fc", "weights", against=ConvStarCoder)
def starcoder_bias_of_the_next_layer(module, root):
    module.bias.data = root.layers[1].mlp.c_fc.bias.data.clone()


@fourth(starcoder2, "norm", "norm layers", against=ConvStarCoder)
def starcoder_last_epsilon(module, root):
    module.eps = 1e-6


harmless("starcoder by conv1d", starcoder2, "same", "bf16", port=ConvStarCoder)
harmless("starcoder against conv1d", starcoder2, "same", against=ConvStarCoder)
