"""Qwen-style and OPT-style decoders, ported to code that fuses all it can into a few products.

The first port holds norms as bare parameters and rotates queries and keys at once; the second folds
the scale of the queries into their weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_third import BOTH, harmless, third

# --- Grouped heads, normed queries and keys, gated ------------------------------------------------


class QwenNorm(nn.Module):
    """Root mean square, in float32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """Return the second half negated, then the first."""
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


class QwenAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv: int, head: int) -> None:
        super().__init__()
        self.heads, self.kv, self.head = heads, kv, head
        self.q_proj = nn.Linear(dim, heads * head)
        self.k_proj, self.v_proj = nn.Linear(dim, kv * head), nn.Linear(dim, kv * head)
        self.o_proj = nn.Linear(heads * head, dim, bias=False)
        self.q_norm, self.k_norm = QwenNorm(head), QwenNorm(head)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, -1, self.head)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, -1, self.head)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, -1, self.head).transpose(1, 2)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        k, v = (self.repeated(each) for each in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scale()
        mask = torch.full((t, t), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        weights = F.softmax(scores + mask, dim=-1, dtype=torch.float32).to(x.dtype)
        return self.o_proj(torch.matmul(weights, v).transpose(1, 2).reshape(b, t, -1))

    def repeated(self, x: Tensor) -> Tensor:
        b, kv, t, d = x.shape
        return x[:, :, None].expand(b, kv, self.heads // kv, t, d).reshape(b, self.heads, t, d)

    def scale(self) -> float:
        return self.head**-0.5


class QwenMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))

    def act(self, x: Tensor) -> Tensor:
        return F.silu(x)


class QwenLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = QwenAttention(dim, 6, 2, 16), QwenMLP(dim, 144)
        self.input_layernorm, self.post_attention_layernorm = QwenNorm(dim), QwenNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        residual = x
        x = residual + self.self_attn(self.input_layernorm(x), cos, sin)
        return self.fed(x)

    def fed(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen(nn.Module):
    """The decoder; heads are wider together than the model."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(QwenLayer(dim) for _ in range(3))
        self.norm, self.lm_head = QwenNorm(dim), nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        rates = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
        angles = torch.outer(torch.arange(tokens.shape[1]).float(), rates)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def qwen(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Qwen(), 331, outliers)


class FusedLayer(nn.Module):
    """One product in, one out, one up, one down; all else is functions."""

    def __init__(self, of: QwenLayer) -> None:
        super().__init__()
        a, m = of.self_attn, of.mlp
        self.heads, self.kv, self.width, self.eps = a.heads, a.kv, a.head, 1e-6
        bias = torch.cat([each.bias.detach() for each in (a.q_proj, a.k_proj, a.v_proj)])
        self.qkv = linear(a.q_proj.weight, a.k_proj.weight, a.v_proj.weight, bias=bias)
        self.out = linear(a.o_proj.weight)
        self.gate_up = linear(m.gate_proj.weight, m.up_proj.weight)
        self.down = linear(m.down_proj.weight)
        olds = (of.input_layernorm, of.post_attention_layernorm)
        self.ln1, self.ln2 = (nn.Parameter(each.weight.detach().clone()) for each in olds)
        each_head = [a.q_norm.weight] * a.heads + [a.k_norm.weight] * a.kv
        self.qk_scale = nn.Parameter(torch.stack([each.detach() for each in each_head]))

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        h = F.rms_norm(x, x.shape[-1:], self.ln1, self.eps)
        x = torch.add(x, self.out(self.attend(self.qkv(h), table)))
        h = F.rms_norm(x, x.shape[-1:], self.ln2, self.eps)
        return torch.add(x, self.down(self.gated(self.gate_up(h))))

    def attend(self, qkv: Tensor, table: Tensor) -> Tensor:
        qkv = qkv.unflatten(-1, (-1, self.width))
        qk, v = qkv.split((self.heads + self.kv, self.kv), 2)
        q, k = self.placed(qk, table).split((self.heads, self.kv), 2)
        k, v = (self.shared(each) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(q.shape[2]))
        return seen.transpose(1, 2).flatten(2)

    def placed(self, qk: Tensor, table: Tensor) -> Tensor:
        return self.rotated(self.normed(qk), table)

    def normed(self, qk: Tensor) -> Tensor:
        return F.rms_norm(qk, qk.shape[-1:], None, self.eps) * self.qk_scale

    def rotated(self, qk: Tensor, table: Tensor) -> Tensor:
        cos, sin = table[:, None].unbind(-1)
        a, b = qk.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def shared(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.kv, 2)

    def mask(self, length: int) -> Tensor:
        return torch.ones(length, length, dtype=torch.bool).tril()

    def gated(self, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up


class FusedQwen(nn.Module):
    """The same, its rotations in one table."""

    def __init__(self, model: Qwen) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.blocks = nn.ModuleList(FusedLayer(each) for each in model.layers)
        self.ln_f = nn.Parameter(model.norm.weight.detach().clone())
        self.unembed = linear(model.lm_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        table = self.table(tokens.shape[1]).to(x.dtype)
        for block in self.blocks:
            x = block(x, table)
        return self.unembed(F.rms_norm(x, x.shape[-1:], self.ln_f, 1e-6))

    def table(self, length: int) -> Tensor:
        rates = self.theta() ** -(torch.arange(8).float() / 8)
        angles = torch.arange(length).float()[:, None] * rates
        return torch.stack((angles.cos(), angles.sin()), -1)

    def theta(self) -> float:
        return 10000.0


@third(qwen, "blocks.1", "positions", port=FusedQwen, regimes=BOTH)
def qwen_rotates_neighbours(module, root):
    def rotated(self, rotated, qk, table):
        cos, sin = table[:, None].unbind(-1)
        a, b = qk[..., ::2], qk[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)

    change(module, rotated=rotated)


@third(qwen, "blocks.0", "heads", port=FusedQwen, regimes=BOTH)
def qwen_heads_of_keys_in_turn(module, root):
    change(module, shared=lambda self, shared, x: x.repeat(1, 1, self.heads // self.kv, 1))


@third(qwen, "blocks.2", "activations", port=FusedQwen)
def qwen_gate_and_up_the_other_way(module, root):
    change(module, gated=lambda self, gated, x: gated(torch.cat(x.chunk(2, -1)[::-1], -1)))


@third(qwen, "blocks.1.qkv", "weights", port=FusedQwen, regimes=BOTH)
def qwen_no_bias_of_keys_and_values(module, root):
    module.bias.data[96:] = 0


@third(qwen, "", "positions", port=FusedQwen)
def qwen_theta_of_another_release(module, root):
    change(module, theta=lambda self, theta: 1e6)


@third(qwen, "blocks.2", "positions", port=FusedQwen, regimes=BOTH)
def qwen_norm_after_rotation(module, root):
    def placed(self, placed, qk, table):
        return self.normed(self.rotated(qk, table))

    change(module, placed=placed)


@third(qwen, "blocks.0", "masks", port=FusedQwen)
def qwen_sees_one_ahead(module, root):
    def mask(self, mask, length):
        return torch.ones(length, length, dtype=torch.bool).tril(1)

    change(module, mask=mask)


@third(qwen, "blocks.2.gate_up", "weights", port=FusedQwen)
def qwen_gate_and_up_interleaved(module, root):
    module.weight.data = module.weight.data.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)


@third(qwen, "blocks.1", "norm layers", port=FusedQwen)
def qwen_epsilon_of_llama(module, root):
    module.eps = 1e-5


@third(qwen, "", "norm layers", port=FusedQwen)
def qwen_last_norm_not_weighted(module, root):
    module.ln_f.data = torch.ones_like(module.ln_f)


@third(qwen, "layers.1.self_attn", "scale", against=FusedQwen, regimes=BOTH)
def qwen_scale_of_the_whole_width(module, root):
    change(module, scale=lambda self, scale: (64 / self.heads) ** -0.5)


@third(qwen, "layers.2.post_attention_layernorm", "norm layers", against=FusedQwen)
def qwen_norm_of_the_layer_before(module, root):
    module.weight.data = root.layers[1].post_attention_layernorm.weight.data.clone()


@third(qwen, "layers.0.mlp", "activations", against=FusedQwen, regimes=BOTH)
def qwen_gelu_for_silu(module, root):
    change(module, act=lambda self, act, x: F.gelu(x))


@third(qwen, "layers.1", "residuals", against=FusedQwen)
def qwen_residual_of_the_normed(module, root):
    def fed(self, fed, x):
        x = self.post_attention_layernorm(x)
        return x + self.mlp(x)

    change(module, fed=fed)


harmless("qwen fused", qwen, "same", "reordered", "bf16", port=FusedQwen)
harmless("qwen against fused", qwen, against=FusedQwen)


# --- Learned positions from the third row ---------------------------------------------------------


class OptPositions(nn.Embedding):
    """The first two rows are not for positions."""

    def forward(self, mask: Tensor) -> Tensor:
        return super().forward((mask.cumsum(1) * mask).long() - 1 + self.offset())

    def offset(self) -> int:
        return 2


class OptLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(dim, dim) for _ in range(4)
        )
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        h = self.self_attn_layer_norm(x)
        q, k, v = (
            f(h).view(b, t, self.heads, -1).transpose(1, 2).flatten(0, 1)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = torch.bmm(self.scaled(q), k.transpose(1, 2))
        scores = scores + torch.full((t, t), -1e9, dtype=x.dtype).triu(1)
        seen = torch.bmm(scores.softmax(-1), v).view(b, self.heads, t, -1).transpose(1, 2)
        x = x + self.out_proj(seen.reshape(b, t, d))
        return x + self.fc2(F.relu(self.fc1(self.final_layer_norm(x))))

    def scaled(self, q: Tensor) -> Tensor:
        return q * q.shape[-1] ** -0.5


class Opt(nn.Module):
    """The decoder; embeddings narrower than the model."""

    def __init__(self, dim: int = 48, narrow: int = 32) -> None:
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(101, narrow), OptPositions(34, dim)
        self.project_in = nn.Linear(narrow, dim, bias=False)
        self.project_out = nn.Linear(dim, narrow, bias=False)
        self.layers = nn.ModuleList(OptLayer(dim, 4) for _ in range(2))
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.embed_positions(torch.ones_like(tokens))
        x = self.project_in(self.embed_tokens(tokens)) + places
        for layer in self.layers:
            x = layer(x)
        x = self.project_out(self.final_layer_norm(x))
        return x @ self.embed_tokens.weight.T


def opt(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Opt(), 332, outliers)


class FoldedAttention(nn.Module):
    """One product for all three; the scale is in the weights."""

    def __init__(self, of: OptLayer) -> None:
        super().__init__()
        self.heads, scale = of.heads, 12**-0.5
        parts = (of.k_proj, of.v_proj)
        self.c_attn = linear(
            of.q_proj.weight.detach() * scale,
            *(each.weight for each in parts),
            bias=torch.cat([of.q_proj.bias * scale, *(each.bias for each in parts)]).detach(),
        )
        self.c_proj = linear(of.out_proj.weight, bias=of.out_proj.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        later = torch.arange(x.shape[1])[:, None] < torch.arange(x.shape[1])
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.c_proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class FoldedBlock(nn.Module):
    def __init__(self, of: OptLayer) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = norm_like(of.self_attn_layer_norm), norm_like(of.final_layer_norm)
        self.attn = FoldedAttention(of)
        self.c_fc = linear(of.fc1.weight, bias=of.fc1.bias.detach())
        self.c_proj = linear(of.fc2.weight, bias=of.fc2.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(self.act(self.c_fc(self.ln_2(x))))

    def act(self, x: Tensor) -> Tensor:
        return x.clamp(min=0)


class FoldedOpt(nn.Module):
    """The same; tokens are projected once, positions are a slice."""

    def __init__(self, model: Opt) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.widen, self.narrow = linear(model.project_in.weight), linear(model.project_out.weight)
        self.wpe = nn.Parameter(model.embed_positions.weight.detach().clone())
        self.h = nn.ModuleList(FoldedBlock(each) for each in model.layers)
        self.ln_f, self.head = norm_like(model.final_layer_norm), linear(model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.widen(self.wte(tokens)) + self.places(tokens.shape[1])
        for block in self.h:
            x = block(x)
        return self.head(self.narrow(self.ln_f(x)))

    def places(self, length: int) -> Tensor:
        return self.wpe[2 : 2 + length]


@third(opt, "", "positions", port=FoldedOpt, regimes=BOTH)
def opt_positions_without_offset(module, root):
    change(module, places=lambda self, places, length: self.wpe[:length])


@third(opt, "h.1.attn.c_attn", "weights", port=FoldedOpt)
def opt_scale_not_in_the_bias(module, root):
    module.bias.data[:48] *= 12**0.5


@third(opt, "h.0", "activations", port=FoldedOpt)
def opt_gelu_for_relu(module, root):
    change(module, act=lambda self, act, x: F.gelu(x))


@third(opt, "h.0.attn.c_proj", "weights", port=FoldedOpt, regimes=BOTH)
def opt_out_transposed(module, root):
    module.weight.data = module.weight.data.T.contiguous()


@third(opt, "embed_positions", "positions", against=FoldedOpt)
def opt_offset_of_one(module, root):
    change(module, offset=lambda self, offset: 1)


@third(opt, "layers.1", "scale", against=FoldedOpt)
def opt_scaled_twice(module, root):
    change(module, scaled=lambda self, scaled, q: scaled(scaled(q)))


harmless("opt folded", opt, port=FoldedOpt)
harmless("opt against folded", opt, "same", port=None, against=FoldedOpt)
