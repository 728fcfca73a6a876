"""Key heads that are given to the wrong query heads.

What people saw: after a change to the code, query heads used the wrong key heads. With two key
heads for four query heads, query heads 0 and 1 share the first one; tiling gives it to 0 and 2.
All shapes are right either way.

https://github.com/apple/axlearn/pull/842 and https://github.com/ekzhang/jax-js/pull/180
"""

import port as ports
from original import drawn, prompt

import brickline as bl


class Attention(ports.Attention):
    """Repeats the row of heads, not each head."""

    def spread(self, x):
        return x.repeat(1, self.heads // self.groups, 1, 1)


model = drawn("Llama")
port = ports.port_of(model, Attention)
report = bl.check(port, prompt(), reference=model)
print(report)
