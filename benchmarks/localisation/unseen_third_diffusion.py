"""The block by which an image looks at words in diffusion; its port fuses what can be fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_third import BOTH, harmless, third


def same(of: nn.Linear) -> nn.Linear:
    """Return a copy of a layer with a bias."""
    return linear(of.weight, bias=of.bias.detach())


# --- An image that looks at words -----------------------------------------------------------------


def scene(dtype: torch.dtype) -> drives.Run:
    """One call on features of images and of words."""
    generator = torch.Generator().manual_seed(32)
    image = torch.randn(2, 32, 4, 4, generator=generator).to(dtype)
    return drives.Run((image, torch.randn(2, 7, 20, generator=generator).to(dtype)))


class Cross(nn.Module):
    def __init__(self, dim: int, of: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k, self.to_v = (nn.Linear(of, dim, bias=False) for _ in range(2))
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.to_q(x), self.to_k(context), self.to_v(context))
        )
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Looking(nn.Module):
    """To itself, to the words, and a gated MLP."""

    def __init__(self, dim: int, of: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, dim, eps=1e-6)
        self.proj_in, self.proj_out = nn.Conv2d(dim, dim, 1), nn.Conv2d(dim, dim, 1)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.attn1, self.attn2 = Cross(dim, dim), Cross(dim, of)
        self.geglu, self.ff = nn.Linear(dim, 4 * dim), nn.Linear(2 * dim, dim)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        x = self.proj_in(self.norm(image)).flatten(2).transpose(1, 2)
        h = self.norm1(x)
        x = x + self.attn1(h, h)
        x = x + self.attn2(self.norm2(x), words)
        value, gate = self.geglu(self.norm3(x)).chunk(2, -1)
        x = x + self.ff(value * F.gelu(gate))
        return image + self.proj_out(x.transpose(1, 2).unflatten(2, image.shape[2:]))


class Diffusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Looking(32, 20) for _ in range(2))

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        for block in self.blocks:
            image = block(image, words)
        return image


def diffusing(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Diffusing(), 383, outliers)


class Fast(nn.Module):
    """Attention with what can be fused, fused."""

    def __init__(self, of: Cross) -> None:
        super().__init__()
        self.heads, self.q = of.heads, linear(of.to_q.weight)
        self.kv, self.out = linear(of.to_k.weight, of.to_v.weight), same(of.to_out)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.parted(self.kv(context))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def parted(self, kv: Tensor) -> tuple[Tensor, ...]:
        return kv.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class FastLooking(nn.Module):
    def __init__(self, of: Looking) -> None:
        super().__init__()
        self.gn = nn.GroupNorm(8, 32, eps=1e-6)
        self.gn.load_state_dict(of.norm.state_dict())
        self.into = linear(of.proj_in.weight.flatten(1), bias=of.proj_in.bias.detach())
        self.outof = linear(of.proj_out.weight.flatten(1), bias=of.proj_out.bias.detach())
        self.lns = nn.ModuleList(norm_like(e) for e in (of.norm1, of.norm2, of.norm3))
        self.own, self.cross = Fast(of.attn1), Fast(of.attn2)
        self.w1, self.w2 = same(of.geglu), same(of.ff)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        x = self.into(self.gn(image).permute(0, 2, 3, 1).flatten(1, 2))
        h = self.lns[0](x)
        x = self.own(h, h) + x
        x = self.crossed(x, words)
        x = self.w2(self.gated(*self.w1(self.lns[2](x)).chunk(2, -1))) + x
        x = self.outof(x).mT.reshape(image.shape)
        return x + image

    def crossed(self, x: Tensor, words: Tensor) -> Tensor:
        return self.cross(self.lns[1](x), words) + x

    def gated(self, value: Tensor, gate: Tensor) -> Tensor:
        return F.gelu(gate) * value


class FastDiffusing(nn.Module):
    def __init__(self, model: Diffusing) -> None:
        super().__init__()
        self.stages = nn.ModuleList(FastLooking(each) for each in model.blocks)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        for stage in self.stages:
            image = stage(image, words)
        return image


@third(diffusing, "stages.0", "activations", port=FastDiffusing, run=scene, regimes=BOTH)
def diffusing_gate_first(module, root):
    change(module, gated=lambda self, gated, value, gate: gated(gate, value))


@third(diffusing, "stages.1", "norm layers", port=FastDiffusing, run=scene)
def diffusing_looks_with_the_first_norm(module, root):
    def crossed(self, crossed, x, words):
        return self.cross(self.lns[0](x), words) + x

    change(module, crossed=crossed)


@third(diffusing, "stages.0.cross", "heads", port=FastDiffusing, run=scene, regimes=BOTH)
def diffusing_keys_and_values_by_head(module, root):
    def parted(self, parted, kv):
        return kv.unflatten(-1, (self.heads, 2, -1)).permute(3, 0, 2, 1, 4).unbind(0)

    change(module, parted=parted)


@third(diffusing, "stages.1.gn", "norm layers", port=FastDiffusing, run=scene)
def diffusing_epsilon_of_torch(module, root):
    module.eps = 1e-3


@third(diffusing, "blocks.1.attn2.to_out", "weights", against=FastDiffusing, run=scene)
def diffusing_out_without_bias(module, root):
    module.bias.data.zero_()


harmless("diffusing fast", diffusing, "same", "bf16", port=FastDiffusing, run=scene)
harmless("diffusing against fast", diffusing, "same", against=FastDiffusing, run=scene)
