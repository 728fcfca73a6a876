"""How long the first question of a check takes: are the weights of two models the same?

Two models with the shapes of a Llama of 1.5 G parameters in bfloat16, on the GPU where there is
one: with the same names, with fused and renamed weights, and with the norms folded in.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

from brickline.checking.state.question import ask_state

NAMES = ("q", "k", "v", "o", "gate", "up", "down", "n1", "n2")


class Weights(nn.Module):
    """Holds tensors; computes nothing."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def reference(layers: int, width: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return weights by the names of one code base."""

    def drawn(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(shape, device=device)).bfloat16()

    tensors = {"embed": drawn(16 * width, width), "norm": 1 + drawn(width)}
    for layer in range(layers):
        for name in ("q", "k", "v", "o"):
            tensors[f"l{layer}_{name}"] = drawn(width, width)
        for name in ("gate", "up"):
            tensors[f"l{layer}_{name}"] = drawn(4 * width, width)
        tensors[f"l{layer}_down"] = drawn(width, 4 * width)
        for name in ("n1", "n2"):
            tensors[f"l{layer}_{name}"] = 1 + 5 * drawn(width)
    return tensors


def fused(of: dict[str, torch.Tensor], layers: int, *, folded: bool) -> dict[str, torch.Tensor]:
    """Return the weights as another code base holds them."""
    tensors = {"wte": of["embed"].clone(), "last": of["norm"].clone()}
    for layer in range(layers):
        own = {name: of[f"l{layer}_{name}"] for name in NAMES}
        first, second = (own[name].float() if folded else 1.0 for name in ("n1", "n2"))
        tensors[f"h{layer}_qkv"] = (torch.cat([own[n] for n in "qkv"]) * first).bfloat16()
        tensors[f"h{layer}_w13"] = (torch.cat([own["gate"], own["up"]]) * second).bfloat16()
        tensors[f"h{layer}_o"], tensors[f"h{layer}_w2"] = own["o"].clone(), own["down"].clone()
        if not folded:
            tensors[f"h{layer}_n1"], tensors[f"h{layer}_n2"] = own["n1"].clone(), own["n2"].clone()
    return tensors


def main() -> None:
    """Print the time of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    tensors = reference(options.layers, options.width, device)
    total = sum(tensor.numel() for tensor in tensors.values())
    print(f"{total / 1e9:.2f} G parameters on {device}")
    sides = {
        "same names": {name: tensor.clone() for name, tensor in tensors.items()},
        "fused": fused(tensors, options.layers, folded=False),
        "folded": fused(tensors, options.layers, folded=True),
    }
    for name, side in sides.items():
        for turn in ("first", "second"):
            begun = time.perf_counter()
            state = ask_state(Weights(side), Weights(tensors))
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - begun
            print(f"{name}, {turn}: {seconds:.3f} s: {state.line}")
        if device.type == "cuda":
            print(f"  at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
