"""A fourth set by somebody who had not read the tool: what is ported for inference now.

The models, their ports and faults are in `unseen_fourth_llamas`, `_norms`, `_scaled`, `_routed`,
`_sinks`, `_long`, `_pairs`, `_towers` and `_generators`. Scored once before anything was mended
with them at hand.
"""

from __future__ import annotations

from functools import partial

from localisation.unseen_ports import right, unseen

GROUP = "unseen fourth"
SAME = ("same",)
BOTH = ("same", "bf16")

fourth = partial(unseen, group=GROUP, regimes=SAME)
"""Declare a fault of this group."""
harmless = partial(right, group=GROUP)
"""Declare a pair of this group in which nothing is wrong."""
