"""The 30 pairs of `twins.py`: ten without a fault and twenty with one, and who is at fault.

Written before anything was tuned. A pair is two ways to make a model, each with its dtype and its
way of being called; `names` are the modules that may be named, none where the two agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import twin_models as models
from torch import Tensor, nn
from torch.nn import functional

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Side:
    """One run: a model, what is changed in it, and how it is called."""

    make: Callable[[], nn.Module] = models.llama
    dtype: torch.dtype = F32
    change: Change | None = None
    after: Change | None = None
    """A change made once the weights are in their dtype."""
    decodes: bool = False
    device: str = "cpu"

    def model(self) -> nn.Module:
        """Return the model, ready to be recorded."""
        model = self.make()
        if self.change is not None:
            self.change(model)
        model = model.to(self.dtype).to(self.device)
        if self.after is not None:
            self.after(model)
        return model

    def run(self, model: nn.Module) -> None:
        """Call it."""
        torch.manual_seed(5)
        tokens = torch.randint(0, models.WORDS, (2, 24)).to(self.device)
        if not self.decodes:
            model(tokens)
            return
        caches: list[list[Tensor]] = [[] for _ in range(models.LAYERS)]
        model(tokens[:, :20], caches)
        for step in range(20, 24):
            model(tokens[:, step : step + 1], caches)


@dataclass(frozen=True)
class Pair:
    """Two runs, and what is wrong."""

    title: str
    candidate: Side
    reference: Side
    names: tuple[str, ...] = ()


def sdpa(model: Any) -> None:
    for layer in model.layers:
        layer.attention.kind = "sdpa"


def split(model: nn.Module) -> None:
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = models.SplitLinear


def with_eps(number: int) -> Change:
    def change(model: Any) -> None:
        model.layers[number].input_norm.eps = 1e-5

    return change


def all_eps(model: Any) -> None:
    models.ported(model)
    for module in model.modules():
        if hasattr(module, "eps"):
            module.eps = 1e-5


def row_off(path: str) -> Change:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_submodule(path).weight[7] *= 1.03

    return change


def shifted_mask(model: Any) -> None:
    model.shift = 1


def rope_base(model: Any) -> None:
    model.rotary.base = 500_000.0


def scale(model: Any) -> None:
    model.layers[1].attention.scale = models.HEAD**-0.45


class CoarseShares(models.Attention):
    def shares(self, scores: Tensor) -> Tensor:
        return scores.bfloat16().softmax(-1).to(scores.dtype)


class CoarseNorm(models.RmsNorm):
    def forward(self, x: Tensor) -> Tensor:
        half = x.half()
        half = half * torch.rsqrt(half.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * half.to(x.dtype)


class CoarseHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x.half(), self.weight.half()).to(x.dtype)


class WrongHeads(models.Attention):
    def spread(self, x: Tensor) -> Tensor:
        return x.repeat(1, models.HEADS // models.GROUPS, 1, 1)


class GeluMlp(models.Mlp):
    def act(self, x: Tensor) -> Tensor:
        return functional.gelu(x)


class Interleaved(models.EinsumAttention):
    def turned(self, x: Tensor) -> Tensor:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)


def as_class(path: str, kind: type) -> Change:
    def change(model: nn.Module) -> None:
        model.get_submodule(path).__class__ = kind

    return change


def tanh_gelu(model: Any) -> None:
    model.h[0].act.approximate = "tanh"


def no_bias(model: Any) -> None:
    model.h[2].attn.proj.bias = None


def position(model: Any) -> None:
    model.offset = 1


def kept_less(model: Any) -> None:
    model.layers[1].kept = 0.99


def transposed(model: Any) -> None:
    weight = model.layers[0].attention.q.weight
    weight.data = weight.data.T.contiguous()


def other_layer(model: Any) -> None:
    with torch.no_grad():
        model.layers[2].mlp.up.weight.copy_(model.layers[1].mlp.up.weight)


def interleaved(model: Any) -> None:
    models.ported(model)
    for layer in model.layers:
        layer.attention.__class__ = Interleaved


def late_cache(model: Any) -> None:
    model.h[1].attn.late = 1


G = models.gpt
PAIRS = (
    Pair("llama, the same code twice", Side(), Side()),
    Pair("llama, bf16 against f32", Side(dtype=BF16), Side()),
    Pair("llama, f16 against f32", Side(dtype=F16), Side()),
    Pair("llama, SDPA against eager, f32", Side(change=sdpa), Side()),
    Pair("llama, SDPA against eager, bf16", Side(dtype=BF16, change=sdpa), Side(dtype=BF16)),
    Pair("llama, ported, f32", Side(change=models.ported), Side()),
    Pair("llama, ported, bf16 against f32", Side(dtype=BF16, change=models.ported), Side()),
    Pair("gpt, bf16 against f16", Side(G, BF16), Side(G, F16)),
    Pair("gpt, sums in four parts", Side(G, change=split), Side(G)),
    Pair("gpt, decoding, bf16 against f32", Side(G, BF16, decodes=True), Side(G, decodes=True)),
    Pair("eps of one norm", Side(change=with_eps(1)), Side(), ("layers.1.input_norm",)),
    Pair(
        "a row of a weight 3 % off, bf16",
        Side(dtype=BF16, change=row_off("layers.2.mlp.down")),
        Side(dtype=BF16),
        ("layers.2.mlp.down",),
    ),
    Pair(
        "a row of a weight 3 % off, bf16 against f32",
        Side(dtype=BF16, change=row_off("layers.1.attention.v")),
        Side(),
        ("layers.1.attention.v",),
    ),
    Pair("mask off by one", Side(change=shifted_mask), Side(), ("Llama",)),
    Pair("rope base, bf16 against f32", Side(dtype=BF16, change=rope_base), Side(), ("rotary",)),
    Pair("scale of attention", Side(change=scale), Side(), ("layers.1.attention",)),
    Pair(
        "softmax in bf16",
        Side(change=as_class("layers.0.attention", CoarseShares)),
        Side(),
        ("layers.0.attention",),
    ),
    Pair(
        "norm in f16",
        Side(change=as_class("layers.1.post_norm", CoarseNorm)),
        Side(),
        ("layers.1.post_norm",),
    ),
    Pair("head in f16", Side(change=as_class("head", CoarseHead)), Side(), ("head",)),
    Pair("GELU by tanh", Side(G, change=tanh_gelu), Side(G), ("h.0.act",)),
    Pair("a bias is lost", Side(G, change=no_bias), Side(G), ("h.2.attn.proj",)),
    Pair(
        "key heads in another order, bf16 against f32",
        Side(dtype=BF16, change=as_class("layers.1.attention", WrongHeads)),
        Side(),
        ("layers.1.attention",),
    ),
    Pair("positions off by one, f16", Side(G, F16, change=position), Side(G), ("Gpt",)),
    Pair("residual loses 1 %", Side(change=kept_less), Side(), ("layers.1",)),
    Pair("a weight transposed", Side(change=transposed), Side(), ("layers.0.attention.q",)),
    Pair(
        "eps of all norms, ported",
        Side(change=all_eps),
        Side(),
        ("layers.0.input_norm",),
    ),
    Pair(
        "GELU for SiLU, bf16",
        Side(dtype=BF16, change=as_class("layers.1.mlp", GeluMlp)),
        Side(dtype=BF16, change=models.ported),
        ("layers.1.mlp",),
    ),
    Pair(
        "rope interleaved, ported",
        Side(change=interleaved),
        Side(),
        ("layers.0.attention",),
    ),
    Pair(
        "values kept in the wrong place while decoding",
        Side(G, decodes=True, change=late_cache),
        Side(G, BF16, decodes=True),
        ("h.1.attn",),
    ),
    Pair(
        "weights of another layer, bf16 against f32",
        Side(dtype=BF16, change=other_layer),
        Side(),
        ("layers.2.mlp.up",),
    ),
)
"""The last twenty have a fault."""
