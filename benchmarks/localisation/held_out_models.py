"""Models and ports of them that are kept apart: a translator, a recurrent network, a U-net.

Knows nothing of faults.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.drives import Run

# --- An encoder and a decoder with cross attention, norms after, relative places ------------------


class Mixer(nn.Module):
    """Attention from one sequence to another, with a bias by distance where it is asked for."""

    def __init__(self, dim: int, heads: int, relative: bool) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.o = nn.Linear(dim, dim)
        self.distance = nn.Embedding(33, heads) if relative else None

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (
            self.kv(self.source(x, memory))
            .unflatten(-1, (2 * self.heads, -1))
            .transpose(1, 2)
            .chunk(2, 1)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if self.distance is not None:
            scores = scores + self.bias(x.shape[1], memory.shape[1])
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def source(self, x: Tensor, memory: Tensor) -> Tensor:
        return memory

    def bias(self, queries: int, keys: int) -> Tensor:
        apart = torch.arange(keys)[None] - torch.arange(queries)[:, None]
        return self.distance(apart.clamp(-16, 16) + 16).permute(2, 0, 1)


class Feed(nn.Module):
    """The feed-forward with ReLU."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.wi = nn.Linear(dim, 3 * dim)
        self.wo = nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.relu(self.wi(x)))


class Encoding(nn.Module):
    """An encoder's block, norms after."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = Mixer(dim, heads, True)
        self.norm1 = nn.LayerNorm(dim)
        self.feed = Feed(dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, x, hidden))
        return self.norm2(x + self.feed(x))


class Decoding(nn.Module):
    """A decoder's block, norms after."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = Mixer(dim, heads, True)
        self.norm1 = nn.LayerNorm(dim)
        self.cross = Mixer(dim, heads, False)
        self.norm2 = nn.LayerNorm(dim)
        self.feed = Feed(dim)
        self.norm3 = nn.LayerNorm(dim)

    def forward(self, x: Tensor, memory: Tensor, future: Tensor, hidden: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, x, future))
        x = self.norm2(x + self.cross(x, memory, hidden))
        return self.norm3(x + self.feed(x))


class Translator(nn.Module):
    """Encoder and decoder; the embedding is shared with the head."""

    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.shared = nn.Embedding(101, dim)
        self.encoder = nn.ModuleList(Encoding(dim, heads) for _ in range(2))
        self.decoder = nn.ModuleList(Decoding(dim, heads) for _ in range(2))

    def forward(self, source: Tensor, target: Tensor, keep: Tensor) -> Tensor:
        hidden = ~keep[:, None, None, :]
        memory = self.shared(source)
        for block in self.encoder:
            memory = block(memory, hidden)
        x = self.shared(target)
        future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        for block in self.decoder:
            x = block(x, memory, future, hidden)
        return F.linear(self.scaled(x), self.shared.weight)

    def scaled(self, x: Tensor) -> Tensor:
        return x * x.shape[-1] ** -0.5


def translator(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Translator(), 21, outliers)


def translation(dtype: torch.dtype) -> Run:
    keep = torch.ones(2, 14, dtype=torch.bool)
    keep[0, 10:] = False
    return Run((drives.tokens(8, length=14), drives.tokens(9, length=10), keep))


class PortedMixer(nn.Module):
    """The same attention with SDPA, k and v apart, and a table for the bias."""

    def __init__(self, mixer: Mixer) -> None:
        super().__init__()
        keys, values = mixer.kv.weight.chunk(2)
        key_bias, value_bias = mixer.kv.bias.chunk(2)
        self.h = mixer.heads
        self.v_proj = linear(values, bias=value_bias)
        self.k_proj = linear(keys, bias=key_bias)
        self.q_proj = linear(mixer.q.weight, bias=mixer.q.bias)
        self.out_proj = linear(mixer.o.weight, bias=mixer.o.bias)
        table = None if mixer.distance is None else mixer.distance.weight.detach().clone()
        self.table = None if table is None else nn.Parameter(table)

    def forward(self, x: Tensor, other: Tensor, mask: Tensor) -> Tensor:
        v, k = (self.split(each(other)) for each in (self.v_proj, self.k_proj))
        q = self.split(self.q_proj(x))
        if self.table is not None:
            mask = mask + self.shift(q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def shift(self, queries: int, keys: int) -> Tensor:
        apart = torch.arange(keys) - torch.arange(queries).unsqueeze(-1)
        return self.table[apart.clamp(-16, 16) + 16].permute(2, 0, 1)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.h, -1).transpose(1, 2)


class PortedTranslator(nn.Module):
    """Both halves in one module; sublayers in flat lists."""

    def __init__(self, model: Translator) -> None:
        super().__init__()
        self.lookup = nn.Parameter(model.shared.weight.detach().clone())
        blocks = [*model.encoder, *model.decoder]
        self.mixers = nn.ModuleList(PortedMixer(each.attention) for each in blocks)
        self.crosses = nn.ModuleList(PortedMixer(each.cross) for each in model.decoder)
        self.feeds = nn.ModuleList(
            nn.Sequential(
                linear(each.feed.wi.weight, bias=each.feed.wi.bias),
                nn.ReLU(),
                linear(each.feed.wo.weight, bias=each.feed.wo.bias),
            )
            for each in blocks
        )
        named = ("norm1", "norm2", "norm3")
        self.norms = nn.ModuleList(
            nn.ModuleList(norm_like(getattr(each, name)) for name in named if hasattr(each, name))
            for each in blocks
        )
        self.half = len(model.encoder)

    def forward(self, source: Tensor, target: Tensor, keep: Tensor) -> Tensor:
        low = torch.finfo(self.lookup.dtype).min
        padding = torch.zeros_like(keep, dtype=self.lookup.dtype).masked_fill(~keep, low)[
            :, None, None
        ]
        length = target.shape[1]
        future = torch.full((length, length), low, dtype=self.lookup.dtype).triu(1)
        memory = self.lookup[source]
        for n in range(self.half):
            memory = self.norms[n][0](memory + self.mixers[n](memory, memory, padding))
            memory = self.norms[n][1](memory + self.feeds[n](memory))
        x = self.lookup[target]
        for n in range(self.half, len(self.mixers)):
            x = self.norms[n][0](x + self.mixers[n](x, x, future))
            x = self.norms[n][1](x + self.crosses[n - self.half](x, memory, padding))
            x = self.norms[n][2](x + self.feeds[n](x))
        return x @ (self.lookup.T * x.shape[-1] ** -0.5)


# --- A recurrent network that keeps its state -----------------------------------------------------


class Cell(nn.Module):
    """A gated recurrence over the tokens; the state stays for the next call."""

    state = ("memory",)

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.decay = nn.Linear(dim, dim)
        self.write = nn.Linear(dim, dim)
        self.read = nn.Linear(dim, dim)
        self.register_buffer("memory", torch.zeros(2, dim), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        keep, new = torch.sigmoid(self.decay(x)), torch.tanh(self.write(x))
        out = []
        for at in range(x.shape[1]):
            self.memory = self.step(self.memory, keep[:, at], new[:, at])
            out.append(self.memory)
        return torch.stack(out, 1) * F.silu(self.read(x))

    def step(self, memory: Tensor, keep: Tensor, new: Tensor) -> Tensor:
        return memory * keep + new * (1 - keep)


class Recurrent(nn.Module):
    """Cells with residuals."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.emb = nn.Embedding(101, dim)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(3))
        self.cells = nn.ModuleList(Cell(dim) for _ in range(3))
        self.head = nn.Linear(dim, 101)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.emb(tokens)
        for norm, cell in zip(self.norms, self.cells, strict=True):
            x = x + cell(norm(x))
        return self.head(x)

    def reset(self) -> None:
        for cell in self.cells:
            cell.memory = torch.zeros_like(cell.memory)


def recurrent(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Recurrent(), 22, outliers)


class PortedCell(nn.Module):
    """All three projections at once, the state in a dictionary."""

    state = ("kept",)

    def __init__(self, norm: nn.LayerNorm, cell: Cell) -> None:
        super().__init__()
        parts = (cell.write, cell.read, cell.decay)
        self.norm = norm_like(norm)
        self.project = linear(
            *(each.weight for each in parts), bias=torch.cat([each.bias for each in parts])
        )
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        new, read, keep = self.project(self.norm(x)).chunk(3, -1)
        new, keep = new.tanh(), keep.sigmoid()
        h = self.kept.get("h", torch.zeros_like(x[:, 0]))
        out = torch.empty_like(x)
        for at in range(x.shape[1]):
            h = self.mix(h, new[:, at], keep[:, at])
            out[:, at] = h
        self.kept = {"h": h}
        return x + out * read * read.sigmoid()

    def mix(self, h: Tensor, new: Tensor, keep: Tensor) -> Tensor:
        return torch.lerp(new, h, keep)


class PortedRecurrent(nn.Module):
    """Cells in a sequence."""

    def __init__(self, model: Recurrent) -> None:
        super().__init__()
        self.tokens = nn.Embedding.from_pretrained(model.emb.weight.detach().clone(), freeze=False)
        pairs = zip(model.norms, model.cells, strict=True)
        self.body = nn.Sequential(*(PortedCell(*each) for each in pairs))
        self.logits = linear(model.head.weight, bias=model.head.bias)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.logits(self.body(self.tokens(tokens)))

    def reset(self) -> None:
        for cell in self.body:
            cell.kept = {}


# --- A network that goes down and up again --------------------------------------------------------


class UNet(nn.Module):
    """Down, up, and a bridge between."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, width, 3, padding=1)
        self.norm = nn.GroupNorm(3, width)
        self.down = nn.Conv2d(width, 2 * width, 4, stride=2, padding=1)
        self.middle = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.SiLU())
        self.up = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        high = F.silu(self.norm(self.enter(image)))
        low = self.middle(self.down(high))
        return self.last(self.joined(high, self.up(low))) + self.coarse(image)

    def joined(self, high: Tensor, low: Tensor) -> Tensor:
        return torch.cat([high, low], 1)

    def coarse(self, image: Tensor) -> Tensor:
        small = F.avg_pool2d(image, 2)
        return F.interpolate(small, scale_factor=2, mode="bilinear", align_corners=False)


def unet(*, outliers: bool = False) -> nn.Module:
    return models.weigh(UNet(), 23, outliers)


def wide_llama(*, outliers: bool = False) -> nn.Module:
    return models.llama(size=models.WIDE, seed=24, outliers=outliers)


def wide_decoder(*, outliers: bool = False) -> nn.Module:
    return models.llama("growing", size=models.WIDE, seed=25, outliers=outliers)
