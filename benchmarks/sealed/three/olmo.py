"""OLMo 2: litgpt against transformers, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from litgpt import model as litgpt
from torch import nn
from torch.nn import functional
from transformers.models.olmo2 import modeling_olmo2 as olmo2

from sealed.cases import Case
from sealed.three.common import (
    BRAIN,
    HALF,
    Row,
    cases_of,
    change,
    every,
    rough_sum,
    swap,
)
from sealed.three.olmo_port import GROUPS, HEAD, HEADS, WIDTH, build

BLOCK = "transformer.h.{}"
LAYER = "model.model.layers.{}"


def _of(kind: type[nn.Module], **members) -> object:
    """Return what edits a class of the candidate."""
    return lambda model: change(*every(model, kind), **members)


def _by_head(self, x):
    heads = x.float().unflatten(-1, (-1, HEAD))
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + self.eps)
    return (normed.flatten(-2) * self.weight.float()).to(x.dtype)


def _norms_of_heads(model):
    for attention in every(model, litgpt.CausalSelfAttention):
        change(attention.norm_q, attention.norm_k, forward=_by_head)


def _norm_first(self, x, cos, sin, mask=None, input_pos=None, input_pos_maxp1=None):
    x = x + self.attn(self.post_attention_norm(x), cos, sin, mask, input_pos, input_pos_maxp1)
    return x + self.mlp(self.post_mlp_norm(x))


def _norm_of_sum(self, x, cos, sin, mask=None, input_pos=None, input_pos_maxp1=None):
    x = x + self.post_attention_norm(self.attn(x, cos, sin, mask, input_pos, input_pos_maxp1))
    return self.post_mlp_norm(x + self.mlp(x))


def _residual_of_input(self, x, cos, sin, mask=None, input_pos=None, input_pos_maxp1=None):
    taken = self.post_attention_norm(self.attn(x, cos, sin, mask, input_pos, input_pos_maxp1))
    return x + self.post_mlp_norm(self.mlp(x + taken))


def _rope_base(model):
    model.cos, model.sin = litgpt.build_rope_cache(128, HEAD, base=10000)


def _qkv_by_group(model):
    """Lay queries, keys and values out group by group, as older checkpoints of litgpt are."""
    for attention in every(model, litgpt.CausalSelfAttention):
        q, k, v = attention.qkv.weight.split([HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD])
        q = q.unflatten(0, (GROUPS, -1))
        k, v = k.unflatten(0, (GROUPS, -1)), v.unflatten(0, (GROUPS, -1))
        attention.qkv.weight.copy_(torch.cat((q, k, v), 1).flatten(0, 1))


def _gelu_gate(self, x):
    return self.proj(functional.gelu(self.fc_1(x)) * self.fc_2(x))


def _shared_config(**members):
    def plant(model):
        for attention in every(model, litgpt.CausalSelfAttention):
            attention.config = type("Edited", (), {**vars(attention.config), **members})()

    return plant


def _sees_future(model):
    count = model.mask_cache.shape[-1]
    model.mask_cache = torch.ones(count, count).tril(1).bool()[None, None]


def _write_late(self, input_pos, k, v):
    slots = input_pos + (len(input_pos) == 1)
    self.k = litgpt.batched_index_copy_(self.k.to(k.dtype), -2, slots, k)
    self.v = litgpt.batched_index_copy_(self.v.to(v.dtype), -2, slots, v)
    return self.k, self.v


def _values_overwritten(self, input_pos, k, v):
    slots = input_pos if len(input_pos) > 1 else input_pos - 1
    self.k = litgpt.batched_index_copy_(self.k.to(k.dtype), -2, input_pos, k)
    self.v = litgpt.batched_index_copy_(self.v.to(v.dtype), -2, slots, v)
    return self.k, self.v


def _stale_positions(self, start, count):
    return torch.arange(start, start + count) if count > 1 else torch.tensor([8])


def _rough_norm(self, x):
    square = rough_sum(x * x) / x.shape[-1]
    return x * torch.rsqrt(square + self.eps) * self.weight


def _rough_last_norm(model):
    change(model.transformer.ln_f, forward=_rough_norm)


def _rough_attention(self, q, k, v, mask=None):
    scores = q @ k.mT * self.config.head_size**-0.5
    hidden = torch.ones(scores.shape[-2:]).triu(1).bool()
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    taken = (weights.unsqueeze(-1) * v.unsqueeze(2)).transpose(-2, -1)
    return (rough_sum(taken).squeeze(-1) / rough_sum(weights)).transpose(1, 2)


def _plain_attention(self, q, k, v, mask=None):
    scores = (q @ k.mT).float() * self.config.head_size**-0.5
    count = scores.shape[-1]
    seen = torch.ones(scores.shape[-2:]).tril(count - scores.shape[-2]).bool()
    scores = scores.masked_fill(~(seen if mask is None else mask), torch.finfo(scores.dtype).min)
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)


def _norms_of_heads_swapped(model):
    for layer in model.model.model.layers:
        norm = layer.self_attn.q_norm.weight
        norm[:32], norm[32:] = norm[32:].clone(), norm[:32].clone()


def _gate_and_up(model):
    mlp = model.transformer.h[1].mlp
    swap(mlp.fc_1.weight, mlp.fc_2.weight)


def _norms_swapped(model):
    block = model.transformer.h[1]
    swap(block.post_attention_norm.weight, block.post_mlp_norm.weight)


def _copied_layer(model):
    layers = model.model.model.layers
    layers[2].self_attn.v_proj.weight.copy_(layers[1].self_attn.v_proj.weight)


def _coarse_frequencies(model):
    rotary = model.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


def _doubled_residual(self, hidden_states, **kwargs):
    taken, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
    residual = hidden_states + self.post_attention_layernorm(taken)
    return residual + residual + self.post_feedforward_layernorm(self.mlp(residual))


def _rotated_backwards(self, hidden_states, position_embeddings, **kwargs):
    cos, sin = position_embeddings
    return olmo2.Olmo2Attention.forward(self, hidden_states, (cos, -sin), **kwargs)


def _scaled_up(model):
    """Fold the square root of the scale into the norms of queries and keys."""
    for attention in every(model, litgpt.CausalSelfAttention):
        attention.norm_q.weight.mul_(HEAD**-0.5)
    _shared_config(attention_scores_scalar=1.0)(model)


def _heads_permuted(model):
    """Exchange the two groups of heads with their weights, which changes nothing."""
    for attention in every(model, litgpt.CausalSelfAttention):
        q, k, v = attention.qkv.weight.split([64, 32, 32])
        for part in (q, k, v, attention.norm_q.weight, attention.norm_k.weight):
            half = len(part) // 2
            swap(part[:half], part[half:])
        swap(attention.proj.weight[:, :32], attention.proj.weight[:, 32:])


def _unused(model):
    model.transformer.h[0].norm_0 = nn.LayerNorm(WIDTH)
    model.register_buffer("steps_taken", torch.zeros(1))


ROWS = [
    Row(
        "norm_by_head",
        _norms_of_heads,
        (f"{BLOCK}.attn.norm_q", f"{BLOCK}.attn.norm_k"),
        "queries and keys are normalised head by head, not over all heads",
        BRAIN,
    ),
    Row(
        "norm_first",
        _of(litgpt.Block, forward=_norm_first),
        BLOCK,
        "norms come before attention and MLP, not after them",
    ),
    Row(
        "norm_of_sum",
        lambda model: change(model.transformer.h[2], forward=_norm_of_sum),
        "transformer.h.2",
        "the norm after the MLP takes the residual in",
        BRAIN,
    ),
    Row(
        "residual_of_input",
        lambda model: change(model.transformer.h[0], forward=_residual_of_input),
        "transformer.h.0",
        "the second residual lacks what attention added",
    ),
    Row("rope_base", _rope_base, "", "the table of angles has base 10,000", HALF),
    Row(
        "qkv_by_group",
        _qkv_by_group,
        f"{BLOCK}.attn.qkv",
        "queries, keys and values are fused group by group",
    ),
    Row(
        "gelu_gate",
        _of(litgpt.LLaMAMLP, forward=_gelu_gate),
        f"{BLOCK}.mlp",
        "the gate is a gelu where it is a silu",
        BRAIN,
    ),
    Row(
        "scale_of_width",
        _shared_config(attention_scores_scalar=WIDTH),
        f"{BLOCK}.attn",
        "scale from the model's width, not the head's",
    ),
    Row(
        "eps",
        lambda model: [setattr(block.post_mlp_norm, "eps", 1e-5) for block in model.transformer.h],
        f"{BLOCK}.post_mlp_norm",
        "eps 1e-5 where the config has 1e-6",
    ),
    Row(
        "gate_and_up",
        _gate_and_up,
        ("transformer.h.1.mlp.fc_1", "transformer.h.1.mlp.fc_2"),
        "gate and up of one layer are loaded the wrong way round",
        HALF,
    ),
    Row(
        "norms_swapped",
        _norms_swapped,
        ("transformer.h.1.post_attention_norm", "transformer.h.1.post_mlp_norm"),
        "the two norms of one layer are loaded the wrong way round",
    ),
    Row(
        "last_norm_rounded",
        _rough_last_norm,
        "transformer.ln_f",
        "the mean square is summed in the dtype of the activations",
        BRAIN,
        precision=True,
    ),
    Row(
        "softmax_rounded",
        _of(litgpt.CausalSelfAttention, scaled_dot_product_attention=_rough_attention),
        f"{BLOCK}.attn",
        "the softmax and what it weighs are summed in the dtype of the activations",
        BRAIN,
        precision=True,
        kind="long",
    ),
    Row(
        "cache_written_late",
        _of(litgpt.KVCache, forward=_write_late),
        f"{BLOCK}.attn.kv_cache",
        "decode steps write keys and values one slot late",
        kind="steps",
    ),
    Row(
        "values_overwritten",
        lambda model: change(model.transformer.h[1].attn.kv_cache, forward=_values_overwritten),
        "transformer.h.1.attn.kv_cache",
        "decode steps of one layer write values one slot early",
        BRAIN,
        kind="steps",
    ),
    Row("sees_future", _sees_future, "", "the mask shows one token more", kind="steps"),
    Row(
        "stale_positions",
        lambda model: change(model, places=_stale_positions),
        "",
        "every decode step has the position of the first, as a replayed graph would",
        kind="steps",
    ),
    Row(
        "layer_loaded_twice",
        _copied_layer,
        "model.model.layers.2.self_attn.v_proj",
        "layer 2 has the values' weight of layer 1",
        kind="back",
    ),
    Row(
        "norm_of_heads_permuted",
        _norms_of_heads_swapped,
        f"{LAYER}.self_attn.q_norm",
        "the heads of the queries' norm are in another order than the queries'",
        kind="back",
    ),
    Row(
        "frequencies_rounded",
        _coarse_frequencies,
        "model.model.rotary_emb",
        "the frequencies went through bfloat16",
        kind="back",
    ),
    Row(
        "residual_doubled",
        lambda model: change(model.model.model.layers[1], forward=_doubled_residual),
        "model.model.layers.1",
        "the residual is added twice, once per rank",
        BRAIN,
        kind="back",
    ),
    Row(
        "rotated_backwards",
        lambda model: change(model.model.model.layers[1].self_attn, forward=_rotated_backwards),
        "model.model.layers.1.self_attn",
        "one layer rotates by the negative angle",
        kind="back",
    ),
    Row("clean"),
    Row("clean", dtype=BRAIN),
    Row("clean", dtype=HALF),
    Row("clean_back", kind="back"),
    Row("clean_back", dtype=BRAIN, kind="back"),
    Row("clean_steps", kind="steps"),
    Row("clean_steps", dtype=BRAIN, kind="steps"),
    Row(
        "attention_written_out",
        _of(litgpt.CausalSelfAttention, scaled_dot_product_attention=_plain_attention),
    ),
    Row("scale_folded", _scaled_up),
    Row("heads_permuted", _heads_permuted),
    Row("unused_weights", _unused),
]


def cases() -> Iterator[Case]:
    """Yield the cases of this architecture."""
    yield from cases_of("olmo2", build, ROWS)
