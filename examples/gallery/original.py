"""The originals: small models of transformers with random weights.

Nothing is downloaded.
"""

import torch
import transformers

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "use_cache": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def drawn(name, dtype=torch.float32, **options):
    """Return a model of an architecture, such as Llama."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | options)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for weight in model.parameters():
        if weight.ndim == 1:  # of a norm, which starts uniform
            torch.nn.init.normal_(weight, weight.mean().item(), 0.2)
    return model.to(dtype).eval().requires_grad_(False)


def prompt(sequences=2, length=24):
    """Return random tokens."""
    torch.manual_seed(1)
    return torch.randint(1, SIZES["vocab_size"], (sequences, length))
