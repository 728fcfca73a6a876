"""litgpt's OLMo 2 and transformers', with the same weights."""

from __future__ import annotations

import torch
from litgpt import model as litgpt
from litgpt.config import Config
from torch import nn
from transformers import Olmo2Config, Olmo2ForCausalLM

from sealed.cases import Pair
from sealed.three.common import Logits, Stepper, decoding, fill, tokens

WIDTH, HEADS, GROUPS, HEAD, INNER = 64, 4, 2, 16, 88


class GPT(litgpt.GPT):
    """litgpt's model, called like a stepper where it keeps a cache."""

    def places(self, start: int, count: int) -> torch.Tensor:
        """Return the positions of a step."""
        return torch.arange(start, start + count)

    def forward(self, input_ids: torch.Tensor, start: int | None = None) -> torch.Tensor:
        """Return logits; with a start, of a step whose past is kept."""
        if start is None:
            return super().forward(input_ids)
        if start == 0:
            for block in self.transformer.h:
                block.attn.kv_cache.reset_parameters()
        return super().forward(input_ids, self.places(start, input_ids.shape[1]))


def _reference() -> Olmo2ForCausalLM:
    config = Olmo2Config(
        vocab_size=211,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=3,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = fill(Olmo2ForCausalLM(config), seed=41)
    # Small outputs before the norms after them, so that eps is seen.
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data.mul_(0.125)
    return model


def _lit(model: nn.Module) -> GPT:
    config = Config(
        name="olmo2",
        vocab_size=211,
        padded_vocab_size=211,
        block_size=128,
        n_layer=3,
        n_embd=WIDTH,
        n_head=HEADS,
        n_query_groups=GROUPS,
        head_size=HEAD,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        norm_eps=1e-6,
        intermediate_size=INNER,
        rope_base=500000,
        norm_qk=True,
        norm_qk_type="olmo2",
        post_mlp_norm=True,
        norm_1=False,
        norm_2=False,
        post_attention_norm=True,
    )
    port = GPT(config)
    weights = model.state_dict()
    found = {
        "transformer.wte.weight": weights["model.embed_tokens.weight"],
        "transformer.ln_f.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    names = {
        "attn.norm_q": "self_attn.q_norm",
        "attn.norm_k": "self_attn.k_norm",
        "attn.proj": "self_attn.o_proj",
        "post_attention_norm": "post_attention_layernorm",
        "post_mlp_norm": "post_feedforward_layernorm",
        "mlp.fc_1": "mlp.gate_proj",
        "mlp.fc_2": "mlp.up_proj",
        "mlp.proj": "mlp.down_proj",
    }
    for index in range(3):
        here, there = f"transformer.h.{index}", f"model.layers.{index}"
        for ours, theirs in names.items():
            found[f"{here}.{ours}.weight"] = weights[f"{there}.{theirs}.weight"]
        parts = [weights[f"{there}.self_attn.{part}_proj.weight"] for part in "qkv"]
        found[f"{here}.attn.qkv.weight"] = torch.cat(parts)
    port.load_state_dict({name: weight.clone() for name, weight in found.items()})
    return port


def build(kind: str) -> Pair:
    """Return litgpt's model against transformers'; "back" is the other way round."""
    theirs = _reference()
    ours = _lit(theirs)
    if kind == "steps":
        ours.set_kv_cache(2, 24)
        ids = tokens(12, 2, 13, vocabulary=211)
        return Pair(ours, Stepper(theirs), drive=decoding(ids, 8))
    count = {"": 14, "back": 14, "long": 120}[kind]
    args = (tokens(13, 1 if kind == "long" else 2, count, vocabulary=211),)
    if kind == "back":
        return Pair(Logits(theirs), ours, args=args)
    return Pair(ours, Logits(theirs), args=args)
