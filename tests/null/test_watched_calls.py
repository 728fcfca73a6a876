"""Watched calls of the native core: what is seen, and that a function stays what it is."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from brickline import BrickProfiler, _core
from brickline.errors import UsageError

SEES_DIRECT_CALLS = sys.version_info >= (3, 12)
"""Before, the interpreter enters a Python function that is called directly without asking it."""


class Layer:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    def forward(self, x: int, *, add: int = 0) -> int:
        if x < 0:
            raise ValueError("negative")
        return self.scale * x + add

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        return self.forward(*args, **kwargs)


class Watcher:
    """Watches layers and writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.answer: Any = "call"

    def before(self, token: Any, args: Any, kwargs: Any, compiled: bool) -> Any:
        self.heard.append((token, args, kwargs))
        return self.answer

    def after(self, call: Any, result: Any, failed: bool) -> None:
        self.heard.append((call, result, failed))

    def watch(self, key: Any, function: Any = Layer.forward, **given: Any) -> None:
        brick, opaque = given.get("brick"), given.get("opaque", False)
        _core.watch_call(key, function, brick, self.before, self.after, "token", opaque, None)


@pytest.fixture
def layer() -> Iterator[Layer]:
    made = Layer(2)
    yield made
    _core.unwatch_call(made)


def test_a_call_is_heard_before_and_after(layer: Layer) -> None:
    watcher = Watcher()
    watcher.watch(layer)
    assert layer(3, add=1) == 7
    assert watcher.heard == [("token", (3,), {"add": 1}), ("call", 7, False)]


def test_other_objects_are_not_heard(layer: Layer) -> None:
    watcher = Watcher()
    watcher.watch(layer)
    assert Layer(5)(3) == 15
    assert watcher.heard == []


def test_an_exception_passes(layer: Layer) -> None:
    watcher = Watcher()
    watcher.watch(layer)
    with pytest.raises(ValueError, match="negative"):
        layer(-1)
    assert watcher.heard[-1] == ("call", None, True)


def test_an_observer_that_raises_stops_the_call(layer: Layer) -> None:
    def fail(*given: Any) -> None:
        raise RuntimeError("observer")

    _core.watch_call(layer, Layer.forward, None, fail, None, None, False, None)
    with pytest.raises(RuntimeError, match="observer"):
        layer(1)
    _core.unwatch_call(layer)
    _core.watch_call(layer, Layer.forward, None, lambda *given: 1, fail, None, False, None)
    with pytest.raises(RuntimeError, match="observer"):
        layer(1)
    with pytest.raises(ValueError, match="negative"):
        layer(-1)


def test_the_function_stays_what_it_is(layer: Layer) -> None:
    before, signature = Layer.forward, inspect.signature(Layer.forward)
    Watcher().watch(layer)
    assert Layer.forward is before
    assert inspect.signature(Layer.forward) == signature
    assert vars(layer) == {"scale": 2}
    assert _core.is_watched(layer)
    assert _core.unwatch_call(layer)
    assert not _core.is_watched(layer)
    assert not _core.unwatch_call(layer)


def test_nothing_is_heard_afterwards(layer: Layer) -> None:
    watcher = Watcher()
    watcher.watch(layer)
    _core.unwatch_call(layer)
    assert layer(3) == 6
    assert watcher.heard == []


@pytest.mark.skipif(not SEES_DIRECT_CALLS, reason="needs Python 3.12")
def test_calls_that_the_interpreter_has_specialised(layer: Layer) -> None:
    def hot(times: int) -> int:
        return sum(layer.forward(1) for _ in range(times))

    hot(1000)
    watcher = Watcher()
    watcher.watch(layer)
    assert hot(100) == 200
    assert len(watcher.heard) == 200
    _core.unwatch_call(layer)
    assert hot(1000) == 2000
    assert len(watcher.heard) == 200


def test_false_lets_it_and_what_is_inside_pass(layer: Layer) -> None:
    inner = Layer(3)

    class Outer(Layer):
        def forward(self, x: int, *, add: int = 0) -> int:
            return inner(x)

    outer = Outer(1)
    watcher = Watcher()
    watcher.watch(outer, Outer.forward)
    watcher.watch(inner)
    try:
        assert outer(1) == 3
        assert len(watcher.heard) == 4
        watcher.answer = False
        aside = _core.watch_counts()[0]
        assert outer(1) == 3
        assert len(watcher.heard) == 5
        assert _core.watch_counts()[0] == aside + 1
        _core.unwatch_call(outer)
        watcher.answer = "call"
        watcher.watch(outer, Outer.forward, opaque=True)
        assert outer(1) == 3
        assert len(watcher.heard) == 7
    finally:
        _core.unwatch_call(outer)
        _core.unwatch_call(inner)


def test_super_calls_are_part_of_the_call(layer: Layer) -> None:
    class Derived(Layer):
        def forward(self, x: int, *, add: int = 0) -> int:
            return super().forward(x, add=add) + 1

    derived = Derived(2)
    watcher = Watcher()
    watcher.watch(derived, Derived.forward)
    watcher.watch(layer)
    try:
        assert derived(3) == 7
        assert len(watcher.heard) == 2
    finally:
        _core.unwatch_call(derived)


def test_a_function_without_self_is_its_own_key() -> None:
    def function(x: int) -> int:
        return x + 1

    watcher = Watcher()
    watcher.watch(function, function)
    assert function(*(1,)) == 2
    _core.unwatch_call(function)
    assert watcher.heard == [("token", (1,), None), ("call", 2, False)]


def test_bricks_are_timed(layer: Layer) -> None:
    profiler = BrickProfiler("watched", enabled=True)
    _core.watch_call(layer, Layer.forward, profiler.brick("Up"), None, None, None, False, None)
    layer(1)
    with pytest.raises(ValueError, match="negative"):
        layer(-1)
    assert profiler.brick_stats("Up").count == 2
    profiler.close()


def test_first_callers_are_told_of() -> None:
    found: list[Any] = []
    layers = [Layer(1), Layer(2)]
    _core.gate_calls(Layer.__dict__["__call__"], found.append)
    try:
        with pytest.raises(UsageError, match="sought already"):
            _core.gate_calls(Layer.__dict__["__call__"], found.append)
        layers[0](1)
        Watcher().watch(layers[1])
        layers[1](1)
    finally:
        assert _core.ungate_calls()
        _core.unwatch_call(layers[1])
    layers[0](1)
    assert found == [layers[0]]
    assert not _core.ungate_calls()


def test_what_cannot_be_watched_is_refused(layer: Layer) -> None:
    watcher = Watcher()
    with pytest.raises(UsageError, match="expected a Python function to watch, got builtin"):
        watcher.watch(layer, len)
    with pytest.raises(UsageError, match="expected a brick or None"):
        watcher.watch(layer, brick=3)
    watcher.watch(layer)
    with pytest.raises(UsageError, match="Layer is watched already"):
        watcher.watch(layer)


def test_unwatching_during_a_call(layer: Layer) -> None:
    watcher = Watcher()

    def before(token: Any, args: Any, kwargs: Any, compiled: bool) -> Any:
        _core.unwatch_call(layer)
        return "call"

    _core.watch_call(layer, Layer.forward, None, before, watcher.after, object(), False, None)
    assert layer(1) == 2
    assert watcher.heard == [("call", 2, False)]


def test_threads(layer: Layer) -> None:
    watcher = Watcher()
    watcher.watch(layer)

    def work() -> None:
        for number in range(200):
            assert layer(number) == 2 * number

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(watcher.heard) == 1600
