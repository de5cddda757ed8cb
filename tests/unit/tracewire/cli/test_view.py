"""What is shown of a trace is folded from its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.bus_engine import Stage
from tests.support.cli import story
from tracewire import Client, Resumed
from tracewire.cli.view import TraceView


async def viewed(client: Client, trace_id: str, since: str = "start") -> TraceView:
    view = TraceView(trace_id)
    async for event in client.subscribe(trace_id, since=since):
        view.feed(event)
    return view


async def test_text_tokens_rate_and_saves(client: Client, engine: Callable[..., Any]) -> None:
    async with engine(story, engine="e1"), client.trace("tiny", "x", live={"alpha": 1.0}) as trace:
        result = await trace.result()
    view = await viewed(client, trace.id)
    assert (view.text, view.tokens, view.status, view.engine) == (result.text, 10, "finished", "e1")
    assert view.ended
    assert round(view.rate, 3) == 10.0
    assert list(view.readings.by_name["projection"].numbers) == result.saves["projection"]
    assert view.live == {"alpha": 1.0}


async def test_tokens_before_the_first_event_count(client: Client, engine: Callable[..., Any]) -> None:
    async def endless(stage: Stage) -> None:
        await stage.accept()
        for number in range(5):
            await stage.output(f"{number}", time=1.0 + number)
        await stage.steered()

    async with engine(endless), client.trace("tiny", "x", live={"a": 1}) as trace:
        seen = [await anext(trace) for _ in range(5)]
        view = TraceView(trace.id)
        for event in seen[3:]:
            view.feed(event)  # type: ignore[arg-type]
        assert (view.text, view.tokens, round(view.rate, 3)) == ("34", 5, 1.0)
        await trace.cancel()


async def test_a_restart_begins_again_and_notes_say_what_happened(client: Client, engine: Callable[..., Any]) -> None:
    async def script(stage: Stage) -> None:
        await stage.accept()
        await stage.save("lost", {"p": 1.0})
        await stage.restart("engine lost")
        await stage.accept()
        await stage.output("a", invoke=0)
        await stage.output("b", choice=1)
        await stage.hold("somebody")
        await stage.hold("somebody", resume=True)
        await stage.steered()
        await stage.output("c", choice=1)
        await stage.final()

    async with engine(script), client.trace("tiny", "x", n=2, live={"alpha": 1.0}) as trace:
        view, notes = TraceView(trace.id), []
        async for event in client.subscribe(trace.id):
            view.feed(event)
            if isinstance(event, Resumed):
                await trace.steer(alpha=3.0, by="somebody")
            notes.append((view.status, view.note))
    assert view.text == "[0.0] a\n[0.1] bc"
    assert view.tokens == 3
    assert view.readings.by_name == {}
    assert (view.live, view.live_version) == ({"alpha": 3.0}, 1)
    assert ("paused", "paused by somebody") in notes
    assert ("running", "resumed by somebody") in notes
    assert any(note == "restarted: engine lost" for _, note in notes)
    assert any(note == "steered by somebody: alpha=3.0" for _, note in notes)
