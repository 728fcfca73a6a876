"""The vocabulary of model work: brick ids and their categories.

Knows names and numbers only; it times nothing and imports nothing of brickline.
`BrickId` members are plain class attributes on an `int` subclass, because looking up an
`enum` member costs more than a whole measurement on Python 3.11.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class BrickCategory(IntEnum):
    """The seven groups that a brick's time is summed under."""

    NORM = 0
    ATTENTION = 1
    FFN = 2
    OTHER = 3
    SPARSE = 4
    FFT = 5
    SOLVER = 6

    @property
    def label(self) -> str:
        """The name shown in reports."""
        return _CATEGORY_LABELS[self]

    def __str__(self) -> str:
        return self.label


_CATEGORY_LABELS = ("Norm", "Attention", "FFN", "Other", "Sparse", "FFT", "Solver")


class BrickId(int):
    """A known brick: an integer with a name and a category.

    Ids 0 to 22 keep their published numbers; ids from 23 on are the bricks that real models
    have beside them. Any other name is a dynamic brick under `BrickCategory.OTHER`.
    """

    __slots__ = ()

    COUNT: ClassVar[int]
    """How many ids there are."""
    ALL: ClassVar[tuple[BrickId, ...]]
    """Every id, in number order."""

    RMS_NORM: ClassVar[BrickId]
    LAYER_NORM: ClassVar[BrickId]
    QKV_PROJECTION: ClassVar[BrickId]
    ROPE_EMBEDDING: ClassVar[BrickId]
    ATTENTION_SCORE: ClassVar[BrickId]
    ATTENTION_SOFTMAX: ClassVar[BrickId]
    ATTENTION_OUTPUT: ClassVar[BrickId]
    OUTPUT_PROJECTION: ClassVar[BrickId]
    GATE_PROJECTION: ClassVar[BrickId]
    UP_PROJECTION: ClassVar[BrickId]
    ACTIVATION: ClassVar[BrickId]
    DOWN_PROJECTION: ClassVar[BrickId]
    EMBEDDING: ClassVar[BrickId]
    LM_HEAD: ClassVar[BrickId]
    SAMPLING: ClassVar[BrickId]
    SPMV: ClassVar[BrickId]
    SPMM: ClassVar[BrickId]
    FORMAT_CONVERT: ClassVar[BrickId]
    FFT_1D: ClassVar[BrickId]
    FFT_2D: ClassVar[BrickId]
    LU_FACTORIZE: ClassVar[BrickId]
    QR_FACTORIZE: ClassVar[BrickId]
    SVD_COMPUTE: ClassVar[BrickId]
    KV_CACHE_APPEND: ClassVar[BrickId]
    RESIDUAL_ADD: ClassVar[BrickId]
    QUANTIZE: ClassVar[BrickId]
    DEQUANTIZE: ClassVar[BrickId]
    MOE_ROUTER: ClassVar[BrickId]
    MOE_EXPERT: ClassVar[BrickId]
    COLLECTIVE: ClassVar[BrickId]
    MEMORY_COPY: ClassVar[BrickId]

    # The same under the names that reports show, as the published ids are spelled.
    RmsNorm: ClassVar[BrickId]
    LayerNorm: ClassVar[BrickId]
    QkvProjection: ClassVar[BrickId]
    RopeEmbedding: ClassVar[BrickId]
    AttentionScore: ClassVar[BrickId]
    AttentionSoftmax: ClassVar[BrickId]
    AttentionOutput: ClassVar[BrickId]
    OutputProjection: ClassVar[BrickId]
    GateProjection: ClassVar[BrickId]
    UpProjection: ClassVar[BrickId]
    Activation: ClassVar[BrickId]
    DownProjection: ClassVar[BrickId]
    Embedding: ClassVar[BrickId]
    LmHead: ClassVar[BrickId]
    Sampling: ClassVar[BrickId]
    SpMV: ClassVar[BrickId]
    SpMM: ClassVar[BrickId]
    FormatConvert: ClassVar[BrickId]
    FFT1D: ClassVar[BrickId]
    FFT2D: ClassVar[BrickId]
    LUFactorize: ClassVar[BrickId]
    QRFactorize: ClassVar[BrickId]
    SVDCompute: ClassVar[BrickId]
    KvCacheAppend: ClassVar[BrickId]
    ResidualAdd: ClassVar[BrickId]
    Quantize: ClassVar[BrickId]
    Dequantize: ClassVar[BrickId]
    MoeRouter: ClassVar[BrickId]
    MoeExpert: ClassVar[BrickId]
    Collective: ClassVar[BrickId]
    MemoryCopy: ClassVar[BrickId]

    @property
    def label(self) -> str:
        """The name shown in reports and written to runs, such as ``RmsNorm``."""
        return _ROWS[self][1]

    @property
    def category(self) -> BrickCategory:
        """The category its time is summed under."""
        return _ROWS[self][2]

    @property
    def aliases(self) -> tuple[str, ...]:
        """Other names that lead to this id; exact, case-sensitive matches."""
        return _ROWS[self][3]

    @classmethod
    def from_name(cls, name: str) -> BrickId | None:
        """Return the id that a name or alias stands for, or None for a dynamic name."""
        return _BY_NAME.get(name) if isinstance(name, str) else None

    def __repr__(self) -> str:
        return f"BrickId.{_ROWS[self][0]}" if 0 <= self < len(_ROWS) else f"BrickId({int(self)})"

    def __str__(self) -> str:
        return self.label if 0 <= self < len(_ROWS) else repr(self)


_C = BrickCategory
_ROWS: tuple[tuple[str, str, BrickCategory, tuple[str, ...]], ...] = (
    ("RMS_NORM", "RmsNorm", _C.NORM, ()),
    ("LAYER_NORM", "LayerNorm", _C.NORM, ()),
    ("QKV_PROJECTION", "QkvProjection", _C.ATTENTION, ("Qkv",)),
    ("ROPE_EMBEDDING", "RopeEmbedding", _C.ATTENTION, ("Rope", "RoPE")),
    ("ATTENTION_SCORE", "AttentionScore", _C.ATTENTION, ()),
    ("ATTENTION_SOFTMAX", "AttentionSoftmax", _C.ATTENTION, ("Softmax",)),
    ("ATTENTION_OUTPUT", "AttentionOutput", _C.ATTENTION, ()),
    ("OUTPUT_PROJECTION", "OutputProjection", _C.ATTENTION, ("OutProj",)),
    ("GATE_PROJECTION", "GateProjection", _C.FFN, ("Gate",)),
    ("UP_PROJECTION", "UpProjection", _C.FFN, ("Up",)),
    ("ACTIVATION", "Activation", _C.FFN, ("SiLU", "GELU", "ReLU")),
    ("DOWN_PROJECTION", "DownProjection", _C.FFN, ("Down",)),
    ("EMBEDDING", "Embedding", _C.OTHER, ("Embed",)),
    ("LM_HEAD", "LmHead", _C.OTHER, ("Head",)),
    ("SAMPLING", "Sampling", _C.OTHER, ("Sample",)),
    ("SPMV", "SpMV", _C.SPARSE, ("spmv",)),
    ("SPMM", "SpMM", _C.SPARSE, ("spmm",)),
    ("FORMAT_CONVERT", "FormatConvert", _C.SPARSE, ()),
    ("FFT_1D", "FFT1D", _C.FFT, ("fft1d", "FFT")),
    ("FFT_2D", "FFT2D", _C.FFT, ("fft2d",)),
    ("LU_FACTORIZE", "LUFactorize", _C.SOLVER, ("LU",)),
    ("QR_FACTORIZE", "QRFactorize", _C.SOLVER, ("QR",)),
    ("SVD_COMPUTE", "SVDCompute", _C.SOLVER, ("SVD",)),
    ("KV_CACHE_APPEND", "KvCacheAppend", _C.ATTENTION, ("KvCache",)),
    ("RESIDUAL_ADD", "ResidualAdd", _C.OTHER, ("Residual",)),
    ("QUANTIZE", "Quantize", _C.OTHER, ("Quant",)),
    ("DEQUANTIZE", "Dequantize", _C.OTHER, ("Dequant",)),
    ("MOE_ROUTER", "MoeRouter", _C.FFN, ("Router",)),
    ("MOE_EXPERT", "MoeExpert", _C.FFN, ("Expert",)),
    ("COLLECTIVE", "Collective", _C.OTHER, ("AllReduce", "AllGather", "ReduceScatter")),
    ("MEMORY_COPY", "MemoryCopy", _C.OTHER, ("Memcpy",)),
)

BrickId.COUNT = len(_ROWS)
BrickId.ALL = tuple(BrickId(number) for number in range(len(_ROWS)))
for _member, _row in zip(BrickId.ALL, _ROWS, strict=True):
    setattr(BrickId, _row[0], _member)
    setattr(BrickId, _row[1], _member)

_BY_NAME = {name: member for member in BrickId.ALL for name in (member.label, *member.aliases)}
