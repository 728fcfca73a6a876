"""The norm of Llama in Gemma.

What people saw: a fused norm that was right for Llama was wrong for Gemma, which multiplies by one
plus the stored weight. Nothing in a checkpoint says so.

https://github.com/linkedin/Liger-Kernel/issues/74
"""

import port as ports
from original import drawn, prompt

import brickline as bl


class Norm(ports.OffsetNorm):
    """Multiplies by the weight as it is stored."""

    forward = ports.Norm.forward


model = drawn("Gemma")
port = ports.port_of(model, Norm)
report = bl.check(port, prompt(), reference=model)
print(report)
