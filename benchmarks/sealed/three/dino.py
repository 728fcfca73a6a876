"""DINOv2: a port after timm against transformers, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from sealed.cases import Case
from sealed.three.common import BRAIN, HALF, Row, cases_of, change, every, rough_sum, swap
from sealed.three.dino_port import HEADS, WIDTH, Attention, build

BLOCK = "blocks.{}"
LAYER = "model.encoder.layer.{}"


def _of(kind: type[nn.Module], **members) -> object:
    """Return what edits a class of the candidate."""
    return lambda model: change(*every(model, kind), **members)


def _class_without_place(self, x):
    x, rows, columns = x.flatten(1, 2), x.shape[1], x.shape[2]
    first = self.cls_token.expand(len(x), -1, -1)
    return torch.cat((first, x + self.places(rows, columns)), 1)


def _places_shifted(self, x):
    x = x.flatten(1, 2)
    table = torch.cat((self.pos_embed[:, 1:], self.pos_embed[:, :1]), 1)
    return torch.cat((self.cls_token.expand(len(x), -1, -1), x), 1) + table


def _antialiased(self, table, size):
    return functional.interpolate(table, size=size, mode="bicubic", antialias=True)


def _bilinear(self, table, size):
    return functional.interpolate(table, size=size, mode="bilinear", align_corners=False)


def _aligned(self, table, size):
    return functional.interpolate(table, size=size, mode="bicubic", align_corners=True)


def _turned(self, table, size):
    return functional.interpolate(table.mT, size=size, mode="bicubic", align_corners=False)


def _by_columns(self, x):
    return self.proj(x).permute(0, 3, 2, 1)


def _scaled_sum(self, x):
    x = self.ls1(x + self.attn(self.norm1(x)))
    return x + self.ls2(self.mlp(self.norm2(x)))


def _parallel(self, x):
    return x + self.ls1(self.attn(self.norm1(x))) + self.ls2(self.mlp(self.norm2(x)))


def _norm_shared(self, x):
    x = x + self.ls1(self.attn(self.norm1(x)))
    return x + self.ls2(self.mlp(self.norm1(x)))


def _unscaled(self, q, k, v):
    return (q @ k.mT).softmax(-1) @ v


def _heads_after_tokens(self, x):
    return self.proj(self.attend(*self.heads(x)).reshape(len(x), x.shape[1], -1))


def _causal(self, q, k, v):
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)


def _written_out(self, q, k, v):
    return ((q * self.scale) @ k.mT).float().softmax(-1).to(v.dtype) @ v


def _rough_attention(self, q, k, v):
    weights = ((q @ k.mT) * self.scale).exp()
    taken = (weights.unsqueeze(-1) * v.unsqueeze(2)).transpose(-2, -1)
    return rough_sum(taken).squeeze(-1) / rough_sum(weights)


def _rough_norm(self, x):
    mean = rough_sum(x) / WIDTH
    square = rough_sum(x * x) / WIDTH
    return (x - mean) / (square - mean * mean + self.eps).sqrt() * self.weight + self.bias


def _over_tokens(self, x):
    mean = x.mean(1, keepdim=True)
    spread = x.var(1, keepdim=True, unbiased=False)
    return (x - mean) / (spread + self.eps).sqrt() * self.weight + self.bias


def _quick_gelu(self, x):
    return x * (1.702 * x).sigmoid()


def _tanh_gelu(self, x):
    return functional.gelu(x, approximate="tanh")


def _by_head_first(model):
    """Lay out the fused projection of one layer as (heads, 3, width)."""
    for part in model.blocks[1].attn.qkv.parameters():
        part.copy_(part.unflatten(0, (3, HEADS, -1)).transpose(0, 1).flatten(0, 2).clone())


def _channels_flipped(model):
    weight = model.patch_embed.proj.weight
    weight.copy_(weight.flip(1))


def _kernel_transposed(model):
    weight = model.patch_embed.proj.weight
    weight.copy_(weight.mT.clone())


def _split_by_head(model):
    """Split a fused projection as (heads, 3, width) where it was (3, heads, width)."""
    for layer in model.model.encoder.layer:
        attention = layer.attention
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        for part in ("weight", "bias"):
            whole = torch.cat([getattr(each, part) for each in projections])
            split = whole.unflatten(0, (HEADS, 3, -1)).transpose(0, 1).flatten(1, 2)
            for projection, value in zip(projections, split.clone(), strict=True):
                getattr(projection, part).copy_(value)


def _scales_swapped(model):
    layer = model.model.encoder.layer[0]
    swap(layer.layer_scale1.lambda1, layer.layer_scale2.lambda1)


def _square_transposed(model):
    weight = model.model.encoder.layer[1].attention.o_proj.weight
    weight.copy_(weight.T.clone())


def _eps(model):
    for norm in [*every(model, "norm1"), *every(model, "norm2")]:
        norm.eps = 1e-5


def _scales_folded(model):
    for block in model.blocks:
        for linear, scale in ((block.attn.proj, block.ls1), (block.mlp.fc2, block.ls2)):
            linear.weight.mul_(scale.gamma[:, None])
            linear.bias.mul_(scale.gamma)
            scale.gamma.fill_(1)


def _places_added_once(model):
    """Put the class token's position into the token itself."""
    model.cls_token.add_(model.pos_embed[:, :1])
    model.pos_embed[:, :1] = 0


def _channels_last(model):
    model.patch_embed.to(memory_format=torch.channels_last)


def _patches_by_product(self, x):
    rows, columns = x.shape[2] // 4, x.shape[3] // 4
    patches = functional.unfold(x, 4, stride=4).transpose(1, 2)
    found = functional.linear(patches, self.proj.weight.flatten(1), self.proj.bias)
    return found.unflatten(1, (rows, columns))


ROWS = [
    Row(
        "class_without_place",
        lambda model: change(model, embed=_class_without_place),
        "",
        "the class token gets no position",
    ),
    Row(
        "places_shifted",
        lambda model: change(model, embed=_places_shifted),
        "",
        "positions are shifted by one, the class token's comes last",
        BRAIN,
    ),
    Row(
        "places_antialiased",
        lambda model: change(model, stretched=_antialiased),
        "",
        "positions are stretched with antialiasing, as timm does by default",
        kind="wide",
    ),
    Row(
        "places_bilinear",
        lambda model: change(model, stretched=_bilinear),
        "",
        "positions are stretched bilinearly",
        HALF,
        kind="wide",
    ),
    Row(
        "places_aligned",
        lambda model: change(model, stretched=_aligned),
        "",
        "positions are stretched with aligned corners",
        kind="wide",
    ),
    Row(
        "places_turned",
        lambda model: change(model, stretched=_turned),
        "",
        "rows and columns of the positions change places",
        kind="wide",
    ),
    Row(
        "patches_by_columns",
        lambda model: change(model.patch_embed, forward=_by_columns),
        "patch_embed",
        "patches are read column by column",
    ),
    Row(
        "channels_flipped",
        _channels_flipped,
        "patch_embed.proj",
        "the first weight wants blue first",
        BRAIN,
    ),
    Row(
        "kernel_transposed",
        _kernel_transposed,
        "patch_embed.proj",
        "rows and columns of the first kernel change places",
    ),
    Row(
        "scale_not_loaded",
        lambda model: model.blocks[1].ls1.gamma.fill_(1),
        "blocks.1.ls1",
        "a layer scale keeps ones",
        HALF,
    ),
    Row(
        "scaled_residual",
        lambda model: change(model.blocks[0], forward=_scaled_sum),
        "blocks.0",
        "the layer scale takes in the residual",
        BRAIN,
    ),
    Row(
        "parallel_block",
        lambda model: change(model.blocks[2], forward=_parallel),
        "blocks.2",
        "attention and MLP both start from the layer's input",
    ),
    Row(
        "norm_used_twice",
        lambda model: change(model.blocks[1], forward=_norm_shared),
        "blocks.1",
        "the MLP takes the norm that is attention's",
    ),
    Row(
        "scale_missing",
        _of(Attention, attend=_unscaled),
        f"{BLOCK}.attn",
        "the attention that is written out has no scale",
    ),
    Row(
        "heads_after_tokens",
        lambda model: change(model.blocks[2].attn, forward=_heads_after_tokens),
        "blocks.2.attn",
        "heads and tokens are not exchanged before they are joined",
    ),
    Row(
        "causal",
        _of(Attention, attend=_causal),
        f"{BLOCK}.attn",
        "attention looks at earlier patches only",
        HALF,
    ),
    Row(
        "fused_by_head",
        _by_head_first,
        "blocks.1.attn.qkv",
        "queries, keys and values of one layer are fused head by head",
    ),
    Row(
        "bias_of_values",
        lambda model: model.blocks[0].attn.qkv.bias[-WIDTH:].zero_(),
        "blocks.0.attn.qkv",
        "the values' bias is left out of the fused one",
    ),
    Row(
        "quick_gelu",
        lambda model: change(*every(model, "mlp.act"), forward=_quick_gelu),
        f"{BLOCK}.mlp.act",
        "the quick gelu where the model has the exact one",
        BRAIN,
    ),
    Row(
        "tanh_gelu",
        lambda model: change(*every(model, "mlp.act"), forward=_tanh_gelu),
        f"{BLOCK}.mlp.act",
        "the tanh gelu where the model has the exact one",
    ),
    Row(
        "norm_over_tokens",
        lambda model: change(model.norm, forward=_over_tokens),
        "norm",
        "the last norm runs over tokens",
    ),
    Row(
        "eps",
        _eps,
        (f"{BLOCK}.norm1", f"{BLOCK}.norm2"),
        "eps 1e-5 where the model has 1e-6",
    ),
    Row(
        "norm_rounded",
        lambda model: change(model.norm, forward=_rough_norm),
        "norm",
        "the statistics are summed in the dtype of the activations",
        BRAIN,
        precision=True,
    ),
    Row(
        "attention_rounded",
        _of(Attention, attend=_rough_attention),
        f"{BLOCK}.attn",
        "the softmax and what it weighs are summed in the dtype of the activations",
        BRAIN,
        precision=True,
        kind="large",
    ),
    Row(
        "split_by_head",
        _split_by_head,
        tuple(f"{LAYER}.attention.{each}_proj" for each in "qkv"),
        "the fused projection is split head by head",
        kind="back",
    ),
    Row(
        "scales_swapped",
        _scales_swapped,
        ("model.encoder.layer.0.layer_scale1", "model.encoder.layer.0.layer_scale2"),
        "the two scales of one layer are loaded the wrong way round",
        kind="back",
    ),
    Row(
        "square_transposed",
        _square_transposed,
        "model.encoder.layer.1.attention.o_proj",
        "a square weight is transposed",
        BRAIN,
        kind="back",
    ),
    Row(
        "row_scaled",
        lambda model: model.model.encoder.layer[2].mlp.fc1.weight[5].mul_(1.02),
        "model.encoder.layer.2.mlp.fc1",
        "one row of a weight is 2 % too large",
        kind="back",
    ),
    Row("clean"),
    Row("clean", dtype=BRAIN),
    Row("clean", dtype=HALF),
    Row("clean_wide", kind="wide"),
    Row("clean_back", kind="back"),
    Row("clean_back", dtype=BRAIN, kind="back"),
    Row("attention_written_out", _of(Attention, attend=_written_out), dtype=BRAIN),
    Row("scales_folded", _scales_folded),
    Row("place_in_class_token", _places_added_once),
    Row("channels_last", _channels_last),
    Row("patches_by_product", lambda model: change(model.patch_embed, forward=_patches_by_product)),
]


def cases() -> Iterator[Case]:
    """Yield the cases of this architecture."""
    yield from cases_of("dinov2", build, ROWS)
