"""Record both sides as runs: python record.py. On two machines, each would record its own."""

from model import candidate, inputs, reference

import brickline as bl

arguments = inputs()
for name, made in (("candidate.brick", candidate()), ("reference.brick", reference())):
    with bl.record(name, made):
        made(*arguments)
    print("recorded", name)
