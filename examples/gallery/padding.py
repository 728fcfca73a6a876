"""Padding that attends to nothing.

What people saw: empty answers for the shorter prompts of a batch. They are padded on the left, and
with the causal mask a padding token may see no key at all. Its softmax is NaN, and in the next
layer 0 times NaN carries that from the padding into the prompt.

https://github.com/unslothai/unsloth/pull/9848
"""

import port as ports
import torch
from original import drawn, prompt

import brickline as bl


class Attention(ports.Attention):
    """Masks with minus infinity; the original masks with the lowest finite number."""

    def mix(self, q, k, v, seen):
        scores = (q @ k.transpose(-1, -2) * self.scale).masked_fill(~seen, -torch.inf)
        return scores.softmax(-1) @ v


model = drawn("Llama")
port = ports.port_of(model, Attention)
tokens, real = prompt(), torch.ones(2, 24, dtype=torch.int64)
real[1, :6] = 0
report = bl.check(port, tokens, kwargs={"attention_mask": real}, reference=model)
print(report)
