"""Models of images: convolutions, and a vision transformer.

Each step that people get wrong is a method, so that `faults` can override exactly that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- A network of convolutions --------------------------------------------------------------------


class ConvBlock(nn.Module):
    """Depthwise, pointwise, squeeze, residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.GroupNorm(4, channels)
        self.pwconv1 = nn.Conv2d(channels, 2 * channels, 1)
        self.act = nn.GELU()
        self.pwconv2 = nn.Conv2d(2 * channels, channels, 1)
        self.squeeze = Squeeze(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.pwconv2(self.act(self.pwconv1(self.norm(self.dwconv(x)))))
        return self.add(x, self.squeeze(out))

    def add(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out


class Squeeze(nn.Module):
    """Weighs channels by what they are on average."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, channels // 4)
        self.up = nn.Linear(channels // 4, channels)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.pooled(x)
        return x * torch.sigmoid(self.up(F.relu(self.down(mean))))[:, :, None, None]

    def pooled(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


class ConvNet(nn.Module):
    """Stem, two stages, head."""

    def __init__(self, channels: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
        )
        self.stage1 = nn.Sequential(ConvBlock(channels), ConvBlock(channels))
        self.down = nn.Conv2d(channels, 2 * channels, 2, stride=2)
        self.bn = nn.BatchNorm2d(2 * channels)
        self.pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.stage2 = nn.Sequential(ConvBlock(2 * channels))
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stage1(self.stem(image))
        x = self.stage2(self.pool(self.bn(self.down(x))))
        return self.head(x.mean((2, 3)))


# --- A vision transformer -------------------------------------------------------------------------


class ViTAttention(nn.Module):
    """Attention without a mask."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = self.attend(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(batch, length, dim))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(2, 3) * q.shape[-1] ** -0.5).softmax(-1) @ v


class ViTBlock(nn.Module):
    """One block with scaled residuals."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = ViTAttention(dim, heads)
        self.gamma1 = nn.Parameter(torch.ones(dim))
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.gamma2 = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(x, self.attn(self.norm1(x)), self.gamma1)
        return self.add(x, self.mlp(self.norm2(x)), self.gamma2)

    def add(self, x: Tensor, out: Tensor, gamma: Tensor) -> Tensor:
        return x + gamma * out


class ViT(nn.Module):
    """Patches, a class token, blocks, head."""

    def __init__(self, dim: int = 48, heads: int = 4, layers: int = 2, side: int = 16) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, stride=4)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.places = nn.Parameter(torch.zeros(1, (side // 4) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(ViTBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = self.placed(torch.cat([self.cls.expand(len(x), -1, -1), x], 1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])

    def placed(self, x: Tensor) -> Tensor:
        return x + self.places
