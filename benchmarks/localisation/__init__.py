"""Planted faults and harmless variants: who names the guilty module, and who cries wolf.

`python -m localisation` from this directory's parent, or ``brickline bench localisation``.
"""

from __future__ import annotations

import os
from typing import Any

# Some virtual machines announce AMX and trap on it; no score depends on it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


def run(quick: bool = False) -> list[dict[str, Any]]:
    """Return one dict for each claim; `quick` scores one case in sixty and no recorded runs."""
    from localisation.claims import claims

    return claims(quick)
