"""A small decoder with nine norms: PyTorch's in `reference`, hand-written in `candidate`."""

import torch
import torch.nn.functional as F
from kernels import rms_norm
from torch import nn

DIM, NARROW, LAYERS, HEADS, VOCAB = 256, 200, 4, 8, 512
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TorchNorm(nn.RMSNorm):
    """PyTorch's."""


class KernelNorm(nn.RMSNorm):
    """The hand-written kernel."""

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


class Layer(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.attention_norm, self.mlp_norm = norm(DIM, eps=1e-5), norm(DIM, eps=1e-5)
        self.qkv, self.output = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.mlp_norm(x))))


class Decoder(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer(norm) for _ in range(LAYERS))
        self.narrow = nn.Linear(DIM, NARROW)
        self.final_norm = norm(NARROW, eps=1e-5)
        self.head = nn.Linear(NARROW, VOCAB)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final_norm(self.narrow(x)))


def made(norm):
    """Draw the same weights for either norm."""
    torch.manual_seed(0)
    return Decoder(norm).to(DEVICE).eval().requires_grad_(False)


def reference():
    """The decoder as it should be."""
    return made(TorchNorm)


def candidate():
    """The decoder with the new kernel in it."""
    return made(KernelNorm)


def inputs():
    """Two sequences."""
    torch.manual_seed(1)
    return (torch.randint(0, VOCAB, (2, 24), device=DEVICE),)
