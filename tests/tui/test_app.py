"""The terminal interface, driven by keys: what it shows of a process made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hand_made_process import HandMadeMachine, HandMadeProcess, screen_text
from textual.app import App
from textual.pilot import Pilot

from brickline.errors import RunExists
from brickline.top import app as app_module
from brickline.top.app import TopApp
from brickline.top.live import Order
from brickline.top.machine import MachineLoad
from brickline.top.panels import Table

Check = Callable[[App[Any], str], None]
HOSTILE = ("[bold red]x[/]", "[@click=app.quit]quit[/]", "<b>&amp;", "a\x1b[31mb\nc", "名前" * 30)


def drive(
    script: Callable[[TopApp, Pilot[None], HandMadeProcess], Awaitable[None]],
    size: tuple[int, int] = (120, 40),
    process: HandMadeProcess | None = None,
    machine: HandMadeMachine | None = None,
) -> TopApp:
    """Run a script of keys against the interface, three seconds after it was opened."""
    process = process or HandMadeProcess()
    # The timer is for people; here frames are taken when the script says so.
    app = TopApp(
        process,  # type: ignore[arg-type]
        3600.0,
        machine=machine or HandMadeMachine(),  # type: ignore[arg-type]
        clock=process.clock,
    )

    async def run() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            await app.workers.wait_for_complete()
            for _ in range(3):
                process.tick()
                app.look()
            await pilot.pause()
            app.draw()
            await pilot.pause()
            await script(app, pilot, process)

    asyncio.run(run())
    return app


@pytest.mark.parametrize("size", [(120, 40), (80, 24), (40, 20)], ids=lambda size: f"{size[0]}")
def test_bricks_of_a_live_process(size: tuple[int, int], check_snapshot: Check) -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        check_snapshot(app, f"bricks-{size[0]}")

    drive(script, size)


@pytest.mark.parametrize(("key", "name"), [("2", "categories"), ("3", "layers"), ("4", "tiles")])
def test_the_other_views(key: str, name: str, check_snapshot: Check) -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        await pilot.press(key)
        await pilot.pause()
        check_snapshot(app, name)

    drive(script, (80, 24))


def test_help_names_every_key_and_closes(check_snapshot: Check) -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        await pilot.press("question_mark")
        await pilot.pause()
        check_snapshot(app, "help")
        await pilot.press("escape")
        await pilot.pause()
        assert "LmHead" in screen_text(app)

    drive(script)


def names_shown(app: TopApp) -> list[str]:
    lines = [strip.text for strip in app.query_one(Table)._strips[1:]]
    return [line.lstrip("▎").split()[0] for line in lines]


def test_sorting_by_keys_and_by_clicks() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        by_share = names_shown(app)
        assert by_share[0] == "LmHead"
        await pilot.press("r")
        assert names_shown(app) == by_share[::-1]
        await pilot.press("r")
        seen = {app._order: names_shown(app)}
        for _ in Order:
            await pilot.press("s")
            seen[app._order] = names_shown(app)
        assert set(seen) == set(Order)
        assert seen[Order.NAME] == sorted(seen[Order.NAME], key=str.casefold)
        assert seen[Order.RATE][-1] == "LmHead"
        assert seen[Order.P99][0] == "LmHead"
        await pilot.click(Table, offset=(2, 0))
        await pilot.pause()
        assert app._order is Order.NAME

    drive(script)


def test_filtering_by_name_and_clearing_it() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        await pilot.press("slash", "n", "o", "r", "m", "enter")
        await pilot.pause()
        assert names_shown(app) == ["RmsNorm"]
        assert "filter: norm" in screen_text(app)
        await pilot.press("slash", "z", "enter")
        await pilot.pause()
        assert "No brick's name holds “normz”." in screen_text(app)
        await pilot.press("escape")
        await pilot.pause()
        assert len(names_shown(app)) == 4

    drive(script)


def test_a_paused_screen_stands_still_and_goes_on() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        await pilot.press("space")
        before = screen_text(app)
        assert "● paused" in before
        process.tick(steps=999)
        app.look()
        await pilot.pause()
        assert screen_text(app) == before
        await pilot.press("space")
        app.look()
        await pilot.pause()
        assert "● live" in screen_text(app)
        assert "tokens 1199" in screen_text(app)

    drive(script)


def test_figures_of_lately_and_of_the_whole_recording() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        assert "figures last 3 s" in screen_text(app)
        await pilot.press("w")
        await pilot.pause()
        assert "figures since the start" in screen_text(app)

    drive(script)


def test_a_process_that_ends_is_shown_as_it_was() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        process.ended = True
        app.look()
        process.tick(steps=5000)
        app.look()
        await pilot.pause()
        assert "● ended" in screen_text(app)
        assert "tokens 200" in screen_text(app)

    drive(script)


def test_a_profiler_that_was_reset_begins_anew() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        process.tick(steps=-150)
        app.look()
        process.tick(steps=10)
        app.look()
        await pilot.pause()
        assert "10.0 tokens/s" in screen_text(app)

    drive(script)


def test_names_are_shown_and_never_read_as_markup() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        text = screen_text(app)
        for name in ("[bold red]x[/]", "[@click=app.quit]quit[/]", "<b>&amp;", "a\\x1b[31mb\\nc"):
            assert name in text
        await pilot.press("slash", *("left_square_bracket", "b", "enter"))
        await pilot.pause()
        assert "filter: [b" in screen_text(app)
        await pilot.press("escape")
        app.notify("[bold]no[/", markup=False)
        await pilot.click(Table, offset=(4, 5))
        await pilot.pause()
        assert app.is_running

    drive(script, process=HandMadeProcess(names=HOSTILE))


def test_what_is_not_known_of_the_machine_is_absent() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        text = screen_text(app)
        assert not any(each in text for each in ("CPU", "GPU", "memory", "threads"))

    drive(script, machine=HandMadeMachine(MachineLoad()))


def test_more_rows_than_fit_are_scrolled() -> None:
    names = tuple(f"brick-{number:03}" for number in range(200))

    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        await pilot.press("end")
        assert "brick-199" in screen_text(app)
        await pilot.press("home", "down", "down", "pagedown")
        assert app.query_one(Table).cursor is not None
        await pilot.press("G", "g")
        assert "LmHead" in screen_text(app)

    drive(script, (60, 16), HandMadeProcess(names=names))


def test_a_window_that_changes_its_size() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        for size in ((40, 12), (20, 5), (5, 2), (200, 60)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            app.look()
            await pilot.pause()
        assert "Categories" in screen_text(app)

    drive(script)


def test_dark_and_light_draw_every_line_anew() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        await pilot.press("d")
        await pilot.pause(0.2)
        table = app.query_one(Table)
        ground = {segment.style.bgcolor for segment in table._strips[2] if segment.style}
        assert 1 <= len(ground) <= 2
        assert all(colour and colour.get_truecolor().red > 128 for colour in ground)

    drive(script)


def test_without_colour_no_colour_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        for strip in app.query_one(Table)._strips:
            for segment in strip:
                colour = segment.style.color if segment.style else None
                assert colour is None or len(set(colour.get_truecolor())) == 1

    drive(script)


def test_saving_asks_where_and_says_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def save(process: object, path: str) -> Path:
        asked.append(path)
        if len(asked) == 1:
            raise RunExists(f"{path} exists; [/choose] another path")
        return Path(path)

    monkeypatch.setattr(app_module, "save_snapshot", save)
    monkeypatch.chdir(tmp_path)

    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        await pilot.press("S")
        await pilot.pause()
        await pilot.press("escape")
        assert asked == []
        screens = []
        for _ in range(2):
            await pilot.press("S")
            await pilot.pause()
            await pilot.press("enter")
            await app.workers.wait_for_complete()
            await pilot.pause()
            screens.append(screen_text(app))  # at once: a notice goes away by itself
        assert "[/choose]" in screens[0]

    app = drive(script)
    assert [str(path) for path in app.saved] == asked[1:]
    assert asked[0].startswith("process-4711-2")


def test_refreshing_more_and_less_often() -> None:
    async def script(app: TopApp, pilot: Pilot[None], process: HandMadeProcess) -> None:
        app._interval = 1.0
        await pilot.press("plus")
        assert app._interval == 0.5
        await pilot.press("minus", "minus", "minus", "minus", "minus")
        assert app._interval == 5.0

    drive(script)
