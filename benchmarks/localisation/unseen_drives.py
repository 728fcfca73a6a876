"""Decode loops that the tool was not tuned on: other caches, beams, samples, guesses taken back.

The prompt has four tokens and is position 0; token number `at` is position ``at - 3``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from localisation import unseen_caches as caches
from localisation import unseen_transformers
from localisation.cases import Case
from localisation.planting import Fault, change, dtype_of, planted, variant
from localisation.unseen_caches import PAGE, WINDOW, decoder
from localisation.unseen_loops import (
    beams,
    chunked,
    greedy,
    guessed,
    handed,
    loop,
    pooled,
    sampled,
)

GROUP = "unseen drives"


# --- Builds ---------------------------------------------------------------------------------------


def _build(attention: type[caches.Keeping]) -> Callable[..., nn.Module]:
    def build(*, outliers: bool = False) -> nn.Module:
        return decoder(attention, outliers=outliers)

    build.__name__ = attention.__name__.lower()
    return build


def _port(attention: type[caches.Keeping]) -> Callable[[nn.Module], nn.Module]:
    def port(model: nn.Module) -> nn.Module:
        out = decoder(attention)
        out.load_state_dict(model.state_dict())
        return out

    port.__name__ = attention.__name__.lower()
    return port


ring, paged, listed, static = map(_build, (caches.Ring, caches.Paged, caches.Listed, caches.Static))
given_on, replaced = map(_build, (caches.Handed, caches.Replaced))
eight, pool, distant = map(_build, (caches.Eight, caches.Pooled, caches.Distant))


# --- Faults ---------------------------------------------------------------------------------------

FAULTS: list[Fault] = []
BOTH = ("same", "bf16")


def unseen(build: Any, path: str, position: int, run: Any = loop, **more: Any) -> Any:
    """Declare a fault that acts from a position on."""

    def declare(function: Any) -> Any:
        of = (
            build.__name__ if "port" not in more else f"{more['port'].__name__} as {build.__name__}"
        )
        FAULTS.append(
            Fault(
                f"unseen.{of} {run.__name__}: {function.__name__}",
                "decode",
                build,
                path,
                function,
                run,
                position,
                group=GROUP,
                **{"regimes": BOTH, **more},
            )
        )
        return function

    return declare


def _late(at: Tensor, first: int) -> bool:
    return int(at[-1]) >= first


@unseen(ring, "layers.1.attn", 3)
def slot_shifted_after_the_wrap(module, root):
    change(module, slot=lambda self, slot, at: slot(at + 1 if _late(at, 6) else at))


@unseen(ring, "layers.0.attn", 3)
def evicted_one_early(module, root):
    def seen(self, seen, at, when):
        out = seen(at, when)
        return out & (when > at[:, None] - WINDOW + 1) if _late(at, 6) else out

    change(module, seen=seen)


@unseen(ring, "layers.1.attn", 4, greedy, regimes=("same",))
def age_not_written(module, root):
    def keep(self, keep, k, v, at, past):
        old = self.when.clone()
        k, v, _when, past = keep(k, v, at, past)
        if _late(at, 7):
            self.when.copy_(old)
        return k, v, self.when, past

    change(module, keep=keep)


@unseen(paged, "layers.1.attn", 5)
def rows_share_the_third_page(module, root):
    def held(self, held, length):
        out = held(length).clone()
        out[1, 2:] = out[0, 2:]
        return out

    change(module, held=held)


@unseen(paged, "layers.0.attn", 4, sampled)
def last_of_a_page_written_before(module, root):
    def place(self, place, at):
        page, slot = place(at)
        return page, torch.where((slot == PAGE - 1) & (at >= 7), slot - 1, slot)

    change(module, place=place)


@unseen(paged, "layers.1.attn", 5, regimes=("same",))
def newest_page_forgotten(module, root):
    change(module, held=lambda self, held, length: held(length - 1 if length >= 9 else length))


@unseen(listed, "layers.0.attn", 4)
def one_before_the_last_lost(module, root):
    def joined(self, joined):
        if len(self.past) < 5:
            return joined()
        kept = [*self.past[:-2], self.past[-1], self.past[-1]]
        return tuple(torch.cat(each, 1) for each in zip(*kept, strict=True))

    change(module, joined=joined)


@unseen(listed, "layers.1", 3, sampled)
def residual_of_attention_only(module, root):
    def forward(self, forward, x, at, past=None, beam=None):
        out = forward(x, at, past, beam)
        return out - 0.1 * x if _late(at, 6) else out

    change(module, forward=forward)


@unseen(listed, "layers.1.attn", 3, beams)
def keys_not_reordered(module, root):
    def reorder(self, reorder, beam):
        old = self.past
        reorder(beam)
        if len(old) >= 3:
            self.past = [(k, v) for (k, _), (_, v) in zip(old, self.past, strict=True)]

    change(module, reorder=reorder)


@unseen(listed, "layers.0.attn", 2, beams, regimes=("same",))
def newest_not_reordered(module, root):
    def reorder(self, reorder, beam):
        last = self.past[-1]
        reorder(beam)
        self.past = [*self.past[:-1], last]

    change(module, reorder=reorder)


@unseen(static, "layers.1.attn", 4, greedy)
def copied_one_early(module, root):
    change(module, index=lambda self, index, at: at - 1 if _late(at, 7) else at)


@unseen(static, "layers.0.attn", 3)
def itself_hidden(module, root):
    def seen(self, seen, at, when):
        return seen(at - 1 if _late(at, 6) else at, when)

    change(module, seen=seen)


@unseen(static, "layers.1.attn", 2, sampled)
def an_empty_slot_seen(module, root):
    def seen(self, seen, at, when):
        return seen(at + 1 if _late(at, 5) else at, when)

    change(module, seen=seen)


@unseen(static, "", 1, chunked)
def second_chunk_starts_at_two(module, root):
    def positions(self, positions, tokens, start):
        return positions(tokens, 2 if start == 3 else start)

    change(module, positions=positions)


@unseen(static, "layers.0.attn", 2, chunked, regimes=("same",))
def third_chunk_sees_itself_whole(module, root):
    def seen(self, seen, at, when):
        return seen(at[-1:].expand_as(at) if int(at[0]) == 6 else at, when)

    change(module, seen=seen)


@unseen(given_on, "layers.1.attn", 3, handed)
def newest_value_twice(module, root):
    def keep(self, keep, k, v, at, past):
        return keep(k, past[1][:, -1:] if _late(at, 6) else v, at, past)

    change(module, keep=keep)


@unseen(given_on, "layers.0.attn", 4, handed)
def handed_on_scaled(module, root):
    def keep(self, keep, k, v, at, past):
        k, v, when, past = keep(k, v, at, past)
        return k, v, when, (past[0] * 1.05, past[1]) if _late(at, 7) else past

    change(module, keep=keep)


@unseen(given_on, "layers.0.attn", 5, handed)
def query_turned_too_far(module, root):
    change(module, query_at=lambda self, query_at, at: at + 1 if _late(at, 8) else at)


@unseen(given_on, "", 5, handed)
def positions_stop(module, root):
    def positions(self, positions, tokens, start):
        return positions(tokens, start).clamp(max=7)

    def forward(self, forward, tokens, start, past=None, beam=None):
        return forward(tokens, start, past, beam)

    change(module, positions=positions, forward=forward)


@unseen(replaced, "layers.1.attn", 3, guessed)
def one_guess_too_many_kept(module, root):
    def cut(self, cut, old, length):
        return cut(old, length + 1 if old.length > length else length)

    change(module, cut=cut)


@unseen(replaced, "layers.0.attn", 3, guessed, regimes=("same",))
def stale_guess_in_the_values(module, root):
    def cut(self, cut, old, length):
        new = cut(old, length)
        if old.length == length:
            return new
        values = torch.cat([new.values[:, :-1], old.values[:, length : length + 1]], 1)
        return caches.Snapshot(new.keys, values, length)

    change(module, cut=cut)


@unseen(eight, "layers.1.attn", 4)
def scale_of_the_token_before(module, root):
    def scale(self, scale, both, at):
        return self.scales[:, :, at - 1] * 1.0 if _late(at, 7) else scale(both, at)

    change(module, scale=scale)


@unseen(pool, "layers.1.attn", 3, pooled)
def written_to_the_other_layer(module, root):
    change(module, row=lambda self, row, at: 0 if _late(at, 6) else 1)


@unseen(distant, "layers.0.attn", 6, regimes=("same",))
def distance_ends_at_eight(module, root):
    change(module, bias=lambda self, bias, queries, keys: bias(queries, keys).clamp(min=-4.0))


@unseen(listed, "layers.1.attn", 5, port=_port(caches.Paged))
def ported_page_of_the_other_row(module, root):
    def held(self, held, length):
        out = held(length).clone()
        out[0, 2:] = out[1, 2:]
        return out

    change(module, held=held)


@unseen(listed, "layers.0.attn", 4, greedy, port=_port(caches.Static))
def ported_slot_one_early(module, root):
    change(module, index=lambda self, index, at: at - 1 if _late(at, 7) else at)


@unseen(listed, "layers.1.feed.narrow", 0, port=_port(caches.Paged))
def ported_weights(module, root):
    module.weight.data[[4, 9]] = module.weight.data[[9, 4]]


@unseen(static, "layers.0.attn", 3, sampled, port=_port(caches.Listed))
def ported_value_negated(module, root):
    def keep(self, keep, k, v, at, past):
        return keep(k, -v if _late(at, 6) else v, at, past)

    change(module, keep=keep)


@unseen(given_on, "layers.0.attn", 3, handed, port=_port(caches.Replaced))
def ported_cut_short(module, root):
    def cut(self, cut, old, length):
        if length < 6:
            return cut(old, length)
        keys = torch.cat([old.keys[:, 1:2], old.keys[:, 1:]], 1)
        return cut(caches.Snapshot(keys, old.values, old.length), length)

    change(module, cut=cut)


# --- Two at once ----------------------------------------------------------------------------------


PAIRS = (
    (
        "ring, head",
        ring,
        loop,
        ("layers.1.attn", slot_shifted_after_the_wrap, 3),
        ("layers.0.feed", 3),
    ),
    ("static, norm", static, greedy, ("layers.0.attn", itself_hidden, 3), ("norm", 3)),
    (
        "handed, feed",
        given_on,
        handed,
        ("layers.1.attn", newest_value_twice, 3),
        ("layers.1.feed", 3),
    ),
)


def _from_three(module: nn.Module, root: nn.Module) -> None:
    """Scale a little what comes out from position 3 on; the prompt starts the count."""

    def forward(self: Any, forward: Any, x: Tensor) -> Tensor:
        self.calls = 0 if x.shape[1] > 1 else self.calls + 1
        out = forward(x)
        return out * 1.002 if self.calls >= 3 else out

    module.calls = 0
    module.state = ("calls",)
    change(module, forward=forward)


def _two() -> Iterator[Case]:
    for name, build, run, (path, plant, position), (minor, _) in PAIRS:
        pair = [
            Fault(name, "two faults", build, where, how, run)
            for where, how in ((path, plant), (minor, _from_three))
        ]
        yield Case(
            f"unseen.two {name}/same",
            GROUP,
            "two faults",
            "same",
            lambda pair=pair: planted(pair, "same"),
            run,
            expected=path,
            also=(minor,),
            position=position,
        )


# --- Nothing wrong --------------------------------------------------------------------------------

HARMLESS = (
    # Build, port, run, regimes.
    (ring, None, loop, BOTH),
    (paged, None, sampled, ("bf16",)),
    (listed, None, beams, BOTH),
    (static, None, chunked, ("bf16",)),
    (replaced, None, guessed, BOTH),
    (eight, None, loop, BOTH),
    (pool, None, pooled, BOTH),
    (distant, None, sampled, ("same",)),
    (listed, _port(caches.Paged), loop, BOTH),
    (paged, _port(caches.Static), greedy, BOTH),
    (given_on, _port(caches.Replaced), handed, ("same",)),
)


def _harmless() -> Iterator[Case]:
    for build, port, run, regimes in HARMLESS:
        for regime in regimes:
            of = build.__name__ if port is None else f"{port.__name__} as {build.__name__}"
            yield Case(
                f"unseen.{of} {run.__name__}: harmless/{regime}",
                GROUP,
                "harmless",
                regime,
                lambda b=build, p=port, r=regime: variant(b, r, port=p),
                run,
                dtype_of(regime),
            )


def cases() -> Iterator[Case]:
    """Yield the faults, two at once, and what is harmless."""
    for each in FAULTS:
        for regime in each.regimes:
            yield each.case(regime)
    yield from _two()
    yield from _harmless()
    yield from unseen_transformers.cases()
