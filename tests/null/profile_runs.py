"""Runs for the profile page, on a clock that moves only when told to, so that figures are exact."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

from brickline import BrickProfiler, Sampling, TileLevel

HOSTILE = [
    "</script><script>window.pwned=1</script>",
    '<img src=x onerror="window.pwned=2">',
    "line\u2028separator\u2029and\u202eright-to-left\x07bell\x00nul",
    "x" * 1024,
    "{{constructor.constructor('window.pwned=3')()}} ${window.pwned=4}",
    "<!-- <script> ]]> --!> \\u003cscript\\u003e",
]
"""Names that would run or break something, were they ever read as markup."""

LAYER_WORK = (
    ("RmsNorm", 11_000, 4096, 3.0e4),
    ("QkvProjection", 95_000, 3_000_000, 1.5e7),
    ("RopeEmbedding", 9_000, 12_000, 2.0e4),
    ("AttentionScore", 62_000, 900_000, 2.4e6),
    ("AttentionOutput", 31_000, 800_000, 1.6e6),
    ("OutputProjection", 60_000, 1_600_000, 3.2e6),
    ("RmsNorm", 11_000, 4096, 3.0e4),
    ("GateProjection", 150_000, 5_600_000, 1.1e7),
    ("UpProjection", 150_000, 5_600_000, 1.1e7),
    ("Activation", 14_000, 57_000, 0.0),
    ("DownProjection", 170_000, 5_600_000, 1.1e7),
)


def rich_run(path: Path, *, steps: int = 60, layers: int = 16, seed: int = 5) -> Path:
    """A decode with two phases, two threads, tiles, a timeline, a graph and known peaks."""
    rng = random.Random(seed)
    with BrickProfiler(
        "llama decode", enabled=True, device="NULL", path=path, timeline_steps=24
    ) as profiler:
        _pass(profiler, rng, layers, "prefill", tokens=16, slower=6)
        for step in range(steps):
            if step == steps - 1:
                profiler.enable_graph()
            _pass(profiler, rng, layers, "decode", tokens=1, slower=1)
        profiler.disable_graph()
        thread = threading.Thread(target=_fetch, args=(profiler,), name="fetcher")
        thread.start()
        thread.join()
    with_peaks(path, gflops=900.0, gbps=90.0)
    return path


def _pass(
    profiler: BrickProfiler,
    rng: random.Random,
    layers: int,
    phase: str,
    *,
    tokens: int,
    slower: int,
) -> None:
    with profiler.step(tokens=tokens, phase=phase):
        for layer in range(layers):
            for name, typical_ns, moved, flops in LAYER_WORK:
                with profiler.brick(name, layer=layer, elements=4096, bytes=moved, flops=flops):
                    stray = rng.lognormvariate(0.0, 0.12) * (1 + 0.02 * layer)
                    rare = 2.6 if rng.random() < 0.03 else 1.0
                    profiler.advance(int(typical_ns * slower * stray * rare))
        with profiler.brick("LmHead", elements=32_000, bytes=26_000_000, flops=5.2e7):
            for row in range(4):
                for column in range(8):
                    tile = profiler.tiles.start(TileLevel.MACRO, row, column)
                    profiler.advance(int(rng.uniform(9_000, 13_000) * (1 + 0.15 * (column == 7))))
                    profiler.tiles.stop(tile, 1, 1.6e6, 800_000)
        with profiler.brick("Sampling", elements=tokens):
            profiler.advance(22_000)
        profiler.advance(70_000)


def _fetch(profiler: BrickProfiler) -> None:
    for _ in range(12):
        with profiler.brick("MemoryCopy", bytes=1_000_000):
            profiler.advance(40_000)


def hostile_run(path: Path) -> Path:
    """Every name of the run is hostile: bricks, phase, and the run's own."""
    with BrickProfiler(
        HOSTILE[0], enabled=True, device="NULL", path=path, timeline_steps=4, graph=True
    ) as profiler:
        for name in HOSTILE:
            with profiler.step(tokens=1, phase=HOSTILE[1]), profiler.brick(name, layer=1):
                tile = profiler.tiles.start(TileLevel.MICRO, 0, 0)
                profiler.advance(5_000)
                profiler.tiles.stop(tile)
    return path


def sampled_run(path: Path) -> Path:
    """Every fourth step is timed."""
    with BrickProfiler(
        "sampled", enabled=True, device="NULL", path=path, sampling=Sampling(steps=4)
    ) as profiler:
        for _ in range(40):
            with profiler.step(tokens=1, phase="decode"), profiler.brick("LmHead"):
                profiler.advance(10_000)
    return path


def empty_run(path: Path) -> Path:
    """A run in which no brick was entered."""
    with BrickProfiler("nothing", enabled=True, device="NULL", path=path):
        pass
    return path


def with_peaks(path: Path, **peaks: float) -> None:
    """Write measured peaks into a finished run."""
    manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    manifest["peaks"] = peaks
    (path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
