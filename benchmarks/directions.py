"""Does `compare` tell rounding from a small difference that has a direction?

Claims: random pairs of runs of the same model are matched, all of them, whatever rounds differently
on the two sides: products summed in another order, eager attention against SDPA, TF32, and float16
or bfloat16 against float32. And most faults are not called matched that are no larger than rounding
and either common to a whole tensor (a factor, a constant) or confined to a few elements (a tail of
zeros). Peers are the decision rules of other tools, on the same tensors.

A model is one to three blocks of random width, length, norm and activation, on random inputs; a
fault is planted in one of its modules. On a GPU, pairs lie there, and CPU against GPU comes on top.
Run with ``python benchmarks/directions.py``.
"""

from __future__ import annotations

import copy
import math
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Claim

SEED = 21
PAIRS = 240
FAULTS = 120
CLEAN = "directions: clean pairs that are not matched"
MISSED = 35.0
"""Percent of planted faults that may be called matched: many lie in small tensors, or behind inputs
that differ by as much."""
Row = dict[str, Any]
COARSE = ("bfloat16", "float16")
WIDTHS, LENGTHS, BATCHES = (64, 96, 128, 256, 512), (8, 31, 64, 128), (1, 2, 4)


# ------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Way:
    """How one side computes, where the other one does so plainly."""

    dtype: str = "float32"
    reordered: bool = False
    sdpa: bool = False
    tf32: bool = False
    device: str = "cpu"


def block_classes(torch: Any) -> Any:
    """Return the class of a model of random shape."""
    nn, functional = torch.nn, torch.nn.functional

    class Linear(nn.Linear):  # type: ignore[misc]
        order: Any = None
        fault: Any = None

        def forward(self, x: Any) -> Any:
            if self.order is None:
                y = super().forward(x)
            else:
                weight = self.weight[:, self.order]
                y = functional.linear(x[..., self.order], weight, self.bias)
            return y if self.fault is None else self.fault(y)

    class RMSNorm(nn.Module):  # type: ignore[misc]
        fault: Any = None

        def __init__(self, width: int, wide: bool) -> None:
            super().__init__()
            self.weight, self.wide = nn.Parameter(0.5 + torch.rand(width)), wide

        def forward(self, x: Any) -> Any:
            inner = x.float() if self.wide else x
            scaled = inner * torch.rsqrt(inner.pow(2).mean(-1, keepdim=True) + 1e-6)
            y = scaled.to(x.dtype) * self.weight
            return y if self.fault is None else self.fault(y)

    class LayerNorm(nn.LayerNorm):  # type: ignore[misc]
        fault: Any = None

        def forward(self, x: Any) -> Any:
            y = super().forward(x)
            return y if self.fault is None else self.fault(y)

    class Attention(nn.Module):  # type: ignore[misc]
        fault: Any = None
        sdpa = False

        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)

        def forward(self, x: Any) -> Any:
            batch, tokens, width = x.shape
            parts = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
            q, k, v = parts.permute(2, 0, 3, 1, 4)
            if self.sdpa:
                y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
                seen = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
                scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
                y = scores.softmax(-1) @ v
            y = self.out(y.transpose(1, 2).reshape(batch, tokens, width))
            return y if self.fault is None else self.fault(y)

    class Feed(nn.Module):  # type: ignore[misc]
        fault: Any = None

        def __init__(self, width: int, gated: bool) -> None:
            super().__init__()
            self.up = Linear(width, 4 * width)
            self.gate = Linear(width, 4 * width) if gated else None
            self.act = nn.SiLU() if gated else nn.GELU()
            self.down = Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            y = self.up(x)
            y = self.act(y) if self.gate is None else self.act(self.gate(x)) * y
            y = self.down(y)
            return y if self.fault is None else self.fault(y)

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, width: int, draw: random.Random) -> None:
            super().__init__()
            heads = draw.choice((2, 4))
            kind, wide = draw.choice(("layer", "rms")), draw.random() < 0.7
            norms = [LayerNorm(width) if kind == "layer" else RMSNorm(width, wide) for _ in "ab"]
            self.attention_norm, self.feed_norm = norms
            self.attention = Attention(width, heads)
            self.feed = Feed(width, draw.random() < 0.5)

        def forward(self, x: Any) -> Any:
            x = x + self.attention(self.attention_norm(x))
            return x + self.feed(self.feed_norm(x))

    class Model(nn.Module):  # type: ignore[misc]
        def __init__(self, draw: random.Random) -> None:
            super().__init__()
            width = draw.choice(WIDTHS)
            self.shape = draw.choice(BATCHES), draw.choice(LENGTHS), width
            self.layers = nn.ModuleList(Block(width, draw) for _ in range(draw.randint(1, 3)))
            self.norm, self.head = LayerNorm(width), Linear(width, draw.choice((10, 101, 1000)))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = layer(x)
            return self.head(self.norm(x))

    return Model


def given(torch: Any, draw: random.Random, shape: tuple[int, ...]) -> Any:
    """Return random inputs: normal, with a mean, of one sign, or with large channels."""
    x = torch.randn(shape)
    kind = draw.choice(("normal", "normal", "mean", "positive", "channels"))
    if kind == "mean":
        return x + 1.0
    if kind == "positive":
        return x.abs() + 0.1
    if kind == "channels":
        return x * torch.where(torch.rand(shape[-1]) < 0.03, 10.0, 1.0)
    return x


def side(torch: Any, model: Any, way: Way) -> Any:
    """Return a copy of a model that computes in another way."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if way.reordered and isinstance(module, torch.nn.Linear):
            module.order = torch.randperm(module.in_features).to(way.device)
        if hasattr(module, "sdpa"):
            module.sdpa = way.sdpa
    return model.to(getattr(torch, way.dtype)).to(way.device)


# -------------------------------------------------------------------------------------------- pairs


def ways(device: str, draw: random.Random) -> tuple[str, Way, Way]:
    """Return what is different about a pair, and how its two sides compute."""
    dtype = draw.choice(("float32", *COARSE))
    plain = Way(dtype, device=device)
    kinds = ["another order", "SDPA", "SDPA and another order", "float32 reference"]
    kinds += ["TF32", "the other device"] if device == "cuda" else []
    kind = draw.choice(kinds)
    if kind == "another order":
        return f"{kind}, {dtype}", Way(dtype, reordered=True, device=device), plain
    if kind == "SDPA":
        return f"{kind}, {dtype}", Way(dtype, sdpa=True, device=device), plain
    if kind == "SDPA and another order":
        return f"{kind}, {dtype}", Way(dtype, reordered=True, sdpa=True, device=device), plain
    if kind == "TF32":
        return kind, Way(tf32=True, device=device), Way(device=device)
    if kind == "the other device":
        return f"{kind}, {dtype}", plain, Way(dtype)
    coarse = draw.choice(COARSE)
    sdpa = draw.random() < 0.3
    return f"{kind}, {coarse}", Way(coarse, sdpa=sdpa, device=device), Way(device=device)


def compared(torch: Any, candidate: Any, reference: Any, x: Any, both: tuple[Way, Way]) -> Any:
    """Record both sides, and compare the runs; return the report and what peers' rules say."""
    import brickline as bl

    outputs: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="brickline-directions-") as directory:
        paths = [Path(directory) / name for name in ("candidate", "reference")]
        for path, model, way in zip(paths, (candidate, reference), both, strict=True):
            outputs.append({})
            on_side = x.to(getattr(torch, way.dtype)).to(way.device)
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(tf32(torch, way.tf32))
                stack.enter_context(kept(model, outputs[-1]))
                stack.enter_context(bl.record(path, model))
                model(on_side)
        report = bl.compare(*paths)
    return report, peers(*outputs)


@contextmanager
def kept(model: Any, outputs: dict[str, Any]) -> Iterator[None]:
    """Keep what each module puts out."""

    def hook(name: str) -> Callable[..., None]:
        return lambda module, args, out: outputs.__setitem__(name, out.detach().cpu())

    hooks = [each.register_forward_hook(hook(name)) for name, each in model.named_modules()]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()


@contextmanager
def tf32(torch: Any, is_on: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = is_on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def peers(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, bool]:
    """Return which rules say that some module's output differs."""
    from localisation.rules import RULES

    pairs = [(value, theirs[name]) for name, value in ours.items() if name in theirs]
    return {
        name: any(rule(one.float(), two.float()) for one, two in pairs)
        for name, rule in RULES.items()
    }


# ------------------------------------------------------------------------------------------- faults


def planted(torch: Any, model: Any, kind: str, size: float, draw: random.Random) -> str:
    """Plant a fault of a relative size into one module; return its name."""
    places = [(name, each) for name, each in model.named_modules() if hasattr(each, "fault")]
    name, module = draw.choice(places)

    def factor(y: Any) -> Any:
        return (y.double() * (1.0 - size)).to(y.dtype)

    def constant(y: Any) -> Any:
        return (y.double() + size * y.double().square().mean().sqrt()).to(y.dtype)

    def tail(y: Any) -> Any:
        out = y.contiguous().clone()
        count = max(1, round(size**2 * y.numel()))
        out.view(-1)[-count:] = 0
        return out

    module.fault = {"factor": factor, "constant": constant, "tail": tail}[kind]
    return name


def sized(kind: str, roundoff: float, draw: random.Random) -> float:
    """Return a size around the roundoff of a dtype, in relative L2."""
    return roundoff * draw.uniform(1.25, 2.5) * (1.0 if kind != "tail" else 2.0)


# ------------------------------------------------------------------------------------------- claims


def clean_rows(torch: Any, device: str, count: int, draw: random.Random) -> Iterator[Row]:
    model_class = block_classes(torch)
    for _ in range(count):
        torch.manual_seed(draw.randrange(2**31))
        model = model_class(draw).eval()
        kind, ours, theirs = ways(device, draw)
        x = given(torch, draw, model.shape)
        report, rules = compared(
            torch, side(torch, model, ours), side(torch, model, theirs), x, (ours, theirs)
        )
        told = str(report.status) == "matched"
        yield {"kind": kind, "good": told, "peers": rules, "said": report.headline}


def fault_rows(torch: Any, device: str, count: int, draw: random.Random) -> Iterator[Row]:
    model_class = block_classes(torch)
    for at in range(count):
        torch.manual_seed(draw.randrange(2**31))
        model = model_class(draw).eval()
        kind, dtype = ("factor", "constant", "tail")[at % 3], draw.choice(COARSE)
        ours = Way(dtype, reordered=draw.random() < 0.5, device=device)
        theirs = Way(dtype, device=device)
        x = given(torch, draw, model.shape)
        candidate, reference = side(torch, model, ours), side(torch, model, theirs)
        size = sized(kind, torch.finfo(getattr(torch, dtype)).eps / 2, draw)
        name = planted(torch, candidate, kind, size, draw)
        report, rules = compared(torch, candidate, reference, x, (ours, theirs))
        named = [finding.name for finding in report.suspects]
        yield {
            "kind": kind,
            "good": str(report.status) != "matched",
            "named": named[:1] == [name],
            "wrong": bool(named) and named[0] != name,
            "peers": rules,
            "said": f"{name} ({dtype}, {size:.1e}): {report.headline}",
        }


def worker(_: int, quick: bool) -> Row:
    """Every pair of this machine, in one process."""
    import torch

    torch.set_num_threads(1)
    device = "cpu" if harness.torch_with_cuda() is None else "cuda"
    draw = random.Random(SEED)
    few = 6 if quick else 1
    with harness.quiet():
        return {
            "device": device,
            "clean": list(clean_rows(torch, device, PAIRS // few, draw)),
            "faults": list(fault_rows(torch, device, FAULTS // few, draw)),
        }


def run(quick: bool = False) -> list[Row]:
    """One claim of clean pairs, and one of each kind of fault."""
    if not harness.has_torch():
        note = "torch is not installed: pip install torch"
        return [
            Claim(
                name="clean pairs matched", figure=None, unit="%", target=0.0, note=note
            ).as_dict()
        ]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    (rows,) = harness.in_processes(__file__, ["--quick"] if quick else [], 1)
    return [_clean(rows["clean"], rows["device"]), *_faults(rows["faults"], rows["device"])]


def _clean(rows: list[Row], device: str) -> Row:
    bad = [row for row in rows if not row["good"]]
    kinds = Counter(row["kind"] for row in rows)
    shown = "; ".join(f"{kind}: {row['said']}" for row in bad[:5] for kind in [row["kind"]])
    note = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return Claim(
        name=f"{CLEAN}, {device}",
        figure=100.0 * len(bad) / len(rows),
        unit="%",
        target=0.0,
        peers={name: _percent(rows, name) for name in rows[0]["peers"]},
        note=f"{len(rows)} pairs: {note}" + (f". Not matched: {shown}" if bad else ""),
    ).as_dict()


def _faults(rows: list[Row], device: str) -> Iterator[Row]:
    for kind in ("factor", "constant", "tail"):
        chosen = [row for row in rows if row["kind"] == kind]
        missed = sum(row["good"] is False for row in chosen)
        named, wrong = (sum(row[word] for row in chosen) for word in ("named", "wrong"))
        peers = {name: 100.0 - _percent(chosen, name) for name in chosen[0]["peers"]}
        yield Claim(
            name=f"directions: faults no larger than rounding called matched, {kind}, {device}",
            figure=100.0 * missed / len(chosen),
            unit="%",
            target=MISSED,
            peers=peers,
            note=f"{len(chosen)} faults: {named} named first, {wrong} others named first",
        ).as_dict()


def _percent(rows: list[Row], rule: str) -> float:
    return 100.0 * sum(row["peers"][rule] for row in rows) / len(rows)


if __name__ == "__main__":
    sys.exit(harness.main(run, worker, __doc__))
