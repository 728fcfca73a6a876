"""An attention backend that drops the soft-cap.

What people saw: attention outputs with a cosine of 0.59 to the right ones, and no error. The cap
was passed with the call, which accepts and ignores it; the kernel needs it earlier, when it is
planned.

https://github.com/sgl-project/sglang/issues/33915
"""

import port as ports
import torch.nn.functional as F
from original import drawn, prompt

import brickline as bl


class Attention(ports.Attention):
    """Calls a fused kernel without a cap."""

    def mix(self, q, k, v, seen):
        return F.scaled_dot_product_attention(q, k, v, seen, scale=self.scale)


model = drawn("Gemma2", query_pre_attn_scalar=16)
for layer in model.model.layers:
    layer.self_attn.q_proj.weight.mul_(40)  # trained scores are large enough to be capped
port = ports.port_of(model, Attention)
report = bl.check(port, prompt(), reference=model)
print(report)
