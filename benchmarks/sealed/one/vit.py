"""ViT: vit-pytorch's ViT against transformers' ViTForImageClassification."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from einops import rearrange
from einops.layers.torch import Rearrange
from torch import nn
from torch.nn import functional
from transformers import ViTConfig, ViTForImageClassification

from sealed.cases import Case, Pair
from sealed.one.common import (
    BF16,
    F16,
    F32,
    Entry,
    declare,
    randomise,
    rewrite,
    round_to,
    scale_row,
)

LAYERS, WIDTH, HEADS, PATCH, CLASSES = 3, 64, 4, 4, 20
EPS = 1e-12
ATTENTIONS = tuple(f"net.transformer.layers.{index}.0" for index in range(LAYERS))
FFNS = tuple(f"net.transformer.layers.{index}.1" for index in range(LAYERS))
NORMS = (
    *(f"{path}.norm" for path in ATTENTIONS),
    *(f"{path}.net.0" for path in FFNS),
    "net.transformer.norm",
)


@cache
def library() -> ModuleType:
    """Return vit-pytorch's module of the plain ViT; the package itself asks for torchvision."""
    folder = Path(importlib.util.find_spec("vit_pytorch").origin).parent
    spec = importlib.util.spec_from_file_location("vit_pytorch_vit", folder / "vit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Port(nn.Module):
    """The port; casts the images to the precision of the weights."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.net(images.to(self.net.cls_token.dtype))


class Original(nn.Module):
    """The reference."""

    def __init__(self, net: nn.Module, interpolate: bool) -> None:
        super().__init__()
        self.net = net
        self.interpolate = interpolate

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.net(images, interpolate_pos_encoding=self.interpolate).logits


def build(
    dtype: torch.dtype,
    attention: str = "eager",
    size: int = 16,
    embedding: float = 1.0,
    shift: float = 0.0,
    turned: bool = False,
) -> Pair:
    """Return the port for images of a size, and the reference, trained at 16 by 16.

    Where ``turned``, transformers' model is the candidate and the other one the reference.
    """
    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=2 * WIDTH,
        image_size=16,
        patch_size=PATCH,
        qkv_bias=False,
        layer_norm_eps=EPS,
        num_labels=CLASSES,
        attn_implementation=attention,
    )
    net = ViTForImageClassification(config)
    randomise(net, seed=21)
    generator = torch.Generator().manual_seed(22)
    embeddings = net.vit.embeddings
    for parameter in (embeddings.cls_token, embeddings.position_embeddings):
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.7)
    for parameter in embeddings.parameters():
        parameter.mul_(embedding)
    embeddings.position_embeddings.add_(shift)
    round_to(net, dtype)
    port = library().ViT(
        image_size=size,
        patch_size=PATCH,
        num_classes=CLASSES,
        dim=WIDTH,
        depth=LAYERS,
        heads=HEADS,
        mlp_dim=2 * WIDTH,
        dim_head=WIDTH // HEADS,
    )
    _convert(net, port, size // PATCH)
    images = torch.randn(2, 3, size, size, generator=generator)
    port, original = Port(port), Original(net, size != 16)
    return Pair(original, port, (images,)) if turned else Pair(port, original, (images,))


def _convert(net: nn.Module, port: nn.Module, side: int) -> None:
    def copy(to: nn.Module, source: nn.Module) -> None:
        to.load_state_dict(source.state_dict())

    embeddings = net.vit.embeddings
    port.to_patch_embedding[1] = nn.Identity()
    port.to_patch_embedding[3] = nn.Identity()
    convolution = embeddings.patch_embeddings.projection
    port.to_patch_embedding[2].weight.copy_(rearrange(convolution.weight, "d c h w -> d (h w c)"))
    port.to_patch_embedding[2].bias.copy_(convolution.bias)
    port.cls_token.copy_(embeddings.cls_token[0])
    port.pos_embedding.copy_(resized(embeddings.position_embeddings[0], side))
    for (attention, ffn), layer in zip(port.transformer.layers, net.vit.layers, strict=True):
        copy(attention.norm, layer.layernorm_before)
        source = layer.attention
        parts = (source.q_proj.weight, source.k_proj.weight, source.v_proj.weight)
        attention.to_qkv.weight.copy_(torch.cat(parts))
        copy(attention.to_out[0], source.o_proj)
        copy(ffn.net[0], layer.layernorm_after)
        copy(ffn.net[1], layer.mlp.fc1)
        copy(ffn.net[4], layer.mlp.fc2)
    copy(port.transformer.norm, net.vit.layernorm)
    copy(port.mlp_head, net.classifier)
    for path in NORMS:
        port.get_submodule(path.removeprefix("net.")).eps = EPS


def resized(positions: torch.Tensor, side: int, mode: str = "bicubic") -> torch.Tensor:
    """Return the rows of the positions for a square of another side."""
    old = int((len(positions) - 1) ** 0.5)
    if old == side:
        return positions
    square = rearrange(positions[1:], "(h w) d -> 1 d h w", h=old)
    square = functional.interpolate(square, size=(side, side), mode=mode)
    return torch.cat([positions[:1], rearrange(square, "1 d h w -> (h w) d")])


def _layer(port: Port, index: int) -> tuple[Any, Any]:
    return tuple(port.net.transformer.layers[index])


def _fused_attention(port: Port) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = rearrange(self.to_qkv(self.norm(x)), "b n (t h d) -> t b h n d", t=3, h=HEADS)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(rearrange(mixed, "b h n d -> b n (h d)"))

    for path in ATTENTIONS:
        rewrite(port.get_submodule(path), forward=forward)


def _convolution(port: Port) -> None:
    linear = port.net.to_patch_embedding[2]
    convolution = nn.Conv2d(3, WIDTH, PATCH, PATCH)
    convolution.weight.copy_(
        rearrange(linear.weight, "d (h w c) -> d c h w", h=PATCH, w=PATCH).clone()
    )
    convolution.bias.copy_(linear.bias)
    convolution.to(memory_format=torch.channels_last)
    port.net.to_patch_embedding = nn.Sequential(convolution, Rearrange("b d h w -> b (h w) d"))


def _folded_norms(port: Port) -> None:
    for index in range(LAYERS):
        attention, ffn = _layer(port, index)
        wide = nn.Linear(WIDTH, 3 * WIDTH)
        wide.weight.copy_(attention.to_qkv.weight)
        wide.bias.zero_()
        attention.to_qkv = wide
        for norm, linear in ((attention.norm, wide), (ffn.net[0], ffn.net[1])):
            linear.bias.add_(linear.weight @ norm.bias)
            linear.weight.mul_(norm.weight)
        attention.norm = nn.LayerNorm(WIDTH, EPS, elementwise_affine=False)
        ffn.net[0] = nn.LayerNorm(WIDTH, EPS, elementwise_affine=False)


def _folded_scale(port: Port) -> None:
    for index in range(LAYERS):
        attention, _ = _layer(port, index)
        attention.to_qkv.weight[:WIDTH] *= attention.scale
        attention.scale = 1.0


def _default_eps(port: Port) -> None:
    for path in NORMS:
        port.get_submodule(path).eps = 1e-5


def _patches_channels_first(port: Port) -> None:
    linear = port.net.to_patch_embedding[2]
    linear.weight.copy_(rearrange(linear.weight, "d (h w c) -> d (c h w)", c=3, h=PATCH).clone())


def _channels_reversed(port: Port) -> None:
    linear = port.net.to_patch_embedding[2]
    linear.weight.copy_(linear.weight.view(WIDTH, -1, 3).flip(-1).reshape(WIDTH, -1))


def _patches_by_columns(port: Port) -> None:
    port.net.to_patch_embedding[0] = Rearrange(
        "b c (h p1) (w p2) -> b (w h) (p1 p2 c)", p1=PATCH, p2=PATCH
    )


def _class_last(port: Port) -> None:
    def forward(self: Any, img: torch.Tensor) -> torch.Tensor:
        x = self.to_patch_embedding(img)
        x = torch.cat((x, self.cls_token.expand(len(x), 1, -1)), dim=1) + self.pos_embedding
        return self.mlp_head(self.transformer(x)[:, -1])

    rewrite(port.net, forward=forward)


def _mean_pool(port: Port) -> None:
    port.net.pool = "mean"


def _rolled_positions(port: Port) -> None:
    port.net.pos_embedding.copy_(port.net.pos_embedding.roll(-1, 0))


def _other_interpolation(port: Port, mode: str = "bicubic", turned: bool = False) -> None:
    """Interpolate the positions anew from the ones at 16 by 16, in another way."""
    generator = torch.Generator().manual_seed(22)
    torch.randn(1, 1, WIDTH, generator=generator)
    small = torch.randn(1, 17, WIDTH, generator=generator)[0] * 0.7
    side = int((len(port.net.pos_embedding) - 1) ** 0.5)
    wrong = resized(small, side, mode)
    if turned:
        wrong[1:] = wrong[1:].view(side, side, -1).transpose(0, 1).reshape(side * side, -1)
    port.net.pos_embedding.copy_(wrong)


def _softmax_over_queries(port: Port) -> None:
    _layer(port, 1)[0].attend = nn.Softmax(dim=-2)


def _tanh_gelu(port: Port) -> None:
    for index in range(LAYERS):
        _layer(port, index)[1].net[2] = nn.GELU("tanh")


def _scale_of_width(port: Port) -> None:
    for index in range(LAYERS):
        _layer(port, index)[0].scale = WIDTH**-0.5


def _heads_last(port: Port) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = rearrange(self.to_qkv(self.norm(x)), "b n (t d h) -> t b h n d", t=3, h=HEADS)
        mixed = self.attend(q @ k.mT * self.scale) @ v
        return self.to_out(rearrange(mixed, "b h n d -> b n (h d)"))

    rewrite(_layer(port, 2)[0], forward=forward)


def _no_residual(port: Port) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for index, (attention, ffn) in enumerate(self.layers):
            x = attention(x) + x
            x = ffn(x) if index == 1 else ffn(x) + x
        return self.norm(x)

    rewrite(port.net.transformer, forward=forward)


def _no_final_norm(port: Port) -> None:
    port.net.transformer.norm = nn.Identity()


def _one_pass(self: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    mean = x.mean(-1, keepdim=True)
    variance = ((x * x).mean(-1, keepdim=True) - mean * mean).clamp(min=0)
    return (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias


def _one_pass_norms(port: Port) -> None:
    for path in NORMS:
        rewrite(port.get_submodule(path), forward=_one_pass)


class QuickGelu(nn.Module):
    """CLIP's way to come near GELU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation."""
        return x * torch.sigmoid(1.702 * x)


def _quick_gelu(original: Original) -> None:
    for layer in original.net.vit.layers:
        layer.mlp.activation_fn = QuickGelu()


def _kernel_transposed(original: Original) -> None:
    weight = original.net.vit.embeddings.patch_embeddings.projection.weight
    weight.copy_(weight.mT.clone())


def _norm_before_loaded(original: Original) -> None:
    layer = original.net.vit.layers[1]
    layer.layernorm_after.load_state_dict(layer.layernorm_before.state_dict())


def _channels_last(original: Original) -> None:
    original.to(memory_format=torch.channels_last)


def cases() -> Iterator[Case]:
    """Yield the cases of ViT."""
    larger = {"size": 24}
    patches = "net.to_patch_embedding"
    entries = [
        Entry("clean", dtype=F32),
        Entry("clean", dtype=BF16),
        Entry("clean", dtype=F16, options={"attention": "sdpa"}),
        Entry("clean_interpolated_positions", options=larger),
        Entry("fused_attention", _fused_attention),
        Entry("convolution_channels_last", _convolution),
        Entry("norms_folded", _folded_norms),
        Entry("scale_folded", _folded_scale, dtype=BF16),
        Entry("default_eps", _default_eps, NORMS, "eps 1e-5 for 1e-12", options={"embedding": 0.2}),
        Entry(
            "patch_channels_first",
            _patches_channels_first,
            (f"{patches}.0", f"{patches}.2"),
            "weight for patches with the channels first",
        ),
        Entry(
            "channels_reversed",
            _channels_reversed,
            (f"{patches}.2",),
            "weight for BGR images",
            F16,
        ),
        Entry(
            "patches_by_columns", _patches_by_columns, (f"{patches}.0",), "patches column by column"
        ),
        Entry("class_token_last", _class_last, ("net",), "class token behind the patches"),
        Entry("mean_pool", _mean_pool, ("net",), "mean of the tokens for the class token", BF16),
        Entry("positions_rolled", _rolled_positions, ("net",), "class token's position last"),
        Entry(
            "bilinear_positions",
            partial(_other_interpolation, mode="bilinear"),
            ("net",),
            "positions interpolated bilinearly",
            options=larger,
        ),
        Entry(
            "transposed_positions",
            partial(_other_interpolation, turned=True),
            ("net",),
            "positions interpolated with rows for columns",
            options=larger,
        ),
        Entry(
            "softmax_over_queries",
            _softmax_over_queries,
            (f"{ATTENTIONS[1]}.attend",),
            "softmax over the queries",
        ),
        Entry(
            "tanh_gelu",
            _tanh_gelu,
            tuple(f"{path}.net.2" for path in FFNS),
            "tanh GELU for the erf one",
        ),
        Entry("scale_of_width", _scale_of_width, ATTENTIONS, "scale of the width, not the head"),
        Entry("heads_last", _heads_last, (ATTENTIONS[2],), "split as (head_dim, heads)"),
        Entry(
            "residual_missing",
            _no_residual,
            ("net.transformer",),
            "nothing added to the second feed-forward",
            BF16,
        ),
        Entry(
            "final_norm_missing", _no_final_norm, ("net.transformer.norm",), "final norm left out"
        ),
        Entry(
            "row_scaled",
            lambda port: scale_row(_layer(port, 1)[0].to_qkv.weight, 2 * WIDTH + 5),
            (f"{ATTENTIONS[1]}.to_qkv",),
            "one row of the values times 1.03",
        ),
        Entry(
            "output_bias_dropped",
            lambda port: _layer(port, 0)[0].to_out[0].bias.zero_(),
            (f"{ATTENTIONS[0]}.to_out.0",),
            "bias not loaded",
            F16,
        ),
        Entry(
            "norm_variance_in_one_pass",
            _one_pass_norms,
            NORMS,
            "variance as difference of two large means in bfloat16",
            BF16,
            precision=True,
            options={"shift": 8.0},
        ),
    ]
    turned = {"turned": True}
    layers = [f"net.vit.layers.{index}" for index in range(LAYERS)]
    entries += [
        Entry("turned_channels_last", _channels_last, dtype=BF16, options=turned),
        Entry(
            "turned_quick_gelu",
            _quick_gelu,
            tuple(f"{layer}.mlp.activation_fn" for layer in layers),
            "CLIP's GELU",
            options=turned,
        ),
        Entry(
            "turned_kernel_transposed",
            _kernel_transposed,
            ("net.vit.embeddings.patch_embeddings.projection",),
            "rows and columns of the kernel swapped",
            options=turned,
        ),
        Entry(
            "turned_norm_before_loaded",
            _norm_before_loaded,
            (f"{layers[1]}.layernorm_after",),
            "weights of the layer's other norm",
            BF16,
            options=turned,
        ),
    ]
    yield from declare("vit", build, entries)
