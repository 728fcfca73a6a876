"""DeepSeek-V3: a port with absorbed latent attention against transformers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from sealed.cases import Case, Pair
from sealed.three import deepseek_port as port
from sealed.three.common import (
    BRAIN,
    HALF,
    Logits,
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

ATTENTION = "layers.{}.self_attn"
SPARSE = (1, 2)
ROPE = {
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def build(kind: str) -> Pair:
    """Return the port and transformers' model; "steps" decodes, "long" is longer."""
    config = DeepseekV3Config(
        vocab_size=173,
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_shared_experts=2,
        n_routed_experts=8,
        routed_scaling_factor=2.5,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        v_head_dim=12,
        qk_nope_head_dim=16,
        n_group=4,
        topk_group=2,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "yarn", **ROPE},
        attn_implementation="eager",
        experts_implementation="eager",
        num_nextn_predict_layers=0,
    )
    torch.manual_seed(0)
    # Under this seed no rounding to bfloat16 changes which experts are chosen.
    reference = fill(DeepseekV3ForCausalLM(config), seed=46)
    # Small latents of queries, so that eps is seen, and large ones of keys and values.
    for layer in reference.model.layers:
        layer.self_attn.q_a_proj.weight.data.mul_(0.125)
        layer.self_attn.kv_a_proj_with_mqa.weight.data[:16].mul_(64)
    draw = torch.Generator().manual_seed(2)
    for layer in reference.model.layers[1:]:
        bias = layer.mlp.gate.e_score_correction_bias
        bias.copy_((0.15 * torch.randn(bias.shape, generator=draw)).bfloat16())
    candidate = port.DeepseekForCausalLM(config)
    port.load(candidate, reference.state_dict(), config)
    if kind == "steps":
        ids = tokens(4, 2, 11, vocabulary=173)
        return Pair(candidate, Stepper(reference), drive=decoding(ids, 7))
    ids = tokens(9, *((1, 120) if kind == "long" else (2, 12)), vocabulary=173)
    return Pair(candidate, Logits(reference), args=(ids,))


def _of(kind: type[nn.Module], **members) -> object:
    """Return what edits a class of the port."""
    return lambda model: change(*every(model, kind), **members)


def _scale(value: float) -> object:
    def plant(model):
        for attention in every(model, port.MLAAttention):
            attention.scaling = value

    return plant


def _halves(self, x, cos, sin):
    one, two = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def _not_stretched(model):
    rope = dict(ROPE, factor=1.0)
    model.rotary_emb = port.YarnRotaryEmbedding(8, rope)


def _mscale_in_table(model):
    model.rotary_emb = port.YarnRotaryEmbedding(8, dict(ROPE, mscale_all_dim=0.0))


def _transposed(model):
    weight = model.layers[1].self_attn.w_kc
    weight.copy_(weight.transpose(1, 2).clone())


def _heads_inside(model):
    """Split kv_b_proj as if all keys came before all values."""
    for attention in every(model, port.MLAAttention):
        whole = torch.cat((attention.w_kc, attention.w_vc.transpose(1, 2)), 1).flatten(0, 1)
        keys, values = whole.split([4 * 16, 4 * 12])
        attention.w_kc.copy_(keys.unflatten(0, (4, 16)))
        attention.w_vc.copy_(values.unflatten(0, (4, 12)).transpose(1, 2))


def _no_factor(self, hidden):
    x = hidden.flatten(0, 1)
    weights, chosen = self.gate(x)
    return (self.experts(x, weights, chosen) + self.shared_experts(x)).view_as(hidden)


def _factor_on_both(self, hidden):
    x = hidden.flatten(0, 1)
    weights, chosen = self.gate(x)
    both = self.experts(x, weights, chosen) + self.shared_experts(x)
    return (both * self.routed_scaling_factor).view_as(hidden)


def _biased_weights(self, x):
    scores = self.scores(x)
    chosen = self.choose(scores)
    weights = (scores + self.e_score_correction_bias).gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True), chosen


def _softmax_scores(self, x):
    return functional.linear(x.float(), self.weight.float()).softmax(-1)


def _best_of_group(self, biased):
    return biased.amax(-1)


def _late(self, latent, start):
    if not start:
        self.kv_cache = latent
    else:
        gap = torch.zeros_like(latent) if self.kv_cache.shape[1] == start else latent[:, :0]
        self.kv_cache = torch.cat((self.kv_cache, gap, latent), 1)
    return self.kv_cache[:, : (start or 0) + latent.shape[1]]


def _raw_latents_in_steps(self, hidden, cos, sin):
    whole = self.fused_qkv_a_proj(hidden)
    q, latent, k_pe = whole.split([self.q_rank, self.rank, self.rope], -1)
    q = self.q_b_proj(self.q_a_layernorm(q)).unflatten(-1, (self.heads, -1))
    q_nope, q_pe = q.split([self.nope, self.rope], -1)
    q_pe = self.rotate(q_pe, cos, sin)
    k_pe = self.rotate(k_pe.unsqueeze(2), cos, sin).squeeze(2)
    latent = latent if hidden.shape[1] == 1 else self.kv_a_layernorm(latent)
    return q_nope, q_pe, torch.cat((latent, k_pe), -1)


def _sees_one_more(self, queries, keys):
    return torch.ones(queries, keys).triu(keys - queries + 2).bool()


def _finite(self, scores, latent):
    scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    weights = scores.float().softmax(-1).to(scores.dtype)
    return torch.einsum("bhqk,bkr->bqhr", weights, latent)


def _rough_weigh(self, scores, latent):
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    taken = weights.unsqueeze(-1) * latent[:, None, None]
    taken = rough_sum(taken.transpose(-2, -1)).squeeze(-1) / rough_sum(weights)
    return taken.transpose(1, 2)


def _rough_norm(self, x):
    square = rough_sum(x * x) / x.shape[-1]
    return self.weight * (x * torch.rsqrt(square + self.eps))


def _eps_of_config(model):
    for attention in every(model, port.MLAAttention):
        attention.q_a_layernorm.eps = 1e-5


def _materialised(self, hidden, cos, sin, start):
    q_nope, q_pe, new = self.latents(hidden, cos, sin)
    latent, k_pe = self.keep(new, start).split([self.rank, self.rope], -1)
    keys = torch.einsum("bkr,hnr->bhkn", latent, self.w_kc)
    values = torch.einsum("bkr,hrv->bhkv", latent, self.w_vc)
    shared = k_pe.unsqueeze(1).expand(-1, self.heads, -1, -1)
    q = torch.cat((q_nope, q_pe), -1).transpose(1, 2)
    seen = ~self.future(q.shape[-2], keys.shape[-2])
    taken = functional.scaled_dot_product_attention(
        q, torch.cat((keys, shared), -1), values, attn_mask=seen, scale=self.scaling
    )
    return self.o_proj(taken.transpose(1, 2).flatten(2))


def _norm_absorbed(model):
    for attention in every(model, port.MLAAttention):
        norm = attention.kv_a_layernorm.weight
        attention.w_kc.mul_(norm)
        attention.w_vc.mul_(norm[:, None])
        norm.fill_(1)


def _factor_folded(model):
    for layer in model.layers[1:]:
        layer.mlp.experts.w2.mul_(layer.mlp.routed_scaling_factor)
        layer.mlp.routed_scaling_factor = 1.0


def _gate_and_up(model):
    weight = model.layers[0].mlp.gate_up_proj.weight
    swap(weight[:64], weight[64:])


ROWS = [
    Row(
        "mscale_forgotten",
        _scale(24**-0.5),
        ATTENTION,
        "the scale lacks the squared mscale of YaRN",
    ),
    Row(
        "scale_of_nope",
        _scale(16**-0.5 * port.yarn_mscale(4.0, 1.0) ** 2),
        ATTENTION,
        "the scale is taken from the width without the rotated part",
        BRAIN,
    ),
    Row(
        "halves_rotated",
        _of(port.MLAAttention, rotate=_halves),
        ATTENTION,
        "halves are rotated where the weights want neighbours",
        HALF,
    ),
    Row(
        "not_stretched",
        _not_stretched,
        "rotary_emb",
        "frequencies are those of plain rope, not YaRN's",
    ),
    Row(
        "mscale_in_table",
        _mscale_in_table,
        "rotary_emb",
        "mscale_all_dim is not read, so cosines and sines are scaled too",
        BRAIN,
    ),
    Row(
        "absorbed_transposed",
        _transposed,
        "layers.1.self_attn",
        "the absorbed key weight of layer 1, square by head, is transposed",
    ),
    Row(
        "heads_inside",
        _heads_inside,
        ATTENTION,
        "kv_b_proj is split as if all keys came before all values",
        BRAIN,
    ),
    Row(
        "factor_forgotten",
        _of(port.DeepseekMoE, forward=_no_factor),
        "layers.{}.mlp",
        "the routed experts are not scaled by routed_scaling_factor",
        layers=SPARSE,
    ),
    Row(
        "factor_on_both",
        _of(port.DeepseekMoE, forward=_factor_on_both),
        "layers.{}.mlp",
        "the shared experts are scaled by routed_scaling_factor too",
        BRAIN,
        layers=SPARSE,
    ),
    Row(
        "biased_weights",
        _of(port.MoEGate, forward=_biased_weights),
        "layers.{}.mlp.gate",
        "experts are weighed by scores with the correction bias",
        layers=SPARSE,
    ),
    Row(
        "softmax_scores",
        _of(port.MoEGate, scores=_softmax_scores),
        "layers.{}.mlp.gate",
        "the router's scores are a softmax where they are sigmoids",
        layers=SPARSE,
    ),
    Row(
        "best_of_group",
        _of(port.MoEGate, of_groups=_best_of_group),
        "layers.{}.mlp.gate",
        "groups are chosen by their best expert, not their best two",
        layers=SPARSE,
    ),
    Row(
        "gate_and_up",
        _gate_and_up,
        "layers.0.mlp.gate_up_proj",
        "gate and up of the dense layer are fused the wrong way round",
    ),
    Row(
        "sees_next_token",
        _of(port.MLAAttention, future=_sees_one_more),
        ATTENTION,
        "the causal mask is off by one",
        HALF,
    ),
    Row(
        "eps_of_latent_norm",
        _eps_of_config,
        f"{ATTENTION}.q_a_layernorm",
        "the norm of the query latents has the config's eps, not 1e-6",
    ),
    Row(
        "softmax_rounded",
        _of(port.MLAAttention, weigh=_rough_weigh),
        ATTENTION,
        "the softmax and what it weighs are summed in the dtype of the activations",
        BRAIN,
        precision=True,
        kind="long",
    ),
    Row(
        "latent_norm_overflows",
        lambda model: change(*every(model, "kv_a_layernorm"), forward=_rough_norm),
        f"{ATTENTION}.kv_a_layernorm",
        "squares are summed in float16, where they overflow",
        HALF,
        precision=True,
    ),
    Row(
        "head_rounded",
        lambda model: change(model.head, forward=rough_linear),
        "head",
        "partial sums of the logits are kept in the dtype of the activations",
        BRAIN,
        precision=True,
    ),
    Row(
        "cache_written_late",
        _of(port.MLAAttention, keep=_late),
        ATTENTION,
        "decode steps write latents one slot late",
        kind="steps",
    ),
    Row(
        "latents_not_normalised",
        _of(port.MLAAttention, latents=_raw_latents_in_steps),
        ATTENTION,
        "decode steps cache latents before their norm",
        kind="steps",
    ),
    Row("clean"),
    Row("clean", dtype=BRAIN),
    Row("clean", dtype=HALF),
    Row("clean_steps", kind="steps"),
    Row("clean_steps", dtype=HALF, kind="steps"),
    Row("not_absorbed", _of(port.MLAAttention, forward=_materialised)),
    Row("not_absorbed", _of(port.MLAAttention, forward=_materialised), dtype=HALF),
    Row("norm_absorbed", _norm_absorbed),
    Row("factor_folded", _factor_folded),
    Row("mask_finite", _of(port.MLAAttention, weigh=_finite)),
]


def cases() -> Iterator[Case]:
    """Yield the cases of this architecture."""
    yield from cases_of("deepseek_v3", build, ROWS)
