"""The Llama by other people: fused projections, attention inlined, residuals as modules."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import models
from localisation.copies import Residual, linear
from localisation.models import Size

# --- Llama, fused: one projection in, SDPA, heads kept third --------------------------------------


class FusedNorm(nn.Module):
    """Root mean square norm by division."""

    def __init__(self, norm: models.RMSNorm) -> None:
        super().__init__()
        self.scale = nn.Parameter(norm.weight.detach().clone())
        self.epsilon = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide / torch.sqrt((wide * wide).mean(-1, True) + self.epsilon)).type_as(
            x
        ) * self.scale


class FusedAttention(nn.Module):
    """One projection, [B, T, H, D], scaled_dot_product_attention; the cache is kept transposed."""

    state = ("kept",)

    def __init__(self, attention: models.Attention, size: Size) -> None:
        super().__init__()
        self.n_head, self.n_kv, self.d = attention.heads, attention.kv_heads, attention.head
        self.wqkv = linear(
            attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight
        )
        self.wo = linear(attention.o_proj.weight)
        kept = torch.zeros(2, size.batch, size.length, self.n_kv, self.d)
        self.register_buffer("kept", kept, persistent=False)
        self.caching = isinstance(attention, models.BufferedAttention | models.GrowingAttention)

    def forward(self, x: Tensor, freqs: Tensor, where: Tensor) -> Tensor:
        batch, length, _ = x.shape
        sizes = [self.n_head * self.d, self.n_kv * self.d, self.n_kv * self.d]
        q, k, v = self.wqkv(x).split(sizes, -1)
        q = self.turn(q.view(batch, length, self.n_head, self.d), freqs)
        k = self.turn(k.view(batch, length, self.n_kv, self.d), freqs)
        k, v = self.keep(k, v.view(batch, length, self.n_kv, self.d), where)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            self.shared(k.transpose(1, 2)),
            self.shared(v.transpose(1, 2)),
            attn_mask=self.allowed(where, k.shape[1]),
        )
        return self.wo(out.transpose(1, 2).flatten(2))

    def keep(self, k: Tensor, v: Tensor, where: Tensor) -> tuple[Tensor, Tensor]:
        if not self.caching:
            return k, v
        self.kept[0, : len(k), where] = k
        self.kept[1, : len(v), where] = v
        end = int(where[-1]) + 1
        return self.kept[0, : len(k), :end], self.kept[1, : len(v), :end]

    def turn(self, x: Tensor, freqs: Tensor) -> Tensor:
        cos, sin = freqs.cos()[:, None].to(x.dtype), freqs.sin()[:, None].to(x.dtype)
        half = self.d // 2
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def shared(self, x: Tensor) -> Tensor:
        return x[:, :, None].expand(-1, -1, self.n_head // self.n_kv, -1, -1).flatten(1, 2)

    def allowed(self, where: Tensor, keys: int) -> Tensor:
        return where[:, None] >= torch.arange(keys)[None]

    def reset(self) -> None:
        self.kept.zero_()


class FusedFeed(nn.Module):
    """Gate and up in one projection."""

    def __init__(self, feed: models.SwiGLU) -> None:
        super().__init__()
        self.w13 = linear(feed.gate_proj.weight, feed.up_proj.weight)
        self.w2 = linear(feed.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.joined(self.w13(x)))

    def joined(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up


class FusedBlock(nn.Module):
    """One block."""

    def __init__(self, layer: models.LlamaLayer, size: Size) -> None:
        super().__init__()
        self.attn_norm = FusedNorm(layer.input_layernorm)
        self.attn = FusedAttention(layer.self_attn, size)
        self.ffn_norm = FusedNorm(layer.post_attention_layernorm)
        self.ffn = FusedFeed(layer.mlp)

    def forward(self, x: Tensor, freqs: Tensor, where: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), freqs, where)
        return self.joined(x, self.ffn(self.ffn_norm(x)))

    def joined(self, x: Tensor, out: Tensor) -> Tensor:
        return x + out


class FusedLlama(nn.Module):
    """The Llama with fused projections."""

    def __init__(self, model: models.Llama) -> None:
        super().__init__()
        self.theta, self.d = model.rotary_emb.base, model.rotary_emb.head
        self.tok_embeddings = nn.Embedding.from_pretrained(
            model.embed_tokens.weight.detach().clone(), freeze=False
        )
        self.blocks = nn.ModuleList(FusedBlock(each, model.size) for each in model.layers)
        self.final_norm = FusedNorm(model.norm)
        self.output = linear(model.lm_head.weight)

    def forward(self, tokens: Tensor, where: Tensor | None = None) -> Tensor:
        where = torch.arange(tokens.shape[1]) if where is None else where
        x = self.tok_embeddings(tokens)
        freqs = self.freqs(where)
        for block in self.blocks:
            x = block(x, freqs, where)
        return self.output(self.final_norm(x))

    def freqs(self, where: Tensor) -> Tensor:
        inverse = 1.0 / self.theta ** (torch.arange(0, self.d, 2).float() / self.d)
        return torch.outer(where.float(), inverse)

    def reset(self) -> None:
        for block in self.blocks:
            block.attn.reset()


# --- Llama, inlined: attention in the block, keys first, a mask that is added ---------------------


class InlineBlock(nn.Module):
    """A block that does everything but its projections itself."""

    def __init__(self, layer: models.LlamaLayer) -> None:
        super().__init__()
        attention, feed = layer.self_attn, layer.mlp
        self.n, self.groups, self.width = attention.heads, attention.kv_heads, attention.head
        self.key = linear(attention.k_proj.weight)
        self.query = linear(attention.q_proj.weight)
        self.value = linear(attention.v_proj.weight)
        self.out = linear(attention.o_proj.weight)
        self.fc_up = linear(feed.up_proj.weight)
        self.fc_gate = linear(feed.gate_proj.weight)
        self.fc_down = linear(feed.down_proj.weight)
        self.ln1 = nn.Parameter(layer.input_layernorm.weight.detach().clone())
        self.ln2 = nn.Parameter(layer.post_attention_layernorm.weight.detach().clone())
        self.eps = layer.input_layernorm.eps

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        h = self.normed(x, self.ln1)
        k = self.turned(self.heads(self.key(h), self.groups), cos, sin)
        v = self.heads(self.value(h), self.groups)
        q = self.turned(self.heads(self.query(h), self.n), cos, sin)
        x = x + self.out(self.attention(q, k, v, mask))
        h = self.normed(x, self.ln2)
        return x + self.fc_down(self.glu(self.fc_up(h), self.fc_gate(h)))

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).pow(-0.5)).to(
            x.dtype
        ) * weight

    def heads(self, x: Tensor, count: int) -> Tensor:
        return x.unflatten(-1, (count, self.width))

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return x * cos[:, None] + torch.roll(x, self.width // 2, -1) * sin[:, None]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        q = q.unflatten(2, (self.groups, -1))
        scores = torch.einsum("btgrd,bsgd->bgrts", q, k) / self.width**0.5 + mask
        weights = torch.softmax(scores.float(), -1).to(v.dtype)
        return torch.einsum("bgrts,bsgd->btgrd", weights, v).flatten(2)

    def glu(self, up: Tensor, gate: Tensor) -> Tensor:
        return up * gate * torch.sigmoid(gate)


class InlineLlama(nn.Module):
    """The Llama with attention inlined in its blocks."""

    def __init__(self, model: models.Llama) -> None:
        super().__init__()
        self.width, self.base = model.rotary_emb.head, model.rotary_emb.base
        self.wte = nn.Embedding.from_pretrained(
            model.embed_tokens.weight.detach().clone(), freeze=False
        )
        self.h = nn.ModuleList(InlineBlock(each) for each in model.layers)
        self.ln_f = FusedNorm(model.norm)
        self.head = linear(model.lm_head.weight)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx)
        cos, sin = (each.to(x.dtype) for each in self.waves(idx.shape[1]))
        mask = self.mask(idx.shape[1], x)
        for block in self.h:
            x = block(x, cos, sin, mask)
        return self.head(self.ln_f(x))

    def waves(self, length: int) -> tuple[Tensor, Tensor]:
        steps = torch.arange(self.width // 2, dtype=torch.float32) * (2 / self.width)
        angles = torch.arange(length, dtype=torch.float32)[:, None] / self.base**steps
        sin = angles.sin()
        return angles.cos().repeat(1, 2), torch.cat([-sin, sin], -1)

    def mask(self, length: int, x: Tensor) -> Tensor:
        return torch.full((length, length), -1e9, dtype=x.dtype).triu(1)


# --- Llama, nested: residuals and the core of attention are modules, pairs interleaved ------------


class Turn(nn.Module):
    """Rotates neighbours by their angle."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Core(nn.Module):
    """Attention proper: softmax(q k) v."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query = query.unflatten(1, (self.groups, -1))
        logits = torch.einsum("bgrtd,bgsd->bgrts", query, key) * query.shape[-1] ** -0.5
        hidden = self.hidden(query.shape[-2], key.shape[-2])
        logits = torch.where(hidden, torch.finfo(logits.dtype).min, logits)
        return torch.einsum("bgrts,bgsd->bgrtd", logits.softmax(-1), value).flatten(1, 2)

    def hidden(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).triu(1 + keys - queries)


class NestedAttention(nn.Module):
    """Projections, turn, core, projection; keys and values are kept in a list."""

    state = ("past",)

    def __init__(self, attention: models.Attention) -> None:
        super().__init__()
        self.d = attention.head
        self.projections = nn.ModuleDict(
            {
                "v": linear(attention.v_proj.weight),
                "k": linear(_neighbours(attention.k_proj.weight, attention.head)),
                "q": linear(_neighbours(attention.q_proj.weight, attention.head)),
            }
        )
        self.turn = Turn()
        self.core = Core(attention.kv_heads)
        self.project = linear(attention.o_proj.weight)
        self.caching = isinstance(attention, models.GrowingAttention | models.BufferedAttention)
        self.past: list[Tensor] = []

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = {name: self.apart(each(x)) for name, each in self.projections.items()}
        key, value = self.keep(self.turn(parts["k"], cos, sin), parts["v"])
        out = self.core(self.turn(parts["q"], cos, sin), key, value)
        return self.project(out.transpose(1, 2).flatten(2))

    def apart(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.d)).transpose(1, 2)

    def keep(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if not self.caching:
            return key, value
        new = [key.transpose(1, 2), value.transpose(1, 2)]
        self.past = (
            [torch.cat(each, 1) for each in zip(self.past, new, strict=True)] if self.past else new
        )
        return self.past[0].transpose(1, 2), self.past[1].transpose(1, 2)


def _neighbours(weight: Tensor, head: int) -> Tensor:
    """Return the rows of each head so ordered that halves become neighbours."""
    rows = weight.view(-1, 2, head // 2, weight.shape[1])
    return rows.transpose(1, 2).reshape(weight.shape)


class NestedFeed(nn.Module):
    """The feed-forward as a gate and a projection."""

    def __init__(self, feed: models.SwiGLU) -> None:
        super().__init__()
        self.gate = nn.Sequential(linear(feed.gate_proj.weight), nn.SiLU())
        self.value = linear(feed.up_proj.weight)
        self.down = linear(feed.down_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.value(x) * self.gate(x))


class NestedLlama(nn.Module):
    """The Llama of nested residuals."""

    def __init__(self, model: models.Llama) -> None:
        super().__init__()
        self.d, self.base = model.rotary_emb.head, model.rotary_emb.base
        self.embedding = nn.Embedding.from_pretrained(
            model.embed_tokens.weight.detach().clone(), freeze=False
        )
        self.transformer = nn.ModuleDict({"blocks": nn.ModuleList()})
        for layer in model.layers:
            pair = (
                Residual(FusedNorm(layer.input_layernorm), NestedAttention(layer.self_attn)),
                Residual(FusedNorm(layer.post_attention_layernorm), NestedFeed(layer.mlp)),
            )
            self.transformer["blocks"].append(nn.ModuleList(pair))
        self.to_logits = nn.Sequential(FusedNorm(model.norm), linear(model.lm_head.weight))

    def forward(self, ids: Tensor, at: Tensor | None = None) -> Tensor:
        at = torch.arange(ids.shape[1]) if at is None else at
        x = self.embedding(ids)
        cos, sin = (each.to(x.dtype) for each in self.waves(at))
        for attend, feed in self.transformer["blocks"]:
            x = feed(attend(x, cos=cos, sin=sin))
        return self.to_logits(x)

    def waves(self, at: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(0, self.d, 2).float() / self.d
        angles = torch.outer(at.float(), self.base**-steps)
        return angles.cos(), angles.sin()

    def reset(self) -> None:
        for each in self.modules():
            if isinstance(each, NestedAttention):
                each.past = []


# --- Mixture: all experts at once on stacked weights ----------------------------------------------


class StackedMixture(nn.Module):
    """Every expert sees every token; what was not chosen counts nothing."""

    def __init__(self, mixture: models.Mixture) -> None:
        super().__init__()
        self.top = mixture.gate.chosen
        self.router = linear(mixture.gate.weight)
        for name in ("gate_proj", "up_proj", "down_proj"):
            weights = [getattr(each, name).weight.detach() for each in mixture.experts]
            setattr(self, name, nn.Parameter(torch.stack(weights)))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.shares(self.router(x))
        gate = torch.einsum("btd,ehd->bteh", x, self.gate_proj)
        up = torch.einsum("btd,ehd->bteh", x, self.up_proj)
        out = torch.einsum("bteh,edh->bted", F.silu(gate) * up, self.down_proj)
        return torch.einsum("bted,bte->btd", out, shares.to(x.dtype))

    def shares(self, logits: Tensor) -> Tensor:
        top, chosen = logits.float().topk(self.top, -1)
        return torch.zeros_like(logits, dtype=top.dtype).scatter(-1, chosen, top.softmax(-1))


def stacked_moe(model: models.Llama) -> FusedLlama:
    """Return the fused Llama with stacked experts."""
    plain = _without_mixtures(model)
    out = FusedLlama(plain)
    for block, layer in zip(out.blocks, model.layers, strict=True):
        block.ffn = StackedMixture(layer.mlp)
    return out


def _without_mixtures(model: models.Llama) -> models.Llama:
    """Return a plain Llama with the weights of all but the mixtures."""
    plain = models.Llama(model.size)
    plain.load_state_dict(model.state_dict(), strict=False)
    return plain
