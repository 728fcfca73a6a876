"""brickline finds the kernel that went wrong and the brick that is slow.

Names of the looking half are loaded when they are first used, so that a program that only records
starts quickly.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from brickline.bricks import BrickCategory, BrickId
from brickline.device.base import Sampling, SyncMode
from brickline.errors import BricklineError
from brickline.graph import ExecutionGraph
from brickline.profiler import BrickProfiler
from brickline.runs import Run
from brickline.tiles import TileLevel
from brickline.traces import KernelTrace

if TYPE_CHECKING:
    from brickline.profile import Profile
    from brickline.profile_rows import TileStats
    from brickline.stats import BrickBottleneck, BrickStats, CategoryStats

__all__ = [
    "BrickBottleneck",
    "BrickCategory",
    "BrickId",
    "BrickProfiler",
    "BrickStats",
    "BricklineError",
    "CategoryStats",
    "ExecutionGraph",
    "KernelTrace",
    "Profile",
    "Run",
    "Sampling",
    "SyncMode",
    "TileLevel",
    "TileStats",
]

_LOOKING_HALF = {
    "BrickBottleneck": "brickline.stats",
    "BrickStats": "brickline.stats",
    "CategoryStats": "brickline.stats",
    "Profile": "brickline.profile",
    "TileStats": "brickline.profile_rows",
}


def __getattr__(name: str) -> Any:
    """Load a name of the looking half."""
    module = _LOOKING_HALF.get(name)
    if module is None:
        raise AttributeError(f"module 'brickline' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value
