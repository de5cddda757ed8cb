"""Orders to running traces: a paused trace can be cancelled, and a malformed order ends no engine."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

import tracewire
from tests.support.played_engine import PlayedEngine, adapted
from tests.support.scripted_engine import ScriptedEngine, acts, serving
from tests.support.served import ENGINE, counted, runs, served
from tests.support.stepping import Gate
from tracewire import Accepted, Client, Final, Paused
from tracewire_bus.bus import Bus
from tracewire_engine.adapter.control import Control

PATIENCE = 60


@pytest.mark.usefixtures("registered")
async def test_a_paused_trace_is_cancelled(client: Client, embedded: str, prefix: str) -> None:
    engine = PlayedEngine()
    with anyio.fail_after(PATIENCE):
        async with client.trace("tiny", "hello", detach=True) as trace:
            await trace.pause()
            async with adapted(embedded, prefix, engine):
                assert isinstance(await anext(trace), Paused)
                await trace.cancel("enough")
                with pytest.raises(tracewire.TraceFailed, match="enough"):
                    await trace.result()
            assert [kind for kind, _ in engine.asked] == ["pause", "abort"]
            events = [event async for event in client.subscribe(trace.id)]
    assert [type(event) for event in events][:2] == [Accepted, Paused]
    assert [event.status for event in events if isinstance(event, Final)] == ["cancelled"]


async def events_of(client: Client, trace: str) -> list[Any]:
    """All events of a trace, which ends."""
    return [event async for event in client.subscribe(trace)]


@pytest.mark.usefixtures("roomy")
async def test_a_trace_that_is_cancelled_while_it_closes_ends_cancelled(
    client: Client, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever cancelled it was told that it will."""
    gate, heard = Gate(), anyio.Event()
    gate.open()
    end, close = Control.end, bus.records.close

    def ending(control: Control, *args: Any) -> None:
        end(control, *args)
        heard.set()

    async def closing(trace: str, attempt: int) -> list[bytes]:
        changes = await close(trace, attempt)
        assert await client.cancel(trace, "too late?")
        await heard.wait()
        return changes

    monkeypatch.setattr(Control, "end", ending)
    monkeypatch.setattr(bus.records, "close", closing)
    with anyio.fail_after(PATIENCE):
        async with (
            serving(bus, ScriptedEngine(gate)),
            client.trace("tiny", "hello", acts, live={"alpha": 0.0}, detach=True) as trace,
        ):
            events = await events_of(client, trace.id)
    assert isinstance(events[-1], Final)
    assert events[-1].status == "cancelled"


@pytest.mark.parametrize(
    "fields",
    [
        ("k", "pause", "t", "x", "n", "abc"),
        ("k", "pause", "t", "x", "n", "9" * 5000),
        ("k", "drain", "w", "soon"),
        ("t", "x"),
        ("\xff", b"\xff", "k", "steer"),
    ],
    ids=["number", "long number", "time", "kind", "bytes"],
)
async def test_a_malformed_order_ends_no_engine(fields: tuple[Any, ...], bus: Bus, embedded: str, prefix: str) -> None:
    async with served(bus, embedded, prefix) as (adapter, client):
        await bus.command("XADD", bus.keys.control("t0", ENGINE), "*", *fields)
        if b"\xff" not in fields:
            await counted(client)
        await runs(client)
        assert not adapter.stopping.is_set()
