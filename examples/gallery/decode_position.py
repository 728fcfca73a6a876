"""Several tokens in one decode step, all at the position of the first.

What people saw: keys in the cache that were far off, beside values that were right to the bit. All
tokens of a speculative draft were rotated by the position of the first, and accepted drafts left
their keys in the cache. The prompt is right, and so is one token at a time.

https://github.com/jundot/omlx/pull/2363
"""

import port as ports
from original import drawn, prompt
from transformers import DynamicCache

import brickline as bl


class Rotary(ports.Rotary):
    """Counts up in a prompt, but not in a later step."""

    def angles(self, positions, half):
        begin = positions[0]
        return super().angles(positions if begin == 0 else begin.expand(len(positions)), half)


def decode(model):
    """Run the prompt, one token, and a draft of four tokens."""
    cache = DynamicCache()
    for tokens in prompt(1, 13).split([8, 1, 4], dim=1):
        model(tokens, past_key_values=cache)


model = drawn("Llama", use_cache=True)
port = ports.port_of(model, Rotary)
report = bl.check(port, drive=decode, reference=model)
print(report)
