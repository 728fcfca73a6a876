"""T5: a port with fused projections against transformers' T5ForConditionalGeneration."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, EncoderDecoderCache, T5Config, T5ForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

from sealed.cases import Case, Pair
from sealed.one.common import (
    BF16,
    F16,
    F32,
    Entry,
    declare,
    padding,
    randomise,
    rewrite,
    round_to,
    scale_row,
    tokens,
)
from sealed.one.t5_port import (
    BUCKETS,
    FARTHEST,
    HEAD,
    HEADS,
    INNER,
    LAYERS,
    VOCABULARY,
    WIDTH,
    Block,
    CrossMixing,
    Decoder,
    Distance,
    Encoder,
    FeedForward,
    Mixing,
    Norm,
    Port,
    SelfMixing,
    convert,
)


class Original(nn.Module):
    """The reference."""

    def __init__(self, net: T5ForConditionalGeneration) -> None:
        super().__init__()
        self.net = net

    def new_cache(self) -> dict[str, Any]:
        """Return an empty cache."""
        return {"kv": EncoderDecoderCache(DynamicCache(), DynamicCache())}

    def forward(
        self,
        source: torch.Tensor,
        targets: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Return the logits of the targets; with a cache, these are the decoder's inputs."""
        if cache is None:
            ids = self.net._shift_right(targets)
            return self.net(source, attention_mask=mask, decoder_input_ids=ids).logits
        if "memory" not in cache:
            cache["memory"] = self.net.encoder(source, attention_mask=mask).last_hidden_state
        return self.net(
            attention_mask=mask,
            encoder_outputs=BaseModelOutput(cache["memory"]),
            decoder_input_ids=targets,
            past_key_values=cache["kv"],
            use_cache=True,
        ).logits


def decode(source: Any, mask: Any, prompt: Any, steps: Any, model: nn.Module) -> list[Any]:
    """Run the encoder, a prompt and then fixed tokens one by one."""
    cache = model.new_cache()
    outputs = [model(source, prompt, mask, cache)]
    for index in range(steps.shape[1]):
        outputs.append(model(source, steps[:, index : index + 1], mask, cache))
    return outputs


def build(
    dtype: torch.dtype, kind: str = "plain", embedding: float = 1.0, shift: float = 0.0
) -> Pair:
    """Return the port with the weights of the reference, and what both are called with."""
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=HEAD,
        d_ff=INNER,
        num_layers=LAYERS,
        num_heads=HEADS,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=FARTHEST,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        decoder_start_token_id=0,
        pad_token_id=0,
        attn_implementation="eager",
    )
    net = T5ForConditionalGeneration(config)
    randomise(net, seed=41, embedding=1.0)
    net.shared.weight.mul_(embedding)
    for name, parameter in net.named_parameters():
        if name.endswith("Attention.q.weight"):
            parameter.mul_(HEAD**-0.5)
        if "relative_attention_bias" in name:
            parameter.add_(shift)
    round_to(net, dtype)
    port = Port()
    convert(net, port)
    source, targets = tokens(2, 18, VOCABULARY), tokens(2, 12, VOCABULARY, seed=2)
    mask = padding((18, 11), 18)
    if kind == "decode":
        drive = partial(decode, source * mask, mask, targets[:, :5], targets[:, 5:10])
        return Pair(port, Original(net), drive=drive)
    if kind == "padded":
        return Pair(port, Original(net), (source * mask, targets, mask))
    return Pair(port, Original(net), (source, targets))


def _stacks(port: Port) -> list[Block]:
    return [*port.encoder.blocks, *port.decoder.blocks]


def _fused_attention(port: Port) -> None:
    def attend(self: Mixing, q: Any, k: Any, v: Any, bias: torch.Tensor | None) -> torch.Tensor:
        mixed = functional.scaled_dot_product_attention(q, k, v, bias, scale=1.0)
        return self.proj(rearrange(mixed, "b h n d -> b n (h d)"))

    for block in _stacks(port):
        rewrite(block.mix, attend=attend)
        if block.crossed:
            rewrite(block.cross, attend=attend)


def _scaled_embedding(port: Port) -> None:
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight.copy_(port.embed.weight * WIDTH**-0.5)
    port.head = head

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x * WIDTH**0.5, self.weight)

    rewrite(head, forward=forward)


def _folded_norms(port: Port) -> None:
    for block in _stacks(port):
        pairs = [(block.norm_mix, block.mix.qkv), (block.norm_ffn, block.ffn.up)]
        if block.crossed:
            pairs.append((block.norm_cross, block.cross.q))
        for norm, linear in pairs:
            linear.weight.mul_(norm.weight)
            norm.weight.fill_(1)


def _head_by_head(port: Port) -> None:
    def attend(self: Mixing, q: Any, k: Any, v: Any, bias: torch.Tensor | None) -> torch.Tensor:
        scores = q @ k.mT + (0 if bias is None else bias)
        mixed = scores.softmax(-1) @ v
        weights = self.proj.weight.split(HEAD, dim=1)
        return sum(mixed[:, head] @ weights[head].T for head in reversed(range(HEADS)))

    for block in _stacks(port):
        rewrite(block.mix, attend=attend)


def _one_way(port: Port) -> None:
    port.encoder.distance.both_ways = False


def _farthest(port: Port) -> None:
    port.encoder.distance.farthest = port.decoder.distance.farthest = 128


def _rounded_buckets(port: Port) -> None:
    def buckets(self: Distance, distance: torch.Tensor) -> torch.Tensor:
        exact = BUCKETS // 2
        distance = (-distance).clamp(min=0)
        ratio = torch.log(distance.clamp(min=1) / exact) / math.log(self.farthest / exact)
        coarse = (exact + (ratio * (BUCKETS - exact)).round().long()).clamp(max=BUCKETS - 1)
        return torch.where(distance < exact, distance, coarse)

    rewrite(port.decoder.distance, buckets=buckets)


def _scaled_scores(port: Port) -> None:
    def attend(self: Mixing, q: Any, k: Any, v: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return Mixing.attend(self, q * HEAD**-0.5, k, v, bias)

    rewrite(port.decoder.blocks[1].cross, attend=attend)


def _bias_in_first_only(port: Port) -> None:
    def forward(self: Encoder, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        bias = self.distance(x.shape[1], x.shape[1])
        for index, block in enumerate(self.blocks):
            x = block(x, bias if index == 0 else None)
        return self.norm(x)

    rewrite(port.encoder, forward=forward)


def _layer_norm(port: Port) -> None:
    def forward(self: Norm, x: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(x, (WIDTH,), self.weight, eps=self.eps)

    for module in port.modules():
        if isinstance(module, Norm):
            rewrite(module, forward=forward)


def _eps(port: Port) -> None:
    for module in port.modules():
        if isinstance(module, Norm):
            module.eps = 1e-5


def _unscaled_head(port: Port) -> None:
    rewrite(port, scaled=lambda self, x: x)


def _not_shifted(port: Port) -> None:
    rewrite(port, shifted=lambda self, targets: targets)


def _cross_unmasked(port: Port) -> None:
    def forward(self: CrossMixing, x: Any, memory: Any, bias: Any) -> torch.Tensor:
        del bias
        return CrossMixing.forward(self, x, memory, None)

    rewrite(port.decoder.blocks[0].cross, forward=forward)


def _encoder_unmasked(port: Port) -> None:
    def forward(self: Encoder, x: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        del hidden
        return Encoder.forward(self, x, None)

    rewrite(port.encoder, forward=forward)


def _own_keys(port: Port) -> None:
    block = port.decoder.blocks[1]
    block.cross.kv.weight.copy_(block.mix.qkv.weight[HEADS * HEAD :])


def _exact_gelu(port: Port) -> None:
    def forward(self: FeedForward, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.gelu(gate) * up)

    for block in _stacks(port):
        rewrite(block.ffn, forward=forward)


def _gate_second(port: Port) -> None:
    weight = port.encoder.blocks[1].ffn.up.weight
    weight.copy_(torch.cat(weight.chunk(2)[::-1]))


def _no_encoder_norm(port: Port) -> None:
    port.encoder.norm = nn.Identity()


def _bias_forgets_past(port: Port) -> None:
    def bias(self: Decoder, new: int, past: int) -> torch.Tensor:
        if past == 0:
            return Decoder.bias(self, new, past)
        return self.distance(new, past + new, 0)

    rewrite(port.decoder, bias=bias)


def _stale_values(port: Port) -> None:
    def remember(self: SelfMixing, cache: dict[str, Any], k: Any, v: Any) -> tuple[Any, Any]:
        old = cache.get("v")
        k, v = SelfMixing.remember(self, cache, k, v)
        if old is not None:
            cache["v"] = v = torch.cat([old, old[:, :, -1:]], 2)
        return k, v

    rewrite(port.decoder.blocks[1].mix, remember=remember)


def _table_of_encoder(port: Port) -> None:
    port.decoder.distance.table.weight.copy_(port.encoder.distance.table.weight)


def _narrow_norms(port: Port) -> None:
    def forward(self: Norm, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight

    for module in port.modules():
        if isinstance(module, Norm):
            rewrite(module, forward=forward)


def _narrow_scores(port: Port) -> None:
    def attend(self: Mixing, q: Any, k: Any, v: Any, bias: torch.Tensor | None) -> torch.Tensor:
        mixed = ((q @ k.mT) + (0 if bias is None else bias)).softmax(-1) @ v
        return self.proj(rearrange(mixed, "b h n d -> b n (h d)"))

    for block in port.encoder.blocks:
        rewrite(block.mix, attend=attend)


def cases() -> Iterator[Case]:
    """Yield the cases of T5."""
    padded, steps = {"kind": "padded"}, {"kind": "decode"}
    with torch.device("meta"):
        names = [(name, type(module)) for name, module in Port().named_modules()]
    norms = tuple(name for name, kind in names if kind is Norm)
    ffns = tuple(name for name, kind in names if kind is FeedForward)
    entries = [
        Entry("clean", dtype=F32),
        Entry("clean_padded", dtype=BF16, options=padded),
        Entry("clean", dtype=F16),
        Entry("clean_decode_loop", options=steps),
        Entry("fused_attention", _fused_attention, options=padded),
        Entry("scale_folded_into_head", _scaled_embedding),
        Entry("norms_folded", _folded_norms, options=padded),
        Entry("summed_head_by_head", _head_by_head),
        Entry("encoder_one_way", _one_way, ("encoder.distance",), "buckets of a decoder"),
        Entry(
            "farthest_distance",
            _farthest,
            ("encoder.distance", "decoder.distance"),
            "largest distance 128 for 24",
        ),
        Entry(
            "buckets_rounded",
            _rounded_buckets,
            ("decoder.distance",),
            "distances rounded to the nearest bucket",
            F16,
        ),
        Entry(
            "scores_scaled", _scaled_scores, ("decoder.blocks.1.cross",), "scores scaled after all"
        ),
        Entry("bias_in_first_only", _bias_in_first_only, ("encoder",), "bias for the first only"),
        Entry("mean_subtracted", _layer_norm, norms, "layer norm for root mean square", BF16),
        Entry("eps", _eps, norms, "eps 1e-5 for 1e-6", options={"embedding": 0.3}),
        Entry("head_unscaled", _unscaled_head, ("",), "states before the head not scaled"),
        Entry("targets_not_shifted", _not_shifted, ("",), "the decoder sees its targets", BF16),
        Entry(
            "cross_mask_ignored",
            _cross_unmasked,
            ("decoder.blocks.0.cross",),
            "padding of the source seen",
            options=padded,
        ),
        Entry(
            "encoder_mask_ignored",
            _encoder_unmasked,
            ("encoder",),
            "padding of the source seen",
            options=padded,
        ),
        Entry(
            "cross_loaded_with_own",
            _own_keys,
            ("decoder.blocks.1.cross.kv",),
            "keys and values of the self-attention loaded",
        ),
        Entry("exact_gelu", _exact_gelu, ffns, "erf GELU for the tanh one"),
        Entry(
            "gate_second",
            _gate_second,
            ("encoder.blocks.1.ffn.up", "encoder.blocks.1.ffn"),
            "gate and up projection fused in the other order",
            F16,
        ),
        Entry("encoder_norm_missing", _no_encoder_norm, ("encoder.norm",), "no norm at the end"),
        Entry(
            "decode_bias_forgets_past",
            _bias_forgets_past,
            ("decoder",),
            "distances counted from the first position in a step",
            options=steps,
        ),
        Entry(
            "decode_stale_values",
            _stale_values,
            ("decoder.blocks.1.mix",),
            "a step's values not written to the cache",
            options=steps,
        ),
        Entry(
            "table_of_encoder",
            _table_of_encoder,
            ("decoder.distance.table",),
            "table of the encoder loaded",
            BF16,
        ),
        Entry(
            "row_scaled",
            lambda port: scale_row(port.decoder.blocks[2].ffn.down.weight, 3),
            ("decoder.blocks.2.ffn.down",),
            "one row times 1.03",
        ),
        Entry(
            "squares_overflow",
            _narrow_norms,
            norms,
            "squares in float16 overflow",
            F16,
            precision=True,
            options={"embedding": 120.0},
        ),
        Entry(
            "scores_in_half",
            _narrow_scores,
            tuple(f"encoder.blocks.{index}.mix" for index in range(LAYERS)),
            "scores and softmax in bfloat16",
            BF16,
            precision=True,
            options={"shift": 60.0},
        ),
    ]
    yield from declare("t5", build, entries)
