"""The second sealed set: ports of seven architectures against transformers."""

from __future__ import annotations

from collections.abc import Iterator

import sealed.two.packages  # noqa: F401, before what imports transformers
from sealed.cases import Case
from sealed.two import clip, convnext, gemma, llama, mamba, minilm, whisper


def cases() -> Iterator[Case]:
    """Yield every case of the set."""
    for architecture in (llama, gemma, convnext, mamba, clip, whisper, minilm):
        yield from architecture.cases()
