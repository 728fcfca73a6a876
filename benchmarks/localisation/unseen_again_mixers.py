"""Models that mix places without self-attention over them: gated products, and latents that look.

The ports keep weights transposed, take places last, and use the attention of torch.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.planting import change, on_output
from localisation.unseen_again import BOTH, again, harmless

# --- Gates over places ----------------------------------------------------------------------------


class SpatialGate(nn.Module):
    """Half of the channels gates the other, after a product over places."""

    def __init__(self, inner: int, length: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(inner)
        self.proj = nn.Conv1d(length, length, 1)

    def forward(self, x: Tensor) -> Tensor:
        u, v = x.chunk(2, -1)
        return self.gated(u, self.proj(self.norm(v)))

    def gated(self, u: Tensor, v: Tensor) -> Tensor:
        return u * v


class GatedBlock(nn.Module):
    """Norm, widen, gate over places, narrow."""

    def __init__(self, dim: int, inner: int, length: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.proj_in, self.proj_out = nn.Linear(dim, 2 * inner), nn.Linear(inner, dim)
        self.sgu = SpatialGate(inner, length)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj_out(self.sgu(F.gelu(self.proj_in(self.norm(x)))))


class GMLP(nn.Module):
    """Patches, gated blocks, a mean, classes."""

    def __init__(self, dim: int = 40, inner: int = 56, length: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, 4)
        self.blocks = nn.ModuleList(GatedBlock(dim, inner, length) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).mT
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def gmlp(*, outliers: bool = False) -> nn.Module:
    return models.weigh(GMLP(), 211, outliers)


class TurnedBlock(nn.Module):
    """The same with weights transposed, functions only."""

    def __init__(self, of: GatedBlock) -> None:
        super().__init__()
        self.w_in = nn.Parameter(of.proj_in.weight.detach().T.clone())
        self.b_in = nn.Parameter(of.proj_in.bias.detach().clone())
        self.w_out = nn.Parameter(of.proj_out.weight.detach().T.clone())
        self.b_out = nn.Parameter(of.proj_out.bias.detach().clone())
        self.w_places = nn.Parameter(of.sgu.proj.weight.detach()[..., 0].T.clone())
        self.b_places = nn.Parameter(of.sgu.proj.bias.detach().clone())
        self.norms = nn.ParameterList(
            each.detach().clone()
            for norm in (of.norm, of.sgu.norm)
            for each in (norm.weight, norm.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(torch.matmul(self.normed(x, 0), self.w_in) + self.b_in)
        u, v = self.halves(h)
        v = torch.einsum("bsc,st->btc", self.normed(v, 2), self.w_places)
        return torch.matmul(u * self.offset(v), self.w_out) + self.b_out + x

    def halves(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :]

    def offset(self, v: Tensor) -> Tensor:
        return v + self.b_places[:, None]

    def normed(self, x: Tensor, at: int) -> Tensor:
        wide = x - x.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        return wide * self.norms[at] + self.norms[at + 1]


class TurnedGMLP(nn.Module):
    """The same; patches are cut by hand."""

    def __init__(self, model: GMLP) -> None:
        super().__init__()
        self.cut = linear(model.patch.weight.flatten(1), bias=model.patch.bias.detach())
        self.mixers = nn.Sequential(*(TurnedBlock(each) for each in model.blocks))
        self.last = norm_like(model.norm)
        self.classes = linear(model.head.weight, bias=model.head.bias.detach())

    def forward(self, image: Tensor) -> Tensor:
        patches = image.unflatten(2, (4, 4)).unflatten(4, (4, 4)).permute(0, 2, 4, 1, 3, 5)
        x = self.mixers(self.cut(patches.flatten(3).flatten(1, 2)))
        return self.classes(self.last(x)).mean(1)


@again(gmlp, "mixers.1", "weights", port=TurnedGMLP, run=drives.picture, regimes=BOTH)
def gmlp_places_transposed(module, root):
    module.w_places.data = module.w_places.data.T.contiguous()


@again(gmlp, "mixers.2", "structure", port=TurnedGMLP, run=drives.picture, regimes=BOTH)
def gmlp_halves_exchanged(module, root):
    change(module, halves=lambda self, halves, h: halves(h)[::-1])


@again(gmlp, "mixers.0", "biases", port=TurnedGMLP, run=drives.picture)
def gmlp_offset_of_channels(module, root):
    change(module, offset=lambda self, offset, v: v)


@again(gmlp, "cut", "weights", port=TurnedGMLP, run=drives.picture)
def gmlp_channels_last_in_the_cut(module, root):
    weight = module.weight.data.unflatten(1, (3, 4, 4))
    module.weight.data = weight.permute(0, 2, 3, 1).flatten(1).contiguous()


@again(gmlp, "blocks.1.sgu", "activations", against=TurnedGMLP, run=drives.picture, regimes=BOTH)
def gmlp_gate_plus_one(module, root):
    change(module, gated=lambda self, gated, u, v: u * (v + 1))


harmless("gmlp turned", gmlp, "same", "reordered", "bf16", port=TurnedGMLP, run=drives.picture)
harmless("gmlp against turned", gmlp, against=TurnedGMLP, run=drives.picture)


# --- Latents that look ----------------------------------------------------------------------------


class Look(nn.Module):
    """Attention of some places to others, with a norm for each."""

    def __init__(self, dim: int, other: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_q, self.norm_kv = nn.LayerNorm(dim), nn.LayerNorm(other)
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(other, 2 * dim, False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        k, v = self.to_kv(self.norm_kv(given)).chunk(2, -1)
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.to_q(self.norm_q(x)), k, v)
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """The feed-forward with its norm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.net = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


class Perceiver(nn.Module):
    """Latents that look at pixels, then at each other; queries look at the latents."""

    def __init__(self, dim: int = 48, latents: int = 12) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.empty(latents, dim))
        self.queries = nn.Parameter(torch.empty(5, dim))
        self.pixels = nn.Linear(3 + 8, 24)
        self.cross, self.cross_ff = Look(dim, 24, 1), Feed(dim)
        self.selves = nn.ModuleList(nn.ModuleList([Look(dim, dim, 4), Feed(dim)]) for _ in range(2))
        self.decode, self.out = Look(dim, dim, 2), nn.Linear(dim, 9)

    def forward(self, image: Tensor) -> Tensor:
        given = self.pixels(torch.cat([self.flat(image), self.places(image)], -1))
        x = self.latents.expand(len(image), -1, -1)
        x = x + self.cross(x, given)
        x = x + self.cross_ff(x)
        for look, feed in self.selves:
            x = x + look(x, x)
            x = x + feed(x)
        return self.out(self.decode(self.queries.expand(len(image), -1, -1), x))

    def flat(self, image: Tensor) -> Tensor:
        return image.flatten(2).mT

    def places(self, image: Tensor) -> Tensor:
        high, wide = image.shape[2:]
        y, x = torch.meshgrid(
            torch.linspace(-1, 1, high), torch.linspace(-1, 1, wide), indexing="ij"
        )
        rates = torch.tensor([1.0, 3.0]) * math.pi
        waves = [f(axis[..., None] * rates) for axis in (y, x) for f in (torch.sin, torch.cos)]
        return torch.cat(waves, -1).flatten(0, 1).to(image.dtype).expand(len(image), -1, -1)


def perceiver(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Perceiver(), 212, outliers)


class Watcher(nn.Module):
    """Look and feed in one, with the attention of torch and places last."""

    def __init__(self, look: Look, feed: Feed | None) -> None:
        super().__init__()
        dim = look.to_q.in_features
        self.heads, self.own = look.heads, look.norm_q.normalized_shape
        self.n1, self.n2 = norm_like(look.norm_q), norm_like(look.norm_kv)
        key, value = look.to_kv.weight.detach().chunk(2)
        self.q, self.k, self.v = linear(look.to_q.weight), linear(key), linear(value)
        self.o = linear(look.to_out.weight, bias=look.to_out.bias.detach())
        self.fed = feed is not None
        if feed is not None:
            self.n3 = norm_like(feed.norm)
            self.up = nn.Conv1d(dim, 3 * dim, 1)
            self.down = nn.Conv1d(3 * dim, dim, 1)
            for new, old in ((self.up, feed.net[0]), (self.down, feed.net[2])):
                new.weight.data = old.weight.detach()[..., None].clone()
                new.bias.data = old.bias.detach().clone()

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        seen = self.seen(self.n1(x), self.n2(given))
        if not self.fed:
            return seen
        x = x + seen
        return x + self.down(F.gelu(self.up(self.n3(x).transpose(1, 2)))).transpose(1, 2)

    def seen(self, x: Tensor, given: Tensor) -> Tensor:
        q, k, v = (self.split(each) for each in (self.q(x), self.k(given), self.v(given)))
        return self.o(F.scaled_dot_product_attention(q, k, v).permute(0, 2, 1, 3).flatten(-2))

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)


class WatchingPerceiver(nn.Module):
    """The same as a list of watchers."""

    def __init__(self, model: Perceiver) -> None:
        super().__init__()
        self.start = nn.Parameter(model.latents.detach().clone())
        self.asked = nn.Parameter(model.queries.detach().clone())
        self.colours = linear(model.pixels.weight[:, :3])
        self.spots = linear(model.pixels.weight[:, 3:], bias=model.pixels.bias.detach())
        self.watchers = nn.ModuleList(
            [Watcher(model.cross, model.cross_ff), *(Watcher(*each) for each in model.selves)]
        )
        self.reader = Watcher(model.decode, None)
        self.answer = linear(model.out.weight, bias=model.out.bias.detach())

    def forward(self, image: Tensor) -> Tensor:
        given = self.colours(image.permute(0, 2, 3, 1)) + self.spots(self.waves(image))
        given = given.flatten(1, 2)
        x = self.start[None].repeat(image.shape[0], 1, 1)
        for n, watcher in enumerate(self.watchers):
            x = watcher(x, x if n else given)
        return self.answer(self.reader(self.asked[None].repeat(image.shape[0], 1, 1), x))

    def waves(self, image: Tensor) -> Tensor:
        y = torch.linspace(-1, 1, image.shape[2])[:, None, None].expand(-1, image.shape[3], -1)
        x = torch.linspace(-1, 1, image.shape[3])[None, :, None].expand(image.shape[2], -1, -1)
        rates = math.pi * torch.tensor([1.0, 3.0])
        parts = [(y * rates).sin(), (y * rates).cos(), (x * rates).sin(), (x * rates).cos()]
        return torch.cat(parts, -1).to(image.dtype)


watched = {"port": WatchingPerceiver, "run": drives.picture}


@again(perceiver, "watchers.1", "head mapping", regimes=BOTH, **watched)
def perceiver_heads_of_the_inside(module, root):
    def split(self, split, x):
        return x.view(*x.shape[:2], -1, self.heads).permute(0, 3, 1, 2)

    change(module, split=split)


@again(perceiver, "watchers.2.v", "weights", **watched)
def perceiver_value_of_the_key(module, root):
    module.weight.data = root.watchers[2].k.weight.data.clone()


@again(perceiver, "", "positions", regimes=BOTH, **watched)
def perceiver_axes_exchanged(module, root):
    change(module, waves=lambda self, waves, image: waves(image).transpose(0, 1))


@again(perceiver, "watchers.0.n2", "eps", regimes=("same",), **watched)
def perceiver_eps_of_the_given(module, root):
    module.eps = 1e-2


@again(perceiver, "watchers.1.down", "activations", **watched)
def perceiver_feed_twice(module, root):
    on_output(module, lambda out: out * 1.5)


@again(perceiver, "reader", "scale", regimes=BOTH, **watched)
def perceiver_read_without_norm(module, root):
    change(module, seen=lambda self, seen, x, given: seen(x * 1.1, given))


@again(
    perceiver,
    "selves.0.0",
    "scale",
    against=WatchingPerceiver,
    run=drives.picture,
)
def perceiver_scale_of_all_heads(module, root):
    def forward(self, forward, x, given):
        k, v = self.to_kv(self.norm_kv(given)).chunk(2, -1)
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.to_q(self.norm_q(x)), k, v)
        )
        weights = (q @ k.mT / math.sqrt(48)).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))

    change(module, forward=forward)


harmless("perceiver watching", perceiver, port=WatchingPerceiver, run=drives.picture)
harmless("perceiver against watching", perceiver, against=WatchingPerceiver, run=drives.picture)
