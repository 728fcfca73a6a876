"""The run that the claims of `look_*.py` are measured on: a million traces, made once and kept.

`million()` returns the path of a decoder's run: 32 layers, prefill and decode steps, bricks with
bytes and FLOPs, tiles, a timeline of the last steps, the graph of the last one, and a million
launches on the host and on two streams of a device, with operands and fingerprints for some of
them. It is recorded through the profiler itself, on the clock that moves only when told to, so that
its figures are the same everywhere. It lies in a folder of the user's own below the temporary
directory; whoever changes what is recorded raises `VERSION`.

This file makes no claim.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VERSION = 2
LAYERS = 32
TRACES = 1_000_000
TIMELINE_STEPS = 16
OPERANDS_EVERY = 16
"""One launch in so many has operands; each of a thousand tensors has a fingerprint."""
ON_HOST: dict[str, Any] = {"clock_domain": 2, "backend": "CPU"}
ON_STREAMS: tuple[dict[str, Any], ...] = tuple(
    {"clock_domain": 1, "backend": "CUDA:0", "device": 0, "stream": stream}
    for stream in (0x7F10, 0x7F20)
)
"""Where launches happen; clock domains are those of `brickline.abi.ClockDomain`."""


@dataclass(frozen=True)
class Work:
    """A brick of every layer: how long it takes, what it moves, and the kernels it launches."""

    name: str
    typical_ns: int
    moved_bytes: int
    flops: float
    kernels: tuple[str, ...]


LAYER = (
    Work("RmsNorm", 11_000, 16_384, 3.0e4, ("rms_partial", "rms_scale")),
    Work("QkvProjection", 95_000, 3_000_000, 1.5e7, ("gemv_q", "gemv_k", "gemv_v")),
    Work("RopeEmbedding", 9_000, 12_000, 2.0e4, ("rope_q", "rope_k")),
    Work("AttentionScore", 62_000, 900_000, 2.4e6, ("kv_append", "scores", "mask", "scale")),
    Work("AttentionSoftmax", 21_000, 120_000, 4.0e5, ("row_max", "exp_sum", "divide")),
    Work("AttentionOutput", 31_000, 800_000, 1.6e6, ("weighted_sum", "merge_heads")),
    Work("OutputProjection", 60_000, 1_600_000, 3.2e6, ("gemv_o", "residual_attention")),
    Work("GateProjection", 150_000, 5_600_000, 1.1e7, ("gemv_gate", "dequantise_gate")),
    Work("UpProjection", 150_000, 5_600_000, 1.1e7, ("gemv_up", "dequantise_up")),
    Work("Activation", 14_000, 57_000, 0.0, ("silu", "multiply")),
    Work("DownProjection", 170_000, 5_600_000, 1.1e7, ("gemv_down", "residual_ffn")),
)
HEAD_KERNELS = tuple(f"lm_head_{part}" for part in range(8))
TILE_ROWS, TILE_COLUMNS = 8, 8


def million(traces: int = TRACES) -> Path:
    """Return a run of so many traces, made now where it is not there yet."""
    folder = Path(tempfile.gettempdir()) / f"brickline-look-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid() or folder.is_symlink():
        raise RuntimeError(f"{folder} is not this user's; set TMPDIR to another directory")
    run = folder / f"{traces}-traces-v{VERSION}.brick"
    if not (run / "manifest.json").is_file():
        staged = Path(tempfile.mkdtemp(dir=folder, prefix=".making-")) / run.name
        try:
            record(staged, traces)
            if not run.exists():
                os.rename(staged, run)
        finally:
            shutil.rmtree(staged.parent)
    return run


def record(path: Path, traces: int) -> None:
    """Record the run; `path` must be free."""
    import brickline as bl

    profiler = bl.BrickProfiler(
        "a million launches",
        enabled=True,
        device="NULL",
        path=path,
        timeline_steps=TIMELINE_STEPS,
    )
    with profiler:
        _Decoder(bl, profiler, traces).run()


class _Decoder:
    """Walks through the steps and writes what a decoder would have launched."""

    def __init__(self, bl: Any, profiler: Any, traces: int) -> None:
        self.bl, self.profiler, self.left = bl, profiler, traces
        self.random = random.Random(0)
        # Drawn once: a draw for each launch would take longer than writing it.
        self.strays = [
            self.random.lognormvariate(0.0, 0.12) * (2.6 if self.random.random() < 0.03 else 1.0)
            for _ in range(4099)  # prime, so that no brick sees the same ones in every step
        ]
        self.drawn = 0
        self.bricks = [
            [
                (
                    work,
                    profiler.brick(
                        work.name,
                        layer=layer,
                        elements=4096,
                        bytes=work.moved_bytes,
                        flops=work.flops,
                    ),
                )
                for work in LAYER
            ]
            for layer in range(LAYERS)
        ]
        self.head = profiler.brick("LmHead", elements=32_000, bytes=26_000_000, flops=5.2e7)
        self.fingerprints = [self._fingerprint(number) for number in range(1000)]

    def run(self) -> None:
        per_step = LAYERS * sum(len(work.kernels) for work in LAYER) + len(HEAD_KERNELS)
        steps = -(-self.left // per_step)
        prefills = max(1, steps // 100)
        for step in range(steps):
            if step == steps - 1:
                self.profiler.enable_graph()
            phase, tokens, slower = ("decode", 1, 1) if step >= prefills else ("prefill", 16, 6)
            with self.profiler.step(tokens=tokens, phase=phase):
                self._step(step, slower)
        self.profiler.disable_graph()

    def _step(self, step: int, slower: int) -> None:
        advance = self.profiler.advance
        for layer, bricks in enumerate(self.bricks):
            for work, brick in bricks:
                with brick:
                    began = self.profiler.elapsed_ns()
                    advance(int(work.typical_ns * slower * self._stray() * (1 + 0.01 * layer)))
                    self._launches(step, layer, brick.slot, work.kernels, began)
        with self.head:
            began = self.profiler.elapsed_ns()
            self._tiles()
            self._launches(step, -1, self.head.slot, HEAD_KERNELS, began)
        advance(70_000)

    def _tiles(self) -> None:
        tiles = self.profiler.tiles
        for row in range(TILE_ROWS):
            for column in range(TILE_COLUMNS):
                tile = tiles.start(self.bl.TileLevel.MACRO, row, column)
                self.profiler.advance(int(6_000 * self._stray() * (1 + 0.15 * (column == 7))))
                tiles.stop(tile, 1, 4.0e5, 200_000)

    def _launches(
        self, step: int, layer: int, slot: int, kernels: Sequence[str], began_ns: int
    ) -> None:
        """Write the kernels of a brick, one after the other over its time."""
        traces, on_device = self.profiler.traces, layer % 4 != 3
        each_ns = (self.profiler.elapsed_ns() - began_ns) // len(kernels)
        where = ON_STREAMS[layer % 2] if on_device else ON_HOST
        for place, name in enumerate(kernels):
            if self.left == 0:
                return
            self.left -= 1
            start_ns = began_ns + place * each_ns
            number = traces.reserve()
            traces.write(
                number,
                name=name,
                enqueue_ns=max(0, start_ns - 4_000) if on_device else start_ns,
                start_ns=start_ns,
                end_ns=start_ns + each_ns * 9 // 10,
                layer=layer,
                position=step,
                slot=slot,
                operands=self._operands(number) if number % OPERANDS_EVERY == 0 else (),
                **where,
            )

    def _operands(self, number: int) -> Iterator[Any]:
        from brickline.traces import Operand

        for role in (0, 1):
            tensor = (number * 2 + role) % 1000
            yield Operand(
                role,
                0,
                tensor + 1,
                number // 1000,
                "f32",
                (1, 64),
                (64, 1),
                self.fingerprints[tensor],
            )

    def _fingerprint(self, number: int) -> int:
        import numpy as np

        values = np.random.default_rng(number).standard_normal((1, 64), np.float32)
        return int(self.profiler.traces.fingerprint(self.bl.fingerprint(values).to_bytes()))

    def _stray(self) -> float:
        self.drawn = (self.drawn + 1) % len(self.strays)
        return self.strays[self.drawn]


if __name__ == "__main__":
    began = time.perf_counter()
    print(million(int(sys.argv[1]) if len(sys.argv) > 1 else TRACES))
    print(f"{time.perf_counter() - began:.1f} s", file=sys.stderr)
