"""Decoder: one decode step of a Llama-style model as a plan.

The plan takes a token and a position and leaves logits and the next token; keys and values stay in
caches of the plan. The same plan runs on every device with the same bits. `decoder_weights` has the
configuration and where weights come from, `decoding` the loop that runs it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from brickline.bricks import BrickId
from brickline.decoder_weights import DecoderConfig, check_config, weight_shapes
from brickline.decoding import Decoding as Decoding
from brickline.dtypes import dtype_of
from brickline.errors import UsageError
from brickline.kernel import Kernel
from brickline.kernels.attention import attention_combine, attention_decode
from brickline.kernels.elementwise import residual, silu_gate
from brickline.kernels.fused import gated_gemv, gemv_residual, norm_gemv
from brickline.kernels.norms import rms_norm
from brickline.kernels.products import gemv
from brickline.kernels.rotary import kv_append, rope, rope_append
from brickline.kernels.tokens import TILE, argmax_combine, argmax_tiles, embedding
from brickline.plan import Plan
from brickline.plan_arguments import checked_flag
from brickline.plan_buffers import PlanBuffer
from brickline.plan_names import listed, nearest
from brickline.plan_words import counted

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
        check_config(config)
        self.config = config
        self.dtype = dtype_of(dtype).name
        self.fused = checked_flag(fused, "decoder", "fused")
        self._own = _own_kernels(kernels)
        self.plan = Plan("decode")
        self._position = self.plan.variable("position", 0, config.capacity - 1)
        self._weights: dict[str, PlanBuffer] = {
            name: self.plan.buffer(name, shape, self.dtype, read_only=True)
            for name, shape in weight_shapes(config)
        }
        self._rates = self.plan.buffer("rates", config.head_dim // 2, "f32", read_only=True)
        self._buffers = _Buffers.of(self.plan, config, self.dtype)
        self._places: set[str] = set()
        """Names of the kernels that ship, whose places those of a caller may take."""
        self._plan_step()
        unused = sorted(set(self._own) - self._places)
        if unused:
            places = sorted(self._places)
            raise UsageError(
                f"kernels: expected names of {', '.join(places)}, got {', '.join(unused)}"
                f"{nearest(unused[0], places)}"
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
        if not isinstance(weights, Mapping):
            raise UsageError(
                f"expected weights by name, got {weights!r:.80}; read them with load_weights(path, "
                "config), or make some with random_weights(config)"
            )
        missing = [name for name in self._weights if weights.get(name) is None]
        if missing:
            names = listed(missing, "buffers")
            raise UsageError(
                f"expected {counted(len(self._weights), 'weight')}, got {len(weights)} without "
                f"{names}; load_weights(path, config) reads them by these names from a model of "
                "the hub"
            )
        self._check_dtype(weights)
        if "bind" in options:
            raise UsageError(
                "expected weights alone, got bind= too; write other buffers with prepared.write"
            )
        bind = {name: weights[name] for name in self._weights} | {"rates": self.config.rates()}
        prepared = self.plan.prepare(device, executor, bind=bind, **options)
        return Decoding(self, prepared, options.get("profiler"))

    def _check_dtype(self, weights: Mapping[str, Any]) -> None:
        for name in self._weights:
            given = getattr(weights[name], "dtype", self.dtype)
            if dtype_of(given).name != self.dtype:
                raise UsageError(
                    f"weight {name}: expected {self.dtype}, as the decoder has, got "
                    f"{dtype_of(given).name}; give both the same dtype="
                )

    def __repr__(self) -> str:
        config, launches = self.config, counted(len(self.plan.launches), "launch")
        layers = counted(config.layers, "layer")
        return f"<Decoder of {layers}, dim {config.dim}, {self.dtype}, {launches} a token>"

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
        apart = None if self.fused else _ApartBuffers.of(self.plan, config, self.dtype)
        for layer in range(config.layers):
            if apart is None:
                self._plan_fused(layer)
            else:
                self._plan_apart(layer, apart)
        self._plan_head()

    def _launch(self, kernel: Kernel, **arguments: Any) -> None:
        self._places.add(kernel.name)
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

    def _plan_apart(self, layer: int, apart: _ApartBuffers) -> None:
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
        branch, middle = apart.branch, apart.middle
        self._plan_product(f"out_{layer}", b.attended, branch, BrickId.OUTPUT_PROJECTION, layer)
        self._plan_residual(b.x, branch, middle, layer)
        self._plan_norm(f"norm2_{layer}", layer, middle)
        gate_up = self._weights[f"gate_up_{layer}"]
        for half, y, brick in (
            (gate_up[: config.hidden], apart.gate, BrickId.GATE_PROJECTION),
            (gate_up[config.hidden :], apart.up, BrickId.UP_PROJECTION),
        ):
            self._plan_product(half, b.normed, y, brick, layer)
        self._launch(
            silu_gate(self.dtype),
            gate=apart.gate,
            up=apart.up,
            y=b.gated,
            n=config.hidden,
            brick=BrickId.ACTIVATION,
            layer=layer,
        )
        self._plan_product(f"down_{layer}", b.gated, branch, BrickId.DOWN_PROJECTION, layer)
        self._plan_residual(middle, branch, b.x, layer)

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

    def _plan_residual(self, x: PlanBuffer, branch: PlanBuffer, y: PlanBuffer, layer: int) -> None:
        self._launch(
            residual(self.dtype),
            a=x,
            b=branch,
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


def _own_kernels(kernels: Mapping[str, Kernel] | None) -> dict[str, Kernel]:
    if kernels is not None and not isinstance(kernels, Mapping):
        raise UsageError(
            "kernels: expected kernels by the name of the one whose place each takes, got "
            f'{type(kernels).__name__}; for example kernels={{"rope_append": mine}}'
        )
    own = dict(kernels or {})
    for name, kernel in own.items():
        if not isinstance(name, str):
            raise UsageError(f"kernels: expected the name of a kernel, got {name!r:.80}")
        if not isinstance(kernel, Kernel):
            call = "; call it to make one" if callable(kernel) else ""
            raise UsageError(
                f"kernels, {name}: expected a Kernel, got {type(kernel).__name__}{call}"
            )
    return own


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
            keys=[plan.buffer(f"keys_{layer}", cache, dtype) for layer in layers],
            values=[plan.buffer(f"values_{layer}", cache, dtype) for layer in layers],
        )


@dataclass(frozen=True)
class _ApartBuffers:
    """What else passes between launches where each operation has its own."""

    branch: PlanBuffer
    middle: PlanBuffer
    gate: PlanBuffer
    up: PlanBuffer

    @classmethod
    def of(cls, plan: Plan, config: DecoderConfig, dtype: str) -> _ApartBuffers:
        return cls(
            branch=plan.buffer("branch", config.dim, dtype),
            middle=plan.buffer("middle", config.dim, dtype),
            gate=plan.buffer("gate", config.hidden, dtype),
            up=plan.buffer("up", config.hidden, dtype),
        )
