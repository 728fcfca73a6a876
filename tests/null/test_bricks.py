"""The vocabulary: ids, numbers, names, aliases and categories."""

from __future__ import annotations

import pickle

import pytest

from brickline import BrickCategory, BrickId, BrickProfiler

SEED = """
0 RmsNorm Norm
1 LayerNorm Norm
2 QkvProjection Attention Qkv
3 RopeEmbedding Attention Rope RoPE
4 AttentionScore Attention
5 AttentionSoftmax Attention Softmax
6 AttentionOutput Attention
7 OutputProjection Attention OutProj
8 GateProjection FFN Gate
9 UpProjection FFN Up
10 Activation FFN SiLU GELU ReLU
11 DownProjection FFN Down
12 Embedding Other Embed
13 LmHead Other Head
14 Sampling Other Sample
15 SpMV Sparse spmv
16 SpMM Sparse spmm
17 FormatConvert Sparse
18 FFT1D FFT fft1d FFT
19 FFT2D FFT fft2d
20 LUFactorize Solver LU
21 QRFactorize Solver QR
22 SVDCompute Solver SVD
"""
"""Number, name, category and aliases as they are published."""

BEYOND = {
    "KvCacheAppend": "Attention",
    "ResidualAdd": "Other",
    "Quantize": "Other",
    "Dequantize": "Other",
    "MoeRouter": "FFN",
    "MoeExpert": "FFN",
    "Collective": "Other",
    "MemoryCopy": "Other",
}
"""What real models need beside them."""


@pytest.mark.parametrize("line", SEED.strip().splitlines())
def test_the_published_ids_are_kept_exactly(line: str) -> None:
    number, label, category, *aliases = line.split()
    brick = BrickId.ALL[int(number)]
    assert int(brick) == int(number)
    assert brick.label == str(brick) == label
    assert brick.category.label == str(brick.category) == category
    assert list(brick.aliases) == aliases


def test_there_are_31_ids_in_number_order() -> None:
    assert BrickId.COUNT == len(BrickId.ALL) == 31
    assert [int(brick) for brick in BrickId.ALL] == list(range(31))
    assert {brick.label: brick.category.label for brick in BrickId.ALL[23:]} == BEYOND


def test_every_id_is_a_class_attribute_under_its_own_name_and_its_label() -> None:
    members = {name: value for name, value in vars(BrickId).items() if isinstance(value, BrickId)}
    labels = {brick.label for brick in BrickId.ALL}
    constants = {name: brick for name, brick in members.items() if name not in labels}
    assert list(constants.values()) == list(BrickId.ALL)
    for name, brick in constants.items():
        assert repr(brick) == f"BrickId.{name}"
        assert name.replace("_", "").lower() == brick.label.lower()
    assert {name: members[name] for name in labels} == {str(each): each for each in BrickId.ALL}
    assert BrickId.RmsNorm is BrickId.RMS_NORM
    assert set(members) <= set(BrickId.__annotations__), "type checkers know each of them"


def test_the_seven_categories_are_numbered_as_published() -> None:
    labels = [(int(category), category.label) for category in BrickCategory]
    published = ("Norm", "Attention", "FFN", "Other", "Sparse", "FFT", "Solver")
    assert labels == list(enumerate(published))


def test_every_name_and_alias_leads_to_one_id() -> None:
    names = [name for brick in BrickId.ALL for name in (brick.label, *brick.aliases)]
    assert len(names) == len(set(names))
    for brick in BrickId.ALL:
        for name in (brick.label, *brick.aliases):
            assert BrickId.from_name(name) is brick


@pytest.mark.parametrize("name", ["rmsnorm", "RMSNORM", "qkv", "rope", " RmsNorm", "Silu", ""])
def test_names_match_exactly_or_not_at_all(name: str) -> None:
    assert BrickId.from_name(name) is None


def test_an_id_is_an_int() -> None:
    assert BrickId.LM_HEAD == 13
    assert {BrickId.LM_HEAD: "head"}[13] == "head"  # type: ignore[index]
    assert pickle.loads(pickle.dumps(BrickId.LM_HEAD)) == BrickId.LM_HEAD
    assert repr(BrickId(99)) == "BrickId(99)"


def test_the_core_has_the_same_vocabulary() -> None:
    profiler = BrickProfiler()
    for brick in BrickId.ALL:
        for name in (brick, int(brick), brick.label, *brick.aliases):
            assert profiler.brick(name) is profiler.brick(brick)
        assert profiler.brick(brick).name == brick.label
