"""``brickline kernels``: its verbs on caches that are sound, odd or damaged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import brickline as bl
from brickline.cache import KernelCache
from brickline.commands import app
from brickline.errors import BricklineError, CacheError
from brickline.kernel import Kernel, Param
from brickline.kernel_store import KernelStore

SOURCE = "// a comment of its own\nvoid {name}(float* y) {{ *y = {number}; }}\n"

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("clang++", "g++", "c++"))), reason="no C++ compiler on the PATH"
)


def kernel(name: str, number: int = 1) -> Kernel:
    source = SOURCE.format(name=name, number=number)
    return Kernel(name, source, [Param("y", "f32", 1, "write")], language="c")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, empty."""
    path = tmp_path / "cache"
    monkeypatch.setenv("BRICKLINE_CACHE", str(path))
    return path


@pytest.fixture
def kernels(directory: Path) -> list[str]:
    """The keys of three kernels for NULL, of two names."""
    cache = KernelCache(directory)
    declared = (kernel("alpha"), kernel("alpha", 2), kernel("beta"))
    return [cache.get_or_compile(each, "NULL").key for each in declared]


def run(*arguments: object) -> str:
    """Return what the command prints; raise what it raises."""
    result = CliRunner().invoke(app, ["kernels", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def refused(*arguments: object) -> str:
    """Return what a wrong call says; its status is 2."""
    result = CliRunner().invoke(app, ["kernels", *map(str, arguments)])
    if isinstance(result.exception, BricklineError):
        return str(result.exception)
    assert result.exit_code == 2, result.output
    return result.output


def the_file(directory: Path, key: str) -> Path:
    return directory / "entries" / key[:2] / f"{key}.blk"


# --------------------------------------------------------------------------------------------- list


VERBS = (["list"], ["show", "a"], ["gc"], ["clear"], ["verify"])


def test_a_cache_that_was_never_made(directory: Path) -> None:
    for _ in range(2):
        for verb in ("list", "gc", "clear", "verify"):
            assert run(verb) == f"no kernels: nothing is in {directory} yet\n"
        assert refused("show", "a") == "no kernel 'a' in the cache; see `brickline kernels list`"
        assert not directory.exists() or not list(directory.iterdir())
        directory.mkdir(mode=0o700, exist_ok=True)


def test_an_empty_cache(directory: Path) -> None:
    KernelStore(directory)
    assert run("list").startswith("0 kernels, 0 of at most 1,073,741,824 bytes in ")
    assert str(directory) in run("list")
    assert run("gc") == "removed 0 kernels, 0 bytes\n"
    assert run("clear") == "removed 0 kernels, 0 bytes\n"
    assert run("verify") == "0 kernels, 0 damaged\n"


def test_list(directory: Path, kernels: list[str]) -> None:
    for place, key in enumerate(kernels):
        os.utime(the_file(directory, key), (1e9 + place, 1e9 + place))
    lines = run("list").splitlines()
    assert re.split(r"\s+", lines[0].strip()) == ["key", "kernel", "device", "bytes", "used"]
    assert [line.split()[0] for line in lines[1:4]] == [key[:12] for key in reversed(kernels)]
    assert [line.split()[1] for line in lines[1:4]] == ["beta", "alpha", "alpha"]
    assert all(line.split()[2] == "NULL" for line in lines[1:4])
    size = the_file(directory, kernels[2]).stat().st_size
    assert f"{size:,}" in lines[1]
    assert "2001-09-" in lines[1]
    assert lines[4].startswith("3 kernels, ")


def test_another_directory(tmp_path: Path, kernels: list[str]) -> None:
    other = tmp_path / "other [red]place[/x]"  # brackets are no markup
    KernelCache(other).get_or_compile(kernel("gamma"), "NULL")
    listed = run("list", "--dir", other)
    assert "gamma" in listed
    assert "alpha" not in listed
    assert "other [red]place[/x]" in listed
    assert "3 kernels" in run("list")


def test_long_names_keep_their_keys(directory: Path) -> None:
    long = kernel("a_name_that_goes_on_" * 8)
    key = KernelCache(directory).get_or_compile(long, "NULL").key
    assert key[:12] in run("list")


# --------------------------------------------------------------------------------------------- show


def test_show_by_name_and_by_key(kernels: list[str]) -> None:
    shown = run("show", "beta")
    assert SOURCE.format(name="beta", number=1) in shown
    for fact in ("beta", "NULL", kernels[2]):
        assert fact in shown
    assert run("show", kernels[2]) == shown
    assert run("show", kernels[2][:12]) == shown
    assert "*y = 2" in run("show", kernels[1])


def test_show_of_nothing_and_of_many(kernels: list[str]) -> None:
    assert refused("show", "gamma") == (
        "no kernel 'gamma' in the cache; see `brickline kernels list`"
    )
    message = refused("show", "alpha")
    assert message.startswith("'alpha' means 2 kernels (")
    assert kernels[0][:12] in message
    assert kernels[1][:12] in message
    assert message.endswith("give the start of one key")
    assert "means 3 kernels" in refused("show", "")


@needs_compiler
def test_show_what_the_compiler_made(directory: Path) -> None:
    source = "#warning look here\n" + SOURCE.format(name="warned", number=1)
    warned = Kernel("warned", source, [Param("y", "f32", 1, "write")], language="c")
    cached = KernelCache(directory).get_or_compile(warned)
    shown = run("show", "warned")
    assert cached.code in shown
    assert f"code_bytes {cached.resources['code_bytes']}" in shown.replace(",", "")
    assert "The compiler said:" in shown
    assert "look here" in shown
    if shutil.which("objdump"):
        assembly = run("show", "warned", "--assembly")
        assert cached.entry_point in assembly
        assert "ret" in assembly


def test_machine_code_that_is_not_there(
    directory: Path, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused("show", "beta", "--assembly") == "kernel beta has no machine code"
    store = KernelStore(directory)
    entry = store.get(kernels[2])
    assert entry is not None
    store.put(entry.key, entry.facts, entry.blobs | {"binary": b"no code"})
    if shutil.which("objdump"):
        assert refused("show", "beta", "--assembly").startswith("objdump refuses the code: ")
    monkeypatch.setenv("PATH", "")
    assert refused("show", "beta", "--assembly") == (
        "showing machine code needs objdump, which is not on PATH"
    )
    store.put(entry.key, entry.facts | {"device": "CUDA:0"}, entry.blobs | {"binary": b"cubin"})
    assert "needs nvdisasm" in refused("show", "beta", "--assembly")


def strange(**facts: Any) -> Callable[[dict[str, Any], dict[str, bytes]], None]:
    return lambda kept, blobs: kept.update(facts)


@pytest.mark.parametrize(
    "edit",
    [
        lambda facts, blobs: facts.clear(),
        lambda facts, blobs: blobs.clear(),
        strange(name="[/red] markup", device="[bold", language=None),
        strange(resources=None, compiler=None),
        strange(resources={"registers": "many", "[/x]": None}),
        strange(resources=[1, 2], compiler="gcc"),
        strange(resources=3, compiler=[1], name=["a"]),
    ],
)
def test_entries_of_other_programs_are_listed_and_shown(
    directory: Path, kernels: list[str], edit: Any
) -> None:
    store = KernelStore(directory)
    entry = store.get(kernels[2])
    assert entry is not None
    facts, blobs = dict(entry.facts), dict(entry.blobs)
    edit(facts, blobs)
    store.put(entry.key, facts, blobs)
    assert kernels[2][:12] in run("list")
    assert kernels[2] in run("show", kernels[2])
    assert run("verify") == "3 kernels, 0 damaged\n"


# ------------------------------------------------------------------------------- gc, clear, verify


def test_gc_by_size(directory: Path, kernels: list[str]) -> None:
    for place, key in enumerate(kernels):
        os.utime(the_file(directory, key), (1e9 + place, 1e9 + place))
    sizes = [the_file(directory, key).stat().st_size for key in kernels]
    assert run("gc", "--max-bytes", sizes[2]) == (
        f"removed 2 kernels, {sizes[0] + sizes[1]:,} bytes\n"
    )
    assert "beta" in run("list")
    assert run("gc", "--max-bytes", 0) == f"removed 1 kernels, {sizes[2]:,} bytes\n"


def test_gc_by_age(directory: Path, kernels: list[str]) -> None:
    old = time.time() - 40 * 86400
    os.utime(the_file(directory, kernels[0]), (old, old))
    assert run("gc").startswith("removed 0 kernels")
    assert run("gc", "--older-than", 50).startswith("removed 0 kernels")
    assert run("gc", "--older-than", 30).startswith("removed 1 kernels")
    assert run("gc", "--older-than", "0").startswith("removed 2 kernels")


def test_clear(directory: Path, kernels: list[str]) -> None:
    assert run("clear").startswith("removed 3 kernels, ")
    assert run("list").startswith("0 kernels")
    assert not list(directory.glob("entries/*/*.blk"))


def test_verify_finds_what_is_damaged(directory: Path, kernels: list[str]) -> None:
    assert run("verify") == "3 kernels, 0 damaged\n"
    path = the_file(directory, kernels[1])
    data = path.read_bytes()
    path.write_bytes(data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    result = CliRunner().invoke(app, ["kernels", "verify"])
    assert result.exit_code == 1
    assert "3 kernels, 1 damaged" in result.output
    assert str(path) in result.output
    with pytest.warns(RuntimeWarning, match="SHA-256"):
        message = refused("show", kernels[1])
    assert message == f"kernel {kernels[1][:12]} is damaged or gone; compile it again"
    assert run("verify") == "2 kernels, 0 damaged\n", "it was set aside"


def test_a_damaged_header_is_not_listed(directory: Path, kernels: list[str]) -> None:
    the_file(directory, kernels[0]).write_bytes(b"something else")
    listed = run("list")
    assert kernels[0][:12] not in listed
    assert kernels[1][:12] in listed
    assert CliRunner().invoke(app, ["kernels", "verify"]).exit_code == 1


# ---------------------------------------------------------------------------------------- wrong use


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["zork"], "zork"),
        (["show"], r"KEY\|NAME"),
        (["show", "a", "b"], "unexpected extra argument"),
        (["list", "--zork"], "zork"),
        (["list", "extra"], "unexpected extra argument"),
        (["gc", "--max-bytes", "-1"], "--max-bytes"),
        (["gc", "--max-bytes", "many"], "--max-bytes"),
        (["gc", "--older-than", "-0.5"], "--older-than"),
        (["gc", "--older-than", "soon"], "--older-than"),
        (["gc", "--older-than", "nan"], "at least 0|greater than or equal to 0|range"),
        (["clear", "everything"], "unexpected extra argument"),
    ],
)
def test_wrong_use(directory: Path, arguments: list[str], words: str) -> None:
    assert re.search(words, refused(*arguments))


def test_directories_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    for command in VERBS:
        for place in (file, shared):
            result = CliRunner().invoke(app, ["kernels", *command, "--dir", str(place)])
            assert isinstance(result.exception, CacheError)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: str(verb[0]))
def test_a_directory_that_is_no_cache_stays_as_it_is(tmp_path: Path, verb: list[str]) -> None:
    work, empty, missing = tmp_path / "work", tmp_path / "empty", tmp_path / "deep" / "missing"
    (work / "aside").mkdir(parents=True)
    (work / "aside" / "thesis.tex").write_text("mine", encoding="utf-8")
    (work / "main.py").write_text("mine", encoding="utf-8")
    empty.mkdir()
    before = sorted(tmp_path.rglob("*"))
    for place, found in (
        (work, "a kernel cache, found no VERSION but 'main.py'"),
        (empty, "a kernel cache, found none"),
        (missing, "a directory, found nothing"),
    ):
        assert refused(*verb, "--dir", place) == (
            f"expected {found} - at {place}; name another, or none for the user's own"
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_clear_leaves_what_is_not_ours(directory: Path, kernels: list[str]) -> None:
    thesis = directory / "aside" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("mine", encoding="utf-8")
    assert run("clear", "--dir", directory).startswith("removed 3 kernels, ")
    assert thesis.read_text(encoding="utf-8") == "mine"


def test_help_names_every_verb() -> None:
    output = CliRunner().invoke(app, ["kernels", "--help"]).output
    assert all(verb in output for verb in ("list", "show", "gc", "clear", "verify"))
    for verb in ("list", "show", "gc", "clear", "verify"):
        assert (
            f"brickline kernels {verb}"
            in CliRunner().invoke(app, ["kernels", verb, "--help"]).output
        )


def test_errors_end_with_status_2_and_no_traceback(directory: Path) -> None:
    package = str(Path(bl.__file__).parents[1])
    path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "brickline", "kernels", "show", "gamma"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "brickline: no kernel 'gamma' in the cache; see `brickline kernels list`\n"
    )
