"""Llama 3.1 with scaled rotations and Mistral with a window, and how each is written elsewhere.

The first port rotates complex numbers, with the rows of queries and keys in another order; the
second holds the weights of all layers in one parameter each and keeps keys as a ring does.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import linear
from localisation.planting import change
from localisation.unseen_fourth import BOTH, fourth, harmless

# --- Rotations that are stretched -----------------------------------------------------------------


class LlamaRMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(dim)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(variance + self.variance_epsilon)).to(x.dtype)


class LlamaRotary(nn.Module):
    """Slow rates are divided by 8, fast ones are kept, those between are mixed."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self.head, self.theta, self.factor = head, 500000.0, 8.0
        self.low, self.high, self.trained = 1.0, 4.0, 64

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        rates = 1.0 / self.theta ** (torch.arange(0, self.head, 2).float() / self.head)
        angles = positions[:, None].float() * self.stretched(rates)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def stretched(self, rates: Tensor) -> Tensor:
        turns = self.trained * rates / (2 * math.pi)
        smooth = (turns - self.low) / (self.high - self.low)
        mixed = (1 - smooth) * rates / self.factor + smooth * rates
        slow = torch.where(turns < self.low, rates / self.factor, rates)
        return torch.where((turns >= self.low) & (turns <= self.high), mixed, slow)


def rotate_half(x: Tensor) -> Tensor:
    """Return the second half negated, then the first."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class LlamaAttention(nn.Module):
    def __init__(self, dim: int, heads: int, kv: int, window: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv, self.head, self.window = heads, kv, dim // heads, window
        self.q_proj = nn.Linear(dim, heads * self.head, bias=False)
        self.k_proj = nn.Linear(dim, kv * self.head, bias=False)
        self.v_proj = nn.Linear(dim, kv * self.head, bias=False)
        self.o_proj = nn.Linear(heads * self.head, dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv, -1).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv, -1).transpose(1, 2)
        q, k, v = self.placed(q, k, v, cos, sin)
        k, v = (each.repeat_interleave(self.heads // self.kv, 1) for each in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(self.head)
        scores = scores.masked_fill(self.hidden(t), torch.finfo(x.dtype).min)
        weights = F.softmax(scores, -1, dtype=torch.float32).to(x.dtype)
        return self.o_proj(torch.matmul(weights, v).transpose(1, 2).reshape(b, t, -1))

    def placed(self, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> tuple:
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin, v

    def hidden(self, length: int) -> Tensor:
        places = torch.arange(length)
        apart = places[:, None] - places
        return (apart < 0) | (apart >= (self.window or length))


class LlamaMLP(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def act_fn(self, x: Tensor) -> Tensor:
        return F.silu(x)


class LlamaDecoderLayer(nn.Module):
    def __init__(self, dim: int, window: int | None) -> None:
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(dim, 4, 2, window), LlamaMLP(dim, 2 * dim + 8)
        self.input_layernorm = LlamaRMSNorm(dim)
        self.post_attention_layernorm = LlamaRMSNorm(dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.summed(x, self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.mlp(self.post_attention_layernorm(x))

    def summed(self, x: Tensor, seen: Tensor) -> Tensor:
        return x + seen


class LlamaModel(nn.Module):
    def __init__(self, dim: int, window: int | None = None) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(101, dim)
        self.layers = nn.ModuleList(LlamaDecoderLayer(dim, window) for _ in range(3))
        self.norm, self.rotary_emb = LlamaRMSNorm(dim), LlamaRotary(dim // 4)
        self.lm_head = nn.Linear(dim, 101, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        cos, sin = self.rotary_emb(x, torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.lm_head(self.norm(x))


def llama31(*, outliers: bool = False) -> nn.Module:
    return models.weigh(LlamaModel(64), 401, outliers)


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Return rows such that numbers which are rotated together are neighbours."""
    return weight.detach().unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


class MetaNorm(nn.Module):
    def __init__(self, of: LlamaRMSNorm) -> None:
        super().__init__()
        self.eps, self.weight = of.variance_epsilon, nn.Parameter(of.weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / (wide.square().mean(-1, True) + self.eps).sqrt()).type_as(x) * self.weight


class MetaAttention(nn.Module):
    def __init__(self, of: LlamaAttention) -> None:
        super().__init__()
        self.n_heads, self.n_rep = of.heads, of.heads // of.kv
        self.wq = linear(interleaved(of.q_proj.weight, of.heads))
        self.wk = linear(interleaved(of.k_proj.weight, of.kv))
        self.wv, self.wo = linear(of.v_proj.weight), linear(of.o_proj.weight)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (f(x).view(b, t, -1, d // self.n_heads) for f in (self.wq, self.wk, self.wv))
        q, k = self.turned(q, freqs_cis), self.turned(k, freqs_cis)
        k, v = self.repeat_kv(k), self.repeat_kv(v)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(2, 3) * (d // self.n_heads) ** -0.5 + mask
        seen = scores.float().softmax(-1).type_as(x) @ v
        return self.wo(seen.transpose(1, 2).contiguous().view(b, t, d))

    def turned(self, x: Tensor, freqs_cis: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(3).type_as(x)

    def repeat_kv(self, x: Tensor) -> Tensor:
        return x[:, :, :, None].expand(-1, -1, -1, self.n_rep, -1).flatten(2, 3)


class MetaFeed(nn.Module):
    def __init__(self, of: LlamaMLP) -> None:
        super().__init__()
        olds = (of.gate_proj, of.down_proj, of.up_proj)
        self.w1, self.w2, self.w3 = (linear(each.weight) for each in olds)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.gated(self.w1(x), self.w3(x)))

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up


class MetaBlock(nn.Module):
    def __init__(self, of: LlamaDecoderLayer) -> None:
        super().__init__()
        self.attention, self.feed_forward = MetaAttention(of.self_attn), MetaFeed(of.mlp)
        self.attention_norm = MetaNorm(of.input_layernorm)
        self.ffn_norm = MetaNorm(of.post_attention_layernorm)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        return self.fed(x, h)

    def fed(self, x: Tensor, h: Tensor) -> Tensor:
        return h + self.feed_forward(self.ffn_norm(h))


class MetaLlama(nn.Module):
    """The same with complex rotations, which the root makes."""

    def __init__(self, model: LlamaModel) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding.from_pretrained(model.embed_tokens.weight.detach())
        self.layers = nn.ModuleList(MetaBlock(each) for each in model.layers)
        self.norm, self.output = MetaNorm(model.norm), linear(model.lm_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        h, length = self.tok_embeddings(tokens), tokens.shape[1]
        freqs = torch.outer(torch.arange(length).float(), self.freqs(16))
        freqs_cis = torch.polar(torch.ones_like(freqs), freqs)
        mask = torch.full((length, length), float("-inf"), dtype=h.dtype).triu(1)
        for layer in self.layers:
            h = layer(h, freqs_cis, mask)
        return self.output(self.norm(h))

    def freqs(self, head: int) -> Tensor:
        plain = [500000.0 ** -(n / head) for n in range(0, head, 2)]
        return torch.tensor([self.scaled(each) for each in plain])

    def scaled(self, freq: float) -> float:
        length = 2 * math.pi / freq
        if length < 64 / 4:
            return freq
        if length > 64 / 1:
            return freq / 8
        smooth = (64 / length - 1) / (4 - 1)
        return (1 - smooth) * freq / 8 + smooth * freq


@fourth(llama31, "", "positions", port=MetaLlama, regimes=BOTH)
def llama_rates_of_the_release_before(module, root):
    change(module, scaled=lambda self, scaled, freq: freq)


@fourth(llama31, "layers.1.attention.wk", "weights", port=MetaLlama, regimes=BOTH)
def llama_rows_of_keys_not_moved(module, root):
    rows = module.weight.data.unflatten(0, (2, -1, 2)).transpose(1, 2)
    module.weight.data = rows.flatten(0, 2).contiguous()


@fourth(llama31, "layers.0.attention", "heads", port=MetaLlama)
def llama_keys_tiled(module, root):
    change(module, repeat_kv=lambda self, repeat_kv, x: x.repeat(1, 1, self.n_rep, 1))


@fourth(llama31, "layers.2.attention", "positions", port=MetaLlama)
def llama_turned_backwards(module, root):
    change(module, turned=lambda self, turned, x, freqs: turned(x, freqs.conj()))


@fourth(llama31, "layers.2.feed_forward", "activations", port=MetaLlama)
def llama_third_is_the_gate(module, root):
    change(module, gated=lambda self, gated, gate, up: gated(up, gate))


@fourth(llama31, "layers.1.attention_norm", "norm layers", port=MetaLlama)
def llama_epsilon_of_the_first_llama(module, root):
    module.eps = 1e-6


@fourth(llama31, "layers.0", "residuals", port=MetaLlama, regimes=BOTH)
def llama_mlp_of_what_came_in(module, root):
    change(module, fed=lambda self, fed, x, h: h + self.feed_forward(self.ffn_norm(x)))


@fourth(llama31, "rotary_emb", "positions", against=MetaLlama)
def llama_rates_between_not_mixed(module, root):
    def stretched(self, stretched, rates):
        turns = self.trained * rates / (2 * math.pi)
        return torch.where(turns <= self.high, rates / self.factor, rates)

    change(module, stretched=stretched)


@fourth(llama31, "layers.1.self_attn", "positions", against=MetaLlama, regimes=BOTH)
def llama_values_rotated_too(module, root):
    def placed(self, placed, q, k, v, cos, sin):
        return (*placed(q, k, v, cos, sin)[:2], v * cos + rotate_half(v) * sin)

    change(module, placed=placed)


harmless("llama 3.1 of meta", llama31, "same", "bf16", port=MetaLlama)
harmless("llama 3.1 against meta", llama31, "same", against=MetaLlama)


# --- A window, and all layers in one --------------------------------------------------------------


def mistral(*, outliers: bool = False) -> nn.Module:
    model = LlamaModel(48, window=6)
    model.rotary_emb.theta, model.rotary_emb.factor = 10000.0, 1.0
    return models.weigh(model, 402, outliers)


class Scan(nn.Module):
    """Runs all layers; beside each query lie the last few keys."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()

        def stack(name: str, *shape: int) -> nn.Parameter:
            olds = [each.get_parameter(f"{name}.weight").detach() for each in layers]
            return nn.Parameter(torch.stack([e.T.reshape(*shape) if shape else e for e in olds]))

        self.window = layers[0].self_attn.window
        self.query = stack("self_attn.q_proj", 48, 2, 2, 12)
        self.key, self.value = (stack(f"self_attn.{e}_proj", 48, 2, 12) for e in "kv")
        self.out = stack("self_attn.o_proj", 2, 2, 12, 48)
        self.gate, self.up = (stack(f"mlp.{e}_proj", 48, -1) for e in ("gate", "up"))
        self.down = stack("mlp.down_proj", -1, 48)
        self.ln1, self.ln2 = stack("input_layernorm"), stack("post_attention_layernorm")

    def forward(self, x: Tensor) -> Tensor:
        for n in range(len(self.query)):
            x = x + self.attended(F.rms_norm(x, (48,), self.ln1[n], 1e-5), n)
            h = F.rms_norm(x, (48,), self.ln2[n], 1e-5)
            x = x + (F.silu(h @ self.gate[n]) * (h @ self.up[n])) @ self.down[n]
        return x

    def attended(self, h: Tensor, n: int) -> Tensor:
        places = torch.arange(h.shape[1])
        q = self.turned(torch.einsum("btc,cgrd->btgrd", h, self.query[n]), places)
        k = self.turned(torch.einsum("btc,cgd->btgd", h, self.key[n]), self.slots(places))
        v = torch.einsum("btc,cgd->btgd", h, self.value[n])
        scores = torch.einsum("btgrd,btgdw->bgrtw", q, self.beside(k)) / 12**0.5
        weights = scores.masked_fill(self.empty(places), -torch.inf).softmax(-1)
        return torch.einsum("bgrtw,btgdw,grdc->btc", weights, self.beside(v), self.out[n])

    def slots(self, places: Tensor) -> Tensor:
        return places

    def beside(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, 0, self.window - 1, 0)).unfold(1, self.window, 1)

    def empty(self, places: Tensor) -> Tensor:
        return places[:, None] + torch.arange(self.window) < self.window - 1

    def turned(self, x: Tensor, places: Tensor) -> Tensor:
        angles = places[:, None] * 10000.0 ** -(torch.arange(6) / 6)
        angles = angles.view(len(places), *[1] * (x.dim() - 3), 6)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.split(6, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class ScanMistral(nn.Module):
    def __init__(self, model: LlamaModel) -> None:
        super().__init__()
        self.table = nn.Parameter(model.embed_tokens.weight.detach().clone())
        self.stack, self.ln_f = Scan(model.layers), nn.Parameter(model.norm.weight.detach().clone())
        self.head = linear(model.lm_head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.stack(F.embedding(tokens, self.table))
        return self.head(self.normed(x))

    def normed(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (48,), self.ln_f, 1e-5)


@fourth(mistral, "stack", "masks", port=ScanMistral, regimes=BOTH)
def mistral_window_of_one_more(module, root):
    module.window += 1


@fourth(mistral, "stack", "masks", port=ScanMistral)
def mistral_empty_places_seen(module, root):
    def empty(self, empty, places):
        return torch.zeros_like(empty(places))

    change(module, empty=empty)


@fourth(mistral, "stack", "positions", port=ScanMistral, regimes=BOTH)
def mistral_keys_placed_by_slot(module, root):
    change(module, slots=lambda self, slots, places: places % self.window)


@fourth(mistral, "stack", "weights", port=ScanMistral)
def mistral_norms_of_the_next_layer(module, root):
    module.ln2.data = module.ln2.data.roll(1, 0)


@fourth(mistral, "stack", "heads", port=ScanMistral)
def mistral_heads_out_of_the_other_order(module, root):
    module.out.data = module.out.data.transpose(1, 2).contiguous()


@fourth(mistral, "", "norm layers", port=ScanMistral)
def mistral_last_norm_left_out(module, root):
    change(module, normed=lambda self, normed, x: x * self.ln_f)


@fourth(mistral, "layers.0.self_attn", "masks", against=ScanMistral)
def mistral_window_of_one_less(module, root):
    module.window -= 1


@fourth(mistral, "layers.2", "residuals", against=ScanMistral)
def mistral_attention_without_residual(module, root):
    change(module, summed=lambda self, summed, x, seen: seen)


harmless("mistral in one scan", mistral, "same", "bf16", port=ScanMistral)
harmless("mistral against scan", mistral, "same", against=ScanMistral)
