"""Gemma 3: norms of queries and keys, two bases of rotations, a window in most layers.

The port has every norm's one and the scale of queries in weights, and one product for each of
queries, keys and values, and gate and up.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_fifth import BOTH, fifth, harmless


class Gemma3RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class Gemma3Rotary(nn.Module):
    def __init__(self, head: int, base: float, factor: float) -> None:
        super().__init__()
        self.head, self.base, self.factor = head, base, factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rates = 1.0 / self.base ** (torch.arange(0, self.head, 2).float() / self.head)
        angles = torch.arange(x.shape[1])[:, None].float() * (rates / self.factor)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """Return the second half negated, then the first."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Gemma3Attention(nn.Module):
    """Scores are divided by the root of a number that is not the width of a head."""

    def __init__(self, dim: int, window: int | None) -> None:
        super().__init__()
        self.heads, self.kv, self.head, self.window = 4, 2, 16, window
        self.scaling = 24**-0.5
        self.q_proj = nn.Linear(dim, self.heads * self.head, bias=False)
        self.k_proj = nn.Linear(dim, self.kv * self.head, bias=False)
        self.v_proj = nn.Linear(dim, self.kv * self.head, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head, dim, bias=False)
        self.q_norm, self.k_norm = Gemma3RMSNorm(self.head), Gemma3RMSNorm(self.head)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, -1, self.head).transpose(1, 2)
        k = self.k_proj(x).view(b, t, -1, self.head).transpose(1, 2)
        v = self.v_proj(x).view(b, t, -1, self.head).transpose(1, 2)
        q, k = self.placed(q, k, cos, sin)
        k, v = (each.repeat_interleave(self.heads // self.kv, 1) for each in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * self.scaling
        scores = scores.masked_fill(~self.seen(t), torch.finfo(x.dtype).min)
        weights = F.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
        return self.o_proj(torch.matmul(weights, v).transpose(1, 2).reshape(b, t, -1))

    def placed(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        q, k = self.q_norm(q), self.k_norm(k)
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    def seen(self, length: int) -> Tensor:
        places = torch.arange(length)
        apart = places[:, None] - places
        return (apart >= 0) & (apart < (self.window or length))


class Gemma3MLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def act_fn(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class Gemma3Layer(nn.Module):
    def __init__(self, dim: int, window: int | None) -> None:
        super().__init__()
        self.self_attn, self.mlp = Gemma3Attention(dim, window), Gemma3MLP(dim, 112)
        self.input_layernorm = Gemma3RMSNorm(dim)
        self.post_attention_layernorm = Gemma3RMSNorm(dim)
        self.pre_feedforward_layernorm = Gemma3RMSNorm(dim)
        self.post_feedforward_layernorm = Gemma3RMSNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        seen = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.post_attention_layernorm(seen)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma3(nn.Module):
    """Every third layer sees all that came before."""

    def __init__(self, dim: int = 56) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(
            Gemma3Layer(dim, None if number % 3 == 2 else 5) for number in range(4)
        )
        self.norm = Gemma3RMSNorm(dim)
        self.rotary_emb = Gemma3Rotary(16, 1e6, 8.0)
        self.rotary_emb_local = Gemma3Rotary(16, 1e4, 1.0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        x = x * torch.tensor(x.shape[-1] ** 0.5, dtype=x.dtype)
        wide, near = self.rotary_emb(x), self.rotary_emb_local(x)
        for layer in self.layers:
            x = layer(x, *(wide if layer.self_attn.window is None else near))
        return F.linear(self.norm(x), self.embed_tokens.weight)


def gemma3(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(Gemma3(), 501, outliers)
    for module in model.modules():
        if isinstance(module, Gemma3RMSNorm):
            module.weight.data -= 1
    model.embed_tokens.weight.data *= 0.3
    return model


class Rms(nn.Module):
    """The one, and perhaps a scale, are in the weight."""

    def __init__(self, of: Gemma3RMSNorm, scale: float = 1.0) -> None:
        super().__init__()
        self.g, self.eps = nn.Parameter((1 + of.weight.detach()) * scale), of.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.g.shape, self.g, self.eps)


class Rope(nn.Module):
    def __init__(self, theta: float, stretch: float) -> None:
        super().__init__()
        self.theta, self.stretch = theta, stretch

    def forward(self, x: Tensor) -> Tensor:
        """Rotate halves; time is the last but one."""
        half = x.shape[-1] // 2
        places = torch.arange(x.shape[-2])[:, None] / self.stretch
        angles = places * self.theta ** -(torch.arange(half) / half)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class FusedAttention(nn.Module):
    def __init__(self, of: Gemma3Attention) -> None:
        super().__init__()
        self.wqkv = linear(of.q_proj.weight, of.k_proj.weight, of.v_proj.weight)
        self.wo = linear(of.o_proj.weight)
        self.q_norm, self.k_norm = Rms(of.q_norm, of.scaling), Rms(of.k_norm)
        self.rope = Rope(1e4, 1.0) if of.window else Rope(1e6, 8.0)
        self.window = of.window

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (-1, 16)).transpose(1, 2).split((4, 2, 2), 1)
        q, k = self.rope(self.q_norm(q)), self.rope(self.k_norm(k))
        mask = self.mask(x.shape[1])
        seen = F.scaled_dot_product_attention(q, k, v, mask, scale=1.0, enable_gqa=True)
        return self.wo(seen.transpose(1, 2).flatten(2))

    def mask(self, t: int) -> Tensor:
        causal = torch.ones(t, t, dtype=torch.bool).tril()
        return causal & ~causal.tril(-self.window) if self.window else causal


class GeGlu(nn.Module):
    def __init__(self, of: Gemma3MLP) -> None:
        super().__init__()
        self.w13, self.w2 = (
            linear(of.gate_proj.weight, of.up_proj.weight),
            linear(of.down_proj.weight),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.glu(*self.w13(x).chunk(2, -1)))

    def glu(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh") * up


class SandwichBlock(nn.Module):
    def __init__(self, of: Gemma3Layer) -> None:
        super().__init__()
        self.attn, self.mlp = FusedAttention(of.self_attn), GeGlu(of.mlp)
        self.n1, self.n2 = Rms(of.input_layernorm), Rms(of.post_attention_layernorm)
        self.n3 = Rms(of.pre_feedforward_layernorm)
        self.n4 = Rms(of.post_feedforward_layernorm)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.n2(self.attn(self.n1(x)))
        return self.fed(x)

    def fed(self, x: Tensor) -> Tensor:
        return x + self.n4(self.mlp(self.n3(x)))


class FusedGemma3(nn.Module):
    """The scale of embeddings is in their table, which is no longer that of the head."""

    def __init__(self, model: Gemma3) -> None:
        super().__init__()
        table = model.embed_tokens.weight.detach()
        self.wte = nn.Embedding.from_pretrained(table * table.shape[1] ** 0.5)
        self.blocks = nn.Sequential(*map(SandwichBlock, model.layers))
        self.norm, self.head = Rms(model.norm), linear(table)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.wte(tokens))))


@fifth(gemma3, "blocks.2.attn.rope", "positions", port=FusedGemma3)
def gemma3_near_base_in_the_wide_layer(module, root):
    module.theta = 1e4


@fifth(gemma3, "blocks.2.attn.rope", "positions", port=FusedGemma3, regimes=BOTH)
def gemma3_positions_not_stretched(module, root):
    module.stretch = 1.0


@fifth(gemma3, "blocks.1.attn", "masks", port=FusedGemma3, regimes=BOTH)
def gemma3_window_of_one_more(module, root):
    module.window += 1


@fifth(gemma3, "blocks.3.attn", "masks", port=FusedGemma3)
def gemma3_last_layer_sees_all(module, root):
    module.window = None


@fifth(gemma3, "blocks.0.attn.k_norm", "norm layers", port=FusedGemma3)
def gemma3_one_not_added(module, root):
    module.g.data -= 1


@fifth(gemma3, "blocks.3.attn.q_norm", "scale", port=FusedGemma3, regimes=BOTH)
def gemma3_scale_of_the_head(module, root):
    module.g.data *= 24**0.5 / 16**0.5


@fifth(gemma3, "blocks.1.mlp", "activations", port=FusedGemma3)
def gemma3_up_is_the_gate(module, root):
    change(module, glu=lambda self, glu, gate, up: glu(up, gate))


@fifth(gemma3, "blocks.0", "norm layers", port=FusedGemma3)
def gemma3_second_sum_normed(module, root):
    change(module, fed=lambda self, fed, x: self.n4(x + self.mlp(self.n3(x))))


@fifth(gemma3, "layers.0.self_attn", "positions", against=FusedGemma3, regimes=BOTH)
def gemma3_rotated_before_the_norm(module, root):
    def placed(self, placed, q, k, cos, sin):
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        return self.q_norm(q), self.k_norm(k)

    change(module, placed=placed)


@fifth(gemma3, "layers.2.mlp", "activations", against=FusedGemma3)
def gemma3_exact_gelu(module, root):
    change(module, act_fn=lambda self, act_fn, x: F.gelu(x))


harmless("gemma 3 fused", gemma3, "same", "bf16", port=FusedGemma3)
harmless("gemma 3 against fused", gemma3, "same", against=FusedGemma3)
