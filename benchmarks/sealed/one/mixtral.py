"""Mixtral: a port with grouped experts against transformers' MixtralForCausalLM."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from einops import rearrange
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, MixtralConfig, MixtralForCausalLM

from sealed.cases import Case, Pair
from sealed.one.common import (
    BF16,
    F16,
    F32,
    Entry,
    declare,
    decode,
    randomise,
    rewrite,
    round_to,
    scale_row,
    tokens,
)
from sealed.one.mixtral_port import (
    CHOSEN,
    EPS,
    EXPERTS,
    GROUPS,
    HEAD,
    HEADS,
    INNER,
    LAYERS,
    REPEATS,
    THETA,
    VOCABULARY,
    WIDTH,
    Block,
    Experts,
    Mixer,
    Norm,
    Port,
    Rope,
    Router,
    Trunk,
    convert,
    wide,
)

MIXERS = tuple(f"trunk.blocks.{index}.mixer" for index in range(LAYERS))
MOES = tuple(f"trunk.blocks.{index}.moe" for index in range(LAYERS))


class Original(nn.Module):
    """The reference."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def new_cache(self, batch: int) -> DynamicCache:
        """Return an empty cache of keys and values."""
        del batch
        return DynamicCache()

    def forward(self, ids: torch.Tensor, first: int = 0, cache: Any = None) -> torch.Tensor:
        """Return the logits."""
        positions = torch.arange(first, first + ids.shape[1])[None] if cache is None else None
        return self.net(
            ids, position_ids=positions, past_key_values=cache, use_cache=cache is not None
        ).logits


def build(
    dtype: torch.dtype,
    kind: str = "plain",
    attention: str = "eager",
    window: int | None = None,
    first: int = 0,
    embedding: float = 1.0,
    gain: float = 1.0,
    loud: float = 1.0,
    length: int = 16,
) -> Pair:
    """Return the port with the weights of the reference, and what both are called with."""
    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        max_position_embeddings=4096,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        sliding_window=window,
        attn_implementation=attention,
        experts_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    net = MixtralForCausalLM(config)
    randomise(net, seed=51, embedding=embedding)
    for layer in net.model.layers:
        layer.self_attn.q_proj.weight.mul_(gain)
        layer.self_attn.o_proj.weight.mul_(loud)
    round_to(net, dtype)
    port = Port(window)
    convert(net, port)
    pair = partial(Pair, port, Original(net))
    if kind == "decode":
        ids = tokens(2, 12, VOCABULARY)
        return pair(drive=partial(decode, ids[:, :7], ids[:, 7:]))
    return pair((tokens(2, length, VOCABULARY), first))


def _infinite(port: Port) -> None:
    for block in port.trunk.blocks:
        block.mixer.fill = "inf"


def _softmax_of_chosen(port: Port) -> None:
    def forward(self: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, numbers = (wide(x) @ wide(self.weight).T).topk(self.chosen, -1)
        return scores.softmax(-1), numbers

    for path in MOES:
        rewrite(port.get_submodule(path).router, forward=forward)


def _dense_experts(port: Port) -> None:
    def forward(self: Experts, x: torch.Tensor, shares: Any, numbers: Any) -> torch.Tensor:
        full = shares.new_zeros(len(x), EXPERTS).scatter(1, numbers, shares)
        outputs = torch.stack([self.one(expert, x) for expert in range(EXPERTS)], 1)
        return self.combine(outputs, full)

    for path in MOES:
        rewrite(port.get_submodule(path).experts, forward=forward)


def _grouped_projection(port: Port) -> None:
    def split(self: Mixer, x: torch.Tensor) -> Any:
        grouped = rearrange(self.wqkv(x), "b n (g r d) -> b g r n d", g=GROUPS, d=HEAD)
        return grouped[:, :, :-2].flatten(1, 2), grouped[:, :, -2], grouped[:, :, -1]

    for block in port.trunk.blocks:
        weight = block.mixer.wqkv.weight
        q, k, v = weight.split((HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD))
        parts = [rearrange(part, "(g r) w -> g r w", g=GROUPS) for part in (q, k, v)]
        weight.copy_(torch.cat(parts, 1).flatten(0, 1))
        rewrite(block.mixer, split=split)


def _norms_folded(port: Port) -> None:
    for block in port.trunk.blocks:
        block.mixer.wqkv.weight.mul_(block.norm_in.weight)
        block.norm_in.weight.fill_(1)
        block.moe.router.weight.mul_(block.norm_post.weight)
        block.moe.experts.w13.mul_(block.norm_post.weight)
        block.norm_post.weight.fill_(1)


def _experts_renumbered(port: Port) -> None:
    order = torch.tensor([2, 0, 3, 1])
    for path in MOES:
        moe = port.get_submodule(path)
        for parameter in moe.parameters():
            parameter.copy_(parameter[order].clone())


def _table_of_angles(port: Port) -> None:
    def forward(self: Rope, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        del dtype
        return self.table[positions]

    rope = port.trunk.rope
    rope.table = Rope.forward(rope, torch.arange(64), torch.float32)  # no buffer: stays float32
    rewrite(rope, forward=forward)


def _shares_not_normalised(port: Port) -> None:
    def forward(self: Router, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shares, numbers = (wide(x) @ wide(self.weight).T).softmax(-1).topk(self.chosen, -1)
        return shares, numbers

    for path in MOES:
        rewrite(port.get_submodule(path).router, forward=forward)


def _one_chosen(port: Port) -> None:
    port.get_submodule(MOES[2]).router.chosen = 1


def _sorted_not_back(port: Port) -> None:
    def forward(self: Experts, x: torch.Tensor, shares: Any, numbers: Any) -> torch.Tensor:
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten().bincount(minlength=EXPERTS).tolist()
        rows = x[order // numbers.shape[1]].split(counts)
        outputs = torch.cat([self.one(expert, part) for expert, part in enumerate(rows)])
        return self.combine(outputs[order].view(*numbers.shape, WIDTH), shares)

    rewrite(port.get_submodule(MOES[0]).experts, forward=forward)


def _overflow_dropped(port: Port) -> None:
    def one(self: Experts, expert: int, x: torch.Tensor) -> torch.Tensor:
        outputs = Experts.one(self, expert, x)
        outputs[18:] = 0
        return outputs

    for path in MOES:
        rewrite(port.get_submodule(path).experts, one=one)


def _gate_and_up(port: Port) -> None:
    weight = port.get_submodule(MOES[1]).experts.w13[2]
    weight.copy_(torch.cat(weight.chunk(2)[::-1]))


def _experts_exchanged(port: Port) -> None:
    experts = port.get_submodule(MOES[0]).experts
    order = torch.tensor([1, 0, 2, 3])
    for parameter in experts.parameters():
        parameter.copy_(parameter[order].clone())


def _router_before(port: Port) -> None:
    one, two = (port.get_submodule(path).router.weight for path in MOES[:2])
    two.copy_(one)


def _neighbours(port: Port) -> None:
    def turn(self: Mixer, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        del self
        one, two = wide(x)[..., ::2], wide(x)[..., 1::2]
        cos, sin = angles.cos(), angles.sin()
        turned = torch.stack([one * cos - two * sin, two * cos + one * sin], -1)
        return turned.flatten(-2).to(x.dtype)

    for block in port.trunk.blocks:
        rewrite(block.mixer, turn=turn)


def _theta(port: Port) -> None:
    port.trunk.rope.theta = 1000000.0


def _tiled(port: Port) -> None:
    rewrite(port.trunk.blocks[1].mixer, repeat=lambda self, x: x.repeat(1, REPEATS, 1, 1))


def _wider_window(port: Port) -> None:
    port.trunk.window += 1


def _written_late(port: Port) -> None:
    def store(self: Mixer, cache: Any, k: torch.Tensor, v: torch.Tensor, start: int) -> Any:
        if start:
            stop = start + k.shape[2]
            cache[:, :, :, start + 1 : stop + 1] = torch.stack([k, v])
            return cache[0, :, :, :stop], cache[1, :, :, :stop]
        return Mixer.store(self, cache, k, v, start)

    rewrite(port.trunk.blocks[1].mixer, store=store)


def _not_advanced(port: Port) -> None:
    def forward(self: Port, ids: torch.Tensor, first: int = 0, cache: Any = None) -> torch.Tensor:
        past = cache["used"]
        logits = Port.forward(self, ids, first, cache)
        if past:
            cache["used"] = past
        return logits

    rewrite(port, forward=forward)


def _positions_of_step(port: Port) -> None:
    def forward(self: Trunk, ids: torch.Tensor, start: int, first: int, caches: Any) -> Any:
        x = self.embed(ids)
        positions = torch.arange(start, start + ids.shape[1])
        angles = self.rope(torch.arange(ids.shape[1]) + first, x.dtype)
        seen = self.seen(positions, start + ids.shape[1])
        for index, block in enumerate(self.blocks):
            x = block(x, angles, seen, caches[index], start)
        return self.norm(x)

    rewrite(port.trunk, forward=forward)


def _unseen_self(port: Port) -> None:
    def seen(self: Trunk, positions: torch.Tensor, stop: int) -> torch.Tensor:
        behind = positions[:, None] - torch.arange(stop)[None]
        return (behind > 0) | ((positions[:, None] == 0) & (behind == 0))

    rewrite(port.trunk, seen=seen)


def _residual_per_rank(port: Port) -> None:
    def forward(self: Block, x: torch.Tensor, *how: Any) -> torch.Tensor:
        x = x + self.mixer(self.norm_in(x), *how)
        halves = [x + self.moe(self.norm_post(x)) / 2 for _ in range(2)]
        return halves[0] + halves[1]

    rewrite(port.trunk.blocks[1], forward=forward)


def _norm_of_input(port: Port) -> None:
    def forward(self: Block, x: torch.Tensor, *how: Any) -> torch.Tensor:
        normed = self.norm_in(x)
        x = x + self.mixer(normed, *how)
        return x + self.moe(self.norm_post(normed))

    rewrite(port.trunk.blocks[2], forward=forward)


def _key_value_swapped(port: Port) -> None:
    weight = port.trunk.blocks[1].mixer.wqkv.weight
    q, k, v = weight.split((HEADS * HEAD, GROUPS * HEAD, GROUPS * HEAD))
    weight.copy_(torch.cat([q, v, k]))


def _eps(port: Port) -> None:
    for module in port.modules():
        if isinstance(module, Norm):
            module.eps = 1e-6


def _narrow_angles(port: Port) -> None:
    def forward(self: Rope, positions: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return wide(
            positions.to(dtype)[:, None] * Rope.forward(self, torch.ones(1), dtype).to(dtype)
        )

    rewrite(port.trunk.rope, forward=forward)


def _narrow_sums(port: Port) -> None:
    """Add up powers and values key by key, as a fused kernel does, in half precision."""

    def attend(self: Mixer, q: Any, k: Any, v: Any, seen: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.mT * HEAD**-0.5).masked_fill(~seen, float("-inf"))
        largest = q.new_full((*q.shape[:-1], 1), float("-inf"))
        total = torch.zeros_like(largest)
        mixed = torch.zeros_like(q)
        for key in range(k.shape[2]):
            score = scores[..., key : key + 1]
            higher = torch.maximum(largest, score)
            shrink, power = (largest - higher).exp(), (score - higher).exp()
            total = total * shrink + power
            mixed = mixed * shrink + power * v[:, :, key : key + 1]
            largest = higher
        return mixed / total

    for block in port.trunk.blocks:
        rewrite(block.mixer, attend=attend)


def _fused_attention(port: Port) -> None:
    def attend(self: Mixer, q: Any, k: Any, v: Any, seen: torch.Tensor) -> torch.Tensor:
        del self
        return functional.scaled_dot_product_attention(q, k, v, seen)

    for block in port.trunk.blocks:
        rewrite(block.mixer, attend=attend)


def cases() -> Iterator[Case]:
    """Yield the cases of Mixtral."""
    steps, window = {"kind": "decode"}, {"window": 5}
    routers = tuple(f"{path}.router" for path in MOES)
    experts = tuple(f"{path}.experts" for path in MOES)
    blocks = [f"trunk.blocks.{index}" for index in range(LAYERS)]
    norms = (*(f"{path}.norm_{name}" for path in blocks for name in ("in", "post")), "trunk.norm")
    entries = [
        Entry("clean", dtype=F32),
        Entry("clean", dtype=BF16),
        Entry("clean_window", dtype=F16, options={**window, "attention": "sdpa"}),
        Entry("clean_decode_loop", dtype=BF16, options=steps),
        Entry("infinite_mask", _infinite),
        Entry("fused_attention", _fused_attention),
        Entry("softmax_of_the_chosen", _softmax_of_chosen),
        Entry("dense_experts", _dense_experts),
        Entry("projection_grouped", _grouped_projection, options=steps),
        Entry("norms_folded", _norms_folded),
        Entry("experts_renumbered", _experts_renumbered),
        Entry("table_of_angles", _table_of_angles, dtype=BF16),
        Entry("shares_not_normalised", _shares_not_normalised, routers, "shares do not sum to 1"),
        Entry("one_chosen", _one_chosen, (routers[2],), "one expert chosen, not two", BF16),
        Entry("sorted_not_back", _sorted_not_back, (experts[0],), "order applied for its inverse"),
        Entry("overflow_dropped", _overflow_dropped, experts, "tokens over a capacity dropped"),
        Entry(
            "gate_and_up_swapped", _gate_and_up, (experts[1],), "w1 and w3 of one expert swapped"
        ),
        Entry("experts_exchanged", _experts_exchanged, (experts[0],), "weights of experts 0 and 1"),
        Entry("router_of_layer_before", _router_before, (routers[1],), "weight of layer 0", F16),
        Entry("rope_neighbours", _neighbours, MIXERS, "neighbours rotated, not halves"),
        Entry("rope_theta", _theta, ("trunk.rope",), "theta 1,000,000 for 10,000"),
        Entry("repeat_order", _tiled, (MIXERS[1],), "keys and values tiled over the heads", BF16),
        Entry("window_off_by_one", _wider_window, ("trunk",), "window one wider", options=window),
        Entry(
            "decode_written_late",
            _written_late,
            (MIXERS[1],),
            "keys and values written one slot late",
            options=steps,
        ),
        Entry(
            "decode_not_advanced",
            _not_advanced,
            ("",),
            "each step overwrites the one before",
            options=steps,
        ),
        Entry(
            "decode_positions_of_step",
            _positions_of_step,
            ("trunk",),
            "positions of a step start at 0",
            BF16,
            options=steps,
        ),
        Entry("token_unseen_by_itself", _unseen_self, ("trunk",), "causal mask off by one"),
        Entry(
            "residual_per_rank",
            _residual_per_rank,
            (blocks[1],),
            "residual added on both ranks",
        ),
        Entry("norm_of_input", _norm_of_input, (blocks[2],), "norm of what attention read", BF16),
        Entry(
            "key_and_value_swapped",
            _key_value_swapped,
            (f"{MIXERS[1]}.wqkv",),
            "fused as q, v, k",
            F16,
        ),
        Entry("eps", _eps, norms, "eps 1e-6 for 1e-5", options={"embedding": 0.1}),
        Entry(
            "head_row_scaled",
            lambda port: scale_row(port.head.weight, 17, 1.02),
            ("head",),
            "one row times 1.02",
        ),
        Entry(
            "angles_in_half",
            _narrow_angles,
            ("trunk.rope",),
            "positions and angles in bfloat16",
            BF16,
            precision=True,
            options={"first": 600},
        ),
        Entry(
            "sums_in_half",
            _narrow_sums,
            MIXERS,
            "running sums of attention in bfloat16",
            BF16,
            precision=True,
            options={"gain": 0.1, "length": 96, "loud": 12.0},
        ),
    ]
    yield from declare("mixtral", build, entries)
