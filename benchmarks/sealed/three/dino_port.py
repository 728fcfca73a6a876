"""A DINOv2 port after timm's and transformers', with the same weights."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from transformers import Dinov2Config, Dinov2Model

from sealed.cases import Pair
from sealed.three.common import fill

WIDTH, HEADS, DEPTH, PATCH, SIDE = 48, 4, 3, 4, 16
NAMES = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.proj": "attention.o_proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}


class PatchEmbed(nn.Module):
    """A grid of patches, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, WIDTH, PATCH, stride=PATCH)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return (batch, rows, columns, width)."""
        return self.proj(pixels).permute(0, 2, 3, 1)


class Attention(nn.Module):
    """Attention with one fused projection."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = (WIDTH // HEADS) ** -0.5
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def heads(self, x: torch.Tensor):
        """Return queries, keys and values of (batch, heads, tokens, width)."""
        return self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return what tokens take from each other."""
        return functional.scaled_dot_product_attention(q, k, v, scale=self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the attention's output."""
        return self.proj(self.attend(*self.heads(x)).transpose(1, 2).flatten(2))


class LayerScale(nn.Module):
    """Scales each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((WIDTH,), 1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x scaled."""
        return x * self.gamma


class Mlp(nn.Module):
    """Two products around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(WIDTH, 3 * WIDTH)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the MLP's output."""
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attn = Attention()
        self.ls1 = LayerScale()
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = Mlp()
        self.ls2 = LayerScale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tokens after this layer."""
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class Dino(nn.Module):
    """The vision transformer; puts out every token."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + (SIDE // PATCH) ** 2, WIDTH))
        self.patch_embed = PatchEmbed()
        self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def places(self, rows: int, columns: int) -> torch.Tensor:
        """Return the patches' positions, stretched to a grid."""
        side = SIDE // PATCH
        table = self.pos_embed[:, 1:].float().unflatten(1, (side, side)).permute(0, 3, 1, 2)
        if (rows, columns) != (side, side):
            table = self.stretched(table, (rows, columns))
        return table.flatten(2).transpose(1, 2).to(self.pos_embed.dtype)

    def stretched(self, table: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        """Return the table at another size."""
        return functional.interpolate(table, size=size, mode="bicubic", align_corners=False)

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Put the class token before the patches and add positions."""
        x, rows, columns = x.flatten(1, 2), x.shape[1], x.shape[2]
        first = (self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1)
        return torch.cat((first, x + self.places(rows, columns)), 1)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the normalised tokens."""
        patches = self.patch_embed(pixels.to(self.pos_embed.dtype))
        return self.norm(self.blocks(self.embed(patches)))


class Tokens(nn.Module):
    """transformers' model, that puts out every token."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the normalised tokens."""
        return self.model(pixel_values=pixels).last_hidden_state


def build(kind: str) -> Pair:
    """Return the port against transformers'; "back" the other way, "wide" and "large" by size."""
    config = Dinov2Config(
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        mlp_ratio=3,
        layer_norm_eps=1e-6,
        image_size=SIDE,
        patch_size=PATCH,
        attn_implementation="eager" if kind == "eager" else "sdpa",
    )
    torch.manual_seed(0)
    theirs = fill(Dinov2Model(config), seed=61)
    # Small patches, so that positions and eps are seen.
    theirs.embeddings.patch_embeddings.projection.weight.data.mul_(0.25)
    weights = theirs.state_dict()
    ours = Dino()
    found = {
        "cls_token": weights["embeddings.cls_token"],
        "pos_embed": weights["embeddings.position_embeddings"],
    }
    for part in ("weight", "bias"):
        there = f"embeddings.patch_embeddings.projection.{part}"
        found[f"patch_embed.proj.{part}"] = weights[there]
        found[f"norm.{part}"] = weights[f"layernorm.{part}"]
        for index in range(DEPTH):
            here, there = f"blocks.{index}", f"encoder.layer.{index}"
            for one, other in NAMES.items():
                found[f"{here}.{one}.{part}"] = weights[f"{there}.{other}.{part}"]
            parts = [weights[f"{there}.attention.{each}_proj.{part}"] for each in "qkv"]
            found[f"{here}.attn.qkv.{part}"] = torch.cat(parts)
    for index in range(DEPTH):
        for scale in (1, 2):
            there = f"encoder.layer.{index}.layer_scale{scale}.lambda1"
            found[f"blocks.{index}.ls{scale}.gamma"] = weights[there]
    ours.load_state_dict(found)
    draw = torch.Generator().manual_seed(7)
    size = {"wide": (SIDE, 24), "large": (32, 32)}.get(kind, (SIDE, SIDE))
    pixels = torch.randn(2, 3, *size, generator=draw)
    if kind == "back":
        return Pair(Tokens(theirs), ours, args=(pixels,))
    return Pair(ours, Tokens(theirs), args=(pixels,))
