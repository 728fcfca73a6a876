"""Faults of decoders: weights, norms, rotation, masks, heads, tails, rows, precision, residuals."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from localisation import drives, models
from localisation.planting import change, fault, on_output

llama, gpt2 = models.llama, models.gpt2


# --- Weights --------------------------------------------------------------------------------------


@fault(llama, "layers.1.mlp.up_proj", "weights")
def one_row_scaled(module, root):
    module.weight.data[5] *= 1.05


@fault(llama, "layers.0.self_attn.v_proj", "weights")
def two_rows_swapped(module, root):
    module.weight.data[[3, 7]] = module.weight.data[[7, 3]]


@fault(llama, "layers.2.self_attn.o_proj", "weights")
def one_sign_flipped(module, root):
    module.weight.data[3, module.weight[3].abs().argmax()] *= -1


@fault(llama, "layers.1.mlp.down_proj", "weights")
def another_layers_weights(module, root):
    module.weight.data.copy_(root.layers[0].mlp.down_proj.weight)


@fault(llama, "layers.1.self_attn.q_proj", "weights")
def transposed(module, root):
    module.weight.data = module.weight.data.t().contiguous()


@fault(llama, "embed_tokens", "weights")
def two_tokens_swapped(module, root):
    first, second = drives.tokens()[0, :2].tolist()
    module.weight.data[[first, second]] = module.weight.data[[second, first]]


@fault(llama, "lm_head", "tails")
def last_rows_of_the_vocabulary_unset(module, root):
    module.weight.data[-5:] = 0


@fault(gpt2, "h.1.mlp.c_fc", "weights")
def bias_missing(module, root):
    module.bias.data.zero_()


@fault(gpt2, "h.0.attn.c_attn", "weights")
def keys_and_values_exchanged(module, root):
    dim = module.weight.shape[1]
    order = torch.cat(
        [torch.arange(dim), torch.arange(2 * dim, 3 * dim), torch.arange(dim, 2 * dim)]
    )
    module.weight.data, module.bias.data = module.weight.data[order], module.bias.data[order]


# --- Norms ----------------------------------------------------------------------------------------


@fault(llama, "layers.1.input_layernorm", "eps")
def eps_a_hundred_times(module, root):
    module.eps = 1e-3


@fault(llama, "norm", "eps")
def eps_outside_the_root(module, root):
    def forward(self, forward, x):
        wide = x.to(torch.float32)
        wide = wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + self.eps * 100)
        return self.weight * wide.to(x.dtype)

    change(module, forward=forward)


@fault(llama, "layers.2.post_attention_layernorm", "norm layers")
def norm_without_weight(module, root):
    module.weight.data.fill_(1)


@fault(llama, "layers.0.post_attention_layernorm", "norm layers")
def norm_takes_the_mean_off(module, root):
    change(module, forward=lambda self, forward, x: forward(x - x.mean(-1, keepdim=True)))


@fault(gpt2, "h.2.ln_1", "norm layers")
def unbiased_variance(module, root):
    def forward(self, forward, x):
        scaled = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.eps).sqrt()
        return scaled * self.weight + self.bias

    change(module, forward=forward)


@fault(gpt2, "ln_f", "eps")
def layer_norm_eps(module, root):
    module.eps = 1e-2


@fault(llama, "layers.1.post_attention_layernorm", "storage precision")
def norm_in_half_precision(module, root):
    def forward(self, forward, x):
        low = x.to(torch.float16)
        low = low * torch.rsqrt(low.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * low.to(x.dtype)

    change(module, forward=forward)


# --- Rotation -------------------------------------------------------------------------------------


@fault(llama, "rotary_emb", "rope")
def rope_base(module, root):
    module.base = 50000.0


@fault(llama, "layers.1.self_attn", "rope")
def queries_one_position_late(module, root):
    def rotate(self, rotate, q, cos, sin):
        return rotate(q, cos.roll(-1, 0), sin.roll(-1, 0))

    change(module, rotate_q=rotate)


@fault(llama, "layers.0.self_attn", "rope")
def halves_swapped(module, root):
    def rotate(self, rotate, k, cos, sin):
        left, right = k.chunk(2, -1)
        return k * cos + torch.cat([right, -left], -1) * sin

    change(module, rotate_k=rotate)


@fault(llama, "layers.2.self_attn", "rope")
def pairs_interleaved(module, root):
    def rotate(self, rotate, q, cos, sin):
        turned = torch.stack([-q[..., 1::2], q[..., ::2]], -1).flatten(-2)
        return q * cos + turned * sin

    change(module, rotate_q=rotate, rotate_k=rotate)


@fault(llama, "layers.1.self_attn", "rope")
def keys_not_rotated(module, root):
    change(module, rotate_k=lambda self, rotate, k, cos, sin: k)


# --- Masks and heads ------------------------------------------------------------------------------


@fault(llama, "layers.1.self_attn", "masks")
def sees_the_next_token(module, root):
    change(module, visible=lambda self, visible, at, keys: visible(at + 1, keys))


@fault(llama, "layers.2.self_attn", "masks")
def does_not_see_itself(module, root):
    change(module, visible=lambda self, visible, at, keys: visible((at - 1).clamp(0), keys))


@fault(llama, "layers.0.self_attn", "masks")
def mask_missing(module, root):
    change(module, visible=lambda self, visible, at, keys: torch.ones_like(visible(at, keys)))


@fault(llama, "layers.2.self_attn", "masks")
def window_of_eight(module, root):
    def visible(self, visible, at, keys):
        return visible(at, keys) & (torch.arange(keys)[None] > at[:, None] - 8)

    change(module, visible=visible)


@fault(gpt2, "h.1.attn", "masks", run=drives.padded)
def padding_ignored(module, root):
    change(module, seen=lambda self, seen, length, padding: seen(length, None))


@fault(gpt2, "h.0.attn", "masks", run=drives.padded)
def padding_one_short(module, root):
    def seen(self, seen, length, padding):
        return seen(length, padding | padding.roll(1, 1))

    change(module, seen=seen)


@fault(gpt2, "h.2.attn", "masks")
def mask_buffer_one_late(module, root):
    module.bias = torch.ones_like(module.bias).tril(1)


@fault(llama, "layers.1.self_attn", "head mapping")
def groups_tiled_not_repeated(module, root):
    change(module, spread=lambda self, spread, x: x.repeat(1, self.heads // self.kv_heads, 1, 1))


@fault(llama, "layers.0.self_attn", "head mapping")
def two_heads_exchanged(module, root):
    change(module, merge=lambda self, merge, x: merge(x[:, [1, 0, *range(2, self.heads)]]))


@fault(gpt2, "h.1.attn", "head mapping")
def heads_not_transposed_back(module, root):
    change(module, merge=lambda self, merge, x: x.reshape(x.shape[0], x.shape[2], -1))


@fault(llama, "layers.2.self_attn", "attention scale")
def scale_one_percent_off(module, root):
    module.scale *= 1.01


@fault(gpt2, "h.1.attn", "attention scale")
def scale_of_the_model_width(module, root):
    module.scale = 64**-0.5


@fault(llama, "layers.1.self_attn", "accumulation precision")
def softmax_in_bf16(module, root):
    change(module, weights=lambda self, weights, x: torch.softmax(x.to(torch.bfloat16), -1).float())


@fault(llama, "layers.1.self_attn", "attention scale")
def softmax_over_the_wrong_axis_of_one_head(module, root):
    def weights(self, weights, scores):
        out = weights(scores).clone()
        out[:, 1] = out[:, 1] / out[:, 1].sum(-2, keepdim=True)
        return out

    change(module, weights=weights)


# --- Tails, stale and swapped rows ----------------------------------------------------------------


@fault(llama, "layers.1.mlp.down_proj", "tails")
def fan_in_tail_dropped(module, root):
    change(
        module,
        forward=lambda self, forward, x: F.linear(x[..., :-8], self.weight[:, :-8], self.bias),
    )


@fault(llama, "layers.2.mlp.gate_proj", "tails")
def last_columns_not_written(module, root):
    on_output(module, lambda out: torch.cat([out[..., :-4], torch.zeros_like(out[..., -4:])], -1))


@fault(gpt2, "h.1.mlp.c_proj", "tails")
def last_row_not_written(module, root):
    on_output(module, lambda out: torch.cat([out[:, :-1], torch.zeros_like(out[:, -1:])], 1))


@fault(llama, "layers.0.self_attn.o_proj", "stale rows")
def one_row_stale(module, root):
    def stale(out):
        out = out.clone()
        out[:, 9] = out[:, 8]
        return out

    on_output(module, stale)


@fault(llama, "layers.1.mlp.act_fn", "swapped rows")
def two_rows_of_the_output_swapped(module, root):
    def swapped(out):
        out = out.clone()
        out[:, [4, 12]] = out[:, [12, 4]]
        return out

    on_output(module, swapped)


@fault(gpt2, "h.0.ln_2", "swapped rows")
def batch_rows_swapped(module, root):
    on_output(module, lambda out: out.flip(0))


# --- Precision ------------------------------------------------------------------------------------


@fault(llama, "layers.1.mlp.down_proj", "accumulation precision")
def accumulated_in_bf16(module, root):
    def forward(self, forward, x):
        out = 0
        for a, b in zip(x.split(16, -1), self.weight.split(16, -1), strict=True):
            out = (out + F.linear(a, b)).to(torch.bfloat16)
        return out.to(x.dtype)

    change(module, forward=forward)


@fault(llama, "layers.2.mlp.up_proj", "accumulation precision")
def inputs_rounded_to_ten_bits(module, root):
    def rounded(x):
        wide = x.float().contiguous()
        return ((wide.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)

    change(module, forward=lambda self, forward, x: F.linear(rounded(x), rounded(self.weight)))


@fault(llama, "layers.0.mlp.gate_proj", "storage precision")
def weights_stored_in_eight_bits(module, root):
    low = module.weight.data.to(torch.float8_e4m3fn)
    module.weight.data = low.to(module.weight.dtype)


@fault(llama, "layers.1.self_attn.k_proj", "storage precision")
def output_stored_in_bf16(module, root):
    on_output(module, lambda out: out.to(torch.bfloat16).to(out.dtype))


@fault(gpt2, "lm_head", "storage precision")
def weights_stored_in_half(module, root):
    module.weight.data = module.weight.data.half().to(module.weight.dtype)


# --- Activations ----------------------------------------------------------------------------------


@fault(llama, "layers.2.mlp.act_fn", "activations")
def gelu_for_silu(module, root):
    change(module, forward=lambda self, forward, x: F.gelu(x))


@fault(gpt2, "h.1.mlp.act", "activations")
def tanh_gelu_for_erf(module, root):
    module.approximate = "tanh"


@fault(gpt2, "h.2.mlp.act", "activations")
def quick_gelu(module, root):
    change(module, forward=lambda self, forward, x: x * torch.sigmoid(1.702 * x))


@fault(llama, "layers.0.mlp", "activations")
def gate_and_up_exchanged(module, root):
    change(module, gated=lambda self, gated, gate, up: gated(up, gate))


@fault(llama, "layers.1.mlp", "activations")
def activation_missing(module, root):
    change(module, gated=lambda self, gated, gate, up: gate * up)


# --- Parents that combine wrongly -----------------------------------------------------------------


@fault(llama, "layers.1", "residuals")
def residual_missing(module, root):
    change(module, add=lambda self, add, x, out: out)


@fault(llama, "layers.2", "residuals")
def residual_scaled(module, root):
    change(module, add_last=lambda self, add, x, out: x + 0.98 * out)


@fault(llama, "layers.0", "residuals")
def residual_from_the_normed(module, root):
    change(module, add=lambda self, add, x, out: self.input_layernorm(x) + out)


@fault(gpt2, "h.1", "residuals")
def norm_after_the_residual(module, root):
    def forward(self, forward, x, padding=None):
        x = self.ln_1(x + self.attn(x, padding))
        return self.ln_2(x + self.mlp(x))

    change(module, forward=forward)


@fault(gpt2, "h.2", "residuals")
def residual_added_twice(module, root):
    change(module, add_last=lambda self, add, x, out: add(add(x, x), out))


@fault(gpt2, "", "residuals")
def positions_from_one(module, root):
    change(module, places=lambda self, places, tokens: places(tokens) + 1)


@fault(llama, "", "residuals")
def a_layer_run_twice(module, root):
    def forward(self, forward, tokens, positions=None, cache=None):
        positions = torch.arange(tokens.shape[1])
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(x, positions)
        for layer in (self.layers[0], self.layers[1], self.layers[1]):
            x = layer(x, cos, sin, positions, cache)
        return self.lm_head(self.norm(x))

    change(module, forward=forward)


# --- Not finite, not evaluated --------------------------------------------------------------------


@fault(llama, "layers.1.mlp.down_proj", "non-finite", regimes=("same", "reordered", "bf16"))
def overflow_in_half(module, root):
    on_output(module, lambda out: (out * 6e4).half().to(out.dtype) / 6e4)


@fault(llama, "layers.1.self_attn", "non-finite", regimes=("same", "reordered", "bf16"))
def first_row_all_masked(module, root):
    change(module, visible=lambda self, visible, at, keys: visible(at - 1, keys))


@fault(gpt2, "h.1.mlp.act", "non-finite", regimes=("same", "bf16"))
def one_value_becomes_nan(module, root):
    def broken(out):
        out = out.clone()
        out[1, 3, 7] = float("nan")
        return out

    on_output(module, broken)


@fault(gpt2, "h.1.mlp.dropout", "left-on dropout", run=drives.seeded, regimes=("same", "bf16"))
def dropout_left_on(module, root):
    module.train()


@fault(gpt2, "h.0.attn.attn_dropout", "left-on dropout", regimes=("same", "reordered"))
def dropout_left_on_and_unseeded(module, root):
    module.train()
