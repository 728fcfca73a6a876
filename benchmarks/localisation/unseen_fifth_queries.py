"""DETR: waves for rows and columns, learned queries that look at a picture, boxes.

The port has batch norms in convolutions, what places give to queries and keys beforehand, and all
keys and values of the decoder from one product.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_fifth import BOTH, fifth, harmless
from localisation.unseen_fourth_pairs import same

DIM, SIDE = 48, 5


def photo(dtype: torch.dtype) -> drives.Run:
    """One call on pictures that give five places by five."""
    return drives.Run((drives.image(53, side=20, dtype=dtype),))


class FrozenBatchNorm2d(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 2, 1, bias=False), FrozenBatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 32, 3, 2, 1, bias=False), FrozenBatchNorm2d(32)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class SinePositionEmbedding(nn.Module):
    """Half of the channels for rows, half for columns; sine and cosine take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.scale = 10000, 2 * math.pi

    def forward(self, x: Tensor) -> Tensor:
        places = (torch.arange(x.shape[2]) + 1.0) / (x.shape[2] + 1e-6) * self.scale
        rates = torch.arange(DIM // 2)
        rates = self.temperature ** (2 * torch.div(rates, 2, rounding_mode="floor") / (DIM // 2))
        waves = places[:, None] / rates
        waves = torch.stack((waves[:, 0::2].sin(), waves[:, 1::2].cos()), 2).flatten(1)
        return self.joined(waves).flatten(0, 1).to(x.dtype)

    def joined(self, waves: Tensor) -> Tensor:
        size = (len(waves), len(waves), -1)
        return torch.cat((waves[:, None].expand(size), waves[None].expand(size)), -1)


class DetrAttention(nn.Module):
    """Places are added to what asks and to what is asked, and not to what is told."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(DIM, DIM) for _ in range(4)
        )

    def forward(self, x: Tensor, at: Tensor, of: Tensor, of_at: Tensor) -> Tensor:
        q, k, v = (
            e.unflatten(-1, (4, -1)).transpose(1, 2)
            for e in (self.q_proj(x + at) * 12**-0.5, self.k_proj(of + of_at), self.told(of, of_at))
        )
        return self.out_proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def told(self, of: Tensor, of_at: Tensor) -> Tensor:
        return self.v_proj(of)


class DetrEncoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = DetrAttention()
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 80), nn.Linear(80, DIM)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, at, x, at))
        return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x))))


class DetrDecoderLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.encoder_attn = DetrAttention(), DetrAttention()
        self.self_attn_layer_norm, self.encoder_attn_layer_norm = (
            nn.LayerNorm(DIM) for _ in range(2)
        )
        self.fc1, self.fc2 = nn.Linear(DIM, 80), nn.Linear(80, DIM)
        self.final_layer_norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, queries: Tensor, memory: Tensor, at: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, queries, x, queries))
        x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, queries, memory, at))
        return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x))))


class BoxHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, out) for out in (DIM, DIM, 4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class Detr(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.position_embedding = Backbone(), SinePositionEmbedding()
        self.input_projection = nn.Conv2d(32, DIM, 1)
        self.encoder = nn.ModuleList(DetrEncoderLayer() for _ in range(2))
        self.decoder = nn.ModuleList(DetrDecoderLayer() for _ in range(2))
        self.layernorm = nn.LayerNorm(DIM)
        self.query_position_embeddings = nn.Embedding(6, DIM)
        self.class_labels_classifier, self.bbox_predictor = nn.Linear(DIM, 8), BoxHead()

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.input_projection(self.backbone(image))
        at, x = self.position_embedding(x), x.flatten(2).transpose(1, 2)
        for layer in self.encoder:
            x = layer(x, at)
        queries = self.query_position_embeddings.weight
        out = torch.zeros_like(queries).expand(len(image), -1, -1)
        for layer in self.decoder:
            out = layer(out, queries, x, at)
        out = self.layernorm(out)
        return self.class_labels_classifier(out), self.bbox_predictor(out).sigmoid()


def detr(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(Detr(), 506, outliers)
    generator = torch.Generator().manual_seed(507)
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            module.weight += 0.2 * torch.randn(module.weight.shape, generator=generator)
            module.bias.copy_(0.1 * torch.randn(module.bias.shape, generator=generator))
    return model


def folded(conv: nn.Conv2d, norm: FrozenBatchNorm2d) -> nn.Conv2d:
    """Return one convolution for a convolution and a norm."""
    out = nn.Conv2d(conv.in_channels, conv.out_channels, 3, 2, 1)
    scale = norm.weight / (norm.running_var + 1e-5).sqrt()
    out.weight.data = conv.weight.detach() * scale[:, None, None, None]
    out.bias.data = norm.bias - norm.running_mean * scale
    return out


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend with four heads."""
    q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Waves(nn.Module):
    """What the places are, for all pictures."""

    def forward(self) -> Tensor:
        at = torch.tensor([self.place(n) for n in range(SIDE)])
        rates = 10000.0 ** -(torch.arange(DIM // 4) / (DIM // 4))
        waves = torch.view_as_real(torch.polar(torch.ones(()), at[:, None] * rates)).flip(-1)
        rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
        waves = self.ordered(waves)
        return torch.cat((waves[rows], waves[columns]), -1).flatten(0, 1)

    def place(self, n: int) -> float:
        return 2 * math.pi * (n + 1) / (SIDE + 1e-6)

    def ordered(self, waves: Tensor) -> Tensor:
        return waves.flatten(1)


class SelfLook(nn.Module):
    """Places go through the products of queries and keys on their own."""

    def __init__(self, of: DetrAttention) -> None:
        super().__init__()
        self.qkv, self.out = same(of.q_proj, of.k_proj, of.v_proj), same(of.out_proj)
        self.at = linear(of.q_proj.weight, of.k_proj.weight)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        more_q, more_k = self.at(at).chunk(2, -1)
        return self.out(attended(q + more_q, k + more_k, v))


class Looked(nn.Module):
    def __init__(self, of: DetrEncoderLayer) -> None:
        super().__init__()
        self.look, self.ln1 = SelfLook(of.self_attn), norm_like(of.self_attn_layer_norm)
        self.ln2 = norm_like(of.final_layer_norm)
        self.mlp = nn.Sequential(same(of.fc1), nn.ReLU(), same(of.fc2))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.normed(x, self.look(x, at))

    def normed(self, x: Tensor, seen: Tensor) -> Tensor:
        x = self.ln1(x + seen)
        return self.ln2(x + self.mlp(x))


class Asking(nn.Module):
    """Keys and values of the picture are handed to it."""

    def __init__(self, of: DetrDecoderLayer) -> None:
        super().__init__()
        self.look, self.ln1 = SelfLook(of.self_attn), norm_like(of.self_attn_layer_norm)
        self.q, self.out = same(of.encoder_attn.q_proj), same(of.encoder_attn.out_proj)
        self.ln2, self.ln3 = norm_like(of.encoder_attn_layer_norm), norm_like(of.final_layer_norm)
        self.mlp = nn.Sequential(same(of.fc1), nn.ReLU(), same(of.fc2))

    def forward(self, x: Tensor, queries: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = self.ln1(x + self.look(x, queries))
        x = self.ln2(x + self.out(attended(self.q(self.asked(x, queries)), k, v)))
        return self.ln3(x + self.mlp(x))

    def asked(self, x: Tensor, queries: Tensor) -> Tensor:
        return x + queries


class Told(nn.Module):
    """Keys and values of all layers of the decoder from one product."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        olds = [each.encoder_attn for each in layers]
        self.k, self.v = same(*(e.k_proj for e in olds)), same(*(e.v_proj for e in olds))

    def forward(self, memory: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        return self.k(memory + at).split(DIM, -1), self.values(memory, at).split(DIM, -1)

    def values(self, memory: Tensor, at: Tensor) -> Tensor:
        return self.v(memory)


class FoldedDetr(nn.Module):
    def __init__(self, model: Detr) -> None:
        super().__init__()
        b = model.backbone
        self.c1, self.c2 = folded(b.conv1, b.bn1), folded(b.conv2, b.bn2)
        proj = model.input_projection
        self.proj = linear(proj.weight.detach().flatten(1), bias=proj.bias.detach())
        self.waves, self.told = Waves(), Told(model.decoder)
        self.enc, self.dec = (
            nn.ModuleList(map(Looked, model.encoder)),
            nn.ModuleList(map(Asking, model.decoder)),
        )
        self.ln = norm_like(model.layernorm)
        self.queries = nn.Parameter(model.query_position_embeddings.weight.detach().clone())
        self.classes = same(model.class_labels_classifier)
        first, second, third = map(same, model.bbox_predictor.layers)
        self.boxes = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.proj(self.c2(self.c1(image).relu()).relu().flatten(2).mT)
        at = self.waves().to(x.dtype)
        for layer in self.enc:
            x = layer(x, at)
        keys, values = self.told(x, at)
        out = x.new_zeros(len(x), *self.queries.shape)
        for layer, k, v in zip(self.dec, keys, values, strict=True):
            out = layer(out, self.queries, k, v)
        return self.read(out)

    def read(self, out: Tensor) -> tuple[Tensor, Tensor]:
        out = self.ln(out)
        return self.classes(out), self.boxes(out).sigmoid()


def found(path, kind, **more):
    """Declare a fault of detection."""
    return fifth(detr, path, kind, run=photo, **more)


@found("c2", "norm layers", port=FoldedDetr)
def detr_folded_bias_left_out(module, root):
    module.bias.data.zero_()


@found("waves", "positions", port=FoldedDetr, regimes=BOTH)
def detr_all_sines_first(module, root):
    change(module, ordered=lambda self, ordered, waves: waves.transpose(1, 2).flatten(1))


@found("waves", "positions", port=FoldedDetr)
def detr_places_from_zero(module, root):
    change(module, place=lambda self, place, n: place(n - 1))


@found("enc.1.look.at", "weights", port=FoldedDetr)
def detr_places_for_queries_only(module, root):
    module.weight.data[DIM:] = 0


@found("enc.0", "norm layers", port=FoldedDetr)
def detr_norm_before_the_sum(module, root):
    def normed(self, normed, x, seen):
        x = x + self.ln1(seen)
        return self.ln2(x + self.mlp(x))

    change(module, normed=normed)


@found("told", "positions", port=FoldedDetr, regimes=BOTH)
def detr_places_in_values(module, root):
    change(module, values=lambda self, values, memory, at: self.v(memory + at))


@found("dec.1", "positions", port=FoldedDetr)
def detr_queries_not_added_to_ask(module, root):
    change(module, asked=lambda self, asked, x, queries: x)


@found("", "norm layers", port=FoldedDetr)
def detr_last_norm_left_out(module, root):
    change(module, read=lambda self, read, out: (self.classes(out), self.boxes(out).sigmoid()))


@found("told.k", "weights", port=FoldedDetr)
def detr_keys_of_the_other_layer(module, root):
    module.weight.data = module.weight.data.roll(DIM, 0)
    module.bias.data = module.bias.data.roll(DIM, 0)


@found("position_embedding", "positions", against=FoldedDetr)
def detr_columns_before_rows(module, root):
    change(module, joined=lambda self, joined, waves: joined(waves).transpose(0, 1))


@found("encoder.0.self_attn", "positions", against=FoldedDetr)
def detr_encoder_tells_places(module, root):
    change(module, told=lambda self, told, of, of_at: self.v_proj(of + of_at))


harmless("detr folded", detr, "same", "bf16", port=FoldedDetr, run=photo)
harmless("detr against folded", detr, "same", against=FoldedDetr, run=photo)
