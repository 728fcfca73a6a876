"""What `prepare` and `watch` are given, checked before anything is compiled or forgotten."""

from __future__ import annotations

from typing import Any

from brickline.cache import KernelCache
from brickline.errors import PlanError
from brickline.plan_arguments import checked_flag
from brickline.profiler import BrickProfiler


def check_options(where: str, cache: Any, checked: Any, profiler: Any, fingerprints: Any) -> None:
    """Refuse options of `prepare` that are of another kind, or that would do nothing.

    Args:
        where: The plan, for the message.
        cache: A `KernelCache`, or None.
        checked: Whether writes out of bounds are looked for.
        profiler: A `BrickProfiler`, or None.
        fingerprints: Whether it gets a fingerprint of every launch.

    Raises:
        PlanError: One of them does not fit.
    """
    if cache is not None and not isinstance(cache, KernelCache):
        raise PlanError(
            f"{where}: expected cache as a KernelCache, got {cache!r:.80}; make one with "
            "brickline.KernelCache(directory)"
        )
    check_watching(where, profiler, fingerprints, checked=checked_flag(checked, where, "checked"))


def check_watching(where: str, profiler: Any, fingerprints: Any, *, checked: bool) -> None:
    """Refuse what cannot watch a plan; arguments and errors are those of `check_options`."""
    if profiler is not None and not isinstance(profiler, BrickProfiler):
        raise PlanError(
            f"{where}: expected a BrickProfiler or None, got {profiler!r:.80}; make one with "
            "brickline.BrickProfiler(name, enabled=True)"
        )
    if checked_flag(fingerprints, where, "fingerprints") and profiler is None:
        raise PlanError(
            f"{where}: fingerprints=True needs a profiler that gets them; pass profiler= too"
        )
    if profiler is not None and checked:
        raise PlanError(
            f"{where} is checked, which no profiler watches; prepare it once more without checked="
        )
