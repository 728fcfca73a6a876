"""Faults that only backward has: forward is right, a gradient is not."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd import Function

from localisation import drives, models
from localisation.planting import change, fault

llama, gpt2, convnet = models.llama, models.gpt2, models.convnet


def backward(build, path, kind="backward", **more):
    """Declare a fault of a gradient."""
    more = {"run": drives.train, "regimes": ("same", "bf16"), **more}
    return fault(build, path, kind, group="backward", direction="backward", **more)


class Through(Function):
    """Passes a tensor on, and changes the gradient that comes back."""

    @staticmethod
    def forward(ctx, x, change_of):
        ctx.change_of = change_of
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change_of(grad), None


def through(x, change_of):
    return Through.apply(x, change_of)


class SiluWithoutTerm(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(x)


@backward(llama, "layers.1.mlp.act_fn")
def silu_forgets_a_term(module, root):
    change(module, forward=lambda self, forward, x: SiluWithoutTerm.apply(x))


@backward(llama, "layers.0.input_layernorm")
def norm_factor_detached(module, root):
    def forward(self, forward, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps).detach()
        return self.weight * wide.to(x.dtype)

    change(module, forward=forward)


class LinearWithWrongBias(Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, torch.einsum("bto,bti->oi", grad, x), grad.sum(0)[0]


@backward(gpt2, "h.1.mlp.c_fc")
def bias_summed_over_one_axis(module, root):
    change(
        module,
        forward=lambda self, forward, x: LinearWithWrongBias.apply(x, self.weight, self.bias),
    )


class SoftmaxWithoutSum(Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.softmax(x, -1, dtype=torch.float32)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, grad):
        (out,) = ctx.saved_tensors
        return (grad * out).to(grad.dtype)


@backward(llama, "layers.1.self_attn")
def softmax_forgets_the_sum(module, root):
    change(module, weights=lambda self, weights, x: SoftmaxWithoutSum.apply(x))


@backward(llama, "layers.2")
def residual_detached(module, root):
    change(module, add=lambda self, add, x, out: add(x.detach(), out))


@backward(llama, "layers.1.mlp.down_proj")
def weight_gradient_averaged(module, root):
    def forward(self, forward, x):
        weight = through(self.weight, lambda grad: grad / 15)
        return F.linear(x, weight)

    change(module, forward=forward)


class LastOfEachToken(Function):
    @staticmethod
    def forward(ctx, tokens, weight):
        ctx.save_for_backward(tokens)
        ctx.rows = weight.shape
        return weight[tokens]

    @staticmethod
    def backward(ctx, grad):
        (tokens,) = ctx.saved_tensors
        out = grad.new_zeros(ctx.rows)
        out[tokens.flatten()] = grad.flatten(0, 1)
        return None, out


@backward(llama, "embed_tokens")
def duplicates_not_added_up(module, root):
    change(module, forward=lambda self, forward, tokens: LastOfEachToken.apply(tokens, self.weight))


@backward(llama, "layers.0.self_attn")
def group_not_summed(module, root):
    def spread(self, spread, x):
        out = spread(x)
        parts = [out[:, n : n + 1] for n in range(out.shape[1])]
        parts = [part if n % 2 == 0 else part.detach() for n, part in enumerate(parts)]
        return torch.cat(parts, 1)

    change(module, spread=spread)


class RotationTwice(Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        return models.rotated(x, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return models.rotated(grad, cos, sin), None, None


@backward(llama, "layers.2.self_attn")
def rotation_not_undone(module, root):
    change(module, rotate_q=lambda self, rotate, q, cos, sin: RotationTwice.apply(q, cos, sin))


@backward(gpt2, "h.0.ln_2")
def gain_gets_the_shifts_gradient(module, root):
    def forward(self, forward, x):
        gain = self.weight.detach() + (self.bias - self.bias.detach())
        normed = F.layer_norm(x, self.normalized_shape, None, None, self.eps)
        return normed * gain + self.bias.detach() + (self.weight - self.weight.detach())

    change(module, forward=forward)


class GeluOfTanh(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * torch.sigmoid(1.702 * x)


@backward(gpt2, "h.2.mlp.act")
def gelu_derivative_of_another(module, root):
    change(module, forward=lambda self, forward, x: GeluOfTanh.apply(x))


@backward(llama, "layers.0.mlp")
def gate_detached(module, root):
    change(module, gated=lambda self, gated, gate, up: self.act_fn(gate).detach() * up)


@backward(llama, "layers.1.self_attn.v_proj", regimes=("same",))
def gradient_in_half(module, root):
    def forward(self, forward, x):
        return through(forward(x), lambda grad: grad.to(torch.bfloat16).to(grad.dtype))

    change(module, forward=forward)


@backward(gpt2, "h.1.attn")
def keys_without_the_scale(module, root):
    def attend(self, attend, q, k, v, seen):
        return attend(q, through(k, lambda grad: grad / self.scale), v, seen)

    change(module, attend=attend)


@backward(llama, "lm_head")
def gradient_tail_dropped(module, root):
    def drop(grad):
        grad = grad.clone()
        grad[..., -8:] = 0
        return grad

    change(module, forward=lambda self, forward, x: forward(through(x, drop)))


@backward(llama, "layers.2.self_attn.o_proj")
def gradient_rows_swapped(module, root):
    change(module, forward=lambda self, forward, x: forward(through(x, lambda grad: grad.flip(0))))


@backward(gpt2, "h.2.ln_1")
def gradient_of_one_token_lost(module, root):
    def lose(grad):
        grad = grad.clone()
        grad[:, 4] = 0
        return grad

    change(module, forward=lambda self, forward, x: forward(through(x, lose)))


@backward(convnet, "stage1.0.dwconv", run=drives.train_picture)
def kernel_gradient_flipped(module, root):
    def forward(self, forward, x):
        weight = through(self.weight, lambda grad: grad.flip(-1))
        return F.conv2d(x, weight, self.bias, padding=1, groups=self.groups)

    change(module, forward=forward)


@backward(convnet, "stage1.1", run=drives.train_picture)
def conv_residual_counted_twice(module, root):
    change(module, add=lambda self, add, x, out: add(through(x, lambda grad: 2 * grad), out))


@backward(convnet, "bn", run=drives.train_picture)
def batch_norm_gradient_scaled(module, root):
    change(module, forward=lambda self, forward, x: through(forward(x), lambda grad: grad * 1.05))
