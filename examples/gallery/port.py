"""A port of Llama, Mistral, Mixtral, Gemma and Gemma 2, with module names of its own.

This port is right: it matches transformers. Each example replaces one part of it by a wrong one.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

NAMES = {
    "model.embed_tokens": "embedding",
    "model.layers": "blocks",
    "model.norm": "norm",
    "lm_head": "head",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "mlp.gate_proj": "feed.gate",
    "mlp.up_proj": "feed.up",
    "mlp.down_proj": "feed.down",
    "mlp.gate": "feed.router",
    "mlp.experts.gate_up_proj": "feed.into",
    "mlp.experts.down_proj": "feed.back",
    "input_layernorm": "norm_1",
    "pre_feedforward_layernorm": "norm_2",
    "post_feedforward_layernorm": "norm_after_feed",
}
GELU = {"silu": F.silu, "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh")}


def capped(x, cap):
    """Return scores that stay below a cap, where there is one."""
    return x if cap is None else cap * torch.tanh(x / cap)


class Norm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(c.hidden_size)), c.rms_norm_eps

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (wide * scale).to(x.dtype)


class OffsetNorm(Norm):
    """The norm of Gemma, which multiplies by one plus the stored weight."""

    def forward(self, x):
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (1 + self.weight.float())).to(x.dtype)


class Rotary(nn.Module):
    """Rotates pairs of elements by an angle that grows with the position."""

    def __init__(self, c):
        super().__init__()
        self.base = c.rope_parameters["rope_theta"]

    def forward(self, x, start):
        angles = self.angles(torch.arange(start, start + x.shape[-2]), x.shape[-1] // 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)

    def angles(self, positions, half):
        return torch.outer(positions.float(), self.base ** -(torch.arange(half).float() / half))


class Attention(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        self.index, self.rotary = index, Rotary(c)
        self.heads, self.groups = c.num_attention_heads, c.num_key_value_heads
        size = c.head_dim or c.hidden_size // self.heads
        self.scale = getattr(c, "query_pre_attn_scalar", size) ** -0.5
        self.cap = getattr(c, "attn_logit_softcapping", None)
        kinds = getattr(c, "layer_types", None)
        windowed = kinds is None or kinds[index] == "sliding_attention"
        self.window = getattr(c, "sliding_window", None) if windowed else None
        self.query, self.key, self.value, self.out = (
            nn.Linear(one, other, bias=False)
            for one, other in (
                (c.hidden_size, self.heads * size),
                (c.hidden_size, self.groups * size),
                (c.hidden_size, self.groups * size),
                (self.heads * size, c.hidden_size),
            )
        )

    def forward(self, x, real=None, cache=None):
        q, k, v = (
            part(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in (
                (self.query, self.heads),
                (self.key, self.groups),
                (self.value, self.groups),
            )
        )
        start = 0 if cache is None else cache.get_seq_length(self.index)
        q, k = self.rotary(q, start), self.rotary(k, start)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        mixed = self.mix(q, self.spread(k), self.spread(v), self.seen(x.shape[1], start, real))
        return self.out(mixed.transpose(1, 2).flatten(2))

    def spread(self, x):
        """Repeat each key or value head for the neighbouring query heads that share it."""
        return x.repeat_interleave(self.heads // self.groups, dim=1)

    def seen(self, length, start, real):
        """Return which keys each query sees."""
        back = torch.arange(start, start + length)[:, None] - torch.arange(start + length)
        seen = back >= 0
        if self.window is not None:
            seen = seen & (back < self.window)
        return seen if real is None else seen & real.bool()[:, None, None]

    def mix(self, q, k, v, seen):
        scores = capped(q @ k.transpose(-1, -2) * self.scale, self.cap)
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return scores.float().softmax(-1).to(q.dtype) @ v


class Feed(nn.Module):
    def __init__(self, c):
        super().__init__()
        act = getattr(c, "hidden_activation", None) or c.hidden_act
        self.act = GELU[act]
        self.gate, self.up = (
            nn.Linear(c.hidden_size, c.intermediate_size, bias=False) for _ in range(2)
        )
        self.down = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Sends each token through the experts with the highest router scores."""

    def __init__(self, c):
        super().__init__()
        experts, width, hidden = c.num_local_experts, c.hidden_size, c.intermediate_size
        self.chosen = c.num_experts_per_tok
        self.router = nn.Linear(width, experts, bias=False)
        self.into = nn.Parameter(torch.empty(experts, 2 * hidden, width))
        self.back = nn.Parameter(torch.empty(experts, width, hidden))

    def forward(self, x):
        shares, experts = self.shares(self.router(x))
        out = torch.zeros_like(x)
        for number, (into, back) in enumerate(zip(self.into, self.back, strict=True)):
            gate, up = (x @ into.T).chunk(2, -1)
            share = (shares * (experts == number)).sum(-1, keepdim=True)
            out = out + share * ((F.silu(gate) * up) @ back.T)
        return out

    def shares(self, scores):
        shares, experts = scores.softmax(-1).topk(self.chosen)
        return shares / shares.sum(-1, keepdim=True), experts


class Block(nn.Module):
    def __init__(self, c, index):
        super().__init__()
        norm = OffsetNorm if "gemma" in c.model_type else Norm
        self.norm_1, self.attention, self.norm_2 = norm(c), Attention(c, index), norm(c)
        self.feed = Experts(c) if c.model_type == "mixtral" else Feed(c)
        sandwich = c.model_type == "gemma2"
        self.norm_after_attention = norm(c) if sandwich else nn.Identity()
        self.norm_after_feed = norm(c) if sandwich else nn.Identity()

    def forward(self, x, real=None, cache=None):
        x = x + self.norm_after_attention(self.attention(self.norm_1(x), real, cache))
        return x + self.norm_after_feed(self.feed(self.norm_2(x)))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.scale = math.sqrt(c.hidden_size) if "gemma" in c.model_type else 1.0
        self.cap = getattr(c, "final_logit_softcapping", None)
        self.embedding = nn.Embedding(c.vocab_size, c.hidden_size)
        self.blocks = nn.ModuleList(Block(c, index) for index in range(c.num_hidden_layers))
        self.norm = OffsetNorm(c) if "gemma" in c.model_type else Norm(c)
        self.head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, past_key_values=None):
        x = self.embedding(tokens) * self.scale
        for block in self.blocks:
            x = block(x, attention_mask, past_key_values)
        return capped(self.head(self.norm(x)), self.cap)


def port_of(model, *parts):
    """Return the port with the weights of a model of transformers.

    Args:
        model: The original.
        *parts: Classes that replace their base class in the port.
    """
    port, weights = Decoder(model.config), {}
    second = "norm_after_attention" if model.config.model_type == "gemma2" else "norm_2"
    names = NAMES | {"post_attention_layernorm": second}
    for name, weight in model.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        weights[name] = weight
    port.load_state_dict(weights)
    replaced = {part.__base__: part for part in parts}
    for module in port.modules():
        module.__class__ = replaced.get(type(module), type(module))
    return port.to(model.dtype).eval().requires_grad_(False)
