"""A port of Mixtral as an engine has it: fused projections, grouped experts, a fixed cache."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional
from transformers import MixtralForCausalLM

LAYERS, WIDTH, HEADS, GROUPS, HEAD, INNER, VOCABULARY = 3, 64, 4, 2, 16, 96, 200
EXPERTS, CHOSEN, THETA, EPS = 4, 2, 10000.0, 1e-5
REPEATS = HEADS // GROUPS


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return the same in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.eps = EPS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised states."""
        scale = (wide(x).pow(2).mean(-1, keepdim=True) + self.eps).rsqrt()
        return (wide(x) * scale).to(x.dtype) * self.weight


class Rope(nn.Module):
    """The turns of all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = THETA

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the angles, (positions, half a head)."""
        del dtype
        steps = torch.arange(0, HEAD, 2).float() / HEAD
        return positions[:, None].float() * (1.0 / self.theta**steps)


class Mixer(nn.Module):
    """Attention with rotated queries and keys, and its part of the cache."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.fill = "min"

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, seen: torch.Tensor, cache: Any, start: int
    ) -> torch.Tensor:
        """Return what is added to the states; ``seen`` is (queries, keys)."""
        q, k, v = self.split(x)
        q, k = self.turn(q, angles), self.turn(k, angles)
        if cache is not None:
            k, v = self.store(cache, k, v, start)
        mixed = self.attend(q, self.repeat(k), self.repeat(v), seen)
        return self.wo(rearrange(mixed, "b h n d -> b n (h d)"))

    def split(self, x: torch.Tensor) -> Any:
        """Return queries, keys and values per head."""
        parts = self.wqkv(x).split((HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD), -1)
        return (rearrange(part, "b n (h d) -> b h n d", d=HEAD) for part in parts)

    def turn(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        """Turn each channel of the first half with its like in the second."""
        one, two = wide(x).chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)

    def repeat(self, x: torch.Tensor) -> torch.Tensor:
        """Give each head the keys or values of its group."""
        return x.repeat_interleave(REPEATS, 1)

    def store(self, cache: Any, k: torch.Tensor, v: torch.Tensor, start: int) -> Any:
        """Write to the cache and return all that is in it."""
        stop = start + k.shape[2]
        cache[0, :, :, start:stop], cache[1, :, :, start:stop] = k, v
        return cache[0, :, :, :stop], cache[1, :, :, :stop]

    def attend(self, q: Any, k: Any, v: Any, seen: torch.Tensor) -> torch.Tensor:
        """Return the mixed values per head."""
        scores = wide(q) @ wide(k).mT * HEAD**-0.5
        fill = float("-inf") if self.fill == "inf" else torch.finfo(scores.dtype).min
        return scores.masked_fill(~seen, fill).softmax(-1).to(v.dtype) @ v


class Router(nn.Module):
    """Chooses the experts of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(EXPERTS, WIDTH))
        self.chosen = CHOSEN

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the shares and numbers of the chosen experts."""
        chances = (wide(x) @ wide(self.weight).T).softmax(-1)
        shares, numbers = chances.topk(self.chosen, -1)
        return shares / shares.sum(-1, keepdim=True), numbers


class Experts(nn.Module):
    """All experts, each called once with its tokens side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def forward(self, x: torch.Tensor, shares: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs, added up by their shares."""
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten().bincount(minlength=EXPERTS).tolist()
        rows = x[order // numbers.shape[1]].split(counts)
        outputs = torch.cat([self.one(expert, part) for expert, part in enumerate(rows)])
        back = torch.empty_like(outputs)
        back[order] = outputs
        return self.combine(back.view(*numbers.shape, WIDTH), shares)

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Return the output of one expert for its tokens."""
        gate, up = functional.linear(x, self.w13[expert]).chunk(2, -1)
        return functional.linear(functional.silu(gate) * up, self.w2[expert])

    def combine(self, outputs: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Add up (tokens, chosen, width) by shares."""
        return (wide(outputs) * shares[..., None]).sum(1).to(outputs.dtype)


class Moe(nn.Module):
    """Router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Router()
        self.experts = Experts()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what is added to the states."""
        rows = x.flatten(0, 1)
        return self.experts(rows, *self.router(rows)).view(x.shape)


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_in = Norm()
        self.mixer = Mixer()
        self.norm_post = Norm()
        self.moe = Moe()

    def forward(self, x: torch.Tensor, *how: Any) -> torch.Tensor:
        """Return the next states."""
        x = x + self.mixer(self.norm_in(x), *how)
        return x + self.moe(self.norm_post(x))


class Trunk(nn.Module):
    """All but the head."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rope = Rope()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = Norm()
        self.window = window

    def forward(self, ids: torch.Tensor, start: int, first: int, caches: Any) -> torch.Tensor:
        """Return the last states of tokens from ``start`` on, turned from ``first`` on."""
        x = self.embed(ids)
        positions = torch.arange(start, start + ids.shape[1])
        angles = self.rope(positions + first, x.dtype)
        seen = self.seen(positions, start + ids.shape[1])
        for index, block in enumerate(self.blocks):
            x = block(x, angles, seen, None if caches is None else caches[index], start)
        return self.norm(x)

    def seen(self, positions: torch.Tensor, stop: int) -> torch.Tensor:
        """Return which keys each query sees."""
        behind = positions[:, None] - torch.arange(stop)[None]
        return (behind >= 0) & (behind < (self.window or stop))


class Port(nn.Module):
    """Trunk and head."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.trunk = Trunk(window)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def new_cache(self, batch: int) -> dict[str, Any]:
        """Return room for 24 tokens."""
        like = self.head.weight
        return {"used": 0, "kv": like.new_zeros(LAYERS, 2, batch, GROUPS, 24, HEAD)}

    def forward(
        self, ids: torch.Tensor, first: int = 0, cache: dict[str, Any] | None = None
    ) -> torch.Tensor:
        """Return the logits."""
        used = 0 if cache is None else cache["used"]
        states = self.trunk(ids, used, first, None if cache is None else cache["kv"])
        if cache is not None:
            cache["used"] = used + ids.shape[1]
        return self.head(states)


def convert(net: MixtralForCausalLM, port: Port) -> None:
    """Load the weights of transformers' model."""
    port.trunk.embed.weight.copy_(net.model.embed_tokens.weight)
    port.trunk.norm.weight.copy_(net.model.norm.weight)
    port.head.weight.copy_(net.lm_head.weight)
    for block, layer in zip(port.trunk.blocks, net.model.layers, strict=True):
        attention = layer.self_attn
        parts = (attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)
        block.mixer.wqkv.weight.copy_(torch.cat(parts))
        block.mixer.wo.weight.copy_(attention.o_proj.weight)
        block.norm_in.weight.copy_(layer.input_layernorm.weight)
        block.norm_post.weight.copy_(layer.post_attention_layernorm.weight)
        block.moe.router.weight.copy_(layer.mlp.gate.weight)
        block.moe.experts.w13.copy_(layer.mlp.experts.gate_up_proj)
        block.moe.experts.w2.copy_(layer.mlp.experts.down_proj)
