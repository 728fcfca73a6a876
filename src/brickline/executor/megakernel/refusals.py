"""What a megakernel does not run, each with a code that stays.

Words alone, but for the checks that a plan can be given before anything is compiled.
"""

from __future__ import annotations

from collections.abc import Sequence

from brickline.errors import PlanError
from brickline.plan_launches import Launch
from brickline.symbolic import Expr

MAX_ARGUMENTS = 24
"""MEGA_MAX_ARGUMENTS."""
MAX_BLOCKS = 2**32 - 1
"""A task counts its blocks in 32 bits."""

REASONS = {
    "MK101": "its kernel is not written against Block, so no worker can execute it block by block",
    "MK102": "a block of it needs more shared memory than a worker has",
    "MK103": "its kernel needs more registers than a worker has",
    "MK104": f"its kernel has more than {MAX_ARGUMENTS} arguments",
    "MK105": f"it has more than {MAX_BLOCKS} blocks",
    "MK106": "max_wall_time is no time that a run can take",
    "MK107": "the device has no cooperative launch, without which workers may wait for ever",
    "MK108": "the number of workers is none that an engine can have",
    "MK109": "its lanes are no multiple of 32, more than 960, or not known before it runs",
    "MK110": "the device is older than compute capability 9.0, whose barriers workers wait with",
}
"""Why a plan, or what it is asked for, is refused."""

_REMEDIES = {
    "MK101": "write it with language 'block', or take executor serial or parallel",
    "MK102": "declare less shared_bytes, or take another executor",
    "MK103": "declare a smaller local_size, or take another executor",
    "MK104": "pass fewer arguments, such as one buffer of several parts",
    "MK105": "let a block do more",
    "MK106": "pass max_wall_time as a number of seconds, or leave it out",
    "MK107": "take another executor",
    "MK108": "leave workers out for one on each core",
    "MK109": "declare a local_size of 32, 64 and so on up to 960, or take another executor",
    "MK110": "take executor graph, or another",
}


def refusal(code: str, where: str, got: str) -> PlanError:
    """Return the error of a refusal.

    Args:
        code: One of `REASONS`.
        where: What is refused: a launch, or an option.
        got: What was found there.
    """
    return PlanError(f"{where}: {code}: {REASONS[code]}; got {got}: {_REMEDIES[code]}")


def check_launches(where: str, launches: Sequence[Launch], shared_bytes: int) -> None:
    """Refuse a plan with a launch that no worker can execute.

    Args:
        where: The plan, for the message.
        launches: Its launches.
        shared_bytes: Shared memory of a worker, for one block.

    Raises:
        PlanError: Which launch, why, and what to do instead.
    """
    for launch in launches:
        place = f"{where}, {launch}"
        if launch.kernel.language != "block":
            raise refusal("MK101", place, f"language {launch.kernel.language!r}")
        if len(launch.arguments) > MAX_ARGUMENTS:
            raise refusal("MK104", place, f"{len(launch.arguments)} arguments")
        needed = _least(launch.sizes[6])
        if needed > shared_bytes:
            raise refusal("MK102", place, f"{needed} bytes of {shared_bytes}")
        blocks = _least(block_count(launch))
        if blocks > MAX_BLOCKS:
            raise refusal("MK105", place, f"{blocks} blocks")


def block_count(launch: Launch) -> Expr:
    """Return how many blocks a launch has, over the plan's variables."""
    x, y, z = (Expr.of(size) for size in launch.sizes[:3])
    return x * y * z


def _least(size: int | Expr) -> int:
    return size.low if isinstance(size, Expr) else size
