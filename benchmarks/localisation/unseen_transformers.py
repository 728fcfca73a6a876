"""Other families of the transformers library, and other ways to generate, with random weights.

Absent where that library is absent.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from localisation import drives, models
from localisation.cases import Case, Trio
from localisation.drives import Run
from localisation.faults_decode import from_call
from localisation.planting import change, dtype_of

SMALL = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
FEED = {**SMALL, "intermediate_size": 96, "max_position_embeddings": 64}
GROUPED = {**FEED, "num_key_value_heads": 2}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**GROUPED, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**GROUPED, "sliding_window": 8}),
    "phi": ("PhiConfig", "PhiForCausalLM", FEED),
    "falcon": ("FalconConfig", "FalconForCausalLM", SMALL),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {**SMALL, "ffn_dim": 96, "max_position_embeddings": 64, "word_embed_proj_dim": 64},
    ),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", FEED),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": 101, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    ),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", GROUPED),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 101,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 96,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    ),
}


def _model(kind: str, attention: str) -> nn.Module:
    import transformers

    config, model, sizes = FAMILIES[kind]
    made = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    models.weigh(made, 33)
    if kind != "mamba":
        made.set_attn_implementation(attention)
    made.generation_config.pad_token_id = 0
    made.generation_config.bos_token_id = 1
    made.generation_config.eos_token_id = None
    return made


def _trio(kind: str, attention: str, regime: str, plant: Callable[[nn.Module], Any] | None) -> Trio:
    reference = _model(kind, "eager")
    clean = _model(kind, attention)
    clean.load_state_dict(reference.state_dict())
    clean.to(dtype_of(regime))
    for name, buffer in reference.named_buffers():
        path, _, last = name.rpartition(".")
        if "inv_freq" in last:  # from_pretrained leaves these in float32
            setattr(clean.get_submodule(path), last, buffer.clone())
    candidate = copy.deepcopy(clean)
    if plant is not None:
        plant(candidate)
    return Trio(candidate, reference, clean)


# --- Ways to generate -----------------------------------------------------------------------------


def _generate(name: str, length: int = 6, **how: Any) -> Callable[[torch.dtype], Run]:
    given = drives.tokens(43, batch=1, length=length)
    if "prompt_lookup_num_tokens" in how:
        given = torch.cat([given, given[:, :-1]], 1)

    def drive(model: nn.Module) -> Tensor:
        torch.manual_seed(4)
        return model.generate(given, max_new_tokens=6, **how)

    def run(dtype: torch.dtype) -> Run:
        return Run(drive=drive)

    run.__name__ = name
    return run


greedy = _generate("greedy", do_sample=False)
drawn = _generate("drawn", do_sample=True, top_k=20)
beam = _generate("beam", do_sample=False, num_beams=3)
fixed = _generate("static cache", do_sample=False, cache_implementation="static")
looked_up = _generate("looked up", do_sample=False, prompt_lookup_num_tokens=2)
bare = _generate("no cache", do_sample=False, use_cache=False)


# --- Faults ---------------------------------------------------------------------------------------


def rows(module: nn.Module) -> None:
    """Exchange two rows of a weight."""
    module.weight.data[[1, 3]] = module.weight.data[[3, 1]]


def eps(module: nn.Module) -> None:
    """Make the eps of a norm larger."""
    name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"
    setattr(module, name, 0.05)


def softcap(module: nn.Module) -> None:
    """Cap the scores of an attention at a tenth."""
    module.attn_logit_softcapping = 1.0


def alone(module: nn.Module) -> None:
    """Roll what comes out where one token comes alone."""

    def forward(self: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        rolled = first.roll(1, -1) if first.shape[1] == 1 else first
        return (rolled, *out[1:]) if isinstance(out, tuple) else rolled

    change(module, forward=forward)


def third(module: nn.Module) -> None:
    """Scale what comes out from the third call after the prompt on."""
    from_call(module, 3, lambda out: out * 1.02)


def scaling(module: nn.Module) -> None:
    """Change the scale of an attention where one token comes alone."""

    def forward(self: Any, forward: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = self.scaling
        self.scaling = before * (0.7 if hidden_states.shape[1] == 1 else 1.0)
        try:
            return forward(hidden_states, *args, **kwargs)
        finally:
            self.scaling = before

    change(module, forward=forward)


FAULTS = (
    # Family, run, attention, regime, path, plant, position.
    ("qwen3", greedy, "sdpa", "same", "model.layers.1.self_attn.k_norm", eps, 0),
    ("qwen3", greedy, "sdpa", "bf16", "model.layers.0.mlp.down_proj", third, 3),
    ("gemma2", greedy, "eager", "same", "model.layers.1.self_attn", softcap, 0),
    ("gemma2", greedy, "eager", "bf16", "model.layers.0.post_feedforward_layernorm", third, 3),
    ("mistral", greedy, "sdpa", "same", "model.layers.1.self_attn", scaling, 1),
    ("mistral", drawn, "eager", "bf16", "model.layers.0.self_attn.v_proj", third, 3),
    ("phi", greedy, "sdpa", "same", "model.layers.0.self_attn.dense", alone, 1),
    ("falcon", greedy, "sdpa", "same", "transformer.h.1.self_attention.query_key_value", rows, 0),
    ("falcon", greedy, "eager", "bf16", "transformer.h.0.mlp.dense_4h_to_h", third, 3),
    ("opt", greedy, "sdpa", "same", "model.decoder.embed_positions", alone, 1),
    ("opt", beam, "eager", "same", "model.decoder.layers.1.self_attn.out_proj", third, 3),
    ("neox", greedy, "sdpa", "same", "gpt_neox.layers.1.attention.dense", alone, 1),
    ("neox", greedy, "eager", "bf16", "gpt_neox.layers.0.attention", scaling, 1),
    ("mixtral", greedy, "sdpa", "same", "model.layers.0.mlp.gate", rows, 0),
    ("mixtral", greedy, "eager", "same", "model.layers.1.self_attn.o_proj", third, 3),
    ("bloom", greedy, "eager", "same", "transformer.h.1.self_attention.dense", third, 3),
    ("stablelm", drawn, "sdpa", "same", "model.layers.1.input_layernorm", eps, 0),
    ("t5", greedy, "eager", "same", "decoder.block.1.layer.1.EncDecAttention.v", rows, 0),
    ("t5", greedy, "eager", "same", "decoder.block.0.layer.2.DenseReluDense.wo", rows, 0),
    ("mamba", greedy, "eager", "same", "backbone.layers.1.mixer.out_proj", third, 3),
    ("mistral", fixed, "eager", "same", "model.layers.0.self_attn.k_proj", third, 3),
    ("qwen3", looked_up, "sdpa", "same", "model.layers.1.mlp.up_proj", rows, 0),
    ("phi", bare, "eager", "same", "model.layers.1.mlp.fc1", rows, 0),
)

HARMLESS = (
    ("qwen3", greedy, "sdpa", "bf16"),
    ("gemma2", drawn, "eager", "bf16"),
    ("mistral", fixed, "eager", "same"),
    ("phi", beam, "sdpa", "same"),
    ("falcon", greedy, "sdpa", "bf16"),
    ("opt", beam, "sdpa", "bf16"),
    ("neox", looked_up, "sdpa", "same"),
    ("mixtral", greedy, "sdpa", "bf16"),
    ("bloom", greedy, "eager", "bf16"),
    ("stablelm", drawn, "sdpa", "bf16"),
    ("t5", greedy, "eager", "bf16"),
    ("mamba", greedy, "eager", "bf16"),
)


def cases() -> Iterator[Case]:
    """Yield the faults and what is harmless; none where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return
    for kind, run, attention, regime, path, plant, position in FAULTS:
        yield _case(kind, run, attention, regime, path, plant, position)
    for kind, run, attention, regime in HARMLESS:
        yield _case(kind, run, attention, regime)


def _case(
    kind: str,
    run: Any,
    attention: str,
    regime: str,
    path: str | None = None,
    plant: Callable[[nn.Module], None] | None = None,
    position: int | None = None,
) -> Case:
    what = "harmless" if plant is None else f"{plant.__name__} of {path}"
    put = None if plant is None else functools.partial(_plant, path, plant)
    return Case(
        name=f"unseen.{kind} {run.__name__} {attention}: {what}/{regime}",
        group="unseen drives",
        kind="harmless" if plant is None else "transformers",
        regime=regime,
        make=lambda: _trio(kind, attention, regime, put),
        run=run,
        dtype=dtype_of(regime),
        expected=path,
        position=position,
    )


def _plant(path: str, plant: Callable[[nn.Module], None], model: nn.Module) -> None:
    plant(model.get_submodule(path))
