"""What the demo's model is made of: its shape, its random weights, and how it draws a token.

Checked when it is made, and never changed. It knows nothing of the forward pass or a profiler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.errors import UsageError

Floats: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model; the defaults give bricks of some tens of microseconds on a CPU.

    Raises:
        UsageError: if a size is not positive, or two sizes do not divide as they must.
    """

    dim: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 4
    """Heads of the cache; ``heads / kv_heads`` query heads share each."""
    hidden: int = 688
    vocab: int = 4096
    capacity: int = 2048
    """Positions that the KV cache holds, allocated at the start."""
    rope_theta: float = 10_000.0
    norm_epsilon: float = 1e-5
    head_tile_rows: int = 512
    """Vocabulary entries in one tile of the LM head."""
    head_tile_columns: int = 128
    """Model dimensions in one tile of the LM head."""
    seed: int = 0
    """Seed of the weights."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "seed" and not value > 0:
                raise UsageError(f"Expected a positive {field.name}, got {value}")
        for whole, part in (("dim", "heads"), ("heads", "kv_heads")):
            if getattr(self, whole) % getattr(self, part):
                raise UsageError(
                    f"Expected {whole} to be a multiple of {part}, "
                    f"got {whole}={getattr(self, whole)} and {part}={getattr(self, part)}"
                )
        if self.head_dim % 2:
            raise UsageError(
                f"Expected an even head size, which RoPE rotates in pairs, got "
                f"dim/heads={self.head_dim}"
            )

    @property
    def head_dim(self) -> int:
        """Values in one head."""
        return self.dim // self.heads

    @property
    def kv_dim(self) -> int:
        """Values that one position adds to the keys of one layer, and to its values."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is drawn: from the ``top_k`` best, or greedily at temperature 0."""

    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UsageError(f"Expected a temperature of 0 or more, got {self.temperature}")
        if self.top_k < 1:
            raise UsageError(f"Expected top_k of at least 1, got {self.top_k}")


@dataclass(frozen=True)
class LayerWeights:
    """One layer; every matrix is (outputs, inputs)."""

    attention_norm: Floats
    qkv: Floats
    output: Floats
    mlp_norm: Floats
    gate: Floats
    up: Floats
    down: Floats


@dataclass(frozen=True)
class Weights:
    """All parameters of the model."""

    embedding: Floats
    layers: tuple[LayerWeights, ...]
    final_norm: Floats
    head: Floats

    @classmethod
    def random(cls, config: ModelConfig) -> Weights:
        """Draw weights that keep the variance of activations near one through any depth."""
        c, rng = config, np.random.default_rng(config.seed)

        def matrix(outputs: int, inputs: int, gain: float = 1.0) -> Floats:
            drawn = rng.standard_normal((outputs, inputs), dtype=np.float32)
            return drawn * np.float32(gain / math.sqrt(inputs))

        def norm() -> Floats:
            return np.float32(1.0) + np.float32(0.1) * rng.standard_normal(c.dim, dtype=np.float32)

        # Each layer adds to the residual twice; this gain keeps the sum of all of them near one.
        residual_gain = 1 / math.sqrt(2 * c.layers)
        return cls(
            embedding=rng.standard_normal((c.vocab, c.dim), dtype=np.float32),
            layers=tuple(
                LayerWeights(
                    attention_norm=norm(),
                    qkv=matrix(c.dim + 2 * c.kv_dim, c.dim),
                    output=matrix(c.dim, c.dim, residual_gain),
                    mlp_norm=norm(),
                    gate=matrix(c.hidden, c.dim),
                    up=matrix(c.hidden, c.dim),
                    down=matrix(c.dim, c.hidden, residual_gain),
                )
                for _ in range(c.layers)
            ),
            final_norm=norm(),
            head=matrix(c.vocab, c.dim),
        )
