"""The terminal interface at a process that really records."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from hand_made_process import screen_text
from textual.pilot import Pilot

from brickline.profile import profile_from_run
from brickline.runs import Run
from brickline.top.app import TopApp
from brickline.top.watched import WatchedProcess

RECORDER = """
import sys, time
import brickline as bl
profiler = bl.BrickProfiler("[red]decode[/]", enabled=True, path=sys.argv[1])
norm = profiler.brick(bl.BrickId.RMS_NORM, layer=0)
dynamic = profiler.brick("[link=x]mine[/]", layer=1)
for step in range(10**9):
    with profiler.step(tokens=2, phase="decode"):
        with norm:
            pass
        with dynamic:
            profiler.tiles.record(bl.TileLevel.MACRO, 250)
    if step == 100:
        print("ready", flush=True)
    time.sleep(0.001)
"""


async def shown(app: TopApp, pilot: Pilot[None], text: str) -> str:
    """Wait until the screen holds a text."""
    for _ in range(200):
        if text in screen_text(app):
            break
        await pilot.pause(0.05)
    assert text in screen_text(app)
    return screen_text(app)


def test_a_live_process_is_watched_saved_and_seen_to_end(tmp_path: Path) -> None:
    recording = subprocess.Popen(
        [sys.executable, "-c", RECORDER, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    )

    async def watch(process: WatchedProcess) -> TopApp:
        app = TopApp(process, 0.1)
        async with app.run_test(size=(120, 40)) as pilot:
            await shown(app, pilot, "tokens/s")
            text = await shown(app, pilot, "CPU")
            assert "[red]decode[/]" in text
            assert "[link=x]mine[/]" in text
            await pilot.press("3")
            await shown(app, pilot, "Layer ")
            await pilot.press("4")
            await shown(app, pilot, "macro")
            await pilot.press("S")
            await pilot.pause()
            path = str(tmp_path / "saved.brick")
            app.screen.query_one("#path").value = path  # type: ignore[attr-defined]
            await pilot.press("enter")
            await app.workers.wait_for_complete()
            await pilot.press("1")
            recording.kill()
            recording.wait()
            await shown(app, pilot, "● ended")
        return app

    try:
        assert recording.stdout is not None
        assert recording.stdout.readline() == "ready\n"
        with WatchedProcess(recording.pid) as process:
            app = asyncio.run(watch(process))
    finally:
        recording.kill()
        recording.communicate()
    assert app.saved == [tmp_path / "saved.brick"]
    profile = profile_from_run(Run.open(app.saved[0]))
    norm, dynamic = profile.brick("RmsNorm"), profile.brick("[link=x]mine[/]")
    assert norm is not None
    assert dynamic is not None
    assert norm.count >= 100
    assert 0 <= norm.count - dynamic.count <= 1
    assert app.return_code in (0, None)
