"""Training loops that the tool was not tuned on."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from localisation import drives
from localisation.cases import Case
from localisation.faults_backward import through
from localisation.planting import Fault, change, dtype_of, variant
from localisation.sizes import weigh

GROUP = "unseen drives"


# --- A model --------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """A small branch of two narrow products, times a factor."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, 4, bias=False), nn.Linear(4, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.times(self.b(self.a(x)))

    def times(self, x: Tensor) -> Tensor:
        return x * 2.0


class Softplus(nn.Module):
    """x times tanh(softplus(x))."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tanh(F.softplus(x))


class Part(nn.Module):
    """A block with a branch aside."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.act, self.down = nn.Linear(dim, 2 * dim), Softplus(), nn.Linear(2 * dim, dim)
        self.aside = Scaled(dim)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return self.joined(x, self.down(self.act(self.up(normed))), self.aside(normed))

    def joined(self, x: Tensor, out: Tensor, aside: Tensor) -> Tensor:
        return x + out + aside


class Loss(nn.Module):
    """Cross entropy with smoothed labels."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.mean(F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1))

    def mean(self, losses: Tensor) -> Tensor:
        return losses.mean()


class Tied(nn.Module):
    """Gives logits and the loss; the head is the embedding."""

    def __init__(self, dim: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, dim)
        self.parts = nn.ModuleList(Part(dim) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.loss = Loss()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(tokens[:, :-1])
        for part in self.parts:
            x = part(x)
        logits = F.linear(self.norm(x) * x.shape[-1] ** -0.5, self.table())
        return logits, self.loss(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    def table(self) -> Tensor:
        return self.embed.weight


class Twins(nn.Module):
    """One tower for two inputs, and how alike they are."""

    def __init__(self, dim: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, dim)
        self.tower = nn.Sequential(Part(dim), Part(dim), nn.LayerNorm(dim))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        left, right = (self.embed(each).mean(1) for each in tokens.chunk(2, 1))
        left, right = self.tower(left), self.other(self.tower(right))
        alike = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).mT
        return alike, F.cross_entropy(alike.float() / 0.2, torch.arange(len(alike)))

    def other(self, right: Tensor) -> Tensor:
        return right


def tied(*, outliers: bool = False) -> nn.Module:
    return weigh(Tied(), 81, outliers)


def twins(*, outliers: bool = False) -> nn.Module:
    return weigh(Twins(), 82, outliers)


# --- Loops ----------------------------------------------------------------------------------------


def _loop(optimizer: Any, every: int = 1, clip: float | None = None) -> Any:
    def drive(model: nn.Module) -> list[Tensor]:
        chosen, out = optimizer(model.parameters()), []
        for step in range(4):
            _, loss = model(drives.tokens(90 + step, batch=3, length=10, vocab=61))
            (loss / every).backward()
            if (step + 1) % every == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                chosen.step()
                chosen.zero_grad()
            out.append(loss.detach())
        return out

    return lambda dtype: drives.Run(drive=drive)


sgd = _loop(functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9))
adam = _loop(functools.partial(torch.optim.AdamW, lr=1e-3), clip=1.0)
gathered = _loop(functools.partial(torch.optim.SGD, lr=0.05), every=2)

FAULTS: list[Fault] = []


def wrong_gradient(build: Any, path: str, run: Any, position: int = 0, **more: Any) -> Any:
    """Declare a fault of a gradient from some step on."""

    def declare(function: Any) -> Any:
        FAULTS.append(
            Fault(
                f"unseen.{build.__name__} trained: {function.__name__}",
                "backward",
                build,
                path,
                function,
                run,
                position,
                "backward",
                GROUP,
                **{"regimes": ("same",), **more},
            )
        )
        return function

    return declare


def _counted(module: nn.Module, first: int, function: Any, *kept: str) -> None:
    """Change a module's forward from its `first`-th call on."""

    def forward(self: Any, forward: Any, *args: Any) -> Any:
        self.calls = self.calls + 1
        return function(self, forward, *args) if self.calls > first else forward(*args)

    module.calls = 0
    module.state = ("calls", *kept)
    change(module, forward=forward)


class MishOnlyUp(Function):
    """The activation, whose gradient is that of the positive side only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.tanh(F.softplus(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        soft = torch.tanh(F.softplus(x))
        right = soft + x * (1 - soft * soft) * torch.sigmoid(x)
        return grad * torch.where(x < 0, torch.zeros_like(x), right)


@wrong_gradient(tied, "parts.1.act", sgd, 2, regimes=("same", "bf16"))
def negative_side_lost_from_step_two(module, root):
    _counted(module, 2, lambda self, forward, x: MishOnlyUp.apply(x))


@wrong_gradient(tied, "parts.0.aside", adam)
def branch_without_its_factor(module, root):
    change(module, times=lambda self, times, x: times(through(x, lambda grad: grad / 2)))


@wrong_gradient(tied, "parts.1.down", gathered, 1)
def counted_twice_in_the_second_micro_batch(module, root):
    def twice(self, forward, x):
        return F.linear(x, through(self.weight, lambda grad: 2 * grad), self.bias)

    _counted(module, 1, twice)


@wrong_gradient(tied, "parts.0", sgd, regimes=("same", "bf16"))
def branch_detached(module, root):
    change(module, joined=lambda self, joined, x, out, aside: joined(x, out, aside.detach()))


@wrong_gradient(tied, "", adam)
def head_does_not_train_the_table(module, root):
    change(module, table=lambda self, table: table().detach())


@wrong_gradient(tied, "loss", sgd)
def mean_forgotten_in_backward(module, root):
    def mean(self, mean, losses):
        return mean(through(losses, lambda grad: grad * losses.numel()))

    change(module, mean=mean)


class NormWithoutMean(Function):
    """A layer norm whose gradient forgets that the mean depends on x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rstd = torch.rsqrt(x.var(-1, keepdim=True, correction=0) + eps)
        normed = (x - x.mean(-1, keepdim=True)) * rstd
        ctx.save_for_backward(normed, rstd, weight)
        return normed * weight + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        normed, rstd, weight = ctx.saved_tensors
        inner = grad * weight
        gx = rstd * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        axes = tuple(range(grad.dim() - 1))
        return gx, (grad * normed).sum(axes), grad.sum(axes), None


@wrong_gradient(tied, "norm", gathered)
def mean_term_missing(module, root):
    change(
        module,
        forward=lambda self, forward, x: NormWithoutMean.apply(x, self.weight, self.bias, self.eps),
    )


class StaleMask(Function):
    """A gate at zero whose gradient uses the mask it is handed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x * torch.tanh(F.softplus(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return grad * mask, None


@wrong_gradient(tied, "parts.0.act", sgd, 2)
def slope_of_the_step_before(module, root):
    def slope(x):
        soft = torch.tanh(F.softplus(x.detach()))
        return soft + x.detach() * (1 - soft * soft) * torch.sigmoid(x.detach())

    def forward(self, forward, x):
        self.calls = self.calls + 1
        new = slope(x)
        used = self.slope if self.calls > 2 else new
        self.slope = new
        return StaleMask.apply(x, used)

    module.calls, module.slope = 0, None
    module.state = ("calls", "slope")
    change(module, forward=forward)


@wrong_gradient(twins, "", sgd)
def second_tower_not_trained(module, root):
    change(module, other=lambda self, other, right: right.detach())


@wrong_gradient(twins, "tower.1.up", adam, regimes=("same", "bf16"))
def clamped_gradient(module, root):
    def forward(self, forward, x):
        return forward(through(x, lambda grad: grad.clamp(-1e-3, 1e-3)))

    change(module, forward=forward)


@wrong_gradient(tied, "parts.1.up", adam, 3)
def bias_gradient_stops_at_step_three(module, root):
    _counted(module, 3, lambda self, forward, x: F.linear(x, self.weight, self.bias.detach()))


# --- Right ones -----------------------------------------------------------------------------------


class Mish(MishOnlyUp):
    """The activation with the right gradient."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        soft = torch.tanh(F.softplus(x))
        return grad * (soft + x * (1 - soft * soft) * torch.sigmoid(x))


def by_hand(model: nn.Module) -> nn.Module:
    """The same with the activation's gradient by hand."""
    out = tied()
    out.load_state_dict(model.state_dict())
    for part in out.parts:
        change(part.act, forward=lambda self, forward, x: Mish.apply(x))
    return out


HARMLESS = (
    ("sgd", tied, None, sgd, ("same", "bf16")),
    ("adam", tied, None, adam, ("same",)),
    ("gathered", tied, None, gathered, ("bf16",)),
    ("twins", twins, None, adam, ("same", "bf16")),
    ("by hand", tied, by_hand, sgd, ("same", "bf16")),
)


def cases() -> Iterator[Case]:
    """Yield the faults of gradients and what is harmless."""
    for each in FAULTS:
        for regime in each.regimes:
            yield each.case(regime)
    for name, build, port, run, regimes in HARMLESS:
        for regime in regimes:
            yield Case(
                f"unseen.trained {name}/{regime}",
                GROUP,
                "harmless",
                regime,
                lambda b=build, p=port, r=regime: variant(b, r, port=p),
                run,
                dtype_of(regime),
                direction="backward",
            )
