"""Pictures and words: two encoders and a temperature, and a decoder that looks at a picture.

The ports put both encoders into one class, and make all keys of the picture at once.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.drives import Run
from localisation.planting import change, on_output
from localisation.unseen_again import BOTH, again, harmless


def captioned(dtype: torch.dtype) -> Run:
    """Images, and a text for each."""
    return Run((drives.image(dtype=dtype), drives.tokens(length=10)))


# --- Two encoders ---------------------------------------------------------------------------------


class ClipAttention(nn.Module):
    """Projections apart; the queries are scaled first."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(dim, dim) for _ in range(4)
        )

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q_proj(x) * self.scale, self.k_proj(x), self.v_proj(x))
        )
        scores = q @ k.mT
        if mask is not None:
            scores = scores + mask.to(scores.dtype)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ClipLayer(nn.Module):
    """Norms first, a quick GELU."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.self_attn = ClipAttention(dim, heads)
        self.fc1, self.fc2 = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x), mask)
        h = self.fc1(self.layer_norm2(x))
        return x + self.fc2(self.quick(h))

    def quick(self, h: Tensor) -> Tensor:
        return h * torch.sigmoid(1.702 * h)


class ClipText(nn.Module):
    """Tokens; the place of the largest token is read."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.token_embedding, self.places = (
            nn.Embedding(101, dim),
            nn.Parameter(torch.empty(10, dim)),
        )
        self.layers = nn.ModuleList(ClipLayer(dim, 4) for _ in range(2))
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.places
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.read(self.final_layer_norm(x), tokens)

    def read(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x[torch.arange(len(x)), tokens.argmax(-1)]


class ClipVision(nn.Module):
    """Patches and a class."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.cls, self.places = (
            nn.Parameter(torch.empty(1, dim)),
            nn.Parameter(torch.empty(17, dim)),
        )
        self.patch = nn.Conv2d(3, dim, 4, 4, bias=False)
        self.pre_norm, self.post_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.layers = nn.ModuleList(ClipLayer(dim, 3) for _ in range(2))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).mT
        x = torch.cat([self.cls.expand(len(x), 1, -1), x], 1) + self.places
        x = self.pre_norm(x)
        for layer in self.layers:
            x = layer(x)
        return self.post_norm(x[:, 0])


class Clip(nn.Module):
    """Similarities of pictures and texts."""

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.text = ClipVision(48), ClipText(40)
        self.visual_projection = nn.Linear(48, 32, bias=False)
        self.text_projection = nn.Linear(40, 32, bias=False)
        self.logit_scale = nn.Parameter(torch.empty(1))

    def forward(self, image: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.unit(self.visual_projection(self.vision(image)))
        read = self.unit(self.text_projection(self.text(tokens)))
        scores = (self.logit_scale + 2.6).exp() * seen @ read.T
        return scores, scores.T

    def unit(self, x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)


def clip(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Clip(), 251, outliers)


class Tower(nn.Module):
    """Layers of either encoder: places first, one product for queries, keys and values."""

    def __init__(self, layers: nn.ModuleList, *, causal: bool) -> None:
        super().__init__()
        self.causal, self.heads = causal, layers[0].self_attn.heads
        parts: dict[str, list[nn.Module]] = {"ln_1": [], "ln_2": [], "in_proj": [], "out": []}
        parts |= {"c_fc": [], "c_proj": []}
        for each in layers:
            a = each.self_attn
            three = (a.q_proj, a.k_proj, a.v_proj)
            bias = torch.cat([e.bias.detach() for e in three])
            parts["ln_1"].append(norm_like(each.layer_norm1))
            parts["ln_2"].append(norm_like(each.layer_norm2))
            parts["in_proj"].append(linear(*(e.weight for e in three), bias=bias))
            for name, of in (("out", a.out_proj), ("c_fc", each.fc1), ("c_proj", each.fc2)):
                parts[name].append(linear(of.weight, bias=of.bias.detach()))
        self.parts = nn.ModuleDict({name: nn.ModuleList(each) for name, each in parts.items()})

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        p = self.parts
        for n in range(len(p["out"])):
            x = x + p["out"][n](self.attended(p["in_proj"][n](p["ln_1"][n](x))))
            x = x + p["c_proj"][n](self.active(p["c_fc"][n](p["ln_2"][n](x))))
        return x.transpose(0, 1)

    def attended(self, x: Tensor) -> Tensor:
        length, batch, wide = x.shape
        q, k, v = (
            each.reshape(length, batch * self.heads, -1).transpose(0, 1) for each in x.chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=self.causal)
        return seen[0].transpose(0, 1).reshape(length, batch, wide // 3)

    def active(self, h: Tensor) -> Tensor:
        return h * (h * 1.702).sigmoid()


class TwoTowers(nn.Module):
    """The same, one class for both encoders."""

    def __init__(self, model: Clip) -> None:
        super().__init__()
        vision, text = model.vision, model.text
        self.conv1 = nn.Conv2d(3, 48, 4, 4, bias=False)
        self.conv1.load_state_dict(vision.patch.state_dict())
        self.start = nn.Parameter(vision.cls.detach()[0] + vision.places.detach()[0])
        self.grid = nn.Parameter(vision.places.detach()[1:].clone())
        self.ln_pre, self.ln_post = norm_like(vision.pre_norm), norm_like(vision.post_norm)
        self.visual = Tower(vision.layers, causal=False)
        self.embedding = nn.Embedding.from_pretrained(text.token_embedding.weight.detach().clone())
        self.positions = nn.Parameter(text.places.detach().clone())
        self.transformer = Tower(text.layers, causal=True)
        self.ln_final = norm_like(text.final_layer_norm)
        self.proj = nn.Parameter(model.visual_projection.weight.detach().T.clone())
        self.text_proj = nn.Parameter(model.text_projection.weight.detach().T.clone())
        self.register_buffer("temperature", (model.logit_scale.detach() + 2.6).exp())

    def forward(self, image: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        a = F.normalize(self.picture(image), dim=-1)
        b = F.normalize(self.words(tokens), dim=-1)
        scores = torch.einsum("id,jd->ij", a, b) * self.temperature
        return scores, scores.mT

    def picture(self, image: Tensor) -> Tensor:
        patches = self.conv1(image).permute(0, 2, 3, 1).flatten(1, 2) + self.grid
        x = torch.cat([self.start.expand(len(image), 1, -1), patches], 1)
        return self.ln_post(self.visual(self.ln_pre(x)))[:, 0] @ self.proj

    def words(self, tokens: Tensor) -> Tensor:
        x = self.ln_final(self.transformer(self.embedding(tokens) + self.positions))
        at = tokens.argmax(-1)[:, None, None].expand(-1, 1, x.shape[-1])
        return x.gather(1, at)[:, 0] @ self.text_proj


towers = {"port": TwoTowers, "run": captioned}


@again(clip, "visual", "activations", regimes=BOTH, **towers)
def clip_gelu_of_the_picture(module, root):
    change(module, active=lambda self, active, h: F.gelu(h))


@again(clip, "transformer", "masks", regimes=BOTH, **towers)
def clip_text_not_causal(module, root):
    module.causal = False


@again(clip, "transformer.parts.in_proj.1", "biases", **towers)
def clip_bias_of_the_values(module, root):
    module.bias.data[80:] = 0


@again(clip, "visual.parts.ln_2.0", "norm layers", **towers)
def clip_norm_of_the_next_layer(module, root):
    module.load_state_dict(root.visual.parts["ln_2"][1].state_dict())


@again(clip, "", "scale", regimes=BOTH, **towers)
def clip_temperature_not_raised(module, root):
    module.temperature.fill_(math.log(float(module.temperature)))


@again(clip, "", "positions", **towers)
def clip_grid_turned(module, root):
    module.grid.data = module.grid.data.unflatten(0, (4, 4)).transpose(0, 1).flatten(0, 1)


@again(clip, "text", "structure", against=TwoTowers, run=captioned, regimes=BOTH)
def clip_last_place_read(module, root):
    change(module, read=lambda self, read, x, tokens: x[:, -1])


@again(clip, "vision.layers.1.self_attn", "scale", against=TwoTowers, run=captioned)
def clip_scaled_by_the_text(module, root):
    module.scale = 40**-0.5


harmless("clip in towers", clip, "same", "reordered", "bf16", port=TwoTowers, run=captioned)
harmless("clip against towers", clip, against=TwoTowers, run=captioned)


# --- A decoder that looks at a picture ------------------------------------------------------------


class CrossAttention(nn.Module):
    """Queries of words, keys of the picture."""

    def __init__(self, dim: int, seen: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(seen, dim), nn.Linear(seen, dim)
        self.o = nn.Linear(dim, dim)
        self.gate = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q(x), self.k(seen), self.v(seen))
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        out = self.o((weights @ v).transpose(1, 2).flatten(2))
        return self.gated(out)

    def gated(self, out: Tensor) -> Tensor:
        return out * torch.tanh(self.gate + 0.8)


class CaptionLayer(nn.Module):
    """Self-attention, the picture, a feed-forward."""

    def __init__(self, dim: int, seen: int) -> None:
        super().__init__()
        self.n1, self.n2, self.n3 = (nn.LayerNorm(dim) for _ in range(3))
        self.own = ClipAttention(dim, 4)
        self.cross = CrossAttention(dim, seen)
        self.feed = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor, seen: Tensor, mask: Tensor) -> Tensor:
        x = x + self.own(self.n1(x), mask)
        x = x + self.cross(self.n2(x), seen)
        return x + self.feed(self.n3(x))


class Captioner(nn.Module):
    """A small net sees, a decoder tells."""

    def __init__(self, dim: int = 40, seen: int = 24) -> None:
        super().__init__()
        self.eye = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, seen, 3, 2, 1)
        )
        self.seen_norm = nn.LayerNorm(seen)
        self.words, self.places = nn.Embedding(101, dim), nn.Parameter(torch.empty(10, dim))
        self.layers = nn.ModuleList(CaptionLayer(dim, seen) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 101)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        seen = self.seen_norm(self.eye(image).flatten(2).mT)
        x = self.words(tokens) + self.places
        mask = torch.full((tokens.shape[1],) * 2, float("-inf")).triu(1)
        for layer in self.layers:
            x = layer(x, seen, mask)
        return self.head(self.norm(x))


def captioner(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Captioner(), 252, outliers)


class Teller(nn.Module):
    """A layer that is handed its keys and values; the gate is in the projection."""

    def __init__(self, of: CaptionLayer) -> None:
        super().__init__()
        a, c = of.own, of.cross
        three = (a.q_proj, a.k_proj, a.v_proj)
        self.qkv = linear(
            *(e.weight for e in three), bias=torch.cat([e.bias.detach() for e in three])
        )
        self.ask = linear(c.q.weight, bias=c.q.bias.detach())
        self.out1 = linear(a.out_proj.weight, bias=a.out_proj.bias.detach())
        gate = torch.tanh(c.gate.detach() + 0.8)
        self.out2 = linear(c.o.weight * gate, bias=c.o.bias.detach() * gate)
        self.norms = nn.ModuleList(norm_like(each) for each in (of.n1, of.n2, of.n3))
        self.up = linear(of.feed[0].weight, bias=of.feed[0].bias.detach())
        self.down = linear(of.feed[2].weight, bias=of.feed[2].bias.detach())

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = (self.split(each) for each in self.qkv(self.norms[0](x)).chunk(3, -1))
        own = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out1(own.transpose(1, 2).flatten(2))
        q = self.split(self.ask(self.norms[1](x)))
        told = F.scaled_dot_product_attention(q, self.split(keys), self.split(values))
        x = x + self.out2(told.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norms[2](x))))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (4, -1)).transpose(1, 2)


class OneEye(nn.Module):
    """The same; keys and values of all layers in one product, the eye's norm folded."""

    def __init__(self, model: Captioner) -> None:
        super().__init__()
        conv, norm, _, after = model.eye
        scale = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
        self.see1, self.see2 = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 24, 3, 2, 1)
        self.see1.weight.data = conv.weight.detach() * scale[:, None, None, None]
        self.see1.bias.data = (conv.bias.detach() - norm.running_mean) * scale + norm.bias.detach()
        self.see2.load_state_dict(after.state_dict())
        self.see_norm = norm_like(model.seen_norm)
        both = [part for each in model.layers for part in (each.cross.k, each.cross.v)]
        self.kv = linear(*(e.weight for e in both), bias=torch.cat([e.bias.detach() for e in both]))
        self.vocabulary = nn.Embedding.from_pretrained(model.words.weight.detach().clone())
        self.order = nn.Parameter(model.places.detach().clone())
        self.tellers = nn.ModuleList(Teller(each) for each in model.layers)
        self.ln, self.logits = (
            norm_like(model.norm),
            linear(model.head.weight, bias=model.head.bias.detach()),
        )

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        seen = self.see2(F.relu(self.see1(image))).permute(0, 2, 3, 1).flatten(1, 2)
        kv = self.kv(self.see_norm(seen)).chunk(4, -1)
        x = self.vocabulary(tokens) + self.order
        for n, teller in enumerate(self.tellers):
            x = teller(x, *self.pair(kv, n))
        return self.logits(self.ln(x))

    def pair(self, kv: tuple[Tensor, ...], n: int) -> tuple[Tensor, Tensor]:
        return kv[2 * n], kv[2 * n + 1]


one_eye = {"port": OneEye, "run": captioned}


@again(captioner, "", "structure", regimes=BOTH, **one_eye)
def captioner_keys_of_the_other_layer(module, root):
    change(module, pair=lambda self, pair, kv, n: (kv[2 - 2 * n], kv[2 * n + 1]))


@again(captioner, "tellers.1.out2", "scale", **one_eye)
def captioner_gate_not_in_the_bias(module, root):
    module.bias.data /= math.tanh(0.8)


@again(captioner, "kv", "weights", regimes=BOTH, **one_eye)
def captioner_keys_and_values_exchanged(module, root):
    for each in (module.weight, module.bias):
        each.data[80:] = each.data[80:].roll(40, 0)


@again(captioner, "see1", "norm layers", **one_eye)
def captioner_fold_without_root(module, root):
    module.weight.data[3] *= 1.3


@again(captioner, "tellers.0.down", "scale", **one_eye)
def captioner_feed_smaller(module, root):
    on_output(module, lambda out: out * 0.9)


@again(captioner, "layers.1.cross", "activations", against=OneEye, run=captioned, regimes=BOTH)
def captioner_gate_by_sigmoid(module, root):
    change(module, gated=lambda self, gated, out: out * torch.sigmoid(self.gate + 0.8))


@again(captioner, "layers.0.feed.1", "activations", against=OneEye, run=captioned)
def captioner_gelu(module, root):
    change(module, forward=lambda self, forward, x: F.gelu(x))


harmless("captioner of one eye", captioner, port=OneEye, run=captioned)
harmless("captioner against one eye", captioner, against=OneEye, run=captioned)
