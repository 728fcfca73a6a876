"""SegFormer: keys and values of fewer places, a convolution in the MLP, a head of all stages.

The port has channels first throughout, and each stage's way through the head in one matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.planting import change
from localisation.unseen_fifth import BOTH, fifth, harmless


def street(dtype: torch.dtype) -> drives.Run:
    """One call on pictures that give eight places by eight, then four by four."""
    return drives.Run((drives.image(52, side=32, dtype=dtype),))


class OverlapPatchEmbeddings(nn.Module):
    def __init__(self, given: int, dim: int, size: int, stride: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(given, dim, size, stride, size // 2)
        self.layer_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        x = self.proj(x)
        return self.layer_norm(x.flatten(2).transpose(1, 2)), x.shape[2]


class EfficientSelfAttention(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.heads, self.ratio = heads, ratio
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        if ratio > 1:
            self.sr, self.layer_norm = nn.Conv2d(dim, dim, ratio, ratio), nn.LayerNorm(dim)

    def forward(self, x: Tensor, side: int) -> Tensor:
        q, h = self.split(self.query(x)), x
        if self.ratio > 1:
            h = self.sr(h.transpose(1, 2).unflatten(2, (side, side)))
            h = self.layer_norm(h.flatten(2).transpose(1, 2))
        k, v = self.split(self.key(h)), self.split(self.value(h))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class MixFFN(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dense1, self.dense2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.dwconv = nn.Conv2d(2 * dim, 2 * dim, 3, padding=1, groups=2 * dim)

    def forward(self, x: Tensor, side: int) -> Tensor:
        x = self.dense1(x).transpose(1, 2).unflatten(2, (side, side))
        return self.dense2(F.gelu(self.dwconv(x).flatten(2).transpose(1, 2)))


class SegformerLayer(nn.Module):
    def __init__(self, dim: int, heads: int, ratio: int) -> None:
        super().__init__()
        self.layer_norm_1, self.layer_norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.mlp = EfficientSelfAttention(dim, heads, ratio), MixFFN(dim)

    def forward(self, x: Tensor, side: int) -> Tensor:
        x = x + self.attention(self.layer_norm_1(x), side)
        return x + self.mlp(self.layer_norm_2(x), side)


class SegformerStage(nn.Module):
    def __init__(self, given: int, dim: int, size: int, stride: int, ratio: int) -> None:
        super().__init__()
        self.patch_embeddings = OverlapPatchEmbeddings(given, dim, size, stride)
        self.block = nn.ModuleList(SegformerLayer(dim, dim // 16, ratio) for _ in range(2))
        self.layer_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        x, side = self.patch_embeddings(x)
        for block in self.block:
            x = block(x, side)
        return self.layer_norm(x).transpose(1, 2).unflatten(2, (side, side))


class DecodeHead(nn.Module):
    """All stages at the size of the first, the last stage first."""

    def __init__(self, dims: tuple[int, ...], dim: int = 32) -> None:
        super().__init__()
        self.linear_c = nn.ModuleList(nn.Linear(each, dim) for each in dims)
        self.linear_fuse = nn.Conv2d(dim * len(dims), dim, 1, bias=False)
        self.batch_norm, self.classifier = nn.BatchNorm2d(dim), nn.Conv2d(dim, 11, 1)

    def forward(self, stages: list[Tensor]) -> Tensor:
        outs = []
        for x, project in zip(stages, self.linear_c, strict=True):
            x = project(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            outs.append(self.resized(x, stages[0].shape[2]))
        x = self.linear_fuse(self.joined(outs))
        return self.classifier(F.relu(self.batch_norm(x)))

    def joined(self, outs: list[Tensor]) -> Tensor:
        return torch.cat(outs[::-1], 1)

    def resized(self, x: Tensor, side: int) -> Tensor:
        return F.interpolate(x, size=(side, side), mode="bilinear", align_corners=False)


class Segformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(
            (SegformerStage(3, 32, 7, 4, 2), SegformerStage(32, 48, 3, 2, 1))
        )
        self.decode_head = DecodeHead((32, 48))

    def forward(self, image: Tensor) -> Tensor:
        outs = [image]
        for stage in self.stages:
            outs.append(stage(outs[-1]))
        return self.decode_head(outs[1:])


def segformer(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Segformer(), 505, outliers)


def pointwise(*of: nn.Linear) -> nn.Conv2d:
    """Return one convolution of one pixel that holds these layers."""
    weight = torch.cat([each.weight.detach() for each in of])[..., None, None]
    out = nn.Conv2d(weight.shape[1], weight.shape[0], 1)
    out.weight.data, out.bias.data = weight.clone(), torch.cat([e.bias.detach() for e in of])
    return out


def spatial(of: nn.Conv2d) -> nn.Conv2d:
    """Return a copy of a convolution."""
    out = nn.Conv2d(
        of.in_channels, of.out_channels, of.kernel_size, of.stride, of.padding, groups=of.groups
    )
    out.load_state_dict(of.state_dict())
    return out


class FirstNorm(nn.Module):
    """A layer norm over the channels, which are first."""

    def __init__(self, of: nn.LayerNorm) -> None:
        super().__init__()
        self.g, self.b = (
            nn.Parameter(e.detach()[:, None, None].clone()) for e in (of.weight, of.bias)
        )
        self.eps = of.eps

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 1, correction=self.correction(), keepdim=True)
        return (x - mean) * (variance + self.eps).rsqrt() * self.g + self.b

    def correction(self) -> int:
        return 0


class ReducedAttention(nn.Module):
    def __init__(self, of: EfficientSelfAttention) -> None:
        super().__init__()
        self.heads = of.heads
        self.q, self.kv, self.o = (
            pointwise(of.query),
            pointwise(of.key, of.value),
            pointwise(of.out),
        )
        reduced = of.ratio > 1
        self.sr = nn.Sequential(spatial(of.sr), FirstNorm(of.layer_norm)) if reduced else None

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).flatten(2).unflatten(1, (self.heads, -1))
        k, v = self.kv(self.fewer(x)).flatten(2).unflatten(1, (2, self.heads, -1)).unbind(1)
        seen = F.scaled_dot_product_attention(q.mT, k.mT, v.mT)
        return self.o(seen.mT.flatten(1, 2).unflatten(2, x.shape[2:]))

    def fewer(self, x: Tensor) -> Tensor:
        return x if self.sr is None else self.sr(x)


class ConvFeed(nn.Module):
    def __init__(self, of: MixFFN) -> None:
        super().__init__()
        self.up, self.mix, self.down = (
            pointwise(of.dense1),
            spatial(of.dwconv),
            pointwise(of.dense2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mixed(self.up(x)))

    def mixed(self, x: Tensor) -> Tensor:
        return F.gelu(self.mix(x))


class FirstBlock(nn.Module):
    def __init__(self, of: SegformerLayer) -> None:
        super().__init__()
        self.n1, self.n2 = FirstNorm(of.layer_norm_1), FirstNorm(of.layer_norm_2)
        self.attn, self.ffn = ReducedAttention(of.attention), ConvFeed(of.mlp)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x))
        return self.fed(x, self.n2(x))

    def fed(self, x: Tensor, h: Tensor) -> Tensor:
        return x + self.ffn(h)


class FirstStage(nn.Sequential):
    def __init__(self, of: SegformerStage) -> None:
        embed = of.patch_embeddings
        super().__init__(
            spatial(embed.proj),
            FirstNorm(embed.layer_norm),
            *map(FirstBlock, of.block),
            FirstNorm(of.layer_norm),
        )


class SumHead(nn.Module):
    """Projection, fusion and batch norm are one matrix for each stage."""

    def __init__(self, of: DecodeHead) -> None:
        super().__init__()
        norm = of.batch_norm
        scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
        parts = of.linear_fuse.weight.detach()[..., 0, 0].chunk(len(of.linear_c), 1)[::-1]
        pairs = list(zip(parts, of.linear_c, strict=True))
        self.ways = nn.ParameterList(
            scale[:, None] * (part @ each.weight.detach()) for part, each in pairs
        )
        shift = sum(part @ each.bias.detach() for part, each in pairs) - norm.running_mean
        self.shift = nn.Parameter(norm.bias.detach() + scale * shift)
        self.classify = spatial(of.classifier)

    def forward(self, stages: list[Tensor]) -> Tensor:
        total = self.shift[:, None, None]
        for x, way in zip(stages, self.ways, strict=True):
            total = total + self.larger(torch.einsum("bchw,oc->bohw", x, way), stages[0].shape[2:])
        return self.classify(total.relu())

    def larger(self, x: Tensor, size: torch.Size) -> Tensor:
        return F.interpolate(x, size, mode="bilinear", align_corners=False)


class FirstSegformer(nn.Module):
    def __init__(self, model: Segformer) -> None:
        super().__init__()
        self.s1, self.s2 = map(FirstStage, model.stages)
        self.head = SumHead(model.decode_head)

    def forward(self, image: Tensor) -> Tensor:
        first = self.s1(image)
        return self.head([first, self.s2(first)])


def segments(path, kind, **more):
    """Declare a fault of segmentation."""
    return fifth(segformer, path, kind, run=street, **more)


@segments("head", "layouts", port=FirstSegformer, regimes=BOTH)
def segformer_corners_aligned(module, root):
    def larger(self, larger, x, size):
        return F.interpolate(x, size, mode="bilinear", align_corners=True)

    change(module, larger=larger)


@segments("head", "norm layers", port=FirstSegformer)
def segformer_mean_not_folded(module, root):
    norm = segformer().decode_head.batch_norm
    scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
    module.shift.data += scale * norm.running_mean


@segments("s1.2.attn", "norm layers", port=FirstSegformer, regimes=BOTH)
def segformer_fewer_places_not_normed(module, root):
    change(module, fewer=lambda self, fewer, x: self.sr[0](x))


@segments("s1.3.attn.sr.0", "layouts", port=FirstSegformer)
def segformer_reduction_transposed(module, root):
    module.weight.data = module.weight.data.transpose(2, 3).contiguous()


@segments("s2.2.ffn", "activations", port=FirstSegformer)
def segformer_activation_before_the_convolution(module, root):
    change(module, mixed=lambda self, mixed, x: self.mix(F.gelu(x)))


@segments("s1.2.ffn.mix", "padding", port=FirstSegformer, regimes=BOTH)
def segformer_border_repeated(module, root):
    module.padding_mode = "replicate"
    module._reversed_padding_repeated_twice = [1, 1, 1, 1]


@segments("s2.1", "norm layers", port=FirstSegformer)
def segformer_variance_of_a_sample(module, root):
    change(module, correction=lambda self, correction: 1)


@segments("s2.3", "residuals", port=FirstSegformer)
def segformer_residual_of_the_normed(module, root):
    change(module, fed=lambda self, fed, x, h: h + self.ffn(h))


@segments("s2.2.attn", "heads", port=FirstSegformer)
def segformer_heads_of_the_first_stage(module, root):
    module.heads = 2


@segments("decode_head", "layouts", against=FirstSegformer)
def segformer_first_stage_first(module, root):
    change(module, joined=lambda self, joined, outs: torch.cat(outs, 1))


@segments("stages.0.block.1.mlp.dwconv", "weights", against=FirstSegformer)
def segformer_convolution_without_bias(module, root):
    module.bias.data.zero_()


harmless("segformer first", segformer, "same", "bf16", port=FirstSegformer, run=street)
harmless("segformer against first", segformer, "same", against=FirstSegformer, run=street)
