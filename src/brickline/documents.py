"""Documents of one JSON object with a digest over its contents: how they are written and read.

::

    {"format": "brickline-replay", "version": 1, "digest": "9c0e…", "log": {…}}

Knows files, versions and digests; what the contents mean is the matter of who asks for them. A file
that is too large, cut off, damaged, newer or something else is refused before its contents are
looked at.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from brickline.errors import BricklineError, UsageError
from brickline.files.paths import given_path
from brickline.whole_files import OVERWRITE, whole_file

HEAD_BYTES = 4096
_FORMAT = re.compile(rb'\s*\{\s*"format"\s*:\s*"([ -!#-\[\]-~]{1,80})"')


def parsed_json(text: str | bytes) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: It is none, or nests too deeply to be read.
    """
    try:
        return json.loads(text)
    except TypeError:
        raise ValueError(f"expected text, got {type(text).__name__}") from None
    except RecursionError:
        raise ValueError("it nests too deeply") from None


def stated_format(path: str | os.PathLike[str]) -> str | None:
    """Return the format that a file says at its beginning; "" of an empty one, None of no file."""
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return None
    found = _FORMAT.match(head)
    return found[1].decode("ascii", "replace") if found else None if head else ""


@dataclass(frozen=True)
class DocumentFormat:
    """One kind of document."""

    format: str
    """What a document says that it is."""
    version: int
    """The newest that is read."""
    key: str
    """Where the contents are."""
    name: str
    """What messages call it."""
    remedy: str
    """What to do about a damaged one."""
    damaged: type[BricklineError]
    newer: type[BricklineError]
    inaccessible: type[BricklineError]
    """The disk refuses, or the path is none."""
    max_bytes: int = 512 << 20
    """Larger files are refused before they are read, and not written."""
    sorts_keys: bool = False
    """Whether the digest is of contents whose keys are sorted."""
    allows_nan: bool = False

    def text(self, contents: Any, *, version: int | None = None) -> str:
        """Return a document as it is written.

        Args:
            contents: What it holds, as JSON values.
            version: What it says, where readers of an older version understand it, too.
        """
        text = self._text(contents)
        head = {
            "format": self.format,
            "version": self.version if version is None else version,
            "digest": _digest(text),
        }
        return f'{json.dumps(head)[:-1]}, "{self.key}": {text}}}\n'

    def contents(self, text: str | bytes, where: str) -> Any:
        """Return what a document holds.

        Args:
            text: The document.
            where: What messages call this one.

        Raises:
            BricklineError: It is damaged, newer or something else; see the fields.
        """
        try:
            document = parsed_json(text)
        except ValueError as error:
            raise self.damaged(
                f"{where} is no {self.name}, or is cut off: {error!s:.200}"
            ) from None
        if not isinstance(document, dict) or document.get("format") != self.format:
            raise self.damaged(
                f"{where} holds something else than a {self.name} (format {self.format!r})"
            )
        version = document.get("version")
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise self.damaged(f"{where}: expected a version from 1 on, got {version!r:.80}")
        if version > self.version:
            raise self.newer(
                f"{where} is a {self.name} of version {version}; this brickline reads up to "
                f"{self.version}: upgrade brickline, pip install --upgrade brickline"
            )
        contents: Any = document.get(self.key)
        try:
            found = _digest(self._text(contents))
        except (ValueError, RecursionError) as error:
            raise self.damaged(f"{where} holds what no {self.name} holds: {error!s:.200}") from None
        if found != document.get("digest"):
            raise self.damaged(
                f"{where} is damaged: its contents do not have the digest that it states; "
                f"{self.remedy}"
            )
        return contents

    def read(self, path: str | os.PathLike[str]) -> bytes:
        """Return the bytes of a file.

        Raises:
            BricklineError: It is no file, too large, or cannot be read.
        """
        where = f"{path!s:.400}"
        try:
            given_path(path)
            if os.path.exists(path) and not os.path.isfile(path):
                raise self.damaged(f"{where}: expected a file, got a directory, a device or a pipe")
            size = os.stat(path).st_size
            if size > self.max_bytes:
                raise self.damaged(f"{where}: expected at most {self.max_bytes} bytes, got {size}")
            return Path(path).read_bytes()
        except (OSError, ValueError, UsageError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise self.inaccessible(f"cannot read {where}: {why}") from error

    def write(self, text: str, path: str | os.PathLike[str], *, overwrite: bool) -> Path:
        """Write a document to a file, whole or not at all, and return its path.

        Raises:
            UsageError: The file is there and overwriting was not asked for.
            BricklineError: It is too large to be read again, or the disk refuses.
        """
        target = given_path(path)
        if len(text) > self.max_bytes:
            raise self.inaccessible(
                f"{target}: the {self.name} has {len(text)} bytes, and at most {self.max_bytes} "
                "are read again; keep less in it"
            )
        try:
            with whole_file(target, force=overwrite, how=OVERWRITE) as file:
                file.write(text.encode("ascii"))
        except OSError as error:
            raise self.inaccessible(
                f"{target}: cannot write the {self.name}: {error.strerror}"
            ) from error
        return target

    def _text(self, contents: Any) -> str:
        return json.dumps(
            contents,
            sort_keys=self.sorts_keys,
            separators=(",", ":"),
            ensure_ascii=True,
            allow_nan=self.allows_nan,
        )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()
