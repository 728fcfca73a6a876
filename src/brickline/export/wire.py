"""Protobuf's wire format, written by hand: single fields, and whole columns of messages at once.

Knows tags, varints and lengths, and no message of anybody. A field is its tag, ``number << 3 |
kind``, and its value: kind 0 a varint (seven bits a byte, low ones first, the high bit says that
more follow), kind 1 eight bytes, kind 2 a length and so many bytes.

Worked example: field 3 with the value 300 is ``18 AC 02``; field 2 with the text "ab" is
``12 02 61 62``.

`encode_rows` writes one message per row. A message is a list of pieces, each with a value per row
or the same for all, and each may be absent in some rows::

    packet = Message(1, [varints(8, timestamps), Message(11, [varints(10, names, where=named)])])
    encode_rows(packet, len(timestamps))
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Integers: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

_VARINT, _FIXED64, _BYTES = 0, 1, 2
_LIMITS = np.array([1 << 7 * more for more in range(1, 10)], np.uint64)
"""A value that is not below so many of these needs so many further bytes."""


# One field at a time


def varint(value: int) -> bytes:
    """Return a number of at most 64 bits; a negative one as its two's complement."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def zigzag(value: int) -> int:
    """Return a signed number as `sint32` and `sint64` hold it: small where it is near zero."""
    return value << 1 if value >= 0 else -value * 2 - 1


def number_field(number: int, value: int) -> bytes:
    """Return an integer, enum or bool field."""
    return _tag(number, _VARINT) + varint(value)


def double_field(number: int, value: float) -> bytes:
    """Return a double field."""
    return _tag(number, _FIXED64) + struct.pack("<d", value)


def bytes_field(number: int, value: bytes) -> bytes:
    """Return a field of bytes, or a message inside another."""
    return _tag(number, _BYTES) + varint(len(value)) + value


def text_field(number: int, value: str) -> bytes:
    """Return a text field; what UTF-8 cannot hold becomes a question mark."""
    return bytes_field(number, value.encode("utf-8", "replace"))


def packed_field(number: int, values: Iterable[int]) -> bytes:
    """Return a repeated integer field, all values under one tag."""
    return bytes_field(number, b"".join(varint(value) for value in values))


def _tag(number: int, kind: int) -> bytes:
    return varint(number << 3 | kind)


# Columns


class Piece(Protocol):
    """A part of every row's message."""

    def lengths(self, rows: int) -> Integers:
        """Return its bytes in each row."""

    def write(self, out: Bytes, at: Integers) -> None:
        """Put each row's bytes into their place."""


class Same:
    """The same bytes in every row, or in those where the mask holds."""

    def __init__(self, data: bytes, where: Mask | None = None) -> None:
        self._data, self._where = data, where

    def lengths(self, rows: int) -> Integers:
        """Return its bytes in each row."""
        if self._where is None:
            return np.full(rows, len(self._data), np.int64)
        return self._where * np.int64(len(self._data))

    def write(self, out: Bytes, at: Integers) -> None:
        """Put each row's bytes into their place."""
        places = at if self._where is None else at[self._where]
        for offset, byte in enumerate(self._data):
            out[places + offset] = byte


class _Field:
    """A tag and a value per row, in the rows where the mask holds."""

    def __init__(self, tag: bytes, values: NDArray[Any], where: Mask | None) -> None:
        self._tag = tag
        self._where = where
        self._values = (
            values.astype(np.uint64) if where is None else values[where].astype(np.uint64)
        )

    def _sizes(self) -> Integers:
        raise NotImplementedError

    def _put(self, out: Bytes, at: Integers) -> None:
        raise NotImplementedError

    def lengths(self, rows: int) -> Integers:
        """Return its bytes in each row."""
        sizes = self._sizes() + len(self._tag)
        if self._where is None:
            return sizes
        spread = np.zeros(rows, np.int64)
        spread[self._where] = sizes
        return spread

    def write(self, out: Bytes, at: Integers) -> None:
        """Put each row's bytes into their place."""
        places = at if self._where is None else at[self._where]
        for offset, byte in enumerate(self._tag):
            out[places + offset] = byte
        self._put(out, places + len(self._tag))


class _Varints(_Field):
    def _sizes(self) -> Integers:
        return varint_lengths(self._values)

    def _put(self, out: Bytes, at: Integers) -> None:
        put_varints(out, at, self._values)


class _Fixed64s(_Field):
    def _sizes(self) -> Integers:
        return np.full(len(self._values), 8, np.int64)

    def _put(self, out: Bytes, at: Integers) -> None:
        data = np.ascontiguousarray(self._values, "<u8").view(np.uint8).reshape(-1, 8)
        for offset in range(8):
            out[at + offset] = data[:, offset]


def varints(number: int, values: NDArray[Any], where: Mask | None = None) -> Piece:
    """Return an integer field with a value per row."""
    return _Varints(_tag(number, _VARINT), values, where)


def fixed64s(number: int, values: NDArray[Any], where: Mask | None = None) -> Piece:
    """Return a fixed64 field with a value per row."""
    return _Fixed64s(_tag(number, _FIXED64), values, where)


class Message:
    """A message field per row, made of pieces, in the rows where the mask holds.

    Pieces inside a message that is absent in some rows are absent there too: theirs to say.
    """

    def __init__(self, number: int, pieces: Sequence[Piece], where: Mask | None = None) -> None:
        self._tag = Same(_tag(number, _BYTES), where)
        self._pieces, self._where = pieces, where
        self._inner: list[Integers] = []

    def lengths(self, rows: int) -> Integers:
        """Return its bytes in each row."""
        self._inner = [piece.lengths(rows) for piece in self._pieces]
        self._body: Integers = np.asarray(np.sum(self._inner, axis=0, dtype=np.int64))
        self._length_bytes = varint_lengths(self._body.astype(np.uint64))
        if self._where is not None:
            self._length_bytes = self._length_bytes * self._where
        return self._tag.lengths(rows) + self._length_bytes + self._body

    def write(self, out: Bytes, at: Integers) -> None:
        """Put each row's bytes into their place; `lengths` was asked before."""
        self._tag.write(out, at)
        at = at + self._tag.lengths(len(at))
        if self._where is None:
            put_varints(out, at, self._body.astype(np.uint64))
        else:
            put_varints(out, at[self._where], self._body[self._where].astype(np.uint64))
        at = at + self._length_bytes
        for piece, sizes in zip(self._pieces, self._inner, strict=True):
            piece.write(out, at)
            at = at + sizes


def encode_rows(message: Piece, rows: int) -> bytes:
    """Return the messages of all rows, one after the other."""
    sizes = message.lengths(rows)
    ends = np.cumsum(sizes)
    out = np.empty(int(ends[-1]) if rows else 0, np.uint8)
    message.write(out, ends - sizes)
    return out.tobytes()


def varint_lengths(values: NDArray[np.uint64]) -> Integers:
    """Return how many bytes each number takes."""
    return np.searchsorted(_LIMITS, values, side="right").astype(np.int64) + 1


def put_varints(out: Bytes, at: Integers, values: NDArray[np.uint64]) -> None:
    """Write numbers to their places."""
    rest = values
    while len(rest):
        more = rest > 0x7F
        low = (rest & np.uint64(0x7F)).astype(np.uint8)
        out[at] = np.where(more, low | 0x80, low)
        at, rest = at[more] + 1, rest[more] >> np.uint64(7)
