"""Plan files: what was saved comes back; whatever else lies there is refused as a PlanError."""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brickline.errors import BricklineError, PlanError, UsageError
from brickline.hazards import Hazard
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import residual, rms_norm
from brickline.plan import Plan
from brickline.plan_buffers import PlanBuffer
from brickline.plan_files import VERSION
from brickline.plan_launches import FloatVariable

FILL = Kernel(
    "fill",
    "BRICKLINE void fill(Block& block, float* y, int64_t n, float by, double bias) {"
    " block.each(n, [&](int64_t i) { y[i] = by + bias; }); }",
    [
        *(Param("y", "f32", "n", "write"), Scalar("n", low=1, high=64)),
        *(Scalar("by", "f32"), Scalar("bias", "f64")),
    ],
)


def small() -> Plan:
    plan = Plan("small")
    n = plan.variable("n", 1, 4, default=2)
    t = plan.variable("t", dtype="f32", default=0.5)
    y = plan.buffer("y", (n,), "f32")
    plan.launch(FILL, y=y, n=n, by=t, bias=-0.0, brick="Fill", layer=3)
    return plan


def larger() -> Plan:
    """Views, expressions, several kernels, layers, weights, and every sort of argument."""
    plan = Plan("larger, with spaces and \N{GREEK SMALL LETTER MU}")
    n = plan.variable("n", 2, 16, default=7)
    t = plan.variable("t", dtype="f64", default=float("inf"))
    x = plan.buffer("x", (2, 64), "f32")
    y = plan.buffer("y", 128, "f32")
    w = plan.buffer("w", 64, "f32", read_only=True)
    half = plan.buffer("half", (4, n + 1), "bf16")
    assert half.dtype == "bf16"
    plan.protect(half)
    plan.protect(y[100::7])
    out = plan.buffer("out", (2, 64), "f32")
    plan.launch(rms_norm(), x=x, weight=w, y=out, rows=2, n=64, eps=1e-5)
    plan.launch(residual(), a=x[0], b=y[64:], y=y[:64], n=64, brick="Add", layer=0)
    plan.launch(residual(), a=y, b=y, y=x.reshape(128), n=4 * n - 1, layer=1)
    plan.launch(FILL, y=y[3:], n=n, by=float("nan"), bias=t)
    plan.launch(residual(), a=y[1:3], b=x.view(2, 5), y=y[5:7], n=2)
    return plan


def told(value: Any) -> Any:
    """An argument as something that can be compared."""
    if isinstance(value, PlanBuffer):
        return value.storage.number, value.offset, tuple(map(str, value.shape)), value.dtype
    if isinstance(value, FloatVariable):
        return value.name
    return repr(value)


def facts(plan: Plan) -> Any:
    """All that a file keeps of a plan, and what follows from it."""
    variables = [
        (each.name, getattr(each, "low", None), getattr(each, "high", None))
        for each in plan.variables.values()
    ]
    storages = [
        (each.number, each.name, tuple(map(str, each.shape)), each.dtype, each.read_only)
        for each in plan.storages
    ]
    launches = [
        (
            *(launch.number, launch.kernel.digest, launch.brick, launch.layer, launch.waits_for),
            [told(each) for each in launch.arguments],
            [str(size) for size in (*launch.sizes, *launch.work)],
            [tuple(map(str, hazard_facts(hazard))) for hazard in launch.hazards],
        )
        for launch in plan.launches
    ]
    protected = [each.range for each in plan.protected]
    return plan.name, variables, repr(plan.defaults), storages, launches, protected


def hazard_facts(hazard: Hazard) -> tuple[Any, ...]:
    return hazard.earlier, hazard.kind, hazard.space, hazard.begin, hazard.end


def document(path: Path) -> Any:
    return json.loads(path.read_bytes())


def signed(contents: Any) -> Any:
    """A document whose digest is right, whatever it says."""
    text = json.dumps(contents, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    digest = hashlib.sha256(text.encode("ascii")).hexdigest()
    return {"format": "brickline plan", "version": VERSION, "digest": digest, "plan": contents}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    small().save(tmp_path / "small.plan")
    return tmp_path / "small.plan"


def refused(path: Path, made: Any) -> str:
    path.write_text(json.dumps(made), encoding="ascii")
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    assert str(path) in str(error.value)
    return str(error.value)


# ------------------------------------------------------------------------------------- round trips


@pytest.mark.parametrize("make", [small, larger])
def test_what_is_saved_comes_back(tmp_path: Path, make: Any) -> None:
    path, plan = tmp_path / "a.plan", make()
    plan.save(path)
    again = Plan.load(path)
    assert facts(again) == facts(plan)
    assert again.explain() == plan.explain()
    again.save(tmp_path / "b.plan")
    assert (tmp_path / "b.plan").read_bytes() == path.read_bytes()


operations = st.tuples(
    st.integers(0, 2), st.integers(0, 2), st.integers(0, 40), st.integers(0, 40), st.integers(1, 24)
)


@given(program=st.lists(operations, max_size=8), layers=st.lists(st.none() | st.integers(0, 9)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_plan_comes_back(tmp_path: Path, program: list[Any], layers: list[Any]) -> None:
    plan = Plan("any")
    buffers = [plan.buffer(name, 64, "f32") for name in "abc"]
    for number, (source, target, first, second, length) in enumerate(program):
        inside = buffers[source][first : first + length]
        out = buffers[target][second : second + length]
        layer = layers[number] if number < len(layers) else None
        try:
            plan.launch(residual(), a=inside, b=inside, y=out, n=length, layer=layer)
        except PlanError:
            continue  # it writes what it reads
    plan.save(tmp_path / "any.plan", overwrite=True)
    assert facts(Plan.load(tmp_path / "any.plan")) == facts(plan)


def test_a_file_holds_text_and_no_code_of_python(tmp_path: Path) -> None:
    path = tmp_path / "a.plan"
    kernel = residual()
    assert kernel.reference is not None
    larger().save(path)
    text = path.read_text(encoding="ascii")
    assert "reference" not in document(path)["plan"]["kernels"][1]
    for word in ("__reduce__", "pickle", "lambda", "import "):
        assert word not in text
    loaded = Plan.load(path)
    assert loaded.launches[1].kernel == kernel
    assert loaded.launches[1].kernel.reference is None


def test_memory_is_not_saved(tmp_path: Path) -> None:
    plan, x = Plan("bound"), np.full(8, 7.0, np.float32)
    plan.launch(FILL, y=x, n=8, by=1.0, bias=0.0)
    plan.save(tmp_path / "a.plan")
    again = Plan.load(tmp_path / "a.plan")
    assert again.storages[0].memory is None
    assert again.storages[0].shape == (8,)


def test_what_is_protected_stays_so(tmp_path: Path) -> None:
    plan = small()
    plan.protect(plan.buffer("p", 8, "f32")[2:4])
    plan.save(tmp_path / "a.plan")
    again = Plan.load(tmp_path / "a.plan")
    p = PlanBuffer(again, again.storages[1], 0, (8,), "f32")
    again.launch(FILL, y=p[4:], n=4, by=0.0, bias=0.0)
    with pytest.raises(PlanError, match="what of p is declared read-only"):
        again.launch(FILL, y=p[:4], n=4, by=0.0, bias=0.0)


def test_arrays_that_overlap_are_not_saved(tmp_path: Path) -> None:
    plan, memory = Plan("aliased"), np.zeros(12, np.float32)
    plan.launch(residual(), a=memory[:4], b=memory[:4], y=memory[4:8], n=4)
    plan.save(tmp_path / "a.plan")
    plan.launch(residual(), a=memory[:8], b=memory[:8], y=np.zeros(8, np.float32), n=8)
    with pytest.raises(PlanError, match="overlap, which a file cannot say"):
        plan.save(tmp_path / "b.plan")
    assert not (tmp_path / "b.plan").exists()


# ------------------------------------------------------------------------------------------- paths


def test_a_path_that_is_taken_stays(saved: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(UsageError, match="is there already"):
        larger().save(saved)
    assert saved.read_bytes() == before
    larger().save(saved, overwrite=True)
    assert Plan.load(saved).name == larger().name


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="directory"):
        small().save(tmp_path, overwrite=True)
    with pytest.raises(PlanError, match="expected a file, got a directory"):
        Plan.load(tmp_path)


def test_a_device_or_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(PlanError, match="a device or a pipe"):
            Plan.load(path)


@pytest.mark.parametrize("path", ["missing.plan", "missing/a.plan", "a\0b", "x" * 5000, ""])
def test_paths_that_hold_nothing(tmp_path: Path, monkeypatch: Any, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(path)
    if path != "missing.plan":
        with pytest.raises(UsageError):
            small().save(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 3, 10**30, b"\xff", object()])
def test_what_is_no_path(path: Any) -> None:
    with pytest.raises(PlanError, match=r"cannot read|expected a file"):
        Plan.load(path)


def test_a_disk_that_refuses_leaves_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PlanError, match="No space left"):
        small().save(tmp_path / "a.plan")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.plan"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(PlanError, match="expected a plan of at most"):
        Plan.load(path)


# ------------------------------------------------------------------------------------------ damage


def test_every_flipped_byte_is_noticed_or_harmless(saved: Path) -> None:
    whole, expected = saved.read_bytes(), facts(small())
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        saved.write_bytes(damaged)
        try:
            assert facts(Plan.load(saved)) == expected
        except PlanError:
            continue


def test_the_beginning_of_a_file_is_refused(saved: Path) -> None:
    whole = saved.read_bytes()
    for length in range(0, len(whole.rstrip()), 3):
        saved.write_bytes(whole[:length])
        with pytest.raises(PlanError, match="no plan, or is cut off"):
            Plan.load(saved)


def test_a_changed_word_is_damage(saved: Path) -> None:
    made = document(saved)
    made["plan"]["name"] = "other"
    assert "is damaged" in refused(saved, made)


@pytest.mark.parametrize("version", [VERSION + 1, 10**30])
def test_a_newer_version_says_what_to_do(saved: Path, version: int) -> None:
    made = document(saved) | {"version": version}
    assert f"of version {version}; this brickline reads up to {VERSION}: upgrade" in refused(
        saved, made
    )


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, []])
def test_a_version_is_a_number(saved: Path, version: Any) -> None:
    assert "expected a version from 1 on" in refused(saved, document(saved) | {"version": version})


@pytest.mark.parametrize("made", [None, 3, "plan", [], {}, {"format": "other"}, {"format": []}])
def test_other_json_is_no_plan(tmp_path: Path, made: Any) -> None:
    assert "something else than a plan" in refused(tmp_path / "a.plan", made)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"\x80\x04.", b"{", b"PK\x03\x04", b'"\\ud8"'])
def test_other_bytes_are_no_plan(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.plan").write_bytes(data)
    with pytest.raises(PlanError, match="no plan, or is cut off"):
        Plan.load(tmp_path / "a.plan")


# --------------------------------------------------------------------------------- hostile contents


@pytest.mark.parametrize("depth", [100, 900, 2000, 100_000])
def test_deep_nesting_ends_in_an_error(saved: Path, depth: int) -> None:
    for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
        saved.write_text(text, encoding="ascii")
        with pytest.raises(PlanError):
            Plan.load(saved)
        saved.write_text(
            f'{{"format": "brickline plan", "version": 1, "digest": "", "plan": {text}}}',
            encoding="ascii",
        )
        with pytest.raises(PlanError):
            Plan.load(saved)


def changed(made: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy in which one place holds something else."""
    made = copy.deepcopy(made)
    place = made
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return made


ARGUMENT = ("launches", 0, "arguments", 0)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((*ARGUMENT, "offset"), -4, "expected the offset of launch 0, y"),
        ((*ARGUMENT, "offset"), 16, "expected the offset of launch 0, y"),
        ((*ARGUMENT, "offset"), 1, "beyond"),
        ((*ARGUMENT, "offset"), True, "expected the offset"),
        ((*ARGUMENT, "offset"), 10**4000, "expected the offset"),
        ((*ARGUMENT, "buffer"), -1, "expected the buffer of launch 0"),
        ((*ARGUMENT, "buffer"), 1, "expected the buffer of launch 0, y below 1, got 1"),
        ((*ARGUMENT, "buffer"), "y", "expected the buffer"),
        ((*ARGUMENT, "shape"), [10**30], "beyond"),
        ((*ARGUMENT, "shape"), [-1], "expected sizes from 0 on"),
        ((*ARGUMENT, "shape"), ["m"], "m"),
        ((*ARGUMENT, "shape"), [{}], "expected sizes"),
        ((*ARGUMENT, "dtype"), "f63", "expected a dtype"),
        ((*ARGUMENT, "dtype"), [], "expected a dtype"),
        (ARGUMENT, 3, "expected a Buffer or an array"),
        (ARGUMENT, "y", "expected a Buffer or an array"),
        (ARGUMENT, [1.0], "expected a Buffer or an array"),
        (ARGUMENT, {"variable": "t"}, "expected a Buffer or an array"),
        (ARGUMENT, {"variable": "nobody"}, "nobody"),
        (("launches", 0, "arguments", 1), {"expression": "n + 1000"}, "expected a value from 1"),
        (
            ("launches", 0, "arguments", 1),
            {"expression": "((((" * 9999},
            "paren|nest|expected|deep",
        ),
        (("launches", 0, "arguments", 1), {"expression": "__import__('os')"}, "expected"),
        (("launches", 0, "arguments", 1), {"expression": 3}, "."),
        (("launches", 0, "arguments", 1), {"variable": "t"}, "expected a whole number"),
        (("launches", 0, "arguments", 2), {"variable": []}, "describes no plan"),
        (("launches", 0, "arguments", 2), 1e39, "fits f32"),
        (("launches", 0, "arguments", 2), 10**400, "expected a number"),
        (("launches", 0, "arguments"), [], "fill takes 4 arguments, got 0"),
        (("launches", 0, "kernel"), 1, "expected the kernel of launch 0 below 1, got 1"),
        (("launches", 0, "kernel"), -1, "expected the kernel"),
        (("launches", 0, "layer"), -1, "expected layer"),
        (("launches", 0, "layer"), "0", "expected layer"),
        (("launches", 0, "brick"), 3, "expected brick"),
        (("launches", 0), None, "describes no plan"),
        (("launches",), {"a": 1}, "describes no plan"),
        (("kernels",), [], "expected the kernel of launch 0 below 0"),
        (("kernels", 0, "source"), "", "expected a source"),
        (("kernels", 0, "name"), "f; system()", "an identifier of C"),
        (("kernels", 0, "language"), "python", "language"),
        (("kernels", 0, "entry"), "main()", "identifier"),
        (("kernels", 0, "reference"), "os.system", "expected reference"),
        (("kernels", 0, "unknown"), 1, "unknown"),
        (("kernels", 0, "signature", 0, "align"), 2**200, "expected align"),
        (("kernels", 0, "signature", 0, "shape"), ["n**n"], "."),
        (("kernels", 0, "signature"), [{}] * 1000, "."),
        (("buffers", 0, "shape"), [2**62, 2**62], "a size that memory can have"),
        (("buffers", 0, "shape"), ["9" * 5000], "."),
        (("buffers", 0, "shape"), ["n - 2"], "expected sizes from 0 on"),
        (("buffers", 0, "name"), "n", "already"),
        (("buffers", 0, "name"), "../y", "identifier"),
        (("buffers", 0, "read_only"), True, "is declared read-only"),
        (("variables", 0, "low"), 5, "the low one first"),
        (("variables", 0, "high"), 2**80, "int64"),
        (("variables", 0, "high"), 1e9, "integer bounds"),
        (("variables", 0, "default"), 9, "expected a default from 1 to 4"),
        (("variables", 1, "default"), "0.5", "expected a number"),
        (("variables",), "abc", "describes no plan"),
        (("name",), "a\nb", "printable"),
        (("name",), None, "printable"),
        (("protected",), [[0, 0, 4]], "is declared read-only"),
        (("protected",), [[1, 0, 4]], "the buffer of what is protected below 1, got 1"),
        (("protected",), [[0, 0, 10**30]], "beyond"),
        (("protected",), [[0, -1, 4]], "offset from 0 on"),
        (("protected",), [3], "describes no plan"),
        (("protected",), None, "describes no plan"),
    ],
)
def test_contents_that_lie(saved: Path, path: tuple[Any, ...], value: Any, words: str) -> None:
    contents = document(saved)["plan"]
    saved.write_text(json.dumps(signed(changed(contents, path, value))), encoding="ascii")
    with pytest.raises(PlanError, match=words):
        Plan.load(saved)


def places(made: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a document."""
    for step in (
        made if isinstance(made, dict) else range(len(made)) if isinstance(made, list) else ()
    ):
        yield (*path, step)
        yield from places(made[step], (*path, step))


def removed(made: Any, path: tuple[Any, ...]) -> Any:
    made = copy.deepcopy(made)
    place = made
    for step in path[:-1]:
        place = place[step]
    del place[path[-1]]
    return made


numbers = st.one_of(
    st.integers(),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**300, 10**4000, 1 << 62]),
    st.floats(),
)
texts = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["n", "n + 1", "n * n * n * n", "1 // 0", "n // (n - n)", "f32", "block_x", "-1"]
    ),
    st.builds(
        lambda inner, count: inner * count,
        st.sampled_from(["(", "n+", "1*", "-"]),
        numbers.map(lambda number: 3000 if isinstance(number, int) and number > 9 else 2),
    ),
)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def contents(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("contents") / "larger.plan"
    larger().save(path)
    return document(path)["plan"]


@given(data=st.data())
@settings(
    max_examples=400,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_contents_that_were_tampered_with_are_a_plan_or_an_error(
    tmp_path: Path, contents: Any, data: st.DataObject
) -> None:
    made = contents
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(sorted(places(made), key=repr)))
        if data.draw(st.integers(0, 4)):
            taken = st.sampled_from(sorted(places(contents), key=repr)).map(
                lambda other: lookup(contents, other)
            )
            made = changed(made, path, data.draw(values | taken))
        else:
            made = removed(made, path)
    file = tmp_path / "hostile.plan"
    file.write_text(json.dumps(signed(made)), encoding="ascii")
    try:
        plan = Plan.load(file)
    except PlanError:
        return
    plan.explain()
    plan.save(file, overwrite=True)
    assert facts(Plan.load(file)) == facts(plan)
    with suppress(BricklineError):
        plan.prepare("NULL")()


def lookup(made: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        made = made[step]
    return made


def test_a_loaded_plan_runs_as_the_saved_one(saved: Path) -> None:
    prepared = Plan.load(saved).prepare("NULL")
    assert prepared(n=4, t=2.0).values == {"n": 4, "t": 2.0}
