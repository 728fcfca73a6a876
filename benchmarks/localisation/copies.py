"""Parts of which ports are made: layers with the weights of other layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def linear(*weights: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return one linear layer that holds these weights below each other."""
    weight = torch.cat([each.detach() for each in weights])
    out = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        out.weight.copy_(weight)
        if bias is not None:
            out.bias.copy_(bias)
    return out


def norm_like(of: nn.LayerNorm) -> nn.LayerNorm:
    """Return a copy of a norm."""
    out = nn.LayerNorm(of.normalized_shape, eps=of.eps)
    out.load_state_dict(of.state_dict())
    return out


class Residual(nn.Module):
    """Adds what a normed inner module makes."""

    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.pre, self.fn = norm, inner

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        return self.fn(self.pre(x), **more) + x
