"""Ways to get at an op in another process: made anew, by its source, or as a graph.

A recipe is lines for the script and data for it; that it works is shown by `repro`.
"""

from __future__ import annotations

import inspect
import io
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from brickline.checking.evidence import Backward, Evidence
from brickline.checking.repro_vjp import source_of_gradient

_EXPORTABLE_BYTES = 1 << 28


class Refused(Exception):  # noqa: N818 - carries a reason, not an error
    """There is no script; the message says why."""


@dataclass
class Recipe:
    """How a script gets at the op, and the data it needs beside its inputs."""

    make: list[str]
    data: dict[str, Any]
    needs: str = "It needs torch, and nothing else."
    imports: tuple[str, ...] = ()
    before_load: tuple[str, ...] = ()
    safe: tuple[str, ...] = ()
    trusted: bool = False
    constants: tuple[str, ...] = ()
    """Lines that stand before the script's own functions."""


_CONSTRUCTORS: dict[type, tuple[str, ...]] = {
    torch.nn.Linear: ("in_features", "out_features"),
    torch.nn.Embedding: ("num_embeddings", "embedding_dim", "padding_idx", "max_norm"),
    torch.nn.LayerNorm: ("normalized_shape", "eps", "elementwise_affine"),
    torch.nn.RMSNorm: ("normalized_shape", "eps", "elementwise_affine"),
    torch.nn.GroupNorm: ("num_groups", "num_channels", "eps", "affine"),
    **dict.fromkeys(
        (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d),
        ("num_features", "eps", "momentum", "affine", "track_running_stats"),
    ),
    **dict.fromkeys(
        (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d),
        (
            "in_channels",
            "out_channels",
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "groups",
            "padding_mode",
        ),
    ),
}
"""How the modules that most models are made of are made again."""


def known_module(evidence: Evidence) -> Recipe | None:
    """Make one of torch's own modules anew, with its weights as data."""
    module = evidence.module
    names = _CONSTRUCTORS.get(type(module))
    if names is None or not isinstance(module, torch.nn.Module) or not _is_plain(module):
        return None
    options = [f"{name}={getattr(module, name)!r}" for name in names]
    if "bias" in module._parameters:
        options.append(f"bias={module.bias is not None}")
    make = [
        f"module = torch.nn.{type(module).__name__}({', '.join(options)})",
        'module.load_state_dict(given["state"], assign=True)',
        f"return module.to(DEVICE).train({module.training})",
    ]
    state = {name: each.detach().cpu() for name, each in module.state_dict().items()}
    return Recipe(make, {"state": state})


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether a module is nothing but its class: no hooks, no methods of its own."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return "forward" not in vars(module) and not any(hooks) and not module._modules


def aten_op(evidence: Evidence) -> Recipe | None:
    """Call a torch op by its name."""
    if not isinstance(evidence.module, torch._ops.OpOverload):
        return None
    return Recipe([f"return torch.ops.{evidence.module}"], {})


def by_source(evidence: Evidence) -> Recipe | None:
    """Import a module's classes, or a function, from where they are defined."""
    module = evidence.module
    if isinstance(module, torch.nn.Module):
        return _pickled_module(module)
    name, qualified = getattr(module, "__module__", None), getattr(module, "__qualname__", "")
    if not isinstance(name, str) or not inspect.isfunction(module):
        raise Refused(f"{called(module)} is neither a module, a function nor a torch op")
    if "<" in qualified:
        raise Refused(f"{qualified} is defined within a function, so no other process can name it")
    lines, needs = _import_lines([name])
    path = "".join(f".{part}" for part in qualified.split("."))
    make = [f"return sys.modules[{_alias(name)!r}]{path}"]
    return Recipe(make, {}, needs, before_load=tuple(lines), imports=_SOURCE_IMPORTS)


_SOURCE_IMPORTS = ("importlib.util",)


def _pickled_module(module: torch.nn.Module) -> Recipe:
    if "forward" in vars(module):
        raise Refused("its forward was replaced on the instance, which no pickle holds")
    classes = {type(each) for each in module.modules()}
    for each in classes:
        if "<" in each.__qualname__:
            raise Refused(f"{each.__qualname__} is defined within a function, so it has no name")
    lines, needs = _import_lines(sorted({each.__module__ for each in classes}))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    named = {f"{each.__module__}.{each.__qualname__}" for each in classes}
    unsafe = set(torch.serialization.get_unsafe_globals_in_checkpoint(buffer))
    safe = _safe_names(unsafe & (named | HARMLESS))
    trusted = not unsafe <= named | HARMLESS
    make = [
        f'return given["module"].to(DEVICE).train({module.training})',
    ]
    return Recipe(
        make,
        {"module": module},
        needs,
        before_load=tuple(lines),
        imports=_SOURCE_IMPORTS,
        safe=() if trusted else safe,
        trusted=trusted,
    )


HARMLESS = {"builtins.set", "builtins.frozenset", "collections.OrderedDict"}


def _safe_names(names: set[str]) -> tuple[str, ...]:
    out = []
    for name in sorted(names):
        module, _, qualified = name.rpartition(".")
        if module == "builtins":
            out.append(qualified)
        elif module.startswith("torch."):
            out.append(name)
        elif module != "collections":
            found = f"sys.modules[{_alias(module)!r}].{qualified}"
            out.append(f"({found}, {name!r})" if module == "__main__" else found)
    return tuple(out)


def _import_lines(names: Sequence[str]) -> tuple[list[str], str]:
    """Return lines that import modules by name, or from their files where they have no place."""
    lines: list[str] = []
    needed: list[str] = []
    for name in names:
        if name.partition(".")[0] in ("torch", "builtins"):
            continue
        found = sys.modules.get(name)
        if found is None or not Path(getattr(found, "__file__", None) or "").is_file():
            raise Refused(f"the source of {name} is not in a file")
        source = Path(str(found.__file__)).resolve()
        if _is_installed(name, source):
            lines.append(f"__import__({name!r})")
            needed.append(name.partition(".")[0])
            continue
        needed.append(str(source))
        is_package = hasattr(found, "__path__")
        if is_package or "." in name:
            root = source.parents[name.count(".") + is_package]
            lines += [f"sys.path.insert(0, {str(root)!r})", f"__import__({name!r})"]
        else:
            lines += _lines_for_file(name, source)
    needs = f"torch and {', '.join(dict.fromkeys(needed))}" if needed else "torch, and nothing else"
    return lines, f"It needs {needs}."


def _lines_for_file(name: str, source: Path) -> list[str]:
    """Return lines that load a file; a script's own names then stand in for those of this one."""
    if name == "__main__" and not _MAIN_GUARD.search(source.read_text(encoding="utf-8")):
        raise Refused(
            f"it is defined in {source.name}, the script that was started; move it into a module, "
            'or put what the script does under if __name__ == "__main__":'
        )
    alias = _alias(name)
    lines = [
        f"sys.path.insert(0, {str(source.parent)!r})",
        f"spec = importlib.util.spec_from_file_location({alias!r}, {str(source)!r})",
        "loaded = importlib.util.module_from_spec(spec)",
        f"sys.modules[{alias!r}] = loaded",
        "spec.loader.exec_module(loaded)",
    ]
    if name == "__main__":
        lines.append("globals().update({**vars(loaded), **globals()})")
    return lines


_MAIN_GUARD = re.compile(r"""^if __name__ == ["']__main__["']:""", re.MULTILINE)


def _alias(name: str) -> str:
    """Return the name under which a module is loaded; the repro itself is ``__main__``."""
    return "candidate_script" if name == "__main__" else name


def _is_installed(name: str, source: Path) -> bool:
    """Return whether any Python of this installation finds the module by its name."""
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or "site-packages" in source.parts


def exported(evidence: Evidence) -> Recipe | None:
    """Take the op as a graph of torch ops, which needs none of its source."""
    module = evidence.module
    assert module is not None
    if isinstance(module, torch.nn.Module):
        parameters = [*module.parameters(), *module.buffers()]
        if sum(each.numel() * each.element_size() for each in parameters) > _EXPORTABLE_BYTES:
            raise Refused("it is too large to be exported")
        wrapped = module
    else:
        wrapped = _Wrapped(module)
    try:
        program = torch.export.export(
            wrapped, tuple(evidence.args), dict(evidence.kwargs), strict=False
        )
        buffer = io.BytesIO()
        torch.export.save(program, buffer)
    except Exception as error:
        raise Refused(f"torch.export cannot take it: {words_of(error)}") from None
    program_bytes = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    make = [
        'program = io.BytesIO(given["program"].cpu().numpy().tobytes())',
        "return torch.export.load(program).module()",
    ]
    return Recipe(make, {"program": program_bytes}, imports=("io",))


class _Wrapped(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def of_gradient(recipe: Recipe, backward: Backward) -> Recipe:
    """Return how a script gets at one gradient of the op that a recipe makes."""
    call = f'gradient(op, args, kwargs, given["arrived"], {backward.wanted!r})'
    make = [
        "def made():",
        *(f"    {line}" for line in recipe.make),
        "op = made()",
        f"return lambda *args, **kwargs: {call}",
    ]
    arrived = {number: each.detach().cpu().clone() for number, each in backward.arrived.items()}
    constants = (*recipe.constants, "", "", *source_of_gradient(), "")
    return replace(recipe, make=make, data={**recipe.data, "arrived": arrived}, constants=constants)


def called(module: Any) -> str:
    """Return what an op is called in a sentence."""
    if isinstance(module, torch.nn.Module):
        return type(module).__name__
    return str(getattr(module, "__name__", None) or type(module).__name__)


def words_of(error: BaseException) -> str:
    """Return an error's class and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
