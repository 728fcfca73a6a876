"""Claims: what comparing two recorded runs costs.

* Two runs of 20,000 launches are compared in under 2 s.
* Two runs of a million launches are compared in under 60 s, with at most 2 GiB of memory.

The runs are a decoder's: 32 layers of 12 modules, call after call. Every float tensor differs by
rounding, so that no hash spares the work, and one projection is wrong in the middle. A second pair
has other names throughout and an extra module in each layer, so that names align nothing. Each
comparison runs in a fresh process; reading the runs and writing the report are part of it.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import harness
import numpy as np
from harness import Claim

LAYERS = 32
INSIDE = ("", ".norm", ".attn", ".attn.q", ".attn.k", ".attn.v", ".attn.o")
INSIDE += (".norm2", ".mlp", ".mlp.gate", ".mlp.up", ".mlp.down")
TYPES = ("Block", "RMSNorm", "Attention", "Linear", "Linear", "Linear", "Linear")
TYPES += ("RMSNorm", "MLP", "Linear", "Linear", "Linear")
PARENT = (-1, 0, 0, 2, 2, 2, 2, 0, 0, 8, 8, 8)
RENAMED = {"norm2": "ln_2", "norm": "ln_1", "attn": "self_attention", "mlp": "feed_forward"}
RENAMED |= {"q": "query", "k": "key", "v": "value", "o": "dense", "layers": "h"}
PLANTED = (LAYERS // 2, 10)
"""Layer and module that is wrong, in the middle call."""
FEW, MANY = 20_000, 1_000_000


# --- Runs, made in bulk ---------------------------------------------------------------------------


def make_run(
    path: Path, launches: int, *, seed: int, fault: bool = False, port: bool = False
) -> int:
    """Write a run of about so many launches; return how many."""
    import brickline as bl
    from brickline import abi

    names, types, parents = _modules(port)
    calls = max(1, launches // len(names))
    profiler = bl.BrickProfiler(path.stem, enabled=True, path=path)
    ids = np.array([profiler._intern(name) for name in names], np.uint32)
    params = np.array(
        [profiler._intern(json.dumps({"level": "module", "type": each})) for each in types],
        np.uint32,
    )
    layers = np.array([int(name.split(".")[1]) if "." in name else -1 for name in names], np.int32)
    backend, dtype = profiler._intern("CPU"), profiler._intern("float32")
    noise = np.random.default_rng(seed)
    count = len(names)
    planted = names.index(_name(*PLANTED, port))
    for call in range(calls):
        first = call * count + 1
        rows = np.zeros(count, abi.TRACE)
        rows["trace"] = np.arange(first, first + count)
        rows["parent"] = np.where(parents >= 0, parents + first, 0)
        rows["name"], rows["params"], rows["backend"] = ids, params, backend
        rows["layer"], rows["position"], rows["slot"] = layers, call, abi.NO_SLOT
        prints = _prints(abi, count, call, noise, port)
        if fault and call == calls // 2:
            prints["sketch"][planted] *= 1.05
            prints["hash"][planted] += 1
        operands = np.zeros(2 * count, abi.OPERAND)
        operands["trace"] = np.repeat(rows["trace"], 2)
        operands["role"] = np.tile([0, 1], count)
        operands["dtype"], operands["dimensions"] = dtype, 2
        operands["shape"][:, :2] = (1, 4096)
        made = call * count + np.arange(1, count + 1)
        operands["fingerprint"][1::2] = made
        operands["fingerprint"][0::2] = np.maximum(made - 1, 1)
        profiler._append(int(abi.Table.FINGERPRINT), prints.tobytes())
        profiler._append(int(abi.Table.OPERAND), operands.tobytes())
        profiler._append(int(abi.Table.TRACE), rows.tobytes())
    profiler.close()
    return calls * count


def _modules(port: bool) -> tuple[list[str], list[str], np.ndarray]:
    names, types, parents = ["Decoder"], ["Decoder"], [-1]
    for layer in range(LAYERS):
        base = len(names)
        for inside, (kind, parent) in enumerate(zip(TYPES, PARENT, strict=True)):
            names.append(_name(layer, inside, port))
            types.append(kind)
            parents.append(0 if parent < 0 else base + parent)
        if port:
            names.append(f"h.{layer}.drop")
            types.append("Dropout")
            parents.append(base)
    return names, types, np.array(parents)


def _name(layer: int, inside: int, port: bool) -> str:
    name = f"layers.{layer}{INSIDE[inside]}"
    return ".".join(RENAMED.get(part, part) for part in name.split(".")) if port else name


def _prints(abi: Any, count: int, call: int, noise: Any, port: bool) -> np.ndarray:
    """The same values on both sides, up to rounding."""
    base = np.random.default_rng(call)
    shared = 1 + LAYERS * len(INSIDE)
    sketch = base.standard_normal((shared, 64))
    if port:  # a dropout that does nothing ends each layer
        order = []
        for layer in range(LAYERS):
            begin = 1 + layer * len(INSIDE)
            order += [*range(begin, begin + len(INSIDE)), begin + len(INSIDE) - 1]
        sketch = sketch[[0, *order]]
    prints = np.zeros(count, abi.FINGERPRINT)
    prints["sketch"] = sketch * (1 + 2e-7 * noise.standard_normal((count, 64)))
    prints["hash"] = noise.integers(1, 1 << 62, (count, 2))
    prints["l2"] = np.sqrt((sketch**2).sum(axis=1))
    prints["l1"], prints["absmax"], prints["elements"] = prints["l2"], 3.0, 4096
    return prints


# --- One comparison, in a process of its own ------------------------------------------------------


def compare_here(candidate: str, reference: str) -> dict[str, Any]:
    """Compare two runs and say what it took."""
    import brickline.comparison.comparing as comparing

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    report = comparing.compare(candidate, reference)
    text = report.to_json() if len(report.verdicts) < 100_000 else ""
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "wall_s": wall,
        "cpu_s": cpu,
        "resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "before_gib": before / 2**20,
        "rows": len(report.verdicts),
        "first": report.findings[0].name if report.findings else None,
        "status": str(report.status),
        "bytes": len(text),
    }


def _measure(launches: int, repeats: int, *, port: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        pair = [Path(folder) / f"{side}.brick" for side in ("candidate", "reference")]
        made = make_run(pair[0], launches, seed=1, fault=True, port=port)
        make_run(pair[1], launches, seed=2)
        command = [sys.executable, __file__, "--pair", *map(str, pair)]
        found = []
        for _ in range(repeats):
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
    best = min(found, key=lambda each: float(each["cpu_s"]))
    return best | {"launches": made}


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every claim."""
    some, most = (FEW // 4, MANY // 20) if quick else (FEW, MANY)
    few = _measure(some, 1 if quick else 3, port=False)
    other = _measure(some, 1 if quick else 3, port=True)
    many = _measure(most, 1, port=False)
    claims = [
        Claim(f"compare, {some:,} launches", few["cpu_s"], "s", 2.0, note=_note(few)),
        Claim(
            f"compare, {some:,} launches, other names", other["cpu_s"], "s", 2.0, note=_note(other)
        ),
        Claim(f"compare, {most:,} launches", many["cpu_s"], "s", 60.0, note=_note(many)),
        Claim(
            f"compare, {most:,} launches, memory",
            many["resident_gib"],
            "GiB",
            2.0,
            note=f"{many['before_gib']:.2f} GiB before it began",
        ),
    ]
    return [claim.as_dict() for claim in claims]


def _note(found: dict[str, Any]) -> str:
    right = _name(*PLANTED, False), _name(*PLANTED, True)
    named = "the planted fault" if found["first"] in right else f"{found['first']}, not the fault"
    return f"{found['launches']} launches, {found['wall_s']:.2f} s by the wall, named {named}"


if __name__ == "__main__":
    if "--pair" in sys.argv:
        print(json.dumps(compare_here(*sys.argv[2:4])))
    else:
        raise SystemExit(harness.main(run, None, __doc__))
