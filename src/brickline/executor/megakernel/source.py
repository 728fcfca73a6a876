"""The text of a CUDA megakernel: every kernel as an op, and the worker that executes them.

Ops are numbered in the order of the kernels. Each source stands in a namespace of its own, so two
kernels may use the same names. With BRICKLINE_RACECHECK=1 in the environment it is the text that
``compute-sanitizer --tool racecheck`` can follow: see platform::arrive_together and wait_in_part.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from brickline.kernel import Kernel
from brickline.kernel_source import argument_type, exact_types, in_namespace

ENTRY = "run_megakernel"
HELPERS = 96
"""Threads of a worker that execute no items: one warp each for lists, waits and rows."""


def megakernel_source(kernels: Sequence[Kernel], consumers: int) -> str:
    """Return what NVRTC is given for a plan.

    Args:
        kernels: The ops, all written against Block.
        consumers: Threads of a worker that execute items, a multiple of 32.
    """
    threads = consumers + HELPERS
    return _unit(
        "megakernel_cuda", kernels, "mega", "MegaLaunch", threads, f"work<{consumers}, Ops>"
    )


def queue_source(kernels: Sequence[Kernel], threads: int) -> str:
    """Return what NVRTC is given for a queue.

    Args:
        kernels: The ops, all written against Block.
        threads: Of a worker, a multiple of 32.
    """
    return _unit(
        "megakernel_queue_cuda", kernels, "mega_queue", "MegaQueueLaunch", threads, "serve<Ops>"
    )


def _unit(
    header: str, kernels: Sequence[Kernel], engine: str, launch: str, threads: int, call: str
) -> str:
    sources = "".join(
        in_namespace(kernel, f"user_{number}") for number, kernel in enumerate(kernels)
    )
    cases = "\n".join(_case(kernel, number) for number, kernel in enumerate(kernels))
    defines = "#define BRICKLINE_EACH_ARRIVES\n" if os.environ.get("BRICKLINE_RACECHECK") else ""
    return f"""\
{defines}#include "brickline/{header}.h"
{sources}
namespace brickline {{

struct Ops {{
    static __device__ __forceinline__ void run(uint32_t op, Block& block, const uint64_t* words) {{
        switch (op) {{
{cases}
        }}
    }}
}};

extern "C" __global__ void __launch_bounds__({threads}, 1)
{ENTRY}(const __grid_constant__ {launch} launch) {{
    {engine}::{call}(launch);
}}

}}  // namespace brickline
"""


def _case(kernel: Kernel, number: int) -> str:
    given = ", ".join(
        f"mega::argument<{argument_type(each)}>(words[{place}])"
        for place, each in enumerate(kernel.signature)
    )
    passed = ", ".join(["block", given]) if given else "block"
    return f"""\
        case {number}: {{
        {exact_types(kernel, f"user_{number}").strip()}
            user_{number}::{kernel.entry}({passed});
            break;
        }}"""
