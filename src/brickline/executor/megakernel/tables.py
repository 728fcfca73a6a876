"""The tables of a program as arrays: structs of ``include/brickline/megakernel.h``."""

from __future__ import annotations

import numpy as np

TASK = np.dtype(
    [
        *((name, "<u4") for name in ("op", "flags", "lanes", "shared_bytes")),
        ("grid", "<u4", 3),
        *((name, "<u4") for name in ("blocks", "first_worker", "parts")),
        *((name, "<u4") for name in ("first_argument", "arguments", "first_wait", "waits")),
        *((name, "<u4") for name in ("stream", "row_bytes", "block_rows", "rows")),
        ("reserved", "<u4", 2),
    ]
)
"""``MegaTask``."""
WAIT = np.dtype([("task", "<u4"), ("parts", "<u4")])
"""``MegaWait``."""
SIGNALS, JOINED = 1, 2
"""MEGA_SIGNALS and MEGA_JOINED."""
