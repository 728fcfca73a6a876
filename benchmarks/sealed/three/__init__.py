"""Set three: engines' ports of six architectures."""

from __future__ import annotations

from collections.abc import Iterator

from sealed.cases import Case
from sealed.three import deepseek, dino, esm2, olmo, qwen, silero


def cases() -> Iterator[Case]:
    """Yield every case of the set."""
    for module in (qwen, deepseek, olmo, silero, esm2, dino):
        yield from module.cases()
