"""ESM-2: fair-esm against transformers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from esm import modules
from esm.multihead_attention import MultiheadAttention
from esm.rotary_embedding import rotate_half
from torch import nn
from torch.nn import functional

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
from sealed.three.esm2_port import HEADS, Rotary, build

LAYER = "layers.{}"
ATTENTION = f"{LAYER}.self_attn"


def _of(kind: type[nn.Module], **members) -> object:
    """Return what edits a class of the candidate."""
    return lambda model: change(*every(model, kind), **members)


def _attention(scores_of=None, weigh=None):
    """Return the package's attention written out, with other scores or another sum."""

    def forward(self, query, key, value, key_padding_mask=None, need_head_weights=False, **_):
        count, batch, width = query.shape

        def by_head(x):
            return x.contiguous().view(count, batch * HEADS, width // HEADS).transpose(0, 1)

        q, k = by_head(self.q_proj(query) * self.scaling), by_head(self.k_proj(key))
        scores = _scores(self, q, k) if scores_of is None else scores_of(self, q, k)
        if key_padding_mask is not None:
            hidden = key_padding_mask.repeat_interleave(HEADS, 0).unsqueeze(1)
            scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        taken = (weigh or _weigh)(scores, by_head(self.v_proj(value)))
        return self.out_proj(taken.transpose(0, 1).reshape(count, batch, width)), None

    return forward


def _scores(self, q, k):
    q, k = self.rot_emb(q, k)
    return q @ k.transpose(1, 2)


def _weigh(scores, v):
    return scores.float().softmax(-1).to(v.dtype) @ v


def _rough_weigh(scores, v):
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    taken = (weights.unsqueeze(-1) * v.unsqueeze(1)).transpose(-2, -1)
    return rough_sum(taken).squeeze(-1) / rough_sum(weights)


def _over_queries(scores, v):
    return scores.float().softmax(1).to(v.dtype) @ v


def _scaled_again(self, q, k):
    """Scale once more, as a kernel with a scale of its own does."""
    return _scores(self, q, k) * self.scaling


def _padding_seen(self, padding):
    return None


def _padding_early(self, padding):
    """Count the tokens without the one that ends the sequence."""
    return padding | functional.pad(padding[:, 1:], (0, 1))


def _ratio(self, ids, padding):
    masked = ids == self.mask_idx
    x = self.embed_tokens(ids).masked_fill(masked.unsqueeze(-1), 0.0)
    seen = masked.sum(-1).to(x.dtype) / (~padding).sum(-1)
    return x * (1 - 0.15) / (1 - seen)[:, None, None] * ~padding.unsqueeze(-1)


def _ratio_with_padding(self, ids, padding):
    masked = ids == self.mask_idx
    x = self.embed_tokens(ids).masked_fill(masked.unsqueeze(-1), 0.0)
    seen = masked.sum(-1).to(x.dtype) / ids.shape[1]
    return x * (1 - 0.15 * 0.8) / (1 - seen)[:, None, None] * ~padding.unsqueeze(-1)


def _mask_kept(self, ids, padding):
    x = self.embed_tokens(ids)
    seen = (ids == self.mask_idx).sum(-1).to(x.dtype) / (~padding).sum(-1)
    return x * (1 - 0.15 * 0.8) / (1 - seen)[:, None, None] * ~padding.unsqueeze(-1)


def _keys_not_turned(self, q, k):
    return self.turn(q), k


def _one_late(self, q, k):
    filler = torch.zeros_like(k[:, :1])
    return self.turn(q), self.turn(torch.cat((filler, k), 1))[:, 1:]


def _rough_turn(self, x):
    places = torch.arange(x.shape[-2]).to(x.dtype)
    angles = torch.outer(places, self.inv_freq.to(x.dtype)).repeat(1, 2)
    return x * angles.cos() + rotate_half(x) * angles.sin()


def _layer(self, x, self_attn_padding_mask=None, activation=modules.gelu, inner=False):
    normed = self.self_attn_layer_norm(x)
    taken, _ = self.self_attn(normed, normed, normed, key_padding_mask=self_attn_padding_mask)
    residual = x + taken
    normed = self.final_layer_norm(residual)
    done = self.fc2(activation(self.fc1(normed)))
    return (normed if inner else residual) + done, None


def _tanh_layer(self, x, self_attn_padding_mask=None, **_):
    def rough(inner):
        return functional.gelu(inner, approximate="tanh")

    return _layer(self, x, self_attn_padding_mask, rough)


def _residual_of_norm(self, x, self_attn_padding_mask=None, **_):
    return _layer(self, x, self_attn_padding_mask, inner=True)


def _head_without_bias(self, features):
    x = self.layer_norm(modules.gelu(self.dense(features)))
    return functional.linear(x, self.weight)


def _head_norm_first(self, features):
    x = modules.gelu(self.layer_norm(self.dense(features)))
    return functional.linear(x, self.weight) + self.bias


def _rough_layer_norm(self, x):
    mean = rough_sum(x) / x.shape[-1]
    square = rough_sum(x * x) / x.shape[-1]
    return (x - mean) / (square - mean * mean + self.eps).sqrt() * self.weight + self.bias


def _unbiased_layer_norm(self, x):
    spread = x.var(-1, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) / (spread + self.eps).sqrt() * self.weight + self.bias


def _one_sided(self, ids, attentions):
    lower = attentions.tril()
    return modules.ContactPredictionHead.forward(self, ids, lower + lower.mT)


def _queries_and_keys(model):
    attention = model.layers[2].self_attn
    for part in ("weight", "bias"):
        swap(getattr(attention.q_proj, part), getattr(attention.k_proj, part))


def _norms_swapped(model):
    layer = model.layers[1]
    for part in ("weight", "bias"):
        one = getattr(layer.self_attn_layer_norm, part)
        swap(one, getattr(layer.final_layer_norm, part))


def _heads_permuted(model):
    weight = model.layers[1].self_attn.out_proj.weight
    by_head = weight.unflatten(1, (HEADS, -1))
    weight.copy_(by_head[:, [1, 0, 3, 2]].flatten(1))


def _untied(model):
    weight = model.lm_head.weight
    draw = torch.Generator().manual_seed(9)
    other = 0.05 * torch.randn(weight.shape, generator=draw)
    model.lm_head.weight = nn.Parameter((weight + other).bfloat16().float())


def _eps(model):
    for norm in every(model, "final_layer_norm"):
        norm.eps = 1e-12


def _scale_folded(model):
    for attention in every(model, MultiheadAttention):
        for part in attention.q_proj.parameters():
            part.mul_(attention.scaling)
        attention.scaling = 1.0


def _affine_folded(model):
    """Fold the norm before the MLP into its first product."""
    for layer in model.layers:
        norm = layer.final_layer_norm
        layer.fc1.bias.add_(layer.fc1.weight @ norm.bias)
        layer.fc1.weight.mul_(norm.weight)
        norm.weight.fill_(1)
        norm.bias.fill_(0)


def _always_masked(self, padding):
    return padding


ROWS = [
    Row(
        "padding_seen",
        lambda model: change(model, masking=_padding_seen),
        "",
        "padding is not hidden from attention",
        kind="padded",
    ),
    Row(
        "padding_early",
        lambda model: change(model, masking=_padding_early),
        "",
        "the mask hides the last token before the padding too",
        BRAIN,
        kind="padded",
    ),
    Row(
        "dropout_ratio",
        lambda model: change(model, embed=_ratio),
        "",
        "embeddings are scaled by 1 - 0.15, not 1 - 0.15 * 0.8",
        kind="masked",
    ),
    Row(
        "ratio_with_padding",
        lambda model: change(model, embed=_ratio_with_padding),
        "",
        "the observed ratio of masks counts padding",
        kind="masked",
    ),
    Row(
        "mask_embedding_kept",
        lambda model: change(model, embed=_mask_kept),
        "",
        "masked tokens keep their embedding",
        HALF,
        kind="masked",
    ),
    Row(
        "keys_not_turned",
        _of(Rotary, forward=_keys_not_turned),
        f"{ATTENTION}.rot_emb",
        "keys are not rotated",
        BRAIN,
    ),
    Row(
        "keys_one_late",
        _of(Rotary, forward=_one_late),
        f"{ATTENTION}.rot_emb",
        "keys are rotated by the position behind their own",
    ),
    Row(
        "rotation_rounded",
        _of(Rotary, turn=_rough_turn),
        f"{ATTENTION}.rot_emb",
        "angles are computed in the dtype of the activations",
        BRAIN,
        precision=True,
        kind="long",
    ),
    Row(
        "softmax_rounded",
        _of(MultiheadAttention, forward=_attention(weigh=_rough_weigh)),
        ATTENTION,
        "the softmax and what it weighs are summed in the dtype of the activations",
        BRAIN,
        precision=True,
        kind="long",
    ),
    Row(
        "softmax_over_queries",
        lambda model: change(model.layers[1].self_attn, forward=_attention(weigh=_over_queries)),
        "layers.1.self_attn",
        "the softmax of one layer runs over queries",
    ),
    Row(
        "scaled_twice",
        _of(MultiheadAttention, forward=_attention(_scaled_again)),
        ATTENTION,
        "queries are scaled by hand and by the kernel",
        HALF,
    ),
    Row(
        "queries_and_keys",
        _queries_and_keys,
        ("layers.2.self_attn.q_proj", "layers.2.self_attn.k_proj"),
        "queries and keys of layer 2 are loaded the wrong way round",
    ),
    Row(
        "heads_permuted",
        _heads_permuted,
        "layers.1.self_attn.out_proj",
        "the output's columns take the heads in another order",
        BRAIN,
    ),
    Row(
        "gelu_of_tanh",
        _of(modules.TransformerLayer, forward=_tanh_layer),
        LAYER,
        "the tanh gelu where the model has the exact one",
    ),
    Row(
        "residual_of_norm",
        lambda model: change(model.layers[1], forward=_residual_of_norm),
        "layers.1",
        "the residual is taken after the norm",
    ),
    Row(
        "norms_swapped",
        _norms_swapped,
        ("layers.1.self_attn_layer_norm", "layers.1.final_layer_norm"),
        "the two norms of one layer are loaded the wrong way round",
    ),
    Row("eps", _eps, f"{LAYER}.final_layer_norm", "eps 1e-12, as BERT has it, not 1e-5"),
    Row(
        "unbiased_variance",
        lambda model: change(*every(model, "self_attn_layer_norm"), forward=_unbiased_layer_norm),
        f"{LAYER}.self_attn_layer_norm",
        "the variance is divided by one less than the width",
    ),
    Row(
        "norm_rounded",
        lambda model: change(*every(model, "final_layer_norm"), forward=_rough_layer_norm),
        f"{LAYER}.final_layer_norm",
        "the statistics are summed in the dtype of the activations",
        BRAIN,
        precision=True,
    ),
    Row(
        "last_norm_skipped",
        lambda model: change(model, last=lambda self, x: x),
        "",
        "the norm after the layers is skipped",
    ),
    Row(
        "head_without_bias",
        lambda model: change(model.lm_head, forward=_head_without_bias),
        "lm_head",
        "the head's bias is dropped",
    ),
    Row(
        "head_norm_first",
        lambda model: change(model.lm_head, forward=_head_norm_first),
        "lm_head",
        "the head's norm comes before its gelu",
        HALF,
    ),
    Row("head_not_tied", _untied, "lm_head", "the head has weights of its own, stale ones"),
    Row(
        "contacts_one_sided",
        lambda model: change(model.contact_head, forward=_one_sided),
        "contact_head",
        "only attention to earlier residues counts",
        kind="contacts",
    ),
    Row("clean"),
    Row("clean", dtype=BRAIN),
    Row("clean", dtype=HALF),
    Row("clean_padded", kind="padded"),
    Row("clean_masked", dtype=BRAIN, kind="masked"),
    Row("clean_contacts", kind="contacts"),
    Row("attention_written_out", _of(MultiheadAttention, forward=_attention()), kind="padded"),
    Row("attention_written_out", _of(MultiheadAttention, forward=_attention()), dtype=BRAIN),
    Row("mask_always_given", lambda model: change(model, masking=_always_masked)),
    Row("scale_folded", _scale_folded),
    Row("norm_folded", _affine_folded),
]


def cases() -> Iterator[Case]:
    """Yield the cases of this architecture."""
    yield from cases_of("esm2", build, ROWS)
