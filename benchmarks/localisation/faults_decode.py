"""Faults that act from some step of a decode loop on, most of them in what is kept between calls.

The prompt has five tokens and is position 0; token number `at` is position ``at - 4``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from localisation import drives, models
from localisation.planting import change, fault

REGIMES = ("same", "bf16")


def buffered(**more):
    return models.llama("buffers", **more)


def growing(**more):
    return models.llama("growing", **more)


def handed(**more):
    return models.llama("argument", **more)


def decode_fault(build, path, position, kind="KV cache", **more):
    """Declare a fault that acts from a position on."""
    run = drives.decode_with_cache if build is handed else drives.decode
    more = {"run": run, "regimes": REGIMES, **more}
    return fault(build, path, kind, group="decode", position=position, **more)


def _at(positions) -> int:
    return int(positions[-1])


# --- Slots ----------------------------------------------------------------------------------------


@decode_fault(buffered, "layers.1.self_attn", 3)
def slot_one_early_from_step_three(module, root):
    change(module, slots=lambda self, slots, at: at - 1 if _at(at) >= 7 else at)


@decode_fault(buffered, "layers.0.self_attn", 4)
def ring_wraps_too_early(module, root):
    change(module, slots=lambda self, slots, at: at % 8)


@decode_fault(buffered, "layers.2.self_attn", 2)
def values_not_written_from_step_two(module, root):
    def remember(self, remember, k, v, positions, cache):
        old = self.v_cache.clone()
        k, v = remember(k, v, positions, cache)
        if _at(positions) >= 6:
            self.v_cache.copy_(old)
        return k, v

    change(module, remember=remember)


@decode_fault(buffered, "layers.1.self_attn", 2)
def written_after_it_was_read(module, root):
    def remember(self, remember, k, v, positions, cache):
        old = self.k_cache.clone()
        new_k, new_v = remember(k, v, positions, cache)
        if _at(positions) < 6:
            return new_k, new_v
        return old[: k.shape[0], :, : new_k.shape[2]], new_v

    change(module, remember=remember)


@decode_fault(buffered, "layers.1.self_attn", 3)
def an_old_slot_overwritten_at_step_three(module, root):
    def remember(self, remember, k, v, positions, cache):
        k, v = remember(k, v, positions, cache)
        if _at(positions) == 7:
            self.k_cache[:, :, 2] = self.k_cache[:, :, 3]
        return k, v

    change(module, remember=remember)


@decode_fault(buffered, "layers.0.self_attn", 1)
def keys_kept_before_rotation(module, root):
    def rotate(self, rotate, k, cos, sin):
        return k if k.shape[2] == 1 else rotate(k, cos, sin)

    change(module, rotate_k=rotate)


@decode_fault(buffered, "layers.2.self_attn", 0, regimes=("same",))
def kept_in_eight_bits(module, root):
    def remember(self, remember, k, v, positions, cache):
        low = torch.float8_e4m3fn
        return remember(k.to(low).to(k.dtype), v.to(low).to(v.dtype), positions, cache)

    change(module, remember=remember)


@decode_fault(buffered, "layers.1.self_attn", 4)
def batch_rows_mixed_from_step_four(module, root):
    def remember(self, remember, k, v, positions, cache):
        return remember(k, v.flip(0) if _at(positions) >= 8 else v, positions, cache)

    change(module, remember=remember)


# --- Plain attributes, handed-in caches -----------------------------------------------------------


@decode_fault(growing, "layers.1.self_attn", 3)
def oldest_dropped_from_step_three(module, root):
    def remember(self, remember, k, v, positions, cache):
        k, v = remember(k, v, positions, cache)
        if _at(positions) >= 7:
            k = torch.cat([k[:, :, 1:2], k[:, :, 1:]], 2)
        return k, v

    change(module, remember=remember)


@decode_fault(growing, "layers.2.self_attn", 2)
def mask_one_short_when_alone(module, root):
    def visible(self, visible, at, keys):
        return visible(at - 1 if _at(at) >= 6 else at, keys)

    change(module, visible=visible)


@decode_fault(growing, "layers.0.self_attn", 1)
def queries_at_position_zero(module, root):
    def rotate(self, rotate, q, cos, sin):
        return q if q.shape[2] == 1 else rotate(q, cos, sin)

    change(module, rotate_q=rotate)


@decode_fault(handed, "layers.1.self_attn", 2)
def another_layers_cache_from_step_two(module, root):
    def remember(self, remember, k, v, positions, cache):
        k, v = remember(k, v, positions, cache)
        return (k, cache.values[0]) if _at(positions) >= 6 else (k, v)

    change(module, remember=remember)


@decode_fault(handed, "layers.2.self_attn", 3)
def keys_scaled_as_they_are_kept(module, root):
    def remember(self, remember, k, v, positions, cache):
        return remember(k * 1.1 if _at(positions) >= 7 else k, v, positions, cache)

    change(module, remember=remember)


@decode_fault(handed, "layers.0.mlp.down_proj", 1, "tails")
def vector_path_drops_the_tail(module, root):
    def forward(self, forward, x):
        if x.shape[1] > 1:
            return forward(x)
        return F.linear(x[..., :-4], self.weight[:, :-4])

    change(module, forward=forward)


# --- Elsewhere ------------------------------------------------------------------------------------


def from_call(module, number, function):
    """Change what a module returns from its `number`-th call since the last reset on."""

    def forward(self, forward, x, *args, **kwargs):
        out = forward(x, *args, **kwargs)
        self.calls = 0 if x.shape[1] > 1 else getattr(self, "calls", 0) + 1
        return function(out) if self.calls >= number else out

    module.calls = 0
    module.state = ("calls",)
    change(module, forward=forward)


@decode_fault(buffered, "layers.1.mlp.act_fn", 4, "stale rows")
def activation_stale_from_step_four(module, root):
    from_call(module, 4, lambda out: out.roll(1, 0))


@decode_fault(buffered, "norm", 5, "norm layers")
def last_norm_off_from_step_five(module, root):
    from_call(module, 5, lambda out: out * 1.03)


@decode_fault(buffered, "lm_head", 2, "tails")
def logits_of_the_tail_from_step_two(module, root):
    from_call(module, 2, lambda out: torch.cat([out[..., :-3], out[..., :3]], -1))


@decode_fault(buffered, "rotary_emb", 1, "rope")
def rotation_one_late_in_decode(module, root):
    def forward(self, forward, x, positions):
        return forward(x, positions + 1 if len(positions) == 1 else positions)

    change(module, forward=forward)


@decode_fault(buffered, "layers.2", 3, "residuals")
def residual_missing_from_step_three(module, root):
    def forward(self, forward, x, cos, sin, positions, cache=None):
        out = forward(x, cos, sin, positions, cache)
        return out - x if _at(positions) >= 7 else out

    change(module, forward=forward)


@decode_fault(buffered, "layers.1.self_attn.k_proj", 2, "non-finite")
def one_key_infinite_at_step_two(module, root):
    def spoil(out):
        out = out.clone()
        out[0, 0, 3] = float("inf")
        return out

    from_call(module, 2, spoil)


@decode_fault(buffered, "layers.0.mlp.up_proj", 3, "stale rows", run=drives.generate)
def greedy_row_stale_from_step_three(module, root):
    from_call(module, 3, lambda out: torch.cat([out[:1], out[:1]]))


@decode_fault(growing, "layers.1.input_layernorm", 2, "eps", run=drives.generate)
def greedy_norm_off_from_step_two(module, root):
    from_call(module, 2, lambda out: out * 0.97)


@decode_fault(buffered, "layers.2.self_attn.o_proj", 0, "weights")
def weights_wrong_from_the_first_call(module, root):
    module.weight.data[4] *= -1
