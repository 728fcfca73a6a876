"""The README's example: two bricks, a hundred steps, one table."""

import numpy as np

import brickline as bl

x, w = np.ones((64, 512), np.float32), np.ones((512, 512), np.float32)

profiler = bl.BrickProfiler("six lines", enabled=True)
norm, gate = profiler.brick("RmsNorm", layer=0), profiler.brick("GateProjection", layer=0)
for _ in range(100):
    with profiler.step(tokens=1, phase="decode"):
        with norm: y = x / np.sqrt((x * x).mean(-1, keepdims=True))  # noqa: E701  # fmt: skip
        with gate: y @ w  # noqa: E701  # fmt: skip
print(profiler.summary())
