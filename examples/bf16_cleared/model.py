"""A small Llama-style decoder in float32, and the same weights in bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

DIM, LAYERS, HEADS, HIDDEN, VOCAB = 256, 4, 8, 688, 1024
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.output = nn.Linear(DIM, DIM, bias=False)
        self.gate, self.up = (nn.Linear(DIM, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        normed = self.attention_norm(x)
        q, k, v = (
            part(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).flatten(2))
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(DIM, eps=1e-5)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def reference():
    """The decoder in float32."""
    torch.manual_seed(0)
    return Decoder().to(DEVICE).eval().requires_grad_(False)


def candidate():
    """The same weights, rounded to bfloat16."""
    return reference().bfloat16()


def inputs():
    """Two sequences."""
    torch.manual_seed(1)
    return (torch.randint(0, VOCAB, (2, 32), device=DEVICE),)
