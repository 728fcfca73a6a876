"""Weights of a Llama-style decoder: read from safetensors, or random; and its configuration.

Names outside are those of the Hugging Face hub; inside, projections that share an input are one
matrix. Files are mapped, not read: an array is memory of the file until somebody copies it. NumPy
has no bfloat16 of its own and the package safetensors gives none without torch, so the format, a
header of JSON and raw bytes, is read here.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.dtypes import DTYPES, dtype_of
from brickline.errors import UsageError

_SCALING = (
    *("factor", "low_freq_factor", "high_freq_factor"),
    "original_max_position_embeddings",
)
_SAFE_DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16", "F64": "f64"}
MOST_HEADER = 100 << 20


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a Llama-style decoder."""

    vocabulary: int = 256
    dim: int = 64
    hidden: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    capacity: int = 128
    """Positions that the caches hold."""
    eps: float = 1e-5
    theta: float = 10_000.0
    scaling: Mapping[str, float] | None = None
    """Llama 3's: factor, low_freq_factor, high_freq_factor, original_max_position_embeddings."""
    tied: bool = True
    """Whether the head is the embedding."""

    def __post_init__(self) -> None:
        sizes = ("vocabulary", "dim", "hidden", "layers", "heads", "kv_heads", "head_dim")
        for name in (*sizes, "capacity"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}: expected a number from 1 on, got {value!r:.80}")
        if self.head_dim % 2:
            raise UsageError(f"head_dim: expected an even number, got {self.head_dim}")
        if self.heads % self.kv_heads:
            raise UsageError(
                f"expected heads as a multiple of kv_heads, got {self.heads} and {self.kv_heads}"
            )
        _check_positive("eps", self.eps)
        _check_positive("theta", self.theta)
        if self.scaling is not None:
            _check_scaling(self.scaling)

    @classmethod
    def from_json(cls, path: str | os.PathLike[str], *, capacity: int = 1024) -> DecoderConfig:
        """Read the ``config.json`` of a Llama model of the hub.

        Raises:
            UsageError: The file is none, or of another architecture.
        """
        try:
            facts = json.loads(Path(path).read_bytes())
            # Newer files hold base and scaling together.
            rope = facts.get("rope_parameters") or facts.get("rope_scaling") or {}
            kind = rope.get("rope_type", "default")
            _check_architecture(facts, kind)
            heads = facts["num_attention_heads"]
            return cls(
                vocabulary=facts["vocab_size"],
                dim=facts["hidden_size"],
                hidden=facts["intermediate_size"],
                layers=facts["num_hidden_layers"],
                heads=heads,
                kv_heads=facts.get("num_key_value_heads") or heads,
                head_dim=facts.get("head_dim") or facts["hidden_size"] // heads,
                capacity=capacity,
                eps=facts["rms_norm_eps"],
                theta=float(rope.get("rope_theta") or facts.get("rope_theta", 10_000.0)),
                scaling=rope if kind == "llama3" else None,
                tied=bool(facts.get("tie_word_embeddings", False)),
            )
        except UsageError as error:
            raise UsageError(f"{path}: {error}") from error
        except (
            *(OSError, ValueError, KeyError, TypeError, AttributeError),
            *(ArithmeticError, RecursionError),
        ) as error:
            raise UsageError(
                f"{path}: expected the config.json of a Llama model, got {type(error).__name__}: "
                f"{error}"
            ) from error

    def rates(self) -> NDArray[np.float32]:
        """Return by how many radians each pair of a head turns from one position to the next."""
        exponents = np.arange(0, self.head_dim, 2, dtype=np.float64)[: self.head_dim // 2]
        rates = self.theta ** (-exponents / self.head_dim)
        if self.scaling is not None:
            rates = _stretched(rates, self.scaling)
        return rates.astype(np.float32)


def check_config(config: object) -> None:
    """Refuse what is no configuration of a decoder.

    Raises:
        UsageError: It is something else.
    """
    if not isinstance(config, DecoderConfig):
        raise UsageError(
            f"expected a DecoderConfig, got {config!r:.80}; give sizes by name, "
            'DecoderConfig(layers=2), or read them, DecoderConfig.from_json("config.json")'
        )


def _check_positive(name: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:  # type: ignore[operator]
        raise UsageError(f"{name}: expected a number above 0, got {value!r:.80}")


def _check_scaling(scaling: object) -> None:
    if not isinstance(scaling, Mapping):
        raise UsageError(
            f"scaling: expected numbers by name, got {scaling!r:.80}; it has {', '.join(_SCALING)}"
        )
    missing = [name for name in _SCALING if name not in scaling]
    if missing:
        raise UsageError(f"scaling: expected {', '.join(_SCALING)}, got no {', '.join(missing)}")
    for name in _SCALING:
        _check_positive(f"scaling, {name}", scaling[name])


def _check_architecture(facts: Mapping[str, Any], rope: str) -> None:
    """Refuse models whose step is another one; weights alone would not show it."""
    if facts.get("model_type") != "llama" or rope not in ("default", "llama3"):
        raise UsageError(
            "expected model_type llama with rope default or llama3, got "
            f"{facts.get('model_type')!r} with {rope!r}"
        )
    biased = [name for name in ("attention_bias", "mlp_bias") if facts.get(name)]
    activation = facts.get("hidden_act") or "silu"
    if biased or activation != "silu":
        got = f"hidden_act {activation!r}" if activation != "silu" else " and ".join(biased)
        raise UsageError(
            f"expected a Llama with silu and without biases, got {got}, which the decoder lacks"
        )


def _stretched(rates: NDArray[np.float64], scaling: Mapping[str, float]) -> NDArray[np.float64]:
    """Slow down what turns slowly, as Llama 3 does: waves longer than the first context."""
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = context * rates / (2 * math.pi)
    part = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return rates * (part + (1.0 - part) / factor)


def weight_shapes(config: DecoderConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the buffers of a decoder's weights, with their shapes."""
    attended = config.heads * config.head_dim
    rows = attended + 2 * config.kv_heads * config.head_dim
    yield "embedding", (config.vocabulary, config.dim)
    for layer in range(config.layers):
        yield f"norm1_{layer}", (config.dim,)
        yield f"qkv_{layer}", (rows, config.dim)
        yield f"out_{layer}", (config.dim, attended)
        yield f"norm2_{layer}", (config.dim,)
        yield f"gate_up_{layer}", (2 * config.hidden, config.dim)
        yield f"down_{layer}", (config.dim, config.hidden)
    yield "norm", (config.dim,)
    if not config.tied:
        yield "head", (config.vocabulary, config.dim)


def random_weights(
    config: DecoderConfig, *, dtype: str = "bf16", seed: int = 0
) -> dict[str, NDArray[Any]]:
    """Return random weights that keep the size of what passes through them.

    Raises:
        UsageError: The configuration, the dtype or the seed is none.
    """
    check_config(config)
    if not isinstance(seed, int) or seed < 0:
        raise UsageError(f"seed: expected a number from 0 on, got {seed!r:.80}")
    rng = np.random.default_rng(seed)
    kind = _float_dtype(dtype)
    made = {}
    for name, shape in weight_shapes(config):
        if len(shape) == 1:
            values = 1.0 + 0.1 * rng.standard_normal(shape, dtype=np.float32)
        else:
            values = rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[1] ** 0.5)
        made[name] = values.astype(kind)
    return made


def load_weights(
    path: str | os.PathLike[str], config: DecoderConfig, *, dtype: str = "bf16"
) -> dict[str, NDArray[Any]]:
    """Read weights of the hub's names from a safetensors file, or from all of a directory.

    Args:
        path: A file, or a directory with one or several.
        config: The model's sizes.
        dtype: What to convert to. Default "bf16".

    Raises:
        UsageError: A file is damaged, or a tensor is missing or has another shape.
    """
    check_config(config)
    kind = _float_dtype(dtype)
    try:
        place = Path(path)
    except TypeError as error:
        raise UsageError(f"expected the path of safetensors, got {path!r:.80}") from error
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise UsageError(f"{path}: expected a safetensors file, or a directory that holds some")
    tensors: dict[str, NDArray[Any]] = {}
    for file in files:
        tensors |= read_safetensors(file)

    def tensor(name: str, *shape: int) -> NDArray[Any]:
        found = tensors.get(name)
        if found is None:
            raise UsageError(f"{path}: expected a tensor {name}, got none of {len(tensors)}")
        if found.shape != shape:
            raise UsageError(f"{path}: {name}: expected shape {shape}, got {found.shape}")
        return found.astype(kind)

    dim, hidden = config.dim, config.hidden
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    made = {"embedding": tensor("model.embed_tokens.weight", config.vocabulary, dim)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}"
        sizes = (("q", queries), ("k", keys), ("v", keys))
        qkv = [tensor(f"{prefix}.self_attn.{n}_proj.weight", rows, dim) for n, rows in sizes]
        both = [tensor(f"{prefix}.mlp.{n}_proj.weight", hidden, dim) for n in ("gate", "up")]
        made |= {
            f"norm1_{layer}": tensor(f"{prefix}.input_layernorm.weight", dim),
            f"qkv_{layer}": np.concatenate(qkv),
            f"out_{layer}": tensor(f"{prefix}.self_attn.o_proj.weight", dim, queries),
            f"norm2_{layer}": tensor(f"{prefix}.post_attention_layernorm.weight", dim),
            f"gate_up_{layer}": np.concatenate(both),
            f"down_{layer}": tensor(f"{prefix}.mlp.down_proj.weight", dim, hidden),
        }
    made["norm"] = tensor("model.norm.weight", dim)
    if not config.tied:
        made["head"] = tensor("lm_head.weight", config.vocabulary, dim)
    return made


def _float_dtype(dtype: object) -> np.dtype[Any]:
    found = dtype_of(dtype)
    if found.kind != "float":
        raise UsageError(f"dtype: expected a float, as the decoder has, got {found.name}")
    return found.numpy


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, NDArray[Any]]:
    """Return the float tensors of a safetensors file, over its mapped memory.

    Raises:
        UsageError: The file is cut off or contradicts itself.
    """
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MOST_HEADER, len(data) - 8):
        raise UsageError(f"{path}: expected safetensors, got a header of {length} bytes")
    try:
        header = json.loads(data[8 : 8 + length])
        facts = {name: each for name, each in header.items() if name != "__metadata__"}
        return {
            name: _array(data, 8 + length, each)
            for name, each in facts.items()
            if each["dtype"] in _SAFE_DTYPES
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: damaged: {type(error).__name__}: {error!s:.200}") from error


def _array(data: mmap.mmap, start: int, facts: Mapping[str, Any]) -> NDArray[Any]:
    dtype = DTYPES[_SAFE_DTYPES[facts["dtype"]]]
    shape, (first, end) = tuple(facts["shape"]), facts["data_offsets"]
    count = math.prod(shape)
    if not 0 <= first <= end <= len(data) - start or end - first != count * dtype.size_bytes:
        raise ValueError(f"{list(shape)} of {facts['dtype']} at bytes {first} to {end}")
    found = np.frombuffer(data, np.uint8, end - first, start + first)
    return found.view(dtype.numpy).reshape(shape)
