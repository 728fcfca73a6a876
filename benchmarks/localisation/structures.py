"""Models of another build: dictionaries as outputs, a block called again, layers of torch.

What is told here is that a tool follows tensors, not conventions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from localisation import drives, models, ports
from localisation.cases import Case, Trio
from localisation.copies import linear, norm_like
from localisation.planting import change, dtype_of, fault, on_output, variant

GROUP = "callables and structures"
BOTH = ("same", "bf16")


def planted(build: Any, path: str, kind: str, **more: Any) -> Any:
    """Declare a fault of this group."""
    return fault(build, path, kind, **{"regimes": BOTH, "group": GROUP, **more})


# --- Dictionaries, tuples, keywords ---------------------------------------------------------------


class TupleAttention(nn.Module):
    """Gives its weights too, and takes its mask by keyword."""

    def __init__(self, attention: models.GPTAttention) -> None:
        super().__init__()
        self.heads = attention.heads
        self.qkv = linear(attention.c_attn.weight, bias=attention.c_attn.bias)
        self.out = linear(attention.c_proj.weight, bias=attention.c_proj.bias)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(hidden).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        weights = self.weights((q @ k.mT) / q.shape[-1] ** 0.5, mask)
        return self.out((weights @ v).transpose(1, 2).flatten(2)), weights

    def weights(self, scores: Tensor, mask: Tensor) -> Tensor:
        return (scores + mask).softmax(-1)


class DictBlock(nn.Module):
    """Gives a dictionary."""

    def __init__(self, block: models.GPTBlock) -> None:
        super().__init__()
        self.before = norm_like(block.ln_1)
        self.attention = TupleAttention(block.attn)
        self.between = norm_like(block.ln_2)
        self.feed = nn.Sequential(
            linear(block.mlp.c_fc.weight, bias=block.mlp.c_fc.bias),
            nn.GELU(),
            linear(block.mlp.c_proj.weight, bias=block.mlp.c_proj.bias),
        )

    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        out, weights = self.attention(self.before(state["hidden"]), mask=state["mask"])
        hidden = state["hidden"] + out
        hidden = hidden + self.feed(self.between(hidden))
        return {**state, "hidden": hidden, "weights": [*state["weights"], weights]}


class DictGPT(nn.Module):
    """The GPT-2 whose blocks hand a dictionary on; gives logits and more."""

    def __init__(self, model: models.GPT2) -> None:
        super().__init__()
        self.embedding = nn.ModuleList(
            nn.Embedding.from_pretrained(each.weight.detach().clone(), freeze=False)
            for each in (model.wte, model.wpe)
        )
        self.blocks = nn.ModuleList(DictBlock(each) for each in model.h)
        self.last = norm_like(model.ln_f)
        self.classify = linear(model.lm_head.weight)

    def forward(self, ids: Tensor) -> dict[str, Any]:
        length = ids.shape[1]
        hidden = self.embedding[0](ids) + self.embedding[1](torch.arange(length))
        mask = torch.full((length, length), -1e9, dtype=hidden.dtype).triu(1)
        state: dict[str, Any] = {"hidden": hidden, "mask": mask, "weights": []}
        for block in self.blocks:
            state = block(state)
        return {"logits": self.classify(self.last(state["hidden"]))}


@planted(models.gpt2, "blocks.1.attention", "attention scale", port=DictGPT)
def dict_weights_not_normed(module, root):
    change(module, weights=lambda self, weights, scores, mask: weights(scores * 1.1, mask))


@planted(models.gpt2, "blocks.2.feed.0", "weights", port=DictGPT)
def dict_feed_row(module, root):
    module.weight.data[4] *= -1


@planted(models.gpt2, "last", "norm layers", port=DictGPT)
def dict_last_shift_missing(module, root):
    module.bias.data += 0.2


# --- One block, called again and again ------------------------------------------------------------


class Shared(nn.Module):
    """The same block three times."""

    def __init__(self) -> None:
        super().__init__()
        size = models.SIZE
        self.emb = nn.Embedding(size.vocab, size.dim)
        self.block = models.GPTBlock(size)
        self.head = nn.Linear(size.dim, size.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.emb(tokens)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


def shared(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Shared(), 51, outliers)


class Unshared(nn.Module):
    """The same with three copies, and the activation shared."""

    def __init__(self, model: Shared) -> None:
        super().__init__()
        self.table = nn.Embedding.from_pretrained(model.emb.weight.detach().clone(), freeze=False)
        self.act = nn.GELU()
        self.parts = nn.ModuleList(ports.SplitBlock(model.block) for _ in range(3))
        for part in self.parts:
            part.ff[1] = self.act
        self.logits = linear(model.head.weight, bias=model.head.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        mask = torch.full((x.shape[1], x.shape[1]), -1e9, dtype=x.dtype).triu(1)
        for part in self.parts:
            x = part(x, mask)
        return self.logits(x)


@planted(shared, "block.attn.c_proj", "weights")
def shared_rows_swapped(module, root):
    module.weight.data[[2, 9]] = module.weight.data[[9, 2]]


@planted(shared, "block", "residuals")
def shared_residual_scaled(module, root):
    change(module, add=lambda self, add, x, out: x + 1.2 * out)


@planted(shared, "parts.1.k_lin", "weights", port=Unshared)
def one_copy_differs(module, root):
    module.weight.data[6] *= -1


# --- Layers of torch itself -----------------------------------------------------------------------


class Speech(nn.Module):
    """A convolution over time, a GRU, attention of torch, a head."""

    def __init__(self, dim: int = 32) -> None:
        super().__init__()
        self.emb = nn.Embedding(101, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.rnn = nn.GRU(dim, dim, num_layers=2, batch_first=True)
        self.mha = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.head = nn.Linear(dim, 101)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.relu(self.conv(self.emb(tokens).mT)).mT
        x, _ = self.rnn(x)
        out, _ = self.mha(x, x, x, need_weights=False)
        return self.head(x + out)


def speech(*, outliers: bool = False) -> nn.Module:
    return models.weigh(Speech(), 52, outliers)


@planted(speech, "rnn", "weights")
def recurrent_weight(module, root):
    module.weight_hh_l1.data[3] *= -1


@planted(speech, "mha", "weights")
def projection_in(module, root):
    module.in_proj_weight.data[40] *= -1


@planted(speech, "conv", "conv layers")
def time_shifted(module, root):
    on_output(module, lambda out: out.roll(1, -1))


@planted(speech, "", "residuals")
def attention_added_twice(module, root):
    def forward(self, forward, tokens):
        x = F.relu(self.conv(self.emb(tokens).mT)).mT
        x, _ = self.rnn(x)
        out, _ = self.mha(x, x, x, need_weights=False)
        return self.head(x + out + out)

    change(module, forward=forward)


# --- An op of one's own ---------------------------------------------------------------------------


@torch.library.custom_op("localisation::rms_norm", mutates_args=())
def own_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """An op that nothing can look into."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, True) + eps)).to(x.dtype) * weight


class OpaqueNorm(nn.Module):
    """A norm by that op."""

    def __init__(self, norm: models.RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(norm.weight.detach().clone()), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        return own_rms_norm(x, self.weight, self.eps)


def opaque(model: models.Llama) -> nn.Module:
    """Return the Llama with that op in all norms of its blocks."""
    out = models.llama()
    out.load_state_dict(model.state_dict())
    for layer in out.layers:
        layer.input_layernorm = OpaqueNorm(layer.input_layernorm)
        layer.post_attention_layernorm = OpaqueNorm(layer.post_attention_layernorm)
    return out


@planted(models.llama, "layers.1.input_layernorm", "eps", port=opaque)
def opaque_eps(module, root):
    module.eps = 0.05


@planted(models.llama, "layers.2.mlp.down_proj", "weights", port=opaque)
def behind_the_opaque(module, root):
    module.weight.data[1] *= -1


# --- Nothing wrong --------------------------------------------------------------------------------


def _autocast(dtype: torch.dtype) -> drives.Run:
    def drive(model: nn.Module) -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(drives.tokens())

    return drives.Run(drive=drive)


def _checkpointed(model: models.Llama) -> nn.Module:
    out = models.llama()
    out.load_state_dict(model.state_dict())
    for layer in out.layers:
        change(
            layer, forward=lambda self, forward, *a: checkpoint(forward, *a, use_reentrant=False)
        )
    return out


def _training(build: Any) -> Trio:
    trio = variant(build)
    for each in (trio.candidate, trio.reference, trio.clean):
        each.train()
    return trio


def _seeded_training(dtype: torch.dtype) -> drives.Run:
    def drive(model: nn.Module) -> Tensor:
        torch.manual_seed(5)
        return drives.train(dtype)(model)

    return drives.Run(drive=drive)


def cases() -> Iterator[Case]:
    """Yield what is harmless; the faults are declared with all others."""
    for name, build, port in (
        ("dictionaries", models.gpt2, DictGPT),
        ("shared block", shared, None),
        ("shared block unshared", shared, Unshared),
        ("layers of torch", speech, None),
        ("opaque op", models.llama, opaque),
    ):
        for regime in BOTH:
            make = _maker(build, regime, port)
            yield _harmless(f"{name}/{regime}", regime, make, drives.text)
    yield _harmless("autocast/same", "same", lambda: variant(models.llama), _autocast)
    yield _harmless(
        "checkpointed/same",
        "same",
        _maker(models.llama, "same", _checkpointed),
        drives.train,
        direction="backward",
    )
    yield _harmless(
        "batch norm in training/same",
        "same",
        lambda: _training(models.convnet),
        drives.train_picture,
        direction="backward",
    )
    yield _harmless(
        "dropout in training/same",
        "same",
        lambda: _training(models.gpt2),
        _seeded_training,
        direction="backward",
    )


def _maker(build: Any, regime: str, port: Any) -> Any:
    return lambda: variant(build, regime, port=port)


def _harmless(name: str, regime: str, make: Any, run: Any, **more: Any) -> Case:
    dtype = dtype_of(regime)
    return Case(f"structure.{name}", GROUP, "harmless", regime, make, run, dtype, **more)
