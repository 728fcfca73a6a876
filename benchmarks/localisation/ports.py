"""The reference models written again by other people, with the same weights.

Other names, other nesting, projections fused or split, another attention, another order. Each
computes what its reference computes. Gives the ports on; knows nothing of faults or scores.
"""

from __future__ import annotations

from localisation.ports_flat import (
    FlatBlock,
    FlatLlama,
    OneLlama,
)
from localisation.ports_gpt import (
    Conv1D,
    ConvAttention,
    ConvFeed,
    ConvGPT,
    SplitBlock,
    SplitGPT,
)
from localisation.ports_llama import (
    Core,
    FusedAttention,
    FusedBlock,
    FusedFeed,
    FusedLlama,
    FusedNorm,
    InlineBlock,
    InlineLlama,
    NestedAttention,
    NestedFeed,
    NestedLlama,
    StackedMixture,
    Turn,
    stacked_moe,
)
from localisation.ports_vision import (
    LastBlock,
    LastNet,
    PatchBlock,
    PatchViT,
)

__all__ = [
    "Conv1D",
    "ConvAttention",
    "ConvFeed",
    "ConvGPT",
    "Core",
    "FlatBlock",
    "FlatLlama",
    "FusedAttention",
    "FusedBlock",
    "FusedFeed",
    "FusedLlama",
    "FusedNorm",
    "InlineBlock",
    "InlineLlama",
    "LastBlock",
    "LastNet",
    "NestedAttention",
    "NestedFeed",
    "NestedLlama",
    "OneLlama",
    "PatchBlock",
    "PatchViT",
    "SplitBlock",
    "SplitGPT",
    "StackedMixture",
    "Turn",
    "stacked_moe",
]
