"""Decoders: distances instead of positions, and experts that take so many tokens and no more.

The ports split what was interleaved, add biases as a mask, and dispatch by products.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear, norm_like
from localisation.planting import change, on_output
from localisation.unseen_again import BOTH, again, harmless

# --- Distances ------------------------------------------------------------------------------------


class BloomAttention(nn.Module):
    """Queries, keys and values interleaved by head; a slope for each head."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value, self.dense = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, alibi: Tensor) -> Tensor:
        q, k, v = self.query_key_value(x).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = self.biased(q @ k.mT * q.shape[-1] ** -0.5, alibi)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.float().masked_fill(hidden, float("-inf")).softmax(-1).to(x.dtype)
        return self.dense((weights @ v).transpose(1, 2).flatten(2))

    def biased(self, scores: Tensor, alibi: Tensor) -> Tensor:
        return scores + alibi


class BloomBlock(nn.Module):
    """Norms before both parts."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm, self.post_layernorm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.self_attention = BloomAttention(dim, heads)
        self.h_to_4h, self.fh_to_h = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, alibi: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x), alibi)
        h = F.gelu(self.h_to_4h(self.post_layernorm(x)), approximate="tanh")
        return x + self.fh_to_h(h)


class Bloom(nn.Module):
    """The decoder; a norm after the embedding, which is the head too."""

    def __init__(self, dim: int = 48, heads: int = 6) -> None:
        super().__init__()
        self.heads = heads
        self.embed, self.embed_norm = nn.Embedding(101, dim), nn.LayerNorm(dim)
        self.h = nn.ModuleList(BloomBlock(dim, heads) for _ in range(3))
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_norm(self.embed(tokens))
        alibi = self.alibi(tokens.shape[1]).to(x.dtype)
        for block in self.h:
            x = block(x, alibi)
        return F.linear(self.ln_f(x), self.embed.weight)

    def alibi(self, length: int) -> Tensor:
        return self.slopes()[:, None, None] * torch.arange(length)

    def slopes(self) -> Tensor:
        near = 2 ** math.floor(math.log2(self.heads))
        base = 2.0 ** (-8.0 / near)
        slopes = [base ** (n + 1) for n in range(near)]
        between = 2.0 ** (-4.0 / near)
        slopes += [between ** (2 * n + 1) for n in range(self.heads - near)]
        return torch.tensor(slopes)


def bloom(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Bloom(), 221, outliers)


class SplitBlock(nn.Module):
    """Queries, keys and values apart; distances relative to the query, in the mask."""

    def __init__(self, of: BloomBlock) -> None:
        super().__init__()
        a = of.self_attention
        weight = a.query_key_value.weight.detach().unflatten(0, (a.heads, 3, -1))
        bias = a.query_key_value.bias.detach().unflatten(0, (a.heads, 3, -1))
        self.heads = a.heads
        self.wq, self.wk, self.wv = (
            linear(weight[:, n].flatten(0, 1), bias=bias[:, n].flatten()) for n in range(3)
        )
        self.wo = linear(a.dense.weight, bias=a.dense.bias.detach())
        self.ln1, self.ln2 = norm_like(of.input_layernorm), norm_like(of.post_layernorm)
        self.mlp = nn.Sequential(
            linear(of.h_to_4h.weight, bias=of.h_to_4h.bias.detach()),
            nn.GELU(approximate="tanh"),
            linear(of.fh_to_h.weight, bias=of.fh_to_h.bias.detach()),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.ln1(x)
        q, k, v = (self.split(f(h)) for f in (self.wq, self.wk, self.wv))
        seen = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.fed(x + self.wo(seen.transpose(1, 2).reshape(x.shape)))

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def fed(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.ln2(x))


class SplitBloom(nn.Module):
    """The same, its mask made once."""

    def __init__(self, model: Bloom) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(model.embed.weight.detach().clone())
        self.first, self.last = norm_like(model.embed_norm), norm_like(model.ln_f)
        self.blocks = nn.ModuleList(SplitBlock(each) for each in model.h)
        self.unembed = linear(model.embed.weight)
        self.heads = model.heads

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.first(self.wte(tokens))
        mask = self.mask(tokens.shape[1]).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return self.unembed(self.last(x))

    def mask(self, length: int) -> Tensor:
        slopes = self.rates()
        places = torch.arange(length)
        apart = (places[None] - places[:, None]).float()
        return torch.where(apart <= 0, slopes[:, None, None] * apart, float("-inf"))

    def rates(self) -> Tensor:
        return torch.tensor([2.0 ** -(2 * (n + 1)) for n in range(4)] + [0.5, 0.125])


@again(bloom, "", "positions", port=SplitBloom, regimes=BOTH)
def bloom_slopes_sorted(module, root):
    change(module, rates=lambda self, rates: rates().sort(descending=True).values)


@again(bloom, "blocks.1.wk", "weights", port=SplitBloom)
def bloom_key_split_as_blocks(module, root):
    module.weight.data = module.weight.data.unflatten(0, (6, 8)).transpose(0, 1).flatten(0, 1)


@again(bloom, "blocks.2", "residuals", port=SplitBloom, regimes=BOTH)
def bloom_residual_after_the_norm(module, root):
    def fed(self, fed, x):
        x = self.ln2(x)
        return x + self.mlp(x)

    change(module, fed=fed)


@again(bloom, "blocks.0.mlp.1", "activations", port=SplitBloom)
def bloom_exact_gelu(module, root):
    module.approximate = "none"


@again(bloom, "first", "norm layers", port=SplitBloom)
def bloom_bias_of_the_first_norm(module, root):
    module.bias.data = -module.bias.data


@again(bloom, "h.1.self_attention", "masks", against=SplitBloom, regimes=BOTH)
def bloom_bias_before_the_scale(module, root):
    change(module, biased=lambda self, biased, scores, alibi: scores + alibi * 0.35)


@again(bloom, "h.2.self_attention.query_key_value", "weights", against=SplitBloom)
def bloom_rows_of_two_heads(module, root):
    module.weight.data[:48] = module.weight.data[:48].roll(24, 0)


harmless("bloom split", bloom, "same", "reordered", "bf16", port=SplitBloom)
harmless("bloom against split", bloom, against=SplitBloom)


# --- Experts that are full ------------------------------------------------------------------------


class Switch(nn.Module):
    """Each token goes to one expert; those that come late to a full one pass unchanged."""

    def __init__(self, dim: int, experts: int = 4, capacity: int = 9) -> None:
        super().__init__()
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))
            for _ in range(experts)
        )
        self.capacity = capacity

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chance, chosen = self.router(flat.float()).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for n, expert in enumerate(self.experts):
            mine = (chosen == n).nonzero()[:, 0][: self.capacity]
            out = out.index_add(0, mine, self.weighed(expert(flat[mine]), chance[mine]))
        return out.view_as(x)

    def weighed(self, out: Tensor, chance: Tensor) -> Tensor:
        return out * chance[:, None].to(out.dtype)


class SwitchLayer(nn.Module):
    """Attention, then experts."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = models.RMSNorm(dim), models.RMSNorm(dim)
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.moe = Switch(dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (
            f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        seen = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        x = x + self.o(seen.transpose(1, 2).flatten(2))
        return x + self.moe(self.norm2(x))


class Switches(nn.Module):
    """The decoder."""

    def __init__(self, dim: int = 40) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(101, dim), nn.Parameter(torch.empty(16, dim))
        self.layers = nn.ModuleList(SwitchLayer(dim) for _ in range(2))
        self.norm, self.head = models.RMSNorm(dim), nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def switches(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Switches(), 222, outliers)


class Dispatch(nn.Module):
    """Experts as one stack; tokens are dispatched and combined by products."""

    def __init__(self, of: Switch) -> None:
        super().__init__()
        self.gate = nn.Parameter(of.router.weight.detach().T.clone())
        self.w1, self.w2 = (
            nn.Parameter(torch.stack([each[n].weight.detach().T for each in of.experts]))
            for n in (0, 2)
        )
        self.b1, self.b2 = (
            nn.Parameter(torch.stack([each[n].bias.detach() for each in of.experts]))
            for n in (0, 2)
        )
        self.room = of.capacity

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        chances = torch.softmax(tokens.float() @ self.gate.float(), -1)
        place = self.seats(F.one_hot(chances.argmax(-1), chances.shape[-1]))
        sent = place.to(x.dtype)
        h = torch.einsum("nes,nd->esd", sent, tokens)
        h = torch.relu(torch.bmm(h, self.w1) + self.b1[:, None])
        h = torch.bmm(h, self.w2) + self.b2[:, None]
        return torch.einsum("nes,esd->nd", self.shares(sent, chances), h).reshape(x.shape)

    def seats(self, chosen: Tensor) -> Tensor:
        seat = chosen.cumsum(0) * chosen - 1
        return F.one_hot(seat.clamp(-1, self.room) + 1, self.room + 2)[..., 1:-1]

    def shares(self, sent: Tensor, chances: Tensor) -> Tensor:
        return sent * chances[..., None].to(sent.dtype)


class Causal(nn.Module):
    """Attention with one product for queries, keys and values."""

    def __init__(self, of: SwitchLayer) -> None:
        super().__init__()
        self.heads = of.heads
        self.qkv = linear(of.q.weight, of.k.weight, of.v.weight)
        self.out = linear(of.o.weight)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class DispatchSwitches(nn.Module):
    """The same, flat."""

    def __init__(self, model: Switches) -> None:
        super().__init__()
        self.register_buffer("where", model.places.detach().clone())
        self.tok = nn.Embedding.from_pretrained(model.embed.weight.detach().clone())
        norms = [n for each in model.layers for n in (each.norm1, each.norm2)]
        self.norms = nn.ModuleList(nn.RMSNorm(40, eps=1e-5) for _ in range(5))
        for new, old in zip(self.norms, [*norms, model.norm], strict=True):
            new.weight.data = old.weight.detach().clone()
        self.attns = nn.ModuleList(Causal(each) for each in model.layers)
        self.moes = nn.ModuleList(Dispatch(each.moe) for each in model.layers)
        self.lm_head = linear(model.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.where
        for n, (attn, moe) in enumerate(zip(self.attns, self.moes, strict=True)):
            x = x + attn(self.norms[2 * n](x))
            x = x + moe(self.norms[2 * n + 1](x))
        return self.lm_head(self.norms[-1](x))


@again(switches, "moes.0", "routing", port=DispatchSwitches, regimes=BOTH)
def switches_one_seat_less(module, root):
    module.room = 8


@again(switches, "moes.1", "routing", port=DispatchSwitches)
def switches_not_weighed(module, root):
    change(module, shares=lambda self, shares, sent, chances: sent)


@again(switches, "moes.0", "weights", port=DispatchSwitches)
def switches_experts_exchanged(module, root):
    module.w2.data = module.w2.data[[0, 2, 1, 3]]


@again(switches, "attns.1", "masks", port=DispatchSwitches, regimes=BOTH)
def switches_not_causal(module, root):
    def forward(self, forward, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v)
        return self.out(seen.transpose(1, 2).flatten(2))

    change(module, forward=forward)


@again(switches, "layers.1.moe", "routing", against=DispatchSwitches)
def switches_last_come_first(module, root):
    def forward(self, forward, x):
        return forward(x.flip(1)).flip(1)

    change(module, forward=forward)


@again(switches, "layers.0.moe.experts.2.2", "biases", against=DispatchSwitches)
def switches_expert_without_bias(module, root):
    module.bias.data.zero_()


@again(switches, "norms.4", "scale", port=DispatchSwitches, regimes=BOTH)
def switches_last_norm_larger(module, root):
    on_output(module, lambda out: out * 1.02)


harmless("switches dispatched", switches, port=DispatchSwitches)
harmless("switches against dispatched", switches, "same", "reordered", against=DispatchSwitches)
