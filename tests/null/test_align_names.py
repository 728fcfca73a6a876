"""A mapping of names: patterns, what lies below them, and errors that show the nearest names."""

from __future__ import annotations

from typing import Any

import pytest

from brickline.align.names import Mapping, kind_of, nearest_names
from brickline.errors import UsageError

OURS = ["", "blocks.0.attn.wqkv", "blocks.1.attn.wqkv", "blocks.0.attn.wqkv.weight", "norm"]
THEIRS = [f"layers.{layer}.self_attn.{part}_proj" for layer in (0, 1) for part in "qkv"]
THEIRS += ["layers.0.self_attn.q_proj.weight", "ln_f", "rope"]
FUSED = {"blocks.*.attn.wqkv": [f"layers.*.self_attn.{part}_proj" for part in "qkv"]}


def test_a_star_stands_for_the_same_on_both_sides() -> None:
    mapping = Mapping(FUSED, OURS, THEIRS)
    assert mapping.partner("blocks.1.attn.wqkv") == tuple(
        f"layers.1.self_attn.{part}_proj" for part in "qkv"
    )
    assert mapping.partner("norm") == ()


def test_what_lies_below_a_mapped_name_is_mapped_where_it_exists() -> None:
    mapping = Mapping(FUSED, OURS, THEIRS)
    assert mapping.partner("blocks.0.attn.wqkv.weight") == ("layers.0.self_attn.q_proj.weight",)
    assert mapping.partner("blocks.0.attn.wqkv.bias") == ()
    assert mapping.partner("blocks.0.attn.wqkv_b") == ()


def test_the_pattern_of_most_components_counts_and_then_the_plainest() -> None:
    patterns = {
        "blocks.*": "layers.*",
        "blocks.*.norm": "layers.*.ln_1",
        "blocks.1.norm": "layers.1.ln_2",
    }
    ours = ["blocks.0", "blocks.1", "blocks.0.norm", "blocks.1.norm"]
    theirs = ["layers.0", "layers.1", "layers.0.ln_1", "layers.1.ln_1", "layers.1.ln_2"]
    mapping = Mapping(patterns, ours, theirs)
    assert mapping.partner("blocks.0") == ("layers.0",)
    assert mapping.partner("blocks.0.norm") == ("layers.0.ln_1",)
    assert mapping.partner("blocks.1.norm") == ("layers.1.ln_2",)


def test_one_of_the_reference_may_stand_for_all_layers() -> None:
    mapping = Mapping({"blocks.*.attn.wqkv": "rope"}, OURS, THEIRS)
    assert mapping.partner("blocks.1.attn.wqkv") == ("rope",)


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        ({"blocks.*.attn.qkv": "norm"}, "'blocks.*.attn.qkv' matches no name of the candidate; "
         "the nearest are 'blocks.*.attn.wqkv'"),
        ({"norm": "ln_g"}, "'ln_g' gives 'ln_g' for 'norm', which the reference does not have; "
         "the nearest are 'ln_f'"),
        ({"norm": "layers.*.x"}, "has more [*] than 'norm'"),
        ({"norm": []}, "expected a name, and a name or a list of names"),
        ({"norm": 3}, "expected a name, and a name or a list of names"),
        (["norm"], "expected a dictionary"),
    ],
)  # fmt: skip
def test_a_mapping_that_does_not_fit_says_what_does(patterns: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace(".*", "[.][*]")):
        Mapping(patterns, OURS, THEIRS)


def test_the_number_of_a_layer_is_left_out_of_a_kind() -> None:
    assert kind_of("layers.10.mlp.experts.3.up") == "layers.#.mlp.experts.3.up"
    assert kind_of("layer1.conv2d") == "layer1.conv2d"


def test_the_nearest_names_come_first() -> None:
    names = ["layers.0.attention", "layers.0.attn", "norm"]
    assert nearest_names("layers.0.atn", names)[0] == "layers.0.attn"
    assert nearest_names("xyz", names) == []
