"""A decoder with keys and values through a narrow latent, and an expert that all tokens share.

The port absorbs projections and computes all experts at once.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change, on_output
from localisation.unseen_ports import ALL, FP32, right, unseen

# --- Keys and values through a latent; a mixture with a shared expert -----------------------------


class Latent(nn.Module):
    """Attention whose keys and values come from a narrow latent, with a rotated part apart."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.heads, self.plain, self.turned, self.value, self.rank = 4, 12, 8, 10, 20
        self.q_a = nn.Linear(dim, 24, bias=False)
        self.q_norm = models.RMSNorm(24, 1e-6)
        self.q_b = nn.Linear(24, self.heads * (self.plain + self.turned), bias=False)
        self.kv_a = nn.Linear(dim, self.rank + self.turned, bias=False)
        self.kv_norm = models.RMSNorm(self.rank, 1e-6)
        self.kv_b = nn.Linear(self.rank, self.heads * (self.plain + self.value), bias=False)
        self.o_proj = nn.Linear(self.heads * self.value, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.q_b(self.q_norm(self.q_a(x))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, q_turned = q.split([self.plain, self.turned], -1)
        latent, k_turned = self.kv_a(x).split([self.rank, self.turned], -1)
        kv = self.kv_b(self.kv_norm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = kv.split([self.plain, self.value], -1)
        q_turned = self.rotate(q_turned, cos, sin)
        k_turned = self.rotate(k_turned[:, None], cos, sin).expand(-1, self.heads, -1, -1)
        q, k = torch.cat([q, q_turned], -1), torch.cat([k, k_turned], -1)
        scores = q @ k.mT * self.scale()
        future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future, float("-inf")).float().softmax(-1).to(x.dtype)
        return self.o_proj((shares @ v).transpose(1, 2).flatten(2))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def scale(self) -> float:
        return (self.plain + self.turned) ** -0.5


class SigmoidRouter(nn.Module):
    """Sigmoid scores; a bias counts for the choice and not for the share."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, dim))
        self.correction = nn.Parameter(torch.empty(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.sigmoid(F.linear(x.float(), self.weight.float()))
        chosen = (scores + self.correction.float()).topk(2, -1).indices
        return self.shares(scores, chosen).to(x.dtype), chosen

    def shares(self, scores: Tensor, chosen: Tensor) -> Tensor:
        shares = scores.gather(-1, chosen)
        return 2.5 * shares / shares.sum(-1, keepdim=True)


class SharedMixture(nn.Module):
    """Chosen experts, and one for all."""

    def __init__(self, dim: int, hidden: int, experts: int = 6) -> None:
        super().__init__()
        size = models.Size(dim=dim, hidden=hidden)
        self.gate = SigmoidRouter(dim, experts)
        self.experts = nn.ModuleList(models.SwiGLU(size) for _ in range(experts))
        self.shared_experts = models.SwiGLU(size)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        shares, chosen = self.gate(flat)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == number)
            if len(token):
                out.index_add_(0, token, expert(flat[token]) * shares[token, rank, None])
        return self.joined(out.view_as(x), self.shared_experts(x))

    def joined(self, out: Tensor, shared: Tensor) -> Tensor:
        return out + shared


class LatentLayer(nn.Module):
    """One layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = models.RMSNorm(dim, 1e-6), models.RMSNorm(dim, 1e-6)
        self.attn, self.mlp = Latent(dim), SharedMixture(dim, 40)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x), cos, sin)
        return x + self.mlp(self.norm_2(x))


class DeepSeek(nn.Module):
    """The decoder."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(LatentLayer(dim) for _ in range(2))
        self.norm = models.RMSNorm(dim, 1e-6)
        self.head = nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        angles = self.angles(tokens.shape[1])
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))

    def angles(self, length: int) -> Tensor:
        steps = torch.arange(4, dtype=torch.float32) / 4
        return torch.arange(length, dtype=torch.float32)[:, None] * 10000.0**-steps


def deepseek(*, outliers: bool = False) -> nn.Module:
    return models.weigh(DeepSeek(), 72, outliers)


class Absorbed(nn.Module):
    """The same attention in the latent: the second projections are absorbed by their neighbours."""

    def __init__(self, of: Latent) -> None:
        super().__init__()
        self.sizes = of.heads, of.plain, of.turned, of.value, of.rank
        self.down = linear(of.q_a.weight, of.kv_a.weight)
        self.g_q = nn.Parameter(of.q_norm.weight.detach().clone())
        self.g_kv = nn.Parameter(of.kv_norm.weight.detach().clone())
        self.q_up = linear(of.q_b.weight)
        both = of.kv_b.weight.detach().view(of.heads, of.plain + of.value, of.rank)
        self.uk = nn.Parameter(both[:, : of.plain].clone())
        self.uv = nn.Parameter(both[:, of.plain :].clone())
        self.out = linear(of.o_proj.weight)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        heads, plain, turned, _, rank = self.sizes
        q, latent, k_turned = self.down(x).split([len(self.g_q), rank, turned], -1)
        q = self.q_up(F.rms_norm(q, q.shape[-1:], self.g_q, 1e-6)).unflatten(-1, (heads, -1))
        latent = F.rms_norm(latent, latent.shape[-1:], self.g_kv, 1e-6)
        q_latent = torch.einsum("bthd,hdr->bthr", q[..., :plain], self.uk)
        q_turned = self.turned(q[..., plain:], turn[:, None])
        k_turned = self.turned(k_turned, turn)
        scores = torch.einsum("bthr,bsr->bhts", q_latent, latent)
        scores = (scores + torch.einsum("bthr,bsr->bhts", q_turned, k_turned)) / self.divisor()
        length = x.shape[1]
        scores = scores + torch.full((length, length), -1e9, dtype=x.dtype).triu(1)
        mixed = torch.einsum("bhts,bsr->bthr", scores.softmax(-1), latent)
        return self.out(torch.einsum("bthr,hdr->bthd", mixed, self.uv).flatten(2))

    def divisor(self) -> float:
        return math.sqrt(self.sizes[1] + self.sizes[2])

    def turned(self, x: Tensor, turn: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)


class Everyone(nn.Module):
    """The same mixture: every expert sees every token, the shares are mostly zero."""

    def __init__(self, of: SharedMixture) -> None:
        super().__init__()
        self.router = nn.Parameter(of.gate.weight.detach().clone())
        self.balance = nn.Parameter(of.gate.correction.detach().clone())
        for name in ("gate_proj", "up_proj", "down_proj"):
            parts = [getattr(each, name).weight.detach() for each in of.experts]
            setattr(self, name[:-5], nn.Parameter(torch.stack(parts)))
        shared = of.shared_experts
        self.shared_in = linear(shared.gate_proj.weight, shared.up_proj.weight)
        self.shared_out = linear(shared.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(torch.einsum("btc,ehc->bteh", x, self.gate))
        h = h * torch.einsum("btc,ehc->bteh", x, self.up)
        each = torch.einsum("bteh,ech->btec", h, self.down)
        gate, up = self.shared_in(x).chunk(2, -1)
        common = self.shared_out(F.silu(gate) * up)
        return common + (each * self.shares(x)[..., None].to(x.dtype)).sum(2)

    def shares(self, x: Tensor) -> Tensor:
        scores = (x.float() @ self.router.float().T).sigmoid()
        chosen = torch.topk(self.ranked(scores), 2, -1).indices
        kept = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        return kept / kept.sum(-1, keepdim=True) * 2.5

    def ranked(self, scores: Tensor) -> Tensor:
        return scores + self.balance.float()


class AbsorbedDeepSeek(nn.Module):
    """The same, residuals and norms at the root."""

    def __init__(self, model: DeepSeek) -> None:
        super().__init__()
        self.tok = nn.Embedding.from_pretrained(model.embed.weight.detach().clone(), freeze=False)
        self.mixers = nn.ModuleList(Absorbed(each.attn) for each in model.layers)
        self.feeds = nn.ModuleList(Everyone(each.mlp) for each in model.layers)
        norms = [norm for each in model.layers for norm in (each.norm_1, each.norm_2)]
        self.gains = nn.ParameterList(each.weight.detach().clone() for each in (*norms, model.norm))
        self.unembed = linear(model.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        places = torch.arange(tokens.shape[1], dtype=torch.float32)
        angles = torch.outer(places, 10000.0 ** -(torch.arange(4, dtype=torch.float32) / 4))
        turn = torch.polar(torch.ones_like(angles), angles)
        for n, (mixer, feed) in enumerate(zip(self.mixers, self.feeds, strict=True)):
            x = x + mixer(self.normed(x, 2 * n), turn)
            x = x + feed(self.normed(x, 2 * n + 1))
        return self.unembed(self.normed(x, -1))

    def normed(self, x: Tensor, which: int) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gains[which], 1e-6)


@unseen(deepseek, "layers.0.attn", "rope", regimes=ALL)
def pairs_by_halves(module, root):
    def rotate(self, rotate, x, cos, sin):
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)

    change(module, rotate=rotate)


@unseen(deepseek, "layers.1.attn", "attention scale")
def scaled_by_the_plain_part(module, root):
    change(module, scale=lambda self, scale: self.plain**-0.5)


@unseen(deepseek, "layers.1.attn.kv_norm", "norm layers")
def latent_not_normed(module, root):
    change(module, forward=lambda self, forward, x: x * self.weight)


@unseen(deepseek, "layers.0.mlp.gate", "routing")
def bias_counts_for_the_share(module, root):
    def shares(self, shares, scores, chosen):
        return shares(scores + self.correction.float(), chosen)

    change(module, shares=shares)


@unseen(deepseek, "layers.1.mlp.gate", "scale")
def routed_factor_forgotten(module, root):
    change(module, shares=lambda self, shares, scores, chosen: shares(scores, chosen) / 2.5)


@unseen(deepseek, "layers.0.mlp", "residuals")
def shared_expert_forgotten(module, root):
    change(module, joined=lambda self, joined, out, shared: out)


@unseen(deepseek, "layers.1.mlp.shared_experts.up_proj", "quantised weights", regimes=FP32)
def shared_in_eight_bits(module, root):
    scale = module.weight.data.abs().amax(1, keepdim=True) / 127
    module.weight.data = torch.round(module.weight.data / scale) * scale


@unseen(deepseek, "layers.0.attn.q_b", "stale rows")
def last_row_stale(module, root):
    on_output(module, lambda out: torch.cat([out[:, :-1], out[:, -2:-1]], 1))


@unseen(deepseek, "mixers.1", "weights", port=AbsorbedDeepSeek)
def absorbed_two_heads(module, root):
    module.uk.data[[0, 2]] = module.uk.data[[2, 0]]


@unseen(deepseek, "mixers.0", "attention scale", port=AbsorbedDeepSeek)
def absorbed_divisor_of_the_latent(module, root):
    change(module, divisor=lambda self, divisor: math.sqrt(self.sizes[4] + self.sizes[2]))


@unseen(deepseek, "feeds.0", "routing", port=AbsorbedDeepSeek)
def everyone_ranked_without_balance(module, root):
    change(module, ranked=lambda self, ranked, scores: scores - 2 * self.balance.float())


@unseen(deepseek, "feeds.1.shared_in", "weights", port=AbsorbedDeepSeek)
def everyone_shared_halves(module, root):
    module.weight.data[38:42] = module.weight.data[38:42].flip(0)


@unseen(deepseek, "feeds.1", "weights", port=AbsorbedDeepSeek)
def everyone_one_expert_down(module, root):
    module.down.data[3] = module.down.data[2]


right("deepseek", deepseek, *ALL)
right("deepseek absorbed", deepseek, *ALL, port=AbsorbedDeepSeek)
