"""How large a model is, and what weights it gets. Knows no architecture."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """How large a model is; small enough that a case takes a fraction of a second."""

    dim: int = 64
    heads: int = 4
    kv_heads: int = 2
    hidden: int = 160
    layers: int = 3
    vocab: int = 101
    length: int = 32
    experts: int = 4
    batch: int = 2

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.dim // self.heads


SIZE = Size()
WIDE = Size(dim=128, heads=8, kv_heads=2, hidden=320, layers=2)


def weigh(model: nn.Module, seed: int, outliers: bool = False) -> nn.Module:
    """Give a model random weights as trained ones are: scaled by fan-in, uneven, perhaps outliers.

    Outliers are a few channels of the norms and the embedding, 12 to 40 times the others.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            with torch.no_grad():
                weight.copy_(_drawn(module, name, weight, generator, outliers))
        for name, buffer in module.named_buffers(recurse=False):
            if name == "running_mean":
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
            elif name == "running_var":
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.4)
    return model.eval()


def _drawn(
    module: nn.Module, name: str, weight: Tensor, generator: torch.Generator, outliers: bool
) -> Tensor:
    noise = torch.randn(weight.shape, generator=generator)
    if weight.dim() == 1:
        value = 1 + 0.2 * noise if name == "weight" else 0.1 * noise
    elif isinstance(module, nn.Embedding) or name in ("cls", "places"):
        value = noise
    else:
        value = noise * (1.2 / math.sqrt(weight[0].numel()))
    if outliers and weight.dim() <= 2 and (weight.dim() == 1 or isinstance(module, nn.Embedding)):
        chosen = torch.randperm(weight.shape[-1], generator=generator)[: weight.shape[-1] // 24]
        value[..., chosen] *= 12 + 28 * torch.rand(len(chosen), generator=generator)
    return value
