"""How long `check` takes on a decoder, and how much memory it needs.

A Llama-shaped decoder with random weights in bfloat16 is checked against itself over a prompt,
and against itself with one fault. On CUDA it has the shapes of Llama 3.2 1B and 128 tokens; on a
CPU it is smaller. The peers are the model's own forward pass, and PyTorch's DebugMode with hashes.

    python benchmarks/checking.py [--quick]
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import harness
import torch
from harness import Claim
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu

import brickline as bl

TARGET_S = 60.0
"""For a decoder of 1B parameters on an H200; smaller ones must not take longer either."""


class Norm(nn.Module):
    """Root mean square norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (wide * scale).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Grouped attention with rotary positions."""

    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Attend to what came before."""
        batch, length, width = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.groups, self.size).transpose(1, 2)
        q, k = self.turned(q, cos, sin), self.turned(k, cos, sin)
        repeat = self.heads // self.groups
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, width))

    @staticmethod
    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate pairs by their position."""
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, width: int, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.input_norm, self.post_norm = Norm(width), Norm(width)
        self.attention = Attention(width, heads, groups)
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Add attention, then the feed-forward part."""
        x = x + self.attention(self.input_norm(x), cos, sin)
        y = self.post_norm(x)
        return x + self.down_proj(silu(self.gate_proj(y)) * self.up_proj(y))


class Decoder(nn.Module):
    """A Llama-shaped decoder."""

    def __init__(
        self, layers: int, width: int, hidden: int, heads: int, groups: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.size = width // heads
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, hidden, heads, groups) for _ in range(layers))
        self.norm = Norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.embed(tokens)
        place = torch.arange(tokens.shape[1], device=tokens.device).float()
        steps = torch.arange(0, self.size, 2, device=tokens.device).float() / self.size
        angles = torch.outer(place, 500000.0**-steps)
        cos, sin = (f(torch.cat([angles, angles], -1)).to(x.dtype) for f in (torch.cos, torch.sin))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def build(device: str, quick: bool) -> tuple[Decoder, torch.Tensor]:
    """Make the model and its prompt."""
    torch.manual_seed(0)
    if device == "cuda" and not quick:
        model = Decoder(16, 2048, 8192, 32, 8, 128256)
        length = 128
    else:
        model = Decoder(2 if quick else 4, 512, 1536, 8, 2, 4096)
        length = 32
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)
    model = model.to(device, torch.bfloat16).eval()
    tokens = torch.randint(model.embed.num_embeddings, (1, length), device=device)
    return model, tokens


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return seconds and result."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    before = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - before, result


def with_hashes(model: nn.Module, tokens: torch.Tensor) -> None:
    """Run the model under DebugMode with hashes of every tensor."""
    from torch.utils._debug_mode import DebugMode

    with DebugMode() as mode, DebugMode.log_tensor_hashes(), torch.no_grad():
        model(tokens)
    str(mode.debug_string())


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure every claim."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference, tokens = build(device, quick)
    candidate = copy.deepcopy(reference)
    with torch.no_grad():
        reference(tokens)
        plain, _ = timed(lambda: reference(tokens))
    peers: dict[str, float | None] = {"forward": plain, "DebugMode with hashes": None}
    with contextlib.suppress(Exception):  # it has no hashes in every version
        peers["DebugMode with hashes"], _ = timed(lambda: with_hashes(reference, tokens))
    base = _allocated(device)
    clean, report = timed(lambda: bl.check(candidate, tokens, reference=reference))
    extra = _allocated(device, peak=True) - base
    count = sum(each.numel() for each in reference.parameters())
    largest = max(each.numel() for each in reference.parameters()) * 8
    about = f"{device}, {count / 1e9:.2f} G parameters, bfloat16, {tokens.shape[1]} tokens"
    claims = [
        Claim(
            "check against a reference, clean",
            clean,
            "s",
            TARGET_S,
            peers,
            f"{about}: {report.status}, {len(report.verdicts)} values",
        )
    ]
    if device == "cuda":
        target = largest / 2**30 + 1
        note = "the target is the largest brick in float64 and 1 GiB"
        claims.append(
            Claim("check, extra memory", extra / 2**30, "GiB", target, note=note),
        )
    with torch.no_grad():
        candidate.layers[1].down_proj.weight[7] *= 1.5
    seconds, report = timed(lambda: bl.check(candidate, tokens, reference=reference, repro=False))
    named = report.culprits[0].name if report.culprits else "nothing"
    claims.append(Claim("check, one wrong row", seconds, "s", TARGET_S, note=f"named {named}"))
    seconds, report = timed(lambda: bl.check(reference, tokens))
    note = str(report.status)
    claims.append(Claim("check without a reference", seconds, "s", TARGET_S, note=note))
    return [claim.as_dict() for claim in claims]


def _allocated(device: str, peak: bool = False) -> int:
    """Return the device's memory in use, or the most since the last time it was asked without."""
    if device != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    raise SystemExit(harness.main(run, None, __doc__))
