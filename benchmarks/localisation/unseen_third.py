"""A third set by somebody who had not read the tool: mainstream models, ported, single forward.

The models, their ports and faults are in `unseen_third_fused`, `_parallel`, `_windows`, `_one_key`,
`_experts`, `_vision`, `_encoders` and `_diffusion`. Scored once before anything was mended with
them at hand.
"""

from __future__ import annotations

from functools import partial

from localisation.unseen_ports import right, unseen

GROUP = "unseen third"
SAME = ("same",)
BOTH = ("same", "bf16")

third = partial(unseen, group=GROUP, regimes=SAME)
"""Declare a fault of this group."""
harmless = partial(right, group=GROUP)
"""Declare a pair of this group in which nothing is wrong."""
