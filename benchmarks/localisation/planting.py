"""How a fault is planted: a copy of the model in which one module is changed.

`fault` is the decorator under which `faults_*` write theirs; `regime` says how the candidate's
arithmetic differs beside the fault. Knows nothing of the faults themselves.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from localisation import drives
from localisation.cases import Case, Trio
from localisation.drives import Run

REGIMES = ("same", "reordered", "bf16", "outliers")
GROUP_OF = {
    "same": "same code",
    "reordered": "re-ordered",
    "bf16": "bf16 and outliers",
    "outliers": "bf16 and outliers",
}


@dataclass(frozen=True)
class Fault:
    """One way to be wrong, and the one place where it is."""

    name: str
    kind: str
    build: Callable[..., nn.Module]
    path: str
    """Dotted path of the innermost module that runs the wrong ops."""
    plant: Callable[[nn.Module, nn.Module], Any]
    """Is handed the module and the root."""
    run: Callable[[torch.dtype], Run] = drives.text
    position: int = 0
    direction: str = "forward"
    group: str | None = None
    regimes: Sequence[str] = REGIMES
    port: Callable[[nn.Module], nn.Module] | None = None
    """Makes the candidate's code, where it is not the model's own."""
    against: Callable[[nn.Module], nn.Module] | None = None
    """Makes the reference's code, where it is not the model's own."""

    def case(self, regime: str) -> Case:
        """Return the case in one regime."""
        return Case(
            name=f"{self.name}/{regime}",
            group=self.group or GROUP_OF[regime],
            kind=self.kind,
            regime=regime,
            make=lambda: planted((self,), regime),
            run=self.run,
            dtype=dtype_of(regime),
            expected=self.path,
            position=self.position,
            direction=self.direction,
        )


FAULTS: list[Fault] = []
"""All that were declared, in the order of declaration."""


def fault(build: Callable[..., nn.Module], path: str, kind: str, **more: Any) -> Callable[..., Any]:
    """Declare the decorated function as a fault of one module of a model."""

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        of = (more.get("port") or build).__name__
        other = f" against {more['against'].__name__}" if more.get("against") else ""
        name = f"{of}.{function.__name__}{other}"
        FAULTS.append(Fault(name, kind, build, path, function, **more))
        return function

    return declare


def planted(faults: Sequence[Fault], regime: str) -> Trio:
    """Return the two sides of faults in one model, and the candidate without the faults."""
    first = faults[0]
    trio = variant(first.build, regime, port=first.port, against=first.against)
    for each in faults:
        each.plant(trio.candidate.get_submodule(each.path), trio.candidate)
    return trio


def variant(
    build: Callable[..., nn.Module],
    regime: str = "same",
    *,
    port: Callable[[nn.Module], nn.Module] | None = None,
    against: Callable[[nn.Module], nn.Module] | None = None,
) -> Trio:
    """Return a candidate in which nothing is wrong, its reference, and a copy of the candidate."""
    model = build(outliers=True) if regime == "outliers" else build()
    clean = copy.deepcopy(model) if port is None else port(model).eval()
    reference = model if against is None else against(model).eval()
    for each in (*reference.parameters(), *clean.parameters()):
        each.requires_grad_(True)
    change_arithmetic(clean, regime)
    return Trio(copy.deepcopy(clean), reference, clean)


# --- Changing a module ----------------------------------------------------------------------------


def change(module: nn.Module, **methods: Callable[..., Any]) -> None:
    """Override methods of one module; each is handed the module and the original first."""
    base = type(module)
    body = {name: _overriding(getattr(base, name), each) for name, each in methods.items()}
    module.__class__ = type(base.__name__, (base,), body)


def _overriding(original: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, functools.partial(original, self), *args, **kwargs)

    return method


def on_output(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Change what a module returns."""
    change(module, forward=lambda self, forward, *a, **k: function(forward(*a, **k)))


# --- Regimes --------------------------------------------------------------------------------------


def dtype_of(regime: str) -> torch.dtype:
    """Return the candidate's dtype."""
    return torch.bfloat16 if regime in ("bf16", "outliers") else torch.float32


def change_arithmetic(model: nn.Module, regime: str) -> None:
    """Let a model compute as the regime says; it is still right."""
    if regime == "reordered":
        reorder(model)
    model.to(dtype_of(regime))


def reorder(model: nn.Module) -> None:
    """Let every linear layer and convolution add up in another order."""
    for module in list(model.modules()):
        if type(module) is nn.Linear:
            change(module, forward=split_k)
        elif type(module) is nn.Conv2d:
            change(module, forward=unfolded)


def split_k(self: nn.Linear, forward: Any, x: Tensor) -> Tensor:
    """Add four partial products, the last first."""
    parts = [F.linear(a, b) for a, b in zip(x.chunk(4, -1), self.weight.chunk(4, -1), strict=True)]
    out = functools.reduce(torch.add, reversed(parts))
    return out if self.bias is None else out + self.bias


def unfolded(self: nn.Conv2d, forward: Any, x: Tensor) -> Tensor:
    """Convolve by a product with unfolded patches."""
    columns = F.unfold(x, self.kernel_size, self.dilation, self.padding, self.stride)
    batch, _, places = columns.shape
    columns = columns.view(batch, self.groups, -1, places)
    weight = self.weight.view(self.groups, self.out_channels // self.groups, -1)
    out = torch.einsum("bgkp,gok->bgop", columns, weight).reshape(batch, self.out_channels, -1)
    if self.bias is not None:
        out = out + self.bias[:, None]
    high = (x.shape[2] + 2 * self.padding[0] - self.kernel_size[0]) // self.stride[0] + 1
    return out.view(batch, self.out_channels, high, -1)
