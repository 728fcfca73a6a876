"""Decoders with one key and value for all heads: MPT with slopes, Falcon side by side.

The ports multiply the queries of all heads with the one key, or hold bare matrices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_third import BOTH, harmless, third

# --- Slopes, clipped projections, one key for all heads -------------------------------------------


class MptBlock(nn.Module):
    """Clipped projections and slopes; no bias anywhere; one key and value for all heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.clip = heads, 1.5
        self.norm_1, self.norm_2 = (nn.LayerNorm(dim, bias=False) for _ in range(2))
        self.wqkv = nn.Linear(dim, dim + 2 * dim // heads, bias=False)
        self.out_proj = nn.Linear(dim, dim, bias=False)
        self.up_proj, self.down_proj = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.clipped(self.wqkv(self.norm_1(x)))
        q, k, v = qkv.split((d, d // self.heads, d // self.heads), -1)
        q = q.view(b, t, self.heads, -1).transpose(1, 2)
        k, v = (each[:, None].expand(-1, self.heads, -1, -1) for each in (k, v))
        scores = q @ k.mT / (d // self.heads) ** 0.5 + bias[:, -t:, -t:]
        later = ~torch.ones(t, t, dtype=torch.bool).tril()
        weights = scores.masked_fill(later, torch.finfo(x.dtype).min).softmax(-1)
        x = x + self.out_proj((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))

    def clipped(self, x: Tensor) -> Tensor:
        return x.clamp(-self.clip, self.clip)


class Mpt(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 8) -> None:
        super().__init__()
        self.wte, self.heads = nn.Embedding(101, dim), heads
        self.blocks = nn.ModuleList(MptBlock(dim, heads) for _ in range(2))
        self.norm_f = nn.LayerNorm(dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        bias = self.slopes()[:, None, None] * torch.arange(1 - tokens.shape[1], 1)
        bias = bias.expand(-1, tokens.shape[1], -1).to(x.dtype)
        for block in self.blocks:
            x = block(x, bias)
        return self.norm_f(x) @ self.wte.weight.T

    def slopes(self) -> Tensor:
        return 2.0 ** -(torch.arange(1, self.heads + 1).float() * 8 / self.heads)


def mpt(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Mpt(), 352, outliers)


class OneKey(nn.Module):
    """Queries of all heads are rows of one product with the one key."""

    def __init__(self, of: MptBlock) -> None:
        super().__init__()
        dim, head = of.out_proj.weight.shape[0], of.out_proj.weight.shape[0] // of.heads
        self.heads, self.head, self.clip = of.heads, head, of.clip
        self.q = linear(of.wqkv.weight[:dim])
        self.kv = linear(of.wqkv.weight[dim:])
        self.proj = linear(of.out_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q = self.q(x).clamp(-self.clip, self.clip).view(b, t * self.heads, self.head)
        k, v = self.kv_of(self.kv(x).clamp(-self.clip, self.clip))
        scores = torch.baddbmm(self.bias(x).expand(b, -1, -1), q, k.mT, alpha=self.head**-0.5)
        return self.proj(torch.bmm(scores.softmax(-1), v).view(b, t, d))

    def kv_of(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        return kv[..., : self.head], kv[..., self.head :]

    def bias(self, x: Tensor) -> Tensor:
        t = x.shape[1]
        apart = torch.arange(t) - torch.arange(t)[:, None]
        slopes = 0.5 ** self.powers()
        bias = slopes[None, :, None] * apart[:, None].to(slopes)
        bias = torch.where(apart[:, None] > 0, -torch.inf, bias)
        return bias.flatten(0, 1).to(x.dtype)[None]

    def powers(self) -> Tensor:
        return torch.arange(self.heads) + 1.0


class OneKeyBlock(nn.Module):
    def __init__(self, of: MptBlock) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (self.copied(each) for each in (of.norm_1, of.norm_2))
        self.attn = OneKey(of)
        self.ffn = nn.Sequential(linear(of.up_proj.weight), nn.GELU(), linear(of.down_proj.weight))

    @staticmethod
    def copied(of: nn.LayerNorm) -> nn.LayerNorm:
        out = nn.LayerNorm(of.normalized_shape, eps=of.eps)
        out.weight.data = of.weight.detach().clone()
        return out

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.ffn(self.ln_2(x))


class OneKeyMpt(nn.Module):
    def __init__(self, model: Mpt) -> None:
        super().__init__()
        self.tok = nn.Embedding.from_pretrained(model.wte.weight.detach().clone())
        self.h = nn.Sequential(*(OneKeyBlock(each) for each in model.blocks))
        self.ln_f, self.head = OneKeyBlock.copied(model.norm_f), linear(model.wte.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.ln_f(self.h(self.tok(tokens))))


@third(mpt, "h.0.attn", "positions", port=OneKeyMpt, regimes=BOTH)
def mpt_slopes_from_one(module, root):
    change(module, powers=lambda self, powers: powers() - 1)


@third(mpt, "h.1.attn", "scale", port=OneKeyMpt, regimes=BOTH)
def mpt_not_clipped(module, root):
    module.clip = 1e4


@third(mpt, "h.1.attn", "heads", port=OneKeyMpt)
def mpt_key_for_value(module, root):
    change(module, kv_of=lambda self, kv_of, kv: kv_of(kv)[::-1])


@third(mpt, "h.0.ln_2", "norm layers", port=OneKeyMpt)
def mpt_bias_left_from_the_start(module, root):
    module.bias.data += 0.05


@third(mpt, "", "positions", against=OneKeyMpt)
def mpt_slopes_of_half_the_base(module, root):
    change(module, slopes=lambda self, slopes: slopes().sqrt())


harmless("mpt one key", mpt, "same", "bf16", port=OneKeyMpt)
harmless("mpt against one key", mpt, "same", against=OneKeyMpt)


# --- Falcon: many queries, one key, both halves side by side --------------------------------------


class FalconLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head = heads, dim // heads
        self.input_layernorm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, (heads + 2) * self.head, bias=False)
        self.dense = nn.Linear(dim, dim, bias=False)
        self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.input_layernorm(x)
        q, k, v = self.parts(self.query_key_value(h).unflatten(-1, (-1, self.head)))
        q, k, v = (each.transpose(1, 2) for each in (self.rope(q), self.rope(k), v))
        later = torch.full((x.shape[1],) * 2, float("-inf"), dtype=x.dtype).triu(1)
        weights = (q @ k.mT / self.head**0.5 + later).softmax(-1)
        seen = (weights @ v).transpose(1, 2).flatten(2)
        return self.dense(seen) + self.down(F.gelu(self.up(h))) + x

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x[..., :-2, :], x[..., [-2], :], x[..., [-1], :]

    def rope(self, x: Tensor) -> Tensor:
        rates = 1 / 10000.0 ** (torch.arange(0, self.head, 2) / self.head)
        angles = (torch.arange(x.shape[1])[:, None] * rates).repeat(1, 2)[:, None]
        a, b = x.chunk(2, -1)
        return x * angles.cos().to(x.dtype) + torch.cat((-b, a), -1) * angles.sin().to(x.dtype)


class Falcon(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(101, dim)
        self.h = nn.ModuleList(FalconLayer(dim, 4) for _ in range(2))
        self.ln_f = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.word_embeddings(tokens)
        for layer in self.h:
            x = layer(x)
        return self.lm_head(self.ln_f(x))


def falcon(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Falcon(), 353, outliers)


class Flat(nn.Module):
    """Every weight is a bare matrix from input to output."""

    def __init__(self, model: Falcon) -> None:
        super().__init__()
        self.table = nn.Parameter(model.word_embeddings.weight.detach().clone())
        self.steps = nn.ModuleList(FlatStep(each) for each in model.h)
        self.norm, self.out = norm_like(model.ln_f), linear(model.lm_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table[tokens]
        for step in self.steps:
            x = step(x)
        return self.out(self.norm(x))


class FlatStep(nn.Module):
    def __init__(self, of: FalconLayer) -> None:
        super().__init__()
        self.norm = norm_like(of.input_layernorm)
        weight = of.query_key_value.weight.detach()
        self.wq, self.wk, self.wv, self.wo, self.w1, self.w2 = (
            nn.Parameter(each.detach().T.clone())
            for each in (
                weight[:48],
                weight[48:60],
                weight[60:],
                of.dense.weight,
                of.up.weight,
                of.down.weight,
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (h @ self.wq).unflatten(-1, (4, 12)), h @ self.wk, h @ self.wv
        angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** -(torch.arange(6) / 6)
        q, k = self.turn(q, angle[:, None]), self.turn(k, angle)
        scores = torch.einsum("bqhd,bkd->bhqk", q, k) * 12**-0.5
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)
        seen = torch.einsum("bhqk,bkd->bqhd", scores.softmax(-1), v).flatten(2)
        return x + (self.fed(h, x + seen @ self.wo) + seen @ self.wo)

    def turn(self, x: Tensor, angle: Tensor) -> Tensor:
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        a, b = x[..., :6], x[..., 6:]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def fed(self, h: Tensor, x: Tensor) -> Tensor:
        return F.gelu(h @ self.w1) @ self.w2


@third(falcon, "steps.0", "weights", port=Flat, regimes=BOTH)
def falcon_out_transposed(module, root):
    module.wo.data = module.wo.data.T.contiguous()


@third(falcon, "steps.1", "residuals", port=Flat)
def falcon_mlp_after_attention(module, root):
    change(module, fed=lambda self, fed, h, x: fed(self.norm(x), x))


@third(falcon, "h.1", "heads", against=Flat, regimes=BOTH)
def falcon_value_before_key(module, root):
    change(module, parts=lambda self, parts, x: [parts(x)[n] for n in (0, 2, 1)])


harmless("falcon flat", falcon, "same", "bf16", port=Flat)
