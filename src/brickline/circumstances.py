"""The circumstances of a run: what another person needs to know to repeat it.

Looks only at modules that are already imported, at files under /proc and .git, and at an explicit
list of environment variables. It imports nothing heavy, starts no device and raises nothing: what
cannot be found out is None. Values that look like secrets are never taken.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

ENVIRONMENT = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MKL_NUM_THREADS",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE",
    "NVIDIA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "OMP_PLACES",
    "OMP_PROC_BIND",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TRITON_INTERPRET",
    "WORLD_SIZE",
)
"""Every environment variable that is recorded; no other is read."""

_SECRET = re.compile(r"token|secret|password|passwd|api[-_]?key|credential|auth", re.IGNORECASE)
_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_GIT_TIMEOUT_S = 1.0
_T = TypeVar("_T")


def gather_circumstances(*, weights_hash: str | None = None) -> dict[str, Any]:
    """Return what is known now, as JSON values; costs well under a millisecond without torch.

    Args:
        weights_hash: Hash of the model's weights, where the caller knows it.
    """
    torch = sys.modules.get("torch")
    system = os.uname()
    cwd = _attempt(os.getcwd)
    return {
        "brickline": brickline_version(),
        "python": ".".join(map(str, sys.version_info[:3])),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "triton": _version("triton"),
        "cuda": _attempt(lambda: torch.version.cuda) if torch else None,
        "platform": f"{system.sysname}-{system.release}-{system.machine}",
        "libc": _attempt(lambda: os.confstr("CS_GNU_LIBC_VERSION")),
        "cpu": cpu_model(),
        "cpu_count": os.cpu_count(),
        "devices": _device_names(torch),
        "driver": _driver_version(),
        "hostname": system.nodename,
        "pid": os.getpid(),
        "argv": without_secrets(getattr(sys, "argv", [])),
        "cwd": cwd,
        "git": {"commit": git_commit(Path(cwd)) if cwd else None, "dirty": None},
        "rank": _integer("RANK"),
        "world_size": _integer("WORLD_SIZE"),
        "local_rank": _integer("LOCAL_RANK"),
        "seeds": {
            "torch": _attempt(lambda: int(torch.initial_seed())) if torch else None,
            "python_hash": os.environ.get("PYTHONHASHSEED"),
        },
        "weights_hash": weights_hash,
        "numerics": _torch_numerics(torch) if torch else None,
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def merge_circumstances(first: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return `first` with its unknown values (None) filled from `later`, at every depth."""
    merged = dict(first)
    for key, value in later.items():
        known = merged.get(key)
        if known is None:
            merged[key] = value
        elif isinstance(known, dict) and isinstance(value, dict):
            merged[key] = merge_circumstances(known, value)
    return merged


def changed_circumstances(first: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was known in `first` and has another value in `later`, by dotted name."""
    changed: dict[str, Any] = {}
    for key, known in first.items():
        value = later.get(key)
        if isinstance(known, dict) and isinstance(value, dict):
            inner = changed_circumstances(known, value)
            changed.update({f"{key}.{name}": found for name, found in inner.items()})
        elif known is not None and value is not None and known != value:
            changed[key] = value
    return changed


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with every value of a secret-looking option replaced by ``***``."""
    shown: list[str] = []
    hide_next = False
    for argument in map(str, arguments):
        option, equals, _ = argument.partition("=")
        secret = bool(_SECRET.search(option))
        if hide_next and not argument.startswith("-"):
            shown.append("***")
        elif secret and equals:
            shown.append(f"{option}=***")
        else:
            shown.append(argument)
        hide_next = secret and not equals and argument.startswith("-")
    return shown


def git_commit(directory: Path) -> str | None:
    """Return the commit checked out around `directory`, read from .git without starting git."""
    return _attempt(lambda: _read_head(directory))


def git_dirty(directory: Path) -> bool | None:
    """Return whether tracked files differ from the commit; None where git does not say in time.

    Starts ``git`` once, takes no lock and runs no hook of the repository, so it is safe while
    somebody else works there.
    """
    if _git_directory(directory) is None:
        return None
    command = ("git", "-c", "core.fsmonitor=false", "status", "--porcelain", "-uno")
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, RuntimeError, subprocess.SubprocessError):
        return None
    return bool(done.stdout.strip()) if done.returncode == 0 else None


def _read_head(directory: Path) -> str | None:
    git = _git_directory(directory)
    if git is None:
        return None
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref: "):
        return head if _COMMIT.fullmatch(head) else None
    reference = head.removeprefix("ref: ")
    common = git / "commondir"
    shared = (git / common.read_text().strip()).resolve() if common.exists() else git
    for place in (git / reference, shared / reference):
        if place.is_file():
            commit = place.read_text().strip()
            return commit if _COMMIT.fullmatch(commit) else None
    packed = shared / "packed-refs"
    for line in packed.read_text().splitlines() if packed.exists() else ():
        commit, _, name = line.partition(" ")
        if name == reference and _COMMIT.fullmatch(commit):
            return commit
    return None


def _git_directory(directory: Path) -> Path | None:
    for parent in (directory, *directory.parents):
        entry = parent / ".git"
        if entry.is_dir():
            return entry
        if entry.is_file():  # a worktree or a submodule: "gitdir: PATH"
            return (parent / entry.read_text().strip().removeprefix("gitdir: ")).resolve()
    return None


def _torch_numerics(torch: Any) -> dict[str, Any]:
    """Return every switch of torch that changes results, each one None where torch lacks it."""
    backends = getattr(torch, "backends", None)
    cuda: Any = getattr(backends, "cuda", None)
    cudnn: Any = getattr(backends, "cudnn", None)
    reads: dict[str, Callable[[], Any]] = {
        "float32_matmul_precision": lambda: torch.get_float32_matmul_precision(),
        "tf32_matmul": lambda: cuda.matmul.allow_tf32,
        "tf32_cudnn": lambda: cudnn.allow_tf32,
        "fp16_reduced_precision_reduction": (
            lambda: bool(cuda.matmul.allow_fp16_reduced_precision_reduction)
        ),
        "bf16_reduced_precision_reduction": (
            lambda: bool(cuda.matmul.allow_bf16_reduced_precision_reduction)
        ),
        "deterministic_algorithms": lambda: torch.are_deterministic_algorithms_enabled(),
        "cudnn_enabled": lambda: cudnn.enabled,
        "cudnn_benchmark": lambda: cudnn.benchmark,
        "cudnn_deterministic": lambda: cudnn.deterministic,
        "sdp_flash": lambda: cuda.flash_sdp_enabled(),
        "sdp_memory_efficient": lambda: cuda.mem_efficient_sdp_enabled(),
        "sdp_math": lambda: cuda.math_sdp_enabled(),
        "sdp_cudnn": lambda: cuda.cudnn_sdp_enabled(),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: _attempt(read) for name, read in reads.items()}


def _device_names(torch: Any) -> list[str] | None:
    """Return the GPUs' names without starting a driver: from the kernel, else from a live torch."""
    models = []
    for entry in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        text = _attempt(entry.read_text) or ""
        models += [line.split(":", 1)[1].strip() for line in text.splitlines() if "Model:" in line]
    if models or torch is None:
        return models or None
    return _attempt(lambda: _torch_device_names(torch))


def _torch_device_names(torch: Any) -> list[str] | None:
    if not torch.cuda.is_initialized():
        return None
    return [str(torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]


def _driver_version() -> str | None:
    text = _attempt(Path("/proc/driver/nvidia/version").read_text)
    found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", text) if text else None
    return found.group() if found else None


def cpu_model() -> str | None:
    """Return the processor's name, where the kernel tells it."""
    # The file grows with the number of cores; the first of them tells.
    try:
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            text = file.read(4096).decode(errors="replace")
    except OSError:
        return None
    found = re.search(r"^(?:model name|Model|CPU part)\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else None


def brickline_version() -> str | None:
    """Return the version of the installed package; None in a source tree."""
    # importlib.metadata costs 50 ms to import, so the name of the installed metadata is read.
    site = Path(__file__).parent.parent
    for entry in _attempt(lambda: os.listdir(site)) or ():
        if entry.startswith("brickline-") and entry.endswith(".dist-info"):
            return entry[len("brickline-") : -len(".dist-info")]
    return _attempt(_metadata_version)


def _metadata_version() -> str:
    from importlib.metadata import version

    return version("brickline")


def _version(module: str) -> str | None:
    version = getattr(sys.modules.get(module), "__version__", None)
    return None if version is None else str(version)


def _integer(name: str) -> int | None:
    return _attempt(lambda: int(os.environ[name])) if name in os.environ else None


_NOT_KNOWN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a half-imported torch, one without a GPU, or an odd /proc raises: recording goes on."""


def _attempt(read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except _NOT_KNOWN:
        return None
