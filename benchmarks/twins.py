"""Whether two runs with float64 twins are told apart, and what recording the twins costs.

Claims: of the 30 pairs of runs in `twin_cases.py`, across dtypes, code and, where CUDA is there,
devices, all verdicts are right: matched where nothing is wrong, else diverged with the right
module first. Beside it what `compare` says of the same runs without their twins. Recording with
twins takes at most eight times as long as without, on layers of hidden size 1024.

Run with ``python benchmarks/twins.py``; ``--quick`` takes one repetition.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
from harness import Claim

COST = 8.0
HIDDEN, TOKENS = 1024, 256


def scores(on_cuda: bool) -> tuple[list[str], list[str], int]:
    """Return the pairs that were judged wrongly with and without twins, and how many there are."""
    import torch
    import twin_cases as cases

    wrong: list[str] = []
    wrong_without: list[str] = []
    with torch.no_grad():
        for pair in cases.PAIRS:
            candidate = replace(pair.candidate, device="cuda") if on_cuda else pair.candidate
            with tempfile.TemporaryDirectory() as directory:
                sides = {"candidate": candidate, "reference": pair.reference}
                paths = [_recorded(Path(directory) / name, side) for name, side in sides.items()]
                said = _said(paths, pair)
                if said:
                    wrong.append(f"{pair.title}: {said}")
                for file in Path(directory).rglob("*.twins"):
                    file.unlink()
                said = _said(paths, pair)
                if said:
                    wrong_without.append(f"{pair.title}: {said}")
    return wrong, wrong_without, len(cases.PAIRS)


def _recorded(path: Path, side: Any) -> Path:
    import brickline as bl

    model = side.model()
    with bl.record(path, model, twin=True) as recording:
        side.run(model)
    if recording.facts["twin"]["none"] or recording.failures:
        print(recording.summary(), file=sys.stderr)
    return path


def _said(paths: list[Path], pair: Any) -> str:
    """Return what was said of a pair; empty where it is right."""
    import brickline as bl

    report = bl.compare(*paths)
    if not pair.names:
        return "" if report.matched else f"{report.status}, {report.headline}"
    if report.diverged and report.findings and report.findings[0].name in pair.names:
        return ""
    return f"{report.status}, {report.headline}"


def costs(on_cuda: bool, repeats: int) -> dict[str, tuple[float, float, float]]:
    """Return milliseconds of a call bare, recorded, and recorded with its twin, by dtype."""
    import torch

    device = "cuda" if on_cuda else "cpu"
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = _large(torch).to(dtype).to(device).eval()
        tokens = torch.randint(0, 4096, (1, TOKENS)).to(device)

        def call(model: Any = model, tokens: Any = tokens) -> None:
            model(tokens)
            if on_cuda:
                torch.cuda.synchronize()

        with torch.no_grad():
            times = [_median(call, repeats)]
            for twin in (False, True):
                times.append(_recorded_median(model, call, repeats, twin=twin))
        found[str(dtype).removeprefix("torch.")] = tuple(1e3 * each for each in times)
    return found  # type: ignore[return-value]


def _recorded_median(model: Any, call: Callable[[], None], repeats: int, *, twin: bool) -> float:
    import brickline as bl

    with (
        tempfile.TemporaryDirectory() as directory,
        bl.record(Path(directory) / "a.brick", model, twin=twin),
    ):
        call()
        return _median(call, repeats)


def _median(call: Callable[[], None], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _large(torch: Any) -> Any:
    """Four layers of a Llama's shapes: norm, q, k, v, SDPA, gated MLP."""
    nn, functional = torch.nn, torch.nn.functional

    class Layer(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.norm_1, self.norm_2 = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
            self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
            self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
            self.gate, self.up = (nn.Linear(HIDDEN, 3 * HIDDEN, bias=False) for _ in "gu")
            self.down = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 16, -1)).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            y = self.norm_2(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    layers = [Layer() for _ in range(4)]
    return nn.Sequential(nn.Embedding(4096, HIDDEN), *layers, nn.Linear(HIDDEN, 4096, bias=False))


def run(quick: bool) -> list[dict[str, Any]]:
    """Return the claims."""
    if not harness.has_torch():
        return harness.not_measured("verdicts of runs with float64 twins", harness.NO_TORCH)
    import torch

    torch.set_num_threads(1)
    on_cuda = torch.cuda.is_available()
    wrong, without, count = scores(on_cuda)
    claims = [
        Claim(
            f"wrong verdicts of {count} pairs of runs with float64 twins",
            float(len(wrong)),
            "pairs",
            0.0,
            peers={"compare without twins": float(len(without))},
            note="; ".join(wrong) or "all right",
        )
    ]
    for dtype, (bare, plain, twin) in costs(on_cuda, 3 if quick else 7).items():
        claims.append(
            Claim(
                f"recording with twins, of recording without ({dtype})",
                twin / plain,
                "times",
                COST,
                note=f"{twin:.1f} ms of {plain:.1f} ms, bare {bare:.1f} ms; 4 layers of 1024, "
                f"{TOKENS} tokens, {'CUDA' if on_cuda else 'one CPU thread'}",
            )
        )
    return [claim.as_dict() for claim in claims]


if __name__ == "__main__":
    sys.exit(harness.main(run, None, __doc__))
