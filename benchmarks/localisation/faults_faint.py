"""Faults a few times as large as rounding: what a fixed tolerance cannot see."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from localisation import drives, models
from localisation.planting import change, fault, on_output

llama, gpt2, convnet = models.llama, models.gpt2, models.convnet


def faint(build, path, kind, **more):
    """Declare a faint fault of fp32."""
    return fault(build, path, kind, **{"regimes": ("same", "reordered"), **more})


@faint(llama, "layers.1.mlp.up_proj", "weights")
def output_a_millionth_larger(module, root):
    on_output(module, lambda out: out * (1 + 2e-6))


@faint(llama, "layers.0.self_attn.o_proj", "weights")
def one_weight_a_little_off(module, root):
    module.weight.data[3, 5] += 2e-4


@faint(llama, "layers.1.input_layernorm", "eps")
def eps_a_tenth(module, root):
    module.eps = 1e-6


@faint(llama, "layers.2.self_attn", "attention scale")
def scale_a_hundred_thousandth_off(module, root):
    module.scale *= 1 + 1e-5


@faint(llama, "layers.1", "residuals")
def residual_a_millionth_off(module, root):
    change(module, add=lambda self, add, x, out: x + out * (1 + 4e-6))


@faint(gpt2, "h.1.mlp.c_fc", "weights")
def bias_of_one_row_off(module, root):
    module.bias.data[9] += 2e-5


@faint(gpt2, "h.2.mlp.act", "activations")
def gelu_by_a_polynomial(module, root):
    on_output(module, lambda out: out + 2e-6 * torch.exp(-out * out))


@faint(gpt2, "ln_f", "eps")
def eps_twice(module, root):
    module.eps = 5e-5


@faint(gpt2, "h.0.attn", "masks")
def masked_scores_leak(module, root):
    def attend(self, attend, q, k, v, seen):
        scores = (q @ k.transpose(2, 3)) * self.scale
        scores = scores.masked_fill(~seen, -14.0)
        return self.attn_dropout(scores.softmax(-1)) @ v

    change(module, attend=attend)


@faint(convnet, "down", "accumulation precision", run=drives.picture)
def sum_rounded_in_between(module, root):
    def forward(self, forward, x):
        first = F.conv2d(x[:, :8], self.weight[:, :8], None, self.stride)
        last = F.conv2d(x[:, 8:], self.weight[:, 8:], self.bias, self.stride)
        scale = 2.0**14
        return (first * scale).round() / scale + last

    change(module, forward=forward)


@faint(convnet, "stage1.0.norm", "norm layers", run=drives.picture)
def variance_of_one_fewer(module, root):
    on_output(module, lambda out: out * (1 - 1e-6))


@fault(llama, "layers.1.mlp.act_fn", "stale rows", regimes=("bf16", "outliers"))
def one_element_of_the_output(module, root):
    def spoil(out):
        out = out.clone()
        out[1, 7, 30] += out.abs().max()
        return out

    on_output(module, spoil)


@fault(gpt2, "h.1.mlp.c_proj", "weights", regimes=("bf16", "outliers"))
def a_row_a_tenth_larger(module, root):
    module.weight.data[11] *= 1.15


@fault(llama, "layers.2.self_attn.v_proj", "weights", regimes=("bf16", "outliers"))
def everything_a_twentieth_larger(module, root):
    module.weight.data *= 1.05


@fault(llama, "layers.0.mlp.gate_proj", "storage precision", regimes=("bf16", "outliers"))
def four_bits_of_fraction(module, root):
    on_output(module, lambda out: out.to(torch.float8_e4m3fn).to(out.dtype))
