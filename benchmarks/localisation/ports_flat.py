"""The Llama with hardly a module in it: parameters and functions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models

# --- Llama, flat: a block is one module of parameters and functions -------------------------------


class FlatBlock(nn.Module):
    """A block without a module inside."""

    def __init__(self, layer: models.LlamaLayer) -> None:
        super().__init__()
        attention, feed = layer.self_attn, layer.mlp
        for name, weight in (
            (
                "w_qkv",
                torch.cat(
                    [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
                ),
            ),
            ("w_o", attention.o_proj.weight),
            ("w_in", torch.cat([feed.up_proj.weight, feed.gate_proj.weight])),
            ("w_out", feed.down_proj.weight),
            ("g_1", layer.input_layernorm.weight),
            ("g_2", layer.post_attention_layernorm.weight),
        ):
            setattr(self, name, nn.Parameter(weight.detach().clone()))
        self.n, self.groups, self.width = attention.heads, attention.kv_heads, attention.head
        self.eps = layer.input_layernorm.eps

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x, self.g_1), angles)
        up, gate = F.linear(self.norm(x, self.g_2), self.w_in).chunk(2, -1)
        return x + F.linear(self.act(gate) * up, self.w_out)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)

    def attention(self, x: Tensor, angles: Tensor) -> Tensor:
        sizes = (self.n, self.groups, self.groups)
        parts = F.linear(x, self.w_qkv).unflatten(-1, (-1, self.width)).split(sizes, 2)
        q, k, v = (part.transpose(1, 2) for part in parts)
        q, k = self.rope(q, angles), self.rope(k, angles)
        k, v = (each.repeat_interleave(self.n // self.groups, 1) for each in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale())
        return F.linear(out.transpose(1, 2).flatten(2), self.w_o)

    def scale(self) -> float:
        return self.width**-0.5

    def rope(self, x: Tensor, angles: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        turned = torch.complex(x[..., :half].float(), x[..., half:].float())
        turned = turned * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], -1).to(x.dtype)

    def act(self, x: Tensor) -> Tensor:
        return F.silu(x)


class FlatLlama(nn.Module):
    """The Llama of parameters and functions."""

    def __init__(self, model: models.Llama) -> None:
        super().__init__()
        self.width, self.base = model.rotary_emb.head, model.rotary_emb.base
        self.table = nn.Parameter(model.embed_tokens.weight.detach().clone())
        self.stack = nn.ModuleList(FlatBlock(each) for each in model.layers)
        self.gain = nn.Parameter(model.norm.weight.detach().clone())
        self.unembed = nn.Parameter(model.lm_head.weight.detach().clone())
        self.eps = model.norm.eps

    def forward(self, ids: Tensor) -> Tensor:
        x = F.embedding(ids, self.table)
        angles = self.angles(ids.shape[1])
        for block in self.stack:
            x = block(x, angles)
        return F.linear(self.last_norm(x), self.unembed)

    def angles(self, length: int) -> Tensor:
        steps = torch.arange(0, self.width, 2).float() / self.width
        return torch.outer(torch.arange(length).float(), self.base**-steps)

    def last_norm(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.gain, self.eps)


# --- Llama, one module: not even a block ----------------------------------------------------------


class OneLlama(nn.Module):
    """The Llama as one module that loops over stacked parameters."""

    def __init__(self, model: models.Llama) -> None:
        super().__init__()
        self.size = model.size
        self.base, self.eps = model.rotary_emb.base, model.norm.eps
        self.emb = nn.Parameter(model.embed_tokens.weight.detach().clone())
        self.out = nn.Parameter(model.lm_head.weight.detach().clone())
        self.gain = nn.Parameter(model.norm.weight.detach().clone())
        for name, path in (
            ("q", "self_attn.q_proj"),
            ("k", "self_attn.k_proj"),
            ("v", "self_attn.v_proj"),
            ("o", "self_attn.o_proj"),
            ("gate", "mlp.gate_proj"),
            ("up", "mlp.up_proj"),
            ("down", "mlp.down_proj"),
            ("ln1", "input_layernorm"),
            ("ln2", "post_attention_layernorm"),
        ):
            stacked = torch.stack(
                [each.get_submodule(path).weight.detach() for each in model.layers]
            )
            setattr(self, name, nn.Parameter(stacked))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.emb[ids]
        for layer in range(self.size.layers):
            x = x + self.attention(layer, self.norm(x, self.ln1[layer]))
            h = self.norm(x, self.ln2[layer])
            x = (
                x
                + (self.act(layer, h @ self.gate[layer].T) * (h @ self.up[layer].T))
                @ self.down[layer].T
            )
        return self.norm(x, self.gain) @ self.out.T

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt((wide * wide).mean(-1, True) + self.eps)).to(x.dtype)

    def act(self, layer: int, x: Tensor) -> Tensor:
        return F.silu(x)

    def attention(self, layer: int, x: Tensor) -> Tensor:
        size = self.size
        q, k, v = (
            (x @ weight[layer].T).unflatten(-1, (-1, size.head)).transpose(1, 2)
            for weight in (self.q, self.k, self.v)
        )
        steps = torch.arange(0, size.head, 2).float() / size.head
        angles = torch.outer(torch.arange(x.shape[1]).float(), self.base**-steps).repeat(1, 2)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        q, k = models.rotated(q, cos, sin), models.rotated(k, cos, sin)
        k, v = (each.repeat_interleave(size.heads // size.kv_heads, 1) for each in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2) @ self.o[layer].T
