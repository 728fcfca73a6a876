"""No false culprit: thousands of clean operations, each held against its own float64 execution.

Claims: among 10,000 clean checks for each of CPU and CUDA in float32 and bfloat16, and of compiled
regions, none is called a culprit; and small planted faults are. Operations, shapes and values are
drawn anew for every check (`clean_op_cases`, `clean_regions`). Run with
``python benchmarks/clean_checks.py``; ``--regime cuda-bfloat16 --count 2000`` runs a part.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import harness
import torch
from clean_op_cases import cases
from clean_op_draws import Draw
from clean_regions import REGIONS
from harness import Claim
from torch.utils._pytree import tree_map

from brickline.checking.regions import hold_region
from brickline.oracle.calls import Call, outputs_of
from brickline.oracle.holding import Held, hold
from brickline.oracle.noise import Noisy
from brickline.oracle.widen import Widened
from brickline.verdict import Verdict

CHECKS = 10_000
QUICK_CHECKS = 300
SEED = 20_000
COMBINATIONS = 200
"""Distinct combinations of operation, shapes and dtype that the checks must cover."""
REGIMES = ("cpu-float32", "cpu-bfloat16", "cuda-float32", "cuda-bfloat16", "compile")
BAD = (Verdict.CULPRIT, Verdict.NONFINITE_ORIGIN)


@dataclass
class Tally:
    """What came of a regime's checks."""

    checks: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    combinations: set[tuple[Any, ...]] = field(default_factory=set)
    ratios: dict[str, list[float]] = field(
        default_factory=lambda: {"element": [], "rmse": [], "bias": []}
    )
    false: list[str] = field(default_factory=list)
    worst: dict[str, float] = field(default_factory=dict)
    """Largest z by template."""

    def add(self, name: str, shapes: tuple[Any, ...], held: Held) -> None:
        """Count one check."""
        if held.verdict in (Verdict.UNKNOWN, Verdict.NONDETERMINISTIC):
            self.verdicts[f"{held.verdict}: {name}: {held.reason}"] += 1
            return
        self.checks += 1
        self.verdicts[str(held.verdict)] += 1
        self.combinations.add((name, shapes))
        if held.ratios is not None and held.verdict is not Verdict.IDENTICAL:
            for kind, values in self.ratios.items():
                values.append(float(getattr(held.ratios, kind)))
        self.worst[name] = max(self.worst.get(name, 0.0), held.z or 0.0)
        if held.verdict in BAD:
            self.false.append(f"{name} {shapes} z={held.z:.3g} {held.reason or ''}")

    def words(self) -> str:
        """Say what came of them."""
        parts = [f"{self.checks:,} checks over {len(self.combinations):,} combinations"]
        for kind, values in self.ratios.items():
            ordered = sorted(values) or [0.0]
            middle, high = (ordered[int(len(ordered) * part)] for part in (0.5, 0.999))
            parts.append(f"{kind} median {middle:.2f}, 99.9 % {high:.2f}, max {ordered[-1]:.2f}")
        parts.append(f"identical {self.verdicts['identical']:,}, watch {self.verdicts['watch']}")
        others = {each: n for each, n in self.verdicts.items() if ": " in each}
        if others:
            parts.append(f"not held: {sum(others.values())}")
        return "; ".join(parts + self.false[:3])


def shapes_of(args: Any) -> tuple[Any, ...]:
    """Shapes and dtypes of a call's tensors."""
    found: list[Any] = []
    tree_map(
        lambda each: (
            found.append((tuple(each.shape), str(each.dtype)))
            if isinstance(each, torch.Tensor)
            else None
        ),
        args,
    )
    return tuple(found)


# --- Operations -----------------------------------------------------------------------------------


def check_operations(device: str, dtype: torch.dtype, count: int, seed: int) -> Tally:
    """Execute and hold operations until there are enough checks."""
    tally = Tally()
    largest = 1 << 20 if device == "cuda" else 1 << 16
    for number, (name, (func, args, kwargs)) in enumerate(cases(device, dtype, seed, largest)):
        if tally.checks >= count or number > 3 * count:
            break
        before = tree_map(_copied, (args, kwargs))
        result = func(*args, **kwargs)
        call = Call(func, before[0], before[1])
        held = hold(call, outputs_of(func, args, kwargs, result))
        if held is not None:
            tally.add(f"{name.partition('/')[0]} {func}", shapes_of((args, kwargs)), held)
    return tally


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


# --- Compiled regions -----------------------------------------------------------------------------


def check_regions(device: str, count: int, seed: int) -> Tally:
    """Hold compiled regions against their eager originals."""
    tally = Tally()
    draws = [
        Draw(random.Random(seed + number), device, dtype, 1 << 16)
        for number, dtype in enumerate((torch.float32, torch.bfloat16))
    ]
    compiled = {
        (name, draw.dtype): torch.compile(_fresh(function), dynamic=True)
        for name, (function, _) in REGIONS.items()
        for draw in draws
    }
    number = 0
    while tally.checks < count:
        for (name, dtype), call in compiled.items():
            number += 1
            draw = next(each for each in draws if each.dtype is dtype)
            draw.seed(seed * 10_000_019 + number)
            function, inputs = REGIONS[name]
            values = inputs(draw)
            with torch.no_grad():
                held = _hold_compiled(call, function, values, number)
            tally.add(f"{name} {dtype}", shapes_of(values), held)
            if tally.checks >= count:
                break
    return tally


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Each dtype gets a function of its own, so that one does not evict the other's code."""
    namespace = dict(function.__globals__)
    return type(function)(function.__code__, namespace, function.__name__)


def _hold_compiled(call: Any, function: Any, values: Any, number: int) -> Held:
    made, clean = call(*values), function(*values)
    with Widened():
        exact = function(*values)
    with Noisy(number):
        moved = function(*values)
    return hold_region([made], [exact], [clean], [moved])


# --- Planted faults -------------------------------------------------------------------------------


def faults(device: str, dtype: torch.dtype) -> Iterator[tuple[str, Call, torch.Tensor]]:
    """Yield small faults of one matrix product, softmax or norm, with what they make."""
    aten = torch.ops.aten
    generator = torch.Generator(device="cpu").manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    for fan in (256, 1024, 4096):
        left, right = draw(64, fan), draw(fan, 96)
        call = Call(aten.mm.default, (left, right), {})
        right_one = left @ right
        yield f"last of {fan} terms dropped", call, left[:, :-1] @ right[:-1]
        wrong = right_one.clone()
        wrong.view(-1)[wrong.abs().argmax()] *= 1.05
        yield f"one element of {fan} terms 5 % off", call, wrong
        yield f"scaled by 1.01, {fan} terms", call, right_one * 1.01
        swapped = right_one.clone()
        swapped[[3, 4]] = swapped[[4, 3]]
        yield f"two rows swapped, {fan} terms", call, swapped
        # Sixteen parts added in bfloat16 are what torch allows CUDA to do by default.
        if fan > 256:
            yield f"accumulated in bfloat16, {fan} terms", call, _bf16_sum(left, right).to(dtype)
        if dtype is torch.float32:
            yield f"TF32 inputs, {fan} terms", call, _tf32(left) @ _tf32(right)
    value, weight = draw(64, 512), draw(512)
    args = (value, [512], weight, None, 1e-5)
    made = aten.native_layer_norm.default(*args)[0]
    call = Call(aten.native_layer_norm.default, args, {})
    yield "a norm's weight off by one place", call, made / weight * weight.roll(1)
    call = Call(aten._softmax.default, (value, -1, False), {})
    made = torch.softmax(value, -1)
    yield "a softmax that leaves out one column", call, made / (1 - made[:, -1:])


def _bf16_sum(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(left.shape[0], right.shape[1], device=left.device, dtype=torch.bfloat16)
    for start in range(0, left.shape[1], 16):
        part = left[:, start : start + 16].float() @ right[start : start + 16].float()
        total = (total.float() + part).to(torch.bfloat16)
    return total


def _tf32(value: torch.Tensor) -> torch.Tensor:
    bits = value.view(torch.int32)
    return ((bits + (1 << 12)) & ~((1 << 13) - 1)).view(torch.float32)


def missed_faults(device: str, dtype: torch.dtype) -> tuple[int, list[str]]:
    """Hold every planted fault; return how many there are and which were not seen."""
    missed: list[str] = []
    total = 0
    for name, call, made in faults(device, dtype):
        total += 1
        outputs: list[torch.Tensor | None] = [made]
        held = hold(call, outputs)
        if held is None or held.verdict is not Verdict.CULPRIT:
            z = "" if held is None else f" (z {held.z:.2f})"
            missed.append(f"{name}{z}")
    return total, missed


# --- Claims ---------------------------------------------------------------------------------------


def claims_of(regime: str, count: int, seed: int = SEED) -> list[Claim]:
    """Measure one regime."""
    device, _, name = regime.partition("-")
    title = f"clean checks, {regime}: false culprits"
    if device == "cuda" and not torch.cuda.is_available():
        return [Claim(title, None, "culprits", None, note="torch sees no CUDA device")]
    began = time.monotonic()
    if regime == "compile":
        where = "cuda" if torch.cuda.is_available() else "cpu"
        tally = check_regions(where, count, seed)
        extra: list[Claim] = []
    else:
        dtype = getattr(torch, name)
        tally = check_operations(device, dtype, count, seed)
        total, missed = missed_faults(device, dtype)
        note = f"{total} planted" + (f"; missed: {', '.join(missed)}" if missed else "")
        extra = [Claim(f"planted faults, {regime}: missed", len(missed), "faults", 0, note=note)]
    note = f"{tally.words()}; seed {seed}; {time.monotonic() - began:.0f} s"
    figure = len(tally.false)
    few = count >= CHECKS and (tally.checks < count or len(tally.combinations) < COMBINATIONS)
    if few:
        note += f"; fewer than {count:,} checks or {COMBINATIONS} combinations"
    return [Claim(title, figure, "culprits", None if few else 0, note=note), *extra]


def keep_to_what_runs() -> None:
    """Keep oneDNN off AMX where the processor names it and the sandbox forbids it."""
    program = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); a @ a"
    if subprocess.run([sys.executable, "-c", program], check=False).returncode < 0:
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def run(quick: bool = False) -> list[dict[str, Any]]:
    """One claim for each regime, and one for the faults that must be seen in it."""
    torch.set_num_threads(1)
    keep_to_what_runs()
    count = QUICK_CHECKS if quick else CHECKS
    made: list[Claim] = []
    for regime in REGIMES:
        made += claims_of(regime, 40 if quick and regime == "compile" else count)
    return [each.as_dict() for each in made]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--regime", choices=REGIMES)
    parser.add_argument("--count", type=int, default=CHECKS)
    parser.add_argument("--seed", type=int, default=SEED)
    chosen, rest = parser.parse_known_args()
    if chosen.regime is None:
        sys.exit(harness.main(run, None, __doc__))
    torch.set_num_threads(1)
    keep_to_what_runs()
    found = claims_of(chosen.regime, chosen.count, chosen.seed)
    print(harness.as_text([each.as_dict() for each in found]))
    sys.exit(1 if any(each.met is False for each in found) else 0)
