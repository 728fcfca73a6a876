"""DeBERTa: what a word is and where it stands are attended to apart; some words are pads.

The port looks distances up as vectors before it multiplies, and has one product for all that words
give.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import norm_like
from localisation.planting import change
from localisation.unseen_fifth import BOTH, fifth, harmless
from localisation.unseen_fourth_pairs import same

SPAN, FAR = 4, 16
"""How many buckets each side has, and how far the last one reaches."""


def log_bucket(apart: Tensor) -> Tensor:
    """Return buckets of distances: near ones have one each, others share by logarithm."""
    sign, middle = apart.sign(), SPAN // 2
    near = (apart < middle) & (apart > -middle)
    size = torch.where(near, torch.tensor(middle - 1), apart.abs())
    logs = torch.log(size / middle) / math.log((FAR - 1) / middle) * (middle - 1)
    return torch.where(size <= middle, apart, ((logs.ceil() + middle) * sign).long())


class DebertaEmbeddings(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.word_embeddings, self.LayerNorm = nn.Embedding(101, dim), nn.LayerNorm(dim, eps=1e-7)

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x = self.LayerNorm(self.word_embeddings(tokens))
        return x * keep[..., None].to(x.dtype)


class DisentangledSelfAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads = 4
        self.query_proj, self.key_proj, self.value_proj = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor, keep: Tensor, rel_embeddings: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.query_proj, self.key_proj, self.value_proj))
        scale = math.sqrt(q.shape[-1] * 3)
        places = torch.arange(x.shape[1])
        apart = log_bucket(places[:, None] - places)
        scores = q @ (k.transpose(-1, -2) / scale)
        scores = scores + self.disentangled(q, k, apart, rel_embeddings, scale)
        mask = (keep[:, None, :, None] * keep[:, None, None, :]).bool()
        scores = scores.masked_fill(~mask, torch.finfo(x.dtype).min)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def disentangled(
        self, q: Tensor, k: Tensor, apart: Tensor, rel: Tensor, scale: float
    ) -> Tensor:
        pos_query, pos_key = (self.split(f(rel)[None]) for f in (self.query_proj, self.key_proj))
        shape = (*q.shape[:2], *apart.shape)
        index = (apart + SPAN).clamp(0, 2 * SPAN - 1).expand(shape)
        c2p = (q @ pos_key.transpose(-1, -2)).gather(-1, index)
        index = (-apart + SPAN).clamp(0, 2 * SPAN - 1).expand(shape)
        p2c = (k @ pos_query.transpose(-1, -2)).gather(-1, index).transpose(-1, -2)
        return c2p / scale + p2c / scale


class DebertaSelfOutput(nn.Module):
    def __init__(self, inner: int, dim: int) -> None:
        super().__init__()
        self.dense, self.LayerNorm = nn.Linear(inner, dim), nn.LayerNorm(dim, eps=1e-7)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.LayerNorm(self.dense(x) + before)


class DebertaLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.attention, self.attention_output = (
            DisentangledSelfAttention(dim),
            DebertaSelfOutput(dim, dim),
        )
        self.intermediate, self.output = nn.Linear(dim, 96), DebertaSelfOutput(96, dim)

    def forward(self, x: Tensor, keep: Tensor, rel: Tensor) -> Tensor:
        x = self.attention_output(self.attention(x, keep, rel), x)
        return self.output(F.gelu(self.intermediate(x)), x)


class DebertaEncoder(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.ModuleList(DebertaLayer(dim) for _ in range(3))
        self.rel_embeddings, self.LayerNorm = nn.Embedding(2 * SPAN, dim), nn.LayerNorm(dim, 1e-7)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        rel = self.get_rel_embedding()
        for layer in self.layer:
            x = layer(x, keep, rel)
        return x

    def get_rel_embedding(self) -> Tensor:
        return self.LayerNorm(self.rel_embeddings.weight)


class Deberta(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.embeddings, self.encoder = DebertaEmbeddings(dim), DebertaEncoder(dim)
        self.pooler, self.classifier = nn.Linear(dim, dim), nn.Linear(dim, 7)

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x = self.encoder(self.embeddings(tokens, keep), keep)
        return self.classifier(F.gelu(self.pooler(x[:, 0])))


def deberta(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Deberta(), 503, outliers)


class Buckets(nn.Module):
    """For each pair of places, the number of its vector."""

    def forward(self, length: int) -> Tensor:
        rows = [[self.bucket(i - j) for j in range(length)] for i in range(length)]
        return torch.tensor(rows).add(SPAN).clamp(0, 2 * SPAN - 1)

    def bucket(self, n: int) -> int:
        middle = SPAN // 2
        if abs(n) <= middle:
            return n
        logs = math.log(abs(n) / middle) / math.log((FAR - 1) / middle) * (middle - 1)
        return int(math.copysign(math.ceil(logs) + middle, n))


class ApartAttention(nn.Module):
    def __init__(self, of: DebertaLayer) -> None:
        super().__init__()
        a = of.attention
        self.qkv = same(a.query_proj, a.key_proj, a.value_proj)
        self.qk_of_places = same(a.query_proj, a.key_proj)
        self.proj, self.terms = same(of.attention_output.dense), 3

    def forward(self, x: Tensor, distances: Tensor, numbers: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).unbind(2)
        placed_q, placed_k = (
            self.qk_of_places(distances)[numbers].unflatten(-1, (2, 4, -1)).unbind(2)
        )
        bias = torch.einsum("bihd,ijhd->bhij", q, placed_k) + self.placed(k, placed_q)
        scores = torch.einsum("bihd,bjhd->bhij", q, k) + bias
        weights = (scores / (self.terms * q.shape[-1]) ** 0.5 + mask).softmax(-1)
        return self.proj(torch.einsum("bhij,bjhd->bihd", weights, v).flatten(2))

    def placed(self, k: Tensor, placed_q: Tensor) -> Tensor:
        return torch.einsum("bjhd,ijhd->bhij", k, placed_q)


class ApartLayer(nn.Module):
    def __init__(self, of: DebertaLayer) -> None:
        super().__init__()
        self.attn, self.ln1 = ApartAttention(of), norm_like(of.attention_output.LayerNorm)
        self.fc1, self.fc2 = same(of.intermediate), same(of.output.dense)
        self.ln2 = norm_like(of.output.LayerNorm)

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        x = self.ln1(x + self.attn(x, *more))
        return self.ln2(self.fed(x))

    def fed(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(x)))


class Words(nn.Module):
    def __init__(self, of: DebertaEmbeddings) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(of.word_embeddings.weight.detach().clone())
        self.ln = norm_like(of.LayerNorm)

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        return self.ln(self.table(tokens)).masked_fill(~keep[..., None], 0)


class Distances(nn.Module):
    def __init__(self, of: DebertaEncoder) -> None:
        super().__init__()
        self.table = nn.Parameter(of.rel_embeddings.weight.detach().clone())
        self.ln = norm_like(of.LayerNorm)

    def forward(self) -> Tensor:
        return self.ln(self.table)


class ApartDeberta(nn.Module):
    def __init__(self, model: Deberta) -> None:
        super().__init__()
        self.words, self.buckets = Words(model.embeddings), Buckets()
        self.distances = Distances(model.encoder)
        self.blocks = nn.ModuleList(map(ApartLayer, model.encoder.layer))
        self.pool, self.out = same(model.pooler), same(model.classifier)

    def forward(self, tokens: Tensor, keep: Tensor) -> Tensor:
        x, numbers = self.words(tokens, keep), self.buckets(tokens.shape[1])
        mask, distances = self.mask(keep, x.dtype), self.distances()
        for block in self.blocks:
            x = block(x, distances, numbers, mask)
        return self.out(F.gelu(self.pool(x[:, 0])))

    def mask(self, keep: Tensor, dtype: torch.dtype) -> Tensor:
        seen = keep[:, None, :, None] & keep[:, None, None, :]
        return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min / 2)


def apart(path, kind, **more):
    """Declare a fault of words and places."""
    return fifth(deberta, path, kind, run=drives.padded, **more)


@apart("blocks.1.attn", "scale", port=ApartDeberta, regimes=BOTH)
def deberta_scale_of_plain_attention(module, root):
    module.terms = 1


@apart("blocks.0.attn", "positions", port=ApartDeberta, regimes=BOTH)
def deberta_places_to_words_the_other_way(module, root):
    def placed(self, placed, k, placed_q):
        return torch.einsum("bjhd,jihd->bhij", k, placed_q)

    change(module, placed=placed)


@apart("blocks.2.attn", "positions", port=ApartDeberta)
def deberta_places_to_words_left_out(module, root):
    change(module, placed=lambda self, placed, k, placed_q: 0 * placed(k, placed_q))


@apart("blocks.1.attn.qk_of_places", "weights", port=ApartDeberta)
def deberta_places_without_bias(module, root):
    module.bias.data.zero_()


@apart("buckets", "positions", port=ApartDeberta)
def deberta_logarithm_rounded_down(module, root):
    def bucket(self, bucket, n):
        if abs(n) <= SPAN // 2:
            return n
        logs = math.log(abs(n) / 2) / math.log((FAR - 1) / 2)
        return int(math.copysign(math.floor(logs) + SPAN // 2, n))

    change(module, bucket=bucket)


@apart("distances", "norm layers", port=ApartDeberta)
def deberta_distances_not_normed(module, root):
    change(module, forward=lambda self, forward: self.table)


@apart("", "masks", port=ApartDeberta)
def deberta_pads_are_seen(module, root):
    change(module, mask=lambda self, mask, keep, dtype: torch.zeros_like(mask(keep, dtype)))


@apart("blocks.2", "residuals", port=ApartDeberta, regimes=BOTH)
def deberta_second_residual_left_out(module, root):
    change(module, fed=lambda self, fed, x: self.fc2(F.gelu(self.fc1(x))))


@apart("encoder.layer.1.attention", "positions", against=ApartDeberta)
def deberta_distances_not_in_buckets(module, root):
    def disentangled(self, disentangled, q, k, apart, rel, scale):
        places = torch.arange(len(apart))
        return disentangled(q, k, places[:, None] - places, rel, scale)

    change(module, disentangled=disentangled)


@apart("encoder.layer.0.output.LayerNorm", "norm layers", against=ApartDeberta)
def deberta_norm_without_bias(module, root):
    module.bias.data.zero_()


harmless("deberta apart", deberta, "same", "bf16", port=ApartDeberta, run=drives.padded)
harmless("deberta against apart", deberta, "same", against=ApartDeberta, run=drives.padded)
