"""``brickline doctor``: what this machine offers, and what is missing."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from brickline import _core
from brickline.circumstances import cpu_model
from brickline.measurement_cost import entry_costs
from brickline.peaks import keep_peaks, load_peaks, measure_peaks
from brickline.run_directory import state_directory

EXTRAS = {
    "torch": ("torch", "record and check PyTorch models"),
    "cuda": ("cuda.core", "CUDA devices without torch"),
}


def doctor(
    peaks: Annotated[
        bool, typer.Option("--peaks", help="Measure how fast this machine computes and copies.")
    ] = False,
    device: Annotated[str, typer.Option(help="Whose peaks: CPU or CUDA:n.")] = "CPU",
) -> None:
    """Show compiler, driver, extras and clock; with --peaks, measure and keep the roofs.

    Example: brickline doctor --peaks
    """
    console = Console()
    if peaks:
        name = device.upper()
        with console.status(f"Measuring {name}…"):
            measured = measure_peaks(name, seconds=4.0)
        keep_peaks(name, measured)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    for label, text in _facts(device.upper()):
        table.add_row(label, text)
    console.print(table, highlight=False)


def _facts(device: str) -> list[tuple[str, str]]:
    return [
        ("brickline", _package("brickline")),
        ("Python", f"{platform.python_version()} on {platform.platform()}"),
        ("CPU", cpu_model() or platform.machine()),
        ("Compiler", _compiler()),
        ("CUDA driver", _cuda()),
        *((f"extra {name}", _extra(module, use)) for name, (module, use) in EXTRAS.items()),
        (
            "Clock",
            f"{_core.clock_name()}, {_core.clock_cost_ns():.1f} ns a reading; "
            f"time.perf_counter_ns() {_perf_counter_cost_ns():.1f} ns",
        ),
        ("One brick", f"{entry_costs().timed_ns:.0f} ns for `with brick:`"),
        (f"Peaks of {device}", _peaks(device)),
        ("Runs of dead processes", _left_behind()),
    ]


def _package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed as a package"


def _compiler() -> str:
    for name in ("clang++", "g++", "c++"):
        found = shutil.which(name)
        if found is None:
            continue
        try:
            done = subprocess.run(
                [found, "--version"], capture_output=True, text=True, timeout=10, check=False
            )
            first = done.stdout.splitlines()[0] if done.stdout else name
        except (OSError, subprocess.TimeoutExpired):
            continue
        return f"{first} ({found})"
    return "none found; install clang or gcc, or `pip install ziglang`"


def _cuda() -> str:
    facts = _core.cuda_driver()
    if not facts["present"]:
        return str(facts["problem"])
    number = int(facts["version"])
    count = facts["devices"]
    return f"CUDA {number // 1000}.{number % 1000 // 10}, {count} device{'s' if count != 1 else ''}"


def _extra(module: str, use: str) -> str:
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        found = False
    return f"installed ({use})" if found else f"not installed ({use})"


def _perf_counter_cost_ns() -> float:
    clock = time.perf_counter_ns
    costs = []
    for _ in range(20):
        before = clock()
        for _ in range(100):
            clock()
        costs.append((clock() - before) / 100)
    return min(costs)


def _peaks(device: str) -> str:
    peaks = load_peaks(device)
    if peaks is None:
        return "not measured; run `brickline doctor --peaks`"
    return (
        f"{peaks['gflops']:.0f} GFLOP/s ({'float32' if device == 'CPU' else 'bfloat16'}), "
        f"{peaks['gbps']:.1f} GB/s"
    )


def _left_behind() -> str:
    """Count temporary runs whose process is gone: they hold what a crash left behind."""
    directory = state_directory()
    if directory is None:
        return "the state directory is not writable; set XDG_STATE_HOME"
    dead = [
        path
        for path in (directory / "runs").glob("*.brick")
        if not os.path.exists(f"/proc/{path.stem.split('-')[-2]}")
    ]
    if not dead:
        return "none"
    return f"{len(dead)} in {directory / 'runs'}; look with `brickline report`, then delete them"
