"""Models of the transformers library with random weights, as its users run them.

Absent where that library is absent.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.cases import Case, Trio
from localisation.drives import Run
from localisation.planting import change, dtype_of, on_output

SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}


def _model(kind: str, attention: str) -> nn.Module:
    import transformers

    wide = {"intermediate_size": 160, "num_key_value_heads": 2, **SMALL}
    made = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**wide)),
        "qwen": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**wide)),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=101,
                n_embd=64,
                n_head=4,
                n_layer=2,
                n_positions=64,
                bos_token_id=1,
                eos_token_id=1,
            )
        ),
        "bert": lambda: transformers.BertModel(
            transformers.BertConfig(intermediate_size=160, **SMALL)
        ),
    }[kind]()
    models.weigh(made, 31)
    made.set_attn_implementation(attention)
    if getattr(made, "generation_config", None) is not None:
        made.generation_config.pad_token_id = 0
        made.generation_config.eos_token_id = None
    return made


def _trio(kind: str, attention: str, regime: str, plant: Callable[[nn.Module], Any] | None) -> Trio:
    reference = _model(kind, "eager")
    clean = copy.deepcopy(reference)
    clean.set_attn_implementation(attention)
    clean.to(dtype_of(regime))
    for name, buffer in reference.named_buffers():
        path, _, last = name.rpartition(".")
        if "inv_freq" in last:  # from_pretrained leaves these in float32
            setattr(clean.get_submodule(path), last, buffer.clone())
    candidate = copy.deepcopy(clean)
    if plant is not None:
        plant(candidate)
    return Trio(candidate, reference, clean)


def forward(dtype: torch.dtype) -> Run:
    """One call on two rows, the second shorter."""
    keep = torch.ones(2, 12, dtype=torch.long)
    keep[1, 9:] = 0

    def drive(model: nn.Module) -> Any:
        with torch.no_grad():
            return model(input_ids=drives.tokens(41, length=12), attention_mask=keep)

    return Run(drive=drive)


def generate(dtype: torch.dtype) -> Run:
    """`generate`, greedy, with the cache that the library makes."""
    given = drives.tokens(42, batch=1, length=6)

    def drive(model: nn.Module) -> Tensor:
        torch.manual_seed(3)
        return model.generate(given, max_new_tokens=5, do_sample=False)

    return Run(drive=drive)


# --- Faults: what is planted, and where -----------------------------------------------------------


def weights(path: str) -> Callable[[nn.Module], None]:
    """Exchange two rows of a weight."""

    def plant(model: nn.Module) -> None:
        weight = model.get_submodule(path).weight.data
        weight[[3, 7]] = weight[[7, 3]]

    return plant


def eps(path: str) -> Callable[[nn.Module], None]:
    """Make the eps of a norm larger."""

    def plant(model: nn.Module) -> None:
        norm = model.get_submodule(path)
        name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
        setattr(norm, name, 0.1)

    return plant


def gelu(path: str) -> Callable[[nn.Module], None]:
    """Put another activation in."""

    def plant(model: nn.Module) -> None:
        change(model.get_submodule(path), forward=lambda self, forward, x: F.gelu(x) * 1.0)

    return plant


def base(path: str) -> Callable[[nn.Module], None]:
    """Change the frequencies of the rotation."""

    def plant(model: nn.Module) -> None:
        model.get_submodule(path).inv_freq.mul_(0.8)

    return plant


def scale(path: str) -> Callable[[nn.Module], None]:
    """Change the scale of an attention."""

    def plant(model: nn.Module) -> None:
        model.get_submodule(path).scaling *= 0.8

    return plant


def tail_alone(path: str) -> Callable[[nn.Module], None]:
    """Drop the tail of the fan-in where one token comes alone."""

    def forward(self: Any, forward: Any, x: Tensor) -> Tensor:
        if x.shape[1] > 1:
            return forward(x)
        return F.linear(x[..., :-4], self.weight[:, :-4], self.bias)

    return lambda model: change(model.get_submodule(path), forward=forward)


def doubled(path: str) -> Callable[[nn.Module], None]:
    """Let a block give twice what it should where one token comes alone."""

    def twice(out: Any) -> Any:
        first = out[0] if isinstance(out, tuple) else out
        first = first * 2 if first.shape[1] == 1 else first
        return (first, *out[1:]) if isinstance(out, tuple) else first

    return lambda model: on_output(model.get_submodule(path), twice)


FAULTS = (
    # Model, run, path, plant, position.
    ("llama", forward, "model.layers.1.mlp.down_proj", weights, 0),
    ("llama", forward, "model.layers.0.input_layernorm", eps, 0),
    ("llama", forward, "model.layers.1.mlp.act_fn", gelu, 0),
    ("llama", forward, "model.rotary_emb", base, 0),
    ("llama", forward, "model.layers.1.self_attn", scale, 0),
    ("llama", generate, "model.layers.0.self_attn.v_proj", weights, 0),
    ("llama", generate, "model.layers.1.mlp.up_proj", tail_alone, 1),
    ("llama", generate, "model.layers.0.mlp", doubled, 1),
    ("qwen", generate, "model.norm", eps, 0),
    ("qwen", forward, "model.layers.0.self_attn.k_proj", weights, 0),
    ("gpt2", forward, "transformer.h.1.mlp.act", gelu, 0),
    ("gpt2", generate, "transformer.h.0.attn.c_attn", weights, 0),
    ("bert", forward, "encoder.layer.1.attention.output.LayerNorm", eps, 0),
    ("bert", forward, "encoder.layer.0.attention.self.value", weights, 0),
)


def cases() -> Iterator[Case]:
    """Yield the faults and what is harmless; none where transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        return
    for kind, run, path, plant, position in FAULTS:
        for attention, regime in (("eager", "same"), ("sdpa", "same"), ("sdpa", "bf16")):
            yield _case(kind, run, attention, regime, path, plant, position)
    for kind, run in (
        *((each, forward) for each in ("llama", "qwen", "gpt2", "bert")),
        ("llama", generate),
        ("gpt2", generate),
    ):
        for attention, regime in (("sdpa", "same"), ("sdpa", "bf16")):
            yield _case(kind, run, attention, regime)


def _case(
    kind: str,
    run: Callable[[torch.dtype], Run],
    attention: str,
    regime: str,
    path: str | None = None,
    plant: Callable[[str], Callable[[nn.Module], None]] | None = None,
    position: int | None = None,
) -> Case:
    what = "harmless" if plant is None else f"{plant.__name__} of {path}"
    planted = None if plant is None or path is None else plant(path)
    return Case(
        name=f"transformers.{kind} {run.__name__} {attention}: {what}/{regime}",
        group="transformers",
        kind=plant.__name__ if plant is not None else "harmless",
        regime=regime,
        make=lambda: _trio(kind, attention, regime, planted),
        run=run,
        dtype=dtype_of(regime),
        expected=path,
        position=position,
    )
