"""Pictures: a U with skips and a condition, and capsules that agree.

The ports keep channels last, fold norms, and route by products of all capsules at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear
from localisation.drives import Run
from localisation.planting import change
from localisation.unseen_again import BOTH, again, harmless

# --- A U with skips -------------------------------------------------------------------------------


def conditioned(dtype: torch.dtype) -> Run:
    """Images and a condition for each."""
    generator = torch.Generator().manual_seed(77)
    return Run((drives.image(dtype=dtype), torch.randn(2, 12, generator=generator).to(dtype)))


class FilmBlock(nn.Module):
    """Two convolutions; the second's norm is scaled and shifted by the condition."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, after)
        self.film = nn.Linear(12, 2 * after)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        scale, shift = self.film(c)[..., None, None].chunk(2, 1)
        return F.silu(self.norm2(self.conv2(x)) * (1 + scale) + shift)


class UNet(nn.Module):
    """Down twice, up twice, with skips."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = FilmBlock(3, 8), FilmBlock(8, 16), FilmBlock(16, 24)
        self.up2_conv = nn.ConvTranspose2d(24, 16, 2, 2)
        self.up1_conv = nn.ConvTranspose2d(16, 8, 2, 2)
        self.up2, self.up1 = FilmBlock(32, 16), FilmBlock(16, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        first = self.down1(x, c)
        second = self.down2(F.max_pool2d(first, 2), c)
        x = self.middle(F.max_pool2d(second, 2), c)
        x = self.up2(torch.cat([second, self.up2_conv(x)], 1), c)
        x = self.up1(self.joined(first, self.up1_conv(x)), c)
        return self.out(x)

    def joined(self, skip: Tensor, x: Tensor) -> Tensor:
        return torch.cat([skip, x], 1)


def unet(*, outliers: bool = False) -> nn.Module:
    return models.weigh(UNet(), 241, outliers)


class LastBlock(nn.Module):
    """Channels last; the first norm is in its convolution, the conditions come from outside."""

    def __init__(self, of: FilmBlock) -> None:
        super().__init__()
        scale = of.norm1.weight.detach() / torch.sqrt(of.norm1.running_var + of.norm1.eps)
        self.a = nn.Conv2d(of.conv1.in_channels, of.conv1.out_channels, 3, padding=1)
        self.a.weight.data = of.conv1.weight.detach() * scale[:, None, None, None]
        shift = (of.conv1.bias.detach() - of.norm1.running_mean) * scale
        self.a.bias.data = shift + of.norm1.bias.detach()
        self.b = nn.Conv2d(of.conv2.in_channels, of.conv2.out_channels, 3, padding=1)
        self.b.load_state_dict(of.conv2.state_dict())
        self.gain = nn.Parameter(of.norm2.weight.detach().clone())
        self.bias = nn.Parameter(of.norm2.bias.detach().clone())

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        x = self.b(F.relu(self.a(x.permute(0, 3, 1, 2)))).permute(0, 2, 3, 1)
        return F.silu(torch.addcmul(shift, self.normed(x), scale + 1))

    def normed(self, x: Tensor) -> Tensor:
        groups = x.unflatten(-1, (4, -1))
        wide = groups - groups.mean((1, 2, 4), keepdim=True)
        wide = wide / torch.sqrt(wide.square().mean((1, 2, 4), keepdim=True) + 1e-5)
        return wide.flatten(-2) * self.gain + self.bias


class LastUNet(nn.Module):
    """The same with channels last; all conditions from one product, up by products."""

    def __init__(self, model: UNet) -> None:
        super().__init__()
        blocks = [model.down1, model.down2, model.middle, model.up2, model.up1]
        self.stages = nn.ModuleList(LastBlock(each) for each in blocks)
        self.films = linear(
            *(each.film.weight for each in blocks),
            bias=torch.cat([each.film.bias.detach() for each in blocks]),
        )
        self.sizes = [each.film.out_features // 2 for each in blocks for _ in range(2)]
        self.ups = nn.ModuleList(self.raised(each) for each in (model.up2_conv, model.up1_conv))
        self.to_rgb = linear(model.out.weight.flatten(1), bias=model.out.bias.detach())

    def raised(self, of: nn.ConvTranspose2d) -> nn.Linear:
        weight = of.weight.detach().permute(2, 3, 1, 0).flatten(0, 2)
        return linear(weight, bias=of.bias.detach().repeat(4))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        film = [each[:, None, None] for each in self.films(c).split(self.sizes, -1)]
        x = x.permute(0, 2, 3, 1)
        one = self.stages[0](x, *film[:2])
        two = self.stages[1](self.pooled(one), *film[2:4])
        x = self.stages[2](self.pooled(two), *film[4:6])
        x = self.stages[3](torch.cat([two, self.spread(self.ups[0](x))], -1), *film[6:8])
        x = self.stages[4](torch.cat([one, self.spread(self.ups[1](x))], -1), *film[8:])
        return self.to_rgb(x).permute(0, 3, 1, 2)

    def pooled(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).amax((2, 4))

    def spread(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (2, 2, -1)).permute(0, 1, 3, 2, 4, 5)
        return x.flatten(1, 2).flatten(2, 3)


last = {"port": LastUNet, "run": conditioned}


@again(unet, "stages.3", "norm layers", regimes=BOTH, **last)
def unet_groups_of_three(module, root):
    def normed(self, normed, x):
        return F.layer_norm(x, x.shape[-1:], self.gain, self.bias)

    change(module, normed=normed)


@again(unet, "stages.1.a", "norm layers", **last)
def unet_fold_without_mean(module, root):
    module.bias.data = module.bias.data.flip(0)


@again(unet, "films", "weights", regimes=BOTH, **last)
def unet_scale_and_shift_of_the_middle(module, root):
    rows = slice(48, 96)
    module.weight.data[rows] = module.weight.data[rows].roll(24, 0)
    module.bias.data[rows] = module.bias.data[rows].roll(24, 0)


@again(unet, "", "structure", regimes=BOTH, **last)
def unet_spread_turned(module, root):
    def spread(self, spread, x):
        x = x.unflatten(-1, (2, 2, -1)).permute(0, 1, 4, 2, 3, 5)
        return x.flatten(1, 2).flatten(2, 3)

    change(module, spread=spread)


@again(unet, "stages.2", "scale", **last)
def unet_scale_without_one(module, root):
    def forward(self, forward, x, scale, shift):
        return forward(x, scale - 1, shift)

    change(module, forward=forward)


@again(unet, "stages.4.b", "conv layers", **last)
def unet_padding_of_the_edge(module, root):
    change(
        module,
        forward=lambda self, forward, x: F.conv2d(
            F.pad(x, (1, 1, 1, 1), "replicate"), self.weight, self.bias
        ),
    )


@again(unet, "", "structure", against=LastUNet, run=conditioned, regimes=BOTH)
def unet_skip_second(module, root):
    change(module, joined=lambda self, joined, skip, x: torch.cat([x, skip], 1))


@again(unet, "down2.norm1", "norm layers", against=LastUNet, run=conditioned)
def unet_variance_of_the_batch(module, root):
    module.running_var *= 1.2


harmless("unet last", unet, "same", "reordered", "bf16", port=LastUNet, run=conditioned)
harmless("unet against last", unet, against=LastUNet, run=conditioned)


# --- Capsules -------------------------------------------------------------------------------------


def squashed(x: Tensor) -> Tensor:
    size = x.square().sum(-1, keepdim=True)
    return x * size / (1 + size) / torch.sqrt(size + 1e-8)


class Digits(nn.Module):
    """Capsules that agree in three rounds."""

    def __init__(self, capsules: int, into: int, digits: int, out: int) -> None:
        super().__init__()
        self.W = nn.Parameter(torch.empty(digits, capsules, out, into))

    def forward(self, u: Tensor) -> Tensor:
        votes = (self.W * 6 @ u[:, None, :, :, None])[..., 0]
        logits = torch.zeros(votes.shape[:3], dtype=votes.dtype)
        for _ in range(3):
            share = self.shared(logits)[..., None]
            v = squashed((share * votes).sum(2))
            logits = logits + (votes * v[:, :, None]).sum(-1)
        return v

    def shared(self, logits: Tensor) -> Tensor:
        return logits.softmax(1)


class CapsNet(nn.Module):
    """A convolution, capsules, digits, their lengths, and a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 5, 2)
        self.primary = nn.Conv2d(24, 32, 3, 2)
        self.digits = Digits(4 * 4, 8, 5, 6)
        self.decoder = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 48))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.primary(F.relu(self.conv(image)))
        u = squashed(self.capsules(x))
        v = self.digits(u)
        return v.norm(dim=-1), self.decoder(v.flatten(1))

    def capsules(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (4, 8)).flatten(3).transpose(2, 3).flatten(1, 2)


def capsnet(*, outliers: bool = False) -> nn.Module:
    return models.weigh(CapsNet(), 242, outliers)


class EinsumCaps(nn.Module):
    """The same in one module, by einsum."""

    def __init__(self, model: CapsNet) -> None:
        super().__init__()
        self.stem, self.caps = nn.Conv2d(3, 24, 5, 2), nn.Conv2d(24, 32, 3, 2)
        self.stem.load_state_dict(model.conv.state_dict())
        self.caps.load_state_dict(model.primary.state_dict())
        self.votes = nn.Parameter(6 * model.digits.W.detach().permute(1, 3, 0, 2).contiguous())
        self.d1 = linear(model.decoder[0].weight, bias=model.decoder[0].bias.detach())
        self.d2 = linear(model.decoder[2].weight, bias=model.decoder[2].bias.detach())
        self.rounds = 3

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.caps(self.stem(image).relu())
        batch = x.shape[0]
        u = self.small(x.view(batch, 4, 8, -1).permute(0, 1, 3, 2).reshape(batch, -1, 8))
        hat = torch.einsum("bni,nido->bndo", u, self.votes)
        agree = hat.new_zeros(batch, hat.shape[1], hat.shape[2])
        for n in range(self.rounds):
            v = self.small(torch.einsum("bnd,bndo->bdo", F.softmax(agree, 2), hat))
            if n + 1 < self.rounds:
                agree = agree + torch.einsum("bndo,bdo->bnd", hat, v)
        return self.length(v), self.d2(torch.relu(self.d1(v.reshape(batch, -1))))

    def small(self, x: Tensor) -> Tensor:
        size = x.pow(2).sum(-1, keepdim=True)
        return (size / (1 + size)) * (x * torch.rsqrt(size + 1e-8))

    def length(self, v: Tensor) -> Tensor:
        return v.pow(2).sum(-1).sqrt()


@again(capsnet, "", "routing", port=EinsumCaps, run=drives.picture, regimes=BOTH)
def capsnet_two_rounds(module, root):
    module.rounds = 2


@again(capsnet, "caps", "weights", port=EinsumCaps, run=drives.picture)
def capsnet_channels_rolled(module, root):
    module.weight.data[:8] = module.weight.data[:8].roll(1, 0)


@again(capsnet, "", "activations", port=EinsumCaps, run=drives.picture)
def capsnet_length_squared(module, root):
    change(module, length=lambda self, length, v: v.pow(2).sum(-1))


@again(capsnet, "digits", "routing", against=EinsumCaps, run=drives.picture, regimes=BOTH)
def capsnet_shared_over_capsules(module, root):
    change(module, shared=lambda self, shared, logits: logits.softmax(2))


harmless("capsnet by einsum", capsnet, port=EinsumCaps, run=drives.picture)
harmless("capsnet against einsum", capsnet, against=EinsumCaps, run=drives.picture)
