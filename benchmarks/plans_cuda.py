"""Claims: a plan on a GPU costs no more than what one would write by hand.

* `graph` with a variable that changes at every replay, against a CUDA graph captured by hand from
  the same kernels, in which nothing can change: at most 1.1 of its time, instantiated once.
* `serial`, host time of a launch in bursts, against CuPy's: at most 0.6. Listed beside: a loop over
  `CachedKernel.launch`, and one of `cuLaunchKernel` in C, which is the driver's own part.

Skipped where torch sees no CUDA device.
"""

from __future__ import annotations

import ctypes
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import harness
from harness import Claim
from kernels_cuda import NOTHING

import brickline as bl
from brickline.decoder import Decoder
from brickline.decoder_weights import DecoderConfig, random_weights
from brickline.plan import Plan
from brickline.plan_buffers import PlanBuffer
from brickline.symbolic import Expr

BURST = 200
CONFIG = DecoderConfig(
    vocabulary=8192, dim=1024, hidden=2816, layers=8, heads=16, kv_heads=4, head_dim=64
)
CUPY_NOTHING = """
extern "C" __global__ void nothing(const float* x, float* y, long long n) {
    if (n < 0) y[0] = x[0];
}
"""

DRIVER_LOOP = """
using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                       void*, void**, void**);
extern "C" int burst(Launch launch, void* function, void* stream, void** arguments, int count) {
    int code = 0;
    for (int k = 0; k < count; ++k)
        code |= launch(function, 1, 1, 1, 128, 1, 1, 0, stream, arguments, nullptr);
    return code;
}
"""


def _times(torch: Any, call: Callable[[int], object], repeats: int, number: int) -> float:
    """Return the median seconds of a call in rounds that end with a sync."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for k in range(number):
            call(k)
        torch.cuda.synchronize()
        found.append((time.perf_counter() - began) / number)
    return statistics.median(found)


def by_hand(torch: Any, plan: Plan, prepared: Any) -> Any:
    """Return a CUDA graph captured from the same kernels over the same memory."""
    cache, buffers = bl.KernelCache(), prepared.buffers
    calls = []
    for launch in plan.launches:
        values = {}
        for declared, given in zip(launch.kernel.signature, launch.arguments, strict=True):
            if isinstance(given, PlanBuffer):
                whole = buffers[given.name]
                given = bl.Buffer.at_address(
                    whole.address + given.offset, given.shape, given.dtype, kind=2, owner=whole
                )
            elif isinstance(given, Expr):
                given = given.evaluate({"position": 64})
            values[declared.name] = given
        calls.append((cache.get_or_compile(launch.kernel, "CUDA:0").launch, values))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call, values in calls:
            call(**values)
    return graph


def replaying(torch: Any, repeats: int) -> dict[str, Any]:
    """A graph of ours beside one made by hand."""
    decoder = Decoder(CONFIG)
    prepared = decoder.prepare(random_weights(CONFIG), "CUDA:0", "graph").prepared
    graph = by_hand(torch, decoder.plan, prepared)
    before = prepared._core.graph_facts()["instantiations"]
    ours, theirs = [], []
    for _ in range(repeats):
        ours.append(_times(torch, lambda k: prepared(position=k % CONFIG.capacity), 1, 400))
        theirs.append(_times(torch, lambda k: graph.replay(), 1, 400))
    made = prepared._core.graph_facts()["instantiations"] - before
    mine, hand = statistics.median(ours), statistics.median(theirs)
    return Claim(
        "plans: graph replay with a variable changed each time",
        statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        "of a graph captured by hand",
        1.1,
        {"captured by hand, nothing changes": 1.0},
        f"{len(decoder.plan.launches)} launches, {mine * 1e6:.1f} and {hand * 1e6:.1f} us each; "
        f"{made} instantiations meanwhile",
    ).as_dict()


def driver_loop(function: int, stream: int, values: list[Any]) -> Callable[[], object] | None:
    """Return a burst of bare launches from C, where there is a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/burst.so"
        command = [compiler, "-O2", "-shared", "-fPIC", "-x", "c++", "-", "-o", path]
        subprocess.run(command, input=DRIVER_LOOP, text=True, check=True)
        burst = ctypes.CDLL(path).burst
    launch = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuLaunchKernel, ctypes.c_void_p)
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))

    def call() -> None:
        code = burst(launch, ctypes.c_void_p(function), ctypes.c_void_p(stream), pointers, BURST)
        assert code == 0, code

    return call


def launching(torch: Any, repeats: int) -> dict[str, Any]:
    """Host time of a launch in bursts into an idle stream."""
    signature = [bl.Param("x", "f32", "n"), bl.Param("y", "f32", "n", "write"), bl.Scalar("n")]
    kernel = bl.Kernel("nothing", NOTHING, signature, local_size=128)
    plan = Plan("nothing")
    x, y = plan.buffer("x", 16, "f32"), plan.buffer("y", 16, "f32")
    for _ in range(BURST):
        plan.launch(kernel, x=x, y=y, n=16)
    prepared = plan.prepare("CUDA:0")
    launch = bl.KernelCache().get_or_compile(kernel, "CUDA:0").launch
    bx, by = prepared.buffers["x"], prepared.buffers["y"]

    def one_by_one() -> None:
        for _ in range(BURST):
            launch(bx, by, 16)

    ways: dict[str, Callable[[], object]] = {"brickline": prepared, "CachedKernel": one_by_one}
    try:
        import cupy

        theirs = cupy.RawKernel(CUPY_NOTHING, "nothing")
        cx, cy = cupy.zeros(16, cupy.float32), cupy.zeros(16, cupy.float32)

        def with_cupy() -> None:
            for _ in range(BURST):
                theirs((1,), (128,), (cx, cy, 16))

        ways["CuPy"] = with_cupy
        words = [ctypes.c_uint64(cx.data.ptr), ctypes.c_uint64(cy.data.ptr), ctypes.c_int64(16)]
        with_cupy()
        stream = cupy.cuda.get_current_stream().ptr
        bare = driver_loop(theirs.kernel.ptr, stream, words)
        if bare is not None:
            ways["cuLaunchKernel in C"] = bare
    except ImportError:
        pass
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            way()
            found[name].append((time.perf_counter() - began) / BURST)
    micros = {name: 1e6 * statistics.median(times) for name, times in found.items()}
    peer = micros.get("CuPy")
    shown = ", ".join(f"{name} {value:.2f} us" for name, value in micros.items())
    return Claim(
        "plans: serial host time of a launch, bursts into an idle stream",
        None if peer is None else micros["brickline"] / peer,
        "of CuPy's",
        0.6,
        {name: None if peer is None else value / peer for name, value in micros.items()},
        shown,
    ).as_dict()


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every claim of this file."""
    torch = harness.torch_with_cuda()
    if torch is None:
        return harness.not_measured("plans_cuda", harness.NO_GPU)
    repeats = 5 if quick else 15
    return [replaying(torch, repeats), launching(torch, 5 * repeats)]


if __name__ == "__main__":
    raise SystemExit(harness.main(run, None, __doc__))
