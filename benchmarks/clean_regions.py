"""Small regions of models for torch.compile, each with a way to draw its inputs.

Compiled once with dynamic shapes, a region serves many cases. Knows nothing of what is done with
them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812
from clean_op_draws import Draw

Region = Callable[..., torch.Tensor]
Inputs = Callable[[Draw], tuple[torch.Tensor, ...]]
REGIONS: dict[str, tuple[Region, Inputs]] = {}


def region(draw: Inputs) -> Callable[[Region], Region]:
    def register(function: Region) -> Region:
        REGIONS[function.__name__] = (function, draw)
        return function

    return register


def _rows(d: Draw) -> tuple[int, int]:
    return d.random.randint(2, 40), 8 * d.random.randint(2, 96)


def _matrix(d: Draw) -> tuple[torch.Tensor, ...]:
    return (d(*_rows(d)),)


def _pair(d: Draw) -> tuple[torch.Tensor, ...]:
    shape = _rows(d)
    return d(*shape), d(*shape)


def _with_weight(d: Draw) -> tuple[torch.Tensor, ...]:
    rows, width = _rows(d)
    return d(rows, width), d(width, plain=True)


def _with_two_weights(d: Draw) -> tuple[torch.Tensor, ...]:
    rows, width = _rows(d)
    return d(rows, width), d(width, plain=True), d(width, plain=True)


def _projection(d: Draw) -> tuple[torch.Tensor, ...]:
    rows, width = _rows(d)
    out = 8 * d.random.randint(2, 40)
    return d(rows, width), d(out, width, scale=width**-0.5), d(out)


def _gated(d: Draw) -> tuple[torch.Tensor, ...]:
    rows, width = _rows(d)
    out = 8 * d.random.randint(2, 30)
    scale = width**-0.5
    weights = (d(out, width, scale=scale), d(out, width, scale=scale, plain=True))
    return d(rows, width), *weights, d(width, out, scale=out**-0.5, plain=True)


def _heads(d: Draw) -> tuple[torch.Tensor, ...]:
    shape = (2, 4, d.random.randint(2, 60), 32)
    return d(*shape), d(*shape, plain=True), d(*shape)


def _images(d: Draw) -> tuple[torch.Tensor, ...]:
    side = d.random.randint(6, 20)
    return d(d.random.randint(2, 5), 8, side, side), d(16, 8, 3, 3, plain=True), d(16)


def _image(d: Draw) -> tuple[torch.Tensor, ...]:
    side = d.random.randint(4, 20)
    return d(2, 8, side, side), d(8, plain=True), d(8, plain=True)


@region(_matrix)
def softmax_scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 0.125, -1)


@region(_matrix)
def log_softmax(x: torch.Tensor) -> torch.Tensor:
    return torch.log_softmax(x, -1)


@region(_matrix)
def logsumexp(x: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(x, -1)


@region(_matrix)
def centred(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-5)


@region(_matrix)
def running_total(x: torch.Tensor) -> torch.Tensor:
    return torch.cumsum(x, -1) * 0.5


@region(_matrix)
def activations(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x) + F.silu(x) * torch.tanh(x)


@region(_pair)
def gate(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x) * y


@region(_pair)
def distances(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((x - y) ** 2).mean(-1).sqrt()


@region(_with_weight)
def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * w


@region(_with_two_weights)
def layer_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, w.shape, w, b)


@region(_with_two_weights)
def residual_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x + F.layer_norm(x * 1.5 + b, w.shape, w)


@region(_projection)
def linear_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.linear(x, w, b))


@region(_gated)
def swiglu(x: torch.Tensor, g: torch.Tensor, u: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), o)


@region(_heads)
def explicit_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 32**-0.5, -1) @ v


@region(_heads)
def rotary(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    turns = torch.arange(q.shape[-2], device=q.device)[:, None] * 0.1
    cos, sin = turns.cos().to(q.dtype), turns.sin().to(q.dtype)
    half = q.shape[-1] // 2
    return q * cos + torch.cat([-q[..., half:], q[..., :half]], -1) * sin + k * 0.5 + v


@region(_images)
def convolution_relu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.relu(F.conv2d(x, w, b, padding=1)) * 0.5


@region(_image)
def group_norm(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.silu(F.group_norm(x, 2, w, b))


@region(_image)
def pooled(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return x.mean((2, 3)) * w + b
