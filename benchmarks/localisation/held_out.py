"""Cases that no constant was tuned on: other architectures, and ports held against ports.

They are scored like all others and in a group of their own, so that tuning to the rest shows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from localisation import drives, ports
from localisation.cases import Case, Trio
from localisation.held_out_models import (
    PortedRecurrent,
    PortedTranslator,
    recurrent,
    translation,
    translator,
    unet,
    wide_decoder,
    wide_llama,
)
from localisation.planting import change, dtype_of, fault, on_output, variant

BOTH = ("same", "bf16")


def held(build: Any, path: str, kind: str, **more: Any) -> Any:
    """Declare a fault of the group held out."""
    return fault(build, path, kind, **{"regimes": BOTH, "group": "held out", **more})


@held(translator, "decoder.1.cross", "weights", run=translation)
def cross_attends_to_itself(module, root):
    def source(self, source, x, memory):
        return torch.cat([x, memory[:, x.shape[1] :]], 1)

    change(module, source=source)


@held(translator, "encoder.0.attention", "rope", run=translation)
def distance_one_off(module, root):
    change(module, bias=lambda self, bias, q, k: bias(q, k).roll(1, 2))


@held(translator, "encoder.1", "residuals", run=translation)
def norm_before_instead_of_after(module, root):
    def forward(self, forward, x, hidden):
        h = self.norm1(x)
        x = x + self.attention(h, h, hidden)
        return x + self.feed(self.norm2(x))

    change(module, forward=forward)


@held(translator, "", "attention scale", run=translation)
def head_not_scaled(module, root):
    change(module, scaled=lambda self, scaled, x: x)


@held(translator, "feeds.2.0", "weights", port=PortedTranslator, run=translation)
def ported_feed_rows(module, root):
    module.weight.data[[3, 30]] = module.weight.data[[30, 3]]


@held(translator, "crosses.1.k_proj", "weights", port=PortedTranslator, run=translation)
def ported_cross_keys(module, root):
    module.bias.data += 0.3
    module.weight.data[5] *= -1


@held(translator, "mixers.1", "rope", port=PortedTranslator, run=translation)
def ported_table_reversed(module, root):
    change(module, shift=lambda self, shift, queries, keys: shift(queries, keys).flip(2))


@held(recurrent, "cells.1", "KV cache", run=drives.decode, position=3)
def state_stops_at_step_three(module, root):
    def forward(self, forward, x):
        self.calls = 0 if x.shape[1] > 1 else self.calls + 1
        before = self.memory
        out = forward(x)
        if self.calls >= 3:
            self.memory = before
        return out

    module.calls = 0
    module.state = ("memory", "calls")
    change(module, forward=forward)


@held(recurrent, "cells.0", "activations", run=drives.decode)
def gates_exchanged(module, root):
    change(module, step=lambda self, step, memory, keep, new: step(memory, 1 - keep, new))


@held(recurrent, "cells.2.read", "tails", run=drives.decode, position=1)
def read_tail_in_decode(module, root):
    def forward(self, forward, x):
        return (
            forward(x) if x.shape[1] > 1 else F.linear(x[..., :-6], self.weight[:, :-6], self.bias)
        )

    change(module, forward=forward)


@held(recurrent, "body.1", "KV cache", port=PortedRecurrent, run=drives.decode, position=2)
def ported_state_of_the_other_row(module, root):
    def mix(self, mix, h, new, keep):
        self.steps = self.steps + 1 if self.kept else 0
        return mix(h.flip(0) if self.steps >= 2 else h, new, keep)

    module.steps = 0
    module.state = ("kept", "steps")
    change(module, mix=mix)


@held(recurrent, "body.0.project", "weights", port=PortedRecurrent, run=drives.decode)
def ported_projection_row(module, root):
    module.weight.data[60] *= 1.5


@held(unet, "up", "conv layers", run=drives.picture)
def transposed_kernel_flipped(module, root):
    module.weight.data = module.weight.data.flip(2)


@held(unet, "", "conv layers", run=drives.picture)
def corners_aligned(module, root):
    def coarse(self, coarse, image):
        small = F.avg_pool2d(image, 2)
        return F.interpolate(small, scale_factor=2, mode="bilinear", align_corners=True)

    change(module, coarse=coarse)


@held(unet, "middle.0", "conv layers", run=drives.picture)
def one_border_lost(module, root):
    on_output(module, lambda out: F.pad(out[..., :-1], (0, 1)))


@held(wide_llama, "h.1", "head mapping", port=ports.InlineLlama, against=ports.FusedLlama)
def wide_groups_rolled(module, root):
    change(
        module, attention=lambda self, attention, q, k, v, mask: attention(q, k.roll(1, 2), v, mask)
    )


@held(
    wide_llama,
    "blocks.0.ffn.w13",
    "storage precision",
    port=ports.FusedLlama,
    against=ports.FlatLlama,
)
def wide_eight_bits(module, root):
    module.weight.data = module.weight.data.to(torch.float8_e4m3fn).to(module.weight.dtype)


@held(wide_llama, "stack.1", "norm layers", port=ports.FlatLlama, against=ports.NestedLlama)
def wide_norm_without_weight(module, root):
    module.g_2.data.fill_(1)


@held(
    wide_llama,
    "transformer.blocks.1.1.pre",
    "norm layers",
    port=ports.NestedLlama,
    against=ports.InlineLlama,
)
def wide_norm_of_the_largest(module, root):
    def forward(self, forward, x):
        return x / x.abs().amax(-1, keepdim=True) * self.scale

    change(module, forward=forward)


@held(
    wide_decoder,
    "transformer.blocks.0.0.fn",
    "KV cache",
    port=ports.NestedLlama,
    against=ports.FusedLlama,
    run=drives.decode,
    position=2,
)
def wide_oldest_value_lost(module, root):
    def keep(self, keep, key, value):
        key, value = keep(key, value)
        if key.shape[2] < 7:
            return key, value
        return key, torch.cat([torch.zeros_like(value[:, :, :1]), value[:, :, 1:]], 2)

    change(module, keep=keep)


def cases() -> Iterator[Case]:
    """Yield what is harmless; the faults are declared with all others."""
    plain = (
        ("translator ported", translator, PortedTranslator, None, translation),
        ("recurrent ported", recurrent, PortedRecurrent, None, drives.decode),
        ("unet", unet, None, None, drives.picture),
        ("inline against fused", wide_llama, ports.InlineLlama, ports.FusedLlama, drives.text),
        ("nested against fused", wide_decoder, ports.NestedLlama, ports.FusedLlama, drives.decode),
    )
    for name, build, port, against, run in plain:
        for regime in ("same", "reordered") if port is None else BOTH:

            def make(b: Any = build, p: Any = port, a: Any = against, r: str = regime) -> Trio:
                return variant(b, r, port=p, against=a)

            yield Case(
                f"held.{name}/{regime}", "held out", name, regime, make, run, dtype_of(regime)
            )
