"""Faults where the two sides are written by different people."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from localisation import drives, models, ports
from localisation.planting import change, fault, on_output

llama, gpt2, moe, convnet, vit = (
    models.llama,
    models.gpt2,
    models.moe,
    models.convnet,
    models.vit,
)
REGIMES = ("same", "bf16")


def ported(build, port, path, kind, **more):
    """Declare a fault of a port."""
    more = {"regimes": REGIMES, "group": "different code", **more}
    return fault(build, path, kind, port=port, **more)


# --- Fused Llama ----------------------------------------------------------------------------------


@ported(llama, ports.FusedLlama, "blocks.1.attn.wqkv", "weights")
def rows_of_the_values_swapped(module, root):
    module.weight.data[[100, 120]] = module.weight.data[[120, 100]]


@ported(llama, ports.FusedLlama, "blocks.0.attn.wqkv", "tails")
def fused_tail_dropped(module, root):
    on_output(module, lambda out: torch.cat([out[..., :-4], torch.zeros_like(out[..., -4:])], -1))


@ported(llama, ports.FusedLlama, "blocks.1.attn", "masks")
def sees_the_next(module, root):
    change(module, allowed=lambda self, allowed, where, keys: allowed(where + 1, keys))


@ported(llama, ports.FusedLlama, "blocks.2.attn", "head mapping")
def tiled_groups(module, root):
    change(module, shared=lambda self, shared, x: x.repeat(1, self.n_head // self.n_kv, 1, 1))


@ported(llama, ports.FusedLlama, "blocks.1.attn", "rope")
def turned_the_other_way(module, root):
    change(module, turn=lambda self, turn, x, freqs: turn(x, -freqs if x.shape[2] == 4 else freqs))


@ported(llama, ports.FusedLlama, "", "rope")
def frequencies_of_another_base(module, root):
    module.theta = 30000.0


@ported(llama, ports.FusedLlama, "blocks.1.ffn", "activations")
def fused_halves_exchanged(module, root):
    def joined(self, joined, both):
        return joined(both.roll(both.shape[-1] // 2, -1))

    change(module, joined=joined)


@ported(llama, ports.FusedLlama, "blocks.0.ffn", "activations")
def fused_gelu(module, root):
    def joined(self, joined, both):
        gate, up = both.chunk(2, -1)
        return F.gelu(gate) * up

    change(module, joined=joined)


@ported(llama, ports.FusedLlama, "blocks.2.ffn.w2", "weights")
def fused_down_one_sign(module, root):
    module.weight.data[:, 3] *= -1


@ported(llama, ports.FusedLlama, "blocks.1.attn_norm", "eps")
def fused_eps(module, root):
    module.epsilon = 0.02


@ported(llama, ports.FusedLlama, "blocks.1", "residuals")
def fused_residual_scaled(module, root):
    change(module, joined=lambda self, joined, x, out: x + 1.05 * out)


@ported(llama, ports.FusedLlama, "final_norm", "norm layers")
def fused_last_norm_unweighted(module, root):
    module.scale.data.fill_(1)


# --- Inlined Llama --------------------------------------------------------------------------------


@ported(llama, ports.InlineLlama, "h.1", "rope")
def inline_rotation_wrong(module, root):
    change(module, turned=lambda self, turned, x, cos, sin: turned(x, cos, sin.roll(1, 0)))


@ported(llama, ports.InlineLlama, "h.2.key", "weights")
def inline_key_transposed_rows(module, root):
    module.weight.data = module.weight.data.flip(0)


@ported(llama, ports.InlineLlama, "h.0", "norm layers")
def inline_norm_takes_the_mean_off(module, root):
    change(module, normed=lambda self, normed, x, w: normed(x - x.mean(-1, keepdim=True), w))


@ported(llama, ports.InlineLlama, "h.1.fc_gate", "tails")
def inline_gate_tail(module, root):
    change(module, forward=lambda self, forward, x: F.linear(x[..., :-6], self.weight[:, :-6]))


@ported(llama, ports.InlineLlama, "", "masks")
def inline_mask_one_late(module, root):
    def mask(self, mask, length, x):
        return torch.full((length, length), -1e9, dtype=x.dtype).triu(2)

    change(module, mask=mask)


@ported(llama, ports.InlineLlama, "h.2", "activations")
def inline_glu_forgets_the_gate(module, root):
    change(module, glu=lambda self, glu, up, gate: up * torch.sigmoid(gate))


@ported(llama, ports.InlineLlama, "wte", "weights")
def inline_two_tokens_swapped(module, root):
    first, second = drives.tokens()[0, 4:6].tolist()
    module.weight.data[[first, second]] = module.weight.data[[second, first]]


# --- Flat and single-module Llamas ----------------------------------------------------------------


@ported(llama, ports.FlatLlama, "stack.1", "attention scale")
def flat_scale(module, root):
    change(module, scale=lambda self, scale: 0.9 * scale())


@ported(llama, ports.FlatLlama, "stack.0", "activations")
def flat_gelu(module, root):
    change(module, act=lambda self, act, x: F.gelu(x))


@ported(llama, ports.FlatLlama, "stack.2", "weights")
def flat_rows_of_o_swapped(module, root):
    module.w_o.data[[1, 9]] = module.w_o.data[[9, 1]]


@ported(llama, ports.FlatLlama, "", "norm layers")
def flat_last_norm_skipped(module, root):
    change(module, last_norm=lambda self, last_norm, x: x * self.gain)


@ported(llama, ports.OneLlama, "", "activations")
def one_layer_with_gelu(module, root):
    change(module, act=lambda self, act, layer, x: F.gelu(x) if layer == 1 else act(layer, x))


# --- Nested Llama ---------------------------------------------------------------------------------

BLOCKS = "transformer.blocks"


@ported(llama, ports.NestedLlama, f"{BLOCKS}.1.0.fn.core", "masks")
def nested_mask_one_late(module, root):
    change(module, hidden=lambda self, hidden, q, k: hidden(q, k).roll(1, 1).triu(1))


@ported(llama, ports.NestedLlama, f"{BLOCKS}.2.0.fn.turn", "rope")
def nested_turn_by_halves(module, root):
    def forward(self, forward, x, cos, sin):
        left, right = x.chunk(2, -1)
        return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)

    change(module, forward=forward)


@ported(llama, ports.NestedLlama, f"{BLOCKS}.0.0.fn.projections.q", "head mapping")
def nested_two_heads_exchanged(module, root):
    module.weight.data = torch.cat(
        [module.weight.data[16:32], module.weight.data[:16], module.weight.data[32:]]
    )


@ported(llama, ports.NestedLlama, f"{BLOCKS}.1.1", "residuals")
def nested_residual_missing(module, root):
    change(module, forward=lambda self, forward, x: self.fn(self.pre(x)))


@ported(llama, ports.NestedLlama, f"{BLOCKS}.2.1.fn.gate.1", "activations")
def nested_relu(module, root):
    change(module, forward=lambda self, forward, x: F.relu(x))


@ported(llama, ports.NestedLlama, f"{BLOCKS}.0.1.fn", "activations")
def nested_gate_added(module, root):
    change(module, forward=lambda self, forward, x: self.down(self.value(x) + self.gate(x)))


@ported(llama, ports.NestedLlama, "to_logits.1", "stale rows")
def nested_last_token_stale(module, root):
    on_output(module, lambda out: torch.cat([out[:, :-1], out[:, -2:-1]], 1))


# --- GPT-2 ----------------------------------------------------------------------------------------


@ported(gpt2, ports.SplitGPT, "body.1.k_lin", "weights")
def split_bias_of_keys_for_queries(module, root):
    module.weight.data[7] *= 1.3


@ported(gpt2, ports.SplitGPT, "body.0", "attention scale")
def split_scale(module, root):
    def mixed(self, mixed, q, k, v, bias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.3)

    change(module, mixed=mixed)


@ported(gpt2, ports.SplitGPT, "", "masks", run=drives.padded)
def split_padding_ignored(module, root):
    change(module, added=lambda self, added, length, keep, x: added(length, None, x))


@ported(gpt2, ports.SplitGPT, "body.2.ff.1", "activations")
def split_tanh_gelu(module, root):
    module.approximate = "tanh"


@ported(gpt2, ports.ConvGPT, "sublayers.2.fn", "head mapping")
def conv_heads_rolled(module, root):
    change(module, weights=lambda self, weights, q, k: weights(q, k).roll(1, 1))


@ported(gpt2, ports.ConvGPT, "sublayers.3.fn.fc", "weights")
def conv_bias_of_the_other(module, root):
    module.bias.data.zero_()


@ported(gpt2, ports.ConvGPT, "sublayers.5.fn", "activations")
def conv_gelu_without_the_half(module, root):
    change(module, act=lambda self, act, x: x * torch.sigmoid(1.702 * x))


# --- Mixture, convolutions, vision ----------------------------------------------------------------


@ported(moe, ports.stacked_moe, "blocks.1.ffn", "routing")
def stacked_shares_not_renormalised(module, root):
    def shares(self, shares, logits):
        top, chosen = logits.float().softmax(-1).topk(self.top, -1)
        return torch.zeros_like(logits, dtype=top.dtype).scatter(-1, chosen, top)

    change(module, shares=shares)


@ported(moe, ports.stacked_moe, "blocks.2.ffn", "weights")
def stacked_one_expert_wrong(module, root):
    module.up_proj.data[1, 5] *= -1


@ported(moe, ports.stacked_moe, "blocks.0.ffn.router", "weights")
def stacked_router_row_wrong(module, root):
    module.weight.data[2] *= 1.2


@ported(convnet, ports.LastNet, "entry", "norm layers", run=drives.picture)
def folded_without_the_mean(module, root):
    module.bias.data *= 0.5


@ported(convnet, ports.LastNet, "early.1", "norm layers", run=drives.picture)
def last_norm_over_each_place(module, root):
    def normed(self, normed, x):
        parts = x.unflatten(-1, (self.groups, -1)).float()
        centred = parts - parts.mean(4, keepdim=True)
        spread = centred.square().mean(4, keepdim=True) + self.eps
        return (centred * spread.rsqrt()).flatten(-2).to(x.dtype) * self.gain + self.shift

    change(module, normed=normed)


@ported(convnet, ports.LastNet, "late.0.expand", "weights", run=drives.picture)
def last_expand_row(module, root):
    module.weight.data[3] *= -1


@ported(convnet, ports.LastNet, "", "conv layers", run=drives.picture)
def last_pool_counts_padding(module, root):
    change(module, smoothed=lambda self, smoothed, x: F.avg_pool2d(x, 3, 1, 1))


@ported(vit, ports.PatchViT, "trunk.0.to_kv", "weights", run=drives.picture)
def patch_kv_exchanged(module, root):
    module.weight.data = module.weight.data.roll(48, 0)


@ported(vit, ports.PatchViT, "trunk.1", "activations", run=drives.picture)
def patch_silu(module, root):
    change(module, act=lambda self, act, x: F.silu(x))


@ported(vit, ports.PatchViT, "", "conv layers", run=drives.picture)
def patches_in_the_wrong_order(module, root):
    def patches(self, patches, image):
        return patches(image.transpose(2, 3))

    change(module, patches=patches)


# --- The other way round: the reference is the port -----------------------------------------------


def against(build, port, path, kind, **more):
    """Declare a fault of the plain model, held against a port of it."""
    return ported(build, None, path, kind, against=port, **more)


@against(llama, ports.FusedLlama, "layers.1.self_attn.k_proj", "weights")
def one_key_row(module, root):
    module.weight.data[3] *= 2


@against(llama, ports.FusedLlama, "layers.0.mlp.act_fn", "activations")
def act_is_gelu(module, root):
    change(module, forward=lambda self, forward, x: F.gelu(x))


@against(llama, ports.FlatLlama, "layers.2.self_attn", "masks")
def mask_off_by_one(module, root):
    change(module, visible=lambda self, visible, at, keys: visible(at + 1, keys))


@against(llama, ports.InlineLlama, "layers.1.input_layernorm", "norm layers")
def weight_is_missing(module, root):
    module.weight.data.fill_(1)


@against(gpt2, ports.SplitGPT, "h.1.attn.c_attn", "weights")
def value_row(module, root):
    module.weight.data[150] *= -1


@against(gpt2, ports.ConvGPT, "h.0.mlp", "residuals")
def output_halved_for_one_token(module, root):
    def forward(self, forward, x):
        out = forward(x).clone()
        out[:, 5] *= 0.5
        return out

    change(module, forward=forward)


@against(convnet, ports.LastNet, "bn", "norm layers", run=drives.picture)
def batch_norm_before_folding(module, root):
    module.running_var.mul_(1.2)


@against(llama, ports.NestedLlama, "layers.1", "residuals")
def block_adds_half(module, root):
    change(module, add=lambda self, add, x, out: x + 0.5 * out)


# --- Ports in a decode loop -----------------------------------------------------------------------


def buffered(**more):
    return models.llama("buffers", **more)


def growing(**more):
    return models.llama("growing", **more)


def decoded(build, port, path, position, kind="KV cache", **more):
    """Declare a fault of a port that acts from a position on."""
    more = {"run": drives.decode, "regimes": REGIMES, **more}
    return fault(build, path, kind, port=port, group="decode", position=position, **more)


@decoded(buffered, ports.FusedLlama, "blocks.1.attn", 3)
def fused_slot_one_early(module, root):
    def keep(self, keep, k, v, where):
        if int(where[-1]) < 7:
            return keep(k, v, where)
        keep(k, v, where - 1)
        end = int(where[-1]) + 1
        return self.kept[0, :, :end], self.kept[1, :, :end]

    change(module, keep=keep)


@decoded(buffered, ports.FusedLlama, "blocks.0.ffn.w13", 1, "tails")
def fused_vector_path(module, root):
    def forward(self, forward, x):
        if x.shape[1] > 1:
            return forward(x)
        return F.linear(x[..., :-4], self.weight[:, :-4])

    change(module, forward=forward)


@decoded(buffered, ports.FusedLlama, "blocks.2.attn", 2)
def fused_values_stale(module, root):
    def keep(self, keep, k, v, where):
        if int(where[-1]) >= 6:
            v = torch.zeros_like(v)
        return keep(k, v, where)

    change(module, keep=keep)


@decoded(growing, ports.NestedLlama, f"{BLOCKS}.1.0.fn", 4)
def nested_keeps_keys_twice(module, root):
    def keep(self, keep, key, value):
        key, value = keep(key, value)
        if key.shape[2] < 9:
            return key, value
        return torch.cat([key[:, :, :-1], key[:, :, -2:-1]], 2), value

    change(module, keep=keep)


@decoded(growing, ports.NestedLlama, f"{BLOCKS}.0.0.fn.core", 1, "masks")
def nested_core_hides_the_last(module, root):
    def hidden(self, hidden, queries, keys):
        out = hidden(queries, keys)
        if queries == 1:
            out[:, -1] = True
        return out

    change(module, hidden=hidden)


@decoded(buffered, None, "layers.1.self_attn", 2, against=ports.FusedLlama)
def slot_late(module, root):
    def remember(self, remember, k, v, positions, cache):
        k, v = remember(k, v, positions, cache)
        if int(positions[-1]) >= 6:
            k = torch.cat([k[:, :, :-1], k[:, :, :1]], 2)
        return k, v

    change(module, remember=remember)


@decoded(growing, None, "layers.2.mlp.down_proj", 1, "tails", against=ports.NestedLlama)
def vector_path(module, root):
    def forward(self, forward, x):
        out = forward(x)
        return out if x.shape[1] > 1 else out.roll(1, 0)

    change(module, forward=forward)
