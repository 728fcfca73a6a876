"""The models of images by other people: norms folded, channels last, patches by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear, norm_like

# --- Convolutions: batch norm folded in, channels last; patches by a linear layer -----------------


def _folded(conv: nn.Conv2d, norm: nn.BatchNorm2d) -> nn.Conv2d:
    """Return one convolution that does both."""
    factor = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    out = nn.Conv2d(
        conv.in_channels, conv.out_channels, conv.kernel_size, conv.stride, conv.padding
    )
    bias = torch.zeros_like(norm.bias) if conv.bias is None else conv.bias
    with torch.no_grad():
        out.weight.copy_(conv.weight * factor[:, None, None, None])
        out.bias.copy_((bias - norm.running_mean) * factor + norm.bias)
    return out


class LastBlock(nn.Module):
    """A block in which channels are last and pointwise convolutions are linear."""

    def __init__(self, block: models.ConvBlock) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(
            block.dwconv.in_channels,
            block.dwconv.in_channels,
            3,
            padding=1,
            groups=block.dwconv.groups,
        )
        self.depthwise.load_state_dict(block.dwconv.state_dict())
        self.groups, self.eps = block.norm.num_groups, block.norm.eps
        self.gain = nn.Parameter(block.norm.weight.detach().clone())
        self.shift = nn.Parameter(block.norm.bias.detach().clone())
        self.expand = linear(block.pwconv1.weight.flatten(1), bias=block.pwconv1.bias)
        self.contract = linear(block.pwconv2.weight.flatten(1), bias=block.pwconv2.bias)
        self.excite = nn.Sequential(
            linear(block.squeeze.down.weight, bias=block.squeeze.down.bias),
            nn.ReLU(),
            linear(block.squeeze.up.weight, bias=block.squeeze.up.bias),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.depthwise(x).permute(0, 2, 3, 1)
        h = self.contract(self.act(self.expand(self.normed(h))))
        h = h * self.excite(h.mean((1, 2)))[:, None, None]
        return x + h.permute(0, 3, 1, 2)

    def normed(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.groups, -1)).float()
        centred = parts - parts.mean((1, 2, 4), keepdim=True)
        spread = centred.square().mean((1, 2, 4), keepdim=True) + self.eps
        return (centred * spread.rsqrt()).flatten(-2).to(x.dtype) * self.gain + self.shift

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class LastNet(nn.Module):
    """The network of convolutions with folded norms."""

    def __init__(self, model: models.ConvNet) -> None:
        super().__init__()
        self.entry = _folded(model.stem[0], model.stem[1])
        self.early = nn.ModuleList(LastBlock(each) for each in model.stage1)
        self.shrink = _folded(model.down, model.bn)
        self.late = nn.ModuleList(LastBlock(each) for each in model.stage2)
        self.classify = linear(model.head.weight, bias=model.head.bias)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.entry(image))
        for block in self.early:
            x = block(x)
        x = self.smoothed(self.shrink(x))
        for block in self.late:
            x = block(x)
        return self.classify(x.mean((2, 3)))

    def smoothed(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


class PatchBlock(nn.Module):
    """A block with the residual's scale folded into the projections."""

    def __init__(self, block: models.ViTBlock) -> None:
        super().__init__()
        self.heads = block.attn.heads
        self.ln_a, self.ln_b = norm_like(block.norm1), norm_like(block.norm2)
        weights, biases = block.attn.qkv.weight.chunk(3), block.attn.qkv.bias.chunk(3)
        self.to_q = linear(weights[0], bias=biases[0])
        self.to_kv = linear(*weights[1:], bias=torch.cat(biases[1:]))
        first, last, gamma = block.mlp[0], block.mlp[2], block.gamma1[:, None]
        self.to_out = linear(
            block.attn.proj.weight * gamma, bias=block.attn.proj.bias * block.gamma1
        )
        self.fc1 = linear(first.weight, bias=first.bias)
        self.fc2 = linear(last.weight * block.gamma2[:, None], bias=last.bias * block.gamma2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.ln_a(x)
        q, (k, v) = self.to_q(h), self.to_kv(h).chunk(2, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in (q, k, v))
        x = x + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(self.act(self.fc1(self.ln_b(x))))

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x)


class PatchViT(nn.Module):
    """The vision transformer with patches cut out by hand."""

    def __init__(self, model: models.ViT) -> None:
        super().__init__()
        self.embed = linear(model.patch_embed.weight.flatten(1), bias=model.patch_embed.bias)
        self.start = nn.Parameter((model.cls + model.places[:, :1]).detach().clone())
        self.grid = nn.Parameter(model.places[:, 1:].detach().clone())
        self.trunk = nn.ModuleList(PatchBlock(each) for each in model.blocks)
        self.ln = norm_like(model.norm)
        self.fc = linear(model.head.weight, bias=model.head.bias)

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(self.patches(image)) + self.grid
        x = torch.cat([self.start.expand(len(x), -1, -1), x], 1)
        for block in self.trunk:
            x = block(x)
        return self.fc(self.ln(x[:, 0]))

    def patches(self, image: Tensor) -> Tensor:
        return F.unfold(image, 4, stride=4).transpose(1, 2)
