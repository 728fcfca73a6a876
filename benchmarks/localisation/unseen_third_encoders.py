"""Encoders: Sentence-BERT with pads, and wav2vec on waves.

The ports fuse projections, put channels last, and pool by products.
"""

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


# --- Sentences ------------------------------------------------------------------------------------


class BertLayer(nn.Module):
    """A norm after each part."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))
        self.attention_norm, self.output_norm = (nn.LayerNorm(dim, eps=1e-12) for _ in range(2))
        self.intermediate, self.dense = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5 + mask
        seen = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = self.attention_norm(self.output(seen) + x)
        return self.output_norm(self.dense(F.gelu(self.intermediate(x))) + x)


class Sbert(nn.Module):
    """Tokens, places and one type; the mean of what is kept, of length one."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(101, dim), nn.Embedding(20, dim)
        self.types, self.norm = nn.Embedding(2, dim), nn.LayerNorm(dim, eps=1e-12)
        self.layers = nn.ModuleList(BertLayer(dim, 4) for _ in range(2))

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        x = self.words(tokens) + self.types(torch.zeros_like(tokens)) + self.positions(places)
        x = self.norm(x)
        mask = (1.0 - keep[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        return F.normalize(self.pooled(x, keep), dim=-1)

    def pooled(self, x: Tensor, keep: Tensor) -> Tensor:
        weights = keep[..., None].expand(x.shape).to(x.dtype)
        return (x * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


def sbert(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Sbert(), 381, outliers)


class Pool(nn.Module):
    """The mean over what is kept, as a product."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        share = self.shares(keep).to(x.dtype)
        return torch.bmm(share[:, None], x)[:, 0]

    def shares(self, keep: Tensor) -> Tensor:
        return keep / keep.sum(1, keepdim=True)


class FusedBertLayer(nn.Module):
    def __init__(self, of: BertLayer) -> None:
        super().__init__()
        parts = (of.query, of.key, of.value)
        self.heads = of.heads
        self.wqkv = linear(
            *(each.weight for each in parts), bias=torch.cat([each.bias for each in parts]).detach()
        )
        self.wo, self.up, self.down = same(of.output), same(of.intermediate), same(of.dense)
        self.norm1, self.norm2 = norm_like(of.attention_norm), norm_like(of.output_norm)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.wqkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible(keep))
        x = self.norm1(x + self.wo(seen.transpose(1, 2).flatten(2)))
        return self.fed(x)

    def visible(self, keep: Tensor) -> Tensor:
        return keep[:, None, None, :]

    def fed(self, x: Tensor) -> Tensor:
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class FusedSbert(nn.Module):
    """The type is added to the places beforehand."""

    def __init__(self, model: Sbert) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.words.weight.detach().clone())
        self.wpe = nn.Parameter((model.positions.weight + model.types.weight[0]).detach())
        self.kind = model.types.weight[0].tolist()
        self.first = norm_like(model.norm)
        self.blocks = nn.ModuleList(FusedBertLayer(each) for each in model.layers)
        self.pool = Pool()

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x = self.first(self.wte(tokens) + self.wpe[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x, keep)
        x = self.pool(x, keep)
        return self.scaled(x)

    def scaled(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


def padded(build, path, kind, **more):
    """Declare a fault of a model that is handed pads."""
    return third(build, path, kind, run=drives.padded, **more)


@padded(sbert, "pool", "pooling", port=FusedSbert, regimes=BOTH)
def sbert_mean_with_pads(module, root):
    change(module, shares=lambda self, shares, keep: torch.full(keep.shape, 1 / keep.shape[1]))


@padded(sbert, "pool", "pooling", port=FusedSbert)
def sbert_divided_by_the_length(module, root):
    change(module, shares=lambda self, shares, keep: keep / keep.shape[1])


@padded(sbert, "blocks.1", "masks", port=FusedSbert, regimes=BOTH)
def sbert_pads_are_seen(module, root):
    change(module, visible=lambda self, visible, keep: torch.ones_like(visible(keep)))


@padded(sbert, "", "embedding", port=FusedSbert)
def sbert_type_forgotten(module, root):
    module.wpe.data -= torch.tensor(module.kind).to(module.wpe)


@padded(sbert, "blocks.0", "residuals", port=FusedSbert, regimes=BOTH)
def sbert_norm_before(module, root):
    change(module, fed=lambda self, fed, x: x + self.down(F.gelu(self.up(self.norm2(x)))))


@padded(sbert, "blocks.1.norm1", "norm layers", port=FusedSbert)
def sbert_norms_swapped(module, root):
    module.load_state_dict(root.blocks[1].norm2.state_dict())


@padded(sbert, "", "pooling", against=FusedSbert)
def sbert_pools_the_first(module, root):
    change(module, pooled=lambda self, pooled, x, keep: x[:, 0])


harmless("sbert fused", sbert, "same", "bf16", port=FusedSbert, run=drives.padded)
harmless("sbert against fused", sbert, "same", against=FusedSbert, run=drives.padded)


# --- Waves ----------------------------------------------------------------------------------------


def wave(dtype: torch.dtype) -> drives.Run:
    """One call on two waves."""
    generator = torch.Generator().manual_seed(31)
    return drives.Run((torch.randn(2, 230, generator=generator).to(dtype),))


class WavLayer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.layer_norm, self.final_layer_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer_norm(x + self.attention(x, x, x, need_weights=False)[0])
        return self.final_layer_norm(x + self.down(F.gelu(self.up(x))))


class Wav(nn.Module):
    """Strided convolutions, a norm by channel after the first; positions by a convolution."""

    def __init__(self, channels: int = 24, dim: int = 32) -> None:
        super().__init__()
        self.conv0 = nn.Conv1d(1, channels, 10, 5, bias=False)
        self.group_norm = nn.GroupNorm(channels, channels)
        self.conv1 = nn.Conv1d(channels, channels, 3, 2, bias=False)
        self.feature_norm, self.projection = nn.LayerNorm(channels), nn.Linear(channels, dim)
        self.pos_conv = nn.Conv1d(dim, dim, 8, padding=4, groups=4)
        self.encoder_norm = nn.LayerNorm(dim)
        self.layers = nn.ModuleList(WavLayer(dim, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.group_norm(self.conv0(x[:, None])))
        x = F.gelu(self.conv1(x)).transpose(1, 2)
        x = self.projection(self.feature_norm(x))
        x = self.encoder_norm(x + self.placed(self.pos_conv(x.transpose(1, 2))).transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return x

    def placed(self, x: Tensor) -> Tensor:
        return F.gelu(x[..., :-1])


def wav(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Wav(), 382, outliers)


class Unfolded(nn.Module):
    """A convolution by a product, channels last."""

    def __init__(self, of: nn.Conv1d) -> None:
        super().__init__()
        self.size, self.stride = of.kernel_size[0], of.stride[0]
        self.weight = nn.Parameter(of.weight.detach().flatten(1).T.clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(x).flatten(2) @ self.weight

    def cut(self, x: Tensor) -> Tensor:
        return x.unfold(1, self.size, self.stride)


class OverTime(nn.Module):
    """A norm of each channel over time, channels last."""

    def __init__(self, of: nn.GroupNorm) -> None:
        super().__init__()
        self.gain, self.shift = (nn.Parameter(e.detach().clone()) for e in (of.weight, of.bias))
        self.eps = of.eps

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, self.over(), correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.gain + self.shift

    def over(self) -> tuple[int, ...]:
        return (1,)


class Places(nn.Module):
    """Pads by itself, one less on the right."""

    def __init__(self, of: nn.Conv1d) -> None:
        super().__init__()
        self.groups = of.groups
        self.weight, self.bias = (nn.Parameter(e.detach().clone()) for e in (of.weight, of.bias))

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x.transpose(1, 2), self.margin())
        return F.gelu(F.conv1d(x, self.weight, self.bias, groups=self.groups)).transpose(1, 2)

    def margin(self) -> tuple[int, int]:
        return 4, 3


class OwnLayer(nn.Module):
    def __init__(self, of: WavLayer) -> None:
        super().__init__()
        a = of.attention
        self.qkv = linear(a.in_proj_weight, bias=a.in_proj_bias.detach())
        self.proj, self.fc1, self.fc2 = same(a.out_proj), same(of.up), same(of.down)
        self.ln1, self.ln2 = norm_like(of.layer_norm), norm_like(of.final_layer_norm)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).unbind(2)
        weights = torch.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k).softmax(-1)
        x = self.ln1(self.proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)) + x)
        return self.ln2(self.fc2(F.gelu(self.fc1(x))) + x)


class LastWav(nn.Module):
    """All with channels last."""

    def __init__(self, model: Wav) -> None:
        super().__init__()
        self.c0, self.gn, self.c1 = (
            Unfolded(model.conv0),
            OverTime(model.group_norm),
            Unfolded(model.conv1),
        )
        self.ln, self.proj = norm_like(model.feature_norm), same(model.projection)
        self.pos, self.norm = Places(model.pos_conv), norm_like(model.encoder_norm)
        self.h = nn.Sequential(*(OwnLayer(each) for each in model.layers))

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.c1(F.gelu(self.gn(self.c0(x[..., None])))))
        x = self.proj(self.ln(x))
        return self.h(self.norm(x + self.pos(x)))


@third(wav, "pos", "layouts", port=LastWav, run=wave, regimes=BOTH)
def wav_pads_on_the_other_side(module, root):
    change(module, margin=lambda self, margin: (3, 4))


@third(wav, "gn", "norm layers", port=LastWav, run=wave)
def wav_norm_over_all_channels(module, root):
    change(module, over=lambda self, over: (1, 2))


@third(wav, "c1", "layouts", port=LastWav, run=wave, regimes=BOTH)
def wav_taps_before_channels(module, root):
    change(module, cut=lambda self, cut, x: cut(x).transpose(2, 3))


@third(wav, "h.1.proj", "weights", port=LastWav, run=wave)
def wav_out_transposed(module, root):
    module.weight.data = module.weight.data.T.contiguous()


@third(wav, "", "layouts", against=LastWav, run=wave)
def wav_drops_the_first(module, root):
    change(module, placed=lambda self, placed, x: F.gelu(x[..., 1:]))


harmless("wav channels last", wav, "same", "bf16", port=LastWav, run=wave)
