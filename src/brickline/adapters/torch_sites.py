"""Sites: the modules of a model that are recorded, and what each is called.

Owns names, layers, bricks, and which Python function is a module's `forward`. It watches nothing
and records nothing.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from brickline import _core, abi
from brickline.adapters.recording import RecordOptions
from brickline.bricks import BrickId
from brickline.errors import UsageError

PARAMETER_INDEX = 1000
"""Operands from this index on are the module's own parameters and buffers."""
UNSEEN_INDEX = PARAMETER_INDEX - 1
"""An operand with this index stands for the tensors of a call that could not be looked at."""
MOST_SETTINGS = 16


@dataclass(eq=False)
class Site:
    """One module of a recorded model."""

    name: str
    """Its dotted path; the class of the model for the model itself."""
    module: nn.Module
    layer: int
    brick: BrickId | str
    is_root: bool = False
    is_compiled: bool = False
    """It runs as compiled code: nothing inside it is looked at."""
    recorded: bool = True
    named: bool = False
    """`include` names it."""
    mutates: bool = False
    """It says that it writes to its input."""
    params: str = ""
    """JSON text of its traces."""
    slot: int = abi.NO_SLOT
    name_id: int = 0
    """Ids of its name and params in the spool."""
    params_id: int = 0
    backend: str = "CPU"
    """Where it ran last."""
    tensors: tuple[dict[str, Any], ...] = ()
    """The dictionaries of its own parameters and of its buffers."""
    root: Any = None
    gradients: Any = None
    """The call whose gradients arrive at this moment."""
    hooked: set[int] = field(default_factory=set)


# ---------------------------------------------------------------------------------------- the model


def check_model(model: Any) -> None:
    """Refuse what is not a module.

    Raises:
        UsageError: with what was given.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model: expected a torch.nn.Module, got {type(model).__name__}; to record kernels or "
            "functions of your own, use BrickProfiler.trace"
        )


def refuse_watched(model: nn.Module) -> None:
    """Refuse a model that some recording has under watch, in whole or in part.

    Raises:
        UsageError: with the module's path.
    """
    for path, module, _ in walk(model):
        if any(_core.is_watched(key) for key, _ in _forwards_of(module)):
            raise UsageError(
                f"{path or name_of(model)} is being recorded already; leave that recording first, "
                "or record a copy of the model"
            )


def name_of(model: nn.Module) -> str:
    """Return the class of a model, of the original for a compiled one."""
    if isinstance(model, torch.jit.ScriptModule):
        return str(getattr(model, "original_name", "") or type(model).__name__)
    return type(getattr(model, "_orig_mod", model)).__name__


def device_of(model: nn.Module) -> str:
    """Return whose clock times the model: ``"CUDA:n"`` where its weights lie there."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cuda":
            return f"CUDA:{tensor.device.index or 0}"
    return "CPU"


def is_compiled(module: nn.Module) -> bool:
    """Whether what a call of the module runs was made by torch.compile or TorchScript."""
    if isinstance(module, torch.jit.ScriptModule) or isinstance(
        module.__dict__.get("_orig_mod"), nn.Module
    ):
        return True
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
    """Yield path, module and whether it is compiled; nothing inside a compiled one, none twice."""
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        compiled = is_compiled(module)
        yield path, module, compiled
        if not compiled:
            inside = [
                (f"{path}.{name}" if path else name, child)
                for name, child in module._modules.items()
                if child is not None
            ]
            waiting += reversed(inside)


# ------------------------------------------------------------------------------------------ forward


def forward_of(module: nn.Module) -> tuple[Any, FunctionType] | None:
    """Return what a call of the module runs: the key its calls are found by, and the function.

    A TorchScript module's `forward` is native: there it is the function of torch that leads to it,
    which all modules share. None where it is no Python function, or the module has none.
    """
    return next(_forwards_of(module), None)


def _forwards_of(module: nn.Module) -> Iterator[tuple[Any, FunctionType]]:
    if isinstance(module, torch.jit.ScriptModule):
        yield module, nn.Module.__dict__["_call_impl"]
        return
    compiled = module.__dict__.get("_compiled_call_impl")
    own = module.__dict__.get("forward")
    for each in (compiled, own):
        if isinstance(each, FunctionType):
            yield each, each
            return
        if isinstance(each, MethodType) and each.__self__ is module:
            each = each.__func__
        elif isinstance(each, functools.partial) and each.args[:1] == (module,):
            each = each.func
        elif each is not None:
            return
        if isinstance(each, FunctionType):
            yield module, each
            return
    found = inspect.getattr_static(type(module), "forward", None)
    if isinstance(found, FunctionType) and found is not nn.Module.__dict__["forward"]:
        yield module, found


def has_forward(module: nn.Module) -> bool:
    """Whether the module can be called; containers such as ModuleList cannot."""
    default = nn.Module.__dict__["forward"]
    return inspect.getattr_static(module, "forward", default) is not default


# -------------------------------------------------------------------------------------------- sites


def sites_of(model: nn.Module, options: RecordOptions, prefix: str = "") -> list[Site]:
    """Return the sites of a model, the model itself first.

    Args:
        model: The model.
        options: Which of its modules are recorded, and as which bricks.
        prefix: Stands before every path but the model's own, where several models share a run.
    """
    sites = []
    lists = {id(module) for _, module, _ in walk(model) if isinstance(module, nn.ModuleList)}
    for path, module, compiled in walk(model):
        is_root = not path
        named = _matches(options.include, path, module)
        recorded = (named or not options.include) and not _matches(options.exclude, path, module)
        if not (recorded or is_root) or not (has_forward(module) or compiled):
            continue
        name = prefix or name_of(model) if is_root else f"{prefix}.{path}" if prefix else path
        brick = brick_of(path, module, options.bricks)
        sites.append(
            Site(
                name=name,
                module=module,
                layer=layer_of(path, model, lists),
                brick=brick,
                is_root=is_root,
                is_compiled=compiled,
                recorded=recorded,
                named=named,
                mutates=bool(inspect.getattr_static(module, "inplace", False)),
                params=_params(module, compiled),
                tensors=tuple(_tensors(module, compiled)),
            )
        )
    return sites


def _matches(globs: tuple[str, ...], path: str, module: nn.Module) -> bool:
    name = path or name_of(module)
    return any(fnmatchcase(name, glob) for glob in globs)


def _tensors(module: nn.Module, compiled: bool) -> Iterator[dict[str, Any]]:
    if compiled:  # a snapshot by name: what is inside has no traces of its own
        inner = getattr(module, "_orig_mod", module)
        yield dict(inner.named_parameters())
        yield dict(inner.named_buffers())
    else:
        yield module._parameters
        yield module._buffers


def _params(module: nn.Module, compiled: bool) -> str:
    original = getattr(module, "_orig_mod", module)
    names = [
        name
        for tensors in _tensors(module, compiled)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    document: dict[str, Any] = {"level": "module", "type": name_of(original)}
    if compiled:
        document["compiled"] = True
    if names:
        document["parameters"] = names
    settings = _settings(original)
    if settings:
        document["settings"] = settings
    return json.dumps(document, default=str)


def _settings(module: nn.Module) -> dict[str, Any]:
    """Return the plain public attributes of a module, such as eps."""
    found = {
        name: value
        for name, value in module.__dict__.items()
        if not name.startswith("_")
        and name != "training"
        and isinstance(value, bool | int | float | str)
        and len(str(value)) < 64
        and not (isinstance(value, float) and value - value != 0)
    }
    return dict(list(found.items())[:MOST_SETTINGS])


# -------------------------------------------------------------------------------- layers and bricks

_LAYER = re.compile(
    r"(?:^|\.)(?:layers?|h|blocks?|resblocks|encoders?|decoders?|stages?)\.(\d+)(?:\.|$)"
)
_NUMBERED = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


def layer_of(path: str, model: nn.Module, lists: set[int] | None = None) -> int:
    """Return the layer that a path says: ``layers.3.mlp`` is in layer 3; -1 where it says none.

    A number counts under a name that is usual for layers, or in a ModuleList that is not one of
    experts.
    """
    for parent, number in layers_said(path):
        if parent is None:
            return number
        holder = model.get_submodule(parent)
        if isinstance(holder, nn.ModuleList) and (lists is None or id(holder) in lists):
            return number
    return -1


def layers_said(path: str) -> Iterator[tuple[str | None, int]]:
    """Yield the numbers of a path that may be its layer, the likeliest first, with their holder.

    The holder is None under a name that is usual for layers, where nothing is left to look at.
    """
    found = _LAYER.search(path)
    if found:
        yield None, int(found[1])
    for number in _NUMBERED.finditer(path):
        parent = path[: number.start()]
        if parent.rpartition(".")[2] not in ("experts", "heads"):
            yield parent, int(number[1])


_B = BrickId
_BY_CLASS: tuple[tuple[str, BrickId], ...] = (
    ("*RMSNorm*", _B.RMS_NORM),
    ("*RmsNorm*", _B.RMS_NORM),
    ("*LayerNorm*", _B.LAYER_NORM),
    ("GroupNorm", _B.LAYER_NORM),
    ("BatchNorm*", _B.LAYER_NORM),
    ("InstanceNorm*", _B.LAYER_NORM),
    ("*Rotary*", _B.ROPE_EMBEDDING),
    ("*RoPE*", _B.ROPE_EMBEDDING),
    ("*Embedding*", _B.EMBEDDING),
    ("*Router*", _B.MOE_ROUTER),
    ("*Softmax*", _B.ATTENTION_SOFTMAX),
    ("*Attention*", _B.ATTENTION_SCORE),
    ("*SiLU*", _B.ACTIVATION),
    ("*GELU*", _B.ACTIVATION),
    ("*ReLU*", _B.ACTIVATION),
    ("*Activation*", _B.ACTIVATION),
    ("Sigmoid", _B.ACTIVATION),
    ("Tanh", _B.ACTIVATION),
    ("Mish", _B.ACTIVATION),
    ("Hardswish", _B.ACTIVATION),
)
_PROJECTIONS: tuple[tuple[BrickId, str], ...] = (
    (_B.DOWN_PROJECTION, r"(.*\.)?(mlp|ffn|feed_forward)\.(.*\.)?(c_proj|wo|dense|proj)"),
    (_B.QKV_PROJECTION, r"(.*\.)?(q|k|v|qkv|wq|wk|wv|wqkv|query|key|value|[qkv]_lin|in_proj)"),
    (_B.QKV_PROJECTION, r"(.*\.)?([qkv]_proj|qkv_proj|kv_proj|kv_[ab]_proj\w*|q_[ab]_proj)"),
    (_B.QKV_PROJECTION, r"(.*\.)?(c_attn|query_key_value|W_pack|to_[qkv]|to_qkv)"),
    (_B.OUTPUT_PROJECTION, r"(.*\.)?(o|o_proj|out_proj|wo|out_lin)"),
    (_B.OUTPUT_PROJECTION, r"(.*\.)?\w*att\w*\.(.*\.)?(c_proj|dense|proj|out|to_out\.0)"),
    (_B.GATE_PROJECTION, r"(.*\.)?(gate_proj|w1)"),
    (_B.UP_PROJECTION, r"(.*\.)?(up_proj|gate_up_proj|w3|fc1|c_fc|wi|wi_\d|lin1|linear1|up)"),
    (_B.UP_PROJECTION, r"(.*\.)?(dense_h_to_4h|fc_in)"),
    (_B.DOWN_PROJECTION, r"(.*\.)?(down_proj|w2|fc2|lin2|dense_4h_to_h|linear2|down|fc_out)"),
    (_B.LM_HEAD, r"(.*\.)?(lm_head|embed_out|output_head|head|unembed|logits)"),
    (_B.MOE_ROUTER, r"(.*\.)?(router|\w*moe\w*\.gate|mlp\.gate)"),
)
_LINEAR = ("*Linear*", "Conv1D")


def brick_of(
    path: str, module: nn.Module, chosen: Mapping[str | type, BrickId | str]
) -> BrickId | str:
    """Return the brick that a module is: as chosen, by its name and class, else its class."""
    for key, brick in chosen.items():
        if isinstance(key, str) and fnmatchcase(path or name_of(module), key):
            return brick
    for key, brick in chosen.items():
        if isinstance(key, type) and isinstance(module, key):
            return brick
    kind = name_of(module)
    if any(fnmatchcase(kind, each) for each in _LINEAR):
        for known, pattern in _PROJECTIONS:
            if re.fullmatch(pattern, path):
                return known
        return kind
    for glob, known in _BY_CLASS:
        if fnmatchcase(kind, glob):
            return known
    if re.search(r"(^|\.)experts\.\d+$", path):
        return BrickId.MOE_EXPERT
    return kind
