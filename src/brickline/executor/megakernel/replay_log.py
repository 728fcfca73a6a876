"""ReplayLog: what was run, over which memory, in which order, and digests of what launches wrote.

One JSON document, written whole or not at all. It holds the plan, so nothing else is needed to run
it again; of memory it holds digests, and the contents where they are small or asked for::

    {"format": "brickline-replay", "version": 1, "digest": "9c0e…",
     "log": {"plan": {…}, "device": "CPU", "executor": "serial", "made": "2026-11-16T04:00+00:00",
             "runs": [{"values": {"n": 7}, "order": [0, 1],
                       "memory": {"x": {"nbytes": 16, "digest": "ab…", "data": "eJxj…"}},
                       "written": [[[2, 0, 16, 4096, "5f3a…"]], …]}]}}

An entry of ``written`` is a list for each launch: buffer, first byte, end, bytes of a piece, and
16 hexadecimal digits for each piece.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from brickline.dtypes import DTYPES
from brickline.errors import BricklineError, PlanError, UsageError
from brickline.plan import Plan
from brickline.plan_buffers import Storage, largest
from brickline.plan_files import plan_document, plan_from_document
from brickline.plan_launches import FloatVariable, Launch
from brickline.whole_files import whole_file

FORMAT = "brickline-replay"
VERSION = 1
MAX_BYTES = 512 << 20
"""Larger files are refused before they are read."""
MAX_RUNS = 10_000
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

    def array(self, storage: Storage) -> NDArray[Any] | None:
        """Return them as an array of a buffer; None where they are not kept."""
        if self.data is None and not self.zero:
            return None
        raw = np.zeros(self.nbytes, np.uint8)
        if self.data is not None:
            raw[:] = np.frombuffer(self.data, np.uint8)
        return raw.view(DTYPES[storage.dtype].numpy).reshape(tuple(map(largest, storage.shape)))


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One run of the plan."""

    values: Mapping[str, int | float]
    memory: Mapping[str, Contents]
    """What buffers held before it; after the first run, those that had changed in between."""
    order: tuple[int, ...] | None
    """Launches in the order in which they began; None where the executor does not tell."""
    written: tuple[tuple[Written, ...], ...]
    """Of each launch, digests of what it wrote; () where later launches overwrote it."""


@dataclass(frozen=True)
class ReplayLog:
    """What was submitted and in which order it ran; see `replay`."""

    document: Mapping[str, Any]
    """The plan, as its file has it."""
    device: str
    executor: str
    runs: tuple[LoggedRun, ...] = ()
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def __post_init__(self) -> None:
        for name in ("device", "executor", "made"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value or not value.isprintable():
                raise PlanError(f"replay log, {name}: expected text, got {value!r:.80}")
        if len(self.runs) > MAX_RUNS:
            raise PlanError(f"replay log: expected at most {MAX_RUNS} runs, got {len(self.runs)}")
        for number, run in enumerate(self.runs):
            self._check_run(run, number)

    @classmethod
    def of(cls, plan: Plan, device: str, executor: str, runs: Sequence[LoggedRun]) -> ReplayLog:
        """Return a log of runs of a plan.

        Raises:
            PlanError: Arrays of the plan overlap, or a run does not fit it.
        """
        return cls(plan_document(plan), device, executor, tuple(runs))

    @cached_property
    def plan(self) -> Plan:
        """The plan."""
        return self.first_launches(None)

    def first_launches(self, count: int | None) -> Plan:
        """Return the plan with so many of its launches."""
        return plan_from_document(self.document, "the plan of the replay log", launches=count)

    # -------------------------------------------------------------------------------------- checks

    def _check_run(self, run: LoggedRun, number: int) -> None:
        plan, where = self.plan, f"replay log, run {number}"
        names = {storage.name: storage for storage in plan.storages}
        if set(run.values) != set(plan.variables):
            raise PlanError(
                f"{where}: expected values of {', '.join(plan.variables) or 'no variables'}, got "
                f"{', '.join(map(str, run.values)) or 'none':.200}"
            )
        for name, value in run.values.items():
            whole = not isinstance(plan.variables[name], FloatVariable)
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise PlanError(f"{where}, {name}: expected a number, got {value!r:.80}")
        for name, contents in run.memory.items():
            if name not in names:
                raise PlanError(f"{where}: the plan has no buffer {name!r:.80}")
            if contents.nbytes != names[name].nbytes:
                raise PlanError(
                    f"{where}, {name}: expected {names[name].nbytes} bytes, got {contents.nbytes}"
                )
        missing = set(names) - set(run.memory) if number == 0 else set()
        if missing:
            raise PlanError(f"{where}: expected the memory of {min(missing)}, got none")
        if len(run.written) != len(plan.launches):
            raise PlanError(
                f"{where}: expected digests of {len(plan.launches)} launches, got "
                f"{len(run.written)}"
            )
        for launch, entries in zip(plan.launches, run.written, strict=True):
            _check_written(launch, entries, where)
        _check_order(plan.launches, run.order, where)

    # --------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the log to a file, whole or not at all, and return its path.

        Raises:
            UsageError: The file is there and overwriting was not asked for.
            PlanError: The disk refuses.
        """
        target = Path(path)
        contents = _contents(self)
        document = {
            "format": FORMAT,
            "version": VERSION,
            "digest": _document_digest(contents),
            "log": contents,
        }
        text = json.dumps(document, ensure_ascii=True)
        try:
            with whole_file(target, force=overwrite) as file:
                file.write(text.encode("ascii"))
        except OSError as error:
            raise PlanError(f"{target}: cannot write the replay log: {error.strerror}") from error
        return target

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ReplayLog:
        """Read a saved log.

        Raises:
            PlanError: It is damaged, contradicts itself, of a newer version or something else.
        """
        where = f"{path!s:.400}"
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise PlanError(f"{where}: expected a file, got a directory, a device or a pipe")
            size = os.stat(path).st_size
            if size > MAX_BYTES:
                raise PlanError(f"{where}: expected at most {MAX_BYTES} bytes, got {size}")
            data = Path(path).read_bytes()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise PlanError(f"cannot read {where}: {why}") from error
        try:
            return _log(json.loads(data), where)
        except (ValueError, RecursionError) as error:
            raise PlanError(f"{where} is no replay log, or is cut off: {error!s:.200}") from None


def digest_of(data: bytes | memoryview) -> str:
    """Return the digest of bytes, 16 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def writes_of(launch: Launch) -> list[tuple[int, int, int]]:
    """Return buffer, first byte and end of all that a launch may write, each range once."""
    found = {
        (buffer.storage.number, buffer.offset, buffer.offset + buffer.span): None
        for param, buffer in launch.buffers()
        if param.access.writes and buffer.span
    }
    return list(found)


def _check_written(launch: Launch, entries: Sequence[Written], where: str) -> None:
    allowed = writes_of(launch)
    for each in entries:
        inside = any(
            storage == each.storage and begin <= each.begin < each.end <= end
            for storage, begin, end in allowed
        )
        sound = PIECE_BYTES <= each.piece_bytes < 2**62 and len(each.digests) == _DIGITS * len(each)
        if not inside or not sound or not _is_hex(each.digests):
            raise PlanError(
                f"{where}: digests of {launch} are of bytes that it does not write, or are not as "
                "many as pieces"
            )


def _check_order(launches: Sequence[Launch], order: Sequence[int] | None, where: str) -> None:
    if order is None:
        return
    if sorted(order) != list(range(len(launches))):
        raise PlanError(f"{where}: expected an order of all {len(launches)} launches, each once")
    place = {number: at for at, number in enumerate(order)}
    for launch in launches:
        for earlier in launch.waits_for:
            if place[earlier] > place[launch.number]:
                raise PlanError(
                    f"{where}: {launch} began before {launches[earlier]}, which it needs"
                )


def _is_hex(text: str) -> bool:
    return not text.strip("0123456789abcdef")


# ------------------------------------------------------------------------------------------- JSON


def _contents(log: ReplayLog) -> dict[str, Any]:
    return {
        "plan": log.document,
        "device": log.device,
        "executor": log.executor,
        "made": log.made,
        "runs": [
            {
                "values": dict(run.values),
                "order": None if run.order is None else list(run.order),
                "memory": {name: _stored(each) for name, each in run.memory.items()},
                "written": [
                    [
                        [each.storage, each.begin, each.end, each.piece_bytes, each.digests]
                        for each in entries
                    ]
                    for entries in run.written
                ],
            }
            for run in log.runs
        ],
    }


def _stored(each: Contents) -> dict[str, Any]:
    stored: dict[str, Any] = {"nbytes": each.nbytes, "digest": each.digest, "zero": each.zero}
    if each.data is not None:
        stored["data"] = base64.b64encode(zlib.compress(each.data, 1)).decode("ascii")
    return stored


def _document_digest(contents: Any) -> str:
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _log(document: Any, where: str) -> ReplayLog:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanError(f"{where} holds something else than a replay log")
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise PlanError(f"{where}: expected a version from 1 on, got {version!r:.80}")
    if version > VERSION:
        raise PlanError(
            f"{where} is a replay log of version {version}; this brickline reads up to {VERSION}: "
            "upgrade brickline"
        )
    contents: Any = document.get("log")
    if _document_digest(contents) != document.get("digest"):
        raise PlanError(
            f"{where} is damaged: its contents do not have the digest that it states; record it "
            "again"
        )
    try:
        runs = tuple(_run(each) for each in contents["runs"])
        made = {name: contents[name] for name in ("device", "executor", "made")}
        return ReplayLog(contents["plan"], runs=runs, **made)
    except BricklineError as error:
        raise PlanError(f"{where}: {error}") from error
    except (
        *(KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError),
        *(OverflowError, zlib.error),
    ) as error:
        raise PlanError(
            f"{where} describes no replay log: {type(error).__name__}: {error!s:.200}"
        ) from None


def _run(entry: Mapping[str, Any]) -> LoggedRun:
    order = entry["order"]
    return LoggedRun(
        values=dict(entry["values"]),
        memory={name: _read_contents(name, each) for name, each in entry["memory"].items()},
        order=None if order is None else tuple(_integer(each) for each in order),
        written=tuple(tuple(_written(each) for each in entries) for entries in entry["written"]),
    )


def _written(entry: Sequence[Any]) -> Written:
    storage, begin, end, piece, digests = entry
    if not isinstance(digests, str):
        raise UsageError(f"expected digests as text, got {digests!r:.80}")
    return Written(_integer(storage), _integer(begin), _integer(end), _integer(piece), digests)


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise UsageError(f"expected a number from 0 on, got {value!r:.80}")
    return value


def _read_contents(name: str, entry: Mapping[str, Any]) -> Contents:
    nbytes, digest, zero = _integer(entry["nbytes"]), entry["digest"], entry["zero"]
    if not isinstance(digest, str) or len(digest) != _DIGITS or not isinstance(zero, bool):
        raise UsageError(f"memory of {name!r:.80}: expected a digest, got {digest!r:.80}")
    data = None
    if "data" in entry:
        packed = zlib.decompressobj()
        raw = base64.b64decode(entry["data"], validate=True)
        data = packed.decompress(raw, nbytes + 1)  # never more than it may be
        if len(data) != nbytes or not packed.eof or digest_of(data) != digest:
            raise UsageError(f"memory of {name!r:.80}: its contents are damaged")
    return Contents(nbytes, digest, data, zero)
