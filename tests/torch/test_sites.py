"""Which modules of a model are recorded, and as which bricks and layers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from brickline import BrickId, abi  # noqa: E402
from brickline.adapters.recording import RecordOptions  # noqa: E402
from brickline.adapters.torch_rows import OPERAND_BYTES, TRACE  # noqa: E402
from brickline.adapters.torch_sites import brick_of, layer_of, sites_of, walk  # noqa: E402


@pytest.mark.parametrize(
    ("path", "brick"),
    [
        ("model.layers.3.self_attn.q_proj", BrickId.QKV_PROJECTION),
        ("transformer.h.0.attn.c_attn", BrickId.QKV_PROJECTION),
        ("transformer.h.0.attn.c_proj", BrickId.OUTPUT_PROJECTION),
        ("transformer.h.0.mlp.c_proj", BrickId.DOWN_PROJECTION),
        ("model.layers.3.self_attn.o_proj", BrickId.OUTPUT_PROJECTION),
        ("encoder.layer.1.attention.output.dense", BrickId.OUTPUT_PROJECTION),
        ("model.layers.3.mlp.gate_proj", BrickId.GATE_PROJECTION),
        ("model.layers.3.mlp.gate_up_proj", BrickId.UP_PROJECTION),
        ("model.layers.3.mlp.down_proj", BrickId.DOWN_PROJECTION),
        ("model.layers.3.mlp.gate", BrickId.MOE_ROUTER),
        ("lm_head", BrickId.LM_HEAD),
        ("classifier", "Linear"),
    ],
)
def test_linear_layers_are_known_by_name(path: str, brick: BrickId | str) -> None:
    assert brick_of(path, nn.Linear(2, 2), {}) == brick


@pytest.mark.parametrize(
    ("module", "brick"),
    [
        (nn.RMSNorm(2), BrickId.RMS_NORM),
        (nn.LayerNorm(2), BrickId.LAYER_NORM),
        (nn.Embedding(2, 2), BrickId.EMBEDDING),
        (nn.GELU(), BrickId.ACTIVATION),
        (nn.Softmax(-1), BrickId.ATTENTION_SOFTMAX),
        (nn.MultiheadAttention(2, 1), BrickId.ATTENTION_SCORE),
        (nn.Dropout(), "Dropout"),
    ],
)
def test_others_are_known_by_class(module: nn.Module, brick: BrickId | str) -> None:
    assert brick_of("some.where", module, {}) == brick


def test_layers() -> None:
    model = nn.Module()
    model.stack = nn.ModuleList([nn.Sequential(nn.Linear(1, 1))])
    model.experts = nn.ModuleList([nn.Linear(1, 1)])
    model.body = nn.Sequential(nn.Linear(1, 1))
    assert layer_of("model.layers.12.mlp.experts.3", model) == 12
    assert layer_of("transformer.h.5", model) == 5
    assert layer_of("blocks.7.attn", model) == 7
    assert layer_of("stack.0.0", model) == 0
    assert layer_of("experts.0", model) == -1
    assert layer_of("body.0", model) == -1
    assert layer_of("", model) == -1


def test_containers_are_passed_over_and_shared_modules_come_once() -> None:
    shared = nn.Linear(1, 1)
    model = nn.Sequential(nn.ModuleList([shared]), shared, nn.Identity())
    assert [path for path, _, _ in walk(model)] == ["", "0", "0.0", "2"]
    assert [site.name for site in sites_of(model, RecordOptions())] == ["Sequential", "0.0", "2"]


def test_a_prefix_stands_before_every_path() -> None:
    sites = sites_of(nn.Sequential(nn.Identity()), RecordOptions(), "Critic_2")
    assert [site.name for site in sites] == ["Critic_2", "Critic_2.0"]


def test_rows_have_the_sizes_of_the_spool() -> None:
    assert abi.TRACE.itemsize == TRACE.size
    assert abi.OPERAND.itemsize == OPERAND_BYTES
