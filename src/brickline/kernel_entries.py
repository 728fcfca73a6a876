"""Entry: the file format of the kernel cache, and all the checks that a file must pass.

Little-endian::

    offset   bytes
    0        8      "BRICKKRN"
    8        4      version, 1
    12       4      h, the length of the header
    16       h      header: JSON in ASCII, keys sorted
    16 + h   ...    the blobs, back to back, in the header's order
    end-32   32     SHA-256 of all bytes before

An entry with one blob, ``code`` of two bytes, has this header in one line (digits left out)::

    {"blobs":[{"bytes":2,"name":"code","sha256":"fb8e…"}],"created":1700000000.0,
     "facts":{"entry":"rope"},"key":"ab12…","kind":"brickline-kernel"}

It knows neither the directory nor what facts and blobs mean. Nothing in a file is ever executed
here: no pickle.
"""

from __future__ import annotations

import json
import os
import re
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias

from brickline.errors import UsageError
from brickline.private_directory import distrust_of_file

Facts: TypeAlias = dict[str, Any]

MAX_ENTRY_BYTES = 1 << 28
"""No entry is larger, so that a damaged one cannot ask for all memory."""
MAX_HEADER_BYTES = 1 << 26
"""No header is larger; long texts belong into blobs."""
KEY = re.compile(r"[0-9a-f]{64}")

_MAGIC = b"BRICKKRN"
_VERSION = 1
_KIND = "brickline-kernel"
_PROLOGUE = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_FIRST_READ_BYTES = 1 << 14  # holds most headers
# O_NONBLOCK: a pipe in the place of an entry is refused, not waited for.
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class Damaged(Exception):  # noqa: N818 - between this module and the store, never for a user
    """Says what was found in the place of an entry."""


@dataclass(frozen=True)
class Entry:
    """What is stored under a key."""

    key: str
    facts: Facts
    blobs: dict[str, bytes]


class Blob(NamedTuple):
    """What a header says of a blob."""

    name: str
    bytes: int
    sha256: str


class Header(NamedTuple):
    """What an entry says of itself, beside its key."""

    created: float
    facts: Facts
    blobs: list[Blob]


def check_key(key: str) -> None:
    """Raise UsageError unless the key is the hexadecimal form of 256 bits."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise UsageError(f"expected a key of 64 lower-case hexadecimal digits, got {key!r}")


def encode_entry(key: str, facts: Mapping[str, Any], blobs: Mapping[str, bytes]) -> bytes:
    """Return the file of an entry.

    Raises:
        UsageError: if JSON changes the facts, a blob is no bytes, or it is too large.
    """
    for what, given in (("facts", facts), ("blobs", blobs)):
        if not isinstance(given, Mapping):
            raise UsageError(f"expected {what} as a mapping, got {type(given).__name__}")
    for name, blob in blobs.items():
        if not isinstance(name, str) or not isinstance(blob, bytes):
            raise UsageError(
                f"expected blobs as bytes by name, got {type(blob).__name__} for {name!r}"
            )
    document = {
        "blobs": [
            {"bytes": len(blob), "name": name, "sha256": sha256(blob).hexdigest()}
            for name, blob in blobs.items()
        ],
        "created": time.time(),
        "facts": _checked_facts(facts),
        "key": key,
        "kind": _KIND,
    }
    header = json.dumps(document, sort_keys=True, separators=(",", ":")).encode("ascii")
    if len(header) > MAX_HEADER_BYTES:
        raise UsageError(
            f"expected facts of at most {MAX_HEADER_BYTES} bytes as JSON, got {len(header)}; "
            "store long texts as blobs"
        )
    content = b"".join((_PROLOGUE.pack(_MAGIC, _VERSION, len(header)), header, *blobs.values()))
    return content + sha256(content).digest()


def open_entry(path: str) -> int:
    """Return a descriptor; a link is not followed and a pipe not waited for."""
    return os.open(path, _OPEN)


def read_entry(descriptor: int, found: os.stat_result, key: str) -> Entry:
    """Return the entry in an open file.

    Raises:
        Damaged: unless it is the user's own, whole, and the entry of this key.
    """
    data = _read_file(descriptor, found)
    _, entry = _decode(data, key)
    return entry


def read_header(path: str, key: str) -> tuple[Header, os.stat_result]:
    """Return what the header says, and the state of the file; the blobs are not read.

    Raises:
        Damaged: unless the header is sound and announces a file of this size and key.
        OSError: if the file cannot be read.
    """
    descriptor = open_entry(path)
    try:
        found = os.fstat(descriptor)
        _check_file(found)
        start = _read_exactly(descriptor, min(_FIRST_READ_BYTES, found.st_size))
        end = _header_end(start, found.st_size)
        if end > len(start):
            start += _read_exactly(descriptor, end - len(start))
    finally:
        os.close(descriptor)
    return _parse_header(start[_PROLOGUE.size : end], key, found.st_size), found


def verify_entry(path: str, key: str) -> None:
    """Read a file and check each blob by itself too.

    Raises:
        Damaged: unless all of it is sound.
        OSError: if the file cannot be read.
    """
    descriptor = open_entry(path)
    try:
        data = _read_file(descriptor, os.fstat(descriptor))
    finally:
        os.close(descriptor)
    header, entry = _decode(data, key)
    for blob in header.blobs:
        if sha256(entry.blobs[blob.name]).hexdigest() != blob.sha256:
            raise Damaged(f"a blob {blob.name!r} that does not match its SHA-256")


def _checked_facts(facts: Mapping[str, Any]) -> Facts:
    given = dict(facts)
    try:
        if json.loads(json.dumps(given, sort_keys=True, allow_nan=False)) == given:
            return given
        found = "what JSON changes, such as a tuple or a key that is no text"
    except (TypeError, ValueError, RecursionError) as error:
        found = str(error)
    raise UsageError(f"expected facts that JSON gives back unchanged, got {found}")


def _check_file(found: os.stat_result) -> None:
    reason = distrust_of_file(found)
    if reason is not None:
        raise Damaged(reason)


def _read_file(descriptor: int, found: os.stat_result) -> bytes:
    _check_file(found)
    if found.st_size > MAX_ENTRY_BYTES:
        raise Damaged(f"a file of {found.st_size} bytes, {MAX_ENTRY_BYTES} being the limit")
    return _read_exactly(descriptor, found.st_size)


def _read_exactly(descriptor: int, count: int) -> bytes:
    data = os.read(descriptor, count)
    while len(data) < count:
        more = os.read(descriptor, count - len(data))
        if not more:
            raise Damaged(f"{len(data)} bytes instead of {count}")
        data += more
    return data


def _decode(data: bytes, key: str) -> tuple[Header, Entry]:
    """Take a whole file apart; its digest is checked before anything is parsed."""
    offset = _header_end(data, len(data))
    if sha256(memoryview(data)[:-_DIGEST_BYTES]).digest() != data[-_DIGEST_BYTES:]:
        raise Damaged("contents that do not match their SHA-256")
    header = _parse_header(data[_PROLOGUE.size : offset], key, len(data))
    blobs = {}
    for blob in header.blobs:
        blobs[blob.name] = data[offset : offset + blob.bytes]
        offset += blob.bytes
    return header, Entry(key, header.facts, blobs)


def _header_end(start: bytes, size: int) -> int:
    """Return where the header ends in a file of this size that begins so."""
    if size < _PROLOGUE.size + _DIGEST_BYTES:
        raise Damaged(f"a file of {size} bytes")
    magic, version, length = _PROLOGUE.unpack_from(start)
    if magic != _MAGIC:
        raise Damaged(f"a file that begins with {magic!r} instead of {_MAGIC!r}")
    if version != _VERSION:
        raise Damaged(f"an entry of version {version} instead of {_VERSION}")
    if length > min(MAX_HEADER_BYTES, size - _PROLOGUE.size - _DIGEST_BYTES):
        raise Damaged(f"a header of {length} bytes in a file of {size}")
    return _PROLOGUE.size + int(length)


def _parse_header(text: bytes, key: str, size: int) -> Header:
    """Return the header of an entry whose file has this size."""
    try:
        document = json.loads(text)
        blobs = [Blob(blob["name"], blob["bytes"], blob["sha256"]) for blob in document["blobs"]]
        header = Header(document["created"], document["facts"], blobs)
        kind, found = document["kind"], document["key"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"a header that cannot be parsed ({type(error).__name__})") from None
    if kind != _KIND:
        raise Damaged(f"a header of kind {kind!r:.80} instead of {_KIND!r}")
    if found != key:
        raise Damaged(f"the entry of another key, {found!r:.80}")
    if not _is_sound(header):
        raise Damaged("a header with values that no entry has")
    expected = _PROLOGUE.size + len(text) + sum(blob.bytes for blob in blobs) + _DIGEST_BYTES
    if expected != size:
        raise Damaged(f"{size} bytes instead of the {expected} that its header announces")
    return header


def _is_sound(header: Header) -> bool:
    return (
        type(header.created) in (int, float)
        and 0 <= header.created < 1e12
        and isinstance(header.facts, dict)
        and all(_is_sound_blob(blob) for blob in header.blobs)
        and len({blob.name for blob in header.blobs}) == len(header.blobs)
    )


def _is_sound_blob(blob: Blob) -> bool:
    return (
        isinstance(blob.name, str)
        and type(blob.bytes) is int
        and 0 <= blob.bytes <= MAX_ENTRY_BYTES
        and isinstance(blob.sha256, str)
    )
