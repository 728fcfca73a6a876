"""The public face: its names, and that none of them hides a module."""

from __future__ import annotations

import ast
import inspect
import types
from pathlib import Path

import pytest

import brickline

PACKAGE = Path(brickline.__file__).parent
PUBLIC = [
    "Access",
    "BrickBottleneck",
    "BrickCategory",
    "BrickId",
    "BrickProfiler",
    "BrickStats",
    "BricklineError",
    "Buffer",
    "CachedKernel",
    "CategoryStats",
    "DivergenceInfo",
    "DivergenceReport",
    "ExecutionGraph",
    "Finding",
    "Fingerprint",
    "Kernel",
    "KernelCache",
    "KernelChecksum",
    "KernelTrace",
    "Megakernel",
    "MegakernelReport",
    "Param",
    "Plan",
    "PreparedPlan",
    "Profile",
    "Run",
    "Sampling",
    "Scalar",
    "SyncMode",
    "TileLevel",
    "TileStats",
    "Verdict",
    "as_buffer",
    "check",
    "compare",
    "distance",
    "fingerprint",
    "fnv1a_f32",
    "open_device",
    "record",
]
"""A name that comes or goes is a decision: it is made here too."""


def test_the_public_names() -> None:
    assert brickline.__all__ == PUBLIC


def test_all_is_a_sorted_list_that_is_written_out() -> None:
    module = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    (assigned,) = [
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert isinstance(assigned, ast.List)
    assert ast.literal_eval(assigned) == sorted(brickline.__all__)
    assert len(set(brickline.__all__)) == len(brickline.__all__)


def test_the_package_holds_nothing_else() -> None:
    """Imports, the list of names, and the loader of the looking half; nothing else is public."""
    module = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    assert functions == ["__getattr__", "__dir__"]
    for name in brickline.__all__:
        getattr(brickline, name)  # loads the looking half
    public = {
        name
        for name, value in vars(brickline).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public - {"Any", "TYPE_CHECKING", "import_module"} == set(brickline.__all__)


@pytest.mark.parametrize("name", brickline.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(brickline, name)
    assert inspect.getdoc(value)
    for kind in inspect.getmro(value) if inspect.isclass(value) else ():
        for member, attribute in vars(kind).items() if "brickline" in kind.__module__ else ():
            if inspect.isfunction(attribute) and not member.startswith("_"):
                assert inspect.getdoc(attribute), f"{name}.{member}"


def test_no_public_function_shares_a_modules_name() -> None:
    # A verb of the command line is named like the function that it stands for.
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "commands"]
    modules = {path.stem for path in paths}
    modules |= {path.parent.name for path in PACKAGE.rglob("__init__.py")}
    assert not modules & set(brickline.__all__)
    for path in PACKAGE.glob("*.py"):
        functions = {
            node.name
            for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        siblings = {each.stem for each in PACKAGE.glob("*.py")} - {path.stem}
        assert not functions & siblings, f"{path.name} has a function named like a module"


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()
    assert (PACKAGE / "_core.pyi").is_file()


def test_the_stub_names_what_the_core_has() -> None:
    from brickline import _core

    stub = ast.parse((PACKAGE / "_core.pyi").read_text(encoding="utf-8"))
    declared = {
        node.name
        for node in stub.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    declared |= {ast.unparse(node.target) for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert {name for name in vars(_core) if not name.startswith("_")} == declared
    for node in stub.body:
        if not isinstance(node, ast.ClassDef):
            continue
        kind = getattr(_core, node.name)
        methods = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        methods.discard("__buffer__")  # Python shows the buffer protocol from 3.12 on
        missing = {name for name in methods if not hasattr(kind, name)}
        assert not missing, f"{node.name} has no {missing}"
