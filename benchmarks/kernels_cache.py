"""Claims: what finding and launching a compiled kernel costs, and what a warm start saves.

* A hit in memory at most 25 clock calls; a launch on the CPU, arguments checked, at most 3 bare
  ctypes calls.
* A process with a warm cache of 50 kernels starts no compiler and takes at most a tenth of the cold
  time, on the CPU and on CUDA where there is one. Beside it: tinygrad (needs clang) and Triton
  (needs CUDA), each with a warm cache of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
from harness import Claim, Statement

KERNELS = 50
CLOCK = "one time.perf_counter_ns()"
CTYPES = "a bare ctypes call, arguments prepared"
SEED = 20253

SOURCE = """
BRICKLINE void scale(Block& block, float* x, int64_t n, float by) {
    const int64_t first = block.index() * 1024, left = n - first;
    block.each(left < 1024 ? left : 1024, [&](int64_t i) { x[first + i] *= by + NUMBER; });
}
"""


def scale(number: int) -> Any:
    """A small kernel; each number is another one."""
    import brickline as bl

    return bl.Kernel(
        "scale",
        SOURCE,
        [bl.Param("x", "f32", "n", "read-write"), bl.Scalar("n", low=1), bl.Scalar("by", "f32")],
        global_size="ceil_div(n, 1024)",
        defines={"NUMBER": number},
    )


# --- In memory ------------------------------------------------------------------------------------


def worker(number: int, quick: bool) -> dict[str, list[float]]:
    """One process: nanoseconds of every statement, one value per repeat."""
    import ctypes

    import numpy as np

    import brickline as bl

    with tempfile.TemporaryDirectory() as directory, harness.quiet():
        cache, kernel = bl.KernelCache(directory), scale(0)
        cached = cache.get_or_compile(kernel)
        array = np.ones(1, np.float32)
        names = {
            "cache": cache,
            "kernel": kernel,
            "launch": cached.launch,
            "buffer": bl.as_buffer(array),
            "array": array,
            "now": time.perf_counter_ns,
            "bare": _bare_call(ctypes),
        }
        statements = [
            Statement(CLOCK, "now()", names=names),
            Statement(CTYPES, "bare()", names=names),
            Statement("hit", 'cache.get_or_compile(kernel, "CPU")', names=names),
            Statement("launch", "launch(buffer, 1, 1.0)", names=names),
            Statement("launch by name", "launch(x=buffer, n=1, by=1.0)", names=names),
            Statement("launch of a NumPy array", "launch(array, 1, 1.0)", names=names),
        ]
        return harness.hot_loop(statements, repeats=5 if quick else 15, seed=SEED + number)


def _bare_call(ctypes: Any) -> Any:
    """A C function of three arguments that does nothing, with its arguments bound beforehand."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "nothing.so"
        command = ["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
        source = b"void nothing(float* x, long long n, float by) {}"
        subprocess.run(command, input=source, check=True)
        function = ctypes.CDLL(str(path)).nothing
    function.argtypes, function.restype = None, None
    value = (ctypes.c_float * 1)()
    arguments = (ctypes.c_void_p(ctypes.addressof(value)), ctypes.c_int64(1), ctypes.c_float(1))
    from functools import partial

    return partial(function, *arguments)


def in_memory(quick: bool) -> list[Claim]:
    """The hit and the launch."""
    answers = harness.in_processes(__file__, ["--quick"] if quick else [], 1 if quick else 3)

    def ratio(name: str, unit: str) -> float:
        return statistics.median(
            statistics.median(
                cost / base for cost, base in zip(answer[name], answer[unit], strict=True)
            )
            for answer in answers
        )

    def ns(name: str) -> float:
        return statistics.median(statistics.median(answer[name]) for answer in answers)

    return [
        Claim(
            "kernels: a hit in memory",
            ratio("hit", CLOCK),
            f"of {CLOCK}",
            25,
            note=f"{ns('hit'):.0f} ns of {ns(CLOCK):.0f} ns",
        ),
        Claim(
            "kernels: a launch on the CPU",
            ratio("launch", CTYPES),
            f"of {CTYPES}",
            3,
            {name: ratio(name, CTYPES) for name in ("launch by name", "launch of a NumPy array")},
            f"{ns('launch'):.0f} ns of {ns(CTYPES):.0f} ns",
        ),
    ]


# --- Warm start -----------------------------------------------------------------------------------

OURS = """
import json, sys, time
sys.path.insert(0, {here!r})
import kernels_cache
import brickline as bl
device, directory = sys.argv[1:]
bl.open_device(device)
begin = time.perf_counter()
cache = bl.KernelCache(directory)
for number in range(kernels_cache.KERNELS):
    cache.get_or_compile(kernels_cache.scale(number), device)
print(json.dumps([time.perf_counter() - begin, cache.statistics.compilations]))
"""
TRITON = """
import json, sys, time
sys.path.insert(0, {here!r})
import torch, triton_nothing
x = torch.zeros(16, device="cuda")
torch.cuda.synchronize()
begin = time.perf_counter()
for number in range({kernels}):
    triton_nothing.numbered[(1,)](x, x, 16, NUMBER=number)
torch.cuda.synchronize()
print(json.dumps([time.perf_counter() - begin, 0]))
"""
TINYGRAD = """
import json, time
from tinygrad import Tensor
x = Tensor.ones(16, device="CPU").contiguous().realize()
begin = time.perf_counter()
for number in range({kernels}):
    (x * float(number + 2) + float(number)).contiguous().realize()
print(json.dumps([time.perf_counter() - begin, 0]))
"""


def _cold_and_warm(
    script: str, arguments: list[str], environment: dict[str, str], repeats: int
) -> tuple[float, float, int]:
    """Seconds of the first process, median of later ones, and compilations of the last."""

    def once() -> tuple[float, int]:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip().splitlines()[-1])
        seconds, compilations = json.loads(done.stdout.splitlines()[-1])
        return seconds, compilations

    cold, _ = once()
    warm = [once() for _ in range(repeats)]
    return cold, statistics.median(seconds for seconds, _ in warm), warm[-1][1]


def warm_start(device: str, quick: bool) -> Claim:
    """Cold and warm start of a process with `KERNELS` kernels."""
    repeats = 2 if quick else 5
    here = str(Path(__file__).parent)
    directory = Path(tempfile.mkdtemp())
    try:
        cold, warm, compilations = _cold_and_warm(
            OURS.format(here=here), [device, str(directory / "ours")], {}, repeats
        )
        peers: dict[str, float | None] = {}
        others = {
            "tinygrad, warm over cold": (TINYGRAD, {"CACHEDB": str(directory / "tiny.db")}),
            "Triton, warm over cold": (TRITON, {"TRITON_CACHE_DIR": str(directory / "triton")}),
        }
        note = f"cold {cold:.2f} s, warm {warm * 1e3:.0f} ms, {compilations} compilations when warm"
        for name, (script, environment) in others.items():
            if ("tinygrad" in name) != (device == "CPU"):
                continue
            text = script.replace("{here!r}", repr(here)).replace("{kernels}", str(KERNELS))
            try:
                its_cold, its_warm, _ = _cold_and_warm(text, [], environment, repeats)
            except RuntimeError as error:
                peers[name] = None
                note += f"; {name}: absent ({error})"
            else:
                peers[name] = its_warm / its_cold
                note += f"; {name.split(',')[0]} {its_cold:.2f} s and {its_warm * 1e3:.0f} ms"
        figure = warm / cold if compilations == 0 else None
        return Claim(
            f"kernels: warm start of {KERNELS} kernels on {device}",
            figure,
            "of the cold time",
            0.1,
            peers,
            note,
        )
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure and state the claims."""
    claims = [*in_memory(quick), warm_start("CPU", quick)]
    if _has_cuda():
        claims.append(warm_start("CUDA:0", quick))
    return [claim.as_dict() for claim in claims]


def _has_cuda() -> bool:
    from brickline import open_device
    from brickline.errors import DeviceError

    try:
        open_device("CUDA:0")
    except DeviceError:
        return False
    return True


if __name__ == "__main__":
    raise SystemExit(harness.main(run, worker, __doc__))
