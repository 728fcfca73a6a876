"""Expert weights that do not sum to one.

What people saw: a converted mixture-of-experts model started fine-tuning with gradients that were
far too large. The original divides the weights of the chosen experts by their sum; the port used
them as they came out of the softmax over all experts.

https://github.com/pytorch/torchtitan/issues/1448
"""

import port as ports
from original import drawn, prompt

import brickline as bl


class Experts(ports.Experts):
    """Leaves the softmax over all experts as it is."""

    def shares(self, scores):
        return scores.softmax(-1).topk(self.chosen)


model = drawn("Mixtral", num_local_experts=4, sliding_window=None)
port = ports.port_of(model, Experts)
report = bl.check(port, prompt(), reference=model)
print(report)
