"""Gemma 2 in the style of Google's PyTorch code against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM

from sealed.cases import Case, Pair
from sealed.two.common import (
    Edit,
    Family,
    copied,
    finish,
    paths,
    randomise,
    recode,
    reweighed,
    rounded,
    scaled_row,
    setting,
    tokens,
)
from sealed.two.gemma_port import (
    DIM,
    EPS,
    GLOBAL,
    HEAD_DIM,
    HEADS,
    INNER,
    KV_HEADS,
    LAYERS,
    LENGTH,
    LOCAL,
    LOGIT_CAP,
    QUERY_SCALAR,
    SCORE_CAP,
    THETA,
    VOCABULARY,
    WINDOW,
    Gemma2DecoderLayer,
    GemmaAttention,
    GemmaForCausalLM,
    GemmaMLP,
    RMSNorm,
    converted,
    precompute_freqs_cis,
)


class Reference(nn.Module):
    """transformers' Gemma 2, called as Google's is."""

    def __init__(self, model: Gemma2ForCausalLM) -> None:
        super().__init__()
        self.model = model
        self.cache: Any = None

    def forward(self, tokens: Tensor, start: int = 0, real: Tensor | None = None) -> Tensor:
        """Return the logits of a chunk; real tells tokens (so far) from padding."""
        if start == 0:
            self.cache = DynamicCache()
        if real is None:
            real = torch.ones(tokens.shape[0], start + tokens.shape[1], dtype=torch.bool)
        positions = (real.long().cumsum(-1) - 1).clamp(min=0)[:, start:]
        queries = torch.arange(start, real.shape[1])[:, None]
        keys = torch.arange(real.shape[1])[None]
        seen = (keys <= queries) & (real[:, None, :] | (keys == queries))
        near = seen & (keys > queries - WINDOW)
        dtype = self.model.lm_head.weight.dtype
        masks = [
            torch.zeros(each.shape, dtype=dtype)[:, None].masked_fill(
                ~each[:, None], torch.finfo(dtype).min
            )
            for each in (seen, near)
        ]
        output = self.model(
            tokens,
            attention_mask={"full_attention": masks[0], "sliding_attention": masks[1]},
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits.masked_fill(~real[:, start:, None], 0)


def decode(model: nn.Module) -> Tensor:
    """Read a prompt, then one token at a time."""
    text = tokens(15, 2, 16, below=VOCABULARY)
    steps = [model(text[:, :9], 0)] + [model(text[:, at : at + 1], at) for at in range(9, 16)]
    return torch.cat(steps, dim=1)


def padded_decode(model: nn.Module) -> Tensor:
    """Read prompts padded on the right, then one token at a time."""
    text = tokens(16, 2, 15, below=VOCABULARY)
    real = torch.ones(2, 15, dtype=torch.bool)
    real[1, 6:9] = False
    steps = [model(text[:, :9], 0, real[:, :9])]
    steps += [model(text[:, at : at + 1], at, real[:, : at + 1]) for at in range(9, 15)]
    return torch.cat(steps, dim=1)


def build(dtype: torch.dtype, edit: Edit | None, drive: Any = None, padding: bool = False) -> Pair:
    """Return Google's model against transformers'."""
    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=DIM,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=LENGTH,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        query_pre_attn_scalar=QUERY_SCALAR,
        sliding_window=WINDOW,
        attn_logit_softcapping=SCORE_CAP,
        final_logit_softcapping=LOGIT_CAP,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    model = Gemma2ForCausalLM(config)
    model = randomise(model, 2, gain=1.4, embedding=DIM**-0.5, centre=0.0, bias=0.3)
    rounded(model, dtype)
    candidate, reference = finish(converted(model.state_dict()), Reference(model), dtype, edit)
    text = tokens(14, 2, 18, below=VOCABULARY)
    kwargs = {}
    if padding:
        kwargs["real"] = torch.ones(2, 18, dtype=torch.bool)
        kwargs["real"][0, :5] = False
    return Pair(candidate, reference, () if drive else (text,), kwargs, drive)


class _ExactGelu(GemmaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


class _GatedUp(GemmaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * F.gelu(self.up_proj(x), approximate="tanh"))


class _NormAfterResidual(Gemma2DecoderLayer):
    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *context)
        residual = self.post_attention_layernorm(x)
        x = self.mlp(self.pre_feedforward_layernorm(residual))
        return residual + self.post_feedforward_layernorm(x)


class _NoPostFeedforwardNorm(Gemma2DecoderLayer):
    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), *context)
        x = x + self.post_attention_layernorm(attended)
        return x + self.mlp(self.pre_feedforward_layernorm(x))


class _PositionsWithPadding(GemmaForCausalLM):
    def positions(self, tokens: Tensor, start: int, real: Tensor) -> Tensor:
        return torch.arange(start, start + tokens.shape[1]).expand(tokens.shape)


class _PaddingSeen(GemmaForCausalLM):
    def masks(self, h: Tensor, start: int, real: Tensor) -> tuple[Tensor, Tensor]:
        return super().masks(h, start, torch.ones_like(real))


class _PaddingSeenLater(GemmaForCausalLM):
    def masks(self, h: Tensor, start: int, real: Tensor) -> tuple[Tensor, Tensor]:
        return super().masks(h, start, torch.ones_like(real) if start else real)


class _WindowOfChunk(GemmaForCausalLM):
    def masks(self, h: Tensor, start: int, real: Tensor) -> tuple[Tensor, Tensor]:
        mask, local = super().masks(h, start, real)
        return (mask, local) if h.shape[1] > 1 else (mask, mask)


class _LatePositions(GemmaForCausalLM):
    def positions(self, tokens: Tensor, start: int, real: Tensor) -> Tensor:
        positions = super().positions(tokens, start, real)
        return positions + 1 if start else positions


class _InfiniteMask(GemmaForCausalLM):
    def additive(self, seen: Tensor, h: Tensor) -> Tensor:
        return torch.zeros(seen.shape, dtype=h.dtype).masked_fill(~seen, float("-inf"))[:, None]


class _PackedMLP(GemmaMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.gelu(gate, approximate="tanh") * up)


class _OwnGelu(GemmaMLP):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate.pow(3))
        return self.down_proj(up * (0.5 * gate * (1 + torch.tanh(inner))))


def _pack(model: nn.Module) -> None:
    for layer in model.model.layers:
        mlp = layer.mlp
        mlp.__class__ = _PackedMLP
        mlp.gate_up_proj = nn.Linear(DIM, 2 * INNER, bias=False)
        mlp.gate_up_proj.weight.data = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))
        del mlp.gate_proj, mlp.up_proj


def _store_offset(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.weight += 1
            module.add_unit_offset = False


def _fold_scale(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, GemmaAttention):
            module.qkv_proj.weight[: HEADS * HEAD_DIM] *= module.scaling
            module.scaling = 1.0


def _exchange_keys_values(weight: Tensor) -> Tensor:
    q, k, v = weight.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
    return torch.cat((q, v, k))


def _grouped(weight: Tensor) -> Tensor:
    """Return the fused rows as other checkpoints have them: each group's queries, key, value."""
    q, k, v = weight.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
    parts = zip(q.chunk(KV_HEADS), k.chunk(KV_HEADS), v.chunk(KV_HEADS), strict=True)
    return torch.cat([each for group in parts for each in group])


def _kinds_exchanged(model: nn.Module) -> None:
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.attn_type = GLOBAL if attention.attn_type == LOCAL else LOCAL


def cases() -> Iterator[Case]:
    """Yield the cases of Gemma."""
    bf16, f16 = torch.bfloat16, torch.float16
    family = Family("gemma", build)
    fault, harmless = family.fault, family.harmless
    attentions = paths("model.layers.{}.self_attn", LAYERS)
    mlps = paths("model.layers.{}.mlp", LAYERS)

    yield fault(
        "score-cap-missing",
        setting("attn_logit_softcapping", None, *attentions),
        attentions,
        "attention backend without soft-cap",
    )
    yield fault(
        "score-cap-missing-once",
        setting("attn_logit_softcapping", None, "model.layers.2.self_attn"),
        "model.layers.2.self_attn",
        "soft-cap dropped on the path of one layer",
        dtype=bf16,
    )
    yield fault(
        "logit-cap-missing",
        setting("final_logit_softcapping", None, "sampler"),
        "sampler",
        "final soft-cap missing",
    )
    yield fault(
        "window-short",
        setting("window", WINDOW - 1, ""),
        "",
        "sliding window one position too short",
    )
    yield fault(
        "kinds-exchanged", _kinds_exchanged, attentions, "local and global layers exchanged"
    )
    yield fault(
        "norm-offset",
        setting("add_unit_offset", False, "model.norm"),
        "model.norm",
        "weight of the last norm taken without adding one",
    )
    yield fault(
        "norm-offset-stored",
        reweighed("model.layers.1.pre_feedforward_layernorm", lambda w: w + 1),
        "model.layers.1.pre_feedforward_layernorm",
        "one is added by the conversion and again by the norm",
        dtype=f16,
    )
    yield fault(
        "normalizer", setting("normalizer", 1.0, ""), "", "embeddings are not scaled by sqrt(dim)"
    )
    yield fault(
        "scale-of-head",
        setting("scaling", HEAD_DIM**-0.5, *attentions),
        attentions,
        "queries scaled by the head size, not by the model's scalar",
    )
    yield fault("gelu-exact", recode(_ExactGelu, *mlps), mlps, "exact GELU instead of tanh")
    yield fault(
        "gelu-on-up", recode(_GatedUp, mlps[1]), mlps[1], "activation on the wrong branch",
        dtype=bf16,
    )  # fmt: skip
    yield fault(
        "norm-after-residual",
        recode(_NormAfterResidual, "model.layers.2"),
        "model.layers.2",
        "norm after attention applied to the sum with the residual",
    )
    yield fault(
        "post-norm-missing",
        recode(_NoPostFeedforwardNorm, "model.layers.3"),
        "model.layers.3",
        "norm after the feed-forward forgotten",
    )
    yield fault(
        "keys-values-exchanged",
        reweighed("model.layers.0.self_attn.qkv_proj", _exchange_keys_values),
        "model.layers.0.self_attn.qkv_proj",
        "keys and values exchanged when fused",
    )
    yield fault(
        "qkv-grouped",
        reweighed("model.layers.3.self_attn.qkv_proj", _grouped),
        "model.layers.3.self_attn.qkv_proj",
        "fused rows in the order of groups",
    )
    yield fault(
        "down-row",
        reweighed("model.layers.1.mlp.down_proj", scaled_row(20, 1.005)),
        "model.layers.1.mlp.down_proj",
        "one row of a weight is 0.5 % too large",
    )
    yield fault(
        "o-proj-of-other-layer",
        copied("model.layers.2.self_attn.o_proj", "model.layers.1.self_attn.o_proj"),
        "model.layers.2.self_attn.o_proj",
        "output projection of layer 1 loaded into layer 2",
        dtype=f16,
    )
    yield fault(
        "rope-dim",
        setting("freqs_cis", precompute_freqs_cis(HEAD_DIM, LENGTH, THETA**0.75), ""),
        "",
        "rope frequencies of another base",
    )
    yield fault(
        "decode-padding-positions",
        recode(_PositionsWithPadding, ""),
        "",
        "positions of steps count the padding of the prompt",
        drive=padded_decode,
    )
    yield fault(
        "padding-seen",
        recode(_PaddingSeen, ""),
        "",
        "keys of padding are not masked",
        padding=True,
        dtype=bf16,
    )
    yield fault(
        "decode-padding-seen",
        recode(_PaddingSeenLater, ""),
        "",
        "steps after the prompt forget which keys are padding",
        drive=padded_decode,
    )
    yield fault(
        "decode-window",
        recode(_WindowOfChunk, ""),
        "",
        "single steps attend beyond the window",
        drive=decode,
    )
    yield fault(
        "decode-positions-late",
        recode(_LatePositions, ""),
        "",
        "positions of steps are one too large",
        drive=decode,
    )

    yield harmless("clean")
    yield harmless("clean", dtype=bf16)
    yield harmless("clean-padded", dtype=f16, padding=True)
    yield harmless("decode", drive=decode)
    yield harmless("decode-padded", dtype=bf16, drive=padded_decode)
    yield harmless("infinite-mask", recode(_InfiniteMask, ""))
    yield harmless("packed-gate-up", _pack, dtype=bf16)
    yield harmless("offset-stored", _store_offset)
    yield harmless("scale-folded", _fold_scale, dtype=bf16)
    yield harmless("own-gelu", recode(_OwnGelu, *mlps))
