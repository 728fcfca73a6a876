"""How the circumstances of two runs differ, what changes numbers first.

Reads manifests only. A difference here is a fact beside the verdicts, never a verdict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from brickline.runs import Run

_NUMERICS = {
    "tf32_matmul": "TF32 in matrix products",
    "tf32_cudnn": "TF32 in convolutions",
    "float32_matmul_precision": "precision of float32 products",
    "fp16_reduced_precision_reduction": "reduced-precision sums of float16 products",
    "bf16_reduced_precision_reduction": "reduced-precision sums of bfloat16 products",
    "deterministic_algorithms": "deterministic algorithms",
    "sdp_flash": "attention by FlashAttention",
    "sdp_memory_efficient": "memory-efficient attention",
    "sdp_math": "attention spelled out",
    "sdp_cudnn": "attention by cuDNN",
    "cudnn_enabled": "cuDNN",
    "cudnn_benchmark": "cuDNN's search for the fastest kernel",
    "cudnn_deterministic": "deterministic cuDNN",
}
_PLAIN = {
    "weights_hash": "hash of the weights",
    "devices": "GPUs",
    "torch": "torch",
    "cuda": "CUDA",
    "triton": "Triton",
    "numpy": "NumPy",
    "driver": "driver",
    "cpu": "processor",
    "python": "Python",
    "brickline": "brickline",
    "world_size": "processes",
}
_FACTS = ("model", "dtype", "attention", "attn_implementation", "compiled", "autocast", "level")
"""Facts of the recorder that change numbers or what was seen; others count or time things."""


def differing_circumstances(candidate: Run, reference: Run) -> tuple[str, ...]:
    """Return what differs, each as a sentence with both values, the candidate's first."""
    ours, theirs = candidate.circumstances, reference.circumstances
    found = [
        *_compared(_NUMERICS, ours.get("numerics"), theirs.get("numerics")),
        *_facts(recording_facts(candidate), recording_facts(reference)),
        *_seeds(_seeds_of(candidate), _seeds_of(reference)),
        *_compared(_PLAIN, ours, theirs),
        *_commits(ours.get("git"), theirs.get("git")),
        *_environment(ours.get("environment"), theirs.get("environment")),
    ]
    return tuple(found)


def _compared(titles: Mapping[str, str], ours: Any, theirs: Any) -> Iterator[str]:
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return
    for key, title in titles.items():
        one, two = ours.get(key), theirs.get(key)
        if one != two and (one is not None or two is not None):
            yield f"{title}: {_shown(one)}, reference {_shown(two)}"


def _facts(ours: Any, theirs: Any) -> Iterator[str]:
    yield from _compared({name: name.replace("_", " ") for name in _FACTS}, ours, theirs)


def _seeds(ours: Any, theirs: Any) -> Iterator[str]:
    yield from _compared({"torch": "torch's seed", "python_hash": "PYTHONHASHSEED"}, ours, theirs)


def _seeds_of(run: Run) -> Mapping[str, Any] | None:
    """Return the seeds of a run: torch's as the first recorded call found it, where one did."""
    seeds, seed = run.circumstances.get("seeds"), recording_facts(run).get("seed")
    if seed is None:
        return seeds if isinstance(seeds, Mapping) else None
    return {**(seeds if isinstance(seeds, Mapping) else {}), "torch": seed}


def _commits(ours: Any, theirs: Any) -> Iterator[str]:
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return
    one, two = ours.get("commit"), theirs.get("commit")
    if one and two and one != two:
        yield f"git commit: {str(one)[:12]}, reference {str(two)[:12]}"


def _environment(ours: Any, theirs: Any) -> Iterator[str]:
    if not isinstance(ours, Mapping) or not isinstance(theirs, Mapping):
        return
    for name in sorted({*ours, *theirs} - {"RANK", "LOCAL_RANK", "PYTHONHASHSEED"}):
        if ours.get(name) != theirs.get(name):
            yield f"{name}: {_shown(ours.get(name))}, reference {_shown(theirs.get(name))}"


def _shown(value: Any) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ", ".join(sorted({str(each) for each in value})) or "none"
    return str(value)


def recording_facts(run: Run) -> Mapping[str, Any]:
    """Return what the first recorder noted of itself; empty where none noted anything."""
    noted = all_recording_facts(run)
    facts = run.manifest.get("facts")
    return noted[0] if noted else facts if isinstance(facts, Mapping) else {}


def all_recording_facts(run: Run) -> list[Mapping[str, Any]]:
    """Return what each recorder noted of itself: the maker's first, then who joined."""
    found = []
    for document in (run.manifest, *run.joined):
        facts = document.get("facts")
        noted = facts.get("recording") if isinstance(facts, Mapping) else None
        if isinstance(noted, Mapping):
            found.append(noted)
    return found


def uses_tf32(run: Run) -> bool:
    """Return whether float32 products may have been rounded to TF32 on the way in."""
    numerics = run.circumstances.get("numerics")
    if not isinstance(numerics, Mapping) or not run.circumstances.get("devices"):
        return False
    precise = numerics.get("float32_matmul_precision") in (None, "highest")
    return bool(numerics.get("tf32_matmul")) or not precise
