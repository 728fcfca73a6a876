"""The keeper: which tensors' contents are saved beside a run, and saving them.

``"all"`` saves everything that is fingerprinted. ``"suspects"`` saves the tensors of modules that
`include` names, and of the first calls that turn finite inputs into NaN or Inf, the innermost ones.
A device answers late whether a tensor is finite, so tensors of its last calls are held in a ring of
bounded size.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from brickline import abi
from brickline.errors import BricklineError
from brickline.run_tensors import save_tensor

MOST_SUSPECTS = 16
"""Calls with a first NaN or Inf whose tensors are saved, at most."""
RING_BYTES = 1 << 28
"""Tensors that are held until a device has said whether they are finite, at most."""


Held = Sequence[tuple[int, Tensor]]
"""Tensors with the ids of their fingerprints, 0: none."""


class HeldCall:
    """The tensors of one call with the ids of their fingerprints."""

    __slots__ = ("inputs", "nbytes", "outputs", "parent", "trace", "versions")

    def __init__(self, trace: int, parent: int, inputs: Held, outputs: Held) -> None:
        self.trace = trace
        self.parent = parent
        self.inputs = inputs
        self.outputs = outputs
        tensors = [tensor for _, tensor in (*self.inputs, *self.outputs)]
        self.versions = [version_of(tensor) for tensor in tensors]
        self.nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to; -1 where torch does not count."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return -1


class Keeper:
    """Saves tensors of one run.

    Args:
        run: The run's directory.
        tensors: ``"none"``, ``"suspects"`` or ``"all"``.
        unobserved: Counts what could not be saved, by reason.
    """

    def __init__(self, run: Path, tensors: str, unobserved: Counter[str]) -> None:
        self.keeps_all = tensors == "all"
        self.keeps_suspects = tensors == "suspects"
        self.is_asked = tensors != "none"
        self.saved = 0
        self._run = run
        self._unobserved = unobserved
        self._suspects = 0
        self._finite: dict[int, bool] = {}
        self._records: dict[int, bytes] = {}
        self._ring: deque[HeldCall] = deque()
        self._ring_bytes = 0
        self._blamed: set[int] = set()
        """Calls inside which the first NaN or Inf was made."""

    def taken(self, number: int, record: bytes, host: Tensor) -> None:
        """Hear of a fingerprint that was just taken of a tensor in host memory."""
        if self.keeps_all:
            self._save(record, host)
        elif self.keeps_suspects:
            self.arrived(number, record)

    def arrived(self, number: int, record: bytes) -> None:
        """Hear of a fingerprint's record."""
        if self.keeps_suspects:
            self._finite[number] = is_finite(record)
            self._records[number] = record

    def called(self, trace: int, parent: int, inputs: Held, outputs: Held, *, named: bool) -> None:
        """Hear of a call that has ended, with its tensors; inner calls end before outer ones."""
        if not self.keeps_suspects:
            return
        call = HeldCall(trace, parent, inputs, outputs)
        if named:
            self._save_call(call)
        elif self._suspects < MOST_SUSPECTS and not self._judge(call):
            self._hold(call)

    def look_again(self) -> None:
        """Judge the calls in the ring whose fingerprints have arrived."""
        for _ in range(len(self._ring)):
            call = self._ring.popleft()
            self._ring_bytes -= call.nbytes
            if not self._judge(call):
                self._hold(call)
        if not self._ring:
            self._finite.clear()
            self._records.clear()

    def _hold(self, call: HeldCall) -> None:
        self._ring.append(call)
        self._ring_bytes += call.nbytes
        while self._ring_bytes > RING_BYTES:
            self._ring_bytes -= self._ring.popleft().nbytes
            self._unobserved["calls left unjudged by tensors='suspects': the ring was full"] += 1

    def _judge(self, call: HeldCall) -> bool:
        """Save a call that makes the first NaN or Inf; False where that is not known yet."""
        numbers = [number for number, _ in (*call.inputs, *call.outputs) if number]
        if any(number not in self._finite for number in numbers):
            return False
        made = any(not self._finite[number] for number, _ in call.outputs if number)
        if made and all(self._finite[number] for number, _ in call.inputs if number):
            if call.trace not in self._blamed:
                self._suspects += 1
                self._save_call(call)
            self._blamed.add(call.parent)
        return True

    def _save_call(self, call: HeldCall) -> None:
        for (number, tensor), version in zip(
            (*call.inputs, *call.outputs), call.versions, strict=True
        ):
            if not number:
                continue
            if version_of(tensor) != version:
                self._unobserved["tensors written to before they were saved"] += 1
                continue
            record = self._records.get(number)
            self._save(record, tensor.detach().cpu())

    def _save(self, record: bytes | None, host: Tensor) -> None:
        try:
            save_tensor(self._run, record, host.detach())
            self.saved += 1
        except BricklineError as error:
            self._unobserved[f"tensors that could not be saved ({error})"] += 1


def is_finite(record: bytes) -> bool:
    """Whether a fingerprint says that its tensor holds neither NaN nor Inf."""
    fields = abi.FINGERPRINT.fields
    assert fields is not None
    return not any(
        int.from_bytes(record[fields[name][1] : fields[name][1] + 8], "little")
        for name in ("nan_count", "inf_count")
    )
