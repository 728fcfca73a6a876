"""Which module may import which, as the design says, read from the source without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import brickline

PACKAGE = Path(brickline.__file__).parent
MODULES = sorted(
    path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")
    for path in PACKAGE.rglob("*.py")
)
EXTRAS = {"torch", "cuda", "triton", "textual", "duckdb", "opentelemetry", "ray"}
LOOKING = {"profile", "profile_checks", "profile_rows", "profile_tables", "node_table", "nodes"}
LOOKING |= {"stats", "histogram", "roofline", "budgets", "report", "export"}
LOOKING |= {"query", "query_views", "regressions", "student"}
TRACED = {"launch_traces", "comparison"}
"""What a profiler loads when a launch is traced or compared: these read tensors with NumPy."""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(node: ast.AST, *, lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Every imported module, with whether it is imported only when a function is called.

    What is imported for type checkers alone is left out: it does not happen.
    """
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            if child.module == "brickline":
                yield from ((f"brickline.{alias.name}", lazy) for alias in child.names)
            elif child.module is not None:
                yield child.module, lazy
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports(child, lazy=lazy or inside)


@cache
def of_module(module: str) -> list[tuple[str, bool]]:
    """The modules of brickline that one imports, and which of those lazily."""
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    found = imports(ast.parse(path.read_text(encoding="utf-8")))
    return [
        (name.removeprefix("brickline."), lazy)
        for name, lazy in found
        if name.startswith("brickline.")
    ]


def room(module: str) -> str:
    """`report.text` is in the room `report`; `profile` is a room of its own."""
    return module.partition(".")[0]


def rooms(module: str, *, lazy: bool | None = None) -> set[str]:
    wanted = (True, False) if lazy is None else (lazy,)
    return {room(name) for name, late in of_module(module) if late in wanted}


def in_rooms(*names: str) -> list[str]:
    return [module for module in MODULES if room(module) in names]


@pytest.mark.parametrize("module", ["errors", "bricks", "abi"])
def test_the_foundation_imports_nothing_of_brickline(module: str) -> None:
    assert rooms(module) == set()


@pytest.mark.parametrize(
    "module", [each for each in MODULES if room(each) not in ("commands", "__main__")]
)
def test_nothing_imports_the_commands(module: str) -> None:
    assert "commands" not in rooms(module)


@pytest.mark.parametrize(
    "module", [each for each in MODULES if room(each) not in ("commands", "export")]
)
def test_nothing_but_the_commands_imports_exports(module: str) -> None:
    assert "export" not in rooms(module)


KERNELS = {"buffers", "dtypes", "kernel", "kernel_source", "symbolic"}


@pytest.mark.parametrize("module", in_rooms("device"))
def test_a_device_knows_kernels_buffers_and_the_core_only(module: str) -> None:
    assert rooms(module) <= {"errors", "device", "_core"} | KERNELS


@pytest.mark.parametrize("module", ["device.base", "device.clocks", "device.cuda_context"])
def test_a_clock_needs_no_compiler(module: str) -> None:
    assert not rooms(module, lazy=False) & {"kernel", "kernel_source", "symbolic"}


SYMBOLIC = {module for module in MODULES if module.startswith("symbolic")}


@pytest.mark.parametrize("module", in_rooms(*KERNELS, *SYMBOLIC, "kernels", "kernel_checks"))
def test_a_kernel_touches_no_device(module: str) -> None:
    assert not rooms(module) & {"device", "cache", "launching", "profiler"}


@pytest.mark.parametrize("module", [each for each in MODULES if room(each) != "device"])
def test_of_devices_only_the_base_is_seen(module: str) -> None:
    seen = {name for name, _ in of_module(module) if room(name) == "device"}
    assert seen <= {"device.base", "device"}
    if seen:
        makers = {"profiler", "cache", "launching", "adapters", "executor", "fingerprint_cuda"}
        assert room(module) in makers | {"commands", "__init__", "peaks"}


@pytest.mark.parametrize("module", in_rooms("traces", "tiles", "timers", "graph", "graph_builder"))
def test_the_rooms_of_the_profiler_do_not_know_it_or_runs(module: str) -> None:
    assert not rooms(module) & {"profiler", "runs", "profile", "report", "device"}


@pytest.mark.parametrize(
    "module",
    in_rooms(
        "runs", "run_directory", "run_paths", "spools", "tables", "table_index", "circumstances"
    ),
)
def test_runs_know_neither_who_writes_nor_who_looks(module: str) -> None:
    assert not rooms(module) & {"profiler", "profile", "report", "device", "stats", "peaks"}


@pytest.mark.parametrize("module", in_rooms("align"))
def test_what_belongs_together_is_told_without_runs_and_tensors(module: str) -> None:
    assert rooms(module) <= {"align", "errors"}


def test_the_profiler_looks_only_when_asked() -> None:
    for module in ("profiler", "recorded_bricks", "timed_functions", "measurement_cost"):
        at_once = rooms(module, lazy=False)
        assert not at_once & (LOOKING | {"commands", "adapters", "tables"})
    assert rooms("recorded_bricks", lazy=True) == {"profile", "stats", "report"}


@pytest.mark.parametrize("module", in_rooms("top"))
def test_the_watcher_looks_and_is_known_to_its_command_alone(module: str) -> None:
    allowed = LOOKING | {"top", "abi", "bricks", "errors", "runs", "run_directory", "spools"}
    assert rooms(module) <= allowed
    others = [each for each in MODULES if room(each) not in ("top", "commands")]
    assert not [each for each in others if "top" in rooms(each)]


@pytest.mark.parametrize("module", in_rooms(*LOOKING))
def test_the_looking_half_needs_no_device_and_no_profiler(module: str) -> None:
    assert not rooms(module) & {"device", "profiler", "timers", "tiles", "traces", "adapters"}
    if room(module) != "report":
        # A profile in a notebook shows itself; the report is loaded when it does.
        late = module == "profile"
        assert "report" not in rooms(module, lazy=False if late else None)


@pytest.mark.parametrize("module", [each for each in MODULES if room(each) != "commands"])
def test_imports_inside_functions_are_few(module: str) -> None:
    """They hide a direction. They stand for views of a whole: its report, its exports, Parquet."""
    allowed = {
        "recorded_bricks": {"profile", "stats", "report"},
        "profile": {"report"},
        "pytest_plugin": {"pytest_marks", "pytest_reports"},
        "traced_launches": TRACED,
        "graph": {"graph_views"},
        "plan": {"executor", "plan_files", "plan_words"},
        "megakernel_report": {"megakernel_files", "report"},
        "runs": {"tables"},
        "query": {"tables", "table_columns"},
        "device.base": {"buffers"},
        "verdict.finding": {"report"},
        "verdict.report": {"report"},
        "adapters.recording": {"adapters"},
        "adapters.torch_tensors": {"fingerprint_cuda"},
        "adapters.torch_heard": {"fingerprint_cuda"},
        "__main__": {"commands"},
        "checker": {"checking", "oracle", "comparison"},
        "fingerprints": {"fingerprint_cuda"},
    }
    assert rooms(module, lazy=True) <= allowed.get(module, set())


def works_on_tensors(module: str) -> bool:
    """Rooms that are torch through and through; the rest loads them when they are asked for."""
    return room(module) in ("oracle", "checking") or module.startswith("adapters.torch")


@pytest.mark.parametrize("module", [each for each in MODULES if not works_on_tensors(each)])
def test_rooms_of_torch_are_entered_late(module: str) -> None:
    assert not [name for name, lazy in of_module(module) if not lazy and works_on_tensors(name)]


DRAWN = {"top.app", "top.panels", "top.screens"}
"""Modules that are textual through and through; the command loads them when it shows them."""


def test_the_terminal_interface_is_loaded_late() -> None:
    for module in set(MODULES) - DRAWN:
        assert not [name for name, lazy in of_module(module) if name in DRAWN and not lazy]


@pytest.mark.parametrize(
    "module", [each for each in MODULES if not works_on_tensors(each) and each not in DRAWN]
)
def test_no_extra_is_imported_with_its_module(module: str) -> None:
    path = PACKAGE / f"{module.replace('.', '/')}.py"
    for name, lazy in imports(ast.parse(path.read_text(encoding="utf-8"))):
        if name.partition(".")[0] in EXTRAS:
            assert lazy, f"{module} imports {name} at once"


def closure(module: str) -> set[str]:
    """Everything that importing a module imports of brickline."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        current = waiting.pop()
        if current in seen or current == "_core":
            continue
        seen.add(current)
        for name, lazy in of_module(current):
            if not lazy:
                waiting.append(name if name in MODULES or name == "_core" else f"{name}.__init__")
    return seen


def test_what_the_public_face_imports_is_light() -> None:
    recording = ("__init__", "profiler", "runs", "graph", "traces", "tiles", "device.base")
    for module in {each for start in recording for each in closure(start)}:
        path = PACKAGE / f"{module.replace('.', '/')}.py"
        for name, lazy in imports(ast.parse(path.read_text(encoding="utf-8"))):
            if not lazy:
                assert name.partition(".")[0] not in EXTRAS | {"pyarrow", "rich", "typer"}, module


def test_no_module_imports_itself_in_a_circle() -> None:
    for module in MODULES:
        direct = {name for name, lazy in of_module(module) if not lazy and name in MODULES}
        for other in direct - {module}:
            assert module not in closure(other), f"{module} and {other} import each other"
