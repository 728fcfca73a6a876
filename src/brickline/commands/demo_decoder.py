"""The third part of ``brickline demo``: a decoder made of kernels, on every device and executor.

The same plan decodes everywhere, profiled, and the bits of its logits are compared. A few tokens
are recorded with fingerprints on CPU and on CUDA, so that the two can be compared launch by launch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.decoder import Decoder, Decoding
from brickline.decoder_weights import DecoderConfig, random_weights
from brickline.device.base import Sampling, open_device
from brickline.errors import DeviceError
from brickline.executor.megakernel.telling import tell_profiler
from brickline.megakernel_report import MegakernelReport
from brickline.profile import Profile
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
FIRST_TOKENS = 16
TIMED_TOKENS = 48
PROFILED_TOKENS = 16


@dataclass(frozen=True)
class Decoded:
    """What came of decoding in one way."""

    device: str
    executor: str
    tokens_per_second: float
    """When nobody looks."""
    tokens: tuple[int, ...]
    """The first ones, and those of the steps that were profiled."""
    logits: NDArray[np.float32]
    """A row for each step that was profiled."""
    profile: Profile
    report: MegakernelReport | None
    """Of the last step, where that was a megakernel."""

    @property
    def step_ns(self) -> float:
        """Median time of a profiled step, from its call until its token is there."""
        return self.profile.steps["decode"].stats.p50_ns

    @property
    def busiest(self) -> tuple[str, float]:
        """The brick that most of the time went to, and its share of the time in all bricks."""
        if self.report is None or self.report.spans is None:
            brick = self.profile.bricks[0]
            return brick.name, self.profile.share(brick)
        spans, tasks = self.report.spans, self.report.tasks
        work = np.bincount(tasks.brick[spans.task], spans.work_ns)
        return self.report.bricks[int(work.argmax())], float(work.max() / work.sum())

    def against(self, reference: Decoded) -> str:
        """Say whether tokens and logits are those of another way, bit for bit."""
        pairs = zip(self.tokens, reference.tokens, strict=True)
        other = [place for place, (mine, theirs) in enumerate(pairs) if mine != theirs]
        if other:
            return f"other tokens from the {other[0] + 1}. on"
        differ = np.count_nonzero(self.logits.view(np.uint32) != reference.logits.view(np.uint32))
        if differ:
            return f"{differ} of {self.logits.size} logits differ"
        return "the same bits"


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

    def decode(self, device: str, executor: str, prompt: Sequence[int]) -> Decoded:
        """Return what it decodes, how fast it is when nobody looks, and its profile."""
        options = {"trace": True} if executor == "megakernel" else {}
        decoding = self.on(device, executor, **options)
        tokens = decoding.generate(prompt, FIRST_TOKENS)
        began = time.perf_counter()
        for _ in range(TIMED_TOKENS):
            decoding.step()
        _ = decoding.token
        rate = TIMED_TOKENS / (time.perf_counter() - began)
        more, logits, profile = _profiled(decoding)
        return Decoded(
            device,
            executor,
            rate,
            (*tokens, *more),
            np.stack(logits),
            profile,
            decoding.prepared.report,
        )

    def record(self, device: str, path: Path, prompt: Sequence[int], *, overwrite: bool) -> None:
        """Leave a run in which every launch of a few tokens has fingerprints."""
        with BrickProfiler("demo", enabled=True, path=path, overwrite=overwrite) as profiler:
            decoding = self.on(device, "serial", profiler=profiler, fingerprints=True)
            decoding.generate(prompt[:2], COMPARED_TOKENS)


def _profiled(decoding: Decoding) -> tuple[list[int], list[NDArray[np.float32]], Profile]:
    """Decode a few tokens for a profiler; return them with their logits, and the profile."""
    prepared = decoding.prepared
    tokens, logits, every = [], [], Sampling(steps=1)
    with BrickProfiler("demo", enabled=True, device=prepared.device, sampling=every) as profiler:
        # A megakernel took its times itself: it is not watched, and they are told after each step.
        if prepared.executor != "megakernel":
            prepared.watch(profiler)
        for _ in range(PROFILED_TOKENS):
            with profiler.step(tokens=1, phase="decode"):
                decoding.step()
                tokens.append(decoding.token)
            logits.append(decoding.logits())
            if prepared.report is not None:
                tell_profiler(prepared.report, profiler, decoding.position - 1)
        prepared.watch(None)
        return tokens, logits, profiler.profile()


def cuda_device() -> str | None:
    """Return the first GPU, or None where there is none that can be used."""
    try:
        return open_device("CUDA:0").name
    except DeviceError:
        return None
