"""Watches a candidate run and holds every operation against its own float64 execution.

`Watch` is a dispatch mode. It sees the operations of the candidate's calls and of the backward
passes through them, on whatever thread they run; what the driver itself computes it lets pass. Each
is executed as it would be and judged on the spot, so that no more than one operation's float64 form
is held at a time. Knows nothing of reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from brickline.checking.evidence import Evidence
from brickline.checking.snapshot import RandomState
from brickline.checking.stage import Stage
from brickline.checking.unseen import Unseen
from brickline.oracle.calls import Call, outputs_of, tensors_of, written
from brickline.oracle.holding import Held, hold
from brickline.oracle.widen import is_view
from brickline.verdict import Verdict

Progress = Callable[[int, "int | None", str], None]
KEPT_EVIDENCE = 8
"""Culprits whose tensors are kept for an explanation; the others keep their figures."""
COMPILED_BACKWARD = "CompiledFunctionBackward"
_IGNORED = ("profiler", "_c10d_functional", "c10d")


@dataclass(frozen=True)
class Place:
    """Where an operation is executed."""

    path: str
    position: int
    direction: str = "forward"


@dataclass
class Seen:
    """One operation that was executed, and what is said of it."""

    place: Place
    op: str
    ordinal: int
    held: Held
    evidence: Evidence | None = None


@dataclass
class Tally:
    """What was not held to anything, by kind, with the places."""

    random: Counter[str] = field(default_factory=Counter)
    opaque: Counter[str] = field(default_factory=Counter)
    """Tensors that changed without an operation, by the module that read them."""
    compiled_backward: int = 0


class Watch(TorchDispatchMode):
    """Executes and judges."""

    def __init__(self, stage: Stage, progress: Progress | None = None) -> None:
        super().__init__()
        self.stage = stage
        self.seen: list[Seen] = []
        self.tally = Tally()
        self.position = -1
        self.depth = 0
        """How many calls of the root are open."""
        self.quiet = False
        self._progress = progress
        self._nodes: dict[int, Place | None] = {}
        self._ordinals: Counter[tuple[Place, str]] = Counter()
        self._unseen = Unseen()
        self._kept: set[tuple[str, str, str]] = set()

    # The candidate's calls

    @contextmanager
    def call_of_root(self) -> Iterator[None]:
        """Count a call of the root; calls within it are part of it."""
        if self.depth == 0:
            self.position += 1
            self.stage.begin()
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1
            if self.depth == 0:
                self._unseen.forget()

    def returned(self, output: Any) -> None:
        """Look whether the root's output is what operations left there."""
        with _disable_current_modes():
            self._note_opaque(tensors_of(output), self.stage.path)

    # Operations

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        place = None if self.quiet else self._place()
        known = isinstance(func, torch._ops.OpOverload) and func.namespace not in _IGNORED
        if place is None or not known:
            return func(*args, **named)
        if is_view(func):
            return func(*args, **named)
        return self._execute(place, func, tuple(args), named)

    def _execute(
        self, place: Place, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        targets = _storages(_written_tensors(func, args, kwargs))
        inputs = tensors_of((args, kwargs))
        self._note_opaque([each for each in inputs if _key(each) not in targets], place.path)
        before = _before(args, kwargs, targets)
        result = func(*args, **kwargs)
        outputs = outputs_of(func, args, kwargs, result)
        with torch.no_grad():
            self._unseen.note(outputs)
            self._judge(place, func, Call(func, *before), outputs)
        return result

    def _judge(
        self, place: Place, func: Any, call: Call, outputs: list[torch.Tensor | None]
    ) -> None:
        held = judged(call, outputs)
        if held is None:
            return
        name = str(func)
        if held.verdict is Verdict.NONDETERMINISTIC:
            self.tally.random[name] += 1
            return
        if held.verdict is Verdict.CULPRIT:
            held = confirmed(call, held)
        self.add(place, name, held, lambda: self._evidence(place, name, call, held))

    def add(
        self, place: Place, op: str, held: Held, evidence: Callable[[], Evidence | None]
    ) -> None:
        """Note what is said of one operation, with its tensors where they are needed."""
        ordinal = self._ordinals[place, op]
        self._ordinals[place, op] += 1
        kept = None
        key = (place.path, op, place.direction)
        guilty = held.verdict in (Verdict.CULPRIT, Verdict.NONFINITE_ORIGIN)
        if guilty and key not in self._kept and len(self._kept) < KEPT_EVIDENCE:
            self._kept.add(key)
            kept = evidence()
        light = replace(held, actual=None, exact=None, bound=None)
        self.seen.append(Seen(place, op, ordinal, light, kept))
        if self._progress is not None and len(self.seen) % 32 == 0:
            self._progress(len(self.seen), None, self.stage.display(place.path))

    def _evidence(self, place: Place, op: str, call: Call, held: Held) -> Evidence | None:
        if held.actual is None or held.exact is None:
            return None
        return Evidence(
            name=self.stage.display(place.path),
            actual=held.actual.detach().clone(),
            exact=held.exact,
            bound=held.bound,
            op=op,
            inputs=[each.detach().clone() for each in call.inputs],
            module=call.func,
            args=tree_map(_cloned, call.args),
            kwargs=tree_map(_cloned, dict(call.kwargs)),
            output_index=held.output,
        )

    def _note_opaque(self, tensors: list[torch.Tensor], path: str) -> None:
        with torch.no_grad():
            found = self._unseen.changed(tensors)
        if found:
            self.tally.opaque[self.stage.display(path)] += found

    def _place(self) -> Place | None:
        """Return where the candidate is, or None where the driver itself computes."""
        node = torch._C._current_autograd_node()
        if node is not None:
            return self._place_of_node(node)
        place = Place(self.stage.path, self.position) if self.depth else None
        # A node is made right before its operation is dispatched; operations without one follow.
        self._nodes.setdefault(torch.autograd._get_sequence_nr() - 1, place)
        return place

    def _place_of_node(self, node: Any) -> Place | None:
        """Return where the operation was executed whose gradient is being computed."""
        if node.name().startswith(COMPILED_BACKWARD):
            self.tally.compiled_backward += 1
            return None
        number = node._sequence_nr()
        origin = self._nodes.get(number)
        if origin is None and number not in self._nodes and self.position >= 0:
            origin = Place("", self.position)
        return None if origin is None else replace(origin, direction="backward")


def judged(call: Call, outputs: list[torch.Tensor | None]) -> Held | None:
    """Hold a call; whatever goes wrong in doing so is said, never raised."""
    custom = call.func.namespace not in ("aten", "prims")
    dice = RandomState() if custom else None
    try:
        return hold(call, outputs)
    except Exception as error:
        words = f"{type(error).__name__}: {str(error)[:160]}"
        return Held(Verdict.UNKNOWN, reason=f"it could not be held: {words}")
    finally:
        if dice is not None:
            dice.restore()


def confirmed(call: Call, held: Held) -> Held:
    """Execute an operation again: wrong again is a culprit, else it is nondeterministic."""
    args, kwargs = tree_map(_cloned, call.args), tree_map(_cloned, dict(call.kwargs))
    try:
        result = call.func(*args, **kwargs)
    except Exception:
        return held
    outputs = outputs_of(call.func, args, kwargs, result)
    again = outputs[held.output] if held.output < len(outputs) else None
    if again is None or held.actual is None or torch.equal(again, held.actual):
        return held
    second = judged(call, outputs)
    if second is not None and second.verdict is Verdict.CULPRIT:
        return held
    return replace(
        held,
        verdict=Verdict.NONDETERMINISTIC,
        reason="wrong once; executed again on the same inputs, it was right",
    )


def _written_tensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    found: list[torch.Tensor] = []
    for where in written(func):
        if isinstance(where, int):
            found += tensors_of(args[where]) if where < len(args) else []
        else:
            found += tensors_of(kwargs.get(where))
    return found


def _key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return id(tensor)


def _storages(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    return frozenset(_key(each) for each in tensors)


def _before(
    args: tuple[Any, ...], kwargs: dict[str, Any], targets: frozenset[int]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with copies of what is about to be written."""
    if not targets:
        return args, kwargs
    copies: dict[int, torch.Tensor] = {}

    def kept(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or _key(value) not in targets:
            return value
        if id(value) not in copies:
            copies[id(value)] = _cloned(value)
        return copies[id(value)]

    made = tree_map(kept, (args, kwargs))
    return tuple(made[0]), dict(made[1])


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value
