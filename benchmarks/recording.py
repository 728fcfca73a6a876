"""What recording adds to the forward pass of a small GPT (hidden size 1024), against its peers.

Claims: with fingerprints of every module's inputs and outputs, at most 1.3 times the bare forward
on a CPU and at most 1.5 times eager on CUDA; time alone, at most 1.03 times. On CUDA, passes that
wait for the host to launch kernels are measured beside one that waits for the device. Peers in the
same run: torch's DebugMode with hashes of all ops' inputs and outputs, and torch.profiler.

Each variant has a copy of the model and is measured in direct succession with the bare one; the
recorded copies have fingerprinted their weights, which is done once, before. The first pass, which
does that, and closing the run are in the note. Run with ``python benchmarks/recording.py``.
"""

from __future__ import annotations

import copy
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
from harness import Claim

HIDDEN = 1024
HEADS = 16
VOCABULARY = 4096
FINGERPRINTS, TIME, BARE = "fingerprints", "time alone", "bare"
DEBUG, PROFILER = "DebugMode with hashes", "torch.profiler"
AGAIN = "same code twice"
TARGETS = {("cpu", FINGERPRINTS): 1.3, ("cuda", FINGERPRINTS): 1.5, TIME: 1.03}


def gpt(torch: Any, layers: int) -> Any:
    """A decoder as nanoGPT has it: LayerNorm, fused QKV, SDPA, GELU."""
    nn, functional = torch.nn, torch.nn.functional

    class Attention(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.c_attn = nn.Linear(HIDDEN, 3 * HIDDEN)
            self.c_proj = nn.Linear(HIDDEN, HIDDEN)

        def forward(self, x: Any) -> Any:
            batch, tokens, _ = x.shape
            parts = self.c_attn(x).view(batch, tokens, 3, HEADS, HIDDEN // HEADS)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.c_proj(y.transpose(1, 2).reshape(batch, tokens, HIDDEN))

    class Mlp(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.c_fc = nn.Linear(HIDDEN, 4 * HIDDEN)
            self.gelu = nn.GELU()
            self.c_proj = nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x: Any) -> Any:
            return self.c_proj(self.gelu(self.c_fc(x)))

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.ln_1, self.attn = nn.LayerNorm(HIDDEN), Attention()
            self.ln_2, self.mlp = nn.LayerNorm(HIDDEN), Mlp()

        def forward(self, x: Any) -> Any:
            x = x + self.attn(self.ln_1(x))
            return x + self.mlp(self.ln_2(x))

    class Gpt(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.wte, self.wpe = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(2048, HIDDEN)
            self.h = nn.ModuleList(Block() for _ in range(layers))
            self.ln_f = nn.LayerNorm(HIDDEN)
            self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

        def forward(self, ids: Any) -> Any:
            x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
            for block in self.h:
                x = block(x)
            return self.lm_head(self.ln_f(x))

    torch.manual_seed(0)
    return Gpt().eval()


# ----------------------------------------------------------------------------------------- variants


@contextmanager
def debug_mode() -> Iterator[None]:
    from torch.utils._debug_mode import DebugMode

    with (
        DebugMode(record_nn_module=True),
        DebugMode.log_tensor_hashes(hash_fn="hash_tensor", hash_inputs=True),
    ):
        yield


@contextmanager
def profiler(torch: Any, device: str) -> Iterator[None]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities):
        yield


def measure(
    torch: Any,
    device: str,
    dtype: str,
    shape: tuple[int, int],
    layers: int,
    rounds: int,
    repeats: int,
) -> dict[str, Any]:
    """Seconds of a forward pass, one value per variant and round, and what else it costs."""
    from brickline.adapters.recording import record

    model = gpt(torch, layers).to(device, getattr(torch, dtype))
    ids = torch.arange(shape[0] * shape[1], device=device).reshape(shape) % VOCABULARY
    directory = Path(tempfile.mkdtemp(prefix="brickline-recording-"))
    notes: dict[str, float] = {}
    with ExitStack() as stack, torch.no_grad():
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        models = {BARE: model, AGAIN: copy.deepcopy(model)}
        recordings = {}
        for name in (FINGERPRINTS, TIME):
            models[name] = copy.deepcopy(model)
            path = directory / name.replace(" ", "-")
            recordings[name] = record(path, models[name], fingerprints=name == FINGERPRINTS)
            recordings[name].__enter__()
        for name, each in models.items():
            begin = time.perf_counter()
            each(ids)
            synchronise(torch, device)
            notes[f"first {name}"] = time.perf_counter() - begin
        for each in models.values():
            for _ in range(2):
                each(ids)
        contexts: dict[str, Callable[[], Any]] = {
            DEBUG: debug_mode,
            PROFILER: lambda: profiler(torch, device),
        }
        names = [name for name in (*models, *contexts) if name != BARE]
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        rng = random.Random(0)
        for at in range(rounds):
            rng.shuffle(names)
            for name in names:
                if name in contexts and at >= max(3, rounds // 5):
                    continue  # peers are far from one, so a few rounds say enough
                times[name] += pair(
                    torch,
                    device,
                    model,
                    models.get(name, model),
                    ids,
                    repeats,
                    contexts.get(name, ExitStack),
                    at % 2 == 0,
                )
        begin = time.perf_counter()
        for recording in recordings.values():
            recording.__exit__(None, None, None)
        notes["closing"] = time.perf_counter() - begin
        unobserved = recordings[FINGERPRINTS].facts["unobserved"]
        taken = recordings[FINGERPRINTS].facts["fingerprints_taken"]
    return {"times": times, "notes": notes, "unobserved": unobserved, "fingerprints": taken}


def pair(
    torch: Any,
    device: str,
    bare: Any,
    other: Any,
    ids: Any,
    repeats: int,
    context: Callable[[], Any],
    first: bool,
) -> list[tuple[float, float]]:
    """Seconds of a variant and of the bare forward in direct succession, in either order.

    Noise on a shared machine outlasts a pass, so the two of a pair see the same of it.
    """
    found = {}
    for is_bare in (first, not first):
        run = bare if is_bare else other
        try:
            with ExitStack() if is_bare else context():
                found[is_bare] = seconds(torch, device, lambda: run(ids), repeats)  # noqa: B023
        except (ImportError, AttributeError, TypeError, RuntimeError):
            return []  # this torch lacks it
    return [(found[False], found[True])]


def seconds(torch: Any, device: str, run: Callable[[], Any], repeats: int) -> float:
    """CPU time of a pass on the CPU, time until the device is done elsewhere."""
    if device == "cpu":
        begin = time.process_time()
        for _ in range(repeats):
            run()
        return (time.process_time() - begin) / repeats
    synchronise(torch, device)
    begin = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronise(torch, device)
    return (time.perf_counter() - begin) / repeats


def synchronise(torch: Any, device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def worker(_: int, quick: bool) -> list[dict[str, Any]]:
    """Every case of this machine, in one process."""
    import torch

    torch.set_num_threads(1)
    rows = []
    with harness.quiet():
        for label, device, *given in cases(quick, torch):
            row = measure(torch, device, *given)
            rows.append({"label": label, "device": device, **row})
    return rows


def cases(quick: bool, torch: Any) -> Iterator[tuple[Any, ...]]:
    """Label, device, dtype, shape of the tokens, layers, rounds and repeats of each case."""
    layers, rounds = (2, 9) if quick else (4, 25)
    name = f"CPU f32, {layers} layers"
    yield f"{name}, 1 x 64 tokens", "cpu", "float32", (1, 64), layers, rounds, 1
    yield f"{name}, 1 token", "cpu", "float32", (1, 1), layers, rounds, 4
    if torch.cuda.is_available():
        rounds = 5 if quick else 15
        for dtype, shape in (
            ("float32", (8, 512)),
            ("bfloat16", (8, 512)),
            ("bfloat16", (1, 128)),
            ("bfloat16", (1, 1)),
        ):
            tokens = f"{shape[0]} x {shape[1]} tokens"
            yield f"CUDA {dtype}, 12 layers, {tokens}", "cuda", dtype, shape, 12, rounds, 10


# ------------------------------------------------------------------------------------------- claims


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Two claims for each case."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return [
            Claim(
                "recording", None, "times the bare forward", None, note="torch is absent"
            ).as_dict()
        ]
    before = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "ONEDNN_MAX_CPU_ISA")}
    os.environ.update({"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"})
    try:
        processes = harness.in_processes(__file__, ["--quick"] if quick else [], 1 if quick else 2)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return [
        _claim(name, [rows[at] for rows in processes])
        for at in range(len(processes[0]))
        for name in (FINGERPRINTS, TIME)
    ]


def _claim(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ratios are taken pair by pair, and their median over all processes is the figure."""
    device, label = rows[0]["device"], rows[0]["label"]
    ratios = {
        variant: _ratio([pair for row in rows for pair in row["times"][variant]])
        for variant in rows[0]["times"]
    }
    bare = statistics.median(pair[1] for row in rows for pair in row["times"][name])
    notes = rows[0]["notes"]
    note = (
        f"bare {bare * 1e3:.3g} ms; first pass {notes[f'first {name}'] * 1e3:.3g} ms "
        f"against {notes[f'first {BARE}'] * 1e3:.3g} ms; closing {notes['closing'] * 1e3:.3g} ms"
    )
    if name == FINGERPRINTS:
        note += (
            f"; {rows[0]['fingerprints']} fingerprints; not observed: {rows[0]['unobserved'] or 0}"
        )
    return Claim(
        name=f"recording: {name}, {label}",
        figure=ratios[name],
        unit="times the bare forward",
        target=TARGETS.get(name, TARGETS.get((device, name))),
        peers={each: ratios[each] for each in (DEBUG, PROFILER, AGAIN)},
        note=note,
    ).as_dict()


def _ratio(pairs: list[tuple[float, float]]) -> float | None:
    return statistics.median(ours / bare for ours, bare in pairs) if pairs else None


if __name__ == "__main__":
    sys.exit(harness.main(run, worker, __doc__))
