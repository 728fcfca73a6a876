"""Kernels of rotary positions, and of the caches that turned keys go to.

References compute in float64; see `catalog`.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from brickline.dtypes import DType
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.declaring import (
    FAULT_CAPACITY,
    LONGEST,
    MOST_HEADS,
    MOST_POSITIONS,
    Array,
    float_kind,
    piece,
    source_of,
)

LANES = 64
"""A lane for each pair of a head of 128."""
MOST_ROWS = 2**15 - 1
"""Of MOST_HEADS heads each, so that their product is a grid."""
_WITHIN = "minimum({}, maximum(capacity - 1, 0))"
"""A position; a fault writes nothing, and no bytes lie beyond the cache."""


def rope(dtype: object = "bf16", *, in_place: bool = False, interleaved: bool = False) -> Kernel:
    """Rows of heads, turned by their positions: row r stands at position + r.

    Pair i of a head turns by ``position * rates[i]`` radians; `rates` are 1 / theta^(2 i / dim), or
    what a scaled rope makes of them. The elements of an odd `dim` that have no partner stay.

    Args:
        dtype: Of the heads. Default "bf16"; `rates` are always f32.
        in_place: Whether y is turned itself. Default False: x is read, and y written.
        interleaved: Whether pairs are (2 i, 2 i + 1), as GPT-J has them. Default False: (i, i +
            dim / 2), as Llama and Hugging Face have them.
    """
    kind = float_kind(dtype)
    head = piece("block_x", f"dim * {kind.size_bytes}")
    shape = ("rows", "heads", "dim")
    rates = Param("rates", "f32", "dim // 2")
    buffers = (
        [Param("y", kind, shape, "read-write", touches=head), rates]
        if in_place
        else [
            Param("x", kind, shape, touches=head),
            rates,
            Param("y", kind, shape, "write", touches=head),
        ]
    )
    return Kernel(
        "rope",
        source_of("rotation", "rope"),
        [
            *buffers,
            Scalar("rows", high=MOST_ROWS),
            Scalar("heads", high=MOST_HEADS),
            Scalar("dim", high=LONGEST // (MOST_ROWS * MOST_HEADS)),
            Scalar("position", high=MOST_POSITIONS),
        ],
        global_size="rows * heads",
        local_size=LANES,
        flops="rows * heads * (dim // 2) * 40",
        bytes=f"2 * rows * heads * dim * {kind.size_bytes} + dim // 2 * 4",
        reference=partial(_rope_in_place if in_place else _rope, interleaved=interleaved),
        defines={
            "Element": kind.block_type,
            "IN_PLACE": int(in_place),
            "INTERLEAVED": int(interleaved),
        },
    )


def turned_in_numpy(x: Array, rates: Array, position: int, *, interleaved: bool) -> Array:
    """Return [rows, heads, dim] turned: the reference of `rope`, and of kernels that turn."""
    half = x.shape[-1] // 2
    ends = (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    first, second = ends if interleaved else (slice(0, half), slice(half, 2 * half))
    angles = (position + np.arange(x.shape[0], dtype=np.float64))[:, None, None] * rates
    y = x.astype(np.float64)
    a, b = y[..., first].copy(), y[..., second].copy()
    y[..., first] = a * np.cos(angles) - b * np.sin(angles)
    y[..., second] = b * np.cos(angles) + a * np.sin(angles)
    return y.astype(np.float32)


def _rope(
    *,
    x: Array,
    rates: Array,
    rows: int,
    heads: int,
    dim: int,
    position: int,
    interleaved: bool,
) -> Array:
    return turned_in_numpy(x, rates, position, interleaved=interleaved)


def _rope_in_place(
    *,
    y: Array,
    rates: Array,
    rows: int,
    heads: int,
    dim: int,
    position: int,
    interleaved: bool,
) -> Array:
    return turned_in_numpy(y, rates, position, interleaved=interleaved)


def kv_append(dtype: object = "bf16") -> Kernel:
    """Rows of keys and values, written into the caches from a position on.

    The caches are [kv_heads, capacity, dim], so that what attention reads of a head lies in one
    piece. A row beyond the capacity is the fault `declaring.FAULT_CAPACITY`.
    """
    kind = float_kind(dtype)
    row = f"dim * {kind.size_bytes}"
    within = _WITHIN.format("position + block_x // maximum(kv_heads, 1)")
    place = f"block_x % maximum(kv_heads, 1) * capacity + {within}"
    return Kernel(
        "kv_append",
        source_of("kv_append"),
        [
            Param("k", kind, ("rows", "kv_heads", "dim"), touches=piece("block_x", row)),
            Param("v", kind, ("rows", "kv_heads", "dim"), touches=piece("block_x", row)),
            *_caches(kind, (f"({place}) * {row}", f"({place} + 1) * {row}"), "read-write"),
            Scalar("rows", high=MOST_ROWS),
            Scalar("kv_heads", high=MOST_HEADS),
            *_cache_sizes(),
            Scalar("position", high=MOST_POSITIONS),
        ],
        global_size="rows * kv_heads",
        local_size=LANES,
        flops=0,
        bytes=f"4 * rows * kv_heads * {row}",
        reference=_kv_append,
        defines={"Element": kind.block_type, "FAULT_CAPACITY": FAULT_CAPACITY},
    )


def _kv_append(
    *,
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    rows: int,
    kv_heads: int,
    dim: int,
    capacity: int,
    position: int,
) -> tuple[Array, Array]:
    fitting = max(0, min(rows, capacity - position))
    places = slice(position, position + fitting)
    keys, values = k_cache.copy(), v_cache.copy()
    keys[:, places] = k[:fitting].swapaxes(0, 1)
    values[:, places] = v[:fitting].swapaxes(0, 1)
    return keys, values


def rope_append(dtype: object = "bf16", *, interleaved: bool = False) -> Kernel:
    """One token: its queries turned in place, its keys turned and its values into the caches.

    Two `rope` and a `kv_append` in one launch, with the same bits. `qkv` has `heads` heads of
    queries, then kv_heads of keys, then as many of values. A position beyond the capacity is the
    fault `declaring.FAULT_CAPACITY`.

    Args:
        dtype: Of heads and caches. Default "bf16"; `rates` are always f32, see `rope`.
        interleaved: As in `rope`. Default False.
    """
    kind = float_kind(dtype)
    row = f"dim * {kind.size_bytes}"
    return Kernel(
        "rope_append",
        source_of("rotation", "rope_append"),
        [
            Param(
                "qkv",
                kind,
                "(heads + 2 * kv_heads) * dim",
                "read-write",
                touches=piece("block_x", row),
            ),
            Param("rates", "f32", "dim // 2"),
            Param(
                "k_cache",
                kind,
                ("kv_heads", "capacity", "dim"),
                "read-write",
                touches=_row_of_head("heads", row),
            ),
            Param(
                "v_cache",
                kind,
                ("kv_heads", "capacity", "dim"),
                "read-write",
                touches=_row_of_head("(heads + kv_heads)", row),
            ),
            Scalar("heads", high=MOST_HEADS),
            Scalar("kv_heads", high=MOST_HEADS),
            *_cache_sizes(),
            Scalar("position", high=MOST_POSITIONS),
        ],
        global_size="heads + 2 * kv_heads",
        local_size=LANES,
        flops="(heads + kv_heads) * (dim // 2) * 40",
        bytes=f"(2 * heads + 4 * kv_heads) * {row} + dim // 2 * 4",
        reference=partial(rope_append_in_numpy, interleaved=interleaved),
        defines={
            "Element": kind.block_type,
            "FAULT_CAPACITY": FAULT_CAPACITY,
            "INTERLEAVED": int(interleaved),
        },
    )


def _row_of_head(before: str, row: str) -> tuple[str, str]:
    """The row at `position` of head ``block_x - before``; of a block outside of the heads, none."""
    head = f"minimum(maximum(block_x - {before}, 0), kv_heads)"
    after = f"minimum(maximum(block_x + 1 - {before}, 0), kv_heads)"
    row_of = f"minimum({head}, maximum(kv_heads - 1, 0)) * capacity + {_WITHIN.format('position')}"
    return f"({row_of}) * {row}", f"({row_of} + {after} - {head}) * {row}"


def rope_append_in_numpy(
    *,
    qkv: Array,
    rates: Array,
    k_cache: Array,
    v_cache: Array,
    heads: int,
    kv_heads: int,
    dim: int,
    capacity: int,
    position: int,
    interleaved: bool,
) -> tuple[Array, Array, Array]:
    """The reference of `rope_append`, and of kernels that begin with it."""
    rows = qkv.reshape(1, heads + 2 * kv_heads, dim)
    turned = turned_in_numpy(rows[:, : heads + kv_heads], rates, position, interleaved=interleaved)
    result, keys, values = rows.copy(), k_cache.copy(), v_cache.copy()
    result[:, :heads] = turned[:, :heads]
    if position < capacity:
        keys[:, position] = turned[0, heads:]
        values[:, position] = rows[0, heads + kv_heads :]
    return result.reshape(-1), keys, values


def _caches(kind: DType, touches: tuple[str, str], access: str) -> list[Param]:
    shape = ("kv_heads", "capacity", "dim")
    return [Param(name, kind, shape, access, touches=touches) for name in ("k_cache", "v_cache")]


def _cache_sizes() -> list[Scalar]:
    return [
        Scalar("dim", high=LONGEST // (MOST_ROWS * MOST_HEADS)),
        Scalar("capacity", high=MOST_POSITIONS),
    ]
