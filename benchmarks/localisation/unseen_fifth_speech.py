"""Conformer: attention by distance between two halves of an MLP, and a gated convolution.

The port has halves, batch norms and the bias of queries in weights, and looks distances up where
the model shifts.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_fifth import BOTH, fifth, harmless
from localisation.unseen_fourth_pairs import same

DIM = 48


def spoken(dtype: torch.dtype) -> drives.Run:
    """One call on 50 frames of 20 bands."""
    generator = torch.Generator().manual_seed(2055)
    return drives.Run((torch.randn(2, 50, 20, generator=generator).add(0.2).to(dtype),))


class Subsampling(nn.Module):
    """A quarter of the frames; what the bands of all channels give is one vector."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 2), nn.Conv2d(8, 8, 3, 2)
        self.out = nn.Linear(8 * 4, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x[:, None]))))
        return self.out(x.transpose(1, 2).flatten(2))


class RelPositionalEncoding(nn.Module):
    """Scales what it is given; places go from the farthest ahead to the farthest behind."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(x.shape[1] - 1, -x.shape[1], -1.0)[:, None]
        rates = torch.exp(torch.arange(0, DIM, 2).float() * -(math.log(10000.0) / DIM))
        waves = torch.zeros(len(places), DIM)
        waves[:, 0::2], waves[:, 1::2] = torch.sin(places * rates), torch.cos(places * rates)
        return self.scaled(x), waves.to(x.dtype)

    def scaled(self, x: Tensor) -> Tensor:
        return x * math.sqrt(DIM)


class RelPositionAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (
            nn.Linear(DIM, DIM) for _ in range(4)
        )
        self.linear_pos = nn.Linear(DIM, DIM, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.zeros(4, 12)) for _ in range(2))

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        q = self.linear_q(x).unflatten(-1, (4, 12))
        k, v = (f(x).unflatten(-1, (4, 12)).transpose(1, 2) for f in (self.linear_k, self.linear_v))
        p = self.linear_pos(waves).unflatten(-1, (4, 12)).transpose(0, 1)
        content = (q + self.pos_bias_u).transpose(1, 2) @ k.transpose(-2, -1)
        places = self.rel_shift((q + self.pos_bias_v).transpose(1, 2) @ p.transpose(-2, -1))
        weights = ((content + places) / math.sqrt(12)).softmax(-1)
        return self.linear_out((weights @ v).transpose(1, 2).flatten(2))

    def rel_shift(self, x: Tensor) -> Tensor:
        b, h, t, n = x.shape
        x = torch.cat((x.new_zeros(b, h, t, 1), x), -1).view(b, h, n + 1, t)
        return x[:, :, 1:].view(b, h, t, n)[..., : n // 2 + 1]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(DIM, 96), nn.Linear(96, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(F.silu(self.linear1(x)))


class ConvolutionModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pointwise_conv1 = nn.Conv1d(DIM, 2 * DIM, 1)
        self.depthwise_conv = nn.Conv1d(DIM, DIM, 7, padding=3, groups=DIM)
        self.norm = nn.BatchNorm1d(DIM)
        self.pointwise_conv2 = nn.Conv1d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.glu(self.pointwise_conv1(x.transpose(1, 2)), dim=1)
        x = F.silu(self.norm(self.depthwise_conv(x)))
        return self.pointwise_conv2(x).transpose(1, 2)


class ConformerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.feed_forward_macaron, self.feed_forward = FeedForward(), FeedForward()
        self.self_attn, self.conv_module = RelPositionAttention(), ConvolutionModule()
        self.norm_ff_macaron, self.norm_mha, self.norm_conv, self.norm_ff, self.norm_final = (
            nn.LayerNorm(DIM) for _ in range(5)
        )

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        x = x + 0.5 * self.feed_forward_macaron(self.norm_ff_macaron(x))
        x = x + self.self_attn(self.norm_mha(x), waves)
        x = x + self.conv_module(self.norm_conv(x))
        return self.norm_final(x + 0.5 * self.feed_forward(self.norm_ff(x)))


class Conformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.pos_enc = Subsampling(), RelPositionalEncoding()
        self.encoders = nn.ModuleList(ConformerLayer() for _ in range(2))
        self.ctc_lo = nn.Linear(DIM, 30)

    def forward(self, frames: Tensor) -> Tensor:
        x, waves = self.pos_enc(self.embed(frames))
        for layer in self.encoders:
            x = layer(x, waves)
        return self.ctc_lo(x).log_softmax(-1)


def conformer(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(Conformer(), 508, outliers)
    for module in model.modules():
        if isinstance(module, RelPositionAttention):
            module.pos_bias_u.data *= 2
            module.pos_bias_v.data *= 2
    model.embed.out.weight.data *= 0.3
    return model


class Quarter(nn.Module):
    """Bands go before channels, and the scale is in the last product."""

    def __init__(self, of: Subsampling) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3, 2), nn.Conv2d(8, 8, 3, 2)
        self.conv1.load_state_dict(of.conv1.state_dict())
        self.conv2.load_state_dict(of.conv2.state_dict())
        weight = of.out.weight.detach().unflatten(1, (8, 4)).transpose(1, 2).flatten(1)
        self.proj = linear(weight * DIM**0.5, bias=of.out.bias.detach() * DIM**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv2(self.conv1(x.unsqueeze(1)).relu()).relu()
        return self.proj(self.flat(x))

    def flat(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(2)


class Distances(nn.Module):
    """A bias for each pair of places."""

    def __init__(self, of: RelPositionAttention) -> None:
        super().__init__()
        self.proj = linear(of.linear_pos.weight)
        self.v = nn.Parameter(of.pos_bias_v.detach().clone())
        self.base = 10000.0

    def forward(self, q: Tensor) -> Tensor:
        t = q.shape[1]
        angles = torch.arange(-t + 1.0, t)[:, None] * self.base ** -(torch.arange(24) / 24)
        waves = torch.stack((angles.sin(), angles.cos()), -1).flatten(1).to(q.dtype)
        scores = torch.einsum("bihd,nhd->bhin", q + self.v, self.proj(waves).unflatten(-1, (4, 12)))
        return scores.gather(-1, self.numbers(t).expand(*scores.shape[:3], t))

    def numbers(self, t: int) -> Tensor:
        return torch.arange(t)[:, None] - torch.arange(t) + t - 1


class BiasAttention(nn.Module):
    """The bias of contents is in that of queries; distances take it away again."""

    def __init__(self, of: RelPositionAttention) -> None:
        super().__init__()
        self.qkv = same(of.linear_q, of.linear_k, of.linear_v)
        self.qkv.bias.data[:DIM] += of.pos_bias_u.detach().flatten()
        self.distances, self.out = Distances(of), same(of.linear_out)
        self.distances.v.data -= of.pos_bias_u.detach()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 12)).unbind(2)
        bias = self.weighed(self.distances(q))
        seen = F.scaled_dot_product_attention(*(e.transpose(1, 2) for e in (q, k, v)), bias)
        return self.out(seen.transpose(1, 2).flatten(2))

    def weighed(self, scores: Tensor) -> Tensor:
        return scores * 12**-0.5


class GatedConv(nn.Module):
    """Products for points, the batch norm in the taps."""

    def __init__(self, of: ConvolutionModule) -> None:
        super().__init__()
        first, norm, last = of.pointwise_conv1, of.norm, of.pointwise_conv2
        self.pw1 = linear(first.weight.detach()[..., 0], bias=first.bias.detach())
        self.pw2 = linear(last.weight.detach()[..., 0], bias=last.bias.detach())
        scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
        self.dw = nn.Conv1d(DIM, DIM, 7, groups=DIM)
        self.dw.weight.data = of.depthwise_conv.weight.detach() * scale[:, None, None]
        bias = of.depthwise_conv.bias.detach() - norm.running_mean
        self.dw.bias.data = bias * scale + norm.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        x = self.gated(*self.pw1(x).chunk(2, -1))
        x = self.dw(F.pad(x.mT, self.sides()))
        return self.pw2(self.act(x).mT)

    def gated(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b.sigmoid()

    def sides(self) -> tuple[int, int]:
        return 3, 3

    def act(self, x: Tensor) -> Tensor:
        return F.silu(x)


def halved(of: FeedForward) -> nn.Sequential:
    """Return an MLP that gives half of what it gave."""
    out = linear(of.linear2.weight.detach() / 2, bias=of.linear2.bias.detach() / 2)
    return nn.Sequential(same(of.linear1), nn.SiLU(), out)


class MacaronBlock(nn.Module):
    def __init__(self, of: ConformerLayer) -> None:
        super().__init__()
        self.ff1, self.ff2 = halved(of.feed_forward_macaron), halved(of.feed_forward)
        self.mha, self.conv = BiasAttention(of.self_attn), GatedConv(of.conv_module)
        self.ln1, self.ln2, self.ln3, self.ln4, self.ln5 = map(
            norm_like, (of.norm_ff_macaron, of.norm_mha, of.norm_conv, of.norm_ff, of.norm_final)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ff1(self.ln1(x))
        x = self.mixed(x)
        return self.ln5(x + self.ff2(self.ln4(x)))

    def mixed(self, x: Tensor) -> Tensor:
        x = x + self.mha(self.ln2(x))
        return x + self.conv(self.ln3(x))


class FoldedConformer(nn.Sequential):
    def __init__(self, model: Conformer) -> None:
        super().__init__()
        self.front = Quarter(model.embed)
        self.layers = nn.Sequential(*map(MacaronBlock, model.encoders))
        self.ctc, self.probabilities = same(model.ctc_lo), nn.LogSoftmax(-1)


def heard(path, kind, **more):
    """Declare a fault of the conformer."""
    return fifth(conformer, path, kind, run=spoken, **more)


@heard("front", "layouts", port=FoldedConformer)
def conformer_channels_before_bands(module, root):
    change(module, flat=lambda self, flat, x: x.transpose(1, 2).flatten(2))


@heard("front.proj", "scale", port=FoldedConformer, regimes=BOTH)
def conformer_input_not_scaled(module, root):
    module.weight.data /= DIM**0.5
    module.bias.data /= DIM**0.5


@heard("layers.0.mha.distances", "positions", port=FoldedConformer, regimes=BOTH)
def conformer_distances_the_other_way(module, root):
    change(module, numbers=lambda self, numbers, t: numbers(t).T)


@heard("layers.1.mha", "scale", port=FoldedConformer)
def conformer_distances_not_scaled(module, root):
    change(module, weighed=lambda self, weighed, scores: scores)


@heard("layers.0.ff2.2", "scale", port=FoldedConformer)
def conformer_second_half_is_whole(module, root):
    module.weight.data *= 2
    module.bias.data *= 2


@heard("layers.0.conv", "activations", port=FoldedConformer, regimes=BOTH)
def conformer_gate_is_the_first_half(module, root):
    change(module, gated=lambda self, gated, a, b: gated(b, a))


@heard("layers.1.conv", "padding", port=FoldedConformer)
def conformer_convolution_is_causal(module, root):
    change(module, sides=lambda self, sides: (6, 0))


@heard("layers.1.conv.dw", "norm layers", port=FoldedConformer)
def conformer_mean_folded_without_scale(module, root):
    norm = conformer().encoders[1].conv_module.norm
    scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
    module.bias.data += norm.running_mean * (scale - 1)


@heard("layers.1", "residuals", port=FoldedConformer)
def conformer_convolution_before_attention(module, root):
    def mixed(self, mixed, x):
        x = x + self.conv(self.ln3(x))
        return x + self.mha(self.ln2(x))

    change(module, mixed=mixed)


@heard("encoders.0.self_attn", "positions", against=FoldedConformer)
def conformer_not_shifted(module, root):
    change(module, rel_shift=lambda self, rel_shift, x: x[..., : x.shape[-1] // 2 + 1])


@heard("encoders.1.conv_module.norm", "norm layers", against=FoldedConformer)
def conformer_epsilon_of_batch_norm(module, root):
    module.eps = 1e-3


harmless("conformer folded", conformer, "same", "bf16", port=FoldedConformer, run=spoken)
harmless("conformer against folded", conformer, "same", against=FoldedConformer, run=spoken)
