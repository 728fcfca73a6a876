"""The method shared by every benchmark: how a cost is measured and how a claim is stated.

`hot_loop` repeats one statement, as `timeit` does; caches and branch history are warm, so it
flatters; claims about the profiler are gated on `in_situ.py`. `in_processes` repeats a
measurement in fresh processes, because memory layout shifts a figure by more than its spread within
one process.

Times are CPU time of the whole process, pinned to one core: a profiler that hands its work to
another thread is charged for it, and a colleague who compiles on the same machine is not.

This file knows nothing of brickline, and of its peers only whether PyTorch sees a GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

# --- Claims ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """One sentence of docs/performance.md: a figure that must not exceed its target."""

    name: str
    figure: float | None
    """The measured value; None where it could not be measured, and `note` says why."""
    unit: str
    target: float | None
    """The most that `figure` may be; None where the peer that defines it is absent."""
    peers: Mapping[str, float | None] = field(default_factory=dict)
    """Figures of the peers in the same unit and run; None for an absent peer."""
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None means not judged, which is not the same as met."""
        if self.figure is None or self.target is None:
            return None
        return self.figure <= self.target

    def as_dict(self) -> dict[str, Any]:
        """The claim as `brickline bench --json` prints it."""
        return {
            "name": self.name,
            "figure": _rounded(self.figure),
            "unit": self.unit,
            "peers": {peer: _rounded(figure) for peer, figure in self.peers.items()},
            "target": _rounded(self.target),
            "met": self.met,
            "note": self.note,
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


NO_GPU = "needs PyTorch and a GPU that it sees"
NO_TORCH = "needs PyTorch"


def not_measured(name: str, why: str) -> list[dict[str, Any]]:
    """The claims of a benchmark that cannot run here: one, which is not judged and says why."""
    return [Claim(name, None, "", None, note=f"not measured: {why}").as_dict()]


def spread(values: Sequence[float], digits: int = 0) -> str:
    """Smallest to largest, for a note."""
    return f"{min(values):.{digits}f}..{max(values):.{digits}f}"


# --- What a GPU's benchmarks need -----------------------------------------------------------------


def has_torch() -> bool:
    """Whether the torch module is installed."""
    return importlib.util.find_spec("torch") is not None


def torch_with_cuda() -> Any:
    """The torch module where it is installed and sees a GPU, else None."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


# --- Quiet: the state of the process while it measures --------------------------------------------


@contextmanager
def quiet() -> Iterator[int]:
    """Pin the process to its idlest core and switch gc off; both are restored. Yields the core.

    Threads inherit the pinning of the thread that starts them, so a profiler that is to be
    measured is made inside.
    """
    allowed = os.sched_getaffinity(0)
    cpu = _idlest_cpu(allowed)
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    os.sched_setaffinity(0, {cpu})
    try:
        yield cpu
    finally:
        os.sched_setaffinity(0, allowed)
        if collecting:
            gc.enable()


def _idlest_cpu(allowed: set[int], window_s: float = 0.2) -> int:
    before = _idle_ticks()
    time.sleep(window_s)
    after = _idle_ticks()
    return max(sorted(allowed), key=lambda cpu: after.get(cpu, 0) - before.get(cpu, 0))


def _idle_ticks() -> dict[int, int]:
    with open("/proc/stat") as stat:
        rows = [line.split() for line in stat if line.startswith("cpu") and line[3] != " "]
    return {int(row[0][3:]): int(row[4]) for row in rows}


def compiled(source: str, function: str, names: dict[str, Any]) -> Any:
    """The function that the source defines; `names` become its globals and are not copied."""
    exec(compile(source, f"<benchmark {function}>", "exec"), names)
    return names[function]


# --- Hot loop -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Statement:
    """What a hot loop repeats. `names` are globals of the loop, `setup` binds its locals."""

    name: str
    code: str
    setup: str = "pass"
    names: Mapping[str, Any] = field(default_factory=dict)


def hot_loop(
    statements: Sequence[Statement], *, repeats: int = 15, repeat_ms: float = 30.0, seed: int = 0
) -> dict[str, list[float]]:
    """CPU nanoseconds of each statement, one value per repeat, with the empty loop subtracted.

    Repeats of different statements are interleaved in random order. Values of one position come
    from the same moment, so a ratio is best taken position by position.
    """
    empty = Statement("empty loop", "pass")
    loops = {item.name: _compile_loop(item) for item in (empty, *statements)}
    numbers = {name: _calibrate(loop, repeat_ms) for name, loop in loops.items()}
    costs: dict[str, list[float]] = {name: [] for name in loops}
    order = list(loops)
    rng = random.Random(seed)
    for _ in range(repeats):
        rng.shuffle(order)
        for name in order:
            costs[name].append(_loop_cpu_ns(loops[name], numbers[name]) / numbers[name])
        gc.collect()
    floors = costs.pop(empty.name)
    return {
        name: [value - floor for value, floor in zip(values, floors, strict=True)]
        for name, values in costs.items()
    }


def _compile_loop(statement: Statement) -> Callable[[int], None]:
    source = (
        "def loop(number):\n"
        f"{textwrap.indent(statement.setup, '    ')}\n"
        "    for _ in repeat(None, number):\n"
        f"{textwrap.indent(statement.code, '        ')}\n"
    )
    loop: Callable[[int], None] = compiled(source, "loop", {"repeat": repeat, **statement.names})
    return loop


def _calibrate(loop: Callable[[int], None], repeat_ms: float) -> int:
    number = 100
    while (spent := _loop_cpu_ns(loop, number)) < repeat_ms * 1e5:
        number *= 4
    return max(1, int(number * repeat_ms * 1e6 / spent))


def _loop_cpu_ns(loop: Callable[[int], None], number: int) -> int:
    begin = time.process_time_ns()
    loop(number)
    return time.process_time_ns() - begin


# --- Fresh processes and the command line ---------------------------------------------------------


def in_processes(path: str, arguments: Sequence[str], count: int) -> list[Any]:
    """Runs `python path --worker NUMBER arguments` `count` times; returns what each printed last.

    A worker prints one line of JSON at its end; see `main`.
    """
    answers = []
    for number in range(count):
        command = [sys.executable, path, "--worker", str(number), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        answers.append(json.loads(done.stdout.splitlines()[-1]))
    return answers


def main(
    run: Callable[[bool], list[dict[str, Any]]],
    worker: Callable[[int, bool], Any] | None = None,
    description: str | None = None,
) -> int:
    """Command line of a benchmark module; the exit status is 1 where a claim is not met."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats: a smoke test")
    parser.add_argument("--json", action="store_true", help="print the claims as JSON")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        assert worker
        print(json.dumps(worker(options.worker, options.quick)))
        return 0
    claims = run(options.quick)
    print(json.dumps(claims, indent=2) if options.json else as_text(claims))
    return 1 if any(claim["met"] is False for claim in claims) else 0


def as_text(claims: Sequence[Mapping[str, Any]]) -> str:
    """The claims for a terminal, the peers of one unit once."""
    lines: list[str] = []
    units_shown: set[str] = set()
    for claim in claims:
        verdict = {True: "met", False: "NOT MET", None: "not judged"}[claim["met"]]
        target = f"at most {claim['target']}" if claim["target"] is not None else "no target"
        lines.append(f"{claim['name']}: {claim['figure']} {claim['unit']} ({target}): {verdict}")
        lines.append(textwrap.indent(textwrap.fill(claim["note"], 96), "    "))
        if claim["peers"] and claim["unit"] not in units_shown:  # alike for claims in one unit
            for peer, figure in claim["peers"].items():
                shown = "absent" if figure is None else f"{figure:.4g}"
                lines.append(f"        {peer:<54} {shown:>9}")
            units_shown.add(claim["unit"])
    return "\n".join(lines)
