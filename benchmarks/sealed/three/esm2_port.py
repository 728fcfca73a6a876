"""fair-esm's ESM-2 and transformers', with the same weights."""

from __future__ import annotations

import torch
from esm.data import Alphabet
from esm.model.esm2 import ESM2
from esm.rotary_embedding import RotaryEmbedding, rotate_half
from torch import nn
from transformers import EsmConfig, EsmForMaskedLM

from sealed.cases import Pair
from sealed.three.common import fill, tokens

WIDTH, HEADS, DEPTH = 48, 4, 3
PAD, MASK, BEGIN, END = 1, 32, 0, 2


class Port(ESM2):
    """fair-esm's model, that puts out logits or contacts."""

    def embed(self, ids: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        """Return embeddings with masked tokens dropped and the rest scaled up."""
        masked = ids == self.mask_idx
        x = self.embed_tokens(ids).masked_fill(masked.unsqueeze(-1), 0.0)
        seen = masked.sum(-1).to(x.dtype) / (~padding).sum(-1)
        x = x * (1 - 0.15 * 0.8) / (1 - seen)[:, None, None]
        return x.to(self.embed_tokens.weight.dtype) * ~padding.unsqueeze(-1)

    def masking(self, padding: torch.Tensor) -> torch.Tensor | None:
        """Return which keys are hidden, if any is."""
        return padding if padding.any() else None

    def last(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last norm of the layers' output."""
        return self.emb_layer_norm_after(x)

    def forward(self, ids: torch.Tensor, contacts: bool = False) -> torch.Tensor:
        """Return logits, or how likely residues touch."""
        if contacts:
            return super().forward(ids, return_contacts=True)["contacts"]
        padding = ids.eq(self.padding_idx)
        x = self.embed(ids, padding).transpose(0, 1)
        hidden = self.masking(padding)
        for layer in self.layers:
            x, _ = layer(x, self_attn_padding_mask=hidden)
        return self.lm_head(self.last(x).transpose(0, 1))


class Rotary(RotaryEmbedding):
    """The package's rotation, in float32 whatever comes in."""

    def turn(self, x: torch.Tensor) -> torch.Tensor:
        """Return x rotated by its position."""
        places = torch.arange(x.shape[-2]).to(self.inv_freq)
        angles = torch.outer(places, self.inv_freq).repeat(1, 2)
        wide = x.to(self.inv_freq.dtype)
        return (wide * angles.cos() + rotate_half(wide) * angles.sin()).to(x.dtype)

    def forward(self, q: torch.Tensor, k: torch.Tensor):
        """Return queries and keys rotated."""
        return self.turn(q), self.turn(k)


class Reference(nn.Module):
    """transformers' model with a mask made from the padding."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, contacts: bool = False) -> torch.Tensor:
        """Return logits, or how likely residues touch."""
        mask = ids.ne(PAD).long()
        if contacts:
            return self.model.predict_contacts(ids, mask)
        return self.model(input_ids=ids, attention_mask=mask).logits


NAMES = {
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.out_proj": "attention.output.dense",
    "self_attn_layer_norm": "attention.LayerNorm",
    "fc1": "intermediate.dense",
    "fc2": "output.dense",
    "final_layer_norm": "LayerNorm",
}


def build(kind: str) -> Pair:
    """Return fair-esm's model and transformers'; kinds "padded", "masked", "contacts", "long"."""
    config = EsmConfig(
        vocab_size=33,
        mask_token_id=MASK,
        pad_token_id=PAD,
        hidden_size=WIDTH,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=80,
        position_embedding_type="rotary",
        layer_norm_eps=1e-5,
        emb_layer_norm_before=False,
        token_dropout=True,
        tie_word_embeddings=True,
        attn_implementation="eager" if kind == "contacts" else "sdpa",
    )
    torch.manual_seed(0)
    model = EsmForMaskedLM(config)
    model.tie_weights()
    model.esm.contact_head.regression.weight.data.mul_(0)
    fill(model, seed=51)
    model.esm.contact_head.regression.weight.data.mul_(16)
    weights = model.state_dict()
    port = Port(DEPTH, WIDTH, HEADS, Alphabet.from_architecture("ESM-1b"))
    for layer in port.layers:
        layer.self_attn.rot_emb = Rotary(WIDTH // HEADS)
    found = {
        "embed_tokens.weight": weights["esm.embeddings.word_embeddings.weight"],
        "lm_head.weight": weights["esm.embeddings.word_embeddings.weight"],
        "lm_head.bias": weights["lm_head.bias"],
    }
    for part in ("weight", "bias"):
        for index in range(DEPTH):
            for ours, theirs in NAMES.items():
                there = f"esm.encoder.layer.{index}.{theirs}.{part}"
                found[f"layers.{index}.{ours}.{part}"] = weights[there]
        found[f"lm_head.dense.{part}"] = weights[f"lm_head.dense.{part}"]
        found[f"lm_head.layer_norm.{part}"] = weights[f"lm_head.layer_norm.{part}"]
        there = f"esm.encoder.emb_layer_norm_after.{part}"
        found[f"emb_layer_norm_after.{part}"] = weights[there]
        there = f"esm.contact_head.regression.{part}"
        found[f"contact_head.regression.{part}"] = weights[there]
    missing, unexpected = port.load_state_dict(found, strict=False)
    assert not unexpected
    assert all("inv_freq" in name for name in missing), missing
    ids = tokens(8, 3, 78 if kind == "long" else 16, vocabulary=24, low=4)
    ids[:, 0], ids[:, -1] = BEGIN, END
    if kind in ("padded", "masked"):
        ids[1, 12], ids[1, 13:] = END, PAD
        ids[2, 8], ids[2, 9:] = END, PAD
    if kind == "masked":
        ids[0, 4:6] = ids[1, 3] = ids[2, 5] = MASK
    return Pair(port, Reference(model), args=(ids, True) if kind == "contacts" else (ids,))
