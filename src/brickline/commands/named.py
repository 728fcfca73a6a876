"""Objects of a user's program that a command line names: ``file.py:name``, ``package.module:name``.

Loads files and modules as Python would, and tells a model from a factory that makes one. Knows
nothing of what is done with them. Two sides may lie in two directories whose files have the same
names, such as two checkouts of one project: each imports its own.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from brickline.errors import UsageError

INPUT_NAMES = ("inputs", "example_inputs")
"""Where a candidate's file keeps its inputs, unless the command names others."""
SHAPE = "expected file.py:name or package.module:name"

_loaded_files: dict[Path, ModuleType] = {}


class Named(NamedTuple):
    """What a name stands for."""

    spec: str
    module: ModuleType
    value: Any


class CallInputs(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def load_named(spec: str, role: str) -> Named:
    """Return the object of that name.

    Args:
        spec: ``file.py:name`` or ``package.module:name``; the name may be dotted.
        role: the argument or option that gave it, for messages.

    Raises:
        UsageError: if there is no such file, module or name, or loading it fails.
    """
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise UsageError(_shape_message(spec, role))
    module = _load_place(place, spec, role)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise UsageError(_missing_name(place, module, name, role))
        value = getattr(value, part)
    return Named(spec, module, value)


def model_of(named: Named, role: str, prepare: Callable[[], object] = lambda: None) -> Any:
    """Return the model: the object itself, or what a class or a function without parameters makes.

    Args:
        named: what was named.
        role: the argument or option that named it, for messages.
        prepare: called before a factory is, to seed its random numbers.
    """
    value = named.value
    if isinstance(value, type) or _is_factory(value):
        prepare()
        value = _called(value, named.spec, role)
    if not callable(value):
        raise UsageError(
            f"expected a module or another callable, got {_kind(value)} - {role} {named.spec}; "
            "name a model, or a class or function without parameters that makes one"
        )
    return value


def drive_of(named: Named) -> Callable[[Any], object]:
    """Return a function that runs the model it is given."""
    if not callable(named.value):
        raise UsageError(
            f"expected a function of one parameter, the model, got {_kind(named.value)} - "
            f"--drive {named.spec}"
        )
    return named.value  # type: ignore[no-any-return]


def inputs_of(
    spec: str | None, candidate: Named, prepare: Callable[[], object] = lambda: None
) -> CallInputs:
    """Return what the models are called with: a tuple, a mapping of keywords, or one value.

    Args:
        spec: the name that was given; None takes `INPUT_NAMES` of the candidate's file.
        candidate: the candidate, as it was named.
        prepare: called before a function that makes inputs is, to seed its random numbers.

    Raises:
        UsageError: if there are none.
    """
    named = load_named(spec, "--inputs") if spec is not None else _inputs_beside(candidate)
    value = named.value
    if inspect.isfunction(value) or inspect.ismethod(value):
        prepare()
        value = _called(value, named.spec, "--inputs")
    if isinstance(value, Mapping):
        return CallInputs((), {str(key): each for key, each in value.items()})
    if isinstance(value, tuple | list):
        return CallInputs(tuple(value), {})
    if value is None or isinstance(value, type | ModuleType):
        raise UsageError(
            f"expected a tuple of inputs, or a function that gives one, got {_kind(value)} - "
            f"--inputs {named.spec}"
        )
    return CallInputs((value,), {})


def _inputs_beside(candidate: Named) -> Named:
    for name in INPUT_NAMES:
        if hasattr(candidate.module, name):
            place = candidate.spec.rpartition(":")[0]
            return Named(f"{place}:{name}", candidate.module, getattr(candidate.module, name))
    place = candidate.spec.rpartition(":")[0]
    raise UsageError(
        f"expected inputs to call {candidate.spec} with, got none: {place} has no "
        f"{' or '.join(f'`{name}`' for name in INPUT_NAMES)}; define `inputs = (x, ...)` there, "
        "or give --inputs file.py:name, or --drive file.py:name for a loop of your own"
    )


def _is_factory(value: Any) -> bool:
    """Whether it is a function that can be called with nothing and takes no ``*args``."""
    if not (inspect.isfunction(value) or inspect.ismethod(value) or inspect.isbuiltin(value)):
        return False
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(
        each.default is not each.empty or each.kind is each.VAR_KEYWORD for each in parameters
    )


def _called(factory: Callable[[], Any], spec: str, role: str) -> Any:
    try:
        return factory()
    except Exception as error:
        needs = inspect.isclass(factory) and isinstance(error, TypeError)
        hint = "; if it needs arguments, name a function that makes it" if needs else ""
        raise UsageError(
            f"{spec} could not be made: {_told(error)} - {role} {spec}{hint}"
        ) from error


def _load_place(place: str, spec: str, role: str) -> ModuleType:
    is_file = place.endswith(".py") or os.sep in place or Path(place).is_file()
    if is_file and not Path(place).is_file():
        raise UsageError(f"expected a Python file, there is no {place} - {role} {spec}")
    try:
        return _load_file(Path(place).resolve()) if is_file else _load_module(place)
    except (SystemExit, Exception) as error:
        raise UsageError(f"{place} could not be loaded: {_told(error)} - {role} {spec}") from error


def _load_module(name: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _load_file(path: Path) -> ModuleType:
    if path in _loaded_files:
        return _loaded_files[path]
    _forget_namesakes(path.parent)
    sys.path.insert(0, str(path.parent))
    name = path.stem
    if name in sys.modules:
        name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise ImportError(f"{path.name} is not a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    _loaded_files[path] = module
    return module


def _forget_namesakes(directory: Path) -> None:
    """Let a file import its neighbours, not those of a file that was loaded before it."""
    others = {path.parent for path in _loaded_files} - {directory}
    own = {each.stem for each in directory.iterdir() if each.suffix == ".py" or each.is_dir()}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in own and _belongs_to(module, others):
            del sys.modules[name]


def _belongs_to(module: ModuleType, directories: set[Path]) -> bool:
    file = getattr(module, "__file__", None)
    places = [file] if file else list(getattr(module, "__path__", ()))
    return any(
        Path(place).resolve().is_relative_to(each) for place in places for each in directories
    )


def _told(error: BaseException) -> str:
    """Return an error in one line, with the user's line that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename != __file__ and "importlib" not in frame.filename
    ]
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    if isinstance(error, ImportError) and "relative import" in str(error):
        at += "; name it as package.module:name"
    return f"{type(error).__name__}: {error}{at}"


def _shape_message(spec: str, role: str) -> str:
    path = Path(spec.rstrip(":"))
    example = f"{path}:model" if path.is_file() else "port.py:model"
    return f"{SHAPE}, got {spec!r} - {role}; for example {example}"


def _missing_name(place: str, module: ModuleType, name: str, role: str) -> str:
    known = [each for each in vars(module) if not each.startswith("_")]
    close = difflib.get_close_matches(name, known, n=1)
    own = [
        each
        for each in known
        if not isinstance(vars(module)[each], ModuleType)
        and getattr(vars(module)[each], "__module__", module.__name__) == module.__name__
    ]
    hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(own[:8]) or 'no names'}"
    return f"expected a name of {place}, got {name!r} - {role}; {hint}"


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" if value is not None else "None"
