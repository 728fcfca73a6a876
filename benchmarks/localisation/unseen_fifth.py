"""A fifth set by somebody who had not read the tool: ten more models, each as it is ported.

The models, their ports and faults are in `unseen_fifth_gemma`, `_delta`, `_apart`, `_prompted`,
`_segments`, `_queries`, `_speech`, `_spoken`, `_codec` and `_streams`. Scored once before anything
was mended with them at hand.
"""

from __future__ import annotations

from functools import partial

from localisation.unseen_ports import right, unseen

GROUP = "unseen fifth"
SAME = ("same",)
BOTH = ("same", "bf16")

fifth = partial(unseen, group=GROUP, regimes=SAME)
"""Declare a fault of this group."""
harmless = partial(right, group=GROUP)
"""Declare a pair of this group in which nothing is wrong."""
