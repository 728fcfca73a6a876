"""Decoder: one decode step of a Llama-style model as a plan, and a loop that runs it.

The plan takes a token and a position and leaves logits and the next token; keys and values stay in
caches of the plan. The same plan runs on every device with the same bits. `decoder_weights` has the
configuration and where weights come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from brickline.bricks import BrickId
from brickline.decoder_weights import DecoderConfig, weight_shapes
from brickline.dtypes import dtype_of
from brickline.errors import UsageError
from brickline.executor.prepared import PreparedPlan
from brickline.kernel import Kernel
from brickline.kernels.attention import attention_combine, attention_decode
from brickline.kernels.elementwise import residual, silu_gate
from brickline.kernels.fused import gated_gemv, gemv_residual, norm_gemv
from brickline.kernels.norms import rms_norm
from brickline.kernels.products import gemv
from brickline.kernels.rotary import kv_append, rope, rope_append
from brickline.kernels.tokens import TILE, argmax_combine, argmax_tiles, embedding
from brickline.plan import Plan
from brickline.plan_buffers import PlanBuffer
from brickline.symbolic_values import integer_of

if TYPE_CHECKING:
    from brickline.profiler import BrickProfiler

SPAN = 64
"""Positions that a block of attention takes."""
QKV_ROWS = 8
"""Rows of the first product that a block takes, a row for each of its groups."""


class Decoder:
    """The decode step of one configuration.

    Args:
        config: The model's sizes.
        dtype: Of weights, caches and what passes between launches. Default "bf16".
        fused: Whether norms, gates, residuals and rope are part of the launches around them.
            Default True; False has a launch for each, with the same bits.
        kernels: Kernels of your own, by the name of the one whose place each takes in every
            layer; they have its arguments. Default none.

    Example:
        >>> config = DecoderConfig(layers=1)
        >>> decoder = Decoder(config, dtype="f32")
        >>> decoding = decoder.prepare(random_weights(config, dtype="f32"))
        >>> len(decoding.generate([1, 2, 3], 4))
        4
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        dtype: str = "bf16",
        fused: bool = True,
        kernels: Mapping[str, Kernel] | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype_of(dtype).name
        self.fused = fused
        self.plan = Plan("decode")
        self._position = self.plan.variable("position", 0, config.capacity - 1)
        self._weights: dict[str, PlanBuffer] = {
            name: self.plan.buffer(name, shape, self.dtype, read_only=True)
            for name, shape in weight_shapes(config)
        }
        self._rates = self.plan.buffer("rates", config.head_dim // 2, "f32", read_only=True)
        self._buffers = _Buffers.of(self.plan, config, self.dtype)
        self._own = dict(kernels or {})
        self._plan_step()
        planned = {launch.kernel.name for launch in self.plan.launches}
        unused = sorted(name for name, own in self._own.items() if own.name not in planned)
        if unused:
            raise UsageError(
                f"kernels: expected names of {', '.join(sorted(planned))}, got {', '.join(unused)}"
            )

    def prepare(
        self,
        weights: Mapping[str, Any],
        device: str = "CPU",
        executor: str = "serial",
        **options: Any,
    ) -> Decoding:
        """Place weights on a device and return what decodes.

        Args:
            weights: As `random_weights` and `load_weights` return them.
            device: Where to decode. Default "CPU".
            executor: See `Plan.prepare`. Default "serial".
            **options: Others of `Plan.prepare`.

        Raises:
            UsageError: A weight is missing or has another shape.
        """
        missing = sorted(set(self._weights) - set(weights))
        if missing:
            raise UsageError(
                f"expected weights {', '.join(missing[:4])} too; there are {len(weights)}"
            )
        bind = {name: weights[name] for name in self._weights} | {"rates": self.config.rates()}
        prepared = self.plan.prepare(device, executor, bind=bind, **options)
        return Decoding(self, prepared, options.get("profiler"))

    # --------------------------------------------------------------------------------- the launches

    def _plan_step(self) -> None:
        config, b = self.config, self._buffers
        self._launch(
            embedding(self.dtype),
            table=self._weights["embedding"],
            ids=b.token,
            y=b.x.reshape((1, config.dim)),
            rows=1,
            vocabulary=config.vocabulary,
            n=config.dim,
            brick=BrickId.EMBEDDING,
        )
        for layer in range(config.layers):
            (self._plan_fused if self.fused else self._plan_apart)(layer)
        self._plan_head()

    def _launch(self, kernel: Kernel, **arguments: Any) -> None:
        self.plan.launch(self._own.get(kernel.name, kernel), **arguments)

    def _plan_fused(self, layer: int) -> None:
        config, b, weights = self.config, self._buffers, self._weights
        self._launch(
            norm_gemv(self.dtype, rows_per_block=QKV_ROWS),
            w=weights[f"qkv_{layer}"],
            x=b.x,
            weight=weights[f"norm1_{layer}"],
            y=b.qkv,
            m=b.qkv.shape[0],
            n=config.dim,
            eps=config.eps,
            brick=BrickId.QKV_PROJECTION,
            layer=layer,
        )
        self._launch(
            rope_append(self.dtype),
            qkv=b.qkv,
            rates=self._rates,
            k_cache=b.keys[layer],
            v_cache=b.values[layer],
            heads=config.heads,
            kv_heads=config.kv_heads,
            capacity=config.capacity,
            dim=config.head_dim,
            position=self._position,
            brick=BrickId.ROPE_EMBEDDING,
            layer=layer,
        )
        self._plan_attention(layer)
        self._plan_added("out", b.attended, BrickId.OUTPUT_PROJECTION, layer)
        self._plan_norm(f"norm2_{layer}", layer)
        self._launch(
            gated_gemv(self.dtype),
            w=weights[f"gate_up_{layer}"],
            x=b.normed,
            y=b.gated,
            hidden=config.hidden,
            n=config.dim,
            brick=BrickId.GATE_PROJECTION,
            layer=layer,
        )
        self._plan_added("down", b.gated, BrickId.DOWN_PROJECTION, layer)

    def _plan_added(self, name: str, x: PlanBuffer, brick: BrickId, layer: int) -> None:
        """Plan a product that is added to the stream in place."""
        w = self._weights[f"{name}_{layer}"]
        self._launch(
            gemv_residual(self.dtype, in_place=True),
            w=w,
            x=x,
            y=self._buffers.x,
            m=w.shape[0],
            n=w.shape[1],
            brick=brick,
            layer=layer,
        )

    def _plan_attention(self, layer: int) -> None:
        config, b = self.config, self._buffers
        sizes = {"queries": config.heads // config.kv_heads, "dim": config.head_dim, "span": SPAN}
        self._launch(
            attention_decode(self.dtype, **sizes),
            q=b.queries,
            k_cache=b.keys[layer],
            v_cache=b.values[layer],
            largest=b.largest,
            total=b.total,
            values=b.parts,
            kv_heads=config.kv_heads,
            capacity=config.capacity,
            length=self._position + 1,
            scale=config.head_dim**-0.5,
            brick=BrickId.ATTENTION_SCORE,
            layer=layer,
        )
        self._launch(
            attention_combine(self.dtype, **sizes),
            largest=b.largest,
            total=b.total,
            values=b.parts,
            y=b.attended.reshape((config.heads, config.head_dim)),
            kv_heads=config.kv_heads,
            capacity=config.capacity,
            brick=BrickId.ATTENTION_OUTPUT,
            layer=layer,
        )

    def _plan_apart(self, layer: int) -> None:
        config, b = self.config, self._buffers
        dim, heads, kv_heads = config.head_dim, config.heads, config.kv_heads
        self._plan_norm(f"norm1_{layer}", layer)
        self._plan_product(f"qkv_{layer}", b.normed, b.qkv, BrickId.QKV_PROJECTION, layer)
        ends = heads * dim, (heads + kv_heads) * dim
        keys = b.qkv[ends[0] : ends[1]].reshape((1, kv_heads, dim))
        for turned, count in ((b.queries.reshape((1, heads, dim)), heads), (keys, kv_heads)):
            self._launch(
                rope(self.dtype, in_place=True),
                y=turned,
                rates=self._rates,
                rows=1,
                heads=count,
                dim=dim,
                position=self._position,
                brick=BrickId.ROPE_EMBEDDING,
                layer=layer,
            )
        self._launch(
            kv_append(self.dtype),
            k=keys,
            v=b.qkv[ends[1] :].reshape((1, kv_heads, dim)),
            k_cache=b.keys[layer],
            v_cache=b.values[layer],
            rows=1,
            kv_heads=kv_heads,
            capacity=config.capacity,
            dim=dim,
            position=self._position,
            brick=BrickId.KV_CACHE_APPEND,
            layer=layer,
        )
        self._plan_attention(layer)
        self._plan_product(f"out_{layer}", b.attended, b.branch, BrickId.OUTPUT_PROJECTION, layer)
        self._plan_residual(b.x, b.middle, layer)
        self._plan_norm(f"norm2_{layer}", layer, b.middle)
        gate_up = self._weights[f"gate_up_{layer}"]
        for half, y, brick in (
            (gate_up[: config.hidden], b.gate, BrickId.GATE_PROJECTION),
            (gate_up[config.hidden :], b.up, BrickId.UP_PROJECTION),
        ):
            self._plan_product(half, b.normed, y, brick, layer)
        self._launch(
            silu_gate(self.dtype),
            gate=b.gate,
            up=b.up,
            y=b.gated,
            n=config.hidden,
            brick=BrickId.ACTIVATION,
            layer=layer,
        )
        self._plan_product(f"down_{layer}", b.gated, b.branch, BrickId.DOWN_PROJECTION, layer)
        self._plan_residual(b.middle, b.x, layer)

    def _plan_norm(self, weight: str, layer: int | None, x: PlanBuffer | None = None) -> None:
        config, b = self.config, self._buffers
        self._launch(
            rms_norm(self.dtype),
            x=(b.x if x is None else x).reshape((1, config.dim)),
            weight=self._weights[weight],
            y=b.normed.reshape((1, config.dim)),
            rows=1,
            n=config.dim,
            eps=config.eps,
            brick=BrickId.RMS_NORM,
            layer=layer,
        )

    def _plan_product(
        self,
        weight: str | PlanBuffer,
        x: PlanBuffer,
        y: PlanBuffer,
        brick: BrickId,
        layer: int | None,
    ) -> None:
        w = self._weights[weight] if isinstance(weight, str) else weight
        self._launch(
            gemv(self.dtype, self.dtype, y.dtype),
            w=w,
            x=x,
            y=y,
            m=w.shape[0],
            n=w.shape[1],
            brick=brick,
            layer=layer,
        )

    def _plan_residual(self, x: PlanBuffer, y: PlanBuffer, layer: int) -> None:
        self._launch(
            residual(self.dtype),
            a=x,
            b=self._buffers.branch,
            y=y,
            n=self.config.dim,
            brick="Residual",
            layer=layer,
        )

    def _plan_head(self) -> None:
        config, b = self.config, self._buffers
        self._plan_norm("norm", None)
        head = "embedding" if config.tied else "head"
        self._plan_product(head, b.normed, b.logits, BrickId.LM_HEAD, None)
        row: dict[str, Any] = {"rows": 1, "n": config.vocabulary, "brick": BrickId.SAMPLING}
        row |= {"largest": b.tile_largest, "places": b.tile_places}
        self._launch(argmax_tiles(), x=b.logits.reshape((1, config.vocabulary)), **row)
        self._launch(argmax_combine(), y=b.token, **row)


@dataclass(frozen=True)
class _Buffers:
    """What passes between the launches of a step, and what stays between steps."""

    token: PlanBuffer
    x: PlanBuffer
    qkv: PlanBuffer
    queries: PlanBuffer
    attended: PlanBuffer
    gated: PlanBuffer
    largest: PlanBuffer
    total: PlanBuffer
    parts: PlanBuffer
    logits: PlanBuffer
    tile_largest: PlanBuffer
    tile_places: PlanBuffer
    normed: PlanBuffer
    branch: PlanBuffer
    middle: PlanBuffer
    gate: PlanBuffer
    up: PlanBuffer
    keys: Sequence[PlanBuffer]
    values: Sequence[PlanBuffer]

    @classmethod
    def of(cls, plan: Plan, config: DecoderConfig, dtype: str) -> _Buffers:
        group = config.heads // config.kv_heads
        splits = -(-config.capacity // SPAN)
        attended = config.heads * config.head_dim
        tiles = -(-config.vocabulary // TILE)
        cache = (config.kv_heads, config.capacity, config.head_dim)
        layers = range(config.layers)
        qkv = plan.buffer("qkv", attended + 2 * config.kv_heads * config.head_dim, dtype)
        parts = (config.kv_heads, splits, group)
        return cls(
            token=plan.buffer("token", 1, "i32"),
            x=plan.buffer("x", config.dim, dtype),
            qkv=qkv,
            queries=qkv[:attended].reshape((config.heads, config.head_dim)),
            attended=plan.buffer("attended", attended, dtype),
            gated=plan.buffer("gated", config.hidden, dtype),
            largest=plan.buffer("part_largest", parts, "f32"),
            total=plan.buffer("part_total", parts, "f32"),
            parts=plan.buffer("part_values", (*parts, config.head_dim), "f32"),
            logits=plan.buffer("logits", config.vocabulary, "f32"),
            tile_largest=plan.buffer("tile_largest", (1, tiles), "f32"),
            tile_places=plan.buffer("tile_places", (1, tiles), "i32"),
            normed=plan.buffer("normed", config.dim, dtype),
            branch=plan.buffer("branch", config.dim, dtype),
            middle=plan.buffer("middle", config.dim, dtype),
            gate=plan.buffer("gate", config.hidden, dtype),
            up=plan.buffer("up", config.hidden, dtype),
            keys=[plan.buffer(f"keys_{layer}", cache, dtype) for layer in layers],
            values=[plan.buffer(f"values_{layer}", cache, dtype) for layer in layers],
        )


class Decoding:
    """A decoder on a device, somewhere in a text."""

    def __init__(
        self, decoder: Decoder, prepared: PreparedPlan, profiler: BrickProfiler | None = None
    ) -> None:
        self.config = decoder.config
        self.prepared = prepared
        self.profiler = profiler
        self.position = 0
        """Where the next token stands."""

    def step(self, token: int | None = None, *, phase: str = "decode") -> None:
        """Run one token; the next one is found by `token` and fed by a step without one.

        Raises:
            UsageError: The caches are full, or the token is none of the vocabulary.
        """
        if self.position >= self.config.capacity:
            raise UsageError(
                f"expected at most {self.config.capacity} positions, as the caches have; begin "
                "again with restart(), or make a decoder of a larger capacity"
            )
        if token is not None:
            number = integer_of(token)
            if number is None or not 0 <= number < self.config.vocabulary:
                raise UsageError(
                    f"expected a token from 0 to {self.config.vocabulary - 1}, got {token!r}"
                )
            self.prepared.write("token", np.array([number], np.int32))
        within = (
            nullcontext() if self.profiler is None else self.profiler.step(tokens=1, phase=phase)
        )
        with within:
            self.prepared(position=self.position)
        self.position += 1

    @property
    def token(self) -> int:
        """The token that the last step found, after waiting for it."""
        return int(self.prepared.read("token")[0])

    def logits(self) -> NDArray[np.float32]:
        """Return the logits of the last step, after waiting for them."""
        return self.prepared.read("logits")

    def generate(self, prompt: Sequence[int], count: int) -> list[int]:
        """Feed a prompt, and return the tokens that follow, each the most likely one.

        Raises:
            UsageError: The prompt is empty, or does not fit into the caches with what follows.
        """
        if (
            isinstance(prompt, str)
            or not isinstance(prompt, Sequence | np.ndarray)
            or not len(prompt)
        ):
            raise UsageError(f"expected a prompt as a list of tokens, got {prompt!r:.80}")
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise UsageError(f"count: expected a number of tokens from 0 on, got {count!r:.80}")
        needed = self.position + len(prompt) + max(count - 1, 0)
        if needed > self.config.capacity:
            raise UsageError(
                f"expected at most {self.config.capacity} positions, as the caches have; the "
                f"prompt and what follows need {needed}, {self.position} of them are taken: begin "
                "again with restart(), or make a decoder of a larger capacity"
            )
        for token in prompt:
            self.step(token, phase="prefill")
        tokens = [self.token] if count > 0 else []
        while len(tokens) < count:
            self.step()
            tokens.append(self.token)
        return tokens

    def restart(self) -> None:
        """Begin another text; what the caches hold of the last one is not read again."""
        self.position = 0
