"""Networks for images: ViT with two tokens; ResNet and MBConv, norms folded into convolutions.

The first port cuts patches by hand; the others know no batch norm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_third import BOTH, harmless, third

# --- A class token, and one that distils ----------------------------------------------------------


class DeitBlock(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = ((q * (d // self.heads) ** -0.5) @ k.transpose(-2, -1)).softmax(-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class Deit(nn.Module):
    """Both heads are averaged."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls, self.places = (
            nn.Parameter(torch.empty(1, 2, dim)),
            nn.Parameter(torch.empty(1, 18, dim)),
        )
        self.blocks = nn.ModuleList(DeitBlock(dim, 4) for _ in range(3))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head, self.head_dist = nn.Linear(dim, 10), nn.Linear(dim, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), 1) + self.places
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return (self.head(x[:, 0]) + self.head_dist(x[:, 1])) / 2


def deit(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Deit(), 371, outliers)


class Encoder(nn.Module):
    """Attention of torch's functions, queries, keys and values apart."""

    def __init__(self, of: DeitBlock) -> None:
        super().__init__()
        weights, biases = of.qkv.weight.detach().chunk(3), of.qkv.bias.detach().chunk(3)
        self.heads = of.heads
        self.query, self.key, self.value = (
            linear(w, bias=b) for w, b in zip(weights, biases, strict=True)
        )
        self.output = linear(of.proj.weight, bias=of.proj.bias.detach())
        self.before, self.after = norm_like(of.norm1), norm_like(of.norm2)
        self.intermediate = linear(of.fc1.weight, bias=of.fc1.bias.detach())
        self.dense = linear(of.fc2.weight, bias=of.fc2.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q, k, v = (
            f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.output(seen) + x
        return self.dense(self.act(self.intermediate(self.after(x)))) + x

    def act(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.erf(x / 2**0.5))


class Patches(nn.Module):
    """Cuts patches and multiplies them."""

    def __init__(self, of: nn.Conv2d) -> None:
        super().__init__()
        self.size = of.kernel_size[0]
        self.project = linear(of.weight.detach().flatten(1), bias=of.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.cut(x))

    def cut(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.view(b, c, h // self.size, self.size, w // self.size, self.size)
        return x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class HandDeit(nn.Module):
    """Positions of the tokens are added to them beforehand; both heads are one."""

    def __init__(self, model: Deit) -> None:
        super().__init__()
        self.patches = Patches(model.patch_embed)
        places = model.places.detach()
        self.special = nn.Parameter(model.cls.detach() + places[:, :2])
        self.grid = nn.Parameter(places[:, 2:].clone())
        self.layer = nn.Sequential(*(Encoder(each) for each in model.blocks))
        self.layernorm = norm_like(model.norm)
        self.classifier = linear(
            torch.cat((model.head.weight, model.head_dist.weight), 1) / 2,
            bias=(model.head.bias + model.head_dist.bias).detach() / 2,
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image) + self.grid
        x = self.layer(torch.cat((self.special.expand(len(x), -1, -1), x), 1))
        return self.classifier(self.taken(self.layernorm(x)))

    def taken(self, x: Tensor) -> Tensor:
        return x[:, :2].flatten(1)


def picture(build, path, kind, **more):
    """Declare a fault of a network for images."""
    return third(build, path, kind, run=drives.picture, **more)


@picture(deit, "patches", "layouts", port=HandDeit, regimes=BOTH)
def deit_patches_with_channels_last(module, root):
    def cut(self, cut, x):
        return cut(x).unflatten(-1, (3, -1)).transpose(-1, -2).flatten(-2)

    change(module, cut=cut)


@picture(deit, "", "positions", port=HandDeit)
def deit_grid_by_columns(module, root):
    module.grid.data = module.grid.data.unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2)


@picture(deit, "", "pooling", port=HandDeit, regimes=BOTH)
def deit_mean_for_the_token(module, root):
    def taken(self, taken, x):
        return torch.cat((x[:, 0], x[:, 2:].mean(1)), 1)

    change(module, taken=taken)


@picture(deit, "layer.1.before", "norm layers", port=HandDeit)
def deit_epsilon_of_torch(module, root):
    module.eps = 1e-4


@picture(deit, "layer.2", "activations", port=HandDeit)
def deit_quick_gelu(module, root):
    change(module, act=lambda self, act, x: x * torch.sigmoid(1.702 * x))


@picture(deit, "layer.0.key", "weights", port=HandDeit)
def deit_key_without_bias_and_a_row(module, root):
    module.weight.data = module.weight.data.roll(12, 0)


@picture(deit, "classifier", "weights", port=HandDeit)
def deit_heads_not_averaged(module, root):
    module.bias.data *= 2


harmless("deit by hand", deit, "same", "bf16", port=HandDeit, run=drives.picture)
harmless("deit against hand", deit, "same", against=HandDeit, run=drives.picture)


# --- Norms that are folded ------------------------------------------------------------------------


def conv(into: int, out: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Return a convolution and its norm."""
    return nn.Sequential(
        nn.Conv2d(into, out, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out),
    )


class Bottleneck(nn.Module):
    def __init__(self, into: int, mid: int, stride: int) -> None:
        super().__init__()
        self.one, self.three, self.last = (
            conv(into, mid, 1),
            conv(mid, mid, 3, stride),
            conv(mid, 2 * mid, 1),
        )
        self.downsample = conv(into, 2 * mid, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        h = self.last(F.relu(self.three(F.relu(self.one(x)))))
        return F.relu(h + self.downsample(x))


class MBConv(nn.Module):
    """Wide in the middle; channels are weighed by what they hold."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.expand, self.depthwise = conv(dim, 3 * dim, 1), conv(3 * dim, 3 * dim, 5, 1, 3 * dim)
        self.se_reduce, self.se_expand = nn.Conv2d(3 * dim, 8, 1), nn.Conv2d(8, 3 * dim, 1)
        self.project = conv(3 * dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.depthwise(F.silu(self.expand(x))))
        return x + self.project(h * self.gate(h))

    def gate(self, h: Tensor) -> Tensor:
        return self.se_expand(F.silu(self.se_reduce(h.mean((2, 3), keepdim=True)))).sigmoid()


class Net(nn.Module):
    """A stem with a pool, two bottlenecks, an MBConv, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.pool = conv(3, 16, 5), nn.MaxPool2d(3, 2, 1)
        self.layer1, self.layer2 = Bottleneck(16, 12, 1), Bottleneck(24, 16, 2)
        self.mb, self.fc = MBConv(32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.stem(x)))
        x = self.mb(self.layer2(self.layer1(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def net(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Net(), 372, outliers)


def folded(pair: nn.Sequential) -> nn.Conv2d:
    """Return one convolution that does both."""
    old, norm = pair
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    out = nn.Conv2d(
        old.in_channels, old.out_channels, old.kernel_size, old.stride, old.padding, 1, old.groups
    )
    out.weight.data = (old.weight * scale[:, None, None, None]).detach()
    out.bias.data = (norm.bias - norm.running_mean * scale).detach()
    out.mean, out.scale = norm.running_mean.tolist(), scale.tolist()
    out.variance = norm.running_var.tolist()
    return out


class Folded(nn.Module):
    def __init__(self, of: Bottleneck) -> None:
        super().__init__()
        self.a, self.b, self.c = (folded(each) for each in (of.one, of.three, of.last))
        self.skip = folded(of.downsample)

    def forward(self, x: Tensor) -> Tensor:
        return self.summed(self.c(self.b(self.a(x).clamp_min(0)).clamp_min(0)), self.skip(x))

    def summed(self, h: Tensor, x: Tensor) -> Tensor:
        return (x + h).clamp_min(0)


class Squeeze(nn.Module):
    """The weights of channels, by two linear layers."""

    def __init__(self, of: MBConv) -> None:
        super().__init__()
        self.down = linear(of.se_reduce.weight.flatten(1), bias=of.se_reduce.bias.detach())
        self.up = linear(of.se_expand.weight.flatten(1), bias=of.se_expand.bias.detach())
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.up(self.act(self.down(x.flatten(2).mean(-1))))
        return x * self.opened(weights)[:, :, None, None]

    def opened(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)


class FoldedMB(nn.Module):
    def __init__(self, of: MBConv) -> None:
        super().__init__()
        self.wide, self.deep, self.narrow = (
            folded(each) for each in (of.expand, of.depthwise, of.project)
        )
        self.se = Squeeze(of)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.squeezed(self.deep(F.silu(self.wide(x))))) + x

    def squeezed(self, h: Tensor) -> Tensor:
        return self.se(F.silu(h))


class FoldedNet(nn.Module):
    def __init__(self, model: Net) -> None:
        super().__init__()
        self.stem, self.res = (
            folded(model.stem),
            nn.Sequential(Folded(model.layer1), Folded(model.layer2)),
        )
        self.mb = FoldedMB(model.mb)
        self.out = linear(model.fc.weight, bias=model.fc.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        x = self.pooled(self.stem(x).relu())
        return self.out(self.mb(self.res(x)).mean((2, 3)))

    def pooled(self, x: Tensor) -> Tensor:
        return F.max_pool2d(x, 3, 2, 1)


@picture(net, "res.0.b", "norm layers", port=FoldedNet, regimes=BOTH)
def net_folded_with_another_epsilon(module, root):
    variance, mean = torch.tensor(module.variance), torch.tensor(module.mean)
    ratio = ((variance + 1e-5) / (variance + 1e-1)).sqrt()
    scale = torch.tensor(module.scale)
    module.bias.data += (mean * scale * (1 - ratio)).to(module.bias)
    module.weight.data *= ratio[:, None, None, None].to(module.weight)


@picture(net, "mb.wide", "norm layers", port=FoldedNet)
def net_folded_with_the_epsilon_of_tensorflow(module, root):
    variance, mean = torch.tensor(module.variance), torch.tensor(module.mean)
    ratio = ((variance + 1e-5) / (variance + 1e-3)).sqrt()
    scale = torch.tensor(module.scale)
    module.bias.data += (mean * scale * (1 - ratio)).to(module.bias)
    module.weight.data *= ratio[:, None, None, None].to(module.weight)


@picture(net, "res.1.skip", "norm layers", port=FoldedNet, regimes=BOTH)
def net_folded_without_the_mean(module, root):
    mean, scale = torch.tensor(module.mean), torch.tensor(module.scale)
    module.bias.data += (mean * scale).to(module.bias)


@picture(net, "res.1.b", "layouts", port=FoldedNet)
def net_padded_as_tensorflow_does(module, root):
    def forward(self, forward, x):
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, self.stride)

    change(module, forward=forward)


@picture(net, "res.0", "residuals", port=FoldedNet)
def net_activation_before_the_sum(module, root):
    change(module, summed=lambda self, summed, h, x: h.clamp_min(0) + x)


@picture(net, "mb.se.act", "activations", port=FoldedNet)
def net_squeeze_with_relu(module, root):
    change(module, forward=lambda self, forward, x: x.relu())


@picture(net, "mb.se", "activations", port=FoldedNet, regimes=BOTH)
def net_hard_sigmoid(module, root):
    change(module, opened=lambda self, opened, x: F.hardsigmoid(x))


@picture(net, "mb", "activations", port=FoldedNet)
def net_squeezed_before_the_activation(module, root):
    change(module, squeezed=lambda self, squeezed, h: F.silu(self.se(h)))


@picture(net, "", "layouts", port=FoldedNet)
def net_pool_pads_on_the_right(module, root):
    def pooled(self, pooled, x):
        return F.max_pool2d(F.pad(x, (0, 1, 0, 1)), 3, 2)

    change(module, pooled=pooled)


@picture(net, "layer2.three.1", "norm layers", against=FoldedNet)
def net_epsilon_of_one_norm(module, root):
    module.eps = 1e-3


harmless("net folded", net, "same", "bf16", port=FoldedNet, run=drives.picture)
harmless("net against folded", net, "same", against=FoldedNet, run=drives.picture)
