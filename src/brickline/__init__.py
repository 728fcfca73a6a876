"""brickline finds the kernel that went wrong and the brick that is slow."""

from brickline.bricks import BrickCategory, BrickId
from brickline.device.base import Sampling, SyncMode
from brickline.errors import BricklineError
from brickline.graph import ExecutionGraph
from brickline.profile import Profile
from brickline.profile_rows import TileStats
from brickline.profiler import BrickProfiler
from brickline.runs import Run
from brickline.stats import BrickBottleneck, BrickStats, CategoryStats
from brickline.tiles import TileLevel
from brickline.traces import KernelTrace

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
