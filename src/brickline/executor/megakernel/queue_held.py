"""Memory that a queue keeps alive for its workers."""

from __future__ import annotations

from collections.abc import Sequence

from brickline.buffers import Buffer


class Held:
    """Memory of submissions that are not finished, by the number of a batch's first submission."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Buffer]] = {}
        self.nbytes = 0
        self._uses: dict[tuple[int, int], int] = {}

    def more_with(self, buffers: Sequence[Buffer]) -> int:
        """Return the bytes of buffers that are not held yet."""
        new = {(each.address, each.nbytes) for each in buffers} - self._uses.keys()
        return sum(nbytes for _, nbytes in new)

    def hold(self, batch: int, buffers: list[Buffer]) -> None:
        """Keep the memory of a batch."""
        self.batches[batch] = buffers
        for each in buffers:
            key = (each.address, each.nbytes)
            uses = self._uses.get(key, 0)
            self._uses[key] = uses + 1
            if not uses:
                self.nbytes += each.nbytes

    def release(self, batch: int) -> None:
        """Let go of it."""
        for each in self.batches.pop(batch, ()):
            key = (each.address, each.nbytes)
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self.nbytes -= each.nbytes
