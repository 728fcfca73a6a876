"""Imports packages that want torchvision, where none is installed or it does not load.

There is no torchvision for every build of torch. transformers, timm and open_clip want it for
images and datasets, which this set does not use. Names of it are empty classes meanwhile.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def torchvision_or_nothing() -> Iterator[None]:
    """Let torchvision be imported, whether there is one or not."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError):
        finder = _Nothing()
    else:
        yield
        return
    _forget()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]


class _EmptyType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _EmptyType(name, (_Empty,), {})


class _Empty(metaclass=_EmptyType):
    pass


class _Nothing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of torchvision in which every name is an empty class."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        names: dict[str, type] = {}

        def attribute(name: str) -> type:
            if name.startswith("__"):
                raise AttributeError(name)
            return names.setdefault(name, _EmptyType(name, (_Empty,), {}))

        module.__getattr__ = attribute  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


# transformers does without torchvision if there is none, but not if one does not load.
absent = importlib.util.find_spec("torchvision") is None
with contextlib.nullcontext() if absent else torchvision_or_nothing():
    for each in ("bert", "clip", "convnext", "gemma2", "llama", "mamba", "whisper"):
        importlib.import_module(f"transformers.models.{each}.modeling_{each}")
with torchvision_or_nothing():
    timm = importlib.import_module("timm.models.convnext")
    open_clip = importlib.import_module("open_clip.model")
    open_clip_blocks = importlib.import_module("open_clip.transformer")
