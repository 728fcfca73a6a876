"""Checks without a reference that the tool was not tuned on: a broken kernel, an overflow, none.

A kernel of torch is broken in float32 only, as long as the models of its case live.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from localisation import drives, unseen_caches, unseen_drives, unseen_training, unseen_transformers
from localisation.cases import Case, Trio
from localisation.planting import dtype_of
from localisation.sizes import weigh

GROUP = "unseen drives"


# --- Broken kernels -------------------------------------------------------------------------------


@dataclass(eq=False)
class Broken(Case):
    """A case in which a kernel of torch itself is wrong in float32, while its models live."""

    op: str = ""
    kernel: Callable[..., Any] | None = None

    @cached_property
    def trio(self) -> Trio:  # type: ignore[override]
        """The models; the kernel is broken from here on."""
        made = super().trio
        if self.kernel is not None:
            self.library = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.library.impl(self.op, self.kernel, "CPU")
        return made

    def forget(self) -> None:
        """Mend the kernel."""
        super().forget()
        if self.kernel is not None:
            self.library._destroy()


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def silu_tail(x: Tensor) -> Tensor:
    """The last four of a row are passed on as they are, in float32."""
    out = x * _sigmoid(x)
    if x.dtype == torch.float32:
        out[..., -4:] = x[..., -4:]
    return out


def silu_alone(x: Tensor) -> Tensor:
    """A single row comes out a little too large, in float32."""
    out = x * _sigmoid(x)
    return out * 1.01 if x.dtype == torch.float32 and x.shape[-2] == 1 else out


def softmax_low(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """The exponentials are held in bfloat16."""
    weights = (x - x.amax(dim, keepdim=True)).exp()
    if x.dtype == torch.float32:
        weights = weights.bfloat16().float()
    return weights / weights.sum(dim, keepdim=True)


def bmm_low(a: Tensor, b: Tensor) -> Tensor:
    """The factors are held in bfloat16."""
    if a.dtype == torch.float32:
        a, b = a.bfloat16().float(), b.bfloat16().float()
    return (a[..., None] * b[:, None]).sum(2)


def rsqrt_rough(x: Tensor) -> Tensor:
    """The first guess of the reciprocal root without a second step."""
    exact = 1 / torch.sqrt(x)
    return exact * (1 + 1e-4) if x.dtype == torch.float32 else exact


class PlainSilu(nn.Module):
    """SiLU without its kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return x * _sigmoid(x)


class Mixing(nn.Module):
    """Attention over a few tokens; each step is a method."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weights(x) @ x

    def weights(self, x: Tensor) -> Tensor:
        return torch.softmax(x @ x.mT * x.shape[-1] ** -0.5, -1)


class PlainMixing(Mixing):
    """The same without kernels."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.weights(x)[..., None] * x[:, None]).sum(2)

    def weights(self, x: Tensor) -> Tensor:
        scores = (x[:, :, None] * x[:, None]).sum(-1) * x.shape[-1] ** -0.5
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return weights / weights.sum(-1, keepdim=True)


class Norm(nn.Module):
    """Root mean square norm."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class PlainNorm(nn.Module):
    """The same without the kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)


class Stack(nn.Module):
    """What is needed to meet each kernel; no module of the same kind comes twice."""

    def __init__(self, *, plain: bool) -> None:
        super().__init__()
        self.enter = nn.Linear(24, 40)
        self.norm = PlainNorm() if plain else Norm()
        self.mixing = PlainMixing() if plain else Mixing()
        self.act = PlainSilu() if plain else nn.SiLU()
        self.leave = nn.Linear(40, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.enter(x))
        return self.leave(self.act(x + self.mixing(x)))


@torch.library.custom_op("unseen::rough_exp", mutates_args=())
def rough_exp(x: Tensor) -> Tensor:
    """exp, through half precision where it is asked in float32."""
    return x.half().exp().to(x.dtype) if x.dtype == torch.float32 else x.exp()


@torch.library.custom_op("unseen::fine_exp", mutates_args=())
def fine_exp(x: Tensor) -> Tensor:
    """exp, as it should be."""
    return x.double().exp().to(x.dtype)


class RoughExp(nn.Module):
    """exp by the rough op."""

    def forward(self, x: Tensor) -> Tensor:
        return rough_exp(x)


class FineExp(nn.Module):
    """exp by the other."""

    def forward(self, x: Tensor) -> Tensor:
        return fine_exp(x)


class PlainExp(nn.Module):
    """exp of torch."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class Hot(nn.Module):
    """exp in half precision, of numbers too large for it."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 14).half().exp().float().log1p()


class Warm(Hot):
    """The same in single precision."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 14).exp().log1p()


def _stack(seed: int, plain: bool, act: nn.Module | None = None) -> nn.Module:
    model = weigh(Stack(plain=plain), seed)
    if act is not None:
        model.act = act
    return model


def _once(dtype: torch.dtype) -> drives.Run:
    generator = torch.Generator().manual_seed(91)
    return drives.Run((torch.randn(3, 12, 24, generator=generator).to(dtype),))


def _stepwise(dtype: torch.dtype) -> drives.Run:
    generator = torch.Generator().manual_seed(92)
    given = torch.randn(3, 9, 24, generator=generator).to(dtype)

    def drive(model: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            edges = (0, 4, 6, 7, 8, 9)
            return [model(given[:, a:b]) for a, b in itertools.pairwise(edges)]

    return drives.Run(drive=drive)


BROKEN = (
    # Name, op, kernel, path, run, position.
    ("silu drops its tail", "silu", silu_tail, "act", _once, 0),
    ("silu of one row", "silu", silu_alone, "act", _stepwise, 2),
    ("softmax in low precision", "_softmax", softmax_low, "mixing", _once, 0),
    ("bmm in low precision", "bmm", bmm_low, "mixing", _once, 0),
    ("rsqrt is rough", "rsqrt", rsqrt_rough, "norm", _stepwise, 0),
)


def _without() -> Iterator[Case]:
    for name, op, kernel, path, run, position in BROKEN:
        yield Broken(
            name=f"unseen.alone {name}/same",
            group=GROUP,
            kind="without a reference",
            regime="same",
            make=lambda: Trio(_stack(83, False), None, _stack(83, True)),
            run=run,
            expected=path,
            position=position,
            op=op,
            kernel=kernel,
        )
    for name, act, clean in (
        ("rough op", RoughExp(), PlainExp()),
        ("overflow in half", Hot(), Warm()),
    ):
        yield Case(
            f"unseen.alone {name}/same",
            GROUP,
            "without a reference",
            "same",
            lambda a=act, c=clean: Trio(_stack(83, False, a), None, _stack(83, False, c)),
            _once,
            expected="act",
            position=0,
        )


def _alone(name: str, build: Any, run: Any, regime: str = "same") -> Case:
    def make() -> Trio:
        model = build().to(dtype_of(regime))
        return Trio(model, None, model)

    dtype = dtype_of(regime)
    return Case(f"unseen.alone {name}/{regime}", GROUP, "harmless", regime, make, run, dtype)


def _clean_alone() -> Iterator[Case]:
    yield _alone("stack", lambda: _stack(83, False), _stepwise)
    yield _alone("stack", lambda: _stack(83, False), _stepwise, "bf16")
    yield _alone("fine op", lambda: _stack(83, False, FineExp()), _once)
    yield _alone("paged", unseen_drives.paged, unseen_drives.sampled)
    yield _alone("ring", unseen_drives.ring, unseen_drives.loop, "bf16")
    yield _alone(
        "eight bits", lambda: unseen_caches.decoder(unseen_caches.Eight), unseen_drives.loop
    )
    yield _alone("trained", unseen_training.tied, unseen_training.sgd)
    yield _alone(
        "trained by hand",
        lambda: unseen_training.by_hand(unseen_training.tied()),
        unseen_training.adam,
    )
    yield _alone("twins", unseen_training.twins, unseen_training.gathered, "bf16")
    if any(True for _ in unseen_transformers.cases()):
        yield _alone(
            "mistral",
            lambda: unseen_transformers._model("mistral", "sdpa"),
            unseen_transformers.drawn,
        )


def cases() -> Iterator[Case]:
    """Yield what is wrong and what is not."""
    yield from _without()
    yield from _clean_alone()
