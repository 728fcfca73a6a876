"""ConvNeXt and shifted windows; the ports swap layouts, unfold convolutions, drop the windows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_ports import ALL, FP32, right, unseen

# --- ConvNeXt -------------------------------------------------------------------------------------


class NextBlock(nn.Module):
    """Depthwise convolution, a feed-forward with channels last, a scale, a residual."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 5, padding=2, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1, self.act, self.pwconv2 = (
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Linear(4 * dim, dim),
        )
        self.gamma = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        h = self.scaled(self.pwconv2(self.act(self.pwconv1(h))))
        return x + h.permute(0, 3, 1, 2)

    def scaled(self, h: Tensor) -> Tensor:
        return (0.5 + self.gamma) * h


class ChannelNorm(nn.Module):
    """A norm of the channels where they come first."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        apart = x - x.mean(self.axis(), keepdim=True)
        x = apart / torch.sqrt(apart.square().mean(self.axis(), keepdim=True) + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]

    def axis(self) -> int | tuple[int, ...]:
        return 1


class ConvNeXt(nn.Module):
    """A stem, two stages, a head."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dim, 2, stride=2), ChannelNorm(dim))
        self.stages = nn.ModuleList(
            [
                nn.Sequential(NextBlock(dim), NextBlock(dim)),
                nn.Sequential(
                    ChannelNorm(dim), nn.Conv2d(dim, 2 * dim, 2, stride=2), NextBlock(2 * dim)
                ),
            ]
        )
        self.norm = nn.LayerNorm(2 * dim, eps=1e-6)
        self.head = nn.Linear(2 * dim, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        for stage in self.stages:
            x = stage(x)
        return self.head(self.norm(self.pooled(x)))

    def pooled(self, x: Tensor) -> Tensor:
        return x.mean((-2, -1))


def convnext(*, outliers: bool = False) -> nn.Module:
    return models.weigh(ConvNeXt(), 81, outliers)


class LastBlock(nn.Module):
    """The same with channels last all along; the scale is in the weights."""

    def __init__(self, of: NextBlock) -> None:
        super().__init__()
        scale = 0.5 + of.gamma.detach()
        self.spatial = nn.Conv2d(*of.dwconv.weight.shape[:1] * 2, 5, groups=len(scale))
        self.spatial.load_state_dict(of.dwconv.state_dict())
        self.ln = norm_like(of.norm)
        self.up = linear(of.pwconv1.weight, bias=of.pwconv1.bias)
        self.down = linear(of.pwconv2.weight * scale[:, None], bias=of.pwconv2.bias * scale)

    def forward(self, x: Tensor) -> Tensor:
        h = self.spatial(self.padded(x.movedim(-1, 1))).movedim(1, -1)
        return self.down(F.gelu(self.up(self.ln(h)))).add(x)

    def padded(self, x: Tensor) -> Tensor:
        return F.pad(x, (2, 2, 2, 2))


class Patches(nn.Module):
    """A convolution of stride 2 as a product of patches, channels last."""

    def __init__(self, of: nn.Conv2d) -> None:
        super().__init__()
        self.mat = linear(of.weight.permute(0, 2, 3, 1).flatten(1), bias=of.bias)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        x = x.reshape(b, h // 2, 2, w // 2, 2, c)
        return self.mat(x.transpose(2, 3).flatten(3))


def _last_norm(of: ChannelNorm) -> nn.LayerNorm:
    out = nn.LayerNorm(len(of.weight), eps=1e-6)
    out.load_state_dict(of.state_dict())
    return out


class LastNeXt(nn.Module):
    """The same with channels last."""

    def __init__(self, model: ConvNeXt) -> None:
        super().__init__()
        first, second = model.stages
        self.layers = nn.Sequential(
            Patches(model.stem[0]),
            _last_norm(model.stem[1]),
            *(LastBlock(each) for each in first),
            _last_norm(second[0]),
            Patches(second[1]),
            LastBlock(second[2]),
        )
        self.norm = norm_like(model.norm)
        self.fc = linear(model.head.weight, bias=model.head.bias)

    def forward(self, image: Tensor) -> Tensor:
        return self.fc(self.norm(self.layers(image.permute(0, 2, 3, 1)).flatten(1, 2).mean(1)))


@unseen(convnext, "stem.1", "norm axis", run=drives.picture, regimes=ALL)
def norm_of_the_image(module, root):
    change(module, axis=lambda self, axis: (1, 2, 3))


@unseen(convnext, "stages.0.1", "scale", run=drives.picture)
def layer_scale_forgotten(module, root):
    change(module, scaled=lambda self, scaled, h: h)


@unseen(convnext, "stages.1.2.dwconv", "pad", run=drives.picture)
def padded_by_reflection(module, root):
    def forward(self, forward, x):
        x = F.pad(x, (2, 2, 2, 2), mode="reflect")
        return F.conv2d(x, self.weight, self.bias, groups=self.groups)

    change(module, forward=forward)


@unseen(convnext, "", "tails", run=drives.picture)
def pooled_without_the_border(module, root):
    change(module, pooled=lambda self, pooled, x: x[..., :-1, :].mean((-2, -1)))


@unseen(convnext, "stages.0.0.pwconv1", "storage precision", run=drives.picture, regimes=FP32)
def weights_in_fp8(module, root):
    module.weight.data = module.weight.data.to(torch.float8_e4m3fn).float()


@unseen(convnext, "layers.5.mat", "weights", port=LastNeXt, run=drives.picture)
def patches_transposed(module, root):
    kept = module.weight.data.view(32, 2, 2, 16)
    module.weight.data = kept.transpose(1, 2).reshape(32, -1)


@unseen(convnext, "layers.3", "pad", port=LastNeXt, run=drives.picture)
def last_padded_by_the_edge(module, root):
    change(module, padded=lambda self, padded, x: F.pad(x, (2, 2, 2, 2), mode="replicate"))


@unseen(convnext, "layers.2.down", "wrong bias", port=LastNeXt, run=drives.picture)
def last_bias_not_scaled(module, root):
    module.bias.data *= 2


right("convnext", convnext, "reordered", "bf16", run=drives.picture)
right("convnext last", convnext, *ALL, port=LastNeXt, run=drives.picture)


# --- Shifted windows ------------------------------------------------------------------------------


class WindowAttention(nn.Module):
    """Attention in windows of 4 by 4, with a table of distances and a mask across the seam."""

    def __init__(self, dim: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift, self.side = heads, shift, 4
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.table = nn.Parameter(torch.empty(49, heads))

    def forward(self, x: Tensor) -> Tensor:
        b, size, _, c = x.shape
        x = self.windows(self.rolled(x, -self.shift))
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * (c // self.heads) ** -0.5 + self.bias()
        if self.shift:
            seam = self.seam(size)
            scores = scores.unflatten(0, (b, -1)).masked_fill(~seam[:, None], -100.0).flatten(0, 1)
        x = self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        count = size // self.side
        x = x.view(b, count, count, self.side, self.side, c).transpose(2, 3)
        return self.rolled(x.reshape(b, size, size, c), self.shift)

    def windows(self, x: Tensor) -> Tensor:
        b, size, _, c = x.shape
        count = size // self.side
        x = x.view(b, count, self.side, count, self.side, c).transpose(2, 3)
        return x.reshape(-1, self.side**2, c)

    def rolled(self, x: Tensor, by: int) -> Tensor:
        return x.roll((by, by), (1, 2))

    def seam(self, size: int) -> Tensor:
        row = torch.zeros(size)
        row[-self.side : -self.shift], row[-self.shift :] = 1, 2
        grid = self.windows((row[:, None] * 3 + row)[None, ..., None])[..., 0]
        return grid[:, None] == grid[..., None]

    def bias(self) -> Tensor:
        return self.table[self.apart()].permute(2, 0, 1)

    def apart(self) -> Tensor:
        place = torch.cartesian_prod(torch.arange(self.side), torch.arange(self.side))
        apart = place[:, None] - place + self.side - 1
        return apart[..., 0] * (2 * self.side - 1) + apart[..., 1]


class SwinBlock(nn.Module):
    """Windows and a feed-forward."""

    def __init__(self, dim: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, 2, shift)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Merging(nn.Module):
    """Four neighbours become one."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.reduction(self.norm(self.gathered(x)))

    def gathered(self, x: Tensor) -> Tensor:
        corners = ((0, 0), (1, 0), (0, 1), (1, 1))
        return torch.cat([x[:, i::2, j::2] for i, j in corners], -1)


class Swin(nn.Module):
    """Patches, two blocks, merging, a head."""

    def __init__(self, dim: int = 24) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 2, stride=2)
        self.blocks = nn.ModuleList([SwinBlock(dim, 0), SwinBlock(dim, 2)])
        self.merge = Merging(dim)
        self.head = nn.Linear(2 * dim, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.merge(x).mean((1, 2)))


def swin(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Swin(), 82, outliers)


class GlobalWindows(nn.Module):
    """The same attention over all places at once, with everything outside the window masked."""

    def __init__(self, of: WindowAttention) -> None:
        super().__init__()
        self.heads, self.shift = of.heads, of.shift
        parts = zip(of.qkv.weight.chunk(3), of.qkv.bias.chunk(3), strict=True)
        self.q, self.k, self.v = (linear(weight, bias=bias) for weight, bias in parts)
        self.o = linear(of.proj.weight, bias=of.proj.bias)
        self.near = nn.Parameter(of.table.detach().T.reshape(-1, 7, 7).clone())

    def forward(self, x: Tensor) -> Tensor:
        b, size, _, c = x.shape
        flat = x.flatten(1, 2)
        q, k, v = (f(flat).unflatten(-1, (self.heads, -1)).mT.mT for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=self.mask(size)
        )
        return self.o(out.transpose(1, 2).reshape(b, size, size, c))

    def mask(self, size: int) -> Tensor:
        place = torch.cartesian_prod(torch.arange(size), torch.arange(size))
        apart = self.difference(place).clamp(-3, 3) + 3
        bias = self.near[:, apart[..., 0], apart[..., 1]]
        return bias.masked_fill(~self.together(place), float("-inf"))

    def difference(self, place: Tensor) -> Tensor:
        return place[:, None] - place

    def together(self, place: Tensor) -> Tensor:
        window = (place + 4 - self.shift) // 4
        return (window[:, None] == window).all(-1)


class GlobalSwin(nn.Module):
    """The same without windows."""

    def __init__(self, model: Swin) -> None:
        super().__init__()
        self.patches = linear(model.patch.weight.flatten(1), bias=model.patch.bias)
        self.stages = nn.ModuleList()
        for each in model.blocks:
            feed = (norm_like(each.norm2), *(linear(m.weight, bias=m.bias) for m in each.mlp[::2]))
            self.stages.append(
                nn.ModuleDict(
                    {
                        "before": norm_like(each.norm1),
                        "attend": GlobalWindows(each.attn),
                        "feed": nn.Sequential(feed[0], feed[1], nn.GELU(), feed[2]),
                    }
                )
            )
        self.shrink = nn.Sequential(
            norm_like(model.merge.norm), linear(model.merge.reduction.weight)
        )
        self.classify = linear(model.head.weight, bias=model.head.bias)

    def forward(self, image: Tensor) -> Tensor:
        x = F.unfold(image, 2, stride=2).mT
        x = self.patches(x).unflatten(1, (8, 8))
        for stage in self.stages:
            x = stage["attend"](stage["before"](x)) + x
            x = stage["feed"](x) + x
        x = x.unflatten(2, (4, 2)).unflatten(1, (4, 2))
        x = x.permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.classify(self.shrink(x).flatten(1, 2).mean(1))


@unseen(swin, "blocks.1.attn", "masks", run=drives.picture)
def seam_forgotten(module, root):
    change(module, seam=lambda self, seam, size: torch.ones_like(seam(size)))


@unseen(swin, "blocks.0.attn", "rope", run=drives.picture, regimes=ALL)
def distances_transposed(module, root):
    change(module, apart=lambda self, apart: apart().mT)


@unseen(swin, "merge", "swapped rows", run=drives.picture)
def corners_in_another_order(module, root):
    def gathered(self, gathered, x):
        a, b, c, d = gathered(x).chunk(4, -1)
        return torch.cat([a, c, b, d], -1)

    change(module, gathered=gathered)


@unseen(swin, "stages.1.attend", "masks", port=GlobalSwin, run=drives.picture)
def global_windows_shifted_by_one(module, root):
    module.shift = 1


@unseen(swin, "stages.0.attend.v", "weights", port=GlobalSwin, run=drives.picture)
def global_values_row(module, root):
    module.weight.data[3] *= 1.4


@unseen(swin, "shrink.0", "norm layers", port=GlobalSwin, run=drives.picture)
def global_bias_of_the_norm(module, root):
    module.bias.data = module.bias.data.roll(24)


right("swin", swin, "reordered", "bf16", run=drives.picture)
right("swin global", swin, *ALL, port=GlobalSwin, run=drives.picture)
