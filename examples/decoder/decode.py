"""Decode a few tokens with every executor there is, and hold their bits to each other."""

from llama import mine, stock

import brickline as bl

ways = [("CPU", "serial"), ("CPU", "parallel")]
try:
    ways += [(bl.open_device("CUDA:0").name, executor) for executor in ("serial", "graph")]
except bl.BricklineError as error:
    print(f"CPU alone: {error}")

expected = None
for device, executor in ways:
    decoding = stock(device, executor)
    tokens = decoding.generate([1, 2, 3], 8)
    bits = decoding.logits().tobytes()
    expected = expected or bits
    print(device, executor, tokens, "same bits" if bits == expected else "OTHER BITS")
print("mine      ", mine().generate([1, 2, 3], 8))
