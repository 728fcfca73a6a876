"""A decoder of x-transformers with the weights of a Llama."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import x_transformers
from einops import rearrange
from torch import nn

LAYERS, WIDTH, HEADS, GROUPS, HEAD, INNER, VOCABULARY = 3, 64, 4, 2, 16, 160, 200
THETA = 500000.0
ROTARY = "net.attn_layers.rotary_pos_emb"


class Norm(x_transformers.x_transformers.RMSNorm):
    """The norm of x-transformers, in float32 where the weights are narrower."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised states."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return super().forward(x.to(wide)).to(x.dtype)


class Port(nn.Module):
    """The port; keeps the frequencies of the rotary embedding in float32."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.wide_angles = True

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        rotary = self.get_submodule(ROTARY)
        before = rotary.inv_freq
        super()._apply(fn, recurse)
        if self.wide_angles and rotary.inv_freq.dtype.itemsize < 4:
            rotary.inv_freq = before
        return self

    def new_cache(self, batch: int) -> dict[str, Any]:
        """Return an empty cache of keys and values."""
        del batch
        return {}

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        cache: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Return the logits, 0 at padding."""
        if cache is not None:
            logits, cache["last"] = self.net(
                ids,
                cache=cache.get("last"),
                input_not_include_cache=True,
                return_intermediates=True,
            )
            return logits
        if mask is None:
            return self.net(ids)
        return self.net(ids, mask=mask.bool()) * mask[..., None]


def paired(weight: torch.Tensor) -> torch.Tensor:
    """Bring the rows of a head from two halves, which Llama rotates, to neighbours."""
    return rearrange(weight, "(h t d) w -> (h d t) w", t=2, d=HEAD // 2)


def tiled(weight: torch.Tensor) -> torch.Tensor:
    """Bring the heads from groups of neighbours to groups that take every other head."""
    return rearrange(weight, "(g r d) w -> (r g d) w", g=GROUPS, d=HEAD)


def frequencies(theta: float) -> torch.Tensor:
    """Return the frequencies of the rotary embedding."""
    return 1.0 / theta ** (torch.arange(0, HEAD, 2).float() / HEAD)


def convert(net: nn.Module, port: nn.Module) -> None:
    """Load the weights of transformers' model."""
    port.token_emb.emb.weight.copy_(net.model.embed_tokens.weight)
    port.to_logits.weight.copy_(net.lm_head.weight)
    stack = port.attn_layers
    stack.rotary_pos_emb.inv_freq.copy_(frequencies(THETA))
    stack.final_norm.g.copy_(net.model.norm.weight)
    for index, layer in enumerate(net.model.layers):
        (norm, _, _), attention, _ = stack.layers[2 * index]
        norm.g.copy_(layer.input_layernorm.weight)
        source = layer.self_attn
        attention.to_q.weight.copy_(tiled(paired(source.q_proj.weight)))
        attention.to_k.weight.copy_(paired(source.k_proj.weight))
        attention.to_v.weight.copy_(source.v_proj.weight)
        attention.to_out.weight.copy_(tiled(source.o_proj.weight.T).T)
        (norm, _, _), ffn, _ = stack.layers[2 * index + 1]
        norm.g.copy_(layer.post_attention_layernorm.weight)
        gated = torch.cat([layer.mlp.up_proj.weight, layer.mlp.gate_proj.weight])
        ffn.ff[0].proj.weight.copy_(gated)
        ffn.ff[0].proj.bias.zero_()
        _down(ffn).weight.copy_(layer.mlp.down_proj.weight)


def _down(ffn: nn.Module) -> nn.Linear:
    return next(module for module in list(ffn.ff)[1:] if isinstance(module, nn.Linear))
