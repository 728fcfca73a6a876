"""Replay logs: what was saved comes back, and whatever else lies there is a PlanError."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
import zlib
from dataclasses import replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from brickline.errors import PlanError, UsageError
from brickline.executor.megakernel.replay_log import ReplayLog, writes_of
from brickline.executor.megakernel.replay_memory import block_that_touches, surviving
from brickline.executor.megakernel.replay_runs import (
    MAX_PIECES,
    Contents,
    LoggedRun,
    Written,
    digest_of,
)
from brickline.kernels.catalog import residual
from brickline.plan import Plan


def add_plan() -> Plan:
    """y = x + x, then the first half of y again, then z from y."""
    plan = Plan("add")
    n = plan.variable("n", 1, 64, default=64)
    x, y, z = (plan.buffer(name, 64, "f32") for name in "xyz")
    plan.launch(residual(), a=x, b=x, y=y, n=n, brick="First", layer=0)
    plan.launch(residual(), a=x[:32], b=x[:32], y=y[:32], n=32)
    plan.launch(residual(), a=y, b=y, y=z, n=64)
    return plan


def hand_made_log() -> ReplayLog:
    plan = add_plan()
    memory = {
        "x": Contents.of(np.arange(64, dtype=np.float32).tobytes(), keep=True),
        "y": Contents.of(bytes(256), keep=True),
        "z": Contents.of(bytes(range(256)), keep=False),
    }
    written = tuple(
        tuple(
            Written.of(storage, begin, bytes(end - begin))
            for storage, begin, end in writes_of(each)
        )
        for each in plan.launches
    )
    again = LoggedRun({"n": 5}, {}, None, ((), (), ()))
    return ReplayLog.of(
        plan, "CPU", "serial", [LoggedRun({"n": 64}, memory, (0, 1, 2), written), again]
    )


def saved(tmp_path: Path) -> Path:
    return hand_made_log().save(tmp_path / "a.replay.json")


def signed(contents: Any) -> bytes:
    """A document whose digest is right, whatever it says."""
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    head = {"format": "brickline-replay", "version": 1, "digest": digest}
    return json.dumps({**head, "log": contents}).encode()


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    log, path = hand_made_log(), saved(tmp_path)
    again = ReplayLog.load(path)
    assert again == log
    assert again.plan.explain() == add_plan().explain()
    assert len(again.first_launches(2).launches) == 2
    with pytest.raises(UsageError, match="is there already"):
        log.save(path)
    log.save(path, overwrite=True)
    assert [each.name for each in tmp_path.iterdir()] == ["a.replay.json"]


def test_contents_are_kept_where_asked_and_zeros_never() -> None:
    memory = hand_made_log().runs[0].memory
    assert memory["y"] == Contents(256, digest_of(bytes(256)), None, True)
    assert memory["z"].data is None
    storages = {each.name: each for each in add_plan().storages}
    x = memory["x"].array(storages["x"])
    assert x is not None
    assert x.tolist() == list(range(64))
    assert memory["z"].array(storages["z"]) is None
    zeros = memory["y"].array(storages["y"])
    assert zeros is not None
    assert not zeros.any()


def test_pieces_are_few_and_cover_everything() -> None:
    for size in (1, 4095, 4096, 4097, 1 << 20, (4 << 20) + 1, 100 << 20):
        written = Written.of(3, 100, bytes(size))
        pieces = list(written.pieces())
        assert len(pieces) == len(written) <= MAX_PIECES
        assert pieces[0][0] == 100
        assert pieces[-1][1] == written.end == 100 + size
        assert all(first[1] == second[0] for first, second in pairwise(pieces))
        assert pieces[0][2] == digest_of(bytes(min(size, written.piece_bytes)))


def test_what_survives_to_the_end() -> None:
    kept = surviving(add_plan().launches)
    assert kept == [[(1, 128, 256)], [(1, 0, 128)], [(2, 0, 256)]]


ranges = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 24)), min_size=1, max_size=8)


@given(ranges)
@settings(max_examples=50)
def test_survivors_are_those_of_a_byte_by_byte_walk(given: list[tuple[int, int]]) -> None:
    plan = Plan("p")
    x, y = plan.buffer("x", 64, "f32"), plan.buffer("y", 64, "f32")
    for begin, count in given:
        plan.launch(residual(), a=x[:count], b=x[:count], y=y[begin : begin + count], n=count)
    last: dict[int, int] = {}
    for number, (begin, count) in enumerate(given):
        last.update(dict.fromkeys(range(4 * begin, 4 * (begin + count)), number))
    for number, kept in enumerate(surviving(plan.launches)):
        mine = set(chain(*(range(begin, end) for _, begin, end in kept)))
        assert mine == {byte for byte, who in last.items() if who == number}


def test_who_touches_a_byte() -> None:
    plan = Plan("p")
    x, y = plan.buffer("x", 5000, "f32"), plan.buffer("y", 6000, "f32")
    kernel = residual()
    launch = plan.launch(kernel, a=x, b=x, y=y[1000:], n=5000)
    (touches,) = [param.touches for param in kernel.params if param.name == "y"]
    assert touches is not None
    tile = touches[1].evaluate({"block_x": 0, "block_y": 0, "block_z": 0, "n": 5000})
    assert block_that_touches(launch, {}, 1, 4000) == (0, 0, 0)
    assert block_that_touches(launch, {}, 1, 4000 + tile) == (1, 0, 0)
    assert block_that_touches(launch, {}, 1, 23_999) == (-(-20_000 // tile) - 1, 0, 0)
    assert block_that_touches(launch, {}, 1, 3999) is None
    assert block_that_touches(launch, {}, 0, 0) is None


# ------------------------------------------------------------------------------------------ damage


def test_damage_is_found_and_said(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for text, words in (
        (whole[:-30], "is cut off"),
        (whole.replace(b'"n":64', b'"n":63', 1), "digest"),
        (whole.replace(b'"version": 1', b'"version": 2', 1), "upgrade brickline"),
        (whole.replace(b'"version": 1', b'"version": -1', 1), "version from 1 on"),
        (b"", "no replay log"),
        (b"null", "something else than a replay log"),
        (b"[" * 5000, "no replay log"),
        (b"\xff", "no replay log"),
    ):
        path.write_bytes(text)
        with pytest.raises(PlanError, match=words) as error:
            ReplayLog.load(path)
        assert str(path) in str(error.value)
    for missing in (tmp_path / "none", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(PlanError, match=r"cannot read|got a directory"):
            ReplayLog.load(missing)


def changed(**changes: Any) -> Any:
    run = hand_made_log().runs[0]
    return replace(run, **changes)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (changed(order=(0, 2, 1)), r"launch 2 \(residual\) began before launch 1"),
        (changed(order=(0, 1)), "an order of all 3 launches"),
        (changed(order=(0, 1, 1)), "an order of all 3 launches"),
        (changed(values={}), "expected values of n, got none"),
        (changed(values={"n": "x"}), "n: expected a number"),
        (changed(values={"n": True}), "n: expected a number"),
        (changed(memory={}), "expected the memory of x, got none"),
        (changed(memory={"w": Contents(1, "0" * 16)}), "no buffer 'w'"),
        (changed(memory={"x": Contents(4, "0" * 16)}), "expected 256 bytes, got 4"),
        (changed(written=()), "digests of 3 launches, got 0"),
        (changed(written=((Written.of(0, 0, bytes(256)),), (), ())), "does not write"),
        (changed(written=((Written.of(1, 0, bytes(257)),), (), ())), "does not write"),
        (changed(written=((Written(1, 0, 256, 4096, "x" * 16),), (), ())), "does not write"),
        (changed(written=((Written(1, 0, 256, 1, "0" * 16),), (), ())), "does not write"),
    ],
)
def test_runs_that_do_not_fit_are_refused(run: LoggedRun, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        ReplayLog.of(add_plan(), "CPU", "serial", [run])


def test_contents_that_unpack_to_more_are_refused(tmp_path: Path) -> None:
    """A few bytes that would become a gigabyte are cut off at what the buffer holds."""
    path = saved(tmp_path)
    contents = json.loads(path.read_bytes())["log"]
    bomb = base64.b64encode(zlib.compress(bytes(64 << 20), 9)).decode()
    for data in (bomb, "AAAA", "not base64!", base64.b64encode(zlib.compress(b"short")).decode()):
        contents["runs"][0]["memory"]["x"]["data"] = data
        path.write_bytes(signed(contents))
        with pytest.raises(PlanError, match=r"damaged|describes no replay log"):
            ReplayLog.load(path)


JUNK = [None, True, -1, 2**63, 1.5, "x", [], {}, [0], {"a": 1}, 1e300]


def places(value: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    pairs: Any = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    return [way] + [each for key, inner in pairs for each in places(inner, (*way, key))]


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_a_hostile_log_is_refused_or_a_log(data: st.DataObject, room: Path) -> None:
    """Whatever is put anywhere, with a digest that fits: an error of ours, or a sound log."""
    path = hand_made_log().save(room / "hostile.json", overwrite=True)
    contents = json.loads(path.read_bytes())["log"]
    where = contents if data.draw(st.booleans()) else contents["runs"]
    for _ in range(data.draw(st.integers(1, 3))):
        way = data.draw(st.sampled_from(places(where)[1:]))
        holder = where
        for key in way[:-1]:
            holder = holder[key]
        holder[way[-1]] = copy.deepcopy(data.draw(st.sampled_from(JUNK)))
    path.write_bytes(signed(contents))
    try:
        log = ReplayLog.load(path)
    except PlanError:
        return
    assert len(log.plan.launches) == 3
    for run in log.runs:
        assert len(run.written) == 3


@given(data=st.binary(max_size=200))
def test_bytes_are_no_log(data: bytes, room: Path) -> None:
    path = room / "bytes.json"
    path.write_bytes(data)
    with pytest.raises(PlanError):
        ReplayLog.load(path)
