"""Rotary embedding that pairs neighbours, for weights laid out in halves.

What people saw: one or two sensible words, then nonsense. Position 0 is not rotated at all and the
next positions only slightly, so both ways of pairing agree there.

https://github.com/NeuraLegion/shainet/pull/111
"""

import port as ports
import torch
from original import drawn, prompt

import brickline as bl


class Rotary(ports.Rotary):
    """Rotates elements 0 and 1, 2 and 3, ...; the weights expect 0 and 8, 1 and 9, ..."""

    def forward(self, x, start):
        angles = self.angles(torch.arange(start, start + x.shape[-2]), x.shape[-1] // 2)
        one, two = x[..., 0::2], x[..., 1::2]
        rotated = one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()
        return torch.stack(rotated, -1).flatten(-2)


model = drawn("Llama")
port = ports.port_of(model, Rotary)
report = bl.check(port, prompt(), reference=model)
print(report)
