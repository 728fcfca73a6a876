"""The decoder and its weights: what is refused, in which words, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brickline as bl
from brickline.decoder import Decoder
from brickline.decoder_weights import DecoderConfig, load_weights, random_weights
from brickline.decoding import Decoding
from brickline.errors import UsageError
from brickline.kernels.catalog import rms_norm

CONFIG = DecoderConfig(layers=1, capacity=16)
WEIGHTS = random_weights(CONFIG)
LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def decoding() -> Decoding:
    return Decoder(CONFIG).prepare(WEIGHTS, "NULL")


def test_a_decoder_says_what_it_is(decoding: Decoding) -> None:
    assert repr(Decoder(CONFIG)) == "<Decoder of 1 layer, dim 64, bf16, 13 launches a token>"
    assert repr(decoding) == "<Decoding on NULL, serial, at position 0 of 16>"
    decoding.generate([1, 2], 3)
    assert repr(decoding) == "<Decoding on NULL, serial, at position 4 of 16>"


@pytest.mark.parametrize("config", [None, {"layers": 1}, "config.json", DecoderConfig])
@pytest.mark.parametrize(
    "take", [Decoder, random_weights, lambda config: load_weights("none", config)]
)
def test_a_configuration_is_no_dictionary(take: Callable[[Any], Any], config: Any) -> None:
    with pytest.raises(UsageError, match=r"expected a DecoderConfig, got .*from_json"):
        take(config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kernels": [rms_norm()]}, r"kernels: expected kernels by the name .*got list"),
        ({"kernels": {"rms_norm": rms_norm}}, "kernels, rms_norm: expected a Kernel, got function"),
        ({"kernels": {"rms_nrm": rms_norm("f32")}}, r"did you mean 'rms_norm'\?"),
        (
            {"kernels": {rms_norm("bf16"): rms_norm("bf16")}},
            "expected the name of a kernel, got <Ke",
        ),
        ({"fused": "no"}, "expected fused as True or False, got 'no'"),
    ],
)
def test_what_a_decoder_is_made_with(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Decoder(CONFIG, **options)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        (None, r"expected weights by name, got None; read them with load_weights\(path, config\)"),
        ("Llama-3.2-1B", "expected weights by name, got 'Llama-3.2-1B'; read them"),
        ({}, "expected 8 weights, got 0 without embedding, norm1_0, .*load_weights"),
        ({**WEIGHTS, "norm": None}, "expected 8 weights, got 8 without norm; "),
        (random_weights(CONFIG, dtype="f32"), "expected bf16, as the decoder has, got f32; give"),
    ],
)
def test_what_weights_are(weights: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Decoder(CONFIG).prepare(weights, "NULL")


def test_memory_is_bound_by_the_weights_alone() -> None:
    with pytest.raises(
        UsageError, match=r"got bind= too; write other buffers with prepared\.write"
    ):
        Decoder(CONFIG).prepare(WEIGHTS, "NULL", bind={})
    with pytest.raises(
        UsageError, match=r"prepare has no option 'profile'; .*did you mean 'profiler'\?"
    ):
        Decoder(CONFIG).prepare(WEIGHTS, "NULL", profile=None)


@pytest.mark.parametrize(
    ("prompt", "count", "words"),
    [
        ("text", 1, "expected a prompt as a list of tokens, got 'text'"),
        (b"text", 1, "expected a prompt as a list of tokens"),
        ([], 1, "expected a prompt"),
        ({1, 2}, 1, "expected a prompt"),
        (np.array([[1, 2]]), 1, "of 2 axes; take one row of it"),
        (np.array([], np.int64), 1, "expected a prompt"),
        ([1, 2, 256], 1, "expected a token from 0 to 255, got 256"),
        ([1, 2, "a"], 1, "expected a token from 0 to 255, got 'a'"),
        ([1, 2.0], 1, "expected a token from 0 to 255, got 2.0"),
        ([1], 2.0, "count: expected a number of tokens from 0 on"),
        ([1], True, "count: expected a number of tokens from 0 on"),
        ([1], 17, "expected at most 16 positions"),
    ],
)
def test_a_prompt_that_is_refused_runs_nothing(
    decoding: Decoding, prompt: Any, count: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        decoding.generate(prompt, count)
    assert decoding.position == 0


def test_a_prompt_is_a_list_or_an_array(decoding: Decoding) -> None:
    for prompt in ([1, 2], (1, 2), np.array([1, 2], np.int32), range(1, 3)):
        assert len(decoding.generate(prompt, np.int64(2))) == 2  # type: ignore[arg-type]
        decoding.restart()


def test_a_check_says_how_to_check_a_decoder(decoding: Decoding) -> None:
    for given, words in (
        (decoding, r"got Decoding; pass its \.prepared, and drive="),
        (Decoder(CONFIG), r"got Decoder; prepare it first, \.prepare\("),
    ):
        with pytest.raises(UsageError, match=words):
            bl.check(given)


# ----------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"eps": "x"}, "eps: expected a number above 0, got 'x'"),
        ({"eps": True}, "eps: expected a number above 0"),
        ({"theta": 0}, "theta: expected a number above 0, got 0"),
        ({"theta": float("nan")}, "theta: expected a number above 0, got nan"),
        ({"scaling": 3}, "scaling: expected numbers by name, got 3; it has factor"),
        ({"scaling": {"factor": 2}}, "scaling: expected factor, .*got no low_freq_factor, high"),
    ],
)
def test_numbers_of_a_configuration(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        DecoderConfig(**facts)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (
            {"model_type": "gpt2"},
            "expected model_type llama with rope default or llama3, got 'gpt2'",
        ),
        (
            {"attention_bias": True},
            "silu and without biases, got attention_bias, which the decoder",
        ),
        ({"attention_bias": True, "mlp_bias": True}, "got attention_bias and mlp_bias"),
        ({"hidden_act": "gelu"}, "got hidden_act 'gelu'"),
        ({"num_attention_heads": 0}, "expected the config.json of a Llama model"),
        ({"num_attention_heads": "4"}, "expected the config.json of a Llama model"),
        ({"rms_norm_eps": None}, "eps: expected a number above 0, got None"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "scaling: expected factor"),
    ],
)
def test_models_that_the_decoder_is_not(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | facts), encoding="ascii")
    with pytest.raises(UsageError, match=f"config.json: .*{words}"):
        DecoderConfig.from_json(path)


def test_what_a_file_leaves_open_has_the_hub_s_meaning(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    facts = {"num_key_value_heads": None, "tie_word_embeddings": None, "head_dim": None}
    path.write_text(json.dumps(LLAMA | facts), encoding="ascii")
    config = DecoderConfig.from_json(path)
    assert (config.kv_heads, config.tied, config.head_dim) == (4, False, 16)


# ------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "seed: expected a number from 0 on, got -1"),
        ({"seed": "a"}, "seed: expected a number from 0 on, got 'a'"),
        ({"dtype": "i32"}, "dtype: expected a float, as the decoder has, got i32"),
    ],
)
def test_random_weights_are_floats_of_a_seed(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        random_weights(CONFIG, **options)


def test_weights_are_read_from_a_path() -> None:
    with pytest.raises(UsageError, match="expected the path of safetensors, got None"):
        load_weights(None, CONFIG)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="dtype: expected a float"):
        load_weights("none", CONFIG, dtype="i32")
