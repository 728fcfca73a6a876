"""BART, from one text to another, some of it padded.

The port fuses what comes from one input, and tells by booleans what is seen.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_fourth import BOTH, fourth, harmless


def same(*of: nn.Linear) -> nn.Linear:
    """Return one layer that holds these, with their biases."""
    bias = torch.cat([each.bias.detach() for each in of])
    return linear(*(each.weight for each in of), bias=bias)


def texts(dtype: torch.dtype) -> drives.Run:
    """One call on two texts, of which the second is padded, and what was said of them so far."""
    keep = torch.ones(2, 14, dtype=torch.bool)
    keep[1, 9:] = False
    return drives.Run((drives.tokens(41, length=14), keep, drives.tokens(42, length=10)))


class BartPositions(nn.Embedding):
    """The first two rows are not for positions."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(torch.arange(tokens.shape[1]) + 2)


class BartAttention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scaling = heads, (dim // heads) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(dim, dim) for _ in range(4)
        )

    def forward(self, x: Tensor, of: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            e.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for e in (self.q_proj(x) * self.scaling, self.k_proj(of), self.v_proj(of))
        )
        weights = (q @ k.mT + mask).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class BartLayer(nn.Module):
    """Norms come after the sums; that of a decoder looks at what was encoded, too."""

    def __init__(self, dim: int, crossed: bool) -> None:
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = BartAttention(dim, 4), nn.LayerNorm(dim)
        if crossed:
            self.encoder_attn = BartAttention(dim, 4)
            self.encoder_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, mask: Tensor, of: Tensor | None = None, pads=None) -> Tensor:
        h = self.self_attn_layer_norm(x + self.self_attn(x, x, mask))
        if of is not None:
            h = self.crossed(x, h, self.encoder_attn(h, of, pads))
        return self.final_layer_norm(h + self.fc2(F.gelu(self.fc1(h))))

    def crossed(self, x: Tensor, h: Tensor, seen: Tensor) -> Tensor:
        return self.encoder_attn_layer_norm(h + seen)


class BartStack(nn.Module):
    def __init__(self, dim: int, crossed: bool) -> None:
        super().__init__()
        self.embed_positions, self.layernorm_embedding = BartPositions(34, dim), nn.LayerNorm(dim)
        self.layers = nn.ModuleList(BartLayer(dim, crossed) for _ in range(2))

    def forward(self, x: Tensor, tokens: Tensor, mask: Tensor, *more: Tensor) -> Tensor:
        x = self.layernorm_embedding(x + self.embed_positions(tokens))
        for layer in self.layers:
            x = layer(x, mask, *more)
        return x


class Bart(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.shared, self.final_logits_bias = nn.Embedding(101, dim), nn.Parameter(torch.zeros(101))
        self.encoder, self.decoder = BartStack(dim, False), BartStack(dim, True)

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        low = torch.finfo(self.shared.weight.dtype).min
        pads = (~keep)[:, None, None].to(self.shared.weight.dtype) * low
        later = torch.full((target.shape[1],) * 2, low, dtype=pads.dtype).triu(1)
        encoded = self.encoder(self.embedded(source), source, pads)
        made = self.decoder(self.embedded(target), target, later, encoded, pads)
        return F.linear(made, self.shared.weight) + self.final_logits_bias

    def embedded(self, tokens: Tensor) -> Tensor:
        return self.shared(tokens) * math.sqrt(48)


def bart(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(Bart(), 451, outliers)
    model.shared.weight.data /= 4
    return model


class Own(nn.Module):
    """Of itself; one product for all three."""

    def __init__(self, of: BartAttention) -> None:
        super().__init__()
        self.in_proj, self.out = same(of.q_proj, of.k_proj, of.v_proj), same(of.out_proj)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = self.in_proj(x).unflatten(-1, (3, 4, 12)).permute(2, 0, 3, 1, 4)
        return self.out(self.attended(q, k, v, mask).transpose(1, 2).flatten(2))

    def attended(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)


class Other(nn.Module):
    """Of what was encoded."""

    def __init__(self, of: BartAttention) -> None:
        super().__init__()
        self.q, self.kv, self.out = same(of.q_proj), same(of.k_proj, of.v_proj), same(of.out_proj)

    def forward(self, x: Tensor, of: Tensor, mask: Tensor) -> Tensor:
        q = self.q(x).view(*x.shape[:2], 4, 12)
        k, v = self.kv(of).view(*of.shape[:2], 2, 4, 12).unbind(2)
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 12**0.5
        weights = torch.where(self.turned(mask), scores, -torch.inf).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))

    def turned(self, mask: Tensor) -> Tensor:
        return mask


class FusedLayer(nn.Module):
    def __init__(self, of: BartLayer) -> None:
        super().__init__()
        self.own, self.ln1 = Own(of.self_attn), norm_like(of.self_attn_layer_norm)
        self.cross = Other(of.encoder_attn) if hasattr(of, "encoder_attn") else None
        self.ln2 = None if self.cross is None else norm_like(of.encoder_attn_layer_norm)
        self.up, self.down, self.ln3 = same(of.fc1), same(of.fc2), norm_like(of.final_layer_norm)

    def forward(self, x: Tensor, mask: Tensor, of: Tensor | None = None) -> Tensor:
        x = self.ln1(self.own(x, mask if of is None else None) + x)
        x = x if of is None else self.looked(x, of, mask)
        return self.ln3(self.down(F.gelu(self.up(x))) + x)

    def looked(self, x: Tensor, of: Tensor, mask: Tensor) -> Tensor:
        return self.ln2(self.cross(x, of, mask) + x)


class Words(nn.Module):
    """Tokens and places, normed."""

    def __init__(self, table: nn.Embedding, of: BartStack) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(table.weight.detach() * math.sqrt(48))
        self.wpe = nn.Parameter(of.embed_positions.weight.detach().clone())
        self.ln, self.offset = norm_like(of.layernorm_embedding), 2

    def forward(self, tokens: Tensor) -> Tensor:
        return self.ln(self.wte(tokens) + self.wpe[self.offset :][: tokens.shape[1]])


class FusedBart(nn.Module):
    def __init__(self, model: Bart) -> None:
        super().__init__()
        self.read, self.say = Words(model.shared, model.encoder), Words(model.shared, model.decoder)
        self.enc = nn.ModuleList(map(FusedLayer, model.encoder.layers))
        self.dec = nn.ModuleList(map(FusedLayer, model.decoder.layers))
        self.head = linear(model.shared.weight, bias=model.final_logits_bias.detach())

    def forward(self, source: Tensor, keep: Tensor, target: Tensor) -> Tensor:
        x, mask = self.read(source), keep[:, None, None]
        for layer in self.enc:
            x = layer(x, mask)
        y = self.say(target)
        for layer in self.dec:
            y = layer(y, mask, x)
        return self.head(y)


def translated(path, kind, **more):
    """Declare a fault of what reads a text and says another."""
    return fourth(bart, path, kind, run=texts, **more)


@translated("enc.1.own", "masks", port=FusedBart, regimes=BOTH)
def bart_pads_are_seen(module, root):
    def attended(self, attended, q, k, v, mask):
        return attended(q, k, v, torch.ones_like(mask))

    change(module, attended=attended)


@translated("dec.0.cross", "masks", port=FusedBart)
def bart_pads_on_the_left(module, root):
    change(module, turned=lambda self, turned, mask: mask.flip(-1))


@translated("say", "positions", port=FusedBart)
def bart_places_from_the_first_row(module, root):
    module.offset = 0


@translated("dec.1", "norm layers", port=FusedBart)
def bart_norm_before_looking(module, root):
    change(module, looked=lambda self, looked, x, of, mask: x + self.cross(self.ln2(x), of, mask))


@translated("dec.1.own", "masks", port=FusedBart, regimes=BOTH)
def bart_later_words_are_seen(module, root):
    def attended(self, attended, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v)

    change(module, attended=attended)


@translated("head", "weights", port=FusedBart)
def bart_bias_of_the_logits_forgotten(module, root):
    module.bias.data.zero_()


@translated("decoder.layers.0.encoder_attn", "scale", against=FusedBart)
def bart_queries_not_scaled(module, root):
    module.scaling = 1.0


@translated("decoder.layers.1", "residuals", against=FusedBart, regimes=BOTH)
def bart_looks_past_what_it_said(module, root):
    def crossed(self, crossed, x, h, seen):
        return crossed(x, x, seen)

    change(module, crossed=crossed)


harmless("bart fused", bart, "same", "bf16", port=FusedBart, run=texts)
harmless("bart against fused", bart, "same", against=FusedBart, run=texts)
