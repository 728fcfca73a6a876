"""The kernel cache on disk: whatever happens to it, a get gives the whole entry or none.

Processes are real ones, started or forked, stopped and killed; what only another user can do is
done by a process that gives up root, or skipped where the tests do not run as root.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import brickline
from brickline import kernel_store
from brickline.cache import KernelCache
from brickline.errors import CacheError, UsageError
from brickline.kernel import Kernel, Param
from brickline.kernel_files import Removed
from brickline.kernel_store import Entry, KernelStore, default_directory

NOBODY = 65534
FACTS = {"entry": "rms_norm", "globals": [0, 1], "µ": {"nested": [None, True, 1.5, -(2**70)]}}
BLOBS = {"code": bytes(range(256)) * 8, "source": b"void f();", "empty": b""}

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


def key_of(number: int) -> str:
    return hashlib.sha256(str(number).encode()).hexdigest()


KEY = key_of(0)


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore(tmp_path / "cache")


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user reaches; pytest's own are for the user alone."""
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def path_of(store: KernelStore, key: str = KEY) -> Path:
    return store.directory / "entries" / key[:2] / f"{key}.blk"


def lock_of(store: KernelStore, key: str = KEY) -> Path:
    return store.directory / "locks" / key[:2] / f"{key}.lock"


def leftovers(store: KernelStore) -> list[str]:
    return [path.name for path in store.directory.rglob(".*.tmp")]


# ------------------------------------------------------------------------------- other processes

PRELUDE = """
import hashlib, os, random, resource, signal, sys, threading, time, warnings
from pathlib import Path
from brickline.errors import *
from brickline.kernel_store import KernelStore
warnings.simplefilter("error")
directory, arguments = Path(sys.argv[1]), sys.argv[2:]
def key_of(number): return hashlib.sha256(str(number).encode()).hexdigest()
KEY = key_of(0)
def say(text): print(text, flush=True)
"""


def start(code: str, directory: Path, *arguments: object) -> subprocess.Popen[str]:
    package = str(Path(brickline.__file__).parents[1])
    search = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + code, str(directory), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": search},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 60) -> str:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def run(code: str, directory: Path, *arguments: object) -> str:
    return finish(start(code, directory, *arguments))


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate(timeout=60)


# ------------------------------------------------------------------------------- get and put


@pytest.mark.parametrize(
    ("facts", "blobs"),
    [
        (FACTS, BLOBS),
        ({}, {}),
        ({"text": "\ud800 \0 \U0001f9f1"}, {"name \ud800\n": b"\0"}),
        ({"long": "x" * 100_000}, {"code": b"y" * 3_000_000}),
    ],
)
def test_what_is_put_is_got(store: KernelStore, facts: Any, blobs: Any):
    assert store.get(KEY) is None
    assert store.put(KEY, facts, blobs)
    assert store.get(KEY) == Entry(KEY, facts, blobs)
    assert KernelStore(store.directory).get(KEY) == Entry(KEY, facts, blobs)
    assert store.verify() == []
    assert leftovers(store) == []


def test_a_second_put_replaces_the_first(store: KernelStore):
    store.put(KEY, {"a": 1}, {"code": b"old"})
    store.put(KEY, {"a": 2}, {"code": b"new", "more": b""})
    assert store.get(KEY) == Entry(KEY, {"a": 2}, {"code": b"new", "more": b""})


def signed(content: bytes) -> bytes:
    return content + hashlib.sha256(content).digest()


def file_with(header: Any, blobs: bytes = b"", version: int = 1) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return signed(b"BRICKKRN" + struct.pack("<II", version, len(text)) + text + blobs)


def header_with(**changes: Any) -> dict[str, Any]:
    blob = {"bytes": 2, "name": "code", "sha256": hashlib.sha256(b"hi").hexdigest()}
    plain = {"blobs": [blob], "created": 1.7e9, "facts": {}, "key": KEY, "kind": "brickline-kernel"}
    return plain | changes


def place(store: KernelStore, data: bytes, key: str = KEY) -> Path:
    path = path_of(store, key)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o600)
    return path


def test_the_bytes_of_an_entry(store: KernelStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.0)
    store.put(KEY, {"entry": "rope"}, {"code": b"hi"})
    digest = "8f434346648f6b96df89dda901c5176b10a6d83961dd3c1ac88b59b2dc327aa4"
    header = (
        f'{{"blobs":[{{"bytes":2,"name":"code","sha256":"{digest}"}}],"created":1700000000.0,'
        f'"facts":{{"entry":"rope"}},"key":"{KEY}","kind":"brickline-kernel"}}'
    ).encode()
    length = len(header).to_bytes(4, "little")
    expected = signed(b"BRICKKRN" + b"\1\0\0\0" + length + header + b"hi")
    assert path_of(store).read_bytes() == expected
    assert (store.directory / "VERSION").read_bytes() == b"brickline-kernels 1\n"


def test_a_file_made_by_hand_is_read(store: KernelStore):
    place(store, file_with(header_with(facts={"a": 1}), b"hi"))
    assert store.get(KEY) == Entry(KEY, {"a": 1}, {"code": b"hi"})


@pytest.mark.parametrize(
    "key", ["", "ab", "A" * 64, "../" * 21 + "a", "g" * 64, KEY + "\n", KEY + "0", b"a" * 64, None]
)
def test_a_key_is_256_bits(store: KernelStore, key: Any):
    for call in (
        store.get,
        lambda key: store.put(key, {}, {}),
        lambda k: store.locked(k).__enter__(),
    ):
        with pytest.raises(UsageError, match="64 lower-case hexadecimal digits"):
            call(key)


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "facts", [{"a": (1, 2)}, {1: "a"}, {"a": float("nan")}, {"a": b""}, {"a": deep(100_000)}]
)
def test_facts_that_json_would_change_are_refused(store: KernelStore, facts: Any):
    with pytest.raises(UsageError, match="facts that JSON gives back unchanged"):
        store.put(KEY, facts, {})
    assert store.statistics().entries == 0


def test_blobs_are_bytes(store: KernelStore):
    with pytest.raises(UsageError, match="got bytearray for 'code'"):
        store.put(KEY, {}, {"code": bytearray(3)})  # type: ignore[dict-item]


@pytest.mark.parametrize("bound", [0, -1, 1.5, True, None])
def test_a_bound_is_a_whole_number(tmp_path: Path, bound: Any):
    with pytest.raises(UsageError, match="max_bytes"):
        KernelStore(tmp_path / "cache", max_bytes=bound)


@pytest.mark.parametrize("directory", ["", "a\0b", 3, b"cache", True, Path])
def test_a_directory_is_a_path(directory: Any):
    with pytest.raises(UsageError, match="expected the path of a directory, got"):
        KernelStore(directory)


@pytest.mark.parametrize(
    ("facts", "blobs"), [(None, {}), ([1], {}), ("ab", {}), ({}, None), ({}, [b""]), ({}, b"")]
)
def test_facts_and_blobs_are_mappings(store: KernelStore, facts: Any, blobs: Any):
    with pytest.raises(UsageError, match=r"expected (facts|blobs) as a mapping, got"):
        store.put(KEY, facts, blobs)


@pytest.mark.parametrize("timeout", ["1", None, -1, float("nan"), True, 10**400])
def test_a_timeout_is_a_number_of_seconds(store: KernelStore, timeout: Any):
    with pytest.raises(UsageError, match="expected timeout of at least 0, in seconds, got"):
        store.locked(KEY, timeout).__enter__()


def test_a_store_whose_directory_was_removed_makes_it_again(store: KernelStore):
    store.put(KEY, FACTS, BLOBS)
    shutil.rmtree(store.directory)
    assert store.get(KEY) is None
    assert list(store.entries()) == []
    with store.locked(KEY) as held:
        assert held
    assert store.put(KEY, FACTS, BLOBS)
    assert stat.S_IMODE(store.directory.stat().st_mode) == 0o700


# ------------------------------------------------------------------------------- nothing by halves


def test_an_interrupted_put_leaves_the_old_entry(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch
):
    store.put(KEY, {"a": 1}, BLOBS)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for name in ("write", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                store.put(KEY, {"a": 2}, BLOBS)
        assert leftovers(store) == []
        assert store.get(KEY) == Entry(KEY, {"a": 1}, BLOBS)


WRITER = """
store, number = KernelStore(directory), int(arguments[0])
say("ready")
while True:
    store.put(KEY, {"number": number}, {"code": bytes([number % 256]) * (100_000 + number % 7)})
    number += 1
"""


def test_killed_writers_leave_whole_entries(store: KernelStore):
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    chosen = random.Random(seed)
    for _ in range(2):
        writers = [start(WRITER, store.directory, number) for number in (0, 50)]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        deadline = time.monotonic() + chosen.uniform(0.1, 0.3)
        while time.monotonic() < deadline:
            look_at_whole_entry(store)
        for writer in writers:
            kill(writer)
        look_at_whole_entry(store)
    assert store.verify() == []


def look_at_whole_entry(store: KernelStore) -> None:
    entry = store.get(KEY)
    if entry is not None:
        number = entry.facts["number"]
        assert entry.blobs == {"code": bytes([number % 256]) * (100_000 + number % 7)}


def test_what_killed_writers_leave_is_removed_after_an_hour(store: KernelStore):
    store.put(KEY, FACTS, BLOBS)
    names = [f".{KEY}.blk.{number:016x}.tmp" for number in range(2)]
    for name in names:
        path_of(store).with_name(name).write_bytes(b"half an ent")
    hour_ago = time.time() - 3601
    os.utime(path_of(store).with_name(names[0]), (hour_ago, hour_ago))
    assert store.verify() == []
    assert store.gc() == Removed(0, 11)
    assert leftovers(store) == [names[1]]
    assert store.clear().entries == 1
    assert leftovers(store) == [names[1]], "its writer may be running"


# ------------------------------------------------------------------------------- damage


DAMAGES = {
    "empty": b"",
    "short": b"BRICKKRN",
    "text": b"#!/bin/sh\necho this is no entry, but somewhat longer than the shortest one\n",
    "cut": file_with(header_with(), b"hi")[:-1],
    "longer": file_with(header_with(), b"hi") + b"\0",
    "newer": file_with(header_with(), b"hi", version=2),
    "magic": signed(b"BRICKKRO" + file_with(header_with(), b"hi")[8:-32]),
    "unsigned": file_with(header_with(), b"hi")[:-32] + bytes(32),
    "header of 4 GiB": signed(b"BRICKKRN" + struct.pack("<II", 1, 2**32 - 1) + b"{}"),
    "header one too long": signed(b"BRICKKRN" + struct.pack("<II", 1, 3) + b"{}"),
    "deep JSON": file_with(b"[" * 1_000_000),
    "deep facts": file_with(
        json.dumps(header_with(facts=0)).encode().replace(b'"facts": 0', b'"facts":' + b"[" * 9999)
    ),
    "huge number": file_with(b'{"blobs":' + b"9" * 10_000 + b"}"),
    "not UTF-8": file_with(b'{"\xff": 1}'),
    "list": file_with([]),
    "nothing": file_with({}),
    "other key": file_with(header_with(key=key_of(1)), b"hi"),
    "other kind": file_with(header_with(kind="brickline-run"), b"hi"),
    "too few blobs": file_with(header_with(blobs=[]), b"hi"),
    "too few bytes": file_with(header_with(), b"h"),
    "blobs no list": file_with(header_with(blobs=7), b"hi"),
    "blobs of text": file_with(header_with(blobs="ab"), b"hi"),
    "facts no object": file_with(header_with(facts=[]), b"hi"),
    "created no time": file_with(header_with(created=float("nan")), b"hi"),
    "negative blob": file_with(
        header_with(
            blobs=[
                {"name": "a", "bytes": 4, "sha256": ""},
                {"name": "b", "bytes": -2, "sha256": ""},
            ]
        ),
        b"hi",
    ),
    "one name twice": file_with(
        header_with(blobs=[{"name": "a", "bytes": 1, "sha256": ""}] * 2), b"hi"
    ),
}


@pytest.mark.parametrize("data", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_entry_is_set_aside_with_a_note(store: KernelStore, data: bytes):
    path = place(store, data)
    assert [problem.path for problem in store.verify()] == [path]
    with pytest.warns(RuntimeWarning, match="expected a sound entry, found .*counts as missing"):
        assert store.get(KEY) is None
    assert not path.exists()
    (aside,) = (store.directory / "aside").iterdir()
    assert aside.read_bytes() == data
    assert store.get(KEY) is None
    assert store.put(KEY, FACTS, BLOBS)
    assert store.get(KEY) == Entry(KEY, FACTS, BLOBS)


def test_a_blob_is_verified_by_itself(store: KernelStore):
    path = place(store, file_with(header_with(), b"ho"))
    (problem,) = store.verify()
    assert str(problem) == (
        f"expected a sound entry, found a blob 'code' that does not match its SHA-256 - at {path}"
    )


def test_a_huge_file_is_not_read(store: KernelStore):
    path = place(store, file_with(header_with(), b"hi"))
    os.truncate(path, 1 << 40)
    assert list(store.entries()) == []
    with pytest.warns(RuntimeWarning, match=f"a file of {1 << 40} bytes"):
        assert store.get(KEY) is None


def make_link(path: Path) -> None:
    target = path.with_name("elsewhere")
    target.write_bytes(file_with(header_with(), b"hi"))
    target.chmod(0o600)
    path.symlink_to(target)


def make_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket is at most 108 bytes
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path.name)
    os.chdir(here)


@pytest.mark.parametrize(
    "make", [make_link, make_socket, os.mkfifo, os.mkdir], ids=["link", "socket", "pipe", "folder"]
)
def test_what_is_no_file_is_set_aside(store: KernelStore, make: Any):
    path = path_of(store)
    path.parent.mkdir(parents=True)
    make(path)
    assert path in [problem.path for problem in store.verify()]
    assert list(store.entries()) == []
    with pytest.warns(RuntimeWarning, match="expected a sound entry"):
        assert store.get(KEY) is None
    assert not os.path.lexists(path)
    assert store.put(KEY, FACTS, BLOBS)
    store.clear()


def test_a_note_comes_once_per_key(store: KernelStore):
    for number, notes in ((0, 1), (0, 0), (1, 1), (0, 0), (1, 0)):
        place(store, b"", key_of(number))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert store.get(key_of(number)) is None
        assert len(caught) == notes


def test_a_note_points_at_the_callers_line(store: KernelStore, tmp_path: Path):
    place(store, b"")
    kernel = Kernel("noted", "void noted(float* y) {}", [Param("y", "f32", 1, "write")])
    cache = KernelCache(tmp_path / "other")
    key = KernelCache(cache.directory).get_or_compile(kernel, "NULL").key
    assert cache.directory is not None
    (cache.directory / "entries" / key[:2] / f"{key}.blk").write_bytes(b"")
    holder = started_holder(store)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        store.get(KEY)
        with store.locked(KEY, timeout=0.01):
            pass
        cache.get_or_compile(kernel, "NULL")
    kill(holder)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert [Path(each.filename) for each in caught] == [Path(__file__)] * 3
    assert [lines[each.lineno - 1].split("(")[0].strip() for each in caught] == [
        "store.get",
        "with store.locked",
        "cache.get_or_compile",
    ]


def test_what_is_set_aside_is_bounded(store: KernelStore):
    for number in range(20):
        place(store, bytes(number), key_of(number))
        with pytest.warns(RuntimeWarning):
            store.get(key_of(number))
    sizes = sorted(path.stat().st_size for path in (store.directory / "aside").iterdir())
    assert sizes == list(range(4, 20)), "the latest 16"
    assert store.statistics().aside == 16
    assert store.clear() == Removed(0, sum(sizes))
    assert store.statistics().aside == 0


def test_an_entry_that_replaces_a_damaged_one_is_not_set_aside(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch
):
    place(store, b"damaged")

    def read_then_lose_a_race(*_: object) -> None:
        KernelStore(store.directory).put(KEY, FACTS, BLOBS)
        raise kernel_store.Damaged("what was there before")

    with monkeypatch.context() as patch:
        patch.setattr(kernel_store, "read_entry", read_then_lose_a_race)
        assert store.get(KEY) is None
    assert store.get(KEY) == Entry(KEY, FACTS, BLOBS)
    assert store.statistics().aside == 0


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
def test_an_entry_that_cannot_be_read_now_is_left(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch, number: int
):
    store.put(KEY, FACTS, BLOBS)

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    for name in ("open", "read"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.warns(RuntimeWarning, match=os.strerror(number)):
                assert KernelStore.get(store, KEY) is None
        store._noted.clear()
    assert store.get(KEY) == Entry(KEY, FACTS, BLOBS)


def mutate(chosen: random.Random, data: bytes, other: bytes) -> bytes:
    """Damage a file in one of the ways that disks, programs and people have."""
    changed = bytearray(data)
    at = chosen.randrange(len(data))
    match chosen.randrange(9):
        case 0:
            return bytes(changed[:at])
        case 1:
            for _ in range(chosen.choice([1, 1, 3, 50])):
                changed[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        case 2:
            changed[at : at + 4096] = bytes(len(changed[at : at + 4096]))
        case 3:
            changed[at:at] = chosen.randbytes(chosen.randrange(1, 100))
        case 4:
            del changed[at : at + chosen.randrange(1, 100)]
        case 5:
            changed[12:16] = struct.pack("<I", chosen.choice([0, 2**31, 2**32 - 1, len(data)]))
        case 6:
            return other
        case 7:
            changed[chosen.randrange(16)] = chosen.randrange(256)
        case _:
            return data[:at] + other[at:]
    return bytes(changed)


def mutate_and_sign(chosen: random.Random, data: bytes) -> bytes:
    """Damage the header of a file and sign it anew, so that all the later checks are reached."""
    length = int.from_bytes(data[12:16], "little")
    header, blobs = bytearray(data[16 : 16 + length]), data[16 + length : -32]
    for _ in range(chosen.choice([1, 2, 5])):
        at = chosen.randrange(len(header))
        if chosen.random() < 0.5:
            header[at] = chosen.choice(b'{}[]",:0123456789-eEnultrsafNI\\ \xff')
        else:
            header[at : at + chosen.randrange(20)] = chosen.choice(
                [b"", b"null", b"-1", b"[" * 5000, b'"', b"1e999", b"9" * 5000, b"NaN", b"{}"]
            )
    return file_with(bytes(header), blobs)


def fuzz(store: KernelStore, seed: int, seconds: float) -> None:
    store.put(key_of(1), {"other": True}, {"code": b"other" * 500})
    store.put(KEY, FACTS, BLOBS)
    data, other = path_of(store).read_bytes(), path_of(store, key_of(1)).read_bytes()
    deadline, cases = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        case = seed + cases
        chosen = random.Random(case)
        forged = chosen.random() < 0.4
        changed = mutate_and_sign(chosen, data) if forged else mutate(chosen, data, other)
        place(store, changed)
        listed = [info for info in store.entries() if info.key == KEY]
        assert len(listed) <= 1, f"seed {case}"
        verified = any(problem.path == path_of(store) for problem in store.verify())
        entry = store.get(KEY)
        if not forged:
            assert entry is None or changed == data, f"seed {case}"
            assert verified == (entry is None), f"seed {case}"
        elif entry is not None:
            assert entry.key == KEY, f"seed {case}"
            assert b"".join(entry.blobs.values()) == b"".join(BLOBS.values()), f"seed {case}"
        cases += 1
    print(cases, "cases")
    assert cases > 20


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_entry_is_never_returned(store: KernelStore):
    fuzz(store, 1, 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_entry_is_never_returned_in_a_minute(store: KernelStore):
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    fuzz(store, seed, 60)


# ------------------------------------------------------------------------------- the bound


def size_of_entry(tmp_path: Path) -> int:
    other = KernelStore(tmp_path / "measure")
    other.put(KEY, {}, {"code": bytes(1000)})
    return path_of(other).stat().st_size


def put_at(store: KernelStore, number: int, used: float) -> None:
    assert store.put(key_of(number), {}, {"code": bytes(1000)})
    os.utime(path_of(store, key_of(number)), (used, used))


def numbers(store: KernelStore) -> set[int]:
    keys = {info.key for info in store.entries()}
    return {number for number in range(100) if key_of(number) in keys}


def test_the_least_recently_used_leave_first(tmp_path: Path):
    size = size_of_entry(tmp_path)
    store = KernelStore(tmp_path / "cache", max_bytes=4 * size + 50)
    for number in range(4):
        put_at(store, number, used=1e9 + number)
    assert store.get(key_of(0)) is not None
    put_at(store, 4, used=1e9 + 4)
    put_at(store, 5, used=1e9 + 5)
    assert numbers(store) == {0, 3, 4, 5}
    assert store.statistics().bytes <= store.max_bytes


def test_the_entry_just_put_stays(tmp_path: Path):
    size = size_of_entry(tmp_path)
    store = KernelStore(tmp_path / "cache", max_bytes=size + 50)
    put_at(store, 1, used=time.time() + 1e6)
    assert store.put(key_of(2), {}, {"code": bytes(1000)})
    assert numbers(store) == {2}


def test_an_entry_beyond_the_bound_is_not_stored(tmp_path: Path):
    store = KernelStore(tmp_path / "cache", max_bytes=5000)
    store.put(KEY, {}, {"code": bytes(1000)})
    with pytest.warns(RuntimeWarning, match="expected an entry of at most 5000 bytes, got"):
        assert not store.put(key_of(1), {}, {"code": bytes(5000)})
    assert not store.put(key_of(1), {}, {"code": bytes(5000)}), "and warns once"
    assert numbers(store) == {0}


def test_the_bound_counts_what_other_stores_put(tmp_path: Path):
    bound = 64_000
    stores = [KernelStore(tmp_path / "cache", max_bytes=bound) for _ in range(3)]
    for number in range(99):
        assert stores[number % 3].put(key_of(number), {}, {"code": bytes(1000)})
        assert stores[0].statistics().bytes <= bound + 3 * (bound // 16)


def test_use_is_noted_once_a_minute(store: KernelStore):
    store.put(KEY, FACTS, BLOBS)
    path = path_of(store)
    for age, touched in ((30, False), (90, True), (-90, True)):
        used = time.time() - age
        os.utime(path, (used, used))
        store.get(KEY)
        (info,) = store.entries()
        assert (abs(info.used - time.time()) < 10) == touched


def test_gc_by_bytes_and_by_age(tmp_path: Path):
    size = size_of_entry(tmp_path)
    store = KernelStore(tmp_path / "cache")
    now = time.time()
    for number in range(6):
        put_at(store, number, used=now - 1000 * number)
    bytes_before = store.statistics().bytes
    assert store.gc() == Removed(0, 0)
    assert store.gc(older_than=3500) == Removed(2, bytes_before - store.statistics().bytes)
    assert numbers(store) == {0, 1, 2, 3}
    assert store.gc(max_bytes=2 * size + 50).entries == 2
    assert numbers(store) == {0, 1}
    assert store.gc(max_bytes=0).entries == 2
    for wrong in ({"max_bytes": -1}, {"older_than": -1.0}, {"older_than": float("nan")}):
        with pytest.raises(UsageError, match="of at least 0"):
            store.gc(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_bytes": "1G"},
        {"max_bytes": 1.5},
        {"max_bytes": True},
        {"max_bytes": [1]},
        {"older_than": "30d"},
        {"older_than": True},
        {"older_than": 10**400},
        {"older_than": {}},
    ],
)
def test_the_bounds_of_gc_are_numbers(store: KernelStore, wrong: Any):
    store.put(KEY, FACTS, BLOBS)
    with pytest.raises(UsageError, match=f"expected {next(iter(wrong))} of at least 0, "):
        store.gc(**wrong)
    assert store.statistics().entries == 1


def test_foreign_files_aside_and_among_locks_are_never_removed(store: KernelStore, tmp_path: Path):
    aside, locks = store.directory / "aside", lock_of(store).parent
    elsewhere = tmp_path / "elsewhere" / KEY[:2]
    for folder in (aside, locks, elsewhere, path_of(store).parent):
        folder.mkdir(parents=True)
    other = "ff" if KEY[:2] != "ff" else "00"
    (store.directory / "entries" / other).symlink_to(elsewhere)
    (store.directory / "locks" / other).symlink_to(elsewhere)
    foreign = [
        aside / "thesis.tex",
        aside / f"{KEY}.blk",
        aside / f"1-{KEY}.blk",
        aside / f"{0:020}-{KEY}.blk.bak",
        aside / f"{0:020}-{KEY.upper()}.blk",
        locks / "thesis.lock",
        locks / f"{other}{KEY[2:]}.lock",
        store.directory / "locks" / f"{KEY}.lock",
        elsewhere / f"{other}{KEY[2:]}.blk",
        elsewhere / f"{other}{KEY[2:]}.lock",
        path_of(store).parent / f".{other}{KEY[2:]}.blk.{0:016x}.tmp",
    ]
    for path in foreign:
        path.write_text("mine")
        os.utime(path, (1e9, 1e9))
    ours = [aside / f"{1:020}-{KEY}.blk", lock_of(store)]
    for path in ours:
        path.write_text("ours")
    assert store.statistics().aside == 1
    for number in range(20):
        place(store, b"", key_of(number))
        with pytest.warns(RuntimeWarning):
            store.get(key_of(number))
    store.gc(max_bytes=0, older_than=0)
    store.clear()
    assert all(path.read_text() == "mine" for path in foreign)
    assert not any(path.exists() for path in ours)
    assert store.statistics().aside == 0


def test_foreign_files_are_reported_and_never_removed(store: KernelStore):
    store.put(KEY, FACTS, BLOBS)
    folder = path_of(store).parent
    foreign = [
        store.directory / "notes.txt",
        store.directory / "entries" / "readme",
        folder / "notes.txt",
        folder / f"{'0' * 64}.blk" if KEY[:2] != "00" else folder / "x.blk",
        folder / f".{KEY}.tmp",
    ]
    for path in foreign:
        path.write_text("mine")
    store.gc(max_bytes=0, older_than=0)
    store.clear()
    assert all(path.read_text() == "mine" for path in foreign)
    assert {problem.path for problem in store.verify()} == set(foreign[2:])


# ------------------------------------------------------------------------------- listing


def test_entries_come_from_headers_alone(store: KernelStore, monkeypatch: pytest.MonkeyPatch):
    before = time.time()
    for number in range(5):
        store.put(key_of(number), {"number": number}, {"code": bytes(1 << 20)})
    store.put(key_of(5), {"number": 5, "long": "x" * 50_000}, {"code": bytes(1 << 20)})
    place(store, b"damaged", key_of(6))
    read, total = os.read, 0

    def counting_read(descriptor: int, count: int) -> bytes:
        nonlocal total
        data = read(descriptor, count)
        total += len(data)
        return data

    monkeypatch.setattr(os, "read", counting_read)
    infos = list(store.entries())
    assert total < 200_000
    assert [info.key for info in infos] == sorted(key_of(number) for number in range(6))
    for info in infos:
        assert key_of(info.facts["number"]) == info.key
        assert info.bytes == path_of(store, info.key).stat().st_size
        assert before - 1 <= info.created <= time.time()
        assert before - 1 <= info.used <= time.time() + 1
    statistics = store.statistics()
    assert (statistics.entries, statistics.aside) == (7, 0)
    assert statistics.bytes == sum(info.bytes for info in infos) + len(b"damaged")
    assert (statistics.directory, statistics.max_bytes) == (store.directory, 1 << 30)


# ------------------------------------------------------------------------------- whose directory


def test_everything_is_for_the_user_alone(tmp_path: Path):
    previous = os.umask(0)
    try:
        store = KernelStore(tmp_path / "made" / "on the way" / "cache")
        store.put(KEY, FACTS, BLOBS)
        place(store, b"", key_of(1))
        with pytest.warns(RuntimeWarning):
            store.get(key_of(1))
        with store.locked(key_of(2)):
            paths = list((tmp_path / "made").rglob("*"))
            modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
            folders = {path for path in paths if path.is_dir()}
    finally:
        os.umask(previous)
    assert len(modes) >= 11
    for path, mode in modes.items():
        assert mode == (0o700 if path in folders else 0o600), path


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720, 0o702, 0o1777])
def test_a_directory_that_others_can_write_to_is_refused(tmp_path: Path, mode: int):
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(mode)
    with pytest.raises(
        CacheError, match=f"found mode {mode:04o} - at .*another directory"
    ) as error:
        KernelStore(directory)
    assert list(directory.iterdir()) == []
    assert ("chmod" in str(error.value)) == (mode != 0o1777), "never for the likes of /tmp"
    (directory / "work").touch()
    with pytest.raises(CacheError, match=f"found mode {mode:04o} - at ") as error:
        KernelStore(directory)
    assert "chmod" not in str(error.value), "others may share what is in it"


def test_a_directory_that_others_can_read_is_used(tmp_path: Path):
    directory = tmp_path / "cache"
    directory.mkdir()
    directory.chmod(0o755)
    assert KernelStore(directory).put(KEY, FACTS, BLOBS)


@needs_root
def test_another_users_directory_is_refused(tmp_path: Path):
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o700)
    os.chown(directory, NOBODY, NOBODY)
    with pytest.raises(CacheError, match=f"of user 0, found one of user {NOBODY} - at "):
        KernelStore(directory)
    link = tmp_path / "link"
    link.symlink_to(directory)
    with pytest.raises(CacheError, match=f"of user 0, found one of user {NOBODY} - at "):
        KernelStore(link)


@needs_root
def test_another_users_link_is_refused(tmp_path: Path):
    directory, link = tmp_path / "cache", tmp_path / "link"
    KernelStore(directory)
    link.symlink_to(directory)
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(CacheError, match=f"found a link of user {NOBODY} to {directory}"):
        KernelStore(link)


def test_the_users_own_link_is_followed_once(tmp_path: Path):
    (tmp_path / "disk").mkdir(mode=0o700)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk")
    store = KernelStore(link)
    assert store.directory == tmp_path / "disk"
    link.unlink()
    link.symlink_to("/nowhere")
    assert store.put(KEY, FACTS, BLOBS)


@needs_root
def test_another_users_entry_is_not_loaded(store: KernelStore):
    store.put(KEY, FACTS, BLOBS)
    os.chown(path_of(store), NOBODY, NOBODY)
    with pytest.warns(RuntimeWarning, match=f"found a file of user {NOBODY} - at"):
        assert store.get(KEY) is None


def test_an_entry_that_others_can_write_to_is_not_loaded(store: KernelStore):
    store.put(KEY, FACTS, BLOBS)
    path_of(store).chmod(0o620)
    with pytest.warns(RuntimeWarning, match="found a file that others can write to, mode 0620"):
        assert store.get(KEY) is None


def test_a_place_where_no_directory_can_be_is_refused(tmp_path: Path):
    file, dangling = tmp_path / "file", tmp_path / "loop"
    file.write_text("mine")
    dangling.symlink_to(dangling)
    for path in (file, file / "below", dangling, Path("/proc/nothing/cache")):
        with pytest.raises(CacheError, match="; name another directory, or do without a disk"):
            KernelStore(path)
    assert file.read_text() == "mine"


def test_advice_fits_how_the_directory_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    file.write_text("mine")
    monkeypatch.setenv("BRICKLINE_CACHE", str(file))
    found, disk = f"expected a directory, found a file - at {file}; ", "KernelCache(disk=False)"
    chosen = "choose another directory with BRICKLINE_CACHE"
    for directory, create, advice in (
        (None, True, f"{chosen}, or do without a disk: {disk}"),
        (file, True, f"name another directory, or do without a disk: {disk}"),
        (None, False, chosen),
        (file, False, "name another, or none for the user's own"),
    ):
        with pytest.raises(CacheError) as error:
            KernelStore(directory, create=create)
        assert str(error.value) == found + advice


@pytest.mark.parametrize("version", [None, b"", bytes(20)], ids=["none", "empty", "zeros"])
@pytest.mark.parametrize("create", [True, False])
def test_a_directory_of_other_things_is_refused(
    tmp_path: Path, version: bytes | None, create: bool
):
    for name in ("entries", "thesis.tex", "work"):
        (tmp_path / name).touch()
    if version is not None:
        (tmp_path / "VERSION").write_bytes(version)
    before = sorted(tmp_path.iterdir())
    expected = "a kernel cache or an empty directory" if create else "a kernel cache"
    with pytest.raises(CacheError) as error:
        KernelStore(tmp_path, create=create)
    assert str(error.value).startswith(
        f"expected {expected}, found no VERSION but 'thesis.tex' and 1 more - at {tmp_path}; name"
    )
    assert sorted(tmp_path.iterdir()) == before
    assert version is None or (tmp_path / "VERSION").read_bytes() == version


def test_a_store_that_lost_its_version_is_used(tmp_path: Path):
    for name in ("entries", "locks", "aside"):
        (tmp_path / name).mkdir()
    (tmp_path / f".VERSION.{0:016x}.tmp").touch()  # a killed process has left it
    KernelStore(tmp_path, create=False)
    assert not (tmp_path / "VERSION").exists()
    KernelStore(tmp_path)
    assert (tmp_path / "VERSION").exists()


def test_a_store_that_is_only_looked_at_is_not_made(tmp_path: Path):
    missing, empty = tmp_path / "deep" / "missing", tmp_path / "empty"
    empty.mkdir(mode=0o700)
    with pytest.raises(CacheError, match=f"expected a directory, found nothing - at {missing}; "):
        KernelStore(missing, create=False)
    with pytest.raises(CacheError, match=f"expected a kernel cache, found none - at {empty}; "):
        KernelStore(empty, create=False)
    assert list(tmp_path.rglob("*")) == [empty]
    KernelStore(empty).put(KEY, FACTS, BLOBS)
    before = sorted(empty.rglob("*"))
    store = KernelStore(empty, create=False)
    assert store.get(KEY) == Entry(KEY, FACTS, BLOBS)
    assert (store.verify(), store.statistics().entries) == ([], 1)
    assert sorted(empty.rglob("*")) == before


@pytest.mark.parametrize("found", [b"2.3.1\n", b"brickline-kernels 2\n", b"\xff" * 100])
def test_a_directory_of_another_version_or_program_is_refused(tmp_path: Path, found: bytes):
    (tmp_path / "VERSION").write_bytes(found)
    with pytest.raises(CacheError, match="expected 'brickline-kernels 1', found"):
        KernelStore(tmp_path)
    assert (tmp_path / "VERSION").read_bytes() == found


@pytest.mark.parametrize("found", [b"", bytes(20)])
def test_a_version_lost_in_a_power_cut_is_written_again(tmp_path: Path, found: bytes):
    (tmp_path / "VERSION").write_bytes(found)
    KernelStore(tmp_path)
    assert (tmp_path / "VERSION").read_bytes() == b"brickline-kernels 1\n"


def test_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("BRICKLINE_CACHE", "")
    assert default_directory() == tmp_path / ".cache" / "brickline" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_directory() == tmp_path / "xdg" / "brickline" / "kernels"
    monkeypatch.setenv("BRICKLINE_CACHE", "~/mine")
    assert default_directory() == tmp_path / "mine"
    assert KernelStore().directory == tmp_path / "mine"


READ_ONLY = """
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
store = KernelStore(directory)
assert store.get(KEY).facts == {"kept": True}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for number in range(3):
        assert store.put(key_of(number), {}, {"code": b"new"}) is False
        with store.locked(key_of(number)) as held:
            assert held is False
assert len(caught) == 1, [str(each.message) for each in caught]
assert "Permission denied; going on without" in str(caught[0].message)
assert store.get(KEY).facts == {"kept": True}
assert [info.key for info in store.entries()] == [KEY]
assert store.verify() == []
try:
    store.clear()
except CacheError as error:
    assert "cannot remove" in str(error) and "Permission denied" in str(error)
else:
    raise AssertionError("cleared a read-only directory")
say("done")
"""


@pytest.mark.parametrize("version", [True, False], ids=["VERSION", "no VERSION"])
def test_a_read_only_directory_is_read(open_directory: Path, version: bool):
    store = KernelStore(open_directory / "cache")
    store.put(KEY, {"kept": True}, BLOBS)
    if not version:
        (store.directory / "VERSION").unlink()
    for path in [store.directory, *store.directory.rglob("*")]:
        path.chmod(0o500 if path.is_dir() else 0o400)
        if os.geteuid() == 0:
            os.chown(path, NOBODY, NOBODY)
    try:
        assert run(READ_ONLY, store.directory) == "done\n"
    finally:
        for path in [store.directory, *store.directory.rglob("*")]:
            path.chmod(0o700)


UNREACHABLE = """
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    KernelStore(directory / "new" / "cache")
except CacheError as error:
    say(error)
"""


def test_a_directory_that_cannot_be_made_is_an_error(open_directory: Path):
    open_directory.chmod(0o555)
    try:
        said = run(UNREACHABLE, open_directory)
    finally:
        open_directory.chmod(0o755)
    path = open_directory / "new" / "cache"
    assert said.startswith(f"cannot use the cache directory {path}: Permission denied; ")


# ------------------------------------------------------------------------------- a full disk


def test_a_full_disk_costs_the_entry_alone(store: KernelStore, monkeypatch: pytest.MonkeyPatch):
    store.put(KEY, {"a": 1}, BLOBS)
    write, budget = os.write, 3000

    def write_until_full(descriptor: int, data: Any) -> int:
        nonlocal budget
        if budget == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = write(descriptor, data[: min(budget, 1000)])
        budget -= written
        return written

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_until_full)
        with pytest.warns(RuntimeWarning, match="No space left on device; going on without"):
            assert not store.put(KEY, {"a": 2}, {"code": bytes(5000)})
        assert not store.put(key_of(1), {}, {}), "and warns once"
        budget = 10_000
        assert store.put(key_of(2), {}, {"code": bytes(5000)}), "pieces make a whole"
    assert leftovers(store) == []
    assert store.get(KEY) == Entry(KEY, {"a": 1}, BLOBS)
    assert store.get(key_of(2)) == Entry(key_of(2), {}, {"code": bytes(5000)})


FILE_LIMIT = """
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
store = KernelStore(directory)
assert store.put(KEY, {}, {"code": b"small"})
warnings.simplefilter("ignore")
assert not store.put(KEY, {}, {"code": bytes(100_000)})
assert store.get(KEY).blobs == {"code": b"small"}
say("done")
"""


def test_the_systems_limit_costs_the_entry_alone(store: KernelStore):
    assert run(FILE_LIMIT, store.directory) == "done\n"
    assert leftovers(store) == []
    assert store.verify() == []


# ------------------------------------------------------------------------------- locks


HOLDER = """
store = KernelStore(directory)
with store.locked(KEY) as held:
    say(held)
    sys.stdin.readline()
say("released")
"""


def started_holder(store: KernelStore, code: str = HOLDER) -> subprocess.Popen[str]:
    holder = start(code, store.directory)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    return holder


def test_a_lock_keeps_other_processes_out(store: KernelStore):
    holder = started_holder(store)
    with store.locked(KEY, timeout=0) as held:
        assert not held
    with pytest.warns(RuntimeWarning, match=r"within 0\.05 s, found it held - at .*fuser"):  # noqa: SIM117
        with store.locked(KEY, timeout=0.05) as held:
            assert not held
    with store.locked(key_of(1), timeout=0) as held:
        assert held, "another key is another lock"
    assert holder.stdin is not None
    threading.Timer(0.2, os.write, (holder.stdin.fileno(), b"\n")).start()
    with store.locked(KEY) as held:
        assert held
    assert finish(holder) == "released\n"


def test_a_killed_holder_releases_the_lock(store: KernelStore):
    holder = started_holder(store)
    threading.Timer(0.2, holder.kill).start()
    begin = time.monotonic()
    with store.locked(KEY) as held:
        assert held
    assert 0.1 < time.monotonic() - begin < 30
    kill(holder)


def test_a_stopped_holder_is_waited_for_no_longer_than_asked(store: KernelStore):
    holder = started_holder(store)
    holder.send_signal(signal.SIGSTOP)
    with store.locked(KEY, timeout=0) as held:
        assert not held
    kill(holder)
    with store.locked(KEY, timeout=30) as held:
        assert held


FORKING_HOLDER = """
store = KernelStore(directory)
with store.locked(KEY) as held:
    child = os.fork()
    if child == 0:
        with store.locked(KEY, timeout=0) as inherited:
            assert inherited is False
        os.close(0), os.close(1), os.close(2)
        time.sleep(30)
        os._exit(0)
    say(held)
    say(child)
    sys.stdin.readline()
"""


def test_a_forked_child_neither_holds_nor_keeps_the_lock(store: KernelStore):
    holder = started_holder(store, FORKING_HOLDER)
    assert holder.stdout is not None
    child = int(holder.stdout.readline())
    try:
        kill(holder)
        with store.locked(KEY, timeout=10) as held:
            assert held, "the killed holder's child has kept the lock"
    finally:
        os.kill(child, signal.SIGKILL)


FORK_LEAVES_BLOCK = """
store = KernelStore(directory)
with store.locked(KEY) as held:
    child = os.fork()
if child == 0:
    os._exit(0 if held else 1)
assert os.waitpid(child, 0)[1] == 0
with store.locked(KEY):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0
        # The child has left the block, and the lock is still ours.
        def other():
            with store.locked(KEY, timeout=0) as held:
                assert held is False
            say("held")
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
if child == 0:
    os._exit(0)
"""


def test_a_forked_child_that_leaves_the_block_releases_nothing(store: KernelStore):
    assert run(FORK_LEAVES_BLOCK, store.directory) == "held\n"


def test_a_thread_that_would_wait_for_itself_is_told(store: KernelStore):
    with store.locked(KEY) as held:
        assert held
        with pytest.raises(UsageError, match="must not ask for the same entry"):
            store.locked(KEY).__enter__()
        with store.locked(key_of(1)) as other:
            assert other
    with store.locked(KEY, timeout=0) as held:
        assert held


def test_a_block_that_raises_releases_the_lock(store: KernelStore):
    with pytest.raises(OSError, match="mine"), store.locked(KEY):
        raise OSError("mine")
    with store.locked(KEY, timeout=0) as held:
        assert held


def test_lock_files_go_when_they_are_released(store: KernelStore):
    with store.locked(KEY):
        assert lock_of(store).exists()
        store.gc()
        store.clear()
        assert lock_of(store).exists(), "a held lock is left"
        with pytest.raises(UsageError):
            store.locked(KEY).__enter__()
    assert not lock_of(store).exists()
    holder = started_holder(store)
    store.clear()
    assert lock_of(store).exists(), "a held lock is left"
    kill(holder)
    assert lock_of(store).exists()
    store.gc()
    assert not lock_of(store).exists()


def test_a_lock_has_one_holder_though_its_file_comes_and_goes(store: KernelStore):
    inside, most, turns = [0], 0, 0
    deadline = time.monotonic() + 0.7

    def work() -> None:
        nonlocal most, turns
        while time.monotonic() < deadline:
            with store.locked(KEY) as held:
                assert held
                inside[0] += 1
                most = max(most, inside[0])
                time.sleep(0.0005)
                inside[0] -= 1
                turns += 1

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert turns > 20


def test_a_stray_copy_of_the_descriptor_keeps_nobody_out(store: KernelStore):
    entered: list[bool] = []
    waiting = threading.Timer(0.05, lambda: entered.append(store.locked(KEY, 30).__enter__()))
    with store.locked(KEY):
        (name,) = (n for n in os.listdir("/proc/self/fd") if opens_lock(store, n))
        copy = os.dup(int(name))
        waiting.start()
        time.sleep(0.2)
        assert not entered
    waiting.join(10)
    os.close(copy)
    assert entered == [True]


def opens_lock(store: KernelStore, descriptor: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == str(lock_of(store))
    except FileNotFoundError:
        return False


def test_a_file_system_without_locks_is_no_obstacle(
    store: KernelStore, monkeypatch: pytest.MonkeyPatch
):
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with store.locked(KEY) as held:
            assert not held
    assert len(os.listdir("/proc/self/fd")) == before


PRODUCERS = """
def ask(store, number):
    start.wait()
    entry = store.get(KEY)
    if entry is None:
        with store.locked(KEY) as held:
            assert held
            entry = store.get(KEY)
            if entry is None:
                with open(directory.parent / "produced", "a") as log:
                    log.write(f"{os.getpid()}\\n")
                time.sleep(0.2)
                assert store.put(KEY, {"by": os.getpid()}, {"code": bytes(10_000)})
                entry = store.get(KEY)
    answers.append(entry.facts["by"])

answers, start = [], threading.Barrier(8)
shared = KernelStore(directory)
stores = [shared if number % 2 else KernelStore(directory) for number in range(8)]
threads = [threading.Thread(target=ask, args=(stores[n], n)) for n in range(8)]
say("ready")
sys.stdin.readline()
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(answers) == 8 and len(set(answers)) == 1, answers
say(answers[0])
"""


def test_32_threads_in_4_processes_make_one_producer(tmp_path: Path):
    processes = [start(PRODUCERS, tmp_path / "cache") for _ in range(4)]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = {finish(process) for process in processes}
    assert (tmp_path / "produced").read_text().splitlines() == [answers.pop().strip()]
    assert not answers
    assert list((tmp_path / "cache" / "locks").rglob("*.lock")) == []


# ------------------------------------------------------------------------------- all at once


CROWD = """
role, seconds = arguments[0], float(arguments[1])
store, chosen = KernelStore(directory, max_bytes=400_000), random.Random(os.getpid())
deadline, turns, found = time.monotonic() + seconds, 0, 0

def code_of(number): return bytes([number]) * (5000 + 100 * number)

def turn():
    global found
    number = chosen.randrange(50)
    key = key_of(number)
    if role == "clear":
        chosen.choice([store.clear, store.clear, lambda: store.gc(max_bytes=50_000)])()
        list(store.entries()), store.statistics()
        assert store.verify() == []
        time.sleep(0.002)
        return
    if role == "produce":
        with store.locked(key) as held:
            assert held
            if store.get(key) is None:
                assert store.put(key, {"number": number}, {"code": code_of(number)})
    entry = store.get(key)
    if entry is not None:
        found += 1
        assert entry.facts == {"number": number} and entry.blobs == {"code": code_of(number)}

def work():
    global turns
    while time.monotonic() < deadline:
        turn()
        turns += 1

threads = [threading.Thread(target=work) for _ in range(2)]
failures = []
threading.excepthook = lambda args: failures.append(args)
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not failures, failures
say(f"{role} {turns} {found}")
"""


def crowd(directory: Path, seconds: float) -> None:
    roles = ["produce", "produce", "read", "clear"]
    processes = [start(CROWD, directory, role, seconds) for role in roles]
    said = [finish(process, seconds + 60).split() for process in processes]
    print(said)
    assert all(int(turns) > 5 for _, turns, _ in said)
    assert all(int(found) > 0 for role, _, found in said if role == "produce")
    store = KernelStore(directory)
    assert store.verify() == []
    assert leftovers(store) == []
    assert store.statistics().aside == 0
    assert list((directory / "locks").rglob("*.lock")) == []


def test_clear_races_with_readers_and_writers(tmp_path: Path):
    crowd(tmp_path / "cache", 1)


@pytest.mark.long
def test_clear_races_with_readers_and_writers_for_a_minute(tmp_path: Path):
    crowd(tmp_path / "cache", 60)
