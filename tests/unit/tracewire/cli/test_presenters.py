"""How a trace is shown while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from tests.support.bus_engine import Stage
from tests.support.cli import story
from tests.support.terminal import snapshot_of
from tracewire import Client, Event
from tracewire.cli.presenters import JsonLines, PlainLines, TextStream, presenter, status_line, trace_drawing
from tracewire.cli.view import TraceView


async def events_of(client: Client, trace_id: str) -> list[Event]:
    return [event async for event in client.subscribe(trace_id)]


def drawn(view: TraceView, width: int = 80, height: int | None = None) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"), legacy_windows=False)  # noqa: SIM115
    console.print(trace_drawing(view, width, height))
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def test_the_form_follows_the_options_and_the_output() -> None:
    assert isinstance(presenter("a", as_json=True, saves=True), JsonLines)
    assert isinstance(presenter("a", as_json=False, saves=False), TextStream)
    assert isinstance(presenter("a", as_json=False, saves=True), PlainLines)


async def test_several_choices_and_notices_as_text(
    client: Client, engine: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.output("a")
        await stage.hold("somebody")
        await stage.hold("somebody", resume=True)
        await stage.output("b", choice=1)
        await stage.final()

    async with engine(script), client.trace("tiny", "x", n=2) as trace:
        await trace.until_done()
    for shown in (TextStream(), PlainLines()):
        with shown:
            for event in await events_of(client, trace.id):
                shown.feed(event)
    out, err = capsys.readouterr()
    assert out.startswith("a\n[0.1] b\naccepted by ")
    assert '0.1     0 "b"\n' in out
    assert err == "tracewire: paused by somebody\ntracewire: resumed by somebody\n"


async def test_arrays_and_lenses_are_drawn(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        for number in range(3):
            lens = {"token_ids": np.array([[1], [2]]), "token_strings": [[" the"], [" a"]]}
            values = {"p": float(number), "layers": np.array([3.0, 2.0, 1.0]), "lens": lens, "hs": np.zeros((2, 2))}
            await stage.save(f" word{number}", values, time=1.0 + number)
        await stage.final()

    async with engine(script), client.trace("tiny", "x", live={"alpha": 1.0}) as trace:
        await trace.until_done()
    view = TraceView(trace.id)
    for event in await events_of(client, trace.id):
        view.feed(event)
    shown, kept = snapshot_of("saves", drawn(view))
    assert shown == kept
    assert status_line(view) == "finished, 3 tokens, 1.0 tokens/s, alpha=1.0"


async def test_of_a_long_text_the_end_is_drawn(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(story), client.trace("tiny", "x") as trace:
        await trace.until_done()
    view = TraceView(trace.id)
    for event in await events_of(client, trace.id):
        view.feed(event)
    view.texts[0, 0] = "\n".join(f"line {number}" for number in range(100))
    lines = drawn(view, 80, 12).splitlines()
    assert len(lines) <= 12
    assert lines[-2].startswith("line 99")
    assert "line 3" not in drawn(view, 80, 12)


async def test_a_model_does_not_control_the_terminal(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("a\x1b[2Jb\tc\r\n", {"word": "\x1b]0;title\x07"})
        await stage.final()

    async with engine(script), client.trace("tiny", "x") as trace:
        await trace.until_done()
    view = TraceView(trace.id)
    for event in await events_of(client, trace.id):
        view.feed(event)
    shown = drawn(view)
    assert "a␛[2Jb" in shown
    assert not {"\x1b", "\x07", "\r"} & set(shown)
