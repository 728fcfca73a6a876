"""Claim: a Llama-3.2-1B decode step as one graph takes at most 1.0 ms a token on an H200.

bf16, batch 1, at a context of 1,024 positions, random weights; the position changes at every step.
The peer is the same model in torch with static caches: eager, and compiled under a CUDA graph.
The executor serial is listed beside.

Skipped where torch sees no CUDA device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import harness
from harness import Claim

from brickline.decoder import Decoder
from brickline.decoder_weights import DecoderConfig, weight_shapes

CONFIG = DecoderConfig(
    vocabulary=128256,
    dim=2048,
    hidden=8192,
    layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    capacity=1024,
    theta=500000.0,
)
FIRST = 960
"""Position of the first timed step; 64 follow up to the end of the context."""
TARGET_MS = 1.0


def weights_on(torch: Any) -> dict[str, Any]:
    """Return random weights on the device."""
    torch.manual_seed(0)
    made = {}
    for name, shape in weight_shapes(CONFIG):
        tensor = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        made[name] = tensor.mul_(shape[-1] ** -0.5) if len(shape) > 1 else tensor.mul_(0.1).add_(1)
    return made


def milliseconds(torch: Any, step: Callable[[int], None], rounds: int) -> float:
    """Return the median time of a step over a round of positions, ended by a sync."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for position in range(FIRST, CONFIG.capacity):
            step(position)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / (CONFIG.capacity - FIRST))
    return statistics.median(times) * 1e3


def ours(torch: Any, weights: dict[str, Any], executor: str, rounds: int) -> float:
    """Return milliseconds of a step with an executor."""
    prepared = Decoder(CONFIG).prepare(weights, "CUDA:0", executor).prepared

    def step(position: int) -> None:
        prepared(position=position)

    milliseconds(torch, step, 1)
    return milliseconds(torch, step, rounds)


class TorchLlama:
    """The same step in torch, over the same weights."""

    def __init__(self, torch: Any, weights: dict[str, Any]) -> None:
        self.torch, self.weights = torch, weights
        cache = (CONFIG.layers, CONFIG.kv_heads, CONFIG.capacity, CONFIG.head_dim)
        self.keys = torch.zeros(cache, device="cuda", dtype=torch.bfloat16)
        self.values = torch.zeros_like(self.keys)
        places = torch.arange(CONFIG.capacity, device="cuda", dtype=torch.float32)
        rates = torch.from_numpy(CONFIG.rates()).cuda()
        angles = torch.outer(places, rates).repeat(1, 2)
        self.cosines, self.sines = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.places = torch.arange(CONFIG.capacity, device="cuda")

    def _turned(self, x: Any, position: Any) -> Any:
        half = CONFIG.head_dim // 2
        other = self.torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * self.cosines[position] + other * self.sines[position]

    def step(self, token: Any, position: Any) -> Any:
        """Return the next token."""
        functional, weights = self.torch.nn.functional, self.weights
        dim = (CONFIG.dim,)
        x = weights["embedding"][token]
        mask = (self.places <= position)[None, None, None]
        for layer in range(CONFIG.layers):
            normed = functional.rms_norm(x, dim, weights[f"norm1_{layer}"], CONFIG.eps)
            q, k, v = (
                functional.linear(normed, weights[f"qkv_{layer}"])
                .view(1, -1, CONFIG.head_dim)
                .split((CONFIG.heads, CONFIG.kv_heads, CONFIG.kv_heads), 1)
            )
            q, k = self._turned(q, position), self._turned(k, position)
            self.keys[layer].index_copy_(1, position, k.transpose(0, 1))
            self.values[layer].index_copy_(1, position, v.transpose(0, 1))
            y = functional.scaled_dot_product_attention(
                q[:, :, None],
                self.keys[layer][None],
                self.values[layer][None],
                attn_mask=mask,
                enable_gqa=True,
            )
            x = x + functional.linear(y.reshape(1, -1), weights[f"out_{layer}"])
            normed = functional.rms_norm(x, dim, weights[f"norm2_{layer}"], CONFIG.eps)
            gate, up = functional.linear(normed, weights[f"gate_up_{layer}"]).chunk(2, -1)
            x = x + functional.linear(functional.silu(gate) * up, weights[f"down_{layer}"])
        x = functional.rms_norm(x, dim, weights["norm"], CONFIG.eps)
        return functional.linear(x, weights["embedding"]).argmax(-1)


def peers(torch: Any, weights: dict[str, Any], rounds: int, *, compiled: bool) -> dict[str, float]:
    """Return milliseconds of a step of torch: eager, under a CUDA graph, and compiled too."""
    model = TorchLlama(torch, weights)
    token = torch.zeros(1, dtype=torch.long, device="cuda")
    position = torch.full((1,), FIRST, dtype=torch.long, device="cuda")

    def eager(place: int) -> None:
        position.fill_(place)
        token.copy_(model.step(token, position))

    def graphed(step: Callable[..., Any]) -> float:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step(token, position)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token.copy_(step(token, position))

        def replay(place: int) -> None:
            position.fill_(place)
            graph.replay()

        milliseconds(torch, replay, 1)
        return milliseconds(torch, replay, rounds)

    with torch.no_grad():
        found = {"torch, CUDA graph": graphed(model.step)}
        found["torch, eager"] = milliseconds(torch, eager, 1)
        if compiled:
            step = torch.compile(model.step, fullgraph=True, mode="max-autotune-no-cudagraphs")
            found["torch.compile, CUDA graph"] = graphed(step)
    return found


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Measure the claim of this file."""
    torch = harness.torch_with_cuda()
    if torch is None:
        return harness.not_measured("plans_decode", harness.NO_GPU)
    rounds = 3 if quick else 9
    weights = weights_on(torch)
    times = {each: ours(torch, weights, each, rounds) for each in ("graph", "serial")}
    claim = Claim(
        "decode step of Llama-3.2-1B, bf16, context 1,024, graph",
        times["graph"],
        "ms a token",
        TARGET_MS,
        peers(torch, weights, rounds, compiled=not quick),
        f"serial {times['serial']:.3f} ms",
    )
    return [claim.as_dict()]


if __name__ == "__main__":
    raise SystemExit(harness.main(run, None, __doc__))
