"""A second set by somebody who had not read the tool: every case is a port, none was seen before.

The models, their ports and faults are in `unseen_again_recurrent`, `_mixers`, `_decoders`,
`_sparse`, `_vision` and `_pairs`. Scored once before anything was mended with them at hand.
"""

from __future__ import annotations

from functools import partial

from localisation.unseen_ports import right, unseen

GROUP = "unseen again"
SAME = ("same",)
BOTH = ("same", "bf16")

again = partial(unseen, group=GROUP, regimes=SAME)
"""Declare a fault of this group."""
harmless = partial(right, group=GROUP)
"""Declare a pair of this group in which nothing is wrong."""
