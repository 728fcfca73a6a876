"""Tensors of a run: what is saved is loaded, once, and nothing else is."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from brickline import BrickProfiler, Run
from brickline.dtypes import DTYPES
from brickline.errors import RunDamaged, RunError, RunVersion, UsageError
from brickline.fingerprints import fingerprint
from brickline.run_tensors import (
    has_tensor,
    host_array,
    load_tensor,
    save_tensor,
    tensor_name,
    tensor_names,
)

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def same(one: np.ndarray, other: np.ndarray) -> bool:
    return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_comes_back(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    values = np.arange(np.prod(shape, dtype=int)).reshape(shape) % 2
    array = np.asarray(values, DTYPES[name].numpy)
    file = save_tensor(tmp_path, None, array)
    assert file.name == tensor_name(fingerprint(array).hash, name, shape)
    assert same(load_tensor(tmp_path, fingerprint(array)), array)
    assert same(load_tensor(tmp_path, file.name), array)
    assert same(load_tensor(tmp_path, fingerprint(array).to_bytes()), array)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
@given(arrays.arrays(np.float16, arrays.array_shapes(min_dims=0, max_dims=3)), st.booleans())
def test_any_bits_and_any_order_come_back(tmp_path: Path, array: np.ndarray, turn: bool) -> None:
    given_ = array.T if turn else array
    save_tensor(tmp_path, fingerprint(given_), given_)
    assert same(load_tensor(tmp_path, fingerprint(given_)), np.array(given_, order="C"))


def test_equal_tensors_share_a_private_file(tmp_path: Path) -> None:
    file = save_tensor(tmp_path, None, X)
    before = file.stat()
    assert save_tensor(tmp_path, None, X.copy(order="F")) == file
    assert file.stat().st_mtime_ns == before.st_mtime_ns, "written once"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    save_tensor(tmp_path, None, X.reshape(4, 3))
    save_tensor(tmp_path, None, X.astype(np.float64))
    assert len(tensor_names(tmp_path)) == len(os.listdir(file.parent)) == 3
    assert has_tensor(tmp_path, fingerprint(X))
    assert not has_tensor(tmp_path, fingerprint(X + 1))
    assert tensor_names(tmp_path / "none") == []


def test_it_is_a_part_of_the_run(tmp_path: Path) -> None:
    p = BrickProfiler("p", enabled=True, device="NULL", path=tmp_path / "run")
    assert p.path is not None
    p.trace("k", outputs=[X])
    save_tensor(p.path, None, X)
    p.save(tmp_path / "moved")
    p.close()
    (part,) = Run.open(tmp_path / "moved").parts
    row = part.fingerprints[part.operands["fingerprint"][0] - 1]
    assert same(load_tensor(tmp_path / "moved", row.tobytes()), X)


def test_many_write_the_same_at_once(tmp_path: Path) -> None:
    threads = [threading.Thread(target=save_tensor, args=(tmp_path, None, X)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(os.listdir(tmp_path / "tensors")) == 1
    assert same(load_tensor(tmp_path, fingerprint(X)), X)


def test_a_shortened_file_is_written_anew(tmp_path: Path) -> None:
    file = save_tensor(tmp_path, None, X)
    os.truncate(file, 70)
    with pytest.raises(RunDamaged):
        load_tensor(tmp_path, file.name)
    save_tensor(tmp_path, None, X)
    assert same(load_tensor(tmp_path, file.name), X)


def header(**fields: Any) -> bytes:
    known: dict[str, Any] = {"dtype": "f32", "shape": [3, 4], "bytes": 48}
    text = json.dumps(known | fields).encode().ljust(128 - 16)
    return b"BRICKTNS" + (1).to_bytes(4, "little") + (128).to_bytes(4, "little") + text


@pytest.mark.parametrize(
    "contents",
    [
        b"",
        b"BRICKTNS",
        b"NUMPY..." + header()[8:] + X.tobytes(),
        header()[:12] + (2**31).to_bytes(4, "little") + X.tobytes(),
        header()[:12] + (3).to_bytes(4, "little") + X.tobytes(),
        header()[:16] + b"[" + header()[17:] + X.tobytes(),
        header()[:16] + b"[]".ljust(112) + X.tobytes(),
        header(dtype="object") + X.tobytes(),
        header(dtype=["f32"]) + X.tobytes(),
        header(shape=[-3, -4]) + X.tobytes(),
        header(shape=[2**62, 4], bytes=2**64) + X.tobytes(),
        header(shape=[3.0, 4]) + X.tobytes(),
        header(shape=12) + X.tobytes(),
        header(shape=[4, 3]) + X.tobytes(),
        header(bytes=44) + X.tobytes(),
        header() + X.tobytes()[:-1],
        header() + X.tobytes() + b"\0",
        header() + (X + 1).tobytes(),
    ],
    ids=lambda contents: f"{len(contents)} bytes",
)
def test_what_is_damaged_is_refused(tmp_path: Path, contents: bytes) -> None:
    file = save_tensor(tmp_path, None, X)
    file.write_bytes(contents)
    with pytest.raises(RunDamaged, match="- at"):
        load_tensor(tmp_path, fingerprint(X))


def test_what_is_newer_missing_or_misnamed_is_said(tmp_path: Path) -> None:
    file = save_tensor(tmp_path, None, X)
    file.write_bytes(header()[:8] + (2).to_bytes(4, "little") + header()[12:] + X.tobytes())
    with pytest.raises(RunVersion, match="upgrade"):
        load_tensor(tmp_path, file.name)
    with pytest.raises(RunError, match="holds no tensor"):
        load_tensor(tmp_path, fingerprint(X + 1))
    for wrong in ("../manifest.json", "x", file.name.upper()):
        with pytest.raises(UsageError, match="expected a name"):
            load_tensor(tmp_path, wrong)


def test_a_full_or_closed_disk_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunError, match="free some space"):
        save_tensor(tmp_path, None, X)
    assert os.listdir(tmp_path / "tensors") == []
    monkeypatch.undo()
    with pytest.raises(RunError, match="cannot write the run"):
        save_tensor(tmp_path / "nowhere", None, X)


def test_a_scalar_is_a_tensor_without_dimensions(tmp_path: Path) -> None:
    file = save_tensor(tmp_path, None, np.float32(2.5))
    assert file.name.endswith("-f32-scalar")
    assert load_tensor(tmp_path, file.name) == np.float32(2.5)


def test_the_fingerprint_of_another_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected the fingerprint of this tensor"):
        save_tensor(tmp_path, fingerprint(X), X[0])


@pytest.mark.parametrize("wrong", [3, "text", [1.0], np.array([1j]), np.array(["a"])], ids=repr)
def test_what_is_no_tensor_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(UsageError, match="expected"):
        host_array(wrong)
