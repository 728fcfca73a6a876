"""The image encoder of SAM: windows with pads that count, distances by rows and by columns.

The port hands distances to torch's own attention as a mask, and convolves by products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_fifth import BOTH, fifth, harmless
from localisation.unseen_fourth_pairs import same


def scene(dtype: torch.dtype) -> drives.Run:
    """One call on pictures of six patches by six."""
    return drives.Run((drives.image(51, side=24, dtype=dtype),))


class LayerNorm2d(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class SamAttention(nn.Module):
    """Distances are multiplied with queries that are not yet scaled."""

    def __init__(self, dim: int, side: int) -> None:
        super().__init__()
        self.heads, self.scale = 4, (dim // 4) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.rel_pos_h = nn.Parameter(torch.zeros(2 * side - 1, dim // 4))
        self.rel_pos_w = nn.Parameter(torch.zeros(2 * side - 1, dim // 4))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, _ = x.shape
        qkv = self.qkv(x).reshape(b, h * w, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, b * self.heads, h * w, -1).unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.add_rel_pos(attn, q, (h, w)).softmax(-1)
        x = (attn @ v).view(b, self.heads, h, w, -1).permute(0, 2, 3, 1, 4)
        return self.proj(x.reshape(b, h, w, -1))

    def add_rel_pos(self, attn: Tensor, q: Tensor, size: tuple[int, int]) -> Tensor:
        h, w = size
        by_row, by_column = self.rel(self.rel_pos_h, h), self.rel(self.rel_pos_w, w)
        r_q = q.reshape(len(q), h, w, -1)
        rel_h = torch.einsum("bhwc,hkc->bhwk", r_q, by_row)
        rel_w = torch.einsum("bhwc,wkc->bhwk", r_q, by_column)
        attn = attn.view(-1, h, w, h, w) + rel_h[..., None] + rel_w[..., None, :]
        return attn.view(-1, h * w, h * w)

    def rel(self, table: Tensor, size: int) -> Tensor:
        places = torch.arange(size)
        return table[places[:, None] - places + size - 1]


class SamMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin1, self.lin2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin2(F.gelu(self.lin1(x)))


class SamBlock(nn.Module):
    def __init__(self, dim: int, window: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim, eps=1e-6), nn.LayerNorm(dim, eps=1e-6)
        self.attn, self.mlp = SamAttention(dim, window or 6), SamMLP(dim)
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        if self.window:
            h, padded = self.partition(h)
        h = self.attn(h)
        if self.window:
            h = self.unpartition(h, padded, x.shape)
        x = x + h
        return x + self.mlp(self.norm2(x))

    def partition(self, x: Tensor) -> tuple[Tensor, int]:
        b, side, _, c = x.shape
        more = -side % self.window
        x = F.pad(x, (0, 0, 0, more, 0, more))
        count = (side + more) // self.window
        x = x.view(b, count, self.window, count, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window, self.window, c), count

    def unpartition(self, x: Tensor, count: int, shape: torch.Size) -> Tensor:
        b, side, _, c = shape
        x = x.view(b, count, count, self.window, self.window, c).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(b, count * self.window, -1, c)[:, :side, :side]


class Sam(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.pos_embed = nn.Parameter(torch.zeros(1, 6, 6, dim))
        self.blocks = nn.ModuleList(SamBlock(dim, window) for window in (4, 0, 4))
        self.neck = nn.Sequential(
            nn.Conv2d(dim, 32, 1, bias=False),
            LayerNorm2d(32),
            nn.Conv2d(32, 32, 3, padding=1, bias=False),
            LayerNorm2d(32),
        )

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image).permute(0, 2, 3, 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.neck(x.permute(0, 3, 1, 2))


def sam(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(Sam(), 504, outliers)
    model.pos_embed.data *= 8
    return model


class Patchify(nn.Module):
    def __init__(self, of: Sam) -> None:
        super().__init__()
        weight = of.patch_embed.weight.detach().permute(0, 2, 3, 1).flatten(1)
        self.proj = linear(weight, bias=of.patch_embed.bias.detach())
        self.places = nn.Parameter(of.pos_embed.detach()[0].clone())

    def forward(self, image: Tensor) -> Tensor:
        b = len(image)
        x = image.permute(0, 2, 3, 1).reshape(b, 6, 4, 6, 4, 3)
        return self.proj(x.transpose(2, 3).flatten(3)) + self.placed()

    def placed(self) -> Tensor:
        return self.places


class BiasedAttention(nn.Module):
    """Distances become a mask for torch's own attention."""

    def __init__(self, of: SamAttention, side: int) -> None:
        super().__init__()
        places = torch.arange(side)
        numbers = places[:, None] - places + side - 1
        self.wq, self.wk, self.wv = (
            linear(w, bias=b)
            for w, b in zip(of.qkv.weight.chunk(3), of.qkv.bias.detach().chunk(3), strict=True)
        )
        self.wo, self.side = same(of.proj), side
        self.rows = nn.Parameter(of.rel_pos_h.detach()[numbers].clone())
        self.columns = nn.Parameter(of.rel_pos_w.detach()[numbers].clone())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.wq, self.wk, self.wv))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias(q))
        return self.wo(seen.transpose(1, 2).flatten(2))

    def bias(self, q: Tensor) -> Tensor:
        q = q.unflatten(2, (self.side, self.side))
        down = torch.einsum("nhyxd,yrd->nhyxr", q, self.rows)
        across = torch.einsum("nhyxd,xcd->nhyxc", q, self.columns)
        return (down[..., None] + across[..., None, :]).flatten(4).flatten(2, 3)


class WindowBlock(nn.Module):
    def __init__(self, of: SamBlock) -> None:
        super().__init__()
        self.ln1, self.ln2, self.window = norm_like(of.norm1), norm_like(of.norm2), of.window
        self.attn = BiasedAttention(of.attn, of.window or 6)
        self.fc1, self.fc2 = same(of.mlp.lin1), same(of.mlp.lin2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + (
            self.windowed(x) if self.window else self.attn(self.ln1(x).flatten(1, 2)).view_as(x)
        )
        return x + self.fc2(self.act(self.fc1(self.ln2(x))))

    def windowed(self, x: Tensor) -> Tensor:
        b, _, _, c = x.shape
        h = self.padded(x).unfold(1, 4, 4).unfold(2, 4, 4)
        h = self.attn(h.permute(0, 1, 2, 4, 5, 3).reshape(-1, 16, c))
        return self.joined(h.view(b, 2, 2, 4, 4, c))[:, :6, :6]

    def padded(self, x: Tensor) -> Tensor:
        return F.pad(self.ln1(x), (0, 0, 0, 2, 0, 2))

    def joined(self, h: Tensor) -> Tensor:
        return h.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def act(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x * 0.5**0.5))


class LastNeck(nn.Module):
    """Channels are last until the end."""

    def __init__(self, of: nn.Sequential) -> None:
        super().__init__()
        self.reduce = linear(of[0].weight.detach().flatten(1))
        self.mix = linear(of[2].weight.detach().flatten(1))
        self.ln1, self.ln2 = (nn.LayerNorm(32, eps=1e-6) for _ in range(2))
        self.ln1.load_state_dict(of[1].state_dict())
        self.ln2.load_state_dict(of[3].state_dict())

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(self.reduce(x)).permute(0, 3, 1, 2)
        x = self.mix(F.unfold(x, 3, padding=1).transpose(1, 2))
        return self.ln2(x).transpose(1, 2).unflatten(2, (6, 6))


class MaskedSam(nn.Module):
    def __init__(self, model: Sam) -> None:
        super().__init__()
        self.stem, self.neck = Patchify(model), LastNeck(model.neck)
        self.trunk = nn.Sequential(*map(WindowBlock, model.blocks))

    def forward(self, image: Tensor) -> Tensor:
        return self.neck(self.trunk(self.stem(image)))


def seen(path, kind, **more):
    """Declare a fault of the image encoder."""
    return fifth(sam, path, kind, run=scene, **more)


@seen("trunk.1.attn", "scale", port=MaskedSam, regimes=BOTH)
def sam_distances_of_scaled_queries(module, root):
    change(module, bias=lambda self, bias, q: bias(q * q.shape[-1] ** -0.5))


@seen("trunk.0.attn", "positions", port=MaskedSam, regimes=BOTH)
def sam_distances_the_other_way(module, root):
    module.columns.data = module.columns.data.transpose(0, 1).contiguous()


@seen("trunk.2.attn", "positions", port=MaskedSam)
def sam_rows_for_columns(module, root):
    module.rows.data, module.columns.data = module.columns.data, module.rows.data


@seen("trunk.0", "norm layers", port=MaskedSam, regimes=BOTH)
def sam_pads_are_normed(module, root):
    change(module, padded=lambda self, padded, x: self.ln1(F.pad(x, (0, 0, 0, 2, 0, 2))))


@seen("trunk.2", "layouts", port=MaskedSam)
def sam_windows_joined_in_another_order(module, root):
    change(module, joined=lambda self, joined, h: joined(h.transpose(1, 2)))


@seen("trunk.1", "activations", port=MaskedSam)
def sam_gelu_by_tanh(module, root):
    change(module, act=lambda self, act, x: F.gelu(x, approximate="tanh"))


@seen("stem", "layouts", port=MaskedSam)
def sam_places_by_columns(module, root):
    change(module, placed=lambda self, placed: placed().transpose(0, 1))


@seen("stem.proj", "layouts", port=MaskedSam)
def sam_weights_of_patches_channels_first(module, root):
    weight = module.weight.data.unflatten(1, (4, 4, 3)).permute(0, 3, 1, 2)
    module.weight.data = weight.flatten(1).contiguous()


@seen("neck.ln1", "norm layers", port=MaskedSam)
def sam_epsilon_inside_the_neck(module, root):
    module.eps = 1e-3


@seen("blocks.2.attn", "positions", against=MaskedSam)
def sam_table_read_from_its_end(module, root):
    change(module, rel=lambda self, rel, table, size: rel(table.flip(0), size))


@seen("blocks.0", "layouts", against=MaskedSam)
def sam_pads_in_front(module, root):
    def partition(self, partition, x):
        return partition(F.pad(x, (0, 0, 2, 0, 2, 0)))

    def unpartition(self, unpartition, x, count, shape):
        return unpartition(x, count, (shape[0], 8, 8, shape[3]))[:, 2:, 2:]

    change(module, partition=partition, unpartition=unpartition)


harmless("sam masked", sam, "same", "bf16", port=MaskedSam, run=scene)
harmless("sam against masked", sam, "same", against=MaskedSam, run=scene)
