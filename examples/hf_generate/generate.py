"""A Llama with random weights that generates: SDPA attention against the eager one.

Nothing is downloaded: the weights are drawn from the configuration.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def made(attention):
    """Draw the same weights for either attention."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation=attention))
    return model.eval().requires_grad_(False)


def reference():
    """Attention written out, operation by operation."""
    return made("eager")


def candidate():
    """Attention as one fused call."""
    return made("sdpa")


def drive(model):
    """Generate as a user does: a prompt, then one token a call, with a KV cache."""
    tokens = torch.arange(1, 13)[None]
    return model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False
    )
