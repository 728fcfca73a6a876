"""Variants in which nothing is wrong: naming a module of one of them is a false alarm."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives, models, ports
from localisation.cases import Case, Trio
from localisation.planting import change, dtype_of, variant

llama, gpt2, moe, convnet, vit = (
    models.llama,
    models.gpt2,
    models.moe,
    models.convnet,
    models.vit,
)
VARIANTS: list[Case] = []


def _case(name: str, regime: str, make: Callable[[], Trio], run: Any, **more: Any) -> None:
    dtype = more.pop("dtype", dtype_of(regime))
    VARIANTS.append(
        Case(f"harmless.{name}/{regime}", "harmless", name, regime, make, run, dtype, **more)
    )


def harmless(build: Any, run: Any = drives.text, *regimes: str, **more: Any) -> Callable[..., Any]:
    """Declare the decorated function, which changes a candidate, as harmless."""

    def declare(function: Callable[[nn.Module], Any]) -> Callable[..., Any]:
        for regime in regimes or ("same",):

            def make(regime: str = regime) -> Trio:
                trio = variant(build, regime)
                candidate = function(trio.candidate) or trio.candidate
                return Trio(candidate, trio.reference, candidate)

            _case(f"{build.__name__}.{function.__name__}", regime, make, run, **more)
        return function

    return declare


def _plain(build: Any, run: Any, *regimes: str, port: Any = None, against: Any = None) -> None:
    """Declare what the regime or other code alone makes different."""
    for regime in regimes:

        def make(regime: str = regime) -> Trio:
            return variant(build, regime, port=port, against=against)

        name = build.__name__ if port is None else f"{build.__name__} as {port.__name__}"
        other = "" if against is None else f" against {against.__name__}"
        direction = "backward" if run in (drives.train, drives.train_picture) else "forward"
        _case(f"{name}{other} {run.__name__}", regime, make, run, direction=direction)


def buffered(**more: Any) -> nn.Module:
    return models.llama("buffers", **more)


def growing(**more: Any) -> nn.Module:
    return models.llama("growing", **more)


def handed(**more: Any) -> nn.Module:
    return models.llama("argument", **more)


# --- Arithmetic alone -----------------------------------------------------------------------------

for _build in (llama, gpt2, moe):
    _plain(_build, drives.text, "same", "reordered", "bf16", "outliers")
for _build in (convnet, vit):
    _plain(_build, drives.picture, "reordered", "bf16", "outliers")
_plain(models.quantised, drives.text, "bf16")
for _build in (buffered, growing):
    _plain(_build, drives.decode, "reordered", "bf16")
_plain(handed, drives.decode_with_cache, "reordered", "bf16")
_plain(buffered, drives.generate, "bf16")
_plain(gpt2, drives.padded, "bf16")
_plain(llama, drives.train, "reordered", "bf16")
_plain(convnet, drives.train_picture, "bf16")

# --- Other people's code --------------------------------------------------------------------------

for _port in (
    ports.FusedLlama,
    ports.InlineLlama,
    ports.FlatLlama,
    ports.OneLlama,
    ports.NestedLlama,
):
    _plain(llama, drives.text, "same", "bf16", "outliers", port=_port)
_plain(llama, drives.text, "same", against=ports.FusedLlama)
_plain(llama, drives.text, "same", against=ports.FlatLlama)
_plain(gpt2, drives.padded, "same", "bf16", port=ports.SplitGPT)
_plain(gpt2, drives.text, "same", "bf16", port=ports.ConvGPT)
_plain(moe, drives.text, "same", port=ports.stacked_moe)
_plain(convnet, drives.picture, "same", "bf16", port=ports.LastNet)
_plain(vit, drives.picture, "same", "bf16", port=ports.PatchViT)
_plain(buffered, drives.decode, "same", "bf16", port=ports.FusedLlama)
_plain(growing, drives.decode, "same", "bf16", port=ports.NestedLlama)
_plain(llama, drives.train, "same", port=ports.FusedLlama)


def _other_cache() -> Trio:
    reference, candidate = models.llama("growing"), models.llama("buffers")
    return Trio(candidate, reference, candidate)


_case("another way to keep keys and values", "same", _other_cache, drives.decode)


# --- One thing written otherwise ------------------------------------------------------------------


@harmless(llama, drives.text, "same", "bf16")
def sdpa(model: nn.Module) -> None:
    def attend(self: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)

    for layer in model.layers:
        change(layer.self_attn, attend=attend)


@harmless(llama)
def attention_by_einsum(model: nn.Module) -> None:
    def attend(self: Any, attend: Any, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = torch.einsum("bhtd,bhsd->bhts", q * self.scale, k)
        scores = scores + torch.where(seen, 0.0, -1e9)
        return torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v)

    for layer in model.layers:
        change(layer.self_attn, attend=attend)


@harmless(llama, drives.text, "same", "bf16")
def norm_by_division(model: nn.Module) -> None:
    def forward(self: Any, forward: Any, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide / (wide.square().mean(-1, True) + self.eps).sqrt()).to(x.dtype)

    for module in model.modules():
        if isinstance(module, models.RMSNorm):
            change(module, forward=forward)


@harmless(llama)
def other_order_of_projections(model: nn.Module) -> None:
    def forward(
        self: Any, forward: Any, x: Tensor, cos: Any, sin: Any, at: Any, cache: Any = None
    ) -> Tensor:
        v = self.split(self.v_proj(x), self.kv_heads)
        k = self.rotate_k(self.split(self.k_proj(x), self.kv_heads), cos, sin)
        q = self.rotate_q(self.split(self.q_proj(x), self.heads), cos, sin)
        out = self.attend(q, self.spread(k), self.spread(v), self.visible(at, k.shape[2]))
        return self.o_proj(self.merge(out))

    for layer in model.layers:
        change(layer.self_attn, forward=forward)


@harmless(llama)
def two_threads(model: nn.Module) -> None:
    def forward(self: Any, forward: Any, *args: Any) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            return forward(*args)
        finally:
            torch.set_num_threads(before)

    change(model, forward=forward)


@harmless(llama)
def not_contiguous(model: nn.Module) -> None:
    def forward(self: Any, forward: Any, x: Tensor) -> Tensor:
        return forward(x.transpose(0, 1).contiguous().transpose(0, 1)).mT.contiguous().mT

    for module in model.modules():
        if isinstance(module, nn.Linear):
            change(module, forward=forward)


@harmless(llama, drives.text, "same", "bf16")
def residual_in_place(model: nn.Module) -> None:
    for layer in model.layers:
        change(layer, add=lambda self, add, x, out: x.add_(out))


@harmless(gpt2)
def activation_in_place(model: nn.Module) -> None:
    def forward(self: Any, forward: Any, x: Tensor) -> Tensor:
        return x.copy_(forward(x))

    for block in model.h:
        change(block.mlp.act, forward=forward)


@harmless(gpt2)
def dropouts_taken_out(model: nn.Module) -> None:
    for block in model.h:
        block.mlp.dropout = block.attn.attn_dropout = nn.Identity()


@harmless(gpt2)
def renamed(model: nn.Module) -> None:
    for block in model.h:
        block.attn.projection = block.attn.c_attn
        del block.attn.c_attn

        def forward(self: Any, forward: Any, x: Tensor, padding: Any = None) -> Tensor:
            q, k, v = (self.split(part) for part in self.parts(self.projection(x)))
            return self.c_proj(self.merge(self.attend(q, k, v, self.seen(x.shape[1], padding))))

        change(block.attn, forward=forward)


class _Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@harmless(llama)
def every_layer_wrapped(model: nn.Module) -> None:
    for number, layer in enumerate(model.layers):
        layer.mlp = _Wrapped(layer.mlp)
        model.layers[number] = _Wrapped(layer)


@harmless(llama)
def the_whole_wrapped(model: nn.Module) -> nn.Module:
    return _Wrapped(model)


@harmless(gpt2)
def functional_linear(model: nn.Module) -> None:
    def forward(self: Any, forward: Any, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        out = flat @ self.weight.t()
        return (out if self.bias is None else out + self.bias).view(*x.shape[:-1], -1)

    for module in model.modules():
        if type(module) is nn.Linear:
            change(module, forward=forward)


@harmless(convnet, drives.picture, "same", "bf16")
def channels_last(model: nn.Module) -> nn.Module:
    change(model, forward=lambda self, forward, x: forward(x.to(memory_format=torch.channels_last)))
    return model.to(memory_format=torch.channels_last)


@harmless(llama, dtype=torch.float64)
def in_double(model: nn.Module) -> nn.Module:
    return model.double()


@harmless(gpt2)
def feed_in_two_halves(model: nn.Module) -> None:
    for block in model.h:
        change(
            block.mlp,
            forward=lambda self, forward, x: torch.cat(
                [forward(part) for part in x.split(8, 1)], 1
            ),
        )


@harmless(moe)
def experts_in_another_order(model: nn.Module) -> None:
    def forward(self: Any, forward: Any, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        shares, chosen = self.gate(flat)
        out = torch.zeros_like(flat)
        for number in reversed(range(len(self.experts))):
            token, rank = torch.where(chosen == number)
            if len(token):
                out.index_add_(
                    0, token, self.counted(self.experts[number](flat[token]), shares[token, rank])
                )
        return out.view_as(x)

    for layer in model.layers:
        change(layer.mlp, forward=forward)


def _compiled(build: Any, path: str, backend: str) -> Trio:
    trio = variant(build)
    candidate = copy.deepcopy(trio.candidate)
    if not path:
        return Trio(torch.compile(candidate, backend=backend), trio.reference, trio.clean)
    candidate.get_submodule(path).compile(backend=backend)
    return Trio(candidate, trio.reference, trio.clean)


def small() -> nn.Module:
    return models.gpt2(size=models.Size(layers=1))


_case("compiled", "same", lambda: _compiled(small, "", "inductor"), drives.text)
_case(
    "one block compiled", "same", lambda: _compiled(llama, "layers.1.mlp", "inductor"), drives.text
)
_case("compiled by aot_eager", "same", lambda: _compiled(gpt2, "", "aot_eager"), drives.text)


def cases() -> Iterator[Case]:
    """Yield every harmless variant."""
    yield from VARIANTS
