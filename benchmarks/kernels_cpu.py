"""The kernels that ship, on one CPU core at the shapes of a decode step, against NumPy and torch.

Claims: at most 1.5 times NumPy in float32, and at most 1.5 times single-thread torch in bfloat16.
Peers do the same computation on the same arrays; where a result needs several of their calls, all
of them count. Run with ``python benchmarks/kernels_cpu.py``.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Claim, Statement

import brickline as bl
from brickline import Kernel
from brickline.dtypes import dtype_of
from brickline.kernels.catalog import gemv, residual, rms_norm, silu_gate, softmax

TARGET = 1.5
SINGLE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
EPS = 1e-5


@dataclass(frozen=True)
class Case:
    """One kernel at one shape, and the peers' way to the same result."""

    name: str
    kernel: Kernel
    values: dict[str, Any]
    """Arrays and scalars of the kernel."""
    with_numpy: Callable[[dict[str, Any]], Any]
    """Takes the arrays."""
    with_torch: Callable[[Any, dict[str, Any]], Any]
    """Takes the module torch and the arrays as tensors."""


def cases(dtype: str) -> Iterator[Case]:
    for n in (2048, 4096):
        yield Case(
            f"rms_norm 1 x {n} {dtype}",
            rms_norm(dtype),
            {
                **arrays(dtype, x=(1, n), weight=n, y=(1, n)),
                **{"rows": 1, "n": n, "eps": EPS},
            },
            numpy_rms_norm,
            lambda torch, a: torch.nn.functional.rms_norm(
                a["x"], a["weight"].shape, a["weight"], EPS
            ),
        )
    for m, n in ((2048, 2048), (4096, 4096), (16384, 2048)):
        yield Case(
            f"gemv {m} x {n} {dtype}",
            gemv(dtype, y=dtype),
            {**arrays(dtype, w=(m, n), x=n, y=m), "m": m, "n": n},
            lambda a: a["w"] @ a["x"],
            lambda torch, a: a["w"] @ a["x"],
        )
    yield Case(
        f"softmax 32 x 1024 {dtype}",
        softmax(dtype),
        {**arrays(dtype, x=(32, 1024), y=(32, 1024)), "rows": 32, "n": 1024},
        numpy_softmax,
        lambda torch, a: torch.softmax(a["x"], -1),
    )
    yield Case(
        f"silu_gate 8192 {dtype}",
        silu_gate(dtype),
        {**arrays(dtype, gate=8192, up=8192, y=8192), "n": 8192},
        lambda a: a["gate"] / (1 + np.exp(-a["gate"])) * a["up"],
        lambda torch, a: torch.nn.functional.silu(a["gate"]) * a["up"],
    )
    yield Case(
        f"residual 8192 {dtype}",
        residual(dtype),
        {**arrays(dtype, a=8192, b=8192, y=8192), "n": 8192},
        lambda a: a["a"] + a["b"],
        lambda torch, a: a["a"] + a["b"],
    )


def numpy_rms_norm(a: dict[str, Any]) -> Any:
    x = a["x"]
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(EPS)) * a["weight"]


def numpy_softmax(a: dict[str, Any]) -> Any:
    powers = np.exp(a["x"] - a["x"].max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def arrays(dtype: str, **shapes: Any) -> dict[str, Any]:
    """Random arrays at multiples of 64 bytes."""
    rng, kind = np.random.default_rng(0), dtype_of(dtype).numpy
    found = {}
    for name, shape in shapes.items():
        memory = np.zeros(int(np.prod(shape)) * kind.itemsize + 64, np.uint8)
        start = -memory.ctypes.data % 64
        found[name] = memory[start : memory.size - 64 + start].view(kind).reshape(shape)
        found[name][...] = rng.standard_normal(shape, np.float32).astype(kind)
    return found


def launcher(kernel: Kernel, values: dict[str, Any], directory: Path) -> Callable[[], None]:
    """Compile a kernel and return what launches it once, every argument checked."""
    launch = bl.KernelCache(directory / "cache").get_or_compile(kernel, "CPU").launch
    held = {
        name: bl.as_buffer(value) if isinstance(value, np.ndarray) else value
        for name, value in values.items()
    }
    return lambda: launch(**held)


# --- Measuring ------------------------------------------------------------------------------------


def worker(_: int, quick: bool) -> list[dict[str, Any]]:
    """Measure every case in this process; times in ns."""
    rows = []
    torch = _torch()
    with harness.quiet(), tempfile.TemporaryDirectory() as directory:
        for dtype in ("f32", "bf16"):
            for case in cases(dtype):
                rows.append(_measure(case, dtype, torch, Path(directory), quick))
    return rows


def _measure(case: Case, dtype: str, torch: Any, directory: Path, quick: bool) -> dict[str, Any]:
    given = {name: each for name, each in case.values.items() if isinstance(each, np.ndarray)}
    calls = {"brickline": launcher(case.kernel, case.values, directory)}
    if dtype == "f32":
        calls["NumPy"] = lambda: case.with_numpy(given)
    if torch is not None:
        tensors = {name: _tensor(torch, array) for name, array in given.items()}
        calls["torch"] = lambda: case.with_torch(torch, tensors)
    statements = [
        Statement(name, "call()", setup="call = run", names={"run": call})
        for name, call in calls.items()
    ]
    repeats = {"repeats": 5, "repeat_ms": 5.0} if quick else {"repeats": 25, "repeat_ms": 20.0}
    return {"name": case.name, "dtype": dtype, "ns": harness.hot_loop(statements, **repeats)}


def _tensor(torch: Any, array: Any) -> Any:
    if array.dtype == np.float32:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def _torch_environment() -> dict[str, str]:
    """What torch needs to survive a bfloat16 product on this machine.

    Some virtual machines announce AMX and do not grant it; oneDNN then ends the process.
    """
    probe = "import torch; w = torch.ones(512, 512).bfloat16(); print((w @ w[0]).sum())"
    for environment in ({}, {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}):
        command = [sys.executable, "-c", probe]
        alone = {"env": {**os.environ, **environment}, "capture_output": True}
        if subprocess.run(command, check=False, **alone).returncode >= 0:
            return environment
    return {}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """One claim for each kernel, shape and dtype."""
    environment = {**dict.fromkeys(SINGLE_THREAD, "1"), **_torch_environment()}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        processes = harness.in_processes(__file__, ["--quick"] if quick else [], 1 if quick else 3)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    limited = "ONEDNN_MAX_CPU_ISA" in environment
    return [_claim([rows[at] for rows in processes], limited) for at in range(len(processes[0]))]


def _claim(rows: list[dict[str, Any]], limited: bool) -> dict[str, Any]:
    """Ratios are taken repeat by repeat, and their median over all processes is the figure."""
    peer = "NumPy" if rows[0]["dtype"] == "f32" else "torch"
    times = {name: [ns for row in rows for ns in row["ns"][name]] for name in rows[0]["ns"]}
    ratios = [
        ours / theirs for ours, theirs in zip(times["brickline"], times.get(peer, []), strict=False)
    ]
    microseconds = {name: statistics.median(values) / 1000 for name, values in times.items()}
    note = ", ".join(f"{name} {value:.4g} us" for name, value in microseconds.items())
    if limited:
        note += "; oneDNN limited to AVX512_CORE, since AMX ends the process on this machine"
    one = microseconds.get(peer, 1.0)
    return Claim(
        name=f"kernels: {rows[0]['name']}",
        figure=statistics.median(ratios) if ratios else None,
        unit=f"times {peer}",
        target=TARGET if ratios else None,
        peers={name: value / one for name, value in microseconds.items() if name != "brickline"},
        note=note if ratios else f"{peer} is absent; {note}",
    ).as_dict()


if __name__ == "__main__":
    sys.exit(harness.main(run, worker, __doc__))
