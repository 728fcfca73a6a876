"""Objects that a command line names: how they are found, and what is said when they are not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from brickline.commands import named
from brickline.commands.named import drive_of, inputs_of, load_named, model_of
from brickline.errors import UsageError

PORT = """
import helper

def model(x): return x + helper.SHIFT
def make(): return model
def make_seeded(seed=3): return lambda x: x + seed
def broken(): raise ValueError("no weights")
class Model:
    scale = 2
    def __call__(self, x): return self.scale * x
class Needs:
    def __init__(self, size): pass
number = 3
instance = Model()
inputs = (1, 2)
"""


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave no module and no path behind."""
    modules = dict(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(named, "_loaded_files", {})
    monkeypatch.chdir(tmp_path)
    for version, shift in (("new", 1), ("old", 10)):
        (tmp_path / version).mkdir()
        (tmp_path / version / "port.py").write_text(PORT)
        (tmp_path / version / "helper.py").write_text(f"SHIFT = {shift}\n")
    yield
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.modules.update(modules)


def model(spec: str) -> object:
    return model_of(load_named(spec, "CANDIDATE"), "CANDIDATE")


def test_a_function_an_object_a_class_and_a_factory():
    assert model("new/port.py:model")(1) == 2
    assert model("new/port.py:instance")(2) == 4
    assert model("new/port.py:Model")(2) == 4
    assert model("new/port.py:make")(1) == 2
    assert model("new/port.py:make_seeded")(1) == 4


def test_dotted_names_and_modules(tmp_path: Path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inside.py").write_text("from . import other\nmodel = other.model\n")
    (tmp_path / "package" / "other.py").write_text("def model(x): return -x\n")
    assert model("package.inside:model")(3) == -3
    assert load_named("new/port.py:instance.scale", "CANDIDATE").value == 2
    with pytest.raises(UsageError, match=r"name it as package\.module:name"):
        load_named("package/inside.py:model", "CANDIDATE")


def test_two_checkouts_of_one_project_import_their_own_files():
    new, old = model("new/port.py:model"), model("old/port.py:model")
    assert (new(0), old(0)) == (1, 10)
    assert load_named("new/port.py:model", "CANDIDATE").value is new


def test_a_factory_is_prepared_for():
    calls: list[str] = []
    model_of(load_named("new/port.py:make", "CANDIDATE"), "CANDIDATE", lambda: calls.append("x"))
    model_of(load_named("new/port.py:model", "CANDIDATE"), "CANDIDATE", lambda: calls.append("x"))
    assert calls == ["x"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("port.py", "expected file.py:name or package.module:name, got 'port.py'"),
        (":model", "for example port.py:model"),
        ("new/port.py:", "new/port.py:model"),
        ("gone.py:model", "there is no gone.py"),
        ("gone.module:model", "No module named 'gone'"),
        ("new/port.py:modle", "did you mean 'model'?"),
        ("new/port.py:zzz", "it has model, make"),
        ("new/port.py:instance.zzz", "expected a name of new/port.py"),
        ("new/port.py:number", "expected a module or another callable, got a int"),
        ("new/port.py:broken", "ValueError: no weights"),
        ("new/port.py:Needs", "name a function that makes it"),
    ],
)
def test_mistakes_say_what_to_do(spec: str, words: str):
    with pytest.raises(UsageError) as caught:
        model(spec)
    assert words in str(caught.value)
    assert "CANDIDATE" in str(caught.value)


@pytest.mark.parametrize("code", ["1 / 0", "raise SystemExit(4)", "def f(:"])
def test_a_file_that_cannot_be_loaded_says_where(code: str, tmp_path: Path):
    (tmp_path / "bad.py").write_text(f"\n{code}\n")
    with pytest.raises(UsageError, match=r"bad\.py could not be loaded"):
        load_named("bad.py:model", "--reference")
    assert "bad" not in sys.modules


def test_inputs_in_every_form(tmp_path: Path):
    candidate = load_named("new/port.py:model", "CANDIDATE")
    assert inputs_of(None, candidate) == ((1, 2), {})
    (tmp_path / "data.py").write_text(
        "single = 5\nlisted = [1]\nwords = {'x': 1}\ndef made(): return (7,)\nnothing = None\n"
    )
    assert inputs_of("data.py:single", candidate) == ((5,), {})
    assert inputs_of("data.py:listed", candidate) == ((1,), {})
    assert inputs_of("data.py:words", candidate) == ((), {"x": 1})
    assert inputs_of("data.py:made", candidate) == ((7,), {})
    with pytest.raises(UsageError, match="expected a tuple of inputs"):
        inputs_of("data.py:nothing", candidate)


def test_missing_inputs_say_where_they_may_stand(tmp_path: Path):
    (tmp_path / "bare.py").write_text("def model(x): return x\n")
    with pytest.raises(UsageError, match="define `inputs = ") as caught:
        inputs_of(None, load_named("bare.py:model", "CANDIDATE"))
    assert "--drive" in str(caught.value)


def test_a_drive_is_a_function():
    assert callable(drive_of(load_named("new/port.py:model", "--drive")))
    with pytest.raises(UsageError, match="expected a function of one parameter"):
        drive_of(load_named("new/port.py:number", "--drive"))
