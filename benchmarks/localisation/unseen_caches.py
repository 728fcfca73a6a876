"""A small decoder whose attention keeps keys and values in nine ways; nobody tuned the tool on it.

Each way is an attention of its own with one method for each step that people get wrong. The same
weights give the same logits whichever way is taken, so one may be held against another. Knows
nothing of faults.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation.sizes import weigh

DIM, HEADS, HEAD, VOCAB, BATCH = 48, 3, 16, 89, 2
WINDOW, PAGE, LONGEST = 6, 4, 32


def turned(x: Tensor, at: Tensor, base: float = 500.0) -> Tensor:
    """Rotate neighbouring pairs: x is [B, T, H, D], `at` is [T]."""
    steps = base ** (-torch.arange(0, x.shape[-1], 2, dtype=torch.float32) / x.shape[-1])
    angle = at.to(torch.float32)[:, None, None] * steps
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Keeping(nn.Module):
    """Attention; what is kept is the matter of those that inherit."""

    state: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * HEADS * HEAD)
        self.out = nn.Linear(HEADS * HEAD, DIM)

    def forward(self, x: Tensor, at: Tensor, past: Any = None, beam: Tensor | None = None) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD)).unbind(2)
        q, k = turned(q, self.query_at(at)), turned(k, self.key_at(at))
        if beam is not None:
            self.reorder(beam)
        keys, values, when, past = self.keep(k, v, at, past)
        out = self.out(self.attend(q, keys, values, self.seen(at, when)))
        return out if past is None else (out, past)

    def query_at(self, at: Tensor) -> Tensor:
        return at

    def key_at(self, at: Tensor) -> Tensor:
        return at

    def keep(
        self, k: Tensor, v: Tensor, at: Tensor, past: Any
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return keys, values, the position of each, and what is handed on."""
        raise NotImplementedError

    def seen(self, at: Tensor, when: Tensor) -> Tensor:
        return (when <= at[:, None]) & (when >= 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / HEAD**0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)

    def reorder(self, beam: Tensor) -> None:
        raise NotImplementedError

    def reset(self) -> None:
        """Forget."""


class Ring(Keeping):
    """The last `WINDOW` tokens in a ring."""

    state = ("ring_k", "ring_v", "when")

    def __init__(self) -> None:
        super().__init__()
        for name in ("ring_k", "ring_v"):
            self.register_buffer(name, torch.zeros(BATCH, WINDOW, HEADS, HEAD), persistent=False)
        self.register_buffer("when", torch.full((WINDOW,), -1), persistent=False)

    def keep(self, k, v, at, past):
        slot = self.slot(at)
        self.ring_k[:, slot], self.ring_v[:, slot] = k, v
        self.when[slot] = at
        return self.ring_k, self.ring_v, self.when, None

    def slot(self, at: Tensor) -> Tensor:
        return at % WINDOW

    def seen(self, at, when):
        return super().seen(at, when) & (when > at[:, None] - WINDOW)

    def reset(self):
        self.ring_k.zero_()
        self.ring_v.zero_()
        self.when.fill_(-1)


class Paged(Keeping):
    """Pages of four tokens from a pool, found by a table for each row."""

    state = ("pool", "table")

    def __init__(self) -> None:
        super().__init__()
        pages = LONGEST // PAGE
        self.register_buffer("pool", torch.zeros(2, BATCH * pages, PAGE, HEADS, HEAD), False)
        order = torch.randperm(BATCH * pages, generator=torch.Generator().manual_seed(3))
        self.register_buffer("table", order.view(BATCH, pages), persistent=False)

    def keep(self, k, v, at, past):
        page, slot = self.place(at)
        self.pool[0, page, slot] = k
        self.pool[1, page, slot] = v
        held = self.held(int(at[-1]) + 1)
        k, v = self.pool[:, held].flatten(2, 3)
        when = torch.arange(k.shape[1])
        return k, v, torch.where(when <= at[-1], when, -1), None

    def place(self, at: Tensor) -> tuple[Tensor, Tensor]:
        return self.table[:, at // PAGE], at % PAGE

    def held(self, length: int) -> Tensor:
        return self.table[:, : -(-length // PAGE)]

    def reset(self):
        self.pool.zero_()


class Listed(Keeping):
    """A list to which each call appends a pair; rows may be taken anew, for a beam."""

    state = ("past",)

    def __init__(self) -> None:
        super().__init__()
        self.past: list[tuple[Tensor, Tensor]] = []

    def keep(self, k, v, at, past):
        self.past = [*self.past, (k, v)]
        return *self.joined(), torch.arange(int(at[-1]) + 1), None

    def joined(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat(each, 1) for each in zip(*self.past, strict=True))

    def reorder(self, beam):
        self.past = [(k[beam], v[beam]) for k, v in self.past]

    def reset(self):
        self.past = []


class Static(Keeping):
    """Buffers of full length, written by `index_copy_`."""

    state = ("keys", "values")

    def __init__(self) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(BATCH, LONGEST, HEADS, HEAD), persistent=False)

    def keep(self, k, v, at, past):
        self.keys.index_copy_(1, self.index(at), k)
        self.values.index_copy_(1, at, v)
        return self.keys, self.values, torch.arange(LONGEST), None

    def index(self, at: Tensor) -> Tensor:
        return at

    def reset(self):
        self.keys.zero_()
        self.values.zero_()


class Handed(Keeping):
    """A pair of tensors comes in, a longer one goes out."""

    def keep(self, k, v, at, past):
        if past:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        return k, v, torch.arange(k.shape[1]), (k, v)


@dataclass(frozen=True)
class Snapshot:
    """What a layer knows of the past; never written to, replaced instead."""

    keys: Tensor
    values: Tensor
    length: int = 0


class Replaced(Keeping):
    """A frozen dataclass comes in, another goes out; rolled back where the caller goes back."""

    def keep(self, k, v, at, past):
        old = past or Snapshot(k[:, :0], v[:, :0])
        old = self.cut(old, int(at[0]))
        new = replace(
            old,
            keys=torch.cat([old.keys, k], 1),
            values=torch.cat([old.values, v], 1),
            length=old.length + k.shape[1],
        )
        return new.keys, new.values, torch.arange(new.length), new

    def cut(self, old: Snapshot, length: int) -> Snapshot:
        return Snapshot(old.keys[:, :length], old.values[:, :length], length)


class Eight(Keeping):
    """Eight bits and a scale for each token and head."""

    state = ("codes", "scales")

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "codes", torch.zeros(2, BATCH, LONGEST, HEADS, HEAD, dtype=torch.int8), False
        )
        self.register_buffer("scales", torch.zeros(2, BATCH, LONGEST, HEADS, 1), persistent=False)

    def keep(self, k, v, at, past):
        both = torch.stack([k, v])
        scale = self.scale(both, at)
        self.codes[:, :, at] = (both / scale).round().clamp(-127, 127).to(torch.int8)
        self.scales[:, :, at] = scale
        end = int(at[-1]) + 1
        k, v = self.codes[:, :, :end].to(self.scales.dtype) * self.scales[:, :, :end]
        return k, v, torch.arange(end), None

    def scale(self, both: Tensor, at: Tensor) -> Tensor:
        return both.abs().amax(-1, keepdim=True) / 127

    def reset(self):
        self.codes.zero_()
        self.scales.zero_()


class Pooled(Keeping):
    """One tensor for all layers, handed in and written to."""

    layer = 0

    def keep(self, k, v, at, past):
        past[self.row(at)][0][:, at] = k
        past[self.row(at)][1][:, at] = v
        return past[self.layer, 0], past[self.layer, 1], torch.arange(LONGEST), None

    def row(self, at: Tensor) -> int:
        return self.layer


class Distant(Listed):
    """A list, and distances in place of rotations."""

    def query_at(self, at):
        return torch.zeros_like(at)

    key_at = query_at

    def attend(self, q, k, v, seen):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / HEAD**0.5
        scores = scores + self.bias(q.shape[1], k.shape[1]).to(scores.dtype)
        scores = scores.masked_fill(~seen, float("-inf"))
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2)

    def bias(self, queries: int, keys: int) -> Tensor:
        apart = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        return -(0.5 ** torch.arange(1, HEADS + 1))[:, None, None] * apart


class Feed(nn.Module):
    """A feed-forward with a squared ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(DIM, 3 * DIM)
        self.narrow = nn.Linear(3 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(F.relu(self.wide(x)).square())


class Layer(nn.Module):
    """Attention and feed-forward side by side, one norm."""

    def __init__(self, attention: type[Keeping]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.attn = attention()
        self.feed = Feed()

    def forward(self, x: Tensor, at: Tensor, past: Any = None, beam: Tensor | None = None) -> Any:
        normed = self.norm(x)
        out = self.attn(normed, at, past, beam)
        out, past = out if isinstance(out, tuple) else (out, None)
        x = x + out + self.feed(normed)
        return x if past is None else (x, past)


class Decoder(nn.Module):
    """Two layers; `start` is how many tokens came before, a beam is which rows go on."""

    def __init__(self, attention: type[Keeping]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer(attention) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        for number, layer in enumerate(self.layers):
            layer.attn.layer = number

    def forward(
        self, tokens: Tensor, start: int, past: Any = None, beam: Tensor | None = None
    ) -> Any:
        x, at, kept = self.embed(tokens), self.positions(tokens, start), []
        for number, layer in enumerate(self.layers):
            mine = past[number] if isinstance(past, tuple) else past
            x = layer(x, at, mine, beam)
            if isinstance(x, tuple):
                x, mine = x
                kept.append(mine)
        logits = self.head(self.norm(x))
        return (logits, tuple(kept)) if kept else logits

    def positions(self, tokens: Tensor, start: int) -> Tensor:
        return torch.arange(start, start + tokens.shape[1])

    def reset(self) -> None:
        for layer in self.layers:
            layer.attn.reset()


def decoder(attention: type[Keeping], *, outliers: bool = False) -> Decoder:
    """Return the decoder; the weights are the same whatever it keeps."""
    model = Decoder(attention)
    weigh(model, 61, outliers)
    return model
