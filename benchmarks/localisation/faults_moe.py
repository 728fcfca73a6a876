"""Faults of mixtures and of weights held in four bits."""

from __future__ import annotations

import torch

from localisation import models
from localisation.planting import change, fault

moe, quantised = models.moe, models.quantised
FP32 = ("same", "reordered", "bf16")


# --- Routing --------------------------------------------------------------------------------------


@fault(moe, "layers.1.mlp.gate", "routing")
def shares_in_the_wrong_order(module, root):
    def choose(self, choose, shares, dtype):
        shares, chosen = choose(shares, dtype)
        return shares.flip(-1), chosen

    change(module, choose=choose)


@fault(moe, "layers.2.mlp.gate", "routing")
def shares_not_made_to_one(module, root):
    change(module, shared=lambda self, shared, shares: shares)


@fault(moe, "layers.0.mlp.gate", "routing")
def one_expert_instead_of_two(module, root):
    def choose(self, choose, shares, dtype):
        shares, chosen = choose(shares, dtype)
        return torch.cat(
            [shares[:, :1] + shares[:, 1:], torch.zeros_like(shares[:, 1:])], -1
        ), chosen

    change(module, choose=choose)


@fault(moe, "layers.1.mlp", "routing")
def sent_to_the_next_expert(module, root):
    change(module, sent=lambda self, sent, chosen: (chosen + 1) % len(self.experts))


@fault(moe, "layers.2.mlp", "routing")
def tokens_over_capacity_dropped(module, root):
    def forward(self, forward, x):
        out = forward(x).clone()
        out[:, -2:] = 0
        return out

    change(module, forward=forward)


@fault(moe, "layers.0.mlp", "routing")
def shares_squared(module, root):
    change(module, counted=lambda self, counted, out, share: counted(out, share * share))


@fault(moe, "layers.1.mlp.gate", "routing", regimes=("same", "reordered"))
def scores_in_bf16(module, root):
    def scores(self, scores, x):
        return (x.bfloat16().float() @ self.weight.bfloat16().float().t()).bfloat16().to(x.dtype)

    change(module, scores=scores)


@fault(moe, "layers.1.mlp.experts.2.up_proj", "weights")
def an_expert_with_anothers_weights(module, root):
    module.weight.data.copy_(root.layers[1].mlp.experts[0].up_proj.weight)


@fault(moe, "layers.2.mlp.experts.1.act_fn", "activations")
def an_expert_with_relu(module, root):
    change(module, forward=lambda self, forward, x: torch.relu(x))


# --- Four bits ------------------------------------------------------------------------------------


@fault(quantised, "layers.1.mlp.down_proj", "quantised weights", regimes=FP32)
def scale_of_one_group(module, root):
    module.scales[7, 3] *= 2


@fault(quantised, "layers.0.mlp.up_proj", "quantised weights", regimes=FP32)
def zero_point_of_one_group(module, root):
    module.zeros[11, 1] += 1


@fault(quantised, "layers.2.mlp.gate_proj", "quantised weights", regimes=FP32)
def nibbles_in_the_wrong_order(module, root):
    def unpacked(self, unpacked, packed):
        return torch.stack([packed >> 4, packed & 15], -1).flatten(1)

    change(module, unpacked=unpacked)


@fault(quantised, "layers.1.mlp.up_proj", "quantised weights", regimes=FP32)
def scales_of_the_next_group(module, root):
    module.scales = module.scales.roll(1, 1)


@fault(quantised, "layers.1.mlp.gate_proj", "quantised weights", regimes=FP32)
def zero_points_not_taken_off(module, root):
    module.zeros = torch.full_like(module.zeros, 8)


@fault(quantised, "layers.2.mlp.down_proj", "quantised weights", regimes=FP32)
def one_byte_of_codes(module, root):
    module.packed[5, 9] ^= 0x80
