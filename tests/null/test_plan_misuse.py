"""Mistakes with plans: each is named, with what was expected and what to do instead."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import brickline as bl
from brickline.errors import LaunchError, PlanError, SymbolicError, UsageError
from brickline.executor import room
from brickline.executor.prepared import PreparedPlan
from brickline.executor.room import size_text
from brickline.kernel import Kernel, Param, Scalar
from brickline.kernels.catalog import residual, rms_norm
from brickline.plan import Plan
from brickline.plan_names import listed, nearest, unknown_buffer
from brickline.plan_words import counted

COPY = Kernel(
    "copy",
    "BRICKLINE void copy(Block& block, const float* x, float* y, int64_t n) {"
    " block.each(n, [&](int64_t i) { y[i] = x[i]; }); }",
    [Param("x", "f32", "n"), Param("y", "f32", "n", "write"), Scalar("n", high=2**50)],
)


def made(size: Any = 8) -> Plan:
    """A copy of as many floats as `n` says, or a number."""
    plan = Plan("made")
    n = plan.variable("n", 1, 8) if size == "n" else size
    plan.launch(COPY, x=plan.buffer("x", n, "f32"), y=plan.buffer("y", n, "f32"), n=n)
    return plan


@pytest.fixture
def prepared() -> PreparedPlan:
    return made("n").prepare("NULL")


@pytest.fixture
def profiler(tmp_path: Path) -> bl.BrickProfiler:
    return bl.BrickProfiler("misuse", enabled=True, path=tmp_path / "misuse.brick")


# ----------------------------------------------------------------------------------------- watching


@pytest.mark.parametrize("profiler", [3, "run.brick", bl.BrickProfiler, object()])
def test_only_a_profiler_watches(prepared: PreparedPlan, profiler: Any) -> None:
    words = (
        r"plan made: expected a BrickProfiler or None, got .*BrickProfiler\(name, enabled=True\)"
    )
    with pytest.raises(PlanError, match=words):
        prepared.watch(profiler)
    with pytest.raises(PlanError, match=words):
        made().prepare("NULL", profiler=profiler)


def test_who_watches_stays_when_another_is_refused(
    prepared: PreparedPlan, profiler: bl.BrickProfiler
) -> None:
    prepared.watch(profiler)
    for refused in (lambda: prepared.watch(3), lambda: prepared.watch(None, fingerprints=True)):
        with pytest.raises(PlanError):
            refused()
    prepared()
    assert profiler.brick_stats("copy").count == 1


def test_fingerprints_need_somebody_who_gets_them(prepared: PreparedPlan) -> None:
    words = "plan made: fingerprints=True needs a profiler that gets them; pass profiler="
    with pytest.raises(PlanError, match=words):
        made().prepare("NULL", fingerprints=True)
    with pytest.raises(PlanError, match=words):
        prepared.watch(None, fingerprints=True)


@pytest.mark.parametrize("name", ["fingerprints", "checked"])
@pytest.mark.parametrize("value", ["no", 1, None])
def test_a_truth_value_is_no_text(name: str, value: Any, profiler: bl.BrickProfiler) -> None:
    options = {"profiler": profiler, name: value}
    with pytest.raises(PlanError, match=f"plan made: expected {name} as True or False, got "):
        made().prepare("NULL", **options)


# ------------------------------------------------------------------------------------------ options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"thread": 3}, r"prepare has no option 'thread'; it takes .*did you mean 'threads'\?"),
        ({"n": 3}, r"prepare has no option 'n'.*a run is given it, prepared\(n=\.\.\.\)"),
        ({"cache": "/tmp/kernels"}, r"expected cache as a KernelCache, got '/tmp/kernels'; make"),
        ({"bind": [1]}, r"expected bind as arrays by the name .*got list.*bind=\{'x': array\}"),
        ({"bind": []}, "expected bind as arrays"),
        ({"bind": {"x": None}}, "buffer x: expected an array in bind, got None; leave the name"),
        ({"bind": {"n": 3}}, r"has no buffer 'n': that is a variable, .*prepared\(n=\.\.\.\)"),
        ({"bind": {"X": np.zeros(8, np.float32)}}, r"did you mean 'x'\?"),
        ({"bind": {"x": np.zeros(8)}}, "convert it to f32, or declare the buffer as f64"),
        ({"bind": {"x": [0.0] * 8}}, "got list; make an array of f32 of it"),
    ],
)
def test_what_prepare_is_given(options: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        made("n").prepare("NULL", **options)


# -------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("m", "has no buffer 'm'; it has x, y and the variable n$"),
        ("N", r"it has x, y and the variable n; did you mean 'n'\?"),
        ("xx", r"did you mean 'x'\?"),
    ],
)
def test_an_unknown_name_is_answered_with_all_that_there_are(
    prepared: PreparedPlan, name: str, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        prepared(**{name: 3})


def test_buffers_are_read_and_written_by_name(prepared: PreparedPlan) -> None:
    x = prepared.plan.storages[0]
    for name, words in (
        ("n", r"that is a variable, which a run is given, prepared\(n=\.\.\.\)"),
        ([], r"expected the name of a buffer as text, got \[\]$"),
        (x, r"expected the name of a buffer as text, .*; pass its name, 'x'$"),
    ):
        with pytest.raises(PlanError, match=words):
            prepared.read(name)  # type: ignore[arg-type]
        with pytest.raises(PlanError, match=words):
            prepared.write(name, np.zeros(8, np.float32))  # type: ignore[arg-type]


def test_long_lists_of_names_are_cut() -> None:
    names = [f"buffer_{number}" for number in range(200)]
    words = unknown_buffer("wide", "other", names, ())
    assert "buffer_0, buffer_1," in words
    assert words.endswith("more and no variables")
    assert len(words) < 500
    assert listed(["x" * 900, "y"], "buffers") == f"{'x' * 900} and 1 more"
    assert listed(["n", "m"], "variables") == "the variables n, m"
    assert nearest("activation", ["Activations"]) == "; did you mean 'Activations'?"


def test_a_run_takes_names_alone(prepared: PreparedPlan) -> None:
    with pytest.raises(PlanError, match=r"by name, as in prepared\(n=\.\.\.\), got 7 without one"):
        prepared(7)
    with pytest.raises(PlanError, match="expected arguments by name, x=, y=, n=, got one without"):
        Plan("a").launch(COPY, 1, 2)


def test_a_variable_may_have_any_name_but_stream() -> None:
    plan = Plan("names")
    n = plan.variable("self", 1, 8)
    plan.launch(COPY, x=plan.buffer("x", n, "f32"), y=plan.buffer("y", n, "f32"), n=n)
    assert plan.prepare("NULL")(self=3).values == {"self": 3}


# ------------------------------------------------------------------------------------------ writing


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(7, np.float32), r"expected f32\[8\], got f32\[7\]; .*its room for the largest"),
        (np.zeros(8), r"expected f32\[8\], got f64\[8\]; convert it to f32"),
        ([0.0] * 8, "expected a Buffer or an array .*got list; make an array of f32 of it"),
        (None, "expected a Buffer or an array .*got NoneType"),
    ],
)
def test_what_is_written_is_named_with_its_buffer(
    prepared: PreparedPlan, array: Any, words: str
) -> None:
    with pytest.raises(LaunchError, match=f"plan made, buffer x: {words}"):
        prepared.write("x", array)


def test_room_is_spoken_of_where_a_size_varies() -> None:
    with pytest.raises(LaunchError, match=r"a buffer is written as a whole$"):
        made().prepare("NULL").write("x", np.zeros(7, np.float32))


# ------------------------------------------------------------------------------------ launch shapes


def shaped(local_size: Any) -> Plan:
    plan = Plan("shaped")
    kernel = Kernel(
        "shaped",
        "BRICKLINE void shaped(Block& block, float* y, int64_t n) {"
        " block.once([&] { y[0] = float(n); }); }",
        [Param("y", "f32", 1, "write"), Scalar("n", low=1, high=1 << 20)],
        local_size=local_size,
    )
    n = plan.variable("n", 1, 1 << 20)
    plan.launch(kernel, y=plan.buffer("y", 1, "f32"), n=n)
    return plan


@pytest.mark.parametrize(
    ("local_size", "words"),
    [
        (1 << 20, "local_size[0] is 1048576; expected 1 to 1024: declare another local_size= of"),
        ((1, 1, 65), "local_size[2] is 65; expected 1 to 64: declare another local_size= of"),
        ((64, 64), "the product of local_size is 4096; expected at most 1024 lanes: declare"),
        ("n", "local_size[0] = n is 4096 with n=4096; expected 1 to 1024: pass other values"),
        (("n", 2), "local_size[0] = n is 4096 with n=4096; expected 1 to 1024: pass other values"),
    ],
)
def test_a_launch_that_the_device_cannot_take_says_what_it_takes(
    local_size: Any, words: str
) -> None:
    with pytest.raises(PlanError) as refused:
        shaped(local_size).prepare("NULL")(n=4096)
    assert str(refused.value).startswith("plan shaped on NULL, launch 0 (shaped): " + words)
    assert "(range)" not in str(refused.value)


def test_lanes_that_vary_are_told_with_the_values() -> None:
    with pytest.raises(
        PlanError, match=r"product of local_size is 1800 with n=900; .*: pass other"
    ):
        shaped(("n", 2)).prepare("NULL")(n=900)


def test_a_float_that_does_not_fit_names_the_argument() -> None:
    plan = Plan("floats")
    t = plan.variable("t", dtype="f32")
    x, y = (plan.buffer(name, (1, 8), "f32") for name in "xy")
    w = plan.buffer("w", 8, "f32")
    plan.launch(rms_norm(), x=x, weight=w, y=y, rows=1, n=8, eps=t)
    with pytest.raises(PlanError, match=r"eps is 1e\+300 with t=1e\+300; expected .* fits f32"):
        plan.prepare("NULL")(t=1e300)


# ----------------------------------------------------------------------------------------- launches


@pytest.mark.parametrize("name", ["brick", "layer"])
def test_an_argument_that_launch_takes_itself_is_renamed(name: str) -> None:
    kernel = Kernel(
        "taken",
        f"BRICKLINE void taken(Block& block, float* y, int64_t {name}) {{}}",
        [Param("y", "f32", 1, "write"), Scalar(name)],
    )
    plan = Plan("a")
    words = f"kernel taken has an argument {name}, .*rename it in the kernel, .*to {name}_index"
    with pytest.raises(PlanError, match=words):
        plan.launch(kernel, y=plan.buffer("y", 1, "f32"), **{name: 1})


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        (lambda p: p.launch(residual), "expected a Kernel, got function; call it to make one"),
        (lambda p: p.launch(COPY, x=3, z=3, n=3), "misses y and has no argument z; kernel copy"),
        (lambda p: p.launch(COPY, x="x", y="y", n=8), "pass what plan.buffer returned, not its"),
        (lambda p: p.launch(COPY, x=p.x, y=p.y, n=8.0), r"got 8\.0; convert it with int\(\)"),
        (lambda p: p.launch(COPY, x=p.x, y=p.y, n=p.t), r"plan\.variable\(name, low, high\)"),
        (
            lambda p: p.launch(COPY, x=p.x[:4], y=p.y, n=8),
            r"expected shape \[8\], got <x f32\[4\]>$",
        ),
        (lambda p: p.launch(COPY, x=p.x, y=p.y, n=4), r"a part of it, such as x\.view\(4\)"),
        (lambda p: p.launch(COPY, x=p.grid, y=p.y, n=8), r"pass grid\.reshape\(8\)"),
        (lambda p: p.launch(COPY, x=p.rows, y=p.y, n=2 * p.n), r"pass rows\.reshape\(2\*n\)"),
    ],
)
def test_launches_that_do_not_fit(launch: Callable[[Any], Any], words: str) -> None:
    plan: Any = Plan("made")
    plan.n, plan.t = plan.variable("n", 1, 4), plan.variable("t", dtype="f32")
    plan.x, plan.y = (plan.buffer(name, 8, "f32") for name in "xy")
    plan.grid, plan.rows = (
        plan.buffer("grid", (2, 4), "f32"),
        plan.buffer("rows", (plan.n, 2), "f32"),
    )
    with pytest.raises(PlanError, match=words):
        launch(plan)


def test_an_integer_of_the_plan_is_no_float() -> None:
    plan = Plan("a")
    x, y = (plan.buffer(name, (1, 8), "f32") for name in "xy")
    w, k = plan.buffer("w", 8, "f32"), plan.variable("k", 1, 4)
    with pytest.raises(
        PlanError, match=r"an integer of the plan; declare a float with plan\.varia"
    ):
        plan.launch(rms_norm(), x=x, weight=w, y=y, rows=1, n=8, eps=k)


# ------------------------------------------------------------------------------------ declarations


@pytest.mark.parametrize(
    ("declare", "words"),
    [
        (lambda p: p.buffer("a", np.zeros(8)), r"got ndarray .*give an array by name, array="),
        (lambda p: p.buffer("a", "f32", 4), "at buffer a; the shape comes before the dtype"),
        (lambda p: p.buffer("a", "n*64", "f32"), r"without quotes, such as n \* 64"),
        (lambda p: p.buffer("a", 4.0, "f32"), r"convert it with int\(\), or divide with //"),
        (lambda p: p.buffer("a", (None, 4), "f32"), "write every size out"),
        (lambda p: p.buffer("a", np.array([2, 3]), "f32"), "pass the sizes as a tuple"),
        (lambda p: p.buffer("a", p.variable("n", 0, 8) - 1, "f32"), "declare its variables with"),
        (lambda p: p.buffer("a", 2**62, "f32"), r"got 18446744073709551616 bytes of f32\["),
        (lambda p: p.variable("a", dtype="f32", default="x"), "variable a: expected a number"),
        (lambda p: p.variable("a", dtype="int"), "variable a: expected a dtype"),
        (lambda p: p.explain(0, 1), "plan made has no launches; add some"),
        (lambda p: p.explain(0), "two launches, or none, got 0"),
    ],
)
def test_declarations_that_do_not_fit(declare: Callable[[Plan], Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        declare(Plan("made"))


def test_a_float_is_declared_by_any_name_of_its_dtype() -> None:
    assert Plan("a").variable("t", dtype=np.float32, default=2).default == 2.0  # type: ignore[arg-type]


def test_a_launch_is_explained_by_its_number() -> None:
    plan = made()
    with pytest.raises(PlanError, match=r"got launch 0 \(copy\); pass its number"):
        plan.explain(plan.launches[0], plan.launches[0])  # type: ignore[arg-type]


def test_one_is_not_many() -> None:
    assert repr(made()) == "<Plan made, 1 launch over 2 buffers>"
    assert counted(2, "launch") == "2 launches"


# ---------------------------------------------------------------------------------------- reshaping


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (
            4096,
            r"expected as many elements, 64\*n .*got 4096 .*x\.reshape\(64\*n\) has all of them",
        ),
        (-1, r"got -1 - at a reshape of x, where -1 stands for 64\*n; write every size out"),
        ((-1, 32), r"where -1 stands for 2\*n"),
        ((-1, -1), "at a reshape of x; write"),
        ((-1, 48), "at a reshape of x; write"),
        ((-1, 0), "at a reshape of x; write"),
        ("n*64", "without quotes"),
        ((64, 64, 64), r"x\.reshape\(64\*n\) has all of them$"),
        ((2**40, 2**40), "got more than int64 holds"),
    ],
)
def test_reshapes_of_sizes_that_vary_say_how_to_write_them(shape: Any, words: str) -> None:
    plan = Plan("a")
    n = plan.variable("n", 1, 64)
    x = plan.buffer("x", (n, 64), "f32")
    with pytest.raises(PlanError, match=words):
        x.reshape(shape)
    assert x.reshape(64 * n).shape == (64 * n,)


def test_a_part_of_a_buffer_is_a_view_not_a_reshape() -> None:
    plan = Plan("a")
    n = plan.variable("n", 1, 64)
    x = plan.buffer("x", 4096, "f32")
    with pytest.raises(PlanError, match=r"x\.view\(\(n, 64\)\) a part"):
        x.reshape((n, 64))
    assert x.view((n, 64)).shape == (n, 64)
    assert x.reshape(64, 64).shape == x.reshape((64, 64)).shape


@pytest.mark.parametrize(
    ("take", "words"),
    [
        (lambda x, n: x[2, 3], r"index the first axis alone, x\[i\]\[j\], or take view"),
        (lambda x, n: x[-9], "below 8, from -8 on, got -9"),
        (lambda x, n: x[n], "a place that varies is passed to the kernel, as a scalar"),
        (lambda x, n: x[n : n + 1], "a place that varies is passed to the kernel, as a scalar"),
        (lambda x, n: np.asarray(x), r"has no contents; .*prepared\.read\('x'\)"),
    ],
)
def test_places_that_a_buffer_has_not(take: Callable[[Any, Any], Any], words: str) -> None:
    plan = Plan("a")
    n = plan.variable("n", 0, 7)
    with pytest.raises(PlanError, match=words):
        take(plan.buffer("x", (8, 64), "f32"), n)


# -------------------------------------------------------------------------------------- expressions


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda n: n / 2, r"got n / 2; write a // b to round down, or ceil_div\(a, b\)"),
        (lambda n: 2 / n, "got 2 / n; write"),
        (lambda n: n > 3, r"got n > 3, .*take minimum\(a, b\) or maximum"),
        (lambda n: n < 3, "got n < 3"),
        (lambda n: n >= 3, "got n >= 3"),
        (lambda n: n <= np.int64(3), "got n <= 3"),
        (lambda n: max(n, 3), "take minimum"),
        (lambda n: n**2, r"got n \*\* 2; write the product"),
        (int, r"got n, which has no value until .*\.low and \.high"),
    ],
)
def test_what_needs_a_value_is_refused_in_words(use: Callable[[Any], Any], words: str) -> None:
    n = Plan("a").variable("n", 0, 8)
    with pytest.raises(SymbolicError, match=words):
        use(n)


# ------------------------------------------------------------------------------------------- memory


def test_a_plan_larger_than_the_machine_is_refused_in_words() -> None:
    with pytest.raises(PlanError) as refused:
        room.check_room("big", made(2**45).storages, bl.open_device("CPU"))
    words = str(refused.value)
    assert words.startswith(
        "plan big: buffer x, f32[35184372088832], needs 128.0 TiB, all buffers together 256.0 TiB; "
        "CPU has "
    )
    assert "available: declare less, or bind memory of your own" in words


def test_the_bounds_that_room_is_kept_for_are_named() -> None:
    plan = Plan("big")
    n = plan.variable("n", 1, 2**44)
    x = plan.buffer("x", 2 * n, "f32")
    with pytest.raises(PlanError, match=rf"lower the bounds .*\(n up to {2**44}\)"):
        room.check_room("big", [x.storage], bl.open_device("CPU"))
    room.check_room("big", [x.storage], bl.open_device("NULL"))


@pytest.mark.parametrize(
    ("total", "limit", "fits"),
    [
        (2048, None, True),
        (2047, None, False),
        (4096, "max", True),
        (4096, 2 << 20, True),
        (4096, (2 << 20) - 1, False),
        (None, None, True),
    ],
)
def test_memory_is_that_of_the_machine_or_of_the_container(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    total: int | None,
    limit: int | str | None,
    fits: bool,
) -> None:
    facts, most = tmp_path / "meminfo", tmp_path / "memory.max"
    if total is not None:
        facts.write_text(f"MemTotal: {total} kB\nMemAvailable: 7 kB\nSwapTotal: 0 kB\n")
    if limit is not None:
        most.write_text(f"{limit}\n")
    monkeypatch.setattr(room, "_MEMINFO", facts)
    monkeypatch.setattr(room, "_LIMIT", most)
    storages, device = made(2 << 17).storages, bl.open_device("CPU")  # 1 MiB each
    if fits:
        room.check_room("made", storages, device)
    else:
        with pytest.raises(PlanError, match=r"needs 1\.0 MiB, .*2\.0 MiB; CPU has 7\.0 KiB avail"):
            room.check_room("made", storages, device)


@pytest.mark.parametrize(
    ("free", "words"),
    [
        (lambda number: (3 << 30, 4 << 30), r"NULL has 3\.0 GiB available: declare less"),
        (lambda number: 1 // number, "NULL cannot allocate that: declare less"),
    ],
)
def test_memory_of_a_gpu_is_asked_of_torch(
    monkeypatch: pytest.MonkeyPatch, free: Callable[[int], Any], words: str
) -> None:
    def info(number: int) -> Any:
        try:
            return free(number)
        except ZeroDivisionError as error:
            raise RuntimeError("no GPU") from error

    monkeypatch.setitem(
        sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(mem_get_info=info))
    )
    storages, device = made(2**45).storages, bl.open_device("NULL")
    assert re.search(words, room.no_room("made", storages[0], storages, device))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "NULL cannot allocate that" in room.no_room("made", storages[0], storages, device)


def test_sizes_are_short() -> None:
    counts = (0, 1023, 1024, 1536, 2**30, 2**47, 2**70)
    assert [size_text(count) for count in counts] == [
        *("0 bytes", "1023 bytes", "1.0 KiB", "1.5 KiB", "1.0 GiB", "128.0 TiB", "1048576.0 PiB")
    ]


# -------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("path", [None, 3, b"a.plan", object()])
def test_a_plan_is_saved_under_a_path(path: Any) -> None:
    with pytest.raises(PlanError, match="expected a file's path as text or a Path, got"):
        made().save(path)
    with pytest.raises(PlanError, match="expected a file's path as text or a Path, got"):
        Plan.load(path)


def test_a_file_is_replaced_where_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "made.plan"
    path.write_text("mine")
    with pytest.raises(PlanError, match="expected overwrite as True or False, got 'no'"):
        made().save(path, overwrite="no")  # type: ignore[arg-type]
    assert path.read_text() == "mine"


@pytest.mark.parametrize("text", ["", "{", '{"format": "brickline plan"'])
def test_a_file_that_is_cut_off_says_how_to_write_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cut.plan"
    path.write_text(text)
    with pytest.raises(
        PlanError, match=r"is no plan, or is cut off: .*; write it again with Plan\.s"
    ):
        Plan.load(path)


# ------------------------------------------------------------------------------------------- checks


def test_a_check_says_what_of_a_plan_it_takes(prepared: PreparedPlan) -> None:
    class Holder:
        def __init__(self) -> None:
            self.prepared = prepared

    for given, words in (
        (
            made(),
            r"a brickline\.Kernel or a prepared plan, got Plan; prepare it first, \.prepare\(",
        ),
        (Holder(), r"got Holder; pass its \.prepared, and drive=lambda plan: plan"),
        (3, "got int$"),
    ):
        with pytest.raises(UsageError, match=f"candidate: .*{words}"):
            bl.check(given)
        with pytest.raises(UsageError, match=f"reference: .*{words}"):
            bl.check(lambda: None, reference=given)
    with pytest.raises(UsageError, match=r'by name, got 7; for example .*kwargs=\{"n": 7\}'):
        bl.check(prepared, 7)
