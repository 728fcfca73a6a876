"""A sliding window that is one token too wide.

What people saw: four models attended to one token too many, which only prompts longer than the
window show. Given (W, 0), the kernel looks at W earlier tokens and at the token itself, W + 1 in
all; the configuration means W in all.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/2656
"""

import port as ports
import torch
from original import drawn, prompt

import brickline as bl


class Attention(ports.Attention):
    """Passes the configured window to a mask that does not count the token itself."""

    def seen(self, length, start, real):
        back = torch.arange(start, start + length)[:, None] - torch.arange(start + length)
        left, right = self.window, 0
        return (back <= left) & (back >= right)


model = drawn("Mistral", sliding_window=8)
port = ports.port_of(model, Attention)
report = bl.check(port, prompt(), reference=model)
print(report)
