"""SigLIP: a tower for pictures, one for texts, and a learned query that looks at all patches.

The port does by hand what the model leaves to torch's own attention, and cuts its patches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models
from localisation.copies import linear, norm_like
from localisation.planting import change
from localisation.unseen_fourth import BOTH, fourth, harmless
from localisation.unseen_fourth_pairs import same


def matched(dtype: torch.dtype) -> drives.Run:
    """One call on pictures and texts."""
    return drives.Run((drives.image(43, dtype=dtype), drives.tokens(43, length=12)))


class SigAttention(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(dim, dim) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (4, -1)).transpose(1, 2)
            for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        weights = F.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1, dtype=torch.float32).to(x.dtype)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class SigMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 3 * dim), nn.Linear(3 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class SigLayer(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer_norm1, self.layer_norm2 = (nn.LayerNorm(dim, eps=1e-6) for _ in range(2))
        self.self_attn, self.mlp = SigAttention(dim), SigMLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class SigPool(nn.Module):
    """A learned query looks at all patches."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.probe = nn.Parameter(torch.empty(1, 1, dim))
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.layernorm, self.mlp = nn.LayerNorm(dim, eps=1e-6), SigMLP(dim)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.attention(self.probe.expand(len(x), -1, -1), x, x, need_weights=False)[0]
        return self.fed(seen)[:, 0]

    def fed(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.layernorm(x))


class SigVision(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.patch_embedding, self.places = (
            nn.Conv2d(3, dim, 4, 4),
            nn.Parameter(torch.empty(16, dim)),
        )
        self.layers = nn.ModuleList(SigLayer(dim) for _ in range(2))
        self.post_layernorm, self.head = nn.LayerNorm(dim, eps=1e-6), SigPool(dim)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch_embedding(image).flatten(2).transpose(1, 2) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.post_layernorm(x))


class SigText(nn.Module):
    """No word is hidden from any; the last one stands for all."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.token_embedding, self.places = (
            nn.Embedding(101, dim),
            nn.Parameter(torch.empty(12, dim)),
        )
        self.layers = nn.ModuleList(SigLayer(dim) for _ in range(2))
        self.final_layer_norm, self.head = nn.LayerNorm(dim, eps=1e-6), nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.final_layer_norm(x)[:, -1])


class SigLip(nn.Module):
    def __init__(self, dim: int = 48) -> None:
        super().__init__()
        self.vision_model, self.text_model = SigVision(dim), SigText(dim)
        self.logit_scale, self.logit_bias = (nn.Parameter(torch.zeros(1)) for _ in range(2))

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        seen, read = self.vision_model(image), self.text_model(tokens)
        seen = seen / seen.norm(p=2, dim=-1, keepdim=True)
        read = read / read.norm(p=2, dim=-1, keepdim=True)
        return self.matched(read @ seen.T)

    def matched(self, scores: Tensor) -> Tensor:
        return scores * self.logit_scale.exp() + self.logit_bias


def siglip(*, outliers: bool = False) -> nn.Module:
    model = models.weigh(SigLip(), 452, outliers)
    model.logit_scale.data += 2.3
    model.logit_bias.data -= 3
    return model


class TowerBlock(nn.Module):
    """Attention and MLP of one block, without modules of their own."""

    def __init__(self, of: SigLayer) -> None:
        super().__init__()
        a = of.self_attn
        self.ln1, self.ln2 = norm_like(of.layer_norm1), norm_like(of.layer_norm2)
        self.qkv, self.proj = same(a.q_proj, a.k_proj, a.v_proj), same(a.out_proj)
        self.fc1, self.fc2 = same(of.mlp.fc1), same(of.mlp.fc2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln1(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3).unbind(2)
        x = x + self.proj(self.attended(q, k, v).transpose(1, 2).flatten(2))
        return x + self.fc2(self.act(self.fc1(self.ln2(x))))

    def attended(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    def act(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x.pow(3))))


class Probe(nn.Module):
    """The query is multiplied beforehand."""

    def __init__(self, of: SigPool) -> None:
        super().__init__()
        weight, bias = of.attention.in_proj_weight.detach(), of.attention.in_proj_bias.detach()
        self.query = nn.Parameter((F.linear(of.probe, weight[:48], bias[:48]) / 12**0.5).detach())
        self.kv = linear(weight[48:], bias=bias[48:])
        self.out, self.ln = same(of.attention.out_proj), norm_like(of.layernorm)
        self.fc1, self.fc2 = same(of.mlp.fc1), same(of.mlp.fc2)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).unflatten(-1, (2, 4, 12)).unbind(2)
        weights = torch.einsum("hd,bkhd->bhk", self.query.view(4, 12), k).softmax(-1)
        x = self.out(torch.einsum("bhk,bkhd->bhd", weights, v).flatten(1))
        return self.summed(x, self.ln(x))

    def summed(self, x: Tensor, h: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(h), approximate="tanh"))


class CutPatches(nn.Module):
    def __init__(self, of: SigVision) -> None:
        super().__init__()
        self.proj = linear(
            of.patch_embedding.weight.detach().flatten(1), bias=of.patch_embedding.bias.detach()
        )
        self.places = nn.Parameter(of.places.detach().clone())

    def forward(self, image: Tensor) -> Tensor:
        return self.proj(self.cut(image)) + self.places

    def cut(self, image: Tensor) -> Tensor:
        return F.unfold(image, 4, stride=4).transpose(1, 2)


class Eye(nn.Module):
    def __init__(self, of: SigVision) -> None:
        super().__init__()
        self.patches, self.blocks = CutPatches(of), nn.Sequential(*map(TowerBlock, of.layers))
        self.ln, self.pool = norm_like(of.post_layernorm), Probe(of.head)

    def forward(self, image: Tensor) -> Tensor:
        return self.pool(self.ln(self.blocks(self.patches(image))))


class Reader(nn.Module):
    def __init__(self, of: SigText) -> None:
        super().__init__()
        self.wte = nn.Embedding.from_pretrained(of.token_embedding.weight.detach().clone())
        self.wpe = nn.Parameter(of.places.detach().clone())
        self.blocks = nn.Sequential(*map(TowerBlock, of.layers))
        self.ln, self.proj = norm_like(of.final_layer_norm), same(of.head)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.proj(self.ln(self.taken(self.blocks(self.wte(tokens) + self.wpe))))

    def taken(self, x: Tensor) -> Tensor:
        return x[:, -1]


class TowersByHand(nn.Module):
    def __init__(self, model: SigLip) -> None:
        super().__init__()
        self.visual, self.text = Eye(model.vision_model), Reader(model.text_model)
        self.scale = nn.Parameter(model.logit_scale.detach().clone())
        self.bias = nn.Parameter(model.logit_bias.detach().clone())

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        seen, read = (F.normalize(each, dim=-1) for each in (self.visual(image), self.text(tokens)))
        return torch.addcmul(self.bias, torch.einsum("tc,ic->ti", read, seen), self.widened())

    def widened(self) -> Tensor:
        return self.scale.exp()


def towers(path, kind, **more):
    """Declare a fault of two towers."""
    return fourth(siglip, path, kind, run=matched, **more)


@towers("visual.patches", "layouts", port=TowersByHand)
def siglip_patches_by_columns(module, root):
    def cut(self, cut, image):
        return cut(image).unflatten(1, (4, 4)).transpose(1, 2).flatten(1, 2)

    change(module, cut=cut)


@towers("visual.pool", "residuals", port=TowersByHand, regimes=BOTH)
def siglip_residual_of_the_normed(module, root):
    change(module, summed=lambda self, summed, x, h: summed(h, h))


@towers("visual.pool.kv", "weights", port=TowersByHand)
def siglip_values_without_bias(module, root):
    module.bias.data[48:] = 0


@towers("text.blocks.1", "activations", port=TowersByHand)
def siglip_quick_gelu(module, root):
    change(module, act=lambda self, act, x: x * torch.sigmoid(1.702 * x))


@towers("text.blocks.0", "masks", port=TowersByHand, regimes=BOTH)
def siglip_causal_as_in_clip(module, root):
    def attended(self, attended, q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    change(module, attended=attended)


@towers("text", "pooling", port=TowersByHand)
def siglip_first_word_for_all(module, root):
    change(module, taken=lambda self, taken, x: x[:, 0])


@towers("", "scale", port=TowersByHand)
def siglip_scale_as_it_is(module, root):
    change(module, widened=lambda self, widened: self.scale)


@towers("vision_model.head", "norm layers", against=TowersByHand)
def siglip_norm_after_the_mlp(module, root):
    change(module, fed=lambda self, fed, x: x + self.layernorm(self.mlp(x)))


harmless("siglip by hand", siglip, "same", "bf16", port=TowersByHand, run=matched)
harmless("siglip against hand", siglip, "same", against=TowersByHand, run=matched)
