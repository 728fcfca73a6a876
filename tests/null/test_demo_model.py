"""The demo's decoder against a plain float64 forward pass over the whole sequence.

The reference has no cache, no bricks and no tiles, and rotates by complex numbers; it shares
the weights with the model and nothing else.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from brickline import BrickId, BrickProfiler
from brickline.commands.demo_model import DemoModel, gated_silu, rms_norm, rotate, softmax
from brickline.commands.demo_weights import ModelConfig, SamplingConfig, Weights
from brickline.errors import UsageError

# No two sizes are alike, and the tiles of the head do not divide it.
SMALL = ModelConfig(
    dim=48,
    layers=3,
    heads=6,
    kv_heads=2,
    hidden=80,
    vocab=101,
    capacity=40,
    head_tile_rows=16,
    head_tile_columns=20,
)
TOKENS = [int(token) for token in np.random.default_rng(7).integers(0, SMALL.vocab, 24)]
PROMPT = TOKENS[:5]

# Logits are near one in size, and a few hundred roundings of 6e-8 lie between float32 and exact.
ROUNDING = 1e-5


def reference_logits(
    weights: Weights, config: ModelConfig, tokens: list[int]
) -> NDArray[np.float64]:
    """Logits after every position of ``tokens``, in float64."""

    def normed(x: NDArray[np.float64], weight: NDArray[np.float32]) -> NDArray[np.float64]:
        rms = np.sqrt((x**2).mean(axis=1, keepdims=True) + config.norm_epsilon)
        return np.asarray(x / rms * weight.astype(np.float64))

    d, group = config.head_dim, config.heads // config.kv_heads
    positions = np.arange(len(tokens))
    turns = np.exp(
        1j * np.outer(positions, [config.rope_theta ** (-2 * i / d) for i in range(d // 2)])
    )

    def rotated(x: NDArray[np.float64]) -> NDArray[np.float64]:
        turned = (x[:, : d // 2] + 1j * x[:, d // 2 :]) * turns
        return np.concatenate([turned.real, turned.imag], axis=1)

    x = weights.embedding[tokens].astype(np.float64)
    for w in weights.layers:
        qkv = normed(x, w.attention_norm) @ w.qkv.T.astype(np.float64)
        q, k, v = np.split(qkv, [config.dim, config.dim + config.kv_dim], axis=1)
        heads = []
        for head in range(config.heads):
            own = slice(head * d, (head + 1) * d)
            shared = slice(head // group * d, (head // group + 1) * d)
            scores = rotated(q[:, own]) @ rotated(k[:, shared]).T / np.sqrt(d)
            scores[positions[None, :] > positions[:, None]] = -np.inf
            shares = np.exp(scores)
            heads.append(shares / shares.sum(axis=1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(heads, axis=1) @ w.output.T.astype(np.float64)
        h = normed(x, w.mlp_norm)
        gate, up = h @ w.gate.T.astype(np.float64), h @ w.up.T.astype(np.float64)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w.down.T.astype(np.float64)
    return np.asarray(normed(x, weights.final_norm) @ weights.head.T.astype(np.float64))


def small_model(sampling: SamplingConfig | None = None, config: ModelConfig = SMALL) -> DemoModel:
    return DemoModel(BrickProfiler("t"), config, sampling)


def test_cached_decode_equals_the_uncached_forward() -> None:
    model = small_model()
    expected = reference_logits(model.weights, SMALL, TOKENS)
    for position, token in enumerate(TOKENS):
        logits = model.decode(token).logits
        assert logits.dtype == np.float32
        np.testing.assert_allclose(logits, expected[position], rtol=0, atol=ROUNDING)
    assert model.length == len(TOKENS)


@pytest.mark.parametrize("cuts", [[1], [5], [23], [2, 9], [7, 8, 20]])
def test_prefill_in_any_parts_then_decode_equals_the_uncached_forward(cuts: list[int]) -> None:
    model = small_model()
    expected = reference_logits(model.weights, SMALL, TOKENS)
    for start, end in zip([0, *cuts], cuts, strict=False):
        logits = model.prefill(TOKENS[start:end]).logits
        np.testing.assert_allclose(logits, expected[end - 1], rtol=0, atol=ROUNDING)
    for position in range(cuts[-1], len(TOKENS)):
        logits = model.decode(TOKENS[position]).logits
        np.testing.assert_allclose(logits, expected[position], rtol=0, atol=ROUNDING)


def test_default_size_equals_the_uncached_forward() -> None:
    config = ModelConfig()
    model = small_model(config=config)
    tokens = [token * 37 % config.vocab for token in range(18)]
    model.prefill(tokens[:16])
    model.decode(tokens[16])
    expected = reference_logits(model.weights, config, tokens)[-1]
    np.testing.assert_allclose(model.decode(tokens[17]).logits, expected, rtol=0, atol=ROUNDING)


def test_a_later_token_changes_nothing_before_it() -> None:
    first, second = small_model(), small_model()
    one = first.prefill(TOKENS[:8])
    other = second.prefill([*TOKENS[:7], (TOKENS[7] + 1) % SMALL.vocab])
    # Keys of the deeper layers carry what attention mixed in at their position.
    for ours, theirs in ((first._keys, second._keys), (first._values, second._values)):
        np.testing.assert_array_equal(ours[:, :, :7], theirs[:, :, :7])
        assert (ours[:, :, 7] != theirs[:, :, 7]).any(axis=(1, 2)).all()
    assert not np.allclose(one.logits, other.logits)


def test_rope_is_a_rotation_that_knows_relative_positions_only() -> None:
    rng = np.random.default_rng(3)
    angles = np.outer(np.arange(32), 10_000.0 ** (-np.arange(8) / 8))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    pair = rng.standard_normal((2, 1, 1, 16)).astype(np.float32)
    q, k = np.tile(pair, (1, 32, 1, 1))  # the same query and the same key at 32 positions
    turned_q, turned_k = rotate(q, cos, sin), rotate(k, cos, sin)
    lengths = np.hypot(q[..., :8], q[..., 8:])
    np.testing.assert_allclose(np.hypot(turned_q[..., :8], turned_q[..., 8:]), lengths, rtol=1e-6)
    np.testing.assert_array_equal(turned_q[0], q[0])
    np.testing.assert_allclose(rotate(turned_q, cos, -sin), q, atol=1e-6)
    products = turned_q[:, 0] @ turned_k[:, 0].T
    for distance in range(-5, 6):
        along = np.diagonal(products, distance)
        np.testing.assert_allclose(along, along[0], atol=2e-5)
    assert abs(products[0, 0] - products[0, 5]) > 1e-2


def test_the_model_rotates_by_position() -> None:
    model = small_model()
    for _ in range(3):
        model.decode(TOKENS[0])
    keys = model._keys[0, 0, :3]  # the first layer sees the same token, so only RoPE differs
    assert not np.allclose(keys[0], keys[1], atol=1e-3)
    lengths = np.linalg.norm(keys, axis=1)
    np.testing.assert_allclose(lengths, lengths[0], rtol=1e-6)
    np.testing.assert_allclose(model._values[0, 0, 1], model._values[0, 0, 0], rtol=1e-6)


def test_small_functions_hold_at_extremes() -> None:
    x = np.array([[3.0, -4.0]], dtype=np.float32)
    np.testing.assert_allclose(
        rms_norm(x, np.ones(2, dtype=np.float32), 1e-12), x / np.sqrt(12.5), rtol=1e-6
    )
    shares = softmax(np.array([[1e30, -np.inf, 1e30]], dtype=np.float32))
    np.testing.assert_array_equal(shares, [[0.5, 0, 0.5]])
    gate = np.array([-1e30, -90.0, 0.0, 90.0], dtype=np.float32)
    np.testing.assert_allclose(gated_silu(gate, np.ones_like(gate)), [0, 0, 0, 90], atol=1e-30)


def test_same_seed_gives_the_same_tokens() -> None:
    model = small_model()
    tokens = list(model.generate(PROMPT, 20))
    assert len(tokens) == 20
    assert model.length == len(PROMPT) + 19
    assert tokens == list(small_model().generate(PROMPT, 20))
    model.reset()
    assert tokens == list(model.generate(PROMPT, 20))
    assert tokens != list(small_model(SamplingConfig(seed=1)).generate(PROMPT, 20))
    other_weights = dataclasses.replace(SMALL, seed=1)
    assert tokens != list(small_model(config=other_weights).generate(PROMPT, 20))


def test_greedy_takes_the_largest_logit_and_so_does_top_1() -> None:
    model = small_model(SamplingConfig(temperature=0))
    step = model.prefill(PROMPT)
    assert step.token == int(step.logits.argmax())
    greedy = list(small_model(SamplingConfig(temperature=0)).generate(PROMPT, 12))
    assert greedy == list(small_model(SamplingConfig(top_k=1, seed=9)).generate(PROMPT, 12))


def test_sampling_follows_the_softmax_of_the_top_k() -> None:
    model = small_model(SamplingConfig(temperature=0.5, top_k=3))
    logits = np.full(SMALL.vocab, -5, dtype=np.float32)
    logits[[70, 20, 40, 90]] = [1.0, 0.5, 0.0, -0.5]
    drawn = np.bincount([model._sample(logits) for _ in range(20_000)], minlength=SMALL.vocab)
    expected = np.exp([2.0, 1.0, 0.0]) / np.exp([2.0, 1.0, 0.0]).sum()
    # Four standard deviations of the share of 20 000 draws; the seed is fixed.
    np.testing.assert_allclose(drawn[[70, 20, 40]] / 20_000, expected, atol=0.0142)
    assert drawn.sum() == drawn[[70, 20, 40]].sum()


def test_an_enabled_profiler_changes_no_token(tmp_path: Path) -> None:
    plain = small_model()
    profiled = DemoModel(BrickProfiler("t", enabled=True, path=tmp_path / "t.brick"), SMALL)
    for tokens in (PROMPT, [11], [12], TOKENS[:3]):
        ours, theirs = profiled.prefill(tokens), plain.prefill(tokens)
        assert ours.token == theirs.token
        np.testing.assert_array_equal(ours.logits, theirs.logits)


def test_bricks_are_counted_as_the_shapes_say(tmp_path: Path) -> None:
    profiler = BrickProfiler("t", enabled=True, path=tmp_path / "t.brick")
    list(DemoModel(profiler, SMALL).generate(PROMPT, 4))
    c, steps, rows = SMALL, 4, len(PROMPT) + 3
    pairs = len(PROMPT) * len(PROMPT) + 6 + 7 + 8  # (query, key), the masked ones too
    expected = {
        BrickId.EMBEDDING: (steps, rows * c.dim),
        BrickId.RMS_NORM: (steps * (2 * c.layers + 1), (2 * c.layers * rows + steps) * c.dim),
        BrickId.QKV_PROJECTION: (steps * c.layers, c.layers * rows * (c.dim + 2 * c.kv_dim)),
        BrickId.ROPE_EMBEDDING: (steps * c.layers, c.layers * rows * (c.dim + c.kv_dim)),
        BrickId.KV_CACHE_APPEND: (steps * c.layers, c.layers * rows * 2 * c.kv_dim),
        BrickId.ATTENTION_SCORE: (steps * c.layers, c.layers * c.heads * pairs),
        BrickId.ATTENTION_SOFTMAX: (steps * c.layers, c.layers * c.heads * pairs),
        BrickId.ATTENTION_OUTPUT: (steps * c.layers, c.layers * rows * c.dim),
        BrickId.OUTPUT_PROJECTION: (steps * c.layers, c.layers * rows * c.dim),
        BrickId.RESIDUAL_ADD: (2 * steps * c.layers, 2 * c.layers * rows * c.dim),
        BrickId.GATE_PROJECTION: (steps * c.layers, c.layers * rows * c.hidden),
        BrickId.UP_PROJECTION: (steps * c.layers, c.layers * rows * c.hidden),
        BrickId.ACTIVATION: (steps * c.layers, c.layers * rows * c.hidden),
        BrickId.DOWN_PROJECTION: (steps * c.layers, c.layers * rows * c.dim),
        BrickId.LM_HEAD: (steps, steps * c.vocab),
        BrickId.SAMPLING: (steps, steps),
    }
    for brick_id, counts in expected.items():
        stats = profiler.brick_stats(brick_id)
        assert (stats.count, stats.total_elements) == counts, stats.name


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dim": 0}, "positive dim"),
        ({"capacity": -1}, "positive capacity"),
        ({"norm_epsilon": float("nan")}, "positive norm_epsilon"),
        ({"heads": 7}, "dim to be a multiple of heads"),
        ({"kv_heads": 4}, "heads to be a multiple of kv_heads"),
        ({"dim": 54}, "even head size"),
    ],
)
def test_a_config_checks_itself(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(SMALL, **wrong)


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}]
)
def test_a_sampling_config_checks_itself(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="Expected"):
        dataclasses.replace(SamplingConfig(), **wrong)


def test_wrong_tokens_and_a_full_cache_are_refused_and_change_nothing() -> None:
    model = small_model()
    model.prefill(PROMPT)
    for tokens, message in (
        ([], "at least one token"),
        ([SMALL.vocab], "tokens from 0 to 100"),
        ([3, -1], "tokens from 0 to 100"),
        ([1] * 36, "at most 40 positions, got 5 in the cache and 36 more"),
    ):
        with pytest.raises(UsageError, match=message):
            model.prefill(tokens)
    with pytest.raises(UsageError, match="got 5 in the cache"):
        next(model.generate(PROMPT, 32))
    with pytest.raises(UsageError, match="count of at least 1"):
        next(model.generate(PROMPT, 0))
    expected = reference_logits(model.weights, SMALL, [*PROMPT, 9])[-1]
    np.testing.assert_allclose(model.decode(9).logits, expected, rtol=0, atol=ROUNDING)
