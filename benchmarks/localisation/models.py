"""The reference models: small, with random weights of realistic size, torch only.

Names follow the libraries in which each architecture is known. Makes the models and gives their
classes on; knows nothing of faults, ports or scores.
"""

from __future__ import annotations

from localisation.models_gpt import (
    GPT2,
    GPTAttention,
    GPTBlock,
    GPTFeed,
)
from localisation.models_llama import (
    Attention,
    BufferedAttention,
    Cache,
    CacheAttention,
    GrowingAttention,
    Llama,
    LlamaLayer,
    Mixture,
    QuantLinear,
    RMSNorm,
    Rotary,
    Router,
    SwiGLU,
    rotated,
)
from localisation.models_vision import (
    ConvBlock,
    ConvNet,
    Squeeze,
    ViT,
    ViTAttention,
    ViTBlock,
)
from localisation.sizes import SIZE, WIDE, Size, weigh

__all__ = [
    "GPT2",
    "SIZE",
    "WIDE",
    "Attention",
    "BufferedAttention",
    "Cache",
    "CacheAttention",
    "ConvBlock",
    "ConvNet",
    "GPTAttention",
    "GPTBlock",
    "GPTFeed",
    "GrowingAttention",
    "Llama",
    "LlamaLayer",
    "Mixture",
    "QuantLinear",
    "RMSNorm",
    "Rotary",
    "Router",
    "Size",
    "Squeeze",
    "SwiGLU",
    "ViT",
    "ViTAttention",
    "ViTBlock",
    "convnet",
    "gpt2",
    "llama",
    "moe",
    "quantised",
    "rotated",
    "vit",
    "weigh",
]


def llama(
    cache: str = "none", *, size: Size = SIZE, seed: int = 1, outliers: bool = False
) -> Llama:
    """Return a Llama; `cache` is none, buffers, growing or argument."""
    kinds = {
        "none": Attention,
        "buffers": BufferedAttention,
        "growing": GrowingAttention,
        "argument": CacheAttention,
    }
    model = Llama(size, kinds[cache])
    weigh(model, seed, outliers)
    return model


def moe(*, size: Size = SIZE, seed: int = 2, outliers: bool = False) -> Llama:
    """Return a Llama whose feed-forwards are mixtures."""
    model = Llama(size, feed=Mixture)
    weigh(model, seed, outliers)
    return model


def quantised(*, seed: int = 3, outliers: bool = False) -> Llama:
    """Return a Llama whose feed-forwards are held in four bits."""
    model = llama(seed=seed, outliers=outliers)
    for layer in model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, QuantLinear(getattr(layer.mlp, name)))
    return model


def gpt2(*, size: Size = SIZE, seed: int = 4, outliers: bool = False) -> GPT2:
    """Return a GPT-2."""
    model = GPT2(size)
    weigh(model, seed, outliers)
    return model


def convnet(*, seed: int = 5, outliers: bool = False) -> ConvNet:
    """Return a network of convolutions."""
    model = ConvNet()
    weigh(model, seed, outliers)
    return model


def vit(*, seed: int = 6, outliers: bool = False) -> ViT:
    """Return a vision transformer."""
    model = ViT()
    weigh(model, seed, outliers)
    return model
