"""Qwen3-MoE: an engine's port against transformers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sealed.cases import Case, Pair
from sealed.three import qwen_port as port
from sealed.three.common import (
    BRAIN,
    HALF,
    Row,
    Stepper,
    cases_of,
    change,
    decoding,
    every,
    fill,
    rough_linear,
    rough_sum,
    swap,
    tokens,
)

LAYER = "model.layers.{}"


class Packed(nn.Module):
    """The transformers model, called with packed sequences of one length."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return the logits, packed."""
        count = int((places == 0).sum())
        ids, positions = input_ids.view(count, -1), places.view(count, -1)
        logits = self.model(input_ids=ids, position_ids=positions, use_cache=False).logits
        return logits.flatten(0, 1)


def build(kind: str) -> Pair:
    """Return the port and transformers' model; "steps" decodes, "long" is one long sequence."""
    config = Qwen3MoeConfig(
        vocab_size=199,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    torch.manual_seed(0)
    # Under this seed no rounding to bfloat16 changes which experts are chosen.
    reference = fill(Qwen3MoeForCausalLM(config), seed=23)
    reference.tie_weights()
    steps = kind == "steps"
    candidate = port.Qwen3MoeForCausalLM(config, slots=32 if steps else 0)
    port.load(candidate, reference.state_dict())
    if steps:
        ids = tokens(5, 1, 12, vocabulary=199)
        return Pair(candidate, Stepper(reference), drive=decoding(ids, 8))
    if kind == "long":
        ids = tokens(41, 96, vocabulary=199)
        return Pair(candidate, Packed(reference), args=(ids, torch.arange(96)))
    ids = tokens(6, 22, vocabulary=199)
    return Pair(candidate, Packed(reference), args=(ids, torch.arange(11).repeat(2)))


def _of(kind: type[nn.Module], **members) -> object:
    """Return what edits a class of the port."""
    return lambda model: change(*every(model, kind), **members)


def _rope_before_norm(self, positions, hidden, segments):
    q, k, v = self.qkv_proj(hidden).split([self.q_size, self.kv_size, self.kv_size], -1)
    q, k = self.rotary_emb(positions, q, k)
    q, k = self.by_head(self.q_norm, q), self.by_head(self.k_norm, k)
    return self.o_proj(self.attn(q, k, v, positions, segments))


def _other_base(model):
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = port.RotaryEmbedding(16, 128, 10000.0)


def _pairs(self, x, cos, sin):
    heads = x.view(x.shape[0], -1, self.head_dim)
    one, two = heads[..., 0::2], heads[..., 1::2]
    return torch.stack((one * cos - two * sin, two * cos + one * sin), -1).flatten(1)


def _rough_angles(self, positions, like):
    angles = torch.outer(positions.to(like.dtype), self.inv_freq.to(like.dtype))
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def _tiled(self, x):
    return x.repeat(1, self.heads // self.kv_heads, 1)


def _sequences_joined(self, positions, segments):
    return torch.ones(len(positions), len(positions)).tril().bool()


def _late_write(self, positions, k, v):
    self.clear(positions, k)
    slots = positions if len(positions) > 1 else positions + 1
    self.k_cache[slots] = k
    self.v_cache[slots] = v


def _write_of_keys_lost(self, positions, k, v):
    self.clear(positions, k)
    if len(positions) > 1:
        self.k_cache[positions] = k
    self.v_cache[positions] = v


def _position_of_length(self, start, count):
    return torch.arange(start, start + count) + (count == 1)


def _rough_attention(self, q, k, v, seen):
    scores = (q @ k.transpose(-2, -1) * self.scale).masked_fill(~seen, -torch.inf)
    weights = scores.exp()
    taken = (weights.unsqueeze(-1) * v.unsqueeze(1)).transpose(-2, -1)
    return rough_sum(taken).squeeze(-1) / rough_sum(weights)


def _eager_attention(self, q, k, v, seen):
    scores = (q @ k.transpose(-2, -1) * self.scale).float()
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    return scores.softmax(-1).to(q.dtype) @ v


def _not_normalised(self, logits):
    weights, chosen = torch.softmax(logits.float(), -1).topk(self.top_k, -1)
    return weights.to(logits.dtype), chosen


def _weights_on_input(self, hidden, logits):
    weights, chosen = self.select(logits)
    out = torch.zeros_like(hidden)
    for index in range(self.w13_weight.shape[0]):
        token, slot = torch.where(chosen == index)
        if token.numel():
            done = self.expert(hidden[token] * weights[token, slot, None], index)
            out.index_add_(0, token, done)
    return out


def _all_experts(self, hidden, logits):
    weights, chosen = self.select(logits)
    dense = torch.zeros_like(logits).scatter(1, chosen, weights)
    done = [self.expert(hidden, index) for index in range(dense.shape[1])]
    return torch.einsum("te,teh->th", dense, torch.stack(done, 1))


def _sum_dropped(self, positions, hidden, residual, segments):
    if residual is None:
        residual = hidden
        hidden = self.input_layernorm(hidden)
    else:
        hidden, residual = self.input_layernorm(hidden, residual)
    hidden = self.self_attn(positions, hidden, segments)
    hidden = self.post_attention_layernorm(hidden, residual)[0]
    return self.mlp(hidden), residual


def _norm_of_output_only(self, input_ids, positions, segments):
    hidden, residual = self.embed_tokens(input_ids), None
    for layer in self.layers:
        hidden, residual = layer(positions, hidden, residual, segments)
    return self.norm(hidden)


def _eps(model):
    for layer in model.model.layers:
        layer.input_layernorm.eps = 1e-5


def _scale_of_width(model):
    for attention in every(model, port.Attention):
        attention.scale = (48 // 4) ** -0.5


def _gate_and_up_swapped(model):
    one = model.model.layers[1].mlp.experts.w13_weight[3]
    swap(one[:32], one[32:])


def _keys_and_values_swapped(model):
    weight = model.model.layers[2].self_attn.qkv_proj.weight
    swap(weight[64:96], weight[96:])


def _untied(model):
    weight = model.model.embed_tokens.weight
    draw = torch.Generator().manual_seed(3)
    model.lm_head.weight = nn.Parameter(weight + 0.1 * torch.randn(weight.shape, generator=draw))


def _fold(model):
    for layer in model.model.layers:
        layer.self_attn.qkv_proj.weight.mul_(layer.input_layernorm.weight)
        layer.input_layernorm.weight.fill_(1)
        norm, mlp = layer.post_attention_layernorm.weight, layer.mlp
        mlp.gate.weight.mul_(norm)
        mlp.experts.w13_weight.mul_(norm)
        norm.fill_(1)


def _experts_reordered(model):
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for layer in model.model.layers:
        for weight in (layer.mlp.gate.weight, *layer.mlp.experts.parameters()):
            weight.copy_(weight[order].clone())


def _unused(model):
    for layer in model.model.layers:
        layer.mlp.shared_gate = nn.Linear(48, 1)
        layer.self_attn.k_scale = nn.Parameter(torch.tensor(0.7))


def _projection_of_two(model):
    layers = model.model.layers
    layers[2].self_attn.o_proj.weight.copy_(layers[1].self_attn.o_proj.weight)


ROWS = [
    Row(
        "rope_before_norm",
        _of(port.Qwen3MoeAttention, forward=_rope_before_norm),
        f"{LAYER}.self_attn",
        "heads are rotated before they are normalised",
    ),
    Row(
        "rope_base",
        _other_base,
        f"{LAYER}.self_attn.rotary_emb",
        "rope base 10,000 in code, 1,000,000 in the config",
        BRAIN,
    ),
    Row(
        "rope_pairs",
        _of(port.RotaryEmbedding, rotate=_pairs),
        f"{LAYER}.self_attn.rotary_emb",
        "neighbours are rotated where the weights want halves",
    ),
    Row(
        "rope_angles_rounded",
        _of(port.RotaryEmbedding, angles=_rough_angles),
        f"{LAYER}.self_attn.rotary_emb",
        "angles are computed in the dtype of the activations",
        BRAIN,
        precision=True,
        kind="long",
    ),
    Row(
        "kv_heads_tiled",
        _of(port.Attention, expand=_tiled),
        f"{LAYER}.self_attn.attn",
        "key heads are tiled where each should be repeated",
        BRAIN,
    ),
    Row(
        "sequences_joined",
        _of(port.Attention, visible=_sequences_joined),
        f"{LAYER}.self_attn.attn",
        "the mask is causal over all packed tokens, not within each sequence",
    ),
    Row(
        "scale_of_width",
        _scale_of_width,
        f"{LAYER}.self_attn.attn",
        "scale from width over heads where head_dim is set apart",
    ),
    Row(
        "softmax_rounded",
        _of(port.Attention, attend=_rough_attention),
        f"{LAYER}.self_attn.attn",
        "the softmax and what it weighs are summed in the dtype of the activations",
        BRAIN,
        precision=True,
        kind="long",
    ),
    Row(
        "top_k_not_normalised",
        _of(port.FusedMoE, select=_not_normalised),
        f"{LAYER}.mlp.experts",
        "weights of the chosen experts are not made to sum to one",
    ),
    Row(
        "split_k_rounded",
        lambda model: change(
            *(layer.self_attn.o_proj for layer in model.model.layers), forward=rough_linear
        ),
        f"{LAYER}.self_attn.o_proj",
        "partial sums of the product are kept in the dtype of the activations",
        BRAIN,
        precision=True,
        kind="long",
    ),
    Row(
        "weights_on_input",
        _of(port.FusedMoE, forward=_weights_on_input),
        f"{LAYER}.mlp.experts",
        "routing weights scale the experts' input instead of their output",
        HALF,
    ),
    Row(
        "gate_and_up_of_expert",
        _gate_and_up_swapped,
        "model.layers.1.mlp.experts",
        "gate and up of one expert are fused the wrong way round",
    ),
    Row(
        "keys_and_values",
        _keys_and_values_swapped,
        "model.layers.2.self_attn.qkv_proj",
        "keys and values of layer 2 are fused the wrong way round",
        BRAIN,
    ),
    Row(
        "residual_not_summed",
        lambda model: change(model.model.layers[1], forward=_sum_dropped),
        "model.layers.1",
        "the residual that goes on lacks the attention's output",
    ),
    Row(
        "last_norm_without_residual",
        lambda model: change(model.model, forward=_norm_of_output_only),
        "model",
        "the last norm gets the MLP's output without the residual",
    ),
    Row(
        "eps",
        _eps,
        f"{LAYER}.input_layernorm",
        "eps 1e-5 where the config has 1e-6",
    ),
    Row(
        "row_scaled",
        lambda model: model.model.layers[0].self_attn.o_proj.weight[7].mul_(1.03),
        "model.layers.0.self_attn.o_proj",
        "one row of a weight is 3 % too large",
    ),
    Row(
        "layer_loaded_twice",
        _projection_of_two,
        "model.layers.2.self_attn.o_proj",
        "layer 2 has the output projection of layer 1",
        HALF,
    ),
    Row("head_not_tied", _untied, "lm_head", "the head has weights of its own, stale ones"),
    Row(
        "cache_written_late",
        _of(port.Attention, write=_late_write),
        f"{LAYER}.self_attn.attn",
        "decode steps write keys and values one slot late",
        kind="steps",
    ),
    Row(
        "keys_not_cached",
        lambda model: change(model.model.layers[1].self_attn.attn, write=_write_of_keys_lost),
        "model.layers.1.self_attn.attn",
        "decode steps of one layer write values only",
        BRAIN,
        kind="steps",
    ),
    Row(
        "position_of_step",
        lambda model: change(model, positions=_position_of_length),
        "",
        "decode steps get the sequence's length for a position, one too many",
        kind="steps",
    ),
    Row("clean"),
    Row("clean", dtype=BRAIN),
    Row("clean", dtype=HALF),
    Row("clean_long", dtype=BRAIN, kind="long"),
    Row("clean_steps", kind="steps"),
    Row("clean_steps", dtype=BRAIN, kind="steps"),
    Row("norms_folded", _fold),
    Row("experts_reordered", _experts_reordered),
    Row("all_experts_run", _of(port.FusedMoE, forward=_all_experts)),
    Row("eager_attention_finfo", _of(port.Attention, attend=_eager_attention), dtype=BRAIN),
    Row("unused_weights", _unused),
]


def cases() -> Iterator[Case]:
    """Yield the cases of this architecture."""
    yield from cases_of("qwen3_moe", build, ROWS)
