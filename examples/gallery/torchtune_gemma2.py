"""Gemma 2 of torchtune 0.6.1 against transformers.

Three things differ, and each changes the logits:

- the final soft-cap is applied to the hidden state after the last norm, not to the logits
- the converter exchanges the weights of the norms before and after the feed-forward
- the builders of the published sizes cap attention scores at 30 and the end at 50; transformers
  does it the other way round

The models are small and have random weights, converted by torchtune's own converter:

    pip install transformers && pip install --no-deps torchtune==0.6.1

torchtune also imports torchao, datasets and other packages, which play no part here.
"""

import re
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from unittest.mock import MagicMock

import torch

import brickline as bl

for name in ("torchtune", "transformers"):
    if not find_spec(name):
        sys.exit(f"{name} is not installed")

from original import SIZES, drawn, prompt  # noqa: E402

model = drawn("Gemma2", query_pre_attn_scalar=16, sliding_window=8)
for weight in model.parameters():
    if weight.ndim > 1:
        weight.mul_(10)  # trained scores and logits are large enough to be capped


class Placeholders(MetaPathFinder, Loader):
    """Finds packages that torchtune imports and this example does not need, if they are missing."""

    NAMES = (
        "blobfile",
        "datasets",
        "kagglehub",
        "omegaconf",
        "sentencepiece",
        "tiktoken",
        "torchao",
    )

    def find_spec(self, fullname, path=None, target=None):
        needed = fullname.partition(".")[0] in self.NAMES
        return ModuleSpec(fullname, self, is_package=True) if needed else None

    def create_module(self, spec):
        return MagicMock(__path__=[], __spec__=spec)

    def exec_module(self, module):
        pass


sys.meta_path.append(Placeholders())

from torchtune.models.gemma2._component_builders import gemma2  # noqa: E402
from torchtune.models.gemma2._convert_weights import gemma2_hf_to_tune  # noqa: E402


def tuned(model, score_cap, last_cap):
    """Return the model of torchtune with the weights of the original."""
    port = gemma2(
        vocab_size=SIZES["vocab_size"],
        num_layers=SIZES["num_hidden_layers"],
        num_heads=SIZES["num_attention_heads"],
        num_kv_heads=SIZES["num_key_value_heads"],
        head_dim=SIZES["head_dim"],
        embed_dim=SIZES["hidden_size"],
        intermediate_dim=SIZES["intermediate_size"],
        max_seq_len=64,
        hidden_capping_value=score_cap,
        final_capping_value=last_cap,
        sliding_window_size=model.config.sliding_window,
        query_pre_attn_scalar=model.config.query_pre_attn_scalar,
    )
    sizes = {"num_heads": 4, "num_kv_heads": 2, "dim": SIZES["hidden_size"], "head_dim": 16}
    weights = gemma2_hf_to_tune(model.state_dict(), **sizes)
    weights.pop("output.weight")  # the embedding's
    port.load_state_dict(weights)
    return port.eval().requires_grad_(False)


def exchange_norms(port):
    """Exchange the norms before and after the feed-forward."""
    for layer in port.layers:
        layer.mlp_norm, layer.mlp_scale = layer.mlp_scale, layer.mlp_norm


class CappedHead(torch.nn.Module):
    """Caps the logits."""

    def __init__(self, head, cap):
        super().__init__()
        self.head, self.cap = head, cap

    def forward(self, x):
        return self.cap(self.head(x))


def cap_logits(port):
    """Cap the logits instead of the hidden state."""
    cap, port.norm = port.norm.logit_capping, port.norm.rms_norm
    port.output = CappedHead(port.output, cap)


reports = {}
for name, caps, mends in (
    ("as released", (30.0, 50.0), []),
    ("norms exchanged", (30.0, 50.0), [exchange_norms]),
    ("and logits capped", (30.0, 50.0), [exchange_norms, cap_logits]),
    ("and caps of 50 and 30", (50.0, 30.0), [exchange_norms, cap_logits]),
):
    port = tuned(model, *caps)
    for mend in mends:
        mend(port)
    reports[name] = bl.check(port, prompt(), reference=model, repro=False)
    print(f"{name}: {reports[name].headline}")
    culprits = {re.sub(r"\d+", "N", finding.name) for finding in reports[name].culprits}
    print("  culprits:", " ".join(sorted(culprits)) or "none")
