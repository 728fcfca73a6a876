"""What fingerprint.h defines, element by element in NumPy; slow, and apart from the core."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from brickline.dtypes import dtype_of

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF


def mix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & M32
    x = ((x ^ (x >> 15)) * 0x735A2D97) & M32
    return x ^ (x >> 15)


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)


def folded(x: int) -> int:
    return (x & M32) ^ (((x >> 32) * 0x9E3779B9) & M32)


def place_of(index: int) -> tuple[int, int, int]:
    """Block, line and place."""
    block, rest = divmod(index, 1024)
    line, column = divmod(rest, 64)
    return block, line, column ^ 8 * (line % 8) ^ 4 * (line // 8)


def sign(index: int) -> float:
    block, line, place = place_of(index)
    strip = line // 4
    seed = folded(block) + (4 * (strip // 2) + place // 16) * 0x9E3779B9 + 0x3C6EF372
    bit = mix32(seed & M32) >> (strip % 2 * 16 + place % 16) & 1
    return -1.0 if bit != (line % 4 == place // 8 % 4) else 1.0


def bucket(index: int) -> int:
    block, _, place = place_of(index)
    return place ^ (mix32((folded(block) + 0xDAA66D2B) & M32) & 63)


def hash_of(data: bytes, item: int) -> tuple[int, int]:
    block_bytes = 1024 * item
    low = high = 0
    for block in range(-(-len(data) // block_bytes)):
        raw = data[block * block_bytes : (block + 1) * block_bytes].ljust(block_bytes, b"\0")
        words = np.frombuffer(raw, "<u4")
        t = [(int(w) + mix32((k + 0x5BD1E995) & M32)) & M32 for k, w in enumerate(words)]
        a = sum(t[n] * t[n + 1] + t[n + 2] * t[n + 3] for n in range(0, len(t), 4)) & M64
        b = sum(t[n] * t[n + 3] + t[n + 2] * t[n + 1] for n in range(0, len(t), 4)) & M64
        low += a * (mix64((block + 0x243F6A8885A308D3) & M64) | 1)
        high += b * (mix64((block + 0x13198A2E03707344) & M64) | 1)
    mixed = mix64(low & M64)
    return mixed, mix64((high & M64) ^ mixed)


def limits(array: np.ndarray) -> tuple[float, float, float]:
    """Smallest normal, lowest and highest value."""
    dtype = dtype_of(array.dtype)
    if dtype.kind == "float":
        import ml_dtypes

        info = ml_dtypes.finfo(array.dtype)
        return float(info.smallest_normal), float(info.min), float(info.max)
    if dtype.kind == "bool":
        return 1.0, 2.0, 2.0
    integers = np.iinfo(array.dtype)
    high = float(integers.max)
    return 1.0, high if dtype.kind == "uint" else float(integers.min), high


def reference(array: np.ndarray) -> dict[str, Any]:
    """Every field of the fingerprint of an array."""
    flat = np.ascontiguousarray(array).reshape(-1)
    values = flat.astype(np.float64)
    finite = np.isfinite(values)
    kept = np.where(finite, values, 0.0)
    tiny, low, high = limits(array)
    sketch = np.zeros(64)
    for index, value in enumerate(kept):
        sketch[bucket(index)] += sign(index) * value
    wide = max(1, array.shape[-1]) if array.ndim else 1
    width, height = 4 * math.ceil(wide / 128), max(1, math.ceil(flat.size // wide / 32))
    rows, columns = np.zeros(32), np.zeros(32)
    for quad in range(0, flat.size, 4):
        part = math.fsum(kept[quad : quad + 4])
        rows[quad // wide // height] += part
        columns[quad % wide // width] += part
    nan, inf = np.flatnonzero(np.isnan(values)), np.flatnonzero(np.isinf(values))
    where = sum(mix64(4 * int(i) + 1) for i in nan)
    where += sum(mix64(4 * int(i) + (2 if values[i] > 0 else 3)) for i in inf)
    some = values[finite]
    return {
        "hash": hash_of(flat.tobytes(), flat.itemsize),
        "sketch": sketch,
        "rows": rows,
        "columns": columns,
        "l1": math.fsum(np.abs(kept)),
        "l2": math.sqrt(math.fsum(np.square(kept))),
        "total": math.fsum(kept),
        "absmax": float(np.abs(some).max()) if some.size else 0.0,
        "minimum": float(some.min()) if some.size else 0.0,
        "maximum": float(some.max()) if some.size else 0.0,
        "elements": flat.size,
        "nan_count": len(nan),
        "inf_count": len(inf),
        "first_nan": int(nan[0]) if len(nan) else -1,
        "first_inf": int(inf[0]) if len(inf) else -1,
        "nonfinite_hash": where & M64,
        "zeros": int((values == 0).sum()),
        "subnormals": int(((np.abs(values) < tiny) & (values != 0)).sum()),
        "saturated": int((finite & ((values == low) | (values == high))).sum()),
    }
