"""The texts of tokens and the marks that a static rendering has, from a trace's events."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.bus_engine import Stage
from tracewire import Client
from tracewire.notebook.recording import Recording
from tracewire.rendering.page import Mark, Page
from tracewire.traces.event_reader import EventReader


async def recorded(client: Client, trace_id: str) -> Page:
    """What a rendering shows of a trace at its end."""
    recording, reader = Recording(trace_id), EventReader(trace_id, client._session.open_bus(), "start")
    while (event := await reader.next(recording.fold)) is not None:
        recording.take(event)
    await reader.aclose()
    return recording.page()


async def test_texts_marks_and_saves(client: Client, engine: Any) -> None:
    async def play(stage: Stage) -> None:
        await stage.accept()
        await stage.save(" one", {"norm": 1.0})
        await stage.steered()
        await stage.save(" two", {"norm": 2.0}, finish_reason="length")
        await stage.final()

    async with engine(play), client.trace("tiny", "x", live={"alpha": 0.0, "v": np.zeros(2)}) as trace:
        await trace.accepted()
        await client.steer(trace.id, alpha=2.5, v=np.ones(2), by="ada")
        await trace.until_done()
        page = await recorded(client, trace.id)
    (shown,) = page.sequences
    assert (page.status, page.details, list(shown.pieces)) == ("finished", "2 tokens", [" one", " two"])
    assert list(shown.marks) == [Mark(1, "alpha = 2.5, v = … · ada")]
    assert shown.saves["norm"] == [1.0, 2.0]


async def test_another_attempt_begins_anew(client: Client, engine: Any) -> None:
    async def play(stage: Stage) -> None:
        await stage.accept()
        await stage.save(" one", {"norm": 1.0})
        await stage.restart("an engine was lost")
        await stage.accept()
        await stage.save(" two", {"norm": 2.0}, finish_reason="length")
        await stage.final()

    async with engine(play), client.trace("tiny", "x") as trace:
        await trace.until_done()
        page = await recorded(client, trace.id)
    assert list(page.sequences[0].pieces) == [" two"]
