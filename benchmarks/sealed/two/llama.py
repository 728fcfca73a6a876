"""Llama 3 in Meta's style against transformers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from sealed.cases import Case, Pair
from sealed.two.common import (
    Edit,
    Family,
    both,
    copied,
    exchanged,
    finish,
    paths,
    randomise,
    recode,
    replaced,
    reweighed,
    rounded,
    scaled_row,
    setting,
    tokens,
)
from sealed.two.llama_port import (
    DIM,
    EPS,
    HEADS,
    KV_HEADS,
    LAYERS,
    LENGTH,
    SCALING,
    THETA,
    TRAINED_LENGTH,
    VOCABULARY,
    Attention,
    FeedForward,
    RMSNorm,
    Transformer,
    TransformerBlock,
    apply_scaling,
    converted,
    precompute_freqs_cis,
    rotate,
)


class Reference(nn.Module):
    """transformers' Llama, called as Meta's is."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.cache: Any = None

    def forward(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Return the logits of a chunk of tokens."""
        if start == 0:
            self.cache = DynamicCache(config=self.model.config)
        return self.model(tokens, past_key_values=self.cache, use_cache=True).logits


def decode(model: nn.Module) -> Tensor:
    """Read a prompt, then one token at a time."""
    text = tokens(5, 2, 14, below=VOCABULARY)
    steps = [model(text[:, :8], 0)] + [model(text[:, at : at + 1], at) for at in range(8, 14)]
    return torch.cat(steps, dim=1)


def chunked(model: nn.Module) -> Tensor:
    """Read a prompt in chunks, as a server does that bounds its step."""
    text = tokens(6, 2, 16, below=VOCABULARY)
    return torch.cat([model(text[:, at : at + 6], at) for at in (0, 6, 12)], dim=1)


def build(
    dtype: torch.dtype,
    edit: Edit | None,
    drive: Any = None,
    outliers: bool = False,
    sharp: bool = False,
    length: int = 18,
) -> Pair:
    """Return Meta's model against transformers'."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=2 * DIM,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2 * TRAINED_LENGTH,
        rms_norm_eps=EPS,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": THETA,
            "original_max_position_embeddings": TRAINED_LENGTH,
            **SCALING,
        },
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = randomise(LlamaForCausalLM(config), 1, gain=1.2, embedding=0.08)
    if outliers:  # a few channels far above the others, as trained models have them
        model.model.embed_tokens.weight.data[:, [5, 40]] += 400.0
    if sharp:  # scores far apart, as in trained heads
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data *= 4
    rounded(model, dtype)
    candidate = converted(model.state_dict())
    candidate, reference = finish(candidate, Reference(model), dtype, edit)
    args = () if drive else (tokens(4, 2, length, below=VOCABULARY),)
    return Pair(candidate, reference, args, drive=drive)


class _HalvesAttention(Attention):
    def turn(self, q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        cos = freqs_cis.real.repeat(1, 2)[None, :, None].to(q)
        sin = freqs_cis.imag.repeat(1, 2)[None, :, None].to(q)

        def turned(x: Tensor) -> Tensor:
            one, other = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-other, one), dim=-1) * sin

        return turned(q), turned(k)


class _QueriesOnly(Attention):
    def turn(self, q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, freqs_cis), k


class _TiledHeads(Attention):
    def shared(self, x: Tensor) -> Tensor:
        return x.repeat(1, 1, self.n_rep, 1)


class _LateCache(Attention):
    def slot(self, start: int) -> int:
        return start + 1 if start else 0


class _FusedAttention(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class _TopLeftCausal(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=mask is not None)


class _BlockwiseAttention(Attention):
    """Softmax in one pass over blocks of keys; accumulates in float32."""

    def wide(self, x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        shape = (*q.shape[:3], 1)
        mixed, total = self.wide(torch.zeros_like(q)), self.wide(q.new_zeros(shape))
        most = self.wide(q.new_full(shape, torch.finfo(q.dtype).min))
        for at in range(0, k.shape[2], 4):
            block = slice(at, at + 4)
            scores = self.wide(q) @ self.wide(k[:, :, block]).transpose(2, 3) * self.scale
            if mask is not None:
                scores = scores + mask[:, block]
            above = torch.maximum(most, scores.amax(-1, keepdim=True))
            weights, shrunk = torch.exp(scores - above), torch.exp(most - above)
            total = total * shrunk + weights.sum(-1, keepdim=True)
            mixed = mixed * shrunk + weights @ self.wide(v[:, :, block])
            most = above
        return (mixed / total).type_as(q)


class _NarrowBlockwiseAttention(_BlockwiseAttention):
    def wide(self, x: Tensor) -> Tensor:
        return x


class _ParallelBlock(TransformerBlock):
    def forward(self, x: Tensor, start: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), start, freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(x))


class _NormedResidual(TransformerBlock):
    def forward(self, x: Tensor, start: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), start, freqs_cis, mask)
        h = self.ffn_norm(h)
        return h + self.feed_forward(h)


class _RestartedPositions(Transformer):
    def rotations(self, start: int, length: int) -> Tensor:
        return self.freqs_cis[:length]


class _NarrowNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class _NarrowAngles(Transformer):
    def rotations(self, start: int, length: int) -> Tensor:
        dtype, dim = self.output.weight.dtype, DIM // HEADS
        freqs = apply_scaling(1.0 / (THETA ** (torch.arange(0, dim, 2).float() / dim)))
        positions = torch.arange(start, start + length)
        angles = torch.outer(positions.to(dtype), freqs.to(dtype)).float()
        return torch.polar(torch.ones_like(angles), angles)


class _FiniteMask(Transformer):
    def mask(self, h: Tensor, start: int) -> Tensor | None:
        mask = super().mask(h, start)
        return None if mask is None else mask.clamp(min=torch.finfo(h.dtype).min)


class _PackedAttention(Attention):
    def forward(self, x: Tensor, start: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        size, length, _ = x.shape
        packed = self.wqkv(x).view(size, length, -1, self.head_dim)
        q, k, v = packed.split([HEADS, KV_HEADS, KV_HEADS], dim=2)
        q, k = self.turn(q, k, freqs_cis)
        q, k, v = (each.transpose(1, 2) for each in (q, self.shared(k), self.shared(v)))
        return self.wo(self.attend(q, k, v, mask).transpose(1, 2).reshape(size, length, -1))


class ShardedFeedForward(nn.Module):
    """A feed-forward whose inner width is shared out; what the shards put out is summed."""

    def __init__(self, whole: FeedForward) -> None:
        super().__init__()
        self.shards = nn.ModuleList(FeedForward() for _ in range(2))
        for rank, shard in enumerate(self.shards):
            shard.w1.weight.data = whole.w1.weight.chunk(2, 0)[rank].clone()
            shard.w3.weight.data = whole.w3.weight.chunk(2, 0)[rank].clone()
            shard.w2.weight.data = whole.w2.weight.chunk(2, 1)[rank].clone()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum over the shards."""
        return torch.stack([shard(x) for shard in self.shards]).sum(0)


def _table(theta: float, scaled: bool) -> Edit:
    return setting("freqs_cis", precompute_freqs_cis(DIM // HEADS, LENGTH, theta, scaled), "")


def _pack(model: nn.Module) -> None:
    for layer in model.layers:
        attention = layer.attention
        attention.__class__ = _PackedAttention
        weights = [each.weight for each in (attention.wq, attention.wk, attention.wv)]
        attention.wqkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * attention.head_dim, bias=False)
        attention.wqkv.weight.data = torch.cat(weights)
        del attention.wq, attention.wk, attention.wv


def _fold_norms(model: nn.Module) -> None:
    for layer in model.layers:
        fed, attention = layer.feed_forward, layer.attention
        for each in (attention.wq, attention.wk, attention.wv):
            each.weight *= layer.attention_norm.weight
        for each in (fed.w1, fed.w3):
            each.weight *= layer.ffn_norm.weight
        layer.attention_norm.weight.fill_(1)
        layer.ffn_norm.weight.fill_(1)


def cases() -> Iterator[Case]:
    """Yield the cases of Llama."""
    bf16, f16 = torch.bfloat16, torch.float16
    family = Family("llama", build)
    fault, harmless = family.fault, family.harmless
    attentions = paths("layers.{}.attention", LAYERS)
    norms = paths("layers.{}.attention_norm", LAYERS) + paths("layers.{}.ffn_norm", LAYERS)
    norms += ("norm",)

    yield fault(
        "rope-halves", recode(_HalvesAttention, *attentions), attentions,
        "rotates halves where the weights pair neighbours", dtype=bf16,
    )  # fmt: skip
    yield fault(
        "rope-keys-forgotten", recode(_QueriesOnly, "layers.1.attention"), "layers.1.attention",
        "keys are not rotated in one layer",
    )  # fmt: skip
    yield fault("rope-theta", _table(10000.0, True), "", "rope base 10,000 instead of 500,000")
    yield fault("rope-unscaled", _table(THETA, False), "", "long-context scaling of rope missing")
    yield fault(
        "eps", setting("eps", 1e-6, *norms), norms, "eps 1e-6 hard-coded where the model has 1e-5"
    )
    yield fault(
        "kv-heads-tiled", recode(_TiledHeads, *attentions), attentions,
        "key heads repeated as blocks, not each in turn",
    )  # fmt: skip
    yield fault(
        "wk-of-other-layer",
        copied("layers.2.attention.wk", "layers.1.attention.wk"),
        "layers.2.attention.wk",
        "layer 2 loaded with the keys of layer 1",
        dtype=bf16,
    )
    yield fault(
        "gate-up-swapped",
        exchanged("layers.1.feed_forward.w1", "layers.1.feed_forward.w3"),
        ("layers.1.feed_forward.w1", "layers.1.feed_forward.w3"),
        "gate and up projection exchanged",
    )
    yield fault(
        "wo-row", reweighed("layers.0.attention.wo", scaled_row(11, 1.03)), "layers.0.attention.wo",
        "one row of the output projection is 3 % too large",
    )  # fmt: skip
    yield fault(
        "wo-transposed", reweighed("layers.1.attention.wo", Tensor.t), "layers.1.attention.wo",
        "square weight transposed", dtype=f16,
    )  # fmt: skip
    yield fault(
        "wk-not-permuted",
        reweighed(
            "layers.0.attention.wk",
            lambda w: w.view(KV_HEADS, -1, 2, DIM).transpose(1, 2).reshape(w.shape),
        ),
        "layers.0.attention.wk",
        "rows of the keys left in halves in one layer",
    )
    yield fault(
        "scale", setting("scale", 1 / math.sqrt(DIM // KV_HEADS), *attentions), attentions,
        "scores scaled by the wrong head size", dtype=bf16,
    )  # fmt: skip
    yield fault(
        "ffn-norm-of-input", recode(_ParallelBlock, "layers.2"), "layers.2",
        "feed-forward reads the residual from before attention",
    )  # fmt: skip
    yield fault(
        "residual-after-norm", recode(_NormedResidual, "layers.0"), "layers.0",
        "the normed value is taken as the residual",
    )  # fmt: skip
    yield fault(
        "shard-of-other-rank",
        both(
            replaced(ShardedFeedForward, *paths("layers.{}.feed_forward", LAYERS)),
            copied("layers.1.feed_forward.shards.1.w3", "layers.1.feed_forward.shards.0.w3"),
        ),
        "layers.1.feed_forward.shards.1.w3",
        "both ranks loaded the same shard",
        dtype=bf16,
    )
    yield fault(
        "decode-cache-late", recode(_LateCache, *attentions), attentions,
        "cache written one position late", drive=decode,
    )  # fmt: skip
    yield fault(
        "decode-positions", recode(_RestartedPositions, ""), "",
        "positions start at 0 in every step", drive=decode, dtype=bf16,
    )  # fmt: skip
    yield fault(
        "chunk-causal-top-left", recode(_TopLeftCausal, *attentions), attentions,
        "causal flag of the fused attention ignores what is cached", drive=chunked,
    )  # fmt: skip
    yield fault(
        "output-tied", copied("output", "tok_embeddings"), "output",
        "head tied to the embeddings though the model has its own",
    )  # fmt: skip
    yield fault(
        "norm-squares-overflow", recode(_NarrowNorm, *norms), norms,
        "squares of outlier channels overflow in half precision", dtype=f16, precision=True,
        outliers=True,
    )  # fmt: skip
    yield fault(
        "rope-angles-narrow", recode(_NarrowAngles, ""), "",
        "angles multiplied in bfloat16", dtype=bf16, precision=True, length=220,
    )  # fmt: skip
    yield fault(
        "softmax-sums-narrow", recode(_NarrowBlockwiseAttention, *attentions), attentions,
        "attention accumulates over blocks of keys in bfloat16", dtype=bf16, precision=True,
        length=220,
    )  # fmt: skip

    yield harmless("clean")
    yield harmless("clean", dtype=bf16)
    yield harmless("clean-sharp", dtype=bf16, sharp=True)
    yield harmless("clean-long", dtype=bf16, length=220)
    yield harmless(
        "blockwise-softmax", recode(_BlockwiseAttention, *attentions), dtype=bf16, length=220
    )
    yield harmless("clean-outliers", dtype=f16, outliers=True)
    yield harmless("decode", drive=decode, dtype=f16)
    yield harmless("chunked-fused", recode(_FusedAttention, *attentions), drive=chunked)
    yield harmless("packed-qkv", _pack)
    yield harmless(
        "sharded", replaced(ShardedFeedForward, *paths("layers.{}.feed_forward", LAYERS))
    )
    yield harmless("norms-folded", _fold_norms)
    yield harmless(
        "finite-mask-fused",
        both(recode(_FusedAttention, *attentions), recode(_FiniteMask, "")),
        dtype=bf16,
    )
