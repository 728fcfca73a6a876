"""Command-R and OLMo 2: norms without a bias, of heads, of whole queries, and after the products.

The first port rotates halves where the model rotates neighbours and has the scale of the logits in
the head; the second has time before the batch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_fourth import BOTH, fourth, harmless

# --- Side by side, heads normed one by one --------------------------------------------------------


class CohereLayerNorm(nn.Module):
    def __init__(self, *shape: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(shape)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = self.widened(x)
        mean = wide.mean(-1, keepdim=True)
        variance = (wide - mean).pow(2).mean(-1, keepdim=True)
        wide = (wide - mean) * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight.to(wide.dtype) * wide).to(x.dtype)

    def widened(self, x: Tensor) -> Tensor:
        return x.to(torch.float32)


class CohereAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv: int) -> None:
        super().__init__()
        self.heads, self.kv, self.head = heads, kv, dim // heads
        self.q_proj = nn.Linear(dim, dim, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, kv * self.head, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.q_norm = CohereLayerNorm(heads, self.head)
        self.k_norm = CohereLayerNorm(kv, self.head)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.head)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv, self.head)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, self.head).transpose(1, 2)
        q, k = q * cos + self.rotated(q) * sin, k * cos + self.rotated(k) * sin
        k, v = self.repeated(k), self.repeated(v)
        scores = torch.matmul(q, k.transpose(2, 3)) * self.head**-0.5
        scores = scores + torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype)
        return self.o_proj(torch.matmul(weights, v).transpose(1, 2).reshape(b, t, -1))

    def rotated(self, x: Tensor) -> Tensor:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    def repeated(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.kv, 1)


class CohereMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class CohereLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = CohereAttention(dim, 4, 2), CohereMLP(dim, 104)
        self.input_layernorm = CohereLayerNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        return x + self.self_attn(h, cos, sin) + self.mlp(h)


class Cohere(nn.Module):
    """Embeddings are the head, too; logits are made smaller."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.logit_scale, self.embed_tokens = 0.0625, nn.Embedding(101, dim)
        self.layers = nn.ModuleList(CohereLayer(dim) for _ in range(3))
        self.norm = CohereLayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        rates = 1.0 / 50000.0 ** (torch.arange(0, 12, 2).float() / 12)
        angles = torch.arange(tokens.shape[1]).float()[:, None] * rates
        angles = angles.repeat_interleave(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.logits(self.norm(x))

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embed_tokens.weight) * self.logit_scale


def cohere(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(Cohere(), 411, outliers)
    for layer in model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.data += 1
    return model


def plain(of: CohereLayerNorm) -> nn.LayerNorm:
    """Return the norm of torch that does the same."""
    out = nn.LayerNorm(of.weight.shape[0], eps=of.variance_epsilon, bias=False)
    out.weight.data = of.weight.detach().clone()
    return out


def halved(of: Tensor) -> Tensor:
    """Return heads of numbers such that every second one comes last; the heads are first."""
    return torch.cat((of[:, ::2], of[:, 1::2]), 1).detach()


class Mixer(nn.Module):
    """One product for all; queries and keys are normed and rotated together."""

    def __init__(self, of: CohereAttention) -> None:
        super().__init__()
        q, k = (each.weight.unflatten(0, (-1, 12)) for each in (of.q_proj, of.k_proj))
        self.qkv = linear(halved(q).flatten(0, 1), halved(k).flatten(0, 1), of.v_proj.weight)
        self.gain = nn.Parameter(halved(torch.cat((of.q_norm.weight, of.k_norm.weight))))
        self.out = linear(of.o_proj.weight)

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        qk, v = self.qkv(x).unflatten(-1, (8, 12)).split((6, 2), 2)
        qk = F.layer_norm(qk, (12,)) * self.gain
        q, k = self.turned(qk, angles.cos().to(x.dtype), angles.sin().to(x.dtype)).split((4, 2), 2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(seen.transpose(1, 2).flatten(2))

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x[..., :6], x[..., 6:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Ffn(nn.Module):
    def __init__(self, of: CohereMLP) -> None:
        super().__init__()
        self.into = linear(of.up_proj.weight, of.gate_proj.weight)
        self.out = linear(of.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.into(x).chunk(2, -1)
        return self.out(up * gate * torch.sigmoid(gate))


class SideBlock(nn.Module):
    def __init__(self, of: CohereLayer) -> None:
        super().__init__()
        self.norm, self.mixer, self.ffn = (
            plain(of.input_layernorm),
            Mixer(of.self_attn),
            Ffn(of.mlp),
        )

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        h = self.norm(x)
        return self.summed(x, h, self.mixer(h, angles))

    def summed(self, x: Tensor, h: Tensor, seen: Tensor) -> Tensor:
        return (seen + self.ffn(h)) + x


class SideCohere(nn.Module):
    def __init__(self, model: Cohere) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.blocks = nn.ModuleList(SideBlock(each) for each in model.layers)
        self.ln_f = plain(model.norm)
        self.head = linear(model.embed_tokens.weight * model.logit_scale)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        angles = torch.arange(tokens.shape[1])[:, None, None] / 50000 ** (torch.arange(6) / 6)
        for block in self.blocks:
            x = block(x, angles)
        return self.head(self.ln_f(x))


@fourth(cohere, "blocks.1.mixer", "weights", port=SideCohere, regimes=BOTH)
def cohere_gain_left_in_pairs(module, root):
    pairs = module.gain.data.unflatten(1, (2, 6)).transpose(1, 2)
    module.gain.data = pairs.flatten(1).contiguous()


@fourth(cohere, "blocks.0.mixer", "positions", port=SideCohere)
def cohere_rotates_neighbours(module, root):
    def turned(self, turned, x, cos, sin):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    change(module, turned=turned)


@fourth(cohere, "blocks.2", "residuals", port=SideCohere, regimes=BOTH)
def cohere_mlp_after_attention(module, root):
    def summed(self, summed, x, h, seen):
        return summed(x, self.norm(x + seen), seen)

    change(module, summed=summed)


@fourth(cohere, "head", "scale", port=SideCohere)
def cohere_scale_not_in_the_head(module, root):
    module.weight.data /= 0.0625


@fourth(cohere, "blocks.1.norm", "norm layers", port=SideCohere, regimes=BOTH)
def cohere_mean_not_taken_away(module, root):
    change(module, forward=lambda self, forward, x: F.rms_norm(x, (48,), self.weight, self.eps))


@fourth(cohere, "", "scale", against=SideCohere)
def cohere_logits_not_scaled(module, root):
    module.logit_scale = 1.0


@fourth(cohere, "layers.0.self_attn", "heads", against=SideCohere, regimes=BOTH)
def cohere_keys_tiled(module, root):
    change(module, repeated=lambda self, repeated, x: x.repeat(1, self.heads // self.kv, 1, 1))


@fourth(cohere, "layers.2.input_layernorm", "norm layers", against=SideCohere)
def cohere_norm_in_low_precision(module, root):
    change(module, widened=lambda self, widened, x: x.to(torch.bfloat16))


harmless("cohere side by side", cohere, "same", "bf16", port=SideCohere)
harmless("cohere against side", cohere, "same", "bf16", against=SideCohere)


# --- Norms after the products ---------------------------------------------------------------------


class OlmoNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight * wide).to(x.dtype)


class OlmoAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head = heads, dim // heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = OlmoNorm(dim), OlmoNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x)
        q, k, v = (e.unflatten(-1, (self.heads, -1)).transpose(1, 2) for e in (q, k, v))
        q, k = (e * cos + self.rotate_half(e) * sin for e in (q, k))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(seen.transpose(1, 2).flatten(2))

    def rotate_half(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((-second, first), -1)


class OlmoMLP(CohereMLP):
    pass


class OlmoLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = OlmoAttention(dim, 4), OlmoMLP(dim, 120)
        self.post_attention_layernorm = OlmoNorm(dim)
        self.post_feedforward_layernorm = OlmoNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x + self.post_attention_layernorm(self.self_attn(x, cos, sin))
        return self.fed(x, h)

    def fed(self, x: Tensor, h: Tensor) -> Tensor:
        return h + self.post_feedforward_layernorm(self.mlp(h))


class Olmo(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(OlmoLayer(dim) for _ in range(3))
        self.norm, self.lm_head = OlmoNorm(dim), nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        rates = 500000.0 ** -(torch.arange(0, 16, 2).float() / 16)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), rates).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def olmo2(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Olmo(), 412, outliers)


def rms(of: OlmoNorm) -> nn.RMSNorm:
    """Return the norm of torch that does the same."""
    out = nn.RMSNorm(of.weight.shape[0], eps=of.eps)
    out.weight.data = of.weight.detach().clone()
    return out


class TimeFirst(nn.Module):
    """Time, batch, channels; the heads of all rows are one batch of products."""

    def __init__(self, of: OlmoAttention) -> None:
        super().__init__()
        self.heads, self.base = of.heads, 500000.0
        self.in_proj = linear(of.q_proj.weight, of.k_proj.weight, of.v_proj.weight)
        self.out_proj, self.scale = linear(of.o_proj.weight), of.head**-0.5
        self.q_ln, self.k_ln = rms(of.q_norm), rms(of.k_norm)

    def forward(self, x: Tensor) -> Tensor:
        t, b, c = x.shape
        q, k, v = self.in_proj(x).chunk(3, -1)
        q, k = self.normed(q, k)
        q, k, v = (e.reshape(t, b * self.heads, -1).transpose(0, 1) for e in (q, k, v))
        mask = torch.full((t, t), float("-inf"), dtype=x.dtype).triu(1)
        q, k = self.spun(q), self.spun(k)
        scores = torch.baddbmm(mask, q, k.mT, alpha=self.scale)
        seen = torch.bmm(scores.softmax(-1), v)
        return self.out_proj(self.joined(seen, b).reshape(t, b, c))

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_ln(q), self.k_ln(k)

    def spun(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        angles = torch.arange(x.shape[1])[:, None] * self.base ** -(torch.arange(half) / half)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((torch.addcmul(a * cos, b, sin, value=-1), a * sin + b * cos), -1)

    def joined(self, seen: Tensor, batch: int) -> Tensor:
        return seen.transpose(0, 1)


class TimeFirstBlock(nn.Module):
    def __init__(self, of: OlmoLayer) -> None:
        super().__init__()
        self.attn = TimeFirst(of.self_attn)
        self.w_in = linear(of.mlp.gate_proj.weight, of.mlp.up_proj.weight)
        self.w_out = linear(of.mlp.down_proj.weight)
        self.ln_attn = rms(of.post_attention_layernorm)
        self.ln_mlp = rms(of.post_feedforward_layernorm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.looked(x)
        gate, up = self.w_in(x).chunk(2, -1)
        return self.ln_mlp(self.w_out(F.silu(gate).mul_(up))) + x

    def looked(self, x: Tensor) -> Tensor:
        return self.ln_attn(self.attn(x)) + x


class TimeFirstOlmo(nn.Module):
    def __init__(self, model: Olmo) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.h = nn.Sequential(*(TimeFirstBlock(each) for each in model.layers))
        self.ln_f, self.head = rms(model.norm), linear(model.lm_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.ln_f(self.h(self.wte(tokens.T)))).transpose(0, 1)


@fourth(olmo2, "h.1.attn", "norm layers", port=TimeFirstOlmo, regimes=BOTH)
def olmo_heads_normed_one_by_one(module, root):
    def normed(self, normed, q, k):
        q, k = (F.rms_norm(e.unflatten(-1, (4, 16)), (16,), None, 1e-6).flatten(2) for e in (q, k))
        return q * self.q_ln.weight, k * self.k_ln.weight

    change(module, normed=normed)


@fourth(olmo2, "h.0", "norm layers", port=TimeFirstOlmo, regimes=BOTH)
def olmo_norm_before_attention(module, root):
    change(module, looked=lambda self, looked, x: x + self.attn(self.ln_attn(x)))


@fourth(olmo2, "h.2.attn", "layouts", port=TimeFirstOlmo)
def olmo_heads_before_the_batch(module, root):
    def joined(self, joined, seen, batch):
        return seen.unflatten(0, (self.heads, batch)).permute(2, 1, 0, 3)

    change(module, joined=joined)


@fourth(olmo2, "h.0.attn", "positions", port=TimeFirstOlmo)
def olmo_base_of_the_first_olmo(module, root):
    module.base = 10000.0


@fourth(olmo2, "layers.1", "residuals", against=TimeFirstOlmo)
def olmo_second_residual_of_the_first(module, root):
    def fed(self, fed, x, h):
        return x + self.post_feedforward_layernorm(self.mlp(h))

    change(module, fed=fed)


@fourth(olmo2, "layers.2.self_attn.k_norm", "norm layers", against=TimeFirstOlmo, regimes=BOTH)
def olmo_keys_normed_as_queries(module, root):
    module.weight.data = root.layers[2].self_attn.q_norm.weight.data.clone()


harmless("olmo with time first", olmo2, "same", "bf16", port=TimeFirstOlmo)
harmless("olmo against time first", olmo2, "same", against=TimeFirstOlmo)
