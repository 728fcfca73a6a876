"""The decoder against Hugging Face's Llama with the same weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import brickline as bl
from brickline.decoder import Decoder
from brickline.decoder_weights import DecoderConfig, load_weights, random_weights
from brickline.errors import UsageError
from brickline.kernel import Kernel
from brickline.kernels.catalog import rope_append

transformers = pytest.importorskip("transformers")
PROMPT = [3, 141, 59, 26, 5]
SCALED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def saved_llama(directory: Path, **changes: object) -> torch.nn.Module:
    torch.manual_seed(7)
    facts = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": None,
        "attn_implementation": "eager",
        **changes,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**facts)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(8)
    model.save_pretrained(directory, safe_serialization=True)
    return model


@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True}, {"rope_scaling": SCALED}],
    ids=["plain", "tied", "stretched"],
)
@pytest.mark.parametrize("fused", [True, False])
def test_logits_and_tokens_are_those_of_hugging_face(
    tmp_path: Path, changes: dict[str, object], fused: bool
) -> None:
    model = saved_llama(tmp_path, **changes)
    config = DecoderConfig.from_json(tmp_path / "config.json", capacity=64)
    weights = load_weights(tmp_path, config, dtype="f32")
    decoding = Decoder(config, dtype="f32", fused=fused).prepare(weights)
    tokens = decoding.generate(PROMPT, 12)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens[:-1]])).logits[0]
    assert tokens == logits[len(PROMPT) - 1 :].argmax(-1).tolist()
    difference = np.abs(decoding.logits() - logits[-1].numpy()).max()
    assert difference < 1e-4 * float(logits[-1].abs().max())


@pytest.mark.parametrize("fused", [True, False])
def test_no_buffer_is_made_that_no_launch_uses(fused: bool) -> None:
    plan = Decoder(DecoderConfig(layers=2), fused=fused).plan
    used = {view.storage for launch in plan.launches for _, view in launch.buffers()}
    assert [each.name for each in plan.storages if each not in used] == []


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    saved_llama(tmp_path, tie_word_embeddings=True)
    config = DecoderConfig.from_json(tmp_path / "config.json", capacity=64)
    untied = DecoderConfig(**{**vars(config), "tied": False})
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        load_weights(tmp_path, untied)


def test_a_check_names_the_launch_of_a_kernel_of_ones_own(tmp_path: Path) -> None:
    config = DecoderConfig(layers=2)
    weights = random_weights(config, dtype="f32")
    turned = rope_append("f32", interleaved=True)
    facts = turned.to_json() | {"name": "mine", "entry": "rope_append"}
    mine = Decoder(config, dtype="f32", kernels={"rope_append": Kernel.from_json(facts)})
    report = bl.check(
        mine.prepare(weights).prepared,
        reference=Decoder(config, dtype="f32").prepare(weights).prepared,
        drive=lambda plan: [plan(position=position) for position in range(2)],
        repro=False,
    )
    assert report.status == "diverged"
    assert report.findings[0].name == "layers.0.RopeEmbedding"
