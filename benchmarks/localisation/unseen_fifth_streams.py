"""Stable Diffusion 3: pictures and words in two streams that attend together.

The port has all modulations in one product, words before pictures, and ones in biases.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_fifth import BOTH, fifth, harmless
from localisation.unseen_fourth_pairs import same

DIM, WORDS = 48, 7


def noised(dtype: torch.dtype) -> drives.Run:
    """One call on latents, words, what all words are together, and two times."""
    generator = torch.Generator().manual_seed(2058)
    latents, words, pooled = (
        torch.randn(size, generator=generator).to(dtype)
        for size in ((2, 4, 8, 8), (2, WORDS, 40), (2, 24))
    )
    return drives.Run((latents, words, pooled, torch.tensor([37.0, 808.0]).to(dtype)))


class Timesteps(nn.Module):
    """Cosines first."""

    def forward(self, times: Tensor) -> Tensor:
        rates = torch.exp(-math.log(10000) * torch.arange(16).float() / 16)
        angles = times[:, None].float() * rates
        return torch.cat((angles.cos(), angles.sin()), -1).to(times.dtype)


class TwoLayers(nn.Module):
    def __init__(self, given: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(given, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class CombinedEmbeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time_proj = Timesteps()
        self.timestep_embedder, self.text_embedder = TwoLayers(32), TwoLayers(24)

    def forward(self, times: Tensor, pooled: Tensor) -> Tensor:
        return self.timestep_embedder(self.time_proj(times)) + self.text_embedder(pooled)


class AdaLayerNormZero(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = (
            nn.Linear(DIM, 6 * DIM),
            nn.LayerNorm(DIM, eps=1e-6, elementwise_affine=False),
        )

    def forward(self, x: Tensor, temb: Tensor) -> tuple[Tensor, ...]:
        shift, scale, gate, *more = self.linear(F.silu(temb))[:, None].chunk(6, -1)
        return self.norm(x) * (1 + scale) + shift, gate, *more


class AdaLayerNormContinuous(nn.Module):
    """Here the scale is first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = (
            nn.Linear(DIM, 2 * DIM),
            nn.LayerNorm(DIM, eps=1e-6, elementwise_affine=False),
        )

    def forward(self, x: Tensor, temb: Tensor) -> Tensor:
        scale, shift = self.linear(F.silu(temb))[:, None].chunk(2, -1)
        return self.norm(x) * (1 + scale) + shift


class HeadNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(12)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(variance + self.eps)).to(x.dtype) * self.weight


class JointAttention(nn.Module):
    def __init__(self, last: bool) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(DIM, DIM) for _ in range(4))
        self.add_q_proj, self.add_k_proj, self.add_v_proj = (nn.Linear(DIM, DIM) for _ in range(3))
        self.norm_q, self.norm_k, self.norm_added_q, self.norm_added_k = (
            HeadNorm() for _ in range(4)
        )
        self.to_add_out = None if last else nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor | None]:
        q, k, v = (self.split(f(x)) for f in (self.to_q, self.to_k, self.to_v))
        added = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        more_q, more_k, more_v = (self.split(f(context)) for f in added)
        q = torch.cat((self.norm_q(q), self.norm_added_q(more_q)), 2)
        k = torch.cat((self.norm_k(k), self.norm_added_k(more_k)), 2)
        seen = F.scaled_dot_product_attention(q, k, torch.cat((v, more_v), 2))
        seen, more = seen.transpose(1, 2).flatten(2).split((x.shape[1], context.shape[1]), 1)
        return self.to_out(seen), None if self.to_add_out is None else self.to_add_out(more)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, 12)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.out = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.proj(x), approximate="tanh"))


class JointBlock(nn.Module):
    """The last one has no more use for words than to look at them."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.last, self.norm1, self.attn = last, AdaLayerNormZero(), JointAttention(last)
        self.norm1_context = AdaLayerNormContinuous() if last else AdaLayerNormZero()
        self.norm2 = nn.LayerNorm(DIM, eps=1e-6, elementwise_affine=False)
        self.ff = FeedForward()
        if not last:
            self.norm2_context = nn.LayerNorm(DIM, eps=1e-6, elementwise_affine=False)
            self.ff_context = FeedForward()

    def forward(self, x: Tensor, context: Tensor, temb: Tensor) -> tuple[Tensor, Tensor]:
        h, gate, shift, scale, gate_mlp = self.norm1(x, temb)
        if self.last:
            c, rest = self.norm1_context(context, temb), None
        else:
            c, *rest = self.norm1_context(context, temb)
        seen, more = self.attn(h, c)
        x = x + gate * seen
        x = x + gate_mlp * self.ff(self.norm2(x) * (1 + scale) + shift)
        if rest is not None:
            c_gate, c_shift, c_scale, c_gate_mlp = rest
            context = context + c_gate * more
            h = self.norm2_context(context) * (1 + c_scale) + c_shift
            context = context + c_gate_mlp * self.ff_context(h)
        return x, context


class Diffusion3(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pos_embed, self.places = nn.Conv2d(4, DIM, 2, 2), nn.Parameter(torch.zeros(16, DIM))
        self.context_embedder, self.time_text_embed = nn.Linear(40, DIM), CombinedEmbeddings()
        self.transformer_blocks = nn.ModuleList(JointBlock(last) for last in (False, False, True))
        self.norm_out, self.proj_out = AdaLayerNormContinuous(), nn.Linear(DIM, 16)

    def forward(self, latents: Tensor, words: Tensor, pooled: Tensor, times: Tensor) -> Tensor:
        x = self.pos_embed(latents).flatten(2).transpose(1, 2) + self.places
        context, temb = self.context_embedder(words), self.time_text_embed(times, pooled)
        for block in self.transformer_blocks:
            x, context = block(x, context, temb)
        x = self.proj_out(self.norm_out(x, temb)).view(-1, 4, 4, 2, 2, 4)
        return torch.einsum("nhwpqc->nchpwq", x).reshape(-1, 4, 8, 8)


def diffusion3(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Diffusion3(), 512, outliers)


def plain(x: Tensor) -> Tensor:
    """Norm without weights."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6)


class Clock(nn.Module):
    """Time and pooled words; what comes out has been through the activation."""

    def __init__(self, of: CombinedEmbeddings) -> None:
        super().__init__()
        time, text = of.timestep_embedder, of.text_embedder
        self.t1, self.p1 = same(time.linear_1), same(text.linear_1)
        weight = torch.cat((time.linear_2.weight, text.linear_2.weight), 1).detach()
        self.both = linear(weight, bias=(time.linear_2.bias + text.linear_2.bias).detach())
        self.slowest = 10000.0

    def forward(self, times: Tensor, pooled: Tensor) -> Tensor:
        hidden = torch.cat((self.t1(self.waves(times)), self.p1(pooled)), -1)
        return F.silu(self.both(F.silu(hidden)))

    def waves(self, times: Tensor) -> Tensor:
        angles = times.float()[:, None] * self.slowest ** -(torch.arange(16) / 16)
        return self.joined(angles.cos(), angles.sin()).to(times.dtype)

    def joined(self, cos: Tensor, sin: Tensor) -> Tensor:
        return torch.cat((cos, sin), -1)


class Stream(nn.Module):
    """What belongs to pictures, or to words, in one block."""

    def __init__(
        self, qkv: nn.Linear, norms: tuple, out: nn.Linear | None, ff: FeedForward
    ) -> None:
        super().__init__()
        self.qkv = qkv
        self.q_weight, self.k_weight = (nn.Parameter(e.weight.detach().clone()) for e in norms)
        if out is not None:
            self.out, self.up, self.down = same(out), same(ff.proj), same(ff.out)

    def forward(self, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        q, k, v = (
            self.qkv(plain(x) * scale + shift).unflatten(-1, (3, 4, 12)).transpose(1, 3).unbind(2)
        )
        q, k = (F.rms_norm(e, (12,), w, 1e-6) for e, w in ((q, self.q_weight), (k, self.k_weight)))
        return q, k, v

    def after(self, x: Tensor, seen: Tensor, gate: Tensor, *more: Tensor) -> Tensor:
        shift, scale, gate_mlp = more
        x = x + gate * self.out(seen)
        return x + gate_mlp * self.down(self.act(self.up(plain(x) * scale + shift)))

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class TwoStreams(nn.Module):
    """Words come first."""

    def __init__(self, of: JointBlock) -> None:
        super().__init__()
        a = of.attn
        qkv, added = (a.to_q, a.to_k, a.to_v), (a.add_q_proj, a.add_k_proj, a.add_v_proj)
        self.image = Stream(same(*qkv), (a.norm_q, a.norm_k), a.to_out, of.ff)
        norms = (a.norm_added_q, a.norm_added_k)
        self.words = Stream(same(*added), norms, a.to_add_out, None if of.last else of.ff_context)
        self.last = of.last

    def forward(self, x: Tensor, words: Tensor, mod: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        own, theirs = mod[:6], mod[6:]
        sides = self.words(words, *theirs[:2]), self.image(x, *own[:2])
        q, k, v = (torch.cat(each, 2) for each in zip(*sides, strict=True))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        of_words, of_image = seen.split((words.shape[1], x.shape[1]), 1)
        x = self.image.after(x, of_image, *own[2:])
        return x, words if self.last else self.words.after(words, of_words, *theirs[2:])


class Modulations(nn.Module):
    """Those of all blocks and of the end; the ones of the scales are in the bias."""

    def __init__(self, model: Diffusion3) -> None:
        super().__init__()
        weights, biases = [], []
        for norm in (
            *(e for b in model.transformer_blocks for e in (b.norm1, b.norm1_context)),
            model.norm_out,
        ):
            weight = list(norm.linear.weight.detach().split(DIM))
            bias = list(norm.linear.bias.detach().split(DIM))
            if len(weight) == 2:
                weight, bias = weight[::-1], bias[::-1]
            bias[1] = bias[1] + 1
            if len(bias) == 6:
                bias[4] = bias[4] + 1
            weights, biases = weights + weight, biases + bias
        self.all = linear(*weights, bias=torch.cat(biases))

    def forward(self, temb: Tensor) -> tuple[Tensor, ...]:
        return self.all(temb)[:, None].split(DIM, -1)


class StreamsAtOnce(nn.Module):
    def __init__(self, model: Diffusion3) -> None:
        super().__init__()
        self.patch = linear(model.pos_embed.weight.detach().flatten(1), bias=model.pos_embed.bias)
        self.places = nn.Parameter(model.places.detach().clone())
        self.embed, self.clock = same(model.context_embedder), Clock(model.time_text_embed)
        self.mods = Modulations(model)
        self.blocks = nn.ModuleList(map(TwoStreams, model.transformer_blocks))
        self.out = same(model.proj_out)

    def forward(self, latents: Tensor, words: Tensor, pooled: Tensor, times: Tensor) -> Tensor:
        x = self.patch(F.unfold(latents, 2, stride=2).mT) + self.places
        words, mods = self.embed(words), self.mods(self.clock(times, pooled))
        for number, block in enumerate(self.blocks):
            x, words = block(x, words, mods[12 * number : 12 * number + 12])
        return self.pieced(self.out(plain(x) * mods[-1] + mods[-2]))

    def pieced(self, x: Tensor) -> Tensor:
        pixels = x.unflatten(-1, (2, 2, 4)).permute(0, 4, 2, 3, 1)
        return F.fold(pixels.flatten(1, 3), (8, 8), 2, stride=2)


def streams(path, kind, **more):
    """Declare a fault of the two streams."""
    return fifth(diffusion3, path, kind, run=noised, **more)


@streams("clock", "positions", port=StreamsAtOnce, regimes=BOTH)
def diffusion3_sines_first(module, root):
    change(module, joined=lambda self, joined, cos, sin: joined(sin, cos))


@streams("clock", "positions", port=StreamsAtOnce)
def diffusion3_rates_to_the_last(module, root):
    module.slowest = 10000.0 ** (16 / 15)


@streams("blocks.1.words", "norm layers", port=StreamsAtOnce)
def diffusion3_norms_of_queries_and_keys_swapped(module, root):
    module.q_weight.data, module.k_weight.data = module.k_weight.data, module.q_weight.data


@streams("blocks.0.image.qkv", "weights", port=StreamsAtOnce)
def diffusion3_values_before_keys(module, root):
    for each in (module.weight, module.bias):
        q, k, v = each.data.chunk(3)
        each.data = torch.cat((q, v, k))


@streams("mods.all", "weights", port=StreamsAtOnce, regimes=BOTH)
def diffusion3_last_scale_and_shift_swapped(module, root):
    for each in (module.weight, module.bias):
        each.data[-2 * DIM :] = each.data[-2 * DIM :].roll(DIM, 0)


@streams("mods.all", "scale", port=StreamsAtOnce)
def diffusion3_one_left_out(module, root):
    module.bias.data[16 * DIM : 17 * DIM] -= 1


@streams("blocks.1", "layouts", port=StreamsAtOnce, regimes=BOTH)
def diffusion3_words_taken_from_the_end(module, root):
    def forward(self, forward, x, words, mod):
        sides = self.words(words, *mod[6:8]), self.image(x, *mod[:2])
        q, k, v = (torch.cat(each, 2) for each in zip(*sides, strict=True))
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        of_image, of_words = seen.split((x.shape[1], words.shape[1]), 1)
        x = self.image.after(x, of_image, *mod[2:6])
        return x, self.words.after(words, of_words, *mod[8:])

    change(module, forward=forward)


@streams("", "layouts", port=StreamsAtOnce)
def diffusion3_channels_before_pixels(module, root):
    def pieced(self, pieced, x):
        return F.fold(x.mT, (8, 8), 2, stride=2)

    change(module, pieced=pieced)


@streams("transformer_blocks.0.ff_context", "activations", against=StreamsAtOnce)
def diffusion3_exact_gelu(module, root):
    change(module, forward=lambda self, forward, x: self.out(F.gelu(self.proj(x))))


@streams("transformer_blocks.2.norm1_context", "layouts", against=StreamsAtOnce)
def diffusion3_shift_first_as_elsewhere(module, root):
    def forward(self, forward, x, temb):
        shift, scale = self.linear(F.silu(temb))[:, None].chunk(2, -1)
        return self.norm(x) * (1 + scale) + shift

    change(module, forward=forward)


harmless("diffusion 3 at once", diffusion3, "same", "bf16", port=StreamsAtOnce, run=noised)
harmless("diffusion 3 against at once", diffusion3, "same", against=StreamsAtOnce, run=noised)
