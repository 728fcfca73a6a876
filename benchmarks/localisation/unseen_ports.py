"""Cases written by somebody who did not know the tool: how they are declared, and the harmless.

The models, their ports and faults are in `unseen_scans`, `unseen_text`, `unseen_encoders`,
`unseen_decoders`, `unseen_latent`, `unseen_vision` and `unseen_sound`. Nothing in the tool was made
with them at hand when they were first scored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from localisation import drives
from localisation.cases import Case, Trio
from localisation.planting import dtype_of, fault, variant

GROUP = "unseen ports"
BOTH = ("same", "bf16")
FP32 = ("same", "reordered")
ALL = ("same", "reordered", "bf16")
PAIRS: list[tuple[str, Any, Any, Any, Any, tuple[str, ...], str]] = []
"""Name, model, port, the other port, run, regimes and group of what is harmless."""


def unseen(build: Any, path: str, kind: str, **more: Any) -> Any:
    """Declare a fault of this group."""
    return fault(build, path, kind, **{"regimes": BOTH, "group": GROUP, **more})


def right(
    name: str,
    build: Callable[..., nn.Module],
    *regimes: str,
    port: Any = None,
    against: Any = None,
    run: Any = drives.text,
    group: str = GROUP,
) -> None:
    """Declare a pair in which nothing is wrong."""
    PAIRS.append((name, build, port, against, run, regimes or BOTH, group))


def cases() -> Iterator[Case]:
    """Yield what is harmless; the faults are declared with all others."""
    for name, build, port, against, run, regimes, group in PAIRS:
        for regime in regimes:

            def make(b: Any = build, p: Any = port, a: Any = against, r: str = regime) -> Trio:
                return variant(b, r, port=p, against=a)

            yield Case(f"unseen.{name}/{regime}", group, name, regime, make, run, dtype_of(regime))
