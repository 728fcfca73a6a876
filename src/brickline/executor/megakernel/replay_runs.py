"""LoggedRun and what it holds: contents of memory, and digests of what launches wrote.

Values and how a file has them; whether they fit a plan is the matter of `replay_log`, which draws
the file.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.dtypes import DTYPES
from brickline.errors import UsageError
from brickline.executor.megakernel.queue_log import natural
from brickline.plan_buffers import Storage, largest

PIECE_BYTES = 4096
"""Bytes that one digest is of, at the least."""
MAX_PIECES = 1024
"""Pieces of what one launch writes to one buffer."""
DIGEST_BYTES = 8
_DIGITS = 2 * DIGEST_BYTES


@dataclass(frozen=True, slots=True)
class Written:
    """Digests of bytes that a launch wrote, piece by piece."""

    storage: int
    """Number of the buffer."""
    begin: int
    end: int
    piece_bytes: int
    digests: str

    @classmethod
    def of(cls, storage: int, begin: int, data: bytes | memoryview) -> Written:
        """Digest bytes that begin at a place of a buffer."""
        size = len(data)
        piece = max(PIECE_BYTES, 1 << max(-(-size // MAX_PIECES) - 1, 0).bit_length())
        digests = "".join(digest_of(data[at : at + piece]) for at in range(0, size, piece))
        return cls(storage, begin, begin + size, piece, digests)

    def pieces(self) -> Iterator[tuple[int, int, str]]:
        """Yield first byte, end and digest of each piece."""
        for place, first in enumerate(range(self.begin, self.end, self.piece_bytes)):
            digits = self.digests[_DIGITS * place : _DIGITS * (place + 1)]
            yield first, min(first + self.piece_bytes, self.end), digits

    def is_sound(self) -> bool:
        """Whether it has a digest for each piece, and pieces of a size that there can be."""
        if not PIECE_BYTES <= self.piece_bytes < 2**62:
            return False
        is_hex = not self.digests.strip("0123456789abcdef")
        return is_hex and len(self.digests) == _DIGITS * len(self)

    def to_json(self) -> list[Any]:
        """Return it as JSON values."""
        return [self.storage, self.begin, self.end, self.piece_bytes, self.digests]

    @classmethod
    def from_json(cls, entry: Sequence[Any]) -> Written:
        """Read what `to_json` returned."""
        storage, begin, end, piece, digests = entry
        if not isinstance(digests, str):
            raise UsageError(f"expected digests as text, got {digests!r:.80}")
        return cls(natural(storage), natural(begin), natural(end), natural(piece), digests)

    def moved(self, storage: int, by: int) -> Written:
        """Return the same digests, of another buffer and place."""
        return replace(self, storage=storage, begin=self.begin + by, end=self.end + by)

    def __len__(self) -> int:
        return -(-(self.end - self.begin) // self.piece_bytes)


@dataclass(frozen=True, slots=True)
class Contents:
    """What a buffer held before a run."""

    nbytes: int
    digest: str
    data: bytes | None = None
    """The bytes themselves, where they are kept."""
    zero: bool = False
    """Whether all of them are zero."""

    @classmethod
    def of(cls, data: bytes, *, keep: bool) -> Contents:
        """Digest bytes, and keep them where it is asked for."""
        zero = not any(data[:64]) and not data.strip(b"\0")
        return cls(len(data), digest_of(data), data if keep and not zero else None, zero)

    def to_json(self) -> dict[str, Any]:
        """Return them as JSON values."""
        stored: dict[str, Any] = {"nbytes": self.nbytes, "digest": self.digest, "zero": self.zero}
        if self.data is not None:
            stored["data"] = base64.b64encode(zlib.compress(self.data, 1)).decode("ascii")
        return stored

    @classmethod
    def from_json(cls, name: str, entry: Mapping[str, Any]) -> Contents:
        """Read what `to_json` returned; bytes that unpack to more are refused."""
        nbytes, digest, zero = natural(entry["nbytes"]), entry["digest"], entry["zero"]
        if not isinstance(digest, str) or len(digest) != _DIGITS or not isinstance(zero, bool):
            raise UsageError(f"memory of {name!r:.80}: expected a digest, got {digest!r:.80}")
        data = None
        if "data" in entry:
            packed = zlib.decompressobj()
            raw = base64.b64decode(entry["data"], validate=True)
            data = packed.decompress(raw, nbytes + 1)  # never more than it may be
            if len(data) != nbytes or not packed.eof or digest_of(data) != digest:
                raise UsageError(f"memory of {name!r:.80}: its contents are damaged")
        return cls(nbytes, digest, data, zero)

    def bytes(self) -> NDArray[np.uint8] | None:
        """Return a copy of them; None where they are not kept."""
        if self.data is None and not self.zero:
            return None
        raw = np.zeros(self.nbytes, np.uint8)
        if self.data is not None:
            raw[:] = np.frombuffer(self.data, np.uint8)
        return raw

    def array(self, storage: Storage) -> NDArray[Any] | None:
        """Return them as an array of a buffer; None where they are not kept."""
        raw = self.bytes()
        return None if raw is None else array_of(raw, storage)


@dataclass(frozen=True, slots=True)
class Placed:
    """What a part of a buffer held, because the host had written there."""

    storage: int
    begin: int
    contents: Contents


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One run of the plan, or submissions in a row."""

    values: Mapping[str, int | float]
    memory: Mapping[str, Contents]
    """What buffers held before it; after the first run, those that had changed in between."""
    order: tuple[int, ...] | None
    """Launches in the order in which they began; None where the executor does not tell."""
    written: tuple[tuple[Written, ...], ...]
    """Of each launch, digests of what it wrote; () where later launches overwrote it."""
    first: int = 0
    """Its first launch; of a queue, others may have been submitted before."""
    placed: tuple[Placed, ...] = ()
    """Of a queue: what the host had written before it, in this order."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "values": dict(self.values),
            "order": None if self.order is None else list(self.order),
            "first": self.first,
            "memory": {name: each.to_json() for name, each in self.memory.items()},
            "placed": [[each.storage, each.begin, each.contents.to_json()] for each in self.placed],
            "written": [[each.to_json() for each in entries] for entries in self.written],
        }

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> LoggedRun:
        """Read what `to_json` returned."""
        order = entry["order"]
        return cls(
            values=dict(entry["values"]),
            memory={name: Contents.from_json(name, each) for name, each in entry["memory"].items()},
            order=None if order is None else tuple(natural(each) for each in order),
            written=tuple(
                tuple(Written.from_json(each) for each in entries) for entries in entry["written"]
            ),
            first=natural(entry["first"]),
            placed=tuple(
                Placed(natural(storage), natural(begin), Contents.from_json("the host", each))
                for storage, begin, each in entry["placed"]
            ),
        )


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of bytes, 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def array_of(raw: NDArray[np.uint8], storage: Storage) -> NDArray[Any]:
    """Return bytes as an array of a buffer."""
    return raw.view(DTYPES[storage.dtype].numpy).reshape(tuple(map(largest, storage.shape)))
