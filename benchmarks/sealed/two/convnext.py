"""ConvNeXt of timm against transformers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import ConvNextConfig, ConvNextForImageClassification

from sealed.cases import Case, Pair
from sealed.two.common import (
    Edit,
    Family,
    copied,
    exchanged,
    finish,
    noise,
    randomise,
    recode,
    replaced,
    reweighed,
    rounded,
    scaled_row,
    setting,
    zeroed,
)
from sealed.two.packages import timm

DEPTHS, WIDTHS, CLASSES, PATCH = (2, 1, 2, 1), (24, 32, 48, 64), 20, 4
BLOCKS = [f"net.stages.{i}.blocks.{j}" for i, depth in enumerate(DEPTHS) for j in range(depth)]


class Classifier(nn.Module):
    """timm's network, fed images of any dtype."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits of images."""
        return self.net(image.to(self.net.head.fc.weight.dtype))


class Reference(nn.Module):
    """transformers' ConvNeXt with plain logits."""

    def __init__(self, model: ConvNextForImageClassification) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Return the logits of images."""
        return self.model(image).logits


def converted(state: dict[str, Tensor], conv_mlp: bool) -> Classifier:
    """Return timm's network with the weights of transformers'."""
    net = timm.ConvNeXt(
        num_classes=CLASSES,
        depths=DEPTHS,
        dims=WIDTHS,
        patch_size=PATCH,
        ls_init_value=1.0,
        conv_mlp=conv_mlp,
        norm_eps=1e-6,
    )
    names = (
        ("convnext.embeddings.patch_embeddings", "stem.0"),
        ("convnext.embeddings.layernorm", "stem.1"),
        ("convnext.encoder.", ""),
        ("convnext.layernorm", "head.norm"),
        ("classifier", "head.fc"),
        ("downsampling_layer", "downsample"),
        ("layers", "blocks"),
        ("dwconv", "conv_dw"),
        ("layernorm", "norm"),
        ("pwconv1", "mlp.fc1"),
        ("pwconv2", "mlp.fc2"),
        ("layer_scale_parameter", "gamma"),
    )
    shapes, renamed = net.state_dict(), {}
    for name, weight in state.items():
        for old, new in names:
            name = name.replace(old, new)
        renamed[name] = weight.clone().view(shapes[name].shape)
    net.load_state_dict(renamed)
    return Classifier(net)


def build(
    dtype: torch.dtype,
    edit: Edit | None,
    conv_mlp: bool = False,
    faint: bool = False,
    offset: float = 0.0,
) -> Pair:
    """Return timm's ConvNeXt against transformers'."""
    config = ConvNextConfig(
        patch_size=PATCH,
        hidden_sizes=list(WIDTHS),
        depths=list(DEPTHS),
        layer_scale_init_value=1.0,
        layer_norm_eps=1e-6,
        num_labels=CLASSES,
    )
    model = randomise(ConvNextForImageClassification(config), 3, gain=1.3)
    generator = torch.Generator().manual_seed(4)
    for name, parameter in model.named_parameters():
        if "layer_scale" in name:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data = 0.6 + 0.3 * drawn
        if offset and "dwconv.bias" in name:  # as features of trained networks, far from zero
            parameter.data += offset
        if faint and "patch_embeddings" in name:  # images of little contrast
            parameter.data *= 0.01
    rounded(model, dtype)
    candidate = converted(model.state_dict(), conv_mlp)
    candidate, reference = finish(candidate, Reference(model), dtype, edit)
    return Pair(candidate, reference, (noise(5, 2, 3, 64, 64),))


class _RepeatedBorder(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (3, 3, 3, 3), mode="replicate")
        return F.conv2d(padded, self.weight, self.bias, self.stride, 0, 1, self.groups)


class _ShiftedBorder(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (4, 2, 4, 2))
        return F.conv2d(padded, self.weight, self.bias, self.stride, 0, 1, self.groups)


class _NormOverImage(timm.LayerNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, 1, self.weight, self.bias, self.eps)


class _WideNorm(timm.LayerNorm):
    """Own norm: moments in float32, the variance from the mean of squares."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.normed(wide).to(x.dtype)

    def normed(self, x: Tensor) -> Tensor:
        mean, square = x.mean(-1, keepdim=True), (x * x).mean(-1, keepdim=True)
        x = (x - mean) * torch.rsqrt((square - mean * mean).clamp(min=0) + self.eps)
        return x * self.weight + self.bias


class _NarrowNorm(_WideNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x)


class _NoShortcut(timm.ConvNeXtBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x.mul(self.gamma.reshape(1, -1, 1, 1))


class _ScaleOnShortcut(timm.ConvNeXtBlock):
    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.mlp(self.norm(self.conv_dw(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return (x + shortcut).mul(self.gamma.reshape(1, -1, 1, 1))


class _NormFirst(timm.ConvNeXtBlock):
    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        x = self.mlp(self.conv_dw(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return shortcut + x.mul(self.gamma.reshape(1, -1, 1, 1))


class _NormBeforePool(timm.NormMlpClassifierHead):
    def forward(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        return self.fc(self.flatten(self.global_pool(self.norm(x))))


def _fold_gamma(model: nn.Module) -> None:
    for path in BLOCKS:
        block = model.get_submodule(path)
        block.mlp.fc2.weight *= block.gamma[:, None]
        block.mlp.fc2.bias *= block.gamma
        block.gamma = None


def _fold_affine(model: nn.Module) -> None:
    for path in BLOCKS:
        norm, fc1 = model.get_submodule(path).norm, model.get_submodule(path).mlp.fc1
        fc1.bias += fc1.weight @ norm.bias
        fc1.weight *= norm.weight
        norm.weight.fill_(1)
        norm.bias.zero_()


def _channels_last(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


def cases() -> Iterator[Case]:
    """Yield the cases of ConvNeXt."""
    bf16, f16 = torch.bfloat16, torch.float16
    family = Family("convnext", build)
    fault, harmless = family.fault, family.harmless
    activations = tuple(f"{path}.mlp.act" for path in BLOCKS)
    block_norms = tuple(f"{path}.norm" for path in BLOCKS)

    yield fault(
        "gelu-tanh",
        replaced(lambda _: nn.GELU(approximate="tanh"), *activations),
        activations,
        "tanh GELU instead of the exact one",
    )
    yield fault(
        "border-replicated",
        recode(_RepeatedBorder, "net.stages.1.blocks.0.conv_dw"),
        "net.stages.1.blocks.0.conv_dw",
        "border repeated instead of padded with zeros",
    )
    yield fault(
        "border-shifted",
        recode(_ShiftedBorder, *(f"{path}.conv_dw" for path in BLOCKS)),
        tuple(f"{path}.conv_dw" for path in BLOCKS),
        "padding of depthwise convolutions is off by one pixel",
        dtype=bf16,
    )
    yield fault(
        "layer-scale-missing",
        setting("gamma", None, "net.stages.0.blocks.1"),
        "net.stages.0.blocks.1",
        "layer scale of one block not loaded",
    )
    yield fault(
        "eps-of-stem",
        setting("eps", 1e-5, "net.stem.1"),
        "net.stem.1",
        "default eps in the norm of the stem",
        faint=True,
    )
    yield fault(
        "norm-over-image",
        recode(_NormOverImage, "net.stages.1.downsample.0"),
        "net.stages.1.downsample.0",
        "norm over channels and positions together",
    )
    yield fault(
        "kernel-transposed",
        reweighed("net.stages.2.blocks.1.conv_dw", lambda w: w.transpose(2, 3)),
        "net.stages.2.blocks.1.conv_dw",
        "height and width of a kernel exchanged",
    )
    yield fault(
        "kernels-flipped",
        reweighed("net.stages.2.downsample.1", lambda w: w.flip(2, 3)),
        "net.stages.2.downsample.1",
        "kernel flipped, as for a true convolution",
        dtype=f16,
    )
    yield fault(
        "stem-bgr",
        reweighed("net.stem.0", lambda w: w.flip(1)),
        "net.stem.0",
        "channels of the image in the order of another library",
    )
    yield fault(
        "norm-before-pool",
        recode(_NormBeforePool, "net.head"),
        "net.head",
        "last norm applied to positions, before they are averaged",
    )
    yield fault(
        "shortcut-missing",
        recode(_NoShortcut, "net.stages.2.blocks.0"),
        "net.stages.2.blocks.0",
        "residual forgotten",
    )
    yield fault(
        "scale-on-shortcut",
        recode(_ScaleOnShortcut, "net.stages.1.blocks.0"),
        "net.stages.1.blocks.0",
        "layer scale multiplies the residual too",
        dtype=bf16,
    )
    yield fault(
        "norm-before-conv",
        recode(_NormFirst, "net.stages.3.blocks.0"),
        "net.stages.3.blocks.0",
        "norm and depthwise convolution exchanged",
    )
    yield fault(
        "bias-dropped",
        zeroed("net.stages.3.blocks.0.mlp.fc2"),
        "net.stages.3.blocks.0.mlp.fc2",
        "bias not converted",
    )
    yield fault(
        "fc1-row",
        reweighed("net.stages.2.blocks.0.mlp.fc1", scaled_row(7, 1.03)),
        "net.stages.2.blocks.0.mlp.fc1",
        "one row of a weight is 3 % too large",
    )
    yield fault(
        "blocks-exchanged",
        exchanged("net.stages.0.blocks.0.conv_dw", "net.stages.0.blocks.1.conv_dw"),
        ("net.stages.0.blocks.0.conv_dw", "net.stages.0.blocks.1.conv_dw"),
        "depthwise kernels of two blocks exchanged",
    )
    yield fault(
        "norm-of-other-block",
        copied("net.stages.2.blocks.1.norm", "net.stages.2.blocks.0.norm"),
        "net.stages.2.blocks.1.norm",
        "norm loaded with the weight of the block before",
        dtype=bf16,
    )
    yield fault(
        "pool-max",
        replaced(lambda _: nn.AdaptiveMaxPool2d(1), "net.head.global_pool.pool"),
        "net.head.global_pool.pool",
        "largest value instead of the average",
        dtype=f16,
    )
    yield fault(
        "norm-moments-narrow",
        recode(_NarrowNorm, *block_norms),
        block_norms,
        "variance as a difference of large numbers in bfloat16",
        dtype=bf16,
        precision=True,
        offset=6.0,
    )

    yield harmless("clean")
    yield harmless("clean", dtype=bf16)
    yield harmless("clean", dtype=f16)
    yield harmless("moments-wide", recode(_WideNorm, *block_norms), dtype=bf16, offset=6.0)
    yield harmless("conv-mlp", conv_mlp=True)
    yield harmless("channels-last", _channels_last, dtype=bf16)
    yield harmless("layer-scale-folded", _fold_gamma)
    yield harmless("norm-affine-folded", _fold_affine)
