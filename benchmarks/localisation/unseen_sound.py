"""A modulated transformer, and sound with convolutions in front.

The ports fuse modulations and unfold convolutions.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.drives import Run
from localisation.planting import change, on_output
from localisation.unseen_ports import ALL, FP32, right, unseen

# --- A modulated transformer ----------------------------------------------------------------------


class DiTBlock(nn.Module):
    """Norms without weights, modulated by a condition; gates on both parts."""

    def __init__(self, dim: int, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (
            nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False) for _ in range(2)
        )
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 3 * dim), nn.GELU(approximate="tanh"), nn.Linear(3 * dim, dim)
        )
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, -1)
        x = x + self.gated(gate, self.attention(self.modulated(self.norm1(x), shift, scale)))
        return x + gate2 * self.mlp(self.modulated(self.norm2(x), shift2, scale2))

    def modulated(self, x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return x * (1 + scale) + shift

    def gated(self, gate: Tensor, x: Tensor) -> Tensor:
        return gate * x

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).flatten(2))


class Steps(nn.Module):
    """The embedding of a time step."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.mlp = nn.Sequential(nn.Linear(16, dim), nn.SiLU(), nn.Linear(dim, dim))

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(self.waves(t).to(self.mlp[0].weight.dtype))

    def waves(self, t: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(8, dtype=torch.float32) / 8)
        angles = t[:, None].float() * rates
        return torch.cat([angles.cos(), angles.sin()], -1)


class DiT(nn.Module):
    """Patches, modulated blocks, patches again."""

    def __init__(self, dim: int = 36) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.places = nn.Parameter(torch.empty(16, dim))
        self.steps, self.classes = Steps(dim), nn.Embedding(10, dim)
        self.blocks = nn.ModuleList(DiTBlock(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim, eps=1e-6, elementwise_affine=False)
        self.last = nn.Linear(dim, 48)

    def forward(self, image: Tensor, t: Tensor, label: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).mT + self.places
        c = self.steps(t) + self.classes(label)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatched(self.last(self.norm(x)))

    def unpatched(self, x: Tensor) -> Tensor:
        return x.view(-1, 4, 4, 4, 4, 3).permute(0, 5, 1, 3, 2, 4).reshape(-1, 3, 16, 16)


def dit(*, outliers: bool = False) -> nn.Module:
    return models.weigh(DiT(), 83, outliers)


def noised(dtype: torch.dtype) -> Run:
    return Run((drives.image(31, dtype=dtype), torch.tensor([7, 430]), torch.tensor([3, 8])))


class FoldedDiT(nn.Module):
    """All modulations in one product at the root; blocks are functions of it."""

    def __init__(self, model: DiT) -> None:
        super().__init__()
        self.stem = linear(model.patch.weight.flatten(1), bias=model.patch.bias)
        self.grid = nn.Parameter(model.places.detach().clone())
        first, _, second = model.steps.mlp
        self.time_in = linear(first.weight, bias=first.bias)
        self.time_out = linear(second.weight, bias=second.bias)
        self.label = nn.Parameter(model.classes.weight.detach().clone())
        parts = [each.modulation[1] for each in model.blocks]
        self.all_modulations = linear(
            *(each.weight for each in parts), bias=torch.cat([each.bias for each in parts])
        )
        self.body = nn.ModuleList(FoldedBlock(each) for each in model.blocks)
        self.final = linear(model.last.weight, bias=model.last.bias)

    def forward(self, image: Tensor, t: Tensor, label: Tensor) -> Tensor:
        x = self.stem(F.unfold(image, 4, stride=4).mT) + self.grid
        rates = 10000.0 ** -(torch.arange(8, dtype=torch.float32) / 8)
        angles = torch.outer(t.float(), rates)
        waves = torch.cat([torch.cos(angles), torch.sin(angles)], 1).to(x.dtype)
        c = F.silu(self.time_out(F.silu(self.time_in(waves))) + self.label[label])
        for block, six in zip(self.body, self.split(self.all_modulations(c)), strict=True):
            x = block(x, six)
        x = self.final(F.layer_norm(x, x.shape[-1:], eps=1e-6))
        return torch.einsum("bhwpqc->bchpwq", x.view(-1, 4, 4, 4, 4, 3)).reshape(-1, 3, 16, 16)

    def split(self, out: Tensor) -> Tensor:
        return out.view(len(out), len(self.body), 6, -1).transpose(0, 1)


class FoldedBlock(nn.Module):
    """The block; six vectors come from outside."""

    def __init__(self, of: DiTBlock) -> None:
        super().__init__()
        self.heads = of.heads
        self.mix = linear(of.qkv.weight, bias=of.qkv.bias)
        self.out = linear(of.proj.weight, bias=of.proj.bias)
        self.one = linear(of.mlp[0].weight, bias=of.mlp[0].bias)
        self.two = linear(of.mlp[2].weight, bias=of.mlp[2].bias)

    def forward(self, x: Tensor, six: Tensor) -> Tensor:
        a, b, c, d, e, f = six.unsqueeze(2).unbind(1)
        h = torch.addcmul(a, self.normed(x), 1 + b)
        q, k, v = self.mix(h).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = torch.addcmul(x, c, self.out(h))
        h = self.normed(x) * e + self.normed(x) + d
        return x + self.two(F.gelu(self.one(h), approximate="tanh")) * f

    def normed(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=1e-6)


@unseen(dit, "blocks.0", "activations", run=noised, regimes=ALL)
def scale_without_the_one(module, root):
    change(module, modulated=lambda self, modulated, x, shift, scale: x * scale + shift)


@unseen(dit, "blocks.1", "scale", run=noised)
def gate_forgotten(module, root):
    change(module, gated=lambda self, gated, gate, x: x)


@unseen(dit, "steps", "rope", run=noised)
def sines_first(module, root):
    change(module, waves=lambda self, waves, t: waves(t).roll(8, -1))


@unseen(dit, "", "swapped rows", run=noised)
def patches_unpacked_sideways(module, root):
    change(module, unpatched=lambda self, unpatched, x: unpatched(x).mT)


@unseen(dit, "all_modulations", "weights", port=FoldedDiT, run=noised)
def folded_shift_and_scale_exchanged(module, root):
    kept = module.weight.data.clone()
    module.weight.data[:36], module.weight.data[36:72] = kept[36:72], kept[:36]


@unseen(dit, "body.1", "eps", port=FoldedDiT, run=noised, regimes=FP32)
def folded_eps(module, root):
    change(module, normed=lambda self, normed, x: F.layer_norm(x, x.shape[-1:], eps=0.1))


@unseen(dit, "body.0.two", "swapped rows", port=FoldedDiT, run=noised)
def folded_rows(module, root):
    on_output(module, lambda out: torch.cat([out[:, 1:2], out[:, :1], out[:, 2:]], 1))


right("dit", dit, "reordered", "bf16", run=noised)
right("dit folded", dit, *ALL, port=FoldedDiT, run=noised)


# --- Sound: convolutions in front -----------------------------------------------------------------


class SoundBlock(nn.Module):
    """An encoder's block; keys have no bias."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attn_ln, self.mlp_ln = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.key = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        h = self.attn_ln(x)
        q, k, v = (
            f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        scale = self.scale(q.shape[-1])
        mixed = ((q * scale) @ (k * scale).mT).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_ln(x))

    def scale(self, head: int) -> float:
        return head**-0.25


class Whisper(nn.Module):
    """Two convolutions, waves as places, blocks, a head."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(20, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.register_buffer("positions", self.waves(16, dim))
        self.blocks = nn.ModuleList(SoundBlock(dim, 4) for _ in range(2))
        self.ln_post = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 30, bias=False)

    def forward(self, mel: Tensor) -> Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).mT
        x = x + self.placed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_post(x)).log_softmax(-1)

    def placed(self, x: Tensor) -> Tensor:
        return self.positions[: x.shape[1]]

    @staticmethod
    def waves(length: int, dim: int) -> Tensor:
        rates = torch.exp(-math.log(10000) / (dim // 2 - 1) * torch.arange(dim // 2))
        angles = torch.arange(length)[:, None] * rates
        return torch.cat([angles.sin(), angles.cos()], 1)


def whisper(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Whisper(), 84, outliers)


def sound(dtype: torch.dtype) -> Run:
    generator = torch.Generator().manual_seed(91)
    return Run((torch.randn(2, 20, 26, generator=generator).to(dtype),))


class UnfoldedWhisper(nn.Module):
    """The same with convolutions as products, one projection in, norms inlined."""

    def __init__(self, model: Whisper) -> None:
        super().__init__()
        self.front = nn.ModuleList(
            linear(each.weight.mT.flatten(1), bias=each.bias) for each in (model.conv1, model.conv2)
        )
        self.places = nn.Parameter(model.positions.detach().clone())
        self.layers = nn.ModuleList(UnfoldedBlock(each) for each in model.blocks)
        self.post = norm_like(model.ln_post)
        self.unembed = nn.Parameter(model.head.weight.detach().T.contiguous())

    def forward(self, mel: Tensor) -> Tensor:
        x = F.gelu(self.front[0](self.framed(mel.mT, 1)))
        x = F.gelu(self.front[1](self.framed(x, 2)))
        x = self.places[: x.shape[1]] + x
        for layer in self.layers:
            x = layer(x)
        logits = self.post(x) @ self.unembed
        return logits - self.total(logits)

    def total(self, logits: Tensor) -> Tensor:
        return logits.logsumexp(-1, keepdim=True)

    def framed(self, x: Tensor, stride: int) -> Tensor:
        return F.pad(x, (0, 0, 1, 1)).unfold(1, 3, stride).mT.flatten(2)


class UnfoldedBlock(nn.Module):
    """The block with one projection and SDPA."""

    def __init__(self, of: SoundBlock) -> None:
        super().__init__()
        self.heads = of.heads
        biases = [of.query.bias, torch.zeros_like(of.query.bias), of.value.bias]
        self.ln = nn.ModuleList([norm_like(of.attn_ln), norm_like(of.mlp_ln)])
        self.qkv = linear(of.query.weight, of.key.weight, of.value.weight, bias=torch.cat(biases))
        self.o = linear(of.out.weight, bias=of.out.bias)
        self.ff = nn.ModuleList(linear(m.weight, bias=m.bias) for m in of.mlp[::2])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln[0](x)).chunk(3, -1)
        q, k, v = (self.apart(each) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v)
        x = x + self.o(self.joined(out))
        return x + self.ff[1](F.gelu(self.ff[0](self.ln[1](x))))

    def apart(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def joined(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)


@unseen(whisper, "", "off by one", run=sound, regimes=ALL)
def places_one_late(module, root):
    change(module, placed=lambda self, placed, x: self.positions[1 : x.shape[1] + 1])


@unseen(whisper, "blocks.1", "attention scale", run=sound)
def scaled_once_too_often(module, root):
    change(module, scale=lambda self, scale, head: head**-0.5)


@unseen(whisper, "conv2", "pad", run=sound)
def padded_on_one_side(module, root):
    def forward(self, forward, x):
        return F.conv1d(F.pad(x, (0, 2)), self.weight, self.bias, stride=2)

    change(module, forward=forward)


@unseen(whisper, "front.0", "weights", port=UnfoldedWhisper, run=sound)
def unfolded_taps_after_channels(module, root):
    kept = module.weight.data.view(-1, 3, 20)
    module.weight.data = kept.mT.reshape(len(kept), -1)


@unseen(whisper, "layers.0.qkv", "wrong bias", port=UnfoldedWhisper, run=sound)
def unfolded_values_without_bias(module, root):
    module.bias.data[96:] = 0


@unseen(whisper, "layers.1", "head mapping", port=UnfoldedWhisper, run=sound)
def unfolded_heads_joined_inside_out(module, root):
    change(module, joined=lambda self, joined, x: x.permute(0, 2, 3, 1).flatten(2))


@unseen(whisper, "", "norm axis", port=UnfoldedWhisper, run=sound)
def unfolded_total_over_time(module, root):
    change(module, total=lambda self, total, logits: logits.logsumexp(1, keepdim=True))


right("whisper", whisper, "reordered", "bf16", run=sound)
right("whisper unfolded", whisper, *ALL, port=UnfoldedWhisper, run=sound)
