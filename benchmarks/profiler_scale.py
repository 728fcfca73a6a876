"""Claims: what the profiler costs as samples, bricks and threads grow, and to import.

* Stopping and reading all statistics after 10 million samples takes under 100 ms.
* Memory grows with the distinct (layer, brick, phase) of each thread, by at most 8 KiB each, in
  resident memory and in the run's directory; it does not grow with samples.
* Eight threads recording together lose no sample.
* `import brickline` takes at most 150 ms and imports neither pyarrow nor an extra.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import harness
import in_situ
from harness import Claim

MANY_SAMPLES = 10_000_000
NODE_LIMIT_BYTES = 8 * 1024
RSS_SLACK_KIB = 512
"""What the allocator and Python's own caches may add between 1 and 10 million samples."""
THREADS = 8
PHASES = ("prefill", "decode")
FORBIDDEN = ("pyarrow", "torch", "cuda", "textual", "duckdb", "opentelemetry", "ray", "triton")


# --- Parts: each runs in a process of its own -----------------------------------------------------


def samples_part(quick: bool) -> dict[str, Any]:
    """Ten million samples over 192 handles, then a stop and a reading of everything."""
    import brickline as bl

    total = MANY_SAMPLES // 10 if quick else MANY_SAMPLES
    path = Path(tempfile.mkdtemp()) / "samples.brick"
    profiler = bl.BrickProfiler("benchmark samples", enabled=True, path=path)
    handles = _handles(bl, profiler, in_situ.LAYERS)
    _record(handles, total // 10)
    first_kib = _resident_kib()
    _record(handles, total - total // 10)
    last_kib = _resident_kib()
    begin, begin_cpu = time.perf_counter(), time.process_time()
    profiler.disable()
    stats = profiler.all_brick_stats()
    figures = [(s.count, s.total_ns, s.p50_ns, s.p99_ns) for s in _values(stats)]
    spent, spent_cpu = time.perf_counter() - begin, time.process_time() - begin_cpu
    counted = sum(row[0] for row in figures)
    profiler.close()
    return {
        "samples": total,
        "counted": counted,
        "read_ms": spent * 1e3,
        "read_cpu_ms": spent_cpu * 1e3,
        "growth_kib": last_kib - first_kib,
        "run_bytes": _directory_bytes(path),
    }


def nodes_part(quick: bool) -> dict[str, Any]:
    """Bytes per node as layers are added, with one recording thread and with four."""
    return {str(threads): _node_growth(threads, 64 if quick else 512) for threads in (1, 4)}


def _node_growth(threads: int, layers: int) -> dict[str, float]:
    import brickline as bl

    path = Path(tempfile.mkdtemp()) / "nodes.brick"
    profiler = bl.BrickProfiler("benchmark nodes", enabled=True, path=path)
    few = layers // 8
    _record_nodes(bl, profiler, threads, range(few))
    before = _resident_kib() * 1024, _directory_bytes(path)
    _record_nodes(bl, profiler, threads, range(few, layers))
    after = _resident_kib() * 1024, _directory_bytes(path)
    nodes = (layers - few) * len(in_situ.BRICKS) * len(PHASES) * threads
    profiler.close()
    return {
        "nodes": nodes,
        "resident": (after[0] - before[0]) / nodes,
        "directory": (after[1] - before[1]) / nodes,
    }


def _record_nodes(bl: Any, profiler: Any, threads: int, layers: range) -> None:
    """Each node gets samples from 100 ns to some us, as real bricks spread over their histogram."""

    def body() -> None:
        handles = [
            profiler.brick(getattr(bl.BrickId, brick), layer=layer)
            for layer in layers
            for brick, _, _ in in_situ.BRICKS
        ]
        for handle in handles:
            for length in (0, 10, 100):
                with handle:
                    for _ in repeat(None, length):
                        pass

    for phase in PHASES:
        with profiler.step(tokens=1, phase=phase):
            _in_threads(threads, body)
    profiler.all_brick_stats()
    gc.collect()


def threads_part(quick: bool) -> dict[str, Any]:
    """Counts what eight threads recorded into shared bricks."""
    import brickline as bl

    each = 20_000 if quick else 500_000
    profiler = bl.BrickProfiler("benchmark threads", enabled=True)
    handle = profiler.brick(bl.BrickId.RMS_NORM, layer=0)

    def body() -> None:
        for _ in repeat(None, each):
            with handle:
                pass
            timer = profiler.start_brick(bl.BrickId.ATTENTION_SCORE)
            profiler.stop_brick(timer, 1)

    begin = time.perf_counter()
    _in_threads(THREADS, body)
    spent = time.perf_counter() - begin
    counted = sum(
        profiler.brick_stats(brick).count
        for brick in (bl.BrickId.RMS_NORM, bl.BrickId.ATTENTION_SCORE)
    )
    profiler.close()
    expected = 2 * each * THREADS
    return {"expected": expected, "counted": counted, "ns_each": spent * 1e9 / expected}


IMPORT_SOURCE = """
import sys, time
wall, cpu = time.perf_counter(), time.process_time()
import MODULE
wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
import json
print(json.dumps({"wall_ms": wall * 1e3, "cpu_ms": cpu * 1e3, "modules": sorted(sys.modules)}))
"""


def import_part(quick: bool) -> dict[str, Any]:
    """Imports in ten fresh processes, in turn with numpy, which brickline requires."""
    ours, numpy = [], []
    for _ in range(3 if quick else 10):
        ours.append(_import("brickline"))
        numpy.append(_import("numpy"))
    modules = {name.split(".")[0] for answer in ours for name in answer["modules"]}
    return {
        "wall_ms": [answer["wall_ms"] for answer in ours],
        "cpu_ms": [answer["cpu_ms"] for answer in ours],
        "numpy_ms": [answer["wall_ms"] for answer in numpy],
        "forbidden": sorted(modules & set(FORBIDDEN)),
    }


def _import(module: str) -> Any:
    command = [sys.executable, "-c", IMPORT_SOURCE.replace("MODULE", module)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


PARTS: tuple[Callable[[bool], dict[str, Any]], ...] = (
    samples_part,
    nodes_part,
    threads_part,
    import_part,
)


def _handles(bl: Any, profiler: Any, layers: int) -> list[Any]:
    return [
        profiler.brick(getattr(bl.BrickId, brick), layer=layer)
        for layer in range(layers)
        for brick, _, _ in in_situ.BRICKS
    ]


def _record(handles: list[Any], samples: int) -> None:
    each = samples // len(handles)
    left = samples - each * len(handles)
    for handle in handles:
        for _ in repeat(None, each):
            with handle:
                pass
    for handle in handles[:left]:
        with handle:
            pass


def _values(stats: Any) -> list[Any]:
    return list(stats.values()) if isinstance(stats, dict) else list(stats)


def _in_threads(count: int, body: Callable[[], None]) -> None:
    """All threads start together, so that they do record at the same time."""
    barrier = threading.Barrier(count)

    def wait_then_run() -> None:
        barrier.wait()
        body()
        barrier.wait()  # none ends early: a thread's lane may be handed on once it is gone

    threads = [threading.Thread(target=wait_then_run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _resident_kib() -> int:
    gc.collect()
    with open("/proc/self/status") as status:
        row = next(line for line in status if line.startswith("VmRSS:"))
    return int(row.split()[1])


def _directory_bytes(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_blocks * 512 for file in files)


# --- The run --------------------------------------------------------------------------------------


def worker(number: int, quick: bool) -> dict[str, Any]:
    """Part `number` modulo their count."""
    part = PARTS[number % len(PARTS)]
    if part is not samples_part:
        return part(quick)
    with harness.quiet():
        return part(quick)


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measures and states the claims."""
    arguments = ["--quick"] if quick else []
    rounds = 1 if quick else 3
    answers = harness.in_processes(__file__, arguments, len(PARTS) * rounds)
    samples, nodes, threads, imports = (answers[part :: len(PARTS)] for part in range(len(PARTS)))
    claims = [
        *_sample_claims(samples),
        *_node_claims(nodes),
        _thread_claim(threads),
        *_import_claims(imports),
    ]
    return [claim.as_dict() for claim in claims]


def _sample_claims(answers: list[dict[str, Any]]) -> list[Claim]:
    samples = answers[0]["samples"]
    reads = [answer["read_ms"] for answer in answers]
    lost = [abs(answer["samples"] - answer["counted"]) for answer in answers]
    note = (
        f"wall time {harness.spread(reads, 2)} ms; CPU "
        f"{statistics.median([answer['read_cpu_ms'] for answer in answers]):.2f} ms; "
        f"run of {answers[0]['run_bytes'] / 1024:.0f} KiB"
    )
    growths = [float(answer["growth_kib"]) for answer in answers]
    return [
        Claim(
            f"stop and read all statistics after {samples:,} samples",
            statistics.median(reads),
            "ms",
            100.0,
            note=note,
        ),
        Claim(f"samples missing from {samples:,}", float(max(lost)), "samples", 0.0),
        Claim(
            f"resident memory added from {samples // 10:,} to {samples:,} samples",
            statistics.median(growths),
            "KiB",
            RSS_SLACK_KIB,
            note=f"{harness.spread(growths)} KiB",
        ),
    ]


def _node_claims(answers: list[dict[str, Any]]) -> list[Claim]:
    claims = []
    for kind, where in (("resident", "resident memory"), ("directory", "the run's directory")):
        by_threads = {
            threads: [answer[threads][kind] for answer in answers] for threads in answers[0]
        }
        figures = {threads: statistics.median(values) for threads, values in by_threads.items()}
        note = "; ".join(
            f"{threads} thread(s): {figures[threads]:.0f} B ({harness.spread(values)}) over "
            f"{answers[0][threads]['nodes']} nodes"
            for threads, values in by_threads.items()
        )
        claims.append(
            Claim(
                f"{where} per distinct (layer, brick, phase) and thread",
                max(figures.values()),
                "bytes",
                NODE_LIMIT_BYTES,
                note=note,
            )
        )
    return claims


def _thread_claim(answers: list[dict[str, Any]]) -> Claim:
    lost = [abs(answer["expected"] - answer["counted"]) for answer in answers]
    each = statistics.median([answer["ns_each"] for answer in answers])
    return Claim(
        f"samples missing from {THREADS} threads recording together",
        float(max(lost)),
        "samples",
        0.0,
        note=f"of {answers[0]['expected']:,}; {each:.0f} ns of wall time each, GIL included",
    )


def _import_claims(answers: list[dict[str, Any]]) -> list[Claim]:
    walls = [value for answer in answers for value in answer["wall_ms"]]
    peers = {
        "import numpy": statistics.median([v for answer in answers for v in answer["numpy_ms"]])
    }
    cpus = [value for answer in answers for value in answer["cpu_ms"]]
    forbidden = sorted({name for answer in answers for name in answer["forbidden"]})
    cpu_ms = statistics.median(cpus)
    note = f"wall time {harness.spread(walls)} ms over {len(walls)} imports; CPU {cpu_ms:.0f} ms"
    return [
        Claim("import brickline", statistics.median(walls), "ms", 150.0, peers, note),
        Claim(
            "extras and pyarrow imported by import brickline",
            float(len(forbidden)),
            "modules",
            0.0,
            note=", ".join(forbidden) or f"none of {', '.join(FORBIDDEN)}",
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(harness.main(run, worker, __doc__))
