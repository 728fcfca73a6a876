"""gpt-oss: sinks in the softmax, a window in every other layer, experts that are limited.

The port calls expert by expert where the model multiplies by all, and lets the sinks into the
softmax afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_fourth import BOTH, fourth, harmless
from localisation.unseen_fourth_routed import GatheredMoe, QwenMoeModel, same, turned


class OssAttention(nn.Module):
    """A softmax in which a learned number per head takes part."""

    def __init__(self, dim: int, heads: int, window: int | None) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.q_proj, self.o_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.k_proj, self.v_proj = nn.Linear(dim, dim // 2), nn.Linear(dim, dim // 2)
        self.sinks = nn.Parameter(torch.zeros(heads))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (
            f(x).unflatten(-1, (-1, 12)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = turned(q, 150000.0, 1.1), turned(k, 150000.0, 1.1)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = q @ k.mT * 12**-0.5 + self.mask(t).to(x.dtype)
        sinks = self.sinks.view(1, -1, 1, 1).expand(b, -1, t, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1, dtype=torch.float32)[..., :-1]
        return self.o_proj((weights.to(x.dtype) @ v).transpose(1, 2).flatten(2))

    def mask(self, length: int) -> Tensor:
        hidden = torch.full((length, length), -torch.inf)
        far = hidden.tril(-self.window) if self.window else torch.zeros_like(hidden)
        return hidden.triu(1) + far


class OssExperts(nn.Module):
    """All experts at once; gate and up lie between each other, and both are limited."""

    def __init__(self, dim: int, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, dim, 2 * dim))
        self.gate_up_proj_bias = nn.Parameter(torch.empty(experts, 2 * dim))
        self.down_proj = nn.Parameter(torch.empty(experts, dim, dim))
        self.down_proj_bias = nn.Parameter(torch.empty(experts, dim))

    def forward(self, x: Tensor, shares: Tensor) -> Tensor:
        h = torch.einsum("btc,ech->beth", x, self.gate_up_proj) + self.gate_up_proj_bias[:, None]
        gate, up = self.limited(h[..., ::2], h[..., 1::2])
        h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        h = torch.einsum("beth,ehc->betc", h, self.down_proj) + self.down_proj_bias[:, None]
        return torch.einsum("betc,bte->btc", h, shares)

    def limited(self, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return gate.clamp(max=1.5), up.clamp(-1.5, 1.5)


class OssMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(dim, 4), OssExperts(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x)
        best, chosen = scores.topk(2, -1)
        shares = best.softmax(-1, dtype=torch.float32).to(x.dtype)
        return self.experts(x, torch.zeros_like(scores).scatter(-1, chosen, shares))


class OssLayer(nn.Module):
    def __init__(self, dim: int, window: int | None) -> None:
        super().__init__()
        self.self_attn, self.mlp = OssAttention(dim, 4, window), OssMLP(dim)
        self.input_layernorm = nn.RMSNorm(dim, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(dim, eps=1e-5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Oss(QwenMoeModel):
    """Every other layer sees a window."""

    def __init__(self, dim: int = 48) -> None:
        super().__init__(dim)
        self.layers = nn.ModuleList(OssLayer(dim, each) for each in (5, None))


def gpt_oss(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(Oss(), 432, outliers)
    for layer in model.layers:
        layer.self_attn.sinks.data = 1 + 5 * layer.self_attn.sinks.data
        layer.mlp.experts.gate_up_proj.data *= 96**0.5
        layer.mlp.experts.down_proj.data *= 48**0.5
    return model


class OneExpert(nn.Module):
    def __init__(self, of: OssExperts, n: int) -> None:
        super().__init__()
        into, bias = of.gate_up_proj[n].detach().T, of.gate_up_proj_bias[n].detach()
        self.w1, self.w3 = linear(into[::2], bias=bias[::2]), linear(into[1::2], bias=bias[1::2])
        self.w2 = linear(of.down_proj[n].T, bias=of.down_proj_bias[n].detach())
        self.alpha, self.limit = 1.702, 1.5

    def forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x).clamp(max=self.limit)
        up = self.w3(x).clamp(min=-self.limit, max=self.limit)
        return self.w2(gate * torch.sigmoid(gate * self.alpha) * self.shifted(up))

    def shifted(self, up: Tensor) -> Tensor:
        return up + 1


class LoopMoe(nn.Module):
    def __init__(self, of: OssMLP) -> None:
        super().__init__()
        self.gate = same(of.router)
        self.experts = nn.ModuleList(OneExpert(of.experts, n) for n in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.routed(self.gate(x).float())
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            share = (shares * (chosen == number)).sum(-1, keepdim=True)
            out = out + share.to(x.dtype) * expert(x)
        return out

    def routed(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = scores.topk(2, -1)
        return best.softmax(-1), chosen


class SunkAttention(nn.Module):
    """Attends without sinks, then takes the share of the sinks away."""

    def __init__(self, of: OssAttention) -> None:
        super().__init__()
        self.reach, self.sink = of.window or 10**6, nn.Parameter(of.sinks.detach().clone())
        parts = (of.q_proj, of.k_proj, of.v_proj)
        bias = torch.cat([each.bias.detach() for each in parts])
        self.qkv, self.out = linear(*(each.weight for each in parts), bias=bias), same(of.o_proj)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (8, 12)).transpose(1, 2).split((4, 2, 2), 1)
        q, k = turned(q, 150000.0, 1.1), turned(k, 150000.0, 1.1)
        scores = torch.einsum("bgrqd,bgkd->bgrqk", q.unflatten(1, (2, 2)), k).flatten(1, 2)
        places = torch.arange(x.shape[1])
        apart = places[:, None] - places
        scores = (scores.float() / 12**0.5).masked_fill(
            (apart < 0) | (apart >= self.reach), -torch.inf
        )
        weights = (scores.softmax(-1) * self.left(scores)).to(x.dtype).unflatten(1, (2, 2))
        return self.out(torch.einsum("bgrqk,bgkd->bqgrd", weights, v).flatten(2))

    def left(self, scores: Tensor) -> Tensor:
        return torch.sigmoid(scores.logsumexp(-1, keepdim=True) - self.sink[:, None, None].float())


class LoopBlock(nn.Module):
    def __init__(self, of: OssLayer) -> None:
        super().__init__()
        self.attn, self.mlp = SunkAttention(of.self_attn), LoopMoe(of.mlp)
        self.norm1, self.norm2 = nn.RMSNorm(48, eps=1e-5), nn.RMSNorm(48, eps=1e-5)
        self.norm1.load_state_dict(of.input_layernorm.state_dict())
        self.norm2.load_state_dict(of.post_attention_layernorm.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn(self.norm1(x)) + x
        return self.mlp(self.norm2(x)) + x


class LoopOss(GatheredMoe):
    def __init__(self, model: Oss) -> None:
        nn.Module.__init__(self)
        self.wte = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach().clone())
        self.blocks = nn.Sequential(*map(LoopBlock, model.layers))
        self.g = nn.Parameter(model.norm.weight.detach().clone())
        self.head = linear(model.lm_head.weight)


@fourth(gpt_oss, "blocks.0.attn", "masks", port=LoopOss, regimes=BOTH)
def oss_without_sinks(module, root):
    change(module, left=lambda self, left, scores: torch.ones_like(left(scores)))


@fourth(gpt_oss, "blocks.1.mlp.experts.2", "activations", port=LoopOss, regimes=BOTH)
def oss_up_not_shifted(module, root):
    change(module, shifted=lambda self, shifted, up: up)


@fourth(gpt_oss, "blocks.0.mlp", "routing", port=LoopOss)
def oss_softmax_of_all_experts(module, root):
    change(module, routed=lambda self, routed, scores: scores.softmax(-1).topk(2, -1))


@fourth(gpt_oss, "blocks.1.mlp.experts.1", "activations", port=LoopOss)
def oss_plain_silu(module, root):
    module.alpha = 1.0


@fourth(gpt_oss, "layers.0.mlp.experts", "activations", against=LoopOss, regimes=BOTH)
def oss_gate_not_limited(module, root):
    def limited(self, limited, gate, up):
        return gate, limited(gate, up)[1]

    change(module, limited=limited)


@fourth(gpt_oss, "layers.1.self_attn", "weights", against=LoopOss)
def oss_sinks_by_group_first(module, root):
    module.sinks.data = module.sinks.data.view(2, 2).T.flatten()


@fourth(gpt_oss, "layers.1.mlp.router", "weights", against=LoopOss)
def oss_router_without_bias(module, root):
    module.bias.data.zero_()


harmless("gpt-oss in a loop", gpt_oss, "same", port=LoopOss)
harmless("gpt-oss against loop", gpt_oss, "same", against=LoopOss)
