"""brickline finds the kernel that went wrong and the brick that is slow.

Every name is loaded when it is first used, so that a program starts quickly and a test runner that
finds the plugin pays for nothing that no test asks for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brickline.adapters.recording import record
    from brickline.bricks import BrickCategory, BrickId
    from brickline.buffers import Buffer, as_buffer
    from brickline.cache import CachedKernel, KernelCache
    from brickline.checker import check
    from brickline.checksums import DivergenceInfo, KernelChecksum, fnv1a_f32
    from brickline.comparison.comparing import compare
    from brickline.device.base import Sampling, SyncMode, open_device
    from brickline.errors import BricklineError
    from brickline.executor.megakernel.queue import Megakernel
    from brickline.executor.prepared import PreparedPlan
    from brickline.fingerprints import Fingerprint, distance, fingerprint
    from brickline.graph import ExecutionGraph
    from brickline.kernel import Kernel
    from brickline.kernel_arguments import Access, Param, Scalar
    from brickline.megakernel_report import MegakernelReport
    from brickline.plan import Plan
    from brickline.profile import Profile
    from brickline.profile_rows import TileStats
    from brickline.profiler import BrickProfiler
    from brickline.runs import Run
    from brickline.stats import BrickBottleneck, BrickStats, CategoryStats
    from brickline.tiles import TileLevel
    from brickline.traces import KernelTrace
    from brickline.verdict import DivergenceReport, Finding, Verdict

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
    "Megakernel",
    "MegakernelReport",
    "Param",
    "Plan",
    "PreparedPlan",
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
    "BrickCategory": "brickline.bricks",
    "BrickId": "brickline.bricks",
    "BrickProfiler": "brickline.profiler",
    "BrickStats": "brickline.stats",
    "BricklineError": "brickline.errors",
    "Buffer": "brickline.buffers",
    "CachedKernel": "brickline.cache",
    "CategoryStats": "brickline.stats",
    "DivergenceInfo": "brickline.checksums",
    "DivergenceReport": "brickline.verdict",
    "ExecutionGraph": "brickline.graph",
    "Finding": "brickline.verdict",
    "Fingerprint": "brickline.fingerprints",
    "Kernel": "brickline.kernel",
    "KernelCache": "brickline.cache",
    "KernelChecksum": "brickline.checksums",
    "KernelTrace": "brickline.traces",
    "Megakernel": "brickline.executor.megakernel.queue",
    "MegakernelReport": "brickline.megakernel_report",
    "Param": "brickline.kernel_arguments",
    "Plan": "brickline.plan",
    "PreparedPlan": "brickline.executor.prepared",
    "Profile": "brickline.profile",
    "Run": "brickline.runs",
    "Sampling": "brickline.device.base",
    "Scalar": "brickline.kernel_arguments",
    "SyncMode": "brickline.device.base",
    "TileLevel": "brickline.tiles",
    "TileStats": "brickline.profile_rows",
    "Verdict": "brickline.verdict",
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


def __dir__() -> list[str]:
    """List names that are not loaded yet too, for whoever completes them."""
    return sorted({*globals(), *__all__})
