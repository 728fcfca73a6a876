"""Six architectures, ported from or to transformers."""

from __future__ import annotations

from collections.abc import Iterator

from sealed.cases import Case
from sealed.one import bert, gpt2, llama, mixtral, t5, vit


def cases() -> Iterator[Case]:
    """Yield the cases of all architectures."""
    for module in (gpt2, bert, vit, llama, t5, mixtral):
        yield from module.cases()
