"""Compiled modules: one brick each, held at its boundary against its eager original.

What torch.compile made runs as it is, with every dispatch mode out of its way (under one it would
run eagerly), and the original is then executed on the same inputs in its own dtype and in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from brickline.checking.evidence import Evidence
from brickline.checking.snapshot import RandomState, State, snapshot
from brickline.checking.stage import Stage, is_compiled
from brickline.checking.watching import Place, Watch
from brickline.oracle.holding import CULPRIT, WATCH, Held, same
from brickline.oracle.noise import Noisy
from brickline.oracle.ratios import measure
from brickline.oracle.widen import Widened
from brickline.verdict import Verdict

NOISE_GAIN = 2.0
"""One draw of the noise stands for all."""
REGION = "compiled region"
"""What a compiled module is called in the table of verdicts."""


def eager_original(compiled: Any) -> Callable[..., Any] | None:
    """Return what was compiled, or None where it is not to be found."""
    if hasattr(compiled, "_orig_mod"):
        return compiled._orig_mod  # type: ignore[no-any-return]
    if getattr(compiled, "_compiled_call_impl", None) is not None:
        return compiled._call_impl  # type: ignore[no-any-return]
    return getattr(compiled, "_torchdynamo_orig_callable", None)


def is_region(value: Any) -> bool:
    """Whether torch.compile made it, be it a module or a function."""
    return is_compiled(value) or hasattr(value, "_torchdynamo_orig_callable")


def without_insides(stage: Stage) -> None:
    """Take the modules inside compiled ones off a stage: hooks would change what is compiled."""
    outer = [path for path, module in stage.modules.items() if is_compiled(module)]
    for path in list(stage.modules):
        if any(path != each and (not each or path.startswith(f"{each}.")) for each in outer):
            del stage.modules[path]


class Regions:
    """Stands in for a candidate's compiled modules and functions while it is watched."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._undo: list[tuple[dict[str, Any], str, Any]] = []

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Replace the calls of compiled modules and functions as long as this lasts."""
        for path, module in list(self._watch.stage.modules.items()):
            if hasattr(module, "_orig_mod"):
                self._replace(module.__dict__, "forward", module.forward, module, path)
            elif getattr(module, "_compiled_call_impl", None) is not None:
                call = module._compiled_call_impl
                self._replace(module.__dict__, "_compiled_call_impl", call, module, path)
            for name, value in list(module.__dict__.items()):
                function = not isinstance(value, torch.nn.Module) and name != "forward"
                if function and hasattr(value, "_torchdynamo_orig_callable"):
                    where = f"{path}.{name}" if path else name
                    self._replace(module.__dict__, name, value, value, where)
        try:
            yield
        finally:
            for holder, name, value in reversed(self._undo):
                if value is None:
                    holder.pop(name, None)
                else:
                    holder[name] = value
            self._undo.clear()

    def _replace(
        self, holder: dict[str, Any], name: str, call: Any, compiled: Any, path: str
    ) -> None:
        self._undo.append((holder, name, holder.get(name)))
        holder[name] = self.wrapped(call, compiled, path)

    def wrapped(self, call: Callable[..., Any], compiled: Any, path: str) -> Callable[..., Any]:
        """Return a function that calls something compiled and then judges what it made."""

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return self._run(call, compiled, path, args, kwargs)

        return stand_in

    def _run(
        self,
        call: Callable[..., Any],
        compiled: Any,
        path: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        watch = self._watch
        if watch.depth == 0:
            with _disable_current_modes():
                return call(*args, **kwargs)
        original = eager_original(compiled)
        with _disable_current_modes():
            given = snapshot((tuple(args), dict(kwargs)))
            before, dice = State(original), RandomState()
            output = call(*args, **kwargs)
            after, dice_after = State(original), RandomState()
            try:
                with torch.no_grad():
                    self._judge(path, original, call, given, output, before, dice)
            finally:
                after.restore()
                dice_after.restore()
        return output

    def _judge(
        self,
        path: str,
        original: Callable[..., Any] | None,
        call: Callable[..., Any],
        given: tuple[Any, Any],
        output: Any,
        before: State,
        dice: RandomState,
    ) -> None:
        place = Place(path, self._watch.position)

        def again(function: Callable[..., Any]) -> list[torch.Tensor]:
            before.restore()
            dice.restore()
            args, kwargs = snapshot(given)
            return _tensors(function(*args, **kwargs))

        made = _tensors(output)
        if original is None:
            self._add(place, Held(Verdict.UNKNOWN, reason="its eager original is not to be found"))
            return
        try:
            clean = again(original)
            with Widened():
                exact = again(original)
            with Noisy():
                moved = again(original)
        except Exception as error:
            words = f"{type(error).__name__}: {str(error)[:120]}"
            self._add(place, Held(Verdict.UNKNOWN, reason=f"its eager original failed: {words}"))
            return
        held = hold_region(made, exact, clean, moved)
        if held.verdict is Verdict.CULPRIT:
            held = self._confirmed(held, again, call, exact, clean, moved)
        self._add(place, held, given, call)

    def _confirmed(
        self, held: Held, again: Any, call: Any, exact: Any, clean: Any, moved: Any
    ) -> Held:
        try:
            second = hold_region(again(call), exact, clean, moved)
        except Exception:
            return held
        if second.verdict is Verdict.CULPRIT:
            return held
        return Held(Verdict.NONDETERMINISTIC, held.z, held.ratios, reason="wrong once, then right")

    def _add(self, place: Place, held: Held, given: Any = None, call: Any = None) -> None:
        def evidence() -> Evidence | None:
            if held.actual is None or held.exact is None or given is None:
                return None
            return Evidence(
                name=self._watch.stage.display(place.path),
                actual=held.actual.detach().clone(),
                exact=held.exact,
                op=REGION,
                inputs=[each for each in tree_leaves(given) if isinstance(each, torch.Tensor)],
                module=call,
                args=given[0],
                kwargs=given[1],
                output_index=held.output,
            )

        self._watch.add(place, REGION, held, evidence)


def hold_region(
    made: list[torch.Tensor],
    exact: list[torch.Tensor],
    clean: list[torch.Tensor],
    moved: list[torch.Tensor],
) -> Held:
    """Hold a region's outputs against float64, with the eager execution as what is clean.

    Args:
        made: What the region made.
        exact: What its original makes in float64.
        clean: What its original makes in its own dtype.
        moved: What its original makes in float64 with the noise of float32.
    """
    worst = Held(Verdict.UNKNOWN, reason="it returns no tensor")
    if not len(made) == len(exact) == len(clean) == len(moved):
        return Held(Verdict.UNKNOWN, reason="its eager original returns other tensors")
    for number, (left, right, other, near) in enumerate(
        zip(made, exact, clean, moved, strict=True)
    ):
        if left.shape != right.shape:
            return Held(Verdict.UNKNOWN, reason="its eager original returns other shapes")
        held = _hold_tensor(number, left, right, other, near)
        if number == 0 or held.rank > worst.rank:
            worst = held
    return worst


def _hold_tensor(
    number: int,
    left: torch.Tensor,
    right: torch.Tensor,
    clean: torch.Tensor,
    near: torch.Tensor,
) -> Held:
    if same(left, clean) or same(left, right):
        return Held(Verdict.IDENTICAL, 0.0, output=number)
    if not left.dtype.is_floating_point:
        reason = "its integers differ from those of its eager original"
        return Held(Verdict.UNKNOWN, output=number, reason=reason)
    ratios = measure(left, right, clean=clean, noise=(near - right) * NOISE_GAIN)
    verdict = Verdict.ROUNDING if ratios.z <= WATCH else Verdict.WATCH
    if ratios.z > CULPRIT:
        verdict = Verdict.CULPRIT
    return Held(verdict, ratios.z, ratios, number, left, right)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [each.detach() for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
