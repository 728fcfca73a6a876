"""Cases that no constant was tuned on: other architectures, and ports held against ports.

They are scored like all others and in a group of their own, so that tuning to the rest shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models, ports
from localisation.cases import Case, Trio
from localisation.copies import linear, norm_like
from localisation.drives import Run
from localisation.planting import change, dtype_of, fault, on_output, variant

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


# --- Their faults ---------------------------------------------------------------------------------

BOTH = ("same", "bf16")


def held(build: Any, path: str, kind: str, **more: Any) -> Any:
    """Declare a fault of the group held out."""
    return fault(build, path, kind, **{"regimes": BOTH, "group": "held out", **more})


@held(translator, "decoder.1.cross", "weights", run=translation)
def cross_attends_to_itself(module, root):
    def source(self, source, x, memory):
        return torch.cat([x, memory[:, x.shape[1] :]], 1)

    change(module, source=source)


@held(translator, "encoder.0.attention", "rope", run=translation)
def distance_one_off(module, root):
    change(module, bias=lambda self, bias, q, k: bias(q, k).roll(1, 2))


@held(translator, "encoder.1", "residuals", run=translation)
def norm_before_instead_of_after(module, root):
    def forward(self, forward, x, hidden):
        h = self.norm1(x)
        x = x + self.attention(h, h, hidden)
        return x + self.feed(self.norm2(x))

    change(module, forward=forward)


@held(translator, "", "attention scale", run=translation)
def head_not_scaled(module, root):
    change(module, scaled=lambda self, scaled, x: x)


@held(translator, "feeds.2.0", "weights", port=PortedTranslator, run=translation)
def ported_feed_rows(module, root):
    module.weight.data[[3, 30]] = module.weight.data[[30, 3]]


@held(translator, "crosses.1.k_proj", "weights", port=PortedTranslator, run=translation)
def ported_cross_keys(module, root):
    module.bias.data += 0.3
    module.weight.data[5] *= -1


@held(translator, "mixers.1", "rope", port=PortedTranslator, run=translation)
def ported_table_reversed(module, root):
    change(module, shift=lambda self, shift, queries, keys: shift(queries, keys).flip(2))


@held(recurrent, "cells.1", "KV cache", run=drives.decode, position=3)
def state_stops_at_step_three(module, root):
    def forward(self, forward, x):
        self.calls = 0 if x.shape[1] > 1 else self.calls + 1
        before = self.memory
        out = forward(x)
        if self.calls >= 3:
            self.memory = before
        return out

    module.calls = 0
    module.state = ("memory", "calls")
    change(module, forward=forward)


@held(recurrent, "cells.0", "activations", run=drives.decode)
def gates_exchanged(module, root):
    change(module, step=lambda self, step, memory, keep, new: step(memory, 1 - keep, new))


@held(recurrent, "cells.2.read", "tails", run=drives.decode, position=1)
def read_tail_in_decode(module, root):
    def forward(self, forward, x):
        return (
            forward(x) if x.shape[1] > 1 else F.linear(x[..., :-6], self.weight[:, :-6], self.bias)
        )

    change(module, forward=forward)


@held(recurrent, "body.1", "KV cache", port=PortedRecurrent, run=drives.decode, position=2)
def ported_state_of_the_other_row(module, root):
    def mix(self, mix, h, new, keep):
        self.steps = self.steps + 1 if self.kept else 0
        return mix(h.flip(0) if self.steps >= 2 else h, new, keep)

    module.steps = 0
    module.state = ("kept", "steps")
    change(module, mix=mix)


@held(recurrent, "body.0.project", "weights", port=PortedRecurrent, run=drives.decode)
def ported_projection_row(module, root):
    module.weight.data[60] *= 1.5


@held(unet, "up", "conv layers", run=drives.picture)
def transposed_kernel_flipped(module, root):
    module.weight.data = module.weight.data.flip(2)


@held(unet, "", "conv layers", run=drives.picture)
def corners_aligned(module, root):
    def coarse(self, coarse, image):
        small = F.avg_pool2d(image, 2)
        return F.interpolate(small, scale_factor=2, mode="bilinear", align_corners=True)

    change(module, coarse=coarse)


@held(unet, "middle.0", "conv layers", run=drives.picture)
def one_border_lost(module, root):
    on_output(module, lambda out: F.pad(out[..., :-1], (0, 1)))


@held(wide_llama, "h.1", "head mapping", port=ports.InlineLlama, against=ports.FusedLlama)
def wide_groups_rolled(module, root):
    change(
        module, attention=lambda self, attention, q, k, v, mask: attention(q, k.roll(1, 2), v, mask)
    )


@held(
    wide_llama,
    "blocks.0.ffn.w13",
    "storage precision",
    port=ports.FusedLlama,
    against=ports.FlatLlama,
)
def wide_eight_bits(module, root):
    module.weight.data = module.weight.data.to(torch.float8_e4m3fn).to(module.weight.dtype)


@held(wide_llama, "stack.1", "norm layers", port=ports.FlatLlama, against=ports.NestedLlama)
def wide_norm_without_weight(module, root):
    module.g_2.data.fill_(1)


@held(
    wide_llama,
    "transformer.blocks.1.1.pre",
    "norm layers",
    port=ports.NestedLlama,
    against=ports.InlineLlama,
)
def wide_norm_of_the_largest(module, root):
    def forward(self, forward, x):
        return x / x.abs().amax(-1, keepdim=True) * self.scale

    change(module, forward=forward)


@held(
    wide_decoder,
    "transformer.blocks.0.0.fn",
    "KV cache",
    port=ports.NestedLlama,
    against=ports.FusedLlama,
    run=drives.decode,
    position=2,
)
def wide_oldest_value_lost(module, root):
    def keep(self, keep, key, value):
        key, value = keep(key, value)
        if key.shape[2] < 7:
            return key, value
        return key, torch.cat([torch.zeros_like(value[:, :, :1]), value[:, :, 1:]], 2)

    change(module, keep=keep)


def cases() -> Iterator[Case]:
    """Yield what is harmless; the faults are declared with all others."""
    plain = (
        ("translator ported", translator, PortedTranslator, None, translation),
        ("recurrent ported", recurrent, PortedRecurrent, None, drives.decode),
        ("unet", unet, None, None, drives.picture),
        ("inline against fused", wide_llama, ports.InlineLlama, ports.FusedLlama, drives.text),
        ("nested against fused", wide_decoder, ports.NestedLlama, ports.FusedLlama, drives.decode),
    )
    for name, build, port, against, run in plain:
        for regime in ("same", "reordered") if port is None else BOTH:

            def make(b: Any = build, p: Any = port, a: Any = against, r: str = regime) -> Trio:
                return variant(b, r, port=p, against=a)

            yield Case(
                f"held.{name}/{regime}", "held out", name, regime, make, run, dtype_of(regime)
            )
