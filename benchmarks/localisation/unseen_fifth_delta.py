"""Qwen 3 Next: gated delta rules, and in one layer attention with a gate on what it saw.

The model steps through time; its port solves one triangular system for all places.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_fifth import BOTH, fifth, harmless

KEYS, VALUES, WIDE = 2, 4, 8
"""Heads of keys, heads of values, and how wide each is."""


class NextRMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


class NextRMSNormGated(nn.Module):
    """First the norm, then the gate."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), 1e-6

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return ((self.weight * wide.to(x.dtype)) * F.silu(gate.float())).to(x.dtype)


def l2norm(x: Tensor) -> Tensor:
    """Return vectors of length one."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


class NextGatedDeltaNet(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.in_proj_qkv = nn.Linear(dim, (2 * KEYS + VALUES) * WIDE, bias=False)
        self.in_proj_z = nn.Linear(dim, VALUES * WIDE, bias=False)
        self.in_proj_ba = nn.Linear(dim, 2 * VALUES, bias=False)
        width = (2 * KEYS + VALUES) * WIDE
        self.conv1d = nn.Conv1d(width, width, 4, groups=width, padding=3, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        self.norm, self.out_proj = NextRMSNormGated(WIDE), nn.Linear(VALUES * WIDE, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        mixed = self.in_proj_qkv(x).transpose(1, 2)
        mixed = F.silu(self.conv1d(mixed)[..., :t]).transpose(1, 2)
        q, k, v = mixed.split((KEYS * WIDE, KEYS * WIDE, VALUES * WIDE), -1)
        z = self.in_proj_z(x).view(b, t, VALUES, WIDE)
        beta, a = self.in_proj_ba(x).chunk(2, -1)
        q, k, v = (each.reshape(b, t, -1, WIDE).float() for each in (q, k, v))
        q, k = (each.repeat_interleave(VALUES // KEYS, 2) for each in (q, k))
        out = self.stepped(l2norm(q) * WIDE**-0.5, l2norm(k), v, self.decay(a), self.write(beta))
        return self.out_proj(self.norm(out.to(x.dtype), z).flatten(2))

    def decay(self, a: Tensor) -> Tensor:
        return -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)

    def write(self, beta: Tensor) -> Tensor:
        return beta.float().sigmoid()

    def stepped(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        state, outs = v.new_zeros(len(v), VALUES, WIDE, WIDE), []
        for n in range(v.shape[1]):
            state = state * g[:, n].exp()[..., None, None]
            known = (state * k[:, n, :, :, None]).sum(-2)
            delta = (v[:, n] - known) * beta[:, n, :, None]
            state = state + k[:, n, :, :, None] * delta[:, :, None]
            outs.append((state * q[:, n, :, :, None]).sum(-2))
        return torch.stack(outs, 1)


class NextAttention(nn.Module):
    """What belongs to a head is its query, then its gate; a quarter of it is rotated."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(dim, 4 * 16 * 2, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(dim, 2 * 16, bias=False) for _ in range(2))
        self.o_proj = nn.Linear(64, dim, bias=False)
        self.q_norm, self.k_norm = NextRMSNorm(16), NextRMSNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, gate = self.q_proj(x).view(b, t, 4, 32).chunk(2, -1)
        q = self.turned(self.q_norm(q).transpose(1, 2))
        k = self.turned(self.k_norm(self.k_proj(x).view(b, t, 2, 16)).transpose(1, 2))
        v = self.v_proj(x).view(b, t, 2, 16).transpose(1, 2)
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        scores = (q @ k.mT * 0.25).masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
        seen = scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ v
        return self.o_proj(self.gated(seen.transpose(1, 2), gate).flatten(2))

    def gated(self, seen: Tensor, gate: Tensor) -> Tensor:
        return seen * gate.sigmoid()

    def turned(self, x: Tensor) -> Tensor:
        x, rest = x[..., :4], x[..., 4:]
        angles = torch.arange(x.shape[2])[:, None] / 1e7 ** torch.tensor([0.0, 0.5])
        cos, sin = (f(angles).repeat(1, 2).to(x.dtype) for f in (torch.cos, torch.sin))
        half = torch.cat((-x[..., 2:], x[..., :2]), -1)
        return torch.cat((x * cos + half * sin, rest), -1)


class NextMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, 96, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(96, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class NextLayer(nn.Module):
    def __init__(self, dim: int, attends: bool) -> None:
        super().__init__()
        if attends:
            self.self_attn = NextAttention(dim)
        else:
            self.linear_attn = NextGatedDeltaNet(dim)
        self.input_layernorm, self.post_attention_layernorm = NextRMSNorm(dim), NextRMSNorm(dim)
        self.mlp = NextMLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        mixer = self.self_attn if hasattr(self, "self_attn") else self.linear_attn
        x = x + mixer(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3Next(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(NextLayer(dim, number == 2) for number in range(4))
        self.norm, self.lm_head = NextRMSNorm(dim), nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def qwen3_next(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(Qwen3Next(), 502, outliers)
    for module in model.modules():
        if isinstance(module, NextRMSNorm):
            module.weight.data -= 1
        if isinstance(module, NextGatedDeltaNet):
            module.A_log.data = torch.tensor([-1.5, -1.0, -0.5, 0.0])
            module.dt_bias.data = torch.tensor([-1.0, -0.4, 0.3, 0.6])
    return model


class OneNorm(nn.Module):
    def __init__(self, of: NextRMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + of.weight.detach()), of.eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ShortConv(nn.Module):
    """Four taps on each channel, channels last."""

    def __init__(self, of: nn.Conv1d) -> None:
        super().__init__()
        self.taps = nn.Parameter(of.weight.detach()[:, 0].T.clone())

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, (0, 0, *self.sides()))
        return sum(padded[:, n : n + x.shape[1]] * tap for n, tap in enumerate(self.taps))

    def sides(self) -> tuple[int, int]:
        return 3, 0


class GateNorm(nn.Module):
    def __init__(self, of: NextRMSNormGated) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(of.weight.detach().clone()), of.variance_epsilon

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(z)


class DeltaSolve(nn.Module):
    """What each place writes is solved for at once; all that enters is one product."""

    def __init__(self, of: NextGatedDeltaNet) -> None:
        super().__init__()
        self.proj = linear(of.in_proj_qkv.weight, of.in_proj_z.weight, of.in_proj_ba.weight)
        self.conv, self.norm = ShortConv(of.conv1d), GateNorm(of.norm)
        self.rate = nn.Parameter(-of.A_log.detach().exp())
        self.dt_bias = nn.Parameter(of.dt_bias.detach().clone())
        self.out = linear(of.out_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        mixed, z, beta, a = self.proj(x).split((64, 32, 4, 4), -1)
        mixed = F.silu(self.conv(mixed)).unflatten(-1, (8, WIDE)).transpose(1, 2).float()
        q, k, v = mixed.split((KEYS, KEYS, VALUES), 1)
        q, k = self.spread(self.unit(q)) * WIDE**-0.5, self.spread(self.unit(k))
        logs = (self.rate * F.softplus(a.float() + self.dt_bias)).transpose(1, 2).cumsum(-1)
        decay = (logs[..., None] - logs[..., None, :]).tril().exp().tril()
        beta = beta.float().sigmoid().transpose(1, 2)[..., None]
        system = torch.eye(x.shape[1]) + self.earlier(beta * (k @ k.mT) * decay)
        written = torch.linalg.solve_triangular(system, beta * v, upper=False)
        seen = ((q @ k.mT) * decay) @ written
        return self.out(
            self.norm(seen.transpose(1, 2).to(x.dtype), z.unflatten(-1, (4, -1))).flatten(2)
        )

    def unit(self, x: Tensor) -> Tensor:
        return x / (x.square().sum(-1, True) + 1e-6).sqrt()

    def spread(self, x: Tensor) -> Tensor:
        return x[:, :, None].expand(-1, -1, VALUES // KEYS, -1, -1).flatten(1, 2)

    def earlier(self, x: Tensor) -> Tensor:
        return x.tril(-1)


class GatedHeads(nn.Module):
    """Gates have a layer of their own."""

    def __init__(self, of: NextAttention) -> None:
        super().__init__()
        query, gate = of.q_proj.weight.detach().view(4, 2, 16, -1).unbind(1)
        self.q, self.gate = linear(query.flatten(0, 1)), linear(gate.flatten(0, 1))
        self.kv = linear(of.k_proj.weight, of.v_proj.weight)
        self.o, self.qn, self.kn = linear(of.o_proj.weight), OneNorm(of.q_norm), OneNorm(of.k_norm)
        self.rotated = 4

    def forward(self, x: Tensor) -> Tensor:
        q = self.qn(self.q(x).unflatten(-1, (4, 16))).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, 16)).transpose(1, 3).unbind(2)
        q, k = self.rope(q), self.rope(self.kn(k))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(seen.transpose(1, 2).flatten(2) * self.opened(self.gate(x)))

    def opened(self, gate: Tensor) -> Tensor:
        return torch.sigmoid(gate)

    def rope(self, x: Tensor) -> Tensor:
        half = self.rotated // 2
        angles = torch.arange(x.shape[2])[:, None] * 1e7 ** -(torch.arange(half) / half)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b, rest = x.split((half, half, 16 - self.rotated), -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


class SolveBlock(nn.Module):
    def __init__(self, of: NextLayer) -> None:
        super().__init__()
        attends = hasattr(of, "self_attn")
        self.mixer = GatedHeads(of.self_attn) if attends else DeltaSolve(of.linear_attn)
        self.ln1, self.ln2 = OneNorm(of.input_layernorm), OneNorm(of.post_attention_layernorm)
        self.w_in = linear(of.mlp.gate_proj.weight, of.mlp.up_proj.weight)
        self.w_out = linear(of.mlp.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.ln1(x))
        gate, up = self.w_in(self.ln2(x)).chunk(2, -1)
        return x + self.w_out(F.silu(gate) * up)


class SolvedNext(nn.Module):
    def __init__(self, model: Qwen3Next) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.h = nn.Sequential(*map(SolveBlock, model.layers))
        self.ln_f, self.head = OneNorm(model.norm), linear(model.lm_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.ln_f(self.h(self.wte(tokens))))


@fifth(qwen3_next, "h.0.mixer", "norm layers", port=SolvedNext, regimes=BOTH)
def next_keys_of_any_length(module, root):
    change(module, unit=lambda self, unit, x: x / (x.square().mean(-1, True) + 1e-6).sqrt())


@fifth(qwen3_next, "h.1.mixer", "heads", port=SolvedNext, regimes=BOTH)
def next_keys_tiled(module, root):
    change(module, spread=lambda self, spread, x: x.repeat(1, VALUES // KEYS, 1, 1))


@fifth(qwen3_next, "h.3.mixer", "masks", port=SolvedNext)
def next_nothing_taken_back(module, root):
    change(module, earlier=lambda self, earlier, x: torch.zeros_like(x))


@fifth(qwen3_next, "h.1.mixer.norm", "norm layers", port=SolvedNext, regimes=BOTH)
def next_gate_before_the_norm(module, root):
    def forward(self, forward, x, z):
        return F.rms_norm(x * F.silu(z), self.weight.shape, self.weight, self.eps)

    change(module, forward=forward)


@fifth(qwen3_next, "h.0.mixer.conv", "masks", port=SolvedNext)
def next_convolution_sees_what_comes(module, root):
    change(module, sides=lambda self, sides: (2, 1))


@fifth(qwen3_next, "h.3.mixer.conv", "weights", port=SolvedNext)
def next_taps_from_the_other_end(module, root):
    module.taps.data = module.taps.data.flip(0)


@fifth(qwen3_next, "h.0.mixer.proj", "weights", port=SolvedNext)
def next_decay_and_write_swapped(module, root):
    module.weight.data[-8:] = module.weight.data[-8:].roll(4, 0)


@fifth(qwen3_next, "h.2.mixer", "positions", port=SolvedNext)
def next_half_is_rotated(module, root):
    module.rotated = 8


@fifth(qwen3_next, "h.2.mixer", "activations", port=SolvedNext)
def next_attention_gated_by_silu(module, root):
    change(module, opened=lambda self, opened, gate: F.silu(gate))


@fifth(qwen3_next, "layers.1.linear_attn", "activations", against=SolvedNext)
def next_bias_after_the_softplus(module, root):
    def decay(self, decay, a):
        return -self.A_log.float().exp() * (F.softplus(a.float()) + self.dt_bias)

    change(module, decay=decay)


@fifth(qwen3_next, "layers.2.self_attn.k_norm", "norm layers", against=SolvedNext)
def next_norm_of_keys_without_one(module, root):
    change(module, forward=lambda self, forward, x: forward(x) - F.rms_norm(x, (16,), None, 1e-6))


harmless("qwen 3 next solved", qwen3_next, "same", "bf16", port=SolvedNext)
harmless("qwen 3 next against solved", qwen3_next, "same", against=SolvedNext)
