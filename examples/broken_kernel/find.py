"""Hold the candidate to the reference, and print which op is wrong."""

from model import candidate, inputs, reference

import brickline as bl

report = bl.check(candidate(), *inputs(), reference=reference(), repro="repro")
print(report)
