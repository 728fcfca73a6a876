"""What makes pictures and sound: the decoder of a latent VAE, and HiFi-GAN; ports of each.

The first port attends over pixels as over tokens and has the scale of latents in a weight; the
second knows no weight norm, and convolves by products of what it has unfolded.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_fourth import BOTH, fourth, harmless


def pixels(of: nn.Conv2d) -> nn.Linear:
    """Return the linear layer that does the same at each pixel."""
    return linear(of.weight.detach().flatten(1), bias=of.bias.detach())


# --- Latents to pictures --------------------------------------------------------------------------


def latents(dtype: torch.dtype) -> drives.Run:
    """One call on latents."""
    generator = torch.Generator().manual_seed(461)
    return drives.Run((torch.randn(2, 4, 6, 6, generator=generator).mul(0.18).to(dtype),))


def groups(dim: int) -> nn.GroupNorm:
    return nn.GroupNorm(8, dim, eps=1e-6)


class ResnetBlock(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = groups(into), nn.Conv2d(into, out, 3, padding=1)
        self.norm2, self.conv2 = groups(out), nn.Conv2d(out, out, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return self.conv_shortcut(x) + self.conv2(self.second(h))

    def second(self, h: Tensor) -> Tensor:
        return F.silu(self.norm2(h))


class PixelAttention(nn.Module):
    """One head over all pixels, by convolutions."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = groups(dim)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(dim, dim, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        y = self.norm(x)
        q, k, v = (f(y).reshape(b, c, h * w) for f in (self.q, self.k, self.v))
        weights = (torch.bmm(q.transpose(1, 2), k) * c**-0.5).softmax(2)
        return x + self.proj_out(self.laid(torch.bmm(v, weights.transpose(1, 2)), h, w))

    def laid(self, x: Tensor, high: int, wide: int) -> Tensor:
        return x.unflatten(2, (high, wide))


class Upsampler(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class VaeDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scaling_factor, self.post_quant_conv = 0.18215, nn.Conv2d(4, 4, 1)
        self.conv_in = nn.Conv2d(4, 32, 3, padding=1)
        self.mid = nn.Sequential(ResnetBlock(32, 32), PixelAttention(32), ResnetBlock(32, 32))
        self.up1 = nn.Sequential(ResnetBlock(32, 32), Upsampler(32))
        self.up2 = nn.Sequential(ResnetBlock(32, 16), ResnetBlock(16, 16))
        self.norm_out, self.conv_out = groups(16), nn.Conv2d(16, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(self.post_quant_conv(z / self.scaling_factor))
        x = self.up2(self.up1(self.mid(x)))
        return self.conv_out(F.silu(self.norm_out(x)))


def vae(*, outliers: bool = False) -> nn.Module:
    return models.weigh(VaeDecoder(), 461, outliers)


class HandNorm(nn.Module):
    """Norms groups by hand, with a gain and a shift."""

    def __init__(self, of: nn.GroupNorm) -> None:
        super().__init__()
        self.groups, self.eps = of.num_groups, of.eps
        self.gain, self.shift = (nn.Parameter(e.detach().clone()) for e in (of.weight, of.bias))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.parted(x.flatten(2)).float()
        variance, mean = torch.var_mean(parts, (2, 3), correction=0, keepdim=True)
        parts = (parts - mean) / (variance + self.eps).sqrt()
        x = self.joined(parts).view_as(x).to(x.dtype)
        return x * self.gain[:, None, None] + self.shift[:, None, None]

    def parted(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (self.groups, -1))

    def joined(self, x: Tensor) -> Tensor:
        return x.flatten(1, 2)


def conv(of: nn.Conv2d) -> nn.Conv2d:
    """Return a copy."""
    out = nn.Conv2d(of.in_channels, of.out_channels, of.kernel_size, padding=of.padding)
    out.load_state_dict(of.state_dict())
    return out


class Res(nn.Module):
    def __init__(self, of: ResnetBlock) -> None:
        super().__init__()
        self.body = nn.Sequential(
            HandNorm(of.norm1), nn.SiLU(), conv(of.conv1), HandNorm(of.norm2), nn.SiLU(),
            conv(of.conv2),
        )  # fmt: skip
        self.skip = conv(of.conv_shortcut) if hasattr(of.conv_shortcut, "weight") else None

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.kept(x)

    def kept(self, x: Tensor) -> Tensor:
        return x if self.skip is None else self.skip(x)


class TokenAttention(nn.Module):
    def __init__(self, of: PixelAttention) -> None:
        super().__init__()
        self.gn, self.scale = HandNorm(of.norm), 32**-0.5
        self.to_q, self.to_k, self.to_v, self.to_out = map(pixels, (of.q, of.k, of.v, of.proj_out))

    def forward(self, x: Tensor) -> Tensor:
        h = self.gn(x).flatten(2).mT
        q, k, v = self.to_q(h), self.to_k(h), self.to_v(h)
        seen = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return x + self.to_out(seen).mT.reshape(x.shape)


class Larger(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(2, 2).repeat_interleave(2, 3)


class TokenVae(nn.Module):
    def __init__(self, model: VaeDecoder) -> None:
        super().__init__()
        self.quant, self.into = conv(model.post_quant_conv), conv(model.conv_in)
        self.quant.weight.data /= model.scaling_factor
        first, attention, last = model.mid
        self.mid = nn.Sequential(Res(first), TokenAttention(attention), Res(last))
        self.up = nn.Sequential(
            Res(model.up1[0]), Larger(), conv(model.up1[1].conv), *map(Res, model.up2)
        )
        self.gn, self.out = HandNorm(model.norm_out), conv(model.conv_out)

    def forward(self, z: Tensor) -> Tensor:
        return self.out(self.act(self.gn(self.up(self.mid(self.into(self.quant(z)))))))

    def act(self, x: Tensor) -> Tensor:
        return x * x.sigmoid()


def decoded(path, kind, **more):
    """Declare a fault of the decoder of latents."""
    return fourth(vae, path, kind, run=latents, **more)


@decoded("quant", "scale", port=TokenVae, regimes=BOTH)
def vae_latents_not_scaled(module, root):
    module.weight.data *= 0.18215


@decoded("up.0.body.3", "norm layers", port=TokenVae, regimes=BOTH)
def vae_groups_of_every_eighth_channel(module, root):
    change(
        module,
        parted=lambda self, parted, x: x.unflatten(1, (-1, self.groups)).transpose(1, 2),
        joined=lambda self, joined, x: joined(x.transpose(1, 2)),
    )


@decoded("up.1", "layouts", port=TokenVae)
def vae_enlarged_by_tiles(module, root):
    change(module, forward=lambda self, forward, x: x.repeat(1, 1, 2, 2))


@decoded("up.3", "residuals", port=TokenVae)
def vae_shortcut_of_the_normed(module, root):
    change(module, kept=lambda self, kept, x: kept(self.body[0](x)))


@decoded("mid.0.body.0", "norm layers", port=TokenVae)
def vae_epsilon_of_torch(module, root):
    module.eps = 1e-5


@decoded("", "activations", port=TokenVae)
def vae_last_activation_forgotten(module, root):
    change(module, act=lambda self, act, x: x)


@decoded("mid.1", "layouts", against=TokenVae, regimes=BOTH)
def vae_rows_and_columns_swapped(module, root):
    change(module, laid=lambda self, laid, x, high, wide: laid(x, wide, high).mT)


@decoded("up2.1", "norm layers", against=TokenVae)
def vae_norm_after_the_activation(module, root):
    change(module, second=lambda self, second, h: self.norm2(F.silu(h)))


harmless("vae of tokens", vae, "same", "bf16", port=TokenVae, run=latents)
harmless("vae against tokens", vae, "same", against=TokenVae, run=latents)


# --- Spectra to sound -----------------------------------------------------------------------------


def spectra(dtype: torch.dtype) -> drives.Run:
    """One call on spectra."""
    generator = torch.Generator().manual_seed(462)
    return drives.Run((torch.randn(2, 12, 10, generator=generator).to(dtype),))


class WeightNormed(nn.Module):
    """Directions of rows, and how long they are; `of` is the layer that takes the product."""

    def __init__(self, of: nn.Conv1d | nn.ConvTranspose1d) -> None:
        super().__init__()
        self.weight_v, self.bias = nn.Parameter(of.weight.detach()), nn.Parameter(of.bias.detach())
        self.weight_g = nn.Parameter(torch.ones(len(of.weight)))
        self.transposed = isinstance(of, nn.ConvTranspose1d)
        self.stride, self.padding, self.dilation = of.stride[0], of.padding[0], of.dilation[0]

    def weight(self) -> Tensor:
        long = self.weight_v.flatten(1).norm(dim=1)[:, None, None]
        return self.weight_v * (self.weight_g[:, None, None] / long)

    def forward(self, x: Tensor) -> Tensor:
        if self.transposed:
            return F.conv_transpose1d(x, self.weight(), self.bias, self.stride, self.padding)
        return F.conv1d(x, self.weight(), self.bias, 1, self.padding, self.dilation)


class SoundRes(nn.Module):
    """Two pairs of convolutions, the first of each with holes."""

    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(
            WeightNormed(nn.Conv1d(dim, dim, size, padding=d * (size - 1) // 2, dilation=d))
            for d in (1, 3)
        )
        self.convs2 = nn.ModuleList(
            WeightNormed(nn.Conv1d(dim, dim, size, padding=(size - 1) // 2)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.convs1, self.convs2, strict=True):
            x = x + second(F.leaky_relu(first(F.leaky_relu(x, self.slope())), self.slope()))
        return x

    def slope(self) -> float:
        return 0.1


class HifiGan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv_pre = WeightNormed(nn.Conv1d(12, 24, 7, padding=3))
        self.ups = nn.ModuleList(
            WeightNormed(nn.ConvTranspose1d(into, into // 2, 4, 2, 1)) for into in (24, 12)
        )
        self.resblocks = nn.ModuleList(SoundRes(dim, size) for dim in (12, 6) for size in (3, 5))
        self.conv_post = WeightNormed(nn.Conv1d(6, 1, 7, padding=3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_pre(x)
        for n, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))
            x = self.averaged([each(x) for each in self.resblocks[2 * n : 2 * n + 2]])
        return torch.tanh(self.conv_post(F.leaky_relu(x)))

    def averaged(self, parts: list[Tensor]) -> Tensor:
        return sum(parts[1:], parts[0]) / len(parts)


def hifigan(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(HifiGan(), 462, outliers)
    for module in model.modules():
        if isinstance(module, WeightNormed):
            module.weight_g.data = module.weight_g.data + 1.1
    return model


class Windows(nn.Module):
    """Convolves by one product with all windows; a transposed one is a plain one with holes."""

    def __init__(self, of: WeightNormed) -> None:
        super().__init__()
        weight = of.weight().detach()
        self.step = of.stride if of.transposed else 1
        self.size, self.dilation = weight.shape[2], of.dilation
        self.margin = self.size - 1 - of.padding if of.transposed else of.padding
        if of.transposed:
            weight = weight.flip(2).transpose(0, 1)
        self.matrix = nn.Parameter(weight.flatten(1).T.clone())
        self.bias = nn.Parameter(of.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.step > 1:
            x = torch.stack((x, *[torch.zeros_like(x)] * (self.step - 1)), -1).flatten(2)
            x = x[..., : x.shape[-1] - self.step + 1]
        x = F.pad(x, (self.margin, self.margin)).unfold(2, self.reach(), 1)[..., :: self.dilation]
        return (x.transpose(1, 2).flatten(2) @ self.matrix + self.bias).mT

    def reach(self) -> int:
        return self.dilation * (self.size - 1) + 1


class PlainRes(nn.Module):
    def __init__(self, of: SoundRes) -> None:
        super().__init__()
        pairs = zip(of.convs1, of.convs2, strict=True)
        self.pairs = nn.ModuleList(nn.ModuleList(map(Windows, each)) for each in pairs)
        self.slope = 0.1

    def forward(self, x: Tensor) -> Tensor:
        for holes, plain in self.pairs:
            x = plain(self.bent(holes(self.bent(x)))) + x
        return x

    def bent(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, x * self.slope)


class Stage(nn.Module):
    """A longer signal, and the mean of what two blocks make of it."""

    def __init__(self, up: WeightNormed, *blocks: SoundRes) -> None:
        super().__init__()
        self.up, self.blocks = Windows(up), nn.ModuleList(map(PlainRes, blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(F.leaky_relu(x, 0.1))
        return self.mean(torch.stack([block(x) for block in self.blocks]))

    def mean(self, x: Tensor) -> Tensor:
        return x.mean(0)


class PlainGan(nn.Module):
    def __init__(self, model: HifiGan) -> None:
        super().__init__()
        self.pre, self.post = Windows(model.conv_pre), Windows(model.conv_post)
        self.stages = nn.Sequential(
            Stage(model.ups[0], *model.resblocks[:2]), Stage(model.ups[1], *model.resblocks[2:])
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.post(self.bent(self.stages(self.pre(x)))).tanh()

    def bent(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, 0.01)


def spoken(path, kind, **more):
    """Declare a fault of what makes sound."""
    return fourth(hifigan, path, kind, run=spectra, **more)


@spoken("stages.0.up", "weights", port=PlainGan)
def hifigan_kernel_not_turned(module, root):
    module.matrix.data = module.matrix.data.unflatten(0, (-1, 4)).flip(1).flatten(0, 1)


@spoken("stages.1.blocks.0", "activations", port=PlainGan, regimes=BOTH)
def hifigan_slope_of_torch(module, root):
    module.slope = 0.01


@spoken("", "activations", port=PlainGan)
def hifigan_last_slope_as_the_others(module, root):
    change(module, bent=lambda self, bent, x: F.leaky_relu(x, 0.1))


@spoken("stages.0.blocks.1.pairs.1.0", "layouts", port=PlainGan)
def hifigan_without_holes(module, root):
    module.dilation, module.margin = 1, 2


@spoken("stages.1", "scale", port=PlainGan)
def hifigan_blocks_not_averaged(module, root):
    change(module, mean=lambda self, mean, x: x.sum(0))


@spoken("pre", "weights", port=PlainGan, regimes=BOTH)
def hifigan_directions_for_weights(module, root):
    module.matrix.data /= module.matrix.data.norm(dim=0)


@spoken("ups.1", "weights", against=PlainGan)
def hifigan_normed_by_the_other_side(module, root):
    def weight(self, weight):
        long = self.weight_v.norm(dim=(0, 2))[:, None]
        return self.weight_v * (self.weight_g[:, None, None] / long)

    change(module, weight=weight)


harmless("hifigan by windows", hifigan, "same", "bf16", port=PlainGan, run=spectra)
harmless("hifigan against windows", hifigan, "same", against=PlainGan, run=spectra)
