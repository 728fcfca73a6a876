"""What a queue of a megakernel does not take, each with a code that stays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brickline import _core
from brickline.errors import DeviceError, DeviceHung, QueueError
from brickline.kernel import Kernel
from brickline.plan_launches import SIZES

REASONS = {
    "MK501": "it cannot be an op of a queue",
    "MK502": "there is no such op",
    "MK503": "it has more items than the queue has slots",
    "MK504": "it does not fit into memory_budget",
    "MK505": "the queue has ended",
    "MK506": "the queue has one host",
    "MK507": "an argument does not fit the op",
    "MK508": "it is no time to wait for",
    "MK509": "there is no such priority",
    "MK510": "it cannot be done now",
    "MK511": "an option does not fit",
    "MK512": "the queue contradicts itself",
    "MK513": "there is no such submission",
}
"""Why something is refused."""

FAULTS = {
    8: "there is no such op",
    9: "something that it reads was never written",
    10: "the queue was cleared",
    0xFFFFFFFF: "the worker has no memory for a block's shared memory",
}
"""Codes of the engine itself, as in megakernel_queue.h."""


def refusal(code: str, where: str, words: str) -> QueueError:
    """Return the error of a refusal.

    Args:
        code: One of `REASONS`.
        where: What is refused.
        words: What was expected, what was found, and what to do.
    """
    return QueueError(f"{where}: {code}: {REASONS[code]}; {words}")


def column_text(
    kernel: Kernel, refused: tuple[Any, ...], values: Mapping[str, Any], limits: Sequence[int]
) -> str:
    """Say what of a submission's arguments does not fit.

    Args:
        kernel: The op.
        refused: What the core found: why, job, argument, place, found, expected.
        values: The scalars that were given, by name.
        limits: The largest sizes of a launch.
    """
    why, _, argument, place, found, expected = refused
    with_values = ", ".join(f"{name}={value!r:.40}" for name, value in values.items())
    given = f" with {with_values}" if with_values else ""
    if why == "size":
        least = 0 if SIZES[argument] == "shared_bytes" else 1
        return (
            f"{SIZES[argument]} is {found}{given}; expected {least} to {limits[argument]}: pass "
            "other values"
        )
    if why == "lanes":
        return f"a block has {found} lanes{given}; expected at most {expected}: pass other values"
    if why in ("overflow", "division"):
        what = SIZES[argument] if place else f"the shape of {kernel.signature[argument].name}"
        happened = "leaves int64" if why == "overflow" else "divides by zero"
        return f"{what} {happened}{given}; pass other values"
    declared = kernel.signature[argument]
    texts = {
        "range": f"expected a value from {getattr(declared, 'low', 0)} to "
        f"{getattr(declared, 'high', 0)}, got {found}",
        "narrow": "expected a number that fits f32",
        "dimensions": f"expected {expected} dimensions, got {found}",
        "shape": f"expected {expected} elements along axis {place}{given}, got {found}",
        "align": f"expected memory aligned to {expected} bytes, got address {found:#x}: copy it, "
        "or begin the view at a multiple",
        "overlap": f"is written and shares {found} bytes with {kernel.signature[place].name}: pass "
        "memory of its own, or declare one read-write argument",
        "address": "expected memory that is there, got none",
    }
    return f"{declared.name}: {texts[why]}"


def failed_error(name: str, failure: str) -> DeviceError:
    """Return the error of an engine whose device failed.

    Args:
        name: The queue.
        failure: The driver's words.
    """
    return DeviceError(
        f"{name}: {failure}. What ran is lost, and the engine is dead; where an op read or wrote "
        "outside of its memory, the CUDA context is, too: end the process"
    )


def dead_error(
    core: _core.MegaQueueCore, name: str, ops: Sequence[str], after: str
) -> DeviceError | DeviceHung:
    """Return the error of an engine that is dead: its device failed, or an item never returned.

    Args:
        core: The engine.
        name: The queue.
        ops: Names of the ops.
        after: What survives a hang, and what to do.
    """
    if core.failure:
        return failed_error(name, core.failure)
    return _hung_error(name, core.hung(), ops, after)


def _hung_error(
    name: str, hung: Sequence[tuple[Any, ...]], ops: Sequence[str], after: str
) -> DeviceHung:
    """Return the error of an engine whose items never returned.

    Args:
        name: The queue.
        hung: What the core found of each worker that does not come back.
        ops: Names of the ops.
        after: What survives it, and what to do.
    """
    if not hung:  # it came back when it was too late
        return DeviceHung(f"{name}: a worker did not leave in time; {after}")
    words = []
    for worker, submission, block, op, since_ns, waiter, waiters in hung:
        said = (
            f"item {block} of submission {submission} (op {ops[op]}) on worker {worker} has not "
            f"returned for {since_ns / 1e9:.1f} s"
        )
        if waiter is not None:
            others = f" and {waiters - 1} others wait" if waiters > 1 else " waits"
            said += f"; submission {waiter}{others} for submission {submission}"
        words.append(said)
    worker, submission, block, _, _, waiter, _ = hung[0]
    return DeviceHung(
        f"{name}: {'; '.join(words)}; {after}",
        submission,
        block,
        worker,
        None if waiter is None else submission,
    )
