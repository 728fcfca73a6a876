"""The third part of ``brickline demo``: a decoder made of kernels, on CPU and on CUDA.

The same plan decodes on both. A few tokens are recorded with fingerprints on each device, so that
the two can be compared launch by launch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brickline.decoder import Decoder, Decoding
from brickline.decoder_weights import DecoderConfig, random_weights
from brickline.device.base import open_device
from brickline.errors import DeviceError
from brickline.profiler import BrickProfiler

CONFIG = DecoderConfig(
    vocabulary=4096,
    dim=512,
    hidden=1408,
    layers=6,
    heads=8,
    kv_heads=4,
    head_dim=64,
    capacity=2048,
    tied=False,
)
COMPARED_TOKENS = 4
TIMED_TOKENS = 48


@dataclass(frozen=True)
class DemoDecoder:
    """The demo's decoder with its weights."""

    decoder: Decoder
    weights: dict[str, Any]

    @classmethod
    def make(cls) -> DemoDecoder:
        """Return a decoder with random weights."""
        return cls(Decoder(CONFIG, dtype="f32"), random_weights(CONFIG, dtype="f32", seed=11))

    def on(self, device: str, executor: str, **options: Any) -> Decoding:
        """Return the decoder on a device."""
        return self.decoder.prepare(self.weights, device, executor, **options)

    def tokens_per_second(self, device: str, executor: str, prompt: Sequence[int]) -> float:
        """Return how fast it decodes when nobody looks."""
        decoding = self.on(device, executor)
        decoding.generate(prompt, 16)
        began = time.perf_counter()
        for _ in range(TIMED_TOKENS):
            decoding.step()
        _ = decoding.token
        return TIMED_TOKENS / (time.perf_counter() - began)

    def record(self, device: str, path: Path, prompt: Sequence[int], *, overwrite: bool) -> None:
        """Leave a run in which every launch of a few tokens has fingerprints."""
        with BrickProfiler("demo", enabled=True, path=path, overwrite=overwrite) as profiler:
            decoding = self.on(device, "serial", profiler=profiler, fingerprints=True)
            decoding.generate(prompt[:2], COMPARED_TOKENS)


def cuda_device() -> str | None:
    """Return the first GPU, or None where there is none that can be used."""
    try:
        return open_device("CUDA:0").name
    except DeviceError:
        return None
