"""Every error of the public face is a BricklineError, whatever a stranger hands in.

A table of calls that are right, and of values that are wrong almost everywhere. Each argument of
each call is replaced by each value: the call works, or it says what is wrong in brickline's own
words. `TypeError` for arguments that a signature does not have is Python's, and so is what a value
raises itself when it is asked what number it is, as arrays of several numbers do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import brickline as bl
from brickline import BricklineError, BrickProfiler, KernelTrace
from brickline.graph import EdgeKind, ExecutionGraph, TransferDirection


class Hostile:
    """An object that has nothing anybody could want."""

    def __repr__(self) -> str:
        return "<hostile>"


WRONG: Mapping[str, Any] = {
    "None": None,
    "text": "abc",
    "empty text": "",
    "NUL": "a\0b",
    "surrogate": "\ud800",
    "minus one": -1,
    "2**40": 2**40,
    "2**64": 2**64,
    "huge": 10**400,
    "half": 0.5,
    "nan": float("nan"),
    "infinity": float("inf"),
    "object": Hostile(),
    "class": Hostile,
    "bytes": b"\xff\x00",
    "list": ["abc"],
    "nested": [[None]],
    "tuple": (1, "a", None),
    "dict": {"a": object()},
    "set": {1},
    "complex": 1j,
    "True": True,
}


@dataclass(frozen=True)
class Call:
    """One right call: what makes the callable, and its arguments by name; `*` are positional."""

    make: Callable[[], Callable[..., Any]]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    positional: tuple[Any, ...] = ()


def profiler() -> BrickProfiler:
    made = BrickProfiler("fuzz", enabled=True, device="NULL")
    made.record_checksum("k", 0, 0, [1.0])
    return made


def graph() -> ExecutionGraph:
    made = ExecutionGraph()
    made.add_layer(0)
    made.add_layer(1)
    return made


def trace() -> KernelTrace:
    return KernelTrace.new("k", 0, 0, "CPU")


def kernel(**changes: Any) -> bl.Kernel:
    declared = {
        "name": "k",
        "source": "BRICKLINE_KERNEL(k)(block& b) {}",
        "signature": [bl.Param("x", "f32", (4,), "read-write")],
    }
    return bl.Kernel(**declared | changes)


def plan() -> bl.Plan:
    return bl.Plan("fuzz")


def launched() -> bl.Plan:
    made = plan()
    made.launch(kernel(), x=made.buffer("x", (4,), "f32"))
    return made


def on(make: Callable[[], Any], name: str) -> Callable[[], Callable[..., Any]]:
    return lambda: getattr(make(), name)  # type: ignore[no-any-return]


def entered(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that also enters what it returns, and leaves it."""

    def call(*arguments: Any, **named: Any) -> None:
        with make(*arguments, **named):
            pass

    return call


CALLS: Mapping[str, Call] = {
    "BrickProfiler": Call(
        lambda: lambda **options: BrickProfiler(**{"enabled": True, **options}).close(),
        {
            "name": "p",
            "device": "NULL",
            "stream": None,
            "sync_mode": "deferred",
            "sampling": None,
            "path": None,
            "timeline_steps": 0,
            "overwrite": False,
            "graph": False,
        },
    ),
    "brick": Call(
        on(profiler, "brick"), {"layer": 0, "elements": 1, "bytes": 0, "flops": 0}, ("n",)
    ),
    "brick, entered": Call(
        lambda: entered(profiler().brick), {"layer": 0, "elements": 1, "bytes": 0}, ("n",)
    ),
    "mark": Call(on(profiler, "mark"), {"layer": 0}, ("n",)),
    "step": Call(lambda: entered(profiler().step), {"tokens": 1, "phase": "decode"}),
    "start": Call(on(profiler, "start"), {"layer": 0}, ("n",)),
    "start_brick": Call(on(profiler, "start_brick"), {"layer": 0}, (bl.BrickId.RMS_NORM,)),
    "stop": Call(on(profiler, "stop"), {"elements": 1}, (None,)),
    "stop_brick": Call(on(profiler, "stop_brick"), {"elements": 1}, (None,)),
    "advance": Call(on(profiler, "advance"), {"duration_ns": 1}),
    "add_trace": Call(on(profiler, "add_trace"), {"trace": trace()}),
    "brick_stats": Call(on(profiler, "brick_stats"), {"brick": "n"}),
    "stats": Call(on(profiler, "stats"), {"name": "n"}),
    "profiler.compare": Call(on(profiler, "compare"), {"reference": [trace()]}),
    "compare_and_mark": Call(on(profiler, "compare_and_mark"), {"reference": [trace()]}),
    "find_divergence": Call(
        on(profiler, "find_divergence"), {"reference": [bl.KernelChecksum("k", 0, 0, 1)]}
    ),
    "finalize": Call(on(profiler, "finalize"), {"end_ns": 1}),
    "record_checksum": Call(
        on(profiler, "record_checksum"),
        {"name": "k", "layer_idx": 0, "position": 0, "data": [1.0]},
    ),
    "record_deferred": Call(
        on(profiler, "record_deferred"),
        {"brick": bl.BrickId.RMS_NORM, "start_ns": 0, "elements": 1},
    ),
    "record_deferred_dynamic": Call(
        on(profiler, "record_deferred_dynamic"), {"name": "n", "start_ns": 0, "elements": 1}
    ),
    "record_elapsed": Call(
        on(profiler, "record_elapsed"),
        {"brick": "n", "elapsed": timedelta(microseconds=1), "elements": 1, "flops": 1},
    ),
    "reset_brick": Call(on(profiler, "reset_brick"), {"brick": "n"}),
    "set_l2_cache_hit_rate": Call(on(profiler, "set_l2_cache_hit_rate"), {"rate": 0.5}),
    "set_sampling": Call(on(profiler, "set_sampling"), {"sampling": bl.Sampling(2)}),
    "set_sync_mode": Call(on(profiler, "set_sync_mode"), {"mode": "deferred"}),
    "set_zero_copy": Call(on(profiler, "set_zero_copy"), {"enabled": True}),
    "profiler.save": Call(on(profiler, "save"), {"path": "fuzzed.brick", "overwrite": True}),
    "profiler.trace": Call(
        on(profiler, "trace"),
        {
            "name": "k",
            "layer": 0,
            "position": 0,
            "inputs": (),
            "outputs": (),
            "params": "",
            "time_us": 1.0,
            "backend": "CPU",
        },
    ),
    "traces_for_kernel": Call(on(profiler, "traces_for_kernel"), {"kernel_name": "k"}),
    "traces_for_layer": Call(on(profiler, "traces_for_layer"), {"layer_idx": 0}),
    "replay": Call(lambda: entered(profiler().replay), {"graph": 0}),
    "profile.brick": Call(lambda: profiler().profile().brick, {"brick": "n"}),
    "profile.validate": Call(lambda: profiler().profile().validate, {"repeats": None}),
    "profile.of_tile_levels": Call(lambda: profiler().profile().of_tile_levels, {"levels": [0]}),
    "Profile.from_run": Call(lambda: bl.Profile.from_run, {"run": None}),
    "tiles.stats": Call(lambda: profiler().tiles.stats, {}, (bl.TileLevel.MACRO,)),
    "Sampling": Call(lambda: bl.Sampling, {"steps": 1, "layers": 1}),
    "SyncMode": Call(lambda: bl.SyncMode.parse, {}, ("deferred",)),
    "from_name": Call(lambda: bl.BrickId.from_name, {"name": "RmsNorm"}),
    "KernelTrace": Call(
        lambda: KernelTrace,
        {
            "kernel_name": "k",
            "layer_idx": 0,
            "position": 0,
            "backend": "CPU",
            "params": "",
            "time_us": 1.0,
            "input_checksum": 1,
            "output_checksum": 1,
        },
    ),
    "KernelTrace.from_dict": Call(lambda: KernelTrace.from_dict, {"document": trace().to_dict()}),
    "with_input_checksum": Call(on(trace, "with_input_checksum"), {"data": [1.0]}),
    "with_output_checksum": Call(on(trace, "with_output_checksum"), {"data": [1.0]}),
    "with_params": Call(on(trace, "with_params"), {"params": "a=1"}),
    "with_time_us": Call(on(trace, "with_time_us"), {"time_us": 1.0}),
    "ExecutionGraph": Call(lambda: ExecutionGraph, {"node_budget": 10}),
    "add_layer": Call(on(graph, "add_layer"), {"index": 1, "timing_ns": 1, "start_ns": 1}),
    "add_brick": Call(
        on(graph, "add_brick"),
        {"brick": "n", "timing_ns": 1, "elements": 1, "layer": 0, "start_ns": 0},
    ),
    "add_kernel": Call(
        on(graph, "add_kernel"),
        {
            "name": "k",
            "source_hash": 1,
            "grid": 1,
            "block": (1, 2),
            "shared_bytes": 0,
            "timing_ns": 1,
            "arithmetic_intensity": 1.0,
            "achieved_tflops": 1.0,
            "start_ns": 0,
        },
    ),
    "add_function": Call(
        on(graph, "add_function"),
        {"name": "f", "file": "f.py", "line": 1, "timing_ns": 1, "start_ns": 0},
    ),
    "add_transfer": Call(
        on(graph, "add_transfer"),
        {
            "source": "a",
            "target": "b",
            "size_bytes": 1,
            "direction": TransferDirection.HOST_TO_DEVICE,
            "timing_ns": 1,
            "start_ns": 0,
        },
    ),
    "add_async_task": Call(
        on(graph, "add_async_task"),
        {"name": "t", "poll_count": 1, "yield_count": 1, "total_poll_ns": 1, "start_ns": 0},
    ),
    "add_edge": Call(
        on(graph, "add_edge"),
        {
            "source": 0,
            "target": 1,
            "kind": EdgeKind.SEQUENCE,
            "weight": 1.0,
            "size_bytes": None,
            "direction": None,
        },
    ),
    "add_dependency": Call(on(graph, "add_dependency"), {"source": 0, "target": 1}),
    "record_brick": Call(
        on(graph, "record_brick"), {"brick": "n", "timing_ns": 1, "elements": 1, "sequence": True}
    ),
    "record_kernel_launch": Call(
        on(graph, "record_kernel_launch"), {"name": "k", "grid": 1, "block": 1, "sequence": True}
    ),
    "record_transfer": Call(
        on(graph, "record_transfer"),
        {
            "source": "a",
            "target": "b",
            "size_bytes": 1,
            "direction": TransferDirection.HOST_TO_DEVICE,
        },
    ),
    "node": Call(on(graph, "node"), {"node": 0}),
    "node_by_name": Call(on(graph, "node_by_name"), {"name": "n"}),
    "nodes_by_name": Call(on(graph, "nodes_by_name"), {"name": "n"}),
    "incoming_edges": Call(on(graph, "incoming_edges"), {"node": 0}),
    "outgoing_edges": Call(on(graph, "outgoing_edges"), {"node": 0}),
    "push_scope": Call(on(graph, "push_scope"), {"node": 0, "sequence": True}),
    "scope": Call(lambda: entered(graph().scope), {"node": 0, "sequence": True}),
    "follow": Call(on(graph, "follow"), {"profiler": None}),
    "roofline_distance": Call(
        on(graph, "roofline_distance"), {"peak_tflops": 1.0, "peak_gbps": 1.0}
    ),
    "critical_path_summary": Call(on(graph, "critical_path_summary"), {"max_rows": 1}),
    "to_tree": Call(on(graph, "to_tree"), {"max_depth": 1, "max_rows": 1}),
    "graph.to_json": Call(on(graph, "to_json"), {"indent": 1}),
    "ExecutionGraph.from_json": Call(lambda: ExecutionGraph.from_json, {"text": graph().to_json()}),
    "Fingerprint": Call(lambda: bl.Fingerprint.from_bytes, {"record": b""}),
    "fingerprint": Call(lambda: bl.fingerprint, {"tensor": np.ones(3, np.float32)}),
    "distance": Call(
        lambda: bl.distance,
        {
            "candidate": bl.fingerprint(np.ones(3, np.float32)),
            "reference": bl.fingerprint(np.ones(3, np.float32)),
        },
    ),
    "fnv1a_f32": Call(lambda: bl.fnv1a_f32, {"data": [1.0]}),
    "as_buffer": Call(lambda: bl.as_buffer, {"value": np.ones(3, np.float32)}),
    "Buffer.at_address": Call(
        lambda: bl.Buffer.at_address,
        {"address": 4096, "shape": (4,), "dtype": "f32", "kind": 1, "number": 0},
    ),
    "allocate": Call(lambda: bl.open_device("NULL").allocate, {"shape": (4,), "dtype": "f32"}),
    "allocate on the CPU": Call(
        lambda: bl.open_device("CPU").allocate, {"shape": (4,), "dtype": "f32"}
    ),
    "open_device": Call(lambda: bl.open_device, {"name": "CPU"}),
    "Param": Call(
        lambda: bl.Param,
        {
            "name": "x",
            "dtype": "f32",
            "shape": (4,),
            "access": "read",
            "touches": None,
            "accumulate": None,
            "align": None,
            "strides": None,
        },
    ),
    "Scalar": Call(lambda: bl.Scalar, {"name": "n", "dtype": "i64", "low": 0, "high": 4}),
    "Kernel": Call(
        lambda: kernel,
        {
            "name": "k",
            "source": "BRICKLINE_KERNEL(k)(block& b) {}",
            "signature": [bl.Param("x", "f32", (4,), "read-write")],
            "global_size": 1,
            "local_size": 1,
            "language": "block",
            "shared_bytes": 0,
            "flops": 1,
            "bytes": 1,
            "pure": True,
            "reference": None,
            "defines": {"A": 1},
            "entry": None,
            "host_parallel_safe": True,
        },
    ),
    "Kernel.from_json": Call(lambda: bl.Kernel.from_json, {"data": kernel().to_json()}),
    "Kernel.from_source": Call(
        lambda: bl.Kernel.from_source,
        {
            "source": "BRICKLINE_KERNEL(k)(block& b) {}",
            "name": "k",
            "signature": [bl.Param("x", "f32", (4,), "read-write")],
        },
    ),
    "kernel.sizes": Call(lambda: kernel().sizes, {"values": {}}),
    "KernelCache": Call(
        lambda: bl.KernelCache,
        {"directory": "cache", "max_bytes": 2**20, "memory_bytes": 2**20, "disk": True},
    ),
    "gc": Call(lambda: bl.KernelCache("cache").gc, {"max_bytes": 1}),
    "get_or_compile": Call(
        lambda: bl.KernelCache("cache", disk=False).get_or_compile,
        {"kernel": None, "device": "NULL"},
    ),
    "Plan": Call(lambda: bl.Plan, {"name": "p"}),
    "plan.buffer": Call(
        on(plan, "buffer"), {"name": "b", "shape": (4,), "dtype": "f32", "read_only": False}
    ),
    "plan.buffer, array": Call(
        on(plan, "buffer"), {"name": "b", "array": np.ones(3, np.float32), "read_only": True}
    ),
    "plan.variable": Call(
        on(plan, "variable"), {"name": "n", "low": 0, "high": 4, "default": 1, "dtype": "i64"}
    ),
    "plan.launch": Call(on(plan, "launch"), {"brick": None, "layer": None, "x": None}, (kernel(),)),
    "plan.protect": Call(on(plan, "protect"), {"buffer": None}),
    "plan.explain": Call(on(launched, "explain"), {"first": 0, "second": 0}),
    "plan.save": Call(on(launched, "save"), {"path": "p.json", "overwrite": True}),
    "plan.prepare": Call(on(launched, "prepare"), {"device": "NULL", "executor": "serial"}),
    "Plan.load": Call(lambda: bl.Plan.load, {"path": "none.json"}),
    "Run.open": Call(lambda: bl.Run.open, {"path": "none.brick"}),
    "DivergenceReport.load": Call(lambda: bl.DivergenceReport.load, {"path": "none.json"}),
    "DivergenceReport.from_json": Call(lambda: bl.DivergenceReport.from_json, {"text": "{}"}),
    "MegakernelReport.load": Call(lambda: bl.MegakernelReport.load, {"path": "none.json"}),
    "MegakernelReport.from_json": Call(lambda: bl.MegakernelReport.from_json, {"text": "{}"}),
    "compare": Call(lambda: bl.compare, {"candidate": "none.brick", "reference": "none.brick"}),
    "Megakernel": Call(
        lambda: lambda **options: bl.Megakernel(**{"ops": [kernel()], **options}).close(),
        {
            "device": "NULL",
            "ops": [],
            "workers": 1,
            "slots": 64,
            "memory_budget": None,
            "retry_codes": (),
            "retry_limit": 0,
            "trace": False,
            "profiler": None,
            "cache": None,
            "log": None,
            "overwrite": False,
            "name": "q",
            "delay_seed": 0,
        },
    ),
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, caches and files go to a folder that the test throws away."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("BRICKLINE_RUN", raising=False)
    monkeypatch.chdir(tmp_path)


def attempts(call: Call) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    for word, value in WRONG.items():
        for at in range(len(call.positional)):
            wrong = (*call.positional[:at], value, *call.positional[at + 1 :])
            yield f"argument {at}: {word}", wrong, {}
        for name in call.arguments:
            yield f"{name}: {word}", call.positional, {**call.arguments, name: value}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore")
def test_every_error_is_ours(name: str) -> None:
    call, foreign = CALLS[name], []
    for words, positional, named in attempts(call):
        try:
            call.make()(*positional, **named)
        except BricklineError as error:
            if not str(error):
                foreign.append(f"{words}: an error without words")
        except Exception as error:
            foreign.append(f"{words}: {type(error).__name__}: {error}")
    assert not foreign, "\n".join(foreign)
