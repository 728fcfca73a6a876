"""A residual that every rank adds.

What people saw: two GPUs diverged from one GPU, starting at the first mixture-of-experts layer.
Each rank added the residual to its partial sum, so the all-reduce counted it twice. Here two ranks
are two slices of a feed-forward in one process.

https://github.com/mirage-project/mirage/pull/722
"""

import port as ports
import torch.nn.functional as F
from original import drawn, prompt

import brickline as bl


class Block(ports.Block):
    """Splits the feed-forward over two ranks."""

    def forward(self, x, real=None, cache=None):
        x = x + self.attention(self.norm_1(x), real, cache)
        normed, feed = self.norm_2(x), self.feed
        ranks = zip(*(w.chunk(2, axis) for w, axis in self.split(feed)), strict=True)
        parts = [
            x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T for gate, up, down in ranks
        ]
        return sum(parts)

    def split(self, feed):
        return (feed.gate.weight, 0), (feed.up.weight, 0), (feed.down.weight, 1)


model = drawn("Llama")
port = ports.port_of(model, Block)
report = bl.check(port, prompt(), reference=model)
print(report)
