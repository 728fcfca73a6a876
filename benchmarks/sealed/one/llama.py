"""A decoder of x-transformers against transformers' Llama, and Mistral for its window."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import x_transformers
from einops import rearrange, repeat
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig
from transformers import MistralForCausalLM as Mistral

from sealed.cases import Case, Pair
from sealed.one.common import (
    BF16,
    F16,
    F32,
    Entry,
    declare,
    decode,
    padding,
    randomise,
    rewrite,
    round_to,
    scale_row,
    tokens,
)
from sealed.one.llama_port import (
    GROUPS,
    HEAD,
    HEADS,
    INNER,
    LAYERS,
    ROTARY,
    THETA,
    VOCABULARY,
    WIDTH,
    Norm,
    Port,
    convert,
    frequencies,
)

ATTENTIONS = tuple(f"net.attn_layers.layers.{2 * index}.1" for index in range(LAYERS))
FFNS = tuple(f"net.attn_layers.layers.{2 * index + 1}.1" for index in range(LAYERS))


class Original(nn.Module):
    """The reference."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def new_cache(self, batch: int) -> DynamicCache:
        """Return an empty cache of keys and values."""
        del batch
        return DynamicCache()

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, cache: Any = None
    ) -> torch.Tensor:
        """Return the logits, 0 at padding."""
        logits = self.net(
            ids, attention_mask=mask, past_key_values=cache, use_cache=cache is not None
        ).logits
        return logits if mask is None else logits * mask[..., None]


def build(
    dtype: torch.dtype,
    kind: str = "plain",
    attention: str = "eager",
    window: int | None = None,
    length: int = 20,
) -> Pair:
    """Return the port with the weights of the reference, and what both are called with."""
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-12,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "attn_implementation": attention,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if window is None:
        net = LlamaForCausalLM(LlamaConfig(**settings))
    else:
        net = Mistral(MistralConfig(**settings, sliding_window=window))
    randomise(net, seed=31)
    round_to(net, dtype)
    layers = x_transformers.Decoder(
        dim=WIDTH,
        depth=LAYERS,
        heads=HEADS,
        attn_dim_head=HEAD,
        attn_kv_heads=GROUPS,
        attn_max_attend_past=None if window is None else window - 1,
        rotary_pos_emb=True,
        rotary_emb_dim=HEAD,
        use_rmsnorm=True,
        norm_add_unit_offset=False,
        ff_glu=True,
        ff_swish=True,
        ff_no_bias=True,
        ff_mult=INNER / WIDTH,
    )
    port = x_transformers.TransformerWrapper(
        num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers, use_abs_pos_emb=False
    )
    convert(net, port)
    for module in port.modules():
        if type(module) is x_transformers.x_transformers.RMSNorm:
            module.__class__ = Norm
    pair = partial(Pair, Port(port), Original(net))
    if kind == "decode":
        ids = tokens(2, 12, VOCABULARY)
        return pair(drive=partial(decode, ids[:, :7], ids[:, 7:]))
    if kind == "padded":
        return pair((tokens(3, 12, VOCABULARY), padding((12, 9, 5), 12, left=True)))
    return pair((tokens(2, length, VOCABULARY),))


def _at(port: Port, path: str) -> Any:
    return port.get_submodule(path)


def _not_paired(port: Port) -> None:
    for path in ATTENTIONS:
        attention = _at(port, path)
        for linear in (attention.to_q, attention.to_k):
            weight = rearrange(linear.weight, "(h d t) w -> (h t d) w", t=2, d=HEAD // 2)
            linear.weight.copy_(weight.clone())


def _base(port: Port) -> None:
    _at(port, ROTARY).inv_freq.copy_(frequencies(10000.0))


def _repeats_interleaved(port: Port) -> None:
    def forward(self: Any, q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        times = q.shape[1] // k.shape[1]
        k, v = (repeat(each, "b h n d -> b (h r) n d", r=times) for each in (k, v))
        return kind.forward(self, q, k, v, **kwargs)

    attend = _at(port, ATTENTIONS[1]).attend
    kind = type(attend)
    rewrite(attend, forward=forward)


def _gate_and_up(port: Port) -> None:
    weight = _at(port, FFNS[1]).ff[0].proj.weight
    weight.copy_(torch.cat(weight.chunk(2)[::-1]))


def _gelu(port: Port) -> None:
    for path in FFNS:
        _at(port, path).ff[0].act = nn.GELU()


def _no_final_norm(port: Port) -> None:
    port.net.attn_layers.final_norm = nn.Identity()


def _doubled_residual(port: Port) -> None:
    port.net.attn_layers.layers[3][2].scale_residual_constant = 2.0


def _no_residual(port: Port) -> None:
    def forward(self: Any, x: torch.Tensor, residual: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        del self, residual, kwargs
        return x

    rewrite(port.net.attn_layers.layers[4][2], forward=forward)


def _wider_window(port: Port) -> None:
    for path in ATTENTIONS:
        _at(port, path).max_attend_past += 1


def _unit_offset(port: Port) -> None:
    for module in port.modules():
        if isinstance(module, Norm):
            module.unit_offset = True


def _norm_of_ffn(port: Port) -> None:
    layers = port.net.attn_layers.layers
    layers[4][0][0].g.copy_(layers[5][0][0].g)


def _scaled_embedding(port: Port) -> None:
    kind = type(port.net.token_emb)

    def forward(self: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return kind.forward(self, x, **kwargs) * WIDTH**0.5

    rewrite(port.net.token_emb, forward=forward)


def _head_tied(port: Port) -> None:
    port.net.to_logits.weight.copy_(port.net.token_emb.emb.weight)


def _late_key(port: Port) -> None:
    kind = type(port.net.attn_layers)

    def forward(self: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        if kwargs.get("cache") is not None:
            positions = torch.arange(x.shape[1] + kwargs["seq_pos_offset"])
            positions[-1] -= 1
            kwargs["pos"] = positions
        return kind.forward(self, x, **kwargs)

    rewrite(port.net.attn_layers, forward=forward)


def _later_positions(port: Port) -> None:
    kind = type(port.net.attn_layers)

    def forward(self: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        kwargs["pos"] = torch.arange(x.shape[1]) + 37
        return kind.forward(self, x, **kwargs)

    rewrite(port.net.attn_layers, forward=forward)


def _mask_ignored(port: Port) -> None:
    attention = _at(port, ATTENTIONS[1])
    kind = type(attention)

    def forward(self: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        return kind.forward(self, x, **{**kwargs, "mask": None})

    rewrite(attention, forward=forward)


def _narrow_frequencies(port: Port) -> None:
    port.wide_angles = False


def _transposed(port: Port) -> None:
    weight = _at(port, ATTENTIONS[2]).to_out.weight
    weight.copy_(weight.T.clone())


def _flash(port: Port) -> None:
    def forward(self: Any, q: Any, k: Any, v: Any, **kwargs: Any) -> Any:
        del self, kwargs
        k, v = (each.repeat(1, HEADS // GROUPS, 1, 1) for each in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed, x_transformers.attend.Intermediates()

    for path in ATTENTIONS:
        rewrite(_at(port, path).attend, forward=forward)


def _folded(port: Port) -> None:
    for index in range(LAYERS):
        (norm, _, _), attention, _ = port.net.attn_layers.layers[2 * index]
        for linear in (attention.to_q, attention.to_k, attention.to_v):
            linear.weight.mul_(norm.g)
        norm.g.fill_(1)
        (norm, _, _), ffn, _ = port.net.attn_layers.layers[2 * index + 1]
        ffn.ff[0].proj.weight.mul_(norm.g)
        norm.g.fill_(1)


def _scaled_values(port: Port) -> None:
    for path in ATTENTIONS:
        attention = _at(port, path)
        attention.to_v.weight.mul_(0.25)
        attention.to_out.weight.mul_(4)


def _plain_norms(port: Port) -> None:
    """Sum the squares in half precision, one channel after the other."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        squares = x * x
        total = squares[..., :1]
        for index in range(1, x.shape[-1]):
            total = total + squares[..., index : index + 1]
        return x * (total / x.shape[-1]).rsqrt() * self.g

    for module in port.net.attn_layers.modules():
        if isinstance(module, Norm):
            rewrite(module, forward=forward)


def cases() -> Iterator[Case]:
    """Yield the cases of x-transformers' decoder."""
    padded, steps, window = (
        {"kind": "padded", "attention": "sdpa"},
        {"kind": "decode"},
        {"window": 6},
    )
    rotated = [f"{path}.{name}" for path in ATTENTIONS for name in ("to_q", "to_k")]
    gated = tuple(f"{path}.ff.0" for path in FFNS)
    layers = "net.attn_layers.layers"
    norms = (*(f"{layers}.{index}.0.0" for index in range(6)), "net.attn_layers.final_norm")
    entries = [
        Entry("clean", dtype=F32),
        Entry("clean", dtype=BF16),
        Entry("clean_against_sdpa", dtype=F16, options={"attention": "sdpa"}),
        Entry("clean_decode_loop", options=steps),
        Entry("clean_left_padding", options=padded),
        Entry("clean_sliding_window", options=window),
        Entry("flash_attention", _flash),
        Entry("norms_folded", _folded),
        Entry("value_scale_moved_to_output", _scaled_values, dtype=BF16),
        Entry("all_positions_later", _later_positions),
        Entry(
            "halves_rotated_as_neighbours",
            _not_paired,
            (*rotated, *ATTENTIONS),
            "rows of queries and keys not permuted for the rotation of neighbours",
        ),
        Entry("rope_base", _base, (ROTARY,), "base 10,000 for 500,000"),
        Entry(
            "repeat_order",
            _repeats_interleaved,
            (f"{ATTENTIONS[1]}.attend",),
            "keys and values repeated in the other order",
            BF16,
        ),
        Entry(
            "gate_and_up_swapped",
            _gate_and_up,
            (f"{gated[1]}.proj", gated[1]),
            "gate and up projection fused in the other order",
        ),
        Entry("gelu_gate", _gelu, tuple(f"{path}.act" for path in gated), "GELU for SiLU", F16),
        Entry(
            "final_norm_missing", _no_final_norm, ("net.attn_layers.final_norm",), "no final norm"
        ),
        Entry("residual_doubled", _doubled_residual, (f"{layers}.3.2",), "residual times 2", BF16),
        Entry("residual_missing", _no_residual, (f"{layers}.4.2",), "residual not added"),
        Entry(
            "window_off_by_one", _wider_window, ATTENTIONS, "window one too wide", options=window
        ),
        Entry("unit_offset", _unit_offset, norms, "1 added to the weights of the norms"),
        Entry(
            "norm_of_ffn",
            _norm_of_ffn,
            (f"{layers}.4.0.0",),
            "weight of the layer's other norm",
            BF16,
        ),
        Entry("embedding_scaled", _scaled_embedding, ("net.token_emb",), "times sqrt(width)"),
        Entry("head_tied", _head_tied, ("net.to_logits",), "head loaded with the embedding"),
        Entry(
            "decode_position_one_early",
            _late_key,
            ("net.attn_layers",),
            "newest token rotated with the position before its own",
            options=steps,
        ),
        Entry("mask_ignored", _mask_ignored, (ATTENTIONS[1],), "padding seen", options=padded),
        Entry(
            "frequencies_in_half",
            _narrow_frequencies,
            (ROTARY,),
            "frequencies cast with the weights",
            BF16,
            options={"length": 60},
        ),
        Entry(
            "output_transposed",
            _transposed,
            (f"{ATTENTIONS[2]}.to_out",),
            "square weight transposed",
            F16,
        ),
        Entry(
            "row_scaled",
            lambda port: scale_row(_at(port, FFNS[0]).ff[0].proj.weight, 9),
            (f"{gated[0]}.proj",),
            "one row of the up projection times 1.03",
        ),
        Entry(
            "norm_sums_in_half",
            _plain_norms,
            norms,
            "mean square summed in bfloat16",
            BF16,
            precision=True,
        ),
    ]
    yield from declare("llama", build, entries)
