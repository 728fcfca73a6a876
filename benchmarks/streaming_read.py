"""A kernel that only reads memory, and the device seconds of calls replayed from a graph.

What a claim about memory bandwidth is held against, in the same run. Knows nothing of what else is
measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

READ = """
extern "C" __global__ void read(const uint4* x, unsigned* y, long long n) {
    unsigned sum = 0;
    long long stride = (long long)gridDim.x * blockDim.x;
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < n; i += 4 * stride) {
        uint4 a = __ldcs(x + i), b = __ldcs(x + i + stride);
        uint4 c = __ldcs(x + i + 2 * stride), d = __ldcs(x + i + 3 * stride);
        sum ^= a.x ^ a.y ^ a.z ^ a.w ^ b.x ^ b.y ^ b.z ^ b.w;
        sum ^= c.x ^ c.y ^ c.z ^ c.w ^ d.x ^ d.y ^ d.z ^ d.w;
    }
    for (; i < n; i += stride) { uint4 a = __ldcs(x + i); sum ^= a.x ^ a.y ^ a.z ^ a.w; }
    if (sum == 0x12345678u) y[0] = sum;
}
"""


def streaming_read(cache: Any) -> Any:
    """Return the launch of the reader: words of 16 bytes, where its result goes, how many."""
    import brickline as bl

    signature = [bl.Param("x", "u32", ("n", 4)), bl.Param("y", "u32", 1, "write"), bl.Scalar("n")]
    reader = bl.Kernel(
        "read", READ, signature, global_size=132 * 8, local_size=512, language="cuda"
    )
    return cache.get_or_compile(reader, "CUDA:0").launch


def graph_seconds(torch: Any, call: Callable[[int], object], copies: int, repeats: int) -> float:
    """Median seconds of one call, from replays of a graph that goes through all copies.

    The host does not count.
    """
    for i in range(copies):
        call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(copies):
            call(i)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spent = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(end) / 1e3 / copies)
    return statistics.median(spent)
