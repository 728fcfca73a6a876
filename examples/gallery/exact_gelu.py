"""The exact GELU, for weights that were trained with the tanh approximation.

What people saw: slightly wrong logits. The configuration of the first Gemma says "gelu" and means
the approximation; the two functions differ by less than 5e-4.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4661
"""

import port as ports
import torch.nn.functional as F
from original import drawn, prompt

import brickline as bl


class Feed(ports.Feed):
    """Takes "gelu" literally."""

    def forward(self, x):
        return self.down(F.gelu(self.gate(x)) * self.up(x))


model = drawn("Gemma")
port = ports.port_of(model, Feed)
report = bl.check(port, prompt(), reference=model)
print(report)
