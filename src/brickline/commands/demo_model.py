"""The small transformer that ``brickline demo`` decodes through: Llama-style, NumPy, float32.

Every operation is one brick of the profiler that is handed in, and the LM head is computed in
tiles. The arithmetic is real, the weights are random: it computes what a model of this shape
computes and says nothing sensible. It knows nothing of runs, reports, the terminal or any device,
and neither the profiler nor an observer changes a token.

What a brick declares follows from shapes alone:

- ``elements``: values the brick produces.
- ``bytes``: inputs, weights and outputs, each counted once (float32, token ids int64);
  temporaries that NumPy makes on the way are not counted.
- ``flops``: additions, multiplications, divisions, square roots, exponentials and tanh count one
  each, so a multiply-add counts two; comparisons and copies count none.

A norm, a projection or an activation depends on the number of rows only, so its handle is made
once and kept. Attention grows with the cache, so its handles are asked for at each call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from brickline.bricks import BrickId
from brickline.commands.demo_weights import (
    Floats,
    LayerWeights,
    ModelConfig,
    SamplingConfig,
    Weights,
)
from brickline.errors import UsageError
from brickline.tiles import TileLevel

if TYPE_CHECKING:
    from brickline.profiler import BrickProfiler

Handle: TypeAlias = AbstractContextManager[Any]
Observer: TypeAlias = Callable[[str, int, Sequence[NDArray[Any]], Sequence[NDArray[Any]]], None]
"""Is told of every brick when it has ended: its name, its layer or -1, what went in, what came out.

The arrays are the model's own and are used on: look at them before returning, and change nothing.
"""

FLOAT_BYTES = 4


class StepResult(NamedTuple):
    """What one step of the model gives: the next token, and the logits it was drawn from."""

    token: int
    logits: Floats


def rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """Scale each row to a root mean square of one, then by ``weight``."""
    mean_square: Floats = np.einsum("rd,rd->r", x, x)[:, None] / np.float32(x.shape[-1])
    inverse: Floats = 1 / np.sqrt(mean_square + np.float32(epsilon))
    return x * inverse * weight


def rotate(x: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotate the pairs (i, i + half) of (rows, heads, head_dim) by angles of (rows, half)."""
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def softmax(scores: Floats) -> Floats:
    """Turn the last axis of ``scores`` into probabilities, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def gated_silu(gate: Floats, up: Floats) -> Floats:
    """``gate * sigmoid(gate) * up``; the sigmoid is written by tanh, which cannot overflow."""
    half = np.float32(0.5)
    sigmoid: Floats = half + half * np.tanh(half * gate)
    return gate * sigmoid * up


def _brick(
    profiler: BrickProfiler,
    brick_id: BrickId,
    elements: int,
    floats: int,
    flops: int = 0,
    layer: int | None = None,
) -> Handle:
    """Declare a brick that touches ``floats`` float32 values."""
    return profiler.brick(
        brick_id, layer=layer, elements=elements, bytes=FLOAT_BYTES * floats, flops=flops
    )


def _matmul(
    profiler: BrickProfiler,
    brick_id: BrickId,
    rows: int,
    inputs: int,
    outputs: int,
    layer: int | None = None,
) -> Handle:
    """Declare the product of (rows, inputs) by (inputs, outputs)."""
    floats = rows * inputs + inputs * outputs + rows * outputs
    flops = 2 * rows * inputs * outputs
    return _brick(profiler, brick_id, rows * outputs, floats, flops, layer)


def _norm(profiler: BrickProfiler, rows: int, dim: int, layer: int | None = None) -> Handle:
    """Declare squares, their sum and two scalings; by row the mean, epsilon, root, inverse."""
    size = rows * dim
    return _brick(profiler, BrickId.RMS_NORM, size, 2 * size + dim, 4 * size + 4 * rows, layer)


class _LayerBricks:
    """The kept handles of one layer, for one number of rows."""

    def __init__(self, profiler: BrickProfiler, c: ModelConfig, rows: int, layer: int) -> None:
        brick = partial(_brick, profiler, layer=layer)
        matmul = partial(_matmul, profiler, layer=layer)
        self.rms_norm = _norm(profiler, rows, c.dim, layer)
        self.qkv_projection = matmul(BrickId.QKV_PROJECTION, rows, c.dim, c.dim + 2 * c.kv_dim)
        # A pair takes four products and two sums, and reads one cosine and one sine.
        size = rows * (c.dim + c.kv_dim)
        angles = rows * c.head_dim
        self.rope_embedding = brick(BrickId.ROPE_EMBEDDING, size, 2 * size + angles, 3 * size)
        size = rows * 2 * c.kv_dim
        self.kv_cache_append = brick(BrickId.KV_CACHE_APPEND, size, 2 * size)
        self.output_projection = matmul(BrickId.OUTPUT_PROJECTION, rows, c.dim, c.dim)
        size = rows * c.dim
        self.residual_add = brick(BrickId.RESIDUAL_ADD, size, 3 * size, size)
        self.gate_projection = matmul(BrickId.GATE_PROJECTION, rows, c.dim, c.hidden)
        self.up_projection = matmul(BrickId.UP_PROJECTION, rows, c.dim, c.hidden)
        size = rows * c.hidden
        self.activation = brick(BrickId.ACTIVATION, size, 3 * size, 6 * size)
        self.down_projection = matmul(BrickId.DOWN_PROJECTION, rows, c.hidden, c.dim)


class _StepBricks:
    """The kept handles of a step over ``rows`` tokens; the head sees the last row only."""

    def __init__(
        self, profiler: BrickProfiler, c: ModelConfig, sampling: SamplingConfig, rows: int
    ) -> None:
        # A token id is as long as two float32.
        size = rows * c.dim
        self.embedding = _brick(profiler, BrickId.EMBEDDING, size, 2 * size + 2 * rows)
        self.layers = tuple(_LayerBricks(profiler, c, rows, i) for i in range(c.layers))
        self.final_norm = _norm(profiler, 1, c.dim)
        self.lm_head = _matmul(profiler, BrickId.LM_HEAD, 1, c.dim, c.vocab)
        # Over the kept logits: temperature, shift, exponential, running sum. Greedy compares only.
        kept = min(sampling.top_k, c.vocab) if sampling.temperature else 0
        self.sampling = _brick(profiler, BrickId.SAMPLING, 1, c.vocab + 2, 4 * kept)


class DemoModel:
    """A decoder with a KV cache, profiled brick by brick.

    Args:
        profiler: where bricks, steps and tiles are recorded; a disabled one records nothing.
        config: the shape and the seed of the weights.
        sampling: how tokens are drawn; by default from the 40 best at temperature 0.8, so that
            the random weights do not fall into a loop.
        observe: is told of every brick; None costs nothing.
    """

    def __init__(
        self,
        profiler: BrickProfiler,
        config: ModelConfig | None = None,
        sampling: SamplingConfig | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.profiler = profiler
        self._observe = observe
        self.config = c = config or ModelConfig()
        self.sampling = sampling or SamplingConfig()
        self.weights = Weights.random(c)
        cache_shape = (c.layers, c.kv_heads, c.capacity, c.head_dim)
        # Filled rather than zeros(), so that no brick pays for the first touch of a page.
        self._keys: Floats = np.full(cache_shape, 0, dtype=np.float32)
        self._values: Floats = np.full(cache_shape, 0, dtype=np.float32)
        pairs = np.arange(c.head_dim // 2) / (c.head_dim // 2)
        angles = np.outer(np.arange(c.capacity), c.rope_theta**-pairs)
        self._cos: Floats = np.cos(angles).astype(np.float32)
        self._sin: Floats = np.sin(angles).astype(np.float32)
        self._bricks_by_rows: dict[int, _StepBricks] = {}
        self._bricks(1)
        self.reset()

    @property
    def length(self) -> int:
        """Positions in the KV cache."""
        return self._length

    def reset(self) -> None:
        """Forget the sequence and start the sampler's seed again."""
        self._length = 0
        self._rng = np.random.default_rng(self.sampling.seed)

    def prefill(self, tokens: Sequence[int]) -> StepResult:
        """Take ``tokens`` in one step; a second call goes on where the cache ends."""
        return self._step(tokens, "prefill")

    def decode(self, token: int) -> StepResult:
        """Take one token and give the next."""
        return self._step([token], "decode")

    def generate(self, prompt: Sequence[int], count: int) -> Iterator[int]:
        """Yield ``count`` tokens after ``prompt``: the first from the prefill, then one a step."""
        if count < 1:
            raise UsageError(f"Expected a count of at least 1, got {count}")
        self._check_room(len(prompt) + count - 1)
        token = self.prefill(prompt).token
        yield token
        for _ in range(count - 1):
            token = self.decode(token).token
            yield token

    def project(self, x: Floats, weight: Floats) -> Floats:
        """Multiply rows by a matrix of (outputs, inputs)."""
        return x @ weight.T

    def norm(self, x: Floats, weight: Floats, name: str) -> Floats:
        """Normalise rows; ``name`` says which of the model's norms it is."""
        return rms_norm(x, weight, self.config.norm_epsilon)

    def _saw(self, name: str, layer: int, inputs: Sequence[Any], *outputs: NDArray[Any]) -> None:
        if self._observe is not None:
            self._observe(name if layer < 0 else f"layers.{layer}.{name}", layer, inputs, outputs)

    def _step(self, tokens: Sequence[int], phase: str) -> StepResult:
        ids = self._checked(tokens)
        bricks = self._bricks(len(ids))
        with self.profiler.step(tokens=len(ids), phase=phase):
            with bricks.embedding:
                x = self.weights.embedding[ids]
            self._saw("embedding", -1, (ids,), x)
            for layer, weights in enumerate(self.weights.layers):
                x = self._attention(x, layer, weights, bricks.layers[layer])
                x = self._mlp(x, layer, weights, bricks.layers[layer])
            self._length += len(ids)
            with bricks.final_norm:
                last = self.norm(x[-1:], self.weights.final_norm, "final_norm")[0]
            self._saw("final_norm", -1, (x[-1:],), last)
            with bricks.lm_head:
                logits = self._head(last)
            self._saw("lm_head", -1, (last,), logits)
            with bricks.sampling:
                token = self._sample(logits)
        return StepResult(token, logits)

    def _attention(self, x: Floats, layer: int, w: LayerWeights, bricks: _LayerBricks) -> Floats:
        c, rows, start = self.config, len(x), self._length
        end = start + rows
        with bricks.rms_norm:
            normed = self.norm(x, w.attention_norm, f"layers.{layer}.attention.norm")
        self._saw("attention.norm", layer, (x,), normed)
        with bricks.qkv_projection:
            qkv = self.project(normed, w.qkv).reshape(rows, -1, c.head_dim)
        self._saw("attention.qkv", layer, (normed,), qkv)
        with bricks.rope_embedding:
            cos, sin = self._cos[start:end], self._sin[start:end]
            rotated = rotate(qkv[:, : c.heads + c.kv_heads], cos, sin)
        self._saw("attention.rope", layer, (qkv, cos, sin), rotated)
        keys, values = rotated[:, c.heads :], qkv[:, c.heads + c.kv_heads :]
        with bricks.kv_cache_append:
            self._keys[layer, :, start:end] = keys.swapaxes(0, 1)
            self._values[layer, :, start:end] = values.swapaxes(0, 1)
        appended = self._keys[layer, :, start:end], self._values[layer, :, start:end]
        self._saw("attention.cache", layer, (keys, values), *appended)
        mixed = self._attend(rotated[:, : c.heads], layer, end)
        with bricks.output_projection:
            projected = self.project(mixed, w.output)
        self._saw("attention.output", layer, (mixed,), projected)
        with bricks.residual_add:
            added = x + projected
        self._saw("attention.add", layer, (x, projected), added)
        return added

    def _attend(self, queries: Floats, layer: int, end: int) -> Floats:
        """Attend from (rows, heads, head_dim) to the first ``end`` positions of the cache."""
        c, rows = self.config, len(queries)
        size, scored = rows * c.dim, c.heads * rows * end
        floats = size + end * c.kv_dim + scored  # queries, keys, scores; or result, values, shares
        flops = 2 * scored * c.head_dim
        brick = partial(_brick, self.profiler, layer=layer)
        keys, values = self._keys[layer, :, :end], self._values[layer, :, :end]
        # The queries are scaled rather than the scores: fewer products.
        with brick(BrickId.ATTENTION_SCORE, scored, floats, flops + size):
            scaled: Floats = queries.swapaxes(0, 1) * np.float32(1 / math.sqrt(c.head_dim))
            grouped = scaled.reshape(c.kv_heads, -1, c.head_dim)
            scores: Floats = grouped @ keys.swapaxes(1, 2)
            if rows > 1:
                future = np.arange(end) > np.arange(end - rows, end)[:, None]
                scores.reshape(c.heads, rows, end)[:, future] = -np.inf
        self._saw("attention.scores", layer, (queries, keys), scores)
        unscaled = scores if self._observe is None else scores.copy()  # softmax works in place
        with brick(BrickId.ATTENTION_SOFTMAX, scored, 2 * scored, 4 * scored):
            shares = softmax(scores)
        self._saw("attention.softmax", layer, (unscaled,), shares)
        with brick(BrickId.ATTENTION_OUTPUT, size, floats, flops):
            mixed: Floats = shares @ values
            joined = mixed.reshape(c.heads, rows, c.head_dim).swapaxes(0, 1).reshape(rows, c.dim)
        self._saw("attention.mix", layer, (shares, values), joined)
        return joined

    def _mlp(self, x: Floats, layer: int, w: LayerWeights, bricks: _LayerBricks) -> Floats:
        with bricks.rms_norm:
            normed = self.norm(x, w.mlp_norm, f"layers.{layer}.mlp.norm")
        self._saw("mlp.norm", layer, (x,), normed)
        with bricks.gate_projection:
            gate = self.project(normed, w.gate)
        self._saw("mlp.gate", layer, (normed,), gate)
        with bricks.up_projection:
            up = self.project(normed, w.up)
        self._saw("mlp.up", layer, (normed,), up)
        with bricks.activation:
            hidden = gated_silu(gate, up)
        self._saw("mlp.activation", layer, (gate, up), hidden)
        with bricks.down_projection:
            projected = self.project(hidden, w.down)
        self._saw("mlp.down", layer, (hidden,), projected)
        with bricks.residual_add:
            added = x + projected
        self._saw("mlp.add", layer, (x, projected), added)
        return added

    def _head(self, x: Floats) -> Floats:
        """Multiply in blocks; each tile adds its columns' part to its rows of the logits."""
        c, tiles = self.config, self.profiler.tiles
        logits: Floats = np.zeros(c.vocab, dtype=np.float32)
        for row, top in enumerate(range(0, c.vocab, c.head_tile_rows)):
            for column, left in enumerate(range(0, c.dim, c.head_tile_columns)):
                timer = tiles.start(TileLevel.MACRO, row, column)
                right = left + c.head_tile_columns
                block = self.weights.head[top : top + c.head_tile_rows, left:right]
                logits[top : top + c.head_tile_rows] += block @ x[left:right]
                height, width = block.shape
                size_bytes = FLOAT_BYTES * (block.size + width + 2 * height)
                tiles.stop(timer, elements=height, flops=2 * block.size, bytes=size_bytes)
        return logits

    def _sample(self, logits: Floats) -> int:
        if not self.sampling.temperature:
            return int(logits.argmax())
        count = min(self.sampling.top_k, len(logits))
        kept = np.argpartition(logits, -count)[-count:]
        kept.sort()  # the partition's order depends on the machine
        scaled = logits[kept].astype(np.float64) / self.sampling.temperature
        sums = np.exp(scaled - scaled.max()).cumsum()
        drawn = int(np.searchsorted(sums, self._rng.random() * sums[-1], side="right"))
        return int(kept[min(drawn, count - 1)])  # the product may round up to the whole sum

    def _bricks(self, rows: int) -> _StepBricks:
        if rows not in self._bricks_by_rows:
            made = _StepBricks(self.profiler, self.config, self.sampling, rows)
            self._bricks_by_rows[rows] = made
        return self._bricks_by_rows[rows]

    def _checked(self, tokens: Sequence[int]) -> NDArray[np.int64]:
        ids = np.asarray(tokens, dtype=np.int64)
        if not len(ids):
            raise UsageError("Expected at least one token, got none")
        if ids.min() < 0 or ids.max() >= self.config.vocab:
            raise UsageError(
                f"Expected tokens from 0 to {self.config.vocab - 1}, got {ids.min()} to {ids.max()}"
            )
        self._check_room(len(ids))
        return ids

    def _check_room(self, tokens: int) -> None:
        if self._length + tokens > self.config.capacity:
            raise UsageError(
                f"Expected at most {self.config.capacity} positions, got {self._length} in the "
                f"cache and {tokens} more; call reset() or give the config a larger capacity"
            )
