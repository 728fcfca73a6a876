"""Kernels at both ends of a model: from token ids to rows, and from logits to a token id.

References compute in float64; see `catalog`.
"""

from __future__ import annotations

import numpy as np

from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.declaring import (
    FAULT_TOKEN,
    MOST_ROWS,
    Array,
    float_kind,
    index_kind,
    piece,
    source_of,
)

TILE = 1024
"""Elements of a block of `argmax_tiles`: 128,000 logits make 125 blocks."""


def embedding(dtype: object = "bf16", ids: object = "i32") -> Kernel:
    """The rows of a table that token ids name.

    An id outside of the table is the fault `declaring.FAULT_TOKEN`, and its row is zeros.

    Args:
        dtype: Of table and result. Default "bf16".
        ids: Dtype of the ids, "i32" or "i64". Default "i32".
    """
    kind, index = float_kind(dtype), index_kind(ids)
    row = f"n * {kind.size_bytes}"
    return Kernel(
        "embedding",
        source_of("embedding"),
        [
            Param("table", kind, ("vocabulary", "n")),
            Param("ids", index, "rows", touches=piece("block_x", index.size_bytes)),
            Param("y", kind, ("rows", "n"), "write", touches=piece("block_x", row)),
            Scalar("rows", high=MOST_ROWS),
            Scalar("vocabulary", high=MOST_ROWS),
            Scalar("n", high=2**30),
        ],
        global_size="rows",
        local_size=256,
        flops=0,
        bytes=f"2 * rows * {row} + rows * {index.size_bytes}",
        reference=_embedding,
        defines={
            "Element": kind.block_type,
            "Index": index.block_type,
            "FAULT_TOKEN": FAULT_TOKEN,
        },
    )


def _embedding(*, table: Array, ids: Array, rows: int, vocabulary: int, n: int) -> Array:
    known = (ids >= 0) & (ids < vocabulary)
    found = np.zeros((rows, n), table.dtype)
    found[known] = table[ids[known]]
    return found


def argmax_tiles(dtype: object = "f32") -> Kernel:
    """The largest of every 1024 elements of a row, and its place in the row.

    Args:
        dtype: Of the row. Default "f32".
    """
    kind = float_kind(dtype)
    tiles = f"ceil_div(n, {TILE})"
    size = kind.size_bytes
    row, tile = f"block_x // {tiles} * n", f"block_x % {tiles}"
    return Kernel(
        "argmax_tiles",
        source_of("argmax_tiles"),
        [
            Param(
                "x",
                kind,
                ("rows", "n"),
                touches=(
                    f"({row} + {tile} * {TILE}) * {size}",
                    f"({row} + minimum(({tile} + 1) * {TILE}, n)) * {size}",
                ),
            ),
            Param("largest", "f32", ("rows", tiles), "write", touches=piece("block_x", 4)),
            Param("places", "i32", ("rows", tiles), "write", touches=piece("block_x", 4)),
            Scalar("rows", high=2**20),
            Scalar("n", low=1, high=MOST_ROWS),
        ],
        global_size=f"rows * {tiles}",
        local_size=256,
        flops="2 * rows * n",
        bytes=f"rows * n * {size} + rows * {tiles} * 8",
        reference=_argmax_tiles,
        defines={"Element": kind.block_type, "TILE": TILE},
    )


def _argmax_tiles(*, x: Array, rows: int, n: int) -> tuple[Array, Array]:
    tiles = -(-n // TILE)
    padded = np.full((rows, tiles * TILE), -np.inf)
    padded[:, :n] = x
    cut = padded.reshape(rows, tiles, TILE)
    places = cut.argmax(axis=-1)  # the first NaN, else the first largest
    largest = np.take_along_axis(cut, places[..., None], axis=-1)[..., 0]
    return largest.astype(np.float32), (places + TILE * np.arange(tiles)).astype(np.int32)


def argmax_combine(ids: object = "i32") -> Kernel:
    """The first place of the largest element of every row, from what `argmax_tiles` left.

    A NaN is larger than any number.

    Args:
        ids: Dtype of the result, "i32" or "i64". Default "i32".
    """
    index = index_kind(ids)
    tiles = f"ceil_div(n, {TILE})"
    return Kernel(
        "argmax_combine",
        source_of("argmax_combine"),
        [
            Param("largest", "f32", ("rows", tiles), touches=piece("block_x", f"{tiles} * 4")),
            Param("places", "i32", ("rows", tiles), touches=piece("block_x", f"{tiles} * 4")),
            Param("y", index, "rows", "write", touches=piece("block_x", index.size_bytes)),
            Scalar("rows", high=2**20),
            Scalar("n", low=1, high=MOST_ROWS),
        ],
        global_size="rows",
        local_size=256,
        flops=f"2 * rows * {tiles}",
        bytes=f"rows * {tiles} * 8 + rows * {index.size_bytes}",
        reference=_argmax_combine,
        defines={"Index": index.block_type, "TILE": TILE},
    )


def _argmax_combine(*, largest: Array, places: Array, rows: int, n: int) -> Array:
    tile = largest.argmax(axis=-1)  # of equal tiles the first, whose place is the smallest
    return np.take_along_axis(places, tile[:, None], axis=-1)[:, 0]
