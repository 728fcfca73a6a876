"""GPT-2: transformer-lens' HookedTransformer against transformers' GPT2LMHeadModel."""

from __future__ import annotations

import copy
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

from sealed.cases import Case, Pair
from sealed.one.common import (
    BF16,
    F16,
    F32,
    Entry,
    declare,
    decode,
    padding,
    randomise,
    rewrite,
    round_to,
    scale_row,
    tokens,
)

LAYERS, WIDTH, HEADS, VOCABULARY = 3, 48, 4, 200
BLOCKS = tuple(f"model.blocks.{index}" for index in range(LAYERS))
NORMS = (*(f"{block}.{norm}" for block in BLOCKS for norm in ("ln1", "ln2")), "model.ln_final")


@cache
def lens() -> Any:
    """Import transformer-lens 2, also where version 4, which lost HookedTransformer, is there.

    Version 2 then lies in a folder ``transformer_lens_2`` of site-packages, put there with
    ``pip install --no-deps --target``.
    """
    if int(importlib.metadata.version("transformer-lens").split(".")[0]) < 4:
        return importlib.import_module("transformer_lens")
    spec = importlib.util.find_spec("transformer_lens")
    folder = str(Path(spec.origin).parents[1] / "transformer_lens_2")
    others = {name: sys.modules.pop(name) for name in [*sys.modules] if _is_lens(name)}
    absent = importlib.util.find_spec("wandb") is None
    if absent:
        sys.modules["wandb"] = types.ModuleType("wandb")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("transformer_lens")
    finally:
        sys.path.remove(folder)
        if absent:
            del sys.modules["wandb"]
        if others:
            for name in [*sys.modules]:
                if _is_lens(name):
                    del sys.modules[name]
            sys.modules.update(others)


def _is_lens(name: str) -> bool:
    return name.split(".")[0] == "transformer_lens"


class Hooked(nn.Module):
    """The port; tells its configuration which precision the weights have."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> nn.Module:
        super()._apply(fn, recurse)
        for module in self.model.modules():
            if hasattr(module, "cfg"):
                module.cfg.dtype = self.model.embed.W_E.dtype
        return self

    def new_cache(self, batch: int) -> Any:
        """Return an empty cache of keys and values."""
        return lens().HookedTransformerKeyValueCache.init_cache(self.model.cfg, "cpu", batch)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, cache: Any = None
    ) -> torch.Tensor:
        """Return the logits, 0 at padding."""
        seen = torch.ones_like(ids) if mask is None and cache is not None else mask
        logits = self.model(ids, attention_mask=seen, past_kv_cache=cache)
        return logits if mask is None else logits * mask[..., None]


class Original(nn.Module):
    """The reference."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def new_cache(self, batch: int) -> DynamicCache:
        """Return an empty cache of keys and values."""
        del batch
        return DynamicCache()

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor | None = None, cache: Any = None
    ) -> torch.Tensor:
        """Return the logits, 0 at padding."""
        positions = None if mask is None else (mask.cumsum(-1) - 1).clamp(min=0)
        logits = self.net(
            ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        ).logits
        return logits if mask is None else logits * mask[..., None]


def build(
    dtype: torch.dtype,
    kind: str = "plain",
    attention: str = "eager",
    embedding: float = 0.5,
    offset: float = 0.0,
    offset_scores: float = 0.0,
    turned: bool = False,
) -> Pair:
    """Return the port with the weights of the reference, and what both are called with.

    Where ``turned``, transformers' model is the candidate and the other one the reference.
    """
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=40,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=attention,
    )
    net = GPT2LMHeadModel(config)
    randomise(net, seed=11, embedding=embedding)
    net.transformer.wte.weight.add_(offset)
    for layer in net.transformer.h:
        layer.attn.c_attn.bias[:WIDTH] += offset_scores
        layer.attn.c_attn.bias[WIDTH : 2 * WIDTH] -= offset_scores
    round_to(net, dtype)
    library = lens()
    settings = library.HookedTransformerConfig(
        n_layers=LAYERS,
        d_model=WIDTH,
        n_ctx=40,
        d_head=WIDTH // HEADS,
        n_heads=HEADS,
        d_vocab=VOCABULARY,
        act_fn="gelu_new",
        normalization_type="LN",
        eps=1e-5,
        device="cpu",
        seed=0,
    )
    model = library.HookedTransformer(settings)
    model.load_state_dict(_converted(net, model.state_dict()))
    port, original = Hooked(model), Original(net)
    pair = partial(Pair, original, port) if turned else partial(Pair, port, original)
    if kind == "decode":
        ids = tokens(2, 11, VOCABULARY)
        return pair(drive=partial(decode, ids[:, :7], ids[:, 7:]))
    if kind == "padded":
        return pair((tokens(3, 12, VOCABULARY), padding((12, 9, 5), 12, left=True)))
    return pair((tokens(2, 16, VOCABULARY),))


def _converted(net: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the state of the port: keys, queries and values per head, nothing transposed."""
    state = dict(state)
    state["embed.W_E"] = net.transformer.wte.weight
    state["pos_embed.W_pos"] = net.transformer.wpe.weight
    state["unembed.W_U"] = net.lm_head.weight.T
    state["ln_final.w"], state["ln_final.b"] = net.transformer.ln_f.parameters()
    for index, layer in enumerate(net.transformer.h):
        at = f"blocks.{index}."
        state[at + "ln1.w"], state[at + "ln1.b"] = layer.ln_1.parameters()
        state[at + "ln2.w"], state[at + "ln2.b"] = layer.ln_2.parameters()
        weight = layer.attn.c_attn.weight.view(WIDTH, 3, HEADS, -1).permute(1, 2, 0, 3)
        bias = layer.attn.c_attn.bias.view(3, HEADS, -1)
        for part, letter in enumerate("QKV"):
            state[at + f"attn.W_{letter}"] = weight[part]
            state[at + f"attn.b_{letter}"] = bias[part]
        state[at + "attn.W_O"] = layer.attn.c_proj.weight.view(HEADS, -1, WIDTH)
        state[at + "attn.b_O"] = layer.attn.c_proj.bias
        state[at + "mlp.W_in"], state[at + "mlp.b_in"] = layer.mlp.c_fc.parameters()
        state[at + "mlp.W_out"], state[at + "mlp.b_out"] = layer.mlp.c_proj.parameters()
    return state


def _swap_query_and_key(port: Hooked) -> None:
    attention = port.model.blocks[1].attn
    for query, key in ((attention.W_Q, attention.W_K), (attention.b_Q, attention.b_K)):
        kept = query.clone()
        query.copy_(key)
        key.copy_(kept)


def _untied(port: Hooked) -> None:
    port.model.unembed.W_U.copy_(torch.randn(WIDTH, VOCABULARY))


def _heads_in_other_order(port: Hooked) -> None:
    weight = port.model.blocks[2].attn.W_O
    weight.copy_(weight.view(-1, HEADS, WIDTH).transpose(0, 1).clone())


def _unscaled(port: Hooked) -> None:
    port.model.blocks[1].attn.attn_scale = 1.0


def _parallel_block(port: Hooked) -> None:
    block = port.model.blocks[1]
    block.cfg = copy.copy(block.cfg)
    block.cfg.parallel_attn_mlp = True


def _sees_next(port: Hooked) -> None:
    attention = port.model.blocks[0].attn
    attention.mask = torch.tril(torch.ones_like(attention.mask), diagonal=1)


def _eps(port: Hooked) -> None:
    for path in NORMS:
        port.get_submodule(path).eps = 1e-6


def _exact_gelu(port: Hooked) -> None:
    for block in port.model.blocks:
        block.mlp.act_fn = functional.gelu


def _shift_positions(port: Hooked) -> None:
    kind = type(port.model.pos_embed)

    def forward(self: Any, ids: Any, past: int = 0, mask: Any = None) -> torch.Tensor:
        return kind.forward(self, ids, past + 1, mask)

    rewrite(port.model.pos_embed, forward=forward)


def _one_early(port: Hooked) -> None:
    kind = type(port.model.pos_embed)

    def forward(self: Any, ids: Any, past: int = 0, mask: Any = None) -> torch.Tensor:
        del mask
        return kind.forward(self, ids, max(past - 1, 0))

    rewrite(port.model.pos_embed, forward=forward)


def _positions_of_padding(port: Hooked) -> None:
    kind = type(port.model.pos_embed)

    def forward(self: Any, ids: Any, past: int = 0, mask: Any = None) -> torch.Tensor:
        del mask
        return kind.forward(self, ids, past)

    rewrite(port.model.pos_embed, forward=forward)


def _one_pass_norms(port: Hooked) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        scale = self.hook_scale((variance.clamp(min=0) + self.eps).sqrt())
        return self.hook_normalized((x - mean) / scale * self.w + self.b)

    for path in NORMS:
        rewrite(port.get_submodule(path), forward=forward)


def _no_maximum(port: Hooked) -> None:
    """Take the powers of the scores in half precision without taking off the largest."""

    def forward(self: Any, query_input: Any, key_input: Any, value_input: Any, **_: Any) -> Any:
        q, k, v = self.calculate_qkv_matrices(query_input, key_input, value_input)
        powers = self.apply_causal_mask(self.calculate_attention_scores(q, k)).exp()
        z = self.calculate_z_scores(v, powers / powers.sum(-1, keepdim=True))
        return torch.einsum("bqhd,hdm->bqm", z, self.W_O) + self.b_O

    for block in port.model.blocks:
        rewrite(block.attn, forward=forward)


def _processed(port: Hooked, **how: bool) -> None:
    port.model.process_weights_(center_unembed=False, **how)


def _result_per_head(port: Hooked) -> None:
    port.model.cfg.use_attn_result = True


def _copy_layer(port: Hooked) -> None:
    port.model.blocks[2].mlp.W_in.copy_(port.model.blocks[1].mlp.W_in)
    port.model.blocks[2].mlp.b_in.copy_(port.model.blocks[1].mlp.b_in)


def _projection_transposed(original: Original) -> None:
    weight = original.net.transformer.h[1].attn.c_proj.weight
    weight.copy_(weight.T.clone())


def _scaled_by_layer(original: Original) -> None:
    for index, layer in enumerate(original.net.transformer.h):
        layer.attn.scaling /= index + 1


def _norms_exchanged(original: Original) -> None:
    layer = original.net.transformer.h[2]
    layer.ln_1, layer.ln_2 = layer.ln_2, layer.ln_1


def _fused_gelu(original: Original) -> None:
    for layer in original.net.transformer.h:
        layer.mlp.act = nn.GELU("tanh")


def cases() -> Iterator[Case]:
    """Yield the cases of GPT-2."""
    attentions = tuple(f"{block}.attn" for block in BLOCKS)
    mlps = tuple(f"{block}.mlp" for block in BLOCKS)
    padded, steps = {"kind": "padded"}, {"kind": "decode"}
    entries = [
        Entry("clean", dtype=F32),
        Entry("clean", dtype=BF16),
        Entry("clean", dtype=F16),
        Entry("clean_against_sdpa_left_padding", options={**padded, "attention": "sdpa"}),
        Entry("clean_decode_loop", options=steps),
        Entry(
            "folded_norm_weights", partial(_processed, fold_ln=True, center_writing_weights=False)
        ),
        Entry("folded_and_centred", partial(_processed, fold_ln=True, center_writing_weights=True)),
        Entry("attention_result_summed_per_head", _result_per_head),
        Entry(
            "query_and_key_swapped",
            _swap_query_and_key,
            ("model.blocks.1.attn",),
            "weights and biases of queries and keys swapped",
        ),
        Entry(
            "heads_in_other_order",
            _heads_in_other_order,
            ("model.blocks.2.attn",),
            "output projection split as (head_dim, heads)",
        ),
        Entry("head_not_tied", _untied, ("model.unembed",), "head not tied to the embedding"),
        Entry(
            "norm_bias_dropped",
            lambda port: port.model.blocks[0].ln2.b.zero_(),
            ("model.blocks.0.ln2",),
            "bias of the norm not loaded",
        ),
        Entry("scale_missing", _unscaled, ("model.blocks.1.attn",), "scores not divided", BF16),
        Entry("parallel_block", _parallel_block, ("model.blocks.1",), "MLP reads what came in"),
        Entry("sees_next_token", _sees_next, ("model.blocks.0.attn",), "causal mask off by one"),
        Entry("eps", _eps, NORMS, "eps 1e-6 for 1e-5", options={"embedding": 0.1}),
        Entry("exact_gelu", _exact_gelu, mlps, "erf GELU for the tanh one"),
        Entry(
            "positions_off_by_one",
            _shift_positions,
            ("model.pos_embed",),
            "positions start at 1",
            F16,
        ),
        Entry(
            "decode_positions_one_early",
            _one_early,
            ("model.pos_embed",),
            "a step takes the position before its own",
            options=steps,
        ),
        Entry(
            "positions_count_padding",
            _positions_of_padding,
            ("model.pos_embed",),
            "positions count the padding on the left",
            options=padded,
        ),
        Entry("mlp_of_layer_before", _copy_layer, ("model.blocks.2.mlp",), "W_in of layer 1", BF16),
        Entry(
            "row_scaled",
            lambda port: scale_row(port.model.blocks[1].mlp.W_out, 7),
            ("model.blocks.1.mlp",),
            "one row of the output projection times 1.03",
        ),
        Entry(
            "norm_variance_in_one_pass",
            _one_pass_norms,
            NORMS,
            "variance as difference of two large means in bfloat16",
            BF16,
            precision=True,
            options={"offset": 4.0},
        ),
        Entry(
            "softmax_underflows",
            _no_maximum,
            attentions,
            "powers of the scores in float16 without the largest taken off",
            F16,
            precision=True,
            options={"offset_scores": 1.8},
        ),
    ]
    turned = {"turned": True}
    layers = [f"net.transformer.h.{index}" for index in range(LAYERS)]
    entries += [
        Entry("turned_clean", dtype=BF16, options=turned),
        Entry("turned_fused_gelu", _fused_gelu, options={**turned, "attention": "sdpa"}),
        Entry(
            "turned_projection_transposed",
            _projection_transposed,
            (f"{layers[1]}.attn.c_proj",),
            "square weight transposed as for a Linear",
            options=turned,
        ),
        Entry(
            "turned_scaled_by_layer",
            _scaled_by_layer,
            tuple(f"{layer}.attn" for layer in layers[1:]),
            "scores also divided by the number of the layer",
            F16,
            options=turned,
        ),
        Entry(
            "turned_norms_exchanged",
            _norms_exchanged,
            (f"{layers[2]}.ln_1", f"{layers[2]}.ln_2"),
            "weights of the two norms swapped",
            BF16,
            options=turned,
        ),
    ]
    yield from declare("gpt2", build, entries)
