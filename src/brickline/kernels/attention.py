"""Kernels of attention while decoding: one token's queries over cached keys and values.

`attention_decode` cuts the positions into spans, `attention_combine` puts the parts together;
`rope_attention` begins with the token's own key and value.
References compute in float64; see `catalog`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from brickline.dtypes import DType
from brickline.errors import KernelError
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.declaring import (
    FAULT_CAPACITY,
    MOST_POSITIONS,
    MOST_SECOND,
    Array,
    count_of,
    float_kind,
    piece,
    source_of,
)
from brickline.kernels.rotary import rope_append_in_numpy

MOST_CUTS = 8
"""Parts into which a block cuts its positions when it sums values."""
KEPT_BYTES = 32768
"""Shared memory for these parts, which every device has."""


def attention_decode(
    dtype: object = "bf16",
    *,
    queries: int = 4,
    dim: int = 64,
    span: int = 64,
    soft_cap: float | None = None,
) -> Kernel:
    """Attention of one token over spans of the caches, to be put together.

    The grid depends on the capacity alone, not on `length`: a span beyond it leaves an empty part.

    Args:
        dtype: Of queries and caches. Default "bf16".
        queries: Heads of q for each head of the caches, side by side. Default 4.
        dim: Of a head. Default 64; a multiple of 16 is read in vectors.
        span: Positions of a block. Default 64: 8 heads and a capacity of 1024 make 128 blocks.
        soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``. Default None: they stay.
    """
    code = _Code.of(dtype, queries, dim, span, soft_cap)
    heads = piece("block_y", code.queries * code.row)
    return Kernel(
        "attention_decode",
        source_of(*code.files, "attention_decode"),
        [
            Param("q", code.kind, (code.heads, code.dim), touches=heads, align=16),
            *code.caches("read", "length"),
            *code.parts("write", piece(f"block_y * {code.splits} + block_x", 1)),
            Scalar("kv_heads", high=MOST_SECOND),
            Scalar("capacity", high=MOST_POSITIONS),
            Scalar("length", high=MOST_POSITIONS),
            Scalar("scale", "f32"),
        ],
        global_size=(code.splits, "kv_heads"),
        local_size=256,
        shared_bytes=code.shared_bytes,
        flops=f"length * {code.flops}",
        bytes=f"length * {code.read_bytes} + {code.fixed_bytes}",
        reference=partial(_decode, queries=code.queries, span=code.span, soft_cap=soft_cap),
        defines=code.defines,
    )


def _decode(
    *,
    q: Array,
    k_cache: Array,
    v_cache: Array,
    kv_heads: int,
    capacity: int,
    length: int,
    scale: float,
    queries: int,
    span: int,
    soft_cap: float | None,
) -> tuple[Array, Array, Array]:
    splits = -(-capacity // span)
    grouped = q.astype(np.float64).reshape(kv_heads, queries, -1)
    largest = np.full((kv_heads, splits, queries), -np.inf)
    total = np.zeros_like(largest)
    values = np.zeros((*largest.shape, q.shape[-1]))
    for split in range(splits):
        places = slice(split * span, min((split + 1) * span, length, capacity))
        if places.start >= places.stop:
            break
        scores = scale * np.einsum("hqd,hpd->hqp", grouped, k_cache[:, places])
        if soft_cap is not None:
            scores = soft_cap * np.tanh(scores / soft_cap)
        largest[:, split] = scores.max(axis=-1)
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        total[:, split] = powers.sum(axis=-1)
        values[:, split] = powers @ v_cache[:, places].astype(np.float64)
    return largest.astype(np.float32), total.astype(np.float32), values.astype(np.float32)


def rope_attention(
    dtype: object = "bf16",
    *,
    queries: int = 4,
    dim: int = 64,
    span: int = 64,
    soft_cap: float | None = None,
    interleaved: bool = False,
) -> Kernel:
    """One token at a position: `rope_append` and `attention_decode` in one launch, the same bits.

    For CUDA: every block turns its queries again, which is less than a launch costs. On a CPU the
    two kernels are faster.

    Args:
        dtype: Of qkv and caches. Default "bf16"; `rates` are always f32, see `rope`.
        queries: As in `attention_decode`.
        dim: As in `attention_decode`.
        span: As in `attention_decode`.
        soft_cap: As in `attention_decode`.
        interleaved: As in `rope`. Default False.
    """
    code = _Code.of(dtype, queries, dim, span, soft_cap)
    turned = code.queries * code.dim * code.kind.size_bytes
    return Kernel(
        "rope_attention",
        source_of("rotation", *code.files, "rope_attention"),
        [
            Param("qkv", code.kind, f"kv_heads * {(code.queries + 2) * code.dim}"),
            Param("rates", "f32", code.dim // 2),
            *code.caches("read-write", "position + 1"),
            *code.parts("write", piece(f"block_y * {code.splits} + block_x", 1)),
            Scalar("kv_heads", high=MOST_SECOND),
            Scalar("capacity", high=MOST_POSITIONS),
            Scalar("position", high=MOST_POSITIONS),
            Scalar("scale", "f32"),
        ],
        global_size=(code.splits, "kv_heads"),
        local_size=256,
        shared_bytes=_sixteens(turned) + code.shared_bytes,
        flops=f"(position + 1) * {code.flops}",
        bytes=(
            f"(position + 1) * {code.read_bytes} + {code.fixed_bytes} + kv_heads * {4 * code.row}"
        ),
        reference=partial(
            _rope_attention,
            queries=code.queries,
            span=code.span,
            soft_cap=soft_cap,
            interleaved=interleaved,
        ),
        defines={**code.defines, "INTERLEAVED": int(interleaved)},
    )


def _rope_attention(
    *,
    qkv: Array,
    rates: Array,
    k_cache: Array,
    v_cache: Array,
    kv_heads: int,
    capacity: int,
    position: int,
    scale: float,
    queries: int,
    span: int,
    soft_cap: float | None,
    interleaved: bool,
) -> tuple[Array, ...]:
    heads, dim = queries * kv_heads, k_cache.shape[-1]
    turned, keys, values = rope_append_in_numpy(
        qkv=qkv,
        rates=rates,
        k_cache=k_cache,
        v_cache=v_cache,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        capacity=capacity,
        position=position,
        interleaved=interleaved,
    )
    parts = _decode(
        q=turned[: heads * dim].reshape(heads, dim),
        k_cache=keys,
        v_cache=values,
        kv_heads=kv_heads,
        capacity=capacity,
        length=position + 1,
        scale=scale,
        queries=queries,
        span=span,
        soft_cap=soft_cap,
    )
    return keys, values, *parts


def attention_combine(
    dtype: object = "bf16", *, queries: int = 4, dim: int = 64, span: int = 64
) -> Kernel:
    """Attention from the parts that `attention_decode` of the same constants left.

    Args:
        dtype: Of the result. Default "bf16".
        queries: As in `attention_decode`.
        dim: As in `attention_decode`.
        span: As in `attention_decode`.
    """
    code = _Code.of(dtype, queries, dim, span, None)
    many, splits = code.queries, code.splits
    names = ("Element", "QUERIES", "DIM", "SPAN")
    return Kernel(
        "attention_combine",
        source_of("attention_combine"),
        [
            # A head's parts lie between those of the heads that share its keys.
            *code.parts("read", piece(f"block_x // {many}", splits)),
            Param(
                "y", code.kind, (code.heads, code.dim), "write", touches=piece("block_x", code.row)
            ),
            Scalar("kv_heads", high=MOST_SECOND),
            Scalar("capacity", high=MOST_POSITIONS),
        ],
        global_size=code.heads,
        local_size=64,
        shared_bytes=f"{splits} * 4",
        flops=f"kv_heads * {many} * ({splits} * {2 * code.dim + 10} + {code.dim})",
        bytes=f"kv_heads * {many} * ({splits} * {(code.dim + 2) * 4} + {code.row})",
        reference=_combine,
        defines={name: code.defines[name] for name in names},
    )


def _combine(*, largest: Array, total: Array, values: Array, kv_heads: int, capacity: int) -> Array:
    shares = np.exp(largest.astype(np.float64) - largest.max(axis=1, keepdims=True))
    sums = (shares * total).sum(axis=1)
    weighted = (shares[..., None] * values).sum(axis=1)
    result: Array = weighted / sums[..., None]
    return result.reshape(-1, values.shape[-1]).astype(np.float32)


@dataclass(frozen=True)
class _Code:
    """What the code of attention is made for, and what follows from it for a declaration."""

    kind: DType
    queries: int
    dim: int
    span: int
    soft_cap: float | None

    @classmethod
    def of(
        cls, dtype: object, queries: object, dim: object, span: object, soft_cap: float | None
    ) -> _Code:
        many, width = count_of(queries, "queries", 1024), count_of(dim, "dim", 4096)
        if many * width * 4 > KEPT_BYTES:
            raise KernelError(
                f"expected queries * dim of at most {KEPT_BYTES // 4}, got {many} * {width}; "
                "launch attention for a part of the heads at a time"
            )
        cap = None if soft_cap is None else _cap(soft_cap)
        return cls(float_kind(dtype), many, width, count_of(span, "span", 1024), cap)

    @property
    def row(self) -> int:
        """Bytes of a head."""
        return self.dim * self.kind.size_bytes

    @property
    def heads(self) -> str:
        return f"kv_heads * {self.queries}"

    @property
    def splits(self) -> str:
        return f"ceil_div(capacity, {self.span})"

    @property
    def cuts(self) -> int:
        """Parts into which a block cuts its positions when it sums values."""
        return min(MOST_CUTS, max(1, KEPT_BYTES // (self.queries * self.dim * 4)), self.span)

    @property
    def shared_bytes(self) -> int:
        scores = _sixteens(self.queries * self.span * 4)
        return scores + self.cuts * self.queries * self.dim * 4

    @property
    def flops(self) -> str:
        """For each position."""
        return f"kv_heads * {self.queries * (4 * self.dim + 5)}"

    @property
    def read_bytes(self) -> str:
        """For each position."""
        return f"2 * kv_heads * {self.row}"

    @property
    def fixed_bytes(self) -> str:
        """Of queries and parts."""
        many = self.queries
        return f"kv_heads * ({many * self.row} + {self.splits} * {many * (self.dim + 2) * 4})"

    @property
    def files(self) -> tuple[str, ...]:
        curves = () if self.soft_cap is None else ("curves",)
        return (*curves, "fetch", "attention_span")

    @property
    def defines(self) -> dict[str, int | float | str]:
        cap = {} if self.soft_cap is None else {"SOFT_CAP": self.soft_cap}
        return {
            "Element": self.kind.block_type,
            "QUERIES": self.queries,
            "DIM": self.dim,
            "SPAN": self.span,
            "PARTS": self.cuts,
            "FAULT_CAPACITY": FAULT_CAPACITY,
            **cap,
        }

    def caches(self, access: str, length: str) -> list[Param]:
        """Both caches, of which a block touches its span up to the length."""
        ends = (f"minimum({end}, {length}, capacity)" for end in piece("block_x", self.span))
        first, end = (f"(block_y * capacity + {place}) * {self.row}" for place in ends)
        shape = ("kv_heads", "capacity", self.dim)
        return [
            Param(name, self.kind, shape, access, touches=(first, end), align=16)
            for name in ("k_cache", "v_cache")
        ]

    def parts(self, access: str, places: tuple[str, str]) -> list[Param]:
        """What spans leave, of which a block touches the places, in units of a span."""
        shape = ("kv_heads", self.splits, self.queries)
        one, all_of = self.queries * 4, self.queries * self.dim * 4
        first, end = (f"({place}) * {one}" for place in places)
        start, stop = (f"({place}) * {all_of}" for place in places)
        return [
            Param("largest", "f32", shape, access, touches=(first, end)),
            Param("total", "f32", shape, access, touches=(first, end)),
            Param("values", "f32", (*shape, self.dim), access, touches=(start, stop)),
        ]


def _cap(value: float) -> float:
    found = float(value)
    if not 0.0 < found < 1e30:
        raise KernelError(
            f"expected soft_cap above 0 and below 1e30, got {value!r:.80}; leave it out for none"
        )
    return found


def _sixteens(size_bytes: int) -> int:
    return -(-size_bytes // 16) * 16
