"""The two sides of a check: how each is called, and the reference in the candidate's dtype.

Low-precision weights are made once from the reference's own and widened for float64 from there,
so that what is compared is arithmetic on the same numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from brickline.checking.endings import words_of
from brickline.checking.execution.wide_memory import WideMemory
from brickline.checking.masks import as_added
from brickline.checking.performance import parameters_by_storage
from brickline.checking.snapshot import RandomState, snapshot, tensors_in
from brickline.checking.stage import Stage
from brickline.checking.state.answer import StateAnswer
from brickline.checking.weights import WeightMap
from brickline.errors import UsageError
from brickline.oracle.widen import is_narrow


@dataclass
class Call:
    """One call of the root, as it was before it ran."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    dice: RandomState | None = None
    """The random generators before it, so that whoever makes the call draws the same numbers."""

    @classmethod
    def taken(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Copy a call that is about to run."""
        held = snapshot((tuple(args), dict(kwargs)))
        return cls(held[0], held[1], RandomState())

    def copied(self, *, device: torch.device | None = None, wide: bool = False) -> Call:
        """Return another copy, on a device and in float64 where asked for."""

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            if device is not None and tensor.device != device:
                tensor = tensor.to(device)
            return tensor.double() if wide and is_narrow(tensor) else tensor

        held = snapshot((self.args, dict(self.kwargs)), convert)
        return Call(held[0], held[1])

    def places(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the call by its place."""
        return dict(tensors_in((self.args, dict(self.kwargs))))


def device_of(root: Any) -> torch.device | None:
    """Return the device that a module's tensors lie on, None for other callables."""
    if not isinstance(root, torch.nn.Module):
        return None
    for tensor in (*root.parameters(), *root.buffers()):
        return tensor.device
    return None


def working_dtype(root: Any, call: Call | None = None) -> torch.dtype:
    """Return the floating dtype that a side works in: of its weights, else of its inputs."""
    tensors: list[torch.Tensor] = []
    if isinstance(root, torch.nn.Module):
        tensors += root.parameters()
    if call is not None:
        tensors += call.places().values()
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            return tensor.dtype
    return torch.float32


def in_dtype_of(reference: Any, candidate: Any) -> Any:
    """Return the reference with its weights rounded to the candidate's dtypes.

    The reference itself where they agree. Each tensor takes the dtype of the candidate's tensor of
    the same name, or else of the same shape and contents, or else the candidate's working dtype.
    """
    if not (isinstance(reference, torch.nn.Module) and isinstance(candidate, torch.nn.Module)):
        return reference
    work = working_dtype(candidate)
    wanted = _wanted_dtypes(reference, candidate, work)
    own = dict((*reference.named_parameters(), *reference.named_buffers()))
    if all(own[name].dtype == dtype for name, dtype in wanted.items()):
        return reference
    try:
        made = copy.deepcopy(reference)
    except Exception as error:
        raise UsageError(
            f"the reference must be rounded to the candidate's {_short(work)}, and cannot be "
            f"copied for that: {words_of(error)}; give a reference whose weights are {_short(work)}"
        ) from error
    with torch.no_grad():
        for module_path, module in made.named_modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                full = f"{module_path}.{name}" if module_path else name
                if tensor is not None and full in wanted:
                    tensor.data = tensor.data.to(wanted[full])
    return made


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _wanted_dtypes(
    reference: torch.nn.Module, candidate: torch.nn.Module, work: torch.dtype
) -> dict[str, torch.dtype]:
    theirs = dict((*candidate.named_parameters(), *candidate.named_buffers()))
    ours = dict((*reference.named_parameters(), *reference.named_buffers()))
    buffers = {name for name, _ in reference.named_buffers()}
    # What the candidate keeps in another dtype, such as a router, it keeps so under any name.
    apart = [each for each in theirs.values() if each.dtype not in (work, torch.float64)]
    wanted: dict[str, torch.dtype] = {}
    for name, tensor in ours.items():
        if not tensor.dtype.is_floating_point:
            continue
        partner = theirs.get(name)
        if partner is not None and partner.shape == tensor.shape:
            if partner.dtype.is_floating_point:
                wanted[name] = partner.dtype
        else:
            like = _like(tensor, candidate.buffers()) if name in buffers else None
            like = _like(tensor, apart) if like is None else like
            wanted[name] = work if like is None else like.dtype
    return wanted


def _like(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return one of the candidate's tensors with the same shape and nearly the same contents."""
    for other in others:
        if other.shape == tensor.shape and other.dtype.is_floating_point:
            left, right = tensor.detach().double().cpu(), other.detach().double().cpu()
            if torch.allclose(left, right, rtol=1e-2, atol=1e-6):
                return other
    return None


class Side:
    """A stage that can be called again and again."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.stage = Stage(root)
        self.device = device_of(root)
        self.parameters = parameters_by_storage(root)
        self.weights: WeightMap | None = None
        """Whose weights these are on the other side, once that was asked."""
        self.given: Any = None
        """The same before its weights were rounded, where they were."""
        self.state: StateAnswer | None = None
        """How its weights compare with the other side's, once that was asked."""
        self.entry: Callable[[Any], Any] | None = None
        """What runs the root, where it is not called itself."""
        self.left = WideMemory()
        """What its calls left behind, in float64."""
        self.lost: str | None = None
        """Why that is not known any more."""
        self.adds_masks = False
        """Whether boolean masks were made for the other side, and this one adds its own."""
        self.masks_added = 0

    def run(self, call: Call) -> Any:
        """Call the root."""
        if self.entry is not None:
            return self.entry(self.root)
        kwargs = call.kwargs
        if self.adds_masks:
            added = as_added(kwargs, working_dtype(self.root))
            self.masks_added += added is not None
            kwargs = kwargs if added is None else added
        return self.root(*call.args, **kwargs)
