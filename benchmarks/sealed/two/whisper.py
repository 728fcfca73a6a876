"""Whisper in OpenAI's style against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import WhisperConfig, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from sealed.cases import Case, Pair
from sealed.two.common import (
    Edit,
    Family,
    copied,
    exchanged,
    finish,
    noise,
    paths,
    randomise,
    recode,
    reweighed,
    rounded,
    scaled_row,
    setting,
    tokens,
    zeroed,
)
from sealed.two.whisper_port import (
    CONTEXT,
    FRAMES,
    HEADS,
    LAYERS,
    MELS,
    STATE,
    VOCABULARY,
    AudioEncoder,
    LayerNorm,
    MultiHeadAttention,
    ResidualAttentionBlock,
    TextDecoder,
    converted,
    sinusoids,
)


class Reference(nn.Module):
    """transformers' Whisper, called as OpenAI's is."""

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        super().__init__()
        self.model = model
        self.features: Any = None
        self.cache: Any = None

    def forward(self, mel: Tensor, tokens: Tensor, start: int = 0) -> Tensor:
        """Return the logits of a chunk of tokens."""
        if start == 0:
            wide = mel.to(self.model.proj_out.weight.dtype)
            self.features, self.cache = self.model.model.encoder(wide).last_hidden_state, None
        output = self.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=self.features),
            decoder_input_ids=tokens,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.cache = output.past_key_values
        return output.logits


def transcribe(model: nn.Module, seed: int = 32) -> Tensor:
    """Read a prompt, then one token at a time."""
    mel, text = noise(seed, 2, MELS, FRAMES), tokens(seed, 2, 12, below=VOCABULARY)
    steps = [model(mel, text[:, :4], 0)]
    steps += [model(mel, text[:, at : at + 1], at) for at in range(4, 12)]
    return torch.cat(steps, dim=1)


def transcribe_two(model: nn.Module) -> Tensor:
    """Transcribe one recording, then another."""
    return torch.stack([transcribe(model, 33), transcribe(model, 34)])


def build(dtype: torch.dtype, edit: Edit | None, drive: Any = None, loud: float = 1.0) -> Pair:
    """Return OpenAI's model against transformers'."""
    config = WhisperConfig(
        vocab_size=VOCABULARY,
        num_mel_bins=MELS,
        d_model=STATE,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS,
        encoder_ffn_dim=4 * STATE,
        decoder_ffn_dim=4 * STATE,
        max_source_positions=FRAMES // 2,
        max_target_positions=CONTEXT,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = randomise(WhisperForConditionalGeneration(config), 9, gain=1.3, embedding=0.4)
    model.model.encoder.embed_positions.weight.data = sinusoids(FRAMES // 2, STATE)
    for layer in [*model.model.encoder.layers, *model.model.decoder.layers]:
        layer.self_attn.q_proj.weight.data *= 1.5
    if loud != 1:  # a few channels far from zero, as trained models have them
        model.model.encoder.conv2.bias.data[[3, 30]] += loud
    positions = model.model.encoder.embed_positions.weight.data.clone()
    rounded(model, dtype)
    model.model.encoder.embed_positions.weight.data = positions
    candidate = converted(model.state_dict())
    candidate, reference = finish(candidate, Reference(model), dtype, edit)
    args = (noise(31, 2, MELS, FRAMES), tokens(31, 2, 10, below=VOCABULARY))
    return Pair(candidate, reference, () if drive else args, drive=drive)


class _CausalConv(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(F.pad(x, (2, 0)), self.weight, self.bias, self.stride)


class _TanhStem(AudioEncoder):
    def stem(self, x: Tensor) -> Tensor:
        x = F.gelu(self.conv1(x), approximate="tanh")
        return F.gelu(self.conv2(x), approximate="tanh").permute(0, 2, 1)


class _NoSecondActivation(AudioEncoder):
    def stem(self, x: Tensor) -> Tensor:
        return self.conv2(F.gelu(self.conv1(x))).permute(0, 2, 1)


class _NoPositions(AudioEncoder):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.ln_post(x)


class _NoLastNorm(AudioEncoder):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = (x + self.positional_embedding).to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return x


class _ScaledOnce(MultiHeadAttention):
    def qkv_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        qk = (q * q.shape[-1] ** -0.25) @ k.transpose(2, 3)
        if mask is not None:
            qk = qk + mask
        return F.softmax(qk.float(), dim=-1).to(q.dtype) @ v


class _SoftmaxOverQueries(MultiHeadAttention):
    def qkv_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        qk = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        return F.softmax(qk.float(), dim=-2).to(q.dtype) @ v


class _Fused(MultiHeadAttention):
    def qkv_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=None if mask is None else mask.to(q)
        )


class _Stale(MultiHeadAttention):
    def fresh(self, start: int) -> bool:
        return False


class _LastSlotLost(MultiHeadAttention):
    def keys_values(self, x: Tensor, xa: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        k, v = super().keys_values(x, xa, start)
        if start:  # the step reads its slot before it is written
            k = torch.cat((k[:, :-1], torch.zeros_like(k[:, -1:])), 1)
            v = torch.cat((v[:, :-1], torch.zeros_like(v[:, -1:])), 1)
        return k, v


class _CrossOfInput(ResidualAttentionBlock):
    def forward(
        self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None, start: int = 0
    ) -> Tensor:
        attended = x + self.attn(self.attn_ln(x), mask=mask, start=start)
        attended = attended + self.cross_attn(self.cross_attn_ln(x), xa, start=start)
        return attended + self.mlp(self.mlp_ln(attended))


class _CrossResidualTwice(ResidualAttentionBlock):
    def forward(
        self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None, start: int = 0
    ) -> Tensor:
        x = x + self.attn(self.attn_ln(x), mask=mask, start=start)
        x = x + (x + self.cross_attn(self.cross_attn_ln(x), xa, start=start))
        return x + self.mlp(self.mlp_ln(x))


class _StepsAtZero(TextDecoder):
    def positions(self, start: int, length: int) -> Tensor:
        return self.positional_embedding[:length]


class _StepsLate(TextDecoder):
    def positions(self, start: int, length: int) -> Tensor:
        first = start + 1 if start else 0
        return self.positional_embedding[first : first + length]


class _NarrowNorm(LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.pow(2).mean(-1, keepdim=True)
        return centred * torch.rsqrt(variance + self.eps) * self.weight + self.bias


class _PackedAttention(MultiHeadAttention):
    def keys_values(self, x: Tensor, xa: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        k, v = self.key_value(x).chunk(2, dim=-1)
        return k, v


def _pack_encoder(model: nn.Module) -> None:
    for block in model.encoder.blocks:
        attn = block.attn
        attn.__class__ = _PackedAttention
        attn.key_value = nn.Linear(STATE, 2 * STATE)
        attn.key_value.weight.data = torch.cat((attn.key.weight, attn.value.weight))
        attn.key_value.bias.data = torch.cat((torch.zeros(STATE), attn.value.bias))
        del attn.key, attn.value


def _move_value_bias(model: nn.Module) -> None:
    """Add the bias of values behind the output projection: weights of attention sum to one."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.out.bias += module.out.weight @ module.value.bias
            module.value.bias.zero_()


def _interleaved(table: Tensor) -> Tensor:
    return torch.stack(table.chunk(2, dim=1), dim=-1).flatten(1)


def _finite_mask(model: nn.Module) -> None:
    model.decoder.mask.clamp_(min=-1e4)


def cases() -> Iterator[Case]:
    """Yield the cases of Whisper."""
    bf16, f16 = torch.bfloat16, torch.float16
    family = Family("whisper", build)
    fault, harmless = family.fault, family.harmless
    encoder_attentions = paths("encoder.blocks.{}.attn", LAYERS)
    decoder_attentions = paths("decoder.blocks.{}.attn", LAYERS)
    crosses = paths("decoder.blocks.{}.cross_attn", LAYERS)
    encoder_norms = paths("encoder.blocks.{}.attn_ln", LAYERS)
    encoder_norms += (*paths("encoder.blocks.{}.mlp_ln", LAYERS), "encoder.ln_post")

    yield fault(
        "conv-causal", recode(_CausalConv, "encoder.conv2"), "encoder.conv2",
        "convolution padded on the left only",
    )  # fmt: skip
    yield fault("stem-gelu-tanh", recode(_TanhStem, "encoder"), "encoder", "tanh GELU in the stem")
    yield fault(
        "stem-activation-missing", recode(_NoSecondActivation, "encoder"), "encoder",
        "no activation after the second convolution", dtype=bf16,
    )  # fmt: skip
    yield fault(
        "audio-positions-missing", recode(_NoPositions, "encoder"), "encoder",
        "positions of the audio not added",
    )  # fmt: skip
    yield fault(
        "sinusoids-interleaved",
        reweighed("encoder", _interleaved, "positional_embedding"),
        "encoder",
        "sines and cosines in turn, not one after the other",
    )
    yield fault(
        "ln-post-missing", recode(_NoLastNorm, "encoder"), "encoder",
        "last norm of the encoder forgotten", dtype=f16,
    )  # fmt: skip
    yield fault(
        "scaled-once",
        recode(_ScaledOnce, *encoder_attentions),
        encoder_attentions,
        "only queries are scaled by the fourth root",
    )
    yield fault(
        "softmax-over-queries",
        recode(_SoftmaxOverQueries, crosses[1]),
        crosses[1],
        "softmax over the wrong dimension",
        dtype=bf16,
    )
    yield fault(
        "heads-halved",
        setting("n_head", HEADS // 2, *crosses),
        crosses,
        "half as many heads in attention over audio",
    )
    yield fault(
        "cross-of-input",
        recode(_CrossOfInput, "decoder.blocks.1"),
        "decoder.blocks.1",
        "attention over audio reads the residual from before self-attention",
    )
    yield fault(
        "cross-residual-twice",
        recode(_CrossResidualTwice, "decoder.blocks.2"),
        "decoder.blocks.2",
        "residual added twice",
        dtype=f16,
    )
    yield fault(
        "mask-late",
        reweighed("decoder", lambda mask: torch.full_like(mask, float("-inf")).triu(2), "mask"),
        "decoder",
        "causal mask lets the next token be seen",
    )
    yield fault(
        "value-bias-dropped",
        zeroed("decoder.blocks.0.cross_attn.value"),
        "decoder.blocks.0.cross_attn.value",
        "bias not converted",
    )
    yield fault(
        "query-of-other-layer",
        copied("encoder.blocks.1.attn.query", "encoder.blocks.0.attn.query"),
        "encoder.blocks.1.attn.query",
        "queries of layer 0 loaded into layer 1",
    )
    yield fault(
        "norms-exchanged",
        exchanged("decoder.blocks.1.attn_ln", "decoder.blocks.1.cross_attn_ln"),
        ("decoder.blocks.1.attn_ln", "decoder.blocks.1.cross_attn_ln"),
        "norms of the two attentions exchanged",
        dtype=bf16,
    )
    yield fault(
        "key-transposed",
        reweighed("encoder.blocks.2.attn.key", Tensor.t),
        "encoder.blocks.2.attn.key",
        "square weight transposed",
    )
    yield fault(
        "mlp-row",
        reweighed("decoder.blocks.0.mlp.2", scaled_row(17, 1.01)),
        "decoder.blocks.0.mlp.2",
        "one row of a weight is 1 % too large",
    )
    yield fault(
        "token-row",
        reweighed("decoder.token_embedding", lambda w: w.roll(1, 0)),
        "decoder.token_embedding",
        "rows of the vocabulary shifted by a special token",
    )
    yield fault(
        "decode-positions-at-zero",
        recode(_StepsAtZero, "decoder"),
        "decoder",
        "every step is at position 0",
        drive=transcribe,
    )
    yield fault(
        "decode-positions-late",
        recode(_StepsLate, "decoder"),
        "decoder",
        "positions of steps are one too large",
        drive=transcribe,
        dtype=bf16,
    )
    yield fault(
        "decode-slot-unwritten",
        recode(_LastSlotLost, *decoder_attentions),
        decoder_attentions,
        "a step reads its slot of the cache before it is written",
        drive=transcribe,
    )
    yield fault(
        "decode-audio-stale",
        recode(_Stale, *crosses),
        crosses,
        "keys and values of the audio kept from the last recording",
        drive=transcribe_two,
    )
    yield fault(
        "norm-overflows",
        recode(_NarrowNorm, *encoder_norms),
        encoder_norms,
        "squares of outlier channels overflow in half precision",
        dtype=f16,
        precision=True,
        loud=600.0,
    )

    yield harmless("clean")
    yield harmless("clean", dtype=bf16)
    yield harmless("clean-loud", dtype=f16, loud=600.0)
    yield harmless("fused", recode(_Fused, *encoder_attentions, *decoder_attentions, *crosses))
    yield harmless("decode", drive=transcribe, dtype=f16)
    yield harmless("decode-two", drive=transcribe_two, dtype=bf16)
    yield harmless("packed-encoder", _pack_encoder)
    yield harmless("value-bias-moved", _move_value_bias)
    yield harmless("finite-mask", _finite_mask, dtype=bf16)
