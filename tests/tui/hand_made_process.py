"""A process made by hand, with its time and its machine, and what a screen shows as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hand_made import HandMadePart
from textual.app import App

from brickline.top.machine import GpuLoad, MachineLoad


class HandMadeProcess:
    """Has the attributes of `WatchedProcess`; `tick` lets a second pass."""

    def __init__(self, layers: int = 4, names: tuple[str, ...] = ()) -> None:
        self.pid = 4711
        self.ended = False
        self.seconds = 100.0
        self.steps = 50
        self._layers, self._names = layers, names

    def tick(self, seconds: float = 1.0, steps: int = 50) -> None:
        self.seconds += seconds
        self.steps += steps

    def clock(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> bool:
        return self.ended

    @property
    def paths(self) -> list[Path]:
        return []

    def close(self) -> None:
        pass

    def statistics(self) -> list[Any]:
        part = HandMadePart(process=self.pid)
        part.path = Path("/hand/made")  # type: ignore[attr-defined]
        part.step("decode", [1_000_000 + 1000 * (at % 7) for at in range(self.steps)])
        bricks = {"RmsNorm": 20_000, "QkvProjection": 90_000, "Activation": 9000}
        for layer in range(self._layers):
            for name, base in bricks.items():
                spans = [base + 1000 * layer + 10 * (at % 50) for at in range(self.steps)]
                part.brick(name, spans, layer=layer, phase="decode")
        spans = [300_000 if at % 40 else 9_000_000 for at in range(self.steps)]
        part.brick("LmHead", spans, phase="decode", flops=1e9)
        for name in self._names:
            part.brick(name, [5000] * self.steps)
        part.tile("QkvProjection", 0, [40_000] * 10, flops=1e6)
        return [part]


class HandMadeMachine:
    """A machine that is always as busy."""

    def __init__(self, load: MachineLoad | None = None) -> None:
        self.load = load or MachineLoad(
            cpu=1.5,
            cores=16,
            threads=34,
            resident_bytes=3 << 30,
            memory_bytes=64 << 30,
            machine_cpu=0.25,
            gpus=(
                GpuLoad(0, "NVIDIA H200", 0.87, 34 << 30, 140 << 30, 30 << 30, 412.0, 51.0),
                GpuLoad(1, "NVIDIA H200"),
            ),
        )

    def look(self) -> MachineLoad:
        return self.load

    def close(self) -> None:
        pass


def screen_text(app: App[Any]) -> str:
    """What the terminal shows, line by line."""
    strips = app.screen._compositor.render_strips(app.size)
    return "\n".join(strip.text.rstrip() for strip in strips) + "\n"
