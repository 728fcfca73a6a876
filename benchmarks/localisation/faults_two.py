"""Two faults at once: the one that matters more must be named first.

`matters` proves which one that is: by how much of the final difference its repair takes away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from localisation import drives, faults_decode, models, ports
from localisation.cases import Case
from localisation.planting import Fault, change, dtype_of, on_output, planted

Plant = Callable[[nn.Module, nn.Module], Any]


# --- Small and large ways to be wrong -------------------------------------------------------------


def slightly_scaled(module: nn.Module, root: nn.Module) -> None:
    on_output(module, lambda out: out * 1.002)


def scaled(module: nn.Module, root: nn.Module) -> None:
    on_output(module, lambda out: out * 1.02)


def tail_dropped(module: nn.Module, root: nn.Module) -> None:
    change(
        module,
        forward=lambda self, forward, x: F.linear(x[..., :-12], self.weight[:, :-12], self.bias),
    )


def one_weight(module: nn.Module, root: nn.Module) -> None:
    module.weight.data.view(-1)[7] *= 1.5


def rows_swapped(module: nn.Module, root: nn.Module) -> None:
    module.weight.data = module.weight.data.roll(1, 0)


def unmasked(module: nn.Module, root: nn.Module) -> None:
    change(module, visible=lambda self, visible, at, keys: torch.ones_like(visible(at, keys)))


def gelu(module: nn.Module, root: nn.Module) -> None:
    change(module, forward=lambda self, forward, x: F.gelu(x))


def tanh_gelu(module: nn.Module, root: nn.Module) -> None:
    module.approximate = "tanh"


def eps(module: nn.Module, root: nn.Module) -> None:
    module.eps = 1e-2


def no_residual(module: nn.Module, root: nn.Module) -> None:
    change(module, add=lambda self, add, x, out: out)


def slightly_off_residual(module: nn.Module, root: nn.Module) -> None:
    change(module, add_last=lambda self, add, x, out: x + 1.003 * out)


def mask_seen(module: nn.Module, root: nn.Module) -> None:
    change(module, allowed=lambda self, allowed, where, keys: torch.ones_like(allowed(where, keys)))


def shares_flipped(module: nn.Module, root: nn.Module) -> None:
    def choose(self: Any, choose: Any, shares: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        shares, chosen = choose(shares, dtype)
        return shares.flip(-1), chosen

    change(module, choose=choose)


def first_step_wrong(module: nn.Module, root: nn.Module) -> None:
    faults_decode.from_call(module, 2, lambda out: out.roll(1, 0))


def first_step_off(module: nn.Module, root: nn.Module) -> None:
    faults_decode.from_call(module, 2, lambda out: out * 1.004)


llama, gpt2, moe, convnet = models.llama, models.gpt2, models.moe, models.convnet
text, picture = drives.text, drives.picture

PAIRS: Sequence[
    tuple[str, Callable[..., nn.Module], Any, Any, tuple[str, Plant], tuple[str, Plant]]
] = (
    # Name, model, port, drive, the one that matters, the other.
    (
        "small first",
        llama,
        None,
        text,
        ("layers.2.mlp.down_proj", tail_dropped),
        ("layers.0.mlp.up_proj", slightly_scaled),
    ),
    (
        "small last",
        llama,
        None,
        text,
        ("layers.0.self_attn", unmasked),
        ("layers.2.self_attn.o_proj", one_weight),
    ),
    (
        "same layer",
        llama,
        None,
        text,
        ("layers.1.mlp.act_fn", gelu),
        ("layers.1.mlp.gate_proj", slightly_scaled),
    ),
    (
        "sibling after",
        llama,
        None,
        text,
        ("layers.1.self_attn.v_proj", rows_swapped),
        ("layers.1.self_attn.o_proj", slightly_scaled),
    ),
    (
        "parent and child",
        llama,
        None,
        text,
        ("layers.1", no_residual),
        ("layers.1.mlp.up_proj", one_weight),
    ),
    (
        "child over parent",
        llama,
        None,
        text,
        ("layers.2.mlp.down_proj", rows_swapped),
        ("layers.2", slightly_off_residual),
    ),
    ("norm and head", llama, None, text, ("lm_head", rows_swapped), ("norm", eps)),
    (
        "head small",
        gpt2,
        None,
        text,
        ("h.0.attn.c_proj", tail_dropped),
        ("lm_head", slightly_scaled),
    ),
    ("two activations", gpt2, None, text, ("h.2.mlp.c_proj", scaled), ("h.0.mlp.act", tanh_gelu)),
    ("embedding small", gpt2, None, text, ("h.1.mlp.c_fc", rows_swapped), ("wpe", one_weight)),
    (
        "routing",
        moe,
        None,
        text,
        ("layers.1.mlp.gate", shares_flipped),
        ("layers.0.mlp.experts.0.down_proj", slightly_scaled),
    ),
    (
        "convolutions",
        convnet,
        None,
        picture,
        ("stage1.1.pwconv2", rows_swapped),
        ("stem.0", one_weight),
    ),
    (
        "fused",
        llama,
        ports.FusedLlama,
        text,
        ("blocks.2.attn", mask_seen),
        ("blocks.0.ffn.w13", slightly_scaled),
    ),
    (
        "fused late small",
        llama,
        ports.FusedLlama,
        text,
        ("blocks.0.attn.wo", tail_dropped),
        ("blocks.2.ffn.w2", slightly_scaled),
    ),
    (
        "split",
        gpt2,
        ports.SplitGPT,
        text,
        ("body.1.v_lin", rows_swapped),
        ("body.0.ff.1", tanh_gelu),
    ),
    (
        "decoding",
        faults_decode.buffered,
        None,
        drives.decode,
        ("layers.1.mlp.act_fn", first_step_wrong),
        ("layers.0.mlp.up_proj", first_step_off),
    ),
)


def cases() -> Iterator[Case]:
    """Yield each pair with the same kernels and in bf16."""
    for name, build, port, run, major, minor in PAIRS:
        for regime in ("same", "bf16"):
            yield _case(name, build, port, run, (major, minor), regime)


def _case(name: str, build: Any, port: Any, run: Any, pair: Any, regime: str) -> Case:
    faults = [Fault(name, "two faults", build, path, plant, run, port=port) for path, plant in pair]
    return Case(
        name=f"two.{name}/{regime}",
        group="two faults",
        kind="two faults",
        regime=regime,
        make=lambda: planted(faults, regime),
        run=run,
        dtype=dtype_of(regime),
        expected=pair[0][0],
        also=(pair[1][0],),
        position=2 if run is drives.decode else 0,
    )


def matters() -> Iterator[tuple[str, float, float]]:
    """Yield, for each pair, the final difference that is left when either fault is repaired."""
    for name, build, port, run, major, minor in PAIRS:
        clean = _final(planted(_faults(build, port), "same").clean, run)
        left = []
        for kept in (minor, major):
            trio = planted(_faults(build, port, kept), "same")
            left.append(float((_final(trio.candidate, run) - clean).norm() / clean.norm()))
        yield name, left[0], left[1]


def _faults(build: Any, port: Any, *kept: Any) -> list[Fault]:
    pairs = kept or (("", lambda module, root: None),)
    return [Fault("", "", build, path, plant, port=port) for path, plant in pairs]


def _final(model: nn.Module, run: Any) -> Tensor:
    with torch.no_grad():
        out = tree_leaves(run(torch.float32)(model))
    return out[2 if run is drives.decode else -1].double()
