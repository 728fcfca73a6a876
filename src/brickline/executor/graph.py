"""A plan as one CUDA graph: instantiated once, launched as often as wanted.

Nodes are the launches, edges the plan's own. The core patches the nodes whose arguments changed
since the last launch, and no others.
"""

from __future__ import annotations

from brickline import _core
from brickline.errors import DeviceError


class GraphExecutor:
    """Launches the graph of a plan."""

    def __init__(self, core: _core.PlanCore, name: str) -> None:
        problem = core.build_graph(True)
        if problem:
            raise DeviceError(f"plan {name}: no CUDA graph: {problem}")
        self.run = core.run_graph
