"""What a client does where Redis is away, a submission is given up half way, or an id is used twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

import tracewire
from tests.support.bus_engine import ScriptedEngine, Stage, engine_info
from tests.support.redis.proxy import proxy
from tracewire import Accepted, Client, Final, Output, Paused, Resumed
from tracewire.traces.presence import Presence
from tracewire_bus.bus import Bus, QueueFull
from tracewire_bus.wire.messages import Invoke, Submission

PATIENCE = 15


@pytest.fixture
async def client(embedded: str, prefix: str, bus: Bus) -> AsyncIterator[Client]:
    """A client, of a bus on which two models are known and nobody takes anything."""
    await bus.registry.register(engine_info(), ttl_s=600)
    await bus.registry.register(engine_info("other"), ttl_s=600)
    async with tracewire.connect(embedded, prefix=prefix, name="one") as client:
        yield client


async def test_a_deadline_is_seen_to_after_an_outage(
    bus: Bus, embedded: str, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both of the times that a client looks at it Redis is away, for longer than the client is patient."""
    monkeypatch.setattr("tracewire.traces.presence._SECOND_LOOK_S", 0.05)
    with anyio.fail_after(PATIENCE):
        async with proxy(embedded, tmp_path) as way, Bus.open(way.url, prefix=prefix, patience_s=0.05) as away:
            failures = 0
            plain = away.sweep

            async def sweep(tags: Any) -> None:
                nonlocal failures
                try:
                    await plain(tags)
                except Exception:
                    failures += 1
                    if failures == 3:
                        way.away = False
                    raise

            away.sweep = sweep  # type: ignore[method-assign]
            await bus.submit(Submission(trace="late", model="tiny", invokes=[Invoke(prompt="x")], deadline_s=0.01))
            presence = Presence(away, 1)
            way.away = True
            await way.cut()
            presence.watch_deadline("late", 0.01)
            async with bus.read("late") as entries:
                await anext(entries)
            await presence.aclose()


async def test_a_full_queue_forgets_nobody_elses_trace(client: Client, bus: Bus) -> None:
    """Of the same id, on another model."""
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, trace_id="mine", detach=True) as trace:
        await bus.submit(Submission(trace="first", model="other", invokes=[Invoke(prompt="x")], client="c"), 1)
        with pytest.raises(QueueFull):
            await bus.submit(Submission(trace="mine", model="other", invokes=[Invoke(prompt="x")], client="c"), 1)
        assert await trace.steer(alpha=1.0) == 1
        assert await trace.cancel()


async def test_an_id_belongs_to_one_model(client: Client, bus: Bus) -> None:
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, trace_id="mine", detach=True) as trace:
        with pytest.raises(tracewire.TraceRejected, match="tiny") as caught:
            await client.trace("other", "hello", trace_id="mine").start()
        assert caught.value.field == "trace_id"
        assert await bus.queue.waiting("other") == 0
        assert await bus.queue.waiting("tiny") == 1
        assert await trace.steer(alpha=1.0) == 1


async def test_a_submission_that_is_given_up_is_cancelled(client: Client, bus: Bus) -> None:
    """Its start was cancelled when it was queued already."""
    opened = client._session.open_bus()
    plain, scope = opened.submit, anyio.CancelScope()

    async def submit(*arguments: Any) -> None:
        await plain(*arguments)
        scope.cancel()
        await anyio.lowlevel.checkpoint()

    opened.submit = submit  # type: ignore[method-assign]
    with anyio.fail_after(PATIENCE):
        trace = client.trace("tiny", "hello")
        with scope:
            async with trace:
                pytest.fail("it was not cancelled")
        assert await bus.queue.waiting("tiny") == 0
        assert (await client.get_state(trace.id)).status == "cancelled"


@pytest.mark.parametrize("priority", [10**30, -(10**30), 2**53 + 1])
def test_a_priority_has_bounds(client: Client, priority: int) -> None:
    with pytest.raises(tracewire.TraceRejected) as caught:
        client.trace("tiny", "hello", priority=priority)
    assert caught.value.field == "priority"


async def test_a_trace_is_paused_and_resumed_on_the_bus(embedded: str, prefix: str) -> None:
    """While it is queued, and while it runs: told once each, in order; not after its end."""
    turns = [anyio.Event(), anyio.Event()]

    async def script(stage: Stage) -> None:
        await stage.accept()
        for turn in turns:
            await stage.going()
            await stage.output("x")
            await turn.wait()
        await stage.going()
        await stage.final()

    with anyio.fail_after(PATIENCE):
        async with (
            Bus.open(embedded, prefix=prefix) as bus,
            tracewire.connect(embedded, prefix=prefix, name="one") as client,
        ):
            await bus.registry.register(engine_info(), ttl_s=600)
            async with client.trace("tiny", "hello", detach=True) as trace:
                assert await trace.pause(by="me")
                assert not await client.pause(trace.id)
                assert await trace.resume()
                assert not await trace.resume()
                assert await trace.pause(by="you")
                async with ScriptedEngine.running(embedded, prefix, script):
                    assert isinstance(await anext(trace), Paused)
                    assert await trace.resume()
                    assert isinstance(await anext(trace), Resumed)
                    assert isinstance(await anext(trace), Output)
                    assert await trace.pause()
                    assert not await trace.pause()
                    assert isinstance(await anext(trace), Paused)
                    turns[0].set()
                    assert await trace.resume()
                    assert isinstance(await anext(trace), Resumed)
                    turns[1].set()
                    assert (await trace.result()).text == "xx"
                with pytest.raises(tracewire.TraceEnded):
                    await trace.pause()
                with pytest.raises(tracewire.TraceEnded):
                    await trace.resume()
                with pytest.raises(tracewire.UnknownTrace):
                    await client.pause("nobody")
                events = [event async for event in client.subscribe(trace.id)]
    kinds = [Accepted, Paused, Resumed, Output, Paused, Resumed, Output, Final]
    assert [type(event) for event in events] == kinds
    assert [event.by for event in events if isinstance(event, Paused)] == ["you", "one"]


@pytest.mark.parametrize("odd", [5, "\udc80", b"me"])
async def test_who_asks_and_why_is_text(client: Client, odd: Any) -> None:
    async with client.trace("tiny", "hello", live={"alpha": 0.0}, detach=True) as trace:
        for asked in (trace.cancel, trace.pause, trace.resume):
            with pytest.raises((TypeError, ValueError), match="by: expected text"):
                await asked(by=odd)
        with pytest.raises((TypeError, ValueError), match="reason: expected text"):
            await trace.cancel(odd)
        with pytest.raises(tracewire.SteerRejected) as caught:
            await trace.steer(alpha=1.0, by=odd)
        assert caught.value.field == "by"
        assert await trace.cancel("genug", by="jemand \N{GREEK SMALL LETTER ALPHA}")
