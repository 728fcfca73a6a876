"""Which module of the reference stands for which of the candidate's, when gradients are asked for.

The one of the same path with the same parameters; else the one that holds the same weights. Whether
it does the same work is not known here: its forward has to show it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property

import torch

from brickline.checking.backward_visits import Visit
from brickline.checking.backward_vjp import Partner
from brickline.checking.sides import Side
from brickline.checking.weights import WeightMap, match_weights, named_tensors


class Partners:
    """Finds the reference's counterparts."""

    def __init__(self, candidate: Side, reference: Side) -> None:
        self._candidate, self._reference = candidate, reference

    def of(self, visit: Visit, names: Iterable[str]) -> tuple[Partner, str] | None:
        """Return what stands for a call's module, and its path, with the parameters named."""
        path = self._paths.get(visit.path)
        if path is None:
            return None
        module = self._reference.stage.modules[path] if path else self._reference.root
        parameters: dict[str, str] = {}
        transposed: set[str] = set()
        if isinstance(module, torch.nn.Module) and isinstance(visit.module, torch.nn.Module):
            ours = dict(visit.module.named_parameters(remove_duplicate=False))
            theirs = dict(module.named_parameters(remove_duplicate=False))
            for name in names:
                other = self._name(visit.path, path, name)
                if other not in theirs:
                    continue
                turned = _is_turned(ours[name], theirs[other])
                if turned:
                    transposed.add(name)
                if turned or theirs[other].shape == ours[name].shape:
                    parameters[name] = other
        return Partner(module, parameters, self._modules, frozenset(transposed)), path

    def _name(self, ours: str, theirs: str, name: str) -> str:
        """Return a parameter's name in the reference's module."""
        full = f"{ours}.{name}" if ours else name
        other = self._weights.get(full)
        prefix = f"{theirs}." if theirs else ""
        if other is None or not other.startswith(prefix):
            return name
        return other.removeprefix(prefix)

    @cached_property
    def _modules(self) -> Mapping[str, torch.nn.Module]:
        modules = self._reference.stage.modules
        return {ours: modules[path] for ours, path in self._paths.items() if path}

    @cached_property
    def _paths(self) -> dict[str, str]:
        """Return the reference's paths by the candidate's."""
        ours, theirs = self._candidate.stage.modules, self._reference.stage.modules
        found = {"": ""}
        left = []
        for path, module in ours.items():
            if path in theirs and _shapes(module) == _shapes(theirs[path]):
                found[path] = path
            elif path:
                left.append(path)
        taken = set(found.values())
        for path in left:
            named = self._inside(path)
            other = self._holders.get(frozenset(named)) if named else None
            if other is not None and other not in taken:
                found[path] = other
        return found

    @cached_property
    def _holders(self) -> dict[frozenset[str], str]:
        """Return the innermost module of the reference that holds exactly some weights."""
        groups: defaultdict[str, set[str]] = defaultdict(set)
        for name in named_tensors(self._reference.root):
            path = name
            while path:
                path = path.rpartition(".")[0]
                groups[path].add(name)
        ordered = sorted(groups, key=lambda each: each.count("."))
        return {frozenset(groups[path]): path for path in ordered if path}

    def _inside(self, path: str) -> set[str]:
        """Return the reference's names of all weights in a module, none if one is not known."""
        names = {each for each in self._ours if each.startswith(f"{path}.")}
        found: set[str] = set()
        for name in names:
            parts = self._parts.get(name)
            if parts is None:
                return set()
            found |= parts
        # A weight that is several of the candidate's counts if all of them are here.
        joined = {each.reference for part in found for each in self._map.inverse.get(part, ())}
        return found if joined <= names else set()

    @cached_property
    def _parts(self) -> dict[str, set[str]]:
        """Return the reference's weights that each of the candidate's is made of or part of."""
        made = {name: {other} for name, other in self._weights.items()}
        for name, rows in self._map.rows.items():
            made[name] = {each.reference for each in rows}
        for name, rows in self._map.inverse.items():
            for each in rows:
                made.setdefault(each.reference, set()).add(name)
        return made

    @cached_property
    def _ours(self) -> dict[str, torch.Tensor]:
        return named_tensors(self._candidate.root)

    @cached_property
    def _weights(self) -> dict[str, str]:
        """Return the reference's names of weights by the candidate's, where they are the same."""
        return self._map.whole

    @cached_property
    def _map(self) -> WeightMap:
        theirs = named_tensors(self._reference.root)
        if self._ours.keys() == theirs.keys():
            return WeightMap({}, {}, {})
        return match_weights(self._ours, theirs)


def _is_turned(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Whether a matrix lies the other way round in the reference."""
    if ours.ndim != 2 or ours.shape != theirs.shape[::-1]:
        return False
    mine, right = ours.detach().double(), theirs.detach().double().to(ours.device)
    return torch.equal(mine, right.t()) and not (
        mine.shape == right.shape and torch.equal(mine, right)
    )


def _shapes(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: each.shape for name, each in module.named_parameters()}
