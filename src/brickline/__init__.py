"""brickline finds the kernel that went wrong and the brick that is slow.

What a program that only records does not need is loaded when it is first used, so that such a
program starts quickly.
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
    from brickline.adapters.recording import record
    from brickline.buffers import Buffer, as_buffer
    from brickline.cache import CachedKernel, KernelCache
    from brickline.checker import check
    from brickline.checksums import DivergenceInfo, KernelChecksum, fnv1a_f32
    from brickline.comparison.comparing import compare
    from brickline.device.base import open_device
    from brickline.fingerprints import Fingerprint, distance, fingerprint
    from brickline.kernel import Kernel
    from brickline.kernel_arguments import Access, Param, Scalar
    from brickline.profile import Profile
    from brickline.profile_rows import TileStats
    from brickline.stats import BrickBottleneck, BrickStats, CategoryStats
    from brickline.verdicts import DivergenceReport, Finding, Verdict

__all__ = [
    "Access",
    "BrickBottleneck",
    "BrickCategory",
    "BrickId",
    "BrickProfiler",
    "BrickStats",
    "BricklineError",
    "Buffer",
    "CachedKernel",
    "CategoryStats",
    "DivergenceInfo",
    "DivergenceReport",
    "ExecutionGraph",
    "Finding",
    "Fingerprint",
    "Kernel",
    "KernelCache",
    "KernelChecksum",
    "KernelTrace",
    "Param",
    "Profile",
    "Run",
    "Sampling",
    "Scalar",
    "SyncMode",
    "TileLevel",
    "TileStats",
    "Verdict",
    "as_buffer",
    "check",
    "compare",
    "distance",
    "fingerprint",
    "fnv1a_f32",
    "open_device",
    "record",
]

_LATER = {
    "Access": "brickline.kernel_arguments",
    "BrickBottleneck": "brickline.stats",
    "BrickStats": "brickline.stats",
    "Buffer": "brickline.buffers",
    "CachedKernel": "brickline.cache",
    "CategoryStats": "brickline.stats",
    "DivergenceInfo": "brickline.checksums",
    "DivergenceReport": "brickline.verdicts",
    "Finding": "brickline.verdicts",
    "Fingerprint": "brickline.fingerprints",
    "Kernel": "brickline.kernel",
    "KernelCache": "brickline.cache",
    "KernelChecksum": "brickline.checksums",
    "Param": "brickline.kernel_arguments",
    "Profile": "brickline.profile",
    "Scalar": "brickline.kernel_arguments",
    "TileStats": "brickline.profile_rows",
    "Verdict": "brickline.verdicts",
    "as_buffer": "brickline.buffers",
    "check": "brickline.checker",
    "compare": "brickline.comparison.comparing",
    "distance": "brickline.fingerprints",
    "fingerprint": "brickline.fingerprints",
    "fnv1a_f32": "brickline.checksums",
    "open_device": "brickline.device.base",
    "record": "brickline.adapters.recording",
}


def __getattr__(name: str) -> Any:
    """Load a name that is not loaded yet."""
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module 'brickline' has no attribute {name!r}")
    value = getattr(import_module(module), name)
    globals()[name] = value
    return value
