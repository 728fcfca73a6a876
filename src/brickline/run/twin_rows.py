"""The float64 twins of recorded calls: a file of fixed rows beside the spool they belong to.

::

    RUN/spool/PID-N.spool      what was recorded
    RUN/spool/PID-N.twins      header, then one row per tensor that a module took or returned

    header     b"brktwins", version (u4), bytes per row (u4)
    row        name, position, ordinal (u4 each), role, index (u2 each), roundoff, noise (f8 each),
               then a fingerprint of the tensor in float64

A row belongs to the forward trace with the same name, position and ordinal, and to its operand with
the same role and index. It is no trace and no operand: whoever counts launches or sums up times
does not meet it. Rows are appended a call at a time, so that a killed process leaves whole rows.
Knows neither torch nor what rows are compared with.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brickline import abi
from brickline.errors import RunDamaged, RunError, RunVersion

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

VERSION = 1
"""Of this file alone. A reader refuses a newer one and reads the run without it."""
ENDING = ".twins"
_MAGIC = b"brktwins"
_HEADER = struct.Struct("<8s2I")
_ROW = struct.Struct("<3I2H2d")


@cache
def row_dtype() -> np.dtype[Any]:
    """Return the columns of a row."""
    import numpy as np

    numbers = [("name", "<u4"), ("position", "<u4"), ("ordinal", "<u4")]
    numbers += [("role", "<u2"), ("index", "<u2"), ("roundoff", "<f8"), ("noise", "<f8")]
    columns: list[Any] = [*numbers, ("fingerprint", abi.FINGERPRINT)]
    return np.dtype(columns)


def packed_row(
    place: tuple[int, int, int, int, int], roundoff: float, noise: float, fingerprint: bytes
) -> bytes:
    """Return a row.

    Args:
        place: Id of the name in the spool, position and ordinal of the call, role and index of the
            operand.
        roundoff: The coarsest rounding by which inputs and weights were moved.
        noise: L2 norm of what that did to this tensor; NaN where it was not measured.
        fingerprint: The record of the tensor's fingerprint.
    """
    return _ROW.pack(*place, roundoff, noise) + fingerprint


class TwinFile:
    """Appends rows beside one spool."""

    def __init__(self, spool: Path) -> None:
        self.spool = spool
        self._process = os.getpid()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._file: int | None = os.open(spool.with_suffix(ENDING), flags, 0o600)
        self._write(_HEADER.pack(_MAGIC, VERSION, row_dtype().itemsize))

    def belongs_to(self, spool: Path) -> bool:
        """Whether it is this process's file of the spool; a forked child has one of its own."""
        return self.spool.name == spool.name and self._process == os.getpid()

    def append(self, rows: bytes) -> None:
        """Append the rows of a call, whole or not at all.

        Raises:
            OSError: if the disk refuses.
        """
        self._write(rows)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _write(self, content: bytes) -> None:
        if self._file is None:
            raise OSError("the file of twins is closed")
        end = os.fstat(self._file).st_size
        try:
            written = memoryview(content)
            while written:
                written = written[os.write(self._file, written) :]
        except OSError:
            os.ftruncate(self._file, end)
            raise


def read_twins(spool: Path) -> NDArray[Any]:
    """Return the rows beside a spool; none where no twins were recorded.

    Raises:
        RunVersion: if a newer brickline wrote them.
        RunDamaged: if the file holds something else.
        RunError: if it cannot be read.
    """
    import numpy as np

    content = _content(spool, None)
    if len(content) < _HEADER.size:  # none, or its process was killed before the first row
        return np.empty(0, row_dtype())
    _check_header(content, spool.with_suffix(ENDING))
    count = (len(content) - _HEADER.size) // row_dtype().itemsize
    return np.frombuffer(content, row_dtype(), count, _HEADER.size)


def twin_problem(spool: Path) -> RunError | None:
    """Return why the twins beside a spool cannot be read; None where they can, or are not there."""
    try:
        content = _content(spool, _HEADER.size)
        if len(content) == _HEADER.size:
            _check_header(content, spool.with_suffix(ENDING))
    except RunError as error:
        return error
    return None


def _content(spool: Path, size: int | None) -> bytes:
    file = spool.with_suffix(ENDING)
    try:
        with open(file, "rb") as opened:
            return opened.read() if size is None else opened.read(size)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise RunError(f"cannot read {file}: {error.strerror}; check its permissions") from error


def _check_header(content: bytes, file: Path) -> None:
    magic, version, size = _HEADER.unpack_from(content)
    if magic != _MAGIC or (version == VERSION and size != row_dtype().itemsize):
        raise RunDamaged(f"expected a file of twins, found something else - at {file}")
    if version > VERSION:
        raise RunVersion(
            f"expected twins of version {VERSION} or older, found {version} - at {file}; upgrade "
            "with `pip install --upgrade brickline`"
        )


def texts_of_run(documents: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what the recorders of a run noted of twins, from its manifest and who joined."""
    texts = []
    for document in documents:
        facts = document.get("facts")
        recording = facts.get("recording") if isinstance(facts, Mapping) else None
        texts += texts_of_twins(recording) if isinstance(recording, Mapping) else []
    return texts


def texts_of_twins(facts: Mapping[str, Any]) -> list[str]:
    """Return what a recorder noted of its twins, a sentence each; [] where none were asked for."""
    noted = facts.get("twin")
    if not isinstance(noted, Mapping):
        return []
    calls = int(noted.get("calls", 0))
    spent = float(noted.get("seconds", 0.0))
    texts = [
        f"{calls} {'call has' if calls == 1 else 'calls have'} a float64 twin, made in "
        f"{spent:.3g} s that no time of the run contains"
    ]
    for entry in noted.get("none", ()):
        texts.append(f"no twin of {_calls(entry)}: {entry.get('reason')}")
    narrow = noted.get("float32", ())
    if narrow:
        texts.append(
            f"in the twins {', '.join(narrow)} ran in float32, having no float64 form: what "
            "comes after is no more exact"
        )
    return texts


def _calls(entry: Mapping[str, Any]) -> str:
    named, count = [str(number) for number in entry.get("calls", ())], int(entry.get("count", 0))
    rest = count - len(named)
    text = ", ".join(named) + (f" and {rest} more" if rest > 0 else "")
    return f"call{'s' if count > 1 else ''} {text}"
